"""One rank of `tests.cluster`: waits for the name of a function, calls it, sends back what it gave.

Started by a launcher as ``python -m tests.worker``. It ends when its connection to the test process does,
whatever it is doing at that moment, so no test process, however it dies, leaves ranks behind.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from tests.cluster import STACKS_SIGNAL, Json, resolve

STORE_TIMEOUT_S = 120.0


def main() -> int:
    """Serves until the test process says that it was the last call or goes away. Returns the exit code."""
    directory = Path(os.environ["TESTS_CLUSTER_DIRECTORY"])
    rank = int(os.environ.get("RANK", "0"))
    with (directory / f"stacks{rank}").open("w") as stacks:
        faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True)
        connection = Client(str(directory / "socket"), family="AF_UNIX")
        connection.send_bytes(json.dumps({"rank": rank}).encode())
        group = ProcessGroup()
        group.renew()
        for message in _messages(connection):
            action = group.renew if message["do"] == "renew" else _call_of(message)
            answer = _answer(action)
            connection.send_bytes(json.dumps(answer).encode())
            if message.get("last"):
                group.leave()
                return 0 if answer["ok"] else 1
            gc.collect()
    return 0


class ProcessGroup:
    """The default process group of torch.distributed; it lives from scenario to scenario until one fails."""

    def __init__(self) -> None:
        self._store: Any = None
        self._generation = 0

    def renew(self) -> None:
        """Makes the group, a fresh one where there is one already. Without a launcher there is none."""
        if "WORLD_SIZE" not in os.environ:
            return
        self.leave()
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if self._store is None:
            self._store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=STORE_TIMEOUT_S)))
        self._generation += 1
        dist.init_process_group(
            _backend(),
            # A prefix of its own: keys of the group before would be taken for addresses of peers in this one.
            store=PrefixStore(f"cluster/{self._generation}", self._store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=float(os.environ["TESTS_CLUSTER_GROUP_TIMEOUT_S"])),
        )

    def leave(self) -> None:
        """Destroys the group and all groups made from it."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _backend() -> str:
    backend = os.environ["TESTS_CLUSTER_BACKEND"]
    if backend == "nccl":
        local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        torch.cuda.set_device(local_rank % gpus)
        if int(os.environ["LOCAL_WORLD_SIZE"]) > gpus or os.environ["GROUP_WORLD_SIZE"] != "1":
            # NCCL refuses one GPU for two ranks of one host; on "different hosts" it does not look.
            os.environ["NCCL_HOSTID"] = f"rank{os.environ['RANK']}"
    return backend


def _messages(connection: Connection[Any, Any]) -> Iterator[Json]:
    """What the test process sends. A thread listens, so that a lost connection ends a busy rank too."""
    messages: queue.SimpleQueue[Json] = queue.SimpleQueue()

    def listen() -> None:
        try:
            while True:
                messages.put(json.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            os._exit(1)

    threading.Thread(target=listen, name="tests-worker", daemon=True).start()
    while True:
        yield messages.get()


def _call_of(message: Json) -> Callable[[], Json]:
    return lambda: resolve(message["function"])(**message["kwargs"])


def _answer(action: Callable[[], Json]) -> Json:
    try:
        value = action()
        json.dumps(value)  # what cannot be sent is the function's error, not the worker's
    except BaseException as error:  # also SystemExit: one scenario must not end the rank
        return {"ok": False, "error": _described(error)}
    return {"ok": True, "value": value}


def _described(error: BaseException) -> Json:
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]
    public = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    return {
        "type": kinds[0],
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "bases": kinds[:-1],
        "attributes": {name: _jsonable(value) for name, value in public.items()},
    }


def _jsonable(value: Any) -> Json:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return repr(value)


if __name__ == "__main__":
    sys.exit(main())
