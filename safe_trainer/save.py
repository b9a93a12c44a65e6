"""A save from prepare to tell: the steps of docs/protocol.md, each one call.

Nobody begins a step before everybody has finished the one before it (:meth:`Channel.together`), and nobody writes
under the staging name once the files have been listed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TypeVar

from tqdm.auto import tqdm

from safe_trainer.disk import free_bytes, fsync_file
from safe_trainer.errors import ENDS_THE_RUN, CheckpointError, InsufficientSpaceError
from safe_trainer.integrity import digest_file, inspect_checkpoint, tensorless_weights
from safe_trainer.layout import (
    MANIFEST_NAME,
    STAGING_MARKER_PREFIX,
    FileStat,
    check_relative_path,
    checkpoint_name,
    checkpoint_step,
    list_checkpoints,
    list_files,
)
from safe_trainer.manifest import FileEntry, Manifest
from safe_trainer.rotation import Rotation, same_directory, stale_steps, steps_to_remove
from safe_trainer.run import Run
from safe_trainer.topology import Domain, Topology, poll
from safe_trainer.transfer import Shipment, plan_shipments, ship, total_bytes_by_destination
from safe_trainer.watch import patient_groups

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A bar only appears where a gather takes longer than this.
BAR_DELAY_S = 1.0

# What the stock Trainer and DeepSpeed write on purpose on several nodes (save_on_each_node). Home's copy counts.
# Pickles and JSON files differ in their bytes though they mean the same: by paths, times, and objects shared or not.
_WRITTEN_ON_EVERY_NODE = re.compile(
    r"trainer_state\.json|training_args\.bin|rng_state\.pth|README\.md|latest|zero_to_fp32\.py"
    r"|(optimizer|scheduler|scaler)\.pt|[^/]+/mp_rank_\d+_model_states\.pt"
)

# Where a file's name tells which rank wrote it: RNG states, DeepSpeed's shards, torch.distributed.checkpoint's.
_RANK_IN_NAME = (
    re.compile(r"^rng_state_(\d+)\.pth$"),
    re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_(?:optim|model)_states\.pt$"),
    re.compile(r"^__(\d+)_\d+\.distcp$"),
)


@dataclass(frozen=True)
class ExpectedBytes:
    """What a save is expected to need, so that too little room is found before anything is written.

    Attributes:
        own: bytes that this rank will write on its disk.
        total: bytes of the whole checkpoint, where that is known; otherwise the sum over all ranks counts.
    """

    own: int = 0
    total: int | None = None


@dataclass(frozen=True)
class SaveReport:
    """What a save did.

    Attributes:
        step: the global step.
        path: this rank's ``checkpoint-N``; on disks other than home's it may hold a part or not be there.
        files: number of files in the checkpoint, the manifest not counted.
        bytes: their total size.
        own_bytes: how many of them this rank has written.
        gathered_bytes: how many of them home received from other disks.
        phases_s: seconds spent in each step, by its name, on this rank.
        stall_s: seconds for which training stood still on this rank.
        warnings: what the user should know although the checkpoint was committed.
    """

    step: int
    path: Path
    files: int
    bytes: int
    own_bytes: int
    gathered_bytes: int
    phases_s: dict[str, float]
    stall_s: float
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.phases_s.items())
        rate = self.bytes / 1e6 / max(self.stall_s, 1e-9)
        return (
            f"saved step {self.step} to {self.path}: {self.files} files, {self.bytes / 1e6:.1f} MB "
            f"({self.gathered_bytes / 1e6:.1f} MB gathered), {self.stall_s:.2f} s stall ({rate:.0f} MB/s; {phases})"
        )


@dataclass
class _Clock:
    """Seconds per step, in the order of the steps."""

    phases_s: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.phases_s[name] = time.perf_counter() - begin

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started


def save_checkpoint(
    run: Run,
    *,
    step: int,
    write: Callable[[Path], None],
    rotation: Callable[[], Rotation],
    expected: Callable[[], ExpectedBytes] = ExpectedBytes,
    show_progress: bool = False,
) -> SaveReport:
    """Save one checkpoint: it is committed as a whole on home, or nothing has changed; collective.

    Args:
        run: the run.
        step: the global step.
        write: writes this rank's files below the directory that it is given, which exists. Every rank enters it.
        rotation: asked on rank 0, after it has written, for what ``save_total_limit`` wants.
        expected: what this save will need at least.
        show_progress: whether a bar may appear on home's leader.

    Raises:
        InsufficientSpaceError: a disk has too little room; nothing was written.
        CheckpointError: on every rank alike; what was committed before is as it was.
    """
    clock = _Clock()
    staged = run.directory.layout.staging / run.next_name(str(step)) / checkpoint_name(step)
    try:
        with clock.phase("prepare"):
            _prepare(run, step, staged, expected)
        with clock.phase("write"):
            _write(run, staged, write)
        with clock.phase("list"):
            listed = _list(run, staged)
        with clock.phase("digest"):
            entries = _digest(run, staged, listed)
        with clock.phase("gather"):
            chosen = choose_copies(entries, run.topology)
            gathered_bytes = _gather(run, staged, chosen, show_progress=show_progress)
        manifest = _manifest(run, step, chosen)
        with clock.phase("commit"):
            decision = _commit(run, staged, manifest, rotation)
    except BaseException as error:
        _abandon(run, staged)
        if isinstance(error, CheckpointError) and not isinstance(error, ENDS_THE_RUN):
            _raise_if_superseded(run)
        raise
    with clock.phase("rotate"):
        warnings = decision.warnings + _finish(run, staged, decision, entries)
    report = SaveReport(
        step=step,
        path=run.directory.layout.checkpoint(step),
        files=len(manifest.files),
        bytes=manifest.total_bytes,
        own_bytes=_own_bytes(run, entries),
        gathered_bytes=gathered_bytes,
        phases_s=clock.phases_s,
        stall_s=clock.elapsed_s(),
        warnings=warnings,
    )
    if run.is_home_leader:
        logger.info("%s", report)
        for warning in warnings:
            logger.warning("checkpoint of step %d: %s", step, warning)
    return report


def keep_only(run: Run, best: Callable[[], str | None]) -> None:
    """Remove every checkpoint but the best one, on every disk, if home has the best one complete; collective.

    Args:
        run: the run.
        best: asked on rank 0 for the best checkpoint's path.
    """

    def decide() -> int | None:
        if not run.is_home_leader:
            return None
        path = best()
        matching = (step for step, place in list_checkpoints(run.root) if same_directory(place, path))
        step = next(matching, None)
        if step is None or not inspect_checkpoint(run.directory.layout.checkpoint(step), verify="size").complete:
            return None
        return step

    kept = run.channel.together("choose what stays", decide)[run.topology.home.leader]

    def remove() -> None:
        if run.topology.is_leader and kept is not None:
            with run.directory.lock():
                run.directory.check_generation()
                run.directory.remove_checkpoints(stale_steps(run.root, [kept]))
            run.directory.empty_trash()

    run.channel.together("remove all but the best", remove)


# --- the steps ---


def _prepare(run: Run, step: int, staged: Path, expected: Callable[[], ExpectedBytes]) -> None:
    """Make the staging directory, and put into it what others have written into the final place beforehand."""
    # Once every rank has entered the save, whoever wrote there before calling it has done so.
    entered = run.channel.together("enter", lambda: (step, expected()))
    steps = sorted({other for other, _ in entered})
    if len(steps) > 1:
        raise CheckpointError(f"the ranks are at different steps ({steps}); nothing was saved")
    expectations = [expectation for _, expectation in entered]

    def prepare() -> None:
        if run.topology.is_leader:
            run.directory.check_generation()
            require_space(run, _needed_bytes(run, expectations), f"checkpoint {step}")
            run.directory.make_staging(staged.parent.name, staged.name)
            run.directory.carry_over(staged)

    run.channel.together("prepare", prepare, place=run.root)


def _needed_bytes(run: Run, expectations: Sequence[ExpectedBytes]) -> int:
    """What this domain's disk must have room for: its own part; on home, and for full copies, everything."""
    total = expectations[run.topology.home.leader].total
    if total is None:
        total = sum(expectation.own for expectation in expectations)
    if run.topology.is_home or run.options.local_copies == "full":
        return total
    return sum(expectations[rank].own for rank in run.topology.domain.ranks)


def require_space(run: Run, needed: int, what: str) -> None:
    """Make sure that this disk has room for ``needed`` bytes, besides everything that is on it.

    No checkpoint is deleted for it: what rotation would delete is needed until the new one is there.

    Raises:
        InsufficientSpaceError: it has not; the text has both numbers.
    """
    free = free_bytes(run.root)
    if free < needed:
        run.directory.empty_trash()
        free = free_bytes(run.root)
    if free < needed:
        raise InsufficientSpaceError(
            f"{what} needs {needed} bytes on the disk of rank {run.channel.rank}, where {free} are free "
            f"({run.channel.host}:{run.root}). Nothing was written or deleted. Make room, or lower "
            "save_total_limit: one checkpoint more than it says must fit."
        )


def _write(run: Run, staged: Path, write: Callable[[Path], None]) -> None:
    """Let every rank write. Afterwards every rank has closed its files."""
    # transformers 4.36 to 4.38 skip their own staging directory where the target is there and not empty.
    marker = staged / f"{STAGING_MARKER_PREFIX}{run.channel.rank}"

    def write_own() -> None:
        run.wait_until_visible(staged)
        marker.touch()
        try:
            with patient_groups():
                write(staged)
        finally:
            marker.unlink(missing_ok=True)

    run.channel.together("write", write_own, place=staged)


def _list(run: Run, staged: Path) -> list[dict[str, FileStat]]:
    """What each node sees in staging: its own files for certain, those of others perhaps not yet."""

    def list_own_node() -> dict[str, FileStat]:
        if not run.topology.is_lister():
            return {}
        # A manifest that is there already came with files that were copied from another checkpoint.
        return {path: found for path, found in list_files(staged).items() if path != MANIFEST_NAME}

    listed = run.channel.together("list files", list_own_node)
    for path in (path for listing in listed for path in listing):
        check_relative_path(path)  # another rank's names are not to be trusted
    return listed


def _digest(run: Run, staged: Path, listed: Sequence[dict[str, FileStat]]) -> list[dict[str, FileEntry]]:
    """Fsync every file on every node of its domain and digest it once; returns each rank's share of entries.

    Only the host that wrote a file can flush it on a network file system, and who that was is not certain, so each
    node fsyncs all of its domain's files; where there is nothing to flush that costs next to nothing.
    """
    topology = run.topology
    files = _as_written(listed, topology)
    peers = topology.node_peers(run.channel.rank)
    to_sync = [path for index, path in enumerate(files) if peers[index % len(peers)] == run.channel.rank]
    digesters = _spread(files, topology)

    def digest_own() -> dict[str, FileEntry]:
        for path in to_sync:
            _wait_for_size(run, staged / path, files[path].size)
            fsync_file(staged / path)
        entries = {}
        for path, digester in digesters.items():
            if digester == run.channel.rank:
                _wait_for_size(run, staged / path, files[path].size)
                entries[path] = FileEntry(
                    path=path,
                    size=files[path].size,
                    digest=digest_file(staged / path),
                    rank=writing_rank(path, topology.domain),
                    mode=files[path].mode,
                )
        return entries

    return run.channel.together("digest", digest_own, place=staged)


def _gather(run: Run, staged: Path, chosen: Sequence[FileEntry], *, show_progress: bool) -> int:
    """Bring to home what it lacks; returns the number of bytes that home received."""
    shipments: list[Shipment] = []
    for domain in run.other_domains:
        owned = [entry for entry in chosen if run.topology.domain_of(entry.rank) == domain]
        shipments += plan_shipments(owned, source=domain, destination=run.topology.home)
    if not shipments:
        return 0
    own_bytes = total_bytes_by_destination(shipments).get(run.channel.rank, 0)

    def receive() -> int:
        with tqdm(
            total=own_bytes,
            desc=f"gather {staged.name}",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            delay=BAR_DELAY_S,
            leave=False,
            disable=not (show_progress and run.is_home_leader),
        ) as bar:
            return ship(run.channel, shipments, source_root=staged, destination_root=staged, progress=bar.update)

    return sum(run.channel.together("gather", receive, place=staged))


@dataclass(frozen=True)
class _Decision:
    """What home decided when it committed.

    Attributes:
        kept: the steps that home has after rotating; None where there is no limit, or rotating failed.
    """

    manifest: Manifest
    kept: tuple[int, ...] | None
    warnings: tuple[str, ...]


def _commit(run: Run, staged: Path, manifest: Manifest, wishes: Callable[[], Rotation]) -> _Decision:
    """Seal and rename on home, then rotate there; returns home's decision to every rank."""

    def commit() -> _Decision | None:
        if not run.is_home_leader:
            return None
        noted = dataclasses.replace(manifest, warnings=_content_warnings(staged, manifest))
        noted.write(staged)
        rotation = wishes()
        with run.directory.lock():
            run.directory.commit(staged)
            kept, problems = _rotate(run, staged, rotation)
        return _Decision(noted, kept, noted.warnings + problems)

    decision = run.channel.together("commit", commit, place=staged)[run.topology.home.leader]
    if decision is None:
        raise CheckpointError("home's leader committed without a decision; this is a bug in safe_trainer")
    return decision


def _rotate(run: Run, staged: Path, rotation: Rotation) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Clear up after the commit. Whatever fails now is a warning: the new checkpoint is there already."""
    try:
        run.directory.release_staging(staged)
        if rotation.limit is None or rotation.limit < 1:
            return None, ()
        newest = checkpoint_step(staged.name) or 0
        run.directory.remove_checkpoints(steps_to_remove(run.root, rotation, newest=newest))
        return tuple(step for step, _ in list_checkpoints(run.root)), ()
    except Exception as error:
        logger.debug("after the commit of %s", staged.name, exc_info=True)
        return None, (f"the checkpoint was committed, but clearing up after it failed: {error!r}",)


def _finish(run: Run, staged: Path, decision: _Decision, entries: Sequence[dict[str, FileEntry]]) -> tuple[str, ...]:
    """Do on the other disks what the options say, and delete what was removed; failures here are warnings."""
    if run.other_domains and run.options.local_copies == "full":
        problem = _complete_local_copies(run, staged, decision.manifest, entries)
        if problem is not None:
            return (problem, *_finish_own(run, staged, decision, entries, drop=True))
    return _finish_own(run, staged, decision, entries, drop=run.options.local_copies == "drop")


def _finish_own(
    run: Run, staged: Path, decision: _Decision, entries: Sequence[dict[str, FileEntry]], *, drop: bool
) -> tuple[str, ...]:
    def finish() -> str | None:
        if not run.topology.is_leader:
            return None
        try:
            if not run.topology.is_home:
                _settle_local_copy(run, staged, decision, entries, drop=drop)
            run.directory.empty_trash()
        except Exception as error:
            return f"the local copy on rank {run.channel.rank}'s disk ({run.channel.host}) was not kept: {error}"
        return None

    return tuple(warning for warning in run.channel.together("rotate", finish) if warning is not None)


def _settle_local_copy(
    run: Run, staged: Path, decision: _Decision, entries: Sequence[dict[str, FileEntry]], *, drop: bool
) -> None:
    manifest = decision.manifest
    final = run.directory.layout.checkpoint(manifest.step)
    if run.options.local_copies == "keep":
        manifest = manifest.part(_as_committed(_merge(entries, run.topology.domain), manifest))
        drop = drop or not manifest.files
    with run.directory.lock():
        run.directory.check_generation()
        if drop:
            run.directory.drop_staging(staged)
            if os.path.lexists(final):
                run.directory.discard(final)  # of an earlier save of this step, or of transformers' own making
        else:
            manifest.write(staged)
            run.directory.commit(staged)
            run.directory.release_staging(staged)
        if decision.kept is not None:
            run.directory.remove_checkpoints(stale_steps(run.root, decision.kept))


def _complete_local_copies(
    run: Run, staged: Path, manifest: Manifest, entries: Sequence[dict[str, FileEntry]]
) -> str | None:
    """Send what the other disks lack from home's committed checkpoint; returns what went wrong, if anything."""
    shipments: list[Shipment] = []
    for domain in run.other_domains:
        present = _as_committed(_merge(entries, domain), manifest)
        lacking = [entry for entry in manifest.files if entry.path not in present]
        shipments += plan_shipments(lacking, source=run.topology.home, destination=domain)

    def make_room() -> None:
        # What a node wrote in its own way (its own trainer state, say) gives way to home's copy.
        if run.topology.is_leader and not run.topology.is_home:
            present = _as_committed(_merge(entries, run.topology.domain), manifest)
            for path in set(list_files(staged)) - present:
                (staged / path).unlink()

    def receive() -> int:
        source = run.directory.layout.checkpoint(manifest.step)
        if run.topology.is_home:
            run.wait_until_visible(source)
        return ship(run.channel, shipments, source_root=source, destination_root=staged)

    try:
        run.channel.together("make local copies", make_room)
        run.channel.together("make local copies", receive)
    except CheckpointError as error:
        return f"the local copies could not be completed and were dropped: {error}"
    return None


def _raise_if_superseded(run: Run) -> None:
    """A newer run sweeps this one's staging directory, whereupon any step fails with whatever is missing."""

    def check() -> None:
        if run.topology.is_leader:
            run.directory.check_generation()

    run.channel.together("look who runs here", check)


def _abandon(run: Run, staged: Path) -> None:
    """Throw the staging directory away after a failure; whatever goes wrong here must not hide its cause."""
    if not run.topology.is_leader:
        return
    try:
        run.directory.drop_staging(staged)
        run.directory.empty_trash()
    except (OSError, CheckpointError):
        logger.warning("Could not clear %s; the next run will.", staged, exc_info=True)


# --- who has what ---


def writing_rank(path: str, domain: Domain) -> int:
    """The global rank that wrote ``path`` into ``domain``'s staging directory.

    Writers that write on every rank put the rank into the name; what has none is written by the one process that
    stock lets write in a directory: the domain's leader. A name that points outside the domain (tensor or pipeline
    parallel numbering) counts as the leader's too, so that a file is always fetched from where it lies.
    """
    name = PurePosixPath(path).name
    for pattern in _RANK_IN_NAME:
        match = pattern.search(name)
        if match is not None and int(match.group(1)) in domain.ranks:
            return int(match.group(1))
    return domain.leader


def _own_bytes(run: Run, entries: Sequence[dict[str, FileEntry]]) -> int:
    own = _merge(entries, run.topology.domain).values()
    return sum(entry.size for entry in own if entry.rank == run.channel.rank)


def choose_copies(entries: Sequence[dict[str, FileEntry]], topology: Topology) -> tuple[FileEntry, ...]:
    """One copy of every path over all domains, home's first.

    Args:
        entries: by rank, its share of its domain's files.
        topology: who is where.

    Raises:
        CheckpointError: two domains have one path with different content, and it is none that stock writes on every
            node.
        UnsafePathError: a path leaves the checkpoint.
    """
    chosen: dict[str, FileEntry] = {}
    for domain in topology.domains:
        for path, entry in _merge(entries, domain).items():
            check_relative_path(path)
            first = chosen.setdefault(path, entry)
            if not first.same_content(entry) and not _WRITTEN_ON_EVERY_NODE.fullmatch(path):
                raise CheckpointError(
                    f"{path} was written with different content by rank {first.rank} ({first.size} bytes) and by rank "
                    f"{entry.rank} ({entry.size} bytes) on another disk. A checkpoint has one file of a name: let each "
                    "rank put its number into the name. Nothing was committed."
                )
    return tuple(chosen[path] for path in sorted(chosen))


def _merge(by_rank: Sequence[dict[str, T]], domain: Domain) -> dict[str, T]:
    merged: dict[str, T] = {}
    for rank in domain.ranks:
        merged.update(by_rank[rank])
    return dict(sorted(merged.items()))


def _as_written(listed: Sequence[dict[str, FileStat]], topology: Topology) -> dict[str, FileStat]:
    """The files of this rank's domain, each as its writer's node sees it: other nodes' caches may lag behind."""
    files = _merge(listed, topology.domain)
    for path in files:
        writers_node = listed[topology.node_peers(writing_rank(path, topology.domain))[0]]
        files[path] = writers_node.get(path, files[path])
    return files


def _as_committed(own: dict[str, FileEntry], manifest: Manifest) -> set[str]:
    """The paths among ``own`` whose content is what was committed."""
    committed = manifest.by_path()
    return {path for path, entry in own.items() if path in committed and committed[path].same_content(entry)}


def _spread(files: dict[str, FileStat], topology: Topology) -> dict[str, int]:
    """Who digests which file: its writer, whose memory still holds it, or one of the leader's node, evenly by size."""
    domain = topology.domain
    load = dict.fromkeys(topology.node_peers(domain.leader), 0)
    digesters = {}
    for path, info in sorted(files.items(), key=lambda item: -item[1].size):
        writer = writing_rank(path, domain)
        if writer == domain.leader:
            writer = min(load, key=lambda rank: (load[rank], rank))
        if writer in load:
            load[writer] += info.size
        digesters[path] = writer
    return digesters


def _wait_for_size(run: Run, path: Path, size: int) -> None:
    """Wait until this node sees a file as its writer left it (attribute caches lag on network file systems)."""
    run.wait_until_visible(path)
    timeout_s = run.options.visibility_timeout_s
    if not poll(lambda: path.stat().st_size == size, channel=run.channel, timeout_s=timeout_s):
        raise CheckpointError(
            f"{path} has {path.stat().st_size} bytes here, its writer said {size}: it changed after it was written, or "
            "the file system's caches lag behind for longer than visibility_timeout_s"
        )


def _manifest(run: Run, step: int, chosen: tuple[FileEntry, ...]) -> Manifest:
    return Manifest(
        step=step,
        save_id=uuid.uuid4().hex,
        scope="full",
        generation=run.generation.number,
        world_size=run.topology.world_size,
        saved_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        saved_by={"host": socket.gethostname(), "process": str(os.getpid()), **run.saved_by},
        files=chosen,
    )


def _content_warnings(staged: Path, manifest: Manifest) -> tuple[str, ...]:
    empty = tensorless_weights(staged, (entry.path for entry in manifest.files))
    return tuple(
        f"{path} holds no tensors: the weights were not gathered before they were saved, so this is not a usable model "
        "or adapter (seen with LoRA under ZeRO-3 on transformers 4.38 to 4.57; newer versions gather them)"
        for path in empty
    )
