"""Small disks and read-only directories, in a mount namespace of the calling process: call in a child only."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

_CLONE_NEWNS = 0x00020000


def needs_mounts() -> pytest.MarkDecorator:
    """Skips a test where this user cannot mount."""
    return pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


def leave_mount_namespace() -> None:
    """Give this process mounts of its own, which end with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _mount("--make-rprivate", "/")


def mount_small_disk(directory: Path, *, size_bytes: int) -> None:
    """Put a file system of ``size_bytes`` on ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(directory))


def make_read_only(directory: Path) -> None:
    """Forbid root, too, to write below ``directory``."""
    _mount("--bind", str(directory), str(directory))
    _mount("-o", "remount,bind,ro", str(directory))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, timeout=30)
