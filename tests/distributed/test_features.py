"""The Trainer's own options keep their meaning, on separate disks too, where stock's do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import checks
from tests.cluster import Cluster, Disks, Layout
from tests.distributed.runs import TIMEOUT_S, run_directories, train

SCORED = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score", "greater_is_better": True}


def train_scored(
    cluster: Cluster,
    disks: Disks,
    engine: str = "ddp",
    *,
    scores: dict[str, float],
    args: dict[str, Any],
    **options: Any,
) -> list[dict[str, Any]]:
    """Train with an evaluation that gives step N the score ``scores["N"]``, else 0."""
    return train(
        cluster,
        disks,
        engine,
        eval=True,
        trainer="tests.scenarios:Scored",
        trainer_kwargs={"scores": scores},
        args={**SCORED, **args},
        **options,
    )


@pytest.mark.parametrize(("limit", "left"), [(1, [6]), (2, [4, 6])])
def test_save_total_limit_holds_on_every_disk(two_nodes: Cluster, limit: int, left: list[int]) -> None:
    disks = two_nodes.disks("split", "limit")

    train(two_nodes, disks, args={"save_total_limit": limit})

    for directory in run_directories(disks):
        assert checks.checkpoints(directory) == left
        checks.assert_only_checkpoints(directory)


@pytest.mark.parametrize("engine", ["ddp", "zero3", "zero2-lora", "fsdp2-sharded"])
def test_best_model_is_loaded_on_every_rank(two_nodes: Cluster, engine: str) -> None:
    """L5: stock warns on node 1 and ends with replicas that differ."""
    disks = two_nodes.disks("split", "best")
    args = {"load_best_model_at_end": True, "save_total_limit": 2}

    results = train_scored(two_nodes, disks, engine, scores={"2": 1.0}, args=args)

    reference = train(two_nodes, two_nodes.disks("split", "reference"), engine, stop_after=2)
    assert {result["best_model_checkpoint"] for result in results} == {f"{disks.path}/run/checkpoint-2"}
    assert {result["parameters_digest"] for result in results} == {reference[0]["parameters_digest"]}
    for directory in run_directories(disks):
        assert checks.checkpoints(directory) == [2, 6]
        checks.assert_only_checkpoints(directory)


def test_limit_of_one_leaves_only_the_best_at_the_end_on_every_disk(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "best")

    args = {"load_best_model_at_end": True, "save_total_limit": 1}

    train_scored(two_nodes, disks, scores={"2": 1.0}, args=args)

    for directory in run_directories(disks):
        assert checks.checkpoints(directory) == [2]
        checks.assert_only_checkpoints(directory)


@pytest.mark.parametrize("layout", ["shared", "split"])
def test_save_strategy_best_saves_only_improvements(two_nodes: Cluster, layout: Layout) -> None:
    disks = two_nodes.disks(layout, "best")
    args = {"eval_steps": 1, "save_strategy": "best"}

    results = train_scored(two_nodes, disks, scores={"1": 0.1, "3": 0.3, "4": 0.2}, args=args)

    home = run_directories(disks)[0]
    assert checks.checkpoints(home) == [1, 3]
    assert {result["best_model_checkpoint"] for result in results} == {f"{disks.path}/run/checkpoint-3"}
    for step in (1, 3):
        checks.assert_matches_manifest(home / f"checkpoint-{step}")
    state = json.loads((home / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == f"{disks.path}/run/checkpoint-3"


def test_best_names_only_committed_checkpoints(two_nodes: Cluster) -> None:
    """U7: the best step is evaluated but not saved."""
    disks = two_nodes.disks("split", "best")

    results = train_scored(two_nodes, disks, scores={"2": 1.0}, args={"eval_steps": 1, "save_steps": 3})

    assert checks.checkpoints(run_directories(disks)[0]) == [3, 6]
    assert {result["best_model_checkpoint"] for result in results} == {None}


def test_save_only_model_leaves_out_the_training_state(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "model")

    train(two_nodes, disks, args={"save_only_model": True})

    home, other = run_directories(disks)
    files = checks.files_below(home / "checkpoint-6")
    assert "model.safetensors" in files
    assert not any(name.startswith(("optimizer", "scheduler", "rng_state")) for name in files)
    checks.assert_matches_manifest(home / "checkpoint-6")
    assert checks.checkpoints(other) == []  # node 1 wrote nothing


@pytest.mark.parametrize("engine", ["ddp", "zero2"])
@pytest.mark.parametrize("layout", ["shared", "split"])
def test_save_on_each_node_changes_nothing_on_home(two_nodes: Cluster, layout: Layout, engine: str) -> None:
    """S2 and L7: whether disks are shared is looked at, not inferred from this flag."""
    homes = []
    for flag in (False, True):
        disks = two_nodes.disks(layout, f"flag-{flag}")
        train(two_nodes, disks, engine, steps=4, stop_after=2, args={"save_on_each_node": flag})
        resumed = train(two_nodes, disks, engine, steps=4, resume=True, args={"save_on_each_node": flag})
        assert {result["first_step"] for result in resumed} == {2}
        homes.append(run_directories(disks)[0])

    without, with_flag = (home / "checkpoint-4" for home in homes)
    assert checks.files_below(with_flag) == checks.files_below(without)
    checks.assert_same_content(with_flag, without, paths=checks.files_below(without) - {checks.MANIFEST})
    checks.assert_matches_manifest(with_flag)


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("layout", ["shared", "split"])
def test_step_is_saved_twice_as_step_and_as_epoch(two_nodes: Cluster, layout: Layout, exchange: bool) -> None:
    disks = two_nodes.disks(layout, "twice")
    patches = [] if exchange else ["tests.patches:no_exchange"]

    results = train(
        two_nodes,
        disks,
        steps=12,
        save_steps=100,
        callbacks=["tests.scenarios:SavesTwice"],
        inspect="tests.scenarios:last_save",
        patches=patches,
    )

    for directory in run_directories(disks):
        assert checks.checkpoints(directory) == [12]
        checks.assert_only_checkpoints(directory)
    checks.assert_matches_manifest(run_directories(disks)[0] / "checkpoint-12")
    assert results[0]["inspect"]["step"] == 12


def test_saving_with_fewer_ranks_leaves_nothing_of_the_former_save(two_nodes: Cluster, three_nodes: Cluster) -> None:
    """N5: four ranks save step 2, then three ranks save step 2."""
    before, after = two_nodes.disks("shared", "four"), three_nodes.disks("shared", "three")
    train(two_nodes, before, stop_after=2)
    shutil.copytree(before.node(0), after.node(0), dirs_exist_ok=True)

    train(three_nodes, after, stop_after=2)

    checkpoint = run_directories(after)[0] / "checkpoint-2"
    names = {path for path in checks.files_below(checkpoint) if path.startswith("rng_state")}
    assert names == {f"rng_state_{rank}.pth" for rank in range(3)}
    checks.assert_matches_manifest(checkpoint)


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint", "all_checkpoints"])
def test_push_reads_the_committed_checkpoint_and_nothing_of_ours(two_nodes: Cluster, strategy: str) -> None:
    """F8: the upload runs in a thread, later."""
    disks = two_nodes.disks("split", "push")
    args = {"push_to_hub": True, "hub_strategy": strategy, "hub_always_push": True}

    results = train(
        two_nodes, disks, stop_after=4, args=args, patches=["tests.patches:hub_stub"], inspect="tests.patches:uploads"
    )

    uploads = results[0]["inspect"]
    run_directory = f"{disks.path}/run"
    folders = {upload["folder"] for upload in uploads}
    expected = {run_directory}
    if strategy != "every_save":
        expected |= {f"{run_directory}/checkpoint-2", f"{run_directory}/checkpoint-4"}
    assert folders == expected
    for upload in uploads:
        if upload["folder"] == run_directory:
            assert "_*" in upload["ignore"]  # and everything of ours is below _safe_trainer/
        else:
            home = run_directories(disks)[0] / Path(upload["folder"]).name
            assert set(upload["files"]) == checks.files_below(home)
    assert [result["inspect"] for result in results[1:]] == [[], [], []]


@pytest.mark.parametrize("layout", ["shared", "split"])
def test_each_trial_has_a_run_directory_of_its_own(two_nodes: Cluster, layout: Layout) -> None:
    disks = two_nodes.disks(layout, "trials")

    two_nodes.run("tests.scenarios:search_hyperparameters", output_dir=f"{disks.path}/run", timeout_s=TIMEOUT_S)

    home = run_directories(disks)[0]
    for trial in ("run-0", "run-1"):
        assert checks.checkpoints(home / trial) == [2, 4]
        checks.assert_matches_manifest(home / trial / "checkpoint-4")
        for directory in run_directories(disks):
            checks.assert_only_checkpoints(directory / trial)


def test_last_save_says_what_was_done(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "report")

    results = train(two_nodes, disks, "zero2", inspect="tests.scenarios:last_save")

    home, other = (directory / "checkpoint-6" for directory in run_directories(disks))
    report: dict[str, Any] = results[0]["inspect"]
    manifest = checks.manifest_of(home)
    written_elsewhere = sum(entry["size"] for entry in checks.manifest_of(other)["files"])
    assert report["step"] == 6
    assert report["path"] == f"{disks.path}/run/checkpoint-6"
    assert report["files"] == len(manifest["files"])
    assert report["bytes"] == sum(entry["size"] for entry in manifest["files"])
    assert report["gathered_bytes"] == written_elsewhere
    assert report["phases"] == ["prepare", "write", "list", "compare", "gather", "commit", "rotate"]
    assert 0 < report["sum_s"] <= report["stall_s"]


@pytest.mark.parametrize("copies", ["keep", "full", "drop"])
def test_local_copies_are_as_the_option_says(two_nodes: Cluster, copies: str) -> None:
    disks = two_nodes.disks("split", "copies")

    train(
        two_nodes,
        disks,
        "zero2",
        trainer="tests.scenarios:with_options",
        trainer_kwargs={"options": {"local_copies": copies}},
    )

    home, other = run_directories(disks)
    checks.assert_matches_manifest(home / "checkpoint-6")
    if copies == "keep":
        checks.assert_matches_manifest(other / "checkpoint-6", scope="part")
        assert "rng_state_3.pth" in checks.files_below(other / "checkpoint-6")
        assert "rng_state_0.pth" not in checks.files_below(other / "checkpoint-6")
    elif copies == "full":
        checks.assert_matches_manifest(other / "checkpoint-6")
        assert checks.manifest_of(other / "checkpoint-6") == checks.manifest_of(home / "checkpoint-6")
    else:
        assert checks.checkpoints(other) == []
    checks.assert_only_checkpoints(other)


@pytest.mark.parametrize(("disable_tqdm", "step"), [(False, 2), (True, 3)])
def test_a_long_gather_shows_a_bar_unless_tqdm_is_disabled(two_nodes: Cluster, disable_tqdm: bool, step: int) -> None:
    disks = two_nodes.disks("split", f"bar-{disable_tqdm}")

    train(
        two_nodes,
        disks,
        stop_after=step,
        save_steps=step,
        args={"disable_tqdm": disable_tqdm},
        patches=["tests.patches:every_gather_is_long"],
    )

    # The log is of all tests so far; this one's saves have names of their own.
    assert (f"gather checkpoint-{step}:" in two_nodes.log()) is not disable_tqdm
    assert f"saved step {step} to {disks.path}" in two_nodes.log()
