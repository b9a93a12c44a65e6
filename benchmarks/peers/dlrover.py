"""DLRover's FlashCkptTrainer: a save into shared memory, from which another process writes it to the disk."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from benchmarks.measure import Unavailable

MODULE = "dlrover.trainer.torch.flash_checkpoint.hf_trainer"


def problem() -> str | None:
    """Why it cannot be measured here; None where it can be tried.

    Nothing is imported that is there: that would start with DeepSpeed.
    """
    if importlib.util.find_spec("dlrover") is None:
        return "dlrover is not installed (pip install dlrover grpcio)"
    return None


def trainer_class() -> type[Any]:
    """FlashCkptTrainer.

    Raises:
        Unavailable: it is not installed, or does not fit the transformers that is.
    """
    reason = problem()
    if reason is not None:
        raise Unavailable(reason)
    try:
        trainer: type[Any] = importlib.import_module(MODULE).FlashCkptTrainer
    except Exception as error:  # whatever its imports raise
        raise Unavailable(f"dlrover is installed, but {MODULE} cannot be imported: {error!r}") from error
    return trainer
