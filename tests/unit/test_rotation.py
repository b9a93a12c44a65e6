"""rotation: which checkpoints go (cases R1, R2, R4, R5)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from safe_trainer.layout import list_checkpoints
from safe_trainer.rotation import Rotation, same_directory, stale_steps, steps_to_remove
from tests.unit.builders import make_checkpoint

FILES = {"model.safetensors": b"weights"}


def make(run_directory: Path, *steps: int) -> None:
    for step in steps:
        make_checkpoint(run_directory, step, FILES)


@pytest.mark.parametrize(
    ("limit", "removed"),
    [(None, []), (0, []), (-1, []), (1, [9, 10, 11]), (2, [9, 10]), (3, [9]), (4, []), (10, [])],
)
def test_the_limit_keeps_the_highest_steps(tmp_path: Path, limit: int | None, removed: list[int]) -> None:
    make(tmp_path, 9, 10, 11, 100)
    assert steps_to_remove(tmp_path, Rotation(limit=limit), newest=100) == removed


def test_times_of_directories_and_files_do_not_matter(tmp_path: Path) -> None:
    make(tmp_path, 9, 10, 11)
    for step, age in ((9, 0), (10, 500), (11, 9000)):
        for path in (tmp_path / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}" / "model.safetensors"):
            os.utime(path, (1e9 - age, 1e9 - age))
    assert steps_to_remove(tmp_path, Rotation(limit=1), newest=11) == [9, 10]


def test_the_one_just_committed_stays_even_if_its_step_is_the_lowest(tmp_path: Path) -> None:
    make(tmp_path, 5, 10, 20)
    assert steps_to_remove(tmp_path, Rotation(limit=1), newest=5) == [10, 20]


def test_two_stay_where_the_limit_is_one_and_best_is_another(tmp_path: Path) -> None:
    make(tmp_path, 10, 20, 30)
    best = str(tmp_path / "checkpoint-10")
    assert steps_to_remove(tmp_path, Rotation(limit=1, best=best), newest=30) == [20]


def test_best_counts_within_the_limit(tmp_path: Path) -> None:
    make(tmp_path, 10, 20, 30, 40)
    best = str(tmp_path / "checkpoint-10")
    assert steps_to_remove(tmp_path, Rotation(limit=2, best=best), newest=40) == [20, 30]


def _absolute(run_directory: Path) -> str:
    return str((run_directory / "checkpoint-10").resolve())


def _relative(run_directory: Path) -> str:
    return os.path.relpath(run_directory / "checkpoint-10")


def _with_a_slash(run_directory: Path) -> str:
    return f"{run_directory}/checkpoint-10/"


def _with_dots(run_directory: Path) -> str:
    return f"{run_directory}/../{run_directory.name}/./checkpoint-10"


def _through_a_link(run_directory: Path) -> str:
    (run_directory.parent / "link").symlink_to(run_directory)
    return str(run_directory.parent / "link" / "checkpoint-10")


@pytest.mark.parametrize("spelling", [_absolute, _relative, _with_a_slash, _with_dots, _through_a_link])
def test_best_stays_however_its_path_is_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: Callable[[Path], str]
) -> None:
    run_directory = tmp_path / "out"
    make(run_directory, 10, 20, 30)
    monkeypatch.chdir(tmp_path)
    assert steps_to_remove(run_directory, Rotation(limit=1, best=spelling(run_directory)), newest=30) == [20]


def test_best_stays_where_the_run_directory_is_a_link(tmp_path: Path) -> None:
    make(tmp_path / "out", 10, 20, 30)
    (tmp_path / "link").symlink_to("out")
    best = str(tmp_path / "out" / "checkpoint-10")
    assert steps_to_remove(tmp_path / "link", Rotation(limit=1, best=best), newest=30) == [20]


def test_a_best_that_is_not_here_protects_nothing(tmp_path: Path) -> None:
    make(tmp_path, 10, 20)
    assert steps_to_remove(tmp_path, Rotation(limit=1, best="/elsewhere/checkpoint-10"), newest=20) == [10]


def test_incomplete_ones_neither_count_nor_go(tmp_path: Path) -> None:
    make(tmp_path, 10, 20, 30)
    (tmp_path / "checkpoint-20" / "model.safetensors").unlink()
    (tmp_path / "checkpoint-40").mkdir()
    assert steps_to_remove(tmp_path, Rotation(limit=1), newest=30) == [10]
    assert steps_to_remove(tmp_path, Rotation(limit=2), newest=30) == []


def test_the_only_complete_one_stays_when_a_newer_one_is_incomplete(tmp_path: Path) -> None:
    make(tmp_path, 10)
    (tmp_path / "checkpoint-20").mkdir()
    assert steps_to_remove(tmp_path, Rotation(limit=1), newest=10) == []


def test_other_names_are_left_alone(tmp_path: Path) -> None:
    make(tmp_path, 10, 20)
    for name in ("checkpoint-5.tmp", "checkpoint-best", "tmp-checkpoint-1", "runs"):
        (tmp_path / name).mkdir()
    assert steps_to_remove(tmp_path, Rotation(limit=1), newest=20) == [10]


# --- several lines of training in one run directory ---


def test_a_line_that_was_left_goes_first(tmp_path: Path) -> None:
    make(tmp_path, 10, 20, 30, 40, 25)
    rotation = Rotation(limit=3, resumed_step=20, steps_at_start=frozenset({10, 20, 30, 40}))
    assert steps_to_remove(tmp_path, rotation, newest=25) == [30, 40]


def test_after_the_line_that_was_left_the_oldest_go(tmp_path: Path) -> None:
    make(tmp_path, 10, 20, 30, 25)
    rotation = Rotation(limit=1, resumed_step=20, steps_at_start=frozenset({10, 20, 30}))
    assert steps_to_remove(tmp_path, rotation, newest=25) == [30, 10, 20]


def test_a_fresh_start_leaves_all_that_was_there(tmp_path: Path) -> None:
    make(tmp_path, 500, 1000, 10, 20)
    rotation = Rotation(limit=2, resumed_step=0, steps_at_start=frozenset({500, 1000}))
    assert steps_to_remove(tmp_path, rotation, newest=20) == [500, 1000]


def test_best_stays_in_a_line_that_was_left(tmp_path: Path) -> None:
    make(tmp_path, 10, 20, 30, 25)
    best = str(tmp_path / "checkpoint-30")
    rotation = Rotation(limit=2, best=best, resumed_step=20, steps_at_start=frozenset({10, 20, 30}))
    assert steps_to_remove(tmp_path, rotation, newest=25) == [10, 20]


# --- other disks, and comparing directories ---


def test_on_another_disk_goes_what_home_has_no_longer(tmp_path: Path) -> None:
    make(tmp_path, 10, 20, 30)
    (tmp_path / "checkpoint-40").mkdir()
    assert stale_steps(tmp_path, [30]) == [10, 20, 40]
    assert stale_steps(tmp_path, [10, 20, 30, 40]) == []


@pytest.mark.parametrize(
    ("other", "same"), [("a", True), ("a/", True), ("./b/../a", True), ("link", True), ("b", False)]
)
def test_directories_are_compared_by_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str, same: bool
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to("a")
    monkeypatch.chdir(tmp_path)
    assert same_directory(tmp_path / "a", other) is same


def test_no_best_is_no_directory(tmp_path: Path) -> None:
    assert not same_directory(tmp_path, None)


def test_deciding_removes_nothing(tmp_path: Path) -> None:
    make(tmp_path, 10, 20)
    steps_to_remove(tmp_path, Rotation(limit=1), newest=20)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [10, 20]
