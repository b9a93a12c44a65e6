"""transfer: files from rank to rank. What arrives is what was sent, or it is an error on all; nobody hangs (L11)."""

from __future__ import annotations

import dataclasses
import os
import resource
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from safe_trainer import digest, transfer
from safe_trainer.channel import Channel, Transit
from safe_trainer.digest import combine, digest_blocks, digest_file
from safe_trainer.layout import FileStat
from safe_trainer.manifest import FileEntry
from safe_trainer.topology import Domain
from safe_trainer.transfer import CHUNK_BYTES, Shipment, Shipped, bytes_by_destination, plan_shipments, ship
from tests.unit.builders import contents, entry_of, write_files
from tests.unit.mounts import leave_mount_namespace, mount_small_disk, needs_mounts
from tests.unit.processes import Raised, outcome_of, run_ranks

MIB = 1 << 20


def files(*sizes: int) -> dict[str, FileStat]:
    return {f"file-{number}": FileStat(size, 0o644) for number, size in enumerate(sizes)}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are long from 2 KiB on, and a chunk has no whole number of blocks."""
    monkeypatch.setattr(digest, "BLOCK_BYTES", 2 << 10)
    monkeypatch.setattr(transfer, "CHUNK_BYTES", 3 << 10)


# --- the plan ---


def stretches(plan: Iterable[Shipment]) -> dict[str, list[tuple[int, int]]]:
    """Offset and length of what is sent of each file, in order."""
    found = defaultdict(list)
    for shipment in plan:
        found[shipment.path].append((shipment.offset, shipment.length))
    return found


def test_every_file_is_in_the_plan_once() -> None:
    plan = plan_shipments(files(*range(20)), source=Domain((2, 3)), destination=Domain((0, 1)))
    assert stretches(plan) == {f"file-{number}": [(0, number)] for number in range(20)}


def test_lanes_pair_the_ranks_in_order_and_carry_about_the_same() -> None:
    plan = plan_shipments(files(6, 5, 4, 3), source=Domain((4, 5)), destination=Domain((0, 1)))
    assert {(shipment.source, shipment.destination) for shipment in plan} == {(4, 0), (5, 1)}
    assert bytes_by_destination(plan) == {0: 11, 1: 7}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("sizes", [(100_000,), (10, 100_000, 10), (100_000, 50_000, 0), (3, 2048, 2049, 4096)])
def test_long_files_are_cut_between_blocks_so_that_lanes_differ_by_a_block_at_most(sizes: tuple[int, ...]) -> None:
    plan = plan_shipments(files(*sizes), source=Domain((4, 5, 6)), destination=Domain((0, 1, 2)))
    carried = bytes_by_destination(plan)
    assert max(carried.values()) - min(carried.get(rank, 0) for rank in (0, 1, 2)) <= 3 * 2048
    for path, found in stretches(plan).items():
        ends = [offset + length for offset, length in found]
        assert [offset for offset, _ in found] == [0, *ends[:-1]]
        assert ends[-1] == files(*sizes)[path].size
        assert all(offset % 2048 == 0 for offset, _ in found)


@pytest.mark.parametrize(
    ("source", "destination", "lanes"),
    [((4, 5, 6), (0,), {(4, 0)}), ((4,), (0, 1), {(4, 0)}), ((4, 5, 6), (0, 1), {(4, 0), (5, 1)})],
)
def test_there_are_as_many_lanes_as_the_smaller_side_has_ranks(
    source: tuple[int, ...], destination: tuple[int, ...], lanes: set[tuple[int, int]]
) -> None:
    plan = plan_shipments(files(*[1] * 6), source=Domain(source), destination=Domain(destination))
    assert {(shipment.source, shipment.destination) for shipment in plan} == lanes


def test_the_plan_does_not_depend_on_the_order_of_the_files() -> None:
    found = files(0, 1, 2, 0, 1, 2)
    sides = {"source": Domain((2, 3)), "destination": Domain((0, 1))}
    assert plan_shipments(found, **sides) == plan_shipments(dict(reversed(found.items())), **sides)


def test_nothing_to_send_is_no_plan() -> None:
    assert plan_shipments({}, source=Domain((1,)), destination=Domain((0,))) == []


# --- three ranks: 1 and 2 send to 0 ---


def whole(entry: FileEntry, source: int) -> Shipment:
    """A file on its way to rank 0."""
    return Shipment(entry.path, entry.size, entry.mode, 0, entry.size, source, 0)


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
        return [whole(entry_of(self.of(source), path), source) for path in paths]

    def ship(self, channel: Channel, plan: list[Shipment]) -> list[Shipped]:
        own = self.of(channel.rank)
        return channel.together("gather", lambda: ship(channel, plan, source_root=own, destination_root=own))


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    return Disks(tmp_path)


def run_failing(
    disks: Disks, plan: list[Shipment], *, before: Callable[[Channel], object] = lambda channel: None
) -> str:
    """Carry out a plan that must fail, with the same error on every rank; returns its text."""

    def body(channel: Channel) -> list[Shipped] | Raised:
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
    shipped = run_ranks(lambda channel: disks.ship(channel, plan))[0]
    assert [each.received_bytes for each in shipped] == [sum(SIZES.values()) + 11, 0, 0]
    assert contents(disks.of(0)) == {**files, "other/.dot": b"from rank 2"}
    digests = {path: digest_blocks(disks.of(0) / path) for path in plan_paths(plan)}
    assert shipped[0].digests == digests
    assert shipped[1].digests | shipped[2].digests == digests


@pytest.mark.usefixtures("small_blocks")
def test_a_long_file_arrives_over_several_lanes(disks: Disks) -> None:
    """From rank 2 over ranks 2 and 1 to 0: two stretches of one file, and small ones packed around them."""
    content = os.urandom(9_000)
    for rank in (1, 2):
        write_files(disks.of(rank), {"a": b"first", "long": content, "z": b""})
    info = {path: FileStat(size, 0o644) for path, size in (("a", 5), ("long", 9_000), ("z", 0))}
    plan = plan_shipments(info, source=Domain((1, 2)), destination=Domain((0, 0)))
    assert {shipment.source for shipment in plan if shipment.path == "long"} == {1, 2}
    shipped = run_ranks(lambda channel: disks.ship(channel, plan))[0]
    assert contents(disks.of(0)) == {"a": b"first", "long": content, "z": b""}
    assert combine(shipped[0].digests["long"]) == digest_file(disks.of(0) / "long")
    assert {**shipped[1].digests["long"], **shipped[2].digests["long"]} == shipped[0].digests["long"]


def plan_paths(plan: Iterable[Shipment]) -> set[str]:
    return {shipment.path for shipment in plan}


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

    assert sorted(run_ranks(body)[0]) == [str(disks.of(0) / "a"), str(disks.of(0) / "b")]


def test_progress_counts_what_arrived_here(disks: Disks) -> None:
    write_files(disks.of(1), {"a": bytes(CHUNK_BYTES + 5)})
    plan = disks.shipments(1, ["a"])

    def body(channel: Channel) -> list[int]:
        counts: list[int] = []
        own = disks.of(channel.rank)
        ship(channel, plan, source_root=own, destination_root=own, progress=counts.append)
        return counts

    assert run_ranks(body) == [[CHUNK_BYTES, 5], [], []]


# --- failures: the same error on all ---


def test_a_file_that_is_gone_is_an_error_that_names_it_and_its_rank(disks: Disks) -> None:
    write_files(disks.of(1), {"a": b"1", "b": b"2", "c": b"3"})
    plan = disks.shipments(1, ["a", "b", "c"])
    (disks.of(1) / "b").unlink()
    message = run_failing(disks, plan)
    assert message.startswith("rank 1 ")
    assert str(disks.of(1) / "b") in message
    assert "FileNotFoundError" in message


@pytest.mark.parametrize("changed", [b"longer than before", b""], ids=["longer", "shorter"])
def test_a_file_that_changes_under_way_is_an_error(disks: Disks, changed: bytes) -> None:
    write_files(disks.of(1), {"a": b"12345"})
    plan = disks.shipments(1, ["a"])
    (disks.of(1) / "a").write_bytes(changed)
    assert f"a has {len(changed)} bytes, not 5 as when it was listed" in run_failing(disks, plan)


def test_what_arrives_is_compared_with_what_was_sent(disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(disks.of(1), {"a": b"12345"})
    plan = disks.shipments(1, ["a"])

    def damage_on_the_wire(channel: Channel) -> None:
        start = channel.start_receive

        def start_damaged(buffer: torch.Tensor, *, from_rank: int) -> Transit:
            transit = start(buffer, from_rank=from_rank)
            if len(buffer) == 6:
                transit.wait()
                buffer[0] ^= 1
                monkeypatch.setattr(transit, "wait", lambda: None)
            return transit

        monkeypatch.setattr(channel, "start_receive", start_damaged)

    message = run_failing(disks, plan, before=damage_on_the_wire)
    assert "a arrived with other content than it was sent with" in message


def test_a_failure_ends_all_lanes_at_once(disks: Disks) -> None:
    """A gather of hours does not go on for hours after a disk is full."""
    for rank in (1, 2):
        with open(disks.of(rank) / f"large-{rank}", "wb") as stream:
            stream.truncate(40 * CHUNK_BYTES)
    plan = disks.shipments(1, ["large-1"]) + disks.shipments(2, ["large-2"])

    def limit(channel: Channel) -> None:
        if channel.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))

    message = run_failing(disks, plan, before=limit)
    assert message.startswith("rank 0 ")
    assert "EFBIG" in message
    assert not (disks.of(0) / "large-2").exists()


@pytest.mark.parametrize("path", ["../evil", "/tmp/evil", "sub/../../evil", "C:/evil", "a\\evil"])
def test_a_malicious_sender_cannot_write_outside(disks: Disks, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    write_files(disks.of(1), {"innocent": b"1", "evil": b"content"})
    evil = dataclasses.replace(entry_of(disks.of(1), "evil"), path=path)
    plan = [whole(evil, 1), *disks.shipments(1, ["innocent"])]

    def skip_the_check_when_sending(channel: Channel) -> None:
        if channel.rank == 1:
            monkeypatch.setattr(
                transfer, "resolve_inside", lambda root, name: root / ("evil" if name == path else name)
            )

    message = run_failing(disks, plan, before=skip_the_check_when_sending)
    assert repr(path) in message
    assert "UnsafePathError" in message or "not a path inside" in message
    assert contents(disks.of(0)) == {}
    assert not Path("/tmp/evil").exists()


def test_an_honest_sender_refuses_to_read_outside(disks: Disks) -> None:
    write_files(disks.of(1), {"a": b"1"})
    write_files(disks.of(1).parent, {"secret": b"secret"})
    plan = [whole(dataclasses.replace(entry_of(disks.of(1), "a"), path="../secret"), 1)]
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
    assert all(path.lstat().st_size == info.st_size for path, info in before.items() if not path.is_dir())
    assert not any((disks.of(0).parent / "outside").glob("*"))


@pytest.mark.usefixtures("small_blocks")
def test_a_stretch_is_never_written_into_a_file_of_another_checkpoint(disks: Disks) -> None:
    """What a checkpoint shares with another one is a second name of the same file."""
    write_files(disks.of(1), {"long": bytes(4096)})
    write_files(disks.of(0), {"committed": b"c" * 4096})
    os.link(disks.of(0) / "committed", disks.of(0) / "long")
    plan = [Shipment("long", 4096, 0o644, 2048, 2048, 1, 0)]
    assert "has several names" in run_failing(disks, plan)
    assert (disks.of(0) / "committed").read_bytes() == b"c" * 4096


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
    plan[0] = dataclasses.replace(plan[0], mode=mode)  # type: ignore[arg-type]
    assert "a" in run_failing(disks, plan)


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
