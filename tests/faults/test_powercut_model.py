"""The model of a power cut: what it loses, and what not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.crash_tape import Operation
from tests.faults.powercut import MODES, Disks

NAMES_LOST, RENAMES_FIRST, DATA_LOST = MODES


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """Disks with one directory and one file."""
    root = tmp_path / "start"
    (root / "out" / "old").mkdir(parents=True)
    (root / "out" / "old" / "file").write_text("content")
    return root


def after(start: Path, *operations: str) -> Disks:
    """The disks after operations, each written as ``op path [to]``."""
    disks = Disks(start)
    for text in operations:
        op, path, to = [*text.split(), ""][:3]
        disks.apply(Operation(0, "", op, path, to))
    return disks


def paths(disks: Disks, mode: str) -> dict[str, bool]:
    """The files that a power cut leaves, and whether they have their bytes."""
    return {path: file is not None for path, file in disks.state(mode).files}


OLD = {"out/old/file": True}


@pytest.mark.parametrize(
    ("operations", "mode", "left"),
    [
        (("create out/new",), NAMES_LOST, OLD),
        (("create out/new",), RENAMES_FIRST, OLD),
        (("create out/new",), DATA_LOST, {**OLD, "out/new": False}),
        (("create out/new", "fsync out/new"), NAMES_LOST, OLD),
        (("create out/new", "fsync out"), NAMES_LOST, {**OLD, "out/new": False}),
        (("create out/new", "fsync out/new", "fsync out"), NAMES_LOST, {**OLD, "out/new": True}),
        (("create out/new", "fsync out/new", "write out/new", "fsync out"), NAMES_LOST, {**OLD, "out/new": False}),
        (("unlink out/old/file",), NAMES_LOST, OLD),
        (("unlink out/old/file",), RENAMES_FIRST, {}),
        (("unlink out/old/file", "fsync out/old"), NAMES_LOST, {}),
        (("rename out/old out/moved",), NAMES_LOST, OLD),
        (("rename out/old out/moved",), RENAMES_FIRST, {"out/moved/file": True}),
        (("rename out/old out/moved", "fsync out"), NAMES_LOST, {"out/moved/file": True}),
        (
            ("mkdir out/in", "fsync out", "rename out/old out/in/old", "fsync out/in"),
            NAMES_LOST,
            {"out/in/old/file": True},
        ),
        (("mkdir out/in", "fsync out", "rename out/old out/in/old", "fsync out"), NAMES_LOST, {}),
        (("link out/old/file out/second", "fsync out"), NAMES_LOST, {**OLD, "out/second": True}),
    ],
)
def test_what_a_power_cut_leaves(start: Path, operations: tuple[str, ...], mode: str, left: dict[str, bool]) -> None:
    assert paths(after(start, *operations), mode) == left


def test_a_renamed_directory_is_there_without_the_names_that_were_not_synced(start: Path) -> None:
    disks = after(
        start, "mkdir out/staged", "create out/staged/file", "fsync out/staged/file", "rename out/staged out/new"
    )

    assert paths(disks, RENAMES_FIRST) == OLD
    assert "out/new" in disks.state(RENAMES_FIRST).directories


def test_an_exchange_is_one_step(start: Path) -> None:
    exchange = ("mkdir out/new", "create out/new/own", "fsync out/new/own", "fsync out/new", "fsync out")
    disks = after(start, *exchange, "exchange out/new out/old")

    assert paths(disks, NAMES_LOST) == {"out/old/file": True, "out/new/own": True}
    assert paths(disks, RENAMES_FIRST) == {"out/new/file": True, "out/old/own": True}


def test_what_failed_has_changed_nothing(start: Path) -> None:
    disks = Disks(start)

    disks.apply(Operation(0, "", "unlink", "out/old/file", ok=False))

    assert paths(disks, DATA_LOST) == OLD


def test_an_operation_that_the_tape_has_not_seen_is_noticed(start: Path) -> None:
    disks = Disks(start)
    (start / "out" / "unseen").touch()

    with pytest.raises(AssertionError, match="unseen"):
        disks.finish(start)
