"""Long work on the loop in slices: one slice in each turn of the loop, and callers take turns.

What is asked of history and of large states takes longer than a heartbeat may wait, and many ask at once. A caller that
only yields now and then holds the loop as often as there are callers. Here all of them share one lane: a slice is
bounded in records and in bytes, a turn of the loop has at most one, and whoever asks much waits for himself: each of
those who ask has a share before one of them has the second. Those who ask for little share one slice, so that many
small answers take no more turns than one large one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator
from heapq import merge
from itertools import chain, islice
from typing import Any, Final, NamedTuple, TypeVar

RECORDS_PER_SLICE: Final = 64
"""Records rendered in one slice, count: a job, an event or a node takes some 50 us, so three milliseconds."""

BYTES_PER_SLICE: Final = 128 * 1024
"""Bytes decoded, hashed or written in one slice: a millisecond. A single entry may have more: 1 MiB at most."""

PARTS_PER_RECORD: Final = 32
"""Looks at something that cost as much as rendering one record, count: a key compared, a number counted."""

PARTS_PER_SLICE: Final = RECORDS_PER_SLICE * PARTS_PER_RECORD

SORTED_AT_ONCE: Final = PARTS_PER_SLICE
"""Items that are sorted in one slice, count: a millisecond or two."""

_Item = TypeVar("_Item")


class _Wish(NamedTuple):
    """What somebody waits for."""

    work: Work
    future: asyncio.Future[None]
    parts: int
    size_bytes: int


class Slices:
    """The lane that all long work of one loop shares."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[_Wish]] = {}
        """What is waited for, by whose work it is; the next one first."""
        self._pump: asyncio.Handle | None = None
        self._present: list[Work] = []
        """Whose slice it is in this turn of the loop."""

    def work(self, who: Hashable) -> Work:
        """Return a piece of long work of `who`, which has to wait for its first slice."""
        return Work(self, who)

    async def turn(self, work: Work, parts: int, size_bytes: int) -> None:
        """Wait until so much may be done, or a whole slice where it is more."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        wish = _Wish(work, future, min(parts, PARTS_PER_SLICE), min(size_bytes, BYTES_PER_SLICE))
        self._waiting.setdefault(work.who, deque()).append(wish)
        if self._pump is None:
            self._pump = loop.call_soon(self._next)
        await future

    def _next(self) -> None:
        """End the present slice, and let those go on in the next turn of the loop who fit into another."""
        self._pump = None
        for work in self._present:
            work.end()
        self._present = []
        parts, size_bytes = PARTS_PER_SLICE, BYTES_PER_SLICE
        while self._waiting:
            who = next(iter(self._waiting))
            line = self._waiting[who]
            wish = line[0]
            if self._present and (wish.parts > parts or wish.size_bytes > size_bytes):
                break  # it comes first in the next one
            del self._waiting[who]
            line.popleft()
            if line:
                self._waiting[who] = line  # behind all others
            if not wish.future.done():  # whoever waited may have been cancelled
                parts, size_bytes = parts - wish.parts, size_bytes - wish.size_bytes
                wish.work.begin(wish.parts, wish.size_bytes)
                self._present.append(wish.work)
                wish.future.set_result(None)
        if self._present:
            # What nobody asked for is the last one's: alone, it has a whole slice.
            self._present[-1].add(parts, size_bytes)
            # Behind the callers' own steps, which `set_result` has put into the next turn: there their slice ends.
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

    def begin(self, parts: int, size_bytes: int) -> None:
        """Give it a share of a slice; called by the lane."""
        self._parts, self._bytes = parts, size_bytes

    def add(self, parts: int, size_bytes: int) -> None:
        """Give it more of the same slice; called by the lane."""
        self._parts, self._bytes = self._parts + parts, self._bytes + size_bytes

    def end(self) -> None:
        """Take what is left of its slice: what it does in a later turn of the loop would come on top of another's."""
        self._parts = self._bytes = 0

    async def take(self, records: int = 1, *, parts: int = 0, size_bytes: int = 0) -> None:
        """Wait until so many records, looks and bytes may be worked on; more than a whole slice gets a whole one."""
        parts += records * PARTS_PER_RECORD
        if self._parts < parts or self._bytes < size_bytes:
            await self._slices.turn(self, parts, size_bytes)
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
