"""Guards: who may change names in a run directory just now. They help against other jobs; the generation decides.

A save is correct without any guard, because one process per disk makes, renames and removes. What a guard adds: two
jobs in one run directory do not look and rename at the same moment.

:class:`FileLockGuard` is ``flock`` through filelock. Where that does not exclude (:func:`held_probe` and
:func:`probe_problem` find out, between the hosts of a job), :class:`ClaimGuard` takes its place. filelock's own lock
files and leases are not used: none of them expires on a network file system, where a lock file of a dead host would
stay for ever (seen with filelock 4.3 on NFS 4.2).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import filelock

from safe_trainer.disk import NO_RENAME, make_below, mount_of, read_fresh, remove_if_empty, rename_if_there
from safe_trainer.errors import CheckpointError
from safe_trainer.process import has_ended, process_mark

logger = logging.getLogger(__name__)

LOCK_POLL_INTERVAL_S = 0.05
# After so long without a sign of life, a claim may be taken over. Long for a busy file server, short for a person.
LEASE_S = 20.0
# Where creation is not exclusive (s3fs: two may succeed), the last one to create it has it; so long is waited for that.
SETTLE_S = 0.3
# A claim that is not there may just be on its way back (see ClaimGuard._take_away).
CHECK_PATIENCE_S = 1.0

_NONCE_RE = re.compile(r"[0-9a-f]{32}")
_MAX_PID = 1 << 31
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP})
# File systems on which flock works and is known to no other host.
_FLOCK_IS_LOCAL = ("fuse.sshfs", "fuse.rclone", "fuse.s3fs", "fuse.gcsfuse")
_FLOCK_IS_LOCAL_OPTIONS = frozenset({"nolock", "local_lock=all", "local_lock=flock", "localflock"})

# To be called right before a deciding rename: raises if the guard has been lost meanwhile.
Check = Callable[[], None]


class Guard(Protocol):
    """Something that one process at a time can hold."""

    def hold(self, *, timeout_s: float) -> contextlib.AbstractContextManager[Check]:
        """Hold it. Gives a check that raises CheckpointError once somebody else has taken it over.

        Raises:
            CheckpointError: somebody else has held it for ``timeout_s`` seconds; the text names file and holder.
            LocksDoNotWork: the file system has no such locks.
        """
        ...


class LocksDoNotWork(CheckpointError):
    """The file system has no file locks; another guard has to take their place."""


class FileLockGuard:
    """``flock`` on a file that is never deleted. Free at once when its holder dies.

    Not guaranteed: that it excludes anybody on another host (sshfs, object stores, NFS 3 with ``nolock``), which it
    does not say. A host that dies keeps it until its file server notices (NFS 4: 90 s unless told otherwise).
    ``timeout_s`` bounds the wait for another holder, not a system call on a file server that does not answer.

    Args:
        path: the lock file; its directory must exist.
        holder: says who may be holding it, for the error's text.
    """

    def __init__(self, path: Path, *, holder: Callable[[], object]) -> None:
        self._path = path
        self._holder = holder

    @contextlib.contextmanager
    def hold(self, *, timeout_s: float) -> Iterator[Check]:
        """See :class:`Guard`."""
        lock = _file_lock(self._path, timeout_s=timeout_s)
        try:
            lock.acquire()
        except filelock.Timeout as error:
            raise CheckpointError(
                f"{self._path} was held by another process for {timeout_s:g} s; the newest run here is "
                f"{self._holder()}. Stop the other job, or raise lock_timeout_s."
            ) from error
        except (OSError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise
            raise LocksDoNotWork(str(error)) from error
        try:
            yield lambda: None
        finally:
            lock.release()


@dataclass(frozen=True)
class Claim:
    """Who holds a :class:`ClaimGuard`.

    Attributes:
        nonce: unique to this holding of it.
        host, pid, taken_at: for messages.
        process: tells this process from all others on this boot of this machine; empty where that is not known.
    """

    nonce: str
    host: str
    pid: int
    process: str
    taken_at: str

    @classmethod
    def of_this_process(cls) -> Claim:
        taken_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return cls(uuid.uuid4().hex, socket.gethostname(), os.getpid(), process_mark(os.getpid()), taken_at)

    @classmethod
    def parse(cls, content: bytes) -> Claim | None:
        """The claim in a file; None where it is empty or damaged."""
        try:
            claim = cls(**json.loads(content))
        except (ValueError, TypeError, RecursionError):
            return None
        is_sound = (
            type(claim.nonce) is str
            and _NONCE_RE.fullmatch(claim.nonce) is not None  # it becomes part of a file's name
            and type(claim.pid) is int
            and 0 < claim.pid < _MAX_PID
            and type(claim.process) is str
        )
        return claim if is_sound else None

    def holder_is_dead(self) -> bool:
        """Whether its process ran on this machine and is there no more. Of another machine's nothing is known."""
        return has_ended(self.pid, self.process)

    def encode(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.taken_at})"


class ClaimGuard:
    """A file that its holder creates and removes, with signs of life beside it; for file systems without locks.

    A claim is taken over at once where its process was on this machine and is dead, else when it has given no sign of
    life for a lease, by the clock of the one who waits. Clocks of two hosts are never compared.

    Not guaranteed: that a holder which was stopped for longer than a lease, and goes on, has it still. Such a one
    learns of it from the check that :meth:`hold` gives. Between that check and a rename nothing helps. Where creation
    excludes nobody, two that create it at the same moment are told apart by reading it back; that works on s3fs, and
    not on rclone, where each reads its own.

    Args:
        path: the claim file; its directory must exist.
        short_lived: a directory for signs of life; made and removed as needed.
        trash: where a claim goes that is taken over; made as needed.
    """

    def __init__(self, path: Path, *, short_lived: Path, trash: Path) -> None:
        self._path = path
        self._short_lived = short_lived
        self._trash = trash
        self._has_links = True

    @contextlib.contextmanager
    def hold(self, *, timeout_s: float) -> Iterator[Check]:
        """See :class:`Guard`."""
        claim = Claim.of_this_process()
        self._acquire(claim, timeout_s)
        released = threading.Event()
        signs_of_life = threading.Thread(target=self._give_signs_of_life, args=(claim, released), daemon=True)
        signs_of_life.start()
        try:
            yield lambda: self._check(claim)
        finally:
            released.set()
            signs_of_life.join(LEASE_S)
            self._release(claim)

    def _acquire(self, claim: Claim, timeout_s: float) -> None:
        begin = unchanged_since = time.monotonic()
        seen: tuple[bytes, bytes | None] | None = None
        while True:
            present = self._look()
            if present is None:
                if self._create(claim):
                    return
                present = self._look()
            now = time.monotonic()
            if present is not None:
                holder = Claim.parse(present[0])
                if holder is not None and holder.nonce == claim.nonce:
                    return  # it was created, and the answer was lost
                if present != seen:
                    seen, unchanged_since = present, now
                if holder is not None and holder.holder_is_dead():
                    self._take_away(present[0], f"{holder} is dead")
                    continue
                if now - unchanged_since >= LEASE_S:
                    self._take_away(present[0], f"{holder or 'nobody known'} gave no sign of life for {LEASE_S:g} s")
                    continue
            if now - begin >= timeout_s:
                held_by = (Claim.parse(present[0]) if present is not None else None) or "somebody unknown"
                raise CheckpointError(
                    f"{self._path} was held by {held_by} for {timeout_s:g} s. Stop that job, or raise lock_timeout_s. "
                    f"(Without a sign of life it is taken over after {LEASE_S:g} s.)"
                )
            time.sleep(LOCK_POLL_INTERVAL_S)

    def _look(self) -> tuple[bytes, bytes | None] | None:
        """The claim file's content and its holder's last sign of life; None where there is no claim."""
        content = read_fresh(self._path)
        if content is None:
            return None
        claim = Claim.parse(content)
        return content, None if claim is None else read_fresh(self._sign_of_life(claim))

    def _create(self, claim: Claim) -> bool:
        """Create the claim file, with its content from the first moment on where there are hard links."""
        if self._has_links:
            source = self._short_lived / f"claim-{claim.nonce}"
            try:
                make_below(self._short_lived, lambda: source.write_bytes(claim.encode()))
                os.link(source, self._path)
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:
                return False  # somebody has removed the directory of short-lived files; the next look tries again
            except OSError:
                # No links here: EPERM, ENOSYS, or EIO (rclone). If it is something else, the next step fails with it.
                # sshfs says EPERM where it means EEXIST.
                self._has_links = os.path.lexists(self._path)
                if self._has_links:
                    return False
            finally:
                source.unlink(missing_ok=True)
                remove_if_empty(self._short_lived)
        return self._create_and_settle(claim)

    def _create_and_settle(self, claim: Claim) -> bool:
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return False
        except PermissionError:
            if os.path.lexists(self._path):
                return False
            raise
        with open(descriptor, "wb") as stream:
            stream.write(claim.encode())
        time.sleep(SETTLE_S)
        return self._is_held_by(claim)

    def _is_held_by(self, claim: Claim) -> bool:
        content = read_fresh(self._path)
        present = None if content is None else Claim.parse(content)
        return present is not None and present.nonce == claim.nonce

    def _take_away(self, stale: bytes, why: str) -> None:
        """Move a stale claim into the trash, once: a newer claim that is met there instead is put back."""
        if read_fresh(self._path) != stale:
            return
        aside = self._trash / f"{uuid.uuid4().hex}-{self._path.name}"
        try:
            if not make_below(self._trash, lambda: rename_if_there(self._path, aside)):
                return
        except OSError as error:
            if error.errno not in NO_RENAME:
                raise
            self._path.unlink(missing_ok=True)
            return
        if read_fresh(aside) == stale:
            logger.warning("%s was left behind: %s. Taking over.", self._path, why)
            return
        try:
            os.link(aside, self._path)  # never over a third one's claim
        except OSError:
            if not os.path.lexists(self._path):
                os.rename(aside, self._path)

    def _sign_of_life(self, claim: Claim) -> Path:
        return self._short_lived / f"alive-{claim.nonce}"

    def _give_signs_of_life(self, claim: Claim, released: threading.Event) -> None:
        path = self._sign_of_life(claim)
        new = path.with_name(f"{path.name}.new")
        count = 0

        def give() -> None:
            new.write_text(str(count))
            os.replace(new, path)

        while not released.wait(LEASE_S / 4):
            count += 1
            try:
                make_below(self._short_lived, give)
            except OSError:
                logger.debug("no sign of life in %s", path, exc_info=True)

    def _check(self, claim: Claim) -> None:
        deadline = time.monotonic() + CHECK_PATIENCE_S
        while not self._is_held_by(claim):
            if time.monotonic() >= deadline:
                present = read_fresh(self._path)
                holder = None if present is None else Claim.parse(present)
                raise CheckpointError(
                    f"{self._path} was taken over by {holder or 'somebody who is gone by now'} while this process held "
                    f"it: it had given no sign of life for {LEASE_S:g} s. Nothing was changed. If the process was "
                    "stopped or its file server did not answer, the next save can succeed."
                )
            time.sleep(LOCK_POLL_INTERVAL_S)

    def _release(self, claim: Claim) -> None:
        try:
            if self._is_held_by(claim):
                self._path.unlink(missing_ok=True)
            self._sign_of_life(claim).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("Cannot remove %s: %s. Others take it over after %g s.", self._path, error, LEASE_S)
        remove_if_empty(self._short_lived)


# --- does flock work here? ---


@contextlib.contextmanager
def held_probe(path: Path) -> Iterator[str | None]:
    """Hold a file lock on ``path``, which nobody has used before, while others try it (:func:`probe_problem`).

    Gives why file locks do not work here; None as far as one process can tell.
    """
    path.touch()
    lock = _file_lock(path, timeout_s=0.0)
    problem = None
    try:
        try:
            lock.acquire()
        except (filelock.Timeout, OSError, NotImplementedError) as error:
            problem = str(error) or repr(error)
        yield problem or _second_descriptor_problem(path)
    finally:
        lock.release()
        path.unlink(missing_ok=True)


def probe_problem(path: Path) -> str | None:
    """Why the lock that another host holds on ``path`` does not work; None where it keeps this process out."""
    lock = _file_lock(path, timeout_s=0.0)
    try:
        lock.acquire()
    except filelock.Timeout:
        return None
    except (OSError, NotImplementedError) as error:
        return str(error) or repr(error)
    lock.release()
    return f"{socket.gethostname()} gets a lock that another host holds"


def flock_is_local(directory: Path) -> str | None:
    """Why locks in ``directory`` are known to no other host, by its mount; None where nothing says so.

    For a job on one host, which cannot try.
    """
    mount = mount_of(directory)
    options = sorted(mount.options & _FLOCK_IS_LOCAL_OPTIONS)
    if options and mount.kind.startswith(("nfs", "lustre")):
        return f"it is mounted with {options[0]}"
    if mount.kind in _FLOCK_IS_LOCAL:
        return f"locks of {mount.kind} are known to one host only"
    return None


def _second_descriptor_problem(path: Path) -> str | None:
    """Whether a lock is given a second time: two descriptors of one file are as two processes."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return "a lock is given twice"


def _file_lock(path: Path, *, timeout_s: float) -> filelock.BaseFileLock:
    return filelock.FileLock(
        path,
        timeout=timeout_s,
        poll_interval=LOCK_POLL_INTERVAL_S,
        fallback_to_soft=False,
        preserve_lock_file=True,
    )
