"""Signals that announce the end: all ranks agree on one step, at which they save and stop.

Slurm, Kubernetes and spot instances send SIGTERM, to one process, to a node or to all, and kill some seconds later. The
ranks see it at different moments, so nobody acts on a signal alone: see :mod:`~safe_trainer.agreement`. Ranks that
train without ever exchanging anything may stop at different steps, and the save refuses that.
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

from safe_trainer.agreement import Agreement
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
        self._channel = channel
        self._rank = channel.rank
        self._host = channel.host
        self._process = os.getpid()
        self._signals = signals
        self._previous: dict[signal.Signals, Any] = {}
        self._agreement: Agreement | None = None

    def __enter__(self) -> Preemption:
        if not self._signals:
            return self
        self._agreement = Agreement(self._channel, f"stop/{next(_runs)}")
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
        if self._agreement is not None:
            self._agreement.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A child that was forked meanwhile (a pool's) is to end as it would have without us.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self._agreement is not None:
            self._agreement.announce(f"{signal.Signals(number).name} on rank {self._rank} ({self._host})")
        previous = self._previous.get(signal.Signals(number))
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    @property
    def reason(self) -> str | None:
        """Which signal came first and where, e.g. ``SIGTERM on rank 2 (node1)``; None before that is known here."""
        return None if self._agreement is None else self._agreement.announcement

    @property
    def exit_code(self) -> int:
        """What a process that such a signal ends gives its launcher: 128 and the signal's number."""
        name = (self.reason or "SIGTERM").split()[0]
        return 128 + signal.Signals[name]

    def stops_at(self, step: int) -> bool:
        """Whether all ranks save and stop now; every rank asks at the end of every step."""
        return self._agreement is not None and self._agreement.is_reached(step)
