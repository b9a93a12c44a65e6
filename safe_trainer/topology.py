"""Ranks, nodes and storage domains: which ranks see the same run directory.

It is found out by looking, not by asking: every rank makes a token with a name of its own in its run directory and
looks for the others' tokens by name. Neither device and inode numbers nor file-system ids tell (they can be equal on
separate disks and different on one).
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from safe_trainer.channel import Channel
from safe_trainer.disk import NO_SPACE, Mount, make_below, mount_of
from safe_trainer.errors import StorageError
from safe_trainer.layout import RunLayout
from safe_trainer.options import Storage

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1
# How long a token that is not there is looked for again where the file system is a network one and the hosts differ.
# Names that were never looked up have no stale cache entry on NFS and FUSE; this covers what lags behind all the same.
ABSENCE_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Domain:
    """The ranks that see one run directory, in ascending order."""

    ranks: tuple[int, ...]

    @property
    def leader(self) -> int:
        """The one rank that creates, renames and deletes in this run directory."""
        return self.ranks[0]


@dataclass(frozen=True)
class Topology:
    """Who is where.

    Attributes:
        rank: this process.
        domains: all storage domains by their leaders' ranks; the first is home, the domain of rank 0.
        nodes: for each rank, the number of its node; nodes are numbered by their lowest ranks.
    """

    rank: int
    domains: tuple[Domain, ...]
    nodes: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    @property
    def home(self) -> Domain:
        return self.domains[0]

    @property
    def domain(self) -> Domain:
        """This rank's own domain."""
        return self.domain_of(self.rank)

    @property
    def is_leader(self) -> bool:
        return self.domain.leader == self.rank

    @property
    def is_home(self) -> bool:
        return self.rank in self.home.ranks

    def domain_of(self, rank: int) -> Domain:
        return next(domain for domain in self.domains if rank in domain.ranks)

    def node_peers(self, rank: int) -> tuple[int, ...]:
        """The ranks on ``rank``'s node that are in its domain, itself included."""
        return tuple(peer for peer in self.domain_of(rank).ranks if self.nodes[peer] == self.nodes[rank])

    def is_on_this_node(self, rank: int) -> bool:
        """Whether ``rank`` runs on the same node as this one."""
        return self.nodes[rank] == self.nodes[self.rank]

    def is_lister(self) -> bool:
        """Whether this rank is the lowest of its node in its domain: it lists files for the others there."""
        return self.node_peers(self.rank)[0] == self.rank

    def describe(self) -> str:
        """One line for the log, e.g. ``2 nodes, 4 ranks, 2 storage domains: ranks 0-1 (home) | ranks 2-3``."""
        parts = [format_ranks(domain.ranks) for domain in self.domains]
        parts[0] += " (home)"
        count = len(self.domains)
        return (
            f"{len(set(self.nodes))} node(s), {self.world_size} rank(s), {count} storage domain(s): {' | '.join(parts)}"
        )


def format_ranks(ranks: tuple[int, ...]) -> str:
    """``ranks 0-3,6`` for (0, 1, 2, 3, 6)."""
    pieces: list[str] = []
    start = previous = ranks[0]
    for rank in (*ranks[1:], None):
        if rank is not None and rank == previous + 1:
            previous = rank
            continue
        pieces.append(str(start) if start == previous else f"{start}-{previous}")
        if rank is not None:
            start = previous = rank
    return ("rank " if len(ranks) == 1 else "ranks ") + ",".join(pieces)


class _Visit(NamedTuple):
    """What a rank tells the others before they look."""

    directory: str
    token: str
    node: tuple[str, str]
    network: bool
    remote: tuple[str, ...] | None


class _Sight(NamedTuple):
    """Whose tokens a rank sees: in its own run directory, and only under the path of theirs."""

    seen: frozenset[int]
    elsewhere: frozenset[int]


def find_topology(
    channel: Channel,
    run_directory: Path,
    *,
    storage: Storage,
    visibility_timeout_s: float,
    make_room: Callable[[], None] = lambda: None,
) -> Topology:
    """Find the storage domains of ``run_directory``; collective.

    Args:
        channel: the control channel.
        run_directory: this rank's run directory; made where it does not exist. It may differ between nodes whose
            disks differ.
        storage: what the user insists on. ``shared`` looks for as long as ``visibility_timeout_s`` before it gives
            up; ``local`` believes absence at once, and that different run directories on one disk are meant so.
        visibility_timeout_s: see :class:`~safe_trainer.options.CheckpointOptions`.
        make_room: called where the disk is too full for the token, which is then tried again.

    Raises:
        StorageError: what was seen contradicts ``storage``, is not symmetric or not transitive, or ranks on one disk
            have different run directories. The text names the ranks.
        CheckpointError: a run directory cannot be written.
    """
    tokens = RunLayout(run_directory).tokens

    def leave_token() -> _Visit:
        token = f"{uuid.uuid4().hex}-{channel.rank}"
        try:
            _touch(tokens / token, timeout_s=visibility_timeout_s)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            make_room()
            _touch(tokens / token, timeout_s=visibility_timeout_s)
        mount = mount_of(run_directory)
        return _Visit(
            directory=str(run_directory.resolve()),
            token=token,
            node=(channel.host, os.environ.get("GROUP_RANK", "")),
            network=mount.is_network,
            remote=_remote_place(mount, run_directory),
        )

    visits = channel.together("write into the run directory", leave_token)
    try:
        sights = _look_around(channel, tokens, visits, storage, visibility_timeout_s)
    finally:
        # Everyone has looked (or the job is about to fail): each rank takes its own token away again.
        _remove_token(tokens, visits[channel.rank].token)
    seen = [sight.seen for sight in sights]
    _check_partition(seen, visits)
    if storage != "local":
        _check_one_directory_per_disk([sight.elsewhere for sight in sights], visits)
        _check_no_server_is_taken_for_two_disks(seen, visits)
    domains = tuple(Domain(tuple(sorted(group))) for group in sorted(set(seen), key=min))
    numbers: dict[tuple[str, str], int] = {}
    nodes = tuple(numbers.setdefault(visit.node, len(numbers)) for visit in visits)
    topology = Topology(rank=channel.rank, domains=domains, nodes=nodes)
    _check_option(storage, topology, visits)
    return topology


def wait_until_visible(path: Path, *, check: Callable[[], None], timeout_s: float) -> None:
    """Return once ``path``, which another rank says exists, can be seen here.

    Listing the parent makes NFS clients forget that the name was missing; on FUSE only waiting helps.

    Raises:
        StorageError: it stays invisible for ``timeout_s`` seconds.
        CheckpointError, OSError: what ``check`` raises, see :func:`poll`.
    """
    if not poll(lambda: _exists(path), check=check, timeout_s=timeout_s):
        raise StorageError(
            f"{path} was written by another rank but has been invisible here for {timeout_s:g} s. If the file system's "
            "caches lag further behind, raise visibility_timeout_s (SAFE_TRAINER_VISIBILITY_TIMEOUT_S)."
        )


def _touch(path: Path, *, timeout_s: float) -> None:
    """Make an empty file and the directories above it, which other nodes may just have made, too."""
    if path.parent.is_symlink():
        raise StorageError(f"{path.parent} is a symbolic link; remove it. Nothing was written there.")
    make_below(path.parent, path.touch, timeout_s=timeout_s)


def _exists(path: Path) -> bool:
    try:
        path.stat()
        return True
    except OSError:  # also ESTALE, which comes once and goes
        pass
    try:
        os.listdir(path.parent)
    except OSError:
        pass
    return False


def poll(condition: Callable[[], bool], *, check: Callable[[], None], timeout_s: float) -> bool:
    """Ask ``condition`` until it holds, for ``timeout_s`` seconds at most; whether it did. Asks at least once.

    Args:
        condition: what is waited for.
        check: called before each further look; raises where there is nothing to wait for any more, as
            :meth:`Channel.raise_if_others_failed` does.
        timeout_s: for how long.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        check()
        time.sleep(POLL_INTERVAL_S)
    return True


def _look_around(
    channel: Channel, tokens: Path, visits: list[_Visit], storage: Storage, visibility_timeout_s: float
) -> list[_Sight]:
    """What each rank sees, by rank. Absence is believed at once only where nothing speaks for caches that lag."""

    def look(patience_s: float) -> _Sight:
        seen = _seen_within(channel, tokens, visits, min(patience_s, visibility_timeout_s))
        return _Sight(seen, frozenset(_seen_elsewhere(visits, channel.rank, seen)))

    patience_s = ABSENCE_PATIENCE_S if storage == "auto" and _may_lag(visits) else 0.0
    if storage == "shared":
        patience_s = visibility_timeout_s
    phase = "look for the other ranks' run directories"
    sights = channel.together(phase, lambda: look(patience_s))
    if storage == "auto" and not _is_partition([sight.seen for sight in sights]):
        # Some see what others do not see yet.
        sights = channel.together(phase, lambda: look(ABSENCE_PATIENCE_S))
    return sights


def _is_partition(seen: list[frozenset[int]]) -> bool:
    """Whether ranks either see each other and the same others, or do not see each other."""
    return all(rank in others and all(seen[other] == others for other in others) for rank, others in enumerate(seen))


def _seen_within(channel: Channel, tokens: Path, visits: list[_Visit], patience_s: float) -> frozenset[int]:
    seen: set[int] = set()

    def look_again() -> bool:
        seen.update(rank for rank, visit in enumerate(visits) if rank not in seen and _exists(tokens / visit.token))
        return len(seen) == len(visits)

    poll(look_again, check=channel.raise_if_others_failed, timeout_s=patience_s)
    return frozenset(seen)


def _seen_elsewhere(visits: list[_Visit], rank: int, seen: frozenset[int]) -> list[int]:
    """Ranks whose token this rank sees, but under another path than its own run directory."""
    own = visits[rank].directory
    return [
        other
        for other, visit in enumerate(visits)
        if other not in seen
        and visit.directory != own
        and _exists(RunLayout(Path(visit.directory)).tokens / visit.token)
    ]


def _may_lag(visits: list[_Visit]) -> bool:
    return any(visit.network for visit in visits) and len({visit.node for visit in visits}) > 1


def _remote_place(mount: Mount, directory: Path) -> tuple[str, ...] | None:
    """The place on a server that ``directory`` is, where the mount's source names one."""
    names_a_server = ":" in mount.source or mount.source.startswith("//")
    if not (mount.is_network and names_a_server):
        return None
    return mount.kind, mount.source, os.path.relpath(directory.resolve(), mount.point)


def _remove_token(tokens: Path, token: str) -> None:
    # The directory stays: other ranks may be about to use it, and caches may show it for longer than it is there.
    try:
        (tokens / token).unlink(missing_ok=True)
    except OSError:
        logger.debug("%s stays in %s for now", token, tokens, exc_info=True)


def _name(rank: int, visits: list[_Visit]) -> str:
    return f"rank {rank} ({visits[rank].node[0]}:{visits[rank].directory})"


def _check_partition(seen: list[frozenset[int]], visits: list[_Visit]) -> None:
    for rank, others in enumerate(seen):
        if rank not in others:
            raise StorageError(f"{_name(rank, visits)} does not see the file that it has just written there.")
        for other in sorted(others):
            if seen[other] != others:
                missing = min(seen[other] ^ others)
                raise StorageError(
                    f"{_name(rank, visits)} and {_name(other, visits)} see one run directory, but only one of the two "
                    f"sees the files of {_name(missing, visits)} there. Ranks must see either the same directory or "
                    "separate ones. Check the mounts, or raise visibility_timeout_s and set storage='shared'."
                )


def _check_one_directory_per_disk(elsewhere: list[frozenset[int]], visits: list[_Visit]) -> None:
    for rank, others in enumerate(elsewhere):
        for other in sorted(others):
            raise StorageError(
                f"{_name(rank, visits)} and {_name(other, visits)} are on one disk but have different run directories, "
                "as if each node had a disk of its own. Give all ranks the same output_dir: a time stamp in its name "
                "must be taken once and passed to every node. If each node is to have its own, set storage='local'."
            )


def _check_no_server_is_taken_for_two_disks(seen: list[frozenset[int]], visits: list[_Visit]) -> None:
    """Two leaders in one directory would delete each other's files (seen with rclone's five-minute caches)."""
    for rank, others in enumerate(seen):
        for other in range(rank):
            place = visits[rank].remote
            if other not in others and place is not None and place == visits[other].remote:
                raise StorageError(
                    f"{_name(other, visits)} and {_name(rank, visits)} have mounted the same directory of "
                    f"{place[1]} but do not see each other's new files there: its caches lag behind for "
                    "longer than SafeTrainer looks. Mount it with shorter caches (rclone: --dir-cache-time 1s), or set "
                    "storage='shared' with a higher visibility_timeout_s. If they are separate disks all the same, set "
                    "storage='local'."
                )


def _check_option(storage: Storage, topology: Topology, visits: list[_Visit]) -> None:
    if storage == "shared" and len(topology.domains) > 1:
        apart = topology.domains[1].leader
        raise StorageError(
            f"storage='shared', but {_name(0, visits)} and {_name(apart, visits)} do not see each other's files. "
            "Mount the same file system on every node, or use storage='auto'."
        )
    if storage == "local":
        for domain in topology.domains:
            for rank in domain.ranks:
                if topology.nodes[rank] != topology.nodes[domain.leader]:
                    raise StorageError(
                        f"storage='local', but {_name(domain.leader, visits)} and {_name(rank, visits)} are on "
                        "different nodes and see one directory. Use storage='auto' or 'shared'."
                    )
