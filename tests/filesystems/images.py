"""File systems of the machine's own kernel, each in an image file: ext4, xfs, btrfs.

    with Image("ext4", directory) as disk:
        ...                                # use disk.mount
        copy = disk.cut_power()            # what had reached the disk at this moment
    with copy.mounted(directory / "after") as root:
        ...                                # what is there when the machine is up again

The image is copied while it is mounted. What the kernel still holds in memory is not in the copy, as it would not be
on a disk whose machine loses power; the file system's own recovery runs when the copy is mounted.

Not the same as a power cut: the disk's own write cache is not simulated, so a barrier that the kernel forgot would not
be noticed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, get_args

Kind = Literal["ext4", "xfs", "btrfs"]
KINDS: tuple[Kind, ...] = get_args(Kind)

MIB = 1 << 20
COMMAND_TIMEOUT_S = 60.0
# The smallest that each tool agrees to make. The files are sparse, so a large one costs nothing.
_SMALLEST_BYTES: dict[Kind, int] = {"ext4": 64 * MIB, "xfs": 320 * MIB, "btrfs": 128 * MIB}
_MAKE: dict[Kind, tuple[str, ...]] = {
    "ext4": ("mkfs.ext4", "-q", "-F"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
    "btrfs": ("mkfs.btrfs", "-q", "-f"),
}
_PACKAGES: dict[Kind, str] = {"ext4": "e2fsprogs", "xfs": "xfsprogs", "btrfs": "btrfs-progs"}
# Nothing but the program under test is to bring anything to the disk: no journal commit by the clock.
_MOUNT_OPTIONS: dict[Kind, str] = {"ext4": "loop,commit=600", "xfs": "loop", "btrfs": "loop,commit=600"}
# xfs refuses two file systems with one identifier; noted for btrfs in `Copy`.
_COPY_OPTIONS: dict[Kind, str] = {"ext4": "loop", "xfs": "loop,nouuid", "btrfs": "loop"}


@functools.cache
def why_not(kind: Kind) -> str | None:
    """Why there can be no image of this kind here; None where there can. Found out once, by trying."""
    if os.geteuid() != 0:
        return "mounting images needs root"
    if shutil.which(_MAKE[kind][0]) is None:
        return f"{_MAKE[kind][0]} is missing (Debian package {_PACKAGES[kind]})"
    with tempfile.TemporaryDirectory(prefix="safe-trainer-image-") as directory:
        try:
            with Image(kind, Path(directory)):
                return None
        except subprocess.CalledProcessError as error:
            return f"no {kind} image can be mounted: {error.stderr.strip()}"


class Image:
    """A fresh file system of one kind, mounted while the ``with`` block runs.

    Args:
        kind: which one.
        directory: where the image file and its copies go.
        size_bytes: its size; as small as the tools allow if not given.
        mount: where to mount it; in ``directory`` if not given.
    """

    def __init__(
        self, kind: Kind, directory: Path, *, size_bytes: int | None = None, mount: Path | None = None
    ) -> None:
        self.kind = kind
        self.mount = directory / "mounted" if mount is None else mount
        self._file = directory / f"{kind}.image"
        self._size_bytes = size_bytes or _SMALLEST_BYTES[kind]
        self._numbers = itertools.count(1)

    def __enter__(self) -> Image:
        with self._file.open("wb") as stream:
            stream.truncate(self._size_bytes)
        _run(*_MAKE[self.kind], str(self._file))
        self.mount.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", self.kind, "-o", _MOUNT_OPTIONS[self.kind], str(self._file), str(self.mount))
        _run("sync", "-f", str(self.mount))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _run("umount", str(self.mount))
        self._file.unlink()

    def cut_power(self) -> Copy:
        """A copy of what has reached the disk by now; the image itself stays mounted and in use."""
        copy = self._file.with_name(f"{self.kind}-{next(self._numbers)}.image")
        _run("cp", "--sparse=always", str(self._file), str(copy))
        return Copy(self.kind, copy)


@dataclass(frozen=True)
class Copy:
    """What a power cut has left of an `Image`."""

    kind: Kind
    file: Path

    @contextlib.contextmanager
    def mounted(self, mount: Path) -> Iterator[Path]:
        """Mounts it, recovery included, and deletes it afterwards.

        btrfs knows file systems by their identifier: the `Image` must not be mounted any more.
        """
        mount.mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", self.kind, "-o", _COPY_OPTIONS[self.kind], str(self.file), str(mount))
        try:
            yield mount
        finally:
            _run("umount", str(mount))
            self.file.unlink()


def _run(*command: str) -> None:
    subprocess.run(
        command, check=True, timeout=COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
