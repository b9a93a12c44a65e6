"""What is saved, and the training around it: a checkpoint of a wanted size from steps that cost nothing.

The large parameters take no gradients, so a step is over at once and needs no memory of its own, but they have an Adam
state each, as if they did: weights and state have the proportions of a real checkpoint, 1 to 2. Every step changes a
number in each, so no file is ever the one of the save before.

Functions here run on every rank and keep the state between calls: filling memory takes longer than some of what is
measured.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks import package
from benchmarks.measure import Unavailable, flush_disks
from benchmarks.memory import peak_bytes, reset_peak, resident_bytes
from benchmarks.peers import copying, dcp, dlrover, fsync, rsync
from benchmarks.process import barrier, device, exchange, local_rank, rank, world_size
from tests.training import clean_process

PIECES = 16
FLOAT_BYTES = 4
PARTS = 3  # of a checkpoint: the weights, and Adam's two moments
CHECKPOINT_STEP = 1
WIDTH = 64
WORK_WIDTH = 256


class Payload(torch.nn.Module):
    """A few large parameters to be saved, and a small one to be trained.

    Args:
        weight_bytes: of the large parameters together.
        device: where they are.
    """

    def __init__(self, weight_bytes: int, device: torch.device) -> None:
        super().__init__()
        size = max(1, weight_bytes // FLOAT_BYTES // PIECES)
        self.pieces = torch.nn.ParameterList(
            torch.nn.Parameter(torch.empty(size, device=device).uniform_(), requires_grad=False) for _ in range(PIECES)
        )
        self.scale = torch.nn.Parameter(torch.ones(WIDTH, device=device))
        self.work = 0  # further products of matrices in each step
        # They are equal on all ranks as far as a save can tell; DDP would broadcast them at every start.
        self._ddp_params_and_buffers_to_ignore = [f"pieces.{index}" for index in range(PIECES)]

    def forward(self, values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        factor = torch.eye(WORK_WIDTH, device=values.device)
        for _ in range(self.work):
            factor = factor @ factor
        return {"loss": (values * self.scale).square().mean() * factor[0, 0]}


class _Examples(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"values": torch.full((WIDTH,), float(index))}


@dataclass(frozen=True)
class State:
    """Model and optimizer of this rank.

    Attributes:
        sharded: whether each rank has, and saves, its share of the optimizer's state only, as under ZeRO.
    """

    model: Payload
    optimizer: torch.optim.AdamW
    sharded: bool

    def tensors(self) -> list[torch.Tensor]:
        """Everything of a checkpoint that this rank writes."""
        weights = list(self.model.state_dict().values()) if rank() == 0 else []
        moments = [
            value
            for entry in self.optimizer.state.values()
            for value in entry.values()
            if isinstance(value, torch.Tensor)
        ]
        return weights + (moments if self.sharded or rank() == 0 else [])

    def change(self) -> None:
        """Make every large tensor another one than at the last save."""
        with torch.no_grad():
            for parameter in self.model.pieces:
                parameter[0] += 1
            for entry in self.optimizer.state.values():
                for value in entry.values():
                    value.view(-1)[0] += 1


_state: dict[tuple[int, bool], State] = {}


def state_of(total_bytes: int, *, sharded: bool) -> State:
    """The state whose checkpoint has ``total_bytes``; only the last one that was asked for is kept."""
    key = (total_bytes, sharded)
    if key not in _state:
        _state.clear()
        _state[key] = _new_state(total_bytes, sharded=sharded)
    return _state[key]


def forget() -> None:
    """Give the memory back."""
    _state.clear()


def _new_state(total_bytes: int, *, sharded: bool) -> State:
    model = Payload(total_bytes // PARTS, device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = range(rank(), PIECES, world_size()) if sharded else range(PIECES)
    for piece in (model.pieces[index] for index in own):
        optimizer.state[piece] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.empty_like(piece).uniform_(),
            "exp_avg_sq": torch.empty_like(piece).uniform_(),
        }
    return State(model, optimizer, sharded)


# --- one save ---


def one_save(
    *,
    arm: str,
    total_bytes: int,
    directory: str,
    sharded: bool,
    is_split: bool,
    warmups: int = 0,
) -> dict[str, Any]:
    """Train for a step, save in one of the ways of :data:`ARMS`, and say how long it took on this rank.

    Args:
        arm: the way.
        total_bytes: size of the whole checkpoint.
        directory: this rank's run directory; removed afterwards.
        sharded: see :class:`State`.
        is_split: whether each node has a directory of its own.
        warmups: saves beforehand that do not count: where buffers are kept from save to save.

    Returns:
        ``stall_s``: seconds for which training stood still on this rank. ``commit_s``: seconds from the start of the
        save until it was complete and, where the way promises that, durable. ``rise_bytes``: by how much the peak of
        the resident memory was above what was resident before the first save. ``save``: of ours, see
        :func:`package.described`.
    """
    state = state_of(total_bytes, sharded=sharded)
    state.change()
    path = Path(directory)
    _clear(path, is_split=is_split)
    path.mkdir(parents=True, exist_ok=True)
    if rank() == 0:
        flush_disks()
    barrier()
    result = _save(arm, state, path, is_split=is_split, warmups=warmups)
    # Not in a finally clause: where one rank has failed, the others do not come to a barrier.
    _clear(path, is_split=is_split)
    return result


def _clear(path: Path, *, is_split: bool) -> None:
    barrier()
    if rank() == 0 or is_split:
        shutil.rmtree(path, ignore_errors=True)
    barrier()


def _save(arm: str, state: State, path: Path, *, is_split: bool, warmups: int) -> dict[str, Any]:
    if arm == "copy":
        tensors = state.tensors()
        copying.warm_up(tensors)
        try:
            return _timed(lambda: copying.copy_into_warm(tensors))
        finally:
            copying.forget()
    if arm == "dcp":
        return dcp.save(state.model, state.optimizer, path / "checkpoint", barrier)
    with _rsync_server(path, wanted=arm in RSYNC_ARMS) as rsync_to:
        return run_trainer(arm, state, path, is_split=is_split, warmups=warmups, rsync_to=rsync_to)


def _timed(action: Callable[[], None]) -> dict[str, Any]:
    barrier()
    started = time.perf_counter()
    action()
    seconds = time.perf_counter() - started
    return {"stall_s": seconds, "commit_s": seconds, "rise_bytes": 0, "save": None}


@contextlib.contextmanager
def _rsync_server(path: Path, *, wanted: bool) -> Iterator[str | None]:
    """A daemon on rank 0 that writes into its run directory; gives the address to every rank."""
    if not wanted:
        yield None
        return
    missing = [reason for reason in exchange(rsync.problem()) if reason is not None]
    if missing:
        raise Unavailable(missing[0])
    with contextlib.ExitStack() as stack:
        yield exchange(stack.enter_context(rsync.serve(path)) if rank() == 0 else None)[0]
        barrier()


def run_trainer(
    arm: str, state: State, path: Path, *, is_split: bool, warmups: int = 0, rsync_to: str | None = None
) -> dict[str, Any]:
    """Train for a step with the Trainer of an arm, which saves after it; what :func:`one_save` returns."""
    after = _AFTER.get(arm)
    with clean_process(), quiet():
        trainer_class, more = _trainer_class(arm, is_split=is_split)
        changes = _Changes(state)
        trainer = build(trainer_class, state, training_arguments(path, saves=warmups + 1), callbacks=[changes], **more)
        changes.trainer = trainer
        trainer.bench_sharded = state.sharded
        if after is not None:
            trainer.bench_after_save = functools.partial(after, is_split=is_split, rsync_to=rsync_to)
        trainer.train()
        package.settle(trainer)
        return dict(trainer.bench_result())


def build(trainer_class: type[Any], state: State, arguments: TrainingArguments, **more: Any) -> Any:
    """A Trainer over the state that is there."""
    schedule = torch.optim.lr_scheduler.LambdaLR(state.optimizer, lambda step: 1.0)
    trainer = trainer_class(
        model=state.model,
        args=arguments,
        train_dataset=_Examples(),
        optimizers=(state.optimizer, schedule),
        **more,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class _Changes(TrainerCallback):  # type: ignore[misc]
    """Before each step: the save before has ended, and what is saved next is something else."""

    trainer: Any = None

    def __init__(self, state: State) -> None:
        self._state = state

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        package.settle(self.trainer)
        self._state.change()


class BenchTrainer(Trainer):  # type: ignore[misc]
    """The Trainer of all arms: it measures around whatever ``_save_checkpoint`` the classes below have.

    With ``bench_sharded``, each rank writes its share of the optimizer's state into a file of its own, named and placed
    as DeepSpeed's ZeRO does it.
    """

    bench_sharded = False

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.bench_sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        shards = Path(output_dir) / f"global_step{self.state.global_step}"
        shards.mkdir(parents=True, exist_ok=True)
        torch.save(
            self.optimizer.state_dict(),
            str(shards / f"zero_pp_rank_{self.args.process_index}_mp_rank_00_optim_states.pt"),
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))


class Measured:
    """Put before a Trainer class: takes the time of each ``_save_checkpoint``, and the memory that it needs."""

    bench_after_save: Callable[[Path], None] | None = None
    _bench_before: int | None = None

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        barrier()
        if self._bench_before is None:  # what a first save keeps for the others belongs to the cost, too
            self._bench_before = resident_bytes()
            reset_peak()
        self._bench_started = time.perf_counter()
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        if self.bench_after_save is not None:
            trainer: Any = self
            self.bench_after_save(Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}")
        self._bench_stall_s = time.perf_counter() - self._bench_started

    def bench_result(self) -> dict[str, Any]:
        """What :func:`one_save` returns, once the save has ended."""
        save = package.last_save(self)
        return {
            "stall_s": self._bench_stall_s,
            "commit_s": self._bench_stall_s if save is None else max(save["total_s"], self._bench_stall_s),
            "rise_bytes": peak_bytes() - (self._bench_before or 0),
            "save": save,
        }


def _trainer_class(arm: str, *, is_split: bool) -> tuple[type[Any], dict[str, Any]]:
    """The Trainer class of an arm and its further arguments."""
    if arm in package.MODES:
        options = package.options(arm, storage="local" if is_split else "auto", local_copies="drop")
        return _measured(package.safe_trainer_class(BenchTrainer)), {"checkpoint_options": options}
    if arm == "dlrover":
        return _measured(dlrover.trainer_class()), {}
    return _measured(BenchTrainer), {}


def _measured(trainer_class: type[Any]) -> type[Any]:
    return type(f"Measured{trainer_class.__name__}", (Measured, trainer_class), {})


def _fsync_all(checkpoint: Path, *, is_split: bool, rsync_to: str | None) -> None:
    """What stock leaves out: every file of the checkpoint is on the disk when all ranks go on."""
    barrier()
    if local_rank() == 0 and (is_split or rank() == 0):
        fsync.tree(checkpoint)
    barrier()


def _rsync_all(checkpoint: Path, *, is_split: bool, rsync_to: str | None, durable: bool = False) -> None:
    """Copy to node 0 what the other nodes have, inside the stall, as people do it."""
    barrier()
    if local_rank() == 0 and rank() != 0 and rsync_to is not None:
        rsync.push(checkpoint, rsync_to)
    barrier()
    if durable:
        if rank() == 0:
            fsync.tree(checkpoint)
        barrier()


_AFTER: dict[str, Callable[..., None]] = {
    "stock+fsync": _fsync_all,
    "stock+rsync": _rsync_all,
    "stock+rsync+fsync": functools.partial(_rsync_all, durable=True),
}

RSYNC_ARMS = ("stock+rsync", "stock+rsync+fsync")
ARMS = ("stock", *_AFTER, *package.MODES, "copy", "dcp", "dlrover")


def training_arguments(path: Path, *, saves: int, **more: Any) -> TrainingArguments:
    """One save after each step."""
    fields: dict[str, Any] = {
        "output_dir": str(path),
        "max_steps": saves,
        "save_strategy": "steps",
        "save_steps": CHECKPOINT_STEP,
        "save_total_limit": 2,  # nothing is deleted inside of what is measured
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "use_cpu": device().type == "cpu",
        "max_grad_norm": 0.0,
        "dataloader_pin_memory": False,
    }
    if dist.is_initialized():
        fields["ddp_backend"] = "gloo" if device().type == "cpu" else "nccl"
        fields["ddp_find_unused_parameters"] = False
    return TrainingArguments(**{**fields, **more})


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """One line for every save would be hundreds."""
    package_log = logging.getLogger("safe_trainer")
    level = package_log.level
    package_log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        package_log.setLevel(level)
