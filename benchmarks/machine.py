"""On what machine: a figure means nothing without it."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from safe_trainer.disk import mount_of

PACKAGES = ("safe_trainer", "torch", "transformers", "accelerate", "safetensors", "xxhash", "numpy", "dlrover")
TOOLS = {"rsync": ("rsync", "--version"), "ssh": ("ssh", "-V"), "tar": ("tar", "--version")}
TOOL_TIMEOUT_S = 10.0


def describe(directories: Iterable[Path]) -> dict[str, Any]:
    """What the figures were measured on. No host name and no path: results are published."""
    return {
        "measured at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "load at the start": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file systems": [file_system(directory) for directory in directories],
        "packages": _versions(),
        "tools": {name: version for name, command in TOOLS.items() if (version := _tool_version(command))},
    }


def file_system(directory: Path) -> str:
    """The type of the file system on which a directory lies, ``unknown`` where nothing tells."""
    existing = next(parent for parent in (directory, *directory.parents) if parent.exists()).resolve()
    return mount_of(existing).kind or "unknown"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _tool_version(command: tuple[str, ...]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False)
        found = re.search(r"\d+(\.\d+)+\w*", done.stdout + done.stderr)
        return found.group(0) if found else None
    return None
