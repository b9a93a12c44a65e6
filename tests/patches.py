"""Context managers that a scenario puts around a training run on a rank (``patches=`` of `run_training`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def zeroed_memory(rank: int) -> Iterator[None]:
    """Makes fresh tensors zero. DeepSpeed saves the padding of its flat ZeRO-3 groups as it finds it in memory, so
    without this two runs of one stock Trainer differ in their files."""
    empty = torch.empty

    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        fresh = empty(*args, **kwargs)
        return fresh if fresh.is_meta else fresh.zero_()

    with mock.patch.object(torch, "empty", zeros):
        yield
