"""Files from rank to rank: over several lanes, large files split, small ones packed, digested in passing.

A plan is a list of :class:`Shipment`, the same on every rank. Each pair of sender and receiver is a lane, and what goes
over a lane is one stream of bytes: the lane's shipments one after another, cut into chunks without regard to where a
file ends. Lanes run side by side. Ranks work through their lanes in the plan's order, so no two of them ever wait for
each other in a circle.

Both ends read or write one chunk while another is on the wire, and take the digests as the bytes pass. After the last
chunk the sender tells its digests, and the receiver compares.
"""

from __future__ import annotations

import errno
import functools
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from safe_trainer.channel import Channel, Transit
from safe_trainer.digest import DIGEST_BYTES, BlockDigester, Digests, block_count, united, whole_blocks
from safe_trainer.disk import (
    FSYNC_THREADS,
    LARGE_BYTES,
    fsync_files,
    naming,
    preallocate,
    preallocates,
    start_writeback,
)
from safe_trainer.errors import CheckpointError, ConsequenceError
from safe_trainer.layout import FileStat, check_relative_path, resolve_inside
from safe_trainer.topology import Domain

CHUNK_BYTES = 16 << 20
# Two on the wire, and one being read, or stored: 48 MiB per rank, whatever the checkpoint's size.
BUFFERS = 3
ON_THE_WIRE = 2
# What is read or about to be written is digested while the processor's caches have it.
PIECE_BYTES = 1 << 20
MAX_OPEN_FILES = 256

_GOOD, _GIVEN_UP = 0, 1

Progress = Callable[[int], object]


@dataclass(frozen=True)
class Shipment:
    """A stretch of one file on its way, at most the whole file.

    Attributes:
        path: relative to the checkpoint.
        size: of the whole file, in bytes.
        mode: its permission bits.
        offset, length: of the stretch, in bytes; the offset is a multiple of :data:`~safe_trainer.digest.BLOCK_BYTES`.
        source, destination: global ranks, which are never equal.
    """

    path: str
    size: int
    mode: int
    offset: int
    length: int
    source: int
    destination: int


@dataclass
class Shipped:
    """What a rank sent and received.

    Attributes:
        received_bytes: how much has arrived here.
        digests: of the blocks that this rank has sent or received, by path and number of the block.
    """

    received_bytes: int = 0
    digests: Digests = field(default_factory=dict)


def plan_shipments(files: Mapping[str, FileStat], *, source: Domain, destination: Domain) -> list[Shipment]:
    """Spread ``files`` over the lanes between two domains, alike in bytes; long files are cut between blocks."""
    lanes = list(zip(source.ranks, destination.ranks, strict=False))
    share = -(-sum(info.size for info in files.values()) // len(lanes))
    shipments = []
    lane = load = 0
    for path, info in sorted(files.items()):
        offset = 0
        while True:
            if load >= share and lane < len(lanes) - 1:
                lane, load = lane + 1, 0
            length = info.size - offset
            if lane < len(lanes) - 1:
                length = min(length, whole_blocks(share - load))
            shipments.append(Shipment(path, info.size, info.mode, offset, length, *lanes[lane]))
            load += length
            offset += length
            if offset >= info.size:
                break
    return shipments


def ship(
    channel: Channel,
    shipments: Sequence[Shipment],
    *,
    source_root: Path | None,
    destination_root: Path | None,
    progress: Progress = lambda count: None,
) -> Shipped:
    """Carry out a plan; every rank calls it with the same plan, inside a step (:meth:`Channel.together`).

    When a file cannot be read or written somewhere, that is made known at once and all lanes end with their next chunk.
    What has arrived here is durable and has the digests that it was sent with.

    Args:
        channel: the control channel.
        shipments: the plan, in the same order on every rank.
        source_root: where this rank's outgoing files are; None where it sends nothing.
        destination_root: where this rank puts incoming files; None where it receives nothing.
        progress: called with the number of bytes that have arrived here.

    Raises:
        CheckpointError, OSError: a file could not be sent from or stored on this rank, or on another one.
    """
    shipped = Shipped()
    own = [lane for lane in _lanes(shipments) if channel.rank in (lane.source, lane.destination)]
    if not own:
        return shipped
    longest = min(CHUNK_BYTES, max(lane.length for lane in own))
    # One byte more than a chunk, which says whether the chunk is good.
    buffers = [torch.empty(longest + 1, dtype=torch.uint8) for _ in range(BUFFERS)]
    problem: Exception | None = None
    with ThreadPoolExecutor(1, "safe_trainer file") as worker:
        means = _Means(channel, buffers, worker, shipped, progress)
        here, there = _Places(source_root), _Places(destination_root)
        for lane in own:
            if lane.source == channel.rank:
                found = _send(means, lane, _Source(here, lane.shipments), given_up=problem is not None)
            else:
                found = _receive(means, lane, _Sink(there, lane.shipments, problem))
            problem = problem or found
    if problem is None:
        return shipped
    if isinstance(problem, (CheckpointError, OSError)):
        raise problem
    raise CheckpointError(f"a file could not be sent or stored: {problem!r}") from problem


def bytes_by_destination(shipments: Sequence[Shipment]) -> dict[int, int]:
    """How many bytes each rank will receive."""
    total: dict[int, int] = defaultdict(int)
    for shipment in shipments:
        total[shipment.destination] += shipment.length
    return total


# --- a lane ---


@dataclass(frozen=True)
class _Lane:
    source: int
    destination: int
    shipments: tuple[Shipment, ...]

    @property
    def length(self) -> int:
        return sum(shipment.length for shipment in self.shipments)

    @property
    def chunks(self) -> list[int]:
        """The chunks' lengths in bytes, known on both ends. There is at least one."""
        whole, rest = divmod(self.length, CHUNK_BYTES)
        return [CHUNK_BYTES] * whole + [rest] * (rest > 0 or whole == 0)

    @property
    def blocks(self) -> list[tuple[str, int]]:
        """Path and number of every block that goes over this lane, in order."""
        return [
            (shipment.path, shipment.offset // whole_blocks(1) + number)
            for shipment in self.shipments
            for number in range(block_count(shipment.length))
        ]


def _lanes(shipments: Sequence[Shipment]) -> list[_Lane]:
    lanes: dict[tuple[int, int], list[Shipment]] = defaultdict(list)
    for shipment in shipments:
        lanes[shipment.source, shipment.destination].append(shipment)
    return [_Lane(source, destination, tuple(stream)) for (source, destination), stream in lanes.items()]


@dataclass(frozen=True)
class _Means:
    """What all lanes of a rank use, one after the other."""

    channel: Channel
    buffers: Sequence[torch.Tensor]
    worker: ThreadPoolExecutor
    shipped: Shipped
    progress: Progress


def _send(means: _Means, lane: _Lane, source: _Source, *, given_up: bool) -> Exception | None:
    """Send a lane's stream. Whatever goes wrong with a file is returned; only the channel's own errors are raised.

    Two chunks are on the wire at a time, so that it does not stand still between them; where the stream is given up,
    the chunk after the one that says so is sent as well, since its receiver waits for it already.
    """
    channel, buffers, worker = means.channel, means.buffers, means.worker
    chunks = lane.chunks
    with source:
        first = zip(buffers, chunks, strict=False)
        filling = deque(worker.submit(source.fill, buffer[:count]) for buffer, count in first)
        sending: deque[Transit] = deque()
        was_given_up = False
        for number, count in enumerate(chunks):
            if len(sending) == ON_THE_WIRE:
                sending.popleft().wait()
                following = number - ON_THE_WIRE + len(buffers)
                if following < len(chunks):
                    into = buffers[following % len(buffers)]
                    filling.append(worker.submit(source.fill, into[: chunks[following]]))
            filling.popleft().result()
            if source.problem is not None and not given_up:
                channel.tell(source.problem)
            given_up = given_up or source.problem is not None or channel.others_failed
            buffer = buffers[number % len(buffers)]
            buffer[count] = _GIVEN_UP if given_up else _GOOD
            sending.append(channel.start_send(buffer[: count + 1], to_rank=lane.destination))
            if was_given_up:
                break
            was_given_up = given_up
        _wait_for_all(filling)
        for transit in sending:
            transit.wait()
        if given_up:
            return source.problem or ConsequenceError(f"sending to rank {lane.destination} was given up")
        digests = source.finish()
        if source.problem is not None:
            channel.tell(source.problem)
    # After the last chunk it is too late to give up: what went wrong then shows in the digests.
    told = b"".join(digests.get(path, {}).get(number, bytes(DIGEST_BYTES)) for path, number in lane.blocks)
    channel.send(torch.frombuffer(bytearray(told), dtype=torch.uint8), to_rank=lane.destination)
    means.shipped.digests = united([means.shipped.digests, digests])
    return source.problem


def _receive(means: _Means, lane: _Lane, sink: _Sink) -> Exception | None:
    """Receive a lane's stream up to its end, or up to where it is given up; returns what went wrong."""
    channel, buffers, shipped = means.channel, means.buffers, means.shipped
    chunks = lane.chunks
    with sink:
        storing: deque[Future[None]] = deque()
        receiving: deque[Transit] = deque()
        is_told = False
        for number, count in enumerate(chunks):
            for ahead in range(number + len(receiving), min(number + ON_THE_WIRE, len(chunks))):
                if len(storing) > len(buffers) - ON_THE_WIRE:
                    storing.popleft().result()
                into = buffers[ahead % len(buffers)]
                receiving.append(channel.start_receive(into[: chunks[ahead] + 1], from_rank=lane.source))
            receiving.popleft().wait()
            buffer = buffers[number % len(buffers)]
            if buffer[count] != _GOOD:
                _wait_for_all(storing)
                for transit in receiving:
                    transit.wait()
                return sink.problem or ConsequenceError(f"rank {lane.source} has given up sending")
            if sink.problem is not None and not is_told:
                channel.tell(sink.problem)
                is_told = True
            storing.append(means.worker.submit(sink.store, buffer[:count]))
            means.progress(count)
            shipped.received_bytes += count
        told = torch.empty(len(lane.blocks) * DIGEST_BYTES, dtype=torch.uint8)
        channel.receive(told, from_rank=lane.source)
        _wait_for_all(storing)
        digests = sink.finish()
    if sink.problem is not None:
        return sink.problem
    for (path, number), digest in zip(lane.blocks, _split(told), strict=True):
        if digests.get(path, {}).get(number) != digest:
            return CheckpointError(f"{path} arrived with other content than it was sent with (digest differs)")
    shipped.digests = united([shipped.digests, digests])
    return None


def _wait_for_all(futures: Iterable[Future[None]]) -> None:
    """Wait until nothing of this is under way; raises what the first of them has raised."""
    for future in futures:
        future.result()


def _split(told: torch.Tensor) -> Iterator[bytes]:
    content = told.numpy().tobytes()
    return (content[start : start + DIGEST_BYTES] for start in range(0, len(content), DIGEST_BYTES))


# --- the two ends ---


class _Places:
    """Where files are below a root; each directory is looked at once, since there can be many small files."""

    def __init__(self, root: Path | None) -> None:
        self.root = root
        self._checked: set[str] = set()

    @functools.cached_property
    def preallocates(self) -> bool:
        """Whether blocks are set aside for new files."""
        return self.root is not None and preallocates(self.root)

    def path_of(self, shipment: Shipment, *, make: bool) -> str:
        """The absolute path of a file, which does not lead out of the root through its directories.

        Raises:
            UnsafePathError: it does.
        """
        if self.root is None:
            raise CheckpointError(f"this rank has no files to send or keep, but was asked for {shipment.path}")
        directory = os.path.dirname(check_relative_path(shipment.path))
        if directory not in self._checked:
            path = resolve_inside(self.root, shipment.path)
            if make:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._checked.add(directory)
        return os.path.join(self.root, shipment.path)


class _Source:
    """The stream of a lane, read from files. After a failure it gives rubbish, and :attr:`problem` says why."""

    def __init__(self, places: _Places, shipments: Sequence[Shipment]) -> None:
        self.problem: Exception | None = None
        self._places = places
        self._waiting = deque(shipments)
        self._shipment: Shipment | None = None
        self._left = 0
        self._path = ""
        self._descriptor: int | None = None
        self._digester = BlockDigester()
        self._digests: Digests = {}

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def fill(self, buffer: torch.Tensor) -> None:
        """Put the next bytes of the stream into ``buffer``, all of it."""
        view = buffer.numpy().data
        try:
            while self.problem is None and view:
                view = view[self._read(view) :]
        except Exception as error:
            self.problem = error

    def finish(self) -> Digests:
        """The digests of all that was read; called after the last chunk."""
        try:
            while self._shipment is not None or self._waiting:
                self._next()
        except Exception as error:
            self.problem = error
        return self._digests

    def _read(self, view: memoryview) -> int:
        if self._left == 0 or self._descriptor is None or self._shipment is None:
            self._next()
            return 0
        position = self._shipment.offset + self._shipment.length - self._left
        with naming(self._path):
            count = os.preadv(self._descriptor, [view[: min(self._left, PIECE_BYTES)]], position)
        if not count:
            raise CheckpointError(
                f"{self._shipment.path} ends {self._left} bytes earlier than when it was listed: it changed meanwhile"
            )
        self._digester.update(view[:count])
        self._left -= count
        return count

    def _next(self) -> None:
        """Go on to the next stretch."""
        if self._shipment is not None:
            self._digests.setdefault(self._shipment.path, {}).update(self._digester.finish())
            self._shipment = None
        self._close()
        if self._waiting:
            shipment = self._waiting.popleft()
            self._path = self._places.path_of(shipment, make=False)
            self._descriptor = self._open(shipment)
            self._digester = BlockDigester(shipment.offset)
            self._shipment, self._left = shipment, shipment.length

    def _open(self, shipment: Shipment) -> int:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno != errno.ELOOP or self._places.root is None:
                raise
            resolve_inside(self._places.root, shipment.path)  # a link to another file of the checkpoint is all right
            descriptor = os.open(self._path, os.O_RDONLY)
        size = os.fstat(descriptor).st_size
        if size != shipment.size:
            os.close(descriptor)
            raise CheckpointError(
                f"{shipment.path} has {size} bytes, not {shipment.size} as when it was listed: it changed meanwhile"
            )
        return descriptor

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class _Sink:
    """Where the stream of a lane goes. After a failure it swallows the rest, and :attr:`problem` says why.

    Large files are fsynced in the background as soon as they are there. Small ones are at the end, all together: the
    first fsync then makes the file system write down what it needs to know of all of them.
    """

    def __init__(self, places: _Places, shipments: Sequence[Shipment], problem: Exception | None) -> None:
        self.problem = problem
        self._places = places
        self._waiting = deque(shipments)
        self._file: _IncomingFile | None = None
        self._syncing: deque[Future[None]] = deque()
        self._small: list[str] = []
        self._syncers = ThreadPoolExecutor(FSYNC_THREADS, "safe_trainer fsync")
        self._digests: Digests = {}

    def __enter__(self) -> _Sink:
        return self

    def __exit__(self, *exception: object) -> None:
        self._syncers.shutdown()
        if self._file is not None:
            self._file.close()

    def store(self, buffer: torch.Tensor) -> None:
        """Take the next bytes of the stream."""
        view = buffer.numpy().data
        try:
            while self.problem is None and view:
                if self._file is None or self._file.left == 0:
                    self._next()
                else:
                    view = view[self._file.write(view) :]
        except Exception as error:
            self.problem = error

    def finish(self) -> Digests:
        """The digests of all that has arrived, which is durable when this returns, unless there is a problem."""
        try:
            while self.problem is None and (self._file is not None or self._waiting):
                self._next()
            if self._small and self._places.root is not None:
                fsync_files(self._small, root=self._places.root)
            _wait_for_all(self._syncing)
        except Exception as error:
            self.problem = self.problem or error
        return self._digests

    def _next(self) -> None:
        """Finish the last file, and go on to the next stretch."""
        if self._file is not None:
            file, self._file = self._file, None
            self._digests.setdefault(file.shipment.path, {}).update(file.digester.finish())
            if file.is_large:
                self._syncing.append(self._syncers.submit(file.make_durable))
            else:
                file.close()
                self._small.append(file.path)
            if len(self._syncing) > MAX_OPEN_FILES:
                self._syncing.popleft().result()
        if self._waiting:
            self._file = self._open(self._waiting.popleft())

    def _open(self, shipment: Shipment) -> _IncomingFile:
        path = self._places.path_of(shipment, make=True)
        # A link is never followed; a file that is there already is somebody's mistake and is left alone.
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        is_whole = shipment.length == shipment.size
        file = _IncomingFile(path, os.open(path, flags | os.O_EXCL if is_whole else flags, 0o666), shipment)
        try:
            file.prepare(is_whole=is_whole, preallocates=file.is_large and self._places.preallocates)
        except BaseException:
            file.close()
            raise
        return file


class _IncomingFile:
    """A file, or a stretch of one, that is arriving."""

    def __init__(self, path: str, descriptor: int, shipment: Shipment) -> None:
        self.path = path
        self.shipment = shipment
        self.left = shipment.length
        self.is_large = shipment.length >= LARGE_BYTES
        self.digester = BlockDigester(shipment.offset)
        self._descriptor = descriptor

    def prepare(self, *, is_whole: bool, preallocates: bool) -> None:
        """Before anything is written."""
        if not is_whole and os.fstat(self._descriptor).st_nlink != 1:
            raise CheckpointError(f"{self.path} is there already and has several names; nothing was written into it")
        with naming(self.path):
            os.fchmod(self._descriptor, self.shipment.mode)
            if is_whole and preallocates:
                preallocate(self._descriptor, self.shipment.size)

    def write(self, view: memoryview) -> int:
        """Take some of what belongs to this stretch of ``view``; returns how much that is."""
        part = view[: min(self.left, PIECE_BYTES)]
        self.digester.update(part)
        position = self.shipment.offset + self.shipment.length - self.left
        written = 0
        with naming(self.path):
            while written < len(part):
                written += os.pwrite(self._descriptor, part[written:], position + written)
        if self.is_large:
            start_writeback(self._descriptor, position, written)
        self.left -= written
        return written

    def make_durable(self) -> None:
        try:
            with naming(self.path):
                os.fsync(self._descriptor)
        finally:
            self.close()

    def close(self) -> None:
        os.close(self._descriptor)
