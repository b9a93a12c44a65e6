"""A failure in each step of a save and of a resume, on each kind of rank: one error everywhere, the root cause first;
the former checkpoint as it was, and the next save whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safe_trainer import disk, resume, save, transfer
from safe_trainer.channel import Channel
from safe_trainer.commit import RunDirectory
from safe_trainer.layout import list_checkpoints
from safe_trainer.manifest import Manifest
from safe_trainer.options import CheckpointOptions
from safe_trainer.resume import resume_latest
from safe_trainer.rotation import Rotation
from safe_trainer.run import Run, open_run
from safe_trainer.save import save_checkpoint
from tests import checks
from tests.unit.processes import Raised, outcome_of, run_ranks

RANKS = 4
# Where it fails: what is replaced (None: the writer of the rank itself), on which rank, and the step in the error.
SAVE_FAULTS: dict[str, tuple[tuple[Any, str] | None, int, str]] = {
    "prepare, home's leader": ((RunDirectory, "make_staging"), 0, "prepare"),
    "prepare, the other leader": ((RunDirectory, "make_staging"), 2, "prepare"),
    "write, home's leader": (None, 0, "write"),
    "write, a plain rank": (None, 3, "write"),
    "list, the other leader": ((save, "list_files"), 2, "list files"),
    "fsync, a plain rank": ((disk, "fsync_file"), 1, "gather"),
    "fsync, the other leader": ((disk, "fsync_file"), 2, "gather"),
    "digest, a plain rank": ((save, "digest_blocks"), 1, "gather"),
    "gather, who sends": ((transfer._Source, "_open"), 3, "gather"),
    "gather, who receives": ((os, "pwrite"), 1, "gather"),
    "manifest, home's leader": ((Manifest, "write"), 0, "commit"),
    "commit, home's leader": ((RunDirectory, "commit"), 0, "commit"),
}
RESUME_FAULTS: dict[str, tuple[tuple[Any, str], int, str]] = {
    "survey, home's leader": ((resume, "inspect_checkpoint"), 0, "look for checkpoints"),
    "check, a plain rank": ((resume, "_check_share"), 1, "check the checkpoint"),
    "compare, the other leader": ((resume, "_has_same"), 2, "compare disks"),
    "scatter, who sends": ((transfer._Source, "_open"), 1, "deliver the checkpoint"),
    "scatter, who receives": ((os, "fchmod"), 3, "deliver the checkpoint"),
    "put in place, the other leader": ((resume, "_settle_delivery"), 2, "put the checkpoint in place"),
}


def fail(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.EIO, "Input/output error", "/disk/file")


def start(channel: Channel, root: Path) -> Run:
    os.environ["GROUP_RANK"] = str(channel.rank // 2)
    options = CheckpointOptions(storage="local", visibility_timeout_s=5.0)
    return open_run(root / f"node{channel.rank // 2}", channel=channel, options=options, saved_by={})


def save_step(run: Run, step: int, write: Callable[[], None] = lambda: None) -> None:
    def write_own(staged: Path) -> None:
        write()
        (staged / f"rank{run.channel.rank}.bin").write_bytes(bytes([step]) * 1000)
        if run.channel.rank == 0:
            (staged / "trainer_state.json").write_text('{"global_step": 1}')

    save_checkpoint(run, step=step, write=write_own, rotation=Rotation)


def assert_one_error(outcomes: list[Any], rank: int, phase: str) -> None:
    assert all(isinstance(outcome, Raised) for outcome in outcomes), outcomes
    (text,) = {outcome.message for outcome in outcomes}
    assert text.startswith(f"rank {rank} on "), text
    assert f", {phase}: OSError (EIO): [Errno 5] Input/output error: '/" in text.split(";")[0]
    assert {outcome.kind for outcome in outcomes} == {"CheckpointError"}
    assert [outcome.cause for outcome in outcomes][rank] == "OSError"


@pytest.mark.parametrize("fault", SAVE_FAULTS)
def test_a_step_of_a_save_that_fails_on_one_rank(tmp_path: Path, fault: str) -> None:
    place, rank, phase = SAVE_FAULTS[fault]

    def body(channel: Channel) -> tuple[Any, list[int]]:
        run = start(channel, tmp_path)
        save_step(run, 1)
        with pytest.MonkeyPatch.context() as patch:
            is_here = channel.rank == rank
            if is_here and place is not None:
                patch.setattr(*place, fail)
            outcome = outcome_of(lambda: save_step(run, 2, fail if is_here and place is None else lambda: None))
        left = [step for step, _ in list_checkpoints(run.root)]
        save_step(run, 2)
        return outcome, left

    results = run_ranks(body, count=RANKS)

    assert_one_error([outcome for outcome, _ in results], rank, phase)
    assert [left for _, left in results] == [[1]] * RANKS
    for node in ("node0", "node1"):
        checks.assert_only_checkpoints(tmp_path / node)
    checks.assert_matches_manifest(tmp_path / "node0" / "checkpoint-2")


@pytest.mark.parametrize("fault", RESUME_FAULTS)
def test_a_step_of_a_resume_that_fails_on_one_rank(tmp_path: Path, fault: str) -> None:
    place, rank, phase = RESUME_FAULTS[fault]

    def body(channel: Channel) -> tuple[Any, int | None]:
        run = start(channel, tmp_path)
        save_step(run, 1)
        if channel.rank == 2:
            (run.root / "checkpoint-1" / "rank3.bin").unlink()  # so that files are sent
        channel.together("look", lambda: None)
        with pytest.MonkeyPatch.context() as patch:
            if channel.rank == rank:
                patch.setattr(*place, fail)
            outcome = outcome_of(lambda: resume_latest(run))
        found = resume_latest(run)
        return outcome, None if found is None else found.step

    results = run_ranks(body, count=RANKS)

    assert_one_error([outcome for outcome, _ in results], rank, phase)
    assert [step for _, step in results] == [1] * RANKS
    checks.assert_matches_manifest(tmp_path / "node0" / "checkpoint-1")


def test_what_fails_after_the_commit_is_a_warning(tmp_path: Path) -> None:
    """Rotation: the new checkpoint is there (case S5); the next save tries again."""

    def body(channel: Channel) -> tuple[list[int], list[int]]:
        run = start(channel, tmp_path)
        for step in (1, 2):
            save_step(run, step)
        with pytest.MonkeyPatch.context() as patch:
            if channel.rank == 0:
                patch.setattr(RunDirectory, "remove_checkpoints", fail)
            report = save_checkpoint(run, step=3, write=lambda staged: None, rotation=lambda: Rotation(limit=1))
        assert any("clearing up after it failed" in warning for warning in report.warnings)
        channel.together("look", lambda: None)
        before = [step for step, _ in list_checkpoints(tmp_path / "node0")]
        save_checkpoint(run, step=4, write=lambda staged: None, rotation=lambda: Rotation(limit=1))
        return before, [step for step, _ in list_checkpoints(tmp_path / "node0")]

    assert run_ranks(body, count=RANKS) == [([1, 2, 3], [4])] * RANKS
