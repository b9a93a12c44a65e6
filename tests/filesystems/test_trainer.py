"""A real Trainer on two hosts, started by torch.distributed.run, on real shared file systems."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import Json
from tests.filesystems.conftest import Place, open_place
from tests.filesystems.hosts import environment_of_ranks

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.file_systems

PORT = 29_300
TIMEOUT_S = 900.0
LOG_TAIL_CHARACTERS = 6000
# A guest has one processor and 2.5 GB: one engine there.
ENGINES = {
    "NFS vers=4.2": ["ddp"],
    "GlusterFS": ["ddp", "zero2", "fsdp2-sharded"],
    "MooseFS": ["ddp", "zero2", "fsdp2-sharded"],
    "sshfs": ["ddp", "zero2", "fsdp2-sharded"],
}


@pytest.mark.parametrize("name", ENGINES)
def test_trains_saves_and_resumes(name: str) -> None:
    with open_place(name) as place:
        ranks = train(place, ENGINES[name])

    for rank in ranks:
        assert set(rank) == set(ENGINES[name])
        for engine, row in rank.items():
            assert row["first_step"] == 4, engine
            assert row["continued"] == {step: row["losses"][step] for step in ("5", "6")}, engine
            assert row["same_parameters"], engine
    for engine, row in ranks[0].items():
        save = row["last_save"]
        logger.info("%s, %s: %d files, %d bytes, %.2f s", name, engine, save["files"], save["bytes"], save["stall_s"])


def train(place: Place, engines: list[str]) -> list[Json]:
    """Starts a launcher on each host and waits for both; what each rank wrote."""
    per_host = place.job.ranks_per_host
    results = place.logs / "results"
    results.mkdir()
    environment = {
        **environment_of_ranks(),
        "DS_ACCELERATOR": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_EXTENSIONS_DIR": str(place.logs / "torch-extensions"),
    }
    launchers = [
        host.start(
            *(sys.executable, "-m", "torch.distributed.run", "--max-restarts", "0"),
            *("--nnodes", str(len(place.hosts)), "--node-rank", str(index), "--nproc-per-node", str(per_host)),
            *("--master-addr", place.hosts[0].address, "--master-port", str(PORT)),
            *("-m", "tests.filesystems.train", f"{place.path}/trained", str(results), *engines),
            log=place.logs / f"train-{host.name}.log",
            env=environment,
        )
        for index, host in enumerate(place.hosts)
    ]
    codes: list[int | None]
    try:
        codes = [launcher.wait(TIMEOUT_S) for launcher in launchers]
    except subprocess.TimeoutExpired:
        codes = [launcher.poll() for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert codes == [0] * len(codes), f"exit codes {codes}\n{_logs(place.logs)}"
    return [json.loads((results / f"rank{rank}.json").read_text()) for rank in range(len(place.hosts) * per_host)]


def _logs(directory: Path) -> str:
    logs = sorted(directory.glob("train-*.log"))
    return "\n".join(f"--- {log.name} ---\n{log.read_text(errors='replace')[-LOG_TAIL_CHARACTERS:]}" for log in logs)
