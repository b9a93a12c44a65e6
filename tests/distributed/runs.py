"""Shorthand for the tests in this folder: a training run on a cluster, and the run directories that it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cluster import Cluster, Disks
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
