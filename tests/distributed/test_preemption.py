"""SIGTERM to one rank, a node or all, once or again, between steps or in a save: one step, one checkpoint, and the exit
code that the launcher knows from a process that was terminated (case F5)."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests import checks
from tests.cluster import Cluster, Disks, Layout, cluster_job
from tests.distributed.runs import SAFE, TIMEOUT_S, run_directories, train

TERMINATED = 128 + signal.SIGTERM
# So many that training does not end before the ranks have agreed, about a second after the signal.
STEPS = 1000


def preempted(
    cluster: Cluster, disks: Disks, engine: str, plan: dict[str, list[list[Any]]], **options: Any
) -> list[dict[str, Any]]:
    options.setdefault("trainer", SAFE)
    return cluster.run(
        "tests.scenarios:train_until_preempted",
        engine=engine,
        output_dir=f"{disks.path}/run",
        steps=STEPS,
        save_steps=STEPS,
        callbacks=[["tests.scenarios:SignalsItself", {"plan": plan}]],
        timeout_s=TIMEOUT_S,
        **options,
    )


def assert_one_checkpoint(disks: Disks) -> int:
    """Home has one checkpoint, whole, and nothing else; its step."""
    home = run_directories(disks)[0]
    (step,) = checks.checkpoints(home)
    checks.assert_matches_manifest(home / f"checkpoint-{step}")
    for directory in run_directories(disks):
        checks.assert_only_checkpoints(directory)
    return step


ONE_RANK: dict[str, list[list[Any]]] = {"3": [[2, "SIGTERM"]]}
NODE_AFTER_NODE = {rank: [[2 if rank in "01" else 4, "SIGTERM"]] for rank in "0123"}
ALL_AND_AGAIN = {rank: [[2, "SIGTERM"], [3, "SIGTERM"], [9, "SIGTERM"]] for rank in "0123"}


@pytest.mark.parametrize(
    ("engine", "layout", "plan", "jit"),
    [
        ("ddp", "split", ONE_RANK, False),
        ("ddp", "shared", NODE_AFTER_NODE, True),
        ("zero2", "split", ALL_AND_AGAIN, False),
        pytest.param("fsdp2-sharded", "split", NODE_AFTER_NODE, False, marks=pytest.mark.whole_table),
        pytest.param("zero3", "shared", ONE_RANK, True, marks=pytest.mark.whole_table),
    ],
)
def test_all_ranks_save_one_step_and_stop(
    two_nodes: Cluster, engine: str, layout: Layout, plan: dict[str, list[list[Any]]], jit: bool
) -> None:
    disks = two_nodes.disks(layout, "preempted")

    results = preempted(two_nodes, disks, engine, plan, args={"enable_jit_checkpoint": True} if jit else {})

    assert results == [{"exit": TERMINATED, "handler_is_back": True}] * 4
    step = assert_one_checkpoint(disks)
    assert 2 <= step < STEPS
    resumed = train(two_nodes, disks, engine, steps=step + 1, save_steps=0, resume=True)
    assert {result["first_step"] for result in resumed} == {step}


def test_a_signal_during_a_save_stops_after_it(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "preempted")
    options: dict[str, Any] = {"output_dir": f"{disks.path}/run", "trainer": SAFE, "steps": STEPS, "save_steps": 2}
    patch = ["tests.patches:signal_in_the_save", {"signalled_rank": 2, "name": "SIGTERM"}]
    args = {"save_total_limit": 1}

    results = two_nodes.run(
        "tests.scenarios:train_until_preempted",
        engine="ddp",
        patches=[patch],
        args=args,
        timeout_s=TIMEOUT_S,
        **options,
    )

    assert {result["exit"] for result in results} == {TERMINATED}
    assert assert_one_checkpoint(disks) >= 2


def test_the_checkpoint_of_the_end_outlives_what_stock_deletes_at_the_end(two_nodes: Cluster) -> None:
    """With a best checkpoint and ``save_total_limit=1`` stock ends training by deleting all others."""
    disks = two_nodes.disks("split", "preempted")
    scored = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score", "greater_is_better": True}
    results = two_nodes.run(
        "tests.scenarios:train_until_preempted",
        engine="ddp",
        output_dir=f"{disks.path}/run",
        trainer="tests.scenarios:Scored",
        trainer_kwargs={"scores": {"2": 1.0}},
        steps=STEPS,
        save_steps=2,
        eval=True,
        args={**scored, "save_total_limit": 1, "load_best_model_at_end": True},
        callbacks=[["tests.scenarios:SignalsItself", {"plan": {"1": [[6, "SIGTERM"]]}}]],
        timeout_s=TIMEOUT_S,
    )

    assert {result["exit"] for result in results} == {TERMINATED}
    home = run_directories(disks)[0]
    assert checks.checkpoints(home)[0] == 2
    assert checks.checkpoints(home)[-1] >= 6
    for step in checks.checkpoints(home):
        checks.assert_matches_manifest(home / f"checkpoint-{step}")


def test_switched_off_the_signal_does_what_it_did(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("split", "preempted")
    options = {"save_on_preemption": False}

    results = train(
        two_nodes,
        disks,
        steps=4,
        trainer="tests.scenarios:with_options",
        trainer_kwargs={"options": options},
        inspect="tests.scenarios:handler_of_sigterm",
    )

    assert {result["inspect"] for result in results} == {"SIG_DFL"}


def test_a_scheduler_ends_the_launchers_of_both_nodes(tmp_path: Path) -> None:
    """The real thing: SIGTERM to the launchers of the nodes, one after the other, which pass it on to their ranks."""
    disks = Disks.create(tmp_path, "split", 2, "ended")
    with cluster_job(
        2,
        2,
        "tests.scenarios:train_and_exit",
        disks=[disks],
        engine="ddp",
        output_dir=f"{disks.path}/run",
        trainer=SAFE,
        steps=100_000,
        save_steps=100_000,
    ) as job:
        deadline = time.monotonic() + 90.0
        while not re.search(r"'loss'|\"loss\"", job.log_of(0)) and time.monotonic() < deadline:
            time.sleep(0.2)
        job.terminate_node(1)
        time.sleep(0.5)
        job.terminate_node(0)
        codes = job.wait(60.0, grace_s=40.0)
        assert job.log().count("exiting with code 143") >= 2

    assert all(code != 0 for code in codes)  # torchrun's own way to end on a signal
    assert assert_one_checkpoint(disks) > 0
