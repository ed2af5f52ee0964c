"""Journal across sync log and LMDB: which data goes where, without a visible difference."""

import errno
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.wal import BrokenInvariant, Entry, Environment, Journal, RecoveryRefused, StorageFailed, sync_log
from forebay.wal import journal as journal_module
from forebay.wal.environment import DATA_FILE
from forebay.wal.failures import LOG_FILE
from forebay.wal.ledger import Ledger
from forebay.wal.recovery import Condition
from forebay.wal.sectors import BLOCK_BYTES
from forebay.wal.sync_log import RECORD_MAX_BYTES, DiskFile, SyncRecord
from tests.wal.conftest import LOG_BYTES
from tests.wal.logs import content_of, made_with_log, rewrite
from tests.wal.support import apply, entry, fill, open_env, opened

ALL = {"max_bytes": 1 << 30, "max_entries": 1 << 20}


@contextmanager
def counted(env: Environment) -> Iterator[Counter[str]]:
    """Count durable writes by kind."""
    done, commit = Counter[str](), env.commit

    def count(sync: Any) -> None:
        done["record" if isinstance(sync, SyncRecord) else "checkpoint"] += 1
        commit(sync)

    env.commit = count
    yield done
    env.commit = commit


def test_sync_is_exactly_one_write_and_one_flush_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_env(tmp_path) as env:
        journal = Journal(env)
        calls: list[str] = []
        pwrite, fdatasync = os.pwrite, os.fdatasync
        monkeypatch.setattr(os, "pwrite", lambda *given: (calls.append("write"), pwrite(*given))[1])
        monkeypatch.setattr(os, "fdatasync", lambda *given: (calls.append("flush"), fdatasync(*given))[1])
        before = env._environment.info()["last_txnid"]  # type: ignore[union-attr]
        for index in range(1, 6):
            fill(journal, index, applied=index - 1)
        assert calls == ["write", "flush"] * 5
        assert env._environment.info()["last_txnid"] == before  # type: ignore[union-attr]


def test_log_file_keeps_its_size_and_its_blocks_are_really_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    original = DiskFile.write

    def write(self: DiskFile, data: bytes, offset: int) -> None:
        written.append(len(data))
        original(self, data, offset)

    monkeypatch.setattr(DiskFile, "write", write)
    with open_env(tmp_path) as env:
        assert written == [LOG_BYTES]
        journal = Journal(env)
        for index in range(1, 40):
            fill(journal, index)
        status = (tmp_path / LOG_FILE).stat()
        assert status.st_size == LOG_BYTES <= status.st_blocks * 512


def test_full_log_restarts_after_a_checkpoint(tmp_path: Path) -> None:
    records_max = LOG_BYTES // BLOCK_BYTES - 1
    with open_env(tmp_path) as env:
        journal = Journal(env)
        with counted(env) as done:
            for index in range(1, 3 * records_max + 5):
                fill(journal, index)
                assert done["checkpoint"] == index // (records_max + 1)
        assert journal._sync_log.generation > 3
    with opened(tmp_path) as journal:
        assert journal.last_index == 3 * records_max + 4


@pytest.mark.parametrize("size_bytes", [RECORD_MAX_BYTES, LOG_BYTES, 1 << 20])
def test_sync_too_large_for_the_log_goes_to_lmdb_with_the_log_content(tmp_path: Path, size_bytes: int) -> None:
    with open_env(tmp_path) as env:
        journal = Journal(env)
        fill(journal, 3, applied=2)
        with counted(env) as done:
            journal.append([Entry(4, 1, bytes(size_bytes))])
            journal.sync()
        assert done == {"checkpoint": 1}
        assert Ledger(env).applied_index == 2
        with counted(env) as done:
            fill(journal, 5)
        assert done == {"record": 1}
    with opened(tmp_path) as journal:
        assert journal.last_index == 5 and len(journal.entry(4).data) == size_bytes


@pytest.mark.parametrize(("name", "bound"), [("CHECKPOINT_BYTES", 1500), ("CHECKPOINT_ROWS", 12)])
def test_checkpoint_comes_before_lmdb_lacks_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, bound: int
) -> None:
    monkeypatch.setattr(journal_module, name, bound)
    with open_env(tmp_path) as env:
        journal = Journal(env)
        with counted(env) as done:
            for index in range(1, 25):
                fill(journal, index, applied=index - 1)
        assert 2 <= done["checkpoint"] <= 6 and done["checkpoint"] + done["record"] == 24
        assert journal.last_index - journal._stored.last < 13


def test_resets_and_compaction_go_straight_to_lmdb(tmp_path: Path) -> None:
    with open_env(tmp_path) as env:
        journal = Journal(env)
        fill(journal, 6, applied=5)
        journal.compact_to(3)
        with counted(env) as done:
            fill(journal, 7)
        assert done == {"checkpoint": 1}
        fill(journal, 8)
        with counted(env) as done:
            journal.reset_to(20, 2, bytes(32), 40)
            journal.sync()
        assert done == {"checkpoint": 2}
        fill(journal, 21, term=2)
    with opened(tmp_path) as journal:
        assert (journal.base_index, journal.last_index, journal.applied_index) == (20, 21, 20)


def test_start_makes_one_checkpoint_for_any_log_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint halfway would begin a generation, and a crash after it would lose the remaining records."""
    with open_env(tmp_path) as env:
        journal = Journal(env)
        fill(journal, 1)
        for index in range(2, 20):
            fill(journal, index, applied=index - 1)
    for bound in ("HINTS_MAX_ROWS", "CHECKPOINT_ROWS"):
        monkeypatch.setattr(journal_module, bound, 3)
    with open_env(tmp_path) as env:
        with counted(env) as done:
            journal = Journal(env)
        assert done == {"checkpoint": 1}
        assert (journal.last_index, journal.applied_index) == (19, 18)
        assert Ledger(env).verify().entries == 18


def test_entries_that_lmdb_lacks_stay_in_memory_beyond_every_bound(tmp_path: Path) -> None:
    with open_env(tmp_path) as env:
        journal = Journal(env, recent_max_bytes=100)
        for index in range(1, 31):
            fill(journal, index, applied=index - 1)
        assert journal._stored.last == 0
        assert journal.entries(1, **ALL) == [entry(index) for index in range(1, 31)]
        assert [journal.term_of(index) for index in (0, 1, 30, 31)] == [0, 1, 1, None]
        digests = [journal.digest_at(index) for index in range(31)]
        for index in (1, 17, 29):
            assert journal.record_applied(entry(index), 2 * index) == digests[index]
            with pytest.raises(BrokenInvariant, match="applied again"):
                journal.record_applied(entry(index), 2 * index + 1)
        journal.flush_hints()
        assert journal._suffix.first > 25
        assert [journal.digest_at(index) for index in range(30)] == digests[:30]
        fill(journal, 33, applied=32)
        assert [journal.digest_at(index) for index in range(30)] == digests[:30]
        assert journal.entries(1, **ALL) == [entry(index) for index in range(1, 34)]


def test_truncation_is_the_same_for_entries_in_lmdb_log_and_memory(tmp_path: Path) -> None:
    """Entries 1 to 4 are in LMDB, 5 to 8 in the log, 9 and 10 in memory. Cut anywhere, and twice."""
    for first in range(3, 11):
        for second in range(3, first + 1):
            directory = tmp_path / f"{first}-{second}"
            with opened(directory) as journal:
                fill(journal, 4, applied=2)
                journal.flush_hints()
                fill(journal, 6)
                fill(journal, 8)
                journal.append([entry(9), entry(10)])
                journal.set_term(2, "r2")
                journal.truncate_from(first)
                journal.append([entry(first, 2)])
                journal.sync()
                journal.set_term(3, None)
                journal.truncate_from(second)
                assert journal.dirty
                journal.append([entry(second, 3), entry(second + 1, 3)])
                journal.sync()
                expected = [entry(index) for index in range(1, second)] + [entry(second, 3), entry(second + 1, 3)]
                assert journal.entries(1, **ALL) == expected
            for _ in range(2):
                with opened(directory, create=False) as journal:
                    assert journal.entries(1, **ALL) == expected
                    assert (journal.term, journal.voted_for, journal.last_term) == (3, None, 3)


def test_truncation_alone_is_durable(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 4)
        journal.flush_hints()
        fill(journal, 6)
        journal.truncate_from(3)
        journal.sync()
        assert not journal.dirty
    with opened(tmp_path, create=False) as journal:
        assert journal.last_index == 2


def _short(self: DiskFile, data: bytes, offset: int) -> None:
    os.pwrite(self._descriptor, data[:512], offset)
    raise OSError(errno.EIO, f"{os.strerror(errno.EIO)}: 512 of {len(data)} bytes were written")


def _raise(code: int) -> object:
    def fail(*given: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("call", "failing", "words"),
    [
        ("write", _raise(errno.EIO), "Input/output error"),
        ("write", _raise(errno.ENOSPC), "No space left on device"),
        ("write", _short, "512 of 4096 bytes were written"),
        ("sync", _raise(errno.EIO), "Input/output error"),
        ("sync", _raise(errno.ENOSPC), "No space left on device"),
    ],
)
def test_first_failed_write_or_flush_of_the_log_stops_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, failing: object, words: str
) -> None:
    with open_env(tmp_path) as env:
        journal = Journal(env)
        fill(journal, 3)
        with monkeypatch.context() as patched:
            patched.setattr(DiskFile, call, failing)
            journal.append([entry(4)])
            with pytest.raises(StorageFailed, match=rf"sync.log could not be written durably: .*{words}.*Free space"):
                journal.sync()
        before = content_of(tmp_path)
        for again in (journal.sync, journal.flush_hints, lambda: journal.append([entry(5)])):
            with pytest.raises(StorageFailed, match="sync.log could not be written durably"):
                again()
        assert content_of(tmp_path) == before
    with opened(tmp_path, create=False) as journal:
        # A failed flush leaves an unknown state: nothing was promised, so both outcomes are right.
        assert journal.last_index == (4 if call == "sync" else 3)


def test_short_write_is_an_error_even_if_the_next_would_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_env(tmp_path) as env:
        journal = Journal(env)
        pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:1000], offset))
        journal.set_term(1, "r1")
        with pytest.raises(StorageFailed, match="Input/output error: 1000 of 4096 bytes were written"):
            journal.sync()


def test_interrupted_sync_stops_the_environment(tmp_path: Path) -> None:
    with open_env(tmp_path) as env:
        journal = Journal(env)

        def interrupt(sync: Any) -> None:
            raise KeyboardInterrupt

        env.commit = interrupt
        journal.set_term(1, "r1")
        with pytest.raises(KeyboardInterrupt):
            journal.sync()
        with pytest.raises(StorageFailed, match="interrupted"):
            journal.sync()


def test_sync_is_never_written_past_the_end_of_the_log(tmp_path: Path) -> None:
    with open_env(tmp_path) as env:
        with pytest.raises(BrokenInvariant, match="does not fit"):
            env.append(b"before the journal has begun a generation")
        with pytest.raises(StorageFailed):
            env.check()


def test_symbolic_link_instead_of_a_new_log_is_not_followed(tmp_path: Path) -> None:
    directory, victim = tmp_path / "wal", tmp_path / "victim"
    victim.write_bytes(b"precious")
    directory.mkdir()
    (directory / LOG_FILE).symlink_to(victim)
    with opened(directory) as journal:
        fill(journal, journal.last_index + 1, term=2)
    assert victim.read_bytes() == b"precious"
    assert not (directory / LOG_FILE).is_symlink()


def test_log_counts_as_used_if_any_byte_after_the_first_block_is_set(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    made = content_of(tmp_path)[:BLOCK_BYTES].ljust(LOG_BYTES, b"\0")
    descriptor = os.open(tmp_path, os.O_RDONLY)
    store = sync_log.DiskStore(descriptor, readonly=True)
    try:
        rewrite(tmp_path, made)
        assert not sync_log.is_used(store, tmp_path)
        for at in (BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES - 1, 2 * BLOCK_BYTES, LOG_BYTES - 1):
            rewrite(tmp_path, made[:at] + b"\1" + made[at + 1 :])
            assert sync_log.is_used(store, tmp_path), f"byte {at} is of a record"
    finally:
        os.close(descriptor)


def test_log_of_another_size_than_the_default_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later release may create larger logs; LMDB records the size."""
    made_with_log(tmp_path)
    monkeypatch.setattr(sync_log, "LOG_BYTES", 2 * LOG_BYTES)
    with opened(tmp_path, create=False) as journal:
        assert journal.last_index == 12
        fill(journal, 13, term=3)
    assert len(content_of(tmp_path)) == LOG_BYTES


def test_hints_synced_to_the_log_survive_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 4)
        apply(journal, 3)
        journal.sync()
    with opened(tmp_path, create=False) as journal:
        assert (journal.commit_index, journal.applied_index, journal.applied_revision) == (3, 3, 6)


def test_no_flipped_bit_in_the_log_changes_the_journal(tmp_path: Path) -> None:
    """Each flip is rejected or has no effect. Most flips are inside records."""
    made_with_log(tmp_path)
    data, log = (tmp_path / DATA_FILE).read_bytes(), content_of(tmp_path)
    with opened(tmp_path, create=False) as journal:
        expected = journal.term, journal.voted_for, journal.applied_digest, journal.entries(3, **ALL)
    used = 4 * BLOCK_BYTES
    outcomes = Counter[str]()
    for number in range(240):
        bit = number * 2_654_435_761 % (8 * (used if number % 4 else len(log)))
        content = bytearray(log)
        content[bit // 8] ^= 1 << bit % 8
        rewrite(tmp_path, bytes(content))
        (tmp_path / DATA_FILE).write_bytes(data)
        try:
            with opened(tmp_path, create=False) as journal:
                assert (journal.term, journal.voted_for, journal.applied_digest, journal.entries(3, **ALL)) == expected
            outcomes["without effect" if bit >= 8 * used else f"believed: bit {bit}"] += 1
        except RecoveryRefused as refused:
            assert refused.condition in (Condition.SYNC_LOG_DAMAGED, Condition.SYNC_LOG_FOREIGN)
            outcomes["rejected"] += 1
    assert set(outcomes) == {"rejected", "without effect"} and outcomes["rejected"] >= 180, outcomes
