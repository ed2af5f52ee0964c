"""Tiles of a tree, as specified by C2SP tlog-tiles: 256 hashes of every eighth level, or fewer at the right edge.

A bundle contains leaves; before each leaf stands its length as a u16.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from forebay.cluster.security.proofs.tree import HASH_BYTES, ReadNode, node_hash

TILE_LEVELS = 8
TILE_WIDTH = 1 << TILE_LEVELS
# Eight levels of tiles hold a tree of any u64 size.
MAX_TILE_LEVEL = 7
MAX_LEAF_BYTES = 2**16 - 1

_PATH = re.compile(
    r"tile/(?P<level>entries|[0-7])/(?P<groups>(?:x[0-9]{3}/){0,6})(?P<last>[0-9]{3})(?:\.p/(?P<width>[1-9][0-9]{0,2}))?",
)


class TileError(ValueError):
    """A path names no tile, or the bytes do not match its name."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile: `width` hashes (1 to 256) of tile level `level`, starting at index * 256; level None: a bundle."""

    level: int | None
    index: int
    width: int = TILE_WIDTH

    @property
    def path(self) -> str:
        """Return the path below the log's prefix: `tile/0/x001/x234/067`, with `.p/5` for a partial tile."""
        groups = [f"{self.index % 1000:03}"]
        rest = self.index // 1000
        while rest:
            groups.insert(0, f"x{rest % 1000:03}")
            rest //= 1000
        partial = "" if self.width == TILE_WIDTH else f".p/{self.width}"
        return f"tile/{'entries' if self.level is None else self.level}/{'/'.join(groups)}{partial}"


def parse_path(path: str) -> Tile:
    """Parse a tile's path.

    Raises:
        TileError: The path is not the canonical name of a tile.
    """
    found = _PATH.fullmatch(path)
    if found is None:
        raise TileError(f"{path[:100]!r} is not the path of a tile, such as tile/0/x001/067 or tile/1/000.p/5")
    level = None if found["level"] == "entries" else int(found["level"])
    index = int(found["groups"].replace("x", "").replace("/", "") + found["last"])
    tile = Tile(level, index, int(found["width"] or TILE_WIDTH))
    if tile.path != path or tile.width > TILE_WIDTH:
        raise TileError(f"{path!r} is not how the tile {tile.path!r} is named, or wider than {TILE_WIDTH} hashes")
    return tile


def tile_at(level: int, index: int, size: int) -> Tile:
    """Return tile `index` of tile level `level`, with its width in a tree of `size` leaves.

    Raises:
        TileError: There is no such tile.
    """
    width = min(TILE_WIDTH, (size >> TILE_LEVELS * level) - index * TILE_WIDTH)
    if width < 1:
        raise TileError(f"a tree of {size} leaves has no tile {index} at level {level}")
    return Tile(level, index, width)


def new_tiles(old_size: int, size: int) -> Iterator[Tile]:
    """Yield the tiles that are new or wider after growth from `old_size` to `size` leaves, lowest level first."""
    for level in range(MAX_TILE_LEVEL + 1):
        old, new = old_size >> TILE_LEVELS * level, size >> TILE_LEVELS * level
        if old == new:
            return
        for index in range(old // TILE_WIDTH, -(-new // TILE_WIDTH)):
            yield tile_at(level, index, size)


def nodes_in_tiles(size: int, read_tile: Callable[[Tile], bytes]) -> ReadNode:
    """Return a reader of tree nodes from tiles. It raises TileError if a tile has the wrong length."""

    def read(level: int, index: int) -> bytes:
        tile_level, above = divmod(level, TILE_LEVELS)
        first = index << above
        tile = tile_at(tile_level, first // TILE_WIDTH, size)
        held = read_tile(tile)
        if len(held) != tile.width * HASH_BYTES:
            raise TileError(f"{tile.path} has {len(held)} bytes instead of {tile.width * HASH_BYTES}")
        begin = first % TILE_WIDTH
        if begin + (1 << above) > tile.width:
            raise TileError(f"a tree of {size} leaves has no full subtree {index} at level {level}")
        hashes = [held[at * HASH_BYTES : (at + 1) * HASH_BYTES] for at in range(begin, begin + (1 << above))]
        while len(hashes) > 1:
            hashes = [node_hash(left, right) for left, right in zip(hashes[::2], hashes[1::2], strict=True)]
        return hashes[0]

    return read


def bundle(leaves: Sequence[bytes]) -> bytes:
    """Encode a bundle.

    Raises:
        TileError: A leaf has more than 65,535 bytes.
    """
    if any(len(leaf) > MAX_LEAF_BYTES for leaf in leaves):
        raise TileError(f"a leaf in a bundle may have at most {MAX_LEAF_BYTES} bytes")
    return b"".join(len(leaf).to_bytes(2, "big") + leaf for leaf in leaves)


def leaves_in(held: bytes) -> list[bytes]:
    """Return the leaves of a bundle.

    Raises:
        TileError: The bundle is truncated.
    """
    leaves: list[bytes] = []
    at = 0
    while at < len(held):
        end = at + 2 + int.from_bytes(held[at : at + 2], "big")
        if at + 2 > len(held) or end > len(held):
            raise TileError(f"the bundle is truncated in leaf {len(leaves)}, at byte {at}")
        leaves.append(held[at + 2 : end])
        at = end
    return leaves
