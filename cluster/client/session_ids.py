"""The ids of a program's commands, numbered in its session: which are answered, and up to where all are (law 6)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from cluster.client.calls import is_definite
from cluster.system import Clock
from replica.values import SESSION_IDLE_S_MAX, SESSION_WINDOW_MAX, numbered, session_command_id

if TYPE_CHECKING:
    import asyncio

REST_S: Final = SESSION_IDLE_S_MAX / 2
"""Seconds without a command after which another session is opened: the cluster's clock may go at another speed."""

UNKNOWN_SESSION: Final = "unknown_session"


class SessionIds:
    """Numbers for commands in one session after the other.

    One that was never answered keeps its place among those that are outstanding, so that it can be sent again; where
    they fill the window, another session is opened, and the former ends by itself.
    """

    def __init__(self, open_session: Callable[[], Awaitable[int]], clock: Clock) -> None:
        """`open_session` opens one and returns its number; ApiError if it cannot."""
        self._open = open_session
        self._clock = clock
        self._opening: asyncio.Future[None] | None = None
        self._session = 0
        self._last = 0
        """The sequence number that was given out last."""
        self._acknowledged = 0
        self._answered: set[int] = set()
        """Those above it that were answered."""
        self._used_s = 0.0

    async def next_id(self) -> str:
        """Return the id for one more command; opens a session where there is none that can be used."""
        while not self._is_usable(now_s := self._clock.monotonic_s()):
            # A client without a loop has no session.
            import asyncio

            if self._opening is None:
                self._opening = asyncio.ensure_future(self._begin())
            # Not a lock, which lets one on a turn of the loop: whoever waited sends in the same one.
            await asyncio.shield(self._opening)
        self._used_s = now_s
        self._last += 1
        return session_command_id(self._session, self._last, self._acknowledged).hex()

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
        """Take note that a command's answer is here, or that nobody will ask for it again."""
        sequence = self._sequence_of(command_id)
        if not self._acknowledged < sequence <= self._last:
            return
        self._answered.add(sequence)
        while self._acknowledged + 1 in self._answered:
            self._acknowledged += 1
            self._answered.remove(self._acknowledged)

    def note_rejection(self, command_id: str, status: int, code: str) -> None:
        """Take note of a refusal, of no unknown outcome: a session that the cluster does not have is used no more."""
        if code == UNKNOWN_SESSION and self._sequence_of(command_id):
            self._session = 0
        elif is_definite(status, code):
            self.acknowledge(command_id)

    def _sequence_of(self, command_id: str) -> int:
        """Return the number of a command in the present session; 0 for any other id, whoever wrote it."""
        try:
            said = numbered(bytes.fromhex(command_id))
        except ValueError:
            return 0
        return said.sequence if said.session == self._session else 0
