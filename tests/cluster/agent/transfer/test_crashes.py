"""A transfer killed at any call: each destination is absent, old or complete, and the next attempt goes on."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from forebay.cluster.agent.transfer.options import ItemKind, TransferOptions
from tests.cluster.agent.transfer.crashing import calls_of, dies_at
from tests.cluster.agent.transfer.harness import Harness, plant, tree_of

CHUNK = 4096
MOMENTS = 25
"""About how many moments to kill at, count."""

LARGE = os.urandom(CHUNK * 5 + 100)
OLD = b"old" * 7000
NEW = {"a": b"new", "d": {"b": b"b" * 5000, "e": {}}, "large": LARGE}


def prepared(directory: Path) -> Harness:
    harness = Harness(directory)
    plant(harness.source, NEW)
    (harness.destination / "a").write_bytes(b"before")
    (harness.destination / "large").write_bytes(OLD)
    return harness


def check(harness: Harness) -> None:
    """See that nothing is partial."""
    source = tree_of(harness.source)
    for path, data in tree_of(harness.destination).items():
        if path.rpartition("/")[2].startswith(".forebay-"):
            continue
        assert data in (source[path], {"a": b"before", "large": OLD}.get(path, source[path])), path


@pytest.mark.parametrize("streams", [1, 2])
def test_killed_at_any_call_nothing_is_partial_and_the_next_attempt_ends_right(fast_path: Path, streams: int) -> None:
    options = TransferOptions(chunk_bytes=CHUNK, large_bytes=4 * CHUNK, streams=streams)
    (fast_path / "count").mkdir()
    harness = prepared(fast_path / "count")
    total = calls_of(lambda: harness.carry(options=options))
    harness.close()
    assert total > 50
    killed = 0
    # Another set of moments for either number of streams; scripts/transfers tries every system call.
    for number in range(streams, total + 1, max(1, total // MOMENTS)):
        directory = fast_path / str(number)
        directory.mkdir()
        harness = prepared(directory)
        killed += dies_at(partial(harness.carry, options=options), number)
        check(harness)
        harness.attempt = 1
        receipt = harness.carry(options=options)
        assert tree_of(harness.destination) == tree_of(harness.source), number
        assert (receipt.files, receipt.complete) == (3, True)
        harness.close()
    assert killed > MOMENTS / 2


def test_a_file_that_may_not_be_replaced_is_complete_after_a_crash_and_not_refused_as_taken(fast_path: Path) -> None:
    options = TransferOptions(chunk_bytes=CHUNK, large_bytes=4 * CHUNK, replace=False, streams=1)
    number, over = 1, False
    while not over:
        directory = fast_path / str(number)
        directory.mkdir()
        harness = Harness(directory)
        plant(harness.source, {"a": b"new", "large": LARGE})
        over = not dies_at(partial(harness.carry, options=options), number)
        harness.attempt = 1
        assert harness.carry(options=options).files == 2
        assert tree_of(harness.destination) == tree_of(harness.source), number
        harness.close()
        number += 7


@pytest.mark.parametrize("copied", [1, 3, 5])
def test_a_large_file_goes_on_where_it_was_and_copies_one_chunk_again_at_most(harness: Harness, copied: int) -> None:
    (harness.source / "large").write_bytes(LARGE)
    item = harness.item(ItemKind.FILE, harness.source / "large", harness.destination / "large")

    class Power:
        """Fails in the middle of a chunk."""

        moved = 0

        def take(self, size_bytes: int, /) -> None:
            self.moved += size_bytes
            if self.moved > copied * CHUNK:
                os._exit(9)

        def check(self) -> None:
            pass

        def step_bytes(self, most: int, /) -> int:
            return min(most, CHUNK // 2)

    child = os.fork()
    if not child:
        harness.pace = Power()
        harness.carry([item], TransferOptions(chunk_bytes=CHUNK, large_bytes=4 * CHUNK, streams=1))
        os._exit(0)
    os.waitpid(child, 0)
    harness.attempt = 1
    receipt = harness.carry([item], TransferOptions(chunk_bytes=CHUNK, large_bytes=4 * CHUNK, streams=1))
    assert (harness.destination / "large").read_bytes() == LARGE
    assert receipt.written_bytes <= len(LARGE) - (copied - 1) * CHUNK
    assert receipt.resumed_bytes >= (copied - 1) * CHUNK
    assert receipt.resumed_bytes + receipt.written_bytes == len(LARGE)
