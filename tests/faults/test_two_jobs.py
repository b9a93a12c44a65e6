"""Two jobs in one run directory (S10), what a dead one leaves (S8, F6), and locks that do not work (S7).

Real jobs of real ranks: no model, no transformers.
"""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from safe_trainer.channel import Channel
from safe_trainer.errors import CheckpointError, RunDirectoryTaken
from safe_trainer.layout import AREA_NAME, list_checkpoints
from safe_trainer.options import CheckpointOptions
from safe_trainer.resume import resume_latest
from safe_trainer.rotation import Rotation
from safe_trainer.run import Run, open_run
from safe_trainer.save import save_checkpoint
from tests import checks
from tests.unit.builders import write_files
from tests.unit.processes import Raised, killed, outcome_of, run_ranks, running

DEADLINE_S = 90.0
ROUNDS = 10
RANKS = 2
# Much less than a lease or any time-out, and long for a busy machine.
AT_ONCE_S = 8.0
CLEAN = ["generation.json", "lock"]

_FORK = multiprocessing.get_context("fork")


def options(storage: str = "auto") -> CheckpointOptions:
    return CheckpointOptions(storage=storage, lock_timeout_s=30.0, visibility_timeout_s=10.0, timeout_s=60.0)


def open_alone(root: Path) -> Run:
    return open_run(root, channel=Channel(None, rank=0, world_size=1), options=options(), saved_by={})


def save_alone(run: Run, step: int, *, limit: int | None = None, bytes_: int = 100) -> None:
    def write(directory: Path) -> None:
        write_files(directory, {"model.bin": str(step).encode() * bytes_, "trainer_state.json": b"{}"})

    save_checkpoint(run, step=step, write=write, rotation=lambda: Rotation(limit=limit))


def refuse_locks() -> None:
    """File locks do not exist any more, in this process."""

    def fail(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    fcntl.flock = fail  # type: ignore[assignment]


def nothing() -> None:
    """File locks work."""


# --- of two that start at the same moment, the same one wins on all disks ---


@dataclass(frozen=True)
class Layout:
    """Where the ranks of each job are: for each job, the disk of each of its ranks."""

    disks: tuple[tuple[int, int], tuple[int, int]]

    @property
    def storage(self) -> str:
        return "local" if any(first != second for first, second in self.disks) else "shared"


LAYOUTS = {
    "shared": Layout(((0, 0), (0, 0))),
    "split": Layout(((0, 1), (0, 1))),
    "split, with exchanged homes": Layout(((0, 1), (1, 0))),
}


class _Start(NamedTuple):
    """How one rank of a job got on: the generation it started with, or what was raised, then and at the next check."""

    run_id: str | None
    raised: str | None
    next_check: str | None


def start_again_and_again(
    root: Path, layout: Layout, job: int, rank: int, prepare: Callable[[], None], barrier: Barrier, parent: Connection
) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", GROUP_RANK=str(rank))
    torch.set_num_threads(1)
    prepare()
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous-{job}", rank=rank, world_size=RANKS)
    channel = Channel.open(timeout_s=30.0)
    starts = []
    for number in range(ROUNDS):
        disk = root / f"round{number}" / f"disk{layout.disks[job][rank]}"
        barrier.wait(DEADLINE_S)
        run = outcome_of(
            lambda disk=disk: open_run(disk, channel=channel, options=options(layout.storage), saved_by={})  # type: ignore[misc]
        )
        barrier.wait(DEADLINE_S)
        if isinstance(run, Raised):
            starts.append(_Start(None, f"{run.kind}: {run.message}", None))
            continue
        check = outcome_of(run.directory.check_generation) if run.topology.is_leader else None
        fenced = f"{check.kind}: {check.message}" if isinstance(check, Raised) else None
        starts.append(_Start(run.generation.run_id, None, fenced))
    parent.send(starts)


def starts_of_two_jobs(root: Path, layout: Layout, prepare: Callable[[], None]) -> list[list[list[_Start]]]:
    """By round, job and rank."""
    barrier = _FORK.Barrier(2 * RANKS)
    pipes, ranks = [], []
    for job in range(2):
        for rank in range(RANKS):
            own, theirs = _FORK.Pipe(duplex=False)
            arguments = (root, layout, job, rank, prepare, barrier, theirs)
            ranks.append(_FORK.Process(target=start_again_and_again, args=arguments, daemon=True))
            pipes.append(own)
    try:
        for process in ranks:
            process.start()
        answers = []
        for pipe in pipes:
            assert pipe.poll(DEADLINE_S), "a rank does not answer"
            answers.append(pipe.recv())
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [
        [[answers[job * RANKS + rank][number] for rank in range(RANKS)] for job in range(2)] for number in range(ROUNDS)
    ]


@pytest.mark.parametrize("prepare", [nothing, refuse_locks], ids=["with locks", "without"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_of_two_jobs_that_start_at_once_one_wins_on_all_disks_and_the_other_learns_of_it(
    tmp_path: Path, layout: str, prepare: Callable[[], None]
) -> None:
    for number, jobs in enumerate(starts_of_two_jobs(tmp_path, LAYOUTS[layout], prepare)):
        disks = sorted((tmp_path / f"round{number}").iterdir())
        owners = {json.loads((disk / AREA_NAME / "generation.json").read_text())["run_id"] for disk in disks}
        assert len(owners) == 1, "one run owns all disks"
        winners = [job for job in jobs if all(start.run_id in owners for start in job)]
        losers = [job for job in jobs if job not in winners]
        assert len(winners) == len(losers) == 1
        assert all(start.next_check is None for start in winners[0])
        for start in losers[0]:
            told = start.raised or losers[0][0].next_check
            assert told is not None
            assert told.startswith("RunDirectoryTaken"), told
            assert "now belongs to run" in told


# --- a requeued job and its zombie ---


def test_two_jobs_that_save_by_turns_do_not_touch_each_others_and_the_older_is_fenced_off(tmp_path: Path) -> None:
    def save_for_ever(ready: Callable[[], None]) -> None:
        run = open_alone(tmp_path / "out")
        step = 0
        while True:
            step += 1
            try:
                save_alone(run, step, limit=1)
            except RunDirectoryTaken as error:
                (tmp_path / "said.new").write_text(str(error))
                (tmp_path / "said.new").rename(tmp_path / "said")
                return
            except CheckpointError:
                continue  # its staging directory was swept: the next save begins with a check
            if step == 3:
                ready()

    with running(save_for_ever):
        requeued = open_alone(tmp_path / "out")
        resumed = resume_latest(requeued)
        assert resumed is not None
        assert resumed.step is not None
        for step in range(1000, 1006):
            save_alone(requeued, step, limit=1)
            present = [step for step, _ in list_checkpoints(tmp_path / "out")]
            assert present == [step]
            checks.assert_matches_manifest(tmp_path / "out" / f"checkpoint-{step}")
        _wait_for(tmp_path / "said")
    assert (
        f"now belongs to run 2 (started {requeued.generation.started_at} by process {os.getpid()}"
        in (tmp_path / "said").read_text()
    )


def test_a_zombie_that_wakes_up_right_before_its_rename_changes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "out"

    def stop_before_the_rename(ready: Callable[[], None]) -> None:
        run = open_alone(root)
        save_alone(run, 10)
        lock = run.directory.lock

        def stop_and_lock() -> AbstractContextManager[None]:
            ready()
            os.kill(os.getpid(), signal.SIGSTOP)
            return lock()

        run.directory.lock = stop_and_lock  # type: ignore[assignment,method-assign]
        outcome = outcome_of(lambda: save_alone(run, 20))
        assert isinstance(outcome, Raised)
        (tmp_path / "said.new").write_text(f"{outcome.kind}: {outcome.message}")
        (tmp_path / "said.new").rename(tmp_path / "said")

    with running(stop_before_the_rename) as zombie:
        assert zombie.pid is not None
        requeued = open_alone(root)
        save_alone(requeued, 20)
        before = _everything_in(root)
        os.kill(zombie.pid, signal.SIGCONT)
        _wait_for(tmp_path / "said")
    assert (tmp_path / "said").read_text().startswith("RunDirectoryTaken: ")
    assert "now belongs to run 2" in (tmp_path / "said").read_text()
    assert _everything_in(root) == before


@pytest.mark.parametrize("prepare", [nothing, refuse_locks], ids=["with locks", "without"])
def test_a_requeued_job_starts_at_once_though_the_dead_one_held_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[], None]
) -> None:
    monkeypatch.setattr(fcntl, "flock", fcntl.flock)
    prepare()

    def hold(ready: Callable[[], None]) -> None:
        run = open_alone(tmp_path)
        save_alone(run, 10)
        with run.directory.lock():
            ready()
            time.sleep(DEADLINE_S)

    with running(hold):
        pass  # killed
    begin = time.monotonic()
    requeued = open_alone(tmp_path)
    resumed = resume_latest(requeued)
    assert time.monotonic() - begin < AT_ONCE_S
    assert resumed is not None
    assert resumed.step == 10


def test_five_killed_saves_leave_nothing_after_the_next_start_but_what_is_not_theirs(tmp_path: Path) -> None:
    def die_while_writing() -> None:
        run = open_alone(tmp_path)

        def write(directory: Path) -> None:
            write_files(directory, {"model.bin": bytes(1_000_000)})
            os.kill(os.getpid(), signal.SIGKILL)

        save_checkpoint(run, step=10, write=write, rotation=lambda: Rotation())

    write_files(tmp_path / AREA_NAME, {"staging/notes of a person/model.bin": b"precious"})
    for _ in range(5):
        assert killed(die_while_writing)
    assert len(os.listdir(tmp_path / AREA_NAME / "staging")) == 2  # each start has swept what was there before it
    open_alone(tmp_path)
    assert os.listdir(tmp_path / AREA_NAME / "staging") == ["notes of a person"]
    assert sorted(os.listdir(tmp_path / AREA_NAME)) == [*CLEAN, "staging"]


# --- which guard works is tried between the hosts ---


def _get_every_lock(descriptor: int, how: int) -> None:
    """As on sshfs: what another host holds does not matter."""


@pytest.mark.parametrize("mistaken", [None, 1, 2], ids=["all are kept out", "one gets it", "its neighbour would"])
def test_a_lock_that_another_host_gets_as_well_is_replaced_by_a_claim(tmp_path: Path, mistaken: int | None) -> None:
    """Rank 0 is on one host, ranks 1 and 2 on another, of which the first tries."""

    def body(channel: Channel) -> list[str]:
        os.environ["GROUP_RANK"] = str(min(channel.rank, 1))
        if channel.rank == mistaken:
            fcntl.flock = _get_every_lock  # type: ignore[assignment]
        run = open_run(tmp_path, channel=channel, options=options(), saved_by={})
        if not run.topology.is_leader:
            return []
        with run.directory.lock():
            return sorted(set(os.listdir(tmp_path / AREA_NAME)) - {"generation.json"})

    held = run_ranks(body)[0]
    assert held == (["claim.json"] if mistaken == 1 else ["lock"])
    assert not (tmp_path / AREA_NAME / "claim.json").exists()
    assert not (tmp_path / AREA_NAME / "tokens").exists()


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.02)


def _everything_in(root: Path) -> dict[str, tuple[int, int]]:
    """Every checkpoint's files and the generation, with inode and time of change."""
    files = [root / AREA_NAME / "generation.json", *(path for path in root.glob("checkpoint-*/**/*"))]
    return {path.relative_to(root).as_posix(): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}
