"""A save and a resume without a Trainer: plain files, real ranks, a directory for each node."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from safe_trainer import layout
from safe_trainer.channel import Channel
from safe_trainer.errors import CheckpointError, IncompleteCheckpointError
from safe_trainer.options import CheckpointOptions
from safe_trainer.resume import Resumption, resume_latest, resume_path
from safe_trainer.rotation import Rotation
from safe_trainer.run import Run, open_run
from safe_trainer.save import SaveReport, save_checkpoint
from tests import checks
from tests.unit.processes import outcome_of, run_ranks

STEP = 7
NOWHERE = Channel(None, rank=0, world_size=1)

BACKENDS = [
    "gloo",
    # Can move nothing but GPU memory, and runs without a GPU: what NCCL alone is to the package.
    "cuda:gloo",
    pytest.param(
        "nccl", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs on this machine")
    ),
]


def start(channel: Channel, root: Path, **options: Any) -> Run:
    """A run of this rank on a node of its own, with a directory of its own."""
    os.environ["GROUP_RANK"] = str(channel.rank)
    return open_run(
        root / f"node{channel.rank}",
        channel=channel,
        options=CheckpointOptions(storage="local", **options),
        saved_by={"test": "1"},
    )


def save(run: Run, step: int = STEP, content: str = "content", rotation: Rotation | None = None) -> SaveReport:
    def write(directory: Path) -> None:
        (directory / "shards").mkdir(exist_ok=True)
        (directory / "shards" / f"of_rank_{run.channel.rank}.bin").write_text(f"{content} of {run.channel.rank}")
        if run.channel.rank == 0:
            (directory / "trainer_state.json").write_text("{}")

    return save_checkpoint(run, step=step, write=write, rotation=lambda: rotation or Rotation())


def files_of(resumption: Resumption | None) -> dict[str, str] | None:
    if resumption is None:
        return None
    return {
        path: (resumption.path / path).read_text() for path in checks.files_below(resumption.path) - {checks.MANIFEST}
    }


WHOLE = {f"shards/of_rank_{rank}.bin": f"content of {rank}" for rank in range(2)} | {"trainer_state.json": "{}"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_save_reaches_home_and_a_resume_every_node(tmp_path: Path, backend: str) -> None:
    """The training back end is never asked to move anything, so one that only knows GPU memory will do."""

    def body(channel: Channel) -> dict[str, str] | None:
        run = start(channel, tmp_path)
        save(run)
        return files_of(resume_latest(run))

    assert run_ranks(body, count=2, backend=backend) == [WHOLE, WHOLE]
    checks.assert_matches_manifest(tmp_path / "node0" / f"checkpoint-{STEP}")
    checks.assert_matches_manifest(tmp_path / "node1" / f"checkpoint-{STEP}", scope="part")


def flipped(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("verify", "damage", "noticed"),
    [
        ("digest", flipped, True),
        ("digest", cut, True),
        ("size", flipped, False),
        ("size", cut, True),
        ("off", cut, False),
        ("off", Path.unlink, True),
    ],
)
def test_verify_says_how_closely_a_checkpoint_is_looked_at(
    tmp_path: Path, verify: str, damage: Callable[[Path], None], noticed: bool
) -> None:
    run = start(NOWHERE, tmp_path, verify=verify)
    save(run)
    damage(tmp_path / f"node0/checkpoint-{STEP}/shards/of_rank_0.bin")

    assert (resume_latest(run) is None) == noticed


def test_a_name_from_another_rank_that_leaves_the_checkpoint_is_refused(tmp_path: Path) -> None:
    """A worker whose file list has been tampered with."""

    def body(channel: Channel) -> Any:
        run = start(channel, tmp_path)
        listing = layout.list_files
        with pytest.MonkeyPatch.context() as patch:
            if channel.rank == 1:
                patch.setattr(
                    "safe_trainer.save.list_files",
                    lambda root: {path.replace("shards/", "../../../"): info for path, info in listing(root).items()},
                )
            return outcome_of(lambda: save(run))

    outcomes = run_ranks(body, count=2)

    assert {outcome.kind for outcome in outcomes} == {"UnsafePathError"}
    assert not list(tmp_path.glob("of_rank_*"))
    assert checks.checkpoints(tmp_path / "node0") == []


def test_a_checkpoint_under_the_name_of_another_step_is_not_complete(tmp_path: Path) -> None:
    run = start(NOWHERE, tmp_path)
    save(run)
    (tmp_path / f"node0/checkpoint-{STEP}").rename(tmp_path / "node0/checkpoint-100")

    with pytest.raises(IncompleteCheckpointError, match=f"its manifest is of step {STEP}"):
        resume_path(run, tmp_path / "node0/checkpoint-100")


def test_a_symbolic_link_out_of_the_checkpoint_is_refused_at_the_save(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not yours")
    run = start(NOWHERE, tmp_path)

    def write(directory: Path) -> None:
        (directory / "trainer_state.json").symlink_to(secret)

    with pytest.raises(CheckpointError, match="symbolic link"):
        save_checkpoint(run, step=STEP, write=write, rotation=Rotation)

    assert checks.checkpoints(tmp_path / "node0") == []
    checks.assert_only_checkpoints(tmp_path / "node0")


def test_a_resumed_path_that_is_nowhere_is_an_error_on_every_rank(tmp_path: Path) -> None:
    def body(channel: Channel) -> Any:
        run = start(channel, tmp_path)
        return outcome_of(lambda: resume_path(run, tmp_path / "elsewhere" / "checkpoint-3"))

    outcomes = run_ranks(body, count=2)

    assert {outcome.kind for outcome in outcomes} == {IncompleteCheckpointError.__name__}
    assert all("does not exist on any node" in outcome.message for outcome in outcomes)


def test_files_added_after_the_commit_are_delivered_too(tmp_path: Path) -> None:
    """As a Trainer does that writes into checkpoint-N after super()._save_checkpoint (case N1)."""

    def body(channel: Channel) -> dict[str, str] | None:
        run = start(channel, tmp_path)
        save(run)
        if channel.rank == 0:
            (tmp_path / f"node0/checkpoint-{STEP}/added.json").write_text("{}")
        return files_of(resume_latest(run))

    assert run_ranks(body, count=2) == [WHOLE | {"added.json": "{}"}] * 2


@pytest.mark.parametrize("damage", [flipped, cut, Path.unlink])
def test_a_damaged_copy_on_home_is_mended_from_a_whole_one_on_another_disk(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    def body(channel: Channel) -> tuple[int | None, dict[str, str] | None]:
        run = start(channel, tmp_path, local_copies="full")
        save(run, step=STEP - 1)
        save(run, step=STEP)
        if channel.rank == 0:
            damage(tmp_path / f"node0/checkpoint-{STEP}/shards/of_rank_0.bin")
        found = resume_latest(run)
        return (None if found is None else found.step), files_of(found)

    assert run_ranks(body, count=2) == [(STEP, WHOLE), (STEP, WHOLE)]
    checks.assert_matches_manifest(tmp_path / f"node0/checkpoint-{STEP}")


def test_the_number_of_collectives_is_the_same_for_few_and_many_files(tmp_path: Path) -> None:
    def count_for(files: int) -> int:
        run = start(NOWHERE, tmp_path / str(files))
        calls = []
        together = Channel.together

        def counted(self: Channel, phase: str, action: Callable[[], Any], **options: Any) -> list[Any]:
            calls.append(phase)
            return together(self, phase, action, **options)

        def write(directory: Path) -> None:
            for index in range(files):
                (directory / f"{index}.bin").write_text("x")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Channel, "together", counted)
            save_checkpoint(run, step=STEP, write=write, rotation=Rotation)
        return len(calls)

    assert count_for(1) == count_for(200)
