"""A network that is cut, or a host that is gone, in the middle of a save: who is left says who is missing, and what was
committed is there.

Two hosts with networks of their own; the store lives on the first, with rank 0. Where the network is cut, no connection
is closed: packets just stop, so only the beats that stay away tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from safe_trainer.channel import Channel
from safe_trainer.errors import ProcessGroupLostError
from safe_trainer.options import CheckpointOptions
from safe_trainer.rotation import Rotation
from safe_trainer.run import open_run
from safe_trainer.save import save_checkpoint
from tests import checks
from tests.cluster import Json
from tests.filesystems import hosts
from tests.filesystems.hosts import Host, Hosts
from tests.filesystems.job import Job

TIMEOUT_S = 3.0
# A beat, the guard's tick, and a busy machine.
SLACK_S = 6.0

_reason = hosts.why_not()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))


def save_until_cut(*, tell: Callable[[Json], None], root: str, in_collective: bool) -> Json:
    """Saves once; in the second save the ranks wait for what never comes, and say what they make of it."""
    channel = Channel.open(timeout_s=TIMEOUT_S)
    directory = Path(root) / f"host{channel.rank // 2}"
    run = open_run(directory, channel=channel, options=CheckpointOptions(storage="local"), saved_by={})

    def write(staged: Path, *, is_second: bool = False) -> None:
        (staged / f"rank{channel.rank}.bin").write_bytes(b"x" * 1000)
        if is_second:
            tell("writing")
            time.sleep(1.5)  # the link is cut meanwhile
            if in_collective:
                dist.all_reduce(torch.zeros(2))

    save_checkpoint(run, step=1, write=write, rotation=Rotation)
    started = time.monotonic()
    try:
        save_checkpoint(run, step=2, write=lambda staged: write(staged, is_second=True), rotation=Rotation)
    except ProcessGroupLostError as error:
        return {"missing": list(error.missing), "text": str(error), "seconds": time.monotonic() - started}
    return "saved"


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[tuple[Hosts, Job]]:
    with Hosts("a", "b") as machines, Job(list[Host](machines), machines.directory, ranks_per_host=2) as job:
        yield machines, job


@pytest.mark.parametrize("in_collective", [True, False], ids=["in a collective", "at the end of the step"])
def test_both_sides_of_a_cut_network_say_who_is_missing(
    two_hosts: tuple[Hosts, Job], tmp_path: Path, in_collective: bool
) -> None:
    machines, job = two_hosts

    calls = job.start(save_until_cut, root=str(tmp_path), in_collective=in_collective)
    assert calls.wait(lambda: all(answer.told for answer in calls.answers), timeout_s=60.0)
    machines.cut("b")
    try:
        results: list[Any] = calls.results(timeout_s=40.0)
    finally:
        machines.heal("b")

    assert [result["missing"] for result in results] == [[2, 3], [2, 3], [0, 1], [0, 1]]
    assert "no sign of life from rank 2 on b, rank 3 on b for 3 s" in results[0]["text"]
    assert "no contact with the job's store" in results[2]["text"]
    assert "rank 0 on a, rank 1 on a missing" in results[2]["text"]
    assert max(result["seconds"] for result in results) < 1.5 + TIMEOUT_S + SLACK_S
    home = tmp_path / "host0"
    assert checks.checkpoints(home) == [1]
    checks.assert_matches_manifest(home / "checkpoint-1")


@pytest.mark.parametrize(("gone", "missing"), [(1, [2, 3]), (0, [0, 1])], ids=["another host", "home with the store"])
def test_who_is_left_names_the_ranks_of_a_host_that_is_gone(
    two_hosts: tuple[Hosts, Job], tmp_path: Path, gone: int, missing: list[int]
) -> None:
    _, job = two_hosts

    calls = job.start(save_until_cut, root=str(tmp_path), in_collective=True)
    assert calls.wait(lambda: all(answer.told for answer in calls.answers), timeout_s=60.0)
    calls.kill_host(gone)
    calls.settle(timeout_s=40.0)

    left: list[Any] = [calls.answers[rank].value for rank in range(4) if rank not in missing]
    for result in left:
        assert result["missing"] == missing, result
        for rank in missing:
            assert f"rank {rank} on " in result["text"]
        assert result["seconds"] < 1.5 + TIMEOUT_S + SLACK_S
    checks.assert_matches_manifest(tmp_path / "host0" / "checkpoint-1")
