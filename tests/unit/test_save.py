"""save: the protocol with plain file writers, no model. One rank, but for what takes several."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from safe_trainer import commit
from safe_trainer.channel import Channel
from safe_trainer.errors import CheckpointError, RunDirectoryTaken
from safe_trainer.integrity import inspect_checkpoint
from safe_trainer.layout import AREA_NAME, MANIFEST_NAME, STAGING_MARKER_PREFIX, list_checkpoints
from safe_trainer.manifest import FileEntry, Manifest
from safe_trainer.options import CheckpointOptions
from safe_trainer.rotation import Rotation
from safe_trainer.run import Run, open_run
from safe_trainer.save import SaveReport, choose_copies, keep_only, save_checkpoint, writing_rank
from safe_trainer.topology import Domain
from tests.unit.builders import contents, write_files
from tests.unit.processes import Raised, outcome_of, run_ranks

OPTIONS = CheckpointOptions(lock_timeout_s=5.0, visibility_timeout_s=5.0)
FILES = {"model.safetensors.index.json": b"{}", "optimizer.pt": b"state", "sub/.dot": b""}


def start(root: Path, channel: Channel | None = None) -> Run:
    channel = Channel.open(timeout_s=5.0) if channel is None else channel
    return open_run(root, channel=channel, options=OPTIONS, saved_by={"torch": "2"})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return start(tmp_path)


def save(
    run: Run,
    step: int,
    files: dict[str, bytes] = FILES,
    *,
    rotation: Rotation | None = None,
    write: Callable[[Path], None] | None = None,
) -> SaveReport:
    return save_checkpoint(
        run,
        step=step,
        write=write or (lambda staged: write_files(staged, files)),
        rotation=lambda: rotation or Rotation(),
    )


def names_in(directory: Path) -> set[str]:
    return {entry.name for entry in os.scandir(directory)}


# --- a save ---


def test_a_run_that_is_superseded_while_it_writes_says_so_whatever_fails_first(run: Run) -> None:
    """A newer one has swept its staging directory."""
    save(run, 10)

    def write(staged: Path) -> None:
        start(run.root)
        write_files(staged / "deeper", FILES)
        (staged / "model").rename(staged / "gone")

    with pytest.raises(RunDirectoryTaken, match="run 2"):
        save(run, 20, write=write)
    assert names_in(run.root) == {AREA_NAME, "checkpoint-10"}


def test_a_manifest_that_came_along_with_copied_files_is_not_listed(run: Run) -> None:
    """A subclass that takes files over from an older checkpoint."""
    save(run, 10)

    def write(staged: Path) -> None:
        write_files(staged, FILES)
        shutil.copy(run.root / "checkpoint-10" / MANIFEST_NAME, staged)

    save(run, 20, write=write)
    assert inspect_checkpoint(run.root / "checkpoint-20", verify="digest").complete


def test_a_save_leaves_a_complete_checkpoint_and_nothing_else(run: Run) -> None:
    save(run, 10)
    assert names_in(run.root) == {AREA_NAME, "checkpoint-10"}
    assert names_in(run.root / AREA_NAME) == {"generation.json", "lock"}
    assert contents(run.root / "checkpoint-10") == FILES
    assert inspect_checkpoint(run.root / "checkpoint-10", verify="digest").complete


def test_the_manifest_says_what_was_saved_and_by_whom(run: Run) -> None:
    save(run, 10)
    manifest = Manifest.read(run.root / "checkpoint-10")
    assert manifest is not None
    assert (manifest.step, manifest.scope, manifest.generation, manifest.world_size) == (10, "full", 1, 1)
    assert manifest.saved_by["torch"] == "2"
    assert {entry.path: entry.size for entry in manifest.files} == {path: len(data) for path, data in FILES.items()}


def test_the_report_counts_files_and_bytes_and_seconds_of_each_step(run: Run) -> None:
    report = save(run, 10)
    assert (report.step, report.files, report.bytes, report.gathered_bytes) == (10, 3, 7, 0)
    assert list(report.phases_s) == ["prepare", "write", "list", "compare", "gather", "commit", "rotate"]
    assert sum(report.phases_s.values()) <= report.stall_s


def test_a_save_is_one_line_in_the_log(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="safe_trainer"):
        save(run, 10)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "saved step 10" in line
    assert str(run.root / "checkpoint-10") in line


def test_writers_find_a_directory_that_is_there_and_not_empty(run: Run) -> None:
    found: list[set[str]] = []
    save(run, 10, write=lambda staged: found.append(names_in(staged)))
    assert found == [{f"{STAGING_MARKER_PREFIX}0"}]
    assert contents(run.root / "checkpoint-10") == {}


def test_nothing_has_the_final_name_while_ranks_write(run: Run) -> None:
    seen: list[list[tuple[int, Path]]] = []
    save(run, 10, write=lambda staged: seen.append(list_checkpoints(run.root)))
    assert seen == [[]]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_saving_a_step_again_leaves_nothing_of_the_former_save(
    run: Run, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(commit, "exchange", lambda first, second: False)
    save(run, 10, {f"rng_state_{rank}.pth": b"old" for rank in range(4)})
    save(run, 10, {f"rng_state_{rank}.pth": b"new" for rank in range(2)})
    assert contents(run.root / "checkpoint-10") == {"rng_state_0.pth": b"new", "rng_state_1.pth": b"new"}
    assert names_in(run.root / AREA_NAME) == {"generation.json", "lock"}


# --- a save that fails changes nothing ---


def _fails(staged: Path) -> None:
    write_files(staged, {"half": b"x"})
    raise OSError(errno.ENOSPC, "No space left on device", str(staged / "half"))


def _leads_out(staged: Path) -> None:
    (staged / "link").symlink_to("/etc/passwd")


def _has_a_name_that_no_reader_accepts(staged: Path) -> None:
    write_files(staged, {"a\\b": b"x"})


@pytest.mark.parametrize("write", [_fails, _leads_out, _has_a_name_that_no_reader_accepts])
def test_after_a_failure_everything_is_as_before(run: Run, write: Callable[[Path], None]) -> None:
    save(run, 10)
    before = contents(run.root / "checkpoint-10")
    with pytest.raises(CheckpointError):
        save(run, 20, write=write)
    assert names_in(run.root) == {AREA_NAME, "checkpoint-10"}
    assert names_in(run.root / AREA_NAME) == {"generation.json", "lock"}
    assert contents(run.root / "checkpoint-10") == before


def test_a_failure_names_rank_step_and_path(run: Run) -> None:
    with pytest.raises(CheckpointError, match=r"rank 0 on .*, write: OSError \(ENOSPC\).*checkpoint-20/half"):
        save(run, 20, write=_fails)


def test_after_a_failure_the_next_save_works(run: Run) -> None:
    with pytest.raises(CheckpointError):
        save(run, 10, write=_fails)
    save(run, 10)
    assert contents(run.root / "checkpoint-10") == FILES


def test_a_fenced_run_saves_nothing(run: Run) -> None:
    start(run.root)
    with pytest.raises(RunDirectoryTaken):
        save(run, 10)
    assert list_checkpoints(run.root) == []


def test_a_disk_that_fails_to_sync_a_file_stops_the_save(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fail_on_the_optimizer(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("optimizer.pt"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail_on_the_optimizer)
    with pytest.raises(CheckpointError, match=r"ENOSPC.*optimizer\.pt"):
        save(run, 10)
    assert list_checkpoints(run.root) == []


def test_every_file_and_directory_is_on_the_disk_before_the_deciding_rename(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    real_fsync, real_rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        calls.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        real_fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        calls.append(("rename", os.path.basename(target)))
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    save(run, 10)
    deciding = calls.index(("rename", "checkpoint-10"))
    synced = [name for kind, name in calls[:deciding] if kind == "fsync"]
    files = {os.path.basename(path) for path in FILES}
    assert {*files, "checkpoint_manifest.json", "sub", "checkpoint-10"} <= set(synced)
    assert max(synced.index(name) for name in files) < synced.index("checkpoint_manifest.json"), "the manifest is last"
    assert calls[deciding + 1] == ("fsync", run.root.name)


# --- what fails after the deciding rename is a warning ---


def test_clearing_up_that_fails_after_the_commit_does_not_make_the_save_fail(run: Run) -> None:
    (run.root / "README.md").mkdir()

    def write(staged: Path) -> None:
        write_files(staged, FILES)
        write_files(staged.parent, {"README.md": b"a card where there is a directory"})

    report = save(run, 10, write=write)
    assert contents(run.root / "checkpoint-10") == FILES
    assert "clearing up" in "".join(report.warnings)


def test_wishes_that_cannot_be_told_are_an_error_before_the_commit(run: Run) -> None:
    def fail() -> Rotation:
        raise ValueError("no wishes")

    with pytest.raises(CheckpointError, match="no wishes"):
        save_checkpoint(run, step=10, write=lambda staged: write_files(staged, FILES), rotation=fail)
    assert list_checkpoints(run.root) == []


# --- rotation ---


def test_old_checkpoints_go_after_the_commit(run: Run) -> None:
    for step in (10, 20, 30):
        save(run, step, rotation=Rotation(limit=2))
    assert [step for step, _ in list_checkpoints(run.root)] == [20, 30]


def test_all_but_the_best_go_at_the_end(run: Run) -> None:
    for step in (10, 20, 30):
        save(run, step)
    keep_only(run, lambda: str(run.root / "checkpoint-20"))
    assert [step for step, _ in list_checkpoints(run.root)] == [20]


@pytest.mark.parametrize("best", [None, "/elsewhere/checkpoint-20", "checkpoint-40"])
def test_without_a_best_one_that_is_here_and_complete_all_stay(run: Run, best: str | None) -> None:
    for step in (10, 20):
        save(run, step)
    (run.root / "checkpoint-40").mkdir()
    keep_only(run, lambda: best if best is None or best.startswith("/") else str(run.root / best))
    assert [step for step, _ in list_checkpoints(run.root)] == [10, 20, 40]


# --- who wrote what (L9) ---

DOMAIN = Domain((2, 3))


@pytest.mark.parametrize(
    ("path", "rank"),
    [
        ("model.safetensors", 2),
        ("rng_state_3.pth", 3),
        ("rng_state_2.pth", 2),
        ("rng_state_0.pth", 2),
        ("sub/rng_state_3.pth", 3),
        ("global_step5/zero_pp_rank_3_mp_rank_00_model_states.pt", 3),
        ("global_step5/bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt", 3),
        ("global_step5/zero_pp_rank_9_mp_rank_00_model_states.pt", 2),
        ("global_step5/zero_pp_rank_3_mp_rank_01_model_states.pt", 2),
        ("pytorch_model_fsdp_0/__3_0.distcp", 3),
        ("pytorch_model_fsdp_0/.metadata", 2),
    ],
)
def test_the_writing_rank_is_in_the_name_or_the_leader(path: str, rank: int) -> None:
    assert writing_rank(path, DOMAIN) == rank


def entries(home: dict[str, str], other: dict[str, str]) -> dict[Domain, dict[str, FileEntry]]:
    """The files of two disks, each written by its leader, with their contents' digests."""
    return {
        domain: {path: FileEntry(path, 1, digest, domain.leader, 0o644) for path, digest in files.items()}
        for domain, files in ((Domain((0, 1)), home), (Domain((2, 3)), other))
    }


def test_each_path_is_taken_from_where_it_is_home_first() -> None:
    chosen = choose_copies(entries({"a": "1", "b": "2"}, {"a": "1", "c": "3"}))
    assert {entry.path: entry.rank for entry in chosen} == {"a": 0, "b": 0, "c": 2}


def test_one_name_with_two_contents_is_an_error_that_names_path_and_ranks() -> None:
    with pytest.raises(CheckpointError, match=r"expert\.pt .* rank 0 .* rank 2 ") as caught:
        choose_copies(entries({"expert.pt": "1"}, {"expert.pt": "2"}))
    assert "another disk" in str(caught.value)


@pytest.mark.parametrize("path", ["trainer_state.json", "training_args.bin", "latest"])
def test_of_what_stock_writes_on_every_node_homes_copy_counts(path: str) -> None:
    (chosen,) = choose_copies(entries({path: "1"}, {path: "2"}))
    assert chosen.rank == 0


def test_only_at_the_top_are_those_names_known() -> None:
    with pytest.raises(CheckpointError):
        choose_copies(entries({"sub/latest": "1"}, {"sub/latest": "2"}))


# --- several ranks ---


def test_three_ranks_on_one_disk_write_one_checkpoint(tmp_path: Path) -> None:
    def body(channel: Channel) -> tuple[int, int]:
        def write(staged: Path) -> None:
            write_files(staged, {f"rng_state_{channel.rank}.pth": b"x" * channel.rank})

        report = save(start(tmp_path, channel), 10, write=write)
        return report.files, report.bytes

    assert run_ranks(body) == [(3, 3)] * 3
    manifest = Manifest.read(tmp_path / "checkpoint-10")
    assert manifest is not None
    assert {entry.path: entry.rank for entry in manifest.files} == {f"rng_state_{rank}.pth": rank for rank in range(3)}


def test_a_writer_that_fails_on_one_rank_is_the_same_error_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    def body(channel: Channel) -> SaveReport | Raised:
        run = start(tmp_path, channel)
        write = _fails if channel.rank == 2 else (lambda staged: write_files(staged, {f"{channel.rank}": b""}))
        return outcome_of(lambda: save(run, 10, write=write))

    raised = [outcome for outcome in run_ranks(body) if isinstance(outcome, Raised)]
    assert len(raised) == 3
    (message,) = {outcome.message for outcome in raised}
    assert message.startswith("rank 2 ")
    assert names_in(tmp_path) == {AREA_NAME}
    assert names_in(tmp_path / AREA_NAME) == {"generation.json", "lock"}


def test_what_a_rank_writes_now_wins_over_what_was_edited_after_the_former_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_copy = shutil.copy2

    def copy_slowly(source: Path, target: Path) -> None:
        time.sleep(0.3)
        real_copy(source, target)

    def body(channel: Channel) -> None:
        run = start(tmp_path, channel)
        name = f"notes_{channel.rank}.json"
        save(run, 10, {name: b"first"})
        time.sleep(0.02)
        (tmp_path / "checkpoint-10" / name).write_bytes(b"edited")
        channel.together("all have edited", lambda: None)
        monkeypatch.setattr(shutil, "copy2", copy_slowly)
        save(run, 10, {name: b"second"})

    run_ranks(body)
    assert contents(tmp_path / "checkpoint-10") == {f"notes_{rank}.json": b"second" for rank in range(3)}


def test_reports_are_frozen_so_that_nobody_rewrites_history(run: Run) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        save(run, 10).step = 11  # type: ignore[misc]
