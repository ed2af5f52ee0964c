"""Duties of a leader: periodic work without requests, behind one interface."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from forebay.cluster.server.pending import Answer, NotLeading, QueueFull
from forebay.replica.decide import is_expiry_due
from forebay.replica.messages import CONTROLLER, ExpireCachedReplies, Request
from forebay.replica.state import State
from forebay.replica.values import Instant

POLL_PERIOD_S = 1.0
"""Polling interval of a leader's duties, seconds."""


class Duty(Protocol):
    """Duty of a leader: for nodes, mail, pools of a provider, feature levels, restarts or membership."""

    def poll(self) -> None:
        """Do due work, and return at once. Called once a second while this replica leads."""

    def stop(self) -> None:
        """Abandon pending work: leadership was lost, or the replica stops."""


class Duties:
    """Duties of one replica, in the order of registration."""

    def __init__(self, *, leads: Callable[[], bool], check: Callable[[], None]) -> None:
        """Initialize. `check` is called at each polling interval, on leaders and followers."""
        self._leads = leads
        self._check = check
        self._registered: list[Duty] = []
        self._on_change: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None

    def register(self, duty: Duty, *, on_change: Callable[[], None] | None = None) -> None:
        """Register a duty to poll while this replica leads. `on_change` starts urgent work, and must not raise."""
        self._registered.append(duty)
        if on_change is not None:
            self._on_change.append(on_change)

    def start(self) -> None:
        """Start polling in the running loop."""
        self._timer = asyncio.get_running_loop().call_later(POLL_PERIOD_S, self.poll)

    def stop(self) -> None:
        """Stop polling, and make every duty abandon pending work."""
        if self._timer is not None:
            self._timer.cancel()
        for duty in self._registered:
            duty.stop()

    def poll(self) -> None:
        """Check, poll every duty if this replica leads, and schedule the next poll."""
        self.start()
        self._check()
        if self._leads():
            for duty in self._registered:
                duty.poll()

    def leadership_changed(self) -> None:
        """Start urgent work after a change of role, term or readiness."""
        for begin in self._on_change:
            begin()


class AnswerExpiry:
    """Duty to remove expired cached replies and unused sessions, some at a time (law 6)."""

    def __init__(
        self, *, state: Callable[[], State], now: Callable[[], Instant], submit: Callable[[Request], Answer]
    ) -> None:
        """Initialize. `submit` is `Controller.submit`; `now` returns the agreed time."""
        self._state = state
        self._now = now
        self._submit = submit
        self._answer: Answer | None = None

    def poll(self) -> None:
        """Submit the next removal if one is due and none is pending."""
        if self._answer is None and is_expiry_due(self._state(), self._now()):
            with suppress(QueueFull, NotLeading):
                self._answer = self._submit(Request(b"", CONTROLLER, ExpireCachedReplies()))
                self._answer.add_done_callback(self._done)

    def stop(self) -> None:
        """Drop the pending removal: the next leader submits it again."""
        self._answer = None

    def _done(self, answer: Answer) -> None:
        if answer is not self._answer:
            return
        self._answer = None
        if not answer.cancelled() and answer.exception() is None:
            self.poll()
