"""Moving: a source goes only when its copy is durable and it is what was copied; and never the last copy."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forebay.cluster.agent.transfer import transfer
from forebay.cluster.agent.transfer.errors import TransferPaused
from forebay.cluster.agent.transfer.options import ItemKind, TransferOptions
from forebay.cluster.agent.transfer.progress import no_op
from tests.cluster.agent.transfer.crashing import calls_of, dies_at
from tests.cluster.agent.transfer.harness import SMALL, Harness, plant, tree_of

TREE: dict[str, object] = {"a": b"a", "d": {"b": b"b", "e": {"c": b"c"}}, "large": bytes(20000)}


def test_what_is_moved_is_gone_from_the_source_and_whole_at_the_destination(harness: Harness) -> None:
    plant(harness.source, TREE)
    before = tree_of(harness.source)
    receipt = harness.carry([harness.item(move=True)])
    assert (receipt.removed_files, receipt.files) == (4, 4)
    assert tree_of(harness.destination) == before
    assert tree_of(harness.source) == {}


def test_only_items_that_say_so_are_moved(harness: Harness) -> None:
    plant(harness.source, TREE)
    items = [
        harness.item(ItemKind.FILE, harness.source / "a", harness.destination / "a", move=True),
        harness.item(ItemKind.DIRECTORY, harness.source / "d", harness.destination / "d"),
    ]
    assert harness.carry(items).removed_files == 1
    assert sorted(tree_of(harness.source)) == ["d", "d/b", "d/e", "d/e/c", "large"]


def test_a_source_that_changed_after_it_was_copied_stays_and_so_does_what_holds_it(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(harness.source, TREE)
    remove_sources = transfer.remove_sources

    def late(transfer: object) -> int:
        (harness.source / "d" / "e" / "c").write_bytes(b"newer")
        (harness.source / "d" / "f").write_bytes(b"new")
        return remove_sources(transfer)  # type: ignore[arg-type]

    monkeypatch.setattr(transfer, "remove_sources", late)
    assert harness.carry([harness.item(move=True)]).removed_files == 3
    assert tree_of(harness.source) == {"d": None, "d/e": None, "d/e/c": b"newer", "d/f": b"new"}


def test_nothing_is_removed_before_everything_is_durable(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(harness.source, TREE)
    before = tree_of(harness.source)

    def broken(*_: object) -> None:
        raise OSError(5, "broken")

    monkeypatch.setattr(transfer, "write_header", broken)
    with pytest.raises(OSError, match="broken"):
        harness.carry([harness.item(move=True)])
    assert tree_of(harness.source) == before


def test_a_source_whose_copy_somebody_took_away_is_the_last_one_and_stays(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(harness.source, TREE)
    remove_sources = transfer.remove_sources

    def late(transfer: object) -> int:
        (harness.destination / "a").unlink()
        (harness.destination / "d" / "b").write_bytes(b"?")
        return remove_sources(transfer)  # type: ignore[arg-type]

    monkeypatch.setattr(transfer, "remove_sources", late)
    assert harness.carry([harness.item(move=True)]).removed_files == 2
    assert sorted(tree_of(harness.source)) == ["a", "d", "d/b"]


def _paused_after(removals: int) -> Callable[[], None]:
    left = iter(range(removals))

    def before_removal() -> None:
        if next(left, None) is None:
            raise TransferPaused

    return before_removal


def test_no_source_is_removed_while_somebody_else_may_have_begun(harness: Harness) -> None:
    plant(harness.source, TREE)
    before = tree_of(harness.source)
    harness.before_removal = _paused_after(2)
    with pytest.raises(TransferPaused):
        harness.carry([harness.item(move=True)])
    assert len([data for data in tree_of(harness.source).values() if data is not None]) == 2
    assert tree_of(harness.destination) == before


def test_another_machine_finishes_a_removal_although_it_numbers_the_device_differently(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(harness.source, {**TREE, "d": {"b": b"b"}})
    (harness.source / "link").symlink_to("a")
    before = tree_of(harness.source)
    harness.before_removal = _paused_after(2)
    with pytest.raises(TransferPaused):
        harness.carry([harness.item(move=True)])
    harness.before_removal = no_op
    look = os.stat

    def elsewhere(*args: Any, **kwargs: Any) -> os.stat_result:
        seen = look(*args, **kwargs)
        return os.stat_result((*seen[:2], seen.st_dev + 1, *seen[3:]), {"st_mtime_ns": seen.st_mtime_ns})

    monkeypatch.setattr(transfer.os, "stat", elsewhere)
    receipt = harness.carry([harness.item(move=True)])
    monkeypatch.undo()
    assert (receipt.files, receipt.removed_files) == (3, 3)
    assert (tree_of(harness.source), tree_of(harness.destination)) == ({}, before)


@pytest.mark.parametrize("part", [0, 1])
def test_a_move_that_is_killed_at_any_call_loses_nothing_and_is_finished_by_the_next_attempt(
    fast_path: Path, part: int
) -> None:
    options = TransferOptions(chunk_bytes=4096, large_bytes=16384, streams=1)

    def prepared(name: str) -> tuple[Harness, object, object]:
        (fast_path / name).mkdir()
        harness = Harness(fast_path / name)
        plant(harness.source, TREE)
        return harness, tree_of(harness.source), [harness.item(move=True)]

    harness, _, items = prepared("count")
    total = calls_of(partial(harness.carry, items, options))  # type: ignore[arg-type]
    harness.close()
    # From the middle on sources are removed: there every third call, before it some.
    for number in (*range(1 + part, total // 2, 23), *range(total // 2 + part, total + 1, 3)):
        harness, before, items = prepared(str(number))
        dies_at(partial(harness.carry, items, options), number)  # type: ignore[arg-type]
        assert isinstance(before, dict)
        for path, data in before.items():
            if data is None:
                continue
            there = [side / path for side in (harness.source, harness.destination) if (side / path).exists()]
            assert there and all(copy.read_bytes() == data for copy in there), (number, path)
        harness.attempt = 1
        receipt = harness.carry(items, options)  # type: ignore[arg-type]
        assert (receipt.files, receipt.complete) == (4, True)
        assert (tree_of(harness.destination), tree_of(harness.source)) == (before, {})
        harness.close()


def test_a_source_directory_that_cannot_be_removed_stays_without_a_failure(harness: Harness) -> None:
    plant(harness.source, {"d": {"a": b"a"}})
    item = harness.item(ItemKind.DIRECTORY, harness.source / "d", harness.destination / "d", move=True)
    assert harness.carry([item], SMALL).removed_files == 1
    assert os.listdir(harness.source / "d") == []
