"""SafeTrainer: the only place that knows transformers' Trainer.

The mixin goes before a Trainer class in the bases. It lets that class's ``_save_checkpoint`` run unchanged, with
``_get_output_dir`` pointing into the staging directory meanwhile, and does the rest around it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import logging
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from safe_trainer.agreement import Agreement
from safe_trainer.background import PendingSave
from safe_trainer.channel import Channel
from safe_trainer.errors import (
    ENDS_THE_RUN,
    CheckpointError,
    IncompleteCheckpointError,
    OptionError,
    ProcessGroupLostError,
)
from safe_trainer.layout import MANIFEST_NAME, TRAINER_STATE_NAME, checkpoint_name, checkpoint_step, list_checkpoints
from safe_trainer.options import CheckpointOptions
from safe_trainer.preemption import Preemption
from safe_trainer.resume import (
    Resumption,
    check_world_size,
    clear_deliveries,
    committed_step,
    resume_latest,
    resume_path,
    warn_missing_rng,
)
from safe_trainer.rotation import Rotation
from safe_trainer.run import Run, open_run
from safe_trainer.save import (
    ExpectedBytes,
    SaveReport,
    StagedCheckpoint,
    commit_checkpoint,
    keep_only,
    stage_checkpoint,
)

if TYPE_CHECKING:
    from transformers import Trainer as _TrainerBase
else:
    _TrainerBase = object

logger = logging.getLogger(__name__)

AUTO = "auto"
FAILED_SAVES = "checkpoint/failed_saves"
_saves = itertools.count()
_PACKAGES = ("safe_trainer", "transformers", "accelerate", "torch", "deepspeed", "peft", "trl")


@dataclass
class _Unsettled:
    """A save that training has not heard the end of.

    Attributes:
        save: the save.
        over: on which step all ranks hear of its end, unless something makes them wait for it before.
        state: the trainer's state as it was saved.
        best_before: ``state.best_model_checkpoint`` before the save.
        trial: of a hyperparameter search.
        pushes: checkpoints to upload when it has been committed.
    """

    save: PendingSave
    over: Agreement
    state: TrainerState
    best_before: str | None
    trial: Any
    pushes: list[str]


class SafeCheckpointMixin(_TrainerBase):
    """Makes a Trainer class save complete checkpoints, in one place, atomically, and resume from them on every node.

    Put it first: ``class MyTrainer(SafeCheckpointMixin, SFTTrainer)``. It works below a subclass that overrides
    ``_save_checkpoint`` as well (``class MyTrainer(SafeTrainer)``); what such a subclass writes into ``checkpoint-N``
    after ``super()._save_checkpoint(...)`` comes after the commit and is not in the manifest.

    Args:
        *args, **kwargs: as the Trainer class takes them.
        checkpoint_options: how to save and resume; without it, the SAFE_TRAINER_* variables and the defaults.

    Attributes:
        checkpoint_options: the options in force.
        last_save: what this trainer's last successful save did; None before the first.
        failed_saves: how many have failed, with ``on_error="continue"``.
    """

    def __init__(self, *args: Any, checkpoint_options: CheckpointOptions | None = None, **kwargs: Any) -> None:
        self.checkpoint_options = CheckpointOptions() if checkpoint_options is None else checkpoint_options
        self.last_save: SaveReport | None = None
        self.failed_saves = 0
        self._safe_channel: Channel | None = None
        # For what goes on beside training: collectives of two threads must not meet in one group.
        self._safe_background_channel: Channel | None = None
        self._safe_unsettled: _Unsettled | None = None
        self._safe_run: Run | None = None
        self._safe_lineage = Rotation()
        self._safe_saved_steps: set[int] = set()
        # Where _get_output_dir points; None except while the Trainer class writes a checkpoint.
        self._safe_staged_run_directory: Path | None = None
        self._safe_deferred_pushes: list[str] = []
        self._safe_best_in_checkpoint: str | None = None
        # The best metric and its step as of the last committed checkpoint, or of the start of training.
        self._safe_best_so_far: tuple[float | None, int | None] = (None, None)
        self._safe_preemption: Preemption | None = None
        self._safe_is_preempted = False
        super().__init__(*args, **kwargs)
        self.add_callback(_RunCallback(self))
        _set_up_logging(self.args)

    # --- training ---

    def train(  # type: ignore[override]
        self, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As ``Trainer.train``.

        Args:
            resume_from_checkpoint: True for the newest complete checkpoint in the run directory (an error where there
                is none), ``"auto"`` for the same or a fresh start, or the path of a checkpoint.
            *args, **kwargs: as ``Trainer.train`` takes them.

        Raises:
            SystemExit: on every rank, with 128 plus the signal's number: a signal of ``preemption_signals`` came, all
                ranks have saved at one step, and training has ended there.
            ValueError: True was given and there is no complete checkpoint.
            CheckpointError: on every rank alike, before training starts; see :mod:`safe_trainer.resume`.
        """
        wanted = _normalized(resume_from_checkpoint)
        signals = self._take_over_preemption()
        if wanted is None and not signals and not self._saves_checkpoints():
            self._safe_run = None
            return super().train(None, *args, **kwargs)
        self._check_engine()
        trial = kwargs.get("trial", args[0] if args else None)
        self._safe_run = self._open_run(trial)
        path = self._find_checkpoint(self._safe_run, wanted)
        self._safe_is_preempted = False
        with Preemption(self._safe_run.channel, signals) as self._safe_preemption, self._pending_save_is_waited_for():
            output = super().train(path, *args, **kwargs)
        if self._safe_is_preempted:
            code = self._safe_preemption.exit_code
            logger.warning(
                "Preempted (%s): stopped at step %d, exiting with code %d.",
                self._safe_preemption.reason,
                self.state.global_step,
                code,
            )
            raise SystemExit(code)
        return output

    def _take_over_preemption(self) -> tuple[signal.Signals, ...]:
        """The signals at which to save and stop. transformers' just-in-time checkpoint, which saves on each rank for
        itself at whatever step that rank sees the signal, gives way to ours."""
        signals = self.checkpoint_options.signals()
        if getattr(self.args, "enable_jit_checkpoint", False):
            for callback in list(self.callback_handler.callbacks):
                manager = getattr(callback, "jit_manager", None)
                if manager is not None:
                    signal.signal(signal.SIGTERM, manager._original_sigterm_handler or signal.SIG_DFL)
                    self.remove_callback(callback)
                    logger.info("enable_jit_checkpoint: SafeTrainer saves on SIGTERM, at one step on all ranks.")
            return signals or (signal.SIGTERM,)
        return signals if self._saves_checkpoints() else ()

    def _check_engine(self) -> None:
        """Refuse, before training, what cannot give a complete checkpoint.

        Raises:
            OptionError: DeepSpeed is configured to go on writing after a save has returned.
        """
        if not self.is_deepspeed_enabled:
            return
        config = self.accelerator.state.deepspeed_plugin.hf_ds_config.config
        writer = config.get("checkpoint", {}).get("writer") or {}
        asynchronous = {
            "checkpoint.writer.decoupled": writer.get("decoupled", False),
            "datastates_ckpt": bool(config.get("datastates_ckpt")),
            "nebula.enabled": config.get("nebula", {}).get("enabled", False),
        }
        for name, is_set in asynchronous.items():
            if is_set:
                raise OptionError(
                    f"the DeepSpeed config sets {name}: its files would still be written after the save has returned, "
                    "so no checkpoint could be known to be complete. Remove it."
                )

    def _saves_checkpoints(self) -> bool:
        strategy = self.args.save_strategy
        return bool(getattr(strategy, "value", strategy) != "no")

    def _open_run(self, trial: Any) -> Run:
        """Start a run in the current run directory; collective.

        Rank 0 says which directory below ``output_dir`` it is: in a hyperparameter search, other ranks may not know
        the trial.
        """
        if self._safe_channel is None:
            self._safe_channel = self._open_channel()
            if self.checkpoint_options.background:
                self._safe_background_channel = self._open_channel()
        self._warn_where_ranks_are_mistaken(self._safe_channel)
        own = os.path.relpath(super()._get_output_dir(trial), self.args.output_dir)
        relative = self._safe_channel.together("agree on the run directory", lambda: own)[0]
        return open_run(
            Path(os.path.abspath(os.path.join(cast(str, self.args.output_dir), relative))),
            channel=self._safe_channel,
            options=self.checkpoint_options,
            saved_by=_versions(),
        )

    def _open_channel(self) -> Channel:
        return Channel.open(
            timeout_s=self.checkpoint_options.timeout_s,
            waits_for_slow=self.checkpoint_options.on_error == "continue",
        )

    def _warn_where_ranks_are_mistaken(self, channel: Channel) -> None:
        """On machines without an accelerator, accelerate can take each DeepSpeed rank for the only one (seen with
        accelerate 1.15): all of them then write the files of rank 0."""
        if self.args.process_index != channel.rank or self.args.world_size != channel.world_size:
            logger.warning(
                "transformers takes this process for rank %d of %d, but it is rank %d of %d. Ranks will write the same "
                "files and train on the same data. On CPU, set use_cpu=True and ddp_backend='gloo'.",
                self.args.process_index,
                self.args.world_size,
                channel.rank,
                channel.world_size,
            )

    def _find_checkpoint(self, run: Run, wanted: str | bool | None) -> str | None:
        """The path to hand to the Trainer class on this rank; what rank 0 wants counts."""
        at_start = run.channel.together(
            "agree on what to resume", lambda: (wanted, [step for step, _ in list_checkpoints(run.root)])
        )
        agreed, steps = at_start[0]
        self._safe_best_in_checkpoint = None
        self._safe_lineage = Rotation(steps_at_start=frozenset(steps))
        self._safe_saved_steps.clear()
        if agreed is None:
            return None
        if agreed is True or agreed == AUTO:
            resumption = resume_latest(run)
            if resumption is None and agreed is True:
                raise ValueError(f"No valid checkpoint found in output directory ({self.args.output_dir})")
            if resumption is None:
                return None
        else:
            path = wanted if isinstance(wanted, str) and wanted != AUTO else cast(str, agreed)
            if run.channel.together("look at the path", lambda: _is_mere_model(Path(path)))[0]:
                return path
            resumption = resume_path(run, path)
        self._accept(run, resumption)
        return str(resumption.path)

    def _accept(self, run: Run, resumption: Resumption) -> None:
        if self.is_deepspeed_enabled and not self._deepspeed_can_reshape():
            check_world_size(resumption, world_size=run.topology.world_size)
        if run.is_home_leader:
            warn_missing_rng(resumption, world_size=run.topology.world_size)
        state_file = resumption.path / TRAINER_STATE_NAME

        def read() -> tuple[str | None, int]:
            state = json.loads(state_file.read_text(encoding="utf-8"))
            best = state.get("best_model_checkpoint")
            return best if isinstance(best, str) else None, int(state["global_step"])

        # Rank 0's copy counts for all.
        self._safe_best_in_checkpoint, resumed_step = run.channel.together("read the trainer's state", read)[0]
        self._safe_lineage = Rotation(resumed_step=resumed_step, steps_at_start=self._safe_lineage.steps_at_start)

    def _deepspeed_can_reshape(self) -> bool:
        config = self.accelerator.state.deepspeed_plugin.hf_ds_config.config
        universal = config.get("checkpoint", {}).get("load_universal", False)
        return bool(universal or config.get("zero_optimization", {}).get("elastic_checkpoint", False))

    def _check_resumed_state(self) -> None:
        """Every rank is at the same step, and the best checkpoint is one that exists here; collective."""
        run = self._safe_run
        if run is None:
            return
        self._safe_best_so_far = _best_metric(self.state)
        steps = run.channel.together("compare the ranks' steps", lambda: self.state.global_step)
        if len(set(steps)) > 1:
            listing = ", ".join(f"rank {rank}: {step}" for rank, step in enumerate(steps))
            raise CheckpointError(f"the ranks resumed from different steps ({listing}); training would diverge.")
        if self._safe_lineage.resumed_step == 0:
            return
        best = self._safe_best_in_checkpoint
        step = committed_step(run, best)
        self.state.best_model_checkpoint = None if step is None else self._final_path(checkpoint_name(step), None)
        if step is None and best is not None and run.is_home_leader:
            logger.warning(
                "The best checkpoint so far, %s, is not (or not complete) in %s. The run goes on without a best one.",
                best,
                run.root,
            )

    # --- saving ---

    @property
    def pending_save(self) -> PendingSave | None:
        """The save that is being finished beside training, with ``done()`` and ``wait()``; None where there is none."""
        return None if self._safe_unsettled is None else self._safe_unsettled.save

    def _save_checkpoint(self, model: Any, trial: Any = None, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self._settle_pending_save()
        if self._safe_run is None:
            self._safe_run = self._open_run(trial)
        run = self._safe_run
        best_before = self.state.best_model_checkpoint
        self._safe_saved_steps.add(self.state.global_step)

        def write(staged: Path) -> None:
            self._safe_staged_run_directory = staged.parent
            try:
                with self._one_writer_per_disk(run):
                    super(SafeCheckpointMixin, self)._save_checkpoint(model, trial, *args, **kwargs)
                    self._name_best_by_final_path(staged, trial)
            finally:
                self._safe_staged_run_directory = None

        self._let_on_save_pass()
        try:
            staged = stage_checkpoint(
                run,
                step=self.state.global_step,
                write=write,
                rotation=self._rotation,
                expected=self._expected_bytes,
            )
            pushes, self._safe_deferred_pushes = self._safe_deferred_pushes, []
            if self.checkpoint_options.background:
                self._commit_in_background(run, staged, best_before, trial, pushes)
                return
            report = commit_checkpoint(run, staged, show_progress=not self.args.disable_tqdm, is_stall=True)
        except BaseException as error:
            self._after_failed_save(error, self.state.global_step, best_before)
            self._hold_on_save_back()
            return
        self._after_save(run, report, self.state, trial, pushes)

    def _commit_in_background(
        self, run: Run, staged: StagedCheckpoint, best_before: str | None, trial: Any, pushes: list[str]
    ) -> None:
        """Let training go on. Callbacks get ``on_save`` when this save is settled."""
        channel = self._safe_background_channel or run.channel
        beside = dataclasses.replace(run, channel=channel)
        over = Agreement(run.channel, f"saved/{next(_saves)}")
        state = copy.copy(self.state)
        state.log_history = list(state.log_history)
        save = PendingSave(
            staged.step,
            lambda: commit_checkpoint(beside, staged),
            on_end=lambda: over.announce("over"),
        )
        self._safe_unsettled = _Unsettled(save, over, state, best_before, trial, pushes)
        self._hold_on_save_back()

    def _settle_pending_save(self) -> None:
        """Wait for the save under way, if there is one, and do what comes after a save; every rank calls it alike."""
        pending = self._safe_unsettled
        if pending is None:
            return
        error = pending.save.error()
        pending.over.close()
        self._safe_unsettled = None
        if error is not None:
            self._after_failed_save(error, pending.save.step, pending.best_before)
            return
        self._after_save(cast(Run, self._safe_run), pending.save.wait(), pending.state, pending.trial, pending.pushes)
        control, handler = self.control, self.callback_handler
        should_save = control.should_save  # for the present step, decided before; on_save of the handler takes it back
        type(handler).on_save(handler, self.args, pending.state, control)
        control.should_save = should_save or control.should_save

    def _settle_where_agreed(self) -> None:
        pending = self._safe_unsettled
        if pending is not None and pending.over.is_reached(self.state.global_step):
            self._settle_pending_save()

    @contextlib.contextmanager
    def _pending_save_is_waited_for(self) -> Iterator[None]:
        """An error of training cuts no save short; where the save knows better what has happened, it says so."""
        try:
            yield
        except BaseException as error:
            pending, self._safe_unsettled = self._safe_unsettled, None
            if pending is not None:
                failure = pending.save.error()
                pending.over.close()
                if isinstance(failure, ProcessGroupLostError):
                    raise failure from error
                if failure is not None:
                    logger.error("The checkpoint of step %d was NOT saved: %s", pending.save.step, failure)
                else:
                    self.last_save = pending.save.wait()
            raise

    def _after_save(self, run: Run, report: SaveReport, state: TrainerState, trial: Any, pushes: list[str]) -> None:
        self.last_save = report
        self._safe_best_so_far = _best_metric(state)
        # Every rank has left the point at which it read what was delivered for resuming.
        clear_deliveries(run)
        for folder in pushes:
            super()._push_from_checkpoint(self._final_path(Path(folder).name, trial))

    def _after_failed_save(self, error: BaseException, step: int, best_before: str | None) -> None:
        """Go on without that save where the options say so, else raise ``error``. Only a committed checkpoint is the
        best one."""
        self.state.best_model_checkpoint = best_before
        self._safe_deferred_pushes.clear()
        if getattr(self.state, "best_global_step", None) in (None, step):
            self.state.best_metric, best_step = self._safe_best_so_far
            if hasattr(self.state, "best_global_step"):  # transformers 4.50 and newer
                self.state.best_global_step = best_step
        may_go_on = isinstance(error, CheckpointError) and not isinstance(error, ENDS_THE_RUN)
        if not may_go_on or self.checkpoint_options.on_error == "raise":
            raise error
        self.failed_saves += 1
        if self.args.process_index == 0:
            logger.error(
                "The checkpoint of step %d was NOT saved (failure %d; on_error='continue'): %s. Training goes on; the "
                "next save tries again. What was committed before is unchanged.",
                step,
                self.failed_saves,
                error,
            )
        self.log({FAILED_SAVES: float(self.failed_saves)})

    def _hold_on_save_back(self) -> None:
        """The Trainer class calls ``on_save`` although nothing was saved; callbacks must not look for a checkpoint."""

        def on_save(args: TrainingArguments, state: TrainerState, control: TrainerControl) -> TrainerControl:
            self._let_on_save_pass()
            control.should_save = False
            return control

        self.callback_handler.on_save = on_save

    def _let_on_save_pass(self) -> None:
        with contextlib.suppress(AttributeError):
            del self.callback_handler.on_save  # the instance's; the class has its own

    def _expected_bytes(self) -> ExpectedBytes:
        """What the last save needed, or at least what the weights and the optimizer's state take."""
        if self.last_save is not None:
            return ExpectedBytes(own=self.last_save.own_bytes, total=self.last_save.bytes)
        is_sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        if not is_sharded and self.args.process_index != 0:
            return ExpectedBytes()
        # Each DeepSpeed rank has a copy of the weights (or, in ZeRO-3, none that can be seen); only one writes them.
        writes_weights = self.args.process_index == 0 or not self.is_deepspeed_enabled
        weights = (
            [parameter for parameter in self.model.parameters() if parameter.requires_grad] if writes_weights else []
        )
        engine: Any = getattr(self, "deepspeed", None)
        optimizer: Any = self.optimizer if engine is None else engine.optimizer
        states = [] if self.args.save_only_model else (getattr(optimizer, "state", None) or {}).values()
        tensors = [value for state in states if isinstance(state, dict) for value in state.values()]
        return ExpectedBytes(own=_local_bytes([*weights, *tensors]))

    def _get_output_dir(self, trial: Any) -> str:
        if self._safe_staged_run_directory is not None:
            return str(self._safe_staged_run_directory)
        return super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Uploading waits for the commit: it runs in a thread, and reads the directory by its final name."""
        if self._safe_staged_run_directory is not None:
            self._safe_deferred_pushes.append(checkpoint_folder)
        else:
            super()._push_from_checkpoint(checkpoint_folder)

    def _final_path(self, name: str, trial: Any) -> str:
        """The path of a checkpoint as the stock Trainer would write it, relative where ``output_dir`` is."""
        return os.path.join(super()._get_output_dir(trial), name)

    def _name_best_by_final_path(self, staged: Path, trial: Any) -> None:
        """The stock code has recorded the staging path as the best checkpoint's; correct it, on disk too."""
        best = self.state.best_model_checkpoint
        if best is None or Path(best).parent != staged.parent:
            return
        self.state.best_model_checkpoint = self._final_path(Path(best).name, trial)
        state_file = staged / TRAINER_STATE_NAME
        if self.args.should_save and state_file.exists():
            self.state.save_to_json(str(state_file))

    @contextlib.contextmanager
    def _one_writer_per_disk(self, run: Run) -> Iterator[None]:
        """With ``save_on_each_node``, nodes that share a disk would write the same files at once, and damage them (seen
        with DeepSpeed's model states). So one rank of each disk writes what is no rank's own."""
        if run.topology.is_leader:
            yield
            return
        flag = self.args.save_on_each_node
        self.args.save_on_each_node = False
        engine: Any = getattr(self, "deepspeed", None)
        # In ZeRO-3 model states are each rank's own, too; below, one rank of a node writes them for all.
        replicates = engine is not None and engine.use_node_local_storage() and engine.zero_optimization_stage() < 3
        if replicates:
            writes_model_states, engine.save_non_zero_checkpoint = engine.save_non_zero_checkpoint, False
        try:
            yield
        finally:
            self.args.save_on_each_node = flag
            if replicates:
                engine.save_non_zero_checkpoint = writes_model_states

    def _rotation(self) -> Rotation:
        return Rotation(
            limit=self.args.save_total_limit,
            best=self.state.best_model_checkpoint,
            resumed_step=self._safe_lineage.resumed_step,
            # A step that this run has saved again is one of its own.
            steps_at_start=self._safe_lineage.steps_at_start - self._safe_saved_steps,
        )

    # --- the end of training ---

    def _load_best_model(self) -> None:
        """As stock, with the best checkpoint on every node first: all ranks load it, or none."""
        self._settle_pending_save()
        if self._safe_is_preempted:
            return
        run = self._safe_run
        best = self.state.best_model_checkpoint
        if run is None or best is None:
            super()._load_best_model()
            return
        try:
            resumption = resume_path(run, best)
        except IncompleteCheckpointError as error:
            logger.error("The best model is not loaded, on any rank; the last one stays: %s", error)
            return
        self.state.best_model_checkpoint = str(resumption.path)
        try:
            run.channel.together("load the best model", super()._load_best_model)
        finally:
            self.state.best_model_checkpoint = best
        clear_deliveries(run)

    def _remove_all_but_best(self) -> None:
        """What stock does when training ends with ``save_total_limit=1``, in one step each and on every disk."""
        self._settle_pending_save()
        if self._safe_is_preempted:
            # Training has not ended: what was just saved must stay. Stock deletes nothing where there is no best one.
            self.state.best_model_checkpoint = None
        elif self._safe_run is not None and self.args.save_total_limit == 1:
            keep_only(self._safe_run, lambda: self.state.best_model_checkpoint)

    def _end_run(self) -> None:
        self._settle_pending_save()
        if self._safe_run is not None and not self._safe_run.channel.is_lost:
            run = self._safe_run
            run.channel.together("end", lambda: clear_deliveries(run))
            run.channel.rest()
            if self._safe_background_channel is not None:
                self._safe_background_channel.rest()

    def _stop_where_agreed(self, control: TrainerControl) -> None:
        """After a signal, save and stop at the step on which all ranks agree."""
        preemption = self._safe_preemption
        if preemption is None or not preemption.stops_at(self.state.global_step):
            return
        if not self._safe_is_preempted and self.args.process_index == 0:
            logger.warning("%s: saving at step %d and stopping.", preemption.reason, self.state.global_step)
        self._safe_is_preempted = True
        control.should_save = True
        control.should_evaluate = False  # there is little time, and an evaluation may take the save back
        control.should_training_stop = True


class _RunCallback(TrainerCallback):
    """Calls the mixin at the points of training that no overridable method marks in every version."""

    def __init__(self, trainer: SafeCheckpointMixin) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer._check_resumed_state()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._trainer._settle_where_agreed()
        self._trainer._stop_where_agreed(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._trainer._safe_is_preempted:
            control.should_save = control.should_evaluate = False  # done at the end of the step

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # The summary at the end of training is the last thing before the stock code deletes checkpoints itself.
        if "train_runtime" in (kwargs.get("logs") or {}):
            self._trainer._remove_all_but_best()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer._end_run()


class SafeTrainer(SafeCheckpointMixin, Trainer):
    """transformers' ``Trainer`` with :class:`SafeCheckpointMixin`: the class to swap in."""


class SafeSeq2SeqTrainer(SafeCheckpointMixin, Seq2SeqTrainer):
    """transformers' ``Seq2SeqTrainer`` with :class:`SafeCheckpointMixin`."""


def make_safe(trainer_class: type[Trainer]) -> type[Trainer]:
    """The same trainer class with safe checkpoints: ``make_safe(SFTTrainer)(model=..., args=...)``.

    Returns:
        A subclass of both :class:`SafeCheckpointMixin` and ``trainer_class``; ``trainer_class`` itself where it is
        safe already.

    Raises:
        TypeError: ``trainer_class`` is not a subclass of ``Trainer``.
    """
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise TypeError(f"make_safe takes a subclass of transformers.Trainer, not {trainer_class!r}")
    if issubclass(trainer_class, SafeCheckpointMixin):
        return trainer_class
    attributes = {"__module__": trainer_class.__module__, "__doc__": trainer_class.__doc__}
    return cast(
        "type[Trainer]", type(f"Safe{trainer_class.__name__}", (SafeCheckpointMixin, trainer_class), attributes)
    )


def _set_up_logging(args: TrainingArguments) -> None:
    """Show one line per save, unless the user has set the package's logger up or asked for less (``log_level``).

    As in transformers, a handler is only added where the program has none.
    """
    package = logging.getLogger("safe_trainer")
    if package.level == logging.NOTSET:
        package.setLevel(logging.INFO if args.log_level == "passive" else args.get_process_log_level())
    if not package.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(levelname)s|safe_trainer] %(message)s"))
        package.addHandler(handler)
        package.propagate = False


def _best_metric(state: TrainerState) -> tuple[float | None, int | None]:
    return state.best_metric, getattr(state, "best_global_step", None)


def _local_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of this rank's part of ``tensors``, each counted once; what is no tensor counts nothing."""
    own = {
        id(tensor): getattr(tensor, "_local_tensor", tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)
    }
    return sum(tensor.numel() * tensor.element_size() for tensor in own.values())


def _normalized(resume_from_checkpoint: str | os.PathLike[str] | bool | None) -> str | bool | None:
    if resume_from_checkpoint is None or resume_from_checkpoint is False:
        return None
    return True if resume_from_checkpoint is True else os.fspath(resume_from_checkpoint)


def _is_mere_model(path: Path) -> bool:
    """A directory that is no checkpoint of a Trainer, and is not named as one: stock's business."""
    has_state = any((path / name).exists() for name in (TRAINER_STATE_NAME, MANIFEST_NAME))
    return path.is_dir() and checkpoint_step(path.name) is None and not has_state


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
