"""What the historian counts of each job: at any size, killed or begun anew, and against what is recorded."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from forebay.cluster.api.history_service import HistoryServiceTimeout, ProofUnavailable, record_counts
from forebay.cluster.config.config import Config
from forebay.cluster.security.proofs import HistoryCounts
from forebay.cluster.server.tlog import counting, disclosure_key_of
from forebay.cluster.server.tlog.publish import CountedHistories
from forebay.replica.messages import CONTROLLER, RecordHistories, Request, jobs_of
from forebay.wal import EntryKind, decode_batch, kind_of
from tests.cluster.harness import PLAIN, Harness, story


def expected(harness: Harness, size: int) -> CountedHistories:
    """What is counted in the first entries, by reading them."""
    harness.controller.journal.flush_hints()
    ledger = harness.controller.ledger.as_stored()
    counts, found = HistoryCounts(disclosure_key_of(ledger)), Counter[int]()
    for entry in ledger.read(1, limit=size):
        if kind_of(entry.data) is EntryKind.BATCH and entry.revision > entry.base:
            for command in decode_batch(entry.data).entries:
                found.update({job for event in command.events for job in jobs_of(event)})
    for job, count in found.items():
        counts.add(job, count)
    return CountedHistories(counts.jobs(), counts.root())


async def busy(harness: Harness) -> None:
    await asyncio.gather(*(harness.submit(script=PLAIN) for _ in range(6)))
    array = (await harness.submit(script=PLAIN, array="0-3")).body["job_id"]
    await harness.ask("POST", f"/v1/jobs/{array}/hold", {"command_id": harness.new_id()}, who="alice")


async def counted(harness: Harness, size: int) -> CountedHistories:
    async with asyncio.timeout(60):
        while True:
            try:
                found = await harness.service.past.counts(size)
                return CountedHistories(found.jobs, found.root)
            except (ProofUnavailable, HistoryServiceTimeout) as error:
                assert "not counted yet" in str(error) or isinstance(error, HistoryServiceTimeout)
                await asyncio.sleep(0.02)


@story
async def test_the_records_of_jobs_are_counted_at_every_size_and_again_by_a_historian_that_was_killed(
    config: Config,
) -> None:
    async with Harness(config) as harness:
        await busy(harness)
        for is_killed in (True, False):
            sizes = range(2, harness.controller.applied_index + 1)
            assert [await counted(harness, size) for size in sizes] == [expected(harness, size) for size in sizes]
            pid = harness.service.past.process.pid
            assert pid is not None
            if is_killed:
                os.kill(pid, signal.SIGKILL)
                await busy(harness)


@story
async def test_a_replica_signs_nothing_behind_a_record_of_other_counts_than_its_own(config: Config) -> None:
    async with Harness(config) as harness:
        await busy(harness)
        publisher = harness.service.publisher
        assert await publisher.publish()
        size, true = publisher.size, expected(harness, publisher.size)
        for jobs, root, is_false in ((*true, False), (true.jobs, bytes(32), True)):
            command = RecordHistories(size, jobs, root)
            assert (await harness.controller.submit(Request(b"", CONTROLLER, command))).rejection is None
            await busy(harness)
            if is_false:
                with pytest.raises(ProofUnavailable, match="the record counts in entry"):
                    await publisher.publish()
            else:
                assert await publisher.publish()
        # Also by a historian that has written what it noted, and follows on behind it.
        await harness.service.past.stop()
        harness.service.past.start()
        with pytest.raises(ProofUnavailable, match="the record counts in entry"):
            await publisher.publish()
        # What came before it is signed on.
        assert (await harness.service.past.root(size)) is not None


@story
async def test_nothing_is_counted_back_without_a_bound(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "UNDONE_COMMANDS_MAX", 5)
    async with Harness(config) as harness:
        await busy(harness)
        harness.controller.journal.flush_hints()
        ledger, last = harness.controller.ledger.as_stored(), harness.controller.applied_index
        with pytest.raises(counting.TooFar, match="the ledger has more than 5 commands"):
            counting.records_between(ledger, 2, last)
        assert counting.records_between(ledger, 2, last, bounded=False)
        assert not counting.records_between(ledger, last, last)


@story
async def test_jobs_that_there_are_not_cannot_be_counted(config: Config) -> None:
    async with Harness(config) as harness:
        await busy(harness)
        for jobs in (0, harness.controller.state.next_job):
            refused = await harness.controller.submit(Request(b"", CONTROLLER, RecordHistories(3, jobs, bytes(32))))
            assert refused.rejection is not None and "does not exist" in refused.rejection.sentence


class Noted:
    """A follower whose rows are given: each job has as many as its number says."""

    begun, holes, index, noted_index, ledger, is_confirmed = 1, (), 9, 9, None, True

    def __init__(self) -> None:
        self.noted = {job: job % 3 for job in range(1, 601) if job % 3}
        # As after a recovery, which gives out far higher job IDs.
        self.noted |= {10**11 + job: 2 for job in range(20)}

    def noted_jobs(self, after: int) -> list[int]:
        return sorted(job for job in self.noted if job > after)

    def rows(self, job: int) -> list[None]:
        return [None] * self.noted.get(job, 0)

    def note(self, job: int) -> None:
        """As the follower does: the row is there, and it is told of."""
        self.noted[job] = self.noted.get(job, 0) + 1
        self.on_record(job)  # type: ignore[attr-defined]


def test_what_is_noted_while_older_records_are_read_out_is_counted_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(record_counts, "disclosure_key_of", lambda ledger: b"k" * 32)
    monkeypatch.setattr(record_counts, "JOBS_PER_STEP", 50)
    follower, chance = Noted(), random.Random(7)
    counted = record_counts.RecordCounts(follower, tmp_path)  # type: ignore[arg-type]
    follower.note(3)
    # At a start the index is further than the state that is folded again up to there.
    follower.index = 5
    assert [counted.step() for _ in range(3)] == [True, False, False]
    follower.index = 9
    steps = 0
    with pytest.raises(record_counts.CountUnavailable):
        counted.count_first(9)
    while counted.step():
        steps += 1
        for _ in range(5):
            follower.note(chance.randrange(1, 640))
    follower.note(10**11 + 40)
    wanted = HistoryCounts(b"k" * 32)
    for job, count in follower.noted.items():
        wanted.add(job, count)
    assert steps > 8 and counted.count_first(9) == (len(follower.noted), wanted.root())
    # An index that is begun anew is counted anew.
    follower.noted, follower.begun = {1: 4}, 2
    while counted.step():
        pass
    assert counted.count_first(9).jobs == 1
