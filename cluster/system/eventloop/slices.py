"""Time slices for long work on the loop: one slice per turn of the loop, shared fairly by callers.

Queries of history and large states take longer than a heartbeat may wait, and many run at once. If each merely yielded
from time to time, each turn would do one piece of work for every caller. Here all callers share one lane. A slice is
bounded in records and bytes, and a turn of the loop has at most one slice. Callers take turns, so a caller with much
work delays only itself. Small requests share a slice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator
from heapq import merge
from itertools import chain, islice
from typing import Any, Final, NamedTuple, TypeVar

RECORDS_PER_SLICE: Final = 64
"""Number of records rendered in one slice: about 50 us for a job, event or node, so three milliseconds."""

BYTES_PER_SLICE: Final = 128 * 1024
"""Bytes decoded, hashed or written in one slice: a millisecond. A single entry may be larger: 1 MiB at most."""

PARTS_PER_RECORD: Final = 32
"""Number of small steps, such as comparing a key, that cost as much as rendering one record."""

PARTS_PER_SLICE: Final = RECORDS_PER_SLICE * PARTS_PER_RECORD

SORTED_AT_ONCE: Final = PARTS_PER_SLICE
"""Number of items sorted in one slice: a millisecond or two."""

_Item = TypeVar("_Item")


class _Wish(NamedTuple):
    """Request of a waiting caller for a share of a slice."""

    work: SlicedWork
    future: asyncio.Future[None]
    parts: int
    size_bytes: int


class Slices:
    """Lane shared by all long work of one loop."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[_Wish]] = {}
        """Waiting requests by owner; the next owner comes first."""
        self._pump: asyncio.Handle | None = None
        self._present: list[SlicedWork] = []
        """Work that shares the slice of this turn of the loop."""

    def work(self, who: Hashable) -> SlicedWork:
        """Return new work of the owner `who`."""
        return SlicedWork(self, who)

    async def turn(self, work: SlicedWork, parts: int, size_bytes: int) -> None:
        """Wait until this much work may be done; the maximum is a whole slice."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        wish = _Wish(work, future, min(parts, PARTS_PER_SLICE), min(size_bytes, BYTES_PER_SLICE))
        self._waiting.setdefault(work.who, deque()).append(wish)
        if self._pump is None:
            self._pump = loop.call_soon(self._next)
        await future

    def _next(self) -> None:
        """End the present slice, and resume the callers that fit into the next one."""
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
                break  # first in the next slice
            del self._waiting[who]
            line.popleft()
            if line:
                self._waiting[who] = line  # after all others
            if not wish.future.done():  # the caller may have been cancelled
                parts, size_bytes = parts - wish.parts, size_bytes - wish.size_bytes
                wish.work.begin(wish.parts, wish.size_bytes)
                self._present.append(wish.work)
                wish.future.set_result(None)
        if self._present:
            # The last caller gets the rest of the slice, so a single caller has a whole slice.
            self._present[-1].add(parts, size_bytes)
            # `set_result` has scheduled the callers' steps for the next turn. The slice ends after them.
            self._pump = asyncio.get_running_loop().call_soon(self._next)


class SlicedWork:
    """Long work of one caller, which announces each step and waits if the slice is used up."""

    __slots__ = ("_bytes", "_parts", "_slices", "who")

    def __init__(self, slices: Slices, who: Hashable) -> None:
        self._slices = slices
        self.who = who
        """Owner. Requests of one owner are served one at a time."""
        self._parts = 0
        self._bytes = 0

    def of(self, who: Hashable) -> SlicedWork:
        """Return work of another owner in the same lane."""
        return SlicedWork(self._slices, who)

    def begin(self, parts: int, size_bytes: int) -> None:
        """Assign a share of a slice; called by the lane."""
        self._parts, self._bytes = parts, size_bytes

    def add(self, parts: int, size_bytes: int) -> None:
        """Extend the share of the same slice; called by the lane."""
        self._parts, self._bytes = self._parts + parts, self._bytes + size_bytes

    def end(self) -> None:
        """Withdraw the rest of the slice, because later steps would add to another slice."""
        self._parts = self._bytes = 0

    async def take(self, records: int = 1, *, parts: int = 0, size_bytes: int = 0) -> None:
        """Wait until this many records, parts and bytes may be processed; larger requests get one whole slice."""
        parts += records * PARTS_PER_RECORD
        if self._parts < parts or self._bytes < size_bytes:
            await self._slices.turn(self, parts, size_bytes)
        self._parts -= parts
        self._bytes -= size_bytes

    async def sort(
        self, items: Iterable[_Item], *, key: Callable[[_Item], Any] | None = None, reverse: bool = False
    ) -> Iterator[_Item]:
        """Return the items in the order of `sorted`: sorted a slice at a time, and merged lazily."""
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


async def iterate_paced(items: Iterable[_Item], work: SlicedWork, parts: int = 0) -> AsyncIterator[_Item]:
    """Yield each item when its share of a slice is available: one record, or `parts` small steps."""
    for item in items:
        await work.take(0 if parts else 1, parts=parts)
        yield item
