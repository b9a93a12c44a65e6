"""Saves that are finished beside training: the same checkpoints, in order, and their failures on all ranks alike."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path
from typing import Any

import pytest

from tests import checks
from tests.cluster import Cluster, Disks, Layout, cluster_job
from tests.conftest import Clusters
from tests.distributed.runs import TIMEOUT_S, run_directories, survivors_of_rank_3, train
from tests.training import DISTRIBUTED_ENGINES

NOTES = "tests.scenarios:NotesPendingSaves"
# What tells two saves of equal runs apart: paths, times and process ids.
_NOT_THE_SAME_BYTES = ("zero3", "zero3-lora", "fsdp2-sharded")  # nor are two foreground saves
_OF_THE_RUN = {checks.MANIFEST, "training_args.bin", "trainer_state.json"}
PART_OF_TABLE = {
    ("ddp", "split", "memory"),
    ("zero3", "split", "memory"),
    ("zero2-lora", "pair", "memory"),
    ("fsdp2-full", "shared", "memory"),
    ("fsdp2-sharded", "split", "disk"),
    ("zero2", "shared", "directory"),
}
TABLE = [
    pytest.param(*row, marks=[] if row in PART_OF_TABLE else pytest.mark.whole_table, id="-".join(row))
    for engine in DISTRIBUTED_ENGINES
    for layout in ("shared", "split", "pair")
    for staging in ("disk", "memory", "directory")
    if (row := (engine, layout, staging))
]


def beside(trainer: str = "safe_trainer:SafeTrainer", *, staging: str = "disk", **options: Any) -> dict[str, Any]:
    """Keywords of `run_training` for a trainer that saves in the background, with these further options."""
    made = {"background": True, "staging": staging, **options}
    return {"trainer": "tests.scenarios:with_options", "trainer_kwargs": {"options": made, "trainer": trainer}}


def train_beside(
    cluster: Cluster,
    disks: Disks,
    engine: str = "ddp",
    *,
    trainer: str = NOTES,
    options: dict[str, Any] | None = None,
    **further: Any,
) -> list[dict[str, Any]]:
    """Train with saves in the background, by a trainer that notes which are under way."""
    return train(
        cluster,
        disks,
        engine,
        **beside(trainer, **(options or {})),
        callbacks=["tests.scenarios:ListsCheckpointOnSave"],
        inspect="tests.scenarios:noted_saves",
        **further,
    )


def run_beside(cluster: Cluster, scenario: str, disks: Disks, **options: Any) -> list[Any]:
    """A scenario around `run_training` with DDP, which may end in another way than with results."""
    return cluster.run(
        f"tests.scenarios:{scenario}", engine="ddp", output_dir=f"{disks.path}/run", timeout_s=TIMEOUT_S, **options
    )


def digests(checkpoint: Path) -> dict[str, str]:
    return {
        path: hashlib.sha256((checkpoint / path).read_bytes()).hexdigest()
        for path in checks.files_below(checkpoint) - _OF_THE_RUN
    }


@pytest.mark.parametrize(("engine", "layout", "staging"), TABLE)
def test_it_is_what_a_save_in_the_foreground_writes_and_resumes(
    clusters: Clusters, tmp_path: Path, engine: str, layout: Layout, staging: str
) -> None:
    cluster = clusters.of(engine=engine, layout=layout)
    before, beside = cluster.disks(layout, "foreground"), cluster.disks(layout, "background")
    patches = ["tests.patches:zeroed_memory"] if engine.startswith("zero3") else []
    options = {"staging": str(tmp_path / "nvme") if staging == "directory" else staging}

    reference = train(cluster, before, engine, patches=patches)
    results = train_beside(cluster, beside, engine, patches=patches, options=options)

    (first, *_), (home, *_) = run_directories(before), run_directories(beside)
    assert checks.checkpoints(home) == [2, 4, 6]
    for step in (2, 4, 6):
        checks.assert_matches_manifest(home / f"checkpoint-{step}")
        ours, theirs = home / f"checkpoint-{step}", first / f"checkpoint-{step}"
        assert checks.files_below(ours) == checks.files_below(theirs)
        checks.assert_same_content(ours, theirs, paths=checks.files_below(theirs) - {checks.MANIFEST})
        if engine not in _NOT_THE_SAME_BYTES:
            assert digests(ours) == digests(theirs)
    for rank, result in enumerate(results):
        assert result["losses"] == reference[rank]["losses"]
        assert list(result["inspect"]["seen"]) == ["2", "4", "6"]
        assert not result["inspect"]["is_pending"]
        assert result["inspect"]["last"]["step"] == 6
        assert result["inspect"]["last"]["stall_s"] <= result["inspect"]["last"]["total_s"]
    for directory in run_directories(beside):
        checks.assert_only_checkpoints(directory)
    assert not list((tmp_path / "nvme").rglob("checkpoint-*"))

    resume = f"{beside.path}/run/checkpoint-4"
    resumed = train_beside(cluster, beside, engine, patches=patches, options=options, resume=resume)
    assert [result["first_step"] for result in resumed] == [4] * len(resumed)
    assert [result["losses"]["6"] for result in resumed] == [result["losses"]["6"] for result in reference]


@pytest.mark.parametrize("staging", ["disk", "memory"])
def test_training_goes_on_and_the_next_save_waits(two_nodes: Cluster, staging: str) -> None:
    disks = two_nodes.disks("split", "slow")

    results = train_beside(
        two_nodes,
        disks,
        steps=10,
        save_steps=4,
        options={"staging": staging},
        patches=[["tests.patches:slow_commits", {"seconds": 1.0, "step_s": 0.1}]],
    )

    assert checks.checkpoints(run_directories(disks)[0]) == [4, 8, 10]
    for result in results:
        noted = {step: busy_with for step, busy_with, _ in result["inspect"]["noted"]}
        assert noted[4] == 4  # the step after the save began while the save was under way
        assert noted[8] == 8  # and the next save has waited for it
        seen = result["inspect"]["seen"]
        assert list(seen) == ["4", "8", "10"]
        assert all(checks.MANIFEST in files for files in seen.values()) or result is not results[0]
        assert result["inspect"]["last"]["stall_s"] < 1.0 < result["inspect"]["last"]["total_s"]


def test_a_save_that_ends_between_two_saves_is_told_before_the_next(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "told")

    results = train_beside(
        two_nodes,
        disks,
        steps=30,
        save_steps=15,
        patches=[["tests.patches:slow_commits", {"seconds": 0.1, "step_s": 0.25}]],
    )

    told = [[step for step, _, is_pending in result["inspect"]["noted"] if not is_pending] for result in results]
    assert told == [told[0]] * 4  # at the same step on every rank
    assert max(told[0]) in range(16, 30)
    assert {tuple(result["inspect"]["seen"]) for result in results} == {("15", "30")}


def test_twenty_saves_follow_each_other(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "twenty")

    results = train_beside(two_nodes, disks, steps=40, args={"save_total_limit": 2}, options={"staging": "memory"})

    assert checks.checkpoints(run_directories(disks)[0]) == [38, 40]
    assert {len(result["inspect"]["seen"]) for result in results} == {20}


@pytest.mark.parametrize(("steps", "save_steps", "step_s"), [(6, 4, 0.0), (40, 10, 0.2)], ids=["at the end", "before"])
def test_an_error_beside_training_is_raised_on_all_ranks_alike(
    two_nodes: Cluster, steps: int, save_steps: int, step_s: float
) -> None:
    disks = two_nodes.disks("split", "failing")

    told = run_beside(
        two_nodes,
        "train_into_an_error",
        disks,
        **beside(NOTES),
        steps=steps,
        save_steps=save_steps,
        patches=[
            ["tests.patches:slow_commits", {"seconds": 0.0, "step_s": step_s}],
            ["tests.patches:fails_to_commit", {"step": save_steps}],
        ],
    )

    (message,) = set(told)
    assert message.startswith("CheckpointError: rank 0 on ")
    assert "Input/output error" in message
    for directory in run_directories(disks):
        assert checks.checkpoints(directory) == []


def test_with_continue_the_failure_is_counted_and_callbacks_are_not_told(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "continue")

    results = train_beside(
        two_nodes,
        disks,
        options={"on_error": "continue"},
        patches=[["tests.patches:fails_to_commit", {"step": 4}]],
    )

    assert checks.checkpoints(run_directories(disks)[0]) == [2, 6]
    for result in results:
        assert result["inspect"]["failed"] == 1
        assert list(result["inspect"]["seen"]) == ["2", "6"]


def test_an_error_of_training_cuts_no_save_short(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "error")

    told = run_beside(
        two_nodes,
        "train_into_an_error",
        disks,
        **beside("tests.scenarios:StopsAfterTwoSteps", staging="memory"),
        patches=[["tests.patches:slow_commits", {"seconds": 1.0, "step_s": 0.0}]],
    )

    assert set(told) == {"ArithmeticError: the loss is not a number"}
    assert checks.checkpoints(run_directories(disks)[0]) == [2]
    checks.assert_matches_manifest(run_directories(disks)[0] / "checkpoint-2")


def test_the_best_model_is_loaded_from_a_save_that_was_under_way(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "best")

    results = train_beside(
        two_nodes,
        disks,
        eval=True,
        args={
            "eval_strategy": "steps",
            "eval_steps": 2,
            "metric_for_best_model": "loss",
            "load_best_model_at_end": True,
            "save_total_limit": 1,
        },
        options={"staging": "memory"},
        patches=[["tests.patches:slow_commits", {"seconds": 0.5, "step_s": 0.0}]],
    )

    best = {result["best_model_checkpoint"] for result in results}
    assert len(best) == 1
    assert checks.checkpoints(run_directories(disks)[0]) == [int(best.pop().rpartition("-")[2])]
    assert len({result["parameters_digest"] for result in results}) == 1


def test_too_little_memory_means_the_foreground_and_is_said_once(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "little")

    train_beside(
        two_nodes, disks, options={"staging": "memory"}, patches=[["tests.patches:little_memory", {"bytes": 1000}]]
    )

    assert checks.checkpoints(run_directories(disks)[0]) == [2, 4, 6]
    assert two_nodes.log().count("staging='memory' needs") in range(1, 5)


def test_frozen_weights_are_not_sent_twice(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "frozen")

    results = train_beside(
        two_nodes,
        disks,
        trainer="tests.scenarios:WritesFrozenWeights",
    )

    reports = [result["inspect"]["last"] for result in results]
    assert {report["reused_bytes"] for report in reports} == {2 * (2 << 20)}
    home = run_directories(disks)[0]
    for rank in (0, 3):
        names = [home / f"checkpoint-{step}" / f"frozen-{rank}.bin" for step in (2, 4, 6)]
        assert len({path.read_bytes() for path in names}) == 1
    for step in (2, 4, 6):
        checks.assert_matches_manifest(home / f"checkpoint-{step}")


def test_a_signal_waits_for_the_save_under_way(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "signal")

    results = run_beside(
        two_nodes,
        "train_until_preempted",
        disks,
        **beside(staging="memory"),
        steps=1000,
        save_steps=100,
        callbacks=[["tests.scenarios:SignalsItself", {"plan": {"3": [[101, "SIGTERM"]]}}]],
        patches=[["tests.patches:slow_commits", {"seconds": 3.0, "step_s": 0.0}]],
    )

    assert [result["exit"] for result in results] == [128 + signal.SIGTERM] * 4
    home = run_directories(disks)[0]
    steps = checks.checkpoints(home)
    assert steps[0] == 100
    assert len(steps) == 2
    for step in steps:
        checks.assert_matches_manifest(home / f"checkpoint-{step}")
    checks.assert_only_checkpoints(home)


@pytest.mark.whole_table
def test_survivors_of_a_rank_that_is_killed_beside_training_name_it(tmp_path: Path) -> None:
    disks = Disks.create(tmp_path, "split", 2, "killed")
    with cluster_job(
        2,
        2,
        "tests.scenarios:train_and_time",
        disks=[disks],
        engine="ddp",
        output_dir=f"{disks.path}/run",
        steps=1000,
        **beside(staging="memory"),
        patches=[["tests.patches:dies_beside_training", {"dying_rank": 3}]],
    ) as job:
        job.wait(120.0, grace_s=30.0)
        results = job.results()

    for result in survivors_of_rank_3(results):
        assert "rank 3 on " in result["message"]
    assert checks.checkpoints(run_directories(disks)[0]) == []
