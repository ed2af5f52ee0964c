"""Pruning leaves an intentional gap. The rest verifies at every moment, even if pruning is interrupted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.wal import BrokenInvariant, Environment, Journal, records
from forebay.wal.journal import Entry
from forebay.wal.ledger import Ledger, LedgerBroken, export_history
from forebay.wal.ledger import fill as fill_gap
from forebay.wal.pruning import authorise, insert_beginning, prune_some, read_pruned
from forebay.wal.records import CHAIN, ENTRIES, KEPT_ENTRIES, REVISIONS, Gap, PrunedRange, PrunedSegment
from tests.wal.support import apply, entry, fill, open_env, opened

LAST = 300
SEGMENTS = (PrunedSegment(1, 200, 400, 5), PrunedSegment(201, 300, 600, 9))
FIRST = KEPT_ENTRIES + 1


def whole(directory: Path, *, base: int = LAST) -> Environment:
    """Create a storage whose consensus sees nothing before `base`."""
    env = open_env(directory)
    journal = Journal(env)
    fill(journal, LAST, applied=LAST)
    journal.compact_to(base)
    journal.flush_hints()
    return env


def rows(env: Environment) -> tuple[int, int, int]:
    with env.read() as transaction:
        entries, chain, revisions = (
            transaction.stat(env.table(name))["entries"] for name in (ENTRIES, CHAIN, REVISIONS)
        )
    return entries, chain, revisions


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_ledger_verifies_after_each_pruning_step_and_keeps_exactly_the_rest(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    env = whole(tmp_path_factory.mktemp("pruned") / "r1")
    ledger, digest = Ledger(env), Ledger(env).applied_digest
    below = data.draw(st.integers(1, LAST + 1), label="below")
    authorise(env, PrunedRange(below, SEGMENTS))
    assert rows(env) == (LAST, LAST, LAST)
    steps = 0
    while prune_some(env, entries_max=data.draw(st.integers(1, LAST), label="step")):
        assert ledger.verify().digest == digest
        steps += 1
    removed = max(0, below - FIRST)
    assert ledger.gaps() == ((Gap(FIRST, below - 1, 2 * KEPT_ENTRIES, 2 * (below - 1)),) if removed else ())
    # The digest at the end of the gap stays.
    assert rows(env) == (LAST - removed, LAST - max(0, removed - 1), LAST - removed)
    verified = ledger.verify(revision_after=lambda data, before: before + 2)
    assert (verified.entries, verified.digest) == (LAST - removed, digest)
    env.close()
    with opened(env.directory, create=False) as again:
        assert (again.applied_index, again.applied_digest) == (LAST, digest)


@pytest.mark.parametrize("gap", [(1, 100), (10, 40), (10, 100), (65, 70), (64, 64), (150, 180), (170, 250)])
def test_pruning_absorbs_existing_gaps(tmp_path: Path, gap: tuple[int, int]) -> None:
    first, last = gap
    donor = whole(tmp_path / "r2")
    env = open_env(tmp_path / "r1")
    journal = Journal(env)
    if first > 1:
        fill(journal, first - 1, applied=first - 1)
    journal.set_term(1, None)
    journal.reset_to(last, 1, Ledger(donor).row_at(last).digest, 2 * last)
    fill(journal, LAST, applied=LAST)
    journal.compact_to(LAST)
    journal.flush_hints()
    authorise(env, PrunedRange(200, SEGMENTS))
    while prune_some(env, entries_max=7):
        Ledger(env).verify()
    begin = first if last >= FIRST > first else FIRST
    end = max(199, last) if last >= FIRST else 199
    expected = [Gap(begin, end, 2 * (begin - 1), 2 * end)]
    if last < FIRST:
        expected.insert(0, Gap(first, last, 2 * (first - 1), 2 * last))
    if last == FIRST - 1:
        assert first == 64
    assert list(Ledger(env).gaps()) == expected
    assert Ledger(env).verify().digest == Ledger(donor).applied_digest
    env.close()
    donor.close()


class Died(Exception):
    """The process was killed."""


def killed_at(number: int, *, before: bool) -> Callable[[Any], None]:
    """Return a commit hook that dies just before or just after transaction `number + 1` is durable."""
    done = 0

    def commit(transaction: Any) -> None:
        nonlocal done
        done += 1
        if done <= number or not before:
            transaction.commit()
        if done > number:
            raise Died

    return commit


@pytest.mark.parametrize("before", [True, False])
def test_pruning_killed_at_any_step_continues_after_a_restart(tmp_path: Path, before: bool) -> None:
    whole(tmp_path / "r1").close()
    digest, deaths = None, 0
    while True:
        env = open_env(tmp_path / "r1", create=False)
        Journal(env)
        digest = digest or Ledger(env).applied_digest
        env.commit = killed_at(0, before=before and deaths % 2 == 0)
        try:
            if read_pruned(env) is None:
                authorise(env, PrunedRange(250, SEGMENTS))
            if not prune_some(env, entries_max=50):
                break
        except Died:
            deaths += 1
        finally:
            env.close()
        with opened(tmp_path / "r1", create=False) as again:
            assert Ledger(again._env).verify().digest == digest
    assert deaths > 3
    env = open_env(tmp_path / "r1", create=False)
    assert Ledger(env).gaps() == (Gap(FIRST, 249, 2 * KEPT_ENTRIES, 498),)
    env.close()


def test_entries_that_consensus_needs_are_never_pruned(tmp_path: Path) -> None:
    env = whole(tmp_path / "r1", base=200)
    with pytest.raises(BrokenInvariant, match="below entry 202, but consensus needs 201 and later"):
        authorise(env, PrunedRange(202, SEGMENTS))
    authorise(env, PrunedRange(201, SEGMENTS))
    with pytest.raises(BrokenInvariant, match="the ledger is pruned below 201"):
        authorise(env, PrunedRange(200, SEGMENTS))
    env.close()


def test_earlier_reader_skips_entries_pruned_meanwhile(tmp_path: Path) -> None:
    env = whole(tmp_path / "r1")
    seen = Ledger(env).as_of_now()
    reading = seen.read(1, limit=LAST)
    assert next(reading).index == 1
    authorise(env, PrunedRange(290, SEGMENTS))
    while prune_some(env, entries_max=10_000):
        pass
    assert [one.index for one in seen.read(1, limit=LAST)] == [*range(1, FIRST), *range(290, LAST + 1)]
    assert [one.index for one in seen.read_some(150, entries_max=2, bytes_max=10)] == [290]
    assert seen.verify().entries == LAST - 290 + FIRST
    with pytest.raises(LookupError, match="it was pruned"):
        seen.index_of_revision(300)
    assert seen.index_of_revision(579) == 290
    for first in (FIRST, 100, 289):
        assert seen.check_some(first, entries_max=10, bytes_max=10**6, revision_after=lambda data, before: before + 2)
    env.close()


def test_pruning_between_two_reads_of_a_check_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = whole(tmp_path / "r1")
    rows_of = Ledger._revision_rows

    def meanwhile(ledger: Ledger, after: int, last: int, index: int) -> list[tuple[int, int]]:
        authorise(env, PrunedRange(290, SEGMENTS))
        while prune_some(env, entries_max=10_000):
            pass
        return rows_of(ledger, after, last, index)

    monkeypatch.setattr(Ledger, "_revision_rows", meanwhile)
    assert Ledger(env).check_some(100, entries_max=9, bytes_max=10**6, revision_after=lambda data, before: before + 2)
    env.close()


def test_pruned_entries_are_reported_with_their_segment(tmp_path: Path) -> None:
    env = whole(tmp_path / "r1")
    authorise(env, PrunedRange(290, SEGMENTS))
    while prune_some(env):
        pass
    ledger = Ledger(env)
    with pytest.raises(
        LookupError, match=f"revision 401 is not available on this replica, it was pruned.*{201:020d}-{300:020d}"
    ):
        ledger.index_of_revision(401)
    with pytest.raises(
        LookupError, match=f"entry 70 is not available on this replica: it was pruned.*{1:020d}-{200:020d}"
    ):
        export_history(ledger, 70)
    assert [one.entry.index for one in export_history(ledger, 295)] == [*range(295, 289, -1)]
    assert ledger.index_of_revision(128) == 64 and ledger.index_of_revision(579) == 290
    env.close()


def test_pruned_entries_can_be_filled_in_again(tmp_path: Path) -> None:
    donor, env = whole(tmp_path / "r2"), whole(tmp_path / "r1")
    authorise(env, PrunedRange(250, SEGMENTS))
    while prune_some(env):
        pass
    left: Gap | None = Ledger(env).gaps()[0]
    while left is not None:
        handed = [one for one in export_history(Ledger(donor), left.last_index) if one.entry.index >= left.first_index]
        left = fill_gap(env, left, handed)
    assert Ledger(env).verify().entries == LAST
    env.close()
    donor.close()


def test_damaged_digest_that_must_stay_prevents_removal(tmp_path: Path) -> None:
    env = whole(tmp_path / "r1")
    authorise(env, PrunedRange(250, SEGMENTS))
    with env.write() as transaction:
        transaction.put((249).to_bytes(8, "big"), b"wrong", db=env.table(CHAIN))
    before = rows(env)
    with pytest.raises(LedgerBroken, match="entry 249: its digest"):
        prune_some(env, entries_max=10_000)
    assert rows(env) == before and env.failure is None
    env.close()


def test_pruned_space_is_reused_and_the_map_does_not_fill_up(tmp_path: Path) -> None:
    env = open_env(tmp_path / "r1", map_size_bytes=16 << 20)
    journal = Journal(env)
    journal.set_term(1, None)
    written, highest = 0, 0.0
    sizes = (200, 3_000, 40_000, 700_000)
    # Write eight times the size of the map.
    while written < 8 * (16 << 20):
        following = journal.last_index + 1
        size_bytes = sizes[following % len(sizes)] if following > KEPT_ENTRIES else 200
        journal.append([entry(following, 1, size_bytes)])
        written += size_bytes
        apply(journal, following)
        journal.sync()
        if env.fill > 0.6:
            full = env.fill
            journal.compact_to(journal.applied_index)
            journal.flush_hints()
            authorise(env, PrunedRange(journal.applied_index, SEGMENTS))
            while prune_some(env):
                pass
            assert env.fill < full - 0.2
        highest = max(highest, env.fill)
    assert highest < 0.8
    assert Ledger(env).verify().last_index == journal.applied_index
    env.close()


def test_prune_record_with_a_fraction_of_a_segment_is_damaged() -> None:
    head, segment = (
        len(records.unpack_checked(records.PRUNED_KEY, records.pack_pruned(PrunedRange(1, SEGMENTS[:count]))))
        for count in (0, 1)
    )
    for length in range(2 * segment):
        value = records.pack_checked(records.PRUNED_KEY, bytes(length))
        count, rest = divmod(length - head, segment - head)
        if length >= head and not rest:
            assert len(records.unpack_pruned(value).segments) == count
        else:
            with pytest.raises(records.DamagedValue, match=f"has {length} bytes"):
                records.unpack_pruned(value)


@pytest.mark.parametrize("count", [0, 1, 2, KEPT_ENTRIES, 99, 100])
def test_beginning_is_inserted_unchanged_or_not_at_all(tmp_path: Path, count: int) -> None:
    donor, env = whole(tmp_path / "r2"), open_env(tmp_path / "r1")
    *_, end = Ledger(donor).read(1, limit=100)
    journal = Journal(env)
    journal.reset_to(100, 1, end.digest, end.revision)
    journal.sync()
    (gap,) = Ledger(env).gaps()
    assert gap == Gap(1, 100, 0, 200)
    held = list(Ledger(donor).read(1, limit=count)) if count else []
    first = [(Entry(one.index, one.term, one.data), one.digest, one.revision) for one in held]
    for place in {0, count // 2, count - 1} if count else ():
        one, digest, revision = first[place]
        for wrong in (
            (one._replace(index=one.index + 1), digest, revision),
            (one._replace(data=one.data + b"!"), digest, revision),
            (one, bytes(32), revision),
            (one, digest, 201),
            (one, digest, revision - 3),
        ):
            with pytest.raises(BrokenInvariant, match="does not continue"):
                insert_beginning(env, gap, [*first[:place], wrong, *first[place + 1 :]])
            assert Ledger(env).gaps() == (gap,) and rows(env)[0] == 0
    insert_beginning(env, gap, first)
    inserted = count if count < 100 else 0  # a whole gap is filled in another way
    assert list(Ledger(env).read(1, limit=LAST)) == held[:inserted]
    assert Ledger(env).gaps() == (Gap(inserted + 1, 100, 2 * inserted, 200),)
    assert Ledger(env).verify().digest == end.digest
    assert [Ledger(env).index_of_revision(2 * index) for index in range(1, inserted + 1)] == [*range(1, inserted + 1)]
    env.close()
    donor.close()
