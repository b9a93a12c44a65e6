"""Every call of the benchmarks into safe_trainer, so that a change of its internals is met in one place."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash

from benchmarks.measure import Unavailable
from safe_trainer.channel import Channel
from safe_trainer.layout import FileStat, list_files
from safe_trainer.options import CheckpointOptions
from safe_trainer.resume import resume_path
from safe_trainer.rotation import Rotation
from safe_trainer.run import Run, open_run
from safe_trainer.save import SaveReport, save_checkpoint
from safe_trainer.topology import Domain
from safe_trainer.transfer import plan_shipments, ship

CHANNEL_TIMEOUT_S = 600.0
# What save.py calls of torch.distributed; a wrapper around each counts.
COLLECTIVES = (
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
)
SINGLE_MESSAGES = ("isend", "irecv", "send", "recv")

# How a save is made, by the name of an arm: fields of CheckpointOptions.
MODES: Mapping[str, Mapping[str, Any]] = {
    "foreground": {},
    "background": {"background": True},
    "memory": {"background": True, "staging": "memory"},
}


def mode_problem(mode: str) -> str | None:
    """Why saves cannot be made in a mode of :data:`MODES`; None where they can."""
    known = {option.name for option in dataclasses.fields(CheckpointOptions)}
    if "background" in MODES[mode] and "background" not in known:
        return "this version has no background saves"
    if "staging" in MODES[mode] and "staging" not in known:
        return "this version has no memory staging"
    return None


def options(mode: str = "foreground", **fields: Any) -> CheckpointOptions:
    """The options of a mode.

    Raises:
        Unavailable: this version does not have it.
    """
    problem = mode_problem(mode)
    if problem is not None:
        raise Unavailable(problem)
    return CheckpointOptions(**{"save_on_preemption": False, **MODES[mode], **fields})


# --- without a Trainer ---


@contextlib.contextmanager
def open_channel() -> Iterator[Channel]:
    """A channel for one measured function."""
    channel = Channel.open(timeout_s=CHANNEL_TIMEOUT_S)
    try:
        yield channel
    finally:
        if dist.is_initialized():
            dist.barrier()  # nobody takes leave while another one still works
        channel.close()


def start_run(channel: Channel, directory: Path, **fields: Any) -> Run:
    """A run in ``directory`` with these options; collective."""
    return open_run(directory, channel=channel, options=options(**fields), saved_by={})


def save_files(run: Run, step: int, write: Callable[[Path], None]) -> dict[str, Any]:
    """One save of what ``write`` writes; what :func:`described` makes of its report."""
    started = time.perf_counter()
    report = save_checkpoint(run, step=step, write=write, rotation=lambda: Rotation(limit=1))
    return described(report) | {"seconds": time.perf_counter() - started}


def described(report: SaveReport) -> dict[str, Any]:
    """A report as JSON: ``total_s`` is from the start of the save to its end, ``stall_s`` training's share of it."""
    return {
        "bytes": report.bytes,
        "gathered_bytes": report.gathered_bytes,
        "phases_s": dict(report.phases_s),
        "stall_s": report.stall_s,
        "total_s": getattr(report, "total_s", report.stall_s),
    }


@contextlib.contextmanager
def counted_messages() -> Iterator[dict[str, int]]:
    """Count what goes through torch.distributed's functions: ``collectives`` and ``messages`` between two ranks."""
    counts = {"collectives": 0, "messages": 0}
    originals = {name: getattr(dist, name) for name in (*COLLECTIVES, *SINGLE_MESSAGES)}

    def counting(name: str) -> Callable[..., Any]:
        kind = "collectives" if name in COLLECTIVES else "messages"

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[kind] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def new_digest() -> Any:
    """The digest that files of a checkpoint have: an object with ``update`` and ``hexdigest``."""
    return xxhash.xxh3_128()


@dataclasses.dataclass(frozen=True)
class Consignment:
    """Files that are to go from one rank to another.

    Attributes:
        files: of each its size and mode, by its path relative to the root on its rank.
        source, destination: ranks.
    """

    files: Mapping[str, FileStat]
    source: int
    destination: int

    @classmethod
    def below(cls, root: Path, *, source: int, destination: int) -> Consignment:
        """All files below ``root``."""
        return cls(list_files(root), source, destination)


def move_files(
    channel: Channel, consignment: Consignment, *, source_root: Path, destination_root: Path, digests: bool = True
) -> None:
    """Bring files from rank to rank as a save does, durable when it returns; collective.

    Each file is digested where it comes from and where it arrives.

    Raises:
        Unavailable: this version cannot do without digests.
    """
    if not digests:
        raise Unavailable("this version always takes digests")
    source, destination = Domain((consignment.source,)), Domain((consignment.destination,))
    plan = plan_shipments(consignment.files, source=source, destination=destination)

    def move() -> None:
        ship(channel, plan, source_root=source_root, destination_root=destination_root)

    channel.together("move", move)


def deliver(run: Run, checkpoint: Path) -> None:
    """Have a checkpoint checked and brought to every disk, as resuming from it does; collective."""
    resume_path(run, checkpoint)


# --- with a Trainer ---


def safe_trainer_class(trainer_class: type[Any]) -> type[Any]:
    """A Trainer class with safe checkpoints."""
    from safe_trainer import make_safe

    return make_safe(trainer_class)


def settle(trainer: Any) -> None:
    """Return when no save of this trainer is under way."""
    pending = getattr(trainer, "pending_save", None)
    if pending is not None:
        pending.wait()


def is_saving(trainer: Any) -> bool:
    """Whether a save of this trainer is under way beside training."""
    pending = getattr(trainer, "pending_save", None)
    return pending is not None and not pending.done()


def last_save(trainer: Any) -> dict[str, Any] | None:
    """What the trainer's last save did (:func:`described`); None for one that is not ours."""
    report = getattr(trainer, "last_save", None)
    return None if report is None else described(report)
