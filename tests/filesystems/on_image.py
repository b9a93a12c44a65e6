"""Runs a command for which /dev/shm is a fresh ext4, xfs or btrfs: where `tests.cluster` keeps its disks.

    python -m tests.filesystems.on_image xfs python -m pytest tests/distributed/test_engines.py --all

Nobody else sees it: the command has mounts of its own. It fails, too, if hardly anything was written to the image,
since then the command has kept its disks elsewhere.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.filesystems.images import KINDS, Image
from tests.unit.mounts import leave_mount_namespace

SHARED_MEMORY = Path("/dev/shm")
SIZE_BYTES = 6 << 30  # sparse
LEAST_WRITTEN_BYTES = 1 << 20
SECTOR_BYTES = 512


def main() -> int:
    """Gives the command's exit code."""
    kind, *command = sys.argv[1:]
    if kind not in KINDS or not command:
        sys.stderr.write(f"usage: on_image {'|'.join(KINDS)} COMMAND...\n")
        return 2
    leave_mount_namespace()
    # The image file is in the memory that it hides. The kernel has it open.
    with Image(kind, SHARED_MEMORY, size_bytes=SIZE_BYTES, mount=SHARED_MEMORY) as image:
        before = _written_bytes(image.mount)
        code = subprocess.run(command, check=False).returncode
        written = _written_bytes(image.mount) - before
    sys.stderr.write(f"{written / 1e6:.0f} MB were written to {kind}\n")
    return code or (0 if written >= LEAST_WRITTEN_BYTES else 1)


def _written_bytes(mount: Path) -> int:
    """How much has gone to the disk that is mounted there."""
    # The last one hides the others.
    *_, device = (part.device for part in psutil.disk_partitions(all=True) if part.mountpoint == str(mount))
    sectors = Path("/sys/block", Path(device).name, "stat").read_text().split()[6]
    return int(sectors) * SECTOR_BYTES


if __name__ == "__main__":
    sys.exit(main())
