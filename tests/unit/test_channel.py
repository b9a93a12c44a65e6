"""channel: ranks agree, or fail together with the same error. One process is the plain case of many."""

from __future__ import annotations

import os
import pickle
import re
import socket
import time
from collections import namedtuple
from collections.abc import Callable

import psutil
import pytest
import torch

from safe_trainer import channel as channel_module
from safe_trainer.channel import Channel
from safe_trainer.errors import CheckpointError, IncompleteCheckpointError, RunDirectoryTaken, StorageError
from safe_trainer.manifest import ManifestError
from tests.unit.processes import Raised, kill_self, outcome_of, run_ranks, run_ranks_that_may_die

# --- one process ---


@pytest.fixture
def alone() -> Channel:
    return Channel.open(timeout_s=5.0)


def test_one_process_is_rank_0_of_1(alone: Channel) -> None:
    assert (alone.rank, alone.world_size, alone.host) == (0, 1, socket.gethostname())


def test_one_process_agrees_with_itself(alone: Channel) -> None:
    assert alone.together("write", lambda: "result") == ["result"]


def test_one_process_can_return_what_no_other_could_receive(alone: Channel) -> None:
    result: Callable[[], None] = lambda: None  # noqa: E731
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(result)
    assert alone.together("write", lambda: result) == [result]


def test_an_error_becomes_a_checkpoint_error_with_the_first_as_its_cause(alone: Channel) -> None:
    root = OSError(28, "No space left on device", "/disk/x")

    def fail() -> None:
        raise root

    with pytest.raises(CheckpointError) as caught:
        alone.together("write", fail)
    assert caught.value.__cause__ is root
    assert str(caught.value).startswith(f"rank 0 on {alone.host}, write: OSError (ENOSPC): {root} (")
    assert str(caught.value).endswith(" bytes free there)")
    (failure,) = caught.value.failures
    assert (failure.rank, failure.phase, failure.kind, failure.path) == (0, "write", "OSError", "/disk/x")


@pytest.mark.parametrize(
    "kind", [CheckpointError, IncompleteCheckpointError, StorageError, RunDirectoryTaken, ManifestError]
)
def test_an_error_of_our_own_keeps_its_class_and_text(alone: Channel, kind: type[CheckpointError]) -> None:
    def fail() -> None:
        raise kind("what happened")

    with pytest.raises(CheckpointError) as caught:
        alone.together("write", fail)
    assert type(caught.value) is kind
    assert "what happened" in str(caught.value)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_what_is_meant_to_end_the_process_ends_it(alone: Channel, stop: type[BaseException]) -> None:
    def end() -> None:
        raise stop

    with pytest.raises(stop):
        alone.together("write", end)


def test_it_can_be_closed_twice(alone: Channel) -> None:
    alone.close()
    alone.close()


# --- three processes ---


def test_every_rank_gets_every_result_by_rank() -> None:
    def body(channel: Channel) -> list[tuple[int, str]]:
        return channel.together("count", lambda: (channel.rank, "x" * channel.rank))

    assert run_ranks(body) == [[(0, ""), (1, "x"), (2, "xx")]] * 3


def test_nobody_goes_on_before_everybody_has_finished() -> None:
    def body(channel: Channel) -> bool:
        def act() -> float:
            time.sleep(0.3 if channel.rank == 2 else 0.0)
            return time.monotonic()

        finished = channel.together("write", act)
        return time.monotonic() >= max(finished)

    assert run_ranks(body) == [True] * 3


def _error_of(action: Callable[[Channel], object]) -> list[Raised]:
    raised = run_ranks(lambda channel: outcome_of(lambda: channel.together("write", lambda: action(channel))))
    assert all(isinstance(outcome, Raised) for outcome in raised)
    return [outcome for outcome in raised if isinstance(outcome, Raised)]


def test_a_failure_on_one_rank_is_the_same_error_on_all_and_has_its_cause_where_it_happened() -> None:
    def fail_on_2(channel: Channel) -> None:
        if channel.rank == 2:
            raise OSError(5, "Input/output error", "/disk/x")

    raised = _error_of(fail_on_2)
    text = f"rank 2 on {socket.gethostname()}, write: OSError (EIO): [Errno 5] Input/output error: '/disk/x'"
    assert {outcome.message for outcome in raised} == {text}
    assert {outcome.kind for outcome in raised} == {"CheckpointError"}
    assert [outcome.cause for outcome in raised] == [None, None, "OSError"]


def test_an_error_of_our_own_keeps_its_class_on_every_rank() -> None:
    def fail_on_1(channel: Channel) -> None:
        if channel.rank == 1:
            raise RunDirectoryTaken("a newer run")

    raised = _error_of(fail_on_1)
    assert {(outcome.kind, outcome.message) for outcome in raised} == {("RunDirectoryTaken", "a newer run")}


def test_the_same_failure_on_several_ranks_is_told_once_and_names_them() -> None:
    def fail(channel: Channel) -> None:
        raise ValueError("out of luck")

    (message,) = {outcome.message for outcome in _error_of(fail)}
    assert message.count("out of luck") == 1
    assert re.search(r"the same on ranks \d, \d", message)  # whoever was first is told first


def test_different_failures_are_all_told() -> None:
    def fail(channel: Channel) -> None:
        if channel.rank == 0:
            raise StorageError("first")
        if channel.rank == 2:
            raise ValueError("second")

    raised = _error_of(fail)
    assert {outcome.kind for outcome in raised} == {"CheckpointError"}
    (message,) = {outcome.message for outcome in raised}
    assert "rank 0" in message
    assert "first" in message
    assert "rank 2" in message
    assert "second" in message


def test_after_a_failure_the_channel_still_works() -> None:
    def body(channel: Channel) -> list[int]:
        def fail() -> None:
            raise ValueError("once")

        outcome_of(lambda: channel.together("write", fail))
        return channel.together("again", lambda: channel.rank)

    assert run_ranks(body) == [[0, 1, 2]] * 3


def test_a_rank_that_dies_is_noticed_by_the_others() -> None:
    def body(channel: Channel) -> str:
        channel.together("all are here", lambda: None)
        if channel.rank == 1:
            kill_self()
        outcome = outcome_of(lambda: channel.together("write", lambda: None))
        return type(outcome).__name__

    answers = run_ranks_that_may_die(body)
    assert answers[1].problem == "died"
    assert [answers[0].given(), answers[2].given()] == ["Raised", "Raised"]


def test_bytes_are_sent_between_two_ranks() -> None:
    def body(channel: Channel) -> list[int]:
        buffer = torch.arange(5, dtype=torch.uint8)
        if channel.rank == 1:
            channel.send(buffer, to_rank=2)
        elif channel.rank == 2:
            buffer.zero_()
            channel.receive(buffer, from_rank=1)
        return buffer.tolist()

    assert run_ranks(body)[2] == [0, 1, 2, 3, 4]


# --- which network interface gloo uses ---

Address = namedtuple("Address", "address")
INTERFACES = {"lo": [Address("127.0.0.1")], "eth0": [Address("10.0.0.5"), Address("fe80::1%eth0")]}


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a loopback and one network interface, whose own name leads to loopback only."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: INTERFACES)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")


def chosen_interface() -> str | None:
    with channel_module._gloo_interface():
        return os.environ.get("GLOO_SOCKET_IFNAME")


def test_without_a_master_gloo_chooses_itself(interfaces: None) -> None:
    assert chosen_interface() is None


def test_the_interface_that_reaches_the_master_is_taken(interfaces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert chosen_interface() == "lo"
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_gloos_own_choice_stays_where_the_hosts_name_is_no_loopback(
    interfaces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.5")
    assert chosen_interface() is None


def test_the_users_choice_wins(interfaces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert chosen_interface() == "mine"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"


@pytest.mark.parametrize(("nccl", "chosen"), [("eth0", "eth0"), ("^docker0", "lo"), ("=eth0", "lo"), ("eth", "lo")])
def test_nccls_interface_is_taken_where_it_is_a_plain_name(
    interfaces: None, monkeypatch: pytest.MonkeyPatch, nccl: str, chosen: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", nccl)
    assert chosen_interface() == chosen


def test_a_master_that_has_no_address_is_no_error(interfaces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise socket.gaierror

    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert chosen_interface() is None


# --- results of any length ---


@pytest.mark.parametrize("lengths", [(0, 0, 0), (5000, 0, 0), (0, 0, 5000), (900, 1100, 200_000), (3, 5_000_000, 3)])
def test_results_of_any_length_reach_every_rank(lengths: tuple[int, int, int]) -> None:
    def body(channel: Channel) -> list[bytes]:
        own = bytes([channel.rank]) * lengths[channel.rank]
        for _ in range(2):
            results = channel.together("tell", lambda: own)
        return results

    expected = [bytes([rank]) * length for rank, length in enumerate(lengths)]
    assert run_ranks(body) == [expected] * 3


@pytest.mark.parametrize("around", range(-3, 4))
def test_where_a_result_just_fits(around: int) -> None:
    """Pickled, it is as long as a slot, a little shorter or a little longer."""
    overhead = len(pickle.dumps(channel_module._Outcome(b"x" * 900, None))) - 900
    length = channel_module.SLOT_BYTES - channel_module._LENGTH_BYTES - overhead + around

    def body(channel: Channel) -> list[bytes]:
        return channel.together("tell", lambda: b"x" * length)

    assert run_ranks(body, count=2) == [[b"x" * length] * 2] * 2


def test_a_failure_that_is_told_early_is_the_one_that_is_raised() -> None:
    def body(channel: Channel) -> tuple[bool, Raised]:
        seen = []

        def act() -> None:
            if channel.rank == 1:
                channel.tell(OSError(28, "No space left on device", "/disk/first"))
                time.sleep(1.0)
                raise ValueError("what came of it")
            deadline = time.monotonic() + 10.0
            while not channel.others_failed and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(channel.others_failed)
            channel.raise_if_others_failed()

        raised = outcome_of(lambda: channel.together("work", act))
        assert isinstance(raised, Raised)
        assert not channel.others_failed
        channel.together("next", lambda: None)
        return all(seen), raised

    outcomes = run_ranks(body)
    assert all(seen for seen, _ in outcomes)
    (message,) = {raised.message for _, raised in outcomes}
    assert message.startswith("rank 1 ")
    assert "/disk/first" in message.split(";")[0]
