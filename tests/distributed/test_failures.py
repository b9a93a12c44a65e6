"""A save that fails, is slow or loses a rank, with real engines: one error everywhere within seconds, or none."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests import checks
from tests.cluster import Cluster, Disks, ScenarioError, cluster_job
from tests.distributed.runs import SAFE, TIMEOUT_S, run_directories, survivors_of_rank_3, train

WITHIN_S = 10.0


@pytest.mark.parametrize(
    "engine",
    [
        "zero2",
        "fsdp2-sharded",
        pytest.param("zero3", marks=pytest.mark.whole_table),
        pytest.param("zero1", marks=pytest.mark.whole_table),
    ],
)
def test_a_failure_inside_the_engines_collectives_is_everyones_within_seconds(
    two_nodes: Cluster, tmp_path: Path, engine: str
) -> None:
    """F2: the others stand in the engine's own barrier, which the failed rank never reaches."""
    disks = two_nodes.disks("split", "failing")
    note = tmp_path / "failed-at"

    results = two_nodes.run(
        "tests.scenarios:train_and_time",
        engine=engine,
        output_dir=f"{disks.path}/run",
        trainer=SAFE,
        patches=[["tests.patches:fails_inside_the_engine", {"failing_rank": 3, "notes": str(note)}]],
        timeout_s=TIMEOUT_S,
    )
    two_nodes.stop()  # its process group is lost, as it would be for a user

    (message,) = {result["message"] for result in results}
    assert message.startswith("rank 3 on ")
    assert "No space left on device" in message.split(";")[0]
    assert {result["failures"][0] for result in results} == {3}
    failed_at = float(note.read_text())
    assert max(result["raised_at"] for result in results) - failed_at < WITHIN_S
    for directory in run_directories(disks):
        assert checks.checkpoints(directory) == []


@pytest.mark.parametrize(
    ("engine", "in_engine", "sleep_s", "timeout_s"),
    [
        ("ddp", False, 6.0, 3.0),
        ("zero2", True, 6.0, 3.0),
        pytest.param("ddp", False, 60.0, 20.0, marks=pytest.mark.whole_table),
        pytest.param("zero2", True, 60.0, 20.0, marks=pytest.mark.whole_table),
    ],
)
def test_a_slow_rank_is_waited_for_longer_than_the_back_end_would(
    two_nodes: Cluster, engine: str, in_engine: bool, sleep_s: float, timeout_s: float
) -> None:
    """F1."""
    disks = two_nodes.disks("split", "slow")
    patch = {"slow_rank": 3, "sleep_s": sleep_s, "timeout_s": timeout_s, "in_engine": in_engine}

    train(
        two_nodes,
        disks,
        engine,
        steps=2,
        patches=[["tests.patches:slower_than_the_back_end_allows", patch]],
    )

    assert checks.checkpoints(run_directories(disks)[0]) == [2]
    checks.assert_matches_manifest(run_directories(disks)[0] / "checkpoint-2")
    if sleep_s > 40.0:
        assert "Late: rank 3 on " in two_nodes.log()


def test_with_continue_training_goes_on_and_the_next_save_is_made(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "continue")

    results = train(
        two_nodes,
        disks,
        trainer="tests.scenarios:with_options",
        trainer_kwargs={
            "trainer": "tests.scenarios:FailsOnRank",
            "options": {"on_error": "continue"},
            "failing_rank": 3,
            "failing_step": 4,
        },
        callbacks=["tests.scenarios:ListsCheckpointOnSave"],
        inspect="tests.scenarios:failures",
    )

    assert checks.checkpoints(run_directories(disks)[0]) == [2, 6]
    for result in results:
        assert result["inspect"]["count"] == 1
        assert result["inspect"]["logged"] == [1.0]
        assert list(result["inspect"]["seen"]) == ["2", "6"]  # on_save only where there is a checkpoint
    for directory in run_directories(disks):
        checks.assert_only_checkpoints(directory)
    log = two_nodes.log()
    assert "The checkpoint of step 4 was NOT saved" in log
    reference = train(two_nodes, two_nodes.disks("split", "reference"))
    assert results[0]["losses"] == reference[0]["losses"]


def test_a_failed_save_does_not_stay_the_best(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "best")
    scored = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score", "greater_is_better": True}

    results = train(
        two_nodes,
        disks,
        eval=True,
        trainer="tests.scenarios:with_options",
        trainer_kwargs={
            "trainer": "tests.scenarios:ScoredAndFails",
            "options": {"on_error": "continue"},
            "scores": {"2": 0.1, "4": 0.9, "6": 0.5},
            "failing_rank": 3,
            "failing_step": 4,
        },
        args={**scored, "load_best_model_at_end": True},
    )

    assert {result["best_model_checkpoint"] for result in results} == {f"{disks.path}/run/checkpoint-6"}
    assert {result["best_metric"] for result in results} == {0.5}


@pytest.mark.parametrize(
    ("engine", "least_share"),
    [
        ("ddp", 0.25),
        ("fsdp2-sharded", 0.25),
        pytest.param("zero2", 0.25, marks=pytest.mark.whole_table),
        pytest.param("zero3", 0.25, marks=pytest.mark.whole_table),
        pytest.param("fsdp2-full", 0.25, marks=pytest.mark.whole_table),
        pytest.param("zero2-lora", 0.01, marks=pytest.mark.whole_table),  # next to a tiny adapter, RNG states are much
    ],
)
def test_what_a_first_save_is_expected_to_need_is_close_and_never_too_much(
    two_nodes: Cluster, engine: str, least_share: float
) -> None:
    """Too high a number would refuse a save for which there is room."""
    results = train(
        two_nodes,
        two_nodes.disks("split", "expected"),
        engine,
        steps=2,
        trainer="tests.scenarios:ExpectsBytes",
        callbacks=["tests.scenarios:NotesExpectedBytes"],
        inspect="tests.scenarios:expected_and_saved",
    )

    expected = sum(result["inspect"][0] for result in results)
    saved = sum(result["inspect"][1] for result in results)
    assert least_share * saved < expected <= saved


def test_too_little_room_for_a_first_save_is_an_error_before_anything_is_written(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "small")

    with pytest.raises(ScenarioError) as caught:
        train(two_nodes, disks, "zero2", patches=[["tests.patches:little_room", {"small_rank": 2, "free": 1000}]])

    for error in caught.value.errors.values():
        assert error.is_a("InsufficientSpaceError")
        assert "on the disk of rank 2, where 1000 are free" in error.message
    for directory in run_directories(disks):
        checks.assert_only_checkpoints(directory)
        assert checks.checkpoints(directory) == []


def test_an_engine_that_writes_after_the_save_has_returned_is_refused_at_the_start(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "decoupled")

    with pytest.raises(ScenarioError) as caught:
        train(two_nodes, disks, "zero2", patches=["tests.patches:decoupled_writer"])

    assert {error.type for error in caught.value.errors.values()} == {"safe_trainer.errors.OptionError"}
    assert all("checkpoint.writer.decoupled" in error.message for error in caught.value.errors.values())


def test_survivors_of_a_killed_rank_name_it(tmp_path: Path) -> None:
    disks = Disks.create(tmp_path, "split", 2, "killed")
    started = time.monotonic()
    with cluster_job(
        2,
        2,
        "tests.scenarios:train_and_time",
        disks=[disks],
        engine="ddp",
        output_dir=f"{disks.path}/run",
        trainer=SAFE,
        patches=[["tests.patches:dies_in_the_save", {"dying_rank": 3}]],
    ) as job:
        job.wait(120.0, grace_s=30.0)
        results = job.results()

    assert time.monotonic() - started < 100.0
    for result in survivors_of_rank_3(results):
        assert "no sign of life from rank 3 on " in result["message"]
    assert checks.checkpoints(run_directories(disks)[0]) == []
