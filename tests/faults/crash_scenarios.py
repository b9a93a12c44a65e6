"""What the jobs of the crash tests do, and on which disks: the rows of the table.

Every scenario begins with disks as one or two healthy jobs, a lost disk or a crash have left them, opens a run on them,
resumes, and mostly saves once more. It is what a rank runs; what must hold afterwards is in
:mod:`tests.faults.crash`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

from safe_trainer import commit, run, staging
from safe_trainer.background import PendingSave
from safe_trainer.channel import Channel
from safe_trainer.layout import RunLayout, checkpoint_name
from safe_trainer.options import CheckpointOptions
from safe_trainer.resume import clear_deliveries, resume_latest
from safe_trainer.rotation import Rotation
from safe_trainer.run import Run, open_run
from safe_trainer.save import commit_checkpoint, save_checkpoint, stage_checkpoint
from tests.faults.crash_jobs import CHANNEL_TIMEOUT_S, RANKS, Rank
from tests.faults.crash_tape import TRAINING, Tape, TapeSpec
from tests.unit.builders import flip_byte

LIMIT = 2
RANKS_PER_NODE = 2
CLEAR_DELIVERIES = "clear deliveries"


class Content(NamedTuple):
    """Which tensors a checkpoint has: those of a step, and of one of several saves of that step."""

    step: int
    attempt: int


@dataclass(frozen=True)
class Setting:
    """The disks and what they can do.

    Attributes:
        split: whether each node has a disk of its own.
        local_copies: the option.
        exchange: whether two directories can be exchanged in one step.
        pieces: whether directories are said to be renamed file by file, as on object stores.
        beside: whether saves are staged in memory and finished in a thread, while training goes on.
    """

    split: bool
    local_copies: str = "keep"
    exchange: bool = True
    pieces: bool = False
    beside: bool = False

    def disk_of(self, rank: int) -> int:
        return rank // RANKS_PER_NODE if self.split else 0

    def run_directory(self, root: Path, disk: int) -> Path:
        return root / f"disk{disk}" / "out"

    @property
    def disks(self) -> range:
        return range(2 if self.split else 1)


@dataclass(frozen=True)
class Scenario:
    """One row.

    Attributes:
        before: the saves of the job before; the last one is what is resumed from.
        damage: what happens to the disks then.
        save: what is saved after resuming, if anything.
        wreck: or, before it, a scenario in which everybody was killed, and a part of the key of the operation after
            which they were.
        only_elsewhere: whether home does not have whole what is resumed from, so that what has its name there may be
            a part, or damaged.
    """

    name: str
    setting: Setting
    before: tuple[Content, ...] = (Content(10, 0), Content(20, 0))
    damage: Callable[[Path, Setting], None] | None = None
    save: Content | None = None
    wreck: tuple[str, str] | None = None
    only_elsewhere: bool = False

    @property
    def initial(self) -> Content | None:
        """What a job that starts in this scenario resumes from."""
        return self.before[-1] if self.before else None


# --- what happens to disks ---


def lose_home(root: Path, setting: Setting) -> None:
    """Node 0 has a new disk."""
    shutil.rmtree(setting.run_directory(root, 0))


def lose_other(root: Path, setting: Setting) -> None:
    """Node 1 has a new disk."""
    shutil.rmtree(setting.run_directory(root, 1))


def exchange_disks(root: Path, setting: Setting) -> None:
    """The machines have changed places: home has parts, and the other disk has the whole checkpoints."""
    os.rename(root / "disk0", root / "disk")
    os.rename(root / "disk1", root / "disk0")
    os.rename(root / "disk", root / "disk1")


def damage_home(root: Path, setting: Setting) -> None:
    """A byte of home's newest checkpoint has flipped; the other disk has a whole copy."""
    flip_byte(setting.run_directory(root, 0) / checkpoint_name(20) / "model-1.safetensors")


def leave_debris(root: Path, setting: Setting) -> None:
    """A run that was killed between two renames, and had been killed before in a save, a delivery and a rotation."""
    for disk in setting.disks:
        layout = RunLayout(setting.run_directory(root, disk))
        for place in (
            layout.staging / "1-0123abcd-7-30" / checkpoint_name(30),
            layout.delivered / "1-0123abcd-2-resume" / checkpoint_name(20),
            layout.trash / f"{'0123456789abcdef' * 2}-{checkpoint_name(5)}",
        ):
            (place / "shards").mkdir(parents=True)
            (place / "shards" / "half.pt").write_bytes(b"half")
        (layout.area / f"generation.json.{'0123456789abcdef' * 2}").write_text("{")
        layout.replaced.mkdir()
        os.rename(layout.checkpoint(20), layout.replaced / checkpoint_name(20))


def _scenarios() -> tuple[Scenario, ...]:
    shared, renames = Setting(split=False), Setting(split=False, exchange=False)
    keep, full, drop = (Setting(split=True, local_copies=copies) for copies in ("keep", "full", "drop"))
    keep_renames, full_renames = (
        Setting(split=True, local_copies=copies, exchange=False) for copies in ("keep", "full")
    )
    shared_beside, keep_beside, full_beside = (replace(setting, beside=True) for setting in (shared, keep, full))
    pieces, full_pieces = (replace(setting, pieces=True) for setting in (shared, full))
    new, again = Content(30, 0), Content(20, 1)
    return (
        Scenario("first-shared", shared, before=(), save=Content(10, 0)),
        Scenario("first-split", keep, before=(), save=Content(10, 0)),
        Scenario("save-shared", shared, save=new),
        Scenario("save-split-keep", keep, save=new),
        Scenario("save-split-full", full, save=new),
        Scenario("save-split-drop", drop, save=new),
        Scenario("again-shared-exchange", shared, save=again),
        Scenario("again-shared-renames", renames, save=again),
        Scenario("again-split-keep-exchange", keep, save=again),
        Scenario("again-split-full-renames", full_renames, save=again),
        Scenario("home-lost-full", full, damage=lose_home, only_elsewhere=True),
        Scenario("other-lost-keep", keep, damage=lose_other, save=new),
        Scenario("other-lost-full", full, damage=lose_other),
        Scenario("swapped-keep-exchange", keep, damage=exchange_disks, only_elsewhere=True),
        Scenario("swapped-keep-renames", keep_renames, damage=exchange_disks, only_elsewhere=True),
        Scenario("damaged-full-renames", full_renames, damage=damage_home, only_elsewhere=True),
        Scenario("debris-shared", shared, damage=leave_debris),
        Scenario("debris-split-keep", keep, damage=leave_debris),
        Scenario("save-shared-beside", shared_beside, save=new),
        Scenario("save-split-keep-beside", keep_beside, save=new),
        Scenario("again-split-full-beside", full_beside, save=again),
        Scenario("save-shared-pieces", pieces, save=new),
        Scenario("again-shared-pieces", pieces, save=again),
        Scenario("save-split-full-pieces", full_pieces, save=new),
        Scenario(
            "wreck-shared-pieces",
            pieces,
            before=(new,),
            wreck=("save-shared-pieces", "checkpoint-30/model-2.safetensors -> disk0/out/checkpoint-30"),
        ),
        Scenario(
            "wreck-shared-renames",
            renames,
            wreck=("again-shared-renames", "rename disk0/out/checkpoint-20 -> disk0/out/_safe_trainer/replaced"),
        ),
        Scenario("home-lost-full-pieces", full_pieces, damage=lose_home, only_elsewhere=True),
    )


SCENARIOS = {scenario.name: scenario for scenario in _scenarios()}


# --- what ranks run ---


def train(rank: Rank, root: Path, scenario: Scenario, spec: TapeSpec, break_it: Callable[[int], None] | None) -> None:
    """One job of a scenario, on tape; ``break_it`` may take something out of the package before, on each rank."""
    _limit_file_system(scenario.setting)
    tape = Tape(spec, rank=rank.channel.rank, pids=rank.pids)
    tape.install()
    if break_it is not None:
        break_it(rank.channel.rank)
    opened = _open(rank, root, scenario.setting)
    _resume(opened)
    if scenario.save is not None:
        _save(opened, scenario.save, tape)
        if opened.is_home_leader:
            tape.claim(json.dumps(scenario.save))
    opened.channel.together("loaded", lambda: None)  # the trainer's part: who still reads a delivered copy needs it
    tape.enter(CLEAR_DELIVERIES)
    clear_deliveries(opened)
    # Nobody gets past this alone: whoever says that it has come to its end says so of all.
    opened.channel.together("end", lambda: None)


def start_afresh(rank: Rank, root: Path, setting: Setting) -> Content | None:
    """The job after a crash: resume, look at every tensor of every rank, and save once more; what it resumed from."""
    _limit_file_system(setting)
    opened = _open(rank, root, setting)
    found = _resume(opened)
    _save(opened, Content(10 if found is None else found.step + 10, 9), None)
    clear_deliveries(opened)
    opened.channel.together("end", lambda: None)
    return found


def train_healthily(rank: Rank, root: Path, setting: Setting, saves: tuple[Content, ...]) -> None:
    """The job before a scenario."""
    opened = _open(rank, root, setting)
    for content in saves:
        _save(opened, content, None)


_REAL = {name: (module, getattr(module, name)) for module, name in ((commit, "exchange"), (run, "rename_problem"))}


def _limit_file_system(setting: Setting) -> None:
    """Let the package believe that the file system can do no more than the setting says."""
    for name, (module, real) in _REAL.items():
        setattr(module, name, real)
    if not setting.exchange:
        setattr(commit, "exchange", lambda first, second: False)  # noqa: B010
    if setting.pieces:
        setattr(run, "rename_problem", lambda layout: "this is a test")  # noqa: B010


def _open(rank: Rank, root: Path, setting: Setting) -> Run:
    number = rank.channel.rank
    os.environ["GROUP_RANK"] = str(number // RANKS_PER_NODE)
    return open_run(
        setting.run_directory(root, setting.disk_of(number)),
        channel=rank.channel,
        options=CheckpointOptions(
            storage="local" if setting.split else "shared",
            local_copies=setting.local_copies,
            lock_timeout_s=10.0,
            visibility_timeout_s=10.0,
            background=setting.beside,
            staging="memory" if setting.beside else "disk",
        ),
        saved_by={},
    )


def _resume(opened: Run) -> Content | None:
    found = resume_latest(opened)
    if found is None:
        return None
    content = read_content(found.path)
    if content.step != found.step:
        raise ValueError(f"{found.path} has the tensors of step {content.step}")
    return content


def _save(opened: Run, content: Content, tape: Tape | None) -> None:
    rank = opened.channel.rank

    is_beside = opened.options.stages_elsewhere

    def write_file(path: Path, write: Callable[[], object]) -> None:
        write() if tape is None or is_beside else tape.around("write", path, write)

    def write(directory: Path) -> None:
        model, shard = directory / f"model-{rank}.safetensors", directory / _shard(rank)
        write_file(model, lambda: save_file(_tensors(content, rank), model))
        shard.parent.mkdir(exist_ok=True)
        write_file(shard, lambda: torch.save(_tensors(content, rank), shard))
        if rank == 0:
            (directory / "trainer_state.json").write_text(json.dumps(content))

    wishes = Rotation(limit=LIMIT)
    if not is_beside:
        save_checkpoint(opened, step=content.step, write=write, rotation=lambda: wishes)
        return
    beside = replace(opened, channel=Channel.open(timeout_s=CHANNEL_TIMEOUT_S))
    staged = stage_checkpoint(opened, step=content.step, write=write, rotation=lambda: wishes)
    if tape is not None:
        _put_on_tape(tape)
    save = PendingSave(content.step, lambda: commit_checkpoint(beside, staged), on_end=lambda: None)
    for _ in range(3):
        opened.channel.together(TRAINING, lambda: None)
    save.wait()


def _put_on_tape(tape: Tape) -> None:
    """torch and safetensors write what was put aside, which the tape does not see."""
    bring = staging._Postponed.bring

    def traced(self: staging._Postponed) -> None:
        tape.around("write", self.path, lambda: bring(self))

    staging._Postponed.bring = traced  # type: ignore[method-assign]


def _shard(rank: int) -> str:
    return f"shards/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def _tensors(content: Content, rank: int) -> dict[str, torch.Tensor]:
    """Some that no other step, attempt or rank has."""
    start = (content.step * 10 + content.attempt) * 1000 + rank * 100
    return {"weight": torch.arange(start, start + 64), "which": torch.tensor(content)}


def read_content(checkpoint: Path) -> Content:
    """Whose tensors a checkpoint has.

    Raises:
        ValueError: not every file of every rank is there with the tensors of one and the same save.
    """
    found = Content(*json.loads((checkpoint / "trainer_state.json").read_text()))
    for rank in range(RANKS):
        expected = _tensors(found, rank)
        for content in (
            load_file(checkpoint / f"model-{rank}.safetensors"),
            torch.load(checkpoint / _shard(rank)),
        ):
            if content.keys() != expected.keys() or not all(torch.equal(content[k], expected[k]) for k in expected):
                raise ValueError(f"{checkpoint}: the tensors of rank {rank} are not those of {found}")
    return found
