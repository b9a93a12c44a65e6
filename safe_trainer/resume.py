"""Resuming: choose a checkpoint, bring it to every disk that lacks it, hand each rank a path.

Home decides. Only where home has no complete checkpoint (its disk is new, or nodes changed places), another disk's
counts, and home receives it too. What is handed over has been checked as ``verify`` says.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from safe_trainer.digest import Digests, combine, digest_blocks, share_out, united
from safe_trainer.disk import fsync_files, link_or_copy
from safe_trainer.errors import CheckpointError, IncompleteCheckpointError, UnsafePathError
from safe_trainer.integrity import (
    Verdict,
    file_problem,
    inspect_checkpoint,
    rng_ranks,
    saved_world_size,
    stat_problem,
    structure_problem,
)
from safe_trainer.layout import (
    MANIFEST_NAME,
    FileStat,
    checkpoint_step,
    list_checkpoints,
    list_files,
    resolve_inside,
)
from safe_trainer.manifest import FileEntry, Manifest
from safe_trainer.run import Run
from safe_trainer.save import check_arrival, require_space, writing_rank
from safe_trainer.topology import Domain, format_ranks
from safe_trainer.transfer import Shipped, plan_shipments, ship

logger = logging.getLogger(__name__)

State = Literal["complete", "part", "broken"]


@dataclass(frozen=True)
class Resumption:
    """A checkpoint that has been chosen, checked and delivered.

    Attributes:
        path: where this rank finds it, whole.
        step: its step; None for a directory that is not named as a checkpoint.
        world_size: the number of ranks that saved it, where that is known.
        has_deepspeed_shards: whether only as many ranks can load it as saved it.
        rng_ranks: ranks whose RNG states it has.
    """

    path: Path
    step: int | None
    world_size: int | None
    has_deepspeed_shards: bool
    rng_ranks: frozenset[int]


@dataclass(frozen=True)
class _Candidate:
    """A checkpoint directory on one disk, as its leader judges it."""

    name: str
    step: int | None
    state: State
    save_id: str | None
    problems: tuple[str, ...]

    @classmethod
    def of(cls, path: Path, verdict: Verdict) -> _Candidate:
        state: State = "complete" if verdict.complete else "part" if verdict.is_part else "broken"
        save_id = None if verdict.manifest is None else verdict.manifest.save_id
        return cls(path.name, checkpoint_step(path.name), state, save_id, verdict.problems)

    def is_copy_of(self, other: _Candidate) -> bool:
        """Whether both come from one save."""
        return self.save_id is not None and (self.name, self.save_id) == (other.name, other.save_id)


@dataclass(frozen=True)
class _Place:
    """Where this rank would find a checkpoint.

    Attributes:
        path: in this rank's run directory, or wherever the user says.
        in_run_directory: then every rank of a storage domain sees it; elsewhere only its leader is asked.
    """

    path: Path
    in_run_directory: bool

    def readers(self, domain: Domain) -> tuple[int, ...]:
        """The ranks that share the work of reading it in ``domain``."""
        return domain.ranks if self.in_run_directory else (domain.leader,)


@dataclass(frozen=True)
class _Source:
    """Where a checkpoint can be had: ``name`` on ``domain``'s disk."""

    name: str
    step: int | None
    domain: Domain


@dataclass(frozen=True)
class _Share:
    """What one rank found when it checked its share of a checkpoint's files."""

    digests: Digests = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    manifest: Manifest | None = None
    world_size: int | None = None


@dataclass(frozen=True)
class _Inventory:
    """Every file of a checkpoint, and what is wrong with it after the check that the options ask for."""

    entries: tuple[FileEntry, ...]
    manifest: Manifest | None
    problems: tuple[str, ...]
    world_size: int | None


@dataclass(frozen=True)
class _Need:
    """What a storage domain needs before its ranks can load a checkpoint.

    Attributes:
        copy: whether it needs a copy of its own; False where every rank can use what is there.
        missing: the paths that have to come from another disk.
    """

    copy: bool
    missing: frozenset[str]


def resume_latest(run: Run) -> Resumption | None:
    """The newest complete checkpoint of the run directory on every rank, or None where there is none; collective.

    Incomplete ones are skipped with a warning that says why.

    Raises:
        CheckpointError: a checkpoint was found but could not be brought to every disk.
    """
    candidates = _survey(run, lambda: [path for _, path in list_checkpoints(run.root)])
    for source in _in_order(run, candidates):
        place = _Place(run.root / source.name, in_run_directory=True)
        inventory = _take_inventory(run, source, place)
        if inventory.problems:
            _warn_skipped(run, source.name, inventory.problems)
            continue
        return _deliver(run, source, inventory, place)
    return None


def resume_path(run: Run, path: str | os.PathLike[str]) -> Resumption:
    """The checkpoint at ``path`` on every rank; collective.

    ``path`` may differ between ranks, and need not exist on every disk. A checkpoint in the run directory is looked
    for in each node's own run directory.

    Raises:
        IncompleteCheckpointError: it is nowhere complete; the text lists what is wrong with it.
        CheckpointError: it could not be brought to every disk.
    """
    own = Path(path)
    inside = run.channel.together("look for the checkpoint", lambda: _name_in_run_directory(run, own))[0]
    place = _Place(own, False) if inside is None else _Place(run.root / inside, True)
    found = _survey(run, lambda: [place.path] if place.path.is_dir() else [])
    problems = [problem for domain in found for candidate in domain for problem in candidate.problems]
    for source in _in_order(run, found, warn=False):
        inventory = _take_inventory(run, source, place)
        if not inventory.problems:
            return _deliver(run, source, inventory, place)
        problems += inventory.problems
    raise _incomplete(place.path, problems or ["it does not exist on any node"])


def committed_step(run: Run, path: str | None) -> int | None:
    """The step of the checkpoint that ``path`` names, if home has it complete in this run directory; collective.

    Paths are compared by the directory's name only, so that a run directory that was moved is recognised. Rank 0's
    ``path`` counts.
    """

    def look() -> int | None:
        if not run.is_home_leader or path is None:
            return None
        step = checkpoint_step(Path(path).name)
        if step is None:
            return None
        place = run.directory.layout.checkpoint(step)
        return step if place.is_dir() and inspect_checkpoint(place, verify="size").complete else None

    return run.channel.together("look for the best checkpoint", look)[0]


def check_world_size(resumption: Resumption, *, world_size: int) -> None:
    """Refuse DeepSpeed shards of another number of ranks, before any engine tries to load them.

    Raises:
        CheckpointError: on every rank alike, with the ways out.
    """
    saved = resumption.world_size
    if not resumption.has_deepspeed_shards or saved is None or saved == world_size:
        return
    raise CheckpointError(
        f"{resumption.path.name} holds DeepSpeed ZeRO shards of {saved} ranks and cannot be loaded by {world_size}. "
        f"Start {saved} ranks; or convert it with DeepSpeed's ds_to_universal.py and set checkpoint.load_universal in "
        "the DeepSpeed config; or make weights of it with the zero_to_fp32.py beside it and start a new run from those."
    )


def warn_missing_rng(resumption: Resumption, *, world_size: int) -> None:
    """Say once which ranks have no RNG state in the checkpoint; they go on with the states that they have."""
    missing = tuple(rank for rank in range(world_size) if rank not in resumption.rng_ranks)
    if missing and resumption.rng_ranks:
        logger.warning(
            "%s has no RNG state for %s (it was saved with %d ranks); dropout and shuffling there will not repeat what "
            "an uninterrupted run would have done.",
            resumption.path,
            format_ranks(missing),
            len(resumption.rng_ranks),
        )


def clear_deliveries(run: Run) -> None:
    """Delete the copies that were made for resuming; call it when nobody reads them any more. Not collective."""
    if not run.topology.is_leader:
        return
    try:
        run.directory.check_generation()
    except CheckpointError:
        return  # a newer run has started and swept; what is there now is its own
    run.directory.clear_deliveries()


# --- choose ---


def _survey(run: Run, places: Callable[[], list[Path]]) -> list[list[_Candidate]]:
    """What each domain's leader finds, by domain."""
    verify: Literal["size", "off"] = "off" if run.options.verify == "off" else "size"

    def look() -> list[_Candidate]:
        if not run.topology.is_leader:
            return []
        return [_Candidate.of(path, inspect_checkpoint(path, verify=verify)) for path in places()]

    found = run.channel.together("look for checkpoints", look)
    return [found[domain.leader] for domain in run.topology.domains]


def _in_order(run: Run, candidates: Sequence[Sequence[_Candidate]], *, warn: bool = True) -> list[_Source]:
    """Where to try, best first.

    Home's by step, the highest first. Behind each comes the same save on another disk that has it whole: it stands in
    where home has only a part (the nodes changed places) or a damaged copy. After them what only other disks have.
    """
    home = candidates[0]
    elsewhere = [
        (candidate, _Source(candidate.name, candidate.step, domain))
        for domain, found in zip(run.other_domains, candidates[1:], strict=True)
        for candidate in found
        if candidate.state == "complete"
    ]
    elsewhere.sort(key=lambda found: _step_key(found[0]), reverse=True)
    sources: list[_Source] = []
    for candidate in sorted(home, key=_step_key, reverse=True):
        if candidate.state == "complete":
            sources.append(_Source(candidate.name, candidate.step, run.topology.home))
        copies = [source for other, source in elsewhere if other.is_copy_of(candidate)]
        if warn and (candidate.state == "broken" or (candidate.state == "part" and not copies)):
            _warn_skipped(run, candidate.name, candidate.problems)
        sources += copies
    return sources + [source for _, source in elsewhere if source not in sources]


def _step_key(candidate: _Candidate) -> int:
    return -1 if candidate.step is None else candidate.step


def _warn_skipped(run: Run, name: str, problems: Sequence[str]) -> None:
    if run.is_home_leader:
        logger.warning("Not resuming from %s: %s.", run.root / name, "; ".join(_first(problems)))


def _incomplete(path: Path, problems: Sequence[str]) -> IncompleteCheckpointError:
    return IncompleteCheckpointError(
        f"{path} is not a complete checkpoint: {'; '.join(_first(problems))}. Resume from another one, or with "
        "resume_from_checkpoint=True from the newest complete one."
    )


def _first(problems: Sequence[str], limit: int = 20) -> list[str]:
    more = len(problems) - limit
    return [*problems[:limit], f"and {more} more"] if more > 0 else list(problems)


def _name_in_run_directory(run: Run, path: Path) -> str | None:
    """The name of ``path`` where it is a checkpoint of this run directory, else None."""
    if checkpoint_step(path.name) is None:
        return None
    return path.name if os.path.realpath(path.parent) == os.path.realpath(run.root) else None


# --- check ---


def _take_inventory(run: Run, source: _Source, place: _Place) -> _Inventory:
    """List and check the chosen checkpoint, each reader of its domain a share of the files."""
    readers = place.readers(source.domain)
    leader = source.domain.leader
    # One listing for all: on a network file system, those of several nodes may differ.
    files = run.channel.together(
        "list the checkpoint", lambda: list_files(place.path) if run.channel.rank == leader else {}
    )[leader]

    def check_share() -> _Share:
        if run.channel.rank not in readers:
            return _Share()
        run.wait_until_visible(place.path)
        return _check_share(run, place.path, files, readers=readers)

    shares = run.channel.together("check the checkpoint", check_share)
    manifest = shares[leader].manifest
    listed = {} if manifest is None else manifest.by_path()
    digests = united(share.digests for share in shares)
    problems = {name: problem for share in shares for name, problem in share.problems.items()}
    entries = []
    for name in sorted(files.keys() - {MANIFEST_NAME}):
        entry = listed.get(name)
        found = combine(digests[name]) if name in digests and name not in problems else ""
        if entry is None:
            # A stock checkpoint's file, or one that somebody added after the commit: it goes along with the others.
            info = files[name]
            entry = FileEntry(name, info.size, found, writing_rank(name, source.domain), info.mode)
        elif found and found != entry.digest:
            problems[name] = f"{name} has other content than when it was saved (digest differs)"
        entries.append(entry)
    return _Inventory(
        entries=tuple(entries),
        manifest=manifest,
        problems=tuple(problems.values()),
        world_size=shares[leader].world_size,
    )


def _check_share(run: Run, path: Path, files: dict[str, FileStat], *, readers: tuple[int, ...]) -> _Share:
    """This rank's share: every so many files' structure and size, and as many bytes to digest as any other reader."""
    index = readers.index(run.channel.rank)
    every_byte = run.options.verify == "digest"
    manifest = Manifest.read(path)
    listed = {} if manifest is None else manifest.by_path()
    names = sorted(files.keys() - {MANIFEST_NAME})
    problems = {}
    for name in names[index :: len(readers)] if every_byte else ():
        if name in listed:
            problem = stat_problem(path, listed[name])
        elif (problem := structure_problem(path / name, thorough=True)) is not None:
            problem = f"{name}: {problem}"
        if problem is not None:
            problems[name] = problem
    # Of what no manifest lists, the digest is needed only where it is to be sent.
    is_sent = len(run.topology.domains) > 1
    to_digest = {name: files[name].size for name in names if (every_byte if name in listed else is_sent)}
    digests: Digests = {}
    for stretch in share_out(to_digest, dict.fromkeys(readers, 0)):
        if stretch.rank == run.channel.rank:
            try:
                found = digest_blocks(resolve_inside(path, stretch.path), offset=stretch.offset, length=stretch.length)
            except (OSError, CheckpointError) as error:
                problems.setdefault(stretch.path, f"{stretch.path}: {error}")
            else:
                digests.setdefault(stretch.path, {}).update(found)
    return _Share(
        digests=digests,
        problems=problems,
        manifest=manifest if index == 0 else None,
        world_size=saved_world_size(path, files) if manifest is None else manifest.world_size,
    )


# --- deliver ---


def _deliver(run: Run, source: _Source, inventory: _Inventory, place: _Place) -> Resumption:
    """Bring the checkpoint to every domain that lacks some of it.

    On home, and where ``local_copies`` is ``full``, it takes its place as ``checkpoint-N`` in the run directory;
    elsewhere, and where the user named a path outside of it, the copy lies in ``_safe_trainer/delivered/`` until
    training has loaded it.
    """
    needs = _find_needs(run, source, inventory, place)
    own_need = needs[run.channel.rank]
    path = place.path
    if any(need.copy for need in needs):
        staged = run.directory.layout.delivered / run.next_name("resume") / place.path.name
        _ship_missing(run, source, inventory, place, staged, needs)
        settled = run.channel.together(
            "put the checkpoint in place",
            lambda: _settle_delivery(run, inventory, place, staged) if own_need.copy else None,
        )
        path = Path(settled[run.topology.domain.leader] or place.path)
    visible_path = path
    run.channel.together("see the checkpoint", lambda: run.wait_until_visible(visible_path))
    if run.is_home_leader:
        logger.info("resuming from %s (%d files)", path, len(inventory.entries))
    if place.in_run_directory and inventory.manifest is not None and run.options.verify == "digest":
        run.last.note(inventory.entries, path if run.is_home_leader else None)
    names = {entry.path for entry in inventory.entries}
    alone = {0} if "rng_state.pth" in names else set()  # saved by a single process
    return Resumption(
        path=path,
        step=source.step,
        world_size=inventory.world_size,
        has_deepspeed_shards=any(name.endswith("_optim_states.pt") for name in names),
        rng_ranks=frozenset(rng_ranks(names) | alone),
    )


def _find_needs(run: Run, source: _Source, inventory: _Inventory, place: _Place) -> list[_Need]:
    """For each rank, what its domain needs."""
    domain = run.topology.domain
    readers = place.readers(domain)
    rank = run.channel.rank

    def compare_share() -> _Need:
        here = place.path.is_dir()
        if domain == source.domain and rank in readers:
            return _Need(copy=False, missing=frozenset())
        if rank not in readers:
            return _Need(copy=not here, missing=frozenset())
        share = inventory.entries[readers.index(rank) :: len(readers)]
        known = _trusted_digests(run, inventory, place.path)
        missing = frozenset(entry.path for entry in share if not (here and _has_same(place.path, entry, known)))
        return _Need(copy=bool(missing) or not here, missing=missing)

    found = run.channel.together("compare disks", compare_share)
    needs = []
    for peers in (run.topology.domain_of(other).ranks for other in range(run.topology.world_size)):
        missing = frozenset(path for peer in peers for path in found[peer].missing)
        needs.append(_Need(copy=any(found[peer].copy for peer in peers), missing=missing))
    return needs


def _trusted_digests(run: Run, inventory: _Inventory, place: Path) -> dict[str, FileEntry]:
    """Entries of this disk's own manifest, where the user does not ask for every byte to be read again."""
    if run.options.verify == "digest":
        return {}
    try:
        manifest = Manifest.read(place)
    except CheckpointError:
        return {}
    if manifest is None or inventory.manifest is None or manifest.save_id != inventory.manifest.save_id:
        return {}
    return manifest.by_path()


def _has_same(place: Path, entry: FileEntry, known: dict[str, FileEntry]) -> bool:
    try:
        if resolve_inside(place, entry.path).stat().st_size != entry.size:
            return False
    except (OSError, UnsafePathError):
        return False
    trusted = known.get(entry.path)
    if trusted is not None:
        return trusted.same_content(entry)
    return file_problem(place, entry) is None


def _ship_missing(
    run: Run, source: _Source, inventory: _Inventory, place: _Place, staged: Path, needs: Sequence[_Need]
) -> None:
    """Fill ``staged`` in every domain that needs a copy: links to what is there already, the rest over the wire."""

    def stage_present() -> None:
        need = needs[run.channel.rank]
        if run.topology.is_leader and need.copy:
            lacking = sum(entry.size for entry in inventory.entries if entry.path in need.missing)
            require_space(run, lacking, f"the copy of {place.path.name} for resuming")
            staged.mkdir(parents=True)
            for entry in inventory.entries:
                if entry.path not in need.missing:
                    link_or_copy(place.path / entry.path, staged / entry.path)

    run.channel.together("use what is here", stage_present, place=staged)
    shipments = []
    lacking = {}
    for domain in run.topology.domains:
        lacking[domain] = [entry for entry in inventory.entries if entry.path in needs[domain.leader].missing]
        files = {entry.path: entry.stat for entry in lacking[domain]}
        shipments += plan_shipments(files, source=Domain(place.readers(source.domain)), destination=domain)

    def receive() -> Shipped:
        if needs[run.channel.rank].copy:
            run.wait_until_visible(staged)
        return ship(run.channel, shipments, source_root=place.path, destination_root=staged)

    shipped = run.channel.together("deliver the checkpoint", receive, place=staged)
    for domain, expected in lacking.items():
        check_arrival(expected, domain, [each.digests for each in shipped])
    if run.is_home_leader:
        received = sum(each.received_bytes for each in shipped)
        logger.info("delivered %.1f MB of %s to disks that lacked it", received / 1e6, place.path.name)


def _settle_delivery(run: Run, inventory: _Inventory, place: _Place, staged: Path) -> str:
    """Finish a delivered copy on this domain's leader and say where it is."""
    if not run.topology.is_leader:
        return str(staged)
    if inventory.manifest is not None:
        inventory.manifest.write(staged)
    if place.in_run_directory and (run.topology.is_home or run.options.local_copies == "full"):
        # For those that were linked or copied; stock never fsyncs.
        fsync_files([staged / path for path in list_files(staged)], root=staged)
        with run.directory.lock():
            final = run.directory.commit(staged)
            run.directory.release_staging(staged)
            return str(final)
    return str(staged)
