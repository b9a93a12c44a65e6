"""What a user can choose: one dataclass, given by keyword, parsed by ``HfArgumentParser``, or from the environment."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from safe_trainer.errors import OptionError

ENVIRONMENT_PREFIX = "SAFE_TRAINER_"

Storage = Literal["auto", "shared", "local"]
LocalCopies = Literal["keep", "full", "drop"]
Verify = Literal["digest", "size", "off"]


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def _option(name: str, default: Any, help_text: str, *, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field whose default is the variable ``SAFE_TRAINER_<NAME>``, else ``default``."""

    def read() -> Any:
        text = os.environ.get(_variable(name))
        if text is None:
            return default
        try:
            return type(default)(text)
        except ValueError as error:
            raise OptionError(f"{_variable(name)}={text!r}: {name} takes a {type(default).__name__}.") from error

    # HfArgumentParser hands the metadata to argparse. It would make a field of type Literal required.
    metadata: dict[str, Any] = {"help": f"{help_text} Without it, {_variable(name)}; without that, {default!r}."}
    if choices:
        metadata["choices"] = list(choices)
    return field(default_factory=read, metadata=metadata)


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
    timeout_s: float = _option(
        "timeout_s",
        1800.0,
        "Longest time in seconds that a rank waits for the others in one step of a save or resume.",
    )
    lock_timeout_s: float = _option(
        "lock_timeout_s",
        60.0,
        "Longest time in seconds to wait for another job that holds the run directory's lock.",
    )
    visibility_timeout_s: float = _option(
        "visibility_timeout_s",
        60.0,
        "Longest time in seconds that something written by another node may stay invisible here (caches of network "
        "file systems).",
    )

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            self._check(option.name, getattr(self, option.name), option.metadata.get("choices"))

    @staticmethod
    def _check(name: str, value: Any, choices: list[str] | None) -> None:
        text = os.environ.get(_variable(name))
        where = f" (from {_variable(name)}={text!r})" if _reads_as(text, value) else ""
        if choices is not None:
            if value not in choices:
                allowed = ", ".join(repr(choice) for choice in choices)
                raise OptionError(f"{name}={value!r}{where}: choose one of {allowed}.")
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise OptionError(f"{name}={value!r}{where}: give a number of seconds greater than 0.")


def _reads_as(text: str | None, value: Any) -> bool:
    """Whether a variable's text gives ``value``, nan included."""
    try:
        return text is not None and str(type(value)(text)) == str(value)
    except (TypeError, ValueError):
        return False
