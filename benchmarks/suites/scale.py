"""2 to 16 nodes of one rank, the protocol alone: what a byte costs, and what a save without bytes costs."""

from __future__ import annotations

from benchmarks import protocol_ranks
from benchmarks.measure import MB, Series, Target, format_size
from benchmarks.ranks import Ranks
from benchmarks.report import Row
from benchmarks.runner import Bench

SUITE = "scale"
NODES = (2, 4, 8, 16)
BYTES_PER_NODE = 32_000_000
WARMUPS = 1
FIXED_TARGET = Target("<=", 0.2)
PER_BYTE_TARGET = Target("<=", 1.15)


def run(bench: Bench) -> None:
    """Fixed bytes on every node, on split disks of memory: the disk is one for all nodes here, and would be measured
    instead."""
    per_node = min(BYTES_PER_NODE, max(bench.settings.sizes))
    base: Series | None = None
    for nodes in NODES:
        with bench.row_of(SUITE, f"{nodes} nodes"):
            ranks = bench.ranks(nodes, 1)
            empty = _saves(ranks, 0, bench.settings.repeats)
            full = _saves(ranks, per_node, bench.settings.repeats)
            fixed = Series(f"{nodes} nodes", "s", empty)
            target = FIXED_TARGET if nodes == max(NODES) else None
            bench.add(Row.value(SUITE, f"fixed cost, {nodes} nodes", fixed, target=target))
            # Fixed costs are another row's. What is left is per gigabyte of the whole checkpoint.
            giga = nodes * per_node / 1e9
            seconds = tuple(max(second - fixed.median, 1e-9) / giga for second in full)
            per_byte = Series(f"{nodes} nodes", "s/GB", seconds)
            target = PER_BYTE_TARGET if base is not None else None
            base = base or per_byte
            case = f"time per byte, {nodes} nodes, {format_size(per_node)} each"
            rate = f"{nodes * per_node / MB / Series('', 's', full).median:.0f} MB/s in all"
            bench.add(Row.ratio(SUITE, case, per_byte, base, target=target, note=rate))
    bench.end_simulated()


def _saves(ranks: Ranks, per_rank_bytes: int, repeats: int) -> tuple[float, ...]:
    """Seconds of the slowest rank, of each save."""
    results = ranks.run(
        protocol_ranks.saves,
        per_rank=[{"directory": directory} for directory in ranks.directories("split", "run", in_memory=True)],
        is_split=True,
        bytes_per_rank=per_rank_bytes,
        files_per_rank=1,
        count=WARMUPS + repeats,
    )
    return tuple(max(values) for values in zip(*(result["save_s"][WARMUPS:] for result in results), strict=True))
