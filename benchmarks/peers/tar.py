"""tar over a socket: many small files as one stream."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

from benchmarks.peers.sockets import TIMEOUT_S


def problem() -> str | None:
    """Why there is no tar here; None where there is."""
    return None if shutil.which("tar") else "tar is not installed"


def move(peer: socket.socket | None, *, source_root: Path, destination_root: Path, sends: bool) -> None:
    """Bring the files below ``source_root`` through a connection; nothing to do where there is none."""
    if peer is None:
        return
    peer.setblocking(True)  # tar gets it as its standard input or output
    if sends:
        command = ["tar", "-C", str(source_root), "-cf", "-", "."]
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=peer.fileno(), timeout=TIMEOUT_S, check=True)
        peer.shutdown(socket.SHUT_WR)
    else:
        destination_root.mkdir(parents=True, exist_ok=True)
        command = ["tar", "-C", str(destination_root), "-xf", "-"]
        subprocess.run(command, stdin=peer.fileno(), timeout=TIMEOUT_S, check=True)
