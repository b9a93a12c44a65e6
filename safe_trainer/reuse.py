"""What home's last checkpoint has already, so that it is neither sent nor stored again: frozen weights, a tokenizer.

A file is taken over only where its writer has taken the digest of what it wrote just now, and that digest is the one in
the last checkpoint's manifest; and only where the file on home is still the one that was committed or checked by this
run. The new checkpoint gets a file of its own that shares its blocks with the old one, or a second name of the same
file, so that deleting either harms nothing.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safe_trainer.disk import fsync_file, share_or_link
from safe_trainer.errors import CheckpointError
from safe_trainer.layout import FileStat
from safe_trainer.manifest import FileEntry

# To send less than that is cheaper than to find out whether it is needed.
MIN_BYTES = 1 << 20

# What identifies the content of a file that nobody writes to: device, inode, size in bytes, modification time in ns.
_Mark = tuple[int, int, int, int]


@dataclass
class LastCheckpoint:
    """The last checkpoint on home that this run has committed, or has checked in order to resume.

    Attributes:
        entries: its files, by path; the same on every rank.
        changing: files that were different in the save before, and so will be in the next; the same on every rank.
    """

    entries: Mapping[str, FileEntry] = field(default_factory=dict)
    changing: frozenset[str] = frozenset()
    _directory: Path | None = None
    _marks: dict[str, _Mark] = field(default_factory=dict)

    def note(self, entries: Iterable[FileEntry], directory: Path | None) -> None:
        """This is the last one from now on.

        Args:
            entries: its files.
            directory: where it is, on home's leader; None on every other rank.
        """
        new = {entry.path: entry for entry in entries}
        in_both = new.keys() & self.entries.keys()
        same = {path for path in in_both if new[path].same_content(self.entries[path])}
        self.changing = frozenset((in_both | (self.changing & new.keys())) - same)
        self.entries = new
        self._directory = directory
        self._marks = {}
        if directory is not None:
            large = (path for path, entry in new.items() if entry.size >= MIN_BYTES)
            self._marks = {path: mark for path in large if (mark := _mark(directory / path)) is not None}

    def intact(self) -> frozenset[str]:
        """Paths of the files that are still there as they were; asked on home's leader."""
        if self._directory is None:
            return frozenset()
        return frozenset(path for path, mark in self._marks.items() if _mark(self._directory / path) == mark)

    def candidates(self, files: Mapping[str, FileStat], intact: frozenset[str]) -> dict[str, FileStat]:
        """Which of ``files``, just written on another disk, may be the same as last time."""
        return {
            path: info
            for path, info in files.items()
            if path in intact and path not in self.changing and self.entries[path].size == info.size
        }

    def has(self, entry: FileEntry) -> bool:
        """Whether the last checkpoint has this content under this path."""
        known = self.entries.get(entry.path)
        return known is not None and known.same_content(entry)

    def take_over(self, path: str, staged: Path) -> None:
        """Give the checkpoint in ``staged`` the last one's file ``path``, which it lacks; on home's leader.

        Raises:
            OSError: it is not there any more, or there is no room for a copy where files cannot be linked.
        """
        if self._directory is None:
            raise CheckpointError(f"{path} is nothing that this rank can take over; this is a bug in safe_trainer")
        if not share_or_link(self._directory / path, staged / path):
            shutil.copy2(self._directory / path, staged / path)
            fsync_file(staged / path)

    def replace(self, path: str, staged: Path) -> None:
        """As :meth:`take_over`, where the file is in ``staged`` already; its room is given back."""
        if self._directory is None:
            return
        beside = staged / f"{path}.{uuid.uuid4().hex}"
        if share_or_link(self._directory / path, beside):
            os.replace(beside, staged / path)


def _mark(path: Path) -> _Mark | None:
    try:
        info = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns
