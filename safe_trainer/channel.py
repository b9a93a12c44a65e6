"""The control channel: how ranks agree, and the only place that knows whether torch.distributed is on.

It runs over a gloo group of the package's own, so that it works beside a back end that can only move GPU memory,
and never touches the training back end. One process is the plain case of many: every call works there too.

Nothing is unpickled from another rank other than by torch.distributed's own object collectives.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Generic, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from safe_trainer.errors import CheckpointError, ConsequenceError, RankFailure
from safe_trainer.watch import UNLIMITED, Peer, Watch, set_group_timeout

logger = logging.getLogger(__name__)

T = TypeVar("T")

# What a rank says at the end of a step mostly fits: a result of a few fields, or a failure.
SLOT_BYTES = 1024
_LENGTH_BYTES = 8

_ENDS_THE_PROCESS = (KeyboardInterrupt, SystemExit, GeneratorExit)


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    value: T | None
    failure: RankFailure | None


class Channel:
    """Agreement, broadcast and byte transfer between the ranks of a job.

    Every method other than the attributes is collective, except :meth:`send` and :meth:`receive`. None has a limit in
    time while all ranks live: a slow rank is waited for. A rank that fails, dies or cannot be reached is noticed by
    the :mod:`~safe_trainer.watch`, and ends every wait.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, rank: int, world_size: int, watch: Watch | None = None
    ) -> None:
        self._group = group
        self._watch = watch
        if watch is not None:
            weakref.finalize(self, watch.stop)
        self.rank = rank
        self.world_size = world_size
        self.host = socket.gethostname()
        self._phase = ""
        self._place: Path | None = None

    @classmethod
    def open(cls, *, timeout_s: float, waits_for_slow: bool = False) -> Channel:
        """Make the channel; collective where torch.distributed is initialised, else a channel of one rank.

        Args:
            timeout_s: silence in seconds after which a rank is given up.
            waits_for_slow: whether, after a failure on one rank, slow ones are waited for, so that all can go on.

        Raises:
            ProcessGroupLostError: some ranks have not come for half an hour, or ``timeout_s`` if that is longer.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls(None, rank=0, world_size=1)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        watch = Watch(
            _own_store(), rank=rank, world_size=world_size, timeout_s=timeout_s, waits_for_slow=waits_for_slow
        )
        watch.start()
        with _gloo_interface():
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        set_group_timeout(group, UNLIMITED)
        channel = cls(group, rank=rank, world_size=world_size, watch=watch)
        watch.peers = channel.together("introduce", Peer.own)
        return channel

    def close(self) -> None:
        """Leave the group. The channel cannot be used afterwards."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def rest(self) -> None:
        """Nothing more is to come for now: training has ended. The next step needs no preparation. Not collective."""
        if self._watch is not None:
            self._watch.rest()

    @property
    def watch(self) -> Watch | None:
        """The watch over this channel's ranks; None where this process is the only one."""
        return self._watch

    @property
    def is_lost(self) -> bool:
        """Whether the process group is lost, so that every further step raises at once."""
        return self._watch is not None and self._watch.lost is not None

    @property
    def others_failed(self) -> bool:
        """Whether a rank is known to have failed in the present step."""
        return self._watch is not None and self._watch.others_failed

    def tell(self, error: BaseException) -> None:
        """Let the others know at once that this rank has failed in the present step, though its part is not over yet.

        ``error`` is to be raised in the end all the same.
        """
        if self._watch is not None:
            self._watch.tell(self._failure(error, self._phase, self._place))

    def raise_if_others_failed(self) -> None:
        """For an action that waits for what others have made.

        Raises:
            ConsequenceError: another rank has failed in this step, as far as is known here.
        """
        if self.others_failed:
            raise ConsequenceError("another rank failed while this one waited for something of it")

    def together(self, phase: str, action: Callable[[], T], *, place: Path | None = None) -> list[T]:
        """Run ``action`` on every rank and give every rank all results, by rank; or the same error to all.

        This is the one way in which the steps of a save follow each other: nobody goes on before everybody has
        finished, and a failure on one rank is a failure on all, within seconds, even where others are inside
        somebody else's collective at the time.

        Args:
            phase: the name of the step, for the error's text.
            action: what this rank does; its result must be picklable.
            place: where it writes, for errors that name no path.

        Raises:
            CheckpointError: ``action`` raised on at least one rank. On such a rank its own exception is the cause.
                Where an action raises a subclass of CheckpointError, that class is raised on every rank.
            ProcessGroupLostError: a rank is gone, or could not end the step after another one had failed.
        """
        if self._group is None or self._watch is None:
            outcome, error = self._attempt(phase, action, place)
            return _results([outcome], error)
        if self._watch.lost is not None:
            raise self._watch.lost
        self._phase, self._place = phase, place
        with self._watch.step(phase) as step:
            try:
                outcome, error = self._attempt(phase, action, place)
            except _ENDS_THE_PROCESS as leaving:  # the others must know
                self._watch.tell(self._failure(leaving, phase, place))
                raise
            if self._watch.lost is not None:
                raise self._watch.lost from error
            if outcome.failure is not None:
                outcome = _Outcome(None, self._watch.tell(outcome.failure))
            step.state = "waiting"
            try:
                outcomes = self._exchange(outcome)
            except RuntimeError as broken:
                raise self._watch.explain(broken) from (error or broken)
            if any(outcome.failure is not None for outcome in outcomes):
                self._watch.settle()
            return _results(outcomes, error)

    def _exchange(self, outcome: _Outcome[T]) -> list[_Outcome[T]]:
        """Every rank's outcome, by rank: they go to rank 0, and from there to all.

        Not by ``all_gather_object``: gloo's all_gather sends everything round a ring, and takes 8 times as long with
        four ranks and 7 times with sixteen (torch 2.13, two cores). What does not fit into a slot goes by itself
        afterwards, in its own length. Two collectives, or three.
        """
        content = pickle.dumps(outcome)
        slot = torch.zeros(SLOT_BYTES, dtype=torch.uint8)
        _put(slot, len(content).to_bytes(_LENGTH_BYTES, "big") + content[: SLOT_BYTES - _LENGTH_BYTES])
        slots = torch.empty(self.world_size * SLOT_BYTES, dtype=torch.uint8)
        received = list(torch.split(slots, SLOT_BYTES)) if self.rank == 0 else None
        dist.gather(slot, received, dst=0, group=self._group)
        dist.broadcast(slots, src=0, group=self._group)
        told = [bytes(part.numpy()) for part in torch.split(slots, SLOT_BYTES)]
        lengths = [int.from_bytes(part[:_LENGTH_BYTES], "big") for part in told]
        contents = [part[_LENGTH_BYTES:][:length] for part, length in zip(told, lengths, strict=True)]
        long = [rank for rank, length in enumerate(lengths) if length > SLOT_BYTES - _LENGTH_BYTES]
        if long:
            for rank, whole in zip(long, self._exchange_long(content, long, lengths), strict=True):
                contents[rank] = whole
        return [pickle.loads(content) for content in contents]

    def _exchange_long(self, own: bytes, ranks: list[int], lengths: list[int]) -> list[bytes]:
        """The contents of ``ranks``, which are too long for a slot."""
        everything = torch.empty(sum(lengths[rank] for rank in ranks), dtype=torch.uint8)
        parts = torch.split(everything, [lengths[rank] for rank in ranks])
        for rank, part in zip(ranks, parts, strict=True):
            if rank == self.rank:
                _put(part, own)
                if self.rank != 0:
                    self.send(part, to_rank=0)
            elif self.rank == 0:
                self.receive(part, from_rank=rank)
        dist.broadcast(everything, src=0, group=self._group)
        return [bytes(part.numpy()) for part in parts]

    def _attempt(
        self, phase: str, action: Callable[[], T], place: Path | None
    ) -> tuple[_Outcome[T], BaseException | None]:
        try:
            return _Outcome(action(), None), None
        except _ENDS_THE_PROCESS:
            raise
        except BaseException as error:  # torch.distributed.checkpoint's error is no Exception
            _release_locals(error)
            return _Outcome(None, self._failure(error, phase, place)), error

    def _failure(self, error: BaseException, phase: str, place: Path | None) -> RankFailure:
        return RankFailure.from_exception(error, rank=self.rank, host=self.host, phase=phase, place=place)

    def send(self, buffer: torch.Tensor, *, to_rank: int) -> None:
        """Send a contiguous CPU tensor (1-D, any dtype) to ``to_rank``, which must be receiving its size and dtype."""
        self.start_send(buffer, to_rank=to_rank).wait()

    def receive(self, buffer: torch.Tensor, *, from_rank: int) -> None:
        """Fill a contiguous CPU tensor (1-D) with what ``from_rank`` sends."""
        self.start_receive(buffer, from_rank=from_rank).wait()

    def start_send(self, buffer: torch.Tensor, *, to_rank: int) -> Transit:
        """As :meth:`send`, without waiting; the buffer must not change until what this returns has been waited for.

        What is sent to one rank arrives in order.
        """
        return Transit(dist.isend(buffer, dst=to_rank, group=self._group))

    def start_receive(self, buffer: torch.Tensor, *, from_rank: int) -> Transit:
        """As :meth:`receive`, without waiting."""
        return Transit(dist.irecv(buffer, src=from_rank, group=self._group))


def _put(buffer: torch.Tensor, content: bytes) -> None:
    """Write ``content`` to the beginning of a buffer of bytes."""
    buffer.numpy()[: len(content)] = memoryview(content)


def _release_locals(error: BaseException | None) -> None:
    """Let go of what the frames of an exception hold: a writer that has failed would keep its file open, and the disk
    full, for as long as anybody keeps the exception."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Transit:
    """Bytes on their way."""

    def __init__(self, work: dist.Work | None) -> None:
        if work is None:
            raise CheckpointError("this rank is not in the control group; this is a bug in safe_trainer")
        self._work = work

    def wait(self) -> None:
        """Wait until they have arrived, or are on their way and the buffer is free again."""
        # The time limit of the group does not reach point-to-point operations; wait's own does.
        self._work.wait(UNLIMITED)


def _own_store() -> Store:
    """The job's store over a connection of its own, with keys that no other channel uses.

    The number of process groups so far is the same on all ranks, and each channel makes one.
    """
    store = dist.distributed_c10d._get_default_store()
    return PrefixStore(f"safe_trainer/{dist.distributed_c10d._world.group_count}", store.clone())  # type: ignore[attr-defined]


def _results(outcomes: list[_Outcome[T]], error: BaseException | None) -> list[T]:
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    if failures:
        raise _joint_error(failures) from error
    return [outcome.value for outcome in outcomes]  # type: ignore[misc]


def _joint_error(failures: list[RankFailure]) -> CheckpointError:
    """One error of all, the root cause first: what is no consequence of another failure, in the order of time."""
    failures = sorted(failures, key=RankFailure.precedence)
    first, *others = failures
    text = str(first)
    same = [failure for failure in others if (failure.kind, failure.message) == (first.kind, first.message)]
    different = [failure for failure in others if failure not in same]
    if same:
        text += f" (the same on ranks {', '.join(str(failure.rank) for failure in same)})"
    for failure in different:
        text += f"; also {failure}"
    if all(failure.kind == first.kind for failure in failures):
        for kind in _error_classes(CheckpointError):
            if kind.__name__ == first.kind:
                return kind(text if different else first.message, failures)
    return CheckpointError(text, failures)


def _error_classes(base: type[CheckpointError]) -> Iterator[type[CheckpointError]]:
    yield base
    for child in base.__subclasses__():
        yield from _error_classes(child)


@contextlib.contextmanager
def _gloo_interface() -> Iterator[None]:
    """Let gloo use the interface that reaches the master, where the host's own name only leads to loopback.

    Many distributions map the host name to 127.0.1.1; gloo would then offer other nodes a loopback address.
    GLOO_SOCKET_IFNAME, else NCCL_SOCKET_IFNAME, decides where the user has set one.
    """
    variable = "GLOO_SOCKET_IFNAME"
    if os.environ.get(variable):
        yield
        return
    # NCCL's variable may hold a pattern ("^docker", "=eth0", a prefix); only a plain interface name means the same.
    chosen = os.environ.get("NCCL_SOCKET_IFNAME", "")
    interface = chosen if chosen in psutil.net_if_addrs() else _interface_towards_master()
    if interface is None:
        yield
        return
    logger.debug("gloo uses the network interface %s", interface)
    os.environ[variable] = interface
    try:
        yield
    finally:
        del os.environ[variable]


def _interface_towards_master() -> str | None:
    """The interface whose address reaches MASTER_ADDR, or None where gloo's own choice is right or nothing is known."""
    master = os.environ.get("MASTER_ADDR")
    if not master:
        return None
    try:
        own_name_is_loopback = socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        own_name_is_loopback = True
    if not own_name_is_loopback:
        return None
    try:
        family, _, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # a UDP socket: chooses the route, sends nothing
            own_address = probe.getsockname()[0]
    except OSError:
        return None
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == own_address for entry in addresses):
            return interface
    return None
