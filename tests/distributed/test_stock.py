"""The rig with the stock Trainer: what `tests.training` promises, which all comparisons in other tests stand on."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
from transformers import TrainerCallback

from tests.cluster import Cluster, Disks
from tests.conftest import Clusters
from tests.training import ENGINES, run_training

STEPS = 6
STOP = 4
# One engine of each kind; the others differ from these in what is saved, not in how it trains.
PART_OF_TABLE = ("single", "ddp", "zero2", "zero3", "fsdp2-sharded")
TABLE = [pytest.param(engine, marks=[] if engine in PART_OF_TABLE else pytest.mark.whole_table) for engine in ENGINES]


class FailAtStep(TrainerCallback):  # type: ignore[misc]
    """Ends training by an error, on every rank."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise RuntimeError("told to fail")


def live_engines() -> int:
    return sum(type(item).__name__ == "DeepSpeedEngine" for item in gc.get_objects())


def train(cluster: Cluster, engine: str, disks: Disks, **options: Any) -> list[Any]:
    return cluster.run(run_training, engine=engine, output_dir=disks.path, steps=STEPS, save_steps=STOP, **options)


def losses(results: list[dict[str, Any]], first: int, last: int) -> list[list[str]]:
    """The losses of each rank from step `first` to step `last`."""
    return [[result["losses"][str(step)] for step in range(first, last + 1)] for result in results]


@pytest.mark.parametrize("engine", TABLE)
def test_equal_runs_are_equal_and_a_resumed_one_continues_bit_for_bit(clusters: Clusters, engine: str) -> None:
    cluster = clusters.of(engine=engine, layout="shared")
    disks = cluster.disks("shared", "stock")

    whole = train(cluster, engine, cluster.disks("shared", "whole"))
    half = train(cluster, engine, disks, stop_after=STOP)
    rest = train(cluster, engine, disks, resume=True)

    assert losses(half, 1, STOP) == losses(whole, 1, STOP)
    assert losses(rest, STOP + 1, STEPS) == losses(whole, STOP + 1, STEPS)
    assert {result["parameters_digest"] for result in rest} == {whole[0]["parameters_digest"]}
    assert {result["resumed_from"] for result in rest} == {f"{disks.path}/checkpoint-{STOP}"}
    assert {result["first_step"] for result in rest} == {STOP}


def test_all_distributed_engines_train_the_same_model(two_nodes: Cluster) -> None:
    """They split the same work differently, so losses differ by rounding only."""
    engines = ("ddp", "zero1", "zero3", "fsdp2-sharded")
    runs = [train(two_nodes, engine, two_nodes.disks("shared", "stock"), stop_after=3) for engine in engines]

    reference = as_numbers(runs[0])
    assert [as_numbers(run) for run in runs[1:]] == [pytest.approx(reference, rel=1e-5)] * 3


@pytest.mark.parametrize(
    "engine",
    ["ddp", "zero3", *(pytest.param(name, marks=pytest.mark.whole_table) for name in ("zero2", "fsdp2-sharded"))],
)
def test_a_run_that_fails_leaves_nothing_to_the_next(two_nodes: Cluster, engine: str) -> None:
    disks = two_nodes.disks("shared", "stock")
    failing = ["tests.distributed.test_stock:FailAtStep", {"step": 2}]
    before = train(two_nodes, engine, disks, stop_after=2)
    processes = two_nodes.run(os.getpid)

    failed = train(two_nodes, engine, disks, raise_errors=False, callbacks=[failing])
    after = train(two_nodes, engine, disks, stop_after=2)

    assert [error.message for error in failed] == ["told to fail"] * two_nodes.world_size
    assert losses(after, 1, 2) == losses(before, 1, 2)
    assert two_nodes.run(live_engines) == [0] * two_nodes.world_size
    assert two_nodes.run(os.getpid) == processes


def test_each_rank_draws_other_random_numbers(two_nodes: Cluster) -> None:
    """Else a random state that came back to the wrong rank would not be seen."""
    runs = train(two_nodes, "ddp", two_nodes.disks("shared", "stock"), stop_after=1, inspect="tests.training:draw")

    assert len({result["inspect"] for result in runs}) == two_nodes.world_size


def test_the_best_model_is_loaded_at_the_end(two_nodes: Cluster) -> None:
    disks = two_nodes.disks("shared", "stock")
    args = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}

    results = train(two_nodes, "ddp", disks, eval=True, args=args)

    assert results[0]["best_model_checkpoint"].startswith(f"{disks.path}/checkpoint-")
    assert {result["best_metric"] for result in results} == {min(eval_losses(results[0]))}


def as_numbers(results: list[dict[str, Any]]) -> list[float]:
    return [float.fromhex(loss) for rank in losses(results, 1, 3) for loss in rank]


def eval_losses(result: dict[str, Any]) -> list[float]:
    return [entry["eval_loss"] for entry in result["log_history"] if "eval_loss" in entry]
