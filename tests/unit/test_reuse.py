"""reuse: what home's last checkpoint has is neither sent nor stored again, and only that."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from safe_trainer import reuse
from safe_trainer.channel import Channel
from safe_trainer.integrity import file_problem
from safe_trainer.manifest import Manifest
from safe_trainer.options import CheckpointOptions
from safe_trainer.resume import resume_latest
from safe_trainer.rotation import Rotation
from safe_trainer.run import Run, open_run
from safe_trainer.save import SaveReport, save_checkpoint
from tests.unit.builders import write_files
from tests.unit.processes import run_ranks

SIZE = 2000
Files = dict[str, bytes]


@pytest.fixture(autouse=True)
def small_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "MIN_BYTES", 100)


def opened(root: Path, channel: Channel, verify: str = "digest") -> Run:
    os.environ["GROUP_RANK"] = str(channel.rank)
    made = CheckpointOptions(storage="local", verify=verify, lock_timeout_s=5.0, visibility_timeout_s=5.0)
    return open_run(root / f"disk{channel.rank}" / "run", channel=channel, options=made, saved_by={})


def save(run: Run, step: int, by_rank: list[Files]) -> SaveReport:
    return save_checkpoint(
        run,
        step=step,
        write=lambda staged: write_files(staged, by_rank[run.channel.rank]),
        rotation=lambda: Rotation(limit=1),
    )


def at_home(tmp_path: Path, step: int) -> Path:
    return tmp_path / "disk0" / "run" / f"checkpoint-{step}"


def assert_right(checkpoint: Path, by_rank: list[Files]) -> None:
    manifest = Manifest.read(checkpoint)
    assert manifest is not None
    assert [problem for entry in manifest.files if (problem := file_problem(checkpoint, entry))] == []
    for files in by_rank:
        assert {path: (checkpoint / path).read_bytes() for path in files} == files


HOME, OTHER = {"tokenizer": b"t" * SIZE, "trainer": b"1" * SIZE}, {"frozen": b"f" * SIZE, "moving": b"1" * SIZE}
LATER = [{**HOME, "trainer": b"2" * SIZE}, {**OTHER, "moving": b"2" * SIZE}]


def test_only_what_has_changed_is_sent_and_stored(tmp_path: Path) -> None:
    def body(channel: Channel) -> tuple[list[int], list[int], list[str]]:
        run = opened(tmp_path, channel)
        reports = [save(run, 10, [HOME, OTHER]), save(run, 20, LATER), save(run, 30, [HOME, OTHER])]
        return (
            [report.gathered_bytes for report in reports],
            [report.reused_bytes for report in reports],
            sorted(run.last.changing),
        )

    for gathered, reused, changing in run_ranks(body, count=2):
        assert gathered == [2 * SIZE, SIZE, SIZE]
        assert reused == [0, 2 * SIZE, 2 * SIZE]
        assert changing == ["moving", "trainer"]
    assert_right(at_home(tmp_path, 30), [HOME, OTHER])  # though 10 and 20 have been deleted
    assert not at_home(tmp_path, 20).exists()


def test_both_have_the_file_and_deleting_either_harms_nothing(tmp_path: Path) -> None:
    def body(channel: Channel) -> None:
        run = opened(tmp_path, channel)
        for step in (10, 20):
            save_checkpoint(
                run,
                step=step,
                write=lambda staged: write_files(staged, (HOME, OTHER)[channel.rank]),
                rotation=Rotation,
            )

    run_ranks(body, count=2)
    for path in ("tokenizer", "frozen"):
        infos = [os.stat(at_home(tmp_path, step) / path) for step in (10, 20)]
        assert infos[0].st_ino == infos[1].st_ino or infos[1].st_nlink == 1  # linked, or shares its blocks
    shutil.rmtree(at_home(tmp_path, 20))
    assert_right(at_home(tmp_path, 10), [HOME, OTHER])


def _delete(path: Path) -> None:
    path.unlink()


def _damage(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(b"X" + content[1:])


def _replace(path: Path) -> None:
    beside = path.with_name("beside")
    beside.write_bytes(path.read_bytes())
    os.replace(beside, path)


@pytest.mark.parametrize("harm", [_delete, _damage, _replace])
def test_a_file_that_is_not_as_it_was_committed_is_not_taken_over(tmp_path: Path, harm: object) -> None:
    def body(channel: Channel) -> int:
        run = opened(tmp_path, channel)
        save(run, 10, [HOME, OTHER])
        if channel.rank == 0:
            harm(at_home(tmp_path, 10) / "frozen")  # type: ignore[operator]
        channel.together("harmed", lambda: None)
        return save(run, 20, LATER).gathered_bytes

    assert run_ranks(body, count=2) == [2 * SIZE] * 2
    assert_right(at_home(tmp_path, 20), LATER)


def test_a_resumed_run_knows_what_it_has_checked(tmp_path: Path) -> None:
    def first(channel: Channel) -> None:
        save(opened(tmp_path, channel), 10, [HOME, OTHER])

    def second(channel: Channel) -> int:
        run = opened(tmp_path, channel)
        assert resume_latest(run) is not None
        return save(run, 20, LATER).reused_bytes

    run_ranks(first, count=2)
    assert run_ranks(second, count=2) == [2 * SIZE] * 2
    assert_right(at_home(tmp_path, 20), LATER)


def test_without_a_check_nothing_is_known(tmp_path: Path) -> None:
    def first(channel: Channel) -> None:
        save(opened(tmp_path, channel), 10, [HOME, OTHER])

    def second(channel: Channel) -> int:
        run = opened(tmp_path, channel, verify="size")
        resume_latest(run)
        return save(run, 20, LATER).reused_bytes

    run_ranks(first, count=2)
    assert run_ranks(second, count=2) == [0, 0]


def test_without_links_a_copy_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "share_or_link", lambda source, target: False)

    def body(channel: Channel) -> int:
        run = opened(tmp_path, channel)
        save(run, 10, [HOME, OTHER])
        return save(run, 20, LATER).gathered_bytes

    assert run_ranks(body, count=2) == [SIZE] * 2
    assert_right(at_home(tmp_path, 20), LATER)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    before = os.environ.get("GROUP_RANK")
    yield
    if before is not None:
        os.environ["GROUP_RANK"] = before
