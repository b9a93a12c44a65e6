"""``torch.distributed.checkpoint.async_save`` of the same state, with a stager that is kept warm as ours is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Unavailable


def save(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path, barrier: Callable[[], None]
) -> dict[str, Any]:
    """One save on this rank; the result is that of :func:`benchmarks.workload.one_save`.

    Raises:
        Unavailable: this version of torch has no stagers that can be kept.
    """
    try:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import async_save
    except ImportError as error:
        raise Unavailable(f"torch {torch.__version__} has no such async_save: {error}") from error
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    stager = DefaultStager(StagingOptions(on_gpu, False, False, False))
    try:
        stager.stage(state)  # its buffers are warm from here on
        barrier()
        started = time.perf_counter()
        saving: Any = async_save(state, checkpoint_id=checkpoint, async_stager=stager)
        stall_s = time.perf_counter() - started
        saving.result()
        return {
            "stall_s": stall_s,
            "commit_s": time.perf_counter() - started,
            "rise_bytes": 0,
            "save": None,
        }
    finally:
        stager.close()
