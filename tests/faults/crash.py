"""The crash harness: a kill at every file system operation of every rank, and a power cut after each.

For each scenario of :mod:`tests.faults.crash_scenarios`:

1. A healthy run is taped. Every operation on the tape is a point, before and after which a rank can die, alone or with
   all others.
2. For each point a fresh job is started and killed there. Survivors must end by themselves, with an error.
3. The tape also tells what a power cut leaves after each operation (:mod:`tests.faults.powercut`).
4. On what is left, in each case, a fresh job resumes and saves once more, and :class:`Judge` says what is wrong.

``python -m tests.faults.crash`` does all of it and writes the table of docs/reliability.md; the tests do a part.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from safe_trainer.layout import checkpoint_name
from tests import checks
from tests.faults import powercut
from tests.faults.crash_jobs import RANKS, Ended, Job, Jobs
from tests.faults.crash_scenarios import (
    CLEAR_DELIVERIES,
    LIMIT,
    SCENARIOS,
    Content,
    Scenario,
    start_afresh,
    train,
    train_healthily,
)
from tests.faults.crash_tape import CLAIM, KILLED, Kill, Operation, TapeSpec, read_tape
from tests.unit.processes import Raised

HOME_LEADER, OTHER_LEADER, PLAIN = "home's leader", "other leader", "plain rank"
ROLES = (HOME_LEADER, OTHER_LEADER, PLAIN)
# Tokens of a job that is just starting are left alone by the next one; so the next one comes later than that.
LATER_S = 2 * 3600
ATTEMPTS = 4

# Takes something out of the package, in a rank of the job that is killed; never in the fresh one after it.
Mutation = Callable[[int], None]


@dataclass(frozen=True)
class Point:
    """A place to die.

    Attributes:
        step: of docs/protocol.md.
        role: of the rank that dies first.
    """

    scenario: str
    step: str
    role: str
    op: str
    kill: Kill

    def __str__(self) -> str:
        moment = "after" if self.kill.after else "before"
        who = "everybody" if self.kill.everyone else "alone"
        return f"{self.scenario}: {self.step}, {self.role} (rank {self.kill.rank}), {moment} {self.kill.key}, {who}"


@dataclass(frozen=True)
class Result:
    """What came of one point or power cut.

    Attributes:
        kind: ``killed alone``, ``all killed``, or a mode of the power cut.
        problems: empty where all is right.
        reached: whether the rank came there.
        ended_s: how long it took until all ranks of the killed job had ended.
    """

    scenario: str
    step: str
    role: str
    op: str
    kind: str
    where: str
    problems: tuple[str, ...]
    reached: bool = True
    ended_s: float = 0.0


class Rig:
    """Directories, jobs and templates for many trials. A context manager."""

    def __init__(self, mutation: Mutation | None = None) -> None:
        self._mutation = mutation
        shared_memory = Path("/dev/shm")
        self._work = Path(
            tempfile.mkdtemp(prefix="safe-trainer-crash-", dir=shared_memory if shared_memory.is_dir() else None)
        )
        self._jobs = Jobs()
        self._fresh: Job | None = None
        self._count = 0
        self._templates: dict[str, Path] = {}
        self._tapes: dict[str, tuple[list[Operation], Path]] = {}
        self._judged: dict[tuple[powercut.DiskState, int], tuple[str, ...]] = {}

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *exception: object) -> None:
        self._jobs.close()
        self._drop_fresh()
        shutil.rmtree(self._work, ignore_errors=True)

    @property
    def states_judged(self) -> int:
        """How many different states of the disks after power cuts have been judged."""
        return len(self._judged)

    # --- the tape ---

    def tape(self, scenario: Scenario) -> list[Operation]:
        """What all ranks do in a healthy run.

        Raises:
            AssertionError: the run failed.
        """
        return self._taped(scenario)[0]

    def _taped(self, scenario: Scenario) -> tuple[list[Operation], Path]:
        if scenario.name not in self._tapes:
            root, spec = self._set_up(scenario, keep_contents=True)
            answers, _ = self._train(scenario, root, spec)
            assert answers == [None] * RANKS, f"{scenario.name}: the healthy run failed: {answers}"
            self._tapes[scenario.name] = read_tape(spec), root
        return self._tapes[scenario.name]

    def points(self, scenario: Scenario) -> list[Point]:
        """Every place to die in a scenario.

        That is after each operation that has changed something. Before it is the same place as after the one before
        it, unless the rank has talked to others in between; then it is a place of its own for whoever dies alone. All
        together die between two operations of all ranks, so that there is no such difference.
        """
        tape = self.tape(scenario)
        points = []
        last_phase: dict[int, str] = {}
        for operation, step in zip(tape, steps_of(tape), strict=True):
            changes = operation.ok and operation.op not in (CLAIM, "open")
            talked = last_phase.get(operation.rank) != operation.phase or operation.phase in _SHIPPING
            last_phase[operation.rank] = operation.phase
            moments = [(True, False), (True, True)] if changes else []
            if talked and operation.op != CLAIM:
                moments.append((False, False))
            for after, everyone in moments:
                kill = Kill(operation.rank, operation.key, after=after, everyone=everyone)
                role = role_of(scenario, operation.rank)
                points.append(Point(scenario.name, step, role, operation.op, kill))
        return points

    # --- the trials ---

    def kill_at(self, point: Point) -> Result:
        """Kill there, start afresh, and judge.

        Who of several ranks makes or removes a directory is a matter of chance; so a rank may not come to a point at
        its first attempt.
        """
        for _ in range(ATTEMPTS):
            result = self._kill_once(point)
            if result.reached or result.problems:
                break
        return result

    def _kill_once(self, point: Point) -> Result:
        scenario = SCENARIOS[point.scenario]
        root, spec = self._set_up(scenario, kill=point.kill)
        answers, seconds = self._train(scenario, root, spec)
        tape = read_tape(spec)
        reached = any(operation.op == KILLED for operation in tape)
        if reached:
            problems = _wrong_ends(point.kill, answers)
        else:
            problems = [] if answers == [None] * RANKS else [f"the job failed before it came there: {answers}"]
        problems += self._judge(scenario, root, tape)
        self._forget(root, spec)
        kind = "all killed" if point.kill.everyone else "killed alone"
        return Result(
            *(point.scenario, point.step, point.role, point.op, kind, str(point), tuple(problems)),
            reached=reached,
            ended_s=seconds,
        )

    def cuts(self, scenario: Scenario) -> list[powercut.Cut]:
        """Every power cut of a scenario: in each mode, before the first operation and after each."""
        tape, end = self._taped(scenario)
        return powercut.cuts_of(tape, start=self._template(scenario), end=end)

    def cut(self, scenario: Scenario, cut: powercut.Cut) -> Result:
        """Put the disks into the state that a power cut leaves, start afresh, and judge.

        Many power cuts leave the same state; it is judged once for each set of promises that had been made by then.
        """
        tape, _ = self._taped(scenario)
        past = tape[: cut.after + 1]
        key = cut.state, sum(operation.op == CLAIM for operation in past)
        if key not in self._judged:
            root = self._new_directory()
            cut.state.build(root)
            self._judged[key] = tuple(self._judge(scenario, root, past))
            shutil.rmtree(root)
        problems = self._judged[key]
        last = past[-1] if past else Operation(0, "", "nothing", "")
        step = steps_of(past)[-1] if past else "start-1"
        where = f"{scenario.name}: {step}, rank {last.rank}, power cut ({cut.mode}) after {last.key or last.op}"
        return Result(
            scenario.name, step, role_of(scenario, last.rank), last.op, f"power cut, {cut.mode}", where, problems
        )

    # --- how ---

    def _judge(self, scenario: Scenario, root: Path, tape: Sequence[Operation]) -> list[str]:
        judge = Judge(scenario, root, tape)
        problems = judge.problems_after_the_crash()
        answers = self._start_afresh(scenario, root)
        return problems + judge.problems_afterwards(answers)

    def _start_afresh(self, scenario: Scenario, root: Path) -> list[object]:
        _age_tokens(root)
        if self._fresh is None:
            self._fresh = Job()
        answers = self._fresh.run(start_afresh, root, scenario.setting)
        if any(isinstance(answer, (Raised, Ended)) for answer in answers):
            self._drop_fresh()
        return answers

    def _drop_fresh(self) -> None:
        if self._fresh is not None:
            self._fresh.stop()
            self._fresh = None

    def _train(self, scenario: Scenario, root: Path, spec: TapeSpec) -> tuple[list[object], float]:
        job = self._jobs.take()
        try:
            job.start(train, root, scenario, spec, self._mutation)
            self._jobs.prepare_next()
            begin = time.monotonic()
            return job.answers(), time.monotonic() - begin
        finally:
            job.stop()

    def _set_up(
        self, scenario: Scenario, *, kill: Kill | None = None, keep_contents: bool = False
    ) -> tuple[Path, TapeSpec]:
        root, beside = self._new_directory(), self._new_directory()
        beside.mkdir()
        shutil.copytree(self._template(scenario), root)
        return root, TapeSpec(root, beside, kill, keep_contents)

    def _forget(self, root: Path, spec: TapeSpec) -> None:
        shutil.rmtree(root)
        shutil.rmtree(spec.directory)

    def _template(self, scenario: Scenario) -> Path:
        if scenario.name not in self._templates:
            root = self._new_directory()
            for disk in scenario.setting.disks:
                (root / f"disk{disk}").mkdir(parents=True)
            if scenario.wreck is not None:
                shutil.rmtree(root)
                shutil.copytree(self._wreck(*scenario.wreck), root)
            elif scenario.before:
                if self._fresh is None:
                    self._fresh = Job()
                answers = self._fresh.run(train_healthily, root, scenario.setting, scenario.before)
                assert answers == [None] * RANKS, answers
            if scenario.damage is not None:
                scenario.damage(root, scenario.setting)
            self._templates[scenario.name] = root
        return self._templates[scenario.name]

    def _wreck(self, name: str, key: str) -> Path:
        """The disks after a kill of everybody at the first point of a scenario that has ``key`` in its own."""
        scenario = SCENARIOS[name]
        kill = next(point.kill for point in self.points(scenario) if key in point.kill.key and point.kill.everyone)
        root, spec = self._set_up(scenario, kill=kill)
        self._train(scenario, root, spec)
        _age_tokens(root)
        return root

    def _new_directory(self) -> Path:
        self._count += 1
        return self._work / str(self._count)


class Judge:
    """What must hold of the disks of one trial, asked without the package's own code."""

    def __init__(self, scenario: Scenario, root: Path, tape: Sequence[Operation]) -> None:
        self._scenario = scenario
        self._setting = scenario.setting
        self._directories = [self._setting.run_directory(root, disk) for disk in self._setting.disks]
        claimed = any(operation.op == CLAIM for operation in tape)
        # Until the save has returned on home's leader, the former checkpoint is as good an answer.
        self._allowed = {scenario.save} if claimed else {scenario.initial, scenario.save or scenario.initial}

    def problems_after_the_crash(self) -> list[str]:
        """What has a checkpoint's name on home is whole, and the newest whole one is not too old."""
        home = self._directories[0]
        named = {path.name: path for path in _checkpoints_of(home)}
        problems = []
        for path in named.values():
            problem = _problem_of(path)
            if problem is not None and not self._may_be_unfinished(path):
                problems.append(f"{path.name} on home is not whole: {problem}")
        if self._scenario.only_elsewhere or self._setting.pieces:
            return problems  # what will be resumed from is on another disk, or has to be put together
        aside = {path.name: path for path in _checkpoints_of(home / checks.AREA / "replaced")}
        whole = [_content_of(path) for path in (aside | named).values() if _problem_of(path) is None]
        newest = max(whole, default=None)
        if newest not in self._allowed:
            problems.append(f"the newest whole checkpoint is {newest}; right were {self._allowed}")
        self._allowed = {newest}
        return problems

    def _may_be_unfinished(self, checkpoint: Path) -> bool:
        """Where the docs say so: a part or a damaged one, or, file by file, one whose manifest has not come yet."""
        if self._setting.pieces:
            return not (checkpoint / checks.MANIFEST).exists() or self._scenario.only_elsewhere
        return self._scenario.only_elsewhere

    def problems_afterwards(self, answers: Sequence[object]) -> list[str]:
        """The newest complete one was taken by all, and after the next save nothing else is left."""
        resumed = answers[0]
        if resumed not in self._allowed or any(answer != resumed for answer in answers):
            return [f"one of {self._allowed} should have been resumed from: {answers}"]
        saved = Content(resumed.step + 10 if isinstance(resumed, Content) else 10, 9)
        problems = []
        for disk, directory in enumerate(self._directories):
            try:
                self._check(directory, saved, is_home=disk == 0)
            except (AssertionError, OSError, ValueError) as error:
                problems.append(f"after the next save, on disk {disk}: {type(error).__name__}: {error}")
        return problems

    def _check(self, directory: Path, saved: Content, *, is_home: bool) -> None:
        beside = {path.relative_to(directory).as_posix() for path in directory.glob("*") if path.name != checks.AREA}
        beside |= {path.relative_to(directory).as_posix() for path in (directory / checks.AREA).rglob("*")}
        debris = {name for name in beside if not re.fullmatch(r"checkpoint-\d+", name)}
        debris -= {f"{checks.AREA}/{name}" for name in checks.STAYS_IN_AREA}
        assert not debris, f"left behind: {sorted(debris)}"
        steps = checks.checkpoints(directory)
        home_steps = checks.checkpoints(self._directories[0])
        assert set(steps) <= set(home_steps), f"{steps} though home has {home_steps}"
        if not is_home and self._setting.local_copies == "drop":
            assert steps == [], f"kept {steps}"
            return
        assert steps[-1:] == [saved.step], f"the newest is of {steps}"
        found = _checkpoints_of(directory)
        if not self._scenario.only_elsewhere:  # what is not complete neither counts nor goes
            assert len(steps) <= LIMIT, f"more than {LIMIT}: {steps}"
            for path in found:
                checks.assert_matches_manifest(
                    path, scope=_scope(path, is_home or self._setting.local_copies == "full")
                )
        if is_home:
            assert _content_of(found[-1]) == saved


# --- which step of docs/protocol.md an operation belongs to ---

# In these, ranks talk between the operations of one step.
_SHIPPING = ("gather", "make local copies", "deliver the checkpoint")
_PHASES = {
    "write into the run directory": "start-1",
    "look for the other ranks' run directories": "start-1",
    "try what the file system can do": "start-1b",
    "read the run directory's generation": "start-2",
    "enter": "save-1",
    "prepare": "save-1",
    "write": "save-2",
    "list files": "save-3",
    "bring files": "save-3",
    "compare with the last checkpoint": "save-4",
    "gather": "save-5",
    "make local copies": "save-11",
    "rotate": "save-11",
    "use what is here": "resume-6",
    "deliver the checkpoint": "resume-6",
    "put the checkpoint in place": "resume-7",
    "see the checkpoint": "resume-8",
    CLEAR_DELIVERIES: "resume-10",
}
PIECES = "save-7, file by file"
UNKNOWN = "?"
STEPS = (
    *("start-1", "start-1b", "start-3", "start-3b", "start-4", "start-5", "start-6"),
    *("save-1", "save-2", "save-3", "save-5", "save-6", "save-7", "2a", "2b", PIECES, "save-8", "save-9", "save-11"),
    *("resume-6", "resume-7", "resume-10"),
)


def steps_of(tape: Sequence[Operation]) -> list[str]:
    """For each operation of a run, its step."""
    sealing: dict[int, str] = collections.defaultdict(lambda: "save-6")
    steps = []
    for operation in tape:
        if operation.phase == "commit":
            step = sealing[operation.rank] = _commit_step(operation, sealing[operation.rank])
        elif operation.phase == "start in the run directory":
            step = _start_step(operation)
        else:
            step = _PHASES.get(operation.phase, UNKNOWN)
        steps.append(step)
    return steps


def _start_step(operation: Operation) -> str:
    path, to = operation.path, operation.to
    if "/replaced/" in path or "/committing" in path or "/out/checkpoint-" in path + to:
        return "start-4"
    if "/trash/" in to or (operation.op == "mkdir" and path.endswith("/trash")):
        return "start-5"
    if "/trash/" in path or operation.op == "rmdir" or path.endswith("/trash"):
        return "start-6"
    return "start-3" if path.startswith("disk0") else "start-3b"


def _commit_step(operation: Operation, before: str) -> str:
    """``before`` is the step of the same rank's last operation in this phase."""
    path, to = operation.path, operation.to
    if before == PIECES or "/committing" in path:
        return PIECES
    if "/replaced" in to or ("/replaced" in path and operation.op in ("mkdir", "fsync")):
        return "2a"
    if operation.op in ("rename", "exchange") and operation.ok and re.fullmatch(r"disk0/out/checkpoint-\d+", to):
        return "2b" if before == "2a" else "save-7"
    if before in ("2a",) or (before == "save-6"):
        return before if operation.op != "exchange" else "save-7"
    if before in ("save-7", "2b"):
        return "save-8" if operation.op == "fsync" else "save-9"
    return "save-9"


def role_of(scenario: Scenario, rank: int) -> str:
    """What a rank is in a scenario."""
    if rank == 0:
        return HOME_LEADER
    leads = scenario.setting.disk_of(rank) != scenario.setting.disk_of(rank - 1)
    return OTHER_LEADER if leads else PLAIN


# --- the order on the tape ---


def order_problems(tape: Sequence[Operation]) -> list[str]:
    """Where the order of syncs (invariant 2 of docs/protocol.md) was not kept before a commit on home.

    That a manifest is written last can be seen in no state that a crash leaves where directories are renamed in one
    step; on the tape it can.
    """
    problems: list[str] = []
    for index, operation in enumerate(tape):
        commits = operation.op in ("rename", "exchange") and operation.ok and operation.phase == "commit"
        if commits and re.fullmatch(r"disk0/out/checkpoint-\d+", operation.to):
            problems += _unsealed(tape[:index], operation.path)
    return problems


def _unsealed(past: Sequence[Operation], staged: str) -> Iterator[str]:
    written: dict[str, int] = {}
    synced: dict[str, int] = {}
    for index, operation in enumerate(past):
        if not operation.path.startswith(staged) or not operation.ok:
            continue
        if operation.op in ("create", "truncate", "write"):
            written[operation.path] = index
        elif operation.op == "mkdir":
            written.setdefault(str(Path(operation.path).parent), index)
        elif operation.op == "fsync":
            synced[operation.path] = index
        elif operation.op == "unlink":
            written.pop(operation.path, None)
    manifest = f"{staged}/{checks.MANIFEST}"
    files = {path for path in written if Path(path).suffix}
    if manifest not in files:
        yield f"{staged} was committed without a manifest"
        return
    for path in sorted(files):
        if synced.get(path, -1) < written[path]:
            yield f"{path} was not fsynced after it was written"
        elif path != manifest and max(synced[path], written[path]) > written[manifest]:
            yield f"{path} was written or fsynced after the manifest"
    for directory in sorted({str(Path(path).parent) for path in files}):
        inside = [written[path] for path in files if str(Path(path).parent) == directory]
        if synced.get(directory, -1) < max(inside):
            yield f"the directory {directory} was not fsynced after its last file"


# --- helpers ---


def _wrong_ends(kill: Kill, answers: Sequence[object]) -> list[str]:
    """Whoever is killed dies, and nobody else believes that all went well, or waits for ever."""
    problems = []
    for rank, answer in enumerate(answers):
        if kill.everyone or rank == kill.rank:
            if answer != Ended("died"):
                problems.append(f"rank {rank} should have been killed: {answer}")
        elif not isinstance(answer, Raised):
            problems.append(f"rank {rank} should have ended with an error: {answer}")
    return problems


def _checkpoints_of(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return [directory / checkpoint_name(step) for step in checks.checkpoints(directory)]


def _scope(checkpoint: Path, whole: bool) -> str:
    """What its manifest must say: ``full``, or whatever it says."""
    return "full" if whole else str(checks.manifest_of(checkpoint)["scope"])


def _problem_of(checkpoint: Path) -> str | None:
    """Why it is not whole."""
    try:
        checks.assert_matches_manifest(checkpoint)
    except (AssertionError, OSError, ValueError, KeyError) as error:
        return repr(error)
    return None


def _content_of(checkpoint: Path) -> Content:
    return Content(*json.loads((checkpoint / "trainer_state.json").read_text()))


def _age_tokens(root: Path) -> None:
    """Let the next job come so much later that it may take tokens for leftovers."""
    then = time.time() - LATER_S
    for token in root.glob(f"*/*/{checks.AREA}/tokens/*"):
        os.utime(token, (then, then))


# --- which points ---


def all_points(rig: Rig, scenarios: Iterable[Scenario]) -> list[Point]:
    """Every place to die; how a run starts on one kind of disks only once."""
    seen: set[tuple[object, ...]] = set()
    points = []
    for scenario in scenarios:
        for point in rig.points(scenario):
            start = (scenario.setting.split, scenario.setting.pieces, point.kill)
            if point.step.startswith("start-") and start in seen:
                continue
            seen.add(start)
            points.append(point)
    return points


T = TypeVar("T", bound=Hashable)


def spread(items: Iterable[T], kind: Callable[[T], object], count: int) -> list[T]:
    """``count`` of ``items`` (or fewer): first one of each kind, then a second one, and so on.

    Not always the first of its kind, which would mostly be one of the first scenario.
    """
    by_kind: dict[object, list[T]] = collections.defaultdict(list)
    for item in items:
        by_kind[kind(item)].append(item)
    chosen: list[T] = []
    for turn in range(max(map(len, by_kind.values()), default=0)):
        for number, of_kind in enumerate(by_kind.values()):
            if turn < len(of_kind):
                chosen.append(of_kind[(number * 7 + turn) % len(of_kind)])
    return chosen[:count]


def kind_of_point(point: Point) -> object:
    """What makes points alike."""
    return point.step, point.role, point.op


# --- the whole table ---


def table(results: Sequence[Result]) -> str:
    """By step and role: how many points of each kind, and how many of them were not right."""
    kinds = ["killed alone", "all killed", *(f"power cut, {mode}" for mode in powercut.MODES)]
    lines = [
        "| step | role | " + " | ".join(kinds) + " | all | not reached | not right |",
        "| --- | --- |" + " ---: |" * (len(kinds) + 3),
    ]

    def line(step: str, role: str, of_these: Sequence[Result]) -> str:
        counts = [sum(result.kind == kind for result in of_these) for kind in kinds]
        missed = sum(not result.reached for result in of_these)
        red = sum(bool(result.problems) for result in of_these)
        return f"| {step} | {role} | " + " | ".join(map(str, [*counts, len(of_these), missed, red])) + " |"

    for step in (*STEPS, UNKNOWN):
        for role in ROLES:
            of_these = [result for result in results if (result.step, result.role) == (step, role)]
            if of_these:
                lines.append(line(step, role, of_these))
    lines.append(line("**all**", "", results))
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run every point of the scenarios that are asked for, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", action="append", choices=sorted(SCENARIOS), help="only these")
    parser.add_argument("--only", help="only kills whose description has this in it")
    parser.add_argument("--points", type=int, help="at most so many kills, spread over all kinds")
    parser.add_argument("--no-kills", action="store_true", help="power cuts only")
    parser.add_argument("--no-power-cuts", action="store_true", help="kills only")
    parser.add_argument("--results", type=Path, help="write each result there as a line of JSON; go on where it ends")
    options = parser.parse_args()
    results = {result.where: result for result in _read_results(options.results)}
    begin = time.monotonic()
    for result in _run(options, done=set(results)):
        results[result.where] = result
        for problem in result.problems:
            sys.stdout.write(f"NOT RIGHT {result.where}\n    {problem}\n")
        if len(results) % 100 == 0 or result.problems:
            sys.stdout.write(f"{len(results)} in {time.monotonic() - begin:.0f} s: {result.where}\n")
            sys.stdout.flush()
        if options.results:
            with options.results.open("a") as stream:
                stream.write(json.dumps(result.__dict__) + "\n")
    sys.stdout.write(f"\n{time.monotonic() - begin:.0f} s\n")
    return _conclude(list(results.values()))


def _read_results(path: Path | None) -> list[Result]:
    if path is None or not path.exists():
        return []
    documents = [json.loads(line) for line in path.read_text().splitlines()]
    return [Result(**{**document, "problems": tuple(document["problems"])}) for document in documents]


def _run(options: argparse.Namespace, done: Set[str]) -> Iterator[Result]:
    with Rig() as rig:
        scenarios = [SCENARIOS[name] for name in options.scenario or SCENARIOS]
        if not options.no_power_cuts:
            for scenario in scenarios:
                yield from (rig.cut(scenario, cut) for cut in rig.cuts(scenario))
            sys.stdout.write(f"{rig.states_judged} different states of the disks after power cuts\n")
        if not options.no_kills:
            points = [
                point for point in all_points(rig, scenarios) if options.only is None or options.only in str(point)
            ]
            count = len(points) if options.points is None else options.points
            yield from (rig.kill_at(point) for point in spread(points, kind_of_point, count) if str(point) not in done)


def _conclude(results: Sequence[Result]) -> int:
    red = sum(bool(result.problems) for result in results)
    slowest = max((result.ended_s for result in results if result.kind == "killed alone"), default=0.0)
    sys.stdout.write(f"\n{table(results)}\n{len(results)} points, {red} not right. ")
    sys.stdout.write(f"After a kill of one rank, all had ended {slowest:.1f} s after the start at the latest.\n")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
