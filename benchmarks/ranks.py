"""Where the measured functions run: on simulated nodes, on a launcher's ranks, or on hosts with a network between them.

A suite is written once for all of them: it calls module-level functions on every rank and gets every rank's result.
Under a launcher every rank runs the suites, in step; of the others, only the process that was started.
"""

from __future__ import annotations

import abc
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from benchmarks.measure import Unavailable
from tests.cluster import Cluster, Function, Json, ScenarioError, name_of, resolve
from tests.filesystems import hosts
from tests.filesystems.hosts import Host, Hosts
from tests.filesystems.job import Job

Layout = Literal["shared", "split"]

CALL_TIMEOUT_S = 900.0
GROUP_TIMEOUT_S = 1800.0
_PREFIX = "safe-trainer-benchmarks-"
_UNAVAILABLE = f"{Unavailable.__module__}.{Unavailable.__qualname__}"


class Ranks(abc.ABC):
    """Some ranks, and directories for them.

    Attributes:
        nodes: how many nodes they are on.
        ranks_per_node: how many there are on each.
        description: for the reader of a result.
    """

    nodes: int
    ranks_per_node: int
    description = ""

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def far_rank(self) -> int:
        """The first rank that is not on node 0.

        Raises:
            Unavailable: there is but one node.
        """
        if self.nodes < 2:
            raise Unavailable("there is only one node")
        return self.ranks_per_node

    @abc.abstractmethod
    def run(
        self, function: Function, *, per_rank: Sequence[Mapping[str, Json]] | None = None, **kwargs: Json
    ) -> list[Any]:
        """Call a module-level function on every rank; the results by rank, through JSON.

        Raises:
            Unavailable: some rank did.
        """

    @abc.abstractmethod
    def directories(self, layout: Layout, name: str, *, in_memory: bool = False) -> list[str]:
        """A directory for each rank, not made yet: one for all, or one for each node.

        Args:
            layout: which of the two.
            name: its name.
            in_memory: on a memory file system instead of the disk, where ranks are simulated.

        Raises:
            Unavailable: the directory that the user gave is not of this kind.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End what was started and remove what was made."""

    def nearest_layout(self, wanted: Layout) -> Layout:
        """``wanted``, or what there is where that cannot be chosen."""
        return wanted


class SimulatedRanks(Ranks):
    """Nodes made of namespaces on this machine (:mod:`tests.cluster`).

    Args:
        nodes, ranks_per_node: how many.
        directory: node 0's disk, and the shared one, are below it.
        other_disks: the other nodes' disks are below it.
        memory: a memory file system.
    """

    def __init__(self, nodes: int, ranks_per_node: int, *, directory: Path, other_disks: Path, memory: Path) -> None:
        self.nodes, self.ranks_per_node = nodes, ranks_per_node
        self.description = f"{nodes} simulated nodes of {ranks_per_node} rank(s)"
        places = (directory, other_disks, memory)
        self._home, self._others, self._memory = (Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place)) for place in places)
        self._cluster = Cluster(nodes, ranks_per_node, group_timeout_s=GROUP_TIMEOUT_S)

    def run(
        self, function: Function, *, per_rank: Sequence[Mapping[str, Json]] | None = None, **kwargs: Json
    ) -> list[Any]:
        try:
            return self._cluster.run(function, timeout_s=CALL_TIMEOUT_S, per_rank=per_rank, **kwargs)
        except ScenarioError as failed:
            for error in failed.errors.values():
                if error.is_a(_UNAVAILABLE):
                    raise Unavailable(error.message) from failed
            raise

    def directories(self, layout: Layout, name: str, *, in_memory: bool = False) -> list[str]:
        home, others = (self._memory, self._memory) if in_memory else (self._home, self._others)
        if layout == "shared":
            return [str(home / "shared" / name)] * self.world_size
        nodes = [rank // self.ranks_per_node for rank in range(self.world_size)]
        return [str((others if node else home) / f"node{node}" / name) for node in nodes]

    def close(self) -> None:
        self._cluster.close()
        for place in (self._home, self._others, self._memory):
            shutil.rmtree(place, ignore_errors=True)


class LauncherRanks(Ranks):
    """The ranks of torchrun or srun, of which this process is one.

    Args:
        directory: the given directory; whether all nodes see one is found out by looking.
    """

    def __init__(self, directory: Path) -> None:
        _take_over_slurm()
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        if not dist.is_initialized():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S)
            )
        self._rank = dist.get_rank()
        hosts_of = self._exchange(os.environ.get("GROUP_RANK") or socket.gethostname())
        self.nodes = len(dict.fromkeys(hosts_of))
        self.ranks_per_node = dist.get_world_size() // self.nodes
        if hosts_of != sorted(hosts_of, key=hosts_of.index) or self.world_size != len(hosts_of):
            raise SystemExit("the benchmarks need the same number of ranks on every node, numbered node by node")
        self.description = f"{self.nodes} nodes of {self.ranks_per_node} rank(s), {dist.get_backend()}"
        self._root = directory / f"{_PREFIX}{self._exchange(uuid.uuid4().hex)[0]}"
        self._root.mkdir(parents=True, exist_ok=True)
        self.layout: Layout = self._look()

    def run(
        self, function: Function, *, per_rank: Sequence[Mapping[str, Json]] | None = None, **kwargs: Json
    ) -> list[Any]:
        mine = {**kwargs, **(per_rank[self._rank] if per_rank else {})}
        outcome: tuple[str, Any]
        try:
            outcome = ("value", resolve(name_of(function))(**mine))
        except Unavailable as reason:
            outcome = ("unavailable", str(reason))
        except Exception as error:  # the others must learn of it; whoever waits in a collective has its own limit
            outcome = ("error", f"rank {self._rank}: {type(error).__name__}: {error}")
        outcomes = self._exchange(outcome)
        for kind, text in outcomes:
            if kind == "unavailable":
                raise Unavailable(text)
            if kind == "error":
                raise RuntimeError(text)
        return [value for _, value in outcomes]

    def directories(self, layout: Layout, name: str, *, in_memory: bool = False) -> list[str]:
        if layout != self.layout and self.nodes > 1:
            raise Unavailable(f"the nodes' directories are {self.layout}; give another --directory for this row")
        return [str(self._root / name)] * self.world_size

    def nearest_layout(self, wanted: Layout) -> Layout:
        return self.layout

    def close(self) -> None:
        dist.barrier()
        shutil.rmtree(self._root, ignore_errors=True)
        dist.destroy_process_group()

    def _look(self) -> Layout:
        (self._root / f"seen-{self._rank}").touch()
        dist.barrier()
        seen = self._exchange((self._root / "seen-0").exists())
        return "shared" if all(seen) else "split"

    def _exchange(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, value)
        return gathered


class HostRanks(Ranks):
    """Hosts with a network of their own, one rank each, whose links are limited.

    Args:
        count: number of hosts.
        rate: of each host's link, as tc writes it, e.g. ``1gbit``.
        directory: their disks are below it.
    """

    def __init__(self, count: int, *, rate: str, directory: Path) -> None:
        reason = hosts.why_not() or (None if shutil.which("tc") else "tc is missing (Debian package iproute2)")
        if reason is not None:
            raise Unavailable(reason)
        self.nodes, self.ranks_per_node = count, 1
        self.description = f"{count} hosts made of network namespaces, links of {rate}"
        self._directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))
        self._hosts = Hosts(*(f"host{index}" for index in range(count)))
        self._job: Job | None = None
        try:
            self._hosts.__enter__()
            for host in self._hosts:
                host.run(*f"tc qdisc add dev eth0 root tbf rate {rate} burst 256kb latency 50ms".split())
            self._job = Job(list[Host](self._hosts), self._hosts.directory, ranks_per_host=1)
            self._job.__enter__()
        except RuntimeError as error:
            self.close()
            raise Unavailable(f"no limited link here: {error}") from error
        except BaseException:
            self.close()
            raise

    def run(
        self, function: Function, *, per_rank: Sequence[Mapping[str, Json]] | None = None, **kwargs: Json
    ) -> list[Any]:
        assert self._job is not None
        return self._job.run(
            call_on_host,
            timeout_s=CALL_TIMEOUT_S,
            name=name_of(function),
            arguments=kwargs,
            per_rank=list(per_rank) if per_rank else None,
        )

    def directories(self, layout: Layout, name: str, *, in_memory: bool = False) -> list[str]:
        if layout == "shared":
            return [str(self._directory / "shared" / name)] * self.world_size
        return [str(self._directory / f"node{node}" / name) for node in range(self.nodes)]

    def close(self) -> None:
        if self._job is not None:
            self._job.__exit__(None, None, None)
        self._hosts.__exit__(None, None, None)
        shutil.rmtree(self._directory, ignore_errors=True)


def call_on_host(
    *, tell: object, name: str, arguments: dict[str, Json], per_rank: list[dict[str, Json]] | None
) -> Json:
    """What :class:`HostRanks` runs in a rank's process: the function of this name with this rank's arguments."""
    mine = per_rank[dist.get_rank()] if per_rank else {}
    return resolve(name)(**{**arguments, **mine})


def first_error(error: Exception) -> str:
    """What went wrong on the first rank that raised, in one line."""
    if isinstance(error, ScenarioError):
        raised = [failure for _, failure in sorted(error.errors.items()) if not failure.unanswered]
        failure = raised[0] if raised else next(iter(error.errors.values()))
        return f"{failure.type.rpartition('.')[2]}: {failure.message.partition(chr(10))[0]}"
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def is_launched() -> bool:
    """Whether a launcher has started this process as one of several ranks."""
    slurm_tasks = int(os.environ.get("SLURM_NTASKS", "1")) if "SLURM_PROCID" in os.environ else 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 or slurm_tasks > 1


def launched_rank() -> int:
    """This process's rank; 0 where there is no launcher. Known before any process group is."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0) if is_launched() else 0


def _take_over_slurm() -> None:
    """srun sets names of its own; MASTER_ADDR and MASTER_PORT are the user's, as for any torch job under it."""
    for name, slurm in {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}.items():
        if name not in os.environ and slurm in os.environ:
            os.environ[name] = os.environ[slurm]
    os.environ.setdefault("LOCAL_RANK", "0")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise SystemExit(f"{' and '.join(missing)} must be set, as for any job of torch.distributed under srun")
