"""What the demo does on every rank: it runs the script `tests.demo.train` and watches.

The script is run as it is; only the name SafeTrainer in it stands for a class that also writes down what happens.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import Trainer

from safe_trainer import make_safe
from safe_trainer.digest import digest_file
from safe_trainer.layout import list_files
from tests.demo import train
from tests.demo.observation import Observation, tensor_digest
from tests.training import prepare_deepspeed


def run_stock(output_dir: str) -> Observation:
    """The script with transformers' own Trainer, which starts afresh: it does not know ``"auto"``."""
    return _run(output_dir, _StockTrainer)


def run_safe(output_dir: str, *, one_disk: bool = False, stalling_file: str | None = None) -> Observation:
    """The script with SafeTrainer.

    Args:
        output_dir: Run directory.
        one_disk: Whether the nodes' disks are but two directories on one, for want of namespaces.
        stalling_file: Part of the path of a file that gets stuck when this rank has written half of it.
    """
    with contextlib.ExitStack() as stack:
        if one_disk:
            stack.enter_context(_separate_directories())
        if stalling_file:
            stack.enter_context(_stalling_disk(stalling_file))
        return _run(output_dir, make_safe(_WatchedTrainer))


def _run(output_dir: str, trainer_class: type[Any]) -> Observation:
    prepare_deepspeed()
    with mock.patch.object(train, "SafeTrainer", trainer_class):
        observation: Observation = train.main(output_dir).observation()
    return observation


class _WatchedTrainer(Trainer):  # type: ignore[misc]
    def train(self, resume_from_checkpoint: str | None = None, *args: Any, **kwargs: Any) -> Any:
        self._losses: dict[str, str] = {}
        self._resumed_from = resume_from_checkpoint
        self._resumed_files = _digests(Path(resume_from_checkpoint)) if resume_from_checkpoint else {}
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self._losses[str(self.state.global_step + 1)] = float(loss).hex()
        return loss

    def observation(self) -> Observation:
        return Observation(
            losses=self._losses,
            first_step=min(int(step) for step in self._losses) - 1,
            resumed_from=self._resumed_from,
            resumed_files=self._resumed_files,
            trained={
                name: tensor_digest(parameter.detach().numpy())
                for name, parameter in self.model.named_parameters()
                if parameter.requires_grad
            },
        )


class _StockTrainer(_WatchedTrainer):
    def train(self, resume_from_checkpoint: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return super().train(None, *args, **kwargs)


def _digests(checkpoint: Path) -> dict[str, str]:
    return {path: digest_file(checkpoint / path) for path in list_files(checkpoint)}


def _separate_directories() -> contextlib.AbstractContextManager[Any]:
    """Tells SafeTrainer that different run directories on one disk are meant so: here they stand for two disks."""
    return mock.patch.dict(os.environ, SAFE_TRAINER_STORAGE="local")


@contextlib.contextmanager
def _stalling_disk(part: str) -> Iterator[None]:
    """`torch.save` writes half of a file that has `part` in its path, and then nothing more, for ever."""
    save = torch.save

    def stalling_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, str | os.PathLike) or part not in os.fspath(f):
            save(obj, f, *args, **kwargs)
            return
        whole = io.BytesIO()
        save(obj, whole, *args, **kwargs)
        Path(f).write_bytes(whole.getvalue()[: whole.tell() // 2])
        while True:  # the demo kills the job
            time.sleep(1.0)

    with mock.patch.object(torch, "save", stalling_save):
        yield
