"""The disk alone: how fast one process writes bytes so that they are durable."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from benchmarks.process import barrier, rank

BLOCK_BYTES = 16 << 20


def write_seconds(*, directory: str, total_bytes: int, on_rank: int | None = None) -> float:
    """Seconds to write a new file of ``total_bytes`` in blocks from memory and fsync it.

    Args:
        directory: where.
        total_bytes: how many.
        on_rank: only this rank writes; the others give 0.0.
    """
    barrier()
    if on_rank is not None and rank() != on_rank:
        barrier()
        return 0.0
    Path(directory).mkdir(parents=True, exist_ok=True)
    path = Path(directory) / "write-alone.bin"
    block = memoryview(np.random.default_rng(0).bytes(min(BLOCK_BYTES, total_bytes)))
    os.sync()
    started = time.perf_counter()
    with open(path, "wb", buffering=0) as stream:
        left = total_bytes
        while left:
            left -= stream.write(block[: min(left, len(block))])
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    barrier()
    return seconds
