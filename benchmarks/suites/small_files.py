"""Many small files from node to node, beside tar over a socket."""

from __future__ import annotations

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
    for in_memory, words in bench.places.items():
        case = f"{count} files of {FILE_BYTES} bytes, {words}"
        with bench.row_of(SUITE, case, against=TAR):
            ranks = bench.ranks(2, 1)
            samples = gather.take(
                bench, ranks, ["ours", TAR], size=count * FILE_BYTES, count=count, in_memory=in_memory
            )
            ours, tar = samples.series("ours", float), samples.series(TAR, float)
            bench.add(Row.ratio(SUITE, case, ours, tar, target=TARGET))
