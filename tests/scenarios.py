"""Trainer subclasses, callbacks and look-ins for training runs: what users' code does around a checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback

from safe_trainer import CheckpointError, CheckpointOptions, SafeCheckpointMixin, SafeTrainer
from safe_trainer.trainer import FAILED_SAVES
from tests import training
from tests.cluster import resolve

# --- trainers ---


def _write_around(trainer: Any, trial: Any, save: Callable[[], None]) -> None:
    """As TRL's trainers do: something into checkpoint-N before and after the stock save (case N1)."""
    checkpoint = Path(trainer._get_output_dir(trial=trial)) / f"checkpoint-{trainer.state.global_step}"
    if trainer.args.should_save:
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "before.json").write_text("{}")
    save()
    if trainer.args.should_save:
        (checkpoint / "after.json").write_text("{}")


class WritesAround(Trainer):
    """Somebody's trainer, with the signature of transformers up to 4.46."""

    def _save_checkpoint(self, model: Any, trial: Any, metrics: Any = None) -> None:
        _write_around(self, trial, lambda: super(WritesAround, self)._save_checkpoint(model, trial))


class MixinBeforeWritesAround(SafeCheckpointMixin, WritesAround):
    """``class T(SafeCheckpointMixin, SFTTrainer)``."""


class WritesAroundSafe(SafeTrainer):
    """A user's subclass on top of SafeTrainer."""

    def _save_checkpoint(self, model: Any, trial: Any = None, *args: Any, **kwargs: Any) -> None:
        _write_around(self, trial, lambda: super(WritesAroundSafe, self)._save_checkpoint(model, trial))


class _WritesAroundMixin:
    def _save_checkpoint(self, model: Any, trial: Any = None, *args: Any, **kwargs: Any) -> None:
        parent: Any = super()
        _write_around(self, trial, lambda: parent._save_checkpoint(model, trial))


class SafeUnderMixin(_WritesAroundMixin, SafeTrainer):
    """A mixin of the user's before ours."""


class SafeOverMixin(SafeCheckpointMixin, _WritesAroundMixin, Trainer):  # type: ignore[misc]
    """A mixin of the user's after ours."""


class ExpertShards(SafeTrainer):
    """Every rank writes a file of its own (case L9).

    Args:
        same_name: all ranks use one name, with different content.
    """

    def __init__(self, *args: Any, same_name: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._same_name = same_name

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        rank = self.args.process_index
        if not self._same_name or self.args.local_process_index == 0:
            name = "expert.bin" if self._same_name else f"expert_{rank}.bin"
            Path(output_dir, name).write_bytes(b"expert" * (rank + 1))


class WritesBesideCheckpoint(SafeTrainer):
    """Writes into the run directory, as it thinks, while it saves."""

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.args.should_save:
            Path(output_dir).with_name("notes.txt").write_text(str(self.state.global_step))


class EmptyAdapter(SafeTrainer):
    """Saves weights without tensors, as LoRA under ZeRO-3 did on transformers 4 (case N3)."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        save_file({}, os.path.join(output_dir or "", "adapter_model.safetensors"))


class FailsOnRank(SafeTrainer):
    """One rank cannot write its RNG state."""

    def __init__(self, *args: Any, failing_rank: int, failing_step: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._failing = (failing_rank, failing_step)

    def _save_rng_state(self, output_dir: str) -> None:
        if (self.args.process_index, self.state.global_step) == self._failing:
            raise OSError(28, "No space left on device", os.path.join(output_dir, "rng_state.pth"))
        super()._save_rng_state(output_dir)


class Scored(SafeTrainer):
    """An evaluation that gives each step the score it is told.

    Args:
        scores: by step, as a string; 0 where there is none.
    """

    def __init__(self, *args: Any, scores: dict[str, float], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scores = scores

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = {"eval_score": self._scores.get(str(self.state.global_step), 0.0)}
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class ScoredAndFails(Scored, FailsOnRank):
    """Both."""


class NotesPendingSaves(SafeTrainer):
    """Notes before each step which save was under way, and whether one had not been told of. See `noted_saves`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.noted: list[tuple[int, int | None, bool]] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        pending = self.pending_save
        is_busy = pending is not None and not pending.done()
        busy_with = pending.step if pending is not None and is_busy else None
        self.noted.append((self.state.global_step, busy_with, pending is not None))
        return super().training_step(*args, **kwargs)


class WritesFrozenWeights(NotesPendingSaves):
    """Two ranks on different nodes write a file that never changes."""

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        rank = self.args.process_index
        if rank in (0, 3):
            Path(output_dir, f"frozen-{rank}.bin").write_bytes(bytes([rank]) * (2 << 20))


class StopsAfterTwoSteps(SafeTrainer):
    """Training fails on all ranks."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 2:
            raise ArithmeticError("the loss is not a number")
        return super().training_step(*args, **kwargs)


# --- callbacks ---


class ListsCheckpointOnSave(TrainerCallback):
    """As W&B's and MLflow's callbacks: reads checkpoint-N in on_save (case F7). See `listed_on_save`."""

    def __init__(self) -> None:
        self.seen: dict[int, list[str]] = {}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        self.seen[state.global_step] = sorted(files)


class SavesTwice(TrainerCallback):
    """Asks for a save of the last step of an epoch twice: as a step's and as an epoch's."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.epoch is not None and float(state.epoch).is_integer()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = True


class SignalsItself(TrainerCallback):
    """A scheduler that ends the job: signals to this process at the beginning of some steps.

    Args:
        plan: by rank, the steps and the names of the signals, e.g. ``{"3": [[2, "SIGTERM"]]}``.
    """

    def __init__(self, plan: dict[str, list[list[Any]]]) -> None:
        self._own = plan.get(os.environ.get("RANK", "0"), [])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for step, name in self._own:
            if state.global_step + 1 == step:
                os.kill(os.getpid(), signal.Signals[name])


# --- look-ins --------------------------------------------------------------------------------------------------------


def listed_on_save(trainer: Trainer) -> dict[str, list[str]]:
    callback = next(
        callback for callback in trainer.callback_handler.callbacks if isinstance(callback, ListsCheckpointOnSave)
    )
    return {str(step): files for step, files in callback.seen.items()}


def noted_saves(trainer: NotesPendingSaves) -> dict[str, Any]:
    """What was under way, what callbacks saw, and whether anything still is."""
    return {
        "noted": trainer.noted,
        "seen": listed_on_save(trainer),
        "is_pending": trainer.pending_save is not None,
        "failed": trainer.failed_saves,
        "last": last_save(trainer),
    }


def last_save(trainer: SafeTrainer) -> dict[str, Any]:
    report = trainer.last_save
    if report is None:
        return {}
    return {
        "step": report.step,
        "path": str(report.path),
        "bytes": report.bytes,
        "files": report.files,
        "gathered_bytes": report.gathered_bytes,
        "phases": list(report.phases_s),
        "stall_s": report.stall_s,
        "total_s": report.total_s,
        "reused_bytes": report.reused_bytes,
        "sum_s": sum(report.phases_s.values()),
        "warnings": list(report.warnings),
    }


class NotesExpectedBytes(TrainerCallback):
    """What a trainer expects its first save to need, before it. See `expected_and_saved`."""

    trainer: SafeTrainer

    def __init__(self) -> None:
        self.own: int | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.own is None:
            self.own = self.trainer._expected_bytes().own


class ExpectsBytes(SafeTrainer):
    """Introduces itself to `NotesExpectedBytes`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, NotesExpectedBytes):
                callback.trainer = self


def expected_and_saved(trainer: SafeTrainer) -> tuple[int, int]:
    """Bytes that this rank expected to write before the first save, and those that it wrote in the last."""
    noted = next(
        callback.own for callback in trainer.callback_handler.callbacks if isinstance(callback, NotesExpectedBytes)
    )
    if noted is None or trainer.last_save is None:
        raise AssertionError("nothing was saved")
    return noted, trainer.last_save.own_bytes


def handler_of_sigterm(trainer: Trainer) -> str:
    handler = signal.getsignal(signal.SIGTERM)
    return handler.name if isinstance(handler, signal.Handlers) else repr(handler)


def failures(trainer: SafeTrainer) -> dict[str, Any]:
    """What ``on_error="continue"`` has left."""
    logged = [entry[FAILED_SAVES] for entry in trainer.state.log_history if FAILED_SAVES in entry]
    return {"count": trainer.failed_saves, "logged": logged, "seen": listed_on_save(trainer)}


# --- runs that end in an unusual way ---


def train_until_preempted(**options: Any) -> dict[str, Any]:
    """`run_training` that ends with `SystemExit`: its code, and whether the handler of SIGTERM is the former one."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        training.run_training(**options)
    except SystemExit as stop:
        return {"exit": stop.code, "handler_is_back": signal.getsignal(signal.SIGTERM) == before}
    return {"exit": None}


def train_and_exit(**options: Any) -> None:
    """As a user's script: what `run_training` raises ends the process, with its exit code."""
    try:
        training.run_training(**options)
    except SystemExit as stop:
        os._exit(int(stop.code or 0))  # the worker would make an answer of it


def train_and_time(**options: Any) -> dict[str, Any]:
    """`run_training` that fails in a save: the error, and how long it took from the failure of the first rank."""
    try:
        training.run_training(**options)
    except CheckpointError as error:
        return {
            "message": str(error),
            "kind": type(error).__name__,
            "raised_at": time.time(),
            "failures": [failure.rank for failure in error.failures],
        }
    return {"message": None}


def train_into_an_error(**options: Any) -> str | None:
    """`run_training` that fails: the error's kind and text."""
    try:
        training.run_training(**options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# --- factories ---


def with_options(
    *args: Any, options: dict[str, Any] | None = None, trainer: str = "safe_trainer:SafeTrainer", **kwargs: Any
) -> SafeTrainer:
    """A trainer with `CheckpointOptions` made of a plain dictionary, which a scenario can be given."""
    made: SafeTrainer = resolve(trainer)(*args, checkpoint_options=CheckpointOptions(**(options or {})), **kwargs)
    return made


def search_hyperparameters(*, output_dir: str) -> None:
    """Two optuna trials of four steps each, on every rank."""
    with training.clean_process():
        arguments = training._training_arguments("ddp", output_dir, 4, 2, 0, {})
        trainer = SafeTrainer(
            model_init=lambda trial: training._model("ddp", 0),
            args=arguments,
            train_dataset=training.ByteDataset(training.TRAIN_EXAMPLES, 0),
            eval_dataset=training.ByteDataset(training.EVAL_EXAMPLES, 1),
        )
        trainer.hyperparameter_search(
            hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-2)},
            n_trials=2,
            backend="optuna",
        )


# --- other tools on a committed checkpoint, run on rank 0 ---


def merge_with_zero_to_fp32(*, checkpoint: str) -> str | None:
    """Runs the script that DeepSpeed put beside its shards, as its users do; a digest of the merged weights."""
    if int(os.environ["RANK"]) != 0:
        return None
    with tempfile.TemporaryDirectory() as out:
        script = os.path.join(checkpoint, "zero_to_fp32.py")
        subprocess.run([sys.executable, script, checkpoint, out], check=True, capture_output=True, timeout=180)
        model = training._model("zero2", 1)
        weights = {
            name: tensor
            for file in Path(out).glob("*.bin")
            for name, tensor in torch.load(file, weights_only=True).items()
        }
        for file in Path(out).glob("*.safetensors"):
            weights.update(load_file(file))
        result = model.load_state_dict(weights, strict=False)
        if set(result.missing_keys) - {"lm_head.weight"} or result.unexpected_keys:
            raise AssertionError(str(result))
        return training.parameters_digest(model)


def adapter_digest(*, checkpoint: str) -> str | None:
    """The whole model's digest with the adapter as PEFT loads it."""
    if int(os.environ["RANK"]) != 0:
        return None
    from peft import PeftModel

    base = training._model("zero2-lora", 0).get_base_model()  # type: ignore[operator]
    fresh = training._model("zero2", 0)
    fresh.load_state_dict(
        {name.replace(".base_layer", ""): tensor for name, tensor in base.state_dict().items() if "lora_" not in name}
    )
    return training.parameters_digest(PeftModel.from_pretrained(fresh, checkpoint))
