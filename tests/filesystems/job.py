"""Ranks on several hosts: starts them, hands them functions, kills them.

    with Job(hosts, ranks_per_host=2) as job:
        results = job.run(scenarios.save_and_replace, root="/mnt/shared/run")

Imports are paid once per host (`tests.filesystems.agent`); every call gets fresh processes and a fresh gloo group
whose traffic goes over the hosts' network.
"""

from __future__ import annotations

import itertools
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.cluster import Function, Json, name_of
from tests.filesystems.hosts import Host, environment_of_ranks

START_TIMEOUT_S = 300.0  # a User Mode Linux guest imports torch in a minute or more
CALL_TIMEOUT_S = 180.0
STRAGGLER_S = 30.0
STACKS_S = 1.0
FIRST_PORT = 29_400
LOG_TAIL_CHARACTERS = 4000


class JobError(AssertionError):
    """Some rank failed, died or did not answer."""


@dataclass
class Answer:
    """What one rank on one host has sent so far."""

    host: str
    told: list[Json] = field(default_factory=list)
    done: bool = False
    value: Json = None
    problem: str | None = None

    def fail(self, problem: str) -> None:
        self.done, self.problem = True, problem


class _Agent:
    """The connection to the agent of one host."""

    def __init__(self, host: Host, log: Path, messages: queue.SimpleQueue[Json]) -> None:
        self.host = host
        self.log = log
        self._messages = messages
        self.ready = threading.Event()
        command = (sys.executable, "-m", "tests.filesystems.agent")
        self.process = host.start(*command, log=log, env=environment_of_ranks(), talk=True)
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, message: Json) -> None:
        stdin = self.process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        except OSError:
            pass  # an agent that is gone is noticed where its answers are awaited

    def close(self) -> None:
        stdin = self.process.stdin
        assert stdin is not None
        try:
            stdin.close()
        except OSError:
            pass  # the same
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _listen(self) -> None:
        stdout = self.process.stdout
        assert stdout is not None
        for line in stdout:
            message = json.loads(line)
            if message.get("ready"):
                self.ready.set()
            else:
                self._messages.put(message)
        self._messages.put({"lost": self.host.name})


class Calls:
    """One function under way on all ranks."""

    def __init__(self, job: Job, numbers: Sequence[int], host_of: Sequence[int]) -> None:
        self._job = job
        self._numbers = list(numbers)
        self._host_of = list(host_of)
        self.answers = [job.answers[number] for number in numbers]

    def kill_host(self, index: int) -> None:
        """Kills the ranks of one host."""
        for number, host in zip(self._numbers, self._host_of, strict=True):
            if host == index:
                self._job.agents[index].send({"do": "kill", "call": number})

    def _write_stacks(self) -> None:
        """Lets ranks that have not answered write where they are into their host's log."""
        for number, host, answer in zip(self._numbers, self._host_of, self.answers, strict=True):
            if not answer.done:
                self._job.agents[host].send({"do": "stacks", "call": number})
        time.sleep(STACKS_S)

    def kill(self) -> None:
        """Kills all ranks and waits until they are gone."""
        for index in range(len(self._job.agents)):
            self.kill_host(index)
        self.wait(lambda: all(answer.done for answer in self.answers), timeout_s=STRAGGLER_S)

    def wait(self, condition: Callable[[], bool], *, timeout_s: float) -> bool:
        """Takes in what ranks send until ``condition`` holds; False if it does not in time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            self._job.take_in(remaining_s)
        return True

    def results(self, *, timeout_s: float = CALL_TIMEOUT_S) -> list[Json]:
        """What every rank gave.

        Raises:
            JobError: some rank failed, died, or has not answered; all are killed then.
        """
        self.settle(timeout_s=timeout_s)
        problems = [
            f"rank {rank}: {answer.problem}" for rank, answer in enumerate(self.answers) if answer.problem is not None
        ]
        if problems:
            raise JobError("\n".join([*problems, self._job.log_tails()]))
        return [answer.value for answer in self.answers]

    def settle(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Waits until every rank has answered, or some time after the first problem; kills the others."""
        deadline = time.monotonic() + timeout_s
        while not self.wait(lambda: all(answer.done for answer in self.answers), timeout_s=1.0):
            if any(answer.problem is not None for answer in self.answers):
                deadline = min(deadline, time.monotonic() + STRAGGLER_S)
            if time.monotonic() >= deadline:
                self._write_stacks()
                late = [rank for rank, answer in enumerate(self.answers) if not answer.done]
                self.kill()
                for rank in late:
                    self.answers[rank].problem = "no answer in time"


class Job:
    """Agents on some hosts, for as long as the ``with`` block runs.

    Args:
        hosts: where ranks are to run, in the order of their ranks.
        logs: a directory for what ranks print.
        ranks_per_host: how many on each.
    """

    def __init__(self, hosts: Sequence[Host], logs: Path, *, ranks_per_host: int) -> None:
        self.answers: dict[int, Answer] = {}
        self.ranks_per_host = ranks_per_host
        self.agents: list[_Agent] = []
        self._hosts = list(hosts)
        self._logs = logs
        self._messages: queue.SimpleQueue[Json] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._ports = itertools.count(FIRST_PORT)

    def __enter__(self) -> Job:
        try:
            for host in self._hosts:
                self.agents.append(_Agent(host, self._logs / f"{host.name}.log", self._messages))
            deadline = time.monotonic() + START_TIMEOUT_S
            for agent in self.agents:
                while not agent.ready.wait(0.2):
                    if agent.process.poll() is not None or time.monotonic() >= deadline:
                        raise JobError(f"no agent on {agent.host.name}\n{self.log_tails()}")
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def run(self, function: Function, *, timeout_s: float = CALL_TIMEOUT_S, **kwargs: Json) -> list[Any]:
        """Calls ``function(tell=..., **kwargs)`` on every rank; the results by rank."""
        return self.start(function, **kwargs).results(timeout_s=timeout_s)

    def start(self, function: Function, **kwargs: Json) -> Calls:
        """As :meth:`run`, without waiting."""
        world_size = len(self.agents) * self.ranks_per_host
        rendezvous = {"MASTER_ADDR": self._hosts[0].address, "MASTER_PORT": str(next(self._ports))}
        host_of = [rank // self.ranks_per_host for rank in range(world_size)]
        calls = [
            (
                {
                    **rendezvous,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "LOCAL_RANK": str(rank % self.ranks_per_host),
                    "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
                    "GROUP_RANK": str(host_of[rank]),
                },
                kwargs,
            )
            for rank in range(world_size)
        ]
        return self._call(function, calls, host_of=host_of)

    def on_each_host(self, function: Function, *, timeout_s: float = CALL_TIMEOUT_S, **kwargs: Json) -> list[Any]:
        """Calls ``function(tell=..., host=<number>, **kwargs)`` once on each host, without a process group."""
        no_environment: dict[str, str] = {}
        per_host = [(no_environment, {**kwargs, "host": index}) for index in range(len(self.agents))]
        return self._call(function, per_host, host_of=range(len(self.agents))).results(timeout_s=timeout_s)

    def _call(
        self, function: Function, calls: Sequence[tuple[dict[str, str], Json]], *, host_of: Sequence[int]
    ) -> Calls:
        numbers = [next(self._numbers) for _ in calls]
        for number, (environment, kwargs), host in zip(numbers, calls, host_of, strict=True):
            message = {"do": "call", "call": number, "function": name_of(function)}
            self.answers[number] = Answer(self.agents[host].host.name)
            self.agents[host].send({**message, "env": environment, "kwargs": kwargs})
        return Calls(self, numbers, host_of)

    def take_in(self, timeout_s: float) -> None:
        """Waits for one message of any call and notes it with the answer that it belongs to."""
        try:
            message = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return
        if "lost" in message:
            for answer in self.answers.values():
                if answer.host == message["lost"] and not answer.done:
                    answer.fail(f"host {answer.host} is gone")
            return
        answer = self.answers[message["call"]]
        if "told" in message:
            answer.told.append(message["told"])
        elif message["ok"]:
            answer.done, answer.value = True, message["value"]
        else:
            answer.fail(message.get("error") or f"died ({message.get('died')})")

    def log_tails(self) -> str:
        """The end of what each host's ranks have printed."""
        tails = []
        for agent in self.agents:
            text = agent.log.read_text(errors="replace") if agent.log.exists() else ""
            tails += [f"--- output of {agent.host.name} ---", text[-LOG_TAIL_CHARACTERS:]]
        return "\n".join(tails)

    def _close(self) -> None:
        for agent in self.agents:
            agent.close()
