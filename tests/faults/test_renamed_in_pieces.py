"""A file system that renames a directory file by file (S9), as object stores do: a real (FUSE) one, really killed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from safe_trainer.channel import Channel
from safe_trainer.layout import AREA_NAME, MANIFEST_NAME
from safe_trainer.options import CheckpointOptions
from safe_trainer.resume import resume_latest
from safe_trainer.rotation import Rotation
from safe_trainer.run import Run, open_run
from safe_trainer.save import save_checkpoint
from tests import chaosfs, checks
from tests.chaosfs import ChaosFS, Rule
from tests.unit.builders import contents, write_files
from tests.unit.processes import killed

pytestmark = pytest.mark.skipif(chaosfs.why_not() is not None, reason=str(chaosfs.why_not()))

OLD = {"model": b"old weights", "shards/0": b"0", "trainer_state.json": b"{}"}
NEW = {"model": b"new weights", "shards/0": b"1", "trainer_state.json": b'{"a": 1}'}
IN_PIECES = Rule("rename", times=0, pieces_s=0.0)
# The file system has no locks either, as an object store's mount; files can be renamed.
NO_RENAME_OF_FILES = Rule("rename", "*/staging/*/checkpoint-10/*", times=0, error="ENOSYS")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[ChaosFS]:
    (tmp_path / "backing").mkdir()
    with ChaosFS(tmp_path / "backing", tmp_path / "mount", locks="ENOSYS", exchange=False) as disk:
        disk.set_rules([IN_PIECES])
        yield disk


def open_on(disk: ChaosFS) -> Run:
    options = CheckpointOptions(lock_timeout_s=10.0, visibility_timeout_s=10.0, timeout_s=60.0)
    channel = Channel(None, rank=0, world_size=1)
    return open_run(disk.mount / "out", channel=channel, options=options, saved_by={})


def save(run: Run, step: int, files: dict[str, bytes], *, limit: int | None = None) -> None:
    write: Callable[[Path], None] = lambda staged: write_files(staged, files)  # noqa: E731
    save_checkpoint(run, step=step, write=write, rotation=lambda: Rotation(limit=limit))


def test_it_is_found_at_the_start_and_said_once_and_saves_and_rotates(
    disk: ChaosFS, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = open_on(disk)
    for step, files in ((10, OLD), (10, NEW), (20, NEW)):
        save(run, step, files, limit=1)
    out = tmp_path / "backing" / "out"
    assert sorted(os.listdir(out)) == [AREA_NAME, "checkpoint-20"]
    checks.assert_matches_manifest(out / "checkpoint-20")
    assert os.listdir(out / AREA_NAME) == ["generation.json"]
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2
    assert "does not rename directories in one step" in said[0]
    assert "no working file locks" in said[1]


@pytest.mark.parametrize(
    ("rules", "found"),
    [
        ([Rule("rename", "*/committing/checkpoint-10.json.*", kill="before")], OLD),
        ([Rule("unlink", "/out/checkpoint-10/*", nth=2, kill="after")], NEW),
        ([Rule("rename", f"*/staging/*/{MANIFEST_NAME}", kill="before")], NEW),
        ([Rule("write", f"/out/checkpoint-10/{MANIFEST_NAME}", kill="before"), NO_RENAME_OF_FILES], NEW),
    ],
    ids=[
        "while recording",
        "while the old one goes",
        "before the new manifest",
        "while the manifest is copied",
    ],
)
def test_killed_half_way_the_next_start_has_the_old_or_the_new_one_whole_before_anybody_looks(
    disk: ChaosFS, tmp_path: Path, rules: list[Rule], found: dict[str, bytes]
) -> None:
    save(open_on(disk), 10, OLD)

    def die_while_saving() -> None:
        run = open_on(disk)
        disk.set_rules([*rules, IN_PIECES])
        save(run, 10, NEW)

    assert killed(die_while_saving)
    disk.set_rules([rule for rule in rules if rule.kill is None] + [IN_PIECES])
    resumed = resume_latest(open_on(disk))
    assert resumed is not None
    assert resumed.step == 10
    checkpoint = tmp_path / "backing" / "out" / "checkpoint-10"
    assert contents(checkpoint) == found
    checks.assert_matches_manifest(checkpoint)
    assert os.listdir(tmp_path / "backing" / "out" / AREA_NAME) == ["generation.json"]
