"""The resident memory of this process, and its peak since it was last asked to forget it (Linux)."""

from __future__ import annotations

from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_FORGET_THE_PEAK = "5"


def resident_bytes() -> int:
    """What is resident now."""
    return int(psutil.Process().memory_info().rss)


def reset_peak() -> None:
    """From here on, the peak counts anew."""
    _CLEAR_REFS.write_text(_FORGET_THE_PEAK)


def peak_bytes() -> int:
    """The most that was resident since :func:`reset_peak`."""
    for line in _STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError(f"{_STATUS} has no VmHWM")
