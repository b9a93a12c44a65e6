"""Cases S5 to S9 between two hosts, on a shared file system with faults put in (`tests.chaosfs`).

The hosts have networks and mounts of their own (`tests.filesystems.hosts`), so what one has cached the other does not
know, and one can die while the other goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import chaosfs, checks
from tests.chaosfs import Locks, Rule
from tests.cluster import Json
from tests.filesystems import hosts as machines
from tests.filesystems import scenarios
from tests.filesystems.chaos import ChaosOnHosts, Habits
from tests.filesystems.hosts import Hosts
from tests.filesystems.job import Calls, Job

WHY_NOT = machines.why_not() or chaosfs.why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

RANKS_PER_HOST = 1
LAG = Habits(exchange=False, name_cache_s=5.0, missing_name_cache_s=5.0, attribute_cache_s=5.0)
FOR_EVER = 0
# A claim of another host's dead process is taken over after 20 s; starting takes some, too.
TAKEN_OVER_WITHIN_S = 45.0

file_systems = pytest.mark.file_systems  # the slow ones


@dataclass(frozen=True)
class Rig:
    """Two hosts, a and b, on one disk. Rank 0 is on a, rank 1 on b.

    Attributes:
        run: the name of the run directory.
    """

    hosts: Hosts
    disk: ChaosOnHosts
    job: Job
    run: str = "run"

    @property
    def root(self) -> str:
        return str(self.disk.path / self.run)

    @property
    def really(self) -> Path:
        """The run directory as it is on the disk."""
        return self.disk.backing / self.run

    def saves(self, *steps: int) -> list[Json]:
        return self.job.run(scenarios.save_steps, root=self.root, steps=list(steps))

    def set_rules(self, *rules: Rule, hosts: str = "ab") -> None:
        for host in hosts:
            self.disk.set_rules(host, rules)

    def restarted(self) -> tuple[int | None, int | None]:
        """A fresh start on both hosts: from which step both resume, and which save of it that was."""
        results = self.job.run(scenarios.resume, root=self.root)
        found = {(result["step"], result["number"]) for result in results}
        assert len(found) == 1, f"ranks resume from {found}"
        return found.pop()


@contextlib.contextmanager
def rig(habits: Habits | None = None, **others: Habits) -> Iterator[Rig]:
    with (
        Hosts("a", "b") as hosts,
        ChaosOnHosts(hosts, habits, **others) as disk,
        Job(list(hosts), hosts.directory, ranks_per_host=RANKS_PER_HOST) as job,
    ):
        yield Rig(hosts, disk, job)


@pytest.fixture(scope="module")
def shared_rig() -> Iterator[Rig]:
    with rig() as two:
        yield two


@pytest.fixture
def two(shared_rig: Rig, request: pytest.FixtureRequest) -> Rig:
    """Hosts that all tests share which ask for no others, without rules, and with a run directory of this test's."""
    shared_rig.set_rules()
    return dataclasses.replace(shared_rig, run=f"run{abs(hash(request.node.nodeid))}")


def assert_committed(results: list[Json], *steps: int) -> None:
    assert [(result["committed"], result["error"]) for result in results] == [(list(steps), None)] * len(results)


def assert_whole(two: Rig, *steps: int) -> None:
    """Exactly these are there, and whole on the disk itself."""
    assert checks.checkpoints(two.really) == list(steps)
    for step in steps:
        checks.assert_matches_manifest(two.really / f"checkpoint-{step}")


def assert_everywhere(results: list[Json], *texts: str) -> None:
    """Every rank has failed to save anything, with one error that says all of this."""
    assert [result["committed"] for result in results] == [[]] * len(results)
    assert len({result["error"] for result in results}) == 1
    for text in texts:
        assert text in str(results[0]["error"])


# --- S5: what is to be deleted cannot be ---


def test_what_cannot_be_deleted_has_lost_its_name_and_goes_later(two: Rig) -> None:
    two.set_rules(Rule("unlink", "*/trash/*", error="EBUSY", times=FOR_EVER))
    assert_committed(two.saves(10, 20, 30), 10, 20, 30)
    assert_whole(two, 20, 30)

    two.set_rules()
    assert_committed(two.saves(40), 40)
    assert_whole(two, 30, 40)
    checks.assert_only_checkpoints(two.really)


def test_what_cannot_be_renamed_away_stays_whole_and_is_tried_again(two: Rig) -> None:
    two.set_rules(Rule("rename", f"/{two.run}/checkpoint-10", error="EBUSY", times=FOR_EVER))
    results = two.saves(10, 20, 30)
    assert_committed(results, 10, 20, 30)
    assert_whole(two, 10, 20, 30)
    assert any("checkpoint-10" in warning for warning in results[0]["warnings"])

    two.set_rules()
    assert_committed(two.saves(40), 40)
    assert_whole(two, 30, 40)


# --- S6: caches lag ---


@file_systems
@pytest.mark.parametrize("habits", [LAG, Habits(hide_new_names_s=5.0)], ids=["cached", "hidden"])
@pytest.mark.parametrize("lagging", ["a", "b"], ids=["home's host lags", "the other host lags"])
def test_caches_that_lag_for_five_seconds_cost_time_only(habits: Habits, lagging: str) -> None:
    with rig(**{lagging: habits}) as two:
        for number in (1, 2):  # the second start has seen what the first one has left
            results = two.job.run(scenarios.save_twice, root=two.root, step=10, number=number)
            assert [result["domains"] for result in results] == [[[0, 1]]] * 2
            assert_whole(two, 10)
            assert two.restarted() == (10, number + 1)


# --- S7: locks are missing ---


@file_systems
@pytest.mark.parametrize("locks", ["ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def test_without_locks_saves_go_on_and_an_older_job_is_fenced_off(locks: Locks) -> None:
    with rig(Habits(locks=locks)) as two:
        older = two.job.start(scenarios.save_for_ever, root=two.root)
        _wait_until_saved(older, 2)
        newer = two.saves(1000, 1010)
        assert_committed(newer, 1000, 1010)
        assert len([text for text in newer[0]["warnings"] if "no working file locks" in text]) == 1
        older.settle(timeout_s=60.0)
        for answer in older.answers:
            assert "RunDirectoryTaken" in str(answer.problem), two.job.log_tails()
        assert two.restarted() == (1010, 1010)


# --- S8: a dead job has left its lock ---


@file_systems
@pytest.mark.parametrize("locks", ["pass", "ENOLCK"])
def test_a_lock_left_by_a_process_that_died_in_its_commit_is_taken_over(locks: Locks) -> None:
    with rig(Habits(locks=locks)) as two:
        assert_committed(two.saves(10), 10)
        two.set_rules(Rule("rename", "*/staging/*/checkpoint-20", kill="before"))
        calls = two.job.start(scenarios.save_steps, root=two.root, steps=[20])
        calls.settle(timeout_s=90.0)
        assert "died" in str(calls.answers[0].problem)
        two.set_rules()

        begin = time.monotonic()
        assert two.restarted() == (10, 10)
        assert time.monotonic() - begin < TAKEN_OVER_WITHIN_S
        assert_committed(two.saves(20), 20)


# --- S9: a directory is not renamed in one step, or not at all ---


@pytest.mark.parametrize("error", ["EXDEV", "ENOSYS", "EOPNOTSUPP"])
def test_where_directories_cannot_be_renamed_it_says_so_once_and_saves(two: Rig, error: str) -> None:
    two.set_rules(*_no_directory_renames(error=error))
    results = two.saves(10, 20, 30)
    assert_committed(results, 10, 20, 30)
    assert_whole(two, 20, 30)
    assert len([text for text in results[0]["warnings"] if "rename" in text]) == 1, results[0]["warnings"]
    assert two.restarted() == (30, 30)


@file_systems
@pytest.mark.parametrize("pieces_s", [0.15, 0.6])
def test_a_host_that_dies_while_a_directory_is_renamed_in_pieces(pieces_s: float) -> None:
    """Home's host is gone for good, its file system client with it; the other one has what the store has."""
    with rig() as two:
        assert_committed(two.saves(10), 10)
        two.set_rules(*_no_directory_renames(pieces_s=pieces_s))
        calls = two.job.start(scenarios.save_steps, root=two.root, steps=[20])
        assert calls.wait((two.really / "checkpoint-20").exists, timeout_s=60.0)
        time.sleep(1.5 * pieces_s)
        two.hosts["a"].kill()
        calls.kill_host(1)

        with Job([two.hosts["b"]], two.hosts.directory, ranks_per_host=1) as alone:
            (resumed,) = alone.run(scenarios.resume, root=two.root, saved_by=2)
        assert (resumed["step"], resumed["number"]) in [(10, 10), (20, 20)]


def _no_directory_renames(*, error: str | None = None, pieces_s: float | None = None) -> list[Rule]:
    """What fails or comes in pieces are renames of directories; of the file system's trials at the start, too."""
    patterns = ("*/checkpoint-[0-9]0", "*/tokens/*/renamed", "*/staging/*-[0-9]0")
    return [Rule("rename", pattern, error=error, pieces_s=pieces_s, times=FOR_EVER) for pattern in patterns]


# --- errors of the medium ---


@pytest.mark.parametrize("writer", ["rank0.bin", "rank1.bin"])
@pytest.mark.parametrize(("operation", "phase"), [("fsync", "gather"), ("read", "gather")])
def test_an_io_error_fails_the_save_on_all_ranks_and_names_the_path(
    two: Rig, operation: str, phase: str, writer: str
) -> None:
    assert_committed(two.saves(10), 10)
    two.set_rules(Rule(operation, f"*/{writer}", error="EIO", times=FOR_EVER))
    results = two.saves(20)
    two.set_rules()
    assert two.restarted() == (10, 10)
    assert_whole(two, 10)
    assert_everywhere(results, "EIO", phase, writer)


def test_an_io_error_in_somebody_elses_writer_fails_the_save_on_all_ranks(two: Rig) -> None:
    """Python's own write() does not say to which file it was."""
    assert_committed(two.saves(10), 10)
    two.set_rules(Rule("write", "*/rank1.bin", error="EIO", times=FOR_EVER))
    assert_everywhere(two.saves(20), "rank 1 on b, write", "EIO")
    two.set_rules()
    assert two.restarted() == (10, 10)
    assert_whole(two, 10)


def test_a_checkpoint_that_cannot_be_read_is_not_resumed_from(two: Rig) -> None:
    assert_committed(two.saves(10, 20), 10, 20)
    two.set_rules(Rule("read", f"/{two.run}/checkpoint-20/rank1.bin", error="EIO", times=FOR_EVER))
    assert two.restarted() == (10, 10)


LOOKING = ("getattr", "open", "opendir")
MAKING = ("create", "mkdir", "rename")


@pytest.mark.parametrize("operation", [*LOOKING, *MAKING])
def test_a_stale_handle_that_comes_once_and_goes_is_not_noticed(two: Rig, operation: str) -> None:
    assert_committed(two.saves(10), 10)
    for nth, host in ((1, "a"), (3, "b"), (8, "ab")):
        two.set_rules(Rule(operation, f"/{two.run}/{checks.AREA}/*", error="ESTALE", nth=nth), hosts=host)
        assert_committed(two.saves(20), 20)
    assert two.restarted() == (20, 20)


@file_systems
@pytest.mark.parametrize("operation", [*LOOKING, *MAKING])
def test_a_stale_handle_that_comes_twice_is_overcome_or_told_to_all(two: Rig, operation: str) -> None:
    """The kernel itself looks again after the first; so programs see the second one, once."""
    assert_committed(two.saves(10), 10)
    for nth, host in ((1, "a"), (4, "b"), (9, "ab")):
        stale = Rule(operation, f"/{two.run}/{checks.AREA}/*", error="ESTALE", nth=nth, times=2)
        two.set_rules(stale, hosts=host)
        results = two.saves(20)
        if results[0]["error"] is not None:
            assert_everywhere(results, "ESTALE", checks.AREA)
        two.set_rules()
        assert two.restarted()[0] in (10, 20)
        assert_committed(two.saves(20), 20)


def test_a_handle_that_stays_stale_fails_the_save_on_all_ranks(two: Rig) -> None:
    assert_committed(two.saves(10), 10)
    two.set_rules(Rule("open", "*/rank1.bin", error="ESTALE", times=FOR_EVER), hosts="b")
    assert_everywhere(two.saves(20), "ESTALE", "rank1.bin")
    two.set_rules()
    assert two.restarted() == (10, 10)


# --- a full disk ---


def test_a_disk_that_is_full_when_it_is_flushed_fails_the_save_on_all_ranks(two: Rig) -> None:
    """As a full NFS: every write succeeds, what cannot be stored is found out by fsync alone."""
    assert_committed(two.saves(10), 10)
    two.set_rules(Rule("fsync", "*/staging/*/rank1.bin", error="ENOSPC", times=FOR_EVER))
    assert_everywhere(two.saves(20), "ENOSPC", "rank1.bin", "free")
    two.set_rules()
    assert two.restarted() == (10, 10)


def _wait_until_saved(calls: Calls, saves: int) -> None:
    def have_saved() -> bool:
        return sum("saved" in told for told in calls.answers[0].told) >= saves

    assert calls.wait(have_saved, timeout_s=60.0), [answer.problem for answer in calls.answers]
