"""Command IDs of a program's session: numbering, and acknowledgement up to the first unanswered one (law 6)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from forebay.cluster.client.calls import is_definite
from forebay.cluster.system import Clock
from forebay.replica.values import (
    SESSION_IDLE_S_MAX,
    SESSION_WINDOW_MAX,
    decode_session_command_id,
    encode_session_command_id,
)

if TYPE_CHECKING:
    import asyncio

REST_S: Final = SESSION_IDLE_S_MAX / 2
"""Idle time after which a new session is opened, seconds; half the limit, since the cluster's clock may run faster."""

UNKNOWN_SESSION: Final = "unknown_session"


class SessionIds:
    """Command numbers in successive sessions.

    An unanswered command stays outstanding so that it can be resent. When unanswered commands fill the window, a new
    session is opened, and the old one expires.
    """

    def __init__(self, open_session: Callable[[], Awaitable[int]], clock: Clock) -> None:
        """Start without a session. `open_session` opens one and returns its number, or raises ApiError."""
        self._open = open_session
        self._clock = clock
        self._opening: asyncio.Future[None] | None = None
        self._session = 0
        self._last = 0
        """Last assigned sequence number."""
        self._acknowledged = 0
        self._answered: set[int] = set()
        """Answered numbers above it."""
        self._used_s = 0.0

    async def next_id(self) -> str:
        """Return the ID of the next command; open a session if none is usable."""
        while not self._is_usable(now_s := self._clock.monotonic_s()):
            # A client without an event loop has no session.
            import asyncio

            if self._opening is None:
                self._opening = asyncio.ensure_future(self._begin())
            # A lock would release one waiter per loop iteration; this way all waiters send in the same one.
            await asyncio.shield(self._opening)
        self._used_s = now_s
        self._last += 1
        return encode_session_command_id(self._session, self._last, self._acknowledged).hex()

    async def _begin(self) -> None:
        try:
            session = await self._open()
            self._session, self._last, self._acknowledged, self._answered = session, 0, 0, set()
            self._used_s = self._clock.monotonic_s()
        finally:
            self._opening = None

    def _is_usable(self, now_s: float) -> bool:
        is_full = self._last - self._acknowledged >= SESSION_WINDOW_MAX
        return self._session > 0 and not is_full and now_s - self._used_s < REST_S

    def acknowledge(self, command_id: str) -> None:
        """Record that a command was answered or will not be resent."""
        sequence = self._sequence_of(command_id)
        if not self._acknowledged < sequence <= self._last:
            return
        self._answered.add(sequence)
        while self._acknowledged + 1 in self._answered:
            self._acknowledged += 1
            self._answered.remove(self._acknowledged)

    def note_rejection(self, command_id: str, status: int, code: str) -> None:
        """Record a rejection with a known outcome; a session the cluster does not know is abandoned."""
        if code == UNKNOWN_SESSION and self._sequence_of(command_id):
            self._session = 0
        elif is_definite(status, code):
            self.acknowledge(command_id)

    def _sequence_of(self, command_id: str) -> int:
        """Return a command's number in the current session; 0 for any other ID."""
        try:
            said = decode_session_command_id(bytes.fromhex(command_id))
        except ValueError:
            return 0
        return said.sequence if said.session == self._session else 0
