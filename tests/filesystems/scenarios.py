"""What ranks on several hosts do on a shared file system: functions for `tests.filesystems.job`, without a model.

Each rank checks what it sees through its own host's mount: a checkpoint that is whole on the server and stale on a
client would not load there.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from safe_trainer.channel import Channel
from safe_trainer.errors import CheckpointError
from safe_trainer.layout import list_checkpoints
from safe_trainer.options import CheckpointOptions
from safe_trainer.resume import resume_latest
from safe_trainer.rotation import Rotation
from safe_trainer.run import Run, open_run
from safe_trainer.save import save_checkpoint
from tests import checks
from tests.cluster import Json

FILE_BYTES = 300_000
CHANNEL_TIMEOUT_S = 60.0
SEEN_TIMEOUT_S = 90.0  # NFS clients believe for up to a minute that what they have once missed is not there
LIMIT = 2

Tell = Callable[[Json], None]


def content_of(save: int, rank: int) -> bytes:
    return f"{save}/{rank} ".encode() * (FILE_BYTES // 8)


def open_at(root: str, **options: Any) -> Run:
    options = {"visibility_timeout_s": 90.0, "lock_timeout_s": 60.0, **options}
    channel = Channel.open(timeout_s=CHANNEL_TIMEOUT_S)
    return open_run(Path(root), channel=channel, options=CheckpointOptions(**options), saved_by={})


def save(run: Run, step: int, *, number: int | None = None) -> None:
    """Saves a step with a file of every rank; ``number`` tells two saves of one step apart."""
    number = step if number is None else number

    def write(staged: Path) -> None:
        (staged / f"rank{run.channel.rank}.bin").write_bytes(content_of(number, run.channel.rank))
        if run.channel.rank == 0:
            (staged / "trainer_state.json").write_text("{}")

    save_checkpoint(run, step=step, write=write, rotation=lambda: Rotation(limit=LIMIT))


def save_number(checkpoint: Path, ranks: int) -> int:
    """Which save a checkpoint is of; all its files must be of the same one, and as the manifest says."""
    checks.assert_matches_manifest(checkpoint)
    numbers = {int((checkpoint / f"rank{rank}.bin").read_bytes().partition(b"/")[0]) for rank in range(ranks)}
    assert len(numbers) == 1, f"{checkpoint} has files of the saves {numbers}"
    number = numbers.pop()
    for rank in range(ranks):
        assert (checkpoint / f"rank{rank}.bin").read_bytes() == content_of(number, rank)
    return number


# --- scenarios ---


def save_rotate_replace(*, tell: Tell, root: str) -> Json:
    """Three saves of which two stay, then the last one again."""
    with warnings_of_safe_trainer() as warnings:
        run = open_at(root)
        seconds = []
        for number, step in enumerate((10, 20, 30, 30), start=1):
            begin = time.monotonic()
            save(run, step, number=number)
            seconds.append(round(time.monotonic() - begin, 2))
        begin = time.monotonic()
        _wait_until_seen(run.root, {20: 2, 30: 4}, run.channel.world_size)
        seen_s = round(time.monotonic() - begin, 2)
        run.channel.together("have looked", lambda: None)
    return {
        "domains": [list(domain.ranks) for domain in run.topology.domains],
        "seconds": seconds,
        "seen_after_s": seen_s,
        "warnings": warnings,
    }


def _wait_until_seen(root: Path, expected: dict[int, int], ranks: int) -> None:
    """Until this host, too, sees exactly these saves by step, whole. How long that takes is the mount's affair."""
    deadline = time.monotonic() + SEEN_TIMEOUT_S
    while True:
        try:
            seen = {step: save_number(path, ranks) for step, path in list_checkpoints(root)}
            assert seen == expected
            return
        except (AssertionError, OSError, ValueError):
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.25)


def resume(*, tell: Tell, root: str, saved_by: int | None = None) -> Json:
    """A fresh start: from which step, and which save of it this was. Every rank must see it whole at once.

    Args:
        saved_by: how many ranks had saved it, where it was not as many as now.
    """
    with warnings_of_safe_trainer() as warnings:
        run = open_at(root)
        found = resume_latest(run)
        number = None if found is None else save_number(found.path, saved_by or run.channel.world_size)
        run.channel.together("have looked", lambda: None)
    return {"step": None if found is None else found.step, "number": number, "warnings": warnings}


def save_for_ever(*, tell: Tell, root: str) -> None:
    """Resumes, tells from which step, and saves one step after another, each of them twice; tells of each save."""
    run = open_at(root)
    found = resume_latest(run)
    step = 0 if found is None or found.step is None else found.step
    tell({"resumed": step})
    while True:
        step += 1
        for attempt in (1, 2):
            tell({"saving": step})
            save(run, step, number=10 * step + attempt)
            tell({"saved": step})


def check_all(*, tell: Tell, root: str, ranks: int) -> Json:
    """Every complete checkpoint there is, by step; the files of each belong together."""
    return {str(step): save_number(path, ranks) for step, path in list_checkpoints(Path(root))}


def start_only(*, tell: Tell, root: str, options: Json) -> Json:
    """What a start makes of this place: domains and warnings, or the error."""
    with warnings_of_safe_trainer() as warnings:
        try:
            run = open_at(root, **options)
        except CheckpointError as error:
            return {"error": str(error), "kind": type(error).__name__, "warnings": warnings}
        return {"domains": [list(domain.ranks) for domain in run.topology.domains], "warnings": warnings}


def save_twice(*, tell: Tell, root: str, step: int, number: int) -> Json:
    """One step as save ``number`` and again as the one after it."""
    run = open_at(root)
    for attempt in (number, number + 1):
        save(run, step, number=attempt)
    return {"domains": [list(domain.ranks) for domain in run.topology.domains]}


def save_steps(*, tell: Tell, root: str, steps: list[int]) -> Json:
    """Saves these steps until one fails: which were committed, and with what error the next one failed on this rank."""
    committed: list[int] = []
    error: str | None = None
    with warnings_of_safe_trainer() as warnings:
        try:
            run = open_at(root)
            for step in steps:
                save(run, step)
                committed.append(step)
        except CheckpointError as caught:
            error = str(caught)
    return {"committed": committed, "error": error, "warnings": warnings}


def save_too_much(*, tell: Tell, root: str, megabytes: int) -> Json:
    """A small step 10, then a step 20 with more weights than the disk has room for, from rank 0.

    Gives whether `save_file` returned as if all were well, how many of the bytes that it wrote are zeros when they are
    read back, and the save's error.
    """
    run = open_at(root)
    save(run, 10)
    seen: dict[str, Any] = {"returned": False, "zeros": None, "error": None}

    def write(staged: Path) -> None:
        if run.channel.rank == 0:
            path = staged / "model.safetensors"
            save_file({"weight": torch.full((megabytes << 20,), 255, dtype=torch.uint8)}, path)
            seen["returned"] = True
            with contextlib.suppress(OSError):
                seen["zeros"] = path.read_bytes().count(0)

    try:
        save_checkpoint(run, step=20, write=write, rotation=lambda: Rotation())
    except CheckpointError as error:
        seen["error"] = str(error)
    return seen


@contextlib.contextmanager
def warnings_of_safe_trainer() -> Iterator[list[str]]:
    """What the package warns of in the meantime."""
    texts: list[str] = []

    class Collects(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler = Collects(level=logging.WARNING)
    logging.getLogger("safe_trainer").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("safe_trainer").removeHandler(handler)
