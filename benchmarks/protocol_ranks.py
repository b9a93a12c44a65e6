"""Saves without a model: the protocol alone. Runs on every rank."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks import package
from benchmarks.process import barrier, rank

BLOCK = bytes(range(256)) * 4096


def saves(*, directory: str, is_split: bool, bytes_per_rank: int, files_per_rank: int, count: int) -> dict[str, Any]:
    """``count`` saves, each after a barrier that is timed, too.

    Returns:
        ``save_s``, ``barrier_s``: seconds of each. ``collectives``, ``messages``: of each save. ``saves``: see
        :func:`benchmarks.package.described`.
    """
    path = Path(directory)
    result: dict[str, Any] = {"save_s": [], "barrier_s": [], "collectives": [], "messages": [], "saves": []}
    with package.open_channel() as channel:
        run = package.start_run(channel, path, storage="local" if is_split else "auto", local_copies="drop")
        for step in range(1, count + 1):

            def write(staged: Path, step: int = step) -> None:
                _write(staged, step, bytes_per_rank, files_per_rank)

            barrier()
            started = time.perf_counter()
            barrier()
            result["barrier_s"].append(time.perf_counter() - started)
            with package.counted_messages() as counts:
                started = time.perf_counter()
                save = package.save_files(run, step, write)
                result["save_s"].append(time.perf_counter() - started)
            result["collectives"].append(counts["collectives"])
            result["messages"].append(counts["messages"])
            result["saves"].append(save)
    barrier()
    if rank() == 0 or is_split:
        shutil.rmtree(path, ignore_errors=True)
    barrier()
    return result


def _write(staged: Path, step: int, total: int, files: int) -> None:
    """Files with the rank in their names, and other bytes at every step: nothing is the file of the save before."""
    for index in range(files if total or files > 1 else 0):
        left = total // files
        with open(staged / f"__{rank()}_{index}.distcp", "wb") as stream:
            left -= stream.write(step.to_bytes(8, "big")[: left or 8])
            while left > 0:
                left -= stream.write(BLOCK[:left])
