"""The commit where a directory is not renamed in one step (object-store mounts), file by file with the manifest last.

What one sees on disk while ``checkpoint-20`` is committed::

    run directory/
        checkpoint-20/                              what has arrived; the manifest comes last
        _safe_trainer/
            committing/checkpoint-20.json           lists every file; from before the first change to after the last
            staging/<save>/checkpoint-20/           what has not arrived yet

As long as the record is there, the directory is unfinished, and every listed file is in one of the two places. So the
next start finishes it (:func:`finish_pieces`) before anybody looks for checkpoints. A removal leaves a record, too.

What another process sees meanwhile is a directory without a manifest. Nothing here can keep the stock Trainer from
taking that for a checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import shutil
import uuid
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safe_trainer.disk import (
    NO_RENAME,
    delete_all,
    entries,
    fsync_directory,
    fsync_file,
    fsync_tree,
    make_below,
    mount_of,
    read_fresh,
    remove_if_empty,
    write_durably,
)
from safe_trainer.errors import CheckpointError
from safe_trainer.layout import AREA_NAME, MANIFEST_NAME, RunLayout, checkpoint_step, list_files, resolve_inside

logger = logging.getLogger(__name__)

# They copy a renamed directory file by file, and not all of them show it to a probe.
_OBJECT_STORES = ("fuse.rclone", "fuse.s3fs", "fuse.gcsfuse")
_SUFFIX = ".json"
# Nothing else is committed, whatever a record says.
_SOURCES = (f"{AREA_NAME}/staging/", f"{AREA_NAME}/delivered/")


def rename_problem(layout: RunLayout) -> str | None:
    """Why directories are not renamed in one step in this run directory; None where they are, as far as one can see.

    Tries it under names that nobody has used before. Copying in pieces shows in that an existing directory is no
    obstacle.

    Raises:
        OSError: the run directory cannot be written.
    """
    kind = mount_of(layout.root).kind
    if kind in _OBJECT_STORES:
        return f"{kind} copies a renamed directory file by file"
    probe = layout.tokens / uuid.uuid4().hex

    def make() -> None:
        for name in ("renamed", "in the way"):
            (probe / name).mkdir(parents=True)
            (probe / name / "file").touch()

    try:
        make_below(layout.tokens, make)
        try:
            os.rename(probe / "renamed", probe / "new")
        except OSError as error:
            if error.errno not in NO_RENAME | {errno.EPERM}:
                raise
            return str(error)
        if not (probe / "new" / "file").exists():
            return "a directory that was renamed lost a file"
        try:
            os.rename(probe / "new", probe / "in the way")
        except OSError:
            return None
        return "a directory takes the name of another one that is not empty"
    finally:
        shutil.rmtree(probe, ignore_errors=True)


@dataclass(frozen=True)
class _Record:
    """What is being done to a directory of the run directory.

    Attributes:
        name: the directory, e.g. ``checkpoint-20``.
        staged: where its files come from, relative to the run directory; None where it is being removed.
        files: sizes in bytes by relative path.
    """

    name: str
    staged: str | None
    files: dict[str, int]

    @classmethod
    def read(cls, path: Path) -> _Record:
        """Raises CheckpointError: it is damaged (it was written as a whole before anything was changed)."""
        try:
            document: dict[str, Any] = json.loads(read_fresh(path) or b"")
            record = cls(**document)
            if f"{record.name}{_SUFFIX}" != path.name or checkpoint_step(record.name) is None:
                raise ValueError(f"it names {record.name!r}")
            if record.staged is not None and not str(record.staged).startswith(_SOURCES):
                raise ValueError(f"its files come from {record.staged!r}")
            return dataclasses.replace(record, files={str(name): int(size) for name, size in record.files.items()})
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}). Look whether {path.stem} is complete, then delete that file."
            ) from error


def commit_in_pieces(layout: RunLayout, staged: Path, final: Path) -> None:
    """Bring the files of ``staged`` to ``final``; an existing one is replaced as a whole.

    The files of ``staged`` have been fsynced. After an error the next start finishes it. Directories in which there is
    no file do not come along.

    Raises:
        OSError: with the path.
    """
    files = {path: info.size for path, info in list_files(staged).items()}
    record = _Record(final.name, staged.relative_to(layout.root).as_posix(), files)
    # The record relies on the staging directory, so its own name must be as durable as what is in it.
    for directory in (staged.parent, staged.parent.parent):
        fsync_directory(directory)
    _write(layout, record)
    _carry_out(layout, record)
    _forget(layout, record)


def remove_in_pieces(layout: RunLayout, checkpoint: Path) -> bool:
    """Delete a checkpoint; False where something of it cannot be deleted yet: :func:`finish_pieces` tries again."""
    record = _Record(checkpoint.name, None, {})
    _write(layout, record)
    return _take_away(layout, record)


def finish_pieces(layout: RunLayout) -> None:
    """Finish what a crash or an error has cut short. Call it before anybody looks for checkpoints.

    Raises:
        OSError: it cannot be finished now (no space left, say); nothing is lost, and the next start tries again.
        CheckpointError: a record is damaged.
    """
    for path in entries(layout.committing):
        if path.suffix != _SUFFIX:
            path.unlink(missing_ok=True)  # a record that was being written; nothing had been changed
            continue
        record = _Record.read(path)
        if record.staged is None:
            _take_away(layout, record)
            continue
        lost = _lost_files(layout, record)
        if lost:
            logger.warning(
                "%s was being committed and cannot be finished: %s and %d more are gone. It is removed.",
                layout.root / record.name,
                lost[0],
                len(lost) - 1,
            )
            remove_in_pieces(layout, layout.root / record.name)
            continue
        logger.warning("Finishing the commit of %s, which was cut short.", layout.root / record.name)
        _carry_out(layout, record)
        _forget(layout, record)
    remove_if_empty(layout.committing)


def finish_removals(layout: RunLayout) -> None:
    """Try again what :func:`remove_in_pieces` could not delete."""
    for path in entries(layout.committing):
        if path.suffix == _SUFFIX and (record := _Record.read(path)).staged is None:
            _take_away(layout, record)


def is_promised(layout: RunLayout, staged: Path) -> bool:
    """Whether :func:`finish_pieces` still needs the files in ``staged``."""
    path = _path_of(layout, staged.name)
    return path.exists() and _Record.read(path).staged == staged.relative_to(layout.root).as_posix()


# --- how ---


def _path_of(layout: RunLayout, name: str) -> Path:
    return layout.committing / f"{name}{_SUFFIX}"


def _write(layout: RunLayout, record: _Record) -> None:
    text = json.dumps(dataclasses.asdict(record))
    make_below(layout.committing, lambda: write_durably(_path_of(layout, record.name), text))
    fsync_directory(layout.area)


def _forget(layout: RunLayout, record: _Record) -> None:
    _path_of(layout, record.name).unlink(missing_ok=True)
    fsync_directory(layout.committing)
    remove_if_empty(layout.committing)


def _lost_files(layout: RunLayout, record: _Record) -> list[str]:
    """Listed files that are in neither place as they should be."""
    places = [_sizes(resolve_inside(layout.root, record.staged or "")), _sizes(layout.root / record.name)]
    return [path for path, size in record.files.items() if all(place.get(path) != size for place in places)]


def _sizes(directory: Path) -> dict[str, int]:
    return {path: info.size for path, info in list_files(directory).items()} if directory.is_dir() else {}


def _carry_out(layout: RunLayout, record: _Record) -> None:
    """Make ``final`` what the record lists. Does what is left to do, however often it was begun."""
    staged, final = resolve_inside(layout.root, record.staged or ""), layout.root / record.name
    waiting = _sizes(staged).keys() & record.files.keys()
    arrived = record.files.keys() - waiting
    if final.is_symlink() or not final.is_dir():
        final.unlink(missing_ok=True)
        final.mkdir()
    _clear(final, keep=arrived)
    for path in waiting:
        resolve_inside(final, path).parent.mkdir(parents=True, exist_ok=True)
    # Nothing is moved into a directory that a power cut could take away again.
    fsync_tree(final)
    fsync_directory(layout.root)
    for path in sorted(waiting, key=lambda path: (path == MANIFEST_NAME, path)):
        if path == MANIFEST_NAME:
            fsync_tree(final)
        _move(resolve_inside(staged, path), resolve_inside(final, path), record.files[path])
    fsync_tree(final)
    fsync_directory(layout.root)


def _clear(final: Path, *, keep: Set[str]) -> None:
    """Remove all other files, the manifest first: what is left without it claims nothing."""
    for path in sorted(_sizes(final).keys() - keep, key=lambda path: path != MANIFEST_NAME):
        (final / path).unlink(missing_ok=True)
    for directory, names, _ in os.walk(final, topdown=False):
        remove_if_empty(*(Path(directory, name) for name in names))


def _move(source: Path, target: Path, size: int) -> None:
    """Rename a file, or copy it and leave it, where files cannot be renamed either."""
    try:
        os.replace(source, target)
    except FileNotFoundError:
        if not target.exists() or target.stat().st_size != size:
            raise
    except OSError as error:
        if error.errno not in NO_RENAME | {errno.EPERM}:
            raise
        shutil.copyfile(source, target)
        with contextlib.suppress(OSError):
            shutil.copymode(source, target)
        fsync_file(target)


def _take_away(layout: RunLayout, record: _Record) -> bool:
    final = layout.root / record.name
    if final.is_dir() and not final.is_symlink():
        (final / MANIFEST_NAME).unlink(missing_ok=True)
    left = delete_all([final])
    for problem in left.values():
        logger.warning("Cannot delete %s yet: %s. The next save tries again.", final, problem)
    if not left:
        fsync_directory(layout.root)
        _forget(layout, record)
    return not left
