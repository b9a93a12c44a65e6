"""What happens on one disk: staging, fsync, lock, generation, the deciding rename, trash.

Everything here is done by one process per storage domain, its leader. It knows nothing of other ranks.

The commit, and what a crash after each line leaves:

1. every file and directory of the staging directory is fsynced      -> staging, swept by the next run
2. rename staging/<save>/checkpoint-N to checkpoint-N               -> the new checkpoint, perhaps not yet durable
3. fsync the run directory                                          -> the new checkpoint

Where ``checkpoint-N`` exists already, step 2 exchanges both (renameat2, RENAME_EXCHANGE), and the old one goes to the
trash. Where the file system has no exchange (NFS, FUSE), step 2 is two renames:

2a. rename checkpoint-N to replaced/checkpoint-N                    -> no checkpoint-N; the next run puts the old back
2b. rename staging/<save>/checkpoint-N to checkpoint-N              -> the new checkpoint; the old one is swept
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import json
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock

from safe_trainer.errors import CheckpointError, RunDirectoryTaken
from safe_trainer.integrity import inspect_checkpoint
from safe_trainer.layout import JIT_SENTINEL_NAME, MANIFEST_NAME, RunLayout, checkpoint_step

logger = logging.getLogger(__name__)

LOCK_POLL_INTERVAL_S = 0.05
# Tokens of a job that is just finding its storage domains are seconds old.
STALE_TOKEN_S = 3600.0
DELETE_ATTEMPTS = 3
DELETE_RETRY_S = 0.2
# include/uapi/linux/fs.h and fcntl.h
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# The last two come from FUSE file systems that ignore the flag and try a plain rename.
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EEXIST, errno.ENOTEMPTY)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Generation:
    """Who runs in a run directory.

    Attributes:
        number: grows by one with each run that starts there; 0 before the first.
        run_id: unique to the run.
        host, pid, started_at: for messages.
    """

    number: int
    run_id: str = ""
    host: str = ""
    pid: int = 0
    started_at: str = ""

    @classmethod
    def following(cls, number: int, run_id: str) -> Generation:
        """The generation after ``number``, held by this process."""
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return cls(number + 1, run_id, socket.gethostname(), os.getpid(), started)

    def __str__(self) -> str:
        if self.number == 0:
            return "an unknown run"
        return f"run {self.number} (started {self.started_at} by process {self.pid} on {self.host})"


class RunDirectory:
    """One run directory as its leader handles it.

    Not guaranteed: that no other job writes here. The lock only keeps jobs on file systems with working locks from
    renaming at the same moment; the generation, checked right before every rename, decides.
    """

    def __init__(self, root: Path, *, lock_timeout_s: float) -> None:
        self.layout = RunLayout(root)
        self._lock_timeout_s = lock_timeout_s
        self._generation: Generation | None = None
        self._names_at_start: frozenset[str] = frozenset()
        self._warned_no_lock = False

    # --- the start of a run ---

    def newest_generation(self) -> int:
        """The number of the newest run that has started here; 0 if none has."""
        return self._read_generation().number

    def take(self, generation: Generation) -> None:
        """Make ``generation`` the one that may commit here, and finish or clear away what dead runs left.

        Raises:
            RunDirectoryTaken: a run of that or a greater number has started meanwhile.
        """
        self.layout.area.mkdir(parents=True, exist_ok=True)
        fsync_directory(self.layout.root)
        with self.lock():
            current = self._read_generation()
            if current.number >= generation.number:
                raise RunDirectoryTaken(f"{self.layout.root}: {current} has started at the same time; start again.")
            _write_durably(self.layout.generation_file, json.dumps(dataclasses.asdict(generation)))
            self._generation = generation
            self._put_back_replaced()
            # Older runs' staging is dead, or belongs to a job that is fenced off by now.
            self._discard_all(self.layout.staging)
            self._discard_all(self.layout.delivered)
            self._discard_all(self.layout.tokens, older_than_s=STALE_TOKEN_S)
            for temporary in self.layout.area.glob(f"{self.layout.generation_file.name}.*"):
                self.discard(temporary)
            self._names_at_start = frozenset(
                entry.name for entry in os.scandir(self.layout.root) if checkpoint_step(entry.name) is not None
            )
        self.empty_trash()

    def check_generation(self) -> None:
        """Raise unless this run is still the newest here.

        Raises:
            RunDirectoryTaken: a newer run has started.
        """
        current = self._read_generation()
        if self._generation is None or current.run_id != self._generation.run_id:
            raise RunDirectoryTaken(
                f"{self.layout.root} now belongs to {current}; this is "
                f"{self._generation or 'a process that has not started a run here'}. Nothing was committed. Stop the "
                "older job, or give each job an output_dir of its own."
            )

    def _read_generation(self) -> Generation:
        try:
            generation = Generation(**json.loads(self.layout.generation_file.read_text(encoding="utf-8")))
            if type(generation.number) is not int:
                raise ValueError(f"number {generation.number!r}")
            return generation
        except FileNotFoundError:
            return Generation(0)
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"{self.layout.generation_file} is damaged ({error}). If no other job runs here, delete it."
            ) from error

    def _put_back_replaced(self) -> None:
        """Finish a replacement that a crash cut between its two renames: the old checkpoint gets its name back."""
        for old in _entries(self.layout.replaced):
            final = self.layout.root / old.name
            if final.is_dir() and inspect_checkpoint(final, verify="size").intact:
                self.discard(old)
                continue
            logger.warning("Putting back %s, which a killed save had moved aside.", final)
            if os.path.lexists(final):
                self.discard(final)  # an empty directory, say, that a late writer has brought back
            os.rename(old, final)
            fsync_directory(self.layout.root)

    # --- a save ---

    def make_staging(self, name: str, checkpoint: str) -> Path:
        """Make ``staging/<name>/<checkpoint>`` and return it. Modes follow the umask, as for stock."""
        path = self.layout.staging / name / checkpoint
        path.mkdir(parents=True)
        return path

    def carry_over(self, staged: Path) -> list[str]:
        """Copy into ``staged`` what others have put into its final place during this run, before the save.

        Some trainers write into ``checkpoint-N`` before they call ``super()._save_checkpoint``. Such files are newer
        than the run and than a manifest there, or lie in a directory without one that was not there when the run
        started. What a former save left is not taken over, nor the just-in-time checkpoint's sentinel.

        Returns:
            The names of the copied entries.
        """
        final = self.layout.root / staged.name
        if not final.is_dir():
            return []
        since_ns = _modified_ns(final / MANIFEST_NAME)
        if since_ns is not None:
            # A copied run directory can have files that are newer than their manifest.
            since_ns = max(since_ns, _modified_ns(self.layout.generation_file) or 0)
        elif final.name in self._names_at_start:
            return []
        carried = []
        for path in sorted(final.rglob("*")):
            relative = path.relative_to(final)
            if not path.is_file() or path.name == JIT_SENTINEL_NAME:
                continue
            if since_ns is None or path.stat().st_mtime_ns > since_ns:
                (staged / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, staged / relative)
                carried.append(relative.as_posix())
        return carried

    def commit(self, staged: Path) -> Path:
        """Give ``staged`` its final name ``checkpoint-N``; the caller holds the lock and has fsynced its files.

        Raises:
            RunDirectoryTaken: a newer run has started; nothing was changed.
        """
        final = self.layout.root / staged.name
        fsync_tree(staged)
        self.check_generation()
        if not os.path.lexists(final):
            os.rename(staged, final)
        elif exchange(staged, final):
            fsync_directory(self.layout.root)
            self.discard(staged)
        else:
            self._replace_by_two_renames(staged, final)
        fsync_directory(self.layout.root)
        return final

    def _replace_by_two_renames(self, staged: Path, final: Path) -> None:
        self.layout.replaced.mkdir(exist_ok=True)
        fsync_directory(self.layout.area)
        aside = self.layout.replaced / final.name
        if aside.exists():
            self.discard(aside)
        os.rename(final, aside)
        try:
            fsync_directory(self.layout.replaced)
            os.rename(staged, final)
        except OSError:
            os.rename(aside, final)
            raise
        fsync_directory(self.layout.root)
        self.discard(aside)

    def release_staging(self, staged: Path) -> None:
        """After the commit, put what a subclass wrote beside ``checkpoint-N``, into the run directory as it thought,
        there, and remove the staging directory."""
        wrapper = staged.parent
        for entry in _entries(wrapper):
            if checkpoint_step(entry.name) is not None:
                continue  # a replaced checkpoint that could not be moved to the trash
            target = self.layout.root / entry.name
            if entry.is_dir() and target.is_dir():
                shutil.copytree(entry, target, dirs_exist_ok=True)
            else:
                os.replace(entry, target)
        self.discard(wrapper)

    def drop_staging(self, staged: Path) -> None:
        """Throw away a staging directory; harmless where it is not there."""
        if staged.parent.exists():
            self.discard(staged.parent)

    def discard(self, path: Path) -> bool:
        """Take ``path`` away in one step by renaming it into the trash; :meth:`empty_trash` deletes it later.

        Returns:
            False where it cannot be renamed (a mount inside it, say). It then stays whole under its name; said at
            warning level, and tried again by whoever wants it gone.
        """
        try:
            self.layout.trash.mkdir(parents=True, exist_ok=True)
            os.rename(path, self.layout.trash / f"{uuid.uuid4().hex}-{path.name}")
        except OSError as error:
            if not os.path.lexists(path):
                return True
            logger.warning("Cannot remove %s: %s. It stays for now.", path, error)
            return False
        return True

    def remove_checkpoints(self, steps: Sequence[int]) -> None:
        """Take the checkpoints of ``steps`` away, each in one step; the caller holds the lock."""
        removed = [step for step in steps if self.discard(self.layout.checkpoint(step))]
        if removed:
            fsync_directory(self.layout.root)
            logger.info("Removed checkpoints of steps %s from %s", removed, self.layout.root)

    def empty_trash(self) -> None:
        """Delete what is in the trash. What cannot be deleted (files open on NFS, an uploader at work) stays there."""
        for entry in _entries(self.layout.trash):
            _delete(entry)
        for directory in (self.layout.trash, self.layout.staging, self.layout.replaced, self.layout.delivered):
            with contextlib.suppress(OSError):
                directory.rmdir()

    def clear_deliveries(self) -> None:
        """Delete the copies that were made for resuming."""
        self._discard_all(self.layout.delivered)
        self.empty_trash()

    def _discard_all(self, directory: Path, *, older_than_s: float = 0.0) -> None:
        for entry in _entries(directory):
            age_s = time.time() - entry.lstat().st_mtime
            if age_s >= older_than_s:
                self.discard(entry)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run directory's lock.

        Raises:
            CheckpointError: another process holds it for longer than ``lock_timeout_s``.
        """
        lock = filelock.FileLock(
            self.layout.lock_file,
            timeout=self._lock_timeout_s,
            poll_interval=LOCK_POLL_INTERVAL_S,
            fallback_to_soft=False,
            preserve_lock_file=True,
        )
        try:
            lock.acquire()
            held = True
        except filelock.Timeout as error:
            raise CheckpointError(
                f"{self.layout.lock_file} was held by another process for {self._lock_timeout_s:g} s; the newest run "
                f"here is {self._read_generation()}. Stop the other job, or raise lock_timeout_s."
            ) from error
        except (OSError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise
            if not self._warned_no_lock:
                self._warned_no_lock = True
                logger.warning(
                    "%s has no working file locks (%s). Saves are correct without: one process commits. Two jobs that "
                    "start at the same moment are told apart by their generation only.",
                    self.layout.root,
                    error,
                )
            held = False
        try:
            yield
        finally:
            if held:
                lock.release()


# --- file system primitives ---


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


def fsync_file(path: Path) -> None:
    """Force a file's content to disk through a fresh descriptor.

    Writers may have swallowed an error at close (safetensors does, seen on a full NFS); it surfaces here.
    """
    _fsync_path(path, os.O_RDONLY)


def fsync_directory(path: Path) -> None:
    """Force a directory's entries to disk, so that names made or renamed in it survive a power cut."""
    _fsync_path(path, os.O_RDONLY | os.O_DIRECTORY)


def fsync_tree(root: Path) -> None:
    """:func:`fsync_directory` on ``root`` and every directory below."""
    for directory, _, _ in os.walk(root):
        fsync_directory(Path(directory))


def _fsync_path(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def _write_durably(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    fsync_directory(path.parent)


def _entries(directory: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(directory)]
    except FileNotFoundError:
        return []


def _modified_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _delete(path: Path) -> None:
    for attempt in range(DELETE_ATTEMPTS):
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            problem = error
            if attempt + 1 < DELETE_ATTEMPTS:
                time.sleep(DELETE_RETRY_S)
    logger.warning("Cannot delete %s yet: %s. The next save tries again.", path, problem)
