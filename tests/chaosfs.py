"""A file system that misbehaves on demand: a FUSE passthrough to a real directory, with faults by rule.

    with ChaosFS(backing, mount) as disk:
        disk.set_rules([Rule("rename", "*/staging/*/checkpoint-10", kill="before")])

Two of them over one backing directory are two nodes that share a disk, each with caches of its own.

What can be wrong from the start: file locks that do not work; no exchange of two names (``RENAME_EXCHANGE``); names
that others have made and that stay invisible for a while; the kernel's caches for names, missing names and attributes
(what makes NFS stale). What can go wrong at a chosen operation: see :class:`Rule`.

It needs Linux, ``/dev/fuse``, ``fusermount3`` (Debian: fuse3) and mfusepy; :func:`why_not` says what is missing. It
runs in a process of its own (this module as a script), which ends with the ``with`` block or with the test's process.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import dataclasses
import errno
import fcntl
import fnmatch
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

T = TypeVar("T")

Locks = Literal["pass", "ENOSYS", "ENOLCK", "EOPNOTSUPP"]

MOUNT_TIMEOUT_S = 30.0
UNMOUNT_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.02
SCAN_INTERVAL_S = 0.05
# A process that has been killed is still in the system call; it must not see the call succeed.
KILL_GRACE_S = 0.05


@dataclass(frozen=True)
class Rule:
    """What happens at some operations. The first rule that matches an operation counts it and applies.

    Attributes:
        operation: ``rename``, ``write``, ``fsync``, ``fsyncdir``, ``mkdir``, ``create``, ``open``, ``unlink``,
            ``rmdir``, ``truncate``, ``getattr``, ``readdir``, ``flock``, ...; ``*`` for every one.
        path: a pattern for the path inside the file system, which begins with a slash; of a rename, its source.
        nth: from which matching operation on, counted from 1 since the rules were set.
        times: for how many; 0 for all from there on.
        delay_s: it takes this long.
        error: it fails with this error number, e.g. ``ENOSPC``.
        short_bytes: a write writes only this much before it fails with ``error``.
        kill: the process that asked is killed (SIGKILL) before or after it is done.
        pieces_s: a directory is renamed file by file, with so many seconds before each (object stores).
    """

    operation: str
    path: str = "*"
    nth: int = 1
    times: int = 1
    delay_s: float = 0.0
    error: str | None = None
    short_bytes: int | None = None
    kill: Literal["before", "after"] | None = None
    pieces_s: float | None = None

    def matches(self, operation: str, path: str) -> bool:
        return self.operation in ("*", operation) and fnmatch.fnmatchcase(path, self.path)

    def applies_to(self, count: int) -> bool:
        """Whether the ``count``-th matching operation is meant."""
        return count >= self.nth and (self.times == 0 or count < self.nth + self.times)

    def as_error(self) -> OSError:
        return OSError(getattr(errno, self.error or "EIO"), f"by a rule for {self.operation}")


@dataclass(frozen=True)
class Settings:
    """How the file system is from the start (see :class:`ChaosFS`)."""

    backing: str
    mount: str
    rules_file: str
    log_file: str
    locks: Locks
    exchange: bool
    hide_new_names_s: float
    stubborn: bool
    name_cache_s: float
    missing_name_cache_s: float
    attribute_cache_s: float


@dataclass(frozen=True)
class Operation:
    """One operation that the file system was asked for: its name, path, who asked, and ``ok`` or the error's name."""

    name: str
    path: str
    pid: int
    result: str


def why_not() -> str | None:
    """Why there can be no such file system here; None where there can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is missing or not accessible"
    if shutil.which("fusermount3") is None:
        return "fusermount3 is missing (Debian package fuse3)"
    if importlib.util.find_spec("mfusepy") is None:
        return "the Python package mfusepy is missing"
    if _library() is None:
        return "libfuse3 is missing (Debian package libfuse3-3)"
    return None


class ChaosFS:
    """Mounts ``backing`` on ``mount`` for as long as the ``with`` block runs.

    Args:
        backing: the real directory; it must exist.
        mount: where to see it; made where it does not exist.
        locks: ``pass`` for working file locks, else the error that every flock gives.
        exchange: whether two names can be exchanged in one step.
        hide_new_names_s: for how many seconds names that were made elsewhere stay invisible.
        stubborn: whether they do even after the file system has refused to make one because it exists.
        name_cache_s, missing_name_cache_s, attribute_cache_s: for how many seconds the kernel believes what it knows.
    """

    def __init__(
        self,
        backing: Path,
        mount: Path,
        *,
        locks: Locks = "pass",
        exchange: bool = True,
        hide_new_names_s: float = 0.0,
        stubborn: bool = False,
        name_cache_s: float = 0.0,
        missing_name_cache_s: float = 0.0,
        attribute_cache_s: float = 0.0,
    ) -> None:
        self.mount = mount
        self._control = tempfile.TemporaryDirectory(prefix="chaosfs-")
        control = Path(self._control.name)
        self._settings = Settings(
            backing=str(backing.resolve()),
            mount=str(mount),
            rules_file=str(control / "rules.json"),
            log_file=str(control / "log.jsonl"),
            locks=locks,
            exchange=exchange,
            hide_new_names_s=hide_new_names_s,
            stubborn=stubborn,
            name_cache_s=name_cache_s,
            missing_name_cache_s=missing_name_cache_s,
            attribute_cache_s=attribute_cache_s,
        )
        self._output_file = control / "output"
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ChaosFS:
        self.mount.mkdir(parents=True, exist_ok=True)
        self.set_rules([])
        Path(self._settings.log_file).touch()
        command = [sys.executable, __file__, json.dumps(dataclasses.asdict(self._settings))]
        with open(self._output_file, "wb") as output:
            self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        _within(MOUNT_TIMEOUT_S, lambda: os.path.ismount(self.mount) or self._server_ended())
        if not os.path.ismount(self.mount):
            output_text = self._output_file.read_text(errors="replace")
            self._stop()
            raise RuntimeError(f"{self.mount} was not mounted within {MOUNT_TIMEOUT_S:g} s:\n{output_text}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def set_rules(self, rules: Sequence[Rule]) -> None:
        """From now on these rules hold; counting begins anew."""
        target = Path(self._settings.rules_file)
        new = target.with_suffix(".new")
        new.write_text(json.dumps([dataclasses.asdict(rule) for rule in rules]))
        os.replace(new, target)

    def operations(self, name: str | None = None) -> list[Operation]:
        """What the file system was asked for so far, or those of one name, in order."""
        lines = Path(self._settings.log_file).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        asked = [Operation(**json.loads(line)) for line in lines]
        return [operation for operation in asked if name in (None, operation.name)]

    def _server_ended(self) -> bool:
        return self._server is not None and self._server.poll() is not None

    def _stop(self) -> None:
        if os.path.ismount(self.mount):
            # Lazily: a process that a test has killed may still hold a file for a moment.
            subprocess.run(["fusermount3", "-uz", str(self.mount)], check=False, timeout=UNMOUNT_TIMEOUT_S)
        if self._server is not None:
            self._server.terminate()
            if not _within(UNMOUNT_TIMEOUT_S, self._server_ended):
                self._server.kill()
            self._server.wait(UNMOUNT_TIMEOUT_S)
            self._server = None
        self._control.cleanup()


def _within(timeout_s: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_INTERVAL_S)
    return True


def _library() -> str | None:
    # By name, because mfusepy would take libfuse 2 first where that is installed.
    return ctypes.util.find_library("fuse3")


# --- the process that serves it ---

_AT_FDCWD = -100
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


_NOTHING_SPECIAL = Rule("nothing")


class _Rules:
    """The rules in force, read again whenever the test has replaced them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._version: int | None = None
        self._rules: list[Rule] = []
        self._counts: list[int] = []
        self._guard = threading.Lock()

    def match(self, operation: str, path: str) -> Rule:
        with self._guard:
            self._reload()
            for number, rule in enumerate(self._rules):
                if rule.matches(operation, path):
                    self._counts[number] += 1
                    return rule if rule.applies_to(self._counts[number]) else _NOTHING_SPECIAL
        return _NOTHING_SPECIAL

    def _reload(self) -> None:
        version = self._file.stat().st_ino
        if version != self._version:
            self._rules = [Rule(**rule) for rule in json.loads(self._file.read_text())]
            self._counts = [0] * len(self._rules)
            self._version = version


class _NewNames:
    """Names that were made behind this mount's back and are to stay invisible for a while."""

    def __init__(self, root: str, hide_s: float) -> None:
        self._root = root
        self._hide_s = hide_s
        self._visible_from: dict[tuple[str, int], float] = {}
        if hide_s > 0:
            self._look(since=0.0)
            threading.Thread(target=self._keep_looking, daemon=True).start()

    def hidden(self, path: str) -> bool:
        """Whether ``path`` (a real one) exists but must not be seen yet."""
        if self._hide_s <= 0 or path == self._root:
            return False
        return time.monotonic() < self._note(path, since=time.monotonic())

    def made_here(self, path: str) -> None:
        """``path`` was made through this mount, or the file system has just said that it exists: it is no secret."""
        if self._hide_s > 0:
            with contextlib.suppress(OSError):
                self._visible_from[path, os.lstat(path).st_ino] = 0.0

    def _note(self, path: str, *, since: float) -> float:
        return self._visible_from.setdefault((path, os.lstat(path).st_ino), since + self._hide_s)

    def _keep_looking(self) -> None:
        while True:
            time.sleep(SCAN_INTERVAL_S)
            self._look(since=time.monotonic())

    def _look(self, *, since: float) -> None:
        for directory, directories, files in os.walk(self._root):
            for name in directories + files:
                with contextlib.suppress(OSError):
                    path = os.path.join(directory, name)
                    self._note(path, since=since - (0.0 if since else self._hide_s))


class _Passthrough:
    """The operations of the file system, by the names that mfusepy looks for. Paths begin with a slash."""

    use_ns = True

    def __init__(self, settings: Settings, caller: Callable[[], int]) -> None:
        self._settings = settings
        self._caller = caller
        self._rules = _Rules(Path(settings.rules_file))
        self._new_names = _NewNames(settings.backing, settings.hide_new_names_s)
        self._log = open(settings.log_file, "a", buffering=1, encoding="utf-8")  # noqa: SIM115  as long as the process

    def _real(self, path: str) -> str:
        return (self._settings.backing + path).rstrip("/")

    def _do(self, name: str, path: str, action: Callable[[], T]) -> T:
        """Carry out one operation, or what a rule makes of it."""
        return self._do_by_rule(name, path, lambda rule: action())

    def _do_by_rule(self, name: str, path: str, action: Callable[[Rule], T]) -> T:
        """As :meth:`_do`, for an action that does something else itself where its rule says so."""
        pid = _process_of(self._caller())
        result = "ok"
        try:
            rule = self._rules.match(name, path)
            self._misbehave(rule, pid)
            value = action(rule)
            if rule.kill == "after":
                os.kill(pid, signal.SIGKILL)
            return value
        except OSError as error:
            result = errno.errorcode.get(error.errno or 0, str(error))
            raise
        finally:
            self._log.write(json.dumps({"name": name, "path": path, "pid": pid, "result": result}) + "\n")

    def _misbehave(self, rule: Rule, pid: int) -> None:
        time.sleep(rule.delay_s)
        if rule.kill == "before":
            os.kill(pid, signal.SIGKILL)
            time.sleep(KILL_GRACE_S)
            raise OSError(errno.EINTR, "its process was killed")
        if rule.error is not None and rule.short_bytes is None:
            raise rule.as_error()

    def _make(self, name: str, path: str, action: Callable[[], T]) -> T:
        """An operation that makes ``path``. Its maker sees it, and so does who was told that it exists already."""
        try:
            value = self._do(name, path, action)
        except FileExistsError:
            if not self._settings.stubborn:
                self._new_names.made_here(self._real(path))
            raise
        self._new_names.made_here(self._real(path))
        return value

    def init_with_config(self, connection: Any, config: Any) -> None:
        config.entry_timeout = self._settings.name_cache_s
        config.negative_timeout = self._settings.missing_name_cache_s
        config.attr_timeout = self._settings.attribute_cache_s
        config.use_ino = 1

    # Looking.

    def getattr(self, path: str, handle: int | None = None) -> dict[str, int]:
        def look() -> dict[str, int]:
            info = os.fstat(handle) if handle is not None else os.lstat(self._real(path))
            if handle is None and self._new_names.hidden(self._real(path)):
                raise FileNotFoundError(errno.ENOENT, "still hidden")
            return _attributes(info)

        return self._do("getattr", path, look)

    def opendir(self, path: str) -> int:
        # Without this operation the kernel would cache listings for ever.
        return self._do("opendir", path, lambda: 0)

    def readdir(self, path: str, handle: int) -> list[tuple[str, dict[str, int], int]]:
        def entries() -> Iterator[tuple[str, dict[str, int], int]]:
            own = os.lstat(self._real(path))
            for name in (".", ".."):
                yield name, {"st_ino": own.st_ino, "st_mode": own.st_mode}, 0
            for entry in os.scandir(self._real(path)):
                with contextlib.suppress(FileNotFoundError):
                    if not self._new_names.hidden(entry.path):
                        info = entry.stat(follow_symlinks=False)
                        yield entry.name, {"st_ino": info.st_ino, "st_mode": info.st_mode}, 0

        return self._do("readdir", path, lambda: list(entries()))

    def readlink(self, path: str) -> str:
        return self._do("readlink", path, lambda: os.readlink(self._real(path)))

    def statfs(self, path: str) -> dict[str, int]:
        info = os.statvfs(self._real(path))
        return {name: getattr(info, name) for name in dir(info) if name.startswith("f_") and name != "f_fsid"}

    # Files.

    def create(self, path: str, mode: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        return self._make("create", path, lambda: os.open(self._real(path), flags, mode))

    def open(self, path: str, flags: int) -> int:
        return self._do("open", path, lambda: os.open(self._real(path), flags & ~os.O_DIRECT))

    def read(self, path: str, size: int, offset: int, handle: int) -> bytes:
        return self._do("read", path, lambda: os.pread(handle, size, offset))

    def write(self, path: str, data: bytes, offset: int, handle: int) -> int:
        def put(rule: Rule) -> int:
            if rule.short_bytes is None:
                return os.pwrite(handle, data, offset)
            os.pwrite(handle, data[: rule.short_bytes], offset)
            raise rule.as_error()

        return self._do_by_rule("write", path, put)

    def truncate(self, path: str, length: int, handle: int | None = None) -> None:
        self._do("truncate", path, lambda: os.truncate(self._real(path) if handle is None else handle, length))

    def flush(self, path: str, handle: int) -> None:
        # What close() reports: closing a second descriptor flushes, and leaves the file open.
        self._do("flush", path, lambda: os.close(os.dup(handle)))

    def release(self, path: str, handle: int) -> None:
        self._do("release", path, lambda: os.close(handle))

    def fsync(self, path: str, only_data: int, handle: int) -> None:
        self._do("fsync", path, lambda: os.fsync(handle))

    def flock(self, path: str, handle: int, how: int) -> None:
        self._do("flock", path, lambda: self._flock(handle, how))

    def _flock(self, handle: int, how: int) -> None:
        if self._settings.locks != "pass":
            raise OSError(getattr(errno, self._settings.locks), "no locks here")
        while True:  # a thread of this process must not be blocked for ever
            try:
                return fcntl.flock(handle, how if how & fcntl.LOCK_UN else how | fcntl.LOCK_NB)
            except BlockingIOError:
                if how & fcntl.LOCK_NB:
                    raise
                time.sleep(POLL_INTERVAL_S)

    # Directories and names.

    def mkdir(self, path: str, mode: int) -> None:
        self._make("mkdir", path, lambda: os.mkdir(self._real(path), mode))

    def rmdir(self, path: str) -> None:
        self._do("rmdir", path, lambda: os.rmdir(self._real(path)))

    def unlink(self, path: str) -> None:
        self._do("unlink", path, lambda: os.unlink(self._real(path)))

    def fsyncdir(self, path: str, only_data: int, handle: int) -> None:
        def sync() -> None:
            descriptor = os.open(self._real(path), os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

        self._do("fsyncdir", path, sync)

    def symlink(self, path: str, target: str) -> None:
        self._make("symlink", path, lambda: os.symlink(target, self._real(path)))

    def link(self, path: str, source: str) -> None:
        self._make("link", path, lambda: os.link(self._real(source), self._real(path)))

    def rename(self, old: str, new: str, flags: int) -> None:
        self._do_by_rule("rename", old, lambda rule: self._rename(self._real(old), self._real(new), flags, rule))
        for path in [self._real(new), *_below(self._real(new))]:
            self._new_names.made_here(path)

    def _rename(self, old: str, new: str, flags: int, rule: Rule) -> None:
        if flags and not self._settings.exchange:
            raise OSError(errno.EINVAL, "plain renames only")
        if rule.pieces_s is not None and os.path.isdir(old):
            _rename_in_pieces(old, new, rule.pieces_s)
        elif _LIBC.renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    # Attributes.

    def chmod(self, path: str, mode: int) -> None:
        self._do("chmod", path, lambda: os.chmod(self._real(path), mode))

    def chown(self, path: str, user: int, group: int) -> None:
        self._do("chown", path, lambda: os.chown(self._real(path), user, group))

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        now = time.time_ns()
        self._do("utimens", path, lambda: os.utime(self._real(path), ns=times or (now, now)))


def _attributes(info: os.stat_result) -> dict[str, int]:
    names = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_blksize")
    times = {f"st_{kind}time": int(getattr(info, f"st_{kind}time_ns")) for kind in "amc"}
    return {name: int(getattr(info, name)) for name in names} | times


def _below(directory: str) -> list[str]:
    return [os.path.join(place, name) for place, inner, files in os.walk(directory) for name in inner + files]


def _rename_in_pieces(old: str, new: str, pause_s: float) -> None:
    """What an object store makes of renaming a directory: everybody can see every moment of it."""
    for directory, _, files in os.walk(old):
        target = new + directory[len(old) :]
        os.makedirs(target, exist_ok=True)
        for name in sorted(files):
            time.sleep(pause_s)
            os.rename(os.path.join(directory, name), os.path.join(target, name))
    shutil.rmtree(old)


def _process_of(thread: int) -> int:
    """The process of a thread: FUSE tells the thread that asked."""
    try:
        status = Path(f"/proc/{thread}/status").read_text()
    except OSError:
        return thread
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Tgid:"))


def _serve(settings: Settings) -> None:
    os.umask(0)  # the kernel has applied the caller's
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.environ["FUSE_LIBRARY_PATH"] = _library() or ""
    import mfusepy  # type: ignore[import-untyped]  # only here: it loads libfuse when it is imported

    class Fuse(mfusepy.FUSE):  # type: ignore[misc]
        """mfusepy, which drops the flags of a rename, with them."""

        def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> int:
            self.operations.rename(os.fsdecode(old), os.fsdecode(new), flags)
            return 0

    options = {"allow_other": True} if os.geteuid() == 0 else {}
    Fuse(
        _Passthrough(settings, caller=lambda: int(mfusepy.fuse_get_context()[2])),
        settings.mount,
        foreground=True,
        default_permissions=True,
        fsname="chaosfs",
        subtype="chaosfs",
        max_threads=10,
        **options,
    )


if __name__ == "__main__":
    _serve(Settings(**json.loads(sys.argv[1])))
