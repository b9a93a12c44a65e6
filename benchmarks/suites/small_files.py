"""Many small files from node to node, beside tar over a socket."""

from __future__ import annotations

from benchmarks.machine import file_system
from benchmarks.measure import Target
from benchmarks.report import Row
from benchmarks.runner import Bench
from benchmarks.suites import gather

SUITE = "small-files"
FILE_BYTES = 4096
TARGET = Target("<=", 1.5)
TAR = "tar over a socket"


def run(bench: Bench) -> None:
    """On the disk and on a memory file system. Both sides fsync every file, which is most of it on a disk."""
    count = bench.settings.files
    for place in [None] if bench.is_launched else [bench.settings.memory, None]:
        case = f"{count} files of {FILE_BYTES} bytes, {file_system(place or bench.settings.directory)}"
        with bench.row_of(SUITE, case, against=TAR):
            ranks = bench.ranks(2, 1, directory=place)
            samples = gather.take(
                ranks,
                ["ours", TAR],
                size=count * FILE_BYTES,
                count=count,
                repeats=bench.settings.repeats,
                launched=bench.is_launched,
            )
            ours, tar = samples.series("ours", float), samples.series(TAR, float)
            bench.add(Row.ratio(SUITE, case, ours, tar, target=TARGET, note=ranks.description))
