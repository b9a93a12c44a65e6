"""Files from rank to rank, in chunks of bounded size, digested on both ends.

A plan is a list of :class:`Shipment`, the same on every rank. Each pair of sender and receiver is a lane; lanes run
side by side. Ranks work through the plan in its order, so no two of them ever wait for each other in a circle.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from safe_trainer.channel import Channel
from safe_trainer.disk import naming
from safe_trainer.errors import CheckpointError, ConsequenceError
from safe_trainer.layout import resolve_inside
from safe_trainer.manifest import FileEntry
from safe_trainer.topology import Domain

CHUNK_BYTES = 8 << 20
_FAILED = -1

Progress = Callable[[int], object]


@dataclass(frozen=True)
class Shipment:
    """One file on its way.

    Attributes:
        entry: the file, with the digest that it must have on arrival.
        source, destination: global ranks, which are never equal.
    """

    entry: FileEntry
    source: int
    destination: int


def plan_shipments(entries: Iterable[FileEntry], *, source: Domain, destination: Domain) -> list[Shipment]:
    """Spread ``entries`` over the lanes between two domains, the largest first to whoever has least to carry."""
    lane_count = min(len(source.ranks), len(destination.ranks))
    load = dict.fromkeys(range(lane_count), 0)
    shipments = []
    for entry in sorted(entries, key=lambda entry: (-entry.size, entry.path)):
        lane = min(load, key=lambda lane: (load[lane], lane))
        load[lane] += entry.size
        shipments.append(Shipment(entry, source.ranks[lane], destination.ranks[lane]))
    return shipments


def ship(
    channel: Channel,
    shipments: Sequence[Shipment],
    *,
    source_root: Path | None,
    destination_root: Path | None,
    progress: Progress = lambda count: None,
) -> int:
    """Carry out a plan; every rank calls it with the same plan.

    A file that cannot be read, written or is not what its entry says does not stop the others: the plan is carried
    out to its end, so that nobody is left waiting, and then this rank raises. The caller makes that everyone's error
    with :meth:`~safe_trainer.channel.Channel.together`.

    Args:
        channel: the control channel.
        shipments: the plan, in the same order on every rank.
        source_root: where this rank's outgoing files are; None where it sends nothing.
        destination_root: where this rank puts incoming files; None where it receives nothing.
        progress: called with the number of bytes that have arrived here.

    Returns:
        The number of bytes that this rank received.

    Raises:
        CheckpointError, OSError: at least one file could not be sent from or stored on this rank.
    """
    buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
    problems: list[Exception] = []
    received = 0
    for shipment in shipments:
        if channel.rank == shipment.source:
            problem = _send_file(channel, shipment, source_root, buffer)
        elif channel.rank == shipment.destination:
            problem = _receive_file(channel, shipment, destination_root, buffer, progress)
            received += shipment.entry.size
        else:
            continue
        if problem is not None:
            problems.append(problem)
    for problem in problems:
        if isinstance(problem, (CheckpointError, OSError)):
            raise problem
        raise CheckpointError(f"a file could not be sent or stored: {problem!r}") from problem
    return received


def _send_file(channel: Channel, shipment: Shipment, root: Path | None, buffer: torch.Tensor) -> Exception | None:
    """Send one file as pairs of a length and that many bytes; a length of 0 ends it, of -1 says that it failed.

    Whatever goes wrong with the file is returned. Only the channel's own errors are raised: then nobody can go on.
    """
    view = buffer.numpy().data
    blocks = _blocks(root, shipment.entry.path, view)
    problem: Exception | None = None
    while True:
        try:
            count = next(blocks, 0)
        except Exception as error:
            problem = error
            break
        if not count:
            break
        _send_length(channel, shipment, count)
        channel.send(buffer[:count], to_rank=shipment.destination)
    _send_length(channel, shipment, 0 if problem is None else _FAILED)
    return problem


def _blocks(root: Path | None, path: str, view: memoryview) -> Iterator[int]:
    """Read a file into ``view``, a block at a time; gives the length of each."""
    with _open_source(root, path) as stream:
        while True:
            with naming(Path(str(stream.name))):
                count = stream.readinto(view)
            if not count:
                return
            yield count


def _open_source(root: Path | None, path: str) -> io.FileIO:
    if root is None:
        raise CheckpointError(f"this rank was asked for {path} but has no files to send")
    return io.FileIO(resolve_inside(root, path), "rb")


def _send_length(channel: Channel, shipment: Shipment, length: int) -> None:
    channel.send(torch.tensor([length], dtype=torch.int64), to_rank=shipment.destination)


def _receive_file(
    channel: Channel, shipment: Shipment, root: Path | None, buffer: torch.Tensor, progress: Progress
) -> Exception | None:
    """Receive one file to its end, whatever happens to it here; returns what went wrong."""
    length = torch.empty(1, dtype=torch.int64)
    with _Sink(root, shipment.entry) as sink:
        while True:
            channel.receive(length, from_rank=shipment.source)
            count = int(length.item())
            if count == _FAILED:
                return ConsequenceError(f"{shipment.entry.path} could not be read on rank {shipment.source}")
            if count == 0:
                return sink.finish()
            if not 0 < count <= CHUNK_BYTES:
                raise CheckpointError(
                    f"rank {shipment.source} announced {count} bytes of {shipment.entry.path} at once; the ranks are "
                    "out of step. Do they run the same version of safe_trainer?"
                )
            channel.receive(buffer[:count], from_rank=shipment.source)
            sink.write(buffer.numpy().data[:count])
            progress(count)


class _Sink:
    """Where an incoming file goes. After a failure it swallows the rest, so that its sender can go on."""

    def __init__(self, root: Path | None, entry: FileEntry) -> None:
        self._entry = entry
        self._digest = xxhash.xxh3_128()
        self._path: Path | None = None
        self._descriptor: int | None = None
        self._expected = entry.size
        self._problem: Exception | None = None
        try:
            if root is None:
                raise CheckpointError(f"{entry.path} was sent to a rank that keeps no files")
            self._path = path = resolve_inside(root, entry.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            # O_EXCL: a file of that name that is already there, or a link, is somebody's mistake and is left alone.
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        except Exception as error:
            self._problem = error

    def __enter__(self) -> _Sink:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def write(self, block: memoryview) -> None:
        """Append ``block``."""

        def append(descriptor: int) -> None:
            rest = block
            self._expected -= len(rest)
            if self._expected < 0:
                raise CheckpointError(
                    f"{self._entry.path} arrived with other content than it was sent with (more than its "
                    f"{self._entry.size} bytes)"
                )
            self._digest.update(rest)
            while rest:
                rest = rest[os.write(descriptor, rest) :]

        self._attempt(append)

    def finish(self) -> Exception | None:
        """Make the file durable and compare its digest; returns what went wrong with it, now or before."""

        def make_durable(descriptor: int) -> None:
            os.fchmod(descriptor, self._entry.mode)
            os.fsync(descriptor)
            if self._digest.hexdigest() != self._entry.digest:
                raise CheckpointError(
                    f"{self._entry.path} arrived with other content than it was sent with (digest differs)"
                )

        self._attempt(make_durable)
        return self._problem

    def _attempt(self, action: Callable[[int], None]) -> None:
        """Run ``action`` on the open file, unless something has gone wrong before."""
        if self._problem is not None or self._descriptor is None or self._path is None:
            return
        try:
            with naming(self._path):
                action(self._descriptor)
        except Exception as error:
            self._problem = error


def total_bytes_by_destination(shipments: Iterable[Shipment]) -> dict[int, int]:
    """How many bytes each rank will receive."""
    total: dict[int, int] = defaultdict(int)
    for shipment in shipments:
        total[shipment.destination] += shipment.entry.size
    return total
