"""SafeTrainer: complete, atomic checkpoints for Hugging Face's Trainer on several nodes, whatever their disks are."""

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
