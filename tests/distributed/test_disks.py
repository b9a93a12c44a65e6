"""What people reported of shared disks and of separate ones (cases S, L), of callbacks and subclasses (F, N)."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import checks
from tests.cluster import Cluster, Disks, Layout, ScenarioError
from tests.conftest import Clusters
from tests.distributed.runs import TIMEOUT_S, run_directories, train
from tests.training import run_training

SLEEPS = {"0": 0.02, "1": 0.0, "2": 0.05, "3": 0.1}


class Watcher:
    """Looks at home's run directory all the time and writes down what must never be seen there.

    Attributes:
        faults: what was wrong, in words.
        looks: how many times it looked.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._had_one = False
        self.faults: list[str] = []
        self.looks = 0

    def _watch(self) -> None:
        while not self._stop.is_set():
            self._look()
            time.sleep(0.002)

    def _look(self) -> None:
        self.looks += 1
        try:
            names = [entry.name for entry in self._home.iterdir() if entry.name.startswith("checkpoint-")]
        except FileNotFoundError:
            return
        complete = [name for name in names if self._is_complete(name)]
        if self._had_one and not complete:
            self.faults.append(f"no complete checkpoint at all among {names}")  # case R3
        self._had_one = self._had_one or bool(complete)

    def _is_complete(self, name: str) -> bool:
        """Whole under its name. One that goes away while it is being looked at went in one step."""
        checkpoint = self._home / name
        try:
            manifest = checks.manifest_of(checkpoint)
            sizes = {entry["path"]: entry["size"] for entry in manifest["files"]}
            wrong = [path for path, size in sizes.items() if (checkpoint / path).stat().st_size != size]
        except FileNotFoundError as error:
            if checkpoint.exists():
                self.faults.append(f"{name} exists without {error.filename}")
            return False
        if wrong:
            self.faults.append(f"{name} has files of other sizes: {wrong}")
        return not wrong

    @contextmanager
    def watching(self) -> Iterator[Watcher]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join()


@pytest.mark.parametrize("layout", ["shared", "split", "pair"])
def test_no_incomplete_checkpoint_is_ever_seen_during_twenty_saves(clusters: Clusters, layout: Layout) -> None:
    """Also S1, S3, S4, R3, L6: ranks sleep in their writes, before renames and in every deletion."""
    cluster = clusters.of(engine="ddp", layout=layout)
    disks = cluster.disks(layout, "watched")
    patches = [
        ["tests.patches:slow_writes", {"seconds_by_rank": SLEEPS}],
        ["tests.patches:slow_unlink", {"seconds": 0.002}],
    ]

    with Watcher(run_directories(disks)[0]).watching() as watcher:
        train(cluster, disks, steps=20, save_steps=1, args={"save_total_limit": 1}, patches=patches)

    assert watcher.faults == []
    assert watcher.looks > 200
    for directory in run_directories(disks):
        assert checks.checkpoints(directory) == [20]
        checks.assert_only_checkpoints(directory)


def test_thirty_saves_on_a_shared_disk_give_thirty_checkpoints(two_nodes: Cluster) -> None:
    """S1: with stock 4.38 between 0 and 20 of 20 are lost."""
    disks = two_nodes.disks("shared", "thirty")
    patches = [["tests.patches:slow_writes", {"seconds_by_rank": SLEEPS}]]

    train(two_nodes, disks, "zero2", steps=30, save_steps=1, patches=patches)

    home = run_directories(disks)[0]
    assert checks.checkpoints(home) == list(range(1, 31))
    for step in range(1, 31):
        checks.assert_matches_manifest(home / f"checkpoint-{step}")


# --- each rank a file of its own name, or all the same ---


def test_files_of_every_rank_reach_home(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "experts")

    train(two_nodes, disks, trainer="tests.scenarios:ExpertShards", stop_after=2)

    files = checks.files_below(run_directories(disks)[0] / "checkpoint-2")
    assert {name for name in files if name.startswith("expert")} == {f"expert_{rank}.bin" for rank in range(4)}


def test_one_name_with_different_content_is_an_error_that_names_both_ranks(two_nodes: Cluster) -> None:
    """L9."""
    disks = two_nodes.disks("split", "experts")

    with pytest.raises(ScenarioError) as caught:
        train(two_nodes, disks, trainer="tests.scenarios:ExpertShards", trainer_kwargs={"same_name": True})

    errors = caught.value.errors
    assert set(errors) == {0, 1, 2, 3}
    for error in errors.values():
        assert error.is_a("safe_trainer.errors.CheckpointError")
        assert re.search(r"expert\.bin .* by rank 0 .* by rank 2 ", error.message)
    for directory in run_directories(disks):
        assert checks.checkpoints(directory) == []
        checks.assert_only_checkpoints(directory)


def test_a_failing_rank_is_the_same_error_on_all_and_leaves_the_former_checkpoint(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "failing")
    options: dict[str, Any] = {
        "trainer": "tests.scenarios:FailsOnRank",
        "trainer_kwargs": {"failing_rank": 3, "failing_step": 4},
    }

    with pytest.raises(ScenarioError) as caught:
        train(two_nodes, disks, **options)

    messages = {error.message for error in caught.value.errors.values()}
    assert len(caught.value.errors) == 4
    assert len(messages) == 1
    assert re.match(r"rank 3 on \S+, write: OSError \(ENOSPC\): .*No space left on device", messages.pop())
    for directory in run_directories(disks):
        assert checks.checkpoints(directory) == [2]
        checks.assert_only_checkpoints(directory)
    checks.assert_matches_manifest(run_directories(disks)[0] / "checkpoint-2")


# --- run directories that do not fit together (L10), options that contradict what is there ---


def different_output_dirs(disks: Disks) -> list[dict[str, Any]]:
    return [{"output_dir": f"{disks.path}/run-{rank // 2}"} for rank in range(4)]


def test_different_run_directories_on_one_disk_are_an_error_before_training(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("shared", "stamped")

    with pytest.raises(ScenarioError) as caught:
        two_nodes.run(
            run_training,
            engine="ddp",
            trainer="safe_trainer:SafeTrainer",
            per_rank=different_output_dirs(disks),
            timeout_s=TIMEOUT_S,
        )

    for error in caught.value.errors.values():
        assert error.is_a("safe_trainer.errors.StorageError")
        assert "run-0" in error.message
        assert "run-1" in error.message
        assert "rank 0" in error.message
        assert "rank 2" in error.message


def test_run_directories_may_differ_where_disks_do(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "stamped")
    options: dict[str, Any] = {"engine": "zero2", "trainer": "safe_trainer:SafeTrainer", "timeout_s": TIMEOUT_S}

    two_nodes.run(run_training, per_rank=different_output_dirs(disks), stop_after=4, **options)
    results = two_nodes.run(run_training, per_rank=different_output_dirs(disks), resume=True, **options)

    assert {result["first_step"] for result in results} == {4}
    checks.assert_matches_manifest(disks.node(0) / "run-0" / "checkpoint-6")
    checks.assert_matches_manifest(disks.node(1) / "run-1" / "checkpoint-6", scope="part")


@pytest.mark.parametrize(("layout", "storage"), [("split", "shared"), ("shared", "local")])
def test_storage_that_contradicts_what_is_seen_is_an_error(two_nodes: Cluster, layout: Layout, storage: str) -> None:
    disks = two_nodes.disks(layout, "storage")
    options = {"storage": storage, "visibility_timeout_s": 1.0}

    with pytest.raises(ScenarioError) as caught:
        train(two_nodes, disks, trainer="tests.scenarios:with_options", trainer_kwargs={"options": options})

    for error in caught.value.errors.values():
        assert error.is_a("safe_trainer.errors.StorageError")
        assert f"storage='{storage}'" in error.message


@pytest.mark.parametrize(("layout", "storage"), [("split", "local"), ("shared", "shared")])
def test_storage_that_is_right_is_accepted(two_nodes: Cluster, layout: Layout, storage: str) -> None:
    disks = two_nodes.disks(layout, "storage")

    train(
        two_nodes,
        disks,
        stop_after=2,
        trainer="tests.scenarios:with_options",
        trainer_kwargs={"options": {"storage": storage}},
    )

    checks.assert_matches_manifest(run_directories(disks)[0] / "checkpoint-2")


# --- callbacks and subclasses ---


@pytest.mark.parametrize("layout", ["shared", "split"])
def test_on_save_sees_the_complete_checkpoint(two_nodes: Cluster, layout: Layout) -> None:
    """F7: rank 3 is slow, rank 0's callback lists the directory."""
    disks = two_nodes.disks(layout, "callback")

    results = train(
        two_nodes,
        disks,
        stop_after=2,
        callbacks=["tests.scenarios:ListsCheckpointOnSave"],
        patches=[["tests.patches:slow_writes", {"seconds_by_rank": {"3": 1.0}}]],
        inspect="tests.scenarios:listed_on_save",
    )

    files = checks.files_below(run_directories(disks)[0] / "checkpoint-2")
    assert set(results[0]["inspect"]["2"]) == files
    assert "rng_state_3.pth" in files


@pytest.mark.parametrize(
    ("trainer", "in_manifest"),
    [
        ("MixinBeforeWritesAround", {"before.json", "after.json"}),
        ("SafeOverMixin", {"before.json", "after.json"}),
        ("WritesAroundSafe", {"before.json"}),
        ("SafeUnderMixin", {"before.json"}),
    ],
)
@pytest.mark.parametrize("layout", ["shared", "split"])
def test_what_subclasses_write_around_the_save_is_kept(
    two_nodes: Cluster, layout: Layout, trainer: str, in_manifest: set[str]
) -> None:
    """N1."""
    disks = two_nodes.disks(layout, "around")

    train(two_nodes, disks, trainer=f"tests.scenarios:{trainer}", stop_after=2)
    resumed = train(two_nodes, disks, trainer=f"tests.scenarios:{trainer}", resume=True)

    checkpoint = run_directories(disks)[0] / "checkpoint-2"
    listed = {entry["path"] for entry in checks.manifest_of(checkpoint)["files"]}
    assert {"before.json", "after.json"} <= checks.files_below(checkpoint)
    assert listed & {"before.json", "after.json"} == in_manifest
    assert {result["first_step"] for result in resumed} == {2}


def test_what_a_subclass_writes_beside_the_checkpoint_lands_in_the_run_directory(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "beside")

    train(two_nodes, disks, trainer="tests.scenarios:WritesBesideCheckpoint")

    assert (run_directories(disks)[0] / "notes.txt").read_text() == "6"


def test_weights_without_tensors_are_said_loudly(two_nodes: Cluster) -> None:
    """N3."""
    disks = two_nodes.disks("split", "empty")

    results = train(
        two_nodes, disks, trainer="tests.scenarios:EmptyAdapter", stop_after=2, inspect="tests.scenarios:last_save"
    )

    for warnings in (results[0]["inspect"]["warnings"], results[3]["inspect"]["warnings"]):
        assert len(warnings) == 1
        assert "adapter_model.safetensors holds no tensors" in warnings[0]
    assert checks.manifest_of(run_directories(disks)[0] / "checkpoint-2")["warnings"] == warnings
