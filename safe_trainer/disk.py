"""What the package asks of a file system beyond opening files: syncs, renames, deletions, a second look.

Knows nothing of run directories and checkpoints. Nothing here waits for longer than its arguments or constants say,
except for the file system itself: a system call on a dead server cannot be interrupted.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

T = TypeVar("T")

# A stale file handle (GlusterFS, NFS 3) is gone at the next look.
STALE_ATTEMPTS = 3
STALE_RETRY_S = 0.05
# What another process still uses (open on NFS, an uploader at work) is left for the next save after that.
DELETE_ATTEMPTS = 3
DELETE_RETRY_S = 0.2
DELETE_PATIENCE_S = 5.0
# The longest file of ours lists the files of a checkpoint, a hundred bytes or so for each.
MAX_RECORD_BYTES = 64 << 20
# Another process may remove an empty directory between our mkdir and what we make in it, and caches may show it for
# some seconds longer than it is there (sshfs: 20 s).
MAKE_TIMEOUT_S = 15.0
SHORTEST_MAKE_RETRY_S = 0.001
LONGEST_MAKE_RETRY_S = 1.0

# Several fsyncs at a time share one commit of the file system's journal.
FSYNC_THREADS = 8
MANY_FILES = 64

# Below this, to set blocks aside, to write back early and to fsync in the background costs more than it brings.
LARGE_BYTES = 1 << 20

# What a disk without a free block says, to a file and to a directory alike.
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
# What a rename fails with where the file system, or this place in it (overlayfs), cannot rename directories.
NO_RENAME = frozenset({errno.EXDEV, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})

_NETWORK_FILE_SYSTEMS = (
    "9p",
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "coda",
    "fuse",
    "gfs2",
    "glusterfs",
    "gpfs",
    "lustre",
    "nfs",
    "ocfs2",
    "orangefs",
    "panfs",
    "pvfs2",
    "smb",
    "virtiofs",
    "wekafs",
)

# Where blocks are set aside in one step. Elsewhere it costs as much as writing (tmpfs, NFS 3), or nothing is gained.
_PREALLOCATING_FILE_SYSTEMS = ("ext4", "xfs", "btrfs", "f2fs")

# include/uapi/linux/fs.h and fcntl.h
_RENAME_EXCHANGE = 2
_SYNC_FILE_RANGE_WRITE = 2
_FICLONE = 0x40049409
_AT_FDCWD = -100
# The last two come from FUSE file systems that ignore the flag and try a plain rename.
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EEXIST, errno.ENOTEMPTY)
# Some network file systems have nothing to sync in a directory and say so.
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


# --- durable ---


def fsync_file(path: Path) -> None:
    """Force a file's content to disk through a fresh descriptor.

    Writers may have swallowed an error at close (safetensors does, seen on a full NFS); it surfaces here.

    Raises:
        OSError: with the path.
    """
    again_if_stale(lambda: _fsync_path(path, os.O_RDONLY))


def fsync_directory(path: Path) -> None:
    """Force a directory's entries to disk, so that names made or renamed in it survive a power cut.

    Not guaranteed where the file system has no such call; that is no error.

    Raises:
        OSError: with the path.
    """
    try:
        again_if_stale(lambda: _fsync_path(path, os.O_RDONLY | os.O_DIRECTORY))
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise


def fsync_tree(root: Path) -> None:
    """:func:`fsync_directory` on ``root`` and every directory below."""
    fsync_directory(root)
    for directory, names, _ in os.walk(root):
        for name in names:
            fsync_directory(Path(directory, name))


def _fsync_path(path: Path, flags: int) -> None:
    with _opened(path, flags) as descriptor, naming(path):
        os.fsync(descriptor)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def fsync_files(paths: Sequence[str | Path], *, root: Path) -> None:
    """:func:`fsync_file` on each of ``paths``, which are on the file system of ``root``; several at a time.

    An fsync of a file that was just made has the file system find a place for it, write it, and close its journal.
    Where there are many, all that is dirty there is written back before, in one go.
    """
    if len(paths) >= MANY_FILES:
        _write_back_around(root)
    shares = [paths[start::FSYNC_THREADS] for start in range(min(FSYNC_THREADS, len(paths)))]
    with ThreadPoolExecutor(max(1, len(shares)), "safe_trainer fsync") as pool:
        for ended in [pool.submit(_fsync_each, share) for share in shares]:
            ended.result()


def _fsync_each(paths: Sequence[str | Path]) -> None:
    for path in paths:
        fsync_file(Path(path))


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Have the kernel begin to write a stretch of a file, so that a later fsync has less to wait for (Linux).

    Only a hint: nothing is promised and no error is reported; both are fsync's business.
    """
    hint = _hint("sync_file_range")
    if hint is not None:
        hint(descriptor, ctypes.c_int64(offset), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)


def start_writeback_of(path: Path) -> None:
    """:func:`start_writeback` of a whole file."""
    with _opened(path, os.O_RDONLY) as descriptor:
        start_writeback(descriptor, 0, 0)  # up to the end


def _write_back_around(path: Path) -> None:
    """Have everything written back that is dirty on the file system of ``path`` (Linux syncfs(2)).

    No error is reported; that is fsync's business.
    """
    hint = _hint("syncfs")
    if hint is not None:
        with _opened(path, os.O_RDONLY) as descriptor:
            hint(descriptor)


@functools.cache
def _hint(name: str) -> Any:
    """A function of the C library that only makes a later fsync faster; None where there is none."""
    return getattr(ctypes.CDLL(None), name, None)


def preallocates(directory: Path) -> bool:
    """Whether :func:`preallocate` is worth its while on the file system of ``directory``."""
    return mount_of(directory).kind in _PREALLOCATING_FILE_SYSTEMS


def preallocate(descriptor: int, size: int) -> None:
    """Set ``size`` bytes aside for a new file, in few extents where the file system can.

    Raises:
        OSError: there is no room.
    """
    if size > 0:
        os.posix_fallocate(descriptor, 0, size)


def fsync_ancestors(directory: Path) -> None:
    """Make the name of ``directory`` itself durable: it, or directories above it, may just have been made.

    Up to the root of its file system; what this process may not read is left out.
    """
    for parent in directory.resolve().parents:
        with contextlib.suppress(OSError):
            fsync_directory(parent)
        if os.path.ismount(parent):
            return


def write_durably(path: Path, text: str) -> None:
    """Write ``path`` as a whole: everybody sees the former content or this one, also after a power cut."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    fsync_directory(path.parent)


# --- what errors say ---


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """An OSError that comes out of this names ``path``, unless it names another one: reading, writing and syncing an
    open file do not tell which it was."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def free_bytes(path: Path) -> int:
    """What is free on the file system of ``path``, or, where that is not there, of what is left of it.

    Raises:
        OSError: the system does not tell.
    """
    for existing in (path, *path.absolute().parents):
        with contextlib.suppress(FileNotFoundError):
            return shutil.disk_usage(existing).free
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


# --- names ---


def exchange(first: Path, second: Path) -> bool:
    """Exchange two paths in one step; False where the system or the file system cannot (Linux renameat2(2))."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


def share_or_link(source: Path, target: Path) -> bool:
    """Give ``target``, which is not there, the content of ``source`` without copying it; False where that cannot be.

    A copy that shares its blocks is preferred (reflink: btrfs, xfs): what is written into one of the two later does not
    show in the other. Elsewhere it is a second name of the same file. Directories above are made.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    return _reflink(source, target) or _hard_link(source, target)


def link_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` a second name of ``source``, or, where the file system has no such thing, a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not _hard_link(source, target):
        shutil.copy2(source, target)


def _reflink(source: Path, target: Path) -> bool:
    with open(source, "rb") as original:
        mode = stat.S_IMODE(os.fstat(original.fileno()).st_mode)
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        try:
            fcntl.ioctl(descriptor, _FICLONE, original.fileno())
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        except OSError:
            os.unlink(target)
            return False
        finally:
            os.close(descriptor)
    return True


def _hard_link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # none on this file system, or too many of this file
        return False
    return True


def rename_to_free_name(source: Path, target: Path) -> bool:
    """Rename a directory; False where ``target`` is another one that is not empty, and nothing has changed."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    return True


def rename_if_there(source: Path, target: Path) -> bool:
    """Rename ``source``; False where there is none any more.

    Raises:
        OSError: it cannot be renamed; FileNotFoundError where the directory of ``target`` is missing.
    """
    try:
        os.rename(source, target)
    except FileNotFoundError:
        if os.path.lexists(source):
            raise
        return False
    return True


def make_below(directory: Path, make: Callable[[], T], *, timeout_s: float = MAKE_TIMEOUT_S) -> T:
    """Make ``directory`` and call ``make``, which makes something in it; again where it has been removed meanwhile.

    Empty directories are removed by whoever comes across them, in other jobs, too. And where caches lag, one can be
    there (``mkdir`` says so) and yet be invisible for a while.

    Args:
        timeout_s: for how long in seconds it is tried.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = SHORTEST_MAKE_RETRY_S
    while True:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            return make()
        except OSError as error:
            # FileExistsError: it was there for mkdir, and gone when pathlib looked whether it is a directory.
            is_gone = isinstance(error, (FileNotFoundError, FileExistsError)) or error.errno == errno.ESTALE
            is_in_the_way = any(place.is_file() for place in (directory, *directory.parents))
            if not is_gone or is_in_the_way or time.monotonic() >= deadline:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_MAKE_RETRY_S)


def remove_if_empty(*directories: Path) -> None:
    """Remove those of ``directories`` in which there is nothing; whatever cannot be removed stays."""
    for directory in directories:
        with contextlib.suppress(OSError):
            directory.rmdir()


# --- looking ---


def again_if_stale(action: Callable[[], T]) -> T:
    """What ``action`` gives; ESTALE, which network file systems give once, makes it try again.

    Raises:
        OSError: whatever else it raises, and an ESTALE that stays.
    """
    for _ in range(STALE_ATTEMPTS - 1):
        try:
            return action()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        time.sleep(STALE_RETRY_S)
    return action()


def read_fresh(path: Path) -> bytes | None:
    """A file's content; None where it is not there, also not after a look through the parent's listing.

    Opening a file makes network file systems ask for its present state; a name that a node believes missing comes back
    with the listing (NFS), or when the cache lets it go (FUSE), which is not waited for.

    Raises:
        OSError: it is no regular file, larger than :data:`MAX_RECORD_BYTES`, or cannot be read.
    """

    def read() -> bytes:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:  # else a pipe would be waited for
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise OSError(errno.EINVAL, "no regular file", str(path))
            content = stream.read(MAX_RECORD_BYTES + 1)
        if len(content) > MAX_RECORD_BYTES:
            raise OSError(errno.EFBIG, f"more than {MAX_RECORD_BYTES} bytes", str(path))
        return content

    with contextlib.suppress(FileNotFoundError):
        return again_if_stale(read)
    with contextlib.suppress(OSError):
        os.listdir(path.parent)
    with contextlib.suppress(FileNotFoundError):
        return again_if_stale(read)
    return None


def entries(directory: Path) -> list[Path]:
    """What is in ``directory``, by name; nothing where it does not exist."""

    def look() -> list[Path]:
        with os.scandir(directory) as found:
            return sorted(Path(entry.path) for entry in found)

    try:
        return again_if_stale(look)
    except FileNotFoundError:
        return []


class Mount(NamedTuple):
    """The mount in which a path is.

    Attributes:
        kind: the type of its file system, e.g. ``ext4``, ``nfs4``, ``fuse.sshfs``; empty where it is not known.
        options: its mount options.
        source: what is mounted, e.g. ``server:/export`` or ``/dev/vda``.
        point: where.
    """

    kind: str
    options: frozenset[str]
    source: str = ""
    point: str = "/"

    @property
    def is_network(self) -> bool:
        """Whether other nodes may see the same files, and caches may lag."""
        return self.kind.startswith(_NETWORK_FILE_SYSTEMS)


def mount_of(path: Path) -> Mount:
    """The mount in which ``path`` is, as the system's table of mounts has it."""
    target = path.resolve()
    mounts = {Path(partition.mountpoint): partition for partition in psutil.disk_partitions(all=True)}
    for parent in (target, *target.parents):
        if parent in mounts:
            found = mounts[parent]
            return Mount(found.fstype.lower(), frozenset(found.opts.split(",")), found.device, str(parent))
    return Mount("", frozenset())


# --- deleting ---


def delete_all(paths: Iterable[Path]) -> dict[Path, OSError]:
    """Delete files and trees as far as it goes.

    Everything is tried once. What fails is tried again, for :data:`DELETE_PATIENCE_S` over all of them, so that
    somebody who keeps writing there holds up nobody.

    Returns:
        What is still there, each with the first error that it gave.
    """
    deadline = time.monotonic() + DELETE_PATIENCE_S
    left = _delete_each(paths)
    for _ in range(DELETE_ATTEMPTS - 1):
        if not left or time.monotonic() >= deadline:
            break
        time.sleep(DELETE_RETRY_S)
        left = _delete_each(left)
    return left


def _delete_each(paths: Iterable[Path]) -> dict[Path, OSError]:
    return {path: problem for path in paths if (problem := _delete(path)) is not None}


def _delete(path: Path) -> OSError | None:
    problems: list[OSError] = []

    def note(_function: Any, _path: str, info: Any) -> None:
        # Others in the same directory are deleted all the same.
        if isinstance(info[1], OSError) and not isinstance(info[1], FileNotFoundError):
            problems.append(info[1])

    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, onerror=note)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        problems.append(error)
    except RecursionError:
        problems.append(OSError(errno.ENAMETOOLONG, "nested too deeply to be deleted", str(path)))
    return problems[0] if problems else None
