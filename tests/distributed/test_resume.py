"""Which checkpoint a resumed run takes, on every rank, and what it says of the others (cases U, R, L)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import checks
from tests.cluster import Cluster, Disks, ScenarioError
from tests.distributed.runs import run_directories, train
from tests.distributed.test_features import train_scored


def first_steps(results: list[dict[str, Any]]) -> set[int]:
    return {result["first_step"] for result in results}


# --- damage ---


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def remove(path: Path) -> None:
    path.unlink()


DAMAGES = [
    (truncate, "model.safetensors"),
    (flip_a_byte, "optimizer.pt"),
    (remove, "scheduler.pt"),  # U3: stock starts the scheduler afresh without a word
    (truncate, "trainer_state.json"),
    (flip_a_byte, "rng_state_3.pth"),
    (truncate, checks.MANIFEST),
]


@pytest.mark.parametrize(("damage", "name"), DAMAGES)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before_it(
    two_nodes: Cluster, damage: Callable[[Path], None], name: str
) -> None:
    """U1, U2, U3, on disks of which only home's has the whole."""
    disks = saved_up_to_step_4(two_nodes)
    damage(run_directories(disks)[0] / "checkpoint-4" / name)

    results = train(two_nodes, disks, resume=True, stop_after=3)

    assert first_steps(results) == {2}
    assert f"Not resuming from {disks.path}/run/checkpoint-4" in two_nodes.log()


def saved_up_to_step_4(cluster: Cluster, engine: str = "ddp", layout: str = "split") -> Disks:
    disks = cluster.disks(layout, "damaged")  # type: ignore[arg-type]
    train(cluster, disks, engine, stop_after=4)
    return disks


def test_an_explicit_path_to_a_damaged_checkpoint_is_an_error_that_lists_what_is_wrong(two_nodes: Cluster) -> None:
    disks = saved_up_to_step_4(two_nodes)
    home = run_directories(disks)[0]
    remove(home / "checkpoint-4" / "optimizer.pt")
    truncate(home / "checkpoint-4" / "model.safetensors")

    with pytest.raises(ScenarioError) as caught:
        train(two_nodes, disks, resume=f"{disks.path}/run/checkpoint-4")

    assert len(caught.value.errors) == 4
    for error in caught.value.errors.values():
        assert error.is_a("safe_trainer.errors.IncompleteCheckpointError")
        assert "optimizer.pt is missing" in error.message
        assert "model.safetensors has" in error.message


def test_a_damaged_stock_checkpoint_is_skipped_too(two_nodes: Cluster) -> None:
    """U8, judged by structure."""
    disks = two_nodes.disks("shared", "damaged")
    train(two_nodes, disks, "zero2", trainer="transformers:Trainer", stop_after=4)
    remove(run_directories(disks)[0] / "checkpoint-4/global_step4/zero_pp_rank_3_mp_rank_00_optim_states.pt")

    results = train(two_nodes, disks, "zero2", resume=True, stop_after=3)

    assert first_steps(results) == {2}


# --- what there is to resume from ---


@pytest.mark.parametrize("layout", ["shared", "split"])
def test_nothing_to_resume_from_is_stock_s_error_with_true_and_a_fresh_start_with_auto(
    two_nodes: Cluster, layout: str
) -> None:
    disks = two_nodes.disks(layout, "nothing")  # type: ignore[arg-type]

    with pytest.raises(ScenarioError) as caught:
        train(two_nodes, disks, resume=True)
    results = train(two_nodes, disks, resume="auto", stop_after=1)

    for error in caught.value.errors.values():
        assert error.is_a("ValueError")
        assert "No valid checkpoint found in output directory" in error.message
    assert first_steps(results) == {0}


def test_auto_resumes_where_there_is_something(two_nodes: Cluster) -> None:
    disks = saved_up_to_step_4(two_nodes)

    assert first_steps(train(two_nodes, disks, resume="auto", stop_after=5)) == {4}


def test_home_decides_although_another_disk_has_a_later_step(two_nodes: Cluster) -> None:
    """L4."""
    disks, other = two_nodes.disks("split", "home"), two_nodes.disks("shared", "other")
    train(two_nodes, disks, stop_after=4)
    train(two_nodes, other, stop_after=6)
    shutil.copytree(other.node(0) / "run/checkpoint-6", disks.node(1) / "run/checkpoint-6")

    assert first_steps(train(two_nodes, disks, resume=True, stop_after=5)) == {4}


def test_full_local_copies_survive_the_loss_of_home_s_disk(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "lost")
    options = {"trainer": "tests.scenarios:with_options", "trainer_kwargs": {"options": {"local_copies": "full"}}}
    train(two_nodes, disks, "zero2", stop_after=4, **options)
    disks.wipe(0)

    results = train(two_nodes, disks, "zero2", resume=True, **options)

    assert first_steps(results) == {4}
    for directory in run_directories(disks):
        checks.assert_matches_manifest(directory / "checkpoint-4")
        checks.assert_matches_manifest(directory / "checkpoint-6")


def test_a_rank_that_sees_nothing_does_what_home_says(two_nodes: Cluster) -> None:
    """U5: else it would not enter the load that the others wait in."""
    disks = two_nodes.disks("shared", "blind")
    train(two_nodes, disks, stop_after=4)

    results = train(
        two_nodes, disks, resume=True, stop_after=5, patches=[["tests.patches:sees_nothing", {"blind_rank": 2}]]
    )

    assert first_steps(results) == {4}


def test_an_explicit_path_outside_the_run_directory_is_delivered_to_every_node(two_nodes: Cluster) -> None:
    disks = saved_up_to_step_4(two_nodes, "zero2")
    results = train(
        two_nodes,
        disks,
        "zero2",
        output_dir=f"{disks.path}/other",
        resume=f"{disks.path}/run/checkpoint-2",
        stop_after=4,
    )

    assert first_steps(results) == {2}
    for directory in run_directories(disks, "other"):
        checks.assert_only_checkpoints(directory)
    assert checks.checkpoints(run_directories(disks)[1]) == [2, 4]


# --- another number of ranks ---


def moved_to(cluster: Cluster, source: Disks) -> Disks:
    """The run directory of a shared disk on another cluster's shared disk."""
    target = cluster.disks("shared", "moved")
    shutil.copytree(source.node(0), target.node(0), dirs_exist_ok=True)
    return target


def test_ddp_resumes_with_fewer_ranks(two_nodes: Cluster, three_nodes: Cluster) -> None:
    source = saved_up_to_step_4(two_nodes, "ddp", "shared")

    assert first_steps(train(three_nodes, moved_to(three_nodes, source), resume=True, stop_after=5)) == {4}


def test_ddp_resumes_with_more_ranks_and_says_once_who_has_no_rng_state(
    two_nodes: Cluster, three_nodes: Cluster
) -> None:
    """U4."""
    source = saved_up_to_step_4(three_nodes, "ddp", "shared")

    results = train(two_nodes, moved_to(two_nodes, source), resume=True, stop_after=5)

    assert first_steps(results) == {4}
    assert two_nodes.log().count("has no RNG state for rank 3") == 1


@pytest.mark.parametrize("trainer", ["safe_trainer:SafeTrainer", "transformers:Trainer"])
def test_zero_shards_of_another_world_size_are_refused_alike_on_all_ranks(
    two_nodes: Cluster, three_nodes: Cluster, trainer: str
) -> None:
    """U6, for our checkpoints and for stock's."""
    source = two_nodes.disks("shared", "source")
    train(two_nodes, source, "zero2", trainer=trainer, stop_after=2)

    with pytest.raises(ScenarioError) as caught:
        train(three_nodes, moved_to(three_nodes, source), "zero2", resume=True)

    assert len({error.message for error in caught.value.errors.values()}) == 1
    assert len(caught.value.errors) == 3
    for error in caught.value.errors.values():
        assert error.is_a("safe_trainer.errors.CheckpointError")
        assert "ZeRO shards of 4 ranks and cannot be loaded by 3" in error.message
        assert "ds_to_universal.py" in error.message


# --- the best checkpoint ---


def test_the_best_checkpoint_is_found_after_the_run_directory_was_moved(two_nodes: Cluster) -> None:
    """R6."""
    disks = two_nodes.disks("split", "best")
    args = {"load_best_model_at_end": True}
    train_scored(two_nodes, disks, scores={"2": 1.0}, args=args, stop_after=4)
    for directory in run_directories(disks):
        directory.rename(directory.with_name("moved"))

    results = train_scored(
        two_nodes, disks, scores={"2": 1.0}, args=args, resume=True, output_dir=f"{disks.path}/moved"
    )

    reference = train(two_nodes, two_nodes.disks("split", "reference"), stop_after=2)
    assert {result["best_model_checkpoint"] for result in results} == {f"{disks.path}/moved/checkpoint-2"}
    assert {result["parameters_digest"] for result in results} == {reference[0]["parameters_digest"]}


def test_a_best_checkpoint_that_is_gone_is_cleared_with_a_warning_at_the_start(two_nodes: Cluster) -> None:
    """R6: stock 4.x fails at the end of the run."""
    disks = two_nodes.disks("split", "best")
    args = {"load_best_model_at_end": True}
    train_scored(two_nodes, disks, scores={"2": 1.0}, args=args, stop_after=4)
    for directory in run_directories(disks):
        shutil.rmtree(directory / "checkpoint-2")

    results = train_scored(two_nodes, disks, scores={"2": 1.0}, args=args, resume=True)

    assert {result["best_model_checkpoint"] for result in results} == {None}
    assert "The run goes on without a best one" in two_nodes.log()


# --- stock and its tools ---


@pytest.mark.parametrize("engine", ["ddp", "zero2", "zero3-lora", "fsdp2-sharded"])
def test_stock_resumes_from_ours_and_we_from_stock(two_nodes: Cluster, engine: str) -> None:
    whole = train(two_nodes, two_nodes.disks("shared", "whole"), engine)
    expected = [{step: result["losses"][step] for step in ("5", "6")} for result in whole]
    trainers = ("safe_trainer:SafeTrainer", "transformers:Trainer")

    for first, second in (trainers, trainers[::-1]):
        disks = two_nodes.disks("shared", "handed-over")
        train(two_nodes, disks, engine, trainer=first, stop_after=4)
        results = train(two_nodes, disks, engine, trainer=second, resume=True)

        assert [result["losses"] for result in results] == expected, f"{first} to {second}"


@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_zero_to_fp32_in_the_committed_directory_gives_the_trained_weights(two_nodes: Cluster, engine: str) -> None:
    disks = two_nodes.disks("split", "merge")
    train(two_nodes, disks, engine, stop_after=4)

    merged = two_nodes.run(
        "tests.scenarios:merge_with_zero_to_fp32", checkpoint=f"{disks.path}/run/checkpoint-4", timeout_s=200
    )

    reference = train(two_nodes, two_nodes.disks("split", "reference"), engine, stop_after=4)
    assert merged[0] == reference[0]["parameters_digest"]


@pytest.mark.parametrize("engine", ["zero2-lora", "zero3-lora"])
def test_peft_reads_the_adapter(two_nodes: Cluster, engine: str) -> None:
    disks = two_nodes.disks("split", "adapter")
    results = train(two_nodes, disks, engine, stop_after=4)

    digests = two_nodes.run(
        "tests.scenarios:adapter_digest", checkpoint=f"{disks.path}/run/checkpoint-4", timeout_s=100
    )

    assert digests[0] == results[0]["parameters_digest"]


def test_single_process_resumes_from_its_own_checkpoint(one_process: Cluster) -> None:
    disks = one_process.disks("shared", "single")
    train(one_process, disks, "single", stop_after=4)

    results = train(one_process, disks, "single", resume=True)

    state = json.loads((run_directories(disks)[0] / "checkpoint-6/trainer_state.json").read_text())
    assert first_steps(results) == {4}
    assert state["global_step"] == 6
