"""A run in a run directory: what saving and resuming both need, found once when the run starts."""

from __future__ import annotations

import dataclasses
import itertools
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from safe_trainer.channel import Channel
from safe_trainer.commit import Generation, RunDirectory
from safe_trainer.errors import OptionError
from safe_trainer.options import CheckpointOptions, Storage
from safe_trainer.topology import Domain, Topology, find_topology


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
    """

    channel: Channel
    topology: Topology
    directory: RunDirectory
    options: CheckpointOptions
    generation: Generation
    saved_by: Mapping[str, str]
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

    def next_name(self, purpose: str) -> str:
        """A name for a staging directory: unused in any run, and the same on every rank without a message."""
        return f"{self.generation.number}-{self.generation.run_id[:8]}-{next(self._counter)}-{purpose}"


class _Claim(NamedTuple):
    """What each rank brings along when a run starts."""

    newest_generation: int
    run_id: str
    options: dict[str, Any]


def open_run(
    run_directory: Path,
    *,
    channel: Channel,
    options: CheckpointOptions,
    saved_by: Mapping[str, str],
) -> Run:
    """Start a run in ``run_directory``: find the storage domains, take a generation, clear what dead runs left.

    Collective. On every rank, the run directory is made where it does not exist.

    Raises:
        StorageError: see :func:`~safe_trainer.topology.find_topology`.
        RunDirectoryTaken: another job has started at the same moment.
        OptionError: the options differ between ranks.
        CheckpointError: the run directory cannot be written on some node, or its lock is held.
    """
    topology = find_topology(
        channel,
        run_directory,
        storage=cast(Storage, options.storage),
        visibility_timeout_s=options.visibility_timeout_s,
    )
    directory = RunDirectory(run_directory, lock_timeout_s=options.lock_timeout_s)
    run_id = uuid.uuid4().hex

    def claim() -> _Claim:
        newest = directory.newest_generation() if topology.is_leader else 0
        return _Claim(newest, run_id, dataclasses.asdict(options))

    claims = channel.together("read the run directory's generation", claim)
    _check_same_options([claim.options for claim in claims])
    # Rank 0 names the run. The greatest number over all disks, so that exchanged disks do not set the count back.
    generation = Generation.following(max(claim.newest_generation for claim in claims), claims[0].run_id)

    def take() -> None:
        if topology.is_leader:
            directory.take(generation)

    channel.together("start in the run directory", take)
    return Run(channel, topology, directory, options, generation, dict(saved_by))


def _check_same_options(options: list[dict[str, Any]]) -> None:
    for rank, others in enumerate(options):
        for name, value in others.items():
            if value != options[0][name]:
                raise OptionError(
                    f"{name} is {options[0][name]!r} on rank 0 and {value!r} on rank {rank}. Give all ranks the same "
                    "checkpoint options; a SAFE_TRAINER_* variable must be set on every node."
                )
