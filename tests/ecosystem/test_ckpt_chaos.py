"""ckpt-chaos, a stranger's crash test: it kills a job at every file operation of a save, resumes it, and judges.

Its verdict is PASS where training goes on from the newest complete checkpoint and ends with the weights of an
undisturbed run, bit for bit. docs/reliability.md has the results, stock's beside them.

Only its `run_matrix` is meant for others; the short test uses its parts, so its version is pinned (constraints.txt).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ckpt_chaos import runner

REPOSITORY = Path(__file__).parents[2]
SAFE, STOCK = "safe_trainer", "hf_trainer"


@pytest.fixture(autouse=True)
def target(monkeypatch: pytest.MonkeyPatch) -> None:
    """SafeTrainer as one of ckpt-chaos's targets."""
    monkeypatch.setenv("CKPT_CHAOS_PREPEND_PYTHONPATH", str(REPOSITORY))
    monkeypatch.setitem(runner.TARGETS, SAFE, "tests.ecosystem.chaos_target")


def crash_at(work: Path, points: list[tuple[str, str, str]]) -> dict[str, str]:
    """The verdicts at some points of a save by one process: (kind of operation, name, before or torn).

    As `run_matrix` does it, two processes at a time.
    """
    base = {"CKPT_CHAOS_STRATEGY": "direct"}
    reference, dry = work / "reference" / "out", work / "dry" / "out"
    watched = {**base, "CKPT_CHAOS_WATCH": str(dry), "CKPT_CHAOS_LOG": str(work / "dry" / "events.log")}
    with ThreadPoolExecutor(2) as two:
        ends = [
            two.submit(runner._launch, SAFE, "reference", reference, base),
            two.submit(runner._launch, SAFE, "train", dry, watched),
        ]
        assert [end.result() for end in ends] == [0, 0]
        events = {(0, event[0]): event for event in runner._events(work / "dry" / "events.log.rank0")}
        numbers = {(kind, name): number for number, kind, name, _ in events.values()}  # the last one of a name counts
        setting = {
            "work": work,
            "target": SAFE,
            "ranks": 1,
            "base": base,
            "plan": events,
            "healthy": runner._profile(dry / "checkpoint-10"),
            "ref_final": reference / "final_rank0.pt",
        }
        wanted = [(0, numbers[kind, name], mode) for kind, name, mode in points]
        records = two.map(lambda number, point: runner._run_point(setting, number, point), range(len(wanted)), wanted)
        rows = [runner._judge(record) for record in records]
    assert all(row.crashed and not row.drift for row in rows), rows
    return {row.label: row.verdict for row in rows}


def test_killed_in_the_middle_of_a_file_and_right_before_the_commit(tmp_path: Path) -> None:
    verdicts = crash_at(tmp_path, [("torch.save", "optimizer.pt", "torn"), ("os.rename", "checkpoint-10", "before")])

    assert verdicts == {"torch.save:optimizer.pt [torn]": "PASS", "os.rename:checkpoint-10 [before]": "PASS"}


@pytest.mark.whole_table
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_every_point_of_a_save(tmp_path: Path, ranks: int) -> None:
    """A quarter of an hour with one rank, more than half an hour with two."""
    rows = runner.run_matrix(tmp_path, jobs=1, ranks=ranks, target=SAFE)

    runner.print_table(rows)
    assert len(rows) > 40
    assert [row.label for row in rows if row.verdict != "PASS"] == []


@pytest.mark.whole_table
@pytest.mark.parametrize("ranks", [1, 2])
def test_stock_fails_at_most_points(tmp_path: Path, ranks: int) -> None:
    """What ckpt-chaos is worth: it finds what stock does wrong."""
    rows = runner.run_matrix(tmp_path, jobs=1, ranks=ranks, target=STOCK)

    runner.print_table(rows)
    assert sum(row.verdict != "PASS" for row in rows) > len(rows) // 2
