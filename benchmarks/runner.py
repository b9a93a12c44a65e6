"""Runs suites: what they share, the order, and what becomes of one that breaks off."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import file_system
from benchmarks.measure import Samples, Unavailable
from benchmarks.ranks import LauncherRanks, Layout, Ranks, SimulatedRanks, is_launched, launched_rank
from benchmarks.report import Report, Row, note_failure


@dataclass(frozen=True)
class Settings:
    """How the suite was called.

    Attributes:
        sizes: of checkpoints, in bytes, ascending.
        nodes, ranks: simulated nodes, and ranks on each.
        repeats: samples of each thing.
        directory: node 0's disk and the shared one.
        other_disks: the other nodes' disks.
        memory: a memory file system, for what is to be measured without a disk.
        files: how many, in the suite of small files.
    """

    sizes: tuple[int, ...]
    nodes: int
    ranks: int
    repeats: int
    directory: Path
    other_disks: Path
    memory: Path
    files: int


@dataclass
class Bench:
    """What every suite gets.

    Attributes:
        settings: the user's choices.
        report: where rows go.
        saves: what has been taken of saves with a Trainer, by layout and size: of the same saves, one suite shows the
            stall, another the time to the commit, a third the memory.
    """

    settings: Settings
    report: Report
    saves: dict[tuple[Layout, int], Samples[dict[str, Any]]] = field(default_factory=dict)
    _launcher: LauncherRanks | None = None
    _simulated: dict[tuple[int, int], SimulatedRanks] = field(default_factory=dict)

    @property
    def is_launched(self) -> bool:
        """Whether ranks are a launcher's."""
        return is_launched()

    def ranks(self, nodes: int | None = None, ranks: int | None = None) -> Ranks:
        """The launcher's ranks, whatever is asked for; or simulated nodes, started when first asked for.

        Simulated nodes of another shape end: their memory is needed.
        """
        if self.is_launched:
            if self._launcher is None:
                self._launcher = LauncherRanks(self.settings.directory)
                for simulated in ("nodes", "ranks per node", "other nodes' disks"):
                    self.report.settings.pop(simulated, None)
                self.report.settings["ranks"] = self._launcher.description
            return self._launcher
        shape = (nodes or self.settings.nodes, ranks or self.settings.ranks)
        if shape not in self._simulated:
            self.end_simulated()
            self._simulated[shape] = SimulatedRanks(
                *shape,
                directory=self.settings.directory,
                other_disks=self.settings.other_disks,
                memory=self.settings.memory,
            )
        return self._simulated[shape]

    def add(self, row: Row) -> None:
        """A row, shown as it comes."""
        self.report.rows.append(row)
        if self.is_writer:
            reached = {True: "reached", False: "MISSED", None: ""}[row.reached]
            figure = f"not measured: {row.missing}" if row.figure is None else f"{row.figure:.4g}"
            self.say(f"  {row.case} / {row.against}: {figure} {reached}".rstrip())

    @contextlib.contextmanager
    def row_of(self, suite: str, case: str, *, against: str = "") -> Iterator[None]:
        """What is raised as :class:`Unavailable` within becomes a row that says why there is no figure."""
        try:
            yield
        except Unavailable as reason:
            self.add(Row.absent(suite, case, str(reason), against=against))

    @property
    def places(self) -> dict[bool, str]:
        """The disk, and where nodes are simulated a memory file system, too: whether it is one, and its type."""
        places = {False: file_system(self.settings.directory)}
        return places if self.is_launched else {True: file_system(self.settings.memory), **places}

    @property
    def is_writer(self) -> bool:
        """Whether this process talks and writes."""
        return launched_rank() == 0

    def say(self, text: str) -> None:
        """A line for whoever waits."""
        if self.is_writer:
            print(text, file=sys.stderr, flush=True)

    def end_simulated(self) -> None:
        """End the simulated nodes that there are."""
        for ranks in self._simulated.values():
            ranks.close()
        self._simulated.clear()

    def close(self) -> None:
        """End all ranks."""
        self.end_simulated()
        if self._launcher is not None:
            self._launcher.close()


def run(bench: Bench, names: Sequence[str]) -> None:
    """Run suites one after another; one that fails leaves a row that says so, and the others run."""
    from benchmarks.suites import SUITES

    for name in names:
        suite = SUITES[name]
        bench.say(f"{name}: {suite.summary}")
        started = time.perf_counter()
        if bench.is_launched and not suite.on_real_nodes:
            bench.add(Row.absent(name, "all of it", "it simulates nodes, and is not run on a launcher's"))
            continue
        try:
            suite.run(bench)
        except Exception as error:
            note_failure(bench.report, name, error)
            bench.say(f"  {bench.report.rows[-1].missing}\n{error}")
            bench.end_simulated()
        bench.report.seconds[name] = round(time.perf_counter() - started, 1)
