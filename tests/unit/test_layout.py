"""layout: which names are checkpoints, which paths are safe, which files a checkpoint has."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from safe_trainer.errors import UnsafePathError
from safe_trainer.layout import (
    AREA_NAME,
    STAGING_MARKER_PREFIX,
    RunLayout,
    check_relative_path,
    checkpoint_name,
    checkpoint_step,
    list_checkpoints,
    list_files,
    resolve_inside,
)
from tests.unit.builders import write_files

# --- names ---


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-0", 0),
        ("checkpoint-5", 5),
        ("checkpoint-100", 100),
        ("checkpoint-5.tmp", None),
        ("tmp-checkpoint-5", None),
        ("checkpoint-", None),
        ("checkpoint--5", None),
        ("checkpoint-5-old", None),
        ("checkpoint-best", None),
        ("Checkpoint-5", None),
        (" checkpoint-5", None),
        ("checkpoint_manifest.json", None),
        ("runs", None),
        (AREA_NAME, None),
        ("checkpoint-5\n", None),
        ("checkpoint-\u0665", None),
        ("checkpoint-005", None),
    ],
)
def test_only_a_name_that_a_save_gives_is_a_checkpoint(name: str, step: int | None) -> None:
    assert checkpoint_step(name) == step


def test_name_and_step_lead_to_each_other() -> None:
    assert [checkpoint_step(checkpoint_name(step)) for step in (0, 9, 10, 123456)] == [0, 9, 10, 123456]


def test_checkpoints_are_listed_by_number_and_not_by_spelling(tmp_path: Path) -> None:
    for step in (100, 9, 11, 10):
        (tmp_path / checkpoint_name(step)).mkdir()
    assert list_checkpoints(tmp_path) == [(step, tmp_path / checkpoint_name(step)) for step in (9, 10, 11, 100)]


def test_files_and_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").write_text("a file")
    for name in ("checkpoint-5.tmp", "tmp-checkpoint-2", "runs", AREA_NAME):
        (tmp_path / name).mkdir()
    assert list_checkpoints(tmp_path) == []


def test_a_link_to_a_directory_is_listed_as_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoint-3").symlink_to("elsewhere")
    (tmp_path / "checkpoint-4").symlink_to("nowhere")
    assert [step for step, _ in list_checkpoints(tmp_path)] == [3]


def test_a_run_directory_that_is_not_there_has_no_checkpoints(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "not there") == []


def test_everything_that_is_no_checkpoint_lies_in_one_directory_that_uploads_and_globs_skip(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    own = (
        layout.lock_file,
        layout.generation_file,
        layout.staging,
        layout.replaced,
        layout.delivered,
        layout.trash,
        layout.tokens,
    )
    assert all(path.parent == layout.area for path in own)
    assert layout.area.parent == tmp_path
    assert layout.area.name.startswith("_")
    assert not any(path.name.startswith("checkpoint") for path in (layout.area, *own))
    assert layout.checkpoint(7) == tmp_path / "checkpoint-7"


# --- paths from others ---

UNSAFE_PATHS = (
    "",
    ".",
    "..",
    "/etc/passwd",
    "//host/share",
    "../x",
    "a/../x",
    "a/..",
    "./x",
    "a/./x",
    "a//x",
    "a/",
    "a\\x",
    "..\\x",
    "C:/x",
    "C:\\x",
    "\\\\host\\share",
    "a\0b",
)


@pytest.mark.parametrize("path", UNSAFE_PATHS)
def test_a_path_that_could_lead_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(UnsafePathError, match="not a path inside a checkpoint"):
        check_relative_path(path)


@pytest.mark.parametrize(
    "path",
    [
        "model.safetensors",
        "global_step5/mp_rank_00_model_states.pt",
        "pytorch_model_fsdp_0/.metadata",
        "a..b",
        "a:b",
        "ü",
        " ",
    ],
)
def test_a_plain_relative_path_is_accepted(path: str) -> None:
    assert check_relative_path(path) == path


@pytest.mark.parametrize("path", UNSAFE_PATHS)
def test_resolving_refuses_what_the_check_refuses(tmp_path: Path, path: str) -> None:
    with pytest.raises(UnsafePathError):
        resolve_inside(tmp_path, path)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with a secret beside it."""
    write_files(tmp_path, {"secret/file": b"secret", "checkpoint/a": b"12345", "checkpoint/sub/.b": b""})
    return tmp_path / "checkpoint"


def _link_file_out(checkpoint: Path) -> str:
    (checkpoint / "x").symlink_to("../secret/file")
    return "x"


def _link_directory_out(checkpoint: Path) -> str:
    (checkpoint / "x").symlink_to("../secret")
    return "x/file"


def _link_absolutely_out(checkpoint: Path) -> str:
    (checkpoint / "x").symlink_to("/etc")
    return "x/passwd"


def _link_out_over_a_link(checkpoint: Path) -> str:
    (checkpoint / "y").symlink_to("../secret")
    (checkpoint / "x").symlink_to("y/file")
    return "x"


def _link_to_itself(checkpoint: Path) -> str:
    (checkpoint / "x").symlink_to("x")
    return "x"


def _link_dangling_out(checkpoint: Path) -> str:
    (checkpoint / "x").symlink_to("../secret/not-there")
    return "x"


LEAVING = [
    _link_file_out,
    _link_directory_out,
    _link_absolutely_out,
    _link_out_over_a_link,
    _link_dangling_out,
    _link_to_itself,
]


@pytest.mark.parametrize("link", LEAVING)
def test_a_symbolic_link_out_of_the_checkpoint_is_not_followed(checkpoint: Path, link: Callable[[Path], str]) -> None:
    path = link(checkpoint)
    with pytest.raises(UnsafePathError):
        resolve_inside(checkpoint, path)


@pytest.mark.parametrize("link", LEAVING)
def test_a_checkpoint_with_a_link_out_of_it_cannot_be_listed(checkpoint: Path, link: Callable[[Path], str]) -> None:
    link(checkpoint)
    with pytest.raises(UnsafePathError):
        list_files(checkpoint)


def test_a_symbolic_link_that_stays_inside_is_followed(checkpoint: Path) -> None:
    (checkpoint / "file").symlink_to("a")
    (checkpoint / "directory").symlink_to("sub")
    assert resolve_inside(checkpoint, "file").read_bytes() == b"12345"
    assert resolve_inside(checkpoint, "directory/.b").read_bytes() == b""


def test_a_path_that_is_not_there_yet_can_be_resolved(checkpoint: Path) -> None:
    assert resolve_inside(checkpoint, "new/file") == checkpoint / "new/file"


def test_the_checkpoint_itself_may_be_reached_through_a_link(checkpoint: Path) -> None:
    link = checkpoint.parent / "link"
    link.symlink_to("checkpoint")
    assert resolve_inside(link, "a").read_bytes() == b"12345"


# --- listing files ---


@pytest.mark.parametrize("name", [".nfs0000000001", ".fuse_hidden0000000100000001", f"{STAGING_MARKER_PREFIX}0"])
def test_what_stands_for_a_removed_file_that_is_still_open_is_not_listed(tmp_path: Path, name: str) -> None:
    write_files(tmp_path, {"a": b"1", name: b"2"})

    assert list(list_files(tmp_path)) == ["a"]


def test_every_file_is_listed_with_size_and_mode_dot_files_too(checkpoint: Path) -> None:
    (checkpoint / "a").chmod(0o640)
    listed = list_files(checkpoint)
    assert list(listed) == ["a", "sub/.b"]
    assert (listed["a"].size, listed["a"].mode) == (5, 0o640)


def test_the_markers_of_a_save_under_way_are_no_files_of_the_checkpoint(checkpoint: Path) -> None:
    (checkpoint / f"{STAGING_MARKER_PREFIX}3").touch()
    assert list(list_files(checkpoint)) == ["a", "sub/.b"]


def test_directories_and_sockets_are_not_listed(checkpoint: Path) -> None:
    (checkpoint / "empty").mkdir()
    os.mkfifo(checkpoint / "fifo")
    assert list(list_files(checkpoint)) == ["a", "sub/.b"]


def test_links_inside_are_listed_as_what_they_point_to(checkpoint: Path) -> None:
    (checkpoint / "file").symlink_to("a")
    (checkpoint / "directory").symlink_to("sub")
    listed = list_files(checkpoint)
    assert list(listed) == ["a", "directory/.b", "file", "sub/.b"]
    assert listed["file"] == listed["a"]


def test_a_link_to_a_directory_above_does_not_go_round_for_ever(checkpoint: Path) -> None:
    (checkpoint / "sub" / "up").symlink_to("..")
    assert list(list_files(checkpoint)) == ["a", "sub/.b"]


@pytest.mark.parametrize("name", ["a\\b", "..\\b"])
def test_a_file_that_no_reader_would_accept_is_refused_when_it_is_listed(checkpoint: Path, name: str) -> None:
    (checkpoint / name).touch()
    with pytest.raises(UnsafePathError):
        list_files(checkpoint)


def test_listing_shows_modes_without_the_kind_of_file(checkpoint: Path) -> None:
    assert all(info.mode == stat.S_IMODE(info.mode) for info in list_files(checkpoint).values())
