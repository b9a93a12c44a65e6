"""commit: what happens on one disk. Generation, staging, the deciding rename, trash, lock.

A crash is a process that really dies (SIGKILL); what the next run makes of it is asked of a fresh `RunDirectory`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from safe_trainer import commit, disk, lock
from safe_trainer.commit import Generation, RunDirectory
from safe_trainer.disk import exchange, fsync_directory, fsync_file, fsync_tree
from safe_trainer.errors import CheckpointError, RunDirectoryTaken
from safe_trainer.integrity import file_problem, inspect_checkpoint
from safe_trainer.layout import AREA_NAME, JIT_SENTINEL_NAME, MANIFEST_NAME, list_checkpoints
from safe_trainer.manifest import Manifest
from tests.unit.builders import contents, make_checkpoint, save, stage, start_run, write_files
from tests.unit.mounts import leave_mount_namespace, make_read_only, mount_small_disk, needs_mounts
from tests.unit.processes import die_before, killed, run_in_child, running

OLD = {"model.safetensors": b"old weights", "rng_state_0.pth": b"0", "rng_state_1.pth": b"1"}
NEW = {"model.safetensors": b"new weights", "rng_state_0.pth": b"2", "sub/.file": b""}


def names_in(directory: Path) -> set[str]:
    return {entry.name for entry in os.scandir(directory)}


def is_whole(checkpoint: Path) -> bool:
    """Complete, down to every digest."""
    manifest = Manifest.read(checkpoint)
    assert manifest is not None
    return inspect_checkpoint(checkpoint, verify="digest").complete and not any(
        file_problem(checkpoint, entry) for entry in manifest.files
    )


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that cannot exchange two directories (NFS, most of FUSE)."""
    monkeypatch.setattr(commit, "exchange", lambda first, second: False)


# --- generations: one writer (S10) ---


def test_the_first_run_finds_generation_0_and_takes_1(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, lock_timeout_s=5.0)
    assert directory.newest_generation() == 0
    directory.take(Generation.following(0, "first"))
    assert directory.newest_generation() == 1


def test_taking_makes_the_run_directory(tmp_path: Path) -> None:
    start_run(tmp_path / "not" / "there")
    assert names_in(tmp_path / "not" / "there" / AREA_NAME) == {"generation.json", "lock"}


def test_a_generation_says_who_runs_here(tmp_path: Path) -> None:
    start_run(tmp_path, 3)
    written = json.loads((tmp_path / AREA_NAME / "generation.json").read_text())
    assert (written["number"], written["run_id"], written["pid"]) == (3, "run-id-3", os.getpid())


def test_an_older_run_may_not_commit_any_more_and_learns_who_took_over(tmp_path: Path) -> None:
    older = start_run(tmp_path, 1)
    staged = stage(older, 10, NEW)
    start_run(tmp_path, 2)
    staged.mkdir(parents=True, exist_ok=True)
    with pytest.raises(RunDirectoryTaken, match=f"belongs to run 2 .*process {os.getpid()}.*this is run 1"):
        older.commit(staged)
    assert list_checkpoints(tmp_path) == []


def test_an_older_run_leaves_what_the_newer_has_committed(tmp_path: Path) -> None:
    older = start_run(tmp_path, 1)
    newer = start_run(tmp_path, 2)
    save(newer, 10, NEW)
    staged = stage(older, 10, OLD, save="late")
    with pytest.raises(RunDirectoryTaken):
        older.commit(staged)
    assert contents(tmp_path / "checkpoint-10") == NEW


@pytest.mark.parametrize("number", [1, 2])
def test_who_comes_with_a_number_that_is_taken_or_passed_gets_the_next_one(tmp_path: Path, number: int) -> None:
    older = start_run(tmp_path, 2)
    later = RunDirectory(tmp_path, lock_timeout_s=5.0)
    assert later.take(Generation.following(number - 1, "later")).number == 3
    later.check_generation()
    with pytest.raises(RunDirectoryTaken, match="belongs to run 3"):
        older.check_generation()


def test_of_runs_that_start_at_the_same_moment_each_gets_a_number_and_the_greatest_wins(tmp_path: Path) -> None:
    (tmp_path / AREA_NAME).mkdir()
    taken: dict[str, int] = {}
    threads = [
        threading.Thread(target=lambda name=name: taken.update({name: run_in_child(lambda: _take(tmp_path, name))}))  # type: ignore[misc]
        for name in ("a", "b", "c")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken.values()) == [1, 2, 3]
    newest = json.loads((tmp_path / AREA_NAME / "generation.json").read_text())
    assert newest["run_id"] == max(taken, key=lambda name: taken[name])


def _take(root: Path, run_id: str) -> int:
    return RunDirectory(root, lock_timeout_s=10.0).take(Generation.following(0, run_id)).number


@pytest.mark.parametrize(
    ("number", "run_id"), [(2, "a"), (1, "z")], ids=["a lower number", "the same number and a lower id"]
)
def test_on_another_disk_the_greater_generation_stays_and_the_other_one_learns_whose_it_is(
    tmp_path: Path, number: int, run_id: str
) -> None:
    RunDirectory(tmp_path, lock_timeout_s=5.0).follow(Generation.following(1, "b"))
    with pytest.raises(RunDirectoryTaken, match=f"belongs to run 2 .*process {os.getpid()}"):
        RunDirectory(tmp_path, lock_timeout_s=5.0).follow(Generation.following(number - 1, run_id))
    assert json.loads((tmp_path / AREA_NAME / "generation.json").read_text())["run_id"] == "b"


@pytest.mark.parametrize(("number", "run_id"), [(3, "a"), (2, "c")], ids=["number", "id"])
def test_on_another_disk_a_greater_generation_takes_over(tmp_path: Path, number: int, run_id: str) -> None:
    older = RunDirectory(tmp_path, lock_timeout_s=5.0)
    older.follow(Generation.following(1, "b"))
    RunDirectory(tmp_path, lock_timeout_s=5.0).follow(Generation.following(number - 1, run_id))
    with pytest.raises(RunDirectoryTaken, match=f"belongs to run {number}"):
        older.check_generation()


def test_a_generation_that_others_overwrite_is_written_again_and_at_last_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path, lock_timeout_s=5.0)
    real = disk.write_durably
    overwrites = 0

    def overwritten(path: Path, text: str) -> None:
        nonlocal overwrites
        real(path, text)
        if overwrites < allowed:
            overwrites += 1
            number = json.loads(text)["number"]
            real(path, json.dumps({"number": number, "run_id": "somebody"}))

    monkeypatch.setattr("safe_trainer.commit.write_durably", overwritten)
    allowed = 2
    assert directory.take(Generation.following(0, "own")).number == 3
    allowed = 100
    with pytest.raises(CheckpointError, match="does not keep what is written"):
        directory.take(Generation.following(0, "own"))


def test_who_has_not_started_a_run_may_not_commit(tmp_path: Path) -> None:
    start_run(tmp_path)
    with pytest.raises(RunDirectoryTaken, match="has not started a run"):
        RunDirectory(tmp_path, lock_timeout_s=1.0).check_generation()


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "{}", '{"number": 1, "surprise": 2}', '{"number": "1"}'])
def test_a_damaged_generation_file_is_an_error_that_says_what_to_do(tmp_path: Path, text: str) -> None:
    write_files(tmp_path, {f"{AREA_NAME}/generation.json": text.encode()})
    with pytest.raises(CheckpointError, match=r"generation\.json is damaged.*delete it"):
        RunDirectory(tmp_path, lock_timeout_s=1.0).newest_generation()


# --- the start of a run clears what dead runs left (F6) ---


def test_a_start_sweeps_dead_staging_deliveries_and_trash(tmp_path: Path) -> None:
    dead = start_run(tmp_path, 1)
    stage(dead, 10, NEW)
    write_files(tmp_path / AREA_NAME, {"delivered/1-0a1b2c3d-1-resume/checkpoint-5/model": b"", "trash/y/model": b""})
    start_run(tmp_path, 2)
    assert names_in(tmp_path / AREA_NAME) == {"generation.json", "lock"}
    assert names_in(tmp_path) == {AREA_NAME}


def test_a_start_leaves_checkpoints_and_strangers_alone(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 10, OLD)
    write_files(tmp_path, {"runs/events": b"", "checkpoint-5.tmp/x": b"", "checkpoint-20/half": b""})
    start_run(tmp_path)
    assert names_in(tmp_path) == {AREA_NAME, "checkpoint-10", "checkpoint-20", "checkpoint-5.tmp", "runs"}
    assert contents(tmp_path / "checkpoint-10") == OLD


def test_a_start_leaves_what_a_newer_run_stages_and_what_has_a_name_of_another_kind(tmp_path: Path) -> None:
    kept = {"3-0a1b2c3d-0-10", "10-0a1b2c3d-0-10", "notes", "0-0a1b2c3d-0-10", "1-0A1B2C3D-0-10"}
    swept = {"1-0a1b2c3d-0-10", "2-0a1b2c3d-7-resume"}
    for name in kept | swept:
        write_files(tmp_path / AREA_NAME, {f"staging/{name}/checkpoint-10/model": b""})
    start_run(tmp_path, 2)
    assert names_in(tmp_path / AREA_NAME / "staging") == kept


def test_a_zombie_whose_staging_was_swept_learns_that_it_is_one(tmp_path: Path) -> None:
    older = start_run(tmp_path, 1)
    staged = stage(older, 10, NEW)
    start_run(tmp_path, 2)
    assert not staged.exists()
    with pytest.raises(RunDirectoryTaken, match="belongs to run 2"):
        older.commit(staged)


def test_a_zombie_removes_nothing(tmp_path: Path) -> None:
    older = start_run(tmp_path, 1)
    save(older, 10, OLD)
    start_run(tmp_path, 2)
    with older.lock(), pytest.raises(RunDirectoryTaken):
        older.remove_checkpoints([10])
    assert contents(tmp_path / "checkpoint-10") == OLD


def test_a_start_removes_only_old_tokens(tmp_path: Path) -> None:
    write_files(tmp_path / AREA_NAME / "tokens", {"old": b"", "fresh": b""})
    two_hours_ago = time.time() - 7200
    os.utime(tmp_path / AREA_NAME / "tokens" / "old", (two_hours_ago, two_hours_ago))
    start_run(tmp_path)
    assert names_in(tmp_path / AREA_NAME / "tokens") == {"fresh"}


def test_a_start_removes_what_a_killed_start_left(tmp_path: Path) -> None:
    def die_while_taking() -> None:
        _die_before("replace", 1)
        start_run(tmp_path, 1)

    assert killed(die_while_taking)
    start_run(tmp_path, 2)
    assert names_in(tmp_path / AREA_NAME) == {"generation.json", "lock"}


# --- the commit ---


def test_a_commit_gives_the_staging_directory_its_name_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    directory = start_run(tmp_path)
    final = save(directory, 10, NEW)
    directory.empty_trash()
    assert final == tmp_path / "checkpoint-10"
    assert contents(final) == NEW
    assert names_in(tmp_path) == {AREA_NAME, "checkpoint-10"}
    assert names_in(tmp_path / AREA_NAME) == {"generation.json", "lock"}


@pytest.mark.parametrize("can_exchange", [True, False])
def test_an_existing_checkpoint_is_replaced_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(commit, "exchange", lambda first, second: False)
    directory = start_run(tmp_path)
    save(directory, 10, OLD)
    save(directory, 10, NEW)
    directory.empty_trash()
    assert contents(tmp_path / "checkpoint-10") == NEW
    assert names_in(tmp_path / AREA_NAME) == {"generation.json", "lock"}


def test_with_exchange_there_is_a_checkpoint_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = start_run(tmp_path)
    save(directory, 10, OLD)
    seen = []
    _before_each_step(monkeypatch, lambda: seen.append((tmp_path / "checkpoint-10").exists()))
    save(directory, 10, NEW)
    assert seen
    assert all(seen)


def test_without_exchange_a_second_rename_that_fails_puts_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_exchange: None
) -> None:
    directory = start_run(tmp_path)
    final = save(directory, 10, OLD)
    staged = stage(directory, 10, NEW)
    _refuse_rename(monkeypatch, lambda source, target: source == staged, errno.EIO)
    with pytest.raises(OSError, match="refused"):
        directory.commit(staged)
    assert contents(final) == OLD


def test_a_late_writer_that_brings_the_old_name_back_between_both_renames_is_out_of_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_exchange: None
) -> None:
    directory = start_run(tmp_path)
    final = save(directory, 10, OLD)
    staged = stage(directory, 10, NEW)
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        real(source, target)
        if source == final and target.parent == directory.layout.replaced:
            write_files(final, {"late": b"by somebody on another node"})

    monkeypatch.setattr(os, "rename", rename)
    directory.commit(staged)
    directory.empty_trash()
    assert contents(final) == NEW
    assert is_whole(final)


def test_a_name_that_comes_into_being_right_before_the_rename_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = start_run(tmp_path)
    staged = stage(directory, 10, NEW)
    real = os.path.lexists

    def look_too_early(path: Path) -> bool:
        found = real(path)
        write_files(tmp_path, {f"checkpoint-10/{JIT_SENTINEL_NAME}": b""})
        return found

    with monkeypatch.context() as early:
        early.setattr(os.path, "lexists", look_too_early)
        directory.commit(staged)
    assert contents(tmp_path / "checkpoint-10") == NEW


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_trash_that_takes_nothing_does_not_bring_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(commit, "exchange", lambda first, second: False)
    directory = start_run(tmp_path)
    save(directory, 10, OLD)
    _refuse_rename(monkeypatch, lambda source, target: target.parent == directory.layout.trash, errno.EBUSY)
    save(directory, 10, NEW)
    assert contents(tmp_path / "checkpoint-10") == NEW
    assert "It stays for now" in caplog.text
    monkeypatch.undo()
    start_run(tmp_path, 2)
    assert contents(tmp_path / "checkpoint-10") == NEW
    assert names_in(tmp_path / AREA_NAME) == {"generation.json", "lock"}


def test_what_is_ours_is_deleted_at_once_where_the_disk_has_no_block_for_a_trash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a failed save would keep the disk full that it has filled."""
    directory = start_run(tmp_path)
    save(directory, 10, OLD)
    staged = stage(directory, 20, NEW)
    _refuse_rename(monkeypatch, lambda source, target: target.parent == directory.layout.trash, errno.ENOSPC)
    directory.drop_staging(staged)
    directory.remove_checkpoints([10])  # not ours alone: it has a name that others look at
    assert not staged.parent.exists()
    assert contents(tmp_path / "checkpoint-10") == OLD


def test_a_run_can_start_on_a_disk_that_a_killed_save_has_filled(tmp_path: Path) -> None:
    directory = start_run(tmp_path)
    stage(directory, 20, NEW)
    directory.make_room()
    assert not any(directory.layout.staging.iterdir())


def test_what_a_subclass_wrote_beside_the_checkpoint_goes_to_the_run_directory(tmp_path: Path) -> None:
    write_files(tmp_path, {"README.md": b"old card", "logs/1": b"1"})
    directory = start_run(tmp_path)
    staged = stage(directory, 10, NEW)
    write_files(staged.parent, {"README.md": b"new card", "logs/2": b"2", "samples/1": b"s"})
    directory.commit(staged)
    directory.release_staging(staged)
    assert (tmp_path / "README.md").read_bytes() == b"new card"
    assert names_in(tmp_path / "logs") == {"1", "2"}
    assert names_in(tmp_path / "samples") == {"1"}


def test_an_existing_link_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    write_files(tmp_path, {"elsewhere/model": b"precious"})
    (tmp_path / "checkpoint-10").symlink_to("elsewhere")
    directory = start_run(tmp_path)
    save(directory, 10, NEW)
    directory.empty_trash()
    assert contents(tmp_path / "checkpoint-10") == NEW
    assert (tmp_path / "elsewhere" / "model").read_bytes() == b"precious"


def test_a_link_that_leads_nowhere_is_replaced_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-10").symlink_to("nowhere")
    save(start_run(tmp_path), 10, NEW)
    assert contents(tmp_path / "checkpoint-10") == NEW


# --- durability: the order of fsync and rename ---


def _record_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    real_fsync, real_rename, real_exchange = os.fsync, os.rename, commit.exchange

    def record_fsync(descriptor: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        calls.append(("rename", str(target)))
        real_rename(source, target)

    def record_exchange(first: Path, second: Path) -> bool:
        exchanged = real_exchange(first, second)
        if exchanged:
            calls.append(("rename", str(second)))
        return exchanged

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(commit, "exchange", record_exchange)
    return calls


@pytest.mark.parametrize("before", [{}, OLD], ids=["new", "replaced"])
def test_every_directory_is_synced_before_the_rename_and_the_run_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, bytes]
) -> None:
    directory = start_run(tmp_path)
    if before:
        save(directory, 10, before)
    staged = stage(directory, 10, NEW)
    calls = _record_calls(monkeypatch)
    directory.commit(staged)
    deciding = calls.index(("rename", str(tmp_path / "checkpoint-10")))
    assert {("fsync", str(staged)), ("fsync", str(staged / "sub"))} <= set(calls[:deciding])
    assert ("fsync", str(tmp_path)) in calls[deciding + 1 :]
    assert ("fsync", str(tmp_path)) in calls[deciding + 1 : _next_rename(calls, deciding)]


def _next_rename(calls: list[tuple[str, str]], after: int) -> int:
    return next((at for at in range(after + 1, len(calls)) if calls[at][0] == "rename"), len(calls))


def test_without_exchange_each_rename_is_durable_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_exchange: None
) -> None:
    directory = start_run(tmp_path)
    save(directory, 10, OLD)
    staged = stage(directory, 10, NEW)
    calls = _record_calls(monkeypatch)
    directory.commit(staged)
    aside = calls.index(("rename", str(directory.layout.replaced / "checkpoint-10")))
    final = calls.index(("rename", str(tmp_path / "checkpoint-10")))
    assert ("fsync", str(directory.layout.replaced)) in calls[aside:final]
    assert ("fsync", str(tmp_path)) in calls[final : _next_rename(calls, final)]


def test_a_generation_is_durable_before_the_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _record_calls(monkeypatch)
    start_run(tmp_path)
    area = str(tmp_path / AREA_NAME)
    assert ("fsync", area) in calls
    assert any(kind == "fsync" and path.startswith(f"{area}/generation.json") for kind, path in calls)


def test_a_disk_that_fails_to_sync_stops_the_commit_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = start_run(tmp_path)
    staged = stage(directory, 10, NEW)

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=str(staged)):
        directory.commit(staged)
    assert list_checkpoints(tmp_path) == []


def test_sync_helpers_reach_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, {"a": b"", "sub/sub/b": b""})
    calls = _record_calls(monkeypatch)
    fsync_file(tmp_path / "a")
    fsync_directory(tmp_path / "sub")
    assert calls == [("fsync", str(tmp_path / "a")), ("fsync", str(tmp_path / "sub"))]
    calls.clear()
    fsync_tree(tmp_path)
    assert sorted(path for _, path in calls) == [str(tmp_path), str(tmp_path / "sub"), str(tmp_path / "sub" / "sub")]


# --- crashes: killed before any one of its operations, and the next start ---

_OPERATIONS = ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir")


def _before_each_step(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Call ``action`` before every operation that changes the disk."""

    def wrap(real: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            action()
            return real(*args, **kwargs)

        return wrapped

    for name in _OPERATIONS:
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))
    monkeypatch.setattr(commit, "exchange", wrap(commit.exchange))


def _die_before(operation: str, nth: int) -> None:
    """Make this process kill itself before its nth ``operation`` (``any`` counts all). In a child only."""
    every = [*((os, name) for name in _OPERATIONS), (commit, "exchange")]
    die_before(nth, [(module, name) for module, name in every if operation in ("any", name)])


def _kill_save_before(root: Path, operation: str, nth: int, *, can_exchange: bool) -> bool:
    """Save NEW as step 10 in a child that dies before its nth operation; False where it came to its end."""

    def die_while_saving() -> None:
        if not can_exchange:
            commit.exchange = lambda first, second: False
        directory = start_run(root, 2)
        staged = stage(directory, 10, NEW)
        _die_before(operation, nth)
        with directory.lock():
            directory.commit(staged)
            directory.release_staging(staged)
        directory.empty_trash()

    return killed(die_while_saving)


@pytest.mark.parametrize("can_exchange", [True, False], ids=["exchange", "two renames"])
def test_killed_at_any_moment_of_replacing_the_next_start_has_the_old_or_the_new_one(
    tmp_path: Path, can_exchange: bool
) -> None:
    found = []
    for nth in range(1, 100):
        root = tmp_path / str(nth)
        save(start_run(root, 1), 10, OLD)
        died = _kill_save_before(root, "any", nth, can_exchange=can_exchange)
        start_run(root, 3)
        assert is_whole(root / "checkpoint-10")
        found.append(contents(root / "checkpoint-10"))
        assert found[-1] in (OLD, NEW)
        assert names_in(root) == {AREA_NAME, "checkpoint-10"}
        assert names_in(root / AREA_NAME) == {"generation.json", "lock"}
        if not died:
            break
    assert found == sorted(found, key=lambda files: files == NEW), "once new, always new"
    assert found[0] == OLD
    assert found[-1] == NEW
    assert len(found) > 5


def test_killed_at_any_moment_of_the_first_save_the_next_start_has_none_or_a_whole_one(tmp_path: Path) -> None:
    found = []
    for nth in range(1, 100):
        root = tmp_path / str(nth)
        died = _kill_save_before(root, "any", nth, can_exchange=True)
        start_run(root, 3)
        found.append((root / "checkpoint-10").exists())
        assert not found[-1] or is_whole(root / "checkpoint-10")
        assert names_in(root / AREA_NAME) == {"generation.json", "lock"}
        if not died:
            break
    assert found == sorted(found)
    assert not found[0]
    assert found[-1]


@pytest.mark.parametrize(("nth", "expected"), [(1, OLD), (2, OLD), (3, NEW)], ids=["before", "between", "after"])
def test_killed_around_the_two_renames(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, nth: int, expected: dict[str, bytes]
) -> None:
    save(start_run(tmp_path, 1), 10, OLD)
    assert _kill_save_before(tmp_path, "rename", nth, can_exchange=False)
    between = nth == 2
    assert (tmp_path / "checkpoint-10").exists() is not between
    start_run(tmp_path, 3)
    assert contents(tmp_path / "checkpoint-10") == expected
    assert is_whole(tmp_path / "checkpoint-10")
    assert ("Putting back" in caplog.text) is between


def test_a_start_that_is_killed_while_it_puts_back_leaves_it_to_the_next(tmp_path: Path) -> None:
    for nth in range(1, 100):
        root = tmp_path / str(nth)
        save(start_run(root, 1), 10, OLD)
        assert _kill_save_before(root, "rename", 2, can_exchange=False)

        def die_while_starting(root: Path = root, nth: int = nth) -> None:
            _die_before("rename", nth)
            start_run(root, 3)

        died = killed(die_while_starting)
        start_run(root, 4)
        assert contents(root / "checkpoint-10") == OLD
        if not died:
            break
    assert nth > 1


def test_a_sentinel_only_directory_does_not_cost_the_checkpoint_that_was_moved_aside(tmp_path: Path) -> None:
    save(start_run(tmp_path, 1), 10, OLD)
    assert _kill_save_before(tmp_path, "rename", 2, can_exchange=False)
    write_files(tmp_path, {f"checkpoint-10/{JIT_SENTINEL_NAME}": b""})
    start_run(tmp_path, 3)
    assert contents(tmp_path / "checkpoint-10") == OLD


# --- trash (S5) ---


@contextlib.contextmanager
def _someone_who_keeps_writing(directory: Path) -> Iterator[None]:
    """Creates files in ``directory``, wherever that is moved, until the end."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.wait(0.0005):
            number += 1
            with contextlib.suppress(FileNotFoundError):
                os.close(os.open(f"late-{number}", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        os.close(descriptor)


def test_a_checkpoint_into_which_someone_still_writes_is_gone_under_its_name_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk, "DELETE_RETRY_S", 0.01)
    directory = start_run(tmp_path)
    final = save(directory, 10, {f"file-{number}": b"" for number in range(50)})
    with _someone_who_keeps_writing(final):
        directory.remove_checkpoints([10])
        assert not final.exists()
        with _unlink_that_lets_others_run():
            directory.empty_trash()
    assert "Cannot delete" in caplog.text
    directory.empty_trash()
    assert names_in(tmp_path / AREA_NAME) == {"generation.json", "lock"}


@contextlib.contextmanager
def _unlink_that_lets_others_run() -> Iterator[None]:
    real = os.unlink

    def slow(*args: object, **kwargs: object) -> None:
        time.sleep(0.001)
        real(*args, **kwargs)  # type: ignore[arg-type]

    os.unlink = slow
    try:
        yield
    finally:
        os.unlink = real


@needs_mounts()
def test_a_mount_inside_a_checkpoint_does_not_stop_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = start_run(tmp_path)
    final = save(directory, 10, NEW)

    def remove_it() -> tuple[bool, str]:
        leave_mount_namespace()
        mount_small_disk(final / "sub", size_bytes=4096)
        monkeypatch.setattr(disk, "DELETE_RETRY_S", 0.01)
        directory.remove_checkpoints([10])
        directory.empty_trash()
        return final.exists(), caplog.text

    still_there, said = run_in_child(remove_it)
    assert not still_there
    assert "Cannot delete" in said
    directory.empty_trash()
    assert names_in(tmp_path / AREA_NAME) == {"generation.json", "lock"}


@needs_mounts()
def test_a_checkpoint_that_is_a_mount_stays_whole_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = start_run(tmp_path)
    final = save(directory, 10, NEW)

    def remove_it() -> tuple[dict[str, bytes], str]:
        leave_mount_namespace()
        make_read_only(final)
        directory.remove_checkpoints([10])
        return contents(final), caplog.text

    left, said = run_in_child(remove_it)
    assert left == NEW
    assert "Cannot remove" in said


def test_discarding_what_is_not_there_is_done_already(tmp_path: Path) -> None:
    assert start_run(tmp_path).discard(tmp_path / "not there")


def test_a_trash_that_cannot_be_made_is_said_and_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = start_run(tmp_path)
    final = save(directory, 10, NEW)
    directory.empty_trash()
    directory.layout.trash.write_text("a file in its place")
    assert not directory.discard(final)
    assert contents(final) == NEW
    assert "Cannot remove" in caplog.text


def test_removing_several_takes_each_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = start_run(tmp_path)
    for step in (10, 20, 30):
        save(directory, step, NEW)
    partial: list[Path] = []
    _before_each_step(
        monkeypatch,
        lambda: partial.extend(path for _, path in list_checkpoints(tmp_path) if contents(path) != NEW),
    )
    directory.remove_checkpoints([10, 20])
    directory.empty_trash()
    assert [step for step, _ in list_checkpoints(tmp_path)] == [30]
    assert partial == []


def test_dropping_staging_twice_is_harmless(tmp_path: Path) -> None:
    directory = start_run(tmp_path)
    staged = stage(directory, 10, NEW)
    directory.drop_staging(staged)
    directory.drop_staging(staged)
    assert not staged.exists()


# --- the lock (S7, S8) ---


def test_a_lock_held_by_another_process_is_an_error_in_time_that_names_file_and_holder(tmp_path: Path) -> None:
    def hold(ready: Callable[[], None]) -> None:
        holder = start_run(tmp_path)
        with holder.lock():
            ready()
            time.sleep(60)

    with running(hold) as holder:
        own = RunDirectory(tmp_path, lock_timeout_s=0.3)
        begin = time.monotonic()
        with pytest.raises(CheckpointError) as caught, own.lock():
            pass
        waited_s = time.monotonic() - begin
    assert str(own.layout.lock_file) in str(caught.value)
    assert f"process {holder.pid} " in str(caught.value)
    assert "lock_timeout_s" in str(caught.value)
    assert 0.3 <= waited_s < 5.0


def test_a_lock_held_before_any_run_started_has_no_made_up_holder(tmp_path: Path) -> None:
    def hold(ready: Callable[[], None]) -> None:
        (tmp_path / AREA_NAME).mkdir()
        with RunDirectory(tmp_path, lock_timeout_s=5.0).lock():
            ready()
            time.sleep(60)

    with running(hold), pytest.raises(CheckpointError) as caught, RunDirectory(tmp_path, lock_timeout_s=0.1).lock():
        pass
    assert "process 0" not in str(caught.value)


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    def hold(ready: Callable[[], None]) -> None:
        with start_run(tmp_path).lock():
            ready()
            time.sleep(60)

    with running(hold):
        pass
    with RunDirectory(tmp_path, lock_timeout_s=0.5).lock():
        pass


@pytest.mark.parametrize("content", [b"", b"12345\nsome-other-host\n"])
def test_a_lock_file_that_a_dead_job_left_blocks_nobody(tmp_path: Path, content: bytes) -> None:
    write_files(tmp_path, {f"{AREA_NAME}/lock": content})
    with RunDirectory(tmp_path, lock_timeout_s=0.5).lock():
        pass


def test_the_lock_file_is_never_deleted(tmp_path: Path) -> None:
    directory = start_run(tmp_path)
    before = directory.layout.lock_file.stat().st_ino
    with directory.lock():
        pass
    assert directory.layout.lock_file.stat().st_ino == before


def test_the_lock_is_released_after_an_error(tmp_path: Path) -> None:
    directory = start_run(tmp_path)
    with pytest.raises(ValueError, match="inside"), directory.lock():
        raise ValueError("inside")
    with RunDirectory(tmp_path, lock_timeout_s=0.2).lock():
        pass


def _flock_that_fails(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", fail)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_without_working_locks_it_warns_once_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    _flock_that_fails(monkeypatch, code)
    directory = start_run(tmp_path)
    save(directory, 10, OLD)
    save(directory, 10, NEW)
    assert contents(tmp_path / "checkpoint-10") == NEW
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "no working file locks" in warnings[0].getMessage()
    assert str(tmp_path) in warnings[0].getMessage()


def test_without_working_locks_an_error_inside_is_not_blamed_on_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _flock_that_fails(monkeypatch, errno.ENOLCK)
    directory = start_run(tmp_path)
    with pytest.raises(ValueError, match="inside") as caught, directory.lock():
        raise ValueError("inside")
    assert caught.value.__context__ is None


def test_without_working_locks_no_descriptor_is_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = start_run(tmp_path)
    _flock_that_fails(monkeypatch, errno.ENOLCK)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with directory.lock():
            pass
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("moment", ["before", "between the two renames"])
def test_who_has_lost_its_claim_commits_nothing_and_learns_who_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_exchange: None, moment: str
) -> None:
    _flock_that_fails(monkeypatch, errno.ENOLCK)
    monkeypatch.setattr(lock, "CHECK_PATIENCE_S", 0.05)
    directory = start_run(tmp_path)
    final = save(directory, 10, OLD)
    staged = stage(directory, 10, NEW)
    claim = directory.layout.claim_file

    def lose_it() -> None:
        claim.write_bytes(lock.Claim("a" * 32, "node7", 17, "", "today").encode())

    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if source == final:
            lose_it()
        real(source, target)

    with directory.lock():
        if moment == "before":
            lose_it()
        else:
            monkeypatch.setattr(os, "rename", rename)
        with pytest.raises(CheckpointError, match="taken over by process 17 on node7"):
            directory.commit(staged)
        with pytest.raises(CheckpointError, match="taken over by process 17 on node7"):
            directory.remove_checkpoints([10])
    assert contents(final) == OLD
    assert claim.exists(), "it is another one's"


def test_another_failure_of_the_lock_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = start_run(tmp_path)
    _flock_that_fails(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output"), directory.lock():
        pass


# --- what others have written into the final place (N1, N5) ---


def _age(path: Path, seconds: float) -> None:
    for entry in [path, *path.rglob("*")]:
        moment = time.time() - seconds
        os.utime(entry, (moment, moment))


def test_what_is_written_into_a_new_directory_before_the_save_is_taken_over(tmp_path: Path) -> None:
    directory = start_run(tmp_path)
    write_files(tmp_path, {"checkpoint-10/extra.json": b"{}", "checkpoint-10/sub/.dot": b"1"})
    staged = directory.make_staging("a-save", "checkpoint-10")
    assert directory.carry_over(staged) == ["extra.json", "sub/.dot"]
    assert contents(staged) == {"extra.json": b"{}", "sub/.dot": b"1"}


def test_what_was_written_after_the_former_commit_is_taken_over(tmp_path: Path) -> None:
    directory = start_run(tmp_path)
    final = save(directory, 10, OLD)
    _age(final, 0.0)
    time.sleep(0.02)
    write_files(final, {"extra.json": b"{}"})
    staged = directory.make_staging("b-save", "checkpoint-10")
    assert directory.carry_over(staged) == ["extra.json"]


def test_what_a_former_save_left_is_not_taken_over(tmp_path: Path) -> None:
    directory = start_run(tmp_path)
    save(directory, 10, OLD)
    assert directory.carry_over(directory.make_staging("b-save", "checkpoint-10")) == []


def test_a_stock_checkpoint_of_a_former_run_is_not_taken_over(tmp_path: Path) -> None:
    write_files(tmp_path, {"checkpoint-10/model.safetensors": b"stock"})
    directory = start_run(tmp_path)
    assert directory.carry_over(directory.make_staging("a-save", "checkpoint-10")) == []


def test_a_copied_run_directory_whose_manifests_are_older_than_their_files_is_not_taken_over(tmp_path: Path) -> None:
    final = make_checkpoint(tmp_path, 10, OLD)
    _age(final, 100.0)
    _age(final / MANIFEST_NAME, 200.0)
    directory = start_run(tmp_path)
    assert directory.carry_over(directory.make_staging("a-save", "checkpoint-10")) == []


def test_the_sentinel_of_a_just_in_time_checkpoint_is_not_taken_over(tmp_path: Path) -> None:
    directory = start_run(tmp_path)
    write_files(tmp_path, {f"checkpoint-10/{JIT_SENTINEL_NAME}": b""})
    assert directory.carry_over(directory.make_staging("a-save", "checkpoint-10")) == []


def test_nothing_is_taken_over_where_there_is_nothing(tmp_path: Path) -> None:
    directory = start_run(tmp_path)
    assert directory.carry_over(directory.make_staging("a-save", "checkpoint-10")) == []


def test_a_dangling_link_in_the_former_checkpoint_does_not_stop_the_save(tmp_path: Path) -> None:
    directory = start_run(tmp_path)
    final = save(directory, 10, OLD)
    (final / "dangling").symlink_to("nowhere")
    assert directory.carry_over(directory.make_staging("b-save", "checkpoint-10")) == []


# --- modes (N2) ---


@pytest.fixture
def umask() -> Iterator[Callable[[int], None]]:
    before = os.umask(0o022)
    try:
        yield lambda mask: (os.umask(mask), None)[1]
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o027])
def test_modes_follow_the_umask_as_with_stock(tmp_path: Path, umask: Callable[[int], None], mask: int) -> None:
    umask(mask)
    directory = start_run(tmp_path / "out")
    final = save(directory, 10, NEW)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out", final, *final.rglob("*"))}
    expected = {path: (0o777 if path.is_dir() else 0o666) & ~mask for path in modes}
    assert modes == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="changing a directory's group needs root")
def test_in_a_setgid_directory_group_and_setgid_are_inherited(tmp_path: Path, umask: Callable[[int], None]) -> None:
    umask(0o002)
    root = tmp_path / "out"
    root.mkdir()
    os.chown(root, -1, 12345)
    root.chmod(0o2775)
    final = save(start_run(root), 10, NEW)
    assert {path.stat().st_gid for path in (final, *final.rglob("*"))} == {12345}
    assert stat.S_IMODE(final.stat().st_mode) == 0o2775
    assert stat.S_IMODE((final / "sub").stat().st_mode) == 0o2775


# --- exchange ---


def test_exchange_swaps_two_directories_in_one_step(tmp_path: Path) -> None:
    write_files(tmp_path, {"a/1": b"", "b/2": b""})
    assert exchange(tmp_path / "a", tmp_path / "b")
    assert (names_in(tmp_path / "a"), names_in(tmp_path / "b")) == ({"2"}, {"1"})


class _LibraryWhoseRenameFails:
    """A C library in which renameat2 fails with an error number."""

    def __init__(self, code: int) -> None:
        self._code = code

    def renameat2(self, *args: object) -> int:
        ctypes.set_errno(self._code)
        return -1


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_file_system_that_cannot_exchange_says_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: _LibraryWhoseRenameFails(code))
    assert not exchange(tmp_path / "a", tmp_path / "b")


def test_a_file_system_that_takes_exchange_for_a_plain_rename_cannot_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: _LibraryWhoseRenameFails(errno.ENOTEMPTY))
    assert not exchange(tmp_path / "a", tmp_path / "b")


def test_a_c_library_without_renameat2_cannot_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: object())
    assert not exchange(tmp_path / "a", tmp_path / "b")


def test_another_failure_to_exchange_is_an_error_that_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: _LibraryWhoseRenameFails(errno.EACCES))
    with pytest.raises(PermissionError) as caught:
        exchange(tmp_path / "a", tmp_path / "b")
    assert (caught.value.filename, caught.value.filename2) == (str(tmp_path / "a"), str(tmp_path / "b"))


def _refuse_rename(monkeypatch: pytest.MonkeyPatch, which: Callable[[Path, Path], bool], code: int) -> None:
    real = os.rename

    def rename(source: str | Path, target: str | Path) -> None:
        if which(Path(source), Path(target)):
            raise OSError(code, "refused", str(source), None, str(target))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
