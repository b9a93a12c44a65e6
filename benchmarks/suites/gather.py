"""Throughput to node 0, beside sockets without anything around them and what people use instead."""

from __future__ import annotations

import functools
from pathlib import Path

from benchmarks import moving
from benchmarks.machine import file_system
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
    places: list[Path | None] = [None] if bench.is_launched else [None, bench.settings.memory]
    for place in places:
        words = file_system(place or bench.settings.directory)
        with bench.row_of(SUITE, f"{format_size(size)}, {words}"):
            ranks = bench.ranks(2, 1, directory=place)
            tools = list(dict.fromkeys(tool for ours, peer, _ in ROWS for tool in (ours, peer)))
            samples = take(ranks, tools, size=size, repeats=bench.settings.repeats, launched=bench.is_launched)
            for ours, peer, target in ROWS:
                case = f"{format_size(size)}, {words}, {ours}"
                with bench.row_of(SUITE, case, against=peer):
                    measured, theirs = rates(samples, ours, size), rates(samples, peer, size)
                    bench.add(Row.ratio(SUITE, case, measured, theirs, target=target, note=ranks.description))


def run_wire(bench: Bench) -> None:
    """Hosts with a link of 1 Gbit/s between them."""
    size = min(WIRE_BYTES, max(bench.settings.sizes))
    case = f"{format_size(size)}, {WIRE_RATE}"
    with bench.row_of(WIRE, case):
        bench.end_simulated()
        ranks = HostRanks(2, rate=WIRE_RATE, directory=bench.settings.memory)
        try:
            tools = ["ours", "raw sockets with digests"]
            samples = take(ranks, tools, size=size, repeats=bench.settings.repeats, launched=False)
        finally:
            ranks.close()
        link = Series("the link's rate", "MB/s", (WIRE_BYTES_PER_S / MB,) * bench.settings.repeats)
        for tool, target in zip(tools, (Target(">=", 0.93), None), strict=True):
            with bench.row_of(WIRE, f"{case}, {tool}", against=link.name):
                measured = rates(samples, tool, size)
                note = f"the link carries headers, too; {ranks.description}"
                bench.add(Row.ratio(WIRE, f"{case}, {tool}", measured, link, target=target, note=note))


def take(ranks: Ranks, tools: list[str], *, size: int, repeats: int, launched: bool, count: int = 1) -> Samples[float]:
    """Seconds of the slower of sender and receiver, with each tool in turn.

    Raises:
        Unavailable: there is but one node.
    """
    source, destination = ranks.far_rank, 0
    roots = [
        {"root": here, "source_root": here, "destination_root": there}
        for here, there in zip(ranks.directories("split", "from"), ranks.directories("split", "to"), strict=True)
    ]
    just_root = [{"root": each["root"]} for each in roots]
    both = [{key: each[key] for key in ("source_root", "destination_root")} for each in roots]
    ranks.run(moving.make_files, per_rank=just_root, count=count, total_bytes=size, on_rank=source)

    def sample(tool: str) -> float:
        if launched and tool in SIMULATED_ONLY:
            raise Unavailable("no ssh server is started on real nodes")
        return float(
            max(ranks.run(moving.move_seconds, per_rank=both, tool=tool, source=source, destination=destination))
        )

    try:
        return alternate({tool: functools.partial(sample, tool) for tool in tools}, repeats=repeats)
    finally:
        ranks.run(moving.remove, per_rank=just_root)


def rates(samples: Samples[float], tool: str, size: int) -> Series:
    """MB/s of each of a tool's samples."""
    return samples.series(tool, float).per_second(size)
