"""How long training stands still for a save: ours in three ways, stock in three, and the least that is possible."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from benchmarks import package, workload
from benchmarks.measure import Samples, Series, Target, Unavailable, alternate, format_size, slowest
from benchmarks.peers import disk, dlrover, sockets
from benchmarks.ranks import Layout, Ranks, first_error
from benchmarks.report import Row
from benchmarks.runner import Bench
from tests.cluster import ScenarioError

SHARED, LOCAL = "stall-shared", "stall-local"
LIMIT = "bytes over the slower of wire and disk"
NAMES = {
    "stock": "stock Trainer",
    "stock+fsync": "stock with fsync of all files",
    "stock+rsync": "stock with rsync to node 0",
    "stock+rsync+fsync": "stock with rsync and fsync",
    "copy": "plain copy into warm memory",
    "dcp": "torch DCP async_save",
    "dlrover": "DLRover FlashCkptTrainer",
}
# Buffers are kept from save to save, so the first save is not like the others.
WARMUPS = {"memory": 1, "dlrover": 1}

# (arm, peer, what their ratio is to reach). Peers stand beside each other, too, whatever ours can do in this version.
_MEMORY_PEERS = (
    ("memory", "copy", Target("<=", 1.2)),
    ("memory", "stock", Target("<=", 0.25)),
)
SHARED_ROWS: tuple[tuple[str, str, Target | None], ...] = (
    ("foreground", "stock+fsync", Target("<=", 1.05)),
    ("foreground", "stock", None),
    ("background", "stock", None),
    *_MEMORY_PEERS,
    ("memory", "dcp", Target("<=", 1.0)),
    ("stock+fsync", "stock", None),
    ("dcp", "stock", None),
    ("copy", "stock", None),
)
LOCAL_ROWS: tuple[tuple[str, str, Target | None], ...] = (
    ("foreground", "stock+rsync", Target("<=", 0.8)),
    ("foreground", "stock+rsync+fsync", None),
    ("background", "stock+rsync", None),
    *_MEMORY_PEERS,
    ("memory", "dlrover", Target("<=", 1.0)),
    ("stock+rsync", "stock", None),
    ("dlrover", "stock", None),
    ("copy", "stock", None),
)


def run_shared(bench: Bench) -> None:
    """One disk for all: DDP, rank 0 writes everything."""
    _run(bench, SHARED, "shared", SHARED_ROWS)


def run_local(bench: Bench) -> None:
    """A disk for each node: the optimizer's state in one file for each rank, as under ZeRO."""
    _run(bench, LOCAL, "split", LOCAL_ROWS)


def _run(bench: Bench, suite: str, layout: Layout, rows: tuple[tuple[str, str, Target | None], ...]) -> None:
    ranks = bench.ranks()
    for size in bench.settings.sizes:
        with bench.row_of(suite, format_size(size)):
            samples = saves(bench, layout, size)
            for arm, peer, target in rows:
                case = f"{format_size(size)}, {NAMES.get(arm, arm)}"
                with bench.row_of(suite, case, against=NAMES[peer]):
                    measured, theirs = _stalls(samples, arm), _stalls(samples, peer)
                    bench.add(Row.ratio(suite, case, measured, theirs, target=target))
            if size == max(bench.settings.sizes):
                for mode in (mode for mode in package.MODES if samples.by_arm[mode]):
                    bench.report.timelines[f"{suite}, {format_size(size)}, {mode}"] = samples.by_arm[mode][-1]["ranks"]
    ranks.run(workload.forget)


def saves(bench: Bench, layout: Layout, size: int) -> Samples[dict[str, Any]]:
    """Every arm's saves of one size, beside the limit that wire and disk set; taken once in a run."""
    if (layout, size) not in bench.saves:
        rows = {"shared": SHARED_ROWS, "split": LOCAL_ROWS}[layout]
        arms = [LIMIT, *dict.fromkeys(arm for mine, peer, _ in rows for arm in (peer, mine))]
        repeats = bench.settings.repeats
        bench.saves[layout, size] = _take(bench.ranks(), arms, size=size, layout=layout, repeats=repeats)
    return bench.saves[layout, size]


def _stalls(samples: Samples[dict[str, Any]], arm: str) -> Series:
    return samples.series(arm, lambda sample: float(sample["stall_s"]), name=NAMES.get(arm, f"ours, {arm}"))


def _take(ranks: Ranks, arms: list[str], *, size: int, layout: Layout, repeats: int) -> Samples[dict[str, Any]]:
    """Saves in the ways of ``arms``, in turn; of each the slowest rank's seconds, and every rank's phases."""
    directories = ranks.directories(layout, "run")
    per_rank: list[Mapping[str, str]] = [{"directory": directory} for directory in directories]

    def sample(arm: str) -> dict[str, Any]:
        problem = package.mode_problem(arm) if arm in package.MODES else None
        if arm == "dlrover":
            problem = dlrover.problem()
        if problem is not None:
            raise Unavailable(problem)
        try:
            results = ranks.run(
                workload.one_save,
                per_rank=per_rank,
                arm=arm,
                total_bytes=size,
                sharded=layout == "split",
                is_split=layout == "split",
                warmups=WARMUPS.get(arm, 0),
            )
        except (ScenarioError, RuntimeError) as error:
            if arm in package.MODES or arm == "stock":
                raise
            # A peer may not fit the other packages that are installed; that is no failure of the suite.
            raise Unavailable(f"{NAMES[arm]} failed here: {first_error(error)}") from error
        saves = [result["save"] for result in results]
        return {
            "stall_s": slowest(results, "stall_s"),
            "commit_s": slowest(results, "commit_s"),
            "rise_bytes": [result["rise_bytes"] for result in results],
            "bytes": max((save["bytes"] for save in saves if save is not None), default=size),
            "gathered_bytes": max((save["gathered_bytes"] for save in saves if save is not None), default=0),
            "ranks": [
                {"rank": rank, **(save["phases_s"] if save is not None else {})} for rank, save in enumerate(saves)
            ],
        }

    def limit() -> dict[str, Any]:
        return {"commit_s": limit_seconds(ranks, layout, size)}

    return alternate({arm: limit if arm == LIMIT else functools.partial(sample, arm) for arm in arms}, repeats=repeats)


def limit_seconds(ranks: Ranks, layout: Layout, size: int) -> float:
    """All bytes over the slower of the disk, written and fsynced by one process, and of the wire, where it is used."""
    per_rank = [{"directory": directory} for directory in ranks.directories(layout, "limit")]
    seconds = max(ranks.run(disk.write_seconds, per_rank=per_rank, total_bytes=size, on_rank=0))
    if layout == "split" and ranks.nodes > 1:
        wire = ranks.run(sockets.wire_seconds, total_bytes=size, source=ranks.far_rank, destination=0)
        seconds = max(seconds, *wire)
    return float(seconds)
