"""agreement and background: an end that comes to each rank at its own moment is acted on at one step by all."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from safe_trainer.agreement import Agreement
from safe_trainer.background import PendingSave
from safe_trainer.channel import Channel
from safe_trainer.errors import CheckpointError
from safe_trainer.save import SaveReport
from tests.unit.processes import run_ranks

REPORT = SaveReport(1, Path("checkpoint-1"), 1, 1, 1, 0, 0, {}, 0.1, 0.2)
STEPS = 2000


def train(channel: Channel, agreement: Agreement, *, announce_at: int | None) -> int:
    """Steps that need all ranks; the one at which all act."""
    for step in range(1, STEPS):
        channel.together("training step", lambda: time.sleep(0.002))
        if step == announce_at:
            agreement.announce(f"rank {channel.rank}")
        if agreement.is_reached(step):
            return step
    raise AssertionError("it was never reached")


@pytest.mark.parametrize("ranks", [{1: 5}, {0: 5, 1: 5, 2: 5}, {2: 3, 0: 40}])
def test_all_ranks_act_at_one_step(ranks: dict[int, int]) -> None:
    def body(channel: Channel) -> tuple[int, str | None]:
        agreement = Agreement(channel, "it")
        step = train(channel, agreement, announce_at=ranks.get(channel.rank))
        agreement.close()
        return step, agreement.announcement

    results = run_ranks(body)
    assert len({step for step, _ in results}) == 1
    assert results[0][0] > min(ranks.values())
    assert len({text for _, text in results}) == 1


def test_several_agreements_at_once_and_one_after_the_other() -> None:
    def body(channel: Channel) -> list[int]:
        first, second = Agreement(channel, "first"), Agreement(channel, "second")
        if channel.rank == 0:
            second.announce("now")
        steps = [train(channel, second, announce_at=None)]
        second.close()
        third = Agreement(channel, "third")
        steps.append(train(channel, third, announce_at=2 if channel.rank == 2 else None))
        steps.append(train(channel, first, announce_at=2))
        return steps

    results = run_ranks(body)
    assert results == [results[0]] * 3


def test_alone_it_is_reached_at_once() -> None:
    agreement = Agreement(Channel.open(timeout_s=1.0), "it")
    assert not agreement.is_reached(1)
    agreement.announce("now")
    assert agreement.is_reached(1)
    assert agreement.announcement == "now"


def test_a_pending_save_goes_on_by_itself() -> None:
    may_end, has_ended = threading.Event(), threading.Event()

    def commit() -> SaveReport:
        may_end.wait(10.0)
        return REPORT

    save = PendingSave(7, commit, on_end=has_ended.set)
    assert save.step == 7
    assert not save.done()
    with pytest.raises(TimeoutError):
        save.wait(timeout_s=0.05)
    may_end.set()
    assert save.wait() is REPORT
    assert save.error() is None
    assert save.done()
    assert has_ended.is_set()


@pytest.mark.parametrize("error", [CheckpointError("no room"), SystemExit(3)])
def test_what_it_fails_with_is_kept(error: BaseException) -> None:
    has_ended = threading.Event()

    def commit() -> SaveReport:
        raise error

    save = PendingSave(7, commit, on_end=has_ended.set)
    assert save.error() is error
    with pytest.raises(type(error)):
        save.wait()
    assert has_ended.is_set()
