"""transfer: files from rank to rank. What arrives is what was sent, or it is an error on all; nobody hangs (L11)."""

from __future__ import annotations

import dataclasses
import os
import resource
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from safe_trainer import transfer
from safe_trainer.channel import Channel
from safe_trainer.manifest import FileEntry
from safe_trainer.topology import Domain
from safe_trainer.transfer import CHUNK_BYTES, Shipment, plan_shipments, ship, total_bytes_by_destination
from tests.unit.builders import contents, entry_of, write_files
from tests.unit.mounts import leave_mount_namespace, mount_small_disk, needs_mounts
from tests.unit.processes import Raised, outcome_of, run_ranks

MIB = 1 << 20


def entry(path: str, size: int = 0) -> FileEntry:
    return FileEntry(path=path, size=size, digest="0" * 32, rank=0, mode=0o644)


# --- the plan ---


def test_every_file_is_in_the_plan_once() -> None:
    entries = [entry(f"file-{number}", number) for number in range(20)]
    plan = plan_shipments(entries, source=Domain((2, 3)), destination=Domain((0, 1)))
    assert sorted(shipment.entry.path for shipment in plan) == sorted(entry.path for entry in entries)


def test_lanes_pair_the_ranks_in_order_and_carry_about_the_same() -> None:
    entries = [entry("a", 6), entry("b", 5), entry("c", 4), entry("d", 3)]
    plan = plan_shipments(entries, source=Domain((4, 5)), destination=Domain((0, 1)))
    assert {(shipment.source, shipment.destination) for shipment in plan} == {(4, 0), (5, 1)}
    assert total_bytes_by_destination(plan) == {0: 9, 1: 9}


@pytest.mark.parametrize(
    ("source", "destination", "lanes"),
    [((4, 5, 6), (0,), {(4, 0)}), ((4,), (0, 1), {(4, 0)}), ((4, 5, 6), (0, 1), {(4, 0), (5, 1)})],
)
def test_there_are_as_many_lanes_as_the_smaller_side_has_ranks(
    source: tuple[int, ...], destination: tuple[int, ...], lanes: set[tuple[int, int]]
) -> None:
    entries = [entry(f"file-{number}", 1) for number in range(6)]
    plan = plan_shipments(entries, source=Domain(source), destination=Domain(destination))
    assert {(shipment.source, shipment.destination) for shipment in plan} == lanes


def test_the_plan_does_not_depend_on_the_order_of_the_files() -> None:
    entries = [entry(f"file-{number}", number % 3) for number in range(9)]
    sides = {"source": Domain((2, 3)), "destination": Domain((0, 1))}
    assert plan_shipments(entries, **sides) == plan_shipments(reversed(entries), **sides)


def test_nothing_to_send_is_no_plan() -> None:
    assert plan_shipments([], source=Domain((1,)), destination=Domain((0,))) == []


# --- three ranks: 1 and 2 send to 0 ---

SOURCES = (1, 2)


class Disks:
    """A directory for each of three ranks, as if on three nodes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        for rank in range(3):
            self.of(rank).mkdir()

    def of(self, rank: int) -> Path:
        return self._root / f"rank-{rank}"

    def shipments(self, source: int, paths: Iterable[str]) -> list[Shipment]:
        """A plan that brings files, as they are now, from ``source`` to rank 0."""
        return [Shipment(entry_of(self.of(source), path, rank=source), source, 0) for path in paths]

    def ship(self, channel: Channel, plan: list[Shipment]) -> list[int]:
        own = self.of(channel.rank)
        return channel.together("gather", lambda: ship(channel, plan, source_root=own, destination_root=own))


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    return Disks(tmp_path)


def run_failing(
    disks: Disks, plan: list[Shipment], *, before: Callable[[Channel], object] = lambda channel: None
) -> str:
    """Carry out a plan that must fail, with the same error on every rank; returns its text."""

    def body(channel: Channel) -> list[int] | Raised:
        before(channel)
        return outcome_of(lambda: disks.ship(channel, plan))

    raised = run_ranks(body, channel_timeout_s=10.0)
    assert all(isinstance(outcome, Raised) for outcome in raised), raised
    (message,) = {outcome.message for outcome in raised if isinstance(outcome, Raised)}
    return message


SIZES = {"nothing": 0, "one byte": 1, "one chunk": CHUNK_BYTES, "just over": CHUNK_BYTES + 1}


def test_files_of_every_size_arrive_as_they_were(disks: Disks) -> None:
    files = {f"sub/{name}": os.urandom(size) for name, size in SIZES.items()}
    write_files(disks.of(1), files)
    write_files(disks.of(2), {"other/.dot": b"from rank 2"})
    plan = disks.shipments(1, files) + disks.shipments(2, ["other/.dot"])
    received = run_ranks(lambda channel: disks.ship(channel, plan))
    assert received == [[sum(SIZES.values()) + 11, 0, 0]] * 3
    assert contents(disks.of(0)) == {**files, "other/.dot": b"from rank 2"}


def test_modes_arrive_whatever_the_umask(disks: Disks) -> None:
    modes = {"a": 0o600, "b": 0o644, "c": 0o664, "d": 0o755}
    write_files(disks.of(1), dict.fromkeys(modes, b""))
    for name, mode in modes.items():
        (disks.of(1) / name).chmod(mode)
    plan = disks.shipments(1, modes)

    def body(channel: Channel) -> None:
        os.umask(0o077)
        disks.ship(channel, plan)

    run_ranks(body)
    assert {name: stat.S_IMODE((disks.of(0) / name).stat().st_mode) for name in modes} == modes


def test_what_arrived_is_on_the_disk_before_anybody_is_told(disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(disks.of(1), {"a": b"1", "b": b""})
    plan = disks.shipments(1, ["a", "b"])

    def body(channel: Channel) -> list[str]:
        synced: list[str] = []
        monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.readlink(f"/proc/self/fd/{number}")))
        disks.ship(channel, plan)
        return synced

    assert run_ranks(body)[0] == [str(disks.of(0) / "a"), str(disks.of(0) / "b")]


def test_progress_counts_what_arrived_here(disks: Disks) -> None:
    write_files(disks.of(1), {"a": bytes(CHUNK_BYTES + 5)})
    plan = disks.shipments(1, ["a"])

    def body(channel: Channel) -> list[int]:
        counts: list[int] = []
        own = disks.of(channel.rank)
        ship(channel, plan, source_root=own, destination_root=own, progress=counts.append)
        return counts

    assert run_ranks(body) == [[CHUNK_BYTES, 5], [], []]


# --- failures: the same error on all, and the other files arrive nevertheless ---


def test_a_file_that_is_gone_is_an_error_that_names_it_and_its_rank(disks: Disks) -> None:
    write_files(disks.of(1), {"a": b"1", "b": b"2", "c": b"3"})
    plan = disks.shipments(1, ["a", "b", "c"])
    (disks.of(1) / "b").unlink()
    message = run_failing(disks, plan)
    assert "b could not be read on rank 1" in message
    assert "FileNotFoundError" in message
    assert contents(disks.of(0)).items() >= {"a": b"1", "c": b"3"}.items()


@pytest.mark.parametrize("changed", [b"other", b"longer than before", b""], ids=["content", "longer", "shorter"])
def test_a_file_that_changes_under_way_is_an_error(disks: Disks, changed: bytes) -> None:
    write_files(disks.of(1), {"a": b"12345"})
    plan = disks.shipments(1, ["a"])
    (disks.of(1) / "a").write_bytes(changed)
    assert "a arrived with other content" in run_failing(disks, plan)


@pytest.mark.parametrize("path", ["../evil", "/tmp/evil", "sub/../../evil", "C:/evil", "a\\evil"])
def test_a_malicious_sender_cannot_write_outside(disks: Disks, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    write_files(disks.of(1), {"innocent": b"1", "evil": b"content"})
    evil = dataclasses.replace(entry_of(disks.of(1), "evil"), path=path)
    plan = [Shipment(evil, 1, 0), *disks.shipments(1, ["innocent"])]

    def skip_the_check_when_sending(channel: Channel) -> None:
        if channel.rank == 1:
            monkeypatch.setattr(
                transfer, "resolve_inside", lambda root, name: root / ("evil" if name == path else name)
            )

    message = run_failing(disks, plan, before=skip_the_check_when_sending)
    assert repr(path) in message
    assert "UnsafePathError" in message or "not a path inside" in message
    assert contents(disks.of(0)) == {"innocent": b"1"}
    assert not Path("/tmp/evil").exists()


def test_an_honest_sender_refuses_to_read_outside(disks: Disks) -> None:
    write_files(disks.of(1), {"a": b"1"})
    write_files(disks.of(1).parent, {"secret": b"secret"})
    plan = [Shipment(dataclasses.replace(entry_of(disks.of(1), "a"), path="../secret"), 1, 0)]
    assert "'../secret'" in run_failing(disks, plan)


def _link_to_outside(disks: Disks) -> None:
    (disks.of(0).parent / "outside").mkdir()
    (disks.of(0) / "sub").symlink_to("../outside")


def _link_in_a_circle(disks: Disks) -> None:
    (disks.of(0) / "sub").symlink_to("sub")


def _link_in_place_of_the_file(disks: Disks) -> None:
    (disks.of(0) / "sub").mkdir()
    (disks.of(0) / "sub" / "file").symlink_to("elsewhere")


def _file_in_place_of_the_file(disks: Disks) -> None:
    write_files(disks.of(0), {"sub/file": b"not to be touched"})


def _file_in_place_of_the_directory(disks: Disks) -> None:
    write_files(disks.of(0), {"sub": b"a file"})


@pytest.mark.parametrize(
    "obstacle",
    [
        _link_to_outside,
        _link_in_a_circle,
        _link_in_place_of_the_file,
        _file_in_place_of_the_file,
        _file_in_place_of_the_directory,
    ],
)
def test_what_is_in_the_way_at_the_destination_is_an_error_and_stays(
    disks: Disks, obstacle: Callable[[Disks], None]
) -> None:
    write_files(disks.of(1), {"sub/file": b"new", "other": b"1"})
    plan = disks.shipments(1, ["sub/file", "other"])
    obstacle(disks)
    before = {path: path.lstat() for path in disks.of(0).rglob("*")}
    message = run_failing(disks, plan)
    assert "sub" in message
    assert (disks.of(0) / "other").read_bytes() == b"1"
    assert all(path.lstat().st_size == info.st_size for path, info in before.items() if not path.is_dir())
    assert not any((disks.of(0).parent / "outside").glob("*"))


def test_a_receiver_that_may_not_write_so_much_is_an_error_on_all(disks: Disks) -> None:
    write_files(disks.of(1), {"large": bytes(3 * MIB), "small": b"1"})
    plan = disks.shipments(1, ["large", "small"])

    def limit(channel: Channel) -> None:
        if channel.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))

    message = run_failing(disks, plan, before=limit)
    assert "rank 0" in message
    assert "EFBIG" in message
    assert str(disks.of(0) / "large") in message


@needs_mounts()
def test_a_full_disk_at_the_receiver_is_an_error_on_all_that_names_the_file(disks: Disks) -> None:
    write_files(disks.of(1), {"large": bytes(3 * MIB)})
    write_files(disks.of(2), {"more": bytes(3 * MIB)})
    plan = disks.shipments(1, ["large"]) + disks.shipments(2, ["more"])

    def shrink(channel: Channel) -> None:
        if channel.rank == 0:
            leave_mount_namespace()
            mount_small_disk(disks.of(0), size_bytes=MIB)

    message = run_failing(disks, plan, before=shrink)
    assert "ENOSPC" in message
    assert str(disks.of(0) / "large") in message


@pytest.mark.parametrize("role", ["source", "destination"])
def test_a_rank_without_files_says_so(disks: Disks, role: str) -> None:
    write_files(disks.of(1), {"a": b"1"})
    plan = disks.shipments(1, ["a"])

    def body(channel: Channel) -> object:
        own = disks.of(channel.rank)
        source = None if role == "source" else own
        destination = None if role == "destination" else own
        return outcome_of(
            lambda: channel.together(
                "gather", lambda: ship(channel, plan, source_root=source, destination_root=destination)
            )
        )

    raised = run_ranks(body)
    assert all(isinstance(outcome, Raised) and "a" in outcome.message for outcome in raised)


@pytest.mark.parametrize("mode", ["0644", None])
def test_an_entry_of_a_wrong_type_makes_nobody_hang(disks: Disks, mode: object) -> None:
    write_files(disks.of(1), {"a": b"1", "b": b"2"})
    plan = disks.shipments(1, ["a", "b"])
    plan[0] = dataclasses.replace(plan[0], entry=dataclasses.replace(plan[0].entry, mode=mode))  # type: ignore[arg-type]
    assert "a" in run_failing(disks, plan)
    assert (disks.of(0) / "b").read_bytes() == b"2"


# --- memory (L11) ---


def _peak_memory_bytes(action: Callable[[], object]) -> int:
    """By how much resident memory grew at most while ``action`` ran (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    action()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def test_memory_does_not_grow_with_the_file(disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 300 * MIB
    with open(disks.of(1) / "large", "wb") as stream:
        stream.truncate(size)
    plan = disks.shipments(1, ["large"])

    def body(channel: Channel) -> int:
        # 300 MB to the disk would take the time of all other tests together.
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
        return _peak_memory_bytes(lambda: disks.ship(channel, plan))

    peaks = run_ranks(body)
    assert (disks.of(0) / "large").stat().st_size == size
    assert max(peaks) < 64 * MIB
