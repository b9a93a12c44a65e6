"""Signals that announce the end: all ranks agree on one step, at which they save and stop.

Slurm, Kubernetes and spot instances send SIGTERM, to one process, to a node or to all, and kill some seconds later. The
ranks see it at different moments. So nobody acts on a signal alone:

1. The rank that gets it announces it through the job's store.
2. Each rank, at the end of its next step, leaves the number of that step.
3. The last one to do so publishes that number plus one. No rank can be past it: to end the step after, the others need
   the last rank's gradients. From then on every rank looks at the end of each step, and stops there.

What is not promised: an agreement between ranks that train without ever exchanging anything. They stop at the next step
after the published one, and the save refuses steps that differ.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from safe_trainer.channel import Channel

logger = logging.getLogger(__name__)

_runs = itertools.count()


class Preemption:
    """Handles signals while training runs; a context manager, entered on every rank alike.

    A handler of the user's own is called as well. What is not there: anything for signals that arrive when no training
    runs, or in a thread other than the main one (a process's signals can only be handled there).

    Args:
        channel: the control channel.
        signals: those that mean the end; none switches this off.
    """

    def __init__(self, channel: Channel, signals: Sequence[signal.Signals]) -> None:
        self._watch = channel.watch
        self._rank = channel.rank
        self._host = channel.host
        self._process = os.getpid()
        self._signals = signals
        self._name = f"stop/{next(_runs)}"
        self._previous: dict[signal.Signals, Any] = {}
        self._own: signal.Signals | None = None
        self._left_step = False
        self._stop_at: int | None = None

    def __enter__(self) -> Preemption:
        if not self._signals:
            return self
        if self._watch is not None:
            self._watch.watch_board(self._name)
        if threading.current_thread() is not threading.main_thread():
            logger.warning("Training does not run in the main thread, so this process will not save when preempted.")
            return self
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A child that was forked meanwhile (a pool's) is to end as it would have without us.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self._own is None:
            self._own = signal.Signals(number)
            if self._watch is not None:
                self._watch.announce(f"{self._own.name} on rank {self._rank} ({self._host})")
        previous = self._previous.get(signal.Signals(number))
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    @property
    def reason(self) -> str | None:
        """Which signal came first and where, e.g. ``SIGTERM on rank 2 (node1)``; None before that is known here."""
        if self._watch is not None:
            return self._watch.announcement
        return None if self._own is None else f"{self._own.name} on rank {self._rank} ({self._host})"

    @property
    def exit_code(self) -> int:
        """What a process that such a signal ends gives its launcher: 128 and the signal's number."""
        name = (self.reason or "SIGTERM").split()[0]
        return 128 + signal.Signals[name]

    def stops_at(self, step: int) -> bool:
        """Whether all ranks save and stop now; every rank asks at the end of every step."""
        if self.reason is None:
            return False
        if self._watch is None:
            return True
        published = f"{self._name}/at"
        if not self._left_step:
            self._left_step = True
            latest = self._watch.count_in(self._name, step)
            if latest is not None:
                self._stop_at = latest + 1
                self._watch.publish(published, self._stop_at)
        elif self._stop_at is None:
            self._stop_at = self._watch.published(published)
        return self._stop_at is not None and step >= self._stop_at
