"""process: which process is this, is it still there, and how much memory there is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from safe_trainer import process
from safe_trainer.process import available_memory, has_ended, process_mark


def test_this_process_has_not_ended() -> None:
    mark = process_mark(os.getpid())
    assert mark
    assert mark == process_mark(os.getpid())
    assert not has_ended(os.getpid(), mark)


def test_a_process_that_has_ended_is_gone_also_when_its_number_is_used_again() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mark = process_mark(child.pid)
    assert not has_ended(child.pid, mark)
    child.kill()
    child.wait()
    assert has_ended(child.pid, mark)
    assert has_ended(os.getpid(), mark)


def test_of_another_machines_process_nothing_is_known() -> None:
    assert not has_ended(1 << 21, "another boot and namespace 4711")
    assert not has_ended(1 << 21, "")


def test_memory_is_the_machines_where_no_container_has_less() -> None:
    assert 0 < available_memory() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("limit", "used", "inactive", "left"),
    [("1000000", 400_000, 100_000, 700_000), ("1000000", 2_000_000, 0, 0), ("max", 5, 0, None)],
)
def test_memory_is_the_containers_where_that_is_less(
    tmp_path: Path, limit: str, used: int, inactive: int, left: int | None
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")
    assert process._available_in(tmp_path, 10**12) == (10**12 if left is None else left)


def test_without_cgroups_the_machines_counts(tmp_path: Path) -> None:
    assert process._available_in(tmp_path, 123) == 123
