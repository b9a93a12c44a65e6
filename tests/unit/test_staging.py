"""staging: what is put aside comes out the same, byte for byte, and the hooks are gone afterwards."""

from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from safe_trainer import staging
from safe_trainer.errors import OptionError
from safe_trainer.staging import InDirectory, InMemory, MemoryRoom, Staging, memory_problem, staging_of
from tests.unit.builders import contents

Write = Callable[[Path], object]


def state() -> dict[str, Any]:
    """As various as what the engines save: views, shared storages, scalars, other dtypes, objects of classes."""
    base = torch.randn(1000)
    return {
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": base, "view": base[10:20]}}},
        "ordered": collections.OrderedDict(a=torch.ones(3, dtype=torch.bfloat16), b=torch.empty(0)),
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "arguments": argparse.Namespace(lr=1e-3, names=["a"]),
        "none": None,
        "shape": torch.Size([2, 3]),
        "text": "x" * 1000,
    }


def in_memory(tmp_path: Path, write: Write, memory: InMemory | None = None) -> Path:
    """What comes out of ``write`` through memory."""
    memory = InMemory() if memory is None else memory
    staged = tmp_path / "staged" / "checkpoint-1"
    staged.mkdir(parents=True)
    with memory.writing(staged) as directory:
        write(directory)
    memory.bring(staged)
    memory.clear()
    return staged


def directly(tmp_path: Path, write: Write) -> Path:
    direct = tmp_path / "direct" / "checkpoint-1"
    direct.mkdir(parents=True)
    write(direct)
    return direct


def save_all(directory: Path) -> None:
    torch.manual_seed(0)
    saved = state()
    (directory / "sub").mkdir()
    torch.save(saved, directory / "sub" / "state.pt")
    torch.save(saved, os.fspath(directory / "optimizer.bin"))
    torch.save("text", directory / "legacy.pt", _use_new_zipfile_serialization=False)
    with open(directory / "stream.pt", "wb") as stream:
        torch.save(saved, stream)
    tensors = {"b": torch.randn(3, 4), "a": torch.ones(5, dtype=torch.float16), "s": torch.tensor(2.0)}
    safetensors.torch.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    safetensors.torch.save_file({}, os.fspath(directory / "empty.safetensors"))
    safetensors.torch.save_model(torch.nn.Linear(3, 3), os.fspath(directory / "linear.safetensors"))
    (directory / "config.json").write_text("{}")


def test_the_same_bytes_come_out(tmp_path: Path) -> None:
    assert contents(in_memory(tmp_path, save_all)) == contents(directly(tmp_path, save_all))


def test_it_works_with_the_installed_libraries() -> None:
    assert memory_problem() is None


def test_what_changes_after_the_write_does_not_show(tmp_path: Path) -> None:
    """Training goes on and changes tensors, lists and objects in place."""
    weights, steps = torch.zeros(1000), [1, 2]
    memory, staged = InMemory(), tmp_path / "checkpoint-1"
    staged.mkdir()
    with memory.writing(staged) as directory:
        torch.save({"weights": weights, "steps": steps}, directory / "state.pt")
        safetensors.torch.save_file({"weights": weights}, directory / "model.safetensors")
    weights.fill_(1.0)
    steps.append(3)
    memory.bring(staged)
    loaded = torch.load(staged / "state.pt")
    assert loaded["steps"] == [1, 2]
    assert not loaded["weights"].any()
    assert not safetensors.torch.load_file(staged / "model.safetensors")["weights"].any()


def test_nothing_is_serialized_before_it_is_brought(tmp_path: Path) -> None:
    memory = InMemory()
    with memory.writing(tmp_path) as directory:
        save_all(directory)
    sizes = {path.name: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
    written_at_once = {"legacy.pt", "stream.pt", "config.json"}
    assert {name for name, size in sizes.items() if size} == written_at_once


def test_memory_is_kept_from_save_to_save(tmp_path: Path) -> None:
    memory = InMemory()

    def save(size: int) -> set[int]:
        with memory.writing(tmp_path) as directory:
            torch.save({"a": torch.ones(size), "b": torch.ones(size)}, directory / "state.pt")
            safetensors.torch.save_file({"a": torch.ones(size)}, directory / "model.safetensors")
        memory.bring(tmp_path)
        memory.clear()
        return {storage.data_ptr() for storages in memory._buffers._free.values() for storage in storages}

    first = save(1000)
    assert len(first) == 3
    assert save(1000) == first
    assert memory.room_for(12_000).needed == 0
    assert memory.room_for(20_000).needed == 8_000
    save(10)
    assert memory.room_for(12_000).needed == 12_000 - 3 * 40  # what is not used any more is given back


@pytest.mark.parametrize("fails", [False, True])
def test_the_hooks_are_always_taken_away(tmp_path: Path, fails: bool) -> None:
    places = [
        (torch.serialization, "_open_zipfile_writer"),
        (torch.UntypedStorage, "cpu"),
        (safetensors.torch, "_flatten_as_ptr"),
        (safetensors.torch, "serialize_file"),
    ]
    before = [getattr(owner, name) for owner, name in places]
    with contextlib.suppress(ArithmeticError), InMemory().writing(tmp_path):
        assert [getattr(owner, name) for owner, name in places] != before
        if fails:
            raise ArithmeticError
    assert [getattr(owner, name) for owner, name in places] == before


def test_files_outside_are_written_at_once(tmp_path: Path) -> None:
    staged, outside = tmp_path / "staged", tmp_path / "outside"
    staged.mkdir()
    outside.mkdir()

    def save() -> None:
        torch.save(torch.ones(3), outside / "state.pt")
        safetensors.torch.save_file({"a": torch.ones(3)}, outside / "model.safetensors")

    memory = InMemory()
    with memory.writing(staged):
        other = threading.Thread(target=save)
        other.start()
        other.join()
    assert torch.load(outside / "state.pt").tolist() == [1.0, 1.0, 1.0]
    assert safetensors.torch.load_file(outside / "model.safetensors")["a"].tolist() == [1.0, 1.0, 1.0]


def test_files_that_are_renamed_removed_or_written_again(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        torch.save(1, directory / "part.tmp")
        os.replace(directory / "part.tmp", directory / "renamed.pt")
        torch.save(2, directory / "removed.pt")
        os.unlink(directory / "removed.pt")
        torch.save(3, directory / "again.pt")
        torch.save(4, directory / "again.pt")
        torch.save(5, directory / "moved.pt")
        (directory / "sub").mkdir()
        os.rename(directory / "moved.pt", directory / "sub" / "moved.pt")

    staged = in_memory(tmp_path, write)
    assert {path: torch.load(staged / path) for path in contents(staged)} == {
        "renamed.pt": 1,
        "again.pt": 4,
        "sub/moved.pt": 5,
    }


def test_errors_come_where_they_would_have_come(tmp_path: Path) -> None:
    shared = torch.ones(4)
    with InMemory().writing(tmp_path) as directory:
        with pytest.raises(RuntimeError, match="share memory"):
            safetensors.torch.save_file({"a": shared, "b": shared}, directory / "model.safetensors")
        with pytest.raises(ValueError, match="non contiguous"):
            safetensors.torch.save_file({"a": torch.ones(2, 3).t()}, directory / "model.safetensors")
        with pytest.raises((OSError, RuntimeError)):
            torch.save(1, directory / "missing" / "state.pt")
        with pytest.raises((OSError, SafetensorError)):
            safetensors.torch.save_file({"a": torch.ones(2)}, directory / "missing" / "model.safetensors")
        with pytest.raises((AttributeError, TypeError, RuntimeError)):
            torch.save(lambda: None, directory / "state.pt")
    assert contents(tmp_path) == {}


def test_a_disk_that_fails_later_is_an_error_when_files_are_brought(tmp_path: Path) -> None:
    memory = InMemory()
    with memory.writing(tmp_path) as directory:
        (directory / "sub").mkdir()
        torch.save(torch.ones(3), directory / "sub" / "state.pt")
    (tmp_path / "sub" / "state.pt").unlink()
    (tmp_path / "sub").rmdir()
    with pytest.raises((OSError, RuntimeError)):
        memory.bring(tmp_path)


# --- room ---

GB = 1 << 30


def test_all_ranks_of_the_node_count(caplog: pytest.LogCaptureFixture) -> None:
    memory = InMemory()
    enough = [MemoryRoom(4 * GB, 10 * GB), MemoryRoom(5 * GB, 10 * GB)]
    assert memory.admitted(enough) is memory
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            other = memory.admitted([*enough, MemoryRoom(1, 10 * GB)])
            assert type(other) is Staging
    (record,) = caplog.records
    assert str(9 * GB + 1) in record.getMessage()
    assert str(10 * GB) in record.getMessage()


def test_where_the_libraries_do_not_fit_files_are_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.delattr(torch.serialization, "_open_zipfile_writer")
    with caplog.at_level(logging.WARNING):
        made = staging_of("memory", run_directory=tmp_path, index=0, count=1)
    assert type(made) is Staging
    assert "_open_zipfile_writer" in caplog.text


# --- a directory of the node ---


def test_ranks_of_a_node_move_all_files_together(tmp_path: Path) -> None:
    ranks = [InDirectory(tmp_path / "nvme", run_directory=tmp_path / "run", index=i, count=3) for i in range(3)]
    staged = tmp_path / "run" / "staging" / "use" / "checkpoint-1"
    staged.mkdir(parents=True)
    for index, rank in enumerate(ranks):
        with rank.writing(staged) as directory:
            assert directory.is_relative_to(tmp_path / "nvme")
            (directory / "sub").mkdir(exist_ok=True)
            (directory / "sub" / f"rank-{index}").write_text(str(index))
            (directory / "sub" / f"rank-{index}").chmod(0o600 + index)
            (directory.parent / f"beside-{index}").write_text("beside")
    for rank in ranks:
        rank.bring(staged)
    for rank in ranks:
        rank.clear()
    assert {path.name for path in staged.parent.iterdir()} == {"checkpoint-1", "beside-0", "beside-1", "beside-2"}
    assert contents(staged) == {f"sub/rank-{index}": str(index).encode() for index in range(3)}
    assert [(staged / "sub" / f"rank-{index}").stat().st_mode & 0o777 for index in range(3)] == [0o600, 0o601, 0o602]
    assert not list((tmp_path / "nvme").rglob("checkpoint-*"))


def test_what_a_dead_run_has_left_is_swept_and_other_runs_are_not(tmp_path: Path) -> None:
    def made(run: str, use: str) -> tuple[InDirectory, Path]:
        rank = InDirectory(tmp_path / "nvme", run_directory=tmp_path / run, index=0, count=1)
        with rank.writing(tmp_path / run / use / "checkpoint-1") as directory:
            (directory / "file").write_text(use)
        return rank, directory

    _, dead = made("run", "1-dead")
    _, other = made("other", "1-other")
    _, own = made("run", "2-own")
    assert not dead.exists()
    assert other.exists()
    assert own.exists()


def test_a_directory_that_cannot_be_written_is_found_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"staging='.*/file'"):
        staging_of(str(tmp_path / "file"), run_directory=tmp_path, index=0, count=1)


def test_on_disk_is_where_the_files_belong(tmp_path: Path) -> None:
    made = staging_of("disk", run_directory=tmp_path, index=0, count=1)
    with made.writing(tmp_path) as directory:
        assert directory == tmp_path
    made.bring(tmp_path)
    made.clear()
    assert made.room_for(1 << 60) is None
    assert made.admitted([]) is made
    assert type(made) is staging.Staging
