"""rsync to a daemon of its own, as people bring checkpoints together by hand."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Unavailable
from benchmarks.process import failure_of, free_port, reachable_address
from tests.cluster import die_with_parent

START_TIMEOUT_S = 20.0
TRANSFER_TIMEOUT_S = 900.0
POLL_INTERVAL_S = 0.05


def problem() -> str | None:
    """Why there is no rsync here; None where there is."""
    return None if shutil.which("rsync") else "rsync is not installed"


def push(source: Path, address: str) -> None:
    """Copy the directory ``source`` with its name into the daemon's module at ``address``; nothing is fsynced."""
    failure = failure_of(["rsync", "-a", str(source), address], timeout_s=TRANSFER_TIMEOUT_S)
    if failure is not None:
        raise OSError(failure)


@contextlib.contextmanager
def serve(directory: Path) -> Iterator[str]:
    """A daemon that writes into ``directory``; gives its address for :func:`push`.

    Raises:
        Unavailable: there is no rsync.
    """
    reason = problem()
    if reason is not None:
        raise Unavailable(reason)
    address, port = reachable_address(), free_port()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        settings = Path(scratch) / "rsyncd.conf"
        settings.write_text(
            f"address = {address}\nport = {port}\nuse chroot = no\nmax connections = 0\nreverse lookup = no\n"
            f"pid file = {scratch}/pid\nlog file = {scratch}/log\n"
            f"[home]\npath = {directory}\nread only = no\n"
            + (f"uid = {os.getuid()}\ngid = {os.getgid()}\n" if os.getuid() == 0 else "")
        )
        server = subprocess.Popen(
            ["rsync", "--daemon", "--no-detach", f"--config={settings}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        try:
            wait_until_open(address, port, server)
            yield f"rsync://{address}:{port}/home/"
        finally:
            server.terminate()
            server.wait()


def wait_until_open(address: str, port: int, server: subprocess.Popen[bytes]) -> None:
    """Return once ``server`` accepts connections.

    Raises:
        Unavailable: it does not, or has ended.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1.0):
            return
        if server.poll() is not None or time.monotonic() > deadline:
            raise Unavailable(f"{server.args!r} did not start")
        time.sleep(POLL_INTERVAL_S)
