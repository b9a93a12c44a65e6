"""By how much the peak of the resident memory rises in a save of ours over one of stock."""

from __future__ import annotations

from benchmarks import package, workload
from benchmarks.measure import Series, Target, format_size
from benchmarks.ranks import Layout
from benchmarks.report import Row
from benchmarks.runner import Bench
from benchmarks.suites import stall
from benchmarks.suites.commit import LAYOUTS

SUITE = "memory"
TARGET = Target("<=", 64 << 20)


def run(bench: Bench) -> None:
    """The largest size, on one disk and on split ones; the saves are those of the stall suites."""
    size = max(bench.settings.sizes)
    for layout, words in LAYOUTS.items():
        case = f"{format_size(size)}, {words}"
        with bench.row_of(SUITE, case):
            _layout(bench, layout, size, case)
    bench.ranks().run(workload.forget)


def _layout(bench: Bench, layout: Layout, size: int, case: str) -> None:
    samples = stall.saves(bench, layout, size)
    stock = [sample["rise_bytes"] for sample in samples.of("stock")]
    for mode in package.MODES:
        with bench.row_of(SUITE, f"{case}, {mode}", against="stock Trainer"):
            over = [
                float(max(ours - theirs for ours, theirs in zip(sample["rise_bytes"], before, strict=True)))
                for sample, before in zip(samples.of(mode), stock, strict=True)
            ]
            # Buffers for the whole state are what memory staging is; there the figure is told, not judged.
            target = None if mode == "memory" else TARGET
            note = "of the rank for which it is most"
            series = Series("peak over stock", "bytes", tuple(over))
            bench.add(Row.value(SUITE, f"{case}, {mode}", series, target=target, note=note))
