"""pieces: commits and removals where directories are not renamed in one step (S9). Killed before any operation."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from safe_trainer import commit, pieces
from safe_trainer.commit import RunDirectory
from safe_trainer.disk import Mount
from safe_trainer.errors import CheckpointError
from safe_trainer.integrity import file_problem, inspect_checkpoint
from safe_trainer.layout import AREA_NAME, MANIFEST_NAME, RunLayout
from safe_trainer.manifest import Manifest
from safe_trainer.pieces import rename_problem
from tests.unit.builders import contents, make_checkpoint, save, stage, start_run, write_files
from tests.unit.processes import die_before, kill_self, killed

OLD = {"model.safetensors": b"old weights", "rng_state_0.pth": b"0", "old_only/a": b"1"}
NEW = {"model.safetensors": b"new weights!", "rng_state_0.pth": b"22", "sub/.file": b""}
NEXT_SAVE = "2-0a1b2c3d-0-10"
CLEAN = {"generation.json", "lock"}

Patch = Callable[[], None]


def names_in(directory: Path) -> set[str]:
    return set(os.listdir(directory))


def is_whole(checkpoint: Path) -> bool:
    manifest = Manifest.read(checkpoint)
    assert manifest is not None
    return inspect_checkpoint(checkpoint, verify="digest").complete and not any(
        file_problem(checkpoint, entry) for entry in manifest.files
    )


# What a file system refuses. Set on `os` itself, in a child or through the fixture, which takes it back.


def refuse_directories() -> None:
    """No directory can be renamed; files can."""
    real = os.rename

    def rename(source: str | Path, target: str | Path) -> None:
        if os.path.isdir(source):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(target))
        real(source, target)

    os.rename = rename  # type: ignore[assignment]
    commit.exchange = lambda first, second: False  # type: ignore[assignment]


def refuse_everything() -> None:
    """Nothing can be renamed but the package's own small files in `_safe_trainer/`."""
    refuse_directories()
    real = os.replace

    def replace(source: str | Path, target: str | Path) -> None:
        if Path(target).suffix != ".json" or Path(target).name == MANIFEST_NAME:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(source), None, str(target))
        real(source, target)

    os.replace = replace  # type: ignore[assignment]


@pytest.fixture(params=[refuse_directories, refuse_everything], ids=["files can be renamed", "nothing can"])
def refusal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Patch:
    _remember(monkeypatch)
    refuse: Patch = request.param
    refuse()
    return refuse


def _remember(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the refusals replace is taken back after the test."""
    for module, name in ((os, "rename"), (os, "replace"), (commit, "exchange")):
        monkeypatch.setattr(module, name, getattr(module, name))


# --- finding out ---


def test_a_file_system_that_renames_directories_is_found_to(tmp_path: Path) -> None:
    assert rename_problem(RunLayout(tmp_path)) is None
    assert names_in(RunLayout(tmp_path).tokens) == set()


@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOSYS, errno.ENOTSUP, errno.EPERM], ids=errno.errorcode.get)
def test_one_that_refuses_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "rename", refuse)
    assert os.strerror(code) in (rename_problem(RunLayout(tmp_path)) or "")
    assert names_in(RunLayout(tmp_path).tokens) == set()


def test_another_failure_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        rename_problem(RunLayout(tmp_path))


def test_one_to_which_a_directory_in_the_way_is_no_obstacle_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename_in_pieces(source: Path, target: Path) -> None:
        target.mkdir(exist_ok=True)
        for entry in source.iterdir():
            os.replace(entry, target / entry.name)
        source.rmdir()

    monkeypatch.setattr(os, "rename", rename_in_pieces)
    assert "not empty" in (rename_problem(RunLayout(tmp_path)) or "")


def test_object_stores_are_known_by_their_mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "mount_of", lambda path: Mount("fuse.s3fs", frozenset()))
    assert "fuse.s3fs" in (rename_problem(RunLayout(tmp_path)) or "")


# --- commits and removals ---


def test_a_refused_rename_is_said_once_and_the_checkpoint_arrives_all_the_same(
    tmp_path: Path, refusal: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = start_run(tmp_path)
    save(directory, 10, OLD)
    save(directory, 20, NEW)
    directory.empty_trash()
    assert (contents(tmp_path / "checkpoint-10"), contents(tmp_path / "checkpoint-20")) == (OLD, NEW)
    assert is_whole(tmp_path / "checkpoint-20")
    assert names_in(tmp_path / AREA_NAME) == CLEAN
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert "does not rename directories in one step" in said[0]


def test_an_existing_checkpoint_is_replaced_as_a_whole(tmp_path: Path, refusal: Patch) -> None:
    directory = start_run(tmp_path)
    save(directory, 10, OLD)
    save(directory, 10, NEW)
    directory.empty_trash()
    assert contents(tmp_path / "checkpoint-10") == NEW
    assert names_in(tmp_path / "checkpoint-10") == {"model.safetensors", "rng_state_0.pth", "sub", MANIFEST_NAME}
    assert names_in(tmp_path / AREA_NAME) == CLEAN


def test_the_manifest_is_the_first_to_go_and_the_last_to_come(
    tmp_path: Path, refusal: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = start_run(tmp_path)
    final = save(directory, 10, OLD)
    seen = []
    for name in ("replace", "unlink", "fsync", "open"):
        monkeypatch.setattr(os, name, _watched(getattr(os, name), lambda: seen.append(_state(final))))
    save(directory, 10, NEW)
    directory.remove_checkpoints([10])
    order = [state for before, state in zip([None, *seen], seen, strict=False) if state != before]
    assert order[0] == "old"
    assert order.count("old") == order.count("new") == 1, "each is there once, whole, and between them no manifest"
    assert set(order) == {"old", "new", "nothing to be taken for a checkpoint"}


def test_whatever_a_later_step_relies_on_is_durable_before_it(
    tmp_path: Path, refusal: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = start_run(tmp_path)
    staged = stage(directory, 10, NEW)
    final, record = tmp_path / "checkpoint-10", tmp_path / AREA_NAME / "committing" / "checkpoint-10.json"
    synced: list[Path] = []
    replaced: dict[Path, set[Path]] = {}
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def replace(source: Path, target: Path) -> None:
        replaced[target] = set(synced)
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    directory.commit(staged)
    assert replaced[record] >= {staged, staged.parent, staged.parent.parent}
    for path in NEW:
        assert replaced[final / path] >= {record.parent, tmp_path / AREA_NAME, final, final / "sub", tmp_path}
    assert final / MANIFEST_NAME in replaced
    assert synced.index(record.parent) > synced.index(staged.parent)


def _state(final: Path) -> str:
    if not (final / MANIFEST_NAME).exists() or not (final / MANIFEST_NAME).stat().st_size:
        return "nothing to be taken for a checkpoint"
    return "old" if contents(final) == OLD else "new" if contents(final) == NEW else "half"


def _watched(real: Callable[..., object], look: Callable[[], object]) -> Callable[..., object]:
    looking = False

    def watched(*args: object, **kwargs: object) -> object:
        nonlocal looking
        if not looking:
            looking = True
            look()
            looking = False
        return real(*args, **kwargs)

    return watched


def test_links_and_files_in_the_way_are_replaced_and_what_a_link_points_to_stays(
    tmp_path: Path, refusal: Patch
) -> None:
    write_files(tmp_path, {"elsewhere/model": b"precious", "checkpoint-20": b"a file"})
    (tmp_path / "checkpoint-10").symlink_to("elsewhere")
    directory = start_run(tmp_path)
    directory.use_pieces("told so")
    save(directory, 10, NEW)
    save(directory, 20, NEW)
    assert contents(tmp_path / "checkpoint-10") == contents(tmp_path / "checkpoint-20") == NEW
    assert (tmp_path / "elsewhere" / "model").read_bytes() == b"precious"


def test_what_a_subclass_wrote_beside_the_checkpoint_goes_to_the_run_directory(tmp_path: Path, refusal: Patch) -> None:
    directory = start_run(tmp_path)
    staged = stage(directory, 10, NEW)
    write_files(staged.parent, {"samples/1": b"s"})
    directory.commit(staged)
    directory.release_staging(staged)
    assert (tmp_path / "samples" / "1").read_bytes() == b"s"


# --- crashes ---

_OPERATIONS = ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir", "link")


def _die_before(nth: int) -> None:
    die_before(nth, [(os, name) for name in _OPERATIONS])


def _die_before_the_manifest_moves() -> None:
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        if Path(target).name == MANIFEST_NAME:
            kill_self()
        real(source, target)

    os.replace = replace  # type: ignore[assignment]


@pytest.mark.parametrize("existing", [{}, OLD], ids=["new", "replaced"])
def test_killed_at_any_moment_of_a_commit_the_next_start_has_what_was_there_or_the_new_one(
    tmp_path: Path, refusal: Patch, existing: dict[str, bytes]
) -> None:
    found = []
    for nth in range(1, 200):
        root = tmp_path / str(nth)
        first = start_run(root, 1)
        if existing:
            save(first, 10, existing)

        def die_while_saving(root: Path = root, nth: int = nth) -> None:
            directory = start_run(root, 2)
            staged = stage(directory, 10, NEW, save=NEXT_SAVE)
            _die_before(nth)
            with directory.lock():
                directory.commit(staged)
                directory.release_staging(staged)

        died = killed(die_while_saving)
        start_run(root, 3)
        final = root / "checkpoint-10"
        assert not final.exists() or is_whole(final)
        found.append(contents(final) if final.exists() else {})
        assert names_in(root) <= {AREA_NAME, "checkpoint-10"}
        assert names_in(root / AREA_NAME) == CLEAN
        if not died:
            break
    assert found == sorted(found, key=lambda files: files == NEW), "once new, always new"
    assert found[0] == existing
    assert found[-1] == NEW
    assert len(found) > 10


def test_a_start_that_is_killed_while_it_finishes_leaves_it_to_the_next(tmp_path: Path, refusal: Patch) -> None:
    for nth in range(1, 200):
        root = tmp_path / str(nth)
        save(start_run(root, 1), 10, OLD)

        def die_in_the_middle(root: Path = root) -> None:
            directory = start_run(root, 2)
            staged = stage(directory, 10, NEW, save=NEXT_SAVE)
            _die_before_the_manifest_moves()
            directory.commit(staged)

        def die_while_starting(root: Path = root, nth: int = nth) -> None:
            _die_before(nth)
            start_run(root, 3)

        assert killed(die_in_the_middle)
        assert not (root / "checkpoint-10" / MANIFEST_NAME).exists()
        died = killed(die_while_starting)
        start_run(root, 4)
        assert contents(root / "checkpoint-10") == NEW
        assert is_whole(root / "checkpoint-10")
        if not died:
            break
    assert nth > 10


def test_killed_while_it_removes_the_next_start_has_it_whole_or_not_at_all(tmp_path: Path, refusal: Patch) -> None:
    there = []
    for nth in range(1, 100):
        root = tmp_path / str(nth)
        directory = start_run(root, 1)
        save(directory, 10, OLD)

        def die_while_removing(directory: RunDirectory = directory, nth: int = nth) -> None:
            _die_before(nth)
            directory.remove_checkpoints([10])

        died = killed(die_while_removing)
        start_run(root, 2)
        there.append((root / "checkpoint-10").exists())
        assert not there[-1] or is_whole(root / "checkpoint-10")
        assert names_in(root / AREA_NAME) == CLEAN
        if not died:
            break
    assert there == sorted(there, reverse=True)
    assert there[0]
    assert not there[-1]


# --- errors ---


def test_a_disk_that_is_full_half_way_costs_nothing_and_the_next_start_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _remember(monkeypatch)
    refuse_everything()
    directory = start_run(tmp_path)
    save(directory, 10, OLD)
    staged = stage(directory, 10, NEW)

    def fill_up(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    with monkeypatch.context() as full:
        full.setattr("shutil.copyfile", fill_up)
        with pytest.raises(OSError, match="No space left"), directory.lock():
            directory.commit(staged)
        directory.drop_staging(staged)
        with pytest.raises(OSError, match="No space left"):
            start_run(tmp_path, 2)
    assert "next start finishes it" in caplog.text
    start_run(tmp_path, 3)
    assert contents(tmp_path / "checkpoint-10") == NEW
    assert is_whole(tmp_path / "checkpoint-10")
    assert names_in(tmp_path / AREA_NAME) == CLEAN


def test_what_cannot_be_finished_because_files_are_gone_is_removed_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    staged = stage(start_run(tmp_path), 10, NEW)

    def die_after_the_record() -> None:
        refuse_directories()
        directory = RunDirectory(tmp_path, lock_timeout_s=5.0)
        directory.use_pieces("told so")
        pieces._carry_out = lambda layout, record: kill_self()  # type: ignore[assignment]
        pieces.commit_in_pieces(directory.layout, staged, tmp_path / "checkpoint-10")

    assert killed(die_after_the_record)
    (staged / "model.safetensors").unlink()
    make_checkpoint(tmp_path, 5, OLD)
    start_run(tmp_path, 2)
    assert "model.safetensors" in caplog.text
    assert names_in(tmp_path) == {AREA_NAME, "checkpoint-5"}
    assert names_in(tmp_path / AREA_NAME) == CLEAN


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"name": "checkpoint-5", "staged": null, "files": {}}',
        '{"name": "../x", "staged": null, "files": {}}',
    ],
)
def test_a_damaged_record_is_an_error_that_says_what_to_do(tmp_path: Path, text: str) -> None:
    write_files(tmp_path, {f"{AREA_NAME}/committing/checkpoint-10.json": text.encode()})
    with pytest.raises(CheckpointError, match=r"checkpoint-10\.json is damaged.*delete that file"):
        start_run(tmp_path)


def test_a_record_that_leads_out_of_the_run_directory_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "out"
    write_files(tmp_path, {"precious/model": b"1"})
    text = b'{"name": "checkpoint-10", "staged": "../precious", "files": {"model": 1}}'
    write_files(root, {f"{AREA_NAME}/committing/checkpoint-10.json": text})
    with pytest.raises(CheckpointError, match="its files come from"):
        start_run(root)
    assert contents(tmp_path / "precious") == {"model": b"1"}


def test_what_cannot_be_deleted_yet_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = start_run(tmp_path)
    directory.use_pieces("told so")
    save(directory, 10, OLD)
    with monkeypatch.context() as stuck:
        stuck.setattr("safe_trainer.disk.DELETE_RETRY_S", 0.0)
        stuck.setattr(os, "rmdir", lambda *args, **kwargs: _refuse_to_go())
        directory.remove_checkpoints([10])
        directory.empty_trash()
    assert names_in(tmp_path) == {AREA_NAME, "checkpoint-10"}
    directory.empty_trash()
    assert names_in(tmp_path) == {AREA_NAME}
    assert names_in(tmp_path / AREA_NAME) == CLEAN


def _refuse_to_go() -> None:
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
