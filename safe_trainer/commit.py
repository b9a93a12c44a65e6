"""What happens on one disk: staging, generation, the deciding rename, trash.

Everything here is done by one process per storage domain, its leader. It knows nothing of other ranks.

The commit, and what a crash after each line leaves:

1. every file and directory of the staging directory is fsynced      -> staging, swept by the next run
2. rename staging/<save>/checkpoint-N to checkpoint-N               -> the new checkpoint, perhaps not yet durable
3. fsync the run directory                                          -> the new checkpoint

Where ``checkpoint-N`` exists already, step 2 exchanges both (renameat2, RENAME_EXCHANGE), and the old one goes to the
trash. Where the file system has no exchange (NFS, FUSE), step 2 is two renames:

2a. rename checkpoint-N to replaced/checkpoint-N                    -> no checkpoint-N; the next run puts the old back
2b. rename staging/<save>/checkpoint-N to checkpoint-N              -> the new checkpoint; the old one is swept

Where directories are not renamed in one step, step 2 goes file by file (:mod:`safe_trainer.pieces`).
"""

from __future__ import annotations

import contextlib
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

from safe_trainer.disk import (
    NO_RENAME,
    NO_SPACE,
    delete_all,
    entries,
    fsync_ancestors,
    fsync_directory,
    fsync_tree,
    make_below,
    read_fresh,
    remove_if_empty,
    rename_if_there,
    rename_to_free_name,
    write_durably,
)
from safe_trainer.disk import exchange as exchange
from safe_trainer.errors import CheckpointError, RunDirectoryTaken
from safe_trainer.integrity import inspect_checkpoint
from safe_trainer.layout import JIT_SENTINEL_NAME, MANIFEST_NAME, RunLayout, checkpoint_step, work_generation
from safe_trainer.lock import LEASE_S, Check, ClaimGuard, FileLockGuard, Guard, LocksDoNotWork
from safe_trainer.pieces import commit_in_pieces, finish_pieces, finish_removals, is_promised, remove_in_pieces

logger = logging.getLogger(__name__)

# Tokens of a job that is just finding its storage domains are seconds old.
STALE_TOKEN_S = 3600.0
# So many runs start nowhere; a greater number is damage.
MAX_GENERATION = 1 << 53
# How often a generation is written again that somebody has overwritten, where no guard kept him out.
TAKE_ATTEMPTS = 5


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

    Not guaranteed: that no other job writes here. The lock only keeps jobs from renaming at the same moment; the
    generation, checked right before every rename, decides.

    Args:
        root: the run directory.
        lock_timeout_s: longest time in seconds to wait for another job that holds the lock.
    """

    def __init__(self, root: Path, *, lock_timeout_s: float) -> None:
        self.layout = RunLayout(root)
        self._lock_timeout_s = lock_timeout_s
        self._generation: Generation | None = None
        self._names_at_start: frozenset[str] = frozenset()
        self._guard: Guard = FileLockGuard(self.layout.lock_file, holder=self._newest)
        self._check_lock: Check = _nothing_to_check
        self._in_pieces = False

    # --- what the file system can do ---

    def use_claims(self, reason: str) -> None:
        """From now on the lock is a claim file; said once, at warning level.

        Args:
            reason: why file locks are of no use here.
        """
        if isinstance(self._guard, ClaimGuard):
            return
        logger.warning(
            "%s has no working file locks (%s). Saves are correct without: one process commits. Against other jobs, "
            "%s takes their place; what a dead job on another host leaves of it holds up the next one for %g s.",
            self.layout.root,
            reason,
            self.layout.claim_file,
            LEASE_S,
        )
        self._guard = ClaimGuard(self.layout.claim_file, short_lived=self.layout.tokens, trash=self.layout.trash)

    @property
    def renames_whole(self) -> bool:
        """Whether a directory is renamed in one step here."""
        return not self._in_pieces

    def use_pieces(self, reason: str) -> None:
        """From now on checkpoints are committed and removed file by file; said once, at warning level.

        Args:
            reason: why directories are not renamed in one step here.
        """
        if self._in_pieces:
            return
        logger.warning(
            "%s does not rename directories in one step (%s). Checkpoints arrive there file by file, the manifest "
            "last; what a crash leaves unfinished is finished at the next start of SafeTrainer. Nothing else should "
            "resume from there after a crash.",
            self.layout.root,
            reason,
        )
        self._in_pieces = True

    # --- the start of a run ---

    def make_room(self) -> None:
        """Delete what former runs left below :attr:`layout.area`, on a disk without a free block.

        To be called where a run cannot even begin to start. A former run that still lives loses the save that it is
        in, as it does when this one starts.
        """
        logger.warning("%s is full; deleting what former runs have left in it.", self.layout.area)
        areas = (self.layout.trash, self.layout.staging, self.layout.delivered)
        _delete_and_say([entry for area in areas if not area.is_symlink() for entry in entries(area)])

    def newest_generation(self) -> int:
        """The number of the newest run that has started here; 0 if none has."""
        return self._newest().number

    def take(self, generation: Generation) -> Generation:
        """Start a run on home: make it the one that may commit here, and finish or clear away what dead runs left.

        Where a run with that number or a greater one has started meanwhile, this one takes the next number: the later
        one wins.

        Returns:
            The generation that was taken.

        Raises:
            CheckpointError: the lock is held, or others overwrite the generation without heeding it.
        """
        return self._start(generation, is_home=True)

    def follow(self, generation: Generation) -> None:
        """Start a run on another disk than home, with the generation that home has given it.

        The greater number wins, and of equal ones the greater run id: they come from jobs whose homes are different
        disks, and all disks must come to the same answer.

        Raises:
            RunDirectoryTaken: a newer run has started here meanwhile; nothing was changed.
            CheckpointError: as :meth:`take`.
        """
        self._start(generation, is_home=False)

    def _start(self, generation: Generation, *, is_home: bool) -> Generation:
        self.layout.area.mkdir(parents=True, exist_ok=True)
        self._refuse_links()
        fsync_directory(self.layout.root)
        fsync_ancestors(self.layout.root)
        with self.lock():
            generation = self._write_generation(generation, is_home=is_home)
            self._generation = generation
            finish_pieces(self.layout)
            self._put_back_replaced()
            self._sweep(generation.number)
            self._names_at_start = frozenset(
                entry.name for entry in entries(self.layout.root) if checkpoint_step(entry.name) is not None
            )
        self.empty_trash()
        return generation

    def _refuse_links(self) -> None:
        """What lies in the package's directories is moved and deleted; behind a link it would be somebody else's."""
        layout = self.layout
        for directory in (
            layout.staging,
            layout.replaced,
            layout.committing,
            layout.delivered,
            layout.trash,
            layout.tokens,
        ):
            if directory.is_symlink():
                raise CheckpointError(f"{directory} is a symbolic link; remove it. Nothing was changed.")

    def _write_generation(self, generation: Generation, *, is_home: bool) -> Generation:
        for _ in range(TAKE_ATTEMPTS):
            current = self._newest()
            if is_home and current.number >= generation.number:
                generation = dataclasses.replace(generation, number=current.number + 1)
            elif (current.number, current.run_id) > (generation.number, generation.run_id):
                raise RunDirectoryTaken(
                    f"{self.layout.root} now belongs to {current}, which has started after {generation}. Nothing was "
                    "changed. Stop the older job, or give each job an output_dir of its own."
                )
            write_durably(self.layout.generation_file, json.dumps(dataclasses.asdict(generation)))
            if self._newest() == generation:
                return generation
        raise CheckpointError(
            f"{self.layout.generation_file} does not keep what is written there: it is {self._newest()} each time. "
            "Another job starts in this run directory again and again, or the file system loses writes."
        )

    def check_generation(self) -> None:
        """Raise unless this run is still the newest here.

        Raises:
            RunDirectoryTaken: a newer run has started.
        """
        current = self._newest()
        if self._generation is None or current.run_id != self._generation.run_id:
            raise RunDirectoryTaken(
                f"{self.layout.root} now belongs to {current}; this is "
                f"{self._generation or 'a process that has not started a run here'}. Nothing was committed. Stop the "
                "older job, or give each job an output_dir of its own."
            )

    def _check_is_ours(self) -> None:
        """Right before a deciding rename: the lock has not been lost, and no newer run has started."""
        self._check_lock()
        self.check_generation()

    def _newest(self) -> Generation:
        try:
            content = read_fresh(self.layout.generation_file)
        except OSError as error:
            raise CheckpointError(f"{self.layout.generation_file} cannot be read: {error}") from error
        if content is None:
            return Generation(0)
        try:
            generation = Generation(**json.loads(content))
            is_sound = type(generation.number) is int and type(generation.run_id) is str
            if not is_sound or not 0 <= generation.number < MAX_GENERATION:
                raise ValueError("its number or run id is none")
            return generation
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{self.layout.generation_file} is damaged ({error}). If no other job runs here, delete it."
            ) from error

    def _sweep(self, number: int) -> None:
        """Clear away what runs up to generation ``number`` left: they are dead, or fenced off by now.

        What a newer run has made stays, and so do names that are not the package's.
        """
        for entry in (*entries(self.layout.staging), *entries(self.layout.delivered)):
            generation = work_generation(entry.name)
            if generation is None or generation > number:
                logger.debug("%s is not an older run's; it stays", entry)
            else:
                self.discard(entry)
        for entry in entries(self.layout.tokens):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - entry.lstat().st_mtime >= STALE_TOKEN_S:
                    self.discard(entry)
        for temporary in self.layout.area.glob(f"{self.layout.generation_file.name}.*"):
            self.discard(temporary)

    def _put_back_replaced(self) -> None:
        """Finish a replacement that a crash cut between its two renames: the old checkpoint gets its name back."""
        for old in entries(self.layout.replaced):
            if checkpoint_step(old.name) is None:
                continue  # not of our making, and perhaps named as a file of the user's
            final = self.layout.root / old.name
            if final.is_dir() and inspect_checkpoint(final, verify="size").intact:
                self.discard(old)
                continue
            logger.warning("Putting back %s, which a killed save had moved aside.", final)
            self._put_back(old)

    def _put_back(self, old: Path) -> None:
        final = self.layout.root / old.name
        if os.path.lexists(final):
            self.discard(final)  # an empty directory, say, that a late writer has brought back
        os.rename(old, final)
        fsync_directory(self.layout.root)

    # --- a save ---

    def make_staging(self, name: str, checkpoint: str) -> Path:
        """Make ``staging/<name>/<checkpoint>`` and return it. Modes follow the umask, as for stock."""
        path = self.layout.staging / name / checkpoint
        make_below(self.layout.staging, lambda: path.mkdir(parents=True))
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
            CheckpointError: the lock was lost to another job; nothing was changed.
        """
        final = self.layout.root / staged.name
        try:
            fsync_tree(staged)
        except FileNotFoundError:
            self.check_generation()  # a newer run sweeps the staging directories of older ones
            raise
        self._check_is_ours()
        if not self._in_pieces:
            try:
                self._rename_into_place(staged, final)
            except OSError as error:
                if error.errno not in NO_RENAME:
                    raise
                self.use_pieces(str(error))
        if self._in_pieces:
            commit_in_pieces(self.layout, staged, final)
        fsync_directory(self.layout.root)
        return final

    def _rename_into_place(self, staged: Path, final: Path) -> None:
        if not os.path.lexists(final) and rename_to_free_name(staged, final):
            return
        if exchange(staged, final):
            fsync_directory(self.layout.root)
            self.discard(staged)
        else:
            self._replace_by_two_renames(staged, final)

    def _replace_by_two_renames(self, staged: Path, final: Path) -> None:
        aside = self.layout.replaced / final.name
        if aside.exists():
            self.discard(aside)

        def move_aside() -> bool:
            fsync_directory(self.layout.area)
            return rename_if_there(final, aside)

        if not make_below(self.layout.replaced, move_aside):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(final))
        try:
            fsync_directory(self.layout.replaced)
            self._check_is_ours()
            if not rename_to_free_name(staged, final):
                self.discard(final)  # a late writer has brought the old name back
                os.rename(staged, final)
        except (OSError, CheckpointError):
            if os.path.lexists(aside):  # else a newer run has put it back
                self._put_back(aside)
            raise
        fsync_directory(self.layout.root)
        self.discard(aside)

    def release_staging(self, staged: Path) -> None:
        """After the commit, put what a subclass wrote beside ``checkpoint-N``, into the run directory as it thought,
        there, and remove the staging directory."""
        wrapper = staged.parent
        for entry in entries(wrapper):
            if checkpoint_step(entry.name) is not None:
                continue  # a replaced checkpoint that could not be moved to the trash
            target = self.layout.root / entry.name
            if entry.is_dir() and (target.is_dir() or self._in_pieces):
                shutil.copytree(entry, target, dirs_exist_ok=True)
            else:
                os.replace(entry, target)
        self.discard(wrapper)

    def drop_staging(self, staged: Path) -> None:
        """Throw away a staging directory; harmless where it is not there.

        It stays where a commit file by file has begun and failed: the next start of a run finishes that.
        """
        if is_promised(self.layout, staged):
            logger.warning("%s is partly in place; the next start finishes it from %s.", staged.name, staged)
        elif staged.parent.exists():
            self.discard(staged.parent)

    def discard(self, path: Path) -> bool:
        """Take ``path`` away in one step by renaming it into the trash; :meth:`empty_trash` deletes it later.

        Where directories are not renamed in one step, it is deleted file by file, a checkpoint's manifest first.

        Returns:
            False where it cannot be taken away (a mount inside it, say). It then stays under its name, whole where
            directories are renamed in one step; said at warning level, and tried again by whoever wants it gone.
        """
        if self._in_pieces:
            return self._delete_in_place(path)
        try:
            aside = self.layout.trash / f"{uuid.uuid4().hex}-{path.name}"
            make_below(self.layout.trash, lambda: rename_if_there(path, aside))  # what is not there is away already
        except OSError as error:
            if not os.path.lexists(path):
                return True
            is_ours = self.layout.area in path.parents  # under no name that anybody else looks at
            if error.errno in NO_RENAME or (error.errno in NO_SPACE and is_ours):
                return self._delete_in_place(path)  # without a free block there can be no trash
            logger.warning("Cannot remove %s: %s. It stays for now.", path, error)
            return False
        return True

    def _delete_in_place(self, path: Path) -> bool:
        if path.parent == self.layout.root and checkpoint_step(path.name) is not None:
            return remove_in_pieces(self.layout, path)
        return not _delete_and_say([path])

    def remove_checkpoints(self, steps: Sequence[int]) -> None:
        """Take the checkpoints of ``steps`` away, each in one step; the caller holds the lock.

        Raises:
            RunDirectoryTaken: a newer run has started, which may be reading them; nothing was changed.
            CheckpointError: the lock was lost to another job; nothing was changed.
        """
        if not steps:
            return
        self._check_is_ours()
        removed = [step for step in steps if self.discard(self.layout.checkpoint(step))]
        if removed:
            fsync_directory(self.layout.root)
            logger.info("Removed checkpoints of steps %s from %s", removed, self.layout.root)

    def empty_trash(self) -> None:
        """Delete what is in the trash. What cannot be deleted (files open on NFS, an uploader at work) stays there."""
        finish_removals(self.layout)
        _delete_and_say(entries(self.layout.trash))
        remove_if_empty(
            self.layout.trash,
            self.layout.staging,
            self.layout.replaced,
            self.layout.delivered,
            self.layout.tokens,
        )

    def clear_deliveries(self) -> None:
        """Delete the copies that were made for resuming."""
        for entry in entries(self.layout.delivered):
            self.discard(entry)
        self.empty_trash()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run directory's lock.

        Raises:
            CheckpointError: another process holds it for longer than ``lock_timeout_s``; the text names file and
                holder.
        """
        with contextlib.ExitStack() as held:
            self._check_lock = self._enter_guard(held)
            try:
                yield
            finally:
                self._check_lock = _nothing_to_check

    def _enter_guard(self, held: contextlib.ExitStack) -> Check:
        try:
            return held.enter_context(self._guard.hold(timeout_s=self._lock_timeout_s))
        except LocksDoNotWork as error:
            self.use_claims(str(error))
        return held.enter_context(self._guard.hold(timeout_s=self._lock_timeout_s))


def _nothing_to_check() -> None:
    """What there is to ask of a lock that is not held."""


def _delete_and_say(paths: Sequence[Path]) -> dict[Path, OSError]:
    left = delete_all(paths)
    for path, problem in left.items():
        logger.warning("Cannot delete %s yet: %s. The next save tries again.", path, problem)
    return left


def _modified_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
