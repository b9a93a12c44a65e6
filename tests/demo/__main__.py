"""``python -m tests.demo``: see the package. Exit code 0 only where everything that was printed has been checked."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import NoReturn, get_args

from tests.cluster import Cluster, ClusterError, Isolation
from tests.demo.stage import NODES, RANKS_PER_NODE, Stage
from tests.demo.story import tell
from tests.demo.terminal import DemoError, Terminal

INTERRUPTED = 128 + signal.SIGINT


def main() -> int:
    isolation: Isolation = _parser().parse_args().isolation
    signal.signal(signal.SIGTERM, _interrupt)
    descriptor, name = tempfile.mkstemp(prefix="safe-trainer-demo-", suffix=".log")
    log = Path(name)
    Path(f"/dev/fd/{descriptor}")
    return 0


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.demo", description=__doc__)
    return parser
