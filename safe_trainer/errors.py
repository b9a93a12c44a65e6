"""The errors that the package raises.

All derive from :class:`CheckpointError`, so that one ``except`` catches whatever a save or a resume can
raise. An error that any rank meets is raised on every rank with the same text, root cause first (see
:meth:`safe_trainer.channel.Channel.together`); :attr:`CheckpointError.failures` has it in parts.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safe_trainer.disk import NO_SPACE, free_bytes

# What torch.save says, without an error number or a path, when it cannot write on (seen on a full disk, torch 2.13).
_TORCH_CANNOT_WRITE = ("basic_ios::clear", "iostream error", "unexpected pos", "PytorchStreamWriter failed")
# safetensors tells the system's error number only in the text (seen with safetensors 0.8).
_RUST_ERROR_NUMBER = re.compile(r"\(os error (\d+)\)")


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
        free_bytes: what was free on that file system, where lack of space is the cause or may be.
        is_consequence: it only passes on what went wrong on another rank.
        order: the failures of a step are counted from 1 as they happen; 0 where that is not known.
    """

    rank: int
    host: str
    phase: str
    kind: str
    message: str
    path: str | None = None
    errno: int | None = None
    free_bytes: int | None = None
    is_consequence: bool = False
    order: int = 0

    @classmethod
    def from_exception(
        cls, error: BaseException, *, rank: int, host: str, phase: str, place: Path | None = None
    ) -> RankFailure:
        """Describe ``error`` as it happened on this rank.

        Args:
            place: where this rank was writing, for errors that name no path (``torch.save``'s).
        """
        gathered = getattr(error, "failures", None)
        if isinstance(gathered, Mapping) and gathered:  # torch.distributed.checkpoint's: (exception, stack) by rank
            if rank not in gathered:
                return cls(rank, host, phase, type(error).__name__, f"failed on {list(gathered)}", is_consequence=True)
            error = gathered[rank][0]
        own_path = getattr(error, "filename", None)
        message = str(error) or repr(error)
        number = getattr(error, "errno", None)
        if number is None and (told := _RUST_ERROR_NUMBER.search(message)):
            number = int(told.group(1))
        cannot_write = number in NO_SPACE or any(text in message for text in _TORCH_CANNOT_WRITE)
        path = None if own_path is None else os.fsdecode(own_path) if isinstance(own_path, bytes) else str(own_path)
        if path is None and place is not None and (cannot_write or isinstance(error, OSError)):
            path = str(place)
        return cls(
            rank=rank,
            host=host,
            phase=phase,
            kind=type(error).__name__,
            message=message,
            path=path,
            errno=number if isinstance(number, int) else None,
            free_bytes=_free_bytes(path) if cannot_write and path is not None else None,
            is_consequence=isinstance(error, ConsequenceError),
        )

    def precedence(self) -> tuple[bool, int, int]:
        """Sorts failures of one step, the root cause first."""
        return self.is_consequence, self.order, self.rank

    def __str__(self) -> str:
        code = "" if self.errno is None else f" ({errno.errorcode.get(self.errno, self.errno)})"
        text = f"rank {self.rank} on {self.host}, {self.phase}: {self.kind}{code}: {self.message}"
        if self.path is not None and self.path not in self.message:
            text += f" [{self.path}]"
        if self.free_bytes is not None:
            text += f" ({self.free_bytes} bytes free there)"
        return text


def _free_bytes(path: str) -> int | None:
    try:
        return free_bytes(Path(path))
    except OSError:
        return None


class CheckpointError(RuntimeError):
    """A save or a resume failed; nothing that had been committed before was changed.

    Attributes:
        failures: what happened on which rank; empty where the error concerns no rank in particular.
    """

    def __init__(self, message: str, failures: Sequence[RankFailure] = ()) -> None:
        super().__init__(message)
        self.failures = tuple(failures)


class ConsequenceError(CheckpointError):
    """This rank could not do its part because another one had failed; that one's failure is told first."""


class ProcessGroupLostError(CheckpointError):
    """A rank is gone or cannot be reached, or ranks had to be taken out of a collective of the training back end.

    The process group cannot be used any more, so ``on_error="continue"`` does not apply: the job has to be started
    again. What had been committed is as it was.

    Attributes:
        missing: ranks that have given no sign of life; empty where all live.
    """

    def __init__(self, message: str, failures: Sequence[RankFailure] = (), *, missing: Sequence[int] = ()) -> None:
        super().__init__(message, failures)
        self.missing = tuple(missing)


class InsufficientSpaceError(CheckpointError):
    """There is too little room for a checkpoint; found before anything was written."""


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


# Neither the next save nor another try can succeed after these.
ENDS_THE_RUN = (ProcessGroupLostError, RunDirectoryTaken)
