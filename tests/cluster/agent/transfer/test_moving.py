"""Moving: a source goes only when its copy is durable and it is what was copied; and never the last copy."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from cluster.agent.transfer import transfer
from cluster.agent.transfer.options import Kind, Options
from tests.cluster.agent.transfer.crashing import calls_of, dies_at
from tests.cluster.agent.transfer.rig import SMALL, Rig, plant, tree_of

TREE: dict[str, object] = {"a": b"a", "d": {"b": b"b", "e": {"c": b"c"}}, "large": bytes(20000)}


def test_what_is_moved_is_gone_from_the_source_and_whole_at_the_destination(rig: Rig) -> None:
    plant(rig.source, TREE)
    before = tree_of(rig.source)
    receipt = rig.carry([rig.item(move=True)])
    assert (receipt.removed_files, receipt.files) == (4, 4)
    assert tree_of(rig.destination) == before
    assert tree_of(rig.source) == {}


def test_only_items_that_say_so_are_moved(rig: Rig) -> None:
    plant(rig.source, TREE)
    items = [
        rig.item(Kind.FILE, rig.source / "a", rig.destination / "a", move=True),
        rig.item(Kind.DIRECTORY, rig.source / "d", rig.destination / "d"),
    ]
    assert rig.carry(items).removed_files == 1
    assert sorted(tree_of(rig.source)) == ["d", "d/b", "d/e", "d/e/c", "large"]


def test_a_source_that_changed_after_it_was_copied_stays_and_so_does_what_holds_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(rig.source, TREE)
    remove_sources = transfer.remove_sources

    def late(transfer: object) -> int:
        (rig.source / "d" / "e" / "c").write_bytes(b"newer")
        (rig.source / "d" / "f").write_bytes(b"new")
        return remove_sources(transfer)  # type: ignore[arg-type]

    monkeypatch.setattr(transfer, "remove_sources", late)
    assert rig.carry([rig.item(move=True)]).removed_files == 3
    assert tree_of(rig.source) == {"d": None, "d/e": None, "d/e/c": b"newer", "d/f": b"new"}


def test_nothing_is_removed_before_everything_is_durable(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(rig.source, TREE)
    before = tree_of(rig.source)

    def broken(*_: object) -> None:
        raise OSError(5, "broken")

    monkeypatch.setattr(transfer, "write_header", broken)
    with pytest.raises(OSError, match="broken"):
        rig.carry([rig.item(move=True)])
    assert tree_of(rig.source) == before


def test_a_source_whose_copy_somebody_took_away_is_the_last_one_and_stays(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(rig.source, TREE)
    remove_sources = transfer.remove_sources

    def late(transfer: object) -> int:
        (rig.destination / "a").unlink()
        (rig.destination / "d" / "b").write_bytes(b"?")
        return remove_sources(transfer)  # type: ignore[arg-type]

    monkeypatch.setattr(transfer, "remove_sources", late)
    assert rig.carry([rig.item(move=True)]).removed_files == 2
    assert sorted(tree_of(rig.source)) == ["a", "d", "d/b"]


@pytest.mark.parametrize("part", [0, 1])
def test_a_move_that_is_killed_at_any_call_loses_nothing_and_is_finished_by_the_next_attempt(
    fast_path: Path, part: int
) -> None:
    options = Options(chunk_bytes=4096, large_bytes=16384, streams=1)

    def prepared(name: str) -> tuple[Rig, object, object]:
        (fast_path / name).mkdir()
        rig = Rig(fast_path / name)
        plant(rig.source, TREE)
        return rig, tree_of(rig.source), [rig.item(move=True)]

    rig, _, items = prepared("count")
    total = calls_of(partial(rig.carry, items, options))  # type: ignore[arg-type]
    rig.close()
    # From the middle on sources are removed: there every third call, before it some.
    for number in (*range(1 + part, total // 2, 23), *range(total // 2 + part, total + 1, 3)):
        rig, before, items = prepared(str(number))
        dies_at(partial(rig.carry, items, options), number)  # type: ignore[arg-type]
        assert isinstance(before, dict)
        for path, data in before.items():
            if data is None:
                continue
            there = [side / path for side in (rig.source, rig.destination) if (side / path).exists()]
            assert there and all(copy.read_bytes() == data for copy in there), (number, path)
        rig.attempt = 1
        receipt = rig.carry(items, options)  # type: ignore[arg-type]
        assert (receipt.files, receipt.complete) == (4, True)
        assert (tree_of(rig.destination), tree_of(rig.source)) == (before, {})
        rig.close()


def test_a_source_directory_that_cannot_be_removed_stays_without_a_failure(rig: Rig) -> None:
    plant(rig.source, {"d": {"a": b"a"}})
    item = rig.item(Kind.DIRECTORY, rig.source / "d", rig.destination / "d", move=True)
    assert rig.carry([item], SMALL).removed_files == 1
    assert os.listdir(rig.source / "d") == []
