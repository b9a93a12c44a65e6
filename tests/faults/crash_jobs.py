"""Jobs of four ranks that do one thing after another, until they are killed.

As :mod:`tests.unit.processes` they are forked, so that nothing is imported again; but they outlive what they are asked
for, so that a table of some thousand rows does not form a process group for each.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawArray
from typing import Any

import torch
import torch.distributed as dist

from safe_trainer.channel import Channel
from tests.cluster import die_with_parent
from tests.unit.processes import Raised, answers_through, outcome_of

RANKS = 4
# The survivors of a killed rank must have ended by then. Far longer than it takes: this tells hanging from slow.
DEADLINE_S = 40.0
# What the channel itself waits for at most; shorter, so that whoever has only this to end them is not taken to hang.
CHANNEL_TIMEOUT_S = 20.0

_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Ended:
    """A rank that gave no answer: it ``died``, or it ``hangs``."""

    how: str


Answer = Any  # what was asked for, Raised, or Ended


@dataclass(frozen=True)
class Rank:
    """What a rank is called with."""

    channel: Channel
    pids: tuple[int, ...]


class Job:
    """Four ranks of one job, each in a process of its own."""

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="safe-trainer-crash-")
        self._pids = RawArray(ctypes.c_int, RANKS)
        self._processes = []
        self._connections: list[Connection] = []
        for rank in range(RANKS):
            own, childs = _FORK.Pipe()
            process = _FORK.Process(target=self._serve, args=(rank, childs), daemon=True)
            process.start()
            childs.close()
            self._processes.append(process)
            self._connections.append(own)

    def start(self, body: Callable[..., Any], *arguments: Any) -> None:
        """Let every rank call ``body(rank, *arguments)``, a function of a module."""
        for connection in self._connections:
            connection.send((body, arguments))

    def answers(self) -> list[Answer]:
        """What each rank gave. One that raises has given its answer, and ends, as a training script would."""
        return answers_through(self._connections, DEADLINE_S, died=Ended("died"), hangs=Ended("hangs"))

    def run(self, body: Callable[..., Any], *arguments: Any) -> list[Answer]:
        """:meth:`start`, and the :meth:`answers`."""
        self.start(body, *arguments)
        return self.answers()

    def stop(self) -> None:
        """Kill whatever is left of it."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _serve(self, rank: int, connection: Connection) -> None:
        # Its siblings hold copies of the parent's ends of the pipes, so that the parent's death shows in none of them.
        die_with_parent()
        # Each for itself, and before they meet: whoever kills all others must know them all (kill(0) is everybody).
        self._pids[rank] = os.getpid()
        logging.disable(logging.CRITICAL)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        rendezvous = f"file://{self._directory}/rendezvous"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
        own = Rank(Channel.open(timeout_s=CHANNEL_TIMEOUT_S), tuple(self._pids))
        while True:
            try:
                body, arguments = connection.recv()
            except EOFError:
                os._exit(0)
            answer = outcome_of(lambda body=body, arguments=arguments: body(own, *arguments))  # type: ignore[misc]
            connection.send(answer)
            if isinstance(answer, Raised):
                os._exit(1)  # the others must learn of it by its end; the parent's clean-up is not ours


class Jobs:
    """Jobs for whoever kills them: the next one comes up while this one runs."""

    def __init__(self) -> None:
        self._spare = Job()

    def take(self) -> Job:
        """A fresh job; the caller stops it."""
        return self._spare

    def prepare_next(self) -> None:
        """Start the one after; call it when the one before has been given its work."""
        self._spare = Job()

    def close(self) -> None:
        self._spare.stop()
