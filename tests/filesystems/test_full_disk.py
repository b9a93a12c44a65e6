"""A full disk: the save fails on all ranks and gives the space back.

On a disk without a free block not even a directory can be made (tmpfs does not show that). On a full NFS, safetensors'
`save_file` returns without an error and leaves zeros.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from pathlib import Path

import pytest

from safe_trainer.channel import Channel
from safe_trainer.errors import CheckpointError
from safe_trainer.options import CheckpointOptions
from safe_trainer.resume import resume_latest
from safe_trainer.rotation import Rotation
from safe_trainer.run import Run, open_run
from safe_trainer.save import save_checkpoint
from tests import checks
from tests.filesystems import guests, hosts, images, scenarios
from tests.filesystems.guests import NFS
from tests.filesystems.hosts import Hosts
from tests.filesystems.images import Image
from tests.filesystems.job import Job
from tests.unit.builders import write_files

logger = logging.getLogger(__name__)

NFS_DISK_BYTES = 64 << 20
MEGABYTES = 96
BLOCK_BYTES = 4096
MOST_DIRECTORIES = 1000  # btrfs has room for tens of thousands after the last byte of a file


@pytest.mark.parametrize("kind", images.KINDS)
def test_a_disk_that_a_save_has_filled_is_not_full_afterwards(kind: images.Kind, tmp_path: Path) -> None:
    if (reason := images.why_not(kind)) is not None:
        pytest.skip(reason)
    with Image(kind, tmp_path) as disk:
        run = _open(disk)
        _save(run, 10)
        with pytest.raises(CheckpointError, match=r"ENOSPC.*bytes free"):
            save_checkpoint(run, step=20, write=_fill, rotation=lambda: Rotation())
        _save(run, 30)

        with pytest.raises(CheckpointError, match=r"ENOSPC.*bytes free"):
            save_checkpoint(run, step=40, write=_fill, rotation=lambda: Rotation())
        found = resume_latest(_open(disk))

        assert found is not None
        assert found.step == 30
        assert checks.checkpoints(run.root) == [10, 30]
        for step in (10, 30):
            checks.assert_matches_manifest(run.root / f"checkpoint-{step}")
        checks.assert_only_checkpoints(run.root)


def _open(disk: Image) -> Run:
    channel = Channel.open(timeout_s=20.0)
    return open_run(disk.mount / "run", channel=channel, options=CheckpointOptions(), saved_by={})


def _save(run: Run, step: int) -> None:
    files = {"model": bytes(100_000), "trainer_state.json": b"{}"}
    save_checkpoint(run, step=step, write=lambda staged: write_files(staged, files), rotation=lambda: Rotation())


def _fill(staged: Path) -> None:
    """Writes until there is no block left, neither for bytes nor for directories."""
    with contextlib.suppress(OSError), open(staged / "model", "wb", buffering=0) as stream:
        while True:
            stream.write(bytes(BLOCK_BYTES))
    with contextlib.suppress(OSError):
        for number in range(MOST_DIRECTORIES):
            (staged / str(number)).mkdir()
    raise OSError(errno.ENOSPC, "the disk is full", str(staged))


@pytest.mark.file_systems
@pytest.mark.parametrize("options", ["vers=4.2", "vers=3"])
def test_a_save_to_a_full_nfs_fails_on_all_ranks(options: str) -> None:
    if (reason := hosts.why_not() or guests.why_not()) is not None:
        pytest.skip(reason)
    with (
        Hosts() as machines,
        NFS(options, server_disk_bytes=NFS_DISK_BYTES).mounted(machines) as (clients, path),
        Job(clients, machines.directory, ranks_per_host=1) as job,
    ):
        root = f"{path}/run"
        results = job.run(scenarios.save_too_much, root=root, megabytes=MEGABYTES)
        seen = results[0]
        logger.info("%s: save_file returned: %s; %s zeros; %s", options, seen["returned"], seen["zeros"], seen["error"])
        assert len({result["error"] for result in results}) == 1
        for text in ("ENOSPC", "model.safetensors", "free"):
            assert text in str(seen["error"])
        resumed = job.run(scenarios.resume, root=root)
    assert [(result["step"], result["number"]) for result in resumed] == [(10, 10)] * 2
