"""An index by job whose rows were altered is found and made anew, and no history is called whole before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.cluster.api.history_service import record_counts
from forebay.cluster.api.history_service.frames import RecordsQuery
from forebay.cluster.api.history_service.index_scrub import AGAIN_S, LOOK_S, IndexScrub
from forebay.cluster.api.history_service.queries import HistoryQueries
from forebay.cluster.api.history_service.record_counts import RecordCounts
from forebay.cluster.security.proofs import HistoryCounts
from forebay.replica.messages import HistoriesCounted
from forebay.replica.messages.commands import CONTROLLER
from forebay.replica.messages.entries import Entry as Settled
from forebay.wal.job_index import JobIndex, JobIndexBroken, JobIndexRow
from tests.cluster.api.test_history_service import Replica, follow
from tests.replica.world import World

JOB = 2
STEPS = 10_000
KEY = b"k" * 32


@pytest.fixture
def replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(record_counts, "disclosure_key_of", lambda ledger: KEY)
    made = Replica(tmp_path)
    world = World({"fast": 100}, nodes=2)
    for number in range(5):
        job = world.submit("capacity=10", who=f"user{number}")
        if number % 2:
            world.finish(job)
    for batch in world.ledger:
        made.settle([batch])
    made.world = world  # type: ignore[attr-defined]
    follow(made.follower)
    made.follower.write()
    yield made
    made.close()


def settle_counts(replica: Replica) -> None:
    """Have the ledger record how many records of each job there are, as the leader does."""
    counts = HistoryCounts(KEY)
    jobs = int(replica.state.next_job) - 1
    for job in range(1, jobs + 1):
        counts.add(job, len(replica.follower.rows(job)))
    world: World = replica.world  # type: ignore[attr-defined]
    done = len(world.ledger)
    recorded = HistoriesCounted(replica.journal.last_index, jobs, counts.root())
    world.commit(Settled(b"", CONTROLLER, "record_histories", (recorded,)))
    for batch in world.ledger[done:]:
        replica.settle([batch])
    follow(replica.follower)
    replica.follower.write()


Alter = Callable[[dict[int, list[JobIndexRow]]], None]


def one_removed(rows: dict[int, list[JobIndexRow]]) -> None:
    del rows[JOB][3]


def the_last_removed(rows: dict[int, list[JobIndexRow]]) -> None:
    rows[JOB].pop()


def one_of_another_revision(rows: dict[int, list[JobIndexRow]]) -> None:
    rows[JOB][1] = rows[JOB][1]._replace(revision=rows[JOB][1].revision + 1)


def one_added(rows: dict[int, list[JobIndexRow]]) -> None:
    rows[JOB].append(rows[JOB][-1]._replace(revision=rows[JOB][-1].revision + 1))


def another_note(rows: dict[int, list[JobIndexRow]]) -> None:
    rows[JOB][2] = rows[JOB][2]._replace(note=rows[JOB][3].note)


def a_job_removed(rows: dict[int, list[JobIndexRow]]) -> None:
    del rows[JOB]


def a_job_added(rows: dict[int, list[JobIndexRow]]) -> None:
    rows[99] = rows[JOB][:1]


ALTERED = [one_removed, the_last_removed, one_of_another_revision, one_added, another_note, a_job_removed, a_job_added]
FOUND_AT_ONCE = {one_removed, the_last_removed, one_added, a_job_removed, a_job_added}
"""What the counts of the ledger say: how many rows each job has."""


def alter(replica: Replica, change: Alter) -> None:
    """Write other rows into the index of a stopped replica, sound ones."""
    position = replica.jobs.position
    rows = {job: replica.jobs.rows(job) for job in replica.jobs.jobs()}
    change(rows)
    replica.kill()
    made = JobIndex(replica.directory / "index", map_size_bytes=64 << 20)
    made.begin_anew()
    made.add(rows, position)
    made.close()
    replica.restarted()


def start(replica: Replica) -> RecordCounts:
    """Do what a historian does until it can answer; JobIndexBroken."""
    reading = RecordCounts(replica.follower, replica.directory / "index")
    follow(replica.follower)
    while reading.step():
        pass
    assert not reading.is_reading
    return reading


def scrub(replica: Replica) -> None:
    """Go through a whole pass; JobIndexBroken."""
    scrubbing = IndexScrub(replica.follower, lambda: replica.now_s)
    for _ in range(STEPS):
        scrubbing.step()
        replica.now_s += LOOK_S
        if scrubbing.passes:
            return
    raise AssertionError("the pass does not end")


def is_whole(replica: Replica) -> bool:
    return HistoryQueries(replica.follower, float).records(RecordsQuery(JOB, 10_000, False)).whole


def test_what_a_historian_has_noted_itself_is_whole(replica: Replica) -> None:
    assert is_whole(replica)
    start(replica)
    scrub(replica)
    assert is_whole(replica)


def test_an_index_that_was_found_is_whole_once_its_counts_are_those_of_the_ledger(replica: Replica) -> None:
    settle_counts(replica)
    replica.kill()
    replica.restarted()
    assert not is_whole(replica)
    start(replica)
    assert is_whole(replica)


def test_without_recorded_counts_it_is_whole_once_every_row_was_compared(replica: Replica) -> None:
    replica.kill()
    replica.restarted()
    start(replica)
    assert not is_whole(replica)
    scrub(replica)
    assert is_whole(replica)


@pytest.mark.parametrize("change", ALTERED)
def test_an_altered_index_is_found_and_nothing_is_called_whole_before(replica: Replica, change: Alter) -> None:
    settle_counts(replica)
    expected = replica.records(JOB)
    alter(replica, change)
    assert not is_whole(replica)
    if change in FOUND_AT_ONCE:
        with pytest.raises(JobIndexBroken, match="the index was altered"):
            start(replica)
        assert not is_whole(replica)
    else:
        start(replica)
    with pytest.raises(JobIndexBroken, match="differ from the ledger"):
        scrub(replica)
    # As the process does then.
    replica.follower.begin_anew()
    start(replica)
    scrub(replica)
    assert is_whole(replica) and replica.records(JOB) == expected


def test_what_is_altered_while_it_runs_is_found_by_the_next_pass(replica: Replica) -> None:
    scrubbing = IndexScrub(replica.follower, lambda: replica.now_s)
    while not scrubbing.passes:
        scrubbing.step()
        replica.now_s += LOOK_S
    replica.jobs.add({JOB: replica.jobs.rows(JOB)[-1:]}, replica.jobs.position)
    scrubbing.step()
    replica.now_s += AGAIN_S
    with pytest.raises(JobIndexBroken, match=f"of job {JOB}"):
        for _ in range(STEPS):
            scrubbing.step()
            replica.now_s += LOOK_S
