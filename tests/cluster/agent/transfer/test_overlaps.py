"""Items that share destinations: directories are merged, and different files with one path end the transfer."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from random import Random

import pytest

from forebay.cluster.agent.processes import acting_as
from forebay.cluster.agent.transfer.errors import TransferFailed
from forebay.cluster.agent.transfer.fence import Claimant, is_home
from forebay.cluster.agent.transfer.options import ItemKind, TransferItem
from forebay.cluster.agent.transfer.record_paths import find_overlaps
from forebay.cluster.system.descriptors import open_directory
from tests.cluster.agent.transfer.harness import SMALL, Harness, plant, tree_of

NAMES = ("a", "b", "c")
DESTINATIONS = ("", "a", "a/b", "b", "c/a")
CASES = 150


def make_tree(random: Random, depth: int) -> dict[str, object]:
    made: dict[str, object] = {}
    for name in random.sample(NAMES, random.randint(0, len(NAMES))):
        made[name] = make_tree(random, depth - 1) if depth and random.random() < 0.5 else random.randbytes(3)
    return made


def model_of(trees: list[tuple[str, dict[str, bytes | None]]]) -> dict[str, bytes | None] | None:
    """Return what is there when all trees have been copied; None if the order of the copies decides."""
    found: dict[str, bytes | None] = {}
    for destination, tree in trees:
        parts = destination.split("/") if destination else []
        above: dict[str, bytes | None] = {"/".join(parts[: count + 1]): None for count in range(len(parts))}
        below = {"/".join((*parts, path)): data for path, data in tree.items()}
        for path, data in (above | below).items():
            if path in found and (data is not None or found[path] is not None):
                return None
            found[path] = data
    return found


def test_trees_are_merged_if_no_two_files_have_one_path_and_else_nothing_is_copied(fast_path: Path) -> None:
    counts = [0, 0]
    for case in range(CASES):
        random = Random(case)
        directory = fast_path / str(case)
        directory.mkdir()
        harness = Harness(directory)
        items, trees = [], []
        for number in range(random.choice((2, 2, 3))):
            source, destination = harness.source / str(number), random.choice(DESTINATIONS)
            plant(source, make_tree(random, 2))
            items.append(harness.item(ItemKind.DIRECTORY, source, harness.destination / destination))
            trees.append((destination, tree_of(source)))
        expected = model_of(trees)
        counts[expected is None] += 1
        if expected is None:
            with pytest.raises(TransferFailed, match="have the same destination|exists and is a") as caught:
                harness.carry(items)
            if "exists and is a" not in str(caught.value):
                assert not any(tree_of(harness.destination).values())
        else:
            harness.carry(items)
            assert tree_of(harness.destination) == expected
        harness.close()
    assert min(counts) > CASES // 10, counts


def test_of_two_files_with_one_destination_neither_is_copied_and_both_are_named(harness: Harness) -> None:
    plant(harness.source, {"a": b"a" * 100, "b": b"b" * 200})
    items = [harness.item(ItemKind.FILE, harness.source / name, harness.destination / "c") for name in "ab"]
    with pytest.raises(TransferFailed, match="source/a and .*source/b have the same destination .*/c; give") as caught:
        harness.carry(items, SMALL)
    assert caught.value.item == 1
    assert tree_of(harness.destination) == {}


def test_the_same_file_may_go_to_one_destination_twice(harness: Harness) -> None:
    plant(harness.source, {"d": {"a": b"a"}})
    items = [
        harness.item(ItemKind.DIRECTORY, harness.source / "d", harness.destination),
        harness.item(ItemKind.FILE, harness.source / "d" / "a", harness.destination / "a"),
    ]
    harness.carry(items, SMALL)
    assert tree_of(harness.destination) == {"a": b"a"}


def test_links_with_different_targets_and_one_destination_are_rejected(harness: Harness) -> None:
    plant(harness.source, {"one": {"a": b"a"}, "two": {"b": b"b"}})
    (harness.source / "one" / "l").symlink_to("a")
    (harness.source / "two" / "l").symlink_to("b")
    items = [harness.item(ItemKind.DIRECTORY, harness.source / name, harness.destination) for name in ("one", "two")]
    with pytest.raises(TransferFailed, match="one/l and .*two/l have the same destination"):
        harness.carry(items, SMALL)


def test_destinations_are_compared_as_the_kernel_knows_them(harness: Harness) -> None:
    plant(harness.destination, {"striped": {}})
    below = harness.item(ItemKind.FILE, harness.source / "a", harness.destination / "striped" / "a")
    anchor = os.open(harness.destination / "striped", os.O_RDONLY | os.O_DIRECTORY)
    try:
        target = below.destination._replace(anchor=anchor, shown="$DW_JOB_STRIPED", parts=())
        tree = TransferItem(ItemKind.DIRECTORY, below.source, target)
        assert set(find_overlaps([below, tree])) == {0, 1}
        other = below._replace(destination=below.destination._replace(parts=("destination", "striped-2", "a")))
        assert find_overlaps([tree, other]) == {}
    finally:
        os.close(anchor)


def test_what_another_transfer_is_still_copying_is_left_out_and_named(harness: Harness) -> None:
    claimant = Claimant("0123abcd-9", 1, "0" * 32)
    # As users may call theirs.
    alike = {".forebay-notes": {"b": b"b"}, ".forebay-alone-7": {"9.x": {"c": b"c"}}, ".forebay-alone-8": {}}
    plant(harness.source, {"a": b"a", claimant.home: {claimant.place: {"part": b"half"}}, **alike})
    for path in harness.source.iterdir():
        path.chmod(0o700)
    receipt = harness.carry([harness.item(move=True)], SMALL)
    assert {path: data for path, data in tree_of(harness.destination).items() if data is not None} == {
        "a": b"a",
        ".forebay-notes/b": b"b",
        ".forebay-alone-7/9.x/c": b"c",
    }
    assert (harness.destination / ".forebay-alone-8").is_dir()
    (left,) = receipt.left_out_first
    assert left.path == claimant.home and "a transfer under way" in left.reason
    # It is not removed either: its transfer goes on.
    assert (harness.source / claimant.home / claimant.place / "part").read_bytes() == b"half"
    assert not (harness.source / "a").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_what_another_user_is_copying_is_known_without_being_read(harness: Harness) -> None:
    claimant, nobody = Claimant("alone-9", 1, "0" * 32), pwd.getpwnam("nobody")
    (harness.source / claimant.home).mkdir(mode=0o700)
    source = open_directory(harness.source)
    try:
        status = (harness.source / claimant.home).stat()
        assert not is_home(source, claimant.home.encode(), status)
        with acting_as(nobody.pw_uid, nobody.pw_gid):
            assert is_home(source, claimant.home.encode(), status)
        (harness.source / claimant.home).chmod(0o755)
        assert not is_home(source, claimant.home.encode(), (harness.source / claimant.home).stat())
    finally:
        os.close(source)
