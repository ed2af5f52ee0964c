"""Merkle tree over a ledger's entries, derived from committed entries, in files that can be rebuilt.

The tree depends on the entries alone, so all replicas have the same tree, and none of it goes through consensus. Leaf
i - 1 belongs to entry i (`security.proofs.leaves`). Full tiles and bundles are files with a trailing checksum. The
right edge, at most 255 hashes a level, is in memory; a start restores it from the full tiles below it. Missing or
damaged files are rebuilt when they are read.

Intact files may belong to another history if the ledger was rewritten beside them. They are therefore compared with the
ledger continuously and slowly (`check`). A replica signs only the root that its ledger gives.

If a snapshot replaced entries, the tree ends before them until they are fetched.
"""

from __future__ import annotations

import logging
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from forebay.cluster.security.proofs import (
    HASH_BYTES,
    Leaf,
    Tile,
    bundle,
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    leaf_of,
    leaves_in,
    node_hash,
    nodes_in_tiles,
    parse_leaf,
    root_of,
)
from forebay.cluster.security.proofs.tiles import MAX_TILE_LEVEL, TILE_LEVELS, TILE_WIDTH
from forebay.cluster.system import make_private_directory, replace_private
from forebay.replica.messages import DisclosureKeyDrawn, ReleaseNeeded
from forebay.wal import CodecError, Ledger, LedgerBroken, LedgerEntry, commands_of, decode_batch

LOGGER = logging.getLogger(__name__)

LOG_DIRECTORY = "tlog"
"""Directory of a replica's tree, inside its own."""

STEP_ENTRIES = 128
STEP_BYTES = 64 * 1024
"""Limits of one step: entries, and their bytes without the last entry's; two or three milliseconds of processor."""

FOUNDED_WITHIN = 64
"""Number of entries searched for the first command, which draws the key. Few entries precede that command."""

TILES_KEPT = 64
"""Number of verified files in memory: half a megabyte. A proof reads a dozen."""

_SUM_BYTES = 4


class NoDisclosureKey(LookupError):
    """The ledger has no key to salt leaves."""


class NotInTree(LookupError):
    """The requested entry lies beyond the end of the tree; the message names the tree's size."""


def disclosure_key_of(ledger: Ledger) -> bytes:
    """Return the key that salts a ledger's leaves.

    Raises:
        NoDisclosureKey: The ledger has no key, or this replica lacks the first command.
        LedgerBroken: An entry is damaged.
    """
    found = disclosure_key_in(ledger.read(1, limit=FOUNDED_WITHIN))
    if found is None:
        raise NoDisclosureKey(
            "the ledger's first command is not available on this replica"
            if ledger.first_index > 1
            else "the cluster was founded without a key for salting proofs"
        )
    return found


def disclosure_key_in(entries: Iterable[LedgerEntry]) -> bytes | None:
    """Return the key drawn by the first command among a ledger's first entries, or None."""
    for entry in entries:
        if entry.revision == entry.base:
            continue
        for command in decode_batch(entry.data).entries:
            for event in command.events:
                if isinstance(event, DisclosureKeyDrawn):
                    return event.disclosure_key
        return None
    return None


def leaf_of_entry(disclosure_key: bytes, entry: LedgerEntry) -> Leaf:
    """Return the leaf of an entry. Void entries and entries of consensus have no commands.

    Raises:
        CodecError: The entry cannot be decoded.
    """
    settled = commands_of(entry.data)
    is_void = settled is None or entry.revision == entry.base
    return leaf_of(
        disclosure_key,
        index=entry.index,
        term=entry.term,
        data=entry.data,
        base=entry.base,
        revision=entry.revision,
        at=0 if settled is None else settled.at,
        commands=() if settled is None or is_void else settled.encoded,
    )


class LedgerTree:
    """Tree over one replica's ledger, for one process at a time."""

    def __init__(self, look: Callable[[], Ledger], directory: Path, *, readonly: bool = False) -> None:
        """Read the key, and restore the tree from its files.

        `look` returns the present ledger, read beside the replica. `directory` is the location of the files, which are
        written unless `readonly`.

        Raises:
            NoDisclosureKey: The ledger has no key to salt its leaves.
            LedgerBroken: An entry is damaged.
            OSError: The directory cannot be created.
        """
        self._look = look
        self._ledger = look()
        self._directory = directory
        self._readonly = readonly
        self._key = disclosure_key_of(self._ledger)
        self._kept: OrderedDict[Tile, bytes] = OrderedDict()
        self._made_again = 0
        self._is_stuck = False
        self._edges = [bytearray() for _ in range(MAX_TILE_LEVEL + 1)]
        """Hashes of the incomplete tile, by tile level."""
        self._leaves: list[bytes] = []
        """Leaves of the incomplete bundle."""
        self._checked_tile = 0
        """Number of the next full tile to compare with the ledger."""
        self._checked: list[bytes] = []
        """Leaves of `_checked_tile` derived so far."""
        self.altered: list[int] = []
        """First entries of intact tiles that differed from the ledger."""
        self.size = 0
        """Number of leaves in the tree, and the index of its last entry."""
        self._begin()

    @property
    def made_again(self) -> int:
        """Number of missing or damaged files that were rebuilt."""
        return self._made_again

    @property
    def verified(self) -> int:
        """Last entry whose tile was compared in this round; after the round, the last entry of the tree."""
        return self._checked_tile * TILE_WIDTH or self.size

    def step(self) -> bool:
        """Derive the leaves of a few more entries; return whether entries are left."""
        if self.size >= self._ledger.applied_index:
            self._ledger = self._look()
        following = self.size + 1
        try:
            for entry in self._ledger.read_some(following, entries_max=STEP_ENTRIES, bytes_max=STEP_BYTES):
                if entry.index != self.size + 1:
                    break  # a gap, until it is filled
                self._append(self._leaf(entry).encode())
        except LedgerBroken as error:
            if not self._is_stuck:
                LOGGER.error(
                    "the tree of the ledger stops at entry %d until the ledger is repaired: %s", self.size, error
                )
            self._is_stuck = True
            self._ledger = self._look()
            return False
        if self.size < following:
            self._ledger = self._look()
            return False
        self._is_stuck = False
        return self.size < self._ledger.applied_index

    def check(self) -> bool:
        """Compare a few leaves of the full tiles with the ledger; return whether the round continues.

        A differing tile is replaced, and so are the tiles above it.
        """
        if self._checked_tile >= self.size // TILE_WIDTH:
            self._checked_tile = 0
            self._checked.clear()
            return False
        first = self._checked_tile * TILE_WIDTH + 1 + len(self._checked)
        left = TILE_WIDTH - len(self._checked)
        try:
            held = self._ledger.read_some(first, entries_max=min(left, STEP_ENTRIES), bytes_max=STEP_BYTES)
            leaves = [self._leaf(one).encode() for at, one in enumerate(held, start=first) if one.index == at]
        except LedgerBroken:  # repaired or reported by the scrub
            leaves = []
        self._checked += leaves
        if len(self._checked) == TILE_WIDTH:
            self._compare_tile(self._checked_tile, self._checked)
        if not leaves or len(self._checked) == TILE_WIDTH:
            self._checked_tile += 1
            self._checked = []
        return True

    def root(self, size: int) -> bytes:
        """Return the root over the first `size` leaves.

        Raises:
            NotInTree: The tree has fewer leaves.
            LedgerBroken: A tile and its entries are damaged.
        """
        self._check(size)
        return root_of(size, nodes_in_tiles(size, self.tile))

    def inclusion(self, index: int, size: int) -> list[bytes]:
        """Return the inclusion proof of the entry at `index` in the tree of `size` leaves. Raises as `root`."""
        self._check(size)
        return inclusion_proof(index - 1, size, nodes_in_tiles(size, self.tile))

    def consistency(self, old_size: int, size: int) -> list[bytes]:
        """Return the consistency proof between the trees of `old_size` and `size` leaves. Raises as `root`."""
        self._check(size)
        return consistency_proof(old_size, size, nodes_in_tiles(size, self.tile))

    def leaf(self, index: int) -> Leaf:
        """Return the leaf of an entry. Raises as `root`."""
        self._check(index)
        number, position = divmod(index - 1, TILE_WIDTH)
        held = self.tile(Tile(None, number, min(TILE_WIDTH, self.size - number * TILE_WIDTH)))
        return parse_leaf(leaves_in(held)[position])

    @property
    def disclosure_key(self) -> bytes:
        """Key that salts the tree's leaves."""
        return self._key

    def tile(self, tile: Tile) -> bytes:
        """Return a tile or bundle of any present or past width. Raises as `root`."""
        level = tile.level or 0
        full_tiles = self.size >> TILE_LEVELS * (level + 1)
        if tile.index < full_tiles:
            whole = self._full(Tile(tile.level, tile.index))
        else:
            begun = self._leaves if tile.level is None else self._edges[level]
            if tile.index > full_tiles or tile.width > (self.size >> TILE_LEVELS * level) - tile.index * TILE_WIDTH:
                raise NotInTree(f"the tree has {self.size} leaves, and no {tile.path} yet")
            whole = bundle(begun) if isinstance(begun, list) else bytes(begun)
        if tile.level is None:
            return whole if tile.width == TILE_WIDTH else bundle(leaves_in(whole)[: tile.width])
        return whole[: tile.width * HASH_BYTES]

    def _begin(self) -> None:
        """Start at the end of the full tiles, or at the end of the ledger if the ledger is shorter."""
        tiles = self._tiles_there(self._ledger.applied_index // TILE_WIDTH)
        self.size = tiles * TILE_WIDTH
        for level in range(1, MAX_TILE_LEVEL + 1):
            below = self.size >> TILE_LEVELS * level
            first = below - below % TILE_WIDTH
            for index in range(first, below):
                self._edges[level] += _root(self._full(Tile(level - 1, index)))
        self._kept.clear()

    def _tiles_there(self, most: int) -> int:
        """Return the number of full tiles of the lowest level. They were written in order, so bisection finds it."""
        low = 0
        while low < most:
            middle = (low + most + 1) // 2
            if self._path(Tile(0, middle - 1)).exists():
                low = middle
            else:
                most = middle - 1
        return low

    def _leaf(self, entry: LedgerEntry) -> Leaf:
        try:
            return leaf_of_entry(self._key, entry)
        except ReleaseNeeded:
            raise
        except CodecError as error:
            raise LedgerBroken(entry.index, str(error)) from error

    def _append(self, leaf: bytes) -> None:
        self._leaves.append(leaf)
        node, level = leaf_hash(leaf), 0
        self._edges[0] += node
        self.size += 1
        number = (self.size - 1) // TILE_WIDTH
        if len(self._leaves) == TILE_WIDTH:
            self._write(Tile(None, number), bundle(self._leaves))
            self._leaves.clear()
        while len(self._edges[level]) == TILE_WIDTH * HASH_BYTES and level < MAX_TILE_LEVEL:
            whole = bytes(self._edges[level])
            self._write(Tile(level, number), whole)
            self._edges[level].clear()
            level, number = level + 1, number // TILE_WIDTH
            self._edges[level] += _root(whole)

    def _full(self, tile: Tile) -> bytes:
        """Return a full tile or bundle from its file; rebuild it if the file is missing or damaged."""
        kept = self._kept.get(tile)
        if kept is None:
            kept = self._read(tile)
            if kept is None:
                kept = self._derived(tile)
                self._made_again += 1
                self._write(tile, kept)
            self._keep(tile, kept)
        else:
            self._kept.move_to_end(tile)
        return kept

    def _compare_tile(self, number: int, leaves: Sequence[bytes]) -> None:
        """Compare the files of a full tile with its leaves, and correct differences."""
        whole = b"".join(map(leaf_hash, leaves))
        for tile, body in ((Tile(None, number), bundle(leaves)), (Tile(0, number), whole)):
            held = self._read(tile)
            if held == body:
                continue
            self._made_again += 1
            self._write(tile, body)
            self._keep(tile, body)
            if held is not None and number * TILE_WIDTH + 1 not in self.altered:
                self.altered.append(number * TILE_WIDTH + 1)
                LOGGER.error(
                    "%s is intact but contradicts the ledger from entry %d on: one of them was altered",
                    self._path(tile),
                    number * TILE_WIDTH + 1,
                )
        self._put_above(number, _root(whole))

    def _put_above(self, number: int, node: bytes) -> None:
        """Write the root of a full tile of the lowest level to the tiles above it."""
        for level in range(1, MAX_TILE_LEVEL + 1):
            at = number % TILE_WIDTH * HASH_BYTES
            number //= TILE_WIDTH
            if number >= self.size >> TILE_LEVELS * (level + 1):
                self._edges[level][at : at + HASH_BYTES] = node
                return
            tile = Tile(level, number)
            whole = bytearray(self._full(tile))
            if whole[at : at + HASH_BYTES] == node:
                return
            whole[at : at + HASH_BYTES] = node
            self._write(tile, bytes(whole))
            self._keep(tile, bytes(whole))
            node = _root(bytes(whole))

    def _derived(self, tile: Tile) -> bytes:
        LOGGER.info("%s is rebuilt: its file is missing or damaged", self._path(tile))
        if tile.level:
            below = (Tile(tile.level - 1, tile.index * TILE_WIDTH + position) for position in range(TILE_WIDTH))
            return b"".join(_root(self._full(one)) for one in below)
        kept = None if tile.level is None else self._read(Tile(None, tile.index))
        if kept is not None:  # entries may be pruned, but their leaves never are
            return b"".join(map(leaf_hash, leaves_in(kept)))
        first = tile.index * TILE_WIDTH + 1
        leaves: list[bytes] = []
        for entry in self._ledger.read(first, limit=TILE_WIDTH):
            if entry.index != first + len(leaves):
                break
            leaves.append(leaf_of_entry(self._key, entry).encode())
        if len(leaves) < TILE_WIDTH:
            raise LedgerBroken(first + len(leaves), "the entry is missing, and its tile is damaged")
        return bundle(leaves) if tile.level is None else b"".join(map(leaf_hash, leaves))

    def _read(self, tile: Tile) -> bytes | None:
        try:
            held = self._path(tile).read_bytes()
        except OSError:
            return None
        body = held[:-_SUM_BYTES]
        if len(held) <= _SUM_BYTES or _sum(tile, body) != held[-_SUM_BYTES:]:
            return None
        return body

    def _write(self, tile: Tile, body: bytes) -> None:
        """Write a full tile atomically, so that an existing name means a complete file.

        Bundles are not synced: after a crash they are rebuilt, like files that could not be written to a full disk.
        """
        if self._readonly:
            self._keep(tile, body)
            return
        try:
            self._write_file(tile, body)
        except OSError as error:
            LOGGER.warning("%s could not be written, and will be rebuilt when needed: %s", self._path(tile), error)

    def _write_file(self, tile: Tile, body: bytes) -> None:
        path = self._path(tile)
        make_private_directory(path.parent)
        replace_private(path, body + _sum(tile, body), durable=tile.level is not None)

    def _keep(self, tile: Tile, body: bytes) -> None:
        self._kept[tile] = body
        # With `readonly`, rebuilt content exists only in memory; it fits there for an audit of some minutes.
        while len(self._kept) > TILES_KEPT and not self._readonly:
            self._kept.popitem(last=False)

    def _path(self, tile: Tile) -> Path:
        return self._directory / tile.path

    def _check(self, size: int) -> None:
        if not 0 < size <= self.size:
            raise NotInTree(f"the tree has {self.size} leaves, not {size}")


def _root(whole: bytes) -> bytes:
    """Return the root over the hashes of a full tile."""
    hashes: Sequence[bytes] = [whole[at : at + HASH_BYTES] for at in range(0, len(whole), HASH_BYTES)]
    while len(hashes) > 1:
        hashes = [node_hash(left, right) for left, right in zip(hashes[::2], hashes[1::2], strict=True)]
    return hashes[0]


def _sum(tile: Tile, body: bytes) -> bytes:
    # The checksum covers the name, so that a file in another file's place counts as damaged.
    return zlib.crc32(body, zlib.crc32(tile.path.encode())).to_bytes(_SUM_BYTES, "big")
