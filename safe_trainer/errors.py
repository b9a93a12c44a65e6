"""The errors that the package raises.

All derive from :class:`CheckpointError`, so that one ``except`` catches whatever a save or a resume can
raise. An error that any rank meets is raised on every rank with the same text, root cause first (see
:meth:`safe_trainer.channel.Channel.together`); :attr:`CheckpointError.failures` has it in parts.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankFailure:
    """What went wrong on one rank, in a form that every rank can receive.

    Attributes:
        rank: the global rank.
        host: its host name.
        phase: the step of the save or resume in which it failed, e.g. ``"write"``.
        kind: the class name of the exception.
        message: its text.
        path: the file or directory concerned, where the exception names one.
        errno: the error number, where it has one.
    """

    rank: int
    host: str
    phase: str
    kind: str
    message: str
    path: str | None = None
    errno: int | None = None

    @classmethod
    def from_exception(cls, error: Exception, *, rank: int, host: str, phase: str) -> RankFailure:
        """Describe ``error`` as it happened on this rank."""
        path = getattr(error, "filename", None)
        number = getattr(error, "errno", None)
        return cls(
            rank=rank,
            host=host,
            phase=phase,
            kind=type(error).__name__,
            message=str(error) or repr(error),
            path=None if path is None else str(path),
            errno=number if isinstance(number, int) else None,
        )

    def __str__(self) -> str:
        code = "" if self.errno is None else f" ({errno.errorcode.get(self.errno, self.errno)})"
        return f"rank {self.rank} on {self.host}, {self.phase}: {self.kind}{code}: {self.message}"


class CheckpointError(RuntimeError):
    """A save or a resume failed; nothing that had been committed before was changed.

    Attributes:
        failures: what happened on which rank; empty where the error concerns no rank in particular.
    """

    def __init__(self, message: str, failures: Sequence[RankFailure] = ()) -> None:
        super().__init__(message)
        self.failures = tuple(failures)


class IncompleteCheckpointError(CheckpointError):
    """The checkpoint that was asked for by its path is not complete; the text lists what is wrong with it."""


class StorageError(CheckpointError):
    """The ranks' run directories do not fit together, or contradict the ``storage`` option."""


class RunDirectoryTaken(CheckpointError):
    """A newer run has started in this run directory; this one may no longer commit there."""


class UnsafePathError(CheckpointError, ValueError):
    """A path in a file list or manifest is absolute, has ``..``, or leaves the checkpoint through a link."""


class OptionError(CheckpointError, ValueError):
    """A field of :class:`~safe_trainer.options.CheckpointOptions` has a wrong value; the text lists the right ones."""
