"""SafeTrainer: the only place that knows transformers' Trainer.

The mixin goes before a Trainer class in the bases. It lets that class's ``_save_checkpoint`` run unchanged, with
``_get_output_dir`` pointing into the staging directory meanwhile, and does the rest around it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers import Seq2SeqTrainer, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from safe_trainer.channel import Channel
from safe_trainer.errors import CheckpointError, IncompleteCheckpointError
from safe_trainer.layout import MANIFEST_NAME, TRAINER_STATE_NAME, checkpoint_name, checkpoint_step, list_checkpoints
from safe_trainer.options import CheckpointOptions
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
from safe_trainer.save import SaveReport, keep_only, save_checkpoint

if TYPE_CHECKING:
    from transformers import Trainer as _TrainerBase
else:
    _TrainerBase = object

logger = logging.getLogger(__name__)

AUTO = "auto"
_PACKAGES = ("safe_trainer", "transformers", "accelerate", "torch", "deepspeed", "peft", "trl")


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
        last_save: what this trainer's last save did; None before the first.
    """

    def __init__(self, *args: Any, checkpoint_options: CheckpointOptions | None = None, **kwargs: Any) -> None:
        self.checkpoint_options = CheckpointOptions() if checkpoint_options is None else checkpoint_options
        self.last_save: SaveReport | None = None
        self._safe_channel: Channel | None = None
        self._safe_run: Run | None = None
        self._safe_lineage = Rotation()
        self._safe_saved_steps: set[int] = set()
        # Where _get_output_dir points; None except while the Trainer class writes a checkpoint.
        self._safe_staged_run_directory: Path | None = None
        self._safe_deferred_pushes: list[str] = []
        self._safe_best_in_checkpoint: str | None = None
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
            ValueError: True was given and there is no complete checkpoint.
            CheckpointError: on every rank alike, before training starts; see :mod:`safe_trainer.resume`.
        """
        wanted = _normalized(resume_from_checkpoint)
        if wanted is None and not self._saves_checkpoints():
            self._safe_run = None
            return super().train(None, *args, **kwargs)
        trial = kwargs.get("trial", args[0] if args else None)
        self._safe_run = self._open_run(trial)
        path = self._find_checkpoint(self._safe_run, wanted)
        return super().train(path, *args, **kwargs)

    def _saves_checkpoints(self) -> bool:
        strategy = self.args.save_strategy
        return bool(getattr(strategy, "value", strategy) != "no")

    def _open_run(self, trial: Any) -> Run:
        """Start a run in the current run directory; collective.

        Rank 0 says which directory below ``output_dir`` it is: in a hyperparameter search, other ranks may not know
        the trial.
        """
        if self._safe_channel is None:
            self._safe_channel = Channel.open(timeout_s=self.checkpoint_options.timeout_s)
        self._warn_where_ranks_are_mistaken(self._safe_channel)
        own = os.path.relpath(super()._get_output_dir(trial), self.args.output_dir)
        relative = self._safe_channel.together("agree on the run directory", lambda: own)[0]
        return open_run(
            Path(os.path.abspath(os.path.join(cast(str, self.args.output_dir), relative))),
            channel=self._safe_channel,
            options=self.checkpoint_options,
            saved_by=_versions(),
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
            return state.get("best_model_checkpoint"), int(state["global_step"])

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

    def _save_checkpoint(self, model: Any, trial: Any = None, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
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

        try:
            self.last_save = save_checkpoint(
                run,
                step=self.state.global_step,
                write=write,
                rotation=self._rotation,
                show_progress=not self.args.disable_tqdm,
            )
        except BaseException:
            self.state.best_model_checkpoint = best_before
            self._safe_deferred_pushes.clear()
            raise
        # Every rank has left the point at which it read what was delivered for resuming.
        clear_deliveries(run)
        while self._safe_deferred_pushes:
            super()._push_from_checkpoint(self._final_path(Path(self._safe_deferred_pushes.pop(0)).name, trial))

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
        if self._safe_run is not None and self.args.save_total_limit == 1:
            keep_only(self._safe_run, lambda: self.state.best_model_checkpoint)

    def _end_run(self) -> None:
        if self._safe_run is not None:
            run = self._safe_run
            run.channel.together("end", lambda: clear_deliveries(run))


class _RunCallback(TrainerCallback):
    """Calls the mixin at the points of training that no overridable method marks in every version."""

    def __init__(self, trainer: SafeCheckpointMixin) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer._check_resumed_state()

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
