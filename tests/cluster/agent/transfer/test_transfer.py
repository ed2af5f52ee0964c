"""Carrying: what arrives is what was there, whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.agent.transfer.errors import ReadBackFailed, SourceChanged, TransferFailed, root_cause
from cluster.agent.transfer.options import Kind, Options, Verify
from cluster.agent.transfer.progress import nothing
from cluster.agent.transfer.receipts import read_lines, recheck
from tests.cluster.agent.transfer.rig import SMALL, Rig, plant, tree_of

names = st.text(alphabet="ab.é \n$-", min_size=1, max_size=4).filter(lambda name: name not in (".", ".."))
contents = st.one_of(st.binary(max_size=300), st.integers(16380, 40000).map(lambda size: os.urandom(7) * (size // 7)))
trees = st.recursive(contents, lambda inner: st.dictionaries(names, inner, max_size=4), max_leaves=12).map(
    lambda tree: tree if isinstance(tree, dict) else {"f": tree}
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=trees)
def test_a_tree_arrives_as_it_was_with_small_files_and_large_ones(fast_path: Path, tree: dict[str, object]) -> None:
    rig = Rig(Path(tempfile.mkdtemp(dir=fast_path)))
    plant(rig.source, tree)
    receipt = rig.carry()
    expected = tree_of(rig.source)
    assert tree_of(rig.destination) == expected
    sizes = [len(data) for data in expected.values() if data is not None]
    assert (receipt.files, receipt.size_bytes, receipt.complete) == (len(sizes), sum(sizes), True)
    assert receipt.directories == len(expected) - len(sizes) + 1
    assert [line.path for line in rig.lines() if line.kind == "file"] == [
        str(path.relative_to(rig.source)) for path in sorted(rig.source.rglob("*"), key=os.fsencode) if path.is_file()
    ] or len(rig.lines()) == len(expected) + 1
    rig.close()


def test_one_file_goes_to_a_name_and_the_directories_on_the_way_are_made(rig: Rig) -> None:
    (rig.source / "a").write_bytes(b"data")
    item = rig.item(Kind.FILE, rig.source / "a", rig.destination / "x" / "y" / "b")
    assert rig.carry([item]).files == 1
    assert tree_of(rig.destination) == {"x": None, "x/y": None, "x/y/b": b"data"}


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


def test_a_source_that_changes_once_is_read_again_and_one_that_keeps_changing_is_refused(rig: Rig) -> None:
    log = rig.source / "log"
    log.write_bytes(b"0")
    rig.pace = Writes(log, 1)
    receipt = rig.carry()
    assert (receipt.files, receipt.size_bytes, receipt.retries) == (1, 2, 1)
    assert (rig.destination / "log").read_bytes() == b"0+"
    log.write_bytes(b"0")
    rig.pace = Writes(log, 99)
    with pytest.raises(TransferFailed, match="source/log changed while it was copied, 2 times") as caught:
        rig.carry()
    assert isinstance(root_cause(caught.value), SourceChanged)
    assert tree_of(rig.destination) == {"log": b"0+"}


def test_a_large_source_that_changes_is_planned_again_and_one_that_keeps_changing_is_refused(rig: Rig) -> None:
    log = rig.source / "log"
    log.write_bytes(bytes(20000))
    rig.pace = Writes(log, 1)
    receipt = rig.carry()
    assert (receipt.size_bytes, receipt.retries) == (20001, 1)
    assert tree_of(rig.destination) == tree_of(rig.source) and not rig.parts()
    rig.pace = Writes(log, 99)
    with pytest.raises(TransferFailed, match="source/log changed while it was copied, 2 times") as caught:
        rig.carry()
    assert isinstance(root_cause(caught.value), SourceChanged)
    assert tree_of(rig.destination) == {"log": bytes(20000) + b"+"} and not rig.parts()


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
    rig: Rig, after: str, backend: str
) -> None:
    names = ("a", "b", "c")
    plant(rig.source, {name: name.encode() * 20000 for name in names})
    became = os.urandom(AFTER[after])

    def write() -> None:
        # In place: files around it keep their marks.
        (rig.source / "b").write_bytes(became)

    rig.planned = write
    items = [rig.item()._replace(backend=backend)]
    options = msgspec.structs.replace(SMALL, template="/bin/cp -aT {source} {destination}")
    receipt = rig.carry(items, options)
    assert tree_of(rig.destination) == tree_of(rig.source) and not rig.parts()
    assert (receipt.size_bytes, receipt.retries, receipt.files) == (40000 + len(became), 0, 3)
    descriptor = os.open(rig.home / "receipts" / "7.1.stage_out", os.O_RDONLY)
    assert list(recheck(descriptor, items, "xxh3-128")) == []
    (line,) = (line for line in read_lines(descriptor) if line.path == "b")
    assert line.size == len(became) and -(-line.size // line.chunk_bytes) <= 5
    os.close(descriptor)
    rig.planned = nothing
    again = rig.carry(items, options)
    assert again.resumed_files == 2 and tree_of(rig.destination) == tree_of(rig.source)


def test_what_a_large_file_grew_to_is_held_against_the_limit_before_it_takes_room(rig: Rig) -> None:
    plant(rig.source, {"a": bytes(20000), "b": bytes(20000)})

    def grow() -> None:
        os.truncate(rig.source / "b", 1 << 40)

    rig.planned = grow
    with pytest.raises(TransferFailed, match="a source grew .* more than the 50000 bytes of the buffer"):
        rig.carry(options=msgspec.structs.replace(SMALL, limit_bytes=50000, streams=1))
    assert set(tree_of(rig.destination)) <= {"a"} and not rig.parts()


@pytest.mark.parametrize(("size", "module"), [(3, "small"), (20000, "large")])
def test_what_does_not_read_back_as_it_was_written_is_refused_by_name_and_not_put_in_place(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, size: int, module: str
) -> None:
    (rig.source / "result").write_bytes(bytes(size))
    (rig.destination / "result").write_bytes(b"old")
    options = Options(chunk_bytes=4096, large_bytes=16384, verify=Verify.READ_BACK)
    monkeypatch.setattr(f"cluster.agent.transfer.{module}.digest_on_disk", lambda *_: b"another digest")
    monkeypatch.setattr("cluster.agent.transfer.large.open_direct", lambda *_: None)
    with pytest.raises(ReadBackFailed, match="destination/result does not hold what was read from .*source/result"):
        rig.carry(options=options)
    assert tree_of(rig.destination) == {"result": b"old"}
    monkeypatch.undo()
    assert rig.carry(options=options).files == 1
    assert tree_of(rig.destination) == {"result": bytes(size)}


def test_what_grows_past_the_limit_while_it_is_copied_is_refused(rig: Rig) -> None:
    for name in "ab":
        (rig.source / name).write_bytes(bytes(500))
    rig.pace = Writes(rig.source / "b", 1)
    with pytest.raises(TransferFailed, match="the transfers need more than the 1000 bytes of the buffer"):
        rig.carry(options=Options(limit_bytes=1000))


def test_counters_only_grow_to_the_totals_and_steps_show_life_while_nothing_moves(rig: Rig) -> None:
    plant(rig.source, {"a": b"a" * 10, "d": {"large": bytes(20000), "b": b""}})
    rig.carry()
    copying = [told for told in rig.told if told.files_total]
    assert (copying[-1].files_done, copying[-1].files_total) == (3, 3)
    assert copying[-1].bytes_done == copying[-1].bytes_total == copying[-1].durable_bytes == 20010
    assert copying[-1].durable_files == 3
    assert [told.steps for told in rig.told] == sorted(told.steps for told in rig.told)
    assert rig.told[0].phase == 1 and copying[-1].phase == 4
    rig.carry()
    assert (rig.told[-1].resumed_files, rig.told[-1].files_done, rig.told[-1].durable_bytes) == (3, 3, 20010)


def test_an_empty_tree_and_empty_files_arrive(rig: Rig) -> None:
    plant(rig.source, {"d": {"e": {}}, "f": b""})
    receipt = rig.carry([rig.item(destination=rig.destination / "new" / "tree")])
    assert (receipt.files, receipt.directories, receipt.size_bytes) == (1, 3, 0)
    assert tree_of(rig.destination / "new" / "tree") == tree_of(rig.source)


def test_what_is_wrong_with_one_of_many_items_says_which(rig: Rig) -> None:
    (rig.source / "a").write_bytes(b"a")
    items = [rig.item(Kind.FILE, rig.source / name, rig.destination / name) for name in ("a", "missing", "a")]
    with pytest.raises(TransferFailed, match="source/missing does not exist") as caught:
        rig.carry(items)
    assert caught.value.item == 1
    assert isinstance(root_cause(caught.value), FileNotFoundError)
    assert tree_of(rig.destination) == {}


def test_no_symbolic_link_on_the_way_is_followed_on_either_side(rig: Rig) -> None:
    (rig.source / "a").write_bytes(b"a")
    (rig.directory / "secret").mkdir()
    (rig.directory / "secret" / "a").write_bytes(b"secret")
    (rig.source / "link").symlink_to(rig.directory / "secret")
    (rig.destination / "link").symlink_to(rig.directory / "secret")
    with pytest.raises(TransferFailed, match="source/link is a symbolic link, not a directory"):
        rig.carry([rig.item(Kind.FILE, rig.source / "link" / "a", rig.destination / "a")])
    with pytest.raises(TransferFailed, match="destination/link is a symbolic link, not a directory"):
        rig.carry([rig.item(Kind.FILE, rig.source / "a", rig.destination / "link" / "a")])
    (rig.source / "link").unlink()
    plant(rig.source, {"link": {"a": b"mine"}})
    with pytest.raises(TransferFailed, match="destination/link exists and is a symbolic link"):
        rig.carry()
    assert (rig.directory / "secret" / "a").read_bytes() == b"secret"
