"""tar over a socket: many small files as one stream."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from benchmarks.measure import Unavailable
from benchmarks.peers.sockets import TIMEOUT_S, connection
from benchmarks.process import rank


def move(*, source_root: Path, destination_root: Path, source: int, destination: int) -> None:
    """Bring the files below ``source_root`` from rank to rank. Every rank calls it.

    Raises:
        Unavailable: there is no tar.
    """
    if shutil.which("tar") is None:
        raise Unavailable("tar is not installed")
    peer = connection(source=source, destination=destination)
    if peer is None:
        return
    with peer:
        peer.setblocking(True)  # tar gets it as its standard input or output
        if rank() == source:
            subprocess.run(
                ["tar", "-C", str(source_root), "-cf", "-", "."],
                stdin=subprocess.DEVNULL,
                stdout=peer.fileno(),
                timeout=TIMEOUT_S,
                check=True,
            )
        else:
            destination_root.mkdir(parents=True, exist_ok=True)
            subprocess.run(
                ["tar", "-C", str(destination_root), "-xf", "-"], stdin=peer.fileno(), timeout=TIMEOUT_S, check=True
            )
