"""The historian of a replica: whatever ends it or damages its files, the past is told as it was, to whom it may be."""

from __future__ import annotations

import asyncio
import functools
import os
import signal

import pytest

from forebay.cluster.api.history_service.service import QUESTIONS_PER_ASKER_MAX
from forebay.cluster.config.config import Config
from forebay.cluster.server.controller import Controller
from forebay.replica.messages.commands import CONTROLLER
from forebay.replica.messages.entries import Batch, Entry
from forebay.replica.messages.events import JobPurged
from forebay.replica.model.job_states import JobState
from forebay.wal.codec import encode_batch
from forebay.wal.job_index import JobIndex
from tests.cluster.harness import PLAIN, Answer, Harness, story, until

WHO = ("alice", "bob", "operator")


async def history(harness: Harness, job: int, who: str = "operator") -> Answer:
    return await harness.ask("GET", f"/v1/jobs/{job}/history", who=who)


async def jobs_over(harness: Harness, count: int) -> None:
    """Have jobs of alice's end, each in five commands."""
    for _ in range(count):
        submitted = await harness.submit(script=PLAIN, hold=True)
        job = submitted.body["job_id"]
        for verb in ("release", "hold", "cancel"):
            await harness.ask("POST", f"/v1/jobs/{job}/{verb}", {"command_id": harness.new_id()}, who="alice")
        assert harness.controller.state.jobs[job].state is JobState.CANCELLED


def purge(controller: Controller, harness: Harness, job: int) -> None:
    state = controller.state
    entry = Entry(b"", CONTROLLER, "run_scheduling_cycle", (JobPurged(job),))
    harness.engine.propose(encode_batch(Batch(state.revision, state.at, (entry,))))


async def configure(harness: Harness, flags: str) -> None:
    settings = [{"key": "Flags", "value": flags}]
    body = {"command_id": harness.new_id(), "settings": settings, "partial": True}
    assert (await harness.ask("POST", "/v1/configuration", body)).status == 200


def pid(harness: Harness) -> int:
    found = harness.service.past.process.pid
    assert found is not None
    return found


def has_started(harness: Harness, times: int) -> bool:
    return harness.service.past.process.started >= times


@story
async def test_a_historian_that_is_killed_while_it_builds_is_started_again_and_tells_the_same(config: Config) -> None:
    async with Harness(config) as harness:
        await jobs_over(harness, 12)
        expected = (await history(harness, 7)).body["rows"]
        assert [row["event"] for row in expected][0] == "job_submitted"
        for started in (2, 4):
            os.kill(pid(harness), signal.SIGKILL)
            # Asked while it is started again, and while it is killed once more in the middle of that.
            asked = asyncio.ensure_future(history(harness, 7))
            await until(functools.partial(has_started, harness, started))
            os.kill(pid(harness), signal.SIGKILL)
            answer = await asked
            assert (answer.status, answer.body["rows"], answer.body["complete"]) == (200, expected, True)


@pytest.mark.parametrize("damage", ["cut", "zeros", "gone"])
@story
async def test_an_index_that_is_damaged_costs_time_and_changes_no_answer(config: Config, damage: str) -> None:
    async with Harness(config) as harness:
        await jobs_over(harness, 12)
        expected = (await history(harness, 3)).body["rows"]
        await harness.close()
        file = config.storage.directory / "r1" / "index" / "data.mdb"
        content = file.read_bytes()
        match damage:
            case "cut":
                file.write_bytes(content[: len(content) // 2])
            case "zeros":
                file.write_bytes(content[:8192] + bytes(len(content) - 8192))
            case "gone":
                file.unlink()
        await harness.open()
        answer = await history(harness, 3)
        assert (answer.status, answer.body["rows"]) == (200, expected)


@story
async def test_an_index_that_is_ahead_after_the_ledger_was_rolled_back_is_made_anew(config: Config) -> None:
    async with Harness(config) as harness:
        await jobs_over(harness, 2)
        await harness.close()
        home = config.storage.directory / "r1"
        old = {path.name: path.read_bytes() for path in (home / "wal").iterdir() if path.is_file()}
        await harness.open()
        await jobs_over(harness, 2)
        assert (await history(harness, 4)).body["rows"]
        await harness.close()
        for name, content in old.items():
            (home / "wal" / name).write_bytes(content)
        await harness.open()
        assert (await history(harness, 4)).status == 404
        await jobs_over(harness, 1)
        rows = (await history(harness, 3)).body["rows"]
        assert len({row["revision"] for row in rows}) == len(rows) == 4


@story
async def test_the_history_of_a_purged_job_is_as_private_as_the_job_was(config: Config) -> None:
    async with Harness(config) as harness:
        await configure(harness, "PrivateData")
        await jobs_over(harness, 1)
        before = int(harness.controller.state.revision)
        purge(harness.controller, harness, 1)
        await until(lambda: 1 not in harness.controller.state.jobs)
        await harness.restart()
        paths = ("history", f"why?at={before}")
        for path in paths:
            found = {who: (await harness.ask("GET", f"/v1/jobs/1/{path}", who=who)).status for who in WHO}
            assert found == {"alice": 200, "bob": 403, "operator": 200}, path
        found = {who: (await harness.ask("GET", "/v1/transfers/1/receipts", who=who)).status for who in WHO}
        assert found == {"alice": 200, "bob": 403, "operator": 200}


@story
async def test_events_of_a_purged_job_say_no_more_to_others_than_that_they_happened(config: Config) -> None:
    async with Harness(config) as harness:
        await configure(harness, "PrivateData")
        await harness.submit(script=PLAIN, hold=True, comment="s3cret", name="named")
        await harness.ask("POST", "/v1/jobs/1/cancel", {"command_id": harness.new_id()}, who="alice")
        purge(harness.controller, harness, 1)
        await until(lambda: 1 not in harness.controller.state.jobs)
        for who in ("bob", "operator"):
            read = b""
            async with harness.session(who).get(harness.url + "/v1/events?from=0") as response:
                while b"event: job_purged" not in read:
                    read += await response.content.readany()
            assert (b"s3cret" in read) is (who == "operator")


@story
async def test_why_a_job_waited_before_data_became_private_is_private_too(config: Config) -> None:
    async with Harness(config) as harness:
        await jobs_over(harness, 1)
        before = int(harness.controller.state.revision)
        assert (await harness.ask("GET", f"/v1/jobs/1/why?at={before}", who="bob")).status == 200
        await configure(harness, "PrivateData")
        assert (await harness.ask("GET", f"/v1/jobs/1/why?at={before}", who="bob")).status == 403
        assert (await harness.ask("GET", f"/v1/jobs/1/why?at={before}", who="alice")).status == 200


@story
async def test_a_moment_may_be_named_by_its_time(config: Config) -> None:
    async with Harness(config) as harness:
        await jobs_over(harness, 1)
        rows = (await history(harness, 1)).body["rows"]
        for row in rows:
            answer = await harness.ask("GET", f"/v1/jobs/1/why?at={row['at']}")
            assert answer.status == 200
            assert answer.body["revision"] >= row["revision"] and answer.body["at"] <= row["at"]
            assert answer.body["state"] in {other["state"] for other in rows if other["at"] == row["at"]}
        early = await harness.ask("GET", "/v1/jobs/1/why?at=2001-01-01T00:00:00Z")
        assert (early.status, early.code) == (404, "unknown_job")
        late = await harness.ask("GET", "/v1/jobs/1/why?at=2100-01-01T00:00:00Z")
        assert (late.status, late.code) == (404, "unknown_revision")
        wrong = await harness.ask("GET", "/v1/jobs/1/why?at=yesterday")
        assert (wrong.status, wrong.place) == (400, "query at")


@story
async def test_who_asks_much_of_the_past_waits_for_himself_and_nobody_waits_for_ever(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Harness(config) as harness:
        await jobs_over(harness, 1)
        await history(harness, 1)
        monkeypatch.setattr("forebay.cluster.api.history_service.service.ANSWER_S", 0.5)
        os.kill(pid(harness), signal.SIGSTOP)
        try:
            asked = [asyncio.ensure_future(history(harness, 1, "alice")) for _ in range(QUESTIONS_PER_ASKER_MAX + 1)]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            other = asyncio.ensure_future(history(harness, 1, "operator"))
            found = sorted([(one.status, one.code) for one in await asyncio.gather(*asked)])
            assert found == [(429, "too_many_requests")] + [(503, "too_busy")] * QUESTIONS_PER_ASKER_MAX
            assert (await other).status == 503
        finally:
            os.kill(pid(harness), signal.SIGCONT)
        monkeypatch.undo()
        assert (await history(harness, 1)).status == 200


@story
async def test_what_is_noted_is_written_when_the_replica_stops(config: Config) -> None:
    async with Harness(config) as harness:
        await jobs_over(harness, 3)
        await history(harness, 1)
        await harness.service.past.stop()
        index = JobIndex(config.storage.directory / "r1" / "index", readonly=True)
        assert [len(index.rows(job)) for job in (1, 2, 3)] == [4, 4, 4]
        index.close()
