"""Two nodes, a disk each: train, save, cut the power in the middle of a save, replace a node, resume, merge.

Every line that is marked "ok" has been checked; the exit code is 0 only if all of them were. Logs are kept only if
something fails.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import NoReturn, get_args

import psutil

from tests.cluster import Cluster, Isolation
from tests.demo import NODES, RANKS_PER_NODE
from tests.demo.terminal import Terminal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 128 + signal.SIGINT


def main() -> int:
    """Runs the demo; returns the exit code."""
    isolation: Isolation = _parser().parse_args().isolation
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    with tempfile.NamedTemporaryFile(prefix="safe-trainer-demo-", suffix=".log", delete=False) as file:
        log = Path(file.name)
    try:
        _run(isolation, log)
    except KeyboardInterrupt:
        print("\nInterrupted. Everything that was started has been ended and deleted.")
        log.unlink()
        return INTERRUPTED
    except Exception as error:
        with log.open("a") as file:
            file.write(traceback.format_exc())
        print(f"\nFAILED: {_first_line(error)}\nThe output of all processes is in {log}")
        return 1
    log.unlink()
    return 0


def _run(isolation: Isolation, log: Path) -> None:
    started = time.monotonic()
    terminal = Terminal()
    with _nodes(isolation) as cluster, tempfile.TemporaryDirectory(prefix="safe-trainer-demo-") as scratch:
        terminal.say(_introduction(cluster), indent="")
        # These import torch, which takes seconds; by now there is something to read.
        from tests.demo.stage import Stage
        from tests.demo.story import tell

        disks, stock_disks = (cluster.disks("split", name) for name in ("safe", "stock"))
        tell(Stage(terminal, log, Path(scratch), disks, stock_disks, cluster.isolated))
    terminal.section("The end")
    terminal.claim(
        "Nothing is left of the nodes: no process, no directory.",
        not psutil.Process().children() and not disks.base.exists(),
    )
    terminal.say(f"All {terminal.claims} claims were checked and hold. This took {time.monotonic() - started:.0f} s.")


def _nodes(isolation: Isolation) -> Cluster:
    """Where the disks come from. Its own ranks are never started: each scene has a job of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the introduction says it
        return Cluster(NODES, RANKS_PER_NODE, isolation=isolation)


def _introduction(cluster: Cluster) -> str:
    nodes = (
        "Both nodes are this machine, each with a host name, processes and a disk of its own under the same path."
        if cluster.isolated
        else "Both nodes are this machine. Without mount namespaces (not permitted here, or not wanted), their disks "
        "are two directories, and each node uses its own."
    )
    return (
        "A small language model learns Python's documentation: two nodes of two ranks, LoRA, DeepSpeed ZeRO-2, and "
        f"nothing but a local disk in each node. The script is tests/demo/train.py. {nodes}"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _interrupt(number: int, frame: object) -> NoReturn:
    """Ctrl-C and the like end the demo with everything cleaned up; a second one does not cut that short."""
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--isolation",
        choices=get_args(Isolation),
        default="auto",
        help="whether nodes get namespaces of their own: where they are permitted, always (else it is an error), never",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
