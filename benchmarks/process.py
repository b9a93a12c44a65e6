"""This process among the ranks; one process is the plain case of many."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def barrier() -> None:
    """Wait for all ranks; nothing to do for one."""
    if dist.is_initialized():
        dist.barrier()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def exchange(value: T) -> list[T]:
    """Every rank's value."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def device() -> torch.device:
    """Where training happens: this rank's GPU where the back end can use one."""
    if torch.cuda.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def reachable_address() -> str:
    """An address of this host by which the other ranks reach it."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, _, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # chooses the route, sends nothing
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def listening() -> Iterator[socket.socket]:
    """A socket that listens on a free port of :func:`reachable_address`."""
    with socket.create_server((reachable_address(), 0)) as server:
        yield server


def free_port() -> int:
    """A port on which nobody listens right now, for a server that cannot choose one itself."""
    with listening() as server:
        return int(server.getsockname()[1])


def failure_of(command: Sequence[str], *, timeout_s: float) -> str | None:
    """Run a tool that says nothing where it succeeds; what it says where it fails, else None."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    if done.returncode == 0:
        return None
    return f"{command[0]} gave {done.returncode}: {done.stderr.decode(errors='replace').strip()}"
