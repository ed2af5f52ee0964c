"""Carrying: what arrives is what was there, whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.cluster.agent.transfer import small_files
from forebay.cluster.agent.transfer.errors import ReadBackFailed, SourceChanged, TransferFailed, root_cause
from forebay.cluster.agent.transfer.options import ItemKind, TransferOptions, Verify
from forebay.cluster.agent.transfer.progress import no_op
from forebay.cluster.agent.transfer.receipts import read_lines, recheck
from forebay.cluster.agent.transfer.small_files import READ_AT_ONCE_BYTES, READ_BYTES
from forebay.cluster.providers import Local
from tests.cluster.agent.transfer.harness import SMALL, Harness, plant, tree_of

CP = Local(allowed_programs=("/bin/cp",))
"""What this machine lets the site's configuration name."""

names = st.text(alphabet="ab.é \n$-", min_size=1, max_size=4).filter(lambda name: name not in (".", ".."))
contents = st.one_of(st.binary(max_size=300), st.integers(16380, 40000).map(lambda size: os.urandom(7) * (size // 7)))
trees = st.recursive(contents, lambda inner: st.dictionaries(names, inner, max_size=4), max_leaves=12).map(
    lambda tree: tree if isinstance(tree, dict) else {"f": tree}
)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(tree=trees)
def test_a_tree_arrives_as_it_was_with_small_files_and_large_ones(fast_path: Path, tree: dict[str, object]) -> None:
    harness = Harness(Path(tempfile.mkdtemp(dir=fast_path)))
    plant(harness.source, tree)
    receipt = harness.carry()
    expected = tree_of(harness.source)
    assert tree_of(harness.destination) == expected
    sizes = [len(data) for data in expected.values() if data is not None]
    assert (receipt.files, receipt.size_bytes, receipt.complete) == (len(sizes), sum(sizes), True)
    assert receipt.directories == len(expected) - len(sizes) + 1
    assert [line.path for line in harness.lines() if line.kind == "file"] == [
        str(path.relative_to(harness.source))
        for path in sorted(harness.source.rglob("*"), key=os.fsencode)
        if path.is_file()
    ] or len(harness.lines()) == len(expected) + 1
    harness.close()


def test_one_file_goes_to_a_name_and_the_directories_on_the_way_are_made(harness: Harness) -> None:
    (harness.source / "a").write_bytes(b"data")
    item = harness.item(ItemKind.FILE, harness.source / "a", harness.destination / "x" / "y" / "b")
    assert harness.carry([item]).files == 1
    assert tree_of(harness.destination) == {"x": None, "x/y": None, "x/y/b": b"data"}


class Writes:
    """A pace during which somebody writes to a file, so many times."""

    def __init__(self, path: Path, times: int) -> None:
        self.path = path
        self.left = times

    def take(self, _: int, /) -> None:
        if self.left:
            self.left -= 1
            with self.path.open("ab") as file:
                file.write(b"+")

    def check(self) -> None:
        pass

    def step_bytes(self, most: int, /) -> int:
        return most


def test_a_source_that_changes_once_is_read_again_and_one_that_keeps_changing_is_refused(harness: Harness) -> None:
    log = harness.source / "log"
    log.write_bytes(b"0")
    harness.pace = Writes(log, 1)
    receipt = harness.carry()
    assert (receipt.files, receipt.size_bytes, receipt.retries) == (1, 2, 1)
    assert (harness.destination / "log").read_bytes() == b"0+"
    log.write_bytes(b"0")
    harness.pace = Writes(log, 99)
    with pytest.raises(TransferFailed, match="source/log changed during 2 attempts to copy it") as caught:
        harness.carry()
    assert isinstance(root_cause(caught.value), SourceChanged)
    assert tree_of(harness.destination) == {"log": b"0+"}


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, READ_AT_ONCE_BYTES, READ_AT_ONCE_BYTES + 1, READ_BYTES + 1])
def test_a_file_that_grows_while_it_is_read_is_read_again_also_where_its_times_do_not_tell(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    monkeypatch.setattr(small_files, "check_unchanged", lambda *_: None)
    log = harness.source / "log"
    log.write_bytes(bytes(size_bytes))
    harness.pace = Writes(log, 1)
    receipt = harness.carry(options=TransferOptions(large_bytes=4 * READ_BYTES, streams=1))
    assert (receipt.retries, receipt.size_bytes) == (1, size_bytes + 1)
    assert (harness.destination / "log").read_bytes() == bytes(size_bytes) + b"+"


def test_a_large_source_that_changes_is_planned_again_and_one_that_keeps_changing_is_refused(harness: Harness) -> None:
    log = harness.source / "log"
    log.write_bytes(bytes(20000))
    harness.pace = Writes(log, 1)
    receipt = harness.carry()
    assert (receipt.size_bytes, receipt.retries) == (20001, 1)
    assert tree_of(harness.destination) == tree_of(harness.source) and not harness.parts()
    harness.pace = Writes(log, 99)
    with pytest.raises(TransferFailed, match="source/log changed during 2 attempts to copy it") as caught:
        harness.carry()
    assert isinstance(root_cause(caught.value), SourceChanged)
    assert tree_of(harness.destination) == {"log": bytes(20000) + b"+"} and not harness.parts()


AFTER = {
    "a little longer": 20500,
    "many times as long": 300_001,
    "shorter": 9000,
    "shorter than a large one": 5,
    "empty": 0,
}


@pytest.mark.parametrize("backend", ["native", "template"])
@pytest.mark.parametrize("after", AFTER)
def test_a_large_file_that_became_another_between_the_walk_and_its_copy_arrives_as_it_became(
    harness: Harness, after: str, backend: str
) -> None:
    names = ("a", "b", "c")
    plant(harness.source, {name: name.encode() * 20000 for name in names})
    became = os.urandom(AFTER[after])

    def write() -> None:
        # In place: files around it keep their marks.
        (harness.source / "b").write_bytes(became)

    harness.planned = write
    items = [harness.item()._replace(backend=backend)]
    options = msgspec.structs.replace(SMALL, template="/bin/cp -aT {source} {destination}", local=CP)
    receipt = harness.carry(items, options)
    assert tree_of(harness.destination) == tree_of(harness.source) and not harness.parts()
    assert (receipt.size_bytes, receipt.retries, receipt.files) == (40000 + len(became), 0, 3)
    descriptor = os.open(harness.home / "receipts" / "7.1.stage_out", os.O_RDONLY)
    assert list(recheck(descriptor, items, "xxh3-128")) == []
    (line,) = (line for line in read_lines(descriptor) if line.path == "b")
    assert line.size == len(became) and -(-line.size // line.chunk_bytes) <= 5
    os.close(descriptor)
    harness.planned = no_op
    again = harness.carry(items, options)
    assert again.resumed_files == 2 and tree_of(harness.destination) == tree_of(harness.source)


def test_what_a_large_file_grew_to_is_held_against_the_limit_before_it_takes_room(harness: Harness) -> None:
    plant(harness.source, {"a": bytes(20000), "b": bytes(20000)})

    def grow() -> None:
        os.truncate(harness.source / "b", 1 << 40)

    harness.planned = grow
    with pytest.raises(TransferFailed, match="a source grew .* more than the 50000 bytes of the buffer"):
        harness.carry(options=msgspec.structs.replace(SMALL, limit_bytes=50000, streams=1))
    assert set(tree_of(harness.destination)) <= {"a"} and not harness.parts()


@pytest.mark.parametrize(("size", "module"), [(3, "small_files"), (20000, "large_file")])
def test_what_does_not_read_back_as_it_was_written_is_refused_by_name_and_not_put_in_place(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, size: int, module: str
) -> None:
    (harness.source / "result").write_bytes(bytes(size))
    (harness.destination / "result").write_bytes(b"old")
    options = TransferOptions(chunk_bytes=4096, large_bytes=16384, verify=Verify.READ_BACK)
    monkeypatch.setattr(f"forebay.cluster.agent.transfer.{module}.digest_on_disk", lambda *_: b"another digest")
    monkeypatch.setattr("forebay.cluster.agent.transfer.large_file.open_direct", lambda *_: None)
    with pytest.raises(ReadBackFailed, match="destination/result differs from the data read from .*source/result"):
        harness.carry(options=options)
    assert tree_of(harness.destination) == {"result": b"old"}
    monkeypatch.undo()
    assert harness.carry(options=options).files == 1
    assert tree_of(harness.destination) == {"result": bytes(size)}


def test_what_grows_past_the_limit_while_it_is_copied_is_refused(harness: Harness) -> None:
    for name in "ab":
        (harness.source / name).write_bytes(bytes(500))
    harness.pace = Writes(harness.source / "b", 1)
    with pytest.raises(TransferFailed, match="the transfers need more than the 1000 bytes of the buffer"):
        harness.carry(options=TransferOptions(limit_bytes=1000))


def test_counters_only_grow_to_the_totals_and_steps_show_life_while_nothing_moves(harness: Harness) -> None:
    plant(harness.source, {"a": b"a" * 10, "d": {"large": bytes(20000), "b": b""}})
    harness.carry()
    copying = [told for told in harness.told if told.files_total]
    assert (copying[-1].files_done, copying[-1].files_total) == (3, 3)
    assert copying[-1].bytes_done == copying[-1].bytes_total == copying[-1].durable_bytes == 20010
    assert copying[-1].durable_files == 3
    assert [told.steps for told in harness.told] == sorted(told.steps for told in harness.told)
    assert harness.told[0].phase == 1 and copying[-1].phase == 4
    harness.carry()
    assert (harness.told[-1].resumed_files, harness.told[-1].files_done, harness.told[-1].durable_bytes) == (
        3,
        3,
        20010,
    )


def test_an_empty_tree_and_empty_files_arrive(harness: Harness) -> None:
    plant(harness.source, {"d": {"e": {}}, "f": b""})
    receipt = harness.carry([harness.item(destination=harness.destination / "new" / "tree")])
    assert (receipt.files, receipt.directories, receipt.size_bytes) == (1, 3, 0)
    assert tree_of(harness.destination / "new" / "tree") == tree_of(harness.source)


def test_what_is_wrong_with_one_of_many_items_says_which(harness: Harness) -> None:
    (harness.source / "a").write_bytes(b"a")
    items = [
        harness.item(ItemKind.FILE, harness.source / name, harness.destination / name) for name in ("a", "missing", "a")
    ]
    with pytest.raises(TransferFailed, match="source/missing does not exist") as caught:
        harness.carry(items)
    assert caught.value.item == 1
    assert isinstance(root_cause(caught.value), FileNotFoundError)
    assert tree_of(harness.destination) == {}


def test_no_symbolic_link_on_the_way_is_followed_on_either_side(harness: Harness) -> None:
    (harness.source / "a").write_bytes(b"a")
    (harness.directory / "secret").mkdir()
    (harness.directory / "secret" / "a").write_bytes(b"secret")
    (harness.source / "link").symlink_to(harness.directory / "secret")
    (harness.destination / "link").symlink_to(harness.directory / "secret")
    with pytest.raises(TransferFailed, match="source/link is a symbolic link, not a directory"):
        harness.carry([harness.item(ItemKind.FILE, harness.source / "link" / "a", harness.destination / "a")])
    with pytest.raises(TransferFailed, match="destination/link is a symbolic link, not a directory"):
        harness.carry([harness.item(ItemKind.FILE, harness.source / "a", harness.destination / "link" / "a")])
    (harness.source / "link").unlink()
    plant(harness.source, {"link": {"a": b"mine"}})
    with pytest.raises(TransferFailed, match="destination/link exists and is a symbolic link"):
        harness.carry()
    assert (harness.directory / "secret" / "a").read_bytes() == b"secret"
