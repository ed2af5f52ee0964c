"""Small files in batches, helper processes, and what ends them."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from forebay.cluster.agent.transfer import file_copy, helpers, small_files, transfer_state
from forebay.cluster.agent.transfer.errors import SourceChanged, TransferFailed, TransferPaused, root_cause
from forebay.cluster.agent.transfer.options import TransferOptions, Verify
from forebay.cluster.agent.transfer.rate_limit import TransferStopped
from forebay.cluster.agent.transfer.small_files import SmallFiles
from forebay.cluster.agent.worker.worker import is_final
from forebay.cluster.system.processes import descendants, sync_file_system
from tests.cluster.agent.transfer.harness import SMALL, Harness, plant, tree_of

BATCH_FILES = 44


@pytest.fixture
def crowd(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Harness:
    """Give a harness with files for several batches and a large one."""
    monkeypatch.setattr(transfer_state, "SMALL_BATCH_FILES", BATCH_FILES)
    plant(
        harness.source,
        {f"d{number}": {f"f{inner:02}": b"%d.%d" % (number, inner) * 50 for inner in range(30)} for number in range(9)},
    )
    (harness.source / "large").write_bytes(bytes(range(256)) * 200)
    return harness


BEFORE: set[int] = set()
"""Children that this process had before the test: what an earlier test on the same worker left is not this one's."""


@pytest.fixture(autouse=True)
def _before() -> None:
    BEFORE.clear()
    BEFORE.update(descendants(os.getpid()))


def nobody_is_left() -> bool:
    """Return whether this process has no children any more that it did not have before the test."""
    return not set(descendants(os.getpid())) - BEFORE


@pytest.mark.parametrize("count", [1, 2, 6])
def test_a_crowd_of_files_arrives_whole_however_many_helpers_there_are(crowd: Harness, count: int) -> None:
    receipt = crowd.carry(options=TransferOptions(chunk_bytes=4096, large_bytes=16384, streams=count))
    assert tree_of(crowd.destination) == tree_of(crowd.source)
    size_bytes = sum(path.stat().st_size for path in crowd.source.rglob("*") if path.is_file())
    assert (receipt.files, receipt.size_bytes, receipt.written_bytes) == (271, size_bytes, size_bytes)
    assert crowd.told[-1].files_done == 271 and crowd.told[-1].bytes_done == size_bytes
    assert crowd.parts() == [] and nobody_is_left()


def test_helpers_say_the_same_of_every_file_as_one_process_does(crowd: Harness) -> None:
    one_process = TransferOptions(chunk_bytes=4096, large_bytes=16384, streams=1)
    alone = crowd.carry([crowd.item(destination=crowd.directory / "alone")], one_process).digest
    lines = crowd.lines()
    together = crowd.carry([crowd.item(destination=crowd.directory / "again")], SMALL)
    assert together.written_bytes == together.size_bytes
    assert (together.digest, crowd.lines()) == (alone, lines)


def test_no_file_of_a_group_gets_its_name_before_its_file_system_was_synced(
    crowd: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, bytes]] = []
    really_write, really_sync, really_publish = SmallFiles._write, sync_file_system, file_copy.publish

    def write(files: SmallFiles, record: small_files.ManifestRecord) -> object:
        written = really_write(files, record)
        done.append(("write", written.part))
        return written

    def sync(descriptor: int) -> None:
        really_sync(descriptor)
        done.append(("sync", b""))

    def publish(staging: int, part: bytes, *others: object, **named: object) -> None:
        done.append(("publish", part))
        really_publish(staging, part, *others, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(small_files, "GROUPED_FILES_MIN", 1)
    monkeypatch.setattr(SmallFiles, "_write", write)
    monkeypatch.setattr(small_files, "sync_file_system", sync)
    monkeypatch.setattr(small_files, "publish", publish)
    crowd.carry(options=TransferOptions(large_bytes=1 << 20, streams=1))
    unsynced: set[bytes] = set()
    published = 0
    for what, part in done:
        match what:
            case "write":
                unsynced.add(part)
            case "sync":
                unsynced.clear()
            case "publish":
                published += 1
                assert part not in unsynced
    assert published == 271
    # The last names are made durable too.
    assert done[-1] == ("sync", b"")


@pytest.mark.parametrize("files", [1, small_files.GROUPED_FILES_MIN - 1])
def test_a_few_files_are_synced_one_by_one_and_the_file_system_is_left_alone(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    synced: list[int] = []
    really = os.fsync

    def count(descriptor: int) -> None:
        synced.append(descriptor)
        really(descriptor)

    def never(_: int) -> None:
        raise AssertionError("the whole file system was synced for a few files")

    plant(harness.source, {f"f{number}": b"x" for number in range(files)})
    monkeypatch.setattr(small_files, "sync_file_system", never)
    monkeypatch.setattr(os, "fsync", count)
    harness.carry()
    assert len(synced) >= files + 1
    assert tree_of(harness.destination) == tree_of(harness.source)


def test_where_a_file_systems_sync_is_not_certain_each_file_is_synced(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    really = os.fsync

    def count(descriptor: int) -> None:
        synced.append(descriptor)
        really(descriptor)

    plant(harness.source, {f"f{number}": b"x" for number in range(3 * small_files.GROUPED_FILES_MIN)})
    monkeypatch.setattr(small_files, "is_local", lambda _: False)
    monkeypatch.setattr(os, "fsync", count)
    harness.carry()
    assert len(synced) >= 3 * small_files.GROUPED_FILES_MIN + 1
    assert tree_of(harness.destination) == tree_of(harness.source)


def test_a_sync_that_fails_puts_nothing_in_place(crowd: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(small_files, "sync_file_system", fail)
    with pytest.raises(TransferFailed, match="Input/output error") as raised:
        crowd.carry(options=TransferOptions(large_bytes=1 << 20))
    assert not is_final(raised.value)
    assert [path for path in crowd.destination.rglob("*") if path.is_file()] == []
    assert nobody_is_left()


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (OSError(errno.EACCES, "Permission denied"), True),
        (SourceChanged(), False),
        (TransferFailed("d3 is not to be had"), True),
        (ZeroDivisionError("a mistake of ours"), False),
    ],
    ids=["full", "denied", "changed", "rejected", "mistake"],
)
def test_what_fails_in_a_helper_fails_the_transfer_as_it_would_have_here(
    crowd: Harness, monkeypatch: pytest.MonkeyPatch, error: Exception, final: bool
) -> None:
    really = SmallFiles._write

    def fail(files: SmallFiles, record: small_files.ManifestRecord) -> object:
        if record.path == b"d3/f07":
            raise error
        return really(files, record)

    monkeypatch.setattr(SmallFiles, "_write", fail)
    with pytest.raises(TransferFailed) as raised:
        crowd.carry()
    assert ("d3/f07" in str(raised.value)) is isinstance(error, OSError | SourceChanged)
    assert is_final(raised.value) is final
    if isinstance(error, OSError):
        cause = root_cause(raised.value)
        assert isinstance(cause, OSError) and cause.errno == error.errno
    assert nobody_is_left()
    for path in crowd.destination.rglob("*"):
        if path.is_file() and not path.name.startswith(".forebay-"):
            assert path.read_bytes() == (crowd.source / path.relative_to(crowd.destination)).read_bytes()


def test_a_helper_that_is_killed_fails_the_transfer_and_the_next_attempt_ends_it(
    crowd: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, really = os.getpid(), file_copy.publish

    def killed(staging: int, part: bytes, directory: int, name: bytes, *others: object, **named: object) -> None:
        if name == b"f11" and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        really(staging, part, directory, name, *others, **named)  # type: ignore[arg-type]

    with monkeypatch.context() as deadly:
        deadly.setattr(small_files, "publish", killed)
        with pytest.raises(TransferFailed, match="was killed by SIGKILL; retry the transfer") as raised:
            crowd.carry()
    assert not is_final(raised.value) and nobody_is_left()
    for path in crowd.destination.rglob("*"):
        if path.is_file() and not path.name.startswith(".forebay-"):
            assert path.read_bytes() == (crowd.source / path.relative_to(crowd.destination)).read_bytes()
    crowd.carry()
    assert tree_of(crowd.destination) == tree_of(crowd.source)
    assert crowd.parts() == []


class Ending:
    """A pace that raises something after a number of looks, in whichever process comes first."""

    def __init__(self, error: BaseException, looks: int) -> None:
        self.error = error
        self.looks = looks

    def take(self, size_bytes: int, /) -> None:
        """Raise it if it is time."""
        self.check()

    def check(self) -> None:
        """Raise it if it is time."""
        self.looks -= 1
        if self.looks <= 0:
            raise self.error

    def step_bytes(self, most: int, /) -> int:
        """Return all of it."""
        return most


@pytest.mark.parametrize("error", [TransferStopped(), TransferPaused()], ids=["stopped", "paused"])
@pytest.mark.parametrize("looks", [30, 90])
def test_a_stop_that_a_helper_sees_ends_everybody_and_no_destination_is_partial(
    crowd: Harness, error: BaseException, looks: int
) -> None:
    crowd.pace = Ending(error, looks)
    with pytest.raises(type(error)):
        crowd.carry()
    assert nobody_is_left()
    for path in crowd.destination.rglob("*"):
        if path.is_file() and not path.name.startswith(".forebay-"):
            assert path.read_bytes() == (crowd.source / path.relative_to(crowd.destination)).read_bytes()


def test_helpers_that_are_ended_with_their_parent_remove_what_they_were_writing(
    crowd: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(BaseException):
        pass

    advance = transfer_state.TransferState.advance

    def interrupted(transfer: transfer_state.TransferState, moved: transfer_state.MovedAmounts) -> None:
        if moved.written_bytes:
            raise Interrupted
        advance(transfer, moved)

    monkeypatch.setattr(transfer_state.TransferState, "advance", interrupted)
    with pytest.raises(Interrupted):
        crowd.carry(options=TransferOptions(large_bytes=1 << 20))
    assert nobody_is_left() and crowd.parts() == []


def test_without_room_for_another_process_everything_is_copied_here(
    crowd: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(helpers.os, "fork", none)
    crowd.carry()
    assert tree_of(crowd.destination) == tree_of(crowd.source)


def test_a_small_file_that_storage_gives_back_wrong_is_written_once_more(
    crowd: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, wrong = small_files.digest_on_disk, iter([b"something else"])

    def digest(descriptor: int, algorithm: small_files.Algorithm) -> bytes:
        return next(wrong, None) or really(descriptor, algorithm)

    monkeypatch.setattr(small_files, "digest_on_disk", digest)
    receipt = crowd.carry(options=TransferOptions(large_bytes=1 << 20, streams=1, verify=Verify.READ_BACK))
    assert receipt.retries == 1 and tree_of(crowd.destination) == tree_of(crowd.source)


def test_runs_are_the_same_numbers_without_gaps() -> None:
    for numbers in ([], [3], [1, 2, 3], [1, 3, 4, 9], [5, 6, 8]):
        runs = small_files._runs(numbers)
        assert [number for run in runs for number in run] == numbers
        assert all(first.stop < second.start for first, second in zip(runs, runs[1:], strict=False))
