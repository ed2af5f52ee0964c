"""Turns of callers at a bounded resource, so that a caller with many requests does not delay the others."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from typing import Final


class Turns:
    """Admits a bounded number of callers at a time, fewer of each identity. Identities alternate."""

    def __init__(self, most: int, most_each: int) -> None:
        """`most`: maximum number of turns at a time; `most_each`: maximum for one identity."""
        self._most: Final = most
        self._most_each: Final = most_each
        self._having: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """Waiting callers by identity; the identity with the latest turn is at the end."""

    @asynccontextmanager
    async def turn(self, who: Hashable) -> AsyncIterator[None]:
        """Wait for a turn, and hold it until the end of the context."""
        if self._waiting or self._having.total() >= self._most or self._having[who] >= self._most_each:
            await self._wait(who)
        else:
            self._having[who] += 1
        try:
            yield
        finally:
            self._end(who)

    async def _wait(self, who: Hashable) -> None:
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, deque()).append(admitted)
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():
                self._end(who)
            raise

    def _end(self, who: Hashable) -> None:
        self._having[who] -= 1
        if not self._having[who]:
            del self._having[who]
        self._admit()

    def _admit(self) -> None:
        for who, waiting in [*self._waiting.items()]:
            if self._having.total() >= self._most:
                return
            while waiting and waiting[0].cancelled():
                waiting.popleft()
            if waiting and self._having[who] >= self._most_each:
                continue
            del self._waiting[who]
            if waiting:
                waiting.popleft().set_result(None)
                self._having[who] += 1
            if waiting:
                self._waiting[who] = waiting
