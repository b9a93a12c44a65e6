"""The suites by name, in the order in which they run: those that share simulated nodes follow one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.runner import Bench
from benchmarks.suites import beside, commit, gather, memory, protocol, resume, scale, small_files, stall


@dataclass(frozen=True)
class Suite:
    """A part of the table.

    Attributes:
        summary: what it measures.
        run: measures it and adds rows.
        on_real_nodes: whether it makes sense on a launcher's ranks.
    """

    summary: str
    run: Callable[[Bench], None]
    on_real_nodes: bool = True


SUITES: Mapping[str, Suite] = {
    "stall-shared": Suite("training stopped by a save, one disk for all", stall.run_shared),
    "stall-local": Suite("training stopped by a save, a disk for each node", stall.run_local),
    "commit": Suite("from the start of a save to a durable, complete checkpoint", commit.run),
    "memory": Suite("memory that a save needs over stock", memory.run),
    "gather": Suite("throughput to node 0", gather.run),
    "wire": Suite("the same over a link of 1 Gbit/s", gather.run_wire, on_real_nodes=False),
    "small-files": Suite("many small files", small_files.run),
    "resume": Suite("checking a checkpoint, and bringing it to a new node", resume.run),
    "training-beside": Suite("steps per second while a save is finished beside them", beside.run, on_real_nodes=False),
    "protocol": Suite("what a save costs that saves nothing", protocol.run),
    "scale": Suite("2 to 16 nodes", scale.run, on_real_nodes=False),
}
