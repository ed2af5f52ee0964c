"""Tiles have the names and sizes of C2SP tlog-tiles, and proofs read from tiles match the tree."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.cluster.security.proofs import (
    RightEdge,
    Tile,
    TileError,
    bundle,
    consistency_proof,
    inclusion_proof,
    leaf_hash,
    leaves_in,
    new_tiles,
    nodes_in_tiles,
    parse_path,
    root_of,
    tile_at,
    verify_consistency,
    verify_inclusion,
)

LARGEST = 70_000
ROOTS: list[bytes] = []
NODES: dict[tuple[int, int], bytes] = {}
LEAVES = [leaf_hash(b"%d" % number) for number in range(LARGEST)]


@pytest.fixture(scope="module", autouse=True)
def grown() -> None:
    edge = RightEdge()
    ROOTS.append(edge.root())
    for number, leaf in enumerate(LEAVES):
        for level, node in enumerate(edge.append(leaf)):
            NODES[level, number >> level] = node
        ROOTS.append(edge.root())


def held(tile: Tile) -> bytes:
    assert tile.level is not None
    first = tile.index * 256
    return b"".join(NODES[8 * tile.level, at] for at in range(first, first + tile.width))


def test_tree_of_70_000_leaves_has_the_specified_tiles() -> None:
    tiles = list(new_tiles(0, 70_000))
    assert [(one.level, one.width) for one in tiles if one.width < 256] == [(0, 112), (1, 17), (2, 1)]
    assert [sum(one.level == level and one.width == 256 for one in tiles) for level in (0, 1, 2)] == [273, 1, 0]


def test_tree_of_256_leaves_has_a_full_tile_below_a_tile_of_width_one() -> None:
    assert [one.path for one in new_tiles(0, 256)] == ["tile/0/000", "tile/1/000.p/1"]


def test_tile_has_the_specified_name() -> None:
    assert Tile(0, 1234067).path == "tile/0/x001/x234/067"
    assert Tile(None, 273, 112).path == "tile/entries/273.p/112"


@given(
    st.builds(Tile, st.none() | st.integers(0, 7), st.integers(0, 2**56 - 1), st.integers(1, 256)),
)
def test_tile_survives_the_conversion_to_a_path(tile: Tile) -> None:
    assert parse_path(tile.path) == tile


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/tile/0/000",
        "tile/0/../000",
        "tile/0/000\n",
        "tile/0/000.p/0",
        "tile/0/000.p/01",
        "tile/0/000.p/256",
        "tile/0/000.p/257",
        "tile/0/000/",
        "tile/0/1",
        "tile/0/x000/001",
        "tile/0/x001/x234",
        "tile/0/\u0660\u0660\u0660",
        "tile/00/000",
        "tile/8/000",
    ],
)
def test_any_other_path_is_rejected(path: str) -> None:
    with pytest.raises(TileError):
        parse_path(path)


@settings(max_examples=60)
@given(st.integers(1, LARGEST), st.data())
def test_proofs_read_from_tiles_are_valid(size: int, data: st.DataObject) -> None:
    read = nodes_in_tiles(size, held)
    index, old_size = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, size))
    assert root_of(size, read) == ROOTS[size]
    verify_inclusion(index, size, LEAVES[index], inclusion_proof(index, size, read), ROOTS[size])
    verify_consistency(old_size, size, ROOTS[old_size], ROOTS[size], consistency_proof(old_size, size, read))


@given(st.lists(st.integers(0, LARGEST), min_size=2, max_size=6).map(sorted))
def test_tiles_written_during_growth_are_complete(sizes: list[int]) -> None:
    written = {tile for old, new in zip(sizes, sizes[1:], strict=False) for tile in new_tiles(old, new)}
    assert set(new_tiles(sizes[0], sizes[-1])) <= written


def test_tile_of_wrong_length_is_rejected() -> None:
    with pytest.raises(TileError, match="8191 bytes instead of 8192"):
        root_of(128, nodes_in_tiles(300, lambda _: bytes(8191)))
    with pytest.raises(TileError, match="no tile 1"):
        tile_at(0, 1, 256)


@given(st.lists(st.binary(max_size=300), max_size=10))
def test_bundle_returns_its_leaves_and_is_rejected_when_truncated(leaves: list[bytes]) -> None:
    whole = bundle(leaves)
    assert leaves_in(whole) == leaves
    if leaves:
        with pytest.raises(TileError, match="truncated"):
            leaves_in(whole[:-1])


def test_leaf_too_large_for_a_bundle_is_rejected() -> None:
    with pytest.raises(TileError, match="65535"):
        bundle([bytes(65_536)])
