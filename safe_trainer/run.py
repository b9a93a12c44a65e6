"""A run in a run directory: what saving and resuming both need, found once when the run starts."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from safe_trainer.channel import Channel
from safe_trainer.commit import Generation, RunDirectory
from safe_trainer.disk import make_below
from safe_trainer.errors import OptionError
from safe_trainer.layout import work_name
from safe_trainer.lock import flock_is_local, held_probe, probe_problem
from safe_trainer.options import CheckpointOptions, Storage
from safe_trainer.pieces import rename_problem
from safe_trainer.reuse import LastCheckpoint
from safe_trainer.staging import Staging, staging_of
from safe_trainer.topology import Domain, Topology, find_topology, poll, wait_until_visible


@dataclass(frozen=True)
class Run:
    """One job's claim on a run directory, on one rank.

    Attributes:
        channel: the control channel.
        topology: ranks, nodes and storage domains.
        directory: this rank's run directory. Only leaders change it.
        options: the user's choices.
        generation: this run's number, the same in every domain.
        saved_by: versions of libraries, for the manifest.
        staging: where this rank puts its files while training stands still.
        last: what home's last checkpoint has.
    """

    channel: Channel
    topology: Topology
    directory: RunDirectory
    options: CheckpointOptions
    generation: Generation
    saved_by: Mapping[str, str]
    staging: Staging = field(default_factory=Staging)
    last: LastCheckpoint = field(default_factory=LastCheckpoint)
    _counter: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def root(self) -> Path:
        """This rank's run directory."""
        return self.directory.layout.root

    @property
    def is_home_leader(self) -> bool:
        """Whether this is the one process that commits on home (rank 0)."""
        return self.channel.rank == self.topology.home.leader

    @property
    def other_domains(self) -> tuple[Domain, ...]:
        """Every storage domain but home."""
        return self.topology.domains[1:]

    def wait_until_visible(self, path: Path) -> None:
        """Return once ``path``, which another rank has made, can be seen here; see
        :func:`~safe_trainer.topology.wait_until_visible`."""
        wait_until_visible(path, check=lambda: self._check_may_come(path), timeout_s=self.options.visibility_timeout_s)

    def wait_until(self, path: Path, condition: Callable[[], bool]) -> bool:
        """Wait for something about ``path`` for as long as caches may lag; whether it came to be."""
        return poll(condition, check=lambda: self._check_may_come(path), timeout_s=self.options.visibility_timeout_s)

    def _check_may_come(self, path: Path) -> None:
        """Nobody waits for what is in a staging directory that a newer run has swept: its leader has made it, so it
        sees at once when it is gone; and where that leader fails, the others stop waiting, too."""
        self.channel.raise_if_others_failed()
        staging = self.directory.layout.staging
        if self.topology.is_leader and path.is_relative_to(staging):
            made_here = staging / path.relative_to(staging).parts[0]
            if not made_here.exists():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(made_here))

    def next_name(self, purpose: str) -> str:
        """A name for a staging directory: unused in any run, and the same on every rank without a message."""
        return work_name(self.generation.number, self.generation.run_id, next(self._counter), purpose)


class _Claim(NamedTuple):
    """What each rank brings along when a run starts."""

    newest_generation: int
    run_id: str
    options: dict[str, Any]


class _Trial(NamedTuple):
    """What the leader of a disk has found out about its file system.

    Attributes:
        name: the file that it holds a lock on.
        renames: why directories are not renamed in one step there.
        locks: why file locks do not work there.
    """

    name: str
    renames: str | None
    locks: str | None


def open_run(
    run_directory: Path,
    *,
    channel: Channel,
    options: CheckpointOptions,
    saved_by: Mapping[str, str],
) -> Run:
    """Start a run in ``run_directory``: find the storage domains and what their file systems can do, take a
    generation, clear what dead runs left.

    Collective. On every rank, the run directory is made where it does not exist. Of two jobs that start at the same
    moment the later one wins, on all disks; the older one is fenced off.

    Raises:
        StorageError: see :func:`~safe_trainer.topology.find_topology`.
        RunDirectoryTaken: a newer job has started at the same moment; the text names it.
        OptionError: the options differ between ranks.
        CheckpointError: the run directory cannot be written on some node, or its lock is held.
    """
    directory = RunDirectory(run_directory, lock_timeout_s=options.lock_timeout_s)
    topology = find_topology(
        channel,
        run_directory,
        storage=cast(Storage, options.storage),
        visibility_timeout_s=options.visibility_timeout_s,
        make_room=directory.make_room,
    )
    run_id = uuid.uuid4().hex

    _try_file_systems(channel, topology, directory, visibility_timeout_s=options.visibility_timeout_s)

    def claim() -> _Claim:
        newest = directory.newest_generation() if topology.is_leader else 0
        return _Claim(newest, run_id, dataclasses.asdict(options))

    claims = channel.together("read the run directory's generation", claim)
    _check_same_options([claim.options for claim in claims])
    # Rank 0 names the run. The greatest number over all disks, so that exchanged disks do not set the count back.
    wanted = Generation.following(max(claim.newest_generation for claim in claims), claims[0].run_id)
    generation = _take(channel, topology, directory, wanted)
    staging = _prepare_staging(channel, topology, run_directory, options)
    return Run(channel, topology, directory, options, generation, dict(saved_by), staging)


def _prepare_staging(channel: Channel, topology: Topology, run_directory: Path, options: CheckpointOptions) -> Staging:
    found = [Staging()]

    def prepare() -> None:
        peers = topology.node_peers(channel.rank)
        index = peers.index(channel.rank)
        found[0] = staging_of(options.staging, run_directory=run_directory, index=index, count=len(peers))

    if options.stages_elsewhere:
        channel.together("prepare staging", prepare)
    return found[0]


def _take(channel: Channel, topology: Topology, directory: RunDirectory, wanted: Generation) -> Generation:
    """Take a generation on all disks: home's first, which decides the number."""

    def take() -> Generation | None:
        return directory.take(wanted) if channel.rank == topology.home.leader else None

    generation = channel.together("start in the run directory", take)[topology.home.leader] or wanted

    def follow() -> None:
        if topology.is_leader and not topology.is_home:
            directory.follow(generation)

    channel.together("start in the run directory", follow)
    return generation


def _try_file_systems(
    channel: Channel, topology: Topology, directory: RunDirectory, *, visibility_timeout_s: float
) -> None:
    """Find out whether file locks exclude and directories are renamed in one step, and let each leader act on it.

    The leader of each disk holds a lock on a file that nobody has used before, and the first rank of every other node
    of that disk tries to get it, too.
    """
    layout, leader = directory.layout, topology.domain.leader
    phase = "try what the file system can do"
    name = f"{uuid.uuid4().hex}-lock"
    with contextlib.ExitStack() as held:

        def try_alone() -> _Trial | None:
            if not topology.is_leader:
                return None
            renames = rename_problem(layout)
            locks = make_below(layout.tokens, lambda: held.enter_context(held_probe(layout.tokens / name)))
            if locks is None and set(topology.domain.ranks) == set(topology.node_peers(leader)):
                locks = flock_is_local(layout.root)  # no other host is there to try it
            return _Trial(name, renames, locks)

        trial = channel.together(phase, try_alone)[leader]

        def try_with_leader() -> str | None:
            is_elsewhere = topology.nodes[channel.rank] != topology.nodes[leader]
            if trial is None or trial.locks is not None or not is_elsewhere or not topology.is_lister():
                return None
            wait_until_visible(
                layout.tokens / trial.name, check=channel.raise_if_others_failed, timeout_s=visibility_timeout_s
            )
            return probe_problem(layout.tokens / trial.name)

        problems = channel.together(phase, try_with_leader)
    if topology.is_leader and trial is not None:
        if trial.renames is not None:
            directory.use_pieces(trial.renames)
        locks = trial.locks or next((problem for rank in topology.domain.ranks if (problem := problems[rank])), None)
        if locks is not None:
            directory.use_claims(locks)


def _check_same_options(options: list[dict[str, Any]]) -> None:
    for rank, others in enumerate(options):
        for name, value in others.items():
            if value != options[0][name]:
                raise OptionError(
                    f"{name} is {options[0][name]!r} on rank 0 and {value!r} on rank {rank}. Give all ranks the same "
                    "checkpoint options; a SAFE_TRAINER_* variable must be set on every node."
                )
