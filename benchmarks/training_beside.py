"""Training with steps that work, and a save under way beside them. Runs on every rank."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from benchmarks import package, workload
from benchmarks.measure import Unavailable
from benchmarks.process import barrier, exchange
from tests.training import clean_process

WORK = 20  # products of matrices in a step
FIRST_STEPS = 5  # of which the times are not typical
ALONE_STEPS = 40
MAX_STEPS = 5000
MIN_DURING = 3
NEVER = 10**6


def steps_per_second(*, directory: str, mode: str, total_bytes: int) -> dict[str, float]:
    """``alone`` and ``during`` the save, both of one run of training.

    Raises:
        Unavailable: the save was over before there had been a few steps.
    """
    path = Path(directory)
    state = workload.state_of(total_bytes, sharded=True)
    state.change()
    watch = _Watch()
    state.model.work = WORK
    try:
        with clean_process(), workload.quiet():
            trainer = workload.build(
                package.safe_trainer_class(workload.BenchTrainer),
                state,
                workload.training_arguments(path, saves=MAX_STEPS, save_steps=NEVER),
                callbacks=[watch],
                checkpoint_options=package.options(mode, storage="local", local_copies="drop"),
            )
            watch.trainer = trainer
            trainer.train()
            package.settle(trainer)
    finally:
        state.model.work = 0
        barrier()
        shutil.rmtree(path, ignore_errors=True)
        barrier()
    if len(watch.during_s) < MIN_DURING:
        raise Unavailable(f"the save was over within {len(watch.during_s)} step(s); take a larger --size")
    return {name: len(taken) / sum(taken) for name, taken in (("alone", watch.alone_s), ("during", watch.during_s))}


def forget() -> None:
    """Give the memory back."""
    workload.forget()


class _Watch(TrainerCallback):  # type: ignore[misc]
    """Asks for one save after some steps, takes every step's time, and ends training when the save has ended.

    The ranks agree after every step on whether a save is under way: they must stop at the same one.
    """

    trainer: Any = None

    def __init__(self) -> None:
        self.alone_s: list[float] = []
        self.during_s: list[float] = []
        self._begun = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_saving = any(exchange(package.is_saving(self.trainer)))
        seconds = time.perf_counter() - self._begun
        if FIRST_STEPS < state.global_step <= ALONE_STEPS:
            self.alone_s.append(seconds)
        elif state.global_step > ALONE_STEPS and is_saving:
            self.during_s.append(seconds)
        control.should_save = state.global_step == ALONE_STEPS
        if state.global_step > ALONE_STEPS and not is_saving:
            control.should_training_stop = True
