"""Resuming: everything is there, beside stock; and a node that has joined with an empty disk, beside raw sockets."""

from __future__ import annotations

import functools
from pathlib import Path

from benchmarks import moving, resuming, workload
from benchmarks.measure import Series, Target, alternate, format_size
from benchmarks.ranks import Ranks
from benchmarks.report import Row
from benchmarks.runner import Bench
from benchmarks.suites import gather

SUITE = "resume"
SIZE_LIMIT = 1_000_000_000
STOCK = "stock Trainer"
RAW = "raw sockets with digests"


def run(bench: Bench) -> None:
    """Of the largest size up to 1 GB."""
    ranks = bench.ranks()
    size = max(size for size in bench.settings.sizes if size <= max(SIZE_LIMIT, min(bench.settings.sizes)))
    with bench.row_of(SUITE, f"{format_size(size)}, everything present", against=STOCK):
        _present(bench, ranks, size)
    ranks.run(workload.forget)
    with bench.row_of(SUITE, f"{format_size(size)}, node 1 empty", against=RAW):
        _delivered(bench, ranks, size)


def _present(bench: Bench, ranks: Ranks, size: int) -> None:
    """From the call of ``train`` to the first step, on one disk."""
    per_rank = [{"directory": directory} for directory in ranks.directories("shared", "run")]
    ranks.run(resuming.make_checkpoint, per_rank=per_rank, total_bytes=size)

    def sample(verify: str | None) -> float:
        return float(max(ranks.run(resuming.seconds_to_first_step, per_rank=per_rank, total_bytes=size, verify=verify)))

    arms = {"stock": None, "off": "off", "digest": "digest"}
    try:
        samples = alternate(
            {name: functools.partial(sample, verify) for name, verify in arms.items()},
            repeats=bench.settings.repeats,
        )
    finally:
        ranks.run(moving.remove, per_rank=[{"root": each["directory"]} for each in per_rank])
    stock = samples.series("stock", float, name=STOCK)
    for verify, target in (("off", Target("<=", 1.1)), ("digest", None)):
        case = f"{format_size(size)}, everything present, verify={verify}"
        bench.add(Row.ratio(SUITE, case, samples.series(verify, float), stock, target=target))


def _delivered(bench: Bench, ranks: Ranks, size: int) -> None:
    """Everything that node 1 lacks, checked and delivered, over the same bytes through a raw socket."""
    source, destination = 0, ranks.far_rank
    runs, there = ranks.directories("split", "run"), ranks.directories("split", "raw")
    file_of_raw = [
        {"source_root": str(Path(run) / "checkpoint-1"), "destination_root": target}
        for run, target in zip(runs, there, strict=True)
    ]
    per_rank = [{"directory": directory} for directory in runs]
    ranks.run(resuming.make_plain_checkpoint, per_rank=per_rank, total_bytes=size)
    try:
        samples = alternate(
            {
                RAW: lambda: max(
                    ranks.run(
                        moving.move_seconds, per_rank=file_of_raw, tool=RAW, source=source, destination=destination
                    )
                ),
                "off": lambda: max(ranks.run(resuming.delivery_seconds, per_rank=per_rank, verify="off")),
                "digest": lambda: max(ranks.run(resuming.delivery_seconds, per_rank=per_rank, verify="digest")),
            },
            repeats=bench.settings.repeats,
        )
    finally:
        ranks.run(moving.remove, per_rank=[{"root": each["directory"]} for each in per_rank])
    raw = gather.rates(samples, RAW, size)
    for verify, target in (("off", Target(">=", 0.85)), ("digest", None)):
        case = f"{format_size(size)}, node 1 empty, verify={verify}"
        ours: Series = gather.rates(samples, verify, size)
        bench.add(Row.ratio(SUITE, case, ours, raw, target=target))
