"""Real training runs, tiny and exactly repeatable, to be called on every rank of a `tests.cluster.Cluster`.

`run_training` is the scenario: one engine, one Trainer class, a few steps. It may be called again and again in
one process, with one engine after another; nothing of a run is left for the next. Two calls with equal
arguments give equal losses bit for bit. Dropout is on and every rank draws other numbers, so a checkpoint of
which one part (parameters, optimizer, scheduler, random state of any rank, position in the data) does not come
back, or comes back to another rank, shows in the losses.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from tests.cluster import Json, resolve

ENGINES = (
    "single",
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "zero2-lora",
    "zero3-lora",
    "fsdp2-full",
    "fsdp2-sharded",
)
DISTRIBUTED_ENGINES = ENGINES[1:]

VOCABULARY = 256  # bytes
SEQUENCE_LENGTH = 16
TRAIN_EXAMPLES = 96
EVAL_EXAMPLES = 16
DROPOUT = 0.1

Hook = str | list[Any]  # "module:qualname", or ["module:qualname", {keyword: value}]


def run_training(
    *,
    engine: str,
    output_dir: str,
    trainer: str = "transformers:Trainer",
    steps: int = 6,
    save_steps: int = 2,
    resume: str | bool | None = None,
    stop_after: int | None = None,
    seed: int = 0,
    eval: bool = False,
    args: Mapping[str, Json] | None = None,
    trainer_kwargs: Mapping[str, Json] | None = None,
    callbacks: Sequence[Hook] = (),
    patches: Sequence[Hook] = (),
    inspect: str | None = None,
) -> dict[str, Json]:
    """Trains on this rank, with all others, and says what came out.

    Args:
        engine: One of `ENGINES`. "single" wants a cluster of one rank, the others one of several.
        output_dir: Run directory.
        trainer: Class or factory that is called as a Trainer class is.
        steps: ``max_steps``; the learning rate falls linearly to zero over them.
        save_steps: A checkpoint every so many steps; 0 for none.
        resume: ``resume_from_checkpoint`` of `Trainer.train`.
        stop_after: Step after which training ends although `steps` is larger, as if a callback had asked for it.
        seed: Seed of the parameters, of the data and its order and of the dropout.
        eval: Whether there is an evaluation set, for ``eval_strategy`` and ``load_best_model_at_end``.
        args: Further fields of `TrainingArguments`.
        trainer_kwargs: Further arguments of `trainer`.
        callbacks: `TrainerCallback` classes.
        patches: Context managers to be entered around the run, called with ``rank=``.
        inspect: A function that is called with the trainer after training.

    Returns:
        ``losses``: loss of each step on this rank, ``{"1": hex}``, unrounded, micro-batches joined by a blank.
        ``log_history``: the trainer's own log. ``global_step``, ``best_model_checkpoint``, ``best_metric``: of
        the trainer's state at the end. ``first_step``: how many steps were behind it when training began.
        ``resumed_from``: the checkpoint that the training loop was told to load, or None.
        ``parameters_digest``: of the whole trained model, gathered where it is sharded. ``seconds``: time in
        `Trainer.train`. ``inspect``: what `inspect` gave.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(clean_process())
        for patch in patches:
            stack.enter_context(_called(patch, rank=_rank()))
        arguments = _training_arguments(engine, output_dir, steps, save_steps, seed, args or {})
        record = _Record(seed, stop_after)
        # The trainer lives in that call only: it must be gone before the process is cleaned.
        return _train(
            engine,
            record,
            resume,
            inspect,
            functools.partial(
                resolve(trainer),
                model=_model(engine, seed),
                args=arguments,
                train_dataset=ByteDataset(TRAIN_EXAMPLES, seed),
                eval_dataset=ByteDataset(EVAL_EXAMPLES, seed + 1) if eval else None,
                callbacks=[record, *(_called(callback) for callback in callbacks)],
                **(trainer_kwargs or {}),
            ),
        )


def _train(
    engine: str, record: _Record, resume: str | bool | None, inspect: str | None, build: Callable[[], Trainer]
) -> dict[str, Json]:
    trainer = build()
    record.attach(trainer)
    try:
        started = time.perf_counter()
        trainer.train(resume_from_checkpoint=resume)
        seconds = time.perf_counter() - started
        _check_engine(engine, trainer)
        return {
            "losses": record.losses,
            "first_step": record.first_step,
            "resumed_from": record.resumed_from,
            "log_history": trainer.state.log_history,
            "global_step": trainer.state.global_step,
            "best_model_checkpoint": trainer.state.best_model_checkpoint,
            "best_metric": trainer.state.best_metric,
            "parameters_digest": parameters_digest(trainer.model),
            "seconds": round(seconds, 3),
            "inspect": resolve(inspect)(trainer) if inspect else None,
        }
    finally:
        if trainer.deepspeed is not None:
            trainer.deepspeed.destroy()  # hooks that only C++ can see keep the engine from the garbage collector


# --- Model and data -----------------------------------------------------------------------------------------


class ByteDataset(Dataset[dict[str, torch.Tensor]]):
    """Random bytes, the same ones for the same seed on every machine."""

    def __init__(self, examples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._bytes = torch.randint(0, VOCABULARY, (examples, SEQUENCE_LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._bytes[index], "labels": self._bytes[index]}


def _model(engine: str, seed: int) -> torch.nn.Module:
    _seed_everything(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE_LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=DROPOUT,
        embd_pdrop=DROPOUT,
        attn_pdrop=DROPOUT,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model: torch.nn.Module = GPT2LMHeadModel(config)
    if engine.endswith("-lora"):
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=4, lora_dropout=DROPOUT, target_modules=["c_attn"], fan_in_fan_out=True)
        model = get_peft_model(model, lora)
    return model


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def parameters_digest(model: torch.nn.Module) -> str:
    """A digest of all parameters of a model, whole ones: the same for equal models under every engine.

    A collective call where parameters are sharded.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.removeprefix("module.").encode())
        digest.update(_whole(parameter).numpy().tobytes())
    return digest.hexdigest()


def draw(trainer: Trainer) -> float:
    """The next random number of this rank: an `inspect` that shows where its random state stands."""
    return float(torch.rand(()))


def _whole(parameter: torch.nn.Parameter) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        return cast(DTensor, parameter.detach()).full_tensor().cpu()
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().cpu().clone()
    return parameter.detach().cpu()


def _is_sharded(parameter: torch.nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) or hasattr(parameter, "ds_id")


# --- Engines ------------------------------------------------------------------------------------------------


def _training_arguments(
    engine: str, output_dir: str, steps: int, save_steps: int, seed: int, extra: Mapping[str, Json]
) -> TrainingArguments:
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {ENGINES}, not {engine!r}")
    if (engine == "single") == dist.is_initialized():
        raise ValueError(f"engine {engine!r} in a process group of {_world_size()} rank(s)")
    fields = {
        "output_dir": output_dir,
        "max_steps": steps,
        "save_strategy": "steps" if save_steps else "no",
        "save_steps": save_steps or steps,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "learning_rate": 1e-2,
        "optim": "adamw_torch",
        "lr_scheduler_type": "linear",
        "seed": seed,
        "report_to": "none",
        "disable_tqdm": True,
        **_engine_fields(engine),
        **extra,
    }
    arguments = TrainingArguments(**fields)
    if engine.startswith("fsdp2") and arguments.device.type == "cpu":
        # accelerate knows no FSDP for CPUs and would train plain DDP without a word. It looks at this type only,
        # and the one for NPUs leads to FSDP2 without touching a device.
        arguments.distributed_state.distributed_type = DistributedType.MULTI_NPU
    return arguments


def _check_engine(engine: str, trainer: Trainer) -> None:
    """A rig that silently trains something else proves nothing. Each of these has been seen to go wrong."""
    seen = {
        "world size": trainer.args.world_size,
        "rank": trainer.args.process_index,
        "wrapped in": type(trainer.model_wrapped).__name__,
        "ZeRO stage": trainer.deepspeed.zero_optimization_stage() if trainer.deepspeed else None,
        "sharded": all(_is_sharded(parameter) for parameter in trainer.model.parameters()),
    }
    zero_stage = int(engine[len("zero")]) if engine.startswith("zero") else None
    wrapper = {"single": type(trainer.model).__name__, "ddp": "DistributedDataParallel"}
    expected = {
        "world size": _world_size(),
        "rank": _rank(),
        "wrapped in": wrapper.get(engine, "DeepSpeedEngine" if zero_stage else seen["wrapped in"]),
        "ZeRO stage": zero_stage,
        "sharded": zero_stage == 3 or engine.startswith("fsdp2"),
    }
    if seen != expected:
        raise AssertionError(f"not engine {engine!r}: {seen} instead of {expected}")


def _engine_fields(engine: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"use_cpu": _backend() == "gloo"}
    if engine != "single":
        # With these two, accelerate sees all ranks on CPUs, also under DeepSpeed. Without them DeepSpeed trains
        # just as well, but each rank takes itself for rank 0 of 1: equal data, and every rank saves everything.
        fields["ddp_backend"] = _backend()
    if engine == "ddp":
        # Without it DDP sorts its buckets anew after the first step, also after the first one of a resumed run: the
        # same sums in another order, and losses that differ in the last bit.
        fields["ddp_find_unused_parameters"] = True
    if engine.startswith("zero"):
        prepare_deepspeed()
        fields["deepspeed"] = _deepspeed_config(stage=int(engine[len("zero")]))
    if engine.startswith("fsdp2"):
        state_dict_type = {"fsdp2-full": "FULL_STATE_DICT", "fsdp2-sharded": "SHARDED_STATE_DICT"}[engine]
        fields["fsdp"] = True
        fields["fsdp_config"] = {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["GPT2Block"],
            "state_dict_type": state_dict_type,
        }
    return fields


def _deepspeed_config(stage: int) -> dict[str, Json]:
    zero: dict[str, Json] = {"stage": stage, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
    if stage == 3:
        zero |= {
            "stage3_gather_16bit_weights_on_model_save": True,
            "stage3_param_persistence_threshold": 0,  # else parameters as small as ours stay whole on every rank
            "stage3_prefetch_bucket_size": 10_000,
            "stage3_max_live_parameters": 100_000,
            "sub_group_size": 100_000,
        }
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }


def prepare_deepspeed() -> None:
    """Imports DeepSpeed so that it compiles nothing.

    Its shared-memory operation for CPUs takes a minute to compile, under a lock that a killed builder leaves
    behind. gloo does the same work.
    """
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    assert deepspeed is not None


# --- What a run leaves behind -------------------------------------------------------------------------------


@contextlib.contextmanager
def clean_process() -> Iterator[None]:
    """Makes the enclosed run the first one of this process, and takes away what it leaves.

    The default process group stays; groups that were made in between are destroyed.
    """
    environment = dict(os.environ)
    _forget_previous_run()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        _forget_previous_run()


def _forget_previous_run() -> None:
    """accelerate, transformers and DeepSpeed keep the first run's set-up in module globals for the next one."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    _forget_deepspeed()
    gc.collect()
    _destroy_subgroups()


def _forget_deepspeed() -> None:
    if "deepspeed" not in sys.modules:
        return
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partition_parameters import shutdown_init_context
    from deepspeed.utils import groups

    comm.cdb = None  # not destroy_process_group(): that would end the default group of torch as well
    groups._release_process_group_references()
    shutdown_init_context()
    # ZeRO-3 keeps its models, and through them its engines and their process groups, in a list that it does not
    # empty and as keys of a cache around a method.
    parameter_offload.FWD_MODULE_STACK.clear()
    for item in gc.get_objects():
        if isinstance(item, functools._lru_cache_wrapper) and item.__module__.startswith("deepspeed."):
            item.cache_clear()


def _destroy_subgroups() -> None:
    if not dist.is_initialized():
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


# --- Recording ----------------------------------------------------------------------------------------------


class _Record(TrainerCallback):  # type: ignore[misc]
    """Writes down the losses of this rank and where training began; ends it early when asked to."""

    def __init__(self, seed: int, stop_after: int | None) -> None:
        self.losses: dict[str, str] = {}
        self.first_step = 0
        self.resumed_from: str | None = None
        self._seed = seed
        self._stop_after = stop_after

    def attach(self, trainer: Trainer) -> None:
        """Listens to the two methods of which the results reach no callback."""
        trainer.training_step = self._recording_loss(trainer, trainer.training_step)
        trainer._inner_training_loop = self._recording_checkpoint(trainer._inner_training_loop)

    def _recording_loss(self, trainer: Trainer, training_step: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = training_step(*args, **kwargs)
            step = str(trainer.state.global_step + 1)
            self.losses[step] = " ".join(filter(None, [self.losses.get(step), float(loss).hex()]))
            return loss

        return recorded

    def _recording_checkpoint(self, loop: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.resumed_from = kwargs.get("resume_from_checkpoint")
            return loop(*args, **kwargs)

        return recorded

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.first_step = state.global_step
        # The Trainer gives all ranks one seed, and then no one could tell one rank's random state from another's.
        # In a resumed run the states from the checkpoint come after this and replace these.
        _seed_everything(1000 * (self._seed + 1) + _rank())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._stop_after is not None and state.global_step >= self._stop_after:
            control.should_training_stop = True


def _called(hook: Hook, **kwargs: Any) -> Any:
    if isinstance(hook, str):
        return resolve(hook)(**kwargs)
    return resolve(hook[0])(**kwargs, **hook[1])


def _backend() -> str:
    return dist.get_backend() if dist.is_initialized() else os.environ.get("TESTS_CLUSTER_BACKEND", "gloo")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
