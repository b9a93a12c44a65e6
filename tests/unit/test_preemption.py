"""preemption: whoever gets the signal, and whenever, all ranks stop at one step."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist

from safe_trainer.channel import Channel
from safe_trainer.preemption import Preemption
from tests.unit.processes import run_in_child, run_ranks

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
HOST = socket.gethostname()
# So many that they do not end by themselves: an idle machine takes two thousand in the second before all ranks know.
LAST_STEP = 200_000

# When each rank gets which signal: (step, signal), as often as wanted.
Plan = Mapping[int, list[tuple[int, signal.Signals]]]


def train(channel: Channel, plan: Plan, *, step_s: float = 0.01) -> tuple[int, str | None, int]:
    """A training loop whose steps exchange something, as gradients are; where it stopped, why, and with what code."""
    generator = random.Random(channel.rank)
    with Preemption(channel, SIGNALS) as preemption:
        for step in range(1, LAST_STEP + 1):
            for moment, number in plan.get(channel.rank, []):
                if moment == step:
                    os.kill(os.getpid(), number)
            time.sleep(generator.uniform(0.0, 2 * step_s))
            if channel.world_size > 1:
                dist.all_reduce(torch.zeros(2))
            if preemption.stops_at(step):
                return step, preemption.reason, preemption.exit_code
    raise AssertionError("it was not stopped")


@pytest.mark.parametrize(
    "plan",
    [
        {2: [(5, signal.SIGTERM)]},
        {0: [(5, signal.SIGTERM)]},
        {0: [(5, signal.SIGTERM)], 1: [(5, signal.SIGTERM)], 2: [(5, signal.SIGTERM)]},
        {0: [(5, signal.SIGTERM)], 1: [(40, signal.SIGTERM)]},
        {1: [(5, signal.SIGTERM), (7, signal.SIGTERM), (9, signal.SIGUSR1)]},
    ],
    ids=["one rank", "rank 0", "all at one step", "at different steps", "again and again"],
)
def test_all_stop_at_one_step(plan: Plan) -> None:
    stopped = run_ranks(lambda channel: train(channel, plan))

    assert len(set(stopped)) == 1, stopped
    step, reason, code = stopped[0]
    first = min(moment for moments in plan.values() for moment, _ in moments)
    assert first <= step < first + 400  # within a few seconds
    assert reason is not None
    assert reason.startswith("SIGTERM on rank ")
    assert code == 128 + signal.SIGTERM


@pytest.mark.parametrize("step_s", [0.0, 0.3])
def test_steps_may_be_fast_or_slow(step_s: float) -> None:
    stopped = run_ranks(lambda channel: train(channel, {1: [(3, signal.SIGUSR1)]}, step_s=step_s))

    assert len(set(stopped)) == 1, stopped
    assert stopped[0][1:] == (f"SIGUSR1 on rank 1 ({HOST})", 128 + signal.SIGUSR1)
    if step_s:
        assert stopped[0][0] <= 10


def test_one_process_stops_at_the_end_of_its_step() -> None:
    alone = Channel(None, rank=0, world_size=1)
    stopped = run_in_child(lambda: train(alone, {0: [(3, signal.SIGTERM)]}))
    assert stopped == (3, f"SIGTERM on rank 0 ({HOST})", 143)


def test_a_second_training_knows_nothing_of_the_first_ones_signal() -> None:
    def body(channel: Channel) -> bool:
        train(channel, {1: [(1, signal.SIGTERM)]})
        with Preemption(channel, SIGNALS) as preemption:
            time.sleep(1.5)
            return preemption.stops_at(1)

    assert run_ranks(body) == [False] * 3


def test_handlers_are_put_back_and_the_users_own_is_called_too() -> None:
    def body() -> tuple[list[int], bool, bool]:
        seen: list[int] = []

        def own(number: int, frame: object) -> None:
            seen.append(number)

        signal.signal(signal.SIGTERM, own)
        with Preemption(Channel(None, rank=0, world_size=1), SIGNALS) as preemption:
            os.kill(os.getpid(), signal.SIGTERM)
            stops = preemption.stops_at(1)
        return seen, stops, signal.getsignal(signal.SIGTERM) is own

    assert run_in_child(body) == ([signal.SIGTERM], True, True)


def test_a_forked_child_ends_as_it_would_have() -> None:
    """multiprocessing ends its workers with SIGTERM."""

    def body() -> int:
        with Preemption(Channel(None, rank=0, world_size=1), SIGNALS):
            child = os.fork()
            if child == 0:
                time.sleep(20.0)
                os._exit(0)
            time.sleep(0.2)
            os.kill(child, signal.SIGTERM)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run_in_child(body) == -signal.SIGTERM


def test_without_signals_nothing_is_handled() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with Preemption(Channel(None, rank=0, world_size=1), ()) as preemption:
        assert [signal.getsignal(number) for number in SIGNALS] == before
        assert not preemption.stops_at(1)


def test_outside_the_main_thread_it_says_that_it_cannot(caplog: pytest.LogCaptureFixture) -> None:
    def enter() -> None:
        with Preemption(Channel(None, rank=0, world_size=1), SIGNALS) as preemption:
            assert not preemption.stops_at(1)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "main thread" in caplog.text
