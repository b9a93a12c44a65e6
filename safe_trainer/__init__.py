"""SafeTrainer: complete, atomic checkpoints for Hugging Face's Trainer on several nodes, whatever their disks are.

The trainer classes are imported when they are first asked for, so that the rest works without transformers.
"""

from typing import TYPE_CHECKING, Any

from safe_trainer.errors import (
    CheckpointError,
    IncompleteCheckpointError,
    OptionError,
    RunDirectoryTaken,
    StorageError,
    UnsafePathError,
)
from safe_trainer.options import CheckpointOptions
from safe_trainer.save import SaveReport

if TYPE_CHECKING:
    from safe_trainer.trainer import SafeCheckpointMixin, SafeSeq2SeqTrainer, SafeTrainer, make_safe

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CheckpointOptions",
    "IncompleteCheckpointError",
    "OptionError",
    "RunDirectoryTaken",
    "SafeCheckpointMixin",
    "SafeSeq2SeqTrainer",
    "SafeTrainer",
    "SaveReport",
    "StorageError",
    "UnsafePathError",
    "make_safe",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from safe_trainer import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
