"""Duties of a leader: what the replica that leads does of its own accord, each behind one protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from cluster.server.pending import Answer, NotLeading, QueueFull
from replica.decide import is_expiry_due
from replica.messages import CONTROLLER, ExpireAnswers, Request
from replica.state import State
from replica.values import Instant

POLL_PERIOD_S = 1.0
"""How often a leader polls its duties, seconds."""


class Duty(Protocol):
    """One thing that a leader looks after: nodes, mail, pools of a provider, levels, restarts, membership."""

    def poll(self) -> None:
        """Do what is due, and return at once. Asked once a second while this replica leads."""

    def stop(self) -> None:
        """Give up what is under way: somebody else leads, or the replica stops."""


class Duties:
    """The duties of one replica, in the order in which they were registered."""

    def __init__(self, *, leads: Callable[[], bool], check: Callable[[], None]) -> None:
        """`check` is called as often as duties are polled, whether this replica leads or not."""
        self._leads = leads
        self._check = check
        self._registered: list[Duty] = []
        self._on_change: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None

    def register(self, duty: Duty, *, on_change: Callable[[], None] | None = None) -> None:
        """Poll a duty while this replica leads; `on_change` begins what cannot wait until then, and must not raise."""
        self._registered.append(duty)
        if on_change is not None:
            self._on_change.append(on_change)

    def start(self) -> None:
        """Poll from now on, in the running loop."""
        self._timer = asyncio.get_running_loop().call_later(POLL_PERIOD_S, self.poll)

    def stop(self) -> None:
        """Poll no more, and have every duty give up what is under way."""
        if self._timer is not None:
            self._timer.cancel()
        for duty in self._registered:
            duty.stop()

    def poll(self) -> None:
        """Check, poll every duty if this replica leads, and come again."""
        self.start()
        self._check()
        if self._leads():
            for duty in self._registered:
                duty.poll()

    def leadership_changed(self) -> None:
        """Begin what cannot wait for the next poll: role, term or readiness has changed."""
        for begin in self._on_change:
            begin()


class AnswerExpiry:
    """Answers that are kept no longer, and sessions that nobody uses: they go when due, a portion at a time (law 6)."""

    def __init__(
        self, *, state: Callable[[], State], now: Callable[[], Instant], submit: Callable[[Request], Answer]
    ) -> None:
        """`submit` as `Controller.submit`; `now` gives the agreed time."""
        self._state = state
        self._now = now
        self._submit = submit
        self._answer: Answer | None = None

    def poll(self) -> None:
        """Ask for the next portion if one is due and none is under way."""
        if self._answer is None and is_expiry_due(self._state(), self._now()):
            with suppress(QueueFull, NotLeading):
                self._answer = self._submit(Request(b"", CONTROLLER, ExpireAnswers()))
                self._answer.add_done_callback(self._done)

    def stop(self) -> None:
        """Forget what is under way: whoever leads asks again."""
        self._answer = None

    def _done(self, answer: Answer) -> None:
        if answer is not self._answer:
            return
        self._answer = None
        if not answer.cancelled() and answer.exception() is None:
            self.poll()
