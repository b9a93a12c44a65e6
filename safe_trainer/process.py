"""Which process is this, is it still there, and what may it use: for beats, claims, and staging in memory.

A number alone does not tell: it is used again, and other machines and containers have the same ones. So a process has a
*mark*: this boot of this machine, the namespace of process numbers, and the process's start as the kernel counts it,
which no clock that is set changes (Linux, ``/proc``).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil


def process_mark(pid: int) -> str:
    """The mark of the process that has this number here now; empty where the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = status.rpartition(")")[2].split()
    state, start = fields[0], fields[19]
    return f"{_machine_mark()} {'dead' if state in 'ZX' else start}"


def has_ended(pid: int, mark: str) -> bool:
    """Whether the process with this number and mark is gone for certain; of another machine's nothing is known."""
    machine = _machine_mark()
    if not machine or not mark.startswith(f"{machine} "):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # another user's
    present = process_mark(pid)
    return bool(present) and present != mark


def _machine_mark() -> str:
    """This boot of this machine, and this namespace of process numbers; empty where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def available_memory() -> int:
    """Bytes of memory that processes here may still take, without swap: of the machine, or of this container.

    Source: cgroups v2, ``memory.max`` and ``memory.current`` of every group above this process; file caches that the
    kernel can drop count as available.
    """
    available = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):
        group = Path("/proc/self/cgroup").read_text(encoding="ascii").rpartition("::")[2].strip()
        place = Path("/sys/fs/cgroup") / group.lstrip("/")
        for directory in (place, *place.parents):
            if directory == Path("/sys/fs"):
                break
            available = min(available, _available_in(directory, available))
    return available


def _available_in(group: Path, otherwise: int) -> int:
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return otherwise
    return otherwise if limit == "max" else max(0, int(limit) - used + int(statistics.get("inactive_file", 0)))
