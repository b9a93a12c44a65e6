"""Which checkpoints ``save_total_limit`` no longer allows. Decides only; :mod:`safe_trainer.commit` removes."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from safe_trainer.integrity import inspect_checkpoint
from safe_trainer.layout import list_checkpoints


@dataclass(frozen=True)
class Rotation:
    """The user's wishes at one save.

    Attributes:
        limit: ``save_total_limit``; None or less than 1 keeps all.
        best: path of the best checkpoint, which stays; relative, absolute or through links.
        resumed_step: the step that this run resumed from, 0 for a fresh start. Checkpoints of later steps that were
            there when it started belong to a line of training that was left; they go first.
        steps_at_start: steps of the checkpoints that were there when this run started.
    """

    limit: int | None = None
    best: str | None = None
    resumed_step: int = 0
    steps_at_start: frozenset[int] = frozenset()


def steps_to_remove(run_directory: Path, rotation: Rotation, *, newest: int) -> list[int]:
    """Steps whose checkpoints have to go, in the order in which they go.

    Steps order checkpoints, not times: a touched file or a skewed clock must not delete the newest one. Directories
    that are not complete neither count nor go. The one just committed and the best one always stay, so that with
    ``limit=1`` two remain where those differ (as with stock).

    Args:
        run_directory: home's run directory.
        rotation: what is wished.
        newest: the step that was just committed.
    """
    if rotation.limit is None or rotation.limit < 1:
        return []
    complete = [
        (step, path)
        for step, path in list_checkpoints(run_directory)
        if step == newest or inspect_checkpoint(path, verify="size").complete
    ]
    kept = {newest, *(step for step, path in complete if same_directory(path, rotation.best))}
    removable = [step for step, _ in complete if step not in kept]
    left_behind = {step for step in rotation.steps_at_start if step > rotation.resumed_step}
    removable.sort(key=lambda step: (step not in left_behind, step))
    excess = len(complete) - max(rotation.limit, len(kept & {step for step, _ in complete}))
    return removable[: max(excess, 0)]


def same_directory(path: Path, other: str | None) -> bool:
    """Whether both name one directory, through links, trailing slashes and relative parts."""
    if other is None:
        return False
    return os.path.realpath(path) == os.path.realpath(other)


def stale_steps(run_directory: Path, kept: Collection[int]) -> list[int]:
    """Steps of the checkpoints on a disk other than home's that home no longer has."""
    return [step for step, _ in list_checkpoints(run_directory) if step not in kept]
