"""N nodes with M ranks each, on this one machine: the only place that knows how to start them.

A *node* here is what a node is in a real job as far as a trainer can tell: a launcher of its own
(``torch.distributed.run --nnodes N --node-rank i``), a mount table of its own (so two nodes see different
disks under one path), a host name of its own (``node0``, ``node1``) and process ids of its own. It is made of
Linux namespaces, as root or in a user namespace; where neither is to be had, nodes are plain processes that
see different paths.

* `Cluster` keeps its ranks alive and runs one function after another in them: imports are paid once.
* `cluster_job` starts fresh ranks for one function, for tests that kill nodes.
* `Disks` is a directory that nodes share, do not share, or share in groups, and that the test can look into.

Whatever happens, nothing is left behind: ranks end when their connection to the test does, a launcher is killed
with all that it started, directories are removed at the end or, after a SIGKILL, by the next test process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, cast, get_args

import psutil

Layout = Literal["shared", "split", "pair"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
Backend = Literal["gloo", "nccl"]
Isolation = Literal["auto", "namespaces", "none"]
Function = Callable[..., Any] | str  # a module-level function, or its "module:qualname"
Json = Any  # what json.dumps takes and json.loads gives back

REPOSITORY = Path(__file__).resolve().parent.parent

START_TIMEOUT_S = 240.0  # four ranks importing torch on two busy cores need 20 s; the rest is for slow machines
STRAGGLER_S = 30.0  # how long the others may take once one rank has failed: some wait for it, and for ever
TERM_GRACE_S = 5.0  # a launcher whose peer has died can sit in its exit barrier and ignore SIGTERM
KILL_TIMEOUT_S = 20.0  # a killed process is gone at once, unless a disk holds it
STACKS_TIMEOUT_S = 3.0
POLL_INTERVAL_S = 0.05
GROUP_TIMEOUT_S = 600.0
LOG_TAIL_LINES = 60
MIN_MEMORY_DISK_BYTES = 1 << 30
PORTS = (20_000, 32_000)
STACKS_SIGNAL = signal.SIGRTMIN + 5  # one that means nothing to any trainer, scheduler or launcher

_DIRECTORY_PREFIX = "safe-trainer-cluster-"
_NAMESPACES = ("--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private")
_NAMESPACE_COMMANDS = (("unshare", *_NAMESPACES), ("unshare", "--user", "--map-root-user", *_NAMESPACES))
# What a launcher sets for its ranks. Inherited from the shell of the test, it would mislead ours.
_LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_")
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_SHELL_SIGNAL = 128  # a shell adds it to the number of the signal that ended a command


# --- Errors -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RemoteError:
    """What one rank raised, or how it failed to answer.

    Attributes:
        rank: Global rank.
        type: Qualified name of the exception's class, e.g. ``builtins.ValueError``; "Hang" or "Died" when there
            was no exception because there was no answer.
        message: ``str(exception)``.
        traceback: The traceback as Python prints it; for a rank that hangs, the stacks of all its threads.
        bases: Qualified names of the exception's class and all its base classes.
        attributes: Public attributes of the exception; those that are not JSON by their ``repr``.
    """

    rank: int
    type: str
    message: str
    traceback: str = ""
    bases: tuple[str, ...] = ()
    attributes: Mapping[str, Json] = dataclasses.field(default_factory=dict)

    @property
    def unanswered(self) -> bool:
        """Whether the rank gave no answer, so that its process is gone or of no further use."""
        return self.type in ("Hang", "Died")

    def is_a(self, name: str) -> bool:
        """Whether the exception's class or a base class has this name (qualified or bare)."""
        return any(name in (base, base.rpartition(".")[2]) for base in (self.type, *self.bases))

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.type}: {self.message}\n{self.traceback.rstrip()}"


class ClusterError(RuntimeError):
    """The nodes themselves could not be started."""


class ScenarioError(AssertionError):
    """At least one rank raised, hung or died.

    Attributes:
        errors: What went wrong, by rank.
        results: What the other ranks gave, by rank.
        logs: The last lines of each node's output during the scenario.
    """

    def __init__(self, scenario: str, errors: dict[int, RemoteError], results: dict[int, Json], logs: str) -> None:
        self.errors = errors
        self.results = results
        self.logs = logs
        described = "\n\n".join(str(errors[rank]) for rank in sorted(errors))
        super().__init__(f"{scenario} failed on {len(errors)} rank(s)\n\n{described}\n\n{logs}")


# --- Directories and disks ----------------------------------------------------------------------------------


class Bind(NamedTuple):
    """One bind mount of a node: `source` becomes visible at `target`."""

    source: Path
    target: Path


@dataclasses.dataclass(frozen=True)
class Disks:
    """One path, and for each node the directory that is really behind it.

    On the machine itself::

        base/at/<layout>/<name>            what ranks use (`path`); for the test process there is nothing here
        base/on/<layout>/disk<d>/<name>    what is behind it for the nodes of group d (`node`)

    In each node its ``base/on/<layout>/disk<d>`` is mounted over ``base/at/<layout>``.
    """

    base: Path
    layout: Layout
    nodes: int
    name: str

    @classmethod
    def create(cls, base: Path, layout: Layout, nodes: int, name: str) -> Disks:
        """Makes new, empty directories under `base`; to be used with `cluster_job` without a `Cluster`."""
        disks = cls(base.resolve(), layout, nodes, name)
        for directory in {disks.node(node) for node in range(nodes)}:
            directory.mkdir(parents=True)
        disks.bind(0).target.mkdir(parents=True, exist_ok=True)
        return disks

    @property
    def path(self) -> str:
        """The path for the ranks, the same on every node.

        Where nodes have no namespaces of their own, `Cluster.run` and `cluster_job` replace it by
        `path_on(node)` wherever an argument, or a string inside one, starts with it.
        """
        return str(self.bind(0).target / self.name)

    def path_on(self, node: int) -> str:
        """The path for the ranks of one node that has no namespaces of its own."""
        return str(self.node(node))

    def node(self, node: int) -> Path:
        """Node `node`'s directory as the test process sees it."""
        return self.bind(node).source / self.name

    @property
    def groups(self) -> list[list[int]]:
        """The nodes that share one directory, group by group."""
        groups: dict[int, list[int]] = {}
        for node in range(self.nodes):
            groups.setdefault(disk_of(self.layout, node), []).append(node)
        return list(groups.values())

    def bind(self, node: int) -> Bind:
        """The mount that gives `node` its view."""
        return _bind(self.base, self.layout, node)

    def wipe(self, node: int) -> None:
        """Empties one node's disk, as if the machine had been replaced."""
        for entry in self.node(node).iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def swap(self, first: int, second: int) -> None:
        """Exchanges the disks of two nodes, as if a restarted job had got its machines in another order."""
        one, other = self.node(first), self.node(second)
        if one == other:
            raise ValueError(f"nodes {first} and {second} share one disk in layout {self.layout!r}")
        spare = one.with_name(f"{self.name}.swap")
        one.rename(spare)
        other.rename(one)
        spare.rename(other)

    def remove(self) -> None:
        """Deletes all of the directories; does nothing where they are gone."""
        for node in range(self.nodes):
            shutil.rmtree(self.node(node), ignore_errors=True)


def disk_of(layout: Layout, node: int) -> int:
    """Which disk of a layout a node sees: one for all, one each, or one for node 0 and one for the others."""
    if layout == "shared":
        return 0
    if layout == "split":
        return node
    if layout == "pair":
        return min(node, 1)
    raise ValueError(f"layout must be one of {LAYOUTS}, not {layout!r}")


def _bind(base: Path, layout: Layout, node: int) -> Bind:
    return Bind(source=base / "on" / layout / f"disk{disk_of(layout, node)}", target=base / "at" / layout)


def _new_directory() -> Path:
    """A fresh directory, in memory where there is enough of it, marked with this process's id."""
    shared_memory = Path("/dev/shm")
    parent = Path(tempfile.gettempdir())
    if os.access(shared_memory, os.W_OK) and shutil.disk_usage(shared_memory).free >= MIN_MEMORY_DISK_BYTES:
        parent = shared_memory
    _remove_abandoned(parent)
    return Path(tempfile.mkdtemp(prefix=f"{_DIRECTORY_PREFIX}{os.getpid()}-", dir=parent))


def _remove_abandoned(parent: Path) -> None:
    """Deletes what test processes left that were killed before they could clean up."""
    for directory in parent.glob(f"{_DIRECTORY_PREFIX}*-*"):
        pid = directory.name.removeprefix(_DIRECTORY_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(directory, ignore_errors=True)


# --- Functions that are run elsewhere -----------------------------------------------------------------------


def name_of(function: Function) -> str:
    """``module:qualname`` of a module-level function, under the name by which any process can import it.

    pytest may have imported a test module under a short name; here it is named from the repository's root.
    """
    if isinstance(function, str):
        return function
    if "<" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} is not a module-level function: other processes cannot import it")
    module = function.__module__
    file = Path(inspect.getfile(function)).resolve() if inspect.isfunction(function) else None
    if file is not None and file.is_relative_to(REPOSITORY):
        module = ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)
    return f"{module}:{function.__qualname__}"


def resolve(name: str) -> Any:
    """The object that "module:qualname" names."""
    module, _, qualname = name.partition(":")
    found: Any = importlib.import_module(module)
    for attribute in qualname.split("."):
        found = getattr(found, attribute)
    return found


def _arguments(
    world_size: int, common: Mapping[str, Json], per_rank: Sequence[Mapping[str, Json]] | None
) -> list[dict[str, Json]]:
    if per_rank is not None and len(per_rank) != world_size:
        raise ValueError(f"per_rank has {len(per_rank)} entries for {world_size} ranks")
    return [{**common, **(per_rank[rank] if per_rank else {})} for rank in range(world_size)]


def _localised(value: Json, binds: Iterable[Bind]) -> Json:
    """What bind mounts would do, done to the paths in an argument instead: for nodes without namespaces."""
    if isinstance(value, str):
        for bind in binds:
            if Path(value).is_relative_to(bind.target):
                return str(bind.source / Path(value).relative_to(bind.target))
        return value
    if isinstance(value, Mapping):
        return {key: _localised(item, binds) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_localised(item, binds) for item in value]
    return value


def _outcome(rank: int, answer: Json) -> Json | RemoteError:
    """What a rank has sent: the result, or the error it describes; None is a connection that has ended."""
    if answer is None:
        return RemoteError(rank, "Died", "its process ended without an answer")
    if answer["ok"]:
        return answer["value"]
    error = dict(answer["error"])
    return RemoteError(rank=rank, bases=tuple(error.pop("bases")), **error)


# --- Nodes --------------------------------------------------------------------------------------------------


@functools.cache
def namespace_command() -> tuple[str, ...] | None:
    """The command that gives a process namespaces of its own here, or None; found out once, by trying."""
    for command in _NAMESPACE_COMMANDS:
        trial = [*command, "--", "sh", "-ec", "mount --bind /tmp /tmp; echo n > /proc/sys/kernel/hostname"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if subprocess.run(trial, capture_output=True, timeout=20, check=False).returncode == 0:
                return command
    warnings.warn("no mount namespaces here: nodes see each other's disks, under different paths", stacklevel=2)
    return None


def _isolated(isolation: Isolation) -> bool:
    if isolation == "none":
        return False
    if isolation == "namespaces" and namespace_command() is None:
        raise ClusterError("no mount namespaces here")
    return namespace_command() is not None


class _Node:
    """One launcher (or, for a single rank, the rank itself) with all its descendants."""

    def __init__(
        self,
        index: int,
        command: Sequence[str],
        binds: Iterable[Bind],
        environment: Mapping[str, str],
        *,
        log: Path,
        isolated: bool,
    ) -> None:
        self.index = index
        self.log = log
        self._isolated = isolated
        self._ranks: list[psutil.Process] = []
        self._killed = False
        if isolated:
            command = self._in_namespaces(command, binds)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def _in_namespaces(self, command: Sequence[str], binds: Iterable[Bind]) -> list[str]:
        hosts = self.log.with_name(f"hosts{self.index}")
        hosts.write_text(f"127.0.0.1 localhost node{self.index}\n::1 localhost\n")
        mounts = [Bind(hosts, Path("/etc/hosts")), *binds]
        script = [
            f"echo node{self.index} > /proc/sys/kernel/hostname",
            *(shlex.join(["mount", "--bind", str(mount.source), str(mount.target)]) for mount in mounts),
            shlex.join(command),
            "exit $?",  # the shell stays, as the first process of the namespace, and says how the command ended
        ]
        return [*(namespace_command() or ()), "--", "sh", "-ec", "\n".join(script)]

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        code = self._process.poll()
        if code is not None and self._killed:
            return -signal.SIGKILL  # unshare itself gives 1 for it
        if code is not None and self._isolated and code > _SHELL_SIGNAL:
            return _SHELL_SIGNAL - code
        return code

    def add_rank(self, process: psutil.Process) -> None:
        """Remembers a process that `kill` has to end even when the launcher is gone already."""
        self._ranks.append(process)

    def terminate(self) -> None:
        """Asks the launcher to end (SIGTERM), which passes it on to its ranks."""
        for launcher in self._children(depth=2) if self._isolated else [psutil.Process(self._process.pid)]:
            _send(launcher, signal.SIGTERM)

    def kill(self) -> None:
        """Ends every process of this node at once (SIGKILL), as a power cut would; returns when they are gone."""
        if self.poll() is None:
            self._killed = True
            # With the first process of a pid namespace all others in it end; without one, all are to be found.
            first = self._children(depth=1) if self._isolated else self._children(depth=None)
            for process in first:
                _send(process, signal.SIGKILL)
            if not (self._isolated and first):
                self._process.kill()
        for process in self._ranks:
            _send(process, signal.SIGKILL)
        self._process.wait(KILL_TIMEOUT_S)
        psutil.wait_procs(self._ranks, timeout=KILL_TIMEOUT_S)

    def _children(self, depth: int | None) -> list[psutil.Process]:
        """The descendants at this depth, or all of them."""
        try:
            generation = [psutil.Process(self._process.pid)]
            if depth is None:
                return generation[0].children(recursive=True)
            for _ in range(depth):
                generation = [child for process in generation for child in process.children()]
            return generation
        except psutil.NoSuchProcess:
            return []


def die_with_parent() -> None:
    """In a fork: the kernel ends this process when the test process is gone, even by SIGKILL."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


class _Launch:
    """Nodes that were started together, and a connection to every rank that has made one.

    Everything is in `directory`: the socket that ranks connect to, the output of each node, the stacks of each rank.
    """

    def __init__(
        self,
        directory: Path,
        nodes: int,
        ranks_per_node: int,
        command: Sequence[str],
        *,
        binds: Sequence[Iterable[Bind]],
        env: Mapping[str, str] | None,
        backend: Backend,
        group_timeout_s: float,
        isolated: bool,
    ) -> None:
        self.directory = directory
        self.ranks_per_node = ranks_per_node
        self.world_size = nodes * ranks_per_node
        self.nodes: list[_Node] = []
        self.connections: dict[int, Connection[Any, Any]] = {}
        self._processes: dict[int, psutil.Process] = {}
        directory.mkdir(parents=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / "socket"))
        self._listener.listen(self.world_size)
        self._listener.settimeout(POLL_INTERVAL_S)
        environment = _environment(directory, backend, group_timeout_s) | dict(env or {})
        launchers = _launcher_commands(nodes, ranks_per_node, command)
        try:
            for index, launcher in enumerate(launchers):
                log = directory / f"node{index}.log"
                self.nodes.append(_Node(index, launcher, binds[index], environment, log=log, isolated=isolated))
        except BaseException:
            self.kill()
            raise

    def connect(self, timeout_s: float) -> None:
        """Waits until every rank has said who it is."""
        deadline = time.monotonic() + timeout_s
        while len(self.connections) < self.world_size:
            try:
                peer, _ = self._listener.accept()
            except TimeoutError:
                self._check_start(deadline)
                continue
            pid = int.from_bytes(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
            connection: Connection[Any, Any] = Connection(peer.detach())
            rank = json.loads(connection.recv_bytes())["rank"]
            self.connections[rank] = connection
            self._processes[rank] = psutil.Process(pid)
            self.nodes[self.node_of(rank)].add_rank(self._processes[rank])

    def _check_start(self, deadline: float) -> None:
        ended = [node.index for node in self.nodes if node.poll() is not None]
        if ended or time.monotonic() > deadline:
            why = f"node(s) {ended} ended" if ended else "not all ranks came before the deadline"
            raise ClusterError(f"start: {why}; connected: {sorted(self.connections)}\n{self.log_tails()}")

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def send(self, rank: int, message: Json) -> None:
        with contextlib.suppress(OSError):  # a rank that is gone is noticed where its answer is awaited
            self.connections[rank].send_bytes(json.dumps(message).encode())

    def receive(self, ranks: Iterable[int], timeout_s: float) -> dict[int, Json]:
        """The answers that have come within `timeout_s`; None for a rank whose connection has ended."""
        waiting = {self.connections[rank]: rank for rank in ranks}
        answers: dict[int, Json] = {}
        for ready in wait(list(waiting), timeout_s):
            connection = cast("Connection[Any, Any]", ready)
            try:
                answers[waiting[connection]] = json.loads(connection.recv_bytes())
            except (EOFError, OSError):
                answers[waiting[connection]] = None
        return answers

    def signal_rank(self, rank: int, number: int) -> None:
        _send(self._processes[rank], number)

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """Makes ranks write the stacks of all their threads, and reads them."""
        files = {rank: self.directory / f"stacks{rank}" for rank in ranks}
        for rank in files:
            self.signal_rank(rank, STACKS_SIGNAL)
        deadline = time.monotonic() + STACKS_TIMEOUT_S
        while time.monotonic() < deadline and not all(file.stat().st_size for file in files.values()):
            time.sleep(POLL_INTERVAL_S)
        time.sleep(4 * POLL_INTERVAL_S)  # a dump is written frame by frame
        return {rank: file.read_text() or "(no stacks: the process does not react)" for rank, file in files.items()}

    def log_sizes(self) -> list[int]:
        return [node.log.stat().st_size for node in self.nodes]

    def log_tails(self, since: Sequence[int] | None = None) -> str:
        """The last lines of each node's output, those after the given offsets (bytes)."""
        tails = []
        for node in self.nodes:
            lines = node.log.read_bytes()[since[node.index] if since else 0 :].decode(errors="replace").splitlines()
            tails += [f"--- output of node {node.index} ---", *lines[-LOG_TAIL_LINES:]]
        return "\n".join(tails)

    def kill(self) -> None:
        """Ends everything now. May be called again."""
        for connection in self.connections.values():
            connection.close()
        self._listener.close()
        for node in self.nodes:
            node.kill()


def _launcher_commands(nodes: int, ranks_per_node: int, command: Sequence[str]) -> list[list[str]]:
    """A command for each node. One rank alone needs no launcher, and then torch.distributed stays off."""
    if nodes * ranks_per_node == 1:
        return [list(command)]
    launcher = [
        *(sys.executable, "-m", "torch.distributed.run", "--no-python", "--max-restarts", "0"),
        *("--nnodes", str(nodes), "--nproc-per-node", str(ranks_per_node)),
        *("--master-addr", "127.0.0.1", "--master-port", str(_free_port())),
    ]
    return [[*launcher, "--node-rank", str(node), *command] for node in range(nodes)]


def _free_port() -> int:
    """A port nobody listens on, from below the range out of which the kernel gives ports to connections.

    It is taken seconds later than it is found free; out of that range, some connection might get it first.
    """
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def _environment(directory: Path, backend: Backend, group_timeout_s: float) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    search_path = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **inherited,
        **({"DS_ACCELERATOR": "cpu"} if backend == "gloo" else {}),
        "PYTHONPATH": os.pathsep.join(search_path),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        # Never the user's cache: it may be another environment's, or hold the lock of a builder that was killed.
        "TORCH_EXTENSIONS_DIR": str(directory / "torch-extensions"),
        "TESTS_CLUSTER_DIRECTORY": str(directory),
        "TESTS_CLUSTER_BACKEND": backend,
        "TESTS_CLUSTER_GROUP_TIMEOUT_S": str(group_timeout_s),
    }


def _worker_command() -> list[str]:
    return [sys.executable, "-m", "tests.worker"]


# --- The live cluster ---------------------------------------------------------------------------------------


class Cluster:
    """Nodes and ranks that stay alive from one scenario to the next.

    They start with the first `run`, and again with the next one after a scenario that left a rank hanging or dead.
    With one node of one rank there is no launcher and torch.distributed is not initialised, as in
    ``python train.py``.

    Args:
        nodes: Number of nodes.
        ranks_per_node: Ranks on each node.
        env: Further environment variables of the ranks.
        backend: Back end of the default process group. "nccl" needs a GPU; with fewer GPUs than ranks, ranks
            share them and talk over sockets.
        group_timeout_s: Time-out of the default process group's collectives.
        isolation: "namespaces" insists on them, "none" does without, "auto" takes them where they are to be had.
    """

    def __init__(
        self,
        nodes: int,
        ranks_per_node: int,
        env: Mapping[str, str] | None = None,
        *,
        backend: Backend = "gloo",
        group_timeout_s: float = GROUP_TIMEOUT_S,
        isolation: Isolation = "auto",
    ) -> None:
        self.nodes = nodes
        self.ranks_per_node = ranks_per_node
        self.world_size = nodes * ranks_per_node
        self.backend = backend
        self.isolated = _isolated(isolation)
        self._env = dict(env or {})
        self._group_timeout_s = group_timeout_s
        self._launch: _Launch | None = None
        self._launches = 0
        self._base = _new_directory()
        atexit.register(self.close)
        self._binds = [[_bind(self._base, layout, node) for layout in LAYOUTS] for node in range(nodes)]
        for bind in itertools.chain(*self._binds):  # mounted when the nodes start, filled by `disks` later
            bind.source.mkdir(parents=True, exist_ok=True)
            bind.target.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        function: Function,
        *,
        timeout_s: float = 120.0,
        straggler_s: float = STRAGGLER_S,
        raise_errors: bool = True,
        per_rank: Sequence[Mapping[str, Json]] | None = None,
        **kwargs: Json,
    ) -> list[Any]:
        """Calls `function(**kwargs)` on every rank at once.

        Args:
            function: A module-level function, or its "module:qualname".
            timeout_s: How long the slowest rank may take. Then its stacks go into the error and all are killed.
            straggler_s: How long the others may take once one has failed.
            raise_errors: False gives a `RemoteError` in place of the result of a rank that failed.
            per_rank: Further arguments for each rank.
            **kwargs: Arguments, of JSON types.

        Returns:
            The results by rank, through JSON: tuples come back as lists, keys of dicts as strings.

        Raises:
            ScenarioError: A rank raised, hung or died, and `raise_errors` is set.
        """
        name = name_of(function)
        arguments = _arguments(self.world_size, kwargs, per_rank)
        launch = self._started()
        since = launch.log_sizes()
        for rank, mine in enumerate(arguments):
            launch.send(rank, {"do": "run", "function": name, "kwargs": self._arguments_of(rank, mine)})
        outcomes = self._collect(launch, timeout_s, straggler_s)
        errors = {rank: outcome for rank, outcome in outcomes.items() if isinstance(outcome, RemoteError)}
        if errors:
            logs = launch.log_tails(since)
            self._recover(launch, errors.values())
            if raise_errors:
                results = {rank: outcome for rank, outcome in outcomes.items() if rank not in errors}
                raise ScenarioError(name, errors, results, logs)
        return [outcomes[rank] for rank in range(self.world_size)]

    def disks(self, layout: Layout, name: str) -> Disks:
        """Fresh, empty directories; an earlier set of the same layout and name is deleted."""
        Disks(self._base, layout, self.nodes, name).remove()
        return Disks.create(self._base, layout, self.nodes, name)

    def log(self) -> str:
        """The last lines of what each node has printed."""
        return self._launch.log_tails() if self._launch else ""

    def stop(self) -> None:
        """Ends all processes; the next `run` starts new ones. Disks stay."""
        launch, self._launch = self._launch, None
        if launch is not None:
            launch.kill()

    def close(self) -> None:
        """Ends all processes and deletes all directories. May be called again."""
        atexit.unregister(self.close)
        self.stop()
        shutil.rmtree(self._base, ignore_errors=True)

    def _started(self) -> _Launch:
        if self._launch is None:
            self._launches += 1
            self._launch = _Launch(
                self._base / f"launch{self._launches}",
                self.nodes,
                self.ranks_per_node,
                _worker_command(),
                binds=self._binds,
                env=self._env,
                backend=self.backend,
                group_timeout_s=self._group_timeout_s,
                isolated=self.isolated,
            )
            try:
                self._launch.connect(START_TIMEOUT_S)
            except BaseException:
                self.stop()
                raise
        return self._launch

    def _arguments_of(self, rank: int, arguments: Json) -> Json:
        return arguments if self.isolated else _localised(arguments, self._binds[rank // self.ranks_per_node])

    def _collect(self, launch: _Launch, timeout_s: float, straggler_s: float) -> dict[int, Json | RemoteError]:
        """One outcome per rank: what it answered, or why it did not."""
        outcomes: dict[int, Json | RemoteError] = {}
        started = time.monotonic()
        deadline = started + timeout_s
        try:
            while missing := [rank for rank in range(self.world_size) if rank not in outcomes]:
                if time.monotonic() >= deadline:
                    message = f"no answer within {time.monotonic() - started:.0f} s"
                    stacks = launch.stacks(missing)
                    return outcomes | {rank: RemoteError(rank, "Hang", message, stacks[rank]) for rank in missing}
                for rank, answer in launch.receive(missing, deadline - time.monotonic()).items():
                    outcomes[rank] = _outcome(rank, answer)
                    if isinstance(outcomes[rank], RemoteError):
                        deadline = min(deadline, time.monotonic() + straggler_s)
        except BaseException:
            self.stop()  # answers that nobody has read would be taken for those of the next scenario
            raise
        return outcomes

    def _recover(self, launch: _Launch, errors: Iterable[RemoteError]) -> None:
        """After a failure: a new process group when all ranks answered, new processes when not.

        Ranks that failed at different points have counted different numbers of collectives, so the old group
        would pair this scenario's operations with the next one's.
        """
        if any(error.unanswered for error in errors):
            self.stop()
            return
        for rank in range(self.world_size):
            launch.send(rank, {"do": "renew"})
        outcomes = self._collect(launch, START_TIMEOUT_S, STRAGGLER_S)
        if any(isinstance(outcome, RemoteError) for outcome in outcomes.values()):
            self.stop()


# --- One launch for one function ----------------------------------------------------------------------------


class Job:
    """Launchers that run one function, or one command, and end. Made by `cluster_job`; a context manager."""

    def __init__(self, launch: _Launch) -> None:
        self._launch = launch
        self._outcomes: dict[int, Json | RemoteError] = {}
        atexit.register(self.close)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def kill_node(self, node: int) -> None:
        """A power cut on one node: every process on it is gone when this returns."""
        self._launch.nodes[node].kill()

    def kill_all(self) -> None:
        """A power cut on all nodes."""
        for node in self._launch.nodes:
            node.kill()

    def kill_rank(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to one rank (of a job that runs a function)."""
        self._launch.signal_rank(rank, number)

    def terminate_node(self, node: int) -> None:
        """SIGTERM to one node's launcher, as a scheduler sends it before the allotted time ends."""
        self._launch.nodes[node].terminate()

    def wait(self, timeout_s: float, *, grace_s: float = 15.0) -> list[int]:
        """Waits for the launchers to end.

        Args:
            timeout_s: How long all may run.
            grace_s: How long the others may go on once one has failed. Then they get SIGTERM, then SIGKILL.

        Returns:
            The exit code of each node's launcher, negative for a signal.

        Raises:
            TimeoutError: Some ran longer than `timeout_s`. They are killed; stacks and logs are in the message.
        """
        deadline = time.monotonic() + timeout_s
        while any(code is None for code in self._codes()):
            if any(self._codes()):
                self._end_others(min(deadline, time.monotonic() + grace_s))
            elif time.monotonic() > deadline:
                self._fail(timeout_s)
            self._receive(POLL_INTERVAL_S)
        return [code for code in self._codes() if code is not None]

    def results(self) -> list[Json | RemoteError]:
        """What each rank has answered: its result or its error, which is "Died" for one that never answered.

        To be asked after `wait`, or after all nodes have been killed.
        """
        self._receive(0)
        return [self._outcomes.get(rank, _outcome(rank, None)) for rank in range(self._launch.world_size)]

    def log(self) -> str:
        """The last lines of each node's output."""
        return self._launch.log_tails()

    def log_of(self, node: int) -> str:
        """All output of one node."""
        return self._launch.nodes[node].log.read_text(errors="replace")

    def close(self) -> None:
        """Ends what still runs and deletes the logs. May be called again."""
        atexit.unregister(self.close)
        self._launch.kill()
        shutil.rmtree(self._launch.directory.parent, ignore_errors=True)

    def _codes(self) -> list[int | None]:
        return [node.poll() for node in self._launch.nodes]

    def _receive(self, timeout_s: float) -> None:
        """Reads what ranks have to say, so that none of them waits for a reader; or just waits."""
        waiting = [rank for rank in self._launch.connections if rank not in self._outcomes]
        if not waiting:
            time.sleep(timeout_s)
        for rank, answer in self._launch.receive(waiting, timeout_s).items():
            self._outcomes[rank] = _outcome(rank, answer)

    def _receive_until(self, deadline: float) -> None:
        while any(code is None for code in self._codes()) and time.monotonic() < deadline:
            self._receive(POLL_INTERVAL_S)

    def _end_others(self, deadline: float) -> None:
        self._receive_until(deadline)
        for node in self._launch.nodes:
            node.terminate()
        self._receive_until(time.monotonic() + TERM_GRACE_S)
        self._receive(0)
        self.kill_all()

    def _fail(self, timeout_s: float) -> None:
        stacks = self._launch.stacks(rank for rank in self._launch.connections if rank not in self._outcomes)
        self.kill_all()
        described = "\n".join(f"rank {rank}:\n{stack}" for rank, stack in stacks.items())
        raise TimeoutError(f"still running after {timeout_s} s\n{described}\n{self.log()}")


def cluster_job(
    nodes: int,
    ranks_per_node: int,
    target: Function | Sequence[str],
    *,
    disks: Sequence[Disks] = (),
    env: Mapping[str, str] | None = None,
    backend: Backend = "gloo",
    group_timeout_s: float = GROUP_TIMEOUT_S,
    isolation: Isolation = "auto",
    rank_prefix: Sequence[str] = (),
    per_rank: Sequence[Mapping[str, Json]] | None = None,
    **kwargs: Json,
) -> Job:
    """Starts launchers of their own for one function or command: for tests that kill them.

    Args:
        nodes: Number of nodes.
        ranks_per_node: Ranks on each node.
        target: A function or its "module:qualname": when this returns, all ranks are up and have been told to call
            it. Or a list: the command line of each rank.
        disks: Directories, from a `Cluster` or `Disks.create`, that the ranks are to see.
        env: Further environment variables of the ranks.
        backend: As for `Cluster`.
        group_timeout_s: As for `Cluster`.
        isolation: As for `Cluster`.
        rank_prefix: Put before the command line of each rank, e.g. ``["strace", ...]``.
        per_rank: Further arguments for each rank.
        **kwargs: Arguments of the function, of JSON types.
    """
    isolated = _isolated(isolation)
    function = target if callable(target) or isinstance(target, str) else None
    command = _worker_command() if function else list(cast("Sequence[str]", target))
    arguments = _arguments(nodes * ranks_per_node, kwargs, per_rank)
    binds = [list(dict.fromkeys(disk.bind(node) for disk in disks)) for node in range(nodes)]
    launch = _Launch(
        _new_directory() / "job",
        nodes,
        ranks_per_node,
        [*rank_prefix, *command],
        binds=binds,
        env=env,
        backend=backend,
        group_timeout_s=group_timeout_s,
        isolated=isolated,
    )
    job = Job(launch)
    if function is None:
        return job
    try:
        launch.connect(START_TIMEOUT_S)
    except BaseException:
        job.close()
        raise
    for rank, mine in enumerate(arguments):
        mine = mine if isolated else _localised(mine, binds[launch.node_of(rank)])
        launch.send(rank, {"do": "run", "function": name_of(function), "kwargs": mine, "last": True})
    return job
