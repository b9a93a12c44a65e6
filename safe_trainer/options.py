"""What a user can choose: one dataclass, given by keyword, parsed by ``HfArgumentParser``, or from the environment."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from safe_trainer.errors import OptionError

ENVIRONMENT_PREFIX = "SAFE_TRAINER_"

Storage = Literal["auto", "shared", "local"]
LocalCopies = Literal["keep", "full", "drop"]
Verify = Literal["digest", "size", "off"]
OnError = Literal["raise", "continue"]

# Values of `staging` that are no directories.
ON_DISK, IN_MEMORY = "disk", "memory"

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_SWITCHES = {"background": False, "save_on_preemption": True}


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def _parse(text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise ValueError(text)
        return text.lower() in _TRUE
    return kind(text)


def _from_environment(name: str, default: Any) -> Any:
    """The value of ``SAFE_TRAINER_<NAME>``, else ``default``."""
    text = os.environ.get(_variable(name))
    if text is None:
        return default
    try:
        return _parse(text, type(default))
    except ValueError as error:
        raise OptionError(f"{_variable(name)}={text!r}: {name} takes a {type(default).__name__}.") from error


def _option(name: str, default: Any, help_text: str, *, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field whose default is the variable ``SAFE_TRAINER_<NAME>``, else ``default``."""
    # HfArgumentParser hands the metadata to argparse. It would make a field of type Literal required.
    metadata: dict[str, Any] = {"help": f"{help_text} Without it, {_variable(name)}; without that, {default!r}."}
    if choices:
        metadata["choices"] = list(choices)
    return field(default_factory=lambda: _from_environment(name, default), metadata=metadata)


@dataclass
class CheckpointOptions:
    """How SafeTrainer saves and resumes. The defaults suit most; each field's default can be set by a variable.

    Raises:
        OptionError: a field has a wrong value.
    """

    storage: str = _option(
        "storage",
        "auto",
        "Whether all nodes see one run directory: 'auto' looks, 'shared' insists that they do, 'local' insists that "
        "each node has a directory of its own; a contradiction is an error before training starts.",
        choices=get_args(Storage),
    )
    local_copies: str = _option(
        "local_copies",
        "keep",
        "What stays in checkpoint-N on disks other than home's once home has everything: 'keep' the part that was "
        "written there, 'full' for the whole checkpoint, 'drop' for nothing.",
        choices=get_args(LocalCopies),
    )
    verify: str = _option(
        "verify",
        "digest",
        "How a checkpoint is checked before resuming from it: 'digest' reads every byte, 'size' compares sizes (of a "
        "stock checkpoint: file formats), 'off' only asks whether the files are there.",
        choices=get_args(Verify),
    )
    # HfArgumentParser does not call the default factory of a field of type bool, so None stands for the default.
    background: bool | None = _option(
        "background",
        False,
        "Whether training goes on as soon as every rank has written: files are gathered, made durable and committed "
        "beside it. Callbacks get on_save when the checkpoint has been committed.",
    )
    staging: str = _option(
        "staging",
        ON_DISK,
        "Where ranks put their files while training stands still: 'disk' for the run directory's disk, 'memory' for "
        "the node's memory, or an absolute path of a directory on each node. Anything but 'disk' takes background.",
    )
    on_error: str = _option(
        "on_error",
        "raise",
        "What a failed save does: 'raise' an error on every rank, or 'continue' training after a loud warning and try "
        "again at the next save. An error that means that the process group is lost, or that a newer run has taken the "
        "run directory, is raised in any case.",
        choices=get_args(OnError),
    )
    save_on_preemption: bool | None = _option(
        "save_on_preemption",
        True,
        "Whether a signal of preemption_signals, on any rank, makes all ranks save at one step and stop.",
    )
    preemption_signals: str = _option(
        "preemption_signals",
        "SIGTERM",
        "Names of the signals that announce the end, with commas between them, e.g. 'SIGTERM,SIGUSR1' for Slurm's "
        "--signal=USR1@120.",
    )
    timeout_s: float = _option(
        "timeout_s",
        600.0,
        "Silence in seconds after which a rank that takes part in a save or resume is taken for gone. A rank that is "
        "slow and alive is waited for without a limit.",
    )
    lock_timeout_s: float = _option(
        "lock_timeout_s",
        120.0,
        "Longest time in seconds to wait for another job that holds the run directory's lock. NFS 4 servers give the "
        "lock of a dead client free after 90 s.",
    )
    visibility_timeout_s: float = _option(
        "visibility_timeout_s",
        60.0,
        "Longest time in seconds that something written by another node may stay invisible here (caches of network "
        "file systems).",
    )

    def __post_init__(self) -> None:
        for name, default in _SWITCHES.items():
            if getattr(self, name) is None:
                setattr(self, name, _from_environment(name, default))
        for option in dataclasses.fields(self):
            self._check(option.name, getattr(self, option.name), option.metadata.get("choices"))
        if self.stages_elsewhere and not self.background:
            raise OptionError(
                f"staging={self.staging!r} without background: files would be put aside and written while training "
                "stands still. Set background=True (SAFE_TRAINER_BACKGROUND=1), or leave staging out."
            )

    @property
    def stages_elsewhere(self) -> bool:
        """Whether files are put aside somewhere else than where they are committed."""
        return self.staging != ON_DISK

    def signals(self) -> tuple[signal.Signals, ...]:
        """The signals of ``preemption_signals``; none where ``save_on_preemption`` is off."""
        return _signals(self.preemption_signals) if self.save_on_preemption else ()

    @staticmethod
    def _check(name: str, value: Any, choices: list[str] | None) -> None:
        text = os.environ.get(_variable(name))
        where = f" (from {_variable(name)}={text!r})" if _reads_as(text, value) else ""
        if choices is not None:
            if value not in choices:
                allowed = ", ".join(repr(choice) for choice in choices)
                raise OptionError(f"{name}={value!r}{where}: choose one of {allowed}.")
        elif name == "preemption_signals":
            try:
                _signals(value)
            except (AttributeError, ValueError) as error:
                raise OptionError(
                    f"{name}={value!r}{where}: give names of signals that can be handled, with commas between them, "
                    f"e.g. 'SIGTERM,SIGUSR1' ({error})."
                ) from error
        elif name == "staging":
            if not isinstance(value, str) or (value not in (ON_DISK, IN_MEMORY) and not os.path.isabs(value)):
                raise OptionError(
                    f"{name}={value!r}{where}: give 'disk', 'memory' or the absolute path of a directory."
                )
        elif name in _SWITCHES:
            if not isinstance(value, bool):
                raise OptionError(f"{name}={value!r}{where}: give True or False.")
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise OptionError(f"{name}={value!r}{where}: give a number of seconds greater than 0.")


def _signals(names: str) -> tuple[signal.Signals, ...]:
    """``"SIGTERM, USR1"`` as signals; an empty text is none.

    Raises:
        ValueError: there is no such signal, or no process can handle it.
    """
    found = []
    for name in (part.strip().upper() for part in names.split(",")):
        if not name:
            continue
        member = signal.Signals.__members__.get(name if name.startswith("SIG") else f"SIG{name}")
        if member is None or member.name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"{name} is no signal that can be handled here")
        found.append(member)
    return tuple(dict.fromkeys(found))


def _reads_as(text: str | None, value: Any) -> bool:
    """Whether a variable's text gives ``value``, nan included."""
    try:
        return text is not None and str(_parse(text, type(value))) == str(value)
    except (TypeError, ValueError):
        return False
