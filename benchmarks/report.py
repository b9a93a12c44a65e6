"""What came out: one row for each figure, as JSON with every sample, and as a Markdown table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import Ratio, Series, Target
from benchmarks.ranks import first_error

JSON_NAME = "results.json"
TABLE_NAME = "results.md"
FORMAT = 1


@dataclass(frozen=True)
class Row:
    """One figure of the table.

    Attributes:
        suite, case: where it belongs, e.g. ``stall-shared`` and ``1 GB, background``.
        measured: our samples; None where there are none.
        peer: what they are divided by; None for a figure that is no ratio.
        against: the peer's name.
        figure: the ratio of medians, or the median; None where ``missing`` says why.
        low, high: the smallest and the largest of the repeats.
        target: what it is to reach; None where it is only reported.
        missing: why there is no figure.
        note: what the reader should know.
    """

    suite: str
    case: str
    measured: Series | None = None
    peer: Series | None = None
    against: str = ""
    figure: float | None = None
    low: float | None = None
    high: float | None = None
    target: Target | None = None
    missing: str | None = None
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the target was reached; None where there is none, or no figure."""
        if self.target is None or self.figure is None:
            return None
        return self.target.reached(self.figure)

    @classmethod
    def ratio(
        cls, suite: str, case: str, measured: Series, peer: Series, *, target: Target | None = None, note: str = ""
    ) -> Row:
        """A figure that is a ratio of medians."""
        ratio = Ratio.of(measured, peer)
        return cls(suite, case, measured, peer, peer.name, ratio.value, ratio.low, ratio.high, target=target, note=note)

    @classmethod
    def value(cls, suite: str, case: str, measured: Series, *, target: Target | None = None, note: str = "") -> Row:
        """A figure that is a median, in the unit of its samples."""
        return cls(
            suite,
            case,
            measured,
            figure=measured.median,
            low=measured.low,
            high=measured.high,
            target=target,
            note=note,
        )

    @classmethod
    def absent(cls, suite: str, case: str, reason: str, *, against: str = "", target: Target | None = None) -> Row:
        """A figure that could not be had, and why."""
        return cls(suite, case, against=against, target=target, missing=" ".join(reason.split()))


@dataclass
class Report:
    """Everything that a run of the suite found out.

    Attributes:
        machine: see :func:`benchmarks.machine.describe`.
        settings: how the suite was called.
        rows: in the order in which they were measured.
        seconds: how long each suite took.
        timelines: by case, for each rank the seconds of each phase of one save.
    """

    machine: Mapping[str, Any]
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    timelines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def of(self, *suites: str) -> list[Row]:
        """The rows of some suites."""
        return [row for row in self.rows if row.suite in suites]

    def as_json(self) -> dict[str, Any]:
        """All of it, with the samples of every repeat."""
        return {
            "format": FORMAT,
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "seconds": self.seconds,
            "rows": [_row_as_json(row) for row in self.rows],
            "timelines": self.timelines,
        }

    def write(self, directory: Path) -> list[Path]:
        """Write JSON and table into ``directory``; returns their paths."""
        directory.mkdir(parents=True, exist_ok=True)
        data, table = directory / JSON_NAME, directory / TABLE_NAME
        data.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        table.write_text(self.markdown(), encoding="utf-8")
        return [data, table]

    def markdown(self) -> str:
        """The table, under what it was measured on."""
        lines = ["# Results", "", *_described(self.machine, self.settings), ""]
        header = ["suite", "case", "ours", "against", "theirs", "figure", "to reach", "reached"]
        rows = [
            "| " + " | ".join(cell.replace("|", "/") for cell in _cells(row)) + " |"
            for row in sorted(self.rows, key=lambda row: list(self._suites()).index(row.suite))
        ]
        lines += [f"| {' | '.join(header)} |", "|" + " --- |" * len(header), *rows, ""]
        notes = dict.fromkeys(f"- {row.suite}, {row.case}: {row.note}" for row in self.rows if row.note)
        if notes:
            lines += ["Notes:", "", *notes, ""]
        if self.seconds:
            taken = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self.seconds.items())
            lines += [f"Time taken: {taken}; {sum(self.seconds.values()):.0f} s in all.", ""]
        return "\n".join(lines)

    def _suites(self) -> Iterable[str]:
        return dict.fromkeys(row.suite for row in self.rows)


def _row_as_json(row: Row) -> dict[str, Any]:
    return {**dataclasses.asdict(row), "target": None if row.target is None else str(row.target)} | {
        "reached": row.reached
    }


def _described(machine: Mapping[str, Any], settings: Mapping[str, Any]) -> Sequence[str]:
    def text(value: Any) -> str:
        if isinstance(value, Mapping):
            return ", ".join(f"{key} {text(item)}" for key, item in value.items())
        return ", ".join(map(text, value)) if isinstance(value, list) else str(value)

    return [f"- {key}: {text(value)}" for key, value in {**machine, "settings": settings}.items()]


def _cells(row: Row) -> list[str]:
    """The cells of one row. A figure without its spread would say more than is known."""
    target = "-" if row.target is None else _target(row)
    if row.missing is not None:
        return [row.suite, row.case, "-", row.against or "-", "-", f"not measured: {row.missing}", target, "-"]
    figure = f"**{_number(row.figure)}** ({_number(row.low)} to {_number(row.high)})"
    if row.peer is None and row.measured is not None:
        figure = f"**{_quantity(row.figure, row.measured.unit)}**"
    reached = {True: "yes", False: "no", None: "-"}[row.reached]
    return [row.suite, row.case, _series(row.measured), row.against or "-", _series(row.peer), figure, target, reached]


def _target(row: Row) -> str:
    if row.peer is None and row.measured is not None and row.target is not None:
        words = "at most" if row.target.relation == "<=" else "at least"
        return f"{words} {_quantity(row.target.bound, row.measured.unit)}"
    return str(row.target)


def _series(series: Series | None) -> str:
    if series is None:
        return "-"
    low, high = _quantity(series.low, series.unit), _quantity(series.high, series.unit)
    return f"{_quantity(series.median, series.unit)} ({low} to {high})"


def _quantity(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return f"{value / (1 << 20):.1f} MiB"
    if unit == "s" and abs(value) < 1:
        return f"{value * 1e3:.3g} ms"
    return _number(value) if unit == "1" else f"{_number(value)} {unit}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def note_failure(report: Report, suite: str, error: Exception) -> None:
    """A suite that broke off has a row that says so."""
    report.rows.append(Row.absent(suite, "all of it", f"failed: {first_error(error)}"))
