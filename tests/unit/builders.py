"""Checkpoints and run directories made by hand: with a manifest as ours, or as the stock Trainer leaves them."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from safe_trainer.commit import Generation, RunDirectory
from safe_trainer.digest import digest_file
from safe_trainer.disk import fsync_file
from safe_trainer.layout import MANIFEST_NAME, checkpoint_name, checkpoint_step, list_files
from safe_trainer.manifest import FileEntry, Manifest, Scope

# --- with a manifest ---


def write_files(root: Path, files: Mapping[str, bytes]) -> None:
    """Write ``files`` below ``root``, directories included."""
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


def entry_of(root: Path, path: str, *, rank: int = 0) -> FileEntry:
    """The entry of a file as it is now."""
    info = (root / path).stat()
    return FileEntry(
        path=path, size=info.st_size, digest=digest_file(root / path), rank=rank, mode=info.st_mode & 0o777
    )


def manifest_of(
    checkpoint: Path, *, step: int | None = None, scope: Scope = "full", save_id: str = "a-save"
) -> Manifest:
    """A manifest of all that is in ``checkpoint`` now."""
    paths = [path for path in list_files(checkpoint) if path != MANIFEST_NAME]
    return Manifest(
        step=step if step is not None else checkpoint_step(checkpoint.name) or 1,
        save_id=save_id,
        scope=scope,
        generation=1,
        world_size=1,
        saved_at="2026-01-01T00:00:00Z",
        saved_by={"host": "somewhere", "process": "1"},
        files=tuple(entry_of(checkpoint, path) for path in paths),
    )


def make_checkpoint(run_directory: Path, step: int, files: Mapping[str, bytes]) -> Path:
    """A complete ``checkpoint-<step>`` with a manifest."""
    checkpoint = run_directory / checkpoint_name(step)
    checkpoint.mkdir(parents=True)
    write_files(checkpoint, files)
    manifest_of(checkpoint, step=step).write(checkpoint)
    return checkpoint


def contents(directory: Path) -> dict[str, bytes]:
    """Every file's bytes but the manifest's, by relative path."""
    return {path: (directory / path).read_bytes() for path in list_files(directory) if path != MANIFEST_NAME}


# --- a run directory as its leader handles it ---


# The name of a staging directory of the first run.
A_SAVE = "1-0a1b2c3d-0-10"


def start_run(root: Path, number: int = 1, *, lock_timeout_s: float = 5.0) -> RunDirectory:
    """A run directory that run ``number`` has taken."""
    directory = RunDirectory(root, lock_timeout_s=lock_timeout_s)
    directory.take(Generation.following(number - 1, f"run-id-{number}"))
    return directory


def stage(directory: RunDirectory, step: int, files: Mapping[str, bytes], *, save: str = A_SAVE) -> Path:
    """A sealed staging directory: written, fsynced, with its manifest."""
    staged = directory.make_staging(save, checkpoint_name(step))
    write_files(staged, files)
    for path in files:
        fsync_file(staged / path)
    manifest_of(staged, step=step).write(staged)
    return staged


def save(directory: RunDirectory, step: int, files: Mapping[str, bytes]) -> Path:
    """Stage, commit, and clear up."""
    staged = stage(directory, step, files)
    with directory.lock():
        final = directory.commit(staged)
        directory.release_staging(staged)
    return final


# --- as the stock Trainer leaves them ---

STOCK_WORLD_SIZE = 4


def _write_state(checkpoint: Path) -> None:
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 10, "log_history": []}, indent=2) + "\n")
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "tiny"}, indent=2) + "\n")
    torch.save({"learning_rate": 0.1}, checkpoint / "training_args.bin")


def _write_rng_states(checkpoint: Path, world_size: int) -> None:
    names = ["rng_state.pth"] if world_size == 1 else [f"rng_state_{rank}.pth" for rank in range(world_size)]
    for name in names:
        torch.save({"cpu": torch.get_rng_state()}, checkpoint / name)


def _write_optimizer(checkpoint: Path) -> None:
    torch.save({"state": {0: {"exp_avg": torch.ones(64)}}}, checkpoint / "optimizer.pt")
    torch.save({"last_epoch": 10}, checkpoint / "scheduler.pt")


def _write_model(checkpoint: Path) -> None:
    save_file({"w": torch.ones(8, 4), "b": torch.zeros(3)}, checkpoint / "model.safetensors", metadata={"format": "pt"})


def _write_sharded_model(checkpoint: Path) -> None:
    names = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        save_file({name: torch.ones(4)}, checkpoint / name)
    index = {"metadata": {"total_size": 32}, "weight_map": {name: name for name in names}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))


def deepspeed_model_states(world_size: int) -> dict[str, Any]:
    """The keys of DeepSpeed's ``*_model_states.pt``, in its order."""
    return {
        "module": {"w": torch.ones(8)},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [{"w": torch.Size([8])}],
        "frozen_param_shapes": None,
        "lr_scheduler": {"last_batch_iteration": 10},
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 0,
        "global_steps": 10,
        "global_samples": 160,
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "ds_config": {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}},
        "ds_version": "0.19.8",
    }


def _write_zero(checkpoint: Path, *, model_states: list[str]) -> None:
    folder = checkpoint / "global_step10"
    folder.mkdir()
    for name in model_states:
        torch.save(deepspeed_model_states(STOCK_WORLD_SIZE), folder / name)
    for rank in range(STOCK_WORLD_SIZE):
        state = {"optimizer_state_dict": {"exp_avg": torch.ones(16)}}
        torch.save(state, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (checkpoint / "latest").write_text("global_step10")
    (checkpoint / "zero_to_fp32.py").write_text("print('to fp32')\n")


def _write_distributed(checkpoint: Path, folder: str) -> None:
    state = {"a": torch.ones(64), "b": torch.zeros(32)}
    writer = FileSystemWriter(checkpoint / folder, single_file_per_rank=False, thread_count=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process is no surprise
        save_distributed(state, storage_writer=writer, no_dist=True)


def _single(checkpoint: Path) -> None:
    _write_model(checkpoint)
    _write_optimizer(checkpoint)
    _write_rng_states(checkpoint, 1)


def _ddp(checkpoint: Path) -> None:
    _write_sharded_model(checkpoint)
    _write_optimizer(checkpoint)
    _write_rng_states(checkpoint, STOCK_WORLD_SIZE)


def _zero2(checkpoint: Path) -> None:
    _write_model(checkpoint)
    _write_zero(checkpoint, model_states=["mp_rank_00_model_states.pt"])
    _write_rng_states(checkpoint, STOCK_WORLD_SIZE)


def _zero3(checkpoint: Path) -> None:
    names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(STOCK_WORLD_SIZE)]
    _write_zero(checkpoint, model_states=names)
    _write_rng_states(checkpoint, STOCK_WORLD_SIZE)


def _fsdp(checkpoint: Path) -> None:
    _write_distributed(checkpoint, "pytorch_model_fsdp_0")
    _write_distributed(checkpoint, "optimizer_0")
    torch.save({"last_epoch": 10}, checkpoint / "scheduler.pt")
    _write_rng_states(checkpoint, STOCK_WORLD_SIZE)


def _model_only(checkpoint: Path) -> None:
    _write_model(checkpoint)


STOCK_KINDS: dict[str, Callable[[Path], None]] = {
    "single": _single,
    "ddp": _ddp,
    "zero2": _zero2,
    "zero3": _zero3,
    "fsdp": _fsdp,
    "model-only": _model_only,
}


def make_stock_checkpoint(run_directory: Path, kind: str, *, step: int = 10) -> Path:
    """``checkpoint-<step>`` with the files that the stock Trainer writes for ``kind``, and no manifest."""
    checkpoint = run_directory / checkpoint_name(step)
    checkpoint.mkdir(parents=True)
    STOCK_KINDS[kind](checkpoint)
    _write_state(checkpoint)
    return checkpoint


# --- damage ---


def truncate_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def truncate_to_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_last_byte(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_byte(path: Path, at: int | None = None, *, mask: int = 0x01) -> None:
    """Flip bits of one byte, of the one in the middle if not told."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= mask
    path.write_bytes(content)


TRUNCATIONS: dict[str, Callable[[Path], None]] = {
    "nothing left": truncate_to_nothing,
    "half left": truncate_to_half,
    "last byte gone": cut_last_byte,
}
