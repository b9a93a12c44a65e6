"""Every engine on every kind of disks: what is committed is what stock writes, whole, in one place; and it resumes.

One row is one engine on one layout. The reference is a stock Trainer in the same cluster on the same kind of disks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests import checks
from tests.cluster import Cluster, Disks, Layout
from tests.conftest import Clusters
from tests.distributed.runs import run_directories, train
from tests.training import DISTRIBUTED_ENGINES, ENGINES

# Every engine and every layout once; the rest of the product belongs to `make test-all`.
PART_OF_TABLE = {
    ("ddp", "shared"),
    ("zero1", "shared"),
    ("zero2", "pair"),
    ("zero3", "split"),
    ("zero2-lora", "split"),
    ("zero3-lora", "pair"),
    ("fsdp2-full", "split"),
    ("fsdp2-sharded", "split"),
    ("fsdp2-sharded", "shared"),
}
TABLE = [
    pytest.param(engine, layout, marks=[] if (engine, layout) in PART_OF_TABLE else pytest.mark.whole_table)
    for engine in DISTRIBUTED_ENGINES
    for layout in ("shared", "split", "pair")
]


@pytest.mark.parametrize(("engine", "layout"), [("single", "shared"), *TABLE])
def test_committed_checkpoint_is_what_stock_writes(clusters: Clusters, engine: str, layout: Layout) -> None:
    cluster = clusters.of(engine=engine, layout=layout)
    stock_disks, safe_disks = cluster.disks(layout, "stock"), cluster.disks(layout, "safe")

    patches = ["tests.patches:zeroed_memory"] if engine.startswith("zero3") else []
    train(cluster, stock_disks, engine, steps=4, patches=patches, trainer="transformers:Trainer")
    train(cluster, safe_disks, engine, steps=4, patches=patches)

    home, *others = run_directories(safe_disks)
    assert checks.checkpoints(home) == [2, 4]
    for step in (2, 4):
        ours = home / f"checkpoint-{step}"
        parts = [directory / ours.name for directory in run_directories(stock_disks)]
        stock_files = {path: part for part in reversed(parts) if part.exists() for path in checks.files_below(part)}
        assert checks.files_below(ours) == {*stock_files, checks.MANIFEST}
        for part in parts:
            checks.assert_same_content(
                ours, part, paths=[path for path, source in stock_files.items() if source == part]
            )
        checks.assert_matches_manifest(ours)
        checks.assert_writing_ranks(ours)
    for directory in others:
        checks.assert_matches_manifest(directory / "checkpoint-4", scope="part")
    for directory in (home, *others):
        checks.assert_only_checkpoints(directory)


# --- resuming ---


@dataclass(frozen=True)
class Interrupted:
    """A run that ended after step 4 of 6, and the losses that it would have had.

    Attributes:
        old_disks: copies of every disk as they were after step 2.
    """

    cluster: Cluster
    engine: str
    layout: Layout
    expected: list[dict[str, Any]]
    disks: Disks
    old_disks: Disks

    def resumed(self, **options: Any) -> list[dict[str, Any]]:
        return train(self.cluster, self.disks, self.engine, resume=True, **options)

    def assert_continues(self, results: list[dict[str, Any]], *, run: str = "run") -> None:
        for result, expected in zip(results, self.expected, strict=True):
            assert result["first_step"] == 4
            assert result["losses"] == {step: expected["losses"][step] for step in ("5", "6")}
            assert result["parameters_digest"] == expected["parameters_digest"]
        home = run_directories(self.disks, run)[0]
        for step in (4, 6):
            checks.assert_matches_manifest(home / f"checkpoint-{step}")
        for directory in run_directories(self.disks, run):
            checks.assert_only_checkpoints(directory)


@pytest.fixture(scope="module")
def interrupted(request: pytest.FixtureRequest) -> Callable[[str, Layout], Interrupted]:
    """Makes, once per row, the uninterrupted run, and for each test the interrupted one afresh."""
    expected: dict[tuple[str, Layout], list[dict[str, Any]]] = {}

    def make(engine: str, layout: Layout) -> Interrupted:
        cluster = Clusters(request).of(engine=engine, layout=layout)
        disks, template, old = (cluster.disks(layout, name) for name in ("resumed", f"{engine}-4", f"{engine}-2"))
        if (engine, layout) not in expected:
            expected[engine, layout] = train(cluster, disks, engine)
            disks = cluster.disks(layout, "resumed")
        train(cluster, disks, engine, stop_after=2)
        _copy(disks, old)
        train(cluster, disks, engine, stop_after=4, resume=True)
        _copy(disks, template)
        return Interrupted(cluster, engine, layout, expected[engine, layout], disks, old)

    return make


def _copy(source: Disks, target: Disks) -> None:
    for group in source.groups:
        shutil.copytree(source.node(group[0]), target.node(group[0]), dirs_exist_ok=True)


def nothing(run: Interrupted) -> None:
    """The plain restart."""


def node_1_emptied(run: Interrupted) -> None:
    run.disks.wipe(1)


def disks_exchanged(run: Interrupted) -> None:
    run.disks.swap(0, 1)


def older_checkpoint_on_node_1(run: Interrupted) -> None:
    run.disks.wipe(1)
    shutil.copytree(run.old_disks.node(1), run.disks.node(1), dirs_exist_ok=True)


def other_content_on_node_1(run: Interrupted) -> None:
    """Node 1 has a checkpoint of the same step from another run: same names and sizes, other bytes."""
    for path in run.disks.node(1).glob("run/checkpoint-4/**/*"):
        if path.is_file() and path.name != checks.MANIFEST:
            path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


def run_directory_moved(run: Interrupted) -> None:
    for directory in run_directories(run.disks):
        directory.rename(directory.with_name("moved"))


DISTURBANCES = (
    node_1_emptied,
    disks_exchanged,
    older_checkpoint_on_node_1,
    other_content_on_node_1,
    run_directory_moved,
)


def disturbances_of(engine: str, layout: Layout, *, whole_table: bool) -> list[Callable[[Interrupted], None]]:
    """What is tried in one row: everything, or in the short run the plain restart and two of the others in turn."""
    if layout == "shared":
        return [nothing, run_directory_moved]
    if whole_table:
        return [nothing, *DISTURBANCES]
    turn = ENGINES.index(engine)
    return [nothing, *(DISTURBANCES[(2 * turn + offset) % len(DISTURBANCES)] for offset in range(2))]


@pytest.mark.parametrize(("engine", "layout"), [("single", "shared"), *TABLE])
def test_resumed_losses_are_those_of_the_uninterrupted_run(
    interrupted: Callable[[str, Layout], Interrupted], engine: str, layout: Layout, request: pytest.FixtureRequest
) -> None:
    run = interrupted(engine, layout)
    template = Disks(run.disks.base, layout, run.disks.nodes, f"{engine}-4")

    for disturb in disturbances_of(engine, layout, whole_table=request.config.getoption("--all")):
        for group in run.disks.groups:
            run.disks.wipe(group[0])
        _copy(template, run.disks)
        disturb(run)
        name = "moved" if disturb is run_directory_moved else "run"
        try:
            run.assert_continues(run.resumed(output_dir=f"{run.disks.path}/{name}"), run=name)
        except Exception as error:
            error.add_note(f"after: {disturb.__name__}")
            raise
