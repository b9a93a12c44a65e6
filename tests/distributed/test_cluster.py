"""The harness itself: nodes are separate where real ones are, and nothing that goes wrong on a rank goes unseen."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.cluster import LAYOUTS, REPOSITORY, Cluster, Disks, Json, Layout, RemoteError, ScenarioError, cluster_job

# --- What the ranks are made to do ---


def leave_name(directory: str) -> list[str]:
    """Writes a file named after this rank, then lists what all have written."""
    (Path(directory) / f"rank{dist.get_rank()}").touch()
    dist.barrier()
    return listed(directory)


def listed(directory: str) -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir())


def place() -> Json:
    variables = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return [*(int(os.environ[name]) for name in variables), socket.gethostname()]


def is_distributed() -> bool:
    return dist.is_initialized() or "RANK" in os.environ


def fail(ranks: list[int]) -> str:
    if dist.get_rank() in ranks:
        error = FileNotFoundError(2, "not there")
        error.path = f"/checkpoint-{dist.get_rank()}"  # type: ignore[attr-defined]
        raise error
    return "well"


def fail_at_different_points() -> None:
    """Leaves the ranks with different numbers of groups and of collectives behind them."""
    if dist.get_rank() > 0:
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    raise RuntimeError("uneven")


def sum_in_new_group() -> int:
    numbers = torch.tensor([dist.get_rank()])
    dist.all_reduce(numbers, group=dist.new_group())
    return int(numbers)


def fail_beside_a_collective() -> None:
    if dist.get_rank() == 0:
        raise RuntimeError("rank 0 never comes")
    dist.barrier()


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


def end_process(code: int) -> None:
    os._exit(code)


def kill_process(number: int) -> None:
    os.kill(os.getpid(), number)


def mark_and_meet(directory: str) -> str:
    """Says that it runs, then waits for a peer that is killed meanwhile."""
    (Path(directory) / "running").touch()
    if dist.get_rank() == 1:
        sleep_for_ever()
    dist.barrier()
    return "met"


# --- Nodes and disks ---

EXPECTED_LISTINGS = {
    "shared": [["rank0", "rank1", "rank2"]] * 3,
    "split": [["rank0"], ["rank1"], ["rank2"]],
    "pair": [["rank0"], ["rank1", "rank2"], ["rank1", "rank2"]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nodes_see_the_disks_of_their_layout_under_one_path(three_nodes: Cluster, layout: Layout) -> None:
    disks = three_nodes.disks(layout, "names")

    seen = three_nodes.run(leave_name, directory=disks.path)

    assert seen == EXPECTED_LISTINGS[layout]
    assert [listed(str(disks.node(node))) for node in range(3)] == EXPECTED_LISTINGS[layout]


def test_a_disk_is_wiped_and_swapped_under_the_feet_of_its_node(three_nodes: Cluster) -> None:
    disks = three_nodes.disks("split", "names")
    three_nodes.run(leave_name, directory=disks.path)

    disks.wipe(0)
    disks.swap(1, 2)

    assert three_nodes.run(listed, directory=disks.path) == [[], ["rank2"], ["rank1"]]


def test_disks_of_one_name_are_fresh_each_time(three_nodes: Cluster) -> None:
    three_nodes.run(leave_name, directory=three_nodes.disks("shared", "again").path)

    assert listed(str(three_nodes.disks("shared", "again").node(0))) == []


def test_ranks_get_their_places_from_the_launcher(two_nodes: Cluster) -> None:
    places = two_nodes.run(place)

    hosts = ["node0", "node1"] if two_nodes.isolated else [socket.gethostname()] * 2
    assert places == [[2 * node + local, local, node, 4, 2, hosts[node]] for node in range(2) for local in range(2)]


def test_a_single_process_is_not_distributed(one_process: Cluster) -> None:
    assert one_process.run(is_distributed) == [False]


def test_without_namespaces_nodes_have_different_paths_and_different_disks() -> None:
    with Cluster(nodes=2, ranks_per_node=1, isolation="none") as cluster:
        disks = cluster.disks("split", "names")

        assert cluster.run(leave_name, directory=disks.path) == [["rank0"], ["rank1"]]
        assert disks.path_on(0) != disks.path_on(1)


# --- What goes wrong on ranks ---


def test_every_error_is_reported_and_the_ranks_live_on(two_nodes: Cluster) -> None:
    before = two_nodes.run(os.getpid)

    with pytest.raises(ScenarioError) as caught:
        two_nodes.run(fail, ranks=[1, 3])

    assert sorted(caught.value.errors) == [1, 3]
    assert caught.value.results == {0: "well", 2: "well"}
    error = caught.value.errors[3]
    assert error.type == "builtins.FileNotFoundError"
    assert error.is_a("OSError")
    assert error.attributes["path"] == "/checkpoint-3"
    assert "in fail" in error.traceback
    assert two_nodes.run(os.getpid) == before


def test_errors_come_as_values_when_asked_for(two_nodes: Cluster) -> None:
    outcomes = two_nodes.run(fail, ranks=[2], raise_errors=False)

    assert [isinstance(outcome, RemoteError) for outcome in outcomes] == [False, False, True, False]


def test_collectives_match_after_ranks_failed_at_different_points(two_nodes: Cluster) -> None:
    before = two_nodes.run(os.getpid)
    two_nodes.run(fail_at_different_points, raise_errors=False)

    assert two_nodes.run(sum_in_new_group, timeout_s=20) == [6] * 4
    assert two_nodes.run(os.getpid) == before


def test_ranks_that_wait_for_a_failed_one_are_reported_with_their_stacks(three_nodes: Cluster) -> None:
    outcomes = three_nodes.run(fail_beside_a_collective, straggler_s=1, raise_errors=False)

    assert [outcome.type for outcome in outcomes] == ["builtins.RuntimeError", "Hang", "Hang"]
    assert "in fail_beside_a_collective" in outcomes[1].traceback
    assert three_nodes.run(sum_in_new_group) == [3] * 3, "a new launch does the next scenario"


def test_a_rank_that_hangs_is_reported_in_time(one_process: Cluster) -> None:
    started = time.monotonic()

    outcomes = one_process.run(sleep_for_ever, timeout_s=1, raise_errors=False)

    assert outcomes[0].type == "Hang"
    assert "in sleep_for_ever" in outcomes[0].traceback
    assert time.monotonic() - started < 30, "1 s and a start"


def test_a_rank_that_dies_is_reported(one_process: Cluster) -> None:
    outcomes = one_process.run(end_process, code=3, raise_errors=False)

    assert outcomes[0].type == "Died"
    assert one_process.run(is_distributed) == [False], "a new launch does the next scenario"


# --- Jobs ---


def test_a_power_cut_ends_one_node_and_the_other_reports(tmp_path: Path) -> None:
    disks = Disks.create(tmp_path, "split", 2, "job")
    with cluster_job(2, 1, mark_and_meet, disks=[disks], directory=disks.path) as job:
        wait_for(disks.node(0) / "running")
        wait_for(disks.node(1) / "running")

        job.kill_node(1)
        codes = job.wait(timeout_s=60)

        assert codes[1] == -signal.SIGKILL
        assert codes[0] != 0
        survivor, killed = job.results()
        assert survivor.is_a("RuntimeError"), "gloo's: the connection was lost"
        assert killed.type == "Died"


def test_a_job_that_ends_well_gives_results_and_zeros() -> None:
    with cluster_job(2, 1, fail, ranks=[]) as job:
        assert job.wait(timeout_s=60) == [0, 0]
        assert job.results() == ["well", "well"]


def test_a_job_of_one_process_ends_by_its_own_signal() -> None:
    with cluster_job(1, 1, kill_process, number=signal.SIGKILL) as job:
        assert job.wait(timeout_s=20) == [-signal.SIGKILL]


def test_a_job_is_told_to_end() -> None:
    with cluster_job(1, 2, sleep_for_ever) as job:
        job.terminate_node(0)

        assert job.wait(timeout_s=60) != [0]


def test_a_job_that_takes_too_long_is_ended_and_says_where_it_was() -> None:
    with cluster_job(1, 1, sleep_for_ever) as job, pytest.raises(TimeoutError, match="in sleep_for_ever"):
        job.wait(timeout_s=1)


def test_a_job_may_be_a_command() -> None:
    with cluster_job(1, 1, ["sh", "-c", "echo $TOLD; exit 3"], env={"TOLD": "this"}) as job:
        assert job.wait(timeout_s=20) == [3]
        assert "this" in job.log_of(0)


def wait_for(path: Path, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.05)


# --- Cleaning up ---

ABANDONED = """
import signal, time
from tests.cluster import Cluster
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
cluster = Cluster(1, 1)
cluster.run("os:getpid")
print(cluster.disks("shared", "left").node(0), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_the_test_process_nothing_stays(number: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", ABANDONED], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    directory = Path(process.stdout.readline().strip())
    descendants = psutil.Process(process.pid).children(recursive=True)

    process.send_signal(number)
    process.communicate(timeout=30)

    _, alive = psutil.wait_procs(descendants, timeout=10)
    assert descendants
    assert not alive
    with Cluster(1, 1):  # tidies up after the one that could not
        assert not directory.exists()
