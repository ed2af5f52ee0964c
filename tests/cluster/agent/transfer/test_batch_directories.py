"""Batch staging directories: small files are written in them, and a whole one takes the place of a new directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.cluster.agent.files import removal
from forebay.cluster.agent.transfer import fence, file_copy, small_files
from forebay.cluster.agent.transfer import transfer_state as transfer
from forebay.cluster.agent.transfer.errors import TransferFailed
from forebay.cluster.agent.transfer.fence import BATCH_SUFFIX, BatchDirectory, Claimant, WriterFenced
from forebay.cluster.agent.transfer.options import TransferItem, TransferOptions, Verify
from forebay.cluster.agent.transfer.status_table import RecordState, StatusTable
from forebay.cluster.system import processes
from forebay.cluster.system.descriptors import open_directory
from tests.cluster.agent.transfer.crashing import calls_of, dies_at
from tests.cluster.agent.transfer.harness import TAG, Harness, plant, tree_of

OPTIONS = TransferOptions(chunk_bytes=4096, large_bytes=16384, streams=1)
OWNER = "a" * 32
TREE: dict[str, object] = {
    "few": {"f": b"1"},
    "full": {f"f{number}": b"%d" % number * 9 for number in range(5)},
    "inner": {"above": b"x", "below": {f"g{number}": b"%d" % number for number in range(4)}},
    "top": b"t",
    "with-large": {"a": b"a", "b": b"b", "large": bytes(20000)},
}
LEAVES = {"full", "inner/below"}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a batch directory for two files."""
    monkeypatch.setattr(small_files, "GROUPED_FILES_MIN", 2)
    monkeypatch.setattr(small_files, "BATCH_DIRECTORY_FILES_MIN", 2)


@contextmanager
def claimed(harness: Harness, attempt: int = 1) -> Iterator[TransferItem]:
    """Give the item of the whole harness, with a staging directory as an agent claims it; tidied up at the end."""
    directory = open_directory(harness.destination)
    who = Claimant("0123abcd-7", attempt, OWNER)
    staging = fence.claim(directory, str(harness.destination), who)
    try:
        yield harness.item(staging=staging)
        fence.tidy(directory, who)
    finally:
        os.close(staging)
        os.close(directory)


def run_transfer(harness: Harness, attempt: int = 1, options: TransferOptions = OPTIONS) -> Any:
    with claimed(harness, attempt) as item:
        return harness.carry([item], options)


def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the directories whose place a batch directory takes, by what the name was."""
    found: list[str] = []
    really = BatchDirectory.takes_place

    def takes_place(batch_directory: BatchDirectory, above: int, name: bytes, replaced: int) -> bool:
        where = os.readlink(f"/proc/self/fd/{replaced}")
        assert os.listdir(replaced) == []
        if really(batch_directory, above, name, replaced):
            found.append(where.partition("/destination/")[2])
            return True
        return False

    monkeypatch.setattr(BatchDirectory, "takes_place", takes_place)
    return found


@pytest.mark.parametrize("verify", [Verify.DIGEST, Verify.READ_BACK])
@pytest.mark.parametrize("replace", [True, False])
def test_new_directories_of_small_files_appear_whole_and_others_file_by_file(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, verify: Verify, replace: bool
) -> None:
    plant(harness.source, TREE)
    (harness.source / "full").chmod(0o751)
    (harness.source / "full" / "f1").chmod(0o640)
    found = taken(monkeypatch)
    options = TransferOptions(large_bytes=16384, chunk_bytes=4096, verify=verify, replace=replace, streams=1)
    receipt = run_transfer(harness, options=options)
    assert set(found) == LEAVES and receipt.complete
    assert tree_of(harness.destination) == tree_of(harness.source)
    for path in ("full", "full/f1", "inner/below", "top"):
        theirs, ours = (harness.source / path).stat(), (harness.destination / path).stat()
        assert (theirs.st_mode, theirs.st_size) == (ours.st_mode, ours.st_size)
    assert (harness.destination / "full" / "f1").stat().st_mtime_ns == (
        harness.source / "full" / "f1"
    ).stat().st_mtime_ns
    # The next one finds everything done.
    again = run_transfer(harness, 2, options)
    assert (again.resumed_files, again.digest) == (receipt.files, receipt.digest)
    assert harness.parts() == []


def test_a_directory_that_was_there_stays_the_same_one_with_what_is_in_it(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(harness.source, TREE)
    plant(harness.destination, {"full": {}, "inner": {"below": {"mine": b"mine", "g1": b"old"}}})
    (harness.destination / "full").chmod(0o700)
    before = [(harness.destination / path).stat().st_ino for path in ("full", "inner/below")]
    found = taken(monkeypatch)
    run_transfer(harness)
    assert found == [] and harness.parts() == []
    assert [(harness.destination / path).stat().st_ino for path in ("full", "inner/below")] == before
    expected = tree_of(harness.source) | {"inner/below/mine": b"mine"}
    assert tree_of(harness.destination) == expected


@pytest.mark.parametrize("kind", ["link", "directory", "file"])
def test_what_comes_into_a_new_directory_while_its_files_are_written_is_not_lost(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    plant(harness.source, TREE)
    really = BatchDirectory.takes_place

    def takes_place(batch_directory: BatchDirectory, above: int, name: bytes, replaced: int) -> bool:
        if name == b"full":
            match kind:
                case "link":
                    os.symlink("elsewhere", "f3", dir_fd=replaced)
                case "directory":
                    os.mkdir("f3", dir_fd=replaced)
                case _:
                    os.close(os.open("mine", os.O_CREAT | os.O_WRONLY, dir_fd=replaced))
        return really(batch_directory, above, name, replaced)

    monkeypatch.setattr(BatchDirectory, "takes_place", takes_place)
    if kind == "file":
        run_transfer(harness)
        assert tree_of(harness.destination) == tree_of(harness.source) | {"full/mine": b""}
    else:
        with pytest.raises(TransferFailed, match="full/f3 exists and is a"):
            run_transfer(harness)
        assert os.path.lexists(harness.destination / "full" / "f3")
    assert not [path for path in harness.parts() if path.name.endswith(BATCH_SUFFIX)]


@pytest.mark.parametrize("unlike", ["mode", "attribute"])
def test_a_directory_that_has_something_else_to_pass_on_is_not_replaced(fast_path: Path, unlike: str) -> None:
    staging = open_directory(fast_path)
    (fast_path / "new").mkdir(mode=0o700)
    if unlike == "mode":
        (fast_path / "new").chmod(0o2700)
    else:
        try:
            os.setxattr(fast_path / "new", "user.forebay", b"x")
        except OSError:
            pytest.skip("this file system has no attributes")
    replaced = open_directory(fast_path / "new")
    inode = os.fstat(replaced).st_ino
    batch_directory = BatchDirectory(staging, TAG, 0, 1, whole=True)
    assert not batch_directory.takes_place(staging, b"new", replaced)
    assert (fast_path / "new").stat().st_ino == inode
    batch_directory.remove()
    assert os.listdir(fast_path) == ["new"]
    os.close(replaced)
    os.close(staging)


def test_two_trees_that_go_to_one_place_arrive_file_by_file(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(harness.source, {"one": {"d": {"a": b"1", "b": b"2"}}, "two": {"d": {"c": b"3", "e": b"4"}}})
    found = taken(monkeypatch)
    with claimed(harness) as item:
        items = [
            harness.item(source=harness.source / name, destination=harness.destination, staging=item.staging)
            for name in ("one", "two")
        ]
        harness.carry(items, OPTIONS)
    assert found == []
    assert tree_of(harness.destination) == {"d": None, "d/a": b"1", "d/b": b"2", "d/c": b"3", "d/e": b"4"}


NAMES = st.sampled_from(["a", "a-b", "b", "c", "d"])
TREES: st.SearchStrategy[Any] = st.recursive(
    st.binary(max_size=3), lambda inner: st.dictionaries(NAMES, inner, max_size=5), max_leaves=14
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    tree=st.dictionaries(NAMES, TREES, max_size=5),
    there=st.dictionaries(NAMES, TREES, max_size=2),
    batch=st.integers(1, 9),
)
def test_whatever_the_tree_and_the_batches_everything_arrives_and_what_was_there_stays(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, tree: dict[str, object], there: dict[str, object], batch: int
) -> None:
    monkeypatch.setattr(transfer, "SMALL_BATCH_FILES", batch)
    monkeypatch.setattr(transfer, "SMALL_BATCH_FILES_MIN", batch)
    place = fast_path / os.urandom(8).hex()
    place.mkdir()
    harness = Harness(place)
    plant(harness.source, tree)
    plant(harness.destination, there)
    before, wanted = tree_of(harness.destination), tree_of(harness.source)
    clash = any((before[path] is None) != (wanted[path] is None) for path in before.keys() & wanted.keys())
    if clash:
        with pytest.raises(TransferFailed, match="exists and is a"):
            run_transfer(harness)
    else:
        run_transfer(harness)
        assert tree_of(harness.destination) == before | wanted
        assert harness.parts() == []
    harness.close()


@pytest.mark.parametrize("streams", [1, 2])
def test_killed_at_any_call_no_file_is_partial_and_the_next_attempt_ends_right_and_leaves_nothing(
    fast_path: Path, streams: int
) -> None:
    options = TransferOptions(chunk_bytes=4096, large_bytes=16384, streams=streams)

    def prepared(name: str) -> Harness:
        (fast_path / name).mkdir()
        harness = Harness(fast_path / name)
        plant(harness.source, TREE)
        plant(harness.destination, {"few": {"f": b"old"}})
        return harness

    harness = prepared("count")
    total = calls_of(lambda: run_transfer(harness, options=options))
    harness.close()
    killed = 0
    for number in range(streams, total + 1, max(1, total // 10)):
        harness = prepared(str(number))
        killed += dies_at(partial(run_transfer, harness, options=options), number)
        source = tree_of(harness.source)
        for path, data in tree_of(harness.destination).items():
            if not path.startswith(".forebay-"):
                assert data == source[path] or (path, data) == ("few/f", b"old"), (number, path)
        harness.attempt = 1
        assert run_transfer(harness, 2, options).complete
        assert tree_of(harness.destination) == source, number
        harness.close()
    assert killed > 5


def test_a_shelf_is_not_taken_over_and_goes_with_the_attempt_that_made_it(harness: Harness) -> None:
    with claimed(harness, 3) as late:
        batch_directory = BatchDirectory(late.staging, TAG, 0, 1, whole=True)
        os.close(os.open("a", os.O_CREAT | os.O_WRONLY, dir_fd=batch_directory.descriptor()))
        os.close(os.open("half", os.O_CREAT | os.O_WRONLY, dir_fd=late.staging))
        with claimed(harness, 4) as newest:
            assert os.listdir(newest.staging) == ["half"]
            os.unlink("half", dir_fd=newest.staging)
        assert fence.is_removed(late.staging) and fence.is_removed(batch_directory.descriptor())
        with pytest.raises(FileNotFoundError):
            os.open("b", os.O_CREAT | os.O_WRONLY, dir_fd=batch_directory.descriptor())
        batch_directory.close()
    assert harness.parts() == []


def test_a_shelf_that_is_being_removed_cannot_take_a_place_with_what_is_left_of_it(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = harness.destination / "d"
    place.mkdir(mode=0o700)
    replaced, above = open_directory(place), open_directory(harness.destination)
    really, tried = removal.empty_directory, []
    with claimed(harness, 3) as late:
        batch_directory = BatchDirectory(late.staging, TAG, 0, 1, whole=True)
        for name in "abc":
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=batch_directory.descriptor()))

        def half_way(directory: int, *, shown: str, lasting: bool) -> None:
            os.unlink("b", dir_fd=batch_directory.descriptor())
            with pytest.raises(FileNotFoundError):
                batch_directory.takes_place(above, b"d", replaced)
            tried.append(shown)
            really(directory, shown=shown, lasting=lasting)

        monkeypatch.setattr("forebay.cluster.agent.transfer.fence.empty_directory", half_way)
        with claimed(harness, 4):
            assert tried and os.listdir(place) == []
        batch_directory.close()
    os.close(replaced)
    os.close(above)


def test_whoever_lost_the_destination_while_it_wrote_on_a_shelf_is_fenced_and_puts_nothing_in_place(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(harness.source, {"full": TREE["full"]})
    really = processes.sync_file_system
    directory = open_directory(harness.destination)

    def lose(descriptor: int) -> None:
        really(descriptor)
        os.close(fence.claim(directory, "there", Claimant("0123abcd-7", 9, "b" * 32)))

    monkeypatch.setattr(small_files, "sync_file_system", lose)
    with pytest.raises(WriterFenced):
        run_transfer(harness)
    assert tree_of(harness.destination / "full") == {}
    os.close(directory)


def test_what_killed_helpers_left_on_shelves_is_removed_when_the_transfer_fails(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(harness.source, TREE)

    def die(*_: object, **__: object) -> None:
        os._exit(9)

    monkeypatch.setattr(small_files, "sync_file_system", die)
    with claimed(harness) as item:
        with pytest.raises(TransferFailed, match="a helper process of the transfer"):
            harness.carry([item], TransferOptions(large_bytes=16384, chunk_bytes=4096, streams=2))
        assert os.listdir(item.staging) == []
    assert harness.parts() == []


def test_shelves_that_the_same_attempt_left_are_emptied_before_they_are_used(harness: Harness) -> None:
    with claimed(harness) as item:
        for whole in (True, False):
            batch_directory = BatchDirectory(item.staging, TAG, 0, 1, whole=whole)
            assert os.listdir(batch_directory.descriptor()) == []
            os.close(os.open("a", os.O_CREAT | os.O_WRONLY, dir_fd=batch_directory.descriptor()))
            batch_directory.close()
        fence.discard_all(item.staging)
        assert os.listdir(item.staging) == []


def test_no_shelf_takes_its_place_before_what_is_on_it_is_durable_and_none_is_done_before_the_place_is(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(harness.source, {f"d{number}": TREE["full"] for number in range(5)})
    monkeypatch.setattr(transfer, "SMALL_BATCH_FILES", 10)
    monkeypatch.setattr(transfer, "SMALL_BATCH_FILES_MIN", 10)
    unsynced: set[int] = set()
    placed: set[int] = set()
    done: list[int] = []
    takes_place, put_files = BatchDirectory.takes_place, StatusTable.put_files

    def synced(descriptor: int) -> None:
        processes.sync_file_system(descriptor)
        unsynced.clear()

    def created(directory: int, part: bytes, mode: int = 0o600) -> int:
        unsynced.add(os.fstat(directory).st_ino)
        return file_copy.create_part(directory, part, mode)

    def took(batch_directory: BatchDirectory, above: int, name: bytes, replaced: int) -> bool:
        inode = os.fstat(batch_directory.descriptor()).st_ino
        assert inode not in unsynced
        unsynced.add(inode)
        placed.add(inode)
        return takes_place(batch_directory, above, name, replaced)

    def put(table: StatusTable, index: int, state: RecordState, files: Any) -> None:
        if state is RecordState.DONE:
            done.append(len(files))
            assert not placed & unsynced
        else:
            assert not unsynced - placed
        put_files(table, index, state, files)

    monkeypatch.setattr(small_files, "sync_file_system", synced)
    monkeypatch.setattr(small_files, "create_part", created)
    monkeypatch.setattr(BatchDirectory, "takes_place", took)
    monkeypatch.setattr(StatusTable, "put_files", put)
    run_transfer(harness)
    assert len(placed) == 5 and sum(done) == 25
