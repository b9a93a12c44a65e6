"""Every file system operation of a rank, seen, numbered, written down, and if need be the last thing it does.

A :class:`Tape` stands between a rank's Python code and the system: opening for writing, writing, fsync, rename,
exchange, link, unlink, mkdir, rmdir, chmod. It only looks at what is below the disks of a trial. C code that writes
(torch, safetensors) goes past it; whoever calls such code says so (:meth:`Tape.around`).

Operations of all ranks happen one after the other, under a lock that its holder's death releases. So the tape has one
order for all ranks, a kill of everybody interrupts no operation of anybody, and the tape of a run says exactly what
was on the disks at each moment. :func:`tests.faults.powercut.cuts_of` makes power cuts of it.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import io
import json
import os
import re
import signal
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from safe_trainer import commit
from safe_trainer.channel import Channel

T = TypeVar("T")

KILLED = "killed"
CLAIM = "claim"
# What goes on beside a save has no operations.
TRAINING = "training step"


@dataclass(frozen=True)
class Operation:
    """One operation of one rank.

    Attributes:
        rank: whose.
        phase: the step of the channel that the rank was in, or was last in.
        op: what was done; :data:`KILLED` and :data:`CLAIM` are marks between operations.
        path, to: relative to the trial's root; ``to`` where there are two.
        key: stable from run to run: phase, ``op``, the path without what is random in it, and which one of its kind.
        ok: whether it succeeded.
        content: where the content of a file that this operation took away has been kept.
    """

    rank: int
    phase: str
    op: str
    path: str
    to: str = ""
    key: str = ""
    ok: bool = True
    content: str = ""


@dataclass(frozen=True)
class Kill:
    """Where to die: ``rank`` at its operation ``key``, before or after it, alone or with everybody."""

    rank: int
    key: str
    after: bool
    everyone: bool


@dataclass(frozen=True)
class TapeSpec:
    """What a rank needs to know to lay a tape.

    Attributes:
        root: the trial's root, with a directory for each disk.
        directory: where the tape is, outside of the disks and on the same file system.
        kill: where to die, if at all.
        keep_contents: keep what operations take away, for :mod:`tests.faults.powercut`.
    """

    root: Path
    directory: Path
    kill: Kill | None = None
    keep_contents: bool = False

    @property
    def log(self) -> Path:
        return self.directory / "tape"


def read_tape(spec: TapeSpec) -> list[Operation]:
    """What all ranks have done, in order."""
    if not spec.log.exists():
        return []
    return [Operation(**json.loads(line)) for line in spec.log.read_text().splitlines()]


class Tape:
    """Lays the tape of one rank. For a process that ends afterwards: what :meth:`install` puts in place stays."""

    def __init__(self, spec: TapeSpec, *, rank: int, pids: Sequence[int]) -> None:
        self._spec = spec
        self._root = f"{spec.root}/"
        self._rank = rank
        # Held open, they stand for these processes even when the numbers are used again.
        self._others = [os.pidfd_open(pid) for pid in pids if pid != os.getpid()]
        self._seen: Counter[tuple[str, str, str]] = Counter()
        self._phase = ""
        self._within_process = threading.RLock()
        self._log = os.open(spec.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        # flock belongs to the open file, so each rank opens its own: a rank that dies releases it.
        self._between_processes = os.open(spec.directory / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        self._depth = 0

    def enter(self, phase: str) -> None:
        """From here on, operations belong to ``phase``."""
        self._phase = phase

    def claim(self, what: str) -> None:
        """Note that from now on ``what`` must survive whatever comes."""
        with self._alone():
            self._note(Operation(self._rank, self._phase, CLAIM, what))

    def around(self, op: str, path: str | os.PathLike[str], action: Callable[[], T], *, to: str = "") -> T:
        """Run ``action``, which does ``op`` to ``path``, as one operation."""
        own, other = self._relative(path), self._relative(to) if to else ""
        if own is None or other is None:
            return action()
        with self._alone():
            key = self._key(op, own, other)
            self._perhaps_die(key, after=False)
            content = self._keep(op, own, other) if self._spec.keep_contents else ""
            try:
                result = action()
            except OSError:
                self._note(Operation(self._rank, self._phase, op, own, other, key, ok=False))
                self._perhaps_die(key, after=True)
                raise
            succeeded = result is not False  # exchange() says so where there is none
            self._note(Operation(self._rank, self._phase, op, own, other, key, succeeded, content))
            self._perhaps_die(key, after=True)
            return result

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._within_process:
            if self._depth == 0:
                fcntl.flock(self._between_processes, fcntl.LOCK_EX)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    fcntl.flock(self._between_processes, fcntl.LOCK_UN)

    def _relative(self, path: str | os.PathLike[str]) -> str | None:
        full = os.path.abspath(path)
        return full[len(self._root) :] if full.startswith(self._root) else None

    def _key(self, op: str, path: str, to: str) -> str:
        name = without_chance(f"{path} -> {to}" if to else path)
        self._seen[self._phase, op, name] += 1
        count = self._seen[self._phase, op, name]
        return f"[{self._phase}] {op} {name}" + (f" #{count}" if count > 1 else "")

    def _note(self, operation: Operation) -> None:
        _REAL_WRITE(self._log, (json.dumps(asdict(operation)) + "\n").encode())

    def _perhaps_die(self, key: str, *, after: bool) -> None:
        kill = self._spec.kill
        if kill is None or (kill.rank, kill.key, kill.after) != (self._rank, key, after):
            return
        self._note(Operation(self._rank, self._phase, KILLED, key))
        # The lock is not released before this process is gone: nobody is in the middle of an operation, or begins one.
        if kill.everyone:
            for process in self._others:
                signal.pidfd_send_signal(process, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def _keep(self, op: str, path: str, to: str) -> str:
        """Keep the file that ``op`` is about to take away or to overwrite, as a link in the tape's directory."""
        going = to if op in ("rename", "replace") else path if op in ("unlink", "truncate") else ""
        if not going or not os.path.isfile(self._root + going):
            return ""
        kept = self._spec.directory / f"content-{os.fstat(self._log).st_size}"
        _REAL_LINK(self._root + going, kept)
        return str(kept)

    # --- what is put in the place of the system's functions ---

    def install(self) -> None:
        """See everything from now on, in this process."""
        self._follow_phases()
        self._replace_open()
        self._replace_two_paths("rename", os.rename)
        self._replace_two_paths("replace", os.replace)
        self._replace_two_paths("link", os.link)
        for name in ("unlink", "remove", "rmdir", "mkdir", "chmod"):
            self._replace_one_path(name, getattr(os, name))
        for name in ("fsync", "fdatasync", "fchmod", "write", "ftruncate", "pwrite"):
            self._replace_descriptor(name, getattr(os, name))
        self._replace_descriptor("sendfile", os.sendfile)
        exchange = commit.exchange

        def traced_exchange(first: Path, second: Path) -> bool:
            return self.around("exchange", first, lambda: exchange(first, second), to=str(second))

        commit.exchange = traced_exchange

    def _follow_phases(self) -> None:
        together = Channel.together

        def traced_together(channel: Channel, phase: str, action: Callable[[], T], *more: Any, **named: Any) -> list[T]:
            def within() -> T:
                if phase != TRAINING:
                    self.enter(phase)
                return action()

            return together(channel, phase, within, *more, **named)

        Channel.together = traced_together  # type: ignore[method-assign, assignment]

    def _replace_open(self) -> None:
        real_os_open, real_open = os.open, io.open
        tape = self

        class TracedFile(io.FileIO):
            def write(self, data: Any, /) -> int:
                return tape.around("write", _path_of(self.fileno()), lambda: super(TracedFile, self).write(data))

        def traced_os_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            def action() -> int:
                return real_os_open(path, flags, mode, dir_fd=dir_fd)

            full = _full(path, dir_fd)
            if not flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
                return action()
            return self.around(_kind_of_open(full, truncates=bool(flags & os.O_TRUNC)), full, action)

        def traced_open(file: Any, mode: str = "r", buffering: int = -1, *more: Any, **named: Any) -> Any:
            if not set(mode) & set("wax+") or named.get("opener") is not None:
                return real_open(file, mode, buffering, *more, **named)
            full = _path_of(file) if isinstance(file, int) else _full(file, None)
            if self._relative(full) is None:
                return real_open(file, mode, buffering, *more, **named)
            raw_mode = mode.replace("b", "").replace("t", "")

            def action() -> TracedFile:
                return TracedFile(file, raw_mode, closefd=named.pop("closefd", True))

            raw = action() if isinstance(file, int) else self.around(_kind_of_open(full, "w" in raw_mode), full, action)
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *more, **named)

        os.open = traced_os_open
        builtins.open = io.open = traced_open  # type: ignore[assignment]

    def _replace_two_paths(self, name: str, real: Callable[..., None]) -> None:
        def traced(first: Any, second: Any, *more: Any, **named: Any) -> None:
            source, target = _full(first, named.get("src_dir_fd")), _full(second, named.get("dst_dir_fd"))
            self.around(name, source, lambda: real(first, second, *more, **named), to=target)

        setattr(os, name, traced)

    def _replace_one_path(self, name: str, real: Callable[..., None]) -> None:
        op = "unlink" if name == "remove" else name

        def traced(path: Any, *more: Any, **named: Any) -> None:
            full = _path_of(path) if isinstance(path, int) else _full(path, named.get("dir_fd"))
            self.around(op, full, lambda: real(path, *more, **named))

        setattr(os, name, traced)

    def _replace_descriptor(self, name: str, real: Callable[..., Any]) -> None:
        op = {"fdatasync": "fsync", "fchmod": "chmod", "sendfile": "write", "pwrite": "write"}.get(name, name)
        op = "write" if name == "ftruncate" else op

        def traced(descriptor: int, *more: Any, **named: Any) -> Any:
            return self.around(op, _path_of(descriptor), lambda: real(descriptor, *more, **named))

        setattr(os, name, traced)


# Before anything is replaced: the tape itself must not be on the tape.
_REAL_WRITE = os.write
_REAL_LINK = os.link

_CHANCE = (
    (re.compile(r"[0-9a-f]{32}"), "*"),
    (re.compile(r"\b\d+-[0-9a-f]{8}-(\d+-\w+)"), r"run-\1"),
)


def without_chance(path: str) -> str:
    """``path`` without what differs from run to run: random names, and the runs' ids and generations."""
    for pattern, instead in _CHANCE:
        path = pattern.sub(instead, path)
    return path


def _path_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def _full(path: Any, dir_fd: int | None) -> str:
    name = os.fsdecode(path)
    return name if dir_fd is None or os.path.isabs(name) else f"{_path_of(dir_fd)}/{name}"


def _kind_of_open(path: str, truncates: bool) -> str:
    try:
        size = os.stat(path).st_size
    except OSError:
        return "create"
    if stat.S_ISREG(os.stat(path).st_mode) and truncates and size:
        return "truncate"
    return "open"
