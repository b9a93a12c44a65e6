"""SIGKILL to every process of a job at any moment of a save (case U1), thirty times over in one run directory.

Each life resumes from what the one before it left, goes on saving, and is killed in its turn.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from safe_trainer.channel import Channel
from safe_trainer.layout import list_checkpoints
from safe_trainer.options import CheckpointOptions
from safe_trainer.resume import resume_latest
from safe_trainer.rotation import Rotation
from safe_trainer.run import open_run
from safe_trainer.save import save_checkpoint
from tests import checks

LIVES = 30
RANKS = 4
START_TIMEOUT_S = 60.0
LONGEST_LIFE_S = 0.5
FILE_BYTES = 300_000

_FORK = multiprocessing.get_context("fork")


def content_of(step: int, rank: int) -> bytes:
    return f"{step}/{rank} ".encode() * (FILE_BYTES // 8)


def node_of(layout: str, rank: int) -> int:
    return 0 if layout == "shared" else rank // 2


def live(root: Path, layout: str, rank: int, rendezvous: str, parent: Connection) -> None:
    """One rank of one life: resume, tell the parent from which step, and save one step after another for ever."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", GROUP_RANK=str(rank // 2))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    storage = "shared" if layout == "shared" else "local"
    run = open_run(
        root / f"node{node_of(layout, rank)}",
        channel=Channel.open(timeout_s=20.0),
        options=CheckpointOptions(storage=storage),
        saved_by={},
    )
    found = resume_latest(run)
    step = 0 if found is None or found.step is None else found.step
    if found is not None:
        for peer in range(RANKS):
            assert (found.path / f"rank{peer}.bin").read_bytes() == content_of(step, peer)
    parent.send(step)
    while True:
        step += 1
        this_step = step

        def write(directory: Path, step: int = this_step) -> None:
            (directory / f"rank{rank}.bin").write_bytes(content_of(step, rank))
            if rank == 0:
                (directory / "trainer_state.json").write_text("{}")

        save_checkpoint(run, step=step, write=write, rotation=lambda: Rotation(limit=2))


def one_life(root: Path, layout: str, life_s: float) -> int:
    """Run a job for ``life_s`` seconds after it has resumed, then kill it; the step that it resumed from."""
    rendezvous = f"file://{root}/rendezvous-{time.monotonic_ns()}"
    pipes = [_FORK.Pipe(duplex=False) for _ in range(RANKS)]
    ranks = [
        _FORK.Process(target=live, args=(root, layout, rank, rendezvous, pipes[rank][1]), daemon=True)
        for rank in range(RANKS)
    ]
    try:
        for process in ranks:
            process.start()
        steps = set()
        for reader, _ in pipes:
            assert reader.poll(START_TIMEOUT_S), "a rank did not resume"
            steps.add(reader.recv())
        time.sleep(life_s)
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.join()
    assert len(steps) == 1
    return steps.pop()


@pytest.mark.parametrize("layout", ["shared", "split"])
def test_after_any_kill_the_newest_complete_checkpoint_is_taken(tmp_path: Path, layout: str) -> None:
    moments = random.Random(layout)
    home = tmp_path / "node0"
    resumed: list[int] = []
    longest_s = LONGEST_LIFE_S

    for _ in range(LIVES):
        if len(set(resumed[-3:])) == 1 and len(resumed) >= 3:
            longest_s *= 2  # the disk is too slow for a save in such a short life
        newest = max((step for step, _ in list_checkpoints(home)), default=0)
        resumed.append(one_life(tmp_path, layout, moments.uniform(0.0, longest_s)))
        assert resumed[-1] == newest
        for _, checkpoint in list_checkpoints(home):
            checks.assert_matches_manifest(checkpoint)

    assert len(set(resumed)) > LIVES // 3  # the job made progress, so the kills came during many different saves
    assert len(list_checkpoints(home)) <= 3  # two, and one that a killed rotation had left
