"""From the start of a save to a durable, complete checkpoint, over what wire and disk alone would take."""

from __future__ import annotations

from benchmarks import package, workload
from benchmarks.measure import MB, Target, format_size
from benchmarks.ranks import Layout
from benchmarks.report import Row
from benchmarks.runner import Bench
from benchmarks.suites import stall

SUITE = "commit"
TARGET = Target("<=", 1.25)
LAYOUTS: dict[Layout, str] = {"shared": "one disk", "split": "a disk for each node"}


def run(bench: Bench) -> None:
    """Every size, on one disk and on split ones, in each mode; the saves are those of the stall suites."""
    for layout, words in LAYOUTS.items():
        for size in bench.settings.sizes:
            case = f"{format_size(size)}, {words}"
            with bench.row_of(SUITE, case):
                _size(bench, layout, size, case)
    bench.ranks().run(workload.forget)


def _size(bench: Bench, layout: Layout, size: int, case: str) -> None:
    samples = stall.saves(bench, layout, size)
    limit = samples.series(stall.LIMIT, lambda sample: float(sample["commit_s"]))
    for mode in package.MODES:
        with bench.row_of(SUITE, f"{case}, {mode}", against=limit.name):
            ours = samples.series(mode, lambda sample: float(sample["commit_s"]), name=f"ours, {mode}")
            rates = [size / MB / seconds for seconds in (ours.median, limit.median)]
            note = f"{rates[0]:.0f} MB/s where the limit is {rates[1]:.0f} MB/s"
            bench.add(Row.ratio(SUITE, f"{case}, {mode}", ours, limit, target=TARGET, note=note))
