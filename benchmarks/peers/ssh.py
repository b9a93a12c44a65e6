"""scp to an ssh server of its own, with keys made for the occasion."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Unavailable
from benchmarks.peers.rsync import TRANSFER_TIMEOUT_S, wait_until_open
from benchmarks.process import failure_of, free_port, reachable_address
from tests.cluster import die_with_parent

_SERVER = "/usr/sbin/sshd"
_PRIVILEGE_SEPARATION = Path("/run/sshd")


@dataclass(frozen=True)
class Server:
    """Where a server listens, and the key that opens it."""

    address: str
    port: int
    key: str


def problem() -> str | None:
    """Why there can be no server here; None where there can."""
    for tool in ("scp", "ssh-keygen"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    return None if _server() else "no ssh server is installed"


def _server() -> str | None:
    return shutil.which("sshd") or (_SERVER if os.access(_SERVER, os.X_OK) else None)


@contextlib.contextmanager
def serve() -> Iterator[Server]:
    """A server on a free port that lets this user in with a new key.

    Raises:
        Unavailable: it cannot be started.
    """
    reason = problem()
    if reason is not None:
        raise Unavailable(reason)
    address, port = reachable_address(), free_port()
    if os.getuid() == 0:
        _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)  # sshd refuses to start without it
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("host", "user"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{scratch}/{name}"], check=True, timeout=60.0
            )
        settings = Path(scratch) / "sshd_config"
        settings.write_text(
            f"ListenAddress {address}\nPort {port}\nHostKey {scratch}/host\nAuthorizedKeysFile {scratch}/user.pub\n"
            f"PidFile {scratch}/pid\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n"
            "Subsystem sftp internal-sftp\n"
        )
        server = subprocess.Popen(
            [str(_server()), "-D", "-e", "-f", str(settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        try:
            wait_until_open(address, port, server)
            yield Server(address, port, Path(scratch, "user").read_text())
        finally:
            server.terminate()
            server.wait()


def push(source: Path, destination: str, server: Server) -> None:
    """Copy the directory ``source`` with its name below ``destination`` on the server's host."""
    with tempfile.TemporaryDirectory() as scratch:
        key = Path(scratch) / "key"
        key.touch(mode=0o600)
        key.write_text(server.key)
        command = ["scp", "-q", "-r", "-B", "-i", str(key), "-P", str(server.port)]
        for option in ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"):
            command += ["-o", option]
        command += [str(source), f"{getpass.getuser()}@{server.address}:{destination}/"]
        failure = failure_of(command, timeout_s=TRANSFER_TIMEOUT_S)
    if failure is not None:
        raise Unavailable(failure)
