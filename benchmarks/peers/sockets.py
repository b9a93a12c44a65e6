"""Raw sockets between two plain processes: the wire alone, or with the sink that a gather has.

The sender reads a file in blocks and sends them; the receiver takes them into three buffers, and a second thread writes
them down and fsyncs. With digests, both take the one that checkpoints have, over the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import package
from benchmarks.process import barrier, exchange, listening, rank

BLOCK_BYTES = 16 << 20
BUFFERS = 3
TIMEOUT_S = 600.0


@contextlib.contextmanager
def connection(*, source: int, destination: int) -> Iterator[socket.socket | None]:
    """A connection from rank to rank; None on the ranks that are neither. Called on every rank."""
    peer: socket.socket | None = None
    nowhere: tuple[str, int] | None = None
    if rank() == destination:
        with listening() as server:
            host, port = server.getsockname()[:2]
            exchange((host, port))
            server.settimeout(TIMEOUT_S)
            peer, _ = server.accept()
            peer.settimeout(TIMEOUT_S)
    else:
        address = exchange(nowhere)[destination]
        if rank() == source and address is not None:
            peer = socket.create_connection(address, timeout=TIMEOUT_S)
    with contextlib.nullcontext() if peer is None else peer:
        yield peer


def wire_seconds(*, total_bytes: int, source: int, destination: int) -> float:
    """Seconds from the first byte to the receiver's answer after the last one; nothing is read or written. Every rank
    calls it; the sender gives the time, the others 0.0."""
    with connection(source=source, destination=destination) as peer:
        barrier()
        if peer is None:
            return 0.0
        buffer = memoryview(bytearray(min(BLOCK_BYTES, total_bytes)))
        if rank() == destination:
            left = total_bytes
            while left:
                left -= _fill(peer, buffer, min(left, len(buffer)))
            peer.sendall(b"!")
            return 0.0
        started = time.perf_counter()
        left = total_bytes
        while left:
            count = min(left, len(buffer))
            peer.sendall(buffer[:count])
            left -= count
        peer.recv(1)
        return time.perf_counter() - started


def move_file(peer: socket.socket | None, *, path: Path, target: Path, sends: bool, digests: bool) -> None:
    """Bring one file through a connection, durable when this returns on both sides; nothing to do where there is none.

    Args:
        peer: what :func:`connection` gave.
        path: of the file, for the sender.
        target: where it goes, for the receiver.
        sends: which of the two this is.
        digests: whether both take the digest that checkpoints have, and compare.
    """
    if peer is None:
        return
    if sends:
        _send(peer, path, digests=digests)
    else:
        _receive(peer, target, digests=digests)


def _send(peer: socket.socket, path: Path, *, digests: bool) -> None:
    digest = package.new_digest()
    peer.sendall(path.stat().st_size.to_bytes(8, "big"))
    with open(path, "rb", buffering=0) as stream:
        if digests:
            buffer = memoryview(bytearray(BLOCK_BYTES))
            while count := stream.readinto(buffer):
                digest.update(buffer[:count])
                peer.sendall(buffer[:count])
        else:
            peer.sendfile(stream)
    answer = _exactly(peer, 16)
    if digests and answer != digest.digest():
        raise OSError("the bytes did not arrive as they were sent")


def _receive(peer: socket.socket, target: Path, *, digests: bool) -> None:
    size = int.from_bytes(_exactly(peer, 8), "big")
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = package.new_digest()
    free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    full: queue.SimpleQueue[tuple[memoryview, int] | None] = queue.SimpleQueue()
    for _ in range(BUFFERS):
        free.put(memoryview(bytearray(min(BLOCK_BYTES, max(size, 1)))))

    with open(target, "wb", buffering=0) as stream:

        def write_down() -> None:
            while (item := full.get()) is not None:
                buffer, count = item
                if digests:
                    digest.update(buffer[:count])
                done = 0
                while done < count:
                    done += stream.write(buffer[done:count])
                free.put(buffer)

        writer = threading.Thread(target=write_down)
        writer.start()
        left = size
        while left:
            buffer = free.get()
            count = _fill(peer, buffer, min(left, len(buffer)))
            full.put((buffer, count))
            left -= count
        full.put(None)
        writer.join()
        os.fsync(stream.fileno())
    peer.sendall(digest.digest())


def _fill(peer: socket.socket, buffer: memoryview, total: int) -> int:
    got = 0
    while got < total:
        count = peer.recv_into(buffer[got:total])
        if not count:
            raise OSError("the sender has gone")
        got += count
    return got


def _exactly(peer: socket.socket, count: int) -> bytes:
    buffer: Any = bytearray(count)
    _fill(peer, memoryview(buffer), count)
    return bytes(buffer)
