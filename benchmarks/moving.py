"""Files from one rank to another, by ours and by other means, each durable when its time ends. Runs on every rank."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks import package
from benchmarks.measure import Unavailable, flush_disks
from benchmarks.peers import fsync, rsync, sockets, ssh, tar
from benchmarks.process import barrier, exchange, rank

FILE_NAME = "file-{:05d}.bin"
BLOCK_BYTES = 16 << 20


def make_files(*, root: str, count: int, total_bytes: int, on_rank: int) -> None:
    """``count`` files of equal size, ``total_bytes`` together, on one rank, in its memory and on its disk."""
    if rank() == on_rank:
        path = Path(root)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        block = memoryview(np.random.default_rng(1).bytes(BLOCK_BYTES))
        for index in range(count):
            left = total_bytes // count
            with open(path / FILE_NAME.format(index), "wb") as stream:
                while left:
                    left -= stream.write(block[: min(left, len(block))])
        flush_disks()
    barrier()


def remove(*, root: str) -> None:
    """Delete a directory, on every rank that sees it."""
    barrier()
    shutil.rmtree(root, ignore_errors=True)
    barrier()


def move_seconds(*, tool: str, source_root: str, destination_root: str, source: int, destination: int) -> float:
    """Seconds that this rank needed to bring everything below ``source_root`` to ``destination``.

    Args:
        tool: one of :data:`TOOLS`.
        source_root: on the sender.
        destination_root: on the receiver; not there before, and removed afterwards.
        source, destination: ranks.
    """
    target = Path(destination_root)
    if rank() == destination:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        flush_disks()
    with TOOLS[tool](Path(source_root), target, source, destination) as move:
        barrier()
        started = time.perf_counter()
        move()
        seconds = time.perf_counter() - started
        barrier()
    if rank() == destination:
        shutil.rmtree(target, ignore_errors=True)
    barrier()
    return seconds


# --- the tools: each is entered before the time is taken, and gives what is timed ---


@contextlib.contextmanager
def _ours(
    root: Path, target: Path, source: int, destination: int, digests: bool = True
) -> Iterator[Callable[[], None]]:
    own = package.Consignment.below(root, source=source, destination=destination) if rank() == source else None
    consignment = exchange(own)[source]
    assert consignment is not None
    with package.open_channel() as channel:
        yield lambda: package.move_files(
            channel, consignment, source_root=root, destination_root=target, digests=digests
        )


@contextlib.contextmanager
def _ours_without_digests(root: Path, target: Path, source: int, destination: int) -> Iterator[Callable[[], None]]:
    with _ours(root, target, source, destination, digests=False) as move:
        yield move


@contextlib.contextmanager
def _raw(
    root: Path, target: Path, source: int, destination: int, digests: bool = False
) -> Iterator[Callable[[], None]]:
    name = FILE_NAME.format(0)
    with sockets.connection(source=source, destination=destination) as peer:
        yield lambda: sockets.move_file(
            peer, path=root / name, target=target / name, sends=rank() == source, digests=digests
        )


@contextlib.contextmanager
def _raw_with_digests(root: Path, target: Path, source: int, destination: int) -> Iterator[Callable[[], None]]:
    with _raw(root, target, source, destination, digests=True) as move:
        yield move


@contextlib.contextmanager
def _rsync(root: Path, target: Path, source: int, destination: int) -> Iterator[Callable[[], None]]:
    _require_on_both(rsync.problem() if rank() in (source, destination) else None)
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(rsync.serve(target)) if rank() == destination else None
        address = exchange(address)[destination]
        assert address is not None
        push: Callable[[], None] = lambda: rsync.push(root, address)  # noqa: E731
        yield lambda: _pushed(push, target, source, destination)


@contextlib.contextmanager
def _scp(root: Path, target: Path, source: int, destination: int) -> Iterator[Callable[[], None]]:
    _require_on_both(ssh.problem() if rank() in (source, destination) else None)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ssh.serve()) if rank() == destination else None
        server, there = exchange((server, str(target)))[destination]
        assert server is not None
        push: Callable[[], None] = lambda: ssh.push(root, there, server)  # noqa: E731
        yield lambda: _pushed(push, target, source, destination)


@contextlib.contextmanager
def _tar(root: Path, target: Path, source: int, destination: int) -> Iterator[Callable[[], None]]:
    _require_on_both(tar.problem() if rank() in (source, destination) else None)
    with sockets.connection(source=source, destination=destination) as peer:

        def move() -> None:
            tar.move(peer, source_root=root, destination_root=target, sends=rank() == source)
            if rank() == destination:
                fsync.tree(target)

        yield move


def _pushed(push: Callable[[], None], target: Path, source: int, destination: int) -> None:
    """What these tools leave out belongs to it, too: a copy that a power cut takes away is none."""
    if rank() == source:
        push()
    barrier()
    if rank() == destination:
        fsync.tree(target)


def _require_on_both(problem: str | None) -> None:
    for reason in exchange(problem):
        if reason is not None:
            raise Unavailable(reason)


TOOLS: dict[str, Callable[..., contextlib.AbstractContextManager[Callable[[], None]]]] = {
    "ours": _ours,
    "ours without digests": _ours_without_digests,
    "raw sockets": _raw,
    "raw sockets with digests": _raw_with_digests,
    "rsync daemon": _rsync,
    "scp": _scp,
    "tar over a socket": _tar,
}
