"""What the scenes of the demo play on: two disks, jobs on two nodes, and a file for everything that they print."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import psutil

from safe_trainer.layout import RunLayout
from tests.cluster import Disks, Function, Job, Json, RemoteError, cluster_job
from tests.demo import NODES, RANKS, RANKS_PER_NODE
from tests.demo.observation import Observation
from tests.demo.terminal import DemoError, Terminal

# Each takes a tenth of this where nobody else needs the processors.
JOB_TIMEOUT_S = 300.0
MERGE_TIMEOUT_S = 120.0
POLL_INTERVAL_S = 0.02

MERGE_SCRIPT = "zero_to_fp32.py"  # DeepSpeed puts it into every checkpoint


@dataclass(frozen=True)
class Stage:
    """What all scenes share.

    Attributes:
        terminal: for the person.
        log: the file that gets what jobs and scripts print.
        scratch: a directory for what is merged.
        disks: the two disks of the run that is killed and resumed, a run directory on each.
        stock_disks: those of the stock Trainer's run.
        has_namespaces: whether nodes have namespaces of their own; otherwise they could see each other's disks.
    """

    terminal: Terminal
    log: Path
    scratch: Path
    disks: Disks
    stock_disks: Disks
    has_namespaces: bool

    @contextlib.contextmanager
    def job(
        self, function: Function, disks: Disks, last_rank: Mapping[str, Json] | None = None, **kwargs: Json
    ) -> Iterator[Job]:
        """Two nodes that call ``function(disks.path)`` on each rank. All their processes are gone in the end.

        Args:
            function: Of `tests.demo.rank`.
            disks: The run directory is on these.
            last_rank: Further arguments on the last rank.
            **kwargs: Further arguments on all ranks.
        """
        job = cluster_job(
            NODES,
            RANKS_PER_NODE,
            function,
            disks=[disks],
            isolation="namespaces" if self.has_namespaces else "none",
            env={"TMPDIR": str(self.scratch)},  # a launcher that is killed leaves its own files there
            per_rank=[*({} for _ in RANKS[1:]), last_rank or {}],
            output_dir=disks.path,
            **kwargs,
        )
        with job:
            try:
                yield job
            finally:
                for node in range(NODES):
                    self.note(f"node {node}", job.log_of(node))

    def observe(self, function: Function, disks: Disks, **kwargs: Json) -> list[Observation]:
        """What every rank of a job that runs to its end has seen."""
        with self.job(function, disks, **kwargs) as job:
            codes = job.wait(JOB_TIMEOUT_S)
            results = job.results()
        self.raise_errors(results)
        if any(codes):
            raise DemoError(f"the launchers ended with {codes}")
        return cast("list[Observation]", results)

    def raise_errors(self, results: Sequence[Json | RemoteError]) -> None:
        """Raises `DemoError` for the first rank that failed; all go into the log."""
        errors = [result for result in results if isinstance(result, RemoteError)]
        for error in errors:
            self.note(f"rank {error.rank}", str(error))
        if errors:
            raise DemoError(f"rank {errors[0].rank} failed with {errors[0].type}: {errors[0].message}")

    def wait_for_file(self, job: Job, run_directory: Path, pattern: str) -> Path:
        """Waits until a file that matches `pattern` in the staging area has something in it."""
        staging = RunLayout(run_directory).staging
        deadline = time.monotonic() + JOB_TIMEOUT_S
        while time.monotonic() < deadline:
            for path in staging.glob(pattern):
                if path.stat().st_size:
                    return path
            answers = [answer for answer in job.results() if isinstance(answer, RemoteError) and not answer.unanswered]
            self.raise_errors(answers)
            if _running_launchers() < NODES:
                raise DemoError(f"the job ended before it wrote {pattern}")
            time.sleep(POLL_INTERVAL_S)
        raise DemoError(f"no file {pattern} in {staging} within {JOB_TIMEOUT_S:.0f} s")

    def merge(self, checkpoint: Path, target: Path) -> tuple[int, str]:
        """Runs the merge script that lies in `checkpoint`, as its users do; returns exit code and output."""
        merged = subprocess.run(
            [sys.executable, MERGE_SCRIPT, ".", str(target), "--safe_serialization"],
            cwd=checkpoint,
            env={**os.environ, "DS_ACCELERATOR": "cpu"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=MERGE_TIMEOUT_S,
            check=False,
        )
        self.note(f"{MERGE_SCRIPT} in {checkpoint}", merged.stdout)
        return merged.returncode, merged.stdout

    def note(self, title: str, text: str) -> None:
        """Appends to the log."""
        with self.log.open("a") as log:
            log.write(f"===== {title} =====\n{text}\n")


def _running_launchers() -> int:
    """How many nodes have not ended: their launchers are this process's only children."""
    return sum(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process().children())
