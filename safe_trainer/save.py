"""A save from prepare to tell: the steps of docs/protocol.md, each one call.

It has two halves. :func:`stage_checkpoint` is over when every rank has written and all have agreed on it; training can
go on from there. :func:`commit_checkpoint` does the rest, on the same channel or, beside training, on one of its own.

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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from tqdm.auto import tqdm

from safe_trainer.digest import Digests, Stretch, combine, digest_blocks, share_out, united
from safe_trainer.disk import LARGE_BYTES, free_bytes, fsync_files, start_writeback_of
from safe_trainer.errors import ENDS_THE_RUN, CheckpointError, InsufficientSpaceError
from safe_trainer.integrity import inspect_checkpoint, tensorless_weights
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
from safe_trainer.staging import MemoryRoom, Staging
from safe_trainer.topology import Domain, Topology
from safe_trainer.transfer import Shipment, bytes_by_destination, plan_shipments, ship
from safe_trainer.watch import patient_groups

logger = logging.getLogger(__name__)

# By domain, home first: the files on its disk.
Entries = Mapping[Domain, Mapping[str, FileEntry]]

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
        reused_bytes: how many of them home did not receive or store, since its last checkpoint had them.
        phases_s: seconds spent in each step, by its name, on this rank.
        stall_s: seconds for which training stood still on this rank.
        total_s: seconds from the beginning of the save to its end on this rank; as long as the stall, unless the save
            was finished in the background.
        warnings: what the user should know although the checkpoint was committed.
    """

    step: int
    path: Path
    files: int
    bytes: int
    own_bytes: int
    gathered_bytes: int
    reused_bytes: int
    phases_s: dict[str, float]
    stall_s: float
    total_s: float
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.phases_s.items())
        rate = self.bytes / 1e6 / max(self.total_s, 1e-9)
        reused = f", {self.reused_bytes / 1e6:.1f} MB reused" if self.reused_bytes else ""
        return (
            f"saved step {self.step} to {self.path}: {self.files} files, {self.bytes / 1e6:.1f} MB "
            f"({self.gathered_bytes / 1e6:.1f} MB gathered{reused}), {self.stall_s:.2f} s stall, "
            f"{self.total_s:.2f} s in all ({rate:.0f} MB/s; {phases})"
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


@dataclass(frozen=True)
class StagedCheckpoint:
    """A checkpoint that every rank has written, and that is not committed yet.

    Attributes:
        step: the global step.
        directory: this rank's staging directory.
        staging: where this rank has put its files meanwhile.
        rotation: what ``save_total_limit`` wants; asked on rank 0 when it had written.
        stall_s: seconds from the beginning of the save up to here, on this rank.
    """

    step: int
    directory: Path
    staging: Staging
    rotation: Rotation
    stall_s: float
    clock: _Clock


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

    See :func:`stage_checkpoint` and :func:`commit_checkpoint`, which this calls one after the other.
    """
    staged = stage_checkpoint(run, step=step, write=write, rotation=rotation, expected=expected)
    return commit_checkpoint(run, staged, show_progress=show_progress, is_stall=True)


def stage_checkpoint(
    run: Run,
    *,
    step: int,
    write: Callable[[Path], None],
    rotation: Callable[[], Rotation],
    expected: Callable[[], ExpectedBytes] = ExpectedBytes,
) -> StagedCheckpoint:
    """The first half of a save: all ranks have written, and know it of each other; collective.

    Args:
        run: the run.
        step: the global step.
        write: writes this rank's files below the directory that it is given, which exists. Every rank enters it.
        rotation: asked on rank 0, after it has written, for what ``save_total_limit`` wants.
        expected: what this save will need at least.

    Raises:
        InsufficientSpaceError: a disk has too little room; nothing was written.
        CheckpointError: on every rank alike; what was committed before is as it was.
    """
    clock = _Clock()
    directory = run.directory.layout.staging / run.next_name(str(step)) / checkpoint_name(step)
    staging = Staging()
    with _cleared_up_after(run, directory, lambda: staging):
        with clock.phase("prepare"):
            staging = _prepare(run, step, directory, expected)
        with clock.phase("write"):
            wishes = _write(run, directory, staging, write, rotation)
    return StagedCheckpoint(step, directory, staging, wishes, clock.elapsed_s(), clock)


def commit_checkpoint(
    run: Run, staged: StagedCheckpoint, *, show_progress: bool = False, is_stall: bool = False
) -> SaveReport:
    """The second half of a save: gather, seal, commit and rotate; collective.

    Args:
        run: the run; with another channel over the same ranks where this happens beside training.
        staged: what :func:`stage_checkpoint` gave on this rank.
        show_progress: whether a bar may appear on home's leader.
        is_stall: whether training stands still until this returns.

    Raises:
        CheckpointError: on every rank alike; what was committed before is as it was.
    """
    clock, directory = staged.clock, staged.directory
    with _cleared_up_after(run, directory, lambda: staged.staging):
        if run.options.stages_elsewhere:
            with clock.phase("bring"):
                run.channel.together("bring files", lambda: staged.staging.bring(directory), place=directory)
        with clock.phase("list"):
            contents = _list(run, directory)
        with clock.phase("compare"):
            comparison = _compare(run, directory, contents)
        with clock.phase("gather"):
            gathered = _gather(run, directory, contents, comparison, show_progress=show_progress)
            chosen = choose_copies(gathered.entries)
        manifest = _manifest(run, staged.step, chosen)
        with clock.phase("commit"):
            decision = _commit(run, directory, manifest, comparison, contents, staged.rotation)
    run.last.note(decision.manifest.files, run.directory.layout.checkpoint(staged.step) if run.is_home_leader else None)
    with clock.phase("rotate"):
        warnings = decision.warnings + _finish(run, directory, decision, gathered.entries)
    staged.staging.clear()
    total_s = clock.elapsed_s()
    report = SaveReport(
        step=staged.step,
        path=run.directory.layout.checkpoint(staged.step),
        files=len(manifest.files),
        bytes=manifest.total_bytes,
        own_bytes=sum(e.size for e in gathered.entries[run.topology.domain].values() if e.rank == run.channel.rank),
        gathered_bytes=gathered.received_bytes,
        reused_bytes=decision.reused_bytes,
        phases_s=clock.phases_s,
        stall_s=total_s if is_stall else staged.stall_s,
        total_s=total_s,
        warnings=warnings,
    )
    if run.is_home_leader:
        logger.info("%s", report)
        for warning in warnings:
            logger.warning("checkpoint of step %d: %s", staged.step, warning)
    return report


@contextlib.contextmanager
def _cleared_up_after(run: Run, directory: Path, staging: Callable[[], Staging]) -> Iterator[None]:
    """Leave nothing of a save that fails in here, and say so where a newer run is why it failed."""
    try:
        yield
    except BaseException as error:
        _abandon(run, directory, staging())
        if isinstance(error, CheckpointError) and not isinstance(error, ENDS_THE_RUN):
            _raise_if_superseded(run)
        raise


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


@dataclass(frozen=True)
class _Entry:
    """What a rank brings along into a save."""

    step: int
    expected: ExpectedBytes
    memory: MemoryRoom | None


def _prepare(run: Run, step: int, staged: Path, expected: Callable[[], ExpectedBytes]) -> Staging:
    """Make the staging directory, and put into it what others have written into the final place beforehand.

    Returns:
        Where this rank puts its files: as the options say, unless its node has too little memory.
    """

    def enter() -> _Entry:
        expectation = expected()
        return _Entry(step, expectation, run.staging.room_for(expectation.own))

    # Once every rank has entered the save, whoever wrote there before calling it has done so.
    entered = run.channel.together("enter", enter)
    steps = sorted({entry.step for entry in entered})
    if len(steps) > 1:
        raise CheckpointError(f"the ranks are at different steps ({steps}); nothing was saved")
    expectations = [entry.expected for entry in entered]

    def prepare() -> None:
        if run.topology.is_leader:
            run.directory.check_generation()
            require_space(run, _needed_bytes(run, expectations), f"checkpoint {step}")
            run.directory.make_staging(staged.parent.name, staged.name)
            run.directory.carry_over(staged)

    run.channel.together("prepare", prepare, place=run.root)
    own_node = [entry.memory for rank, entry in enumerate(entered) if run.topology.is_on_this_node(rank)]
    return run.staging.admitted([room for room in own_node if room is not None])


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


def _write(
    run: Run, staged: Path, staging: Staging, write: Callable[[Path], None], rotation: Callable[[], Rotation]
) -> Rotation:
    """Let every rank write. Afterwards every rank has closed its files. Returns what rank 0 wants of the rotation."""
    # transformers 4.36 to 4.38 skip their own staging directory where the target is there and not empty.
    name = f"{STAGING_MARKER_PREFIX}{run.channel.rank}"

    def write_own() -> Rotation:
        run.wait_until_visible(staged)
        with staging.writing(staged) as directory:
            marker = directory / name
            marker.touch()
            try:
                with patient_groups():
                    write(directory)
            finally:
                marker.unlink(missing_ok=True)
        return rotation() if run.channel.rank == 0 else Rotation()

    return run.channel.together("write", write_own, place=staged)[0]


@dataclass(frozen=True)
class _Contents:
    """What lies in staging, the same on every rank.

    Attributes:
        files: by domain, every file that its disk has, as its writer's node sees it; home first.
        owners: for each path, the domain whose copy counts, which is the first that has one.
        contested: paths of which several domains have a copy.
        intact: files of home's last checkpoint that are still as they were.
    """

    files: Mapping[Domain, Mapping[str, FileStat]]
    owners: Mapping[str, Domain]
    contested: frozenset[str]
    intact: frozenset[str]

    @classmethod
    def of(cls, files: Mapping[Domain, Mapping[str, FileStat]], intact: frozenset[str]) -> _Contents:
        owners = {path: domain for domain in reversed(list(files)) for path in files[domain]}
        copies = Counter(path for on_disk in files.values() for path in on_disk)
        return cls(files, owners, frozenset(path for path, count in copies.items() if count > 1), intact)

    def owned(self, domain: Domain) -> dict[str, FileStat]:
        """The files whose copy in ``domain`` counts."""
        return {path: info for path, info in self.files[domain].items() if self.owners[path] == domain}


def _list(run: Run, staged: Path) -> _Contents:
    """What each node sees in staging: its own files for certain, those of others perhaps not yet."""

    def list_own_node() -> tuple[dict[str, FileStat], frozenset[str]]:
        if not run.topology.is_lister():
            return {}, frozenset()
        # A manifest that is there already came with files that were copied from another checkpoint.
        files = {path: found for path, found in list_files(staged).items() if path != MANIFEST_NAME}
        may_link = run.is_home_leader and run.directory.renames_whole
        return files, run.last.intact() if may_link else frozenset()

    listed = run.channel.together("list files", list_own_node)
    seen = [files for files, _ in listed]
    for path in (path for files in seen for path in files):
        check_relative_path(path)  # another rank's names are not to be trusted
    by_domain = {domain: _as_written(seen, run.topology, domain) for domain in run.topology.domains}
    return _Contents.of(by_domain, listed[run.topology.home.leader][1])


@dataclass(frozen=True)
class _Comparison:
    """Which files home's last checkpoint has.

    Attributes:
        reused: those of other disks that need not be sent.
        rounds: the digests that were taken for it, by rank; none if there was nothing to compare.
    """

    reused: frozenset[str] = frozenset()
    rounds: tuple[Sequence[Digests], ...] = ()


def _compare(run: Run, staged: Path, contents: _Contents) -> _Comparison:
    """Find out which files of other disks home's last checkpoint has; no step at all where none can be."""
    candidates = {domain: run.last.candidates(contents.owned(domain), contents.intact) for domain in run.other_domains}
    if not any(candidates.values()):
        return _Comparison()
    own = candidates.get(run.topology.domain, {})
    found = run.channel.together("compare with the last checkpoint", lambda: _digest(run, staged, own), place=staged)
    entries = [entry for domain, files in candidates.items() for entry in _entries(files, domain, found).values()]
    return _Comparison(frozenset(entry.path for entry in entries if run.last.has(entry)), (found,))


@dataclass(frozen=True)
class _Gathered:
    """What a gather came to.

    Attributes:
        entries: by domain, the files that its disk has, each with its digest.
        received_bytes: how much has come to home.
    """

    entries: Entries
    received_bytes: int


def _gather(run: Run, staged: Path, contents: _Contents, comparison: _Comparison, *, show_progress: bool) -> _Gathered:
    """Bring to home what it lacks, and make every file of every disk durable, with its digest.

    What is sent is digested in passing, on both ends. Beside that, each rank does its share of what stays.
    """
    shipments: list[Shipment] = []
    for domain in run.other_domains:
        lacking = {path: info for path, info in contents.owned(domain).items() if path not in comparison.reused}
        shipments += plan_shipments(lacking, source=domain, destination=run.topology.home)
    own = contents.files[run.topology.domain]
    to_digest = own if run.topology.is_home else {path: own[path] for path in own if path in contents.contested}

    def gather() -> tuple[Digests, int]:
        for shipment in shipments:
            if shipment.source == run.channel.rank:
                _wait_for_size(run, staged / shipment.path, shipment.size)
        if run.is_home_leader:
            for path in sorted(comparison.reused):
                run.last.take_over(path, staged)
        with ThreadPoolExecutor(1, "safe_trainer digest") as beside:
            local = beside.submit(_make_durable, run, staged, own, to_digest)
            with _bar(run, f"gather {staged.name}", shipments, show_progress) as bar:
                shipped = ship(run.channel, shipments, source_root=staged, destination_root=staged, progress=bar.update)
            return united([local.result(), shipped.digests]), shipped.received_bytes

    results = run.channel.together("gather", gather, place=staged)
    rounds = (*comparison.rounds, [digests for digests, _ in results])
    entries = {domain: _entries(files, domain, *rounds) for domain, files in contents.files.items()}
    return _Gathered(entries, sum(received for _, received in results))


def _bar(run: Run, text: str, shipments: Sequence[Shipment], show_progress: bool) -> tqdm[Any]:
    return tqdm(
        total=bytes_by_destination(shipments).get(run.channel.rank, 0),
        desc=text,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        delay=BAR_DELAY_S,
        leave=False,
        disable=not (show_progress and shipments and run.is_home_leader),
    )


def _make_durable(run: Run, staged: Path, files: Mapping[str, FileStat], to_digest: Mapping[str, FileStat]) -> Digests:
    """This rank's share of its disk's work: fsync all files, and digest those that are not sent.

    Only the host that wrote a file can flush it on a network file system, and who that was is not certain, so each
    node fsyncs all of its domain's files; where there is nothing to flush that costs next to nothing.
    """
    peers = run.topology.node_peers(run.channel.rank)
    own = [path for index, path in enumerate(files) if peers[index % len(peers)] == run.channel.rank]
    try:
        for path in own:
            _wait_for_size(run, staged / path, files[path].size)
            if files[path].size >= LARGE_BYTES:
                start_writeback_of(staged / path)  # it goes on while digests are taken
        digests = _digest(run, staged, to_digest)
        fsync_files([staged / path for path in own], root=staged)
        return digests
    except Exception as error:
        run.channel.tell(error)  # the others may be busy sending for a long time
        raise


def _digest(run: Run, staged: Path, files: Mapping[str, FileStat]) -> Digests:
    """The digests of this rank's share of its domain's ``files``."""
    digests: Digests = {}
    for stretch in _spread(files, run.topology):
        if stretch.rank == run.channel.rank:
            _wait_for_size(run, staged / stretch.path, files[stretch.path].size)
            found = digest_blocks(staged / stretch.path, offset=stretch.offset, length=stretch.length)
            digests.setdefault(stretch.path, {}).update(found)
    return digests


@dataclass(frozen=True)
class _Decision:
    """What home decided when it committed.

    Attributes:
        kept: the steps that home has after rotating; None where there is no limit, or rotating failed.
        reused_bytes: how much of it was taken over from the last checkpoint.
    """

    manifest: Manifest
    kept: tuple[int, ...] | None
    reused_bytes: int
    warnings: tuple[str, ...]


def _commit(
    run: Run, staged: Path, manifest: Manifest, comparison: _Comparison, contents: _Contents, rotation: Rotation
) -> _Decision:
    """Seal and rename on home, then rotate there; returns home's decision to every rank."""

    def commit() -> _Decision | None:
        if not run.is_home_leader:
            return None
        noted = dataclasses.replace(manifest, warnings=_content_warnings(staged, manifest))
        same = [entry for entry in manifest.files if entry.path in contents.intact and run.last.has(entry)]
        for entry in same:
            if entry.path not in comparison.reused:
                run.last.replace(entry.path, staged)
        noted.write(staged)
        with run.directory.lock():
            run.directory.commit(staged)
            kept, problems = _rotate(run, staged, rotation)
        if not run.other_domains:
            problems += _empty_trash(run)  # it takes no step of its own
        nameless = dataclasses.replace(noted, files=())  # which all ranks know
        return _Decision(nameless, kept, sum(entry.size for entry in same), noted.warnings + problems)

    decision = run.channel.together("commit", commit, place=staged)[run.topology.home.leader]
    if decision is None:
        raise CheckpointError("home's leader committed without a decision; this is a bug in safe_trainer")
    return dataclasses.replace(decision, manifest=dataclasses.replace(decision.manifest, files=manifest.files))


def _empty_trash(run: Run) -> tuple[str, ...]:
    try:
        run.directory.empty_trash()
    except Exception as error:
        return (f"the checkpoint was committed, but the trash could not be emptied: {error!r}",)
    return ()


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


def _finish(run: Run, staged: Path, decision: _Decision, entries: Entries) -> tuple[str, ...]:
    """Do on the other disks what the options say, and delete what was removed; failures here are warnings."""
    if not run.other_domains:
        return ()
    if run.options.local_copies == "full":
        problem = _complete_local_copies(run, staged, decision.manifest, entries)
        if problem is not None:
            return (problem, *_finish_own(run, staged, decision, entries, drop=True))
    return _finish_own(run, staged, decision, entries, drop=run.options.local_copies == "drop")


def _finish_own(run: Run, staged: Path, decision: _Decision, entries: Entries, *, drop: bool) -> tuple[str, ...]:
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


def _settle_local_copy(run: Run, staged: Path, decision: _Decision, entries: Entries, *, drop: bool) -> None:
    manifest = decision.manifest
    final = run.directory.layout.checkpoint(manifest.step)
    if run.options.local_copies == "keep":
        manifest = manifest.part(_as_committed(entries[run.topology.domain], manifest))
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


def _complete_local_copies(run: Run, staged: Path, manifest: Manifest, entries: Entries) -> str | None:
    """Send what the other disks lack from home's committed checkpoint; returns what went wrong, if anything."""
    shipments: list[Shipment] = []
    lacking = {}
    for domain in run.other_domains:
        present = _as_committed(entries[domain], manifest)
        lacking[domain] = [entry for entry in manifest.files if entry.path not in present]
        files = {entry.path: entry.stat for entry in lacking[domain]}
        shipments += plan_shipments(files, source=run.topology.home, destination=domain)

    def make_room() -> None:
        # What a node wrote in its own way (its own trainer state, say) gives way to home's copy.
        if run.topology.is_leader and not run.topology.is_home:
            present = _as_committed(entries[run.topology.domain], manifest)
            for path in set(list_files(staged)) - present:
                (staged / path).unlink()

    def receive() -> Digests:
        source = run.directory.layout.checkpoint(manifest.step)
        if run.topology.is_home:
            run.wait_until_visible(source)
        return ship(run.channel, shipments, source_root=source, destination_root=staged).digests

    try:
        run.channel.together("make local copies", make_room)
        received = run.channel.together("make local copies", receive)
        for domain, expected in lacking.items():
            check_arrival(expected, domain, received)
    except CheckpointError as error:
        return f"the local copies could not be completed and were dropped: {error}"
    return None


def _raise_if_superseded(run: Run) -> None:
    """A newer run sweeps this one's staging directory, whereupon any step fails with whatever is missing."""

    def check() -> None:
        if run.topology.is_leader:
            run.directory.check_generation()

    run.channel.together("look who runs here", check)


def _abandon(run: Run, staged: Path, staging: Staging) -> None:
    """Throw the staging directory away after a failure; whatever goes wrong here must not hide its cause."""
    staging.clear()
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


def choose_copies(entries: Entries) -> tuple[FileEntry, ...]:
    """One copy of every path over all domains, home's first.

    Args:
        entries: by domain, home first, the files on its disk.

    Raises:
        CheckpointError: two domains have one path with different content, and it is none that stock writes on every
            node.
    """
    chosen: dict[str, FileEntry] = {}
    for on_disk in entries.values():
        for path, entry in on_disk.items():
            first = chosen.setdefault(path, entry)
            if not first.same_content(entry) and not _WRITTEN_ON_EVERY_NODE.fullmatch(path):
                raise CheckpointError(
                    f"{path} was written with different content by rank {first.rank} ({first.size} bytes) and by rank "
                    f"{entry.rank} ({entry.size} bytes) on another disk. A checkpoint has one file of a name: let each "
                    "rank put its number into the name. Nothing was committed."
                )
    return tuple(chosen[path] for path in sorted(chosen))


def _entries(files: Mapping[str, FileStat], domain: Domain, *rounds: Sequence[Digests]) -> dict[str, FileEntry]:
    """The files of a domain with the digests that its ranks have taken, in one or more rounds, each by rank.

    Raises:
        CheckpointError: a file, or a part of it, has not been digested.
    """
    digests = united(found[rank] for found in rounds for rank in domain.ranks)
    return {
        path: FileEntry(path, info.size, combine(digests.get(path, {})), writing_rank(path, domain), info.mode)
        for path, info in files.items()
    }


def check_arrival(expected: Iterable[FileEntry], domain: Domain, received: Sequence[Digests]) -> None:
    """Make sure that what has come to a domain is what was meant to come.

    Args:
        expected: what was sent there.
        received: what every rank has received, by rank.

    Raises:
        CheckpointError: a file has another content.
    """
    digests = united(received[rank] for rank in domain.ranks)
    for entry in expected:
        if combine(digests.get(entry.path, {})) != entry.digest:
            raise CheckpointError(f"{entry.path} has other content than when it was saved (digest differs)")


def _as_written(listed: Sequence[Mapping[str, FileStat]], topology: Topology, domain: Domain) -> dict[str, FileStat]:
    """The files of a domain, each as its writer's node sees it: other nodes' caches may lag behind."""
    files: dict[str, FileStat] = {}
    for rank in domain.ranks:
        files.update(listed[rank])
    for path in files:
        writers_node = listed[topology.node_peers(writing_rank(path, domain))[0]]
        files[path] = writers_node.get(path, files[path])
    return dict(sorted(files.items()))


def _as_committed(own: Mapping[str, FileEntry], manifest: Manifest) -> set[str]:
    """The paths among ``own`` whose content is what was committed."""
    committed = manifest.by_path()
    return {path for path, entry in own.items() if path in committed and committed[path].same_content(entry)}


def _spread(files: Mapping[str, FileStat], topology: Topology) -> list[Stretch]:
    """Who digests what of this rank's domain: a file's writer, whose memory still holds it, or where a file says
    nothing of its writer, the ranks of the leader's node, each as many bytes."""
    domain = topology.domain
    load = dict.fromkeys(topology.node_peers(domain.leader), 0)
    stretches, others = [], {}
    for path, info in files.items():
        writer = writing_rank(path, domain)
        if writer == domain.leader:
            others[path] = info.size
            continue
        stretches.append(Stretch(path, 0, info.size, writer))
        if writer in load:
            load[writer] += info.size
    return stretches + share_out(others, load)


def _wait_for_size(run: Run, path: Path, size: int) -> None:
    """Wait until this node sees a file as its writer left it (attribute caches lag on network file systems)."""
    run.wait_until_visible(path)
    if not run.wait_until(path, lambda: path.stat().st_size == size):
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
