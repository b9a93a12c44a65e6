"""The benchmarks run, at sizes that measure nothing: every part of the way from the command line to the plots."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import REPOSITORY

TIMEOUT_S = 300.0


@pytest.mark.whole_table  # half a minute, and more where other things run
def test_a_small_run_writes_figures_table_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    suites = ["stall-local", "commit", "memory", "gather"]
    results = tmp_path / "results"

    subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks", "--size", "200KB", "--repeats", "1"),
            *("--directory", str(tmp_path), "--output", str(results)),
            *(argument for suite in suites for argument in ("--suite", suite)),
        ],
        cwd=REPOSITORY,
        check=True,
        timeout=TIMEOUT_S,
    )

    found = json.loads((results / "results.json").read_text())
    by_suite = {suite: [row for row in found["rows"] if row["suite"] == suite] for suite in suites}
    assert all(by_suite.values())
    for suite, rows in by_suite.items():
        assert any(row["figure"] is not None for row in rows), (suite, [row["missing"] for row in rows])
        assert not [row["missing"] for row in rows if (row["missing"] or "").startswith("failed")]
    assert found["seconds"].keys() == set(suites)
    assert {"results.md", "stall-local.png", "commit.png", "timeline.png"} <= {path.name for path in results.iterdir()}
    assert not list(tmp_path.glob("safe-trainer-benchmarks-*"))
