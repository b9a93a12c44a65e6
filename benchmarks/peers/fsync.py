"""fsync of everything: what a checkpoint needs to survive a power cut, and the stock Trainer leaves out."""

from __future__ import annotations

import os
from pathlib import Path


def tree(root: Path) -> None:
    """Every file below ``root``, every directory, ``root`` and the directory above it."""
    for directory, _, names in os.walk(root, topdown=False):
        for name in names:
            _one(Path(directory, name))
        _one(Path(directory))
    _one(root.parent)


def _one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
