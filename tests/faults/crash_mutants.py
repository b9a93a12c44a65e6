"""The package with one thing taken out: what the crash harness must see.

Each is called with the rank, in a process of its own that ends afterwards, after the tape has been laid.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safe_trainer import disk
from safe_trainer.channel import Channel
from safe_trainer.commit import RunDirectory
from safe_trainer.layout import MANIFEST_NAME
from safe_trainer.manifest import Manifest

LATE_RANK = 1


def no_sync_of_files(rank: int) -> None:
    """``fsync_file`` does nothing."""
    _put("fsync_file", lambda path: None)


def no_sync_of_directories(rank: int) -> None:
    """``fsync_directory`` does nothing."""
    _put("fsync_directory", lambda path: None)


def no_barrier_after_the_syncs(rank: int) -> None:
    """Nobody waits for rank 1's syncs: it makes them after the commit."""
    if rank != LATE_RANK:
        return
    put_off: list[Path] = []
    real = disk.fsync_file

    def catch_up() -> None:
        for path in put_off:
            if path.exists():
                real(path)

    _put("fsync_file", put_off.append)
    _before_step("rotate", catch_up)


def no_barrier_after_the_writes(rank: int) -> None:
    """Nobody waits for rank 1's writes: it begins when the files have been listed."""
    if rank != LATE_RANK:
        return
    put_off: list[Callable[[], object]] = []
    real = Channel.together

    def together(channel: Channel, phase: str, action: Callable[[], Any], *more: Any, **named: Any) -> list[Any]:
        if phase == "write":
            put_off.append(action)
            return real(channel, phase, lambda: None, *more, **named)
        if phase == "gather":
            put_off.pop()()
        return real(channel, phase, action, *more, **named)

    Channel.together = together  # type: ignore[method-assign, assignment]


def manifest_after_the_rename(rank: int) -> None:
    """The checkpoint gets its name first and its manifest then."""
    sealed: dict[Path, Manifest] = {}
    write, commit = Manifest.write, RunDirectory.commit

    def commit_then_seal(directory: RunDirectory, staged: Path, *more: Any, **named: Any) -> Path:
        final = commit(directory, staged, *more, **named)
        write(sealed[staged], final)
        return final

    Manifest.write = lambda manifest, checkpoint: sealed.update({checkpoint: manifest})  # type: ignore[method-assign, assignment]
    RunDirectory.commit = commit_then_seal  # type: ignore[method-assign, assignment]


def manifest_before_the_syncs(rank: int) -> None:
    """Home's leader syncs its share of the files after it has written the manifest, still before the rename."""
    if rank != 0:
        return
    put_off: list[Path] = []
    real, write = disk.fsync_file, Manifest.write

    def write_then_sync(manifest: Manifest, checkpoint: Path) -> None:
        write(manifest, checkpoint)
        for path in put_off:
            real(path)

    _put("fsync_file", put_off.append)
    Manifest.write = write_then_sync  # type: ignore[method-assign, assignment]


def manifest_arrives_first(rank: int) -> None:
    """Where a checkpoint is committed file by file, the manifest is the first to get its place."""
    replace = os.replace

    def manifest_first(source: Any, target: Any) -> None:
        own, other = Path(source).parent / MANIFEST_NAME, Path(target).parent / MANIFEST_NAME
        if Path(target).parent.name.startswith("checkpoint-") and own.exists() and own != Path(source):
            replace(own, other)
        replace(source, target)

    os.replace = manifest_first  # type: ignore[assignment]


# --- how ---


def _put(name: str, instead: Callable[[Path], object]) -> None:
    """Put ``instead`` in the place of a function wherever the package has imported it."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("safe_trainer.") and hasattr(module, name):
            setattr(module, name, instead)


def _before_step(name: str, action: Callable[[], None]) -> None:
    real = Channel.together

    def together(channel: Channel, phase: str, own: Callable[[], Any], *more: Any, **named: Any) -> list[Any]:
        if phase == name:
            action()
        return real(channel, phase, own, *more, **named)

    Channel.together = together  # type: ignore[method-assign, assignment]
