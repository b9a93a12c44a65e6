"""Disks that are full, too small or read-only on one node: found before the first byte where it can be, and otherwise
everyone's error with path and free bytes; what was committed before stays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from safe_trainer import resume
from safe_trainer.channel import Channel
from safe_trainer.errors import CheckpointError, InsufficientSpaceError
from safe_trainer.layout import list_checkpoints
from safe_trainer.options import CheckpointOptions
from safe_trainer.rotation import Rotation
from safe_trainer.run import Run, open_run
from safe_trainer.save import ExpectedBytes, SaveReport, save_checkpoint
from tests import checks
from tests.unit.mounts import leave_mount_namespace, make_read_only, mount_small_disk, needs_mounts
from tests.unit.processes import Raised, outcome_of, run_ranks

pytestmark = needs_mounts()

DISK_BYTES = 4 << 20
OWN_BYTES = 1 << 20


def on_a_small_disk(channel: Channel, root: Path, rank: int, size: int = DISK_BYTES) -> None:
    """Give ``rank`` a small disk where its run directory will be."""
    if channel.rank == rank:
        leave_mount_namespace()
        mount_small_disk(root / f"node{rank}", size_bytes=size)


def start(channel: Channel, root: Path, **options: Any) -> Run:
    os.environ["GROUP_RANK"] = str(channel.rank)
    checkpoint_options = CheckpointOptions(storage="local", **options)
    return open_run(root / f"node{channel.rank}", channel=channel, options=checkpoint_options, saved_by={})


def save(
    run: Run,
    step: int,
    size: int = OWN_BYTES,
    *,
    write: Callable[[Path, int], None] | None = None,
    expected: ExpectedBytes | None = None,
    limit: int | None = None,
) -> SaveReport:
    def write_own(directory: Path) -> None:
        if write is None:
            (directory / f"rank{run.channel.rank}.bin").write_bytes(os.urandom(size))
        else:
            write(directory / f"rank{run.channel.rank}", size)

    return save_checkpoint(
        run,
        step=step,
        write=write_own,
        rotation=lambda: Rotation(limit=limit),
        expected=lambda: expected or ExpectedBytes(),
    )


def torch_save(path: Path, size: int) -> None:
    torch.save(torch.zeros(size, dtype=torch.uint8), path.with_suffix(".pt"))


def safetensors_save(path: Path, size: int) -> None:
    save_file({"x": torch.zeros(size, dtype=torch.uint8)}, path.with_suffix(".safetensors"))


def plain_write(path: Path, size: int) -> None:
    path.with_suffix(".bin").write_bytes(bytes(size))


@pytest.mark.parametrize("write", [torch_save, safetensors_save, plain_write])
def test_a_disk_that_fills_up_names_path_and_free_bytes_on_every_rank(
    tmp_path: Path, write: Callable[[Path, int], None]
) -> None:
    """F3; torch.save gives neither an error number nor a path."""

    def body(channel: Channel) -> tuple[Any, list[int], bool]:
        on_a_small_disk(channel, tmp_path, 1)
        run = start(channel, tmp_path)
        save(run, 1)
        outcome = outcome_of(lambda: save(run, 2, 8 << 20, write=write))
        found = resume.resume_latest(run)
        again = outcome_of(lambda: save(run, 3))
        return (
            outcome,
            [step for step, _ in list_checkpoints(run.root)],
            (found is not None and found.step == 1 and isinstance(again, SaveReport)),
        )

    results = run_ranks(body, count=2)
    failures = [outcome for outcome, _, _ in results]
    assert all(isinstance(failure, Raised) for failure in failures)
    (text,) = {failure.message for failure in failures}
    assert text.startswith("rank 1 on ")
    assert ", write: " in text
    assert str(tmp_path / "node1") in text
    assert "bytes free there" in text
    assert [steps for _, steps, _ in results] == [[1, 3], [1, 3]]
    assert all(goes_on for _, _, goes_on in results)


def test_home_full_while_it_gathers_is_everyones_error(tmp_path: Path) -> None:
    def body(channel: Channel) -> Any:
        on_a_small_disk(channel, tmp_path, 0)
        return outcome_of(lambda: save(start(channel, tmp_path), 1, 3 << 20))

    first, second = run_ranks(body, count=2)
    assert first.message == second.message
    assert "rank 0 on" in first.message
    assert "gather: OSError (ENOSPC)" in first.message
    assert "bytes free there" in first.message


@pytest.mark.parametrize(
    ("small", "expected", "needed"),
    [
        (0, ExpectedBytes(own=3 << 20), 6 << 20),
        (1, ExpectedBytes(own=5 << 20), 5 << 20),
        (0, ExpectedBytes(own=1, total=7 << 20), 7 << 20),
    ],
    ids=["home: all parts", "another disk: its own part", "home: as the last save"],
)
def test_too_little_room_is_an_error_before_the_first_byte(
    tmp_path: Path, small: int, expected: ExpectedBytes, needed: int
) -> None:
    def body(channel: Channel) -> tuple[Any, bool, list[int]]:
        on_a_small_disk(channel, tmp_path, small)
        run = start(channel, tmp_path)
        save(run, 1, limit=1)
        written = False

        def write(path: Path, size: int) -> None:
            nonlocal written
            written = True

        outcome = outcome_of(lambda: save(run, 2, write=write, expected=expected, limit=1))
        return outcome, written, [step for step, _ in list_checkpoints(run.root)]

    for outcome, written, steps in run_ranks(body, count=2):
        assert outcome.kind == InsufficientSpaceError.__name__
        assert f"needs {needed} bytes on the disk of rank {small}" in outcome.message
        assert "are free" in outcome.message
        assert (written, steps) == (False, [1])  # rotation has made no room


def test_trash_is_emptied_before_room_is_found_lacking(tmp_path: Path) -> None:
    def body(channel: Channel) -> bool:
        on_a_small_disk(channel, tmp_path, 0)
        run = start(channel, tmp_path)
        if channel.rank == 0:
            left = run.directory.layout.trash / "left"
            left.mkdir(parents=True)
            (left / "big").write_bytes(bytes(3 << 20))
        save(run, 1, expected=ExpectedBytes(own=OWN_BYTES))
        return not run.directory.layout.trash.exists()

    assert run_ranks(body, count=2) == [True, True]


def test_a_copy_for_resuming_that_does_not_fit_is_refused_before_it_is_made(tmp_path: Path) -> None:
    def body(channel: Channel) -> tuple[Any, list[str]]:
        on_a_small_disk(channel, tmp_path, 1, size=2 << 20)
        run = start(channel, tmp_path)
        save(run, 1, (3 << 20) if channel.rank == 0 else 1000)
        outcome = outcome_of(lambda: resume.resume_latest(run))
        return outcome, sorted(os.listdir(run.root / "_safe_trainer"))

    for outcome, left in run_ranks(body, count=2):
        assert outcome.kind == InsufficientSpaceError.__name__
        assert "on the disk of rank 1" in outcome.message
        assert left == ["generation.json", "lock"]


def test_a_run_directory_that_cannot_be_written_is_found_at_the_start(tmp_path: Path) -> None:
    """F4: on one node only; said on every rank before anything is trained."""

    def body(channel: Channel) -> Any:
        directory = tmp_path / f"node{channel.rank}"
        directory.mkdir()
        if channel.rank == 1:
            leave_mount_namespace()
            make_read_only(directory)
        return outcome_of(lambda: start(channel, tmp_path))

    first, second = run_ranks(body, count=2)
    assert first.message == second.message
    assert first.kind == CheckpointError.__name__
    assert "rank 1 on " in first.message
    assert "EROFS" in first.message
    assert str(tmp_path / "node1") in first.message


def test_what_a_failed_save_leaves_is_gone_and_the_next_one_is_whole(tmp_path: Path) -> None:
    def body(channel: Channel) -> None:
        on_a_small_disk(channel, tmp_path, 1)
        run = start(channel, tmp_path)
        outcome_of(lambda: save(run, 1, 8 << 20, write=torch_save))
        save(run, 1)
        checks.assert_only_checkpoints(run.root)

    run_ranks(body, count=2)
    checks.assert_matches_manifest(tmp_path / "node0" / "checkpoint-1")
