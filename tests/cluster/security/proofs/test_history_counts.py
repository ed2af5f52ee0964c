"""Counts of records by job, now and earlier; each count is proven at exactly one place under one root."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.cluster.security.proofs import (
    EMPTY_ROOT,
    HistoryCounts,
    ProofError,
    RightEdge,
    history_leaf,
    history_salt,
    verify_inclusion,
)

KEY = b"k" * 32


def root_of_all(counts: Counter[int]) -> bytes:
    """Return the root, computed leaf by leaf."""
    edge = RightEdge()
    for job in sorted(job for job, count in counts.items() if count):
        edge.append(history_leaf(history_salt(KEY, job), job, counts[job]))
    return edge.root()


JOBS = st.one_of(st.integers(1, 20), st.integers(250, 262), st.integers(1, 700), st.integers(10**11, 10**11 + 9))


@settings(max_examples=40, deadline=None)
@given(st.lists(JOBS, max_size=60), st.lists(JOBS, max_size=20))
def test_root_covers_the_count_of_each_job_now_and_earlier(earlier: list[int], later: list[int]) -> None:
    counts, then = HistoryCounts(KEY), Counter(earlier)
    # The first record of a job comes after those of all jobs with lower IDs.
    later = [job for job in later if job in then or job > max(then, default=0)]
    assert counts.root() == EMPTY_ROOT and counts.jobs() == 0
    for job in earlier:
        counts.add(job)
    assert counts.root() == root_of_all(then)
    for job in later:
        counts.add(job)
    for less, expected in ((Counter(later), then), (Counter[int](), then + Counter(later)), (Counter(later), then)):
        assert counts.root(less) == root_of_all(expected)
        jobs = counts.jobs(less)
        assert jobs == len(expected)
        for position, job in enumerate(sorted(expected)):
            if position not in (0, 1, jobs // 2, jobs - 1):
                continue
            assert counts.position(job) == position
            salt, path = history_salt(KEY, job), counts.path(job, less)
            assert counts.count(job, less) == expected[job]
            verify_inclusion(position, jobs, history_leaf(salt, job, expected[job]), path, counts.root(less))
            for wrong in (expected[job] + 1, max(0, expected[job] - 1)):
                if wrong != expected[job]:
                    with pytest.raises(ProofError):
                        verify_inclusion(position, jobs, history_leaf(salt, job, wrong), path, counts.root(less))


def test_leaf_hides_its_count_from_readers_without_the_salt() -> None:
    assert len({history_salt(KEY, job) for job in range(1, 100)}) == 99
    assert history_salt(KEY, 7) != history_salt(b"o" * 32, 7)
    assert len({history_leaf(history_salt(KEY, job), 7, 3) for job in (6, 7)}) == 2


def test_incremental_preparation_gives_the_same_root() -> None:
    counts, at_once = HistoryCounts(KEY), HistoryCounts(KEY)
    for job in range(1, 1_300):
        counts.add(job, 2)
        at_once.add(job, 2)
    assert [counts.prepare(2) for _ in range(4)] == [True, True, False, False]
    assert counts.root() == at_once.root()
    counts.add(700)
    assert counts.prepare(0) and not counts.prepare(1)
