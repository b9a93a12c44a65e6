"""watch: nobody is left waiting, whatever the others sit in when a rank fails, dies, falls silent or is slow."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import socket
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from safe_trainer import watch
from safe_trainer.channel import Channel
from safe_trainer.errors import CheckpointError, ProcessGroupLostError
from tests.unit.processes import Answer, kill_self, run_ranks_that_may_die

TIMEOUT_S = 2.0
WITHIN_S = 10.0
HOST = socket.gethostname()


class Outcome:
    """What came of a step on one rank, and how long it took."""

    def __init__(self, channel: Channel, action: Callable[[], object]) -> None:
        self.error: CheckpointError | None = None
        self.missing: tuple[int, ...] | None = None
        started = time.monotonic()
        try:
            channel.together("write", action)
        except CheckpointError as error:
            self.error = error
            self.missing = error.missing if isinstance(error, ProcessGroupLostError) else None
        self.seconds = time.monotonic() - started


def given(answers: list[Answer[Outcome]], *, without: int | None = None) -> list[Outcome]:
    return [answer.given() for rank, answer in enumerate(answers) if rank != without]


def same_error(outcomes: list[Outcome]) -> str:
    texts = {str(outcome.error) for outcome in outcomes}
    assert len(texts) == 1, texts
    assert all(outcome.error is not None for outcome in outcomes)
    return texts.pop()


def in_a_collective() -> None:
    """What DeepSpeed and FSDP do inside a save: all ranks of the training group, one of which will not come."""
    dist.all_reduce(torch.zeros(2))


def fail() -> None:
    raise OSError(28, "No space left on device", "/disk/model")


@pytest.fixture
def in_earnest() -> None:
    """For tests that are to run with the real patience."""


@pytest.fixture(autouse=True)
def hasty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter patience than in earnest, so that the tests are quick; ``WITHIN_S`` is tried with the real one."""
    if "in_earnest" not in request.fixturenames:
        monkeypatch.setattr(watch, "BEAT_INTERVAL_S", 0.25)
        monkeypatch.setattr(watch, "GRACE_S", 1.0)
        monkeypatch.setattr(watch, "STUCK_AFTER_S", 0.5)


@pytest.mark.usefixtures("in_earnest")
def test_a_failure_reaches_ranks_that_sit_in_somebody_elses_collective() -> None:
    def body(channel: Channel) -> Outcome:
        return Outcome(channel, fail if channel.rank == 1 else in_a_collective)

    outcomes = given(run_ranks_that_may_die(body))
    assert same_error(outcomes).startswith(f"rank 1 on {HOST}, write: OSError (ENOSPC): [Errno 28] No space left")
    assert "bytes free there" in str(outcomes[0].error)
    assert max(outcome.seconds for outcome in outcomes) < WITHIN_S
    for outcome in outcomes:
        assert isinstance(outcome.error, ProcessGroupLostError)
        assert [failure.rank for failure in outcome.error.failures] == [1]


def test_a_failure_reaches_ranks_that_wait_for_bytes() -> None:
    def body(channel: Channel) -> Outcome:
        def receive() -> None:
            channel.receive(torch.zeros(2), from_rank=1)

        return Outcome(channel, fail if channel.rank == 1 else receive)

    outcomes = given(run_ranks_that_may_die(body))
    assert "No space left" in same_error(outcomes)
    assert max(outcome.seconds for outcome in outcomes) < WITHIN_S


def test_after_that_every_step_fails_at_once_with_the_same_error() -> None:
    def body(channel: Channel) -> bool:
        first = Outcome(channel, fail if channel.rank == 1 else in_a_collective)
        second = Outcome(channel, lambda: None)
        return channel.is_lost and str(first.error) == str(second.error) and second.seconds < 1.0

    assert [answer.given() for answer in run_ranks_that_may_die(body)] == [True] * 3


@pytest.mark.parametrize("on_this_machine", [True, False])
@pytest.mark.parametrize("where", [in_a_collective, lambda: None], ids=["in a collective", "at the end of the step"])
def test_a_killed_process_is_named(
    where: Callable[[], None], on_this_machine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not on_this_machine:
        monkeypatch.setattr(watch, "process_mark", lambda pid: "")

    def body(channel: Channel) -> Outcome:
        return Outcome(channel, kill_self if channel.rank == 1 else where)

    outcomes = given(run_ranks_that_may_die(body, channel_timeout_s=TIMEOUT_S), without=1)
    assert f"no sign of life from rank 1 on {HOST}" in same_error(outcomes)
    assert [outcome.missing for outcome in outcomes] == [(1,), (1,)]
    assert max(outcome.seconds for outcome in outcomes) < WITHIN_S


@pytest.mark.parametrize("where", [in_a_collective, lambda: None], ids=["in a collective", "at the end of the step"])
def test_a_silent_process_is_named_although_its_connections_stand(where: Callable[[], None]) -> None:
    """A node whose network is cut: no connection is closed, nothing comes any more."""

    def body(channel: Channel) -> Outcome:
        def stop() -> None:
            os.kill(os.getpid(), signal.SIGSTOP)

        return Outcome(channel, stop if channel.rank == 1 else where)

    answers = run_ranks_that_may_die(body, channel_timeout_s=TIMEOUT_S, deadline_s=6.0)
    outcomes = given(answers, without=1)
    assert "no sign of life from rank 1" in same_error(outcomes)
    assert [outcome.missing for outcome in outcomes] == [(1,), (1,)]
    assert max(outcome.seconds for outcome in outcomes) < TIMEOUT_S + 5.0


@pytest.mark.parametrize("on_this_machine", [True, False])
def test_where_the_store_goes_with_rank_0_the_others_name_it(
    on_this_machine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not on_this_machine:
        own = watch.Peer.own
        monkeypatch.setattr(
            watch.Peer, "own", lambda: dataclasses.replace(own(), process="", node=str(dist.get_rank()))
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def body(channel: Channel) -> Outcome:
        return Outcome(channel, kill_self if channel.rank == 0 else lambda: None)

    answers = run_ranks_that_may_die(body, channel_timeout_s=TIMEOUT_S, rendezvous=f"tcp://127.0.0.1:{port}")
    outcomes = given(answers, without=0)
    # Without the store each judges for itself: whoever raises last may miss the first, too.
    for outcome in outcomes:
        assert f"rank 0 on {HOST}" in str(outcome.error)
        assert ("the job's store" in str(outcome.error)) != on_this_machine
        assert (outcome.missing or ())[0] == 0
    assert max(outcome.seconds for outcome in outcomes) < WITHIN_S


def test_a_slow_rank_is_waited_for_however_short_the_time_outs_are() -> None:
    """While the others are inside a collective of a training back end that would not wait that long (case F1)."""

    def body(channel: Channel) -> Outcome:
        def act() -> None:
            with watch.patient_groups():
                time.sleep(3.2 if channel.rank == 2 else 0.0)  # the clocks of the others may start a little later
                in_a_collective()

        return Outcome(channel, act)

    outcomes = given(run_ranks_that_may_die(body, channel_timeout_s=1.0, training_timeout_s=1.0))
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert all(outcome.seconds >= 3.0 for outcome in outcomes)


def test_the_groups_get_their_time_limits_back() -> None:
    def body(channel: Channel) -> bool:
        with watch.patient_groups():
            dist.barrier()
        started = time.monotonic()
        if channel.rank != 0:
            with pytest.raises(RuntimeError):
                in_a_collective()
        else:
            time.sleep(2.0)
        return time.monotonic() - started < 3.0

    answers = run_ranks_that_may_die(body, training_timeout_s=1.0)
    assert [answer.given() for answer in answers] == [True] * 3


@pytest.mark.parametrize("waits", [False, True])
def test_after_a_failure_a_slow_rank_is_waited_for_only_where_all_are_to_go_on(waits: bool) -> None:
    """The failing rank is at the end of its step at once; the slow one is writing for longer than the others wait."""

    def body(channel: Channel) -> tuple[Outcome, bool]:
        action = {0: lambda: None, 1: fail, 2: lambda: time.sleep(3.5)}[channel.rank]
        first = Outcome(channel, action)
        second = Outcome(channel, lambda: None)
        return first, second.error is None

    answers = [answer.given() for answer in run_ranks_that_may_die(body, waits_for_slow=waits)]
    outcomes = [outcome for outcome, _ in answers]
    assert "No space left" in same_error(outcomes)
    assert [goes_on for _, goes_on in answers] == [waits] * 3
    assert [isinstance(outcome.error, ProcessGroupLostError) for outcome in outcomes] == [not waits] * 3
    if not waits:
        assert max(outcome.seconds for outcome in outcomes[:2]) < 3.0


def test_a_rank_that_leaves_the_step_for_good_does_not_keep_the_others() -> None:
    """Its process goes on to its end, or does not: nobody waits to see."""

    def body(channel: Channel) -> Outcome | None:
        def leave() -> None:
            raise SystemExit(1)

        try:
            return Outcome(channel, leave if channel.rank == 1 else lambda: None)
        except SystemExit:
            time.sleep(4.0)
            return None

    answers = run_ranks_that_may_die(body)
    outcomes = [outcome for outcome in (answers[0].given(), answers[2].given()) if outcome is not None]
    assert "SystemExit" in same_error(outcomes)
    assert max(outcome.seconds for outcome in outcomes) < 3.5


def test_the_log_names_who_is_late_and_what_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LATE_LOG_INTERVAL_S", 1.2)

    class Lines(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.lines: list[str] = []

        def emit(self, record: logging.LogRecord) -> None:
            self.lines.append(record.getMessage())

    def body(channel: Channel) -> list[str]:
        log = Lines()
        watch.logger.addHandler(log)
        Outcome(channel, lambda: time.sleep(3.2 if channel.rank == 2 else 0.0))
        return log.lines

    first, second, third = (answer.given() for answer in run_ranks_that_may_die(body))
    assert len(first) == 2
    assert f"Late: rank 2 on {HOST}: 'write' for" in first[0]
    assert "test_watch.py" in first[0]
    assert second == third == []


@pytest.mark.parametrize("late_s", [2.5, 60.0], ids=["late", "never"])
def test_a_rank_may_come_late_to_the_start_but_not_never(late_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "START_TIMEOUT_S", 4.0)
    monkeypatch.setattr(watch, "LATE_LOG_INTERVAL_S", 1.0)

    def prepare(rank: int) -> None:
        time.sleep(late_s if rank == 2 else 0.0)

    answers = run_ranks_that_may_die(
        lambda channel: channel.world_size, channel_timeout_s=1.0, prepare=prepare, deadline_s=9.0
    )
    if late_s < 4.0:
        assert [answer.given() for answer in answers] == [3, 3, 3]
    else:
        for answer in answers[:2]:
            assert "1 of 3 ranks did not come to train() within" in str(answer.problem)


def test_a_rank_that_rests_is_silent_and_not_taken_for_gone() -> None:
    def body(channel: Channel) -> Outcome:
        channel.rest()
        if channel.rank == 2:
            time.sleep(2.5)
        return Outcome(channel, lambda: None)

    outcomes = given(run_ranks_that_may_die(body, channel_timeout_s=1.0))
    assert [outcome.error for outcome in outcomes] == [None] * 3
