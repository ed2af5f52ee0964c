"""Sorted set of keys with fast insertion and deletion: a list of short sorted lists.

With a single list of 100,000 keys, each change would move half a megabyte; here it moves one short list.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Any)

CHUNK_KEYS_MAX = 512
"""Keys in one short list, count: even at twice that many, finding and moving cost about the same."""


class SortedKeys(Generic[K]):
    """A set that iterates in ascending order. It must not change during iteration."""

    __slots__ = ("_chunks", "_greatest")

    def __init__(self, keys: Sequence[K] = ()) -> None:
        """Create the set from `keys`, which must be ascending and distinct."""
        starts = range(0, len(keys), CHUNK_KEYS_MAX)
        self._chunks: list[list[K]] = [list(keys[start : start + CHUNK_KEYS_MAX]) for start in starts]
        self._greatest: list[K] = [chunk[-1] for chunk in self._chunks]
        """The last key of each chunk."""

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __iter__(self) -> Iterator[K]:
        for chunk in self._chunks:
            yield from chunk

    @property
    def first(self) -> K:
        """Return the smallest key.

        Raises:
            IndexError: the set is empty.
        """
        return self._chunks[0][0]

    def first_after(self, key: K) -> K | None:
        """Return the smallest key greater than `key`, or None."""
        index = bisect_right(self._greatest, key)
        if index == len(self._chunks):
            return None
        chunk = self._chunks[index]
        return chunk[bisect_right(chunk, key)]

    def rank(self, key: K) -> int:
        """Return the number of keys smaller than `key`."""
        index = bisect_left(self._greatest, key)
        before = sum(map(len, self._chunks[:index]))
        return before if index == len(self._chunks) else before + bisect_left(self._chunks[index], key)

    def add(self, key: K) -> None:
        """Add a key that is not in the set."""
        if not self._chunks:
            self._chunks.append([key])
            self._greatest.append(key)
            return
        index = min(bisect_left(self._greatest, key), len(self._chunks) - 1)
        chunk = self._chunks[index]
        insort(chunk, key)
        if len(chunk) > CHUNK_KEYS_MAX:
            # Keys mostly arrive in ascending order: the last chunk then stays full instead of half full.
            at = CHUNK_KEYS_MAX if chunk[-1] is key else CHUNK_KEYS_MAX // 2
            self._chunks.insert(index + 1, chunk[at:])
            self._greatest.insert(index, chunk[at - 1])
            del chunk[at:]
            index += chunk[-1] < key
        self._greatest[index] = self._chunks[index][-1]

    def discard(self, key: K) -> None:
        """Remove a key if the set has it."""
        index = bisect_left(self._greatest, key)
        if index == len(self._chunks):
            return
        chunk = self._chunks[index]
        place = bisect_left(chunk, key)
        if chunk[place] != key:
            return
        del chunk[place]
        if chunk:
            self._greatest[index] = chunk[-1]
        else:
            del self._chunks[index], self._greatest[index]
