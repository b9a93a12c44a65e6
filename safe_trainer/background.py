"""Saves that are finished while training goes on."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from safe_trainer.save import SaveReport


class PendingSave:
    """A save that every rank has written, and that is being committed in a thread of its own.

    The thread is waited for when the interpreter exits.

    Args:
        step: the global step.
        commit: does what is left.
        on_end: called in that thread when it is over, whether it succeeded or not.

    Attributes:
        step: the global step.
    """

    def __init__(self, step: int, commit: Callable[[], SaveReport], *, on_end: Callable[[], None]) -> None:
        self.step = step
        worker = ThreadPoolExecutor(1, "safe_trainer save")

        def work() -> SaveReport:
            try:
                return commit()
            finally:
                on_end()

        self._future: Future[SaveReport] = worker.submit(work)
        worker.shutdown(wait=False)

    def done(self) -> bool:
        """Whether it is over on this rank: committed, or failed."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> SaveReport:
        """Wait until it is over; what the save did.

        Args:
            timeout_s: for how many seconds at most; None waits as long as it takes.

        Raises:
            TimeoutError: it is not over yet.
            CheckpointError: the save has failed, with the same error on every rank.
        """
        try:
            return self._future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:  # before Python 3.11 not the built-in one
            if self._future.done():
                raise
            raise TimeoutError(f"the save of step {self.step} is not over after {timeout_s} s") from error

    def error(self) -> BaseException | None:
        """Wait until it is over; what it failed with, else None."""
        return self._future.exception()
