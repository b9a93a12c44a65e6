"""disk: what is asked of a file system, and what becomes of its refusals."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safe_trainer import disk
from safe_trainer.commit import Generation, RunDirectory
from safe_trainer.disk import (
    delete_all,
    entries,
    fsync_directory,
    make_below,
    mount_of,
    read_fresh,
    remove_if_empty,
    rename_to_free_name,
)
from safe_trainer.layout import AREA_NAME, list_checkpoints, list_files
from tests.unit.builders import start_run, write_files

# --- stale handles (ESTALE) ---


def _stale_at_first(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, *, times: int) -> None:
    real: Callable[..., Any] = getattr(module, name)
    left = times

    def sometimes(path: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if left > 0:
            left -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(module, name, sometimes)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "STALE_RETRY_S", 0.0)
    monkeypatch.setattr(disk, "DELETE_RETRY_S", 0.01)


def test_a_handle_that_is_stale_once_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, {"a": b"content"})
    _stale_at_first(monkeypatch, os, "scandir", times=1)
    _stale_at_first(monkeypatch, os, "open", times=1)
    assert entries(tmp_path) == [tmp_path / "a"]
    _stale_at_first(monkeypatch, os, "scandir", times=1)
    assert list(list_files(tmp_path)) == ["a"]
    _stale_at_first(monkeypatch, os, "scandir", times=1)
    assert list_checkpoints(tmp_path) == []
    assert read_fresh(tmp_path / "a") == b"content"
    fsync_directory(tmp_path)


def test_one_that_stays_stale_is_an_error_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stale_at_first(monkeypatch, os, "scandir", times=100)
    _stale_at_first(monkeypatch, os, "open", times=100)
    with pytest.raises(OSError, match=str(tmp_path)):
        entries(tmp_path)
    with pytest.raises(OSError, match=str(tmp_path / "a")):
        read_fresh(tmp_path / "a")


def test_another_error_is_not_tried_again(tmp_path: Path) -> None:
    write_files(tmp_path, {"a": b""})
    with pytest.raises(NotADirectoryError):
        entries(tmp_path / "a")


def test_a_generation_that_is_stale_once_does_not_fence_off_its_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = start_run(tmp_path)
    _stale_at_first(monkeypatch, os, "open", times=1)
    directory.check_generation()


# --- looking ---


def test_a_file_that_comes_with_the_listing_of_its_directory_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, where a node believes that a name is missing until it lists the directory."""
    write_files(tmp_path, {"a": b"content"})
    real_open, real_list = os.open, os.listdir
    listed = False

    def open_descriptor(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == tmp_path / "a" and not listed:
            raise FileNotFoundError(errno.ENOENT, "cached as missing", str(path))
        return real_open(path, *args, **kwargs)

    def list_names(path: Path) -> list[str]:
        nonlocal listed
        listed = True
        return real_list(path)

    monkeypatch.setattr(os, "open", open_descriptor)
    monkeypatch.setattr(os, "listdir", list_names)
    assert read_fresh(tmp_path / "a") == b"content"


def test_what_is_not_there_is_nothing(tmp_path: Path) -> None:
    assert read_fresh(tmp_path / "a") is None
    assert read_fresh(tmp_path / "no" / "a") is None
    assert entries(tmp_path / "no") == []


def test_the_mount_of_a_path_is_known() -> None:
    assert mount_of(Path("/proc/self")).kind == "proc"


# --- names ---


def test_a_directory_gets_a_name_that_is_free_or_empty(tmp_path: Path) -> None:
    write_files(tmp_path, {"a/1": b"", "b/2": b"", "full/3": b""})
    (tmp_path / "empty").mkdir()
    assert rename_to_free_name(tmp_path / "a", tmp_path / "free")
    assert rename_to_free_name(tmp_path / "b", tmp_path / "empty")
    assert not rename_to_free_name(tmp_path / "free", tmp_path / "full")
    assert (tmp_path / "free" / "1").exists()


def test_a_directory_that_others_remove_meanwhile_is_made_again(tmp_path: Path) -> None:
    tries = 0

    def make() -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            (tmp_path / "shared").rmdir()
        (tmp_path / "shared" / "own").touch()

    make_below(tmp_path / "shared", make)
    assert (tmp_path / "shared" / "own").exists()


def test_what_does_not_come_into_being_is_an_error_in_the_end(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        make_below(tmp_path / "shared", lambda: (tmp_path / "no" / "own").touch(), timeout_s=0.2)


def test_only_empty_directories_are_removed(tmp_path: Path) -> None:
    write_files(tmp_path, {"full/a": b""})
    (tmp_path / "empty").mkdir()
    remove_if_empty(tmp_path / "full", tmp_path / "empty", tmp_path / "not there")
    assert os.listdir(tmp_path) == ["full"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP], ids=errno.errorcode.get)
def test_a_file_system_that_cannot_sync_directories_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    fsync_directory(tmp_path)


# --- deleting (S5) ---


def test_everything_is_deleted(tmp_path: Path) -> None:
    write_files(tmp_path, {"tree/a/b": b"", "file": b"", "elsewhere/precious": b""})
    (tmp_path / "link").symlink_to("elsewhere")
    assert delete_all([tmp_path / name for name in ("tree", "file", "link", "not there")]) == {}
    assert os.listdir(tmp_path) == ["elsewhere"]
    assert os.listdir(tmp_path / "elsewhere") == ["precious"]


def test_one_file_that_stays_does_not_keep_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, {f"tree/{name}": b"" for name in ("a", "busy", "z")})
    real = os.unlink

    def unlink(path: Any, *args: Any, **kwargs: Any) -> None:
        if str(path) == "busy":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        real(path, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", unlink)
    left = delete_all([tmp_path / "tree"])
    assert os.listdir(tmp_path / "tree") == ["busy"]
    assert [problem.errno for problem in left.values()] == [errno.EBUSY], "the cause, not what follows from it"


def test_what_is_in_use_for_a_moment_is_deleted_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, {"tree/a": b""})
    real = os.rmdir
    refusals = 1

    def rmdir(path: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal refusals
        if refusals > 0:
            refusals -= 1
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        real(path, *args, **kwargs)

    monkeypatch.setattr(os, "rmdir", rmdir)
    assert delete_all([tmp_path / "tree"]) == {}
    assert os.listdir(tmp_path) == []


def test_many_that_stay_take_no_longer_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "DELETE_RETRY_S", 0.1)
    monkeypatch.setattr(shutil, "rmtree", lambda path, onerror: onerror(None, path, (OSError, OSError("busy"), None)))
    for number in range(30):
        (tmp_path / str(number)).mkdir()
    begin = time.monotonic()
    assert len(delete_all(entries(tmp_path))) == 30
    assert time.monotonic() - begin < 2.0


def test_somebody_who_keeps_writing_into_the_trash_holds_up_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = RunDirectory(tmp_path, lock_timeout_s=5.0)
    directory.take(Generation.following(0, "run"))
    victim = tmp_path / AREA_NAME / "trash" / "victim"
    victim.mkdir(parents=True)
    descriptor = os.open(victim, os.O_RDONLY | os.O_DIRECTORY)
    stop = threading.Event()

    def keep_writing() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                os.close(os.open(f"late-{number}", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor))
            except FileNotFoundError:
                return  # deleted between two files: its writer did not keep it alive this time

    writer = threading.Thread(target=keep_writing)
    writer.start()
    begin = time.monotonic()
    directory.empty_trash()
    took_s = time.monotonic() - begin
    stop.set()
    writer.join()
    os.close(descriptor)
    assert took_s < disk.DELETE_PATIENCE_S + 5.0
    assert not victim.exists() or "Cannot delete" in caplog.text
    directory.empty_trash()
    assert not victim.exists()
