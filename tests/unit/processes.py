"""Processes for unit tests: real gloo ranks, and children that are killed on purpose.

They are forked, so that torch is not imported again and a test can hand over a closure; what a closure patches in
its child (``monkeypatch`` works there too) the test itself does not see. Whoever has not answered by
the deadline is killed, and the test fails and says who it was.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, Generic, TypeVar

import pytest
import torch
import torch.distributed as dist

from safe_trainer.channel import Channel

T = TypeVar("T")

DEADLINE_S = 60.0
CHANNEL_TIMEOUT_S = 20.0

_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Raised:
    """An exception in a form that crosses processes."""

    kind: str
    message: str
    cause: str | None


def outcome_of(action: Callable[[], T]) -> T | Raised:
    """What ``action`` returns, or what it raises."""
    try:
        return action()
    except Exception as error:
        cause = error.__cause__
        return Raised(type(error).__name__, str(error), None if cause is None else type(cause).__name__)


def run_ranks(
    body: Callable[[Channel], T],
    *,
    count: int = 3,
    channel_timeout_s: float = CHANNEL_TIMEOUT_S,
    backend: str = "gloo",
    waits_for_slow: bool = False,
) -> list[T]:
    """Run ``body`` in ``count`` processes of one job with this training back end; what each gave, by rank.

    A rank that raises, hangs or dies fails the test.
    """
    answers = run_ranks_that_may_die(
        body, count=count, channel_timeout_s=channel_timeout_s, backend=backend, waits_for_slow=waits_for_slow
    )
    bad = [f"rank {rank}: {answer.problem}" for rank, answer in enumerate(answers) if answer.problem is not None]
    if bad:
        pytest.fail("\n".join(bad))
    return [answer.given() for answer in answers]


@dataclass(frozen=True)
class Answer(Generic[T]):
    """What one rank gave, or why it gave nothing."""

    value: T | None = None
    problem: str | None = None

    def given(self) -> T:
        assert self.problem is None, self.problem
        return self.value  # type: ignore[return-value]


def run_ranks_that_may_die(
    body: Callable[[Channel], T],
    *,
    count: int = 3,
    channel_timeout_s: float = CHANNEL_TIMEOUT_S,
    backend: str = "gloo",
    waits_for_slow: bool = False,
    rendezvous: str | None = None,
    training_timeout_s: float = DEADLINE_S,
    deadline_s: float = DEADLINE_S,
    prepare: Callable[[int], None] = lambda rank: None,
) -> list[Answer[T]]:
    """As :func:`run_ranks`, for tests in which a rank raises or dies.

    Args:
        rendezvous: e.g. ``tcp://127.0.0.1:29400``, where the store lives and dies with rank 0; a file without it.
        training_timeout_s: the time limit of the training back end's collectives.
        deadline_s: whoever has not answered by then hangs.
        prepare: what each rank does before it opens its channel.
    """
    with tempfile.TemporaryDirectory(prefix="safe-trainer-ranks-") as directory:

        def rank_main(rank: int) -> T:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            torch.set_num_threads(1)
            dist.init_process_group(
                backend,
                init_method=rendezvous or f"file://{directory}/rendezvous",
                rank=rank,
                world_size=count,
                timeout=timedelta(seconds=training_timeout_s),
            )
            prepare(rank)
            return body(Channel.open(timeout_s=channel_timeout_s, waits_for_slow=waits_for_slow))

        with _children([lambda rank=rank: rank_main(rank) for rank in range(count)]) as children:  # type: ignore[misc]
            answers: list[Answer[T]] = _collect(children, deadline_s)
            return answers


def run_in_child(body: Callable[[], T]) -> T:
    """Run ``body`` in a process of its own: for mount namespaces, resource limits, other working directories."""
    with _children([body]) as children:
        (answer,) = _collect(children)
    if answer.problem is not None:
        pytest.fail(answer.problem)
    result: T = answer.given()
    return result


def killed(body: Callable[[], object]) -> bool:
    """Run ``body``, which may kill its own process; True if it did, False if it came to its end."""
    with _children([body]) as children:
        (answer,) = _collect(children)
        children[0].process.join(DEADLINE_S)
        code = children[0].process.exitcode
    if code == -signal.SIGKILL:
        return True
    assert answer.problem is None, answer.problem
    return False


def kill_self() -> None:
    """What a power cut looks like from inside: nothing runs after it."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_before(nth: int, operations: Iterable[tuple[Any, str]]) -> None:
    """Make this process kill itself before its nth call of any of ``operations``, each a module and a name in it. In a
    child only."""
    count = 0

    def wrap(real: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count == nth:
                kill_self()
            return real(*args, **kwargs)

        return wrapped

    for module, name in operations:
        setattr(module, name, wrap(getattr(module, name)))


@contextlib.contextmanager
def running(body: Callable[[Callable[[], None]], object]) -> Iterator[ForkProcess]:
    """A child that runs beside the test; ``body`` calls its argument when it is ready. Killed at the end."""
    own, childs = _FORK.Pipe()

    def main() -> None:
        body(lambda: childs.send("ready"))

    process = _FORK.Process(target=main, daemon=True)
    process.start()
    try:
        assert own.poll(DEADLINE_S), "the child did not get ready"
        own.recv()
        yield process
    finally:
        process.kill()
        process.join(DEADLINE_S)


# --- how ---


@dataclass(frozen=True)
class _Child:
    process: ForkProcess
    connection: Connection


def _answer_through(connection: Connection, body: Callable[[], object]) -> None:
    try:
        connection.send(Answer(value=body()))
    except BaseException:
        connection.send(Answer[object](problem=traceback.format_exc()))
    connection.close()
    os._exit(0)  # the parent's clean-up (pytest's, torch's) is not ours


@contextlib.contextmanager
def _children(bodies: list[Callable[[], Any]]) -> Iterator[list[_Child]]:
    children = []
    try:
        for body in bodies:
            own, childs = _FORK.Pipe()
            process = _FORK.Process(target=_answer_through, args=(childs, body), daemon=True)
            process.start()
            childs.close()
            children.append(_Child(process, own))
        yield children
    finally:
        for child in children:
            child.process.kill()
            child.process.join(DEADLINE_S)
            child.connection.close()


def _collect(children: list[_Child], deadline_s: float = DEADLINE_S) -> list[Answer[Any]]:
    connections = [child.connection for child in children]
    return answers_through(connections, deadline_s, died=Answer(problem="died"), hangs=Answer(problem="hangs"))


def answers_through(connections: list[Connection], deadline_s: float, *, died: Any, hangs: Any) -> list[Any]:
    """One answer through each connection, or what stands for it where none comes."""
    deadline = time.monotonic() + deadline_s
    answers: dict[int, Any] = {}
    while len(answers) < len(connections):
        waiting = {connection: rank for rank, connection in enumerate(connections) if rank not in answers}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        for connection in ready:
            assert isinstance(connection, Connection)
            try:
                answers[waiting[connection]] = connection.recv()
            except (EOFError, ConnectionResetError):
                answers[waiting[connection]] = died
        if not ready:
            answers.update(dict.fromkeys(waiting.values(), hangs))
    return [answers[rank] for rank in range(len(connections))]
