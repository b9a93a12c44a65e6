"""SIGKILL at every operation and power cuts after each (cases U1, U2), a part of the table; and faults that are seen.

The whole table is ``make test-crash``. What is tried, and what must hold, is in :mod:`tests.faults.crash`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.faults import crash_mutants as mutants
from tests.faults.crash import (
    PLAIN,
    ROLES,
    Point,
    Result,
    Rig,
    all_points,
    kind_of_point,
    order_problems,
    spread,
    steps_of,
)
from tests.faults.crash_scenarios import SCENARIOS, Scenario
from tests.faults.powercut import Cut

KILLS = 180
CUTS = 120
# Who of several ranks makes or removes a directory is a matter of chance.
MAY_BE_MISSED = {"mkdir", "rmdir"}


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


@pytest.fixture(scope="module")
def kills(rig: Rig) -> list[Point]:
    """Each operation in each step and role at least once, some alone and some of everybody."""
    points = all_points(rig, SCENARIOS.values())
    chosen = spread(points, kind_of_point, KILLS)
    assert {kind_of_point(point) for point in chosen} == {kind_of_point(point) for point in points}
    return chosen


@pytest.fixture(scope="module")
def cuts(rig: Rig) -> list[tuple[str, Cut]]:
    """Power cuts of each kind, each of which leaves a state of its own."""
    kinds: dict[tuple[str, Cut], object] = {}
    for scenario in SCENARIOS.values():
        tape = rig.tape(scenario)
        steps = ["start-1", *steps_of(tape)]
        by_state = {cut.state: cut for cut in rig.cuts(scenario)}
        for cut in by_state.values():
            last = tape[cut.after] if cut.after >= 0 else None
            kinds[scenario.name, cut] = (steps[cut.after + 1], cut.mode, last and last.op)
    return spread(kinds, kinds.__getitem__, CUTS)


def report(results: Sequence[Result]) -> str:
    return "\n".join(f"{result.where}: {'; '.join(result.problems)}" for result in results if result.problems)


def assert_all_right(results: Sequence[Result]) -> None:
    if wrong := report(results):
        pytest.fail(wrong)


@pytest.mark.parametrize("name", SCENARIOS)
def test_after_a_kill_at_any_operation_the_newest_complete_checkpoint_is_taken(
    rig: Rig, kills: list[Point], name: str
) -> None:
    results = [rig.kill_at(point) for point in kills if point.scenario == name]

    assert_all_right(results)
    assert {result.op for result in results if not result.reached} <= MAY_BE_MISSED


@pytest.mark.parametrize("name", SCENARIOS)
def test_after_a_power_cut_at_any_operation_what_was_committed_is_there(
    rig: Rig, cuts: list[tuple[str, Cut]], name: str
) -> None:
    results = [rig.cut(SCENARIOS[name], cut) for scenario, cut in cuts if scenario == name]

    assert_all_right(results)


def test_every_role_dies_at_every_kind_of_operation(kills: list[Point]) -> None:
    for role in ROLES:
        ops = {point.op for point in kills if point.role == role}
        assert ops >= {"create", "write", "fsync", "unlink"}, role
        # Only leaders rename; and which of several ranks makes or removes a directory is a matter of chance.
        assert ops >= {"mkdir", "rmdir", "rename"} or role == PLAIN, role


def test_every_operation_belongs_to_a_step_of_the_protocol(rig: Rig) -> None:
    unknown = {
        operation.phase
        for scenario in SCENARIOS.values()
        for operation, step in zip(rig.tape(scenario), steps_of(rig.tape(scenario)), strict=True)
        if step == "?"
    }

    assert unknown == set()


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if not scenario.setting.pieces])
def test_syncs_keep_their_order(rig: Rig, name: str) -> None:
    assert order_problems(rig.tape(SCENARIOS[name])) == []


# --- the harness sees faults ---


def cuts_after_the_commit(rig: Rig, scenario: Scenario) -> list[Result]:
    steps = ["start-1", *steps_of(rig.tape(scenario))]
    late = [cut for cut in rig.cuts(scenario) if steps[cut.after + 1] in ("save-7", "save-8", "save-9", "save-11")]
    return [rig.cut(scenario, cut) for cut in {cut.state: cut for cut in late}.values()]


def kills_in_the_commit(rig: Rig, scenario: Scenario) -> list[Result]:
    points = rig.points(scenario)
    renames = [point for point in points if point.step.startswith("save-7") and point.op in ("rename", "replace")]
    return [rig.kill_at(point) for point in renames[:12] if point.kill.everyone]


@pytest.mark.parametrize(
    ("mutation", "name", "trials"),
    [
        pytest.param(mutants.no_sync_of_files, "save-shared", cuts_after_the_commit, id="no sync of files"),
        pytest.param(mutants.no_sync_of_directories, "save-shared", cuts_after_the_commit, id="no sync of directories"),
        pytest.param(
            mutants.no_barrier_after_the_syncs, "save-split-drop", cuts_after_the_commit, id="no wait for syncs"
        ),
        pytest.param(mutants.no_barrier_after_the_writes, "save-shared", kills_in_the_commit, id="no wait"),
        pytest.param(mutants.manifest_after_the_rename, "save-shared", kills_in_the_commit, id="manifest after rename"),
        pytest.param(mutants.manifest_arrives_first, "save-shared-pieces", kills_in_the_commit, id="manifest first"),
    ],
)
def test_what_is_taken_out_is_seen(
    mutation: Callable[[int], None], name: str, trials: Callable[[Rig, Scenario], list[Result]]
) -> None:
    with Rig() as whole:
        healthy = trials(whole, SCENARIOS[name])
    with Rig(mutation) as broken:
        results = trials(broken, SCENARIOS[name])

    assert_all_right(healthy)
    # Not just anything: what the fault does to checkpoints.
    assert re.search("is not whole|the newest whole checkpoint is", report(results)), report(results)


def test_a_manifest_that_is_not_last_is_seen_on_the_tape() -> None:
    with Rig(mutants.manifest_before_the_syncs) as rig:
        problems = order_problems(rig.tape(SCENARIOS["save-shared"]))

    assert any("after the manifest" in problem for problem in problems), problems
