"""The manifest: the file in a checkpoint that lists its files and says who saved it.

It is written last, after everything that it lists has reached the disk, so a directory that has one was complete
when it was written. Whether it still is, is asked of :mod:`safe_trainer.integrity`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import reprlib
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from safe_trainer.errors import CheckpointError
from safe_trainer.layout import MANIFEST_NAME, FileStat, check_relative_path

FORMAT = 1
# Some 300 000 files. What is larger is no manifest, and is not read: JSON takes many times its size in memory.
MAX_BYTES = 64 << 20

_MAX_COUNT = 2**63 - 1
_DIGEST_RE = re.compile(r"[0-9a-f]{32}")

Scope = Literal["full", "part"]
T = TypeVar("T")


class ManifestError(CheckpointError):
    """A manifest cannot be read: it is damaged, or of a format that this version does not know."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        path: relative to the checkpoint, POSIX, normal form.
        size: in bytes.
        digest: of its content, 32 hexadecimal digits; see :mod:`~safe_trainer.digest`.
        rank: the global rank that wrote it (see :func:`safe_trainer.save.writing_rank`).
        mode: permission bits.
    """

    path: str
    size: int
    digest: str
    rank: int
    mode: int

    @property
    def stat(self) -> FileStat:
        """The file as it is listed where it lies."""
        return FileStat(size=self.size, mode=self.mode)

    def same_content(self, other: FileEntry) -> bool:
        """Whether both describe the same bytes."""
        return (self.size, self.digest) == (other.size, other.digest)


@dataclass(frozen=True)
class Manifest:
    """What ``checkpoint_manifest.json`` says.

    Attributes:
        step: the global step.
        save_id: names this save; the same in all its copies and parts, on whatever disk.
        scope: ``full`` for a whole checkpoint, ``part`` for what a disk other than home's wrote and kept.
        generation: the number of the run that saved it (see :mod:`safe_trainer.commit`).
        world_size: the number of ranks that saved it.
        saved_at: UTC, ISO 8601.
        saved_by: host, process id, and versions of the libraries.
        files: by path.
        warnings: what was noticed at the save and its reader should know, e.g. an adapter without tensors.
    """

    step: int
    save_id: str
    scope: Scope
    generation: int
    world_size: int
    saved_at: str
    saved_by: dict[str, str]
    files: tuple[FileEntry, ...]
    warnings: tuple[str, ...] = field(default=())

    @property
    def total_bytes(self) -> int:
        return sum(entry.size for entry in self.files)

    def by_path(self) -> dict[str, FileEntry]:
        return {entry.path: entry for entry in self.files}

    def part(self, paths: set[str]) -> Manifest:
        """The manifest of a copy that holds only ``paths``."""
        files = tuple(entry for entry in self.files if entry.path in paths)
        return dataclasses.replace(self, scope="part", files=files)

    def write(self, checkpoint: Path) -> None:
        """Write into ``checkpoint`` and fsync the file (not the directory)."""
        document = {"format": FORMAT, **dataclasses.asdict(self)}
        with open(checkpoint / MANIFEST_NAME, "w", encoding="utf-8") as stream:
            json.dump(document, stream, indent=1)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())

    @classmethod
    def read(cls, checkpoint: Path) -> Manifest | None:
        """Read the manifest of ``checkpoint``; None where it has none.

        Raises:
            ManifestError: it is damaged or of an unknown format.
            UnsafePathError: it lists a path that is absolute or leaves the checkpoint.
        """
        path = checkpoint / MANIFEST_NAME
        try:
            info = path.stat()
            if not stat.S_ISREG(info.st_mode):  # a pipe would be waited for, a device has no end
                raise ManifestError(f"{path} is no regular file")
            if info.st_size > MAX_BYTES:
                raise ManifestError(f"{path} is damaged: it has {info.st_size} bytes, more than any manifest")
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ManifestError(f"{path} cannot be read: {error}") from error
        try:
            return cls._parse(json.loads(text))
        except CheckpointError:
            raise
        except Exception as error:  # whatever a damaged file makes of the parsers
            raise ManifestError(f"{path} is damaged: {type(error).__name__}: {str(error)[:500]}") from error

    @classmethod
    def _parse(cls, document: dict[str, Any]) -> Manifest:
        version = document.pop("format")
        if type(version) is not int or version != FORMAT:  # true and 1.0 are equal to 1
            raise ManifestError(
                f"the manifest has format {reprlib.repr(version)}, this version of safe_trainer reads {FORMAT}; "
                "update it."
            )
        files = tuple(_checked(FileEntry(**entry), _FILE_FIELDS) for entry in _items(document.pop("files")))
        warnings = tuple(_items(document.pop("warnings", [])))
        manifest = _checked(cls(files=files, warnings=warnings, **document), _MANIFEST_FIELDS)
        for entry in files:
            check_relative_path(entry.path)
        if len(manifest.by_path()) != len(files):
            raise ValueError("it lists a path twice")
        return manifest


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _is_text(value: Any) -> bool:
    return type(value) is str


_FILE_FIELDS: dict[str, Callable[[Any], bool]] = {
    "path": _is_text,
    "size": _is_count,
    "digest": lambda digest: _is_text(digest) and _DIGEST_RE.fullmatch(digest) is not None,
    "rank": _is_count,
    "mode": lambda mode: _is_count(mode) and mode <= 0o7777,
}
_MANIFEST_FIELDS: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "save_id": _is_text,
    "scope": lambda scope: scope in get_args(Scope),
    "generation": _is_count,
    "world_size": _is_count,
    "saved_at": _is_text,
    "saved_by": lambda versions: type(versions) is dict and all(map(_is_text, versions.values())),
    "warnings": lambda warnings: all(map(_is_text, warnings)),
}


def _checked(value: T, fields: dict[str, Callable[[Any], bool]]) -> T:
    """``value``, if all its fields are what they must be: a file of another origin can hold anything."""
    for name, is_right in fields.items():
        if not is_right(getattr(value, name)):
            raise ValueError(f"{name} cannot be {reprlib.repr(getattr(value, name))}")
    return value


def _items(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"a list was expected, not {reprlib.repr(value)}")
    return value
