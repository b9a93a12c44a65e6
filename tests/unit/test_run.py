"""run: what a job finds and claims when it starts in a run directory."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from safe_trainer.channel import Channel
from safe_trainer.commit import Generation
from safe_trainer.errors import RunDirectoryTaken
from safe_trainer.layout import AREA_NAME
from safe_trainer.options import CheckpointOptions
from safe_trainer.run import Run, open_run
from tests.unit.builders import start_run, write_files
from tests.unit.processes import Raised, outcome_of, run_ranks

OPTIONS = CheckpointOptions(lock_timeout_s=5.0, visibility_timeout_s=5.0, timeout_s=20.0)


def open_alone(root: Path) -> Run:
    return open_run(root, channel=Channel.open(timeout_s=5.0), options=OPTIONS, saved_by={"torch": "2"})


def test_each_run_takes_the_next_generation(tmp_path: Path) -> None:
    runs = [open_alone(tmp_path) for _ in range(3)]
    assert [run.generation.number for run in runs] == [1, 2, 3]
    assert len({run.generation.run_id for run in runs}) == 3


def test_an_older_run_is_fenced_off(tmp_path: Path) -> None:
    older = open_alone(tmp_path)
    open_alone(tmp_path)
    with pytest.raises(RunDirectoryTaken):
        older.directory.check_generation()


def test_names_of_staging_directories_never_come_again(tmp_path: Path) -> None:
    first, second = open_alone(tmp_path), open_alone(tmp_path)
    names = [run.next_name("10") for run in (first, first, second, second)]
    assert len(set(names)) == 4
    assert all(name.endswith("-10") for name in names)


def test_all_ranks_agree_on_the_run_and_its_names_and_one_of_them_takes_it(tmp_path: Path) -> None:
    def body(channel: Channel) -> tuple[int, str, str, bool]:
        run = open_run(tmp_path, channel=channel, options=OPTIONS, saved_by={})
        return run.generation.number, run.generation.run_id, run.next_name("10"), run.is_home_leader

    answers = run_ranks(body)
    assert len({answer[:3] for answer in answers}) == 1
    assert [answer[3] for answer in answers] == [True, False, False]
    assert start_run(tmp_path, 2).newest_generation() == 2


def test_a_damaged_generation_is_the_same_error_on_all(tmp_path: Path) -> None:
    write_files(tmp_path, {f"{AREA_NAME}/generation.json": b"{"})

    def body(channel: Channel) -> Run | Raised:
        return outcome_of(lambda: open_run(tmp_path, channel=channel, options=OPTIONS, saved_by={}))

    answers = run_ranks(body)
    (message,) = {answer.message for answer in answers if isinstance(answer, Raised)}
    assert "generation.json is damaged" in message


def test_of_two_jobs_that_start_in_turn_the_second_takes_over_at_once(tmp_path: Path) -> None:
    start_run(tmp_path, 1)
    assert open_alone(tmp_path).generation.number == 2


def test_of_many_that_start_at_once_all_start_and_the_latest_owns_it(tmp_path: Path) -> None:
    runs: list[Run] = []
    threads = [threading.Thread(target=lambda: runs.append(open_alone(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owners = [run for run in runs if not isinstance(outcome_of(run.directory.check_generation), Raised)]
    assert sorted(run.generation.number for run in runs) == [1, 2, 3, 4]
    assert [run.generation.number for run in owners] == [4]


def test_a_generation_tells_when_where_and_who() -> None:
    assert str(Generation(3, "id", "node0", 17, "2026-01-01T00:00:00Z")) == (
        "run 3 (started 2026-01-01T00:00:00Z by process 17 on node0)"
    )
