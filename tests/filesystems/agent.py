"""One process on each host that has imported everything, and forks a rank whenever it is asked to.

Started by `tests.filesystems.job` as ``python -m tests.filesystems.agent``. It reads one JSON document a line from its
standard input and answers on its standard output, through namespaces or ssh alike. When its input ends, it and its
ranks end.

    -> {"do": "call", "call": 7, "function": "module:name", "env": {...}, "kwargs": {...}}
    <- {"call": 7, "told": ...}                  what the function tells while it runs, if anything
    <- {"call": 7, "ok": true, "value": ...}     or "ok": false with "error", or with "died"
    -> {"do": "kill", "call": 7}                 or "stacks": of all threads, into the log
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import torch
import torch.distributed as dist

from tests.cluster import STACKS_SIGNAL, Json, resolve
from tests.filesystems import scenarios  # imported here once, so that ranks need not

GROUP_TIMEOUT_S = 120.0
PRELOADED = (scenarios,)
_FORK = multiprocessing.get_context("fork")


@dataclass
class _Call:
    number: int
    process: ForkProcess
    connection: Connection
    answered: bool = False


def main() -> None:
    """Serves until the standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed goes to the log
    answers.write(json.dumps({"ready": True}) + "\n")
    calls: dict[int, _Call] = {}
    pending = b""
    while True:
        ready = wait([0, *(call.connection for call in calls.values())])
        for call in [call for call in calls.values() if call.connection in ready]:
            if not _pass_on(call, answers.write):
                call.process.join()
                del calls[call.number]
        if 0 in ready:
            received = os.read(0, 1 << 16)
            if not received:
                break
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                _obey(json.loads(line), calls)
    for call in calls.values():
        call.process.kill()


def _obey(message: Json, calls: dict[int, _Call]) -> None:
    number = message["call"]
    if message["do"] in ("kill", "stacks"):
        if number in calls:
            os.kill(calls[number].process.pid or 0, signal.SIGKILL if message["do"] == "kill" else STACKS_SIGNAL)
        return
    own, childs = _FORK.Pipe()
    process = _FORK.Process(target=_rank, args=(childs, message), daemon=True)
    process.start()
    childs.close()
    calls[number] = _Call(number, process, own)


def _pass_on(call: _Call, write: Callable[[str], Any]) -> bool:
    """Hands one message of a rank on; False if that was its last."""
    try:
        answer = call.connection.recv()
    except (EOFError, OSError):
        answer = None
    if answer is None and not call.answered:
        call.process.join()
        answer = {"ok": False, "died": call.process.exitcode}
    if answer is not None:
        call.answered = "ok" in answer
        write(json.dumps({"call": call.number, **answer}) + "\n")
    return not call.answered


def _rank(connection: Connection, message: Json) -> None:
    os.environ.update(message["env"])
    torch.set_num_threads(1)
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    try:
        with _process_group():
            value = resolve(message["function"])(tell=lambda told: connection.send({"told": told}), **message["kwargs"])
        connection.send({"ok": True, "value": value})
    except BaseException:
        connection.send({"ok": False, "error": traceback.format_exc()})
    sys.stderr.flush()
    connection.close()
    os._exit(0)


@contextlib.contextmanager
def _process_group() -> Any:
    if "RANK" not in os.environ:
        yield
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    yield
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
