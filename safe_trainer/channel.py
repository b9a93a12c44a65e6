"""The control channel: how ranks agree, and the only place that knows whether torch.distributed is on.

It runs over a gloo group of the package's own, so that it works beside a back end that can only move GPU memory,
and never touches the training back end. One process is the plain case of many: every call works there too.

Nothing is unpickled from another rank other than by torch.distributed's own object collectives.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

import psutil
import torch
import torch.distributed as dist

from safe_trainer.errors import CheckpointError, RankFailure

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class _Outcome(Generic[T]):
    value: T | None
    failure: RankFailure | None


class Channel:
    """Agreement, broadcast and byte transfer between the ranks of a job.

    Every method other than the attributes is collective, except :meth:`send` and :meth:`receive`. They block for at
    most the group's time-out, after which torch.distributed raises; a rank that dies is noticed by then at the latest.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, rank: int, world_size: int) -> None:
        self._group = group
        self.rank = rank
        self.world_size = world_size
        self.host = socket.gethostname()

    @classmethod
    def open(cls, *, timeout_s: float) -> Channel:
        """Make the channel; collective where torch.distributed is initialised, else a channel of one rank.

        Args:
            timeout_s: longest time in seconds that one operation may wait for another rank.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls(None, rank=0, world_size=1)
        with _gloo_interface():
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return cls(group, rank=dist.get_rank(), world_size=dist.get_world_size())

    def close(self) -> None:
        """Leave the group. The channel cannot be used afterwards."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def together(self, phase: str, action: Callable[[], T]) -> list[T]:
        """Run ``action`` on every rank and give every rank all results, by rank; or the same error to all.

        This is the one way in which the steps of a save follow each other: nobody goes on before everybody has
        finished, and a failure on one rank is a failure on all.

        Args:
            phase: the name of the step, for the error's text.
            action: what this rank does; its result must be picklable.

        Raises:
            CheckpointError: ``action`` raised on at least one rank. On such a rank its own exception is the cause.
                Where an action raises a subclass of CheckpointError, that class is raised on every rank.
        """
        error: Exception | None = None
        outcome: _Outcome[T]
        try:
            outcome = _Outcome(action(), None)
        except Exception as caught:
            error = caught
            failure = RankFailure.from_exception(caught, rank=self.rank, host=self.host, phase=phase)
            outcome = _Outcome(None, failure)
        outcomes = self._all_gather(outcome)
        failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        if failures:
            raise _joint_error(failures) from error
        return [outcome.value for outcome in outcomes]  # type: ignore[misc]

    def _all_gather(self, value: T) -> list[T]:
        if self._group is None:
            return [value]
        gathered: list[T | None] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered  # type: ignore[return-value]

    def send(self, buffer: torch.Tensor, *, to_rank: int) -> None:
        """Send a contiguous CPU tensor (1-D, any dtype) to ``to_rank``, which must be receiving its size and dtype."""
        dist.send(buffer, dst=to_rank, group=self._group)

    def receive(self, buffer: torch.Tensor, *, from_rank: int) -> None:
        """Fill a contiguous CPU tensor (1-D) with what ``from_rank`` sends."""
        dist.recv(buffer, src=from_rank, group=self._group)


def _joint_error(failures: list[RankFailure]) -> CheckpointError:
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
