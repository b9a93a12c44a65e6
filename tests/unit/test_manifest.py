"""manifest: what is written can be read again; what is damaged, foreign or dangerous is refused with a clear error."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from safe_trainer.errors import CheckpointError, UnsafePathError
from safe_trainer.layout import MANIFEST_NAME
from safe_trainer.manifest import FORMAT, MAX_BYTES, FileEntry, Manifest, ManifestError

DIGEST = "0123456789abcdef0123456789abcdef"

MANIFEST = Manifest(
    step=10,
    save_id="save-1",
    scope="full",
    generation=3,
    world_size=4,
    saved_at="2026-01-01T00:00:00Z",
    saved_by={"host": "node0", "process": "17", "torch": "2.13.0"},
    files=(
        FileEntry(path="global_step10/ü.pt", size=70_000_000_000, digest=DIGEST, rank=3, mode=0o600),
        FileEntry(path="model.safetensors", size=0, digest="f" * 32, rank=0, mode=0o644),
    ),
    warnings=("an adapter without tensors",),
)


def document() -> dict[str, Any]:
    return {"format": FORMAT, **json.loads(json.dumps(dataclasses.asdict(MANIFEST)))}


def put(checkpoint: Path, value: object) -> None:
    (checkpoint / MANIFEST_NAME).write_text(json.dumps(value))


# --- round trip ---


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path)
    assert Manifest.read(tmp_path) == MANIFEST


def test_a_directory_without_a_manifest_has_none(tmp_path: Path) -> None:
    assert Manifest.read(tmp_path) is None


def test_the_file_reaches_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    MANIFEST.write(tmp_path)
    assert synced == [str(tmp_path.resolve() / MANIFEST_NAME)]


def test_it_is_json_that_people_can_read(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path)
    text = (tmp_path / MANIFEST_NAME).read_text()
    assert json.loads(text) == document()
    assert "\n" in text.strip()


def test_a_manifest_without_warnings_can_be_read(tmp_path: Path) -> None:
    without = document()
    del without["warnings"]
    put(tmp_path, without)
    assert Manifest.read(tmp_path) == dataclasses.replace(MANIFEST, warnings=())


# --- what it tells ---


def test_bytes_and_files_by_path() -> None:
    assert MANIFEST.total_bytes == 70_000_000_000
    assert MANIFEST.by_path()["model.safetensors"].mode == 0o644


def test_a_part_lists_only_what_it_holds_and_says_so() -> None:
    part = MANIFEST.part({"model.safetensors", "not listed"})
    assert [entry.path for entry in part.files] == ["model.safetensors"]
    assert (part.scope, part.save_id) == ("part", MANIFEST.save_id)


@pytest.mark.parametrize(
    ("change", "same"),
    [({}, True), ({"rank": 7, "mode": 0}, True), ({"size": 1}, False), ({"digest": "0" * 32}, False)],
)
def test_content_is_size_and_digest(change: dict[str, Any], same: bool) -> None:
    entry = MANIFEST.files[0]
    assert entry.same_content(dataclasses.replace(entry, **change)) is same


# --- damaged ---


@pytest.mark.parametrize("keep", [0, 1, 100, -2])
def test_a_truncated_one_is_damaged(tmp_path: Path, keep: int) -> None:
    MANIFEST.write(tmp_path)
    content = (tmp_path / MANIFEST_NAME).read_bytes()
    (tmp_path / MANIFEST_NAME).write_bytes(content[:keep])
    with pytest.raises(ManifestError, match=MANIFEST_NAME):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"not json", b"[" * 100_000, b"\0" * 500])
def test_what_is_no_json_is_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(ManifestError):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("value", [None, 5, "text", [], {}, [document()]])
def test_json_that_is_no_manifest_is_damaged(tmp_path: Path, value: object) -> None:
    put(tmp_path, value)
    with pytest.raises(ManifestError):
        Manifest.read(tmp_path)


def test_a_directory_in_its_place_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).mkdir()
    with pytest.raises(ManifestError, match=MANIFEST_NAME):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("version", [0, FORMAT + 1, "1", None, True, 1.0])
def test_another_format_is_refused_with_advice(tmp_path: Path, version: object) -> None:
    put(tmp_path, {**document(), "format": version})
    with pytest.raises(ManifestError, match="update"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("key", sorted(document().keys() - {"warnings"}))
def test_every_key_is_needed(tmp_path: Path, key: str) -> None:
    without = document()
    del without[key]
    put(tmp_path, without)
    with pytest.raises(ManifestError):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("key", ["path", "size", "digest", "rank", "mode"])
def test_every_key_of_a_file_is_needed(tmp_path: Path, key: str) -> None:
    without = document()
    del without["files"][1][key]
    put(tmp_path, without)
    with pytest.raises(ManifestError):
        Manifest.read(tmp_path)


def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    put(tmp_path, {**document(), "surprise": 1})
    with pytest.raises(ManifestError, match="surprise"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", "10"),
        ("step", 10.5),
        ("step", None),
        ("step", True),
        ("step", 2**63),
        ("scope", "half"),
        ("scope", None),
        ("files", {}),
        ("files", None),
        ("files", [1]),
        ("files", ["model.safetensors"]),
        ("save_id", 5),
        ("generation", "3"),
        ("world_size", "4"),
        ("world_size", None),
        ("saved_by", []),
        ("saved_at", 0),
        ("warnings", None),
    ],
)
def test_a_wrong_type_is_damage(tmp_path: Path, key: str, value: object) -> None:
    put(tmp_path, {**document(), key: value})
    with pytest.raises(ManifestError):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("path", 5),
        ("path", None),
        ("path", ["a"]),
        ("size", -1),
        ("size", "5"),
        ("size", 5.0),
        ("size", True),
        ("size", 2**63),
        ("digest", None),
        ("digest", 5),
        ("digest", ""),
        ("digest", DIGEST.upper()),
        ("rank", "0"),
        ("rank", None),
        ("mode", "0644"),
        ("mode", None),
    ],
)
def test_a_wrong_type_in_a_file_is_damage(tmp_path: Path, key: str, value: object) -> None:
    wrong = document()
    wrong["files"][1][key] = value
    put(tmp_path, wrong)
    with pytest.raises(ManifestError):
        Manifest.read(tmp_path)


def test_a_path_that_is_listed_twice_is_damage(tmp_path: Path) -> None:
    twice = document()
    twice["files"].append({**twice["files"][0], "size": 1})
    put(tmp_path, twice)
    with pytest.raises(ManifestError, match="twice"):
        Manifest.read(tmp_path)


def test_what_is_too_large_for_a_manifest_is_not_read(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).touch()
    os.truncate(tmp_path / MANIFEST_NAME, MAX_BYTES + 1)
    with pytest.raises(ManifestError, match="more than any manifest"):
        Manifest.read(tmp_path)


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MANIFEST_NAME)
    with pytest.raises(ManifestError, match="no regular file"):
        Manifest.read(tmp_path)


# --- dangerous ---


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../../x", "a\\..\\x", "C:/x", "", "./x", "a\0b", "\ud800", "x/" * 4096 + "x"]
)
def test_a_path_that_leaves_the_checkpoint_is_refused(tmp_path: Path, path: str) -> None:
    dangerous = document()
    dangerous["files"][0]["path"] = path
    put(tmp_path, dangerous)
    with pytest.raises(UnsafePathError):
        Manifest.read(tmp_path)


def test_all_its_errors_are_checkpoint_errors() -> None:
    assert issubclass(ManifestError, CheckpointError)
    assert issubclass(UnsafePathError, CheckpointError)
