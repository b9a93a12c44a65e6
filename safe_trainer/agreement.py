"""All ranks agree on one step at which to do something that happens to some of them at any moment.

A signal comes to one rank; a save in the background ends on each rank at a moment of its own. If each acted on it by
itself, some would leave a collective that others are in. So nobody acts alone:

1. A rank to which it has happened announces it through the job's store.
2. Each rank that knows of it leaves, at the end of its next step, the number of that step.
3. The last one to do so publishes that number plus one. No rank can be past it: to end the step after, the others need
   the last rank's gradients. From then on every rank looks at the end of each step, and acts there.

What is not promised: an agreement between ranks that train without ever exchanging anything. They act at the next step
after the published one.
"""

from __future__ import annotations

from safe_trainer.channel import Channel


class Agreement:
    """One such thing; made on every rank alike.

    Args:
        channel: the control channel.
        name: the same on every rank, and used once in the job.
    """

    def __init__(self, channel: Channel, name: str) -> None:
        self._watch = channel.watch
        self._name = name
        self._own: str | None = None
        self._seen: str | None = None
        self._left_step = False
        self._at: int | None = None
        if self._watch is not None:
            self._watch.watch_board(name)

    def close(self) -> None:
        """Look no more; what is known by now stays known."""
        self._seen = self.announcement
        if self._watch is not None:
            self._watch.leave_board(self._name)

    def announce(self, text: str) -> None:
        """It has happened here; may be called from any thread and from a signal handler. The first text counts."""
        if self._own is None:
            self._own = text
            if self._watch is not None:
                self._watch.announce(self._name, text)

    @property
    def announcement(self) -> str | None:
        """The text of whoever announced it first, as soon as that is known here."""
        if self._watch is None:
            return self._own
        return self._seen or self._watch.announcement(self._name)

    def is_reached(self, step: int) -> bool:
        """Whether all ranks act at the end of this step; every rank asks at the end of every step."""
        if self.announcement is None:
            return False
        if self._watch is None:
            return True
        published = f"{self._name}/at"
        if not self._left_step:
            self._left_step = True
            latest = self._watch.count_in(self._name, step)
            if latest is not None:
                self._at = latest + 1
                self._watch.publish(published, self._at)
        elif self._at is None:
            self._at = self._watch.published(published)
        return self._at is not None and step >= self._at
