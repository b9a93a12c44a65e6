"""Network file systems' bad habits, on a real (FUSE) file system between real processes: cases S6, S7, and no exchange.

No model and no transformers: a run, and saves with plain file writers.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from safe_trainer.channel import Channel
from safe_trainer.commit import Generation, RunDirectory
from safe_trainer.integrity import file_problem, inspect_checkpoint
from safe_trainer.layout import AREA_NAME
from safe_trainer.manifest import Manifest
from safe_trainer.options import CheckpointOptions
from safe_trainer.rotation import Rotation
from safe_trainer.run import Run, open_run
from safe_trainer.save import SaveReport, save_checkpoint
from tests import chaosfs
from tests.chaosfs import ChaosFS, Rule
from tests.unit.builders import contents, write_files
from tests.unit.processes import killed, run_ranks

pytestmark = pytest.mark.skipif(chaosfs.why_not() is not None, reason=str(chaosfs.why_not()))

HIDE_S = 5.0
OPTIONS = CheckpointOptions(timeout_s=60.0, lock_timeout_s=10.0, visibility_timeout_s=20.0)
OLD = {"model": b"old weights", "rng_state_0.pth": b"old", "rng_state_1.pth": b"old"}
NEW = {"model": b"new weights", "rng_state_0.pth": b"new"}


@pytest.fixture
def backing(tmp_path: Path) -> Path:
    """What is really on the disk."""
    directory = tmp_path / "backing"
    directory.mkdir()
    return directory


def open_on(root: Path, channel: Channel | None = None, *, node: int = 0) -> Run:
    os.environ["GROUP_RANK"] = str(node)
    channel = Channel.open(timeout_s=10.0) if channel is None else channel
    return open_run(root, channel=channel, options=OPTIONS, saved_by={})


def save(run: Run, step: int, write: Callable[[Path], None]) -> SaveReport:
    return save_checkpoint(run, step=step, write=write, rotation=lambda: Rotation())


def assert_whole(checkpoint: Path, files: dict[str, bytes]) -> None:
    """It has exactly these files, and its manifest is right about every byte."""
    manifest = Manifest.read(checkpoint)
    assert manifest is not None
    assert inspect_checkpoint(checkpoint, verify="digest").problems == ()
    assert [problem for entry in manifest.files if (problem := file_problem(checkpoint, entry))] == []
    assert contents(checkpoint) == files


# --- S6: what one node makes, another does not see at once ---


class TwoNodes:
    """Two mounts of one disk. Rank 0 is on the first node; ranks 1 and 2 are on the second, which sees things late."""

    def __init__(self, first: ChaosFS, second: ChaosFS) -> None:
        self.first = first
        self.second = second

    def node_of(self, rank: int) -> int:
        return min(rank, 1)

    def run_directory(self, rank: int) -> Path:
        return (self.first, self.second)[self.node_of(rank)].mount / "out"


@pytest.fixture
def late_names(backing: Path, tmp_path: Path) -> Iterator[TwoNodes]:
    """The second node does not see names made on the first for some seconds."""
    with ChaosFS(backing, tmp_path / "a") as first, ChaosFS(backing, tmp_path / "b", hide_new_names_s=HIDE_S) as second:
        yield TwoNodes(first, second)


@pytest.fixture
def stale_caches(backing: Path, tmp_path: Path) -> Iterator[TwoNodes]:
    """The second node's kernel believes for some seconds what it has once seen, and what it has not found."""
    with (
        ChaosFS(backing, tmp_path / "a") as first,
        ChaosFS(backing, tmp_path / "b", name_cache_s=3, missing_name_cache_s=3, attribute_cache_s=3) as second,
    ):
        yield TwoNodes(first, second)


def test_names_that_another_node_sees_late_do_not_split_the_disk_nor_fail_the_save(
    late_names: TwoNodes, backing: Path, tmp_path: Path
) -> None:
    def body(channel: Channel) -> tuple[list[tuple[int, ...]], int]:
        run = open_on(late_names.run_directory(channel.rank), channel, node=late_names.node_of(channel.rank))

        def write(staged: Path) -> None:
            if channel.rank == 0:  # the last to write, so that the others cannot see its file when they list theirs
                _wait_for(tmp_path / "written-1")
                _wait_for(tmp_path / "written-2")
            write_files(staged, {f"sub/rng_state_{channel.rank}.pth": bytes([channel.rank])})
            (tmp_path / f"written-{channel.rank}").touch()

        report = save(run, 10, write)
        return [domain.ranks for domain in run.topology.domains], report.files

    assert run_ranks(body) == [([(0, 1, 2)], 3)] * 3
    assert_whole(backing / "out" / "checkpoint-10", {f"sub/rng_state_{rank}.pth": bytes([rank]) for rank in range(3)})
    looked_at = [operation for operation in late_names.second.operations() if "/out/checkpoint-10" in operation.path]
    assert looked_at == [], "what is hidden must be told, not looked at"


def test_saves_go_on_while_names_stay_hidden(late_names: TwoNodes, backing: Path) -> None:
    def body(channel: Channel) -> list[int]:
        run = open_on(late_names.run_directory(channel.rank), channel, node=late_names.node_of(channel.rank))

        def write(staged: Path) -> None:
            write_files(staged, {f"rng_state_{channel.rank}.pth": bytes([channel.rank])})

        return [save(run, step, write).files for step in (10, 10)]

    assert run_ranks(body) == [[3, 3]] * 3
    assert_whole(backing / "out" / "checkpoint-10", {f"rng_state_{rank}.pth": bytes([rank]) for rank in range(3)})


def test_a_start_waits_for_directories_that_exist_and_cannot_be_seen(backing: Path, tmp_path: Path) -> None:
    with (
        ChaosFS(backing, tmp_path / "a") as a,
        ChaosFS(backing, tmp_path / "b", hide_new_names_s=2, stubborn=True) as b,
    ):
        nodes = TwoNodes(a, b)

        def body(channel: Channel) -> int:
            root = nodes.run_directory(channel.rank)
            if channel.rank == 0:
                (root / AREA_NAME / "tokens").mkdir(parents=True)
            channel.together("made on the first node", lambda: None)
            return len(open_on(root, channel, node=nodes.node_of(channel.rank)).topology.domains)

        assert run_ranks(body) == [1] * 3


def test_a_size_that_another_nodes_cache_has_wrong_is_not_taken_for_the_writers(
    stale_caches: TwoNodes, backing: Path, tmp_path: Path
) -> None:
    begun, looked = tmp_path / "begun", tmp_path / "looked"

    def body(channel: Channel) -> int:
        run = open_on(stale_caches.run_directory(channel.rank), channel, node=stale_caches.node_of(channel.rank))

        def write(staged: Path) -> None:
            if channel.rank == 0:
                with open(staged / "model", "wb") as stream:
                    stream.write(b"half")
                    stream.flush()
                    begun.touch()
                    _wait_for(looked)
                    stream.write(b" and the rest")
            if channel.rank == 1:
                _wait_for(begun)
                assert (staged / "model").stat().st_size == 4
                looked.touch()

        return save(run, 10, write).bytes

    assert run_ranks(body) == [17] * 3
    assert_whole(backing / "out" / "checkpoint-10", {"model": b"half and the rest"})


def test_a_name_that_a_node_has_missed_before_is_found_later(stale_caches: TwoNodes, backing: Path) -> None:
    def body(channel: Channel) -> int:
        root = stale_caches.run_directory(channel.rank)
        assert not (root / "checkpoint-10").exists()
        assert not (root / AREA_NAME).exists()
        channel.together("have missed them", lambda: None)
        run = open_on(root, channel, node=stale_caches.node_of(channel.rank))
        return save(run, 10, lambda staged: write_files(staged, {f"{channel.rank}": b""})).files

    assert run_ranks(body) == [3] * 3
    assert_whole(backing / "out" / "checkpoint-10", {"0": b"", "1": b"", "2": b""})


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30.0
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.02)


# --- no exchange of two names: a checkpoint is replaced by two renames ---


@pytest.fixture
def no_exchange(backing: Path, tmp_path: Path) -> Iterator[ChaosFS]:
    with ChaosFS(backing, tmp_path / "mount", exchange=False) as disk:
        yield disk


def writes(files: dict[str, bytes]) -> Callable[[Path], None]:
    return lambda staged: write_files(staged, files)


def renames_of_checkpoint(disk: ChaosFS) -> list[tuple[bool, str]]:
    """Every rename of checkpoint-10: whether it began in staging, and how it went."""
    renames = [operation for operation in disk.operations("rename") if operation.path.endswith("/checkpoint-10")]
    return [("/staging/" in operation.path, operation.result) for operation in renames]


def test_saving_a_step_again_takes_two_renames(no_exchange: ChaosFS, backing: Path) -> None:
    run = open_on(no_exchange.mount / "out")
    save(run, 10, writes(OLD))
    save(run, 10, writes(NEW))
    assert_whole(backing / "out" / "checkpoint-10", NEW)
    first_save, exchange, aside, final, trash = renames_of_checkpoint(no_exchange)
    assert (first_save, exchange) == ((True, "ok"), (True, "EINVAL"))
    assert (aside, final, trash) == ((False, "ok"), (True, "ok"), (False, "ok"))
    assert sorted(os.listdir(backing / "out" / AREA_NAME)) == ["generation.json", "lock"]


# Of the renames out of staging the second is the deciding one: the first was the exchange that is not to be had.
@pytest.mark.parametrize(
    ("rule", "left", "found"),
    [
        (Rule("rename", "/out/checkpoint-10", kill="before"), OLD, OLD),
        (Rule("rename", "/out/checkpoint-10", kill="after"), None, OLD),
        (Rule("rename", "*/staging/*/checkpoint-10", nth=2, kill="before"), None, OLD),
        (Rule("rename", "*/staging/*/checkpoint-10", nth=2, kill="after"), NEW, NEW),
        (Rule("fsyncdir", "/out", kill="before"), NEW, NEW),
        (Rule("rename", "*/replaced/checkpoint-10", kill="before"), NEW, NEW),
    ],
    ids=["before both", "after the first", "before the second", "after the second", "before fsync", "before the sweep"],
)
def test_killed_while_replacing_the_next_start_finds_the_old_or_the_new_one(
    no_exchange: ChaosFS,
    backing: Path,
    caplog: pytest.LogCaptureFixture,
    rule: Rule,
    left: dict[str, bytes] | None,
    found: dict[str, bytes],
) -> None:
    root = no_exchange.mount / "out"
    save(open_on(root), 10, writes(OLD))

    def die_while_saving() -> None:
        run = open_on(root)
        no_exchange.set_rules([rule])
        save(run, 10, writes(NEW))

    assert killed(die_while_saving)
    no_exchange.set_rules([])
    on_disk = backing / "out" / "checkpoint-10"
    assert on_disk.exists() is (left is not None)
    assert left is None or contents(on_disk) == left
    open_on(root)
    assert_whole(on_disk, found)
    assert ("Putting back" in caplog.text) is (left is None)
    assert sorted(os.listdir(backing / "out" / AREA_NAME)) == ["generation.json", "lock"]


def test_a_second_rename_that_fails_leaves_the_old_one(no_exchange: ChaosFS, backing: Path) -> None:
    run = open_on(no_exchange.mount / "out")
    save(run, 10, writes(OLD))
    no_exchange.set_rules([Rule("rename", "*/staging/*/checkpoint-10", nth=2, error="EIO")])
    with pytest.raises(Exception, match="EIO"):
        save(run, 10, writes(NEW))
    assert_whole(backing / "out" / "checkpoint-10", OLD)


def test_errors_that_a_writer_swallows_at_close_are_found_before_the_commit(
    no_exchange: ChaosFS, backing: Path
) -> None:
    run = open_on(no_exchange.mount / "out")
    no_exchange.set_rules([Rule("fsync", "*/model", error="ENOSPC")])
    with pytest.raises(Exception, match=r"ENOSPC.*model"):
        save(run, 10, writes(NEW))
    assert sorted(os.listdir(backing / "out")) == [AREA_NAME]


# --- S7: no file locks ---


@pytest.fixture(params=["ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def no_locks(backing: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ChaosFS]:
    with ChaosFS(backing, tmp_path / "mount", locks=request.param) as disk:
        yield disk


def test_without_locks_it_warns_once_and_saves(
    no_locks: ChaosFS, backing: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = open_on(no_locks.mount / "out")
    for files in (OLD, NEW):
        save(run, 10, writes(files))
    assert_whole(backing / "out" / "checkpoint-10", NEW)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "no working file locks" in warnings[0]


def test_without_locks_an_older_run_is_fenced_off_all_the_same(no_locks: ChaosFS) -> None:
    run = open_on(no_locks.mount / "out")
    RunDirectory(no_locks.mount / "out", lock_timeout_s=1.0).take(Generation.following(1, "newer"))
    with pytest.raises(Exception, match="belongs to run 2"):
        save(run, 10, writes(NEW))
