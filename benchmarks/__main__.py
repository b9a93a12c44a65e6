"""Run the benchmarks: ``python -m benchmarks``, or under torchrun or srun on real nodes (docs/performance.md)."""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine, runner
from benchmarks.measure import format_size, parse_size
from benchmarks.report import Report
from benchmarks.runner import Bench, Settings

MIN_REPEATS = 5
MEMORY_DISK = Path("/dev/shm")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for and write the results; 0 where every suite ran to its end, reached or not."""
    from benchmarks.suites import SUITES

    options = parser().parse_args(arguments)
    warnings.simplefilter("ignore", FutureWarning)  # of other packages, with every save
    names = [name for name in SUITES if not options.suite or name in options.suite]
    settings = settings_of(options)
    directories = list(dict.fromkeys([settings.directory, settings.other_disks, settings.memory]))
    report = Report(machine.describe(directories), described(settings, names))
    bench = Bench(settings, report)
    try:
        runner.run(bench, names)
    finally:
        if bench.is_writer:
            written = report.write(options.output)
            try:
                from benchmarks import plots
            except ImportError as error:
                bench.say(f"no plots: {error}")
            else:
                written += plots.draw(report, options.output)
            bench.say("written: " + ", ".join(str(path) for path in written))
        bench.close()
    broken = [row for row in report.rows if row.missing is not None and row.missing.startswith("failed")]
    return 1 if broken else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    from benchmarks.suites import SUITES

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures what saving with safe_trainer costs, beside other means, and writes the results down. "
        "Under torchrun or srun, it takes the launcher's ranks in place of simulated nodes.",
        epilog="suites: " + "; ".join(f"{name}: {suite.summary}" for name, suite in SUITES.items()),
    )
    parser.add_argument(
        "--suite", action="append", choices=list(SUITES), metavar="NAME", help="only this one; may be given repeatedly"
    )
    parser.add_argument(
        "--size", type=_sizes, default="64MB,1GB,4GB", metavar="SIZES", help="of checkpoints; default: %(default)s"
    )
    parser.add_argument("--nodes", type=_count, default=2, help="simulated nodes; default: %(default)s")
    parser.add_argument("--ranks", type=_count, default=1, help="ranks on each of them; default: %(default)s")
    parser.add_argument(
        "--repeats", type=_count, default=MIN_REPEATS, help="samples of each thing; fewer than 5 are for a try"
    )
    parser.add_argument(
        "--directory",
        type=_directory,
        default=tempfile.gettempdir(),
        help="on the disk that is to be measured; under a launcher, the run directory's place on every node",
    )
    parser.add_argument(
        "--other-disks",
        type=_directory,
        help="where the disks of simulated nodes other than the first are; default: --directory",
    )
    parser.add_argument(
        "--memory-directory",
        type=_directory,
        default=str(MEMORY_DISK) if MEMORY_DISK.is_dir() else None,
        help="a memory file system; default: %(default)s",
    )
    parser.add_argument("--files", type=_count, default=10_000, help="in small-files; default: %(default)s")
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results"), help="where results go; default: %(default)s"
    )
    return parser


def settings_of(options: argparse.Namespace) -> Settings:
    """What the command line says."""
    return Settings(
        sizes=options.size,
        nodes=options.nodes,
        ranks=options.ranks,
        repeats=options.repeats,
        directory=options.directory,
        other_disks=options.other_disks or options.directory,
        memory=options.memory_directory or options.directory,
        files=options.files,
    )


def described(settings: Settings, names: Sequence[str]) -> dict[str, object]:
    """The settings for the reader of the results. Without paths: they say nothing to others."""
    return {
        "suites": list(names),
        "sizes": [format_size(size) for size in settings.sizes],
        "nodes": settings.nodes,
        "ranks per node": settings.ranks,
        "repeats": settings.repeats,
        "other nodes' disks": "the same disk" if settings.other_disks == settings.directory else "another directory",
    }


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({parse_size(part) for part in text.split(",")}))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _directory(text: str) -> Path:
    path = Path(text).absolute()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a directory")
    return path


if __name__ == "__main__":
    sys.exit(main())
