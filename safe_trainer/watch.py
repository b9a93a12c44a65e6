"""Signs of life: who is late, who has failed, who is gone, also while this rank sits in somebody else's collective.

Every rank tells the others through the job's store (``torch.distributed``'s rendezvous store, over a connection of its
own) that it lives and what it is doing. Two threads of each rank do this, so that the thread that trains need not:

- the *pulse* beats, and while a step takes long it reads: notices of failures, the others' beats, a verdict;
- the *guard* never touches the store, which may hang with the network. It acts on what the pulse has found, or on the
  pulse's own silence: it cuts this process's connections to the other ranks, whereupon the collective in which the
  training thread is blocked raises.

A *verdict* says that the process group is lost, and why. The first one in the store counts, so that every rank raises
the same error. What is not promised: that a process is dead because it is silent. A process that holds the GIL for
``timeout_s`` (seconds) is silent too.

Nothing is unpickled from the store; what is read there is JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any, Literal, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from safe_trainer.errors import ProcessGroupLostError, RankFailure
from safe_trainer.process import has_ended, process_mark

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Enough for what a beat costs (one write to the store) to be nothing, often enough to see a death within seconds.
BEAT_INTERVAL_S = 1.0
TICK_S = 0.25
# How long a rank that has not failed may take to come to the end of its step before those that wait go on without it.
GRACE_S = 5.0
# A collective in which a rank has stood for this long, after another one has failed, will not come to its end.
STUCK_AFTER_S = 3.0
# A connection has broken: a rank whose beats have stopped for this many intervals is the one that is gone.
BEATS_MISSED_AFTER_BREAK = 4
LATE_LOG_INTERVAL_S = 30.0
# All ranks read all beats; with many ranks less often, so that the store carries the same load whatever their number.
SCAN_INTERVAL_PER_RANK_S = 0.01
# How long a rank may come later than the others to the start, which is what torch gives collectives by default.
START_TIMEOUT_S = 1800.0
# How long the training thread waits for the pulse to carry something to the store.
STORE_PATIENCE_S = 5.0

UNLIMITED = timedelta(days=365)
_COLLECTIVE_FILES = ("distributed_c10d.py", "_functional_collectives.py")

State = Literal["idle", "resting", "acting", "waiting", "left"]


@dataclass(frozen=True)
class Peer:
    """A rank as the others know it from the start.

    Attributes:
        host, node: its host's name, and the launcher's number of the node.
        addresses: of its host.
        pid: its number.
        process: its mark, see :mod:`~safe_trainer.process`.
    """

    host: str
    node: str
    addresses: tuple[str, ...]
    pid: int
    process: str

    @classmethod
    def own(cls) -> Peer:
        """This process."""
        addresses = {entry.address.split("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
        return cls(
            host=socket.gethostname(),
            node=os.environ.get("GROUP_RANK", ""),
            addresses=tuple(sorted(addresses)),
            pid=os.getpid(),
            process=process_mark(os.getpid()),
        )


@dataclass
class _Step:
    """What the training thread is at. Written by that thread, read by the others."""

    number: int
    phase: str
    thread: int
    state: State = "acting"
    started: float = field(default_factory=time.monotonic)
    told: RankFailure | None = None

    def age_s(self) -> float:
        return time.monotonic() - self.started


@dataclass(frozen=True)
class _Beat:
    """What a rank says of itself.

    Attributes:
        count: grows with each beat.
        step: the number of its step; steps are counted alike on every rank.
        where: the innermost line of Python that it is at, where the step takes long.
        stuck: whether it has stood in one collective for :data:`STUCK_AFTER_S`.
    """

    count: int
    step: int
    phase: str
    state: State
    for_s: float
    where: str
    stuck: bool

    def has_arrived(self, step: int) -> bool:
        """Whether this rank has ended its own part of a step."""
        return self.step > step or (self.step == step and self.state == "waiting")


@dataclass(frozen=True)
class _Verdict:
    """Why the process group is lost."""

    text: str
    failures: tuple[RankFailure, ...] = ()
    missing: tuple[int, ...] = ()

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> _Verdict:
        fields = json.loads(text)
        failures = tuple(RankFailure(**failure) for failure in fields["failures"])
        return cls(str(fields["text"]), failures, tuple(fields["missing"]))

    def error(self) -> ProcessGroupLostError:
        return ProcessGroupLostError(self.text, self.failures, missing=self.missing)


_AGREED = "agreed"


class Watch:
    """This rank's part of the watch over a group.

    Args:
        store: the job's store; a clone is used by one thread only.
        rank, world_size: of this process.
        timeout_s: silence in seconds after which a rank is given up.
        waits_for_slow: after a failure, wait for ranks that live and are not in a collective, rather than go on
            without them after :data:`GRACE_S`.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, timeout_s: float, waits_for_slow: bool) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._waits_for_slow = waits_for_slow
        self._beat_interval_s = min(BEAT_INTERVAL_S, timeout_s / 4)
        self.peers: Sequence[Peer] = ()
        self._count = 0
        self._steps_begun = 0
        self._step: _Step | None = None
        self._verdict: _Verdict | None = None
        self._store_error: Exception | None = None
        self._last_round = time.monotonic()
        self._others: dict[int, tuple[_Beat, float]] = {}
        self._last_scan = 0.0
        self._resting = False
        # By name: what this rank announces, and what the store has.
        self._boards: dict[str, tuple[str | None, str | None]] = {}
        self._notice_seen: tuple[int, float] | None = None
        self._last_late_log = 0.0
        self._in_collective: tuple[int, int, float] | None = None
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin to beat, and wait until every rank does. Ranks may come late: one prepares the data for all, say.

        Raises:
            ProcessGroupLostError: some have not begun within :data:`START_TIMEOUT_S` or ``timeout_s``, whichever is
                longer.
        """
        self._beat()
        limit_s = max(START_TIMEOUT_S, self._timeout_s)
        started = time.monotonic()
        while True:
            try:
                self._store.wait(
                    [_beat_key(rank) for rank in range(self._world_size)], timedelta(seconds=LATE_LOG_INTERVAL_S)
                )
                break
            except RuntimeError as error:
                absent = [rank for rank in range(self._world_size) if not self._store.check([_beat_key(rank)])]
                names = ", ".join(str(rank) for rank in absent)
                waited_s = time.monotonic() - started
                if waited_s >= limit_s:
                    raise ProcessGroupLostError(
                        f"{len(absent)} of {self._world_size} ranks did not come to train() within {waited_s:.0f} s of "
                        f"rank {self._rank}: {names}",
                        missing=absent,
                    ) from error
                if self._rank == min(set(range(self._world_size)) - set(absent)):
                    logger.warning("Waiting for rank(s) %s to begin, for %.0f s so far.", names, waited_s)
        self._run_threads()
        atexit.register(self.stop)

    def _run_threads(self) -> None:
        self._stopped = threading.Event()
        self._last_round = time.monotonic()
        for target in (self._pulse, self._guard):
            threading.Thread(
                target=target, args=(self._stopped,), name=f"safe_trainer {target.__name__}", daemon=True
            ).start()

    def stop(self) -> None:
        """Stop beating; the others will take this rank for gone if they wait for it."""
        self._stopped.set()
        self._wake.set()
        atexit.unregister(self.stop)

    # --- for the training thread ---

    @property
    def lost(self) -> ProcessGroupLostError | None:
        """The error to raise where the group is lost, else None."""
        return None if self._verdict is None else self._verdict.error()

    @property
    def others_failed(self) -> bool:
        """Whether some rank is known to have failed in the present step."""
        step, seen = self._step, self._notice_seen
        return step is not None and seen is not None and seen[0] == step.number

    def rest(self) -> None:
        """Be silent until the next step, without being taken for gone: training has ended, and the store may go."""
        self._resting = True
        self._ask(self._beat, otherwise=None)
        self._stopped.set()
        self._wake.set()

    @contextlib.contextmanager
    def step(self, phase: str) -> Iterator[_Step]:
        """Inside, this rank is at a step that all ranks take; the caller sets its state to ``waiting`` when it is
        done with its own part."""
        self._steps_begun += 1
        step = _Step(self._steps_begun, phase, threading.get_ident())
        self._notice_seen = None
        self._step = step
        if self._resting:
            self._resting = False
            self._run_threads()
        try:
            yield step
        except Exception:
            self._step = None
            raise
        except BaseException:
            step.state = "left"  # for good, so the others need not wait
            raise
        self._step = None

    def tell(self, failure: RankFailure) -> RankFailure:
        """Let every rank know at once that this one has failed in its step; returns the failure with its number.

        Once for each step: what comes later on this rank follows from the first failure.
        """
        step = self._step
        if step is None:
            return failure
        if step.told is not None:
            return step.told

        def post() -> RankFailure:
            order = self._store.add(f"failures/{step.number}", 1)
            numbered = dataclasses.replace(failure, order=order)
            self._store.set(f"failure/{step.number}/{order}", json.dumps(dataclasses.asdict(numbered)))
            return numbered

        step.told = self._ask(post, otherwise=failure)
        return step.told

    # --- boards: one line for all, between steps, without a collective ---

    def watch_board(self, name: str) -> None:
        """Look out for an announcement of this name from now on; every rank must do so to see it."""
        self._boards[name] = (None, None)

    def leave_board(self, name: str) -> None:
        """Look no more."""
        self._boards.pop(name, None)

    def announce(self, name: str, text: str) -> None:
        """Put up an announcement for all ranks, unless there is one; may be called from a signal handler.

        It takes no lock, which the interrupted thread might hold. The pulse finds it at its next beat.
        """
        if name in self._boards and self._boards[name][0] is None:
            self._boards[name] = (text, self._boards[name][1])

    def announcement(self, name: str) -> str | None:
        """What has been announced by any rank, as soon as it is known here."""
        return self._boards.get(name, (None, None))[1]

    def count_in(self, name: str, value: int) -> int | None:
        """Leave a number for all ranks to see; the greatest one if this rank is the last to leave one, else None."""

        def leave() -> int | None:
            self._store.set(f"{name}/{self._rank}", str(value))
            if self._store.add(f"{name}/count", 1) < self._world_size:
                return None
            return max(int(text) for text in self._get_all([f"{name}/{rank}" for rank in range(self._world_size)]))

        return self._ask(leave, otherwise=None)

    def publish(self, name: str, value: int) -> None:
        """Let all ranks know a number; done when this returns."""
        self._ask(lambda: self._store.set(name, str(value)), otherwise=None)

    def published(self, name: str) -> int | None:
        """The number that some rank has published under ``name``, else None."""
        return self._ask(lambda: int(self._store.get(name)) if self._store.check([name]) else None, otherwise=None)

    def settle(self) -> None:
        """All ranks know the failures of this step by the ordinary way, so the group is not lost.

        Raises:
            ProcessGroupLostError: some rank has given the group up meanwhile.
        """
        step = self._step
        if step is None:
            return
        ending = self._ask(lambda: self._end_of_step(step.number, _AGREED), otherwise=_AGREED)
        if ending != _AGREED:
            self._verdict = self._verdict or _Verdict.from_json(ending)
            raise self._verdict.error()

    def explain(self, error: Exception) -> ProcessGroupLostError:
        """The error to raise on this rank, the same on every rank, after ``error`` has come out of the group.

        Blocks until it is known who is gone: at once where that process was on this machine, otherwise at most about
        :data:`BEATS_MISSED_AFTER_BREAK` beats.
        """
        enough_s = self._beat_interval_s * BEATS_MISSED_AFTER_BREAK
        started = time.monotonic()
        verdict = None
        while self._verdict is None and verdict is None:
            waited_s = time.monotonic() - started
            silent = self._silent_for(enough_s) if waited_s > enough_s else []
            if ended := self._ended():
                verdict = self._ended_verdict(ended)
            elif self._store_error is not None:
                verdict = self._no_store_verdict(0.0)
            elif silent:
                verdict = self._missing_verdict(silent, enough_s)
            elif waited_s > enough_s + GRACE_S:
                verdict = _Verdict(f"a connection between the ranks has broken, though all of them live: {error}")
            else:
                self._wake.set()
                time.sleep(TICK_S)
        return (self._verdict or self._give_up(verdict or _Verdict(str(error)))).error()

    # --- between the training thread and the pulse ---

    def _ask(self, request: Callable[[], T], *, otherwise: T) -> T:
        """Have the pulse do something with the store; ``otherwise`` where the store does not answer."""
        if self._store_error is not None:
            return otherwise
        answer: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._requests.put(lambda: answer.put(request()))
        self._wake.set()
        deadline = time.monotonic() + STORE_PATIENCE_S
        while self._store_error is None and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                return answer.get(timeout=TICK_S)
        logger.debug("the store does not answer")
        return otherwise

    def _give_up(self, verdict: _Verdict) -> _Verdict:
        """Propose a verdict from the training thread; whichever came first counts."""
        step = self._step
        number = self._steps_begun if step is None else step.number
        proposal = verdict.to_json()
        ending = self._ask(lambda: self._end_of_step(number, proposal), otherwise=proposal)
        if self._verdict is None:
            # Where the others have agreed on this step's failures, the connection broke on this rank alone.
            self._verdict = verdict if ending == _AGREED else _Verdict.from_json(ending)
        return self._verdict

    def _end_of_step(self, number: int, proposal: str) -> str:
        """How a step ended: as whoever came first has said."""
        ending = str(self._store.compare_set(f"end/{number}", "", proposal), "utf-8")
        if ending not in (_AGREED, ""):
            self._store.compare_set("lost", "", ending)
        return ending

    # --- the pulse ---

    def _pulse(self, stopped: threading.Event) -> None:
        last_beat = -self._beat_interval_s
        while not stopped.is_set():
            try:
                while not self._requests.empty():
                    self._requests.get()()
                if time.monotonic() - last_beat >= self._beat_interval_s:
                    last_beat = time.monotonic()
                    self._beat()
                    self._read_boards()
                step = self._step
                if step is not None and step.age_s() > TICK_S:
                    self._look(step)
                self._last_round = time.monotonic()
            except Exception as error:  # the store is gone, as when the job ends: nobody to tell, nothing to read
                logger.debug("the pulse stops", exc_info=True)
                self._store_error = error
                return
            self._wake.wait(TICK_S)
            self._wake.clear()

    def _beat(self) -> None:
        self._count += 1
        self._store.set(_beat_key(self._rank), json.dumps(dataclasses.asdict(self._own_beat())))

    def _own_beat(self) -> _Beat:
        """What this rank has to say of itself now."""
        step = self._step
        if step is None:
            state: State = "resting" if self._resting else "idle"
            return _Beat(self._count, self._steps_begun, "training", state, 0.0, "", False)
        where, stuck = self._whereabouts(step) if step.age_s() > STUCK_AFTER_S else ("", False)
        return _Beat(self._count, step.number, step.phase, step.state, step.age_s(), where, stuck)

    def _absent(self, step: _Step) -> dict[int, _Beat]:
        """The ranks, this one included, that are not at the end of a step; what they last said of themselves."""
        beats = {rank: beat for rank, (beat, _) in self._others.items()} | {self._rank: self._own_beat()}
        return {rank: beat for rank, beat in sorted(beats.items()) if not beat.has_arrived(step.number)}

    def _read_boards(self) -> None:
        for name, (own, seen) in list(self._boards.items()):
            if seen is None and own is not None:
                seen = str(self._store.compare_set(name, "", own), "utf-8")
            elif seen is None and self._store.check([name]):
                seen = str(self._store.get(name), "utf-8")
            if seen is not None and name in self._boards:
                self._boards[name] = (own or seen, seen)

    def _whereabouts(self, step: _Step) -> tuple[str, bool]:
        """The line at which the training thread is, and whether it has been in one collective for long."""
        frame = sys._current_frames().get(step.thread)
        if frame is None:
            return "", False
        where = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
        collective = _collective_frame(frame)
        if collective is None or step.state != "acting":
            self._in_collective = None
            return where, False
        now = time.monotonic()
        if self._in_collective is None or self._in_collective[:2] != (id(collective), collective.f_lasti):
            self._in_collective = (id(collective), collective.f_lasti, now)
        return where, now - self._in_collective[2] >= STUCK_AFTER_S

    def _look(self, step: _Step) -> None:
        """Read what concerns a step that takes long, and give the group up where that must be."""
        if self._verdict is not None:
            return
        if self._store.check(["lost"]):
            self._verdict = _Verdict.from_json(self._store.get("lost"))
            return
        ended = self._ended() if self._read_beats() else []
        silent = self._silent_for(self._timeout_s)
        if ended:
            self._propose(step, self._ended_verdict(ended))
        elif silent:
            self._propose(step, self._missing_verdict(silent, self._timeout_s))
        elif self._has_notice(step) and not self._can_end_together(step):
            failures = self._read_failures(step)
            self._propose(step, _Verdict(self._text_after_failures(step, failures), tuple(failures)))
        elif self._rank == 0 and step.age_s() > LATE_LOG_INTERVAL_S:
            self._log_late(step)

    def _propose(self, step: _Step, verdict: _Verdict) -> None:
        ending = self._end_of_step(step.number, verdict.to_json())
        if ending != _AGREED:
            self._verdict = _Verdict.from_json(ending)

    def _has_notice(self, step: _Step) -> bool:
        """Whether a rank has failed in this step, and the others have had :data:`GRACE_S` to end it since."""
        if not self._store.check([f"failure/{step.number}/1"]):
            return False
        if self._notice_seen is None or self._notice_seen[0] != step.number:
            self._notice_seen = (step.number, time.monotonic())
        return time.monotonic() - self._notice_seen[1] >= GRACE_S

    def _can_end_together(self, step: _Step) -> bool:
        """Whether the ranks that are not at the end of this step can be waited for."""
        absent = self._absent(step).values()
        if any(beat.stuck or beat.state == "left" for beat in absent):
            return False
        return self._waits_for_slow or not absent

    def _read_beats(self) -> bool:
        """Read what the others say of themselves, if it is time to; whether it was."""
        now = time.monotonic()
        if now - self._last_scan < max(self._beat_interval_s, self._world_size * SCAN_INTERVAL_PER_RANK_S):
            return False
        self._last_scan = now
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        for rank, text in zip(others, self._get_all([_beat_key(rank) for rank in others]), strict=True):
            beat = _Beat(**json.loads(text))
            known = self._others.get(rank)
            if known is None or known[0].count != beat.count:
                self._others[rank] = (beat, now)
        return True

    def _ended(self) -> list[int]:
        """Ranks whose process is gone, as far as this process can tell."""
        return [rank for rank, peer in enumerate(self.peers) if has_ended(peer.pid, peer.process)]

    def _get_all(self, keys: list[str]) -> list[bytes]:
        if self._store.has_extended_api():  # type: ignore[attr-defined]
            return list(self._store.multi_get(keys))
        return [self._store.get(key) for key in keys]

    def _silent_for(self, seconds: float) -> list[int]:
        now = time.monotonic()
        return sorted(
            rank for rank, (beat, heard) in self._others.items() if now - heard > seconds and beat.state != "resting"
        )

    def _read_failures(self, step: _Step) -> list[RankFailure]:
        count = self._store.add(f"failures/{step.number}", 0)
        failures = []
        for order in range(1, count + 1):
            key = f"failure/{step.number}/{order}"
            if self._store.check([key]):
                failures.append(RankFailure(**json.loads(self._store.get(key))))
        return sorted(failures, key=RankFailure.precedence)

    def _log_late(self, step: _Step) -> None:
        """Every half minute, on rank 0: who keeps the others waiting, and with what."""
        if time.monotonic() - self._last_late_log < LATE_LOG_INTERVAL_S:
            return
        self._last_late_log = time.monotonic()
        absent = self._absent(step)
        # Whoever stands in a collective waits for somebody else.
        late = {rank: beat for rank, beat in absent.items() if not beat.stuck} or absent
        told = "; ".join(f"{self._name(rank)}: {_activity(beat, step)}" for rank, beat in late.items())
        logger.warning("%r has taken %.0f s so far. Late: %s", step.phase, step.age_s(), told or "nobody")

    # --- the guard ---

    def _guard(self, stopped: threading.Event) -> None:
        acted_on: int | None = None
        while not stopped.wait(TICK_S):
            step = self._step
            if step is None or step.number == acted_on:
                continue
            silence_s = time.monotonic() - self._last_round
            if self._verdict is None and silence_s > self._timeout_s:
                self._verdict = self._no_store_verdict(silence_s)
            if self._verdict is not None:
                acted_on = step.number
                logger.error("Giving up %r: %s", step.phase, self._verdict.text)
                cut_connections(self.peers, spare_port=_store_port(self._store))

    # --- words ---

    def _name(self, rank: int) -> str:
        host = f" on {self.peers[rank].host}" if rank < len(self.peers) else ""
        return f"rank {rank}{host}"

    def _ended_verdict(self, ended: Sequence[int]) -> _Verdict:
        names = ", ".join(f"{self._name(rank)} (process {self.peers[rank].pid})" for rank in ended)
        step = self._step
        during = "" if step is None else f" during {step.phase!r}"
        return _Verdict(
            f"no sign of life from {names}: it has ended{during}, or was killed. What was committed before is "
            "unchanged; start the job again.",
            missing=tuple(ended),
        )

    def _missing_verdict(self, silent: Sequence[int], seconds: float) -> _Verdict:
        names = ", ".join(self._name(rank) for rank in silent)
        last = {rank: self._others[rank][0] for rank in silent}
        doing = ", ".join(sorted({f"{beat.phase!r}" for beat in last.values()}))
        return _Verdict(
            f"no sign of life from {names} for {seconds:g} s (last seen in {doing}): the process was killed, its node "
            "is down, or the network to it is. What was committed before is unchanged; start the job again.",
            missing=tuple(silent),
        )

    def _no_store_verdict(self, seconds: float) -> _Verdict:
        # The store lives with rank 0 or with the launcher's agent on its node.
        missing: tuple[int, ...] = ()
        if self.peers:
            home = (self.peers[0].host, self.peers[0].node)
            missing = tuple(rank for rank, peer in enumerate(self.peers) if (peer.host, peer.node) == home)
        if self._rank in missing:
            missing = ()
        names = ", ".join(self._name(rank) for rank in missing) or "the launcher's agent"
        since = f" for {seconds:.0f} s" if seconds else ""
        return _Verdict(
            f"no contact with the job's store{since}, which lives on the node of rank 0: {names} missing, or the "
            "network to that node is. What was committed before is unchanged; start the job again.",
            missing=missing,
        )

    def _text_after_failures(self, step: _Step, failures: Sequence[RankFailure]) -> str:
        told = "; also ".join(str(failure) for failure in failures)
        names = ", ".join(
            str(rank) for rank in self._absent(step) if rank not in {failure.rank for failure in failures}
        )
        after = f" (given up without rank(s) {names}, which could not end {step.phase!r} after that)" if names else ""
        return told + after


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _activity(beat: _Beat, step: _Step) -> str:
    if beat.step < step.number or beat.state == "idle":
        return f"has not come to it yet, is in {beat.phase!r}"
    where = f", at {beat.where}" if beat.where else ""
    return f"{beat.phase!r} for {beat.for_s:.0f} s{where}"


def _collective_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of ``torch.distributed``'s collectives below ``frame``, if there is one."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COLLECTIVE_FILES):
            return frame
        frame = frame.f_back
    return None


def _store_port(store: Any) -> int | None:
    """The port of a TCP store's server, below any number of prefixes."""
    inner = getattr(store, "_underlying_non_prefix_store", store)
    port = getattr(inner, "port", None)
    return port if isinstance(port, int) else None


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the time limit of a group's collectives from now on. Point-to-point operations of gloo keep theirs."""
    for backend in _backends([group]):
        backend._set_default_timeout(timeout)


@contextlib.contextmanager
def patient_groups() -> Iterator[None]:
    """Take the time limit off the collectives of every process group of this process, while a checkpoint is written.

    Ranks that are done wait for those that are not inside DeepSpeed's or FSDP's own barriers, where the training back
    end's time-out (``ddp_timeout``) would end a save that is merely slow. Who is gone, the watch finds out.
    """
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    changed: list[tuple[Any, timedelta]] = []
    for backend in _backends(list(dist.distributed_c10d._world.pg_map)):
        try:
            changed.append((backend, backend.options._timeout))
            backend._set_default_timeout(UNLIMITED)
        except (AttributeError, RuntimeError):  # a back end without time-outs of its own
            logger.debug("cannot change the time-out of %r", backend, exc_info=True)
    try:
        yield
    finally:
        for backend, timeout in changed:
            with contextlib.suppress(AttributeError, RuntimeError):
                backend._set_default_timeout(timeout)


def _backends(groups: Sequence[dist.ProcessGroup]) -> list[Any]:
    """The back ends of ``groups`` for each of their devices, once."""
    found: list[Any] = []
    for group in groups:
        for device in group._device_types:
            with contextlib.suppress(RuntimeError):
                backend = group._get_backend(device)
                if all(backend is not other for other in found):
                    found.append(backend)
    return found


def cut_connections(peers: Sequence[Peer], *, spare_port: int | None) -> None:
    """End every collective of this process: each one that is under way raises.

    NCCL's groups have ``abort``. Gloo's has none that does anything (torch 2.13), but an operation of gloo raises as
    soon as a connection that it needs is closed; so all TCP connections to the job's hosts are shut down, other
    than those to the store at ``spare_port``. Nothing else that this process holds open to those hosts survives.
    """
    addresses = {address for peer in peers for address in peer.addresses}
    for connection in psutil.Process().net_connections("tcp"):
        if not connection.raddr or connection.status != psutil.CONN_ESTABLISHED:
            continue
        remote = connection.raddr.ip.removeprefix("::ffff:")
        if remote not in addresses or spare_port in (connection.raddr.port, connection.laddr.port):
            continue
        with contextlib.suppress(OSError):  # closed meanwhile
            stream = socket.socket(fileno=os.dup(connection.fd))
            try:
                stream.shutdown(socket.SHUT_RDWR)
            finally:
                stream.close()
    for group in list(dist.distributed_c10d._world.pg_map):
        abort = getattr(group, "abort", None)
        if abort is not None and torch.device("cuda") in group._device_types:
            with contextlib.suppress(RuntimeError):
                abort()
