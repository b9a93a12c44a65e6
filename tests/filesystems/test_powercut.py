"""The power fails: what was written and not fsynced is gone, and so is a rename whose directory was not fsynced.

SIGKILL does not show this: the kernel still writes what a dead process has left in its memory. Here the disk is an
image that is copied while mounted (`Image.cut_power`), and the job is restarted on the copy.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from safe_trainer.channel import Channel
from safe_trainer.errors import CheckpointError
from safe_trainer.integrity import inspect_checkpoint
from safe_trainer.options import CheckpointOptions
from safe_trainer.resume import resume_latest
from safe_trainer.rotation import Rotation
from safe_trainer.run import Run, open_run
from safe_trainer.save import save_checkpoint
from tests import checks
from tests.cluster import resolve
from tests.filesystems import images
from tests.filesystems.images import Copy, Image
from tests.unit.processes import run_ranks

RANKS = 2
FILE_BYTES = 200_000  # more than a file system keeps in its own blocks: what is not flushed is lost
EXCHANGE = "safe_trainer.commit.exchange"

Forgotten = Literal["files", "directories", "everything"]


@pytest.fixture(params=images.KINDS)
def kind(request: pytest.FixtureRequest) -> images.Kind:
    kind: images.Kind = request.param
    if (reason := images.why_not(kind)) is not None:
        pytest.skip(reason)
    return kind


def content_of(save: int, rank: int) -> bytes:
    return f"{save}/{rank} ".encode() * (FILE_BYTES // 5)


def open_on(disk: Path, channel: Channel | None = None) -> Run:
    channel = Channel.open(timeout_s=20.0) if channel is None else channel
    return open_run(disk / "run", channel=channel, options=CheckpointOptions(), saved_by={})


def save(run: Run, step: int, *, number: int | None = None) -> None:
    """Save a step; ``number`` tells two saves of one step apart."""
    number = step if number is None else number

    def write(staged: Path) -> None:
        (staged / "shards").mkdir(exist_ok=True)
        (staged / "shards" / f"rank{run.channel.rank}.bin").write_bytes(content_of(number, run.channel.rank))
        if run.channel.rank == 0:
            (staged / "trainer_state.json").write_text("{}")

    save_checkpoint(run, step=step, write=write, rotation=lambda: Rotation(limit=1))


def restarted(copy: Copy, mount: Path, *, ranks: int = RANKS) -> tuple[int, int]:
    """Start again after a power cut: the step from which the job resumes, and which save of it that was.

    Whatever it resumes from must be whole, as must everything that is named as a checkpoint.
    """
    with copy.mounted(mount) as disk:
        found = resume_latest(open_on(disk))
        assert found is not None, "no checkpoint has survived"
        for step in checks.checkpoints(disk / "run"):
            checks.assert_matches_manifest(disk / "run" / f"checkpoint-{step}")
        written = [(found.path / "shards" / f"rank{rank}.bin").read_bytes() for rank in range(ranks)]
        number = int(written[0].partition(b"/")[0])
        assert written == [content_of(number, rank) for rank in range(ranks)]
        return found.step or 0, number


def saves_with_power_cuts(disk: Image) -> list[Copy]:
    """Three saves by two ranks, the last one of a step that exists; the power is cut after each commit."""

    def body(channel: Channel) -> list[Copy]:
        run = open_on(disk.mount, channel)
        copies = []
        for number, step in enumerate((10, 20, 20), start=1):
            save(run, step, number=number)
            copies += channel.together("the power is cut", lambda: disk.cut_power() if channel.rank == 0 else None)[:1]
        return [copy for copy in copies if copy is not None]

    return run_ranks(body, count=RANKS)[0]


def test_what_was_committed_survives(kind: images.Kind, tmp_path: Path) -> None:
    with Image(kind, tmp_path) as disk:
        copies = saves_with_power_cuts(disk)

    survivors = [restarted(copy, tmp_path / "after") for copy in copies]

    assert survivors == [(10, 1), (20, 2), (20, 3)]


@pytest.mark.parametrize("forgotten", ["files", "directories", "everything"])
def test_without_the_fsyncs_it_does_not(
    kind: images.Kind, forgotten: Forgotten, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same test, red: so it is the fsyncs that make it green.

    Without those of directories the rename is lost; the fsyncs of the save after it bring that one's files and names
    to the disk, and the former rename with them.
    """
    monkeypatch.setattr(os, "fsync", _fsync_that_forgets(forgotten))
    with Image(kind, tmp_path) as disk:
        copies = saves_with_power_cuts(disk)
    monkeypatch.undo()

    survivors = [_survivor(copy, tmp_path / "after") for copy in copies]

    if forgotten == "directories":
        assert survivors[0] is None
        assert survivors[1:] == [1, 2], "each is the one before"
    else:
        assert survivors == [None, None, None]


def test_without_the_fsyncs_of_its_files_a_checkpoint_has_its_name_and_no_bytes(
    kind: images.Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", _fsync_that_forgets("files"))
    with Image(kind, tmp_path) as disk:
        copy = saves_with_power_cuts(disk)[0]
    monkeypatch.undo()

    with copy.mounted(tmp_path / "after") as root:
        checkpoint = root / "run" / "checkpoint-10"
        sizes = {path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()}
        assert sizes == {0}
        assert not inspect_checkpoint(checkpoint, verify="digest").complete


def _fsync_that_forgets(forgotten: Forgotten) -> Callable[[int], None]:
    """An fsync that does nothing for directories, for the files of checkpoints, or at all."""
    fsync = os.fsync

    def forgetful(descriptor: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        in_checkpoint = "/checkpoint-" in os.readlink(f"/proc/self/fd/{descriptor}")
        kind = "directories" if is_directory else "files" if in_checkpoint else "nothing"
        if forgotten not in (kind, "everything"):
            fsync(descriptor)

    return forgetful


def _survivor(copy: Copy, mount: Path) -> int | None:
    """Which save is there whole; None where none is, or not even a start is possible."""
    try:
        return restarted(copy, mount)[1]
    except (AssertionError, CheckpointError):
        return None


# --- at any other moment ---


@contextlib.contextmanager
def power_cuts(disk: Image, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Copy]]]:
    """Cuts the power before the first and after each fsync, rename and exchange, and says after which it was."""
    cuts: list[tuple[str, Copy]] = [("at the start", disk.cut_power())]

    def cutting(name: str, action: Callable[..., Any]) -> Callable[..., Any]:
        def cut(*args: Any, **kwargs: Any) -> Any:
            result = action(*args, **kwargs)
            cuts.append((f"after {name} {args}", disk.cut_power()))
            return result

        return cut

    with monkeypatch.context() as patches:
        for name in ("fsync", "rename", "replace"):
            patches.setattr(os, name, cutting(name, getattr(os, name)))
        patches.setattr(EXCHANGE, cutting("exchange", resolve(EXCHANGE.replace("commit.", "commit:"))))
        yield cuts


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_whenever_the_power_fails_the_old_or_the_new_one_is_there_whole(
    kind: images.Kind, exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(EXCHANGE, lambda first, second: False)
    with Image(kind, tmp_path) as disk:
        run = open_on(disk.mount)
        save(run, 10, number=1)
        with power_cuts(disk, monkeypatch) as cuts:
            save(run, 20, number=2)
            save(run, 20, number=3)

    survivors = []
    for moment, copy in cuts:
        try:
            survivors.append(restarted(copy, tmp_path / "after", ranks=1)[1])
        except BaseException as error:
            error.add_note(f"the power was cut {moment}")
            raise

    assert survivors == sorted(survivors), "what has survived once is not lost again"
    assert (survivors[0], survivors[-1]) == (1, 3)
