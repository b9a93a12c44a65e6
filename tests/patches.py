"""Context managers that a scenario puts around a training run on a rank (``patches=`` of `run_training`)."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers.trainer
from transformers import Trainer

from safe_trainer.commit import RunDirectory
from safe_trainer.watch import set_group_timeout
from tests import training
from tests.cluster import GROUP_TIMEOUT_S


@contextlib.contextmanager
def zeroed_memory(rank: int) -> Iterator[None]:
    """Makes fresh tensors zero. DeepSpeed saves the padding of its flat ZeRO-3 groups as it finds it in memory, so
    without this two runs of one stock Trainer differ in their files."""
    empty = torch.empty

    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
        fresh = empty(*args, **kwargs)
        return fresh if fresh.is_meta else fresh.zero_()

    with mock.patch.object(torch, "empty", zeros):
        yield


@contextlib.contextmanager
def slow_writes(rank: int, seconds_by_rank: dict[str, float]) -> Iterator[None]:
    """Makes each rank sleep before and after it writes its RNG state, and before every rename."""
    seconds = seconds_by_rank.get(str(rank), 0.0)
    save, rename = Trainer._save_rng_state, os.rename

    def slow_save(self: Trainer, output_dir: str) -> None:
        time.sleep(seconds)
        save(self, output_dir)
        time.sleep(seconds)

    def slow_rename(*args: Any, **kwargs: Any) -> None:
        time.sleep(seconds)
        rename(*args, **kwargs)

    with mock.patch.object(Trainer, "_save_rng_state", slow_save), mock.patch.object(os, "rename", slow_rename):
        yield


@contextlib.contextmanager
def slow_commits(rank: int, seconds: float, step_s: float) -> Iterator[None]:
    """Makes every commit and every training step take longer by so many seconds."""
    commit, step = RunDirectory.commit, Trainer.training_step

    def slow_commit(self: RunDirectory, staged: Path) -> Path:
        time.sleep(seconds)
        return commit(self, staged)

    def slow_step(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        time.sleep(step_s)
        return step(self, *args, **kwargs)

    with mock.patch.object(RunDirectory, "commit", slow_commit), mock.patch.object(Trainer, "training_step", slow_step):
        yield


@contextlib.contextmanager
def fails_to_commit(rank: int, step: int) -> Iterator[None]:
    """The commit of one step fails."""
    commit = RunDirectory.commit

    def fail(self: RunDirectory, staged: Path) -> Path:
        if staged.name == f"checkpoint-{step}":
            raise OSError(errno.EIO, "Input/output error", str(staged))
        return commit(self, staged)

    with mock.patch.object(RunDirectory, "commit", fail):
        yield


@contextlib.contextmanager
def little_memory(rank: int, bytes: int) -> Iterator[None]:
    """The node has no more memory to give than that."""
    with mock.patch("safe_trainer.staging.available_memory", return_value=bytes):
        yield


@contextlib.contextmanager
def fails_inside_the_engine(rank: int, failing_rank: int, notes: str) -> Iterator[None]:
    """On one rank, whatever the engine writes itself fails for lack of space, below its own collectives (case F2).

    Args:
        notes: a file into which the time of the first failure is written.
    """
    if rank != failing_rank:
        yield
        return

    def fail(*args: Any, **kwargs: Any) -> None:
        note = Path(notes)
        if not note.exists():
            note.write_text(str(time.time()))
        raise OSError(errno.ENOSPC, "No space left on device", "shard of the engine")

    with (
        mock.patch.object(torch, "save", fail),
        mock.patch("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", fail),
    ):
        yield


@contextlib.contextmanager
def slower_than_the_back_end_allows(
    rank: int, slow_rank: int, sleep_s: float, timeout_s: float, in_engine: bool
) -> Iterator[None]:
    """One rank sleeps in its write for longer than the training group's time-out (case F1).

    Args:
        timeout_s: given to the training group, as ``ddp_timeout`` does where transformers makes the group.
        in_engine: whether the others wait inside the engine's own barrier meanwhile.
    """
    group = dist.group.WORLD
    if group is None:
        raise AssertionError("no process group")
    set_group_timeout(group, timedelta(seconds=timeout_s))
    save_rng, save = Trainer._save_rng_state, torch.save

    def slow_rng(self: Trainer, output_dir: str) -> None:
        time.sleep(sleep_s)
        save_rng(self, output_dir)

    def slow_save(thing: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if "optim_states" in str(path):
            time.sleep(sleep_s)
        save(thing, path, *args, **kwargs)

    try:
        if rank != slow_rank:
            yield
        elif in_engine:
            with mock.patch.object(torch, "save", slow_save):
                yield
        else:
            with mock.patch.object(Trainer, "_save_rng_state", slow_rng):
                yield
    finally:
        set_group_timeout(group, timedelta(seconds=GROUP_TIMEOUT_S))


@contextlib.contextmanager
def signal_in_the_save(rank: int, signalled_rank: int, name: str) -> Iterator[None]:
    """A signal that comes while a rank writes."""
    save = Trainer._save_rng_state

    def save_rng(self: Trainer, output_dir: str) -> None:
        os.kill(os.getpid(), signal.Signals[name])
        save(self, output_dir)

    if rank != signalled_rank:
        yield
        return
    with mock.patch.object(Trainer, "_save_rng_state", save_rng):
        yield


@contextlib.contextmanager
def dies_beside_training(rank: int, dying_rank: int) -> Iterator[None]:
    """One rank's process is killed while its save is made durable in the background."""

    def die(path: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank != dying_rank:
        yield
        return
    with mock.patch("safe_trainer.disk.fsync_file", die):
        yield


@contextlib.contextmanager
def dies_in_the_save(rank: int, dying_rank: int) -> Iterator[None]:
    """The out-of-memory killer takes a rank while it writes."""
    if rank != dying_rank:
        yield
        return

    def die(self: Trainer, output_dir: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(Trainer, "_save_rng_state", die):
        yield


@contextlib.contextmanager
def little_room(rank: int, small_rank: int, free: int) -> Iterator[None]:
    """On one rank, the disk is said to have ``free`` bytes left."""
    if rank != small_rank:
        yield
        return
    usage = shutil.disk_usage("/")
    with mock.patch.object(shutil, "disk_usage", return_value=usage._replace(free=free)):
        yield


@contextlib.contextmanager
def decoupled_writer(rank: int) -> Iterator[None]:
    """A DeepSpeed config in which files are written after a save has returned."""
    config = training._deepspeed_config

    def with_writer(stage: int) -> dict[str, Any]:
        writer = {"type": "fast", "decoupled": True}
        return {**config(stage), "checkpoint": {"writer": writer}}

    with mock.patch.object(training, "_deepspeed_config", with_writer):
        yield


@contextlib.contextmanager
def slow_unlink(rank: int, seconds: float) -> Iterator[None]:
    """Makes every deletion of a file slow, so that two deleters would meet (case S4)."""
    unlink = os.unlink

    def slow(*args: Any, **kwargs: Any) -> None:
        time.sleep(seconds)
        unlink(*args, **kwargs)

    with mock.patch.object(os, "unlink", slow):
        yield


@contextlib.contextmanager
def no_exchange(rank: int) -> Iterator[None]:
    """A file system that cannot exchange two directories, as most network ones."""
    with mock.patch("safe_trainer.commit.exchange", return_value=False):
        yield


@contextlib.contextmanager
def sees_nothing(rank: int, blind_rank: int) -> Iterator[None]:
    """On one rank, checkpoints seem not to exist while one is being chosen (case U5)."""
    if rank != blind_rank:
        yield
        return

    with (
        mock.patch("safe_trainer.resume.list_checkpoints", return_value=[]),
        mock.patch("safe_trainer.trainer.list_checkpoints", return_value=[]),
    ):
        yield


class HubStub:
    """In place of the hub's client: walks the folder in a thread, half a second later."""

    def __init__(self) -> None:
        self.uploads: list[dict[str, Any]] = []
        self.threads: list[threading.Thread] = []

    def upload_folder(self, *, folder_path: str, ignore_patterns: list[str] | None = None, **kwargs: Any) -> Any:
        upload: dict[str, Any] = {"folder": folder_path, "ignore": ignore_patterns, "files": None}
        self.uploads.append(upload)

        def walk() -> None:
            time.sleep(0.5)
            root = Path(folder_path)
            found = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
            upload["files"] = found if root.is_dir() else f"{folder_path} is gone"

        thread = threading.Thread(target=walk)
        thread.start()
        self.threads.append(thread)
        return mock.Mock(is_done=lambda: True, done=lambda: True)


HUB = HubStub()


@contextlib.contextmanager
def hub_stub(rank: int) -> Iterator[None]:
    """Lets ``push_to_hub`` upload to a `HubStub`; `uploads` tells what it saw."""
    HUB.__init__()  # type: ignore[misc]

    def no_repository(self: Trainer, token: str | None = None) -> None:
        self.hub_model_id = "someone/model"
        self.push_in_progress = None

    with (
        mock.patch.object(transformers.trainer, "hf_api", return_value=HUB),
        mock.patch.object(Trainer, "init_hf_repo", no_repository),
        mock.patch.object(Trainer, "_finish_current_push"),
    ):
        yield


def uploads(trainer: Trainer) -> list[dict[str, Any]]:
    """What was uploaded; to be given as ``inspect=``."""
    for thread in HUB.threads:
        thread.join()
    return HUB.uploads


@contextlib.contextmanager
def every_gather_is_long(rank: int) -> Iterator[None]:
    """Lets the bar, which waits for a second, appear at once."""
    with mock.patch("safe_trainer.save.BAR_DELAY_S", 0.0):
        yield
