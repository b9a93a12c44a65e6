"""Names of the directories and files in a run directory: parse, format, list.

No I/O beyond listing. What one sees on disk::

    run directory/
        checkpoint-10/                      whole on home; on other disks the part written there, or whole
            model.safetensors ...           what stock Trainer writes
            checkpoint_manifest.json        see manifest.py
        _safe_trainer/                      everything else that the package keeps; never named checkpoint-*
            lock                            guards renames against other jobs; never deleted
            claim.json                      takes its place while held, where the file system has no working locks
            generation.json                 the newest run that has started here
            staging/<save>/checkpoint-20/   a save before its commit
            replaced/checkpoint-10/         the old one while a new one takes its name by two renames
            committing/checkpoint-20.json   a commit or a removal file by file, where directories are not renamed
            delivered/<use>/checkpoint-10/  a complete copy for resuming, on a node whose own disk lacks files
            trash/<name>/                   renamed away, about to be deleted
            tokens/                         short-lived files under names of their own: tokens, probes, signs of life
"""

from __future__ import annotations

import os
import re
import reprlib
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from safe_trainer.disk import again_if_stale
from safe_trainer.errors import UnsafePathError

CHECKPOINT_PREFIX = "checkpoint"
AREA_NAME = "_safe_trainer"
MANIFEST_NAME = "checkpoint_manifest.json"
TRAINER_STATE_NAME = "trainer_state.json"
# transformers' just-in-time checkpoint (5.0 on) marks an unfinished directory with this file.
JIT_SENTINEL_NAME = "checkpoint-is-incomplete.txt"
MAX_PATH_BYTES = 4096  # PATH_MAX of Linux
STAGING_MARKER_PREFIX = ".safe_trainer-writing-"

# Ours, and what NFS and FUSE put in the place of a file that was removed while somebody had it open.
_NOT_OF_A_CHECKPOINT = (STAGING_MARKER_PREFIX, ".nfs", ".fuse_hidden")
_PLAIN_PATH_RE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*", re.ASCII)
_DRIVE_RE = re.compile(r"^[A-Za-z]:/")
_WORK_RE = re.compile(r"([1-9][0-9]*)-[0-9a-f]{8}-[0-9]+-.+")
_CHECKPOINT_RE = re.compile(rf"{CHECKPOINT_PREFIX}-(0|[1-9][0-9]*)")


def checkpoint_name(step: int) -> str:
    """The directory name of a checkpoint, e.g. ``checkpoint-500``."""
    return f"{CHECKPOINT_PREFIX}-{step}"


def checkpoint_step(name: str) -> int | None:
    """The step in a directory name, or None where it is none (``checkpoint-5.tmp``, ``checkpoint-05``)."""
    match = _CHECKPOINT_RE.fullmatch(name)
    return None if match is None else int(match.group(1))


def list_checkpoints(run_directory: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """Directories of ``run_directory`` that are named as checkpoints, by step (9 before 10), complete or not."""
    try:
        entries = again_if_stale(lambda: list(os.scandir(run_directory)))
    except FileNotFoundError:
        return []
    found = []
    for entry in entries:
        step = checkpoint_step(entry.name)
        if step is not None and entry.is_dir():
            found.append((step, Path(entry.path)))
    return sorted(found)


def work_name(generation: int, run_id: str, count: int, purpose: str) -> str:
    """The name of a directory in ``staging/`` or ``delivered/``, e.g. ``3-5f0c11d2-1-20``.

    Args:
        generation, run_id: of the run.
        count: different for each of the run's names.
        purpose: for people.
    """
    return f"{generation}-{run_id[:8]}-{count}-{purpose}"


def work_generation(name: str) -> int | None:
    """The generation in a :func:`work_name`, or None where it is none."""
    match = _WORK_RE.fullmatch(name)
    return None if match is None else int(match.group(1))


@dataclass(frozen=True)
class RunLayout:
    """Where things are in one run directory (see the module's tree)."""

    root: Path

    @property
    def area(self) -> Path:
        return self.root / AREA_NAME

    @property
    def lock_file(self) -> Path:
        return self.area / "lock"

    @property
    def claim_file(self) -> Path:
        return self.area / "claim.json"

    @property
    def generation_file(self) -> Path:
        return self.area / "generation.json"

    @property
    def staging(self) -> Path:
        return self.area / "staging"

    @property
    def replaced(self) -> Path:
        return self.area / "replaced"

    @property
    def committing(self) -> Path:
        return self.area / "committing"

    @property
    def delivered(self) -> Path:
        return self.area / "delivered"

    @property
    def trash(self) -> Path:
        return self.area / "trash"

    @property
    def tokens(self) -> Path:
        return self.area / "tokens"

    def checkpoint(self, step: int) -> Path:
        return self.root / checkpoint_name(step)


@dataclass(frozen=True)
class FileStat:
    """A file as listed.

    Attributes:
        size: in bytes.
        mode: permission bits.
    """

    size: int
    mode: int


def check_relative_path(path: str) -> str:
    """Return ``path`` if it is a plain relative POSIX path inside a checkpoint.

    Raises:
        UnsafePathError: it is empty, absolute (on POSIX or Windows), not in normal form, or has a ``..``.
    """
    if _PLAIN_PATH_RE.fullmatch(path) and len(path) < MAX_PATH_BYTES:
        return path  # as nearly all are, and there can be many
    pure = PurePosixPath(path)
    unsafe = (
        not path
        or "\0" in path
        or "\\" in path
        or pure.is_absolute()
        or _DRIVE_RE.match(path) is not None
        or ".." in pure.parts
        or str(pure) != path
        or path == "."
        or not _is_file_name(path)
    )
    if unsafe:
        raise UnsafePathError(
            f"{reprlib.repr(path)} is not a path inside a checkpoint: it must be relative, without '..' and in normal "
            "form. Nothing was read or written for it."
        )
    return path


def _is_file_name(path: str) -> bool:
    """Whether the system could have such a path: a lone surrogate of JSON cannot be encoded."""
    try:
        return len(os.fsencode(path)) < MAX_PATH_BYTES
    except UnicodeEncodeError:
        return False


def resolve_inside(root: Path, path: str) -> Path:
    """The absolute path of ``path`` below ``root``, no matter whether it exists.

    Raises:
        UnsafePathError: as :func:`check_relative_path`, or a symbolic link leads out of ``root``.
    """
    target = root / check_relative_path(path)
    try:
        resolved = target.resolve()
    except RuntimeError as error:  # Python before 3.13 says so of links in a circle
        raise UnsafePathError(f"{path!r} in {root} is a symbolic link that leads nowhere: {error}") from error
    if not resolved.is_relative_to(root.resolve()):
        raise UnsafePathError(f"{path!r} leaves {root} through a symbolic link (to {resolved}); refused.")
    return target


def list_files(root: Path) -> dict[str, FileStat]:
    """Every file below ``root``, by relative POSIX path, dot files too.

    Left out are staging markers, and what file systems put in the place of removed files that are still open.

    Symbolic links that stay inside ``root`` count as what they point to.

    Raises:
        UnsafePathError: a symbolic link leads out of ``root``, directories are nested too deeply, or a name could not
            be read back from a manifest.
    """
    try:
        return dict(sorted(_walk(root, root, frozenset())))
    except RecursionError as error:
        raise UnsafePathError(f"{root} has directories that are nested too deeply.") from error


def _walk(root: Path, directory: Path, above: frozenset[Path]) -> Iterator[tuple[str, FileStat]]:
    # `above` holds the real paths of the directories being walked, so that a link to one of them ends the walk.
    real = directory.resolve()
    if real in above:
        return
    for entry in again_if_stale(lambda: list(os.scandir(directory))):
        path = Path(entry.path)
        relative = path.relative_to(root).as_posix()
        if entry.is_symlink():
            resolve_inside(root, relative)
        if entry.is_dir():
            yield from _walk(root, path, above | {real})
        elif entry.is_file() and not entry.name.startswith(_NOT_OF_A_CHECKPOINT):
            info = entry.stat()
            yield check_relative_path(relative), FileStat(size=info.st_size, mode=stat.S_IMODE(info.st_mode))
