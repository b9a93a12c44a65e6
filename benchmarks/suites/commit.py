"""From the start of a save to a durable, complete checkpoint, over what wire and disk alone would take."""

from __future__ import annotations

import functools

from benchmarks import package, workload
from benchmarks.measure import MB, Series, Target, Unavailable, alternate, format_size
from benchmarks.peers import disk, sockets
from benchmarks.ranks import Layout, Ranks
from benchmarks.report import Row
from benchmarks.runner import Bench
from benchmarks.suites import stall

SUITE = "commit"
TARGET = Target("<=", 1.25)
LAYOUTS: dict[Layout, str] = {"shared": "one disk", "split": "a disk for each node"}


def run(bench: Bench) -> None:
    """Every size, on one disk and on split ones, in each mode."""
    ranks = bench.ranks()
    for layout, words in LAYOUTS.items():
        for size in bench.settings.sizes:
            case = f"{format_size(size)}, {words}"
            with bench.row_of(SUITE, case):
                _size(bench, ranks, layout, size, case)
    ranks.run(workload.forget)


def _size(bench: Bench, ranks: Ranks, layout: Layout, size: int, case: str) -> None:
    ranks.directories(layout, "run")
    arms = {"limit": functools.partial(limit_seconds, ranks, layout, size)} | {
        mode: functools.partial(_commit_seconds, ranks, layout, size, mode) for mode in package.MODES
    }
    samples = alternate(arms, repeats=bench.settings.repeats)
    limit = samples.series("limit", float, name="bytes over the slower of wire and disk")
    for mode in package.MODES:
        with bench.row_of(SUITE, f"{case}, {mode}", against=limit.name):
            measured = samples.series(mode, float, name=f"ours, {mode}")
            rate = Series("rate", "MB/s", tuple(size / MB / seconds for seconds in measured.values))
            note = f"{rate.median:.0f} MB/s; limit {size / MB / limit.median:.0f} MB/s; {ranks.description}"
            bench.add(Row.ratio(SUITE, f"{case}, {mode}", measured, limit, target=TARGET, note=note))


def _commit_seconds(ranks: Ranks, layout: Layout, size: int, mode: str) -> float:
    problem = package.mode_problem(mode)
    if problem is not None:
        raise Unavailable(problem)
    taken = stall.take(ranks, [mode], size=size, layout=layout, repeats=1)
    return float(taken.of(mode)[0]["commit_s"])


def limit_seconds(ranks: Ranks, layout: Layout, size: int) -> float:
    """All bytes over the slower of the disk, written and fsynced by one process, and of the wire, where it is used."""
    per_rank = [{"directory": directory} for directory in ranks.directories(layout, "limit")]
    seconds = max(ranks.run(disk.write_seconds, per_rank=per_rank, total_bytes=size, on_rank=0))
    if layout == "split" and ranks.nodes > 1:
        wire = ranks.run(sockets.wire_seconds, total_bytes=size, source=ranks.far_rank, destination=0)
        seconds = max(seconds, *wire)
    return float(seconds)
