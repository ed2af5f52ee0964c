"""A ledger's tree depends only on its entries, whatever files exist, and repairs damaged files."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from forebay.cluster.security.proofs import (
    Checkpoint,
    RightEdge,
    Tile,
    leaf_hash,
    leaf_of,
    leaves_in,
    new_tiles,
    parse_leaf,
    sign,
    verifier_of,
    verify_consistency,
    verify_inclusion,
    write_note,
)
from forebay.cluster.server.tlog import LedgerTree, NoDisclosureKey, NotInTree, disclosure_key_of
from forebay.wal import Environment, Ledger
from forebay.wal.codec import NO_OP, decode_batch, encode_batch, encode_entry
from tests.cluster.audit.ledgers import Made, lived, written
from tests.cluster.server.tlog.go_reader import needs_go, read
from tests.replica.world import DISCLOSURE_KEY

KEY = DISCLOSURE_KEY
ENTRIES = 256 * 256 + 300
"""Number of entries that gives a full tile of tile hashes."""


def short_history() -> list[tuple[int, bytes]]:
    """Return terms and data of a ledger of `lived` after a no-op."""
    batches = lived()
    # A deposed leader's batch, on a revision that another leader settled meanwhile.
    void = encode_batch(replace(batches[1], at=batches[2].at))
    return [(1, NO_OP), *((1, encode_batch(batch)) for batch in batches[:3]), (1, void)] + [
        (2, encode_batch(batch)) for batch in batches[3:]
    ]


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Made:
    history = short_history()
    return written(tmp_path_factory.mktemp("long"), history + [(2, NO_OP)] * (ENTRIES - len(history)))


@pytest.fixture(scope="module")
def derived(long: Made) -> Path:
    """Files of the tree of `long`."""
    with opened(long) as tree:
        assert tree.size == ENTRIES
    return long.directory / "tlog"


class Opened:
    """Tree derived to the end of its ledger, or up to `last`."""

    def __init__(self, made: Made, directory: Path, *, readonly: bool = False, steps: int = 1_000_000) -> None:
        self._environment = Environment.open_readonly(made.directory / "wal")
        self._make: Callable[[], LedgerTree] = lambda: LedgerTree(
            Ledger(self._environment).as_stored, directory, readonly=readonly
        )
        self._steps = steps

    def __enter__(self) -> LedgerTree:
        tree = self._make()
        for _ in range(self._steps):
            if not tree.step():
                break
        return tree

    def __exit__(self, *exception: object) -> None:
        self._environment.close()


def opened(made: Made, directory: Path | None = None, *, readonly: bool = False, steps: int = 1_000_000) -> Opened:
    return Opened(made, directory or made.directory / "tlog", readonly=readonly, steps=steps)


def root(made: Made, directory: Path, size: int = ENTRIES) -> bytes:
    """Return the root from the files in a directory."""
    with opened(made, directory) as tree:
        return tree.root(size)


def roots(made: Made, sizes: set[int]) -> dict[int, bytes]:
    """Return the roots at some sizes, computed from the entries alone."""
    edge, revision, found = RightEdge(), 0, {}
    for entry in made.entries[: max(sizes)]:
        batch = None if entry.data == NO_OP else decode_batch(entry.data)
        settles = batch is not None and batch.base == revision
        commands = [encode_entry(one) for one in batch.entries] if batch is not None and settles else []
        leaf = leaf_of(
            KEY,
            index=entry.index,
            term=entry.term,
            data=entry.data,
            base=revision,
            revision=revision + len(commands),
            at=0 if batch is None else batch.at,
            commands=commands,
        )
        revision += len(commands)
        edge.append(leaf_hash(leaf.encode()))
        if edge.size in sizes:
            found[edge.size] = edge.root()
    return found


def test_roots_and_proofs_equal_those_over_the_entries_leaves(long: Made, derived: Path) -> None:
    sizes = {1, 5, 255, 256, 257, 300, 65_535, 65_536, 65_537, ENTRIES}
    expected = roots(long, sizes)
    with opened(long, derived) as tree:
        assert {size: tree.root(size) for size in sizes} == expected
        for index in (1, 3, 256, 257, 65_536, ENTRIES):
            leaf = leaf_hash(tree.leaf(index).encode())
            verify_inclusion(index - 1, ENTRIES, leaf, tree.inclusion(index, ENTRIES), expected[ENTRIES])
        for size in sizes:
            verify_consistency(size, ENTRIES, expected[size], expected[ENTRIES], tree.consistency(size, ENTRIES))


def test_bundle_has_the_leaves_of_its_tile(long: Made, derived: Path) -> None:
    with opened(long, derived) as tree:
        for number, width in ((0, 256), (7, 256), (7, 3), (ENTRIES // 256, ENTRIES % 256)):
            leaves = leaves_in(tree.tile(Tile(None, number, width)))
            assert [parse_leaf(leaf).index for leaf in leaves] == [number * 256 + one + 1 for one in range(width)]
            assert b"".join(map(leaf_hash, leaves)) == tree.tile(Tile(0, number, width))
        with pytest.raises(NotInTree):
            tree.tile(Tile(0, ENTRIES // 256, ENTRIES % 256 + 1))
        with pytest.raises(NotInTree):
            tree.root(ENTRIES + 1)


def damaged(path: Path, how: str) -> None:
    """Damage a file in one way."""
    held = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(held[:-32])
    elif how == "flipped":
        at = random.Random(str(path)).randrange(len(held))
        path.write_bytes(held[:at] + bytes([held[at] ^ 1]) + held[at + 1 :])
    elif how == "another's":
        path.write_bytes(path.with_name("002").read_bytes())


@pytest.mark.parametrize("how", ["missing", "empty", "cut", "flipped", "another's"])
@pytest.mark.parametrize("where", ["0/001", "entries/001", "1/000"])
def test_damaged_file_is_derived_again(long: Made, derived: Path, tmp_path: Path, how: str, where: str) -> None:
    if (how, where) == ("another's", "1/000"):
        (derived / "tile/1/002").write_bytes((derived / "tile/0/002").read_bytes())
    copy = tmp_path / "tlog"
    shutil.copytree(derived, copy)
    path = copy / "tile" / where
    whole = path.read_bytes()
    damaged(path, how)
    with opened(long, copy) as tree:
        level, number = where.split("/")
        one = Tile(None if level == "entries" else int(level), int(number))
        assert tree.tile(one) == whole[:-4]
        assert tree.made_again == 1
    assert path.read_bytes() == whole


def test_tree_with_a_lost_directory_is_derived_again(long: Made, derived: Path, tmp_path: Path) -> None:
    expected = root(long, derived)
    with opened(long, tmp_path / "new") as after:
        assert after.root(ENTRIES) == expected


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_tree_continues_where_it_stopped(long: Made, derived: Path, tmp_path: Path, steps: int) -> None:
    with opened(long, tmp_path / "tlog", steps=steps) as tree:
        size = tree.size
    with opened(long, tmp_path / "tlog", steps=4) as tree:
        assert tree.size == size - size % 256 + 512
        found, reached = tree.root(tree.size), tree.size
    assert found == root(long, derived, reached)


def test_reader_writes_nothing(long: Made, derived: Path, tmp_path: Path) -> None:
    expected = root(long, derived)
    with opened(long, tmp_path / "none", readonly=True) as tree:
        assert tree.root(ENTRIES) == expected
    assert not (tmp_path / "none").exists()


def test_tree_works_if_the_disk_rejects_its_files(long: Made, derived: Path, tmp_path: Path) -> None:
    (tmp_path / "full").write_text("in the way")
    expected = root(long, derived)
    with opened(long, tmp_path / "full" / "tlog") as tree:
        assert tree.root(ENTRIES) == expected


def test_tiles_beyond_the_end_of_the_ledger_are_ignored(derived: Path, tmp_path: Path) -> None:
    short = written(tmp_path, short_history())
    shutil.copytree(derived, tmp_path / "tlog")
    with opened(short) as tree:
        assert tree.size == len(short.entries)
        assert tree.root(tree.size) == roots(short, {tree.size})[tree.size]


def test_ledger_without_a_key_has_no_tree(tmp_path: Path) -> None:
    made = written(tmp_path, [(1, NO_OP)] * 3)
    with Environment.open_readonly(made.directory / "wal") as environment, pytest.raises(NoDisclosureKey):
        disclosure_key_of(Ledger(environment))


@needs_go
def test_independent_reader_verifies_every_tile_root_and_leaf(long: Made, derived: Path, tmp_path: Path) -> None:
    old_size, private = 300, [Ed25519PrivateKey.from_private_bytes(bytes([one]) * 32) for one in range(3)]
    (tmp_path / "keys").write_text("".join(f"{verifier_of('forebay/c1', one)}\n" for one in private))
    with opened(long, derived) as tree:
        for name, size, signers in (("old", old_size, 2), ("checkpoint", ENTRIES, 3)):
            text = Checkpoint("forebay/c1", size, tree.root(size)).text()
            note = write_note(text, [sign(text, "forebay/c1", one) for one in private[:signers]])
            (tmp_path / name).write_text(note)
        tiles = [*new_tiles(0, ENTRIES)]
        for tile in tiles + [Tile(None, one.index, one.width) for one in tiles if not one.level]:
            path = tmp_path / tile.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(tree.tile(tile))
    assert {one.level for one in tiles} == {0, 1, 2}
    said = f"{ENTRIES} leaves go on from {old_size}, signed 3, cosigned 0"
    assert read(tmp_path, 2) == said
    assert "2 have signed it, and 3 are wanted" in read(tmp_path, 3)
    for path in (Tile(0, 7).path, Tile(1, 0).path, Tile(1, 1, 1).path, Tile(2, 0, 1).path, Tile(None, 3).path):
        whole = (tmp_path / path).read_bytes()
        (tmp_path / path).write_bytes(whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])
        assert read(tmp_path, 2) != said, path
        (tmp_path / path).write_bytes(whole)
    fork = Checkpoint("forebay/c1", old_size, bytes(32)).text()
    (tmp_path / "old").write_text(write_note(fork, [sign(fork, "forebay/c1", one) for one in private]))
    assert "proof" in read(tmp_path, 2)


def test_files_of_another_history_are_found_and_replaced_up_to_the_top(
    long: Made, derived: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history = [(entry.term, entry.data) for entry in long.entries]
    history[5 * 256 + 17] = (2, NO_OP + b"r9")
    other = written(tmp_path / "other", history)
    wanted = root(other, tmp_path / "fresh")
    assert wanted != root(long, derived)
    files = tmp_path / "files"
    shutil.copytree(derived, files)
    with opened(other, files) as tree:
        assert tree.root(ENTRIES) != wanted, "the files are intact, so only the comparison can detect them"
        while tree.check():
            pass
        assert tree.root(ENTRIES) == wanted
        assert tree.altered == [5 * 256 + 1] and "contradicts the ledger" in caplog.text
        assert tree.made_again == 2, "the tile and its bundle"
    assert root(other, files) == wanted


def test_check_changes_no_right_files_and_restores_a_damaged_one(long: Made, derived: Path, tmp_path: Path) -> None:
    files = tmp_path / "files"
    shutil.copytree(derived, files)
    with opened(long, files) as tree:
        rounds = sum(1 for _ in iter(tree.check, False))
        assert (tree.made_again, tree.altered) == (0, [])
        assert rounds == 2 * (ENTRIES // 256), "128 entries at a time"
        (files / "tile/0/003").write_bytes(b"")
        while tree.check():
            pass
        assert (tree.made_again, tree.altered) == (1, []) and (files / "tile/0/003").read_bytes()
