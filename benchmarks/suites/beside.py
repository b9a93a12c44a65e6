"""Steps per second while a save is finished beside training, over steps per second without one."""

from __future__ import annotations

import os

from benchmarks import package, training_beside
from benchmarks.measure import Series, Target, format_size
from benchmarks.report import Row
from benchmarks.runner import Bench

SUITE = "training-beside"
TARGET = Target(">=", 0.9)
SIZE_LIMIT = 1_000_000_000


def run(bench: Bench) -> None:
    """In the modes in which something goes on beside training."""
    ranks = bench.ranks()
    size = max(size for size in bench.settings.sizes if size <= max(SIZE_LIMIT, min(bench.settings.sizes)))
    spare = (os.cpu_count() or 1) - ranks.world_size
    for mode in ("background", "memory"):
        case = f"{format_size(size)}, {mode}"
        problem = package.mode_problem(mode)
        if problem is not None:
            bench.add(Row.absent(SUITE, case, problem, against="no save under way"))
            continue
        with bench.row_of(SUITE, case, against="no save under way"):
            per_rank = [{"directory": directory} for directory in ranks.directories("split", "run")]
            samples = [
                ranks.run(training_beside.steps_per_second, per_rank=per_rank, mode=mode, total_bytes=size)[0]
                for _ in range(bench.settings.repeats)
            ]
            during = Series("during a save", "steps/s", tuple(sample["during"] for sample in samples))
            alone = Series("no save under way", "steps/s", tuple(sample["alone"] for sample in samples))
            # Where every core trains, the worker's share is taken from training: that is told, not judged.
            target = TARGET if spare > 0 else None
            note = f"{max(spare, 0)} core(s) to spare"
            bench.add(Row.ratio(SUITE, case, during, alone, target=target, note=note))
    ranks.run(training_beside.forget)
