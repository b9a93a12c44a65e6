"""What the suite of resuming does on every rank."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from benchmarks import moving, package, workload
from benchmarks.measure import flush_disks
from benchmarks.process import barrier, rank
from tests.training import clean_process

BLOCK = bytes(range(256)) * 4096


def make_checkpoint(*, directory: str, total_bytes: int) -> None:
    """A checkpoint of ours of the first step, on one disk, and left there."""
    state = workload.state_of(total_bytes, sharded=False)
    workload.run_trainer("foreground", state, Path(directory), is_split=False)
    barrier()


def seconds_to_first_step(*, directory: str, total_bytes: int, verify: str | None) -> float:
    """Seconds from the call of ``train`` to the beginning of the first step after the checkpoint.

    Args:
        directory: the run directory, with a checkpoint.
        total_bytes: its size.
        verify: how ours checks it; None for the stock Trainer.
    """
    state = workload.state_of(total_bytes, sharded=False)
    first = _FirstStep()
    with clean_process(), workload.quiet():
        more: dict[str, Any] = {}
        trainer_class: type[Any] = workload.BenchTrainer
        if verify is not None:
            trainer_class = package.safe_trainer_class(workload.BenchTrainer)
            more["checkpoint_options"] = package.options(verify=verify)
        arguments = workload.training_arguments(Path(directory), saves=2, save_strategy="no")
        trainer = workload.build(trainer_class, state, arguments, callbacks=[first], **more)
        barrier()
        started = time.perf_counter()
        trainer.train(resume_from_checkpoint=True)
    barrier()
    return first.at - started


class _FirstStep(TrainerCallback):  # type: ignore[misc]
    at = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at = self.at or time.perf_counter()


def make_plain_checkpoint(*, directory: str, total_bytes: int) -> None:
    """A committed checkpoint of one file on node 0's disk; the other disks are empty."""

    def write(staged: Path) -> None:
        if rank() == 0:
            with open(staged / moving.FILE_NAME.format(0), "wb") as stream:
                left = total_bytes
                while left:
                    left -= stream.write(BLOCK[: min(left, len(BLOCK))])

    with package.open_channel() as channel:
        run = package.start_run(channel, Path(directory), storage="local", local_copies="drop")
        package.save_files(run, 1, write)


def delivery_seconds(*, directory: str, verify: str) -> float:
    """Seconds to check the checkpoint on node 0 and to bring it to every other disk, all of which are empty."""
    path = Path(directory)
    with package.open_channel() as channel:
        if not (path / "checkpoint-1").exists():
            shutil.rmtree(path, ignore_errors=True)
        barrier()
        run = package.start_run(channel, path, storage="local", verify=verify)
        if rank() == 0:
            flush_disks()
        barrier()
        started = time.perf_counter()
        package.deliver(run, path / "checkpoint-1")
        seconds = time.perf_counter() - started
        barrier()
        if not (path / "checkpoint-1").exists():
            shutil.rmtree(path, ignore_errors=True)
    return seconds
