"""The plots: time over size, throughput over nodes, and a timeline of one save."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from benchmarks.measure import parse_size
from benchmarks.report import Report, Row

DPI = 120
RANK = "rank"  # the one entry of a timeline that is no phase


def draw(report: Report, directory: Path) -> list[Path]:
    """Draw whatever the report has the figures for; returns the files."""
    drawn = [
        _over_size(report.of("stall-shared"), "training stopped per save, one disk", directory / "stall-shared.png"),
        _over_size(report.of("stall-local"), "training stopped per save, split disks", directory / "stall-local.png"),
        _over_size(report.of("commit"), "from the start of a save to its commit", directory / "commit.png"),
        _over_nodes(report.of("scale"), directory / "scale.png"),
        _timelines(report.timelines, directory / "timeline.png"),
    ]
    return [path for path in drawn if path is not None]


def _over_size(rows: list[Row], title: str, path: Path) -> Path | None:
    """Seconds over the checkpoint's size, a line for each thing that was measured.

    The cases are named ``<size>, <arm>`` or ``<size>, <disks>, <arm>``.
    """
    lines: dict[str, dict[float, tuple[float, float, float]]] = defaultdict(dict)
    for row in rows:
        if row.measured is None or row.peer is None:
            continue
        size, *disks, _ = row.case.split(", ")
        for series in (row.measured, row.peer):
            lines[", ".join([series.name, *disks])][parse_size(size)] = (series.median, series.low, series.high)
    if not lines:
        return None
    figure, axes = plt.subplots(figsize=(8, 5))
    for name, points in sorted(lines.items()):
        sizes = sorted(points)
        median, low, high = zip(*(points[size] for size in sizes), strict=True)
        axes.plot([size / 1e6 for size in sizes], median, marker="o", label=name)
        axes.fill_between([size / 1e6 for size in sizes], low, high, alpha=0.12)
    axes.set(title=title, xlabel="size of the checkpoint, MB", ylabel="seconds", xscale="log", yscale="log")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize="small")
    return _saved(figure, path)


def _over_nodes(rows: list[Row], path: Path) -> Path | None:
    """Throughput over the number of nodes, and the fixed cost of a save beside it."""
    rate: dict[int, float] = {}
    fixed: dict[int, float] = {}
    for row in rows:
        if row.measured is None:
            continue
        nodes = int(row.measured.name.split()[0])
        if row.measured.unit == "s/GB":
            rate[nodes] = 1e3 / row.measured.median
        else:
            fixed[nodes] = row.measured.median * 1e3
    if not rate:
        return None
    figure, axes = plt.subplots(figsize=(8, 5))
    axes.plot(sorted(rate), [rate[nodes] for nodes in sorted(rate)], marker="o", label="throughput")
    axes.set(title="a save over the number of nodes", xlabel="nodes", ylabel="MB/s of the whole checkpoint")
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted(rate))
    other = axes.twinx()
    other.plot(sorted(fixed), [fixed[nodes] for nodes in sorted(fixed)], marker="s", color="tab:red", label="fixed")
    other.set_ylabel("fixed cost of a save, ms", color="tab:red")
    other.set_ylim(bottom=0)
    axes.grid(True, alpha=0.3)
    return _saved(figure, path)


def _timelines(timelines: dict[str, list[dict[str, Any]]], path: Path) -> Path | None:
    """One bar for each rank of each save, made of its phases one after another: a report has them in that order."""
    shown = {case: ranks for case, ranks in timelines.items() if any(len(rank) > 1 for rank in ranks)}
    if not shown:
        return None
    phases = list(dict.fromkeys(phase for ranks in shown.values() for rank in ranks for phase in rank if phase != RANK))
    colours = dict(zip(phases, plt.get_cmap("tab10").colors * 2, strict=False))
    figure, all_axes = plt.subplots(len(shown), 1, figsize=(9, 1.6 + 1.1 * len(shown)), squeeze=False)
    for axes, (case, ranks) in zip(all_axes[:, 0], shown.items(), strict=True):
        for rank in ranks:
            begin = 0.0
            for phase in (phase for phase in rank if phase != RANK):
                axes.barh(f"rank {rank[RANK]}", rank[phase], left=begin, color=colours[phase])
                begin += rank[phase]
        axes.set_title(case, fontsize="small", loc="left")
        axes.invert_yaxis()
        axes.tick_params(labelsize="small")
    all_axes[-1, 0].set_xlabel("seconds from the start of the save")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[phase]) for phase in phases]
    all_axes[-1, 0].legend(
        handles, phases, loc="upper center", bbox_to_anchor=(0.5, -0.6), ncol=len(phases), fontsize="small"
    )
    return _saved(figure, path)


def _saved(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=DPI, bbox_inches="tight")
    plt.close(figure)
    return path
