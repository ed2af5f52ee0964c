"""Journal as consensus sees it: buffered, merged with stored entries, and durable only after a sync."""

from pathlib import Path

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.wal import BrokenInvariant, Entry, Environment, Journal, StorageFailed
from forebay.wal import journal as journal_module
from forebay.wal.codec import NO_OP
from forebay.wal.ledger import Ledger
from forebay.wal.records import GENESIS, Gap, chain_digest
from tests.wal.logs import auditor
from tests.wal.support import apply, entry, fill, open_env, opened

ALL = {"max_bytes": 1 << 30, "max_entries": 1 << 20}


def test_empty_journal_answers_every_query(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        assert (journal.first_index, journal.last_index, journal.last_term) == (1, 0, 0)
        assert (journal.base_index, journal.base_term, journal.commit_index) == (0, 0, 0)
        assert (journal.term, journal.voted_for, journal.applied_index) == (0, None, 0)
        assert journal.applied_digest == GENESIS == journal.digest_at(0)
        assert journal.term_of(0) == 0 and journal.term_of(1) is None
        assert journal.entries(1, **ALL) == []
        assert not journal.dirty
        with pytest.raises(LookupError):
            journal.entry(1)


def test_buffered_changes_are_visible_at_once_and_durable_after_sync(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 3)
        journal.set_term(2, "r2")
        journal.append([entry(4, 2)])
        assert journal.last_index == 4 and journal.dirty
        assert journal.entries(3, **ALL) == [entry(3), entry(4, 2)]
    with opened(tmp_path) as journal:
        assert (journal.last_index, journal.term, journal.voted_for) == (3, 1, None)
        journal.set_term(2, "r2")
        journal.append([entry(4, 2)])
        journal.sync()
        assert not journal.dirty
    with opened(tmp_path) as journal:
        assert (journal.last_index, journal.last_term, journal.term, journal.voted_for) == (4, 2, 2, "r2")


def test_truncation_and_replacement_become_durable_together(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 5, applied=2)
        journal.set_term(2, None)
        journal.truncate_from(4)
        assert journal.dirty and journal.last_index == 3 and journal.term_of(4) is None
    with opened(tmp_path) as journal:
        assert journal.last_index == 5
        journal.set_term(2, None)
        journal.truncate_from(4)
        journal.append([entry(4, 2)])
        journal.sync()
    with opened(tmp_path) as journal:
        assert journal.entries(1, **ALL) == [entry(1), entry(2), entry(3), entry(4, 2)]


@pytest.mark.parametrize("index", [0, 1, 2, 3, 4])
def test_truncation_of_committed_or_applied_entries_breaks_an_invariant(tmp_path: Path, index: int) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 6, applied=2)
        journal.set_commit(4)
        with pytest.raises(BrokenInvariant, match="4 is committed"):
            journal.truncate_from(index)
        assert journal.last_index == 6 and not journal.dirty


def test_resent_prefix_finds_its_conflict_without_truncation(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 6)
        assert [journal.term_of(index) for index in range(8)] == [0, 1, 1, 1, 1, 1, 1, None]
        journal.truncate_from(7)
        assert journal.last_index == 6 and not journal.dirty


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ([entry(5)], "entry 5 appended after entry 3"),
        ([entry(3)], "entry 3 appended after entry 3"),
        ([entry(4), entry(6)], "entry 6 appended after entry 4"),
        ([entry(4, 0)], "appended after term 1"),
        ([entry(4, 2)], "in term 1"),
        ([Entry(4, 1, bytes((1 << 20) + 1))], "the maximum is 1048576"),
    ],
)
def test_invalid_append_changes_nothing(tmp_path: Path, entries: list[Entry], sentence: str) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 3)
        with pytest.raises(BrokenInvariant, match=sentence):
            journal.append(entries)
        assert journal.last_index == 3 and not journal.dirty


def test_term_and_vote_never_go_back(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.set_term(3, None)
        journal.set_term(3, "r2")
        journal.set_term(3, "r2")
        for term, vote in [(2, None), (3, "r3"), (3, None)]:
            with pytest.raises(BrokenInvariant):
                journal.set_term(term, vote)
        with pytest.raises(ValueError, match="replica name"):
            journal.set_term(4, "")
        journal.set_term(4, None)
        assert (journal.term, journal.voted_for) == (4, None)


def test_entry_of_maximum_size_survives(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.set_term(1, None)
        journal.append([Entry(1, 1, bytes(range(256)) * 4096)])
        journal.sync()
    with opened(tmp_path) as journal:
        assert journal.entry(1).data == bytes(range(256)) * 4096


def test_hints_alone_are_not_dirty_and_are_written_once(tmp_path: Path) -> None:
    with open_env(tmp_path) as env:
        journal = Journal(env)
        fill(journal, 4)
        apply(journal, 3)
        assert not journal.dirty
        commits: list[object] = []
        commit = env.commit

        def counted(transaction: "lmdb.Transaction[bytes]") -> None:
            commits.append(None)
            commit(transaction)

        env.commit = counted
        journal.flush_hints()
        journal.flush_hints()
        journal.sync()
        assert len(commits) == 1
    with opened(tmp_path) as journal:
        assert (journal.commit_index, journal.applied_index, journal.applied_revision) == (3, 3, 6)


def test_commit_hint_never_exceeds_the_last_entry_and_never_falls(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 4)
        journal.set_commit(3)
        journal.set_commit(1)
        assert journal.commit_index == 3
        with pytest.raises(BrokenInvariant):
            journal.set_commit(5)


def test_compaction_hides_entries_from_consensus_and_deletes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 9, applied=6)
        with pytest.raises(BrokenInvariant):
            journal.compact_to(7)
        journal.compact_to(5)
        journal.compact_to(3)
        assert not journal.dirty
        journal.flush_hints()
    with open_env(tmp_path) as env:
        journal = Journal(env)
        assert (journal.base_index, journal.base_term, journal.first_index) == (5, 1, 6)
        assert journal.term_of(5) == 1 and journal.term_of(4) is None
        assert journal.entries(6, **ALL) == [entry(index) for index in range(6, 10)]
        for read in (lambda: journal.entry(5), lambda: journal.entries(5, **ALL)):
            with pytest.raises(LookupError):
                read()
        assert [held.index for held in Ledger(env).read(1, limit=99)] == [1, 2, 3, 4, 5, 6]


def test_compaction_to_the_last_entry_keeps_its_term_for_the_next_append(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 4, applied=4, term=3)
        journal.compact_to(4)
        journal.flush_hints()
    with opened(tmp_path) as journal:
        assert (journal.last_index, journal.last_term, journal.base_index) == (4, 3, 4)
        fill(journal, 5, term=3)
    with opened(tmp_path) as journal:
        assert journal.entries(5, **ALL) == [entry(5, 3)]


def test_digest_covers_previous_digest_index_term_and_bytes(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 3, applied=3)
        digest = GENESIS
        for index in (1, 2, 3):
            digest = chain_digest(digest, entry(index))
            assert journal.digest_at(index) == digest
        assert journal.applied_digest == digest
        assert journal.digest_at(4) is None


def test_entries_reapplied_after_a_restart_are_compared_with_the_ledger(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 5, applied=4)
    with opened(tmp_path) as journal:
        assert journal.record_applied(entry(3), 6) == journal.digest_at(3)
        assert journal.applied_index == 4
        for wrong, revision in [(entry(3, 0), 6), (Entry(3, 1, b"other"), 6), (entry(3), 7)]:
            with pytest.raises(BrokenInvariant, match="entry 3 applied again"):
                journal.record_applied(wrong, revision)


@pytest.mark.parametrize(
    ("wrong", "revision"), [(entry(4), 4), (entry(3, 0), 4), (Entry(3, 1, b"other"), 4), (entry(3), 3)]
)
def test_applying_out_of_order_or_another_entry_breaks_an_invariant(
    tmp_path: Path, wrong: Entry, revision: int
) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 5, applied=2)
        with pytest.raises(BrokenInvariant):
            journal.record_applied(wrong, revision)
        assert journal.applied_index == 2


def test_snapshot_replaces_a_mismatched_tail_and_records_a_gap(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 9, applied=4)
        journal.reset_to(20, 3, b"d" * 32, 77)
        assert journal.dirty
    with opened(tmp_path) as journal:
        assert journal.last_index == 9, "an unsynced reset has no effect"
        journal.reset_to(20, 3, b"d" * 32, 77)
        journal.sync()
        assert not journal.dirty
    with open_env(tmp_path) as env:
        journal = Journal(env)
        assert (journal.base_index, journal.base_term, journal.last_index, journal.last_term) == (20, 3, 20, 3)
        assert (journal.commit_index, journal.applied_index, journal.applied_revision) == (20, 20, 77)
        assert journal.term == 3 and journal.digest_at(20) == b"d" * 32
        fill(journal, 22, applied=22, term=3)
        journal.flush_hints()
        ledger = Ledger(env)
        assert [held.index for held in ledger.read(1, limit=99)] == [1, 2, 3, 4, 21, 22]
        assert ledger.gaps() == (Gap(5, 20, 8, 77),)
        assert (
            ledger.verify().digest
            == journal.applied_digest
            == chain_digest(chain_digest(b"d" * 32, entry(21, 3)), entry(22, 3))
        )


def test_snapshot_below_the_last_entry_keeps_the_matching_suffix_without_a_gap(tmp_path: Path) -> None:
    with open_env(tmp_path) as env:
        journal = Journal(env)
        journal.set_term(1, None)
        journal.append([Entry(index, 1, NO_OP) for index in range(1, 7)])
        journal.sync()
        digest = GENESIS
        for index in range(1, 5):
            digest = chain_digest(digest, Entry(index, 1, NO_OP))
        with pytest.raises(BrokenInvariant, match="diverged"):
            journal.reset_to(4, 1, b"x" * 32, 0)
        assert journal.applied_index == 0
        journal.reset_to(4, 1, digest, 0)
        assert journal.dirty
        journal.sync()
    with open_env(tmp_path) as env:
        journal = Journal(env)
        assert (journal.base_index, journal.applied_index, journal.commit_index, journal.last_index) == (4, 4, 4, 6)
        assert Ledger(env).gaps() == () and Ledger(env).verify().entries == 4


def test_older_or_contradicting_snapshot_breaks_an_invariant(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 9, applied=4)
        journal.set_commit(7)
        for index, term in [(3, 1), (4, 1), (6, 2)]:
            with pytest.raises(BrokenInvariant):
                journal.reset_to(index, term, b"d" * 32, 99)
        for digest, revision in [(b"short", 99), (b"d" * 32, 7)]:
            with pytest.raises(BrokenInvariant):
                journal.reset_to(20, 2, digest, revision)


def test_entries_are_bounded_by_bytes_and_count_but_never_empty(tmp_path: Path) -> None:
    with open_env(tmp_path) as env:
        journal = Journal(env, recent_max_bytes=400)
        fill(journal, 40)
        size_bytes = len(entry(1).data)
        for first in (1, 20, 30, 34, 40):
            held = 40 - first + 1
            for count in (1, 2, 9, 99):
                for limit in (0, size_bytes * 3, 1 << 20):
                    found = journal.entries(first, max_bytes=limit, max_entries=count)
                    wanted = min(held, count, max(1, limit // size_bytes))
                    assert found == [entry(index) for index in range(first, first + wanted)]


def test_tail_is_read_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_env(tmp_path) as env:
        journal = Journal(env)
        fill(journal, 50)

        def no_read() -> None:
            raise AssertionError("LMDB was read")

        monkeypatch.setattr(env, "read", no_read)
        journal.append([entry(51)])
        apply(journal, 51)
        assert len(journal.entries(2, **ALL)) == 50
        assert journal.term_of(3) == 1 and journal.entry(1) == entry(1)


def test_memory_for_recent_entries_is_bounded_but_keeps_unsynced_entries(tmp_path: Path) -> None:
    with open_env(tmp_path) as env:
        journal = Journal(env, recent_max_bytes=1000)
        journal.set_term(1, None)
        journal.append([entry(index) for index in range(1, 101)])
        assert journal._suffix.first == 1
        journal.sync()
        assert journal._suffix.first == 1, "LMDB does not have these entries yet"
        journal.flush_hints()
        assert journal._suffix.first > 70
        assert [journal.entry(index) for index in (1, 50, 100)] == [entry(1), entry(50), entry(100)]
        journal.truncate_from(40)
        assert journal.entries(38, **ALL) == [entry(38), entry(39)]
        journal.append([entry(40)])
        journal.sync()
    with opened(tmp_path) as journal:
        assert journal.entries(1, **ALL) == [entry(index) for index in range(1, 41)]


def test_after_a_failed_sync_every_call_fails_and_a_restart_lacks_its_changes(tmp_path: Path) -> None:
    with open_env(tmp_path) as env:
        journal = Journal(env)
        fill(journal, 3, applied=1)
        env.commit = _fail
        journal.append([entry(4)])
        with pytest.raises(StorageFailed, match="could not be written durably"):
            journal.sync()
        env.commit = lambda transaction: transaction.commit()
        calls = [
            journal.sync,
            journal.flush_hints,
            lambda: journal.append([entry(5)]),
            lambda: journal.truncate_from(4),
            lambda: journal.set_term(2, None),
            lambda: journal.set_commit(2),
            lambda: journal.compact_to(1),
            lambda: journal.reset_to(9, 1, bytes(32), 9),
            lambda: journal.record_applied(entry(2), 4),
            lambda: journal.entry(1),
            lambda: journal.entries(1, **ALL),
            lambda: journal.term_of(1),
            lambda: journal.digest_at(1),
        ]
        for call in calls:
            with pytest.raises(StorageFailed, match="could not be written durably"):
                call()
    with opened(tmp_path) as journal:
        assert journal.last_index == 3


def _fail(transaction: "lmdb.Transaction[bytes]") -> None:
    raise lmdb.DiskError("injected: fdatasync")


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 5)),
        st.tuples(st.just("truncate"), st.integers(1, 6)),
        st.tuples(st.just("term"), st.integers(0, 2)),
        st.tuples(st.just("apply"), st.integers(1, 4)),
        st.tuples(st.just("compact"), st.integers(0, 3)),
        st.tuples(st.just("reset"), st.integers(1, 9)),
        st.tuples(st.just("sync"), st.just(0)),
        st.tuples(st.just("vote"), st.integers(1, 3)),
        st.tuples(st.just("checkpoint"), st.just(0)),
        st.tuples(st.just("audit"), st.just(0)),
        st.tuples(st.just("crash"), st.just(0)),
    ),
    max_size=30,
)


class Model:
    """Model of the journal: a plain list, with a copy of the state that the last sync made durable."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.base, self.base_term, self.last, self.term, self.applied, self.digest = 0, 0, 0, 0, 0, GENESIS
        self.vote: str | None = None

    def copy(self) -> "Model":
        other = Model()
        other.__dict__.update(self.__dict__)
        other.entries = dict(self.entries)
        return other

    def term_at(self, index: int) -> int:
        return self.base_term if index == self.base else self.entries[index].term


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(operations=OPERATIONS, rows=st.sampled_from([3, 8, 1000]), record_bytes=st.sampled_from([150, 1 << 18]))
def test_any_sequence_of_changes_syncs_and_crashes_matches_the_model(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    operations: list[tuple[str, int]],
    rows: int,
    record_bytes: int,
) -> None:
    """No difference is visible between syncs to the log and to LMDB."""
    monkeypatch.setattr(journal_module, "CHECKPOINT_ROWS", rows)
    monkeypatch.setattr(journal_module, "RECORD_MAX_BYTES", record_bytes)
    directory = tmp_path_factory.mktemp("journal")
    env = open_env(directory)
    journal, model = Journal(env, recent_max_bytes=200), Model()
    durable = model.copy()
    try:
        for name, number in [*operations, ("sync", 0), ("crash", 0)]:
            if name == "append":
                new = [Entry(model.last + 1 + n, model.term, bytes([n]) * 30) for n in range(number)]
                journal.append(new)
                model.entries.update({one.index: one for one in new})
                model.last += number
            elif name == "truncate" and model.last - number >= model.applied:
                for index in range(model.last - number + 1, model.last + 1):
                    del model.entries[index]
                model.last -= number
                journal.truncate_from(model.last + 1)
            elif name == "term":
                model.term += number
                model.vote = None if number else model.vote
                journal.set_term(model.term, model.vote)
            elif name == "vote" and model.vote is None:
                model.vote = f"r{number}"
                journal.set_term(model.term, model.vote)
            elif name == "apply":
                for index in range(model.applied + 1, min(model.applied + number, model.last) + 1):
                    model.digest = journal.record_applied(model.entries[index], index)
                    model.applied = index
            elif name == "compact" and model.applied - number > model.base:
                index = model.applied - number
                journal.compact_to(index)
                model.base_term, model.base = model.term_at(index), index
            elif name == "reset":
                # Use a new term, so that the tail never matches. Buffered changes become durable first.
                index = model.last + number - 3
                if index <= model.applied:
                    continue
                durable = model.copy()
                model.term, model.vote = model.term + 1, None
                journal.reset_to(index, model.term, bytes([number]) * 32, index)
                model.entries = {i: e for i, e in model.entries.items() if i <= model.applied}
                model.base = model.last = model.applied = index
                model.base_term, model.digest = model.term, bytes([number]) * 32
            elif name in ("sync", "checkpoint"):
                journal.sync() if name == "sync" else journal.flush_hints()
                durable = model.copy()
            elif name == "audit":
                seen = Ledger(auditor(env)).verify()
                assert (seen.last_index, seen.digest) == (durable.applied, durable.digest)
            elif name == "crash":
                env.close()
                env, model = open_env(directory, create=False), durable.copy()
                journal = Journal(env, recent_max_bytes=200)
            assert (journal.base_index, journal.base_term, journal.last_index) == (
                model.base,
                model.base_term,
                model.last,
            )
            assert (journal.term, journal.voted_for) == (model.term, model.vote)
            assert (journal.applied_index, journal.applied_digest) == (model.applied, model.digest)
            wanted = [model.entries[index] for index in range(model.base + 1, model.last + 1)]
            assert journal.entries(model.base + 1, **ALL) == wanted
            assert [journal.term_of(one.index) for one in wanted] == [one.term for one in wanted]
        journal.flush_hints()
        verified = Ledger(env).verify()
        held = [one.index for one in Ledger(env).read(1, limit=1000)]
        missing = {i for gap in verified.gaps for i in range(gap.first_index, gap.last_index + 1)}
        assert held == [index for index in range(1, model.applied + 1) if index not in missing]
    finally:
        env.close()


def test_closed_environment_is_named_in_the_error(tmp_path: Path) -> None:
    env: Environment = open_env(tmp_path)
    journal = Journal(env)
    env.close()
    env.close()
    with pytest.raises(BrokenInvariant, match="closed"):
        journal.sync()
