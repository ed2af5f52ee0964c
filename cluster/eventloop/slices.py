"""Long work on the loop in slices: one slice of one caller in each turn of the loop, and callers take turns.

What is asked of history and of large states takes longer than a heartbeat may wait, and many ask at once. A caller that
only yields now and then holds the loop as often as there are callers. Here all of them share one lane: a slice is
bounded in records and in bytes, a turn of the loop has at most one, and whoever asks much waits for himself: each of
those who ask has a slice before one of them has the second.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator
from heapq import merge
from itertools import chain, islice
from typing import Any, Final, TypeVar

RECORDS_PER_SLICE: Final = 64
"""Records rendered in one slice, count: a job, an event or a node takes some 50 us, so three milliseconds."""

BYTES_PER_SLICE: Final = 128 * 1024
"""Bytes decoded, hashed or written in one slice: a millisecond. A single entry may have more: 1 MiB at most."""

PARTS_PER_RECORD: Final = 32
"""Looks at something that cost as much as rendering one record, count: a key compared, a number counted."""

SORTED_AT_ONCE: Final = RECORDS_PER_SLICE * PARTS_PER_RECORD
"""Items that are sorted in one slice, count: a millisecond or two."""

_Item = TypeVar("_Item")


class Slices:
    """The lane that all long work of one loop shares."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[tuple[Work, asyncio.Future[None]]]] = {}
        """Who waits for a slice, by whose work it is; the next one first."""
        self._pump: asyncio.Handle | None = None
        self._present: Work | None = None
        """Whose slice it is in this turn of the loop."""

    def work(self, who: Hashable) -> Work:
        """Return a piece of long work of `who`, which has to wait for its first slice."""
        return Work(self, who)

    async def turn(self, work: Work) -> None:
        """Wait for the next slice."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(work.who, deque()).append((work, future))
        if self._pump is None:
            self._pump = loop.call_soon(self._next)
        await future

    def _next(self) -> None:
        """End the present slice, and let one caller go on in the next turn of the loop."""
        self._pump = None
        if self._present is not None:
            self._present.end()
            self._present = None
        while self._waiting and self._present is None:
            who = next(iter(self._waiting))
            line = self._waiting.pop(who)
            work, future = line.popleft()
            if line:
                self._waiting[who] = line  # behind all others
            if not future.done():  # whoever waited may have been cancelled
                work.begin()
                self._present = work
                future.set_result(None)
        if self._present is not None:
            # Behind the caller's own step, which `set_result` has put into the next turn: there its slice ends.
            self._pump = asyncio.get_running_loop().call_soon(self._next)


class Work:
    """Long work of one caller: it says what it is about to do, and waits where its slice has no room for that."""

    __slots__ = ("_bytes", "_parts", "_slices", "who")

    def __init__(self, slices: Slices, who: Hashable) -> None:
        self._slices = slices
        self.who = who
        """Who waits for himself, and for nobody else."""
        self._parts = 0
        self._bytes = 0

    def of(self, who: Hashable) -> Work:
        """Return a piece of work in the same lane that `who` waits for."""
        return Work(self._slices, who)

    def begin(self) -> None:
        """Give it a whole slice; called by the lane."""
        self._parts, self._bytes = RECORDS_PER_SLICE * PARTS_PER_RECORD, BYTES_PER_SLICE

    def end(self) -> None:
        """Take what is left of its slice: what it does in a later turn of the loop would come on top of another's."""
        self._parts = self._bytes = 0

    async def take(self, records: int = 1, *, parts: int = 0, size_bytes: int = 0) -> None:
        """Wait until so many records, looks and bytes may be worked on; more than a whole slice gets a whole one."""
        parts += records * PARTS_PER_RECORD
        if self._parts < parts or self._bytes < size_bytes:
            await self._slices.turn(self)
        self._parts -= parts
        self._bytes -= size_bytes

    async def ordered(
        self, items: Iterable[_Item], *, key: Callable[[_Item], Any] | None = None, reverse: bool = False
    ) -> Iterator[_Item]:
        """Return the items in order, as `sorted` does: sorted a slice at a time, and merged as they are asked for."""
        runs: list[list[_Item]] = []
        rest = iter(items)
        while True:
            await self.take(0, parts=SORTED_AT_ONCE)
            taken: list[Any] = list(islice(rest, SORTED_AT_ONCE))
            if not taken:
                break
            taken.sort(key=key, reverse=reverse)
            runs.append(taken)
        if len(runs) < 2:
            return chain(*runs)
        merged: Iterator[Any] = merge(*runs, key=key, reverse=reverse)
        return merged


async def paced(items: Iterable[_Item], work: Work, parts: int = 0) -> AsyncIterator[_Item]:
    """Yield the items, each when it may be worked on: as a record, or as so many looks where `parts` says so."""
    for item in items:
        await work.take(0 if parts else 1, parts=parts)
        yield item
