"""Shorthand for the tests in this folder: a training run on a cluster, and the run directories that it leaves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.cluster import Cluster, Disks, RemoteError
from tests.training import run_training

SAFE = "safe_trainer:SafeTrainer"
TIMEOUT_S = 240.0


def train(cluster: Cluster, disks: Disks, engine: str = "ddp", **options: Any) -> list[dict[str, Any]]:
    """`run_training` with SafeTrainer in ``<disks>/run``; results by rank."""
    options.setdefault("output_dir", f"{disks.path}/run")
    options.setdefault("trainer", SAFE)
    return cluster.run(run_training, engine=engine, timeout_s=TIMEOUT_S, **options)


def run_directories(disks: Disks, name: str = "run") -> list[Path]:
    """The run directory on each disk as the test process sees it, home's first."""
    return [disks.node(group[0]) / name for group in disks.groups]


def survivors_of_rank_3(results: Iterable[Any]) -> list[dict[str, Any]]:
    """What the others of four ranks gave in `tests.scenarios:train_and_time`; to each of them the group is lost."""
    survivors: list[Any] = [result for result in results if not isinstance(result, RemoteError)]
    assert len(survivors) >= 2  # rank 3's launcher ends rank 2 on its own
    for result in survivors:
        assert result["kind"] == "ProcessGroupLostError", json.dumps(result)
    return survivors
