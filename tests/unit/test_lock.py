"""lock: who holds a run directory, on file systems with and without locks (S7, S8). Real processes, really killed."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from safe_trainer import lock
from safe_trainer.disk import Mount
from safe_trainer.errors import CheckpointError
from safe_trainer.lock import Claim, ClaimGuard, flock_is_local, held_probe, probe_problem
from tests.unit.processes import Raised, outcome_of, run_in_child, running

SHORT_LEASE_S = 0.4
# Well below a lease, and long for a busy machine.
AT_ONCE_S = 5.0


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "CHECK_PATIENCE_S", 0.2)
    monkeypatch.setattr(lock, "SETTLE_S", 0.1)


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LEASE_S", SHORT_LEASE_S)


A_NONCE = "f" * 32


def guard_in(area: Path) -> ClaimGuard:
    return ClaimGuard(area / "claim.json", short_lived=area / "tokens", trash=area / "trash")


def seconds_to_get(area: Path, *, timeout_s: float = 10.0) -> float:
    begin = time.monotonic()
    with guard_in(area).hold(timeout_s=timeout_s):
        return time.monotonic() - begin


def a_claim(**changes: object) -> Claim:
    claim = Claim(A_NONCE, "node7", 17, "another-boot pid:[1] 99", "2026-01-01T00:00:00Z")
    return dataclasses.replace(claim, **changes)  # type: ignore[arg-type]


def names_in(directory: Path) -> set[str]:
    return set(os.listdir(directory))


def hold_for_ever(area: Path) -> Callable[[Callable[[], None]], None]:
    def hold(ready: Callable[[], None]) -> None:
        with guard_in(area).hold(timeout_s=5.0):
            ready()
            time.sleep(60)

    return hold


# --- one at a time ---


@pytest.fixture(params=["links", "no links", "links fail"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With hard links the claim is there with its content at once; without, it is created and read back."""
    code = {"no links": errno.EPERM, "links fail": errno.EIO}.get(request.param)  # EIO: as on rclone
    if code is not None:
        monkeypatch.setattr(os, "link", lambda source, target: _fail(code))
    return str(request.param)


def test_a_claim_leaves_nothing_behind(tmp_path: Path, links: str) -> None:
    with guard_in(tmp_path).hold(timeout_s=1.0) as check:
        check()
        assert names_in(tmp_path) == {"claim.json"}
        written = Claim.parse((tmp_path / "claim.json").read_bytes())
        assert written is not None
        assert written.pid == os.getpid()
    assert names_in(tmp_path) == set()


def test_many_processes_hold_it_one_after_the_other(tmp_path: Path, links: str) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    area = tmp_path / "area"
    area.mkdir()

    def count_up() -> None:
        for _ in range(3):
            with guard_in(area).hold(timeout_s=30.0):
                value = int(counter.read_text())
                time.sleep(0.01)
                counter.write_text(str(value + 1))

    _at_once([lambda: run_in_child(count_up)] * 4)
    assert counter.read_text() == "12"
    assert names_in(area) == set()


def test_where_creation_excludes_nobody_the_last_one_to_write_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *rest: real(path, flags & ~os.O_EXCL, *rest))
    monkeypatch.setattr(os, "link", lambda source, target: _fail(errno.ENOSYS))
    inside = tmp_path / "inside"
    area = tmp_path / "area"
    area.mkdir()
    both_create = threading.Barrier(2)

    def hold_once() -> None:
        guard = guard_in(area)
        create = guard._create_and_settle

        def create_together(claim: Claim) -> bool:
            try:
                both_create.wait(timeout=0.5)
            except threading.BrokenBarrierError:
                pass
            return create(claim)

        guard._create_and_settle = create_together  # type: ignore[method-assign]
        with guard.hold(timeout_s=10.0):
            inside.touch(exist_ok=False)
            time.sleep(0.05)
            inside.unlink()

    _at_once([hold_once] * 2)


def test_an_answer_that_was_lost_does_not_lock_out_its_own_creator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def link_and_say_no(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, "sent twice", str(target))

    monkeypatch.setattr(os, "link", link_and_say_no)
    assert seconds_to_get(tmp_path) < AT_ONCE_S


# --- held by somebody alive ---


def test_a_claim_that_another_process_holds_is_an_error_in_time_that_names_file_and_holder(tmp_path: Path) -> None:
    with running(hold_for_ever(tmp_path)) as holder:
        begin = time.monotonic()
        with pytest.raises(CheckpointError) as caught, guard_in(tmp_path).hold(timeout_s=0.3):
            pass
        waited_s = time.monotonic() - begin
    assert str(tmp_path / "claim.json") in str(caught.value)
    assert f"process {holder.pid} on " in str(caught.value)
    assert "lock_timeout_s" in str(caught.value)
    assert 0.3 <= waited_s < 2.0


def test_who_holds_it_for_longer_than_a_lease_and_lives_keeps_it(tmp_path: Path, short_lease: None) -> None:
    with running(hold_for_ever(tmp_path)), pytest.raises(CheckpointError, match="was held by process"):
        seconds_to_get(tmp_path, timeout_s=3.5 * SHORT_LEASE_S)


def test_signs_of_life_that_cannot_be_written_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_lease: None
) -> None:
    monkeypatch.setattr(os, "replace", lambda source, target: _fail(errno.EIO))
    with guard_in(tmp_path).hold(timeout_s=1.0) as check:
        time.sleep(0.6 * SHORT_LEASE_S)
        check()


# --- left by somebody dead (S8) ---


def test_the_claim_of_a_killed_process_of_this_machine_is_taken_over_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(hold_for_ever(tmp_path)) as holder:
        pass
    assert seconds_to_get(tmp_path) < AT_ONCE_S
    assert f"process {holder.pid} on " in caplog.text
    assert "is dead" in caplog.text
    assert str(tmp_path / "claim.json") in caplog.text


def test_so_is_that_of_one_whose_parent_has_not_noticed(tmp_path: Path) -> None:
    with running(hold_for_ever(tmp_path)) as holder:
        assert holder.pid is not None
        os.kill(holder.pid, signal.SIGKILL)
        assert seconds_to_get(tmp_path) < AT_ONCE_S


def test_so_is_that_of_one_whose_number_another_process_has_now(tmp_path: Path) -> None:
    own = Claim.of_this_process()
    machine, _, start = own.process.rpartition(" ")
    earlier = dataclasses.replace(own, nonce="e" * 32, process=f"{machine} {int(start) - 1}")
    (tmp_path / "claim.json").write_bytes(earlier.encode())
    assert seconds_to_get(tmp_path) < AT_ONCE_S


@pytest.mark.parametrize(
    "content",
    [
        a_claim().encode(),
        a_claim(pid=os.getpid()).encode(),
        a_claim(process="").encode(),
        b"",
        b"{",
        b"[]",
        b'{"nonce": 1}',
        json.dumps({**dataclasses.asdict(a_claim()), "pid": "x"}).encode(),
        b"\xff",
    ],
    ids=[
        "another host",
        "its number is ours",
        "unknown process",
        "empty",
        "damaged",
        "list",
        "fields",
        "type",
        "bytes",
    ],
)
def test_what_a_dead_host_or_a_damaged_file_left_is_taken_over_after_a_lease(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, short_lease: None, content: bytes
) -> None:
    (tmp_path / "claim.json").write_bytes(content)
    long_ago_or_to_come = time.time() + 86400.0
    os.utime(tmp_path / "claim.json", (long_ago_or_to_come, long_ago_or_to_come))
    waited_s = seconds_to_get(tmp_path)
    assert SHORT_LEASE_S <= waited_s < AT_ONCE_S
    assert "gave no sign of life" in caplog.text
    assert ("node7" in caplog.text) is (b"node7" in content and b'"x"' not in content)


def test_a_sign_of_life_from_another_host_begins_the_lease_anew(tmp_path: Path, short_lease: None) -> None:
    (tmp_path / "claim.json").write_bytes(a_claim().encode())
    sign = tmp_path / "tokens" / f"alive-{A_NONCE}"
    sign.parent.mkdir()
    timer = threading.Timer(0.7 * SHORT_LEASE_S, lambda: sign.write_text("1"))
    timer.start()
    assert seconds_to_get(tmp_path) >= 1.6 * SHORT_LEASE_S


def test_of_many_who_find_a_dead_ones_claim_one_at_a_time_gets_it(tmp_path: Path) -> None:
    area, inside = tmp_path / "area", tmp_path / "inside"
    area.mkdir()
    with running(hold_for_ever(area)):
        pass

    def hold_once() -> None:
        with guard_in(area).hold(timeout_s=30.0) as check:
            inside.touch(exist_ok=False)
            time.sleep(0.02)
            check()
            inside.unlink()

    _at_once([lambda: run_in_child(hold_once)] * 5)


def test_a_newer_claim_that_is_met_in_the_place_of_a_dead_one_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale, newer = a_claim().encode(), a_claim(nonce="a" * 32).encode()
    (tmp_path / "claim.json").write_bytes(stale)
    real = os.rename

    def rename_after_another_was_quicker(source: Path, target: Path) -> None:
        (tmp_path / "claim.json").write_bytes(newer)
        real(source, target)

    monkeypatch.setattr(os, "rename", rename_after_another_was_quicker)
    guard_in(tmp_path)._take_away(stale, "it is dead")
    assert (tmp_path / "claim.json").read_bytes() == newer


# --- lost ---


def test_a_holder_that_was_stopped_for_too_long_learns_who_has_it_now_and_leaves_it_to_him(
    tmp_path: Path, short_lease: None
) -> None:
    answer = tmp_path / "answer"
    area = tmp_path / "area"
    area.mkdir()

    def hold_and_stop(ready: Callable[[], None]) -> None:
        with guard_in(area).hold(timeout_s=5.0) as check:
            ready()
            os.kill(os.getpid(), signal.SIGSTOP)
            outcome = outcome_of(check)
        answer.with_suffix(".new").write_text(outcome.message if isinstance(outcome, Raised) else "still held")
        answer.with_suffix(".new").rename(answer)

    with running(hold_and_stop) as holder:
        assert holder.pid is not None
        with guard_in(area).hold(timeout_s=10.0) as check:
            os.kill(holder.pid, signal.SIGCONT)
            _wait_for(answer)
            check()
    assert f"taken over by process {os.getpid()} on " in answer.read_text()
    assert "Nothing was changed" in answer.read_text()


def test_a_claim_that_somebody_has_deleted_is_lost(tmp_path: Path) -> None:
    with guard_in(tmp_path).hold(timeout_s=1.0) as check:
        (tmp_path / "claim.json").unlink()
        with pytest.raises(CheckpointError, match="somebody who is gone"):
            check()


# --- does flock work here? ---


def _fail(code: int) -> None:
    raise OSError(code, os.strerror(code))


def test_a_lock_that_works_is_found_to_work_and_the_probe_goes(tmp_path: Path) -> None:
    with held_probe(tmp_path / "probe") as problem:
        assert problem is None
        assert run_in_child(lambda: probe_problem(tmp_path / "probe")) is None
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO], ids=errno.errorcode.get)
def test_a_lock_that_fails_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, how: _fail(code))
    with held_probe(tmp_path / "probe") as problem:
        assert problem is not None
        assert os.strerror(code) in problem
    assert os.strerror(code) in (probe_problem(tmp_path / "probe") or "")


def test_a_lock_that_everybody_gets_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, how: None)
    with held_probe(tmp_path / "probe") as problem:
        assert problem == "a lock is given twice"
        assert "another host holds" in (probe_problem(tmp_path / "probe") or "")


@pytest.mark.parametrize(
    ("kind", "options", "is_local"),
    [
        ("ext4", "rw", False),
        ("nfs4", "rw,vers=4.2,local_lock=none", False),
        ("nfs", "rw,vers=3,nolock", True),
        ("nfs", "rw,local_lock=flock", True),
        ("lustre", "rw,localflock", True),
        ("lustre", "rw,flock", False),
        ("fuse.sshfs", "rw", True),
        ("fuse.glusterfs", "rw", False),
        ("ext4", "rw,nolock", False),
    ],
)
def test_mounts_on_which_locks_are_known_to_one_host_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: str, is_local: bool
) -> None:
    monkeypatch.setattr(lock, "mount_of", lambda path: Mount(kind, frozenset(options.split(","))))
    assert (flock_is_local(tmp_path) is not None) is is_local


# --- how ---


def _at_once(bodies: list[Callable[[], object]]) -> None:
    """Run each in a thread; what any of them raises is raised."""
    problems: list[BaseException] = []

    def run(body: Callable[[], object]) -> None:
        try:
            body()
        except BaseException as error:  # pytest's own, too
            problems.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for problem in problems:
        raise problem


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20.0
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before
