"""Throughput to node 0, beside sockets without anything around them and what people use instead."""

from __future__ import annotations

import functools

from benchmarks import moving
from benchmarks.measure import MB, Samples, Series, Target, Unavailable, alternate, format_size
from benchmarks.ranks import HostRanks, Ranks
from benchmarks.report import Row
from benchmarks.runner import Bench

SUITE, WIRE = "gather", "wire"
DEFAULT_BYTES = 1_000_000_000
WIRE_BYTES = 256_000_000
WIRE_RATE = "1gbit"
WIRE_BYTES_PER_S = 1e9 / 8

ROWS = (
    ("ours", "raw sockets with digests", Target(">=", 0.95)),
    ("ours without digests", "raw sockets", Target(">=", 0.95)),
    ("ours", "rsync daemon", Target(">=", 1.5)),
    ("ours", "scp", Target(">=", 3.0)),
)
# What starts servers of its own, with keys, is not started on somebody's real nodes.
SIMULATED_ONLY = frozenset({"scp"})


def run(bench: Bench) -> None:
    """On the disk, and on a memory file system, where no disk hides what the rest costs."""
    size = min(DEFAULT_BYTES, max(bench.settings.sizes))
    for in_memory, words in bench.places.items():
        with bench.row_of(SUITE, f"{format_size(size)}, {words}"):
            ranks = bench.ranks(2, 1)
            tools = list(dict.fromkeys(tool for ours, peer, _ in ROWS for tool in (ours, peer)))
            samples = take(bench, ranks, tools, size=size, in_memory=in_memory)
            for ours, peer, target in ROWS:
                case = f"{format_size(size)}, {words}, {ours}"
                with bench.row_of(SUITE, case, against=peer):
                    measured, theirs = rates(samples, ours, size), rates(samples, peer, size)
                    bench.add(Row.ratio(SUITE, case, measured, theirs, target=target))


def run_wire(bench: Bench) -> None:
    """Hosts with a link of 1 Gbit/s between them."""
    size = min(WIRE_BYTES, max(bench.settings.sizes))
    case = f"{format_size(size)}, {WIRE_RATE}"
    with bench.row_of(WIRE, case):
        ranks = HostRanks(2, rate=WIRE_RATE, directory=bench.settings.memory)
        try:
            tools = ["ours", "raw sockets with digests"]
            samples = take(bench, ranks, tools, size=size)
        finally:
            ranks.close()
        link = Series("the link's rate", "MB/s", (WIRE_BYTES_PER_S / MB,) * bench.settings.repeats)
        for tool, target in zip(tools, (Target(">=", 0.93), None), strict=True):
            with bench.row_of(WIRE, f"{case}, {tool}", against=link.name):
                measured = rates(samples, tool, size)
                note = "the link carries headers, too"
                bench.add(Row.ratio(WIRE, f"{case}, {tool}", measured, link, target=target, note=note))


def take(
    bench: Bench, ranks: Ranks, tools: list[str], *, size: int, in_memory: bool = False, count: int = 1
) -> Samples[float]:
    """Seconds of the slower of sender and receiver, with each tool in turn.

    Raises:
        Unavailable: there is but one node.
    """
    source, destination = ranks.far_rank, 0
    here, there = (ranks.directories("split", name, in_memory=in_memory) for name in ("from", "to"))
    just_root = [{"root": root} for root in here]
    both = [{"source_root": one, "destination_root": other} for one, other in zip(here, there, strict=True)]
    ranks.run(moving.make_files, per_rank=just_root, count=count, total_bytes=size, on_rank=source)

    def sample(tool: str) -> float:
        if bench.is_launched and tool in SIMULATED_ONLY:
            raise Unavailable("no ssh server is started on real nodes")
        return float(
            max(ranks.run(moving.move_seconds, per_rank=both, tool=tool, source=source, destination=destination))
        )

    try:
        return alternate({tool: functools.partial(sample, tool) for tool in tools}, repeats=bench.settings.repeats)
    finally:
        ranks.run(moving.remove, per_rank=just_root)


def rates(samples: Samples[float], tool: str, size: int) -> Series:
    """MB/s of each of a tool's samples."""
    return samples.series(tool, float).per_second(size)
