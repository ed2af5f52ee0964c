"""Cached replies to single commands, by command ID, in the order of their revisions (law 6).

IDs are practically random, so a persistent tree would copy a path of nodes for each command and share little between
States. The replies lie in layers instead, each a plain dict that never changes once it is in a State. A batch adds a
layer, small neighbours are merged, and full layers are shared by all States. A lookup tries each layer, about a dozen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar, overload

from forebay.replica.messages import Actor, CachedReply
from forebay.replica.values import LedgerViolation

LAYER_FULL = 16_384
"""Receipts above which a layer is not merged, count: merging two smaller ones takes a millisecond, and at most 32 full
layers hold all receipts.
"""

T = TypeVar("T")


class _Layer(NamedTuple):
    """Receipts of consecutive settled commands. Immutable."""

    by_id: dict[bytes, CachedReply]
    ids: list[bytes]
    """In the order of revisions."""


class DropSummary(NamedTuple):
    """Summary of deleted entries: the greatest ID, hence the latest client time, and their number for each actor."""

    greatest_id: bytes
    of: Counter[Actor]


class SingleReplies:
    """Cached replies: an immutable map from command ID, iterated in the order of revisions."""

    __slots__ = ("_first", "_layers", "_newest_first", "_skipped", "_total")

    def __init__(self, receipts: Iterable[tuple[bytes, CachedReply]] = ()) -> None:
        """Build the map from (ID, receipt) pairs with rising revisions.

        Raises:
            LedgerViolation: revisions do not rise, or an ID repeats.
        """
        self._set((), 0, 0, 0)
        builder = SingleRepliesBuilder(self)
        for command_id, receipt in receipts:
            builder.add(command_id, receipt)
        made = builder.finish()
        self._set(made._layers, 0, 0, made._total)

    def _set(self, layers: tuple[_Layer, ...], skipped: int, first: int, total: int) -> None:
        self._layers = layers
        self._newest_first = tuple(layer.by_id for layer in reversed(layers))
        self._skipped = skipped
        """Number of deleted entries at the front of the first layer."""
        self._first = first
        """Lower bound of the revisions of kept receipts."""
        self._total = total

    @overload
    def get(self, key: bytes, /) -> CachedReply | None: ...
    @overload
    def get(self, key: bytes, default: CachedReply | T, /) -> CachedReply | T: ...
    def get(self, key: bytes, default: CachedReply | T | None = None, /) -> CachedReply | T | None:
        """Return the receipt of a command ID, or `default`."""
        for by_id in self._newest_first:
            found = by_id.get(key)
            if found is not None:
                return found if found.revision >= self._first else default
        return default

    def __getitem__(self, key: bytes, /) -> CachedReply:
        found = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def __contains__(self, key: object, /) -> bool:
        return isinstance(key, bytes) and self.get(key) is not None

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[bytes]:
        return (command_id for command_id, _ in self.items())

    def items(self) -> Iterator[tuple[bytes, CachedReply]]:
        """Yield (ID, receipt), oldest first."""
        skipped = self._skipped
        for layer in self._layers:
            for position in range(skipped, len(layer.ids)):
                command_id = layer.ids[position]
                yield command_id, layer.by_id[command_id]
            skipped = 0

    def mutate(self) -> SingleRepliesBuilder:
        """Return a builder of the next map."""
        return SingleRepliesBuilder(self)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, SingleReplies) and len(self) == len(other) and list(self.items()) == list(other.items())
        )

    __hash__ = None  # type: ignore[assignment]  # compared in tests only; a hash would walk over everything

    def __repr__(self) -> str:
        return f"Receipts({list(self.items())!r})"


class SingleRepliesBuilder:
    """Cached replies under modification, part of a StateBuilder."""

    __slots__ = ("_absent", "_added", "_base", "_first", "_ids", "_layer", "_newest", "_skipped", "_total")

    def __init__(self, base: SingleReplies) -> None:
        self._base = base
        self._added: dict[bytes, CachedReply] = {}
        self._absent = b""
        """The ID last found missing in the base, because a lookup usually precedes its addition."""
        self._ids: list[bytes] = []
        self._first = base._first
        self._total = base._total
        self._layer = 0
        """The layer of the oldest kept receipt; one beyond the base's is that of the additions."""
        self._skipped = base._skipped
        newest = base._layers[-1] if base._layers else None
        self._newest = newest.by_id[newest.ids[-1]].revision if newest else 0

    @overload
    def get(self, key: bytes, /) -> CachedReply | None: ...
    @overload
    def get(self, key: bytes, default: CachedReply | T, /) -> CachedReply | T: ...
    def get(self, key: bytes, default: CachedReply | T | None = None, /) -> CachedReply | T | None:
        """Return the receipt of a command ID, or `default`."""
        found = self._added.get(key)
        if found is None:
            for by_id in self._base._newest_first:
                found = by_id.get(key)
                if found is not None:
                    break
            else:
                return default
        return found if found.revision >= self._first else default

    def __getitem__(self, key: bytes, /) -> CachedReply:
        found = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def __contains__(self, key: object, /) -> bool:
        if key in self._added:
            return self._added[key].revision >= self._first
        for by_id in self._base._newest_first:
            if key in by_id:
                return by_id[key].revision >= self._first
        if isinstance(key, bytes):
            self._absent = key
        return False

    def __len__(self) -> int:
        return self._total

    def add(self, command_id: bytes, receipt: CachedReply) -> None:
        """Add a receipt.

        Raises:
            LedgerViolation: the ID has a kept receipt, or the revision does not rise.
        """
        added = self._added
        if command_id in added:
            raise LedgerViolation(f"command {command_id.hex()} was settled twice")
        if command_id is not self._absent:
            for by_id in self._base._newest_first:
                if command_id in by_id:
                    if by_id[command_id].revision >= self._first:
                        raise LedgerViolation(f"command {command_id.hex()} was settled twice")
                    break
        if receipt.revision <= self._newest:
            raise LedgerViolation(f"the receipt of revision {receipt.revision} comes after that of {self._newest}")
        self._newest = receipt.revision
        added[command_id] = receipt
        self._ids.append(command_id)
        self._total += 1

    def drop_through(self, revision: int) -> DropSummary:
        """Delete the receipts up to a revision; return a summary."""
        greatest, of = b"", Counter[Actor]()
        for by_id, ids in (*self._base._layers[self._layer :], _Layer(self._added, self._ids)):
            place = self._skipped
            while place < len(ids) and by_id[ids[place]].revision <= revision:
                greatest = max(greatest, ids[place])
                of[by_id[ids[place]].actor] += 1
                place += 1
            if place < len(ids) or ids is self._ids:
                self._skipped = place
                break
            self._layer, self._skipped = self._layer + 1, 0
        self._total -= of.total()
        self._first = max(self._first, revision + 1)
        return DropSummary(greatest, of)

    def finish(self) -> SingleReplies:
        """Return the new map; the builder must not be used afterwards."""
        layers = [*self._base._layers[self._layer :]]
        if self._ids:
            layers.append(_Layer(self._added, self._ids))
        while len(layers) > 1 and _is_to_be_merged(layers[-2], layers[-1]):
            newer = layers.pop()
            older = layers.pop()
            # An ID that was deleted and settled again is in both layers: the newer receipt counts, at its own position.
            layers.append(_Layer(older.by_id | newer.by_id, older.ids + newer.ids))
        skipped = self._skipped
        while layers and skipped >= len(layers[0].ids):
            skipped -= len(layers.pop(0).ids)
        made = SingleReplies.__new__(SingleReplies)
        made._set(tuple(layers), skipped, self._first, self._total)
        return made


def _is_to_be_merged(older: _Layer, newer: _Layer) -> bool:
    # Sizes at least double from layer to layer, so that layers are few and each receipt is copied only a few times.
    return len(older.ids) < LAYER_FULL and len(older.ids) <= 2 * len(newer.ids)
