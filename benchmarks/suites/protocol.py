"""The fixed cost of a save: one that saves nothing, beside one barrier of the same ranks."""

from __future__ import annotations

from benchmarks import protocol_ranks
from benchmarks.measure import Series, Target
from benchmarks.ranks import Ranks
from benchmarks.report import Row
from benchmarks.runner import Bench

SUITE = "protocol"
TARGET = Target("<=", 0.010)
WARMUPS = 2
SAVES_PER_REPEAT = 4
RANKS = 4
MANY_FILES = 100


def run(bench: Bench) -> None:
    """The number of collectives with 2 and 4 ranks and with 1 and 100 files, and the time on each file system."""
    counts: dict[tuple[int, int], tuple[int, int]] = {}
    with bench.row_of(SUITE, "collectives of a save"):
        for ranks_per_node in (1, RANKS // 2):
            ranks = bench.ranks(2, ranks_per_node)
            for files in (1, MANY_FILES):
                counts[ranks.world_size, files] = _count(ranks, files)
        _compare(bench, counts)
    for in_memory, words in bench.places.items():
        with bench.row_of(SUITE, words):
            _time(bench, bench.ranks(2, RANKS // 2), words, in_memory=in_memory)


def _time(bench: Bench, ranks: Ranks, words: str, *, in_memory: bool) -> None:
    count = WARMUPS + bench.settings.repeats * SAVES_PER_REPEAT
    layout = ranks.nearest_layout("shared")
    results = ranks.run(
        protocol_ranks.saves,
        per_rank=[{"directory": directory} for directory in ranks.directories(layout, "run", in_memory=in_memory)],
        is_split=layout == "split",
        bytes_per_rank=0,
        files_per_rank=1,
        count=count,
    )
    save = Series("a save of nothing", "s", _slowest(results, "save_s"))
    barrier = Series("one barrier", "s", _slowest(results, "barrier_s"))
    note = f"{ranks.description}; the checkpoint has a manifest and no files; fsyncs of the directories are in it"
    bench.add(Row.value(SUITE, f"a save of nothing, {words}", save, target=TARGET, note=note))
    bench.add(Row.ratio(SUITE, f"a save of nothing, {words}", save, barrier))
    bench.report.timelines[f"{SUITE}, {words}"] = [
        {"rank": rank, **result["saves"][-1]["phases_s"]} for rank, result in enumerate(results)
    ]


def _slowest(results: list[dict[str, list[float]]], key: str) -> tuple[float, ...]:
    return tuple(max(values) for values in zip(*(result[key][WARMUPS:] for result in results), strict=True))


def _count(ranks: Ranks, files: int) -> tuple[int, int]:
    """Collectives and messages of one save on each rank: the most of any."""
    layout = ranks.nearest_layout("split")
    results = ranks.run(
        protocol_ranks.saves,
        per_rank=[{"directory": directory} for directory in ranks.directories(layout, "count", in_memory=True)],
        is_split=layout == "split",
        bytes_per_rank=files * 1000,
        files_per_rank=files,
        count=2,
    )
    return max(result["collectives"][-1] for result in results), max(result["messages"][-1] for result in results)


def _compare(bench: Bench, counts: dict[tuple[int, int], tuple[int, int]]) -> None:
    least = min(collectives for collectives, _ in counts.values())
    for (ranks, files), (collectives, messages) in counts.items():
        bench.add(
            Row.ratio(
                SUITE,
                f"collectives of a save, {ranks} ranks, {files} file(s) each, split disks",
                Series("collectives", "1", (float(collectives),)),
                Series("the fewest of these rows", "1", (float(least),)),
                target=Target("<=", 1.0),
                note=f"and at most {messages} messages between two ranks on one rank (the bytes)",
            )
        )
