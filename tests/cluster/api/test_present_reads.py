"""Reads in the history service's process: what it answers is what the replica answers itself, and it may die."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from forebay.cluster.api.history_service import HistoryService
from forebay.cluster.api.history_service.frames import PART_BYTES_MAX, PresentQuery
from forebay.cluster.api.local_backend import ROUTES
from forebay.cluster.api.past_reads import HandlerReader
from forebay.cluster.api.service import ApiCall, Handler, Reply, Route
from forebay.cluster.api.statuses import LiveValues
from forebay.cluster.config.config import Config
from forebay.cluster.schemas.operations import OPERATIONS
from forebay.replica.state import EMPTY
from forebay.replica.values import NEVER
from forebay.wal import JobIndexBroken, LedgerBroken
from tests.cluster.api.test_past_reads import plain
from tests.cluster.harness import PLAIN, SCRIPT, Harness, story, until

WHO = ("operator", "alice", "bob")

STATE_READS = [one for one in OPERATIONS.values() if one.live is not None]
"""Reads that the process answers."""

OF_THE_TIME = frozenset({"until", "start_at", "last_contact_s", "sync_s", "room_bytes"})
"""Fields that differ between two moments of one state."""

OF_THE_SCRAPE = ("process_", "forebay_api_request", "_age_seconds", "forebay_journal", "forebay_clock_ahead")
"""Parts of the names of metrics that differ between two scrapes of one state."""


@pytest.fixture(autouse=True)
def few_jobs_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the process asked whatever the number of jobs."""
    monkeypatch.setattr("forebay.cluster.api.history_service.entry_feed.JOBS_HERE_MAX", -1)


async def serving(harness: Harness) -> HistoryService:
    past = harness.service.past
    past.start()
    past._wanted.set()
    await until(lambda: past.has_present)
    return past


def targets(harness: Harness) -> list[str]:
    found = []
    for one in STATE_READS:
        jobs = [*harness.controller.state.jobs, 99]
        found += [one.path.replace("{id}", str(job)) for job in jobs] if "{id}" in one.path else [one.path]
    return [*found, "/v1/jobs?state=pending&limit=1", "/v1/jobs?limit=0", "/v1/jobs?expected=yes", "/v1/jobs?job=99"]


def untimed(found: Any) -> Any:
    """Return an answer without what differs between two moments of one state."""
    if isinstance(found, bytes):
        return [row for row in found.decode().splitlines() if not any(name in row for name in OF_THE_SCRAPE)]
    if isinstance(found, dict):
        return {key: untimed(value) for key, value in found.items() if key not in OF_THE_TIME}
    return [*map(untimed, found)] if isinstance(found, list) else found


async def compare(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in targets(harness):
        for who in WHO:
            there = await harness.ask("GET", target, who=who)
            with monkeypatch.context() as patched:
                patched.setattr(HistoryService, "has_present", False)
                here = await harness.ask("GET", target, who=who)
            assert there.status == here.status, (target, who, there, here)
            assert untimed(plain(there.body)) == untimed(plain(here.body)), (target, who)
            if target == "/metrics":  # of the replica's process, whichever renders them
                assert b"process_resident_memory_bytes" in there.body and b"process_open_fds" in there.body


@story
async def test_every_read_says_the_same_in_the_process_and_in_the_replica(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Harness(config) as harness:
        past = await serving(harness)
        asked = count_reads(past, monkeypatch)
        for number in range(3):
            await harness.submit(script=SCRIPT if number % 2 else PLAIN, name=f"job{number}", hold=number == 2)
            await compare(harness, monkeypatch)
        flags = {"command_id": harness.new_id(), "settings": [{"key": "PrivateData", "value": "jobs"}], "partial": True}
        await harness.ask("POST", "/v1/configuration", flags)
        await compare(harness, monkeypatch)
        assert len(asked) > 100


def count_reads(past: HistoryService, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    asked: list[Any] = []
    read = past.read_present

    async def counted(*words: Any, **more: Any) -> Any:
        asked.append(words)
        return await read(*words, **more)

    monkeypatch.setattr(past, "read_present", counted)
    return asked


@story
async def test_a_read_sees_every_command_that_was_answered_before_it(config: Config) -> None:
    async with Harness(config) as harness:
        await serving(harness)
        for number in range(1, 60):
            assert (await harness.submit(script=PLAIN, hold=True)).status == 201
            found = await harness.ask("GET", "/v1/jobs?limit=1", who="operator")
            assert [one["job_id"] for one in found.body["jobs"]] == [number]


@story
async def test_reads_go_on_whenever_the_process_is_killed(config: Config) -> None:
    async with Harness(config) as harness:
        past = await serving(harness)
        await harness.submit(script=PLAIN, hold=True)
        for _ in range(3):
            reads = [asyncio.ensure_future(harness.ask("GET", "/v1/jobs", who="operator")) for _ in range(20)]
            await asyncio.sleep(0.005)
            pid = past.process.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            for found in await asyncio.gather(*reads):
                assert found.status == 200 and [one["job_id"] for one in found.body["jobs"]] == [1]
            await until(lambda pid=pid: past.process.pid not in (None, pid) and past.has_present)


@story
async def test_a_process_that_is_killed_at_any_moment_costs_no_write_and_no_read(config: Config) -> None:
    chance = random.Random(7)
    async with Harness(config) as harness:
        past, stopped = await serving(harness), asyncio.Event()
        done: Counter[str] = Counter()

        async def write() -> None:
            while not stopped.is_set():
                found = await harness.submit(script=PLAIN, hold=True)
                assert found.status == 201, found.body
                done["writes"] += 1

        async def read(who: str, target: str) -> None:
            while not stopped.is_set():
                before = int(harness.controller.state.revision)
                found = await harness.ask("GET", target, who=who)
                assert found.status == 200 and found.revision >= before, (target, found)
                done[target] += 1

        targets = ("/v1/jobs?limit=50", "/v1/overview", "/metrics", "/v1/nodes")
        tasks = [asyncio.ensure_future(write()) for _ in range(2)]
        tasks += [asyncio.ensure_future(read("operator", target)) for target in targets]
        for _ in range(6):
            await asyncio.sleep(chance.uniform(0, 0.3))
            pid = past.process.pid
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                before = Counter(done)
                await until(lambda before=before: all(done[name] > before[name] for name in ("writes", *targets)))
                done["kills"] += 1
            if chance.random() < 0.7:
                await until(lambda pid=pid: past.process.pid not in (None, pid) and past.has_present)
        stopped.set()
        await asyncio.gather(*tasks)
        assert done["kills"] > 3
        await until(lambda: past.has_present)


@story
async def test_who_reads_more_than_a_share_waits_and_is_then_told_when_to_come_back(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.cluster.api.history_service.service.SHARE", 0.0001)
    monkeypatch.setattr("forebay.cluster.api.history_service.service.RESERVE_S", 0.0)
    async with Harness(config) as harness:
        await serving(harness)
        for _ in range(30):
            assert (await harness.submit(script=PLAIN, user="alice", hold=True)).status == 201
        assert (await harness.ask("GET", "/metrics", who="prometheus")).status == 200  # it loads the handlers
        assert (await harness.ask("GET", "/v1/jobs", who="alice")).status == 200
        found = await harness.ask("GET", "/v1/jobs", who="alice")
        assert (found.status, found.code) == (429, "too_many_requests")
        assert int(found.headers["Retry-After"]) >= 3
        for target in ("/v1/overview", "/v1/accounts", "/v1/jobs/1/history"):
            assert (await harness.ask("GET", target, who="alice")).status == 429, target
        for who, target in (("bob", "/v1/jobs"), ("operator", "/v1/jobs/1/history")):
            assert (await harness.ask("GET", target, who=who)).status == 200, target
        assert (await harness.submit(script=PLAIN, user="alice", hold=True)).status == 201


def test_a_handler_that_fails_costs_its_caller_a_response_and_not_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(call: ApiCall[Any]) -> Reply[Any]:
        raise ZeroDivisionError

    monkeypatch.setitem(ROUTES, "list_pools", Route(OPERATIONS["list_pools"], broken))
    present: Any = SimpleNamespace(state=EMPTY)
    asked = PresentQuery(7, 0, NEVER, "list_pools", {}, {}, "user", "ada", False, msgspec.msgpack.encode(LiveValues()))
    with closing(HandlerReader()) as reader:
        found = reader.present(asked, present, present)
        assert (found.number, found.status) == (7, 500) and b"internal_error" in found.content
        assert "ZeroDivisionError" in caplog.text
        for error in (JobIndexBroken("it is damaged"), LedgerBroken(1, "it is damaged")):
            monkeypatch.setattr(reader, "_present", None)
            monkeypatch.setitem(ROUTES, "list_pools", Route(OPERATIONS["list_pools"], raising(error)))
            with pytest.raises(type(error)):  # what is derived is made again
                reader.present(asked, present, present)


def raising(error: Exception) -> Handler:
    async def raises(call: ApiCall[Any]) -> Reply[Any]:
        raise error

    return raises


@story
async def test_a_long_answer_comes_in_parts_and_whole(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Harness(config) as harness:
        past = await serving(harness)
        for _ in range(200):
            await harness.submit(script=PLAIN, hold=True, workdir="/x" * 1000)
        parts: list[int] = []
        receive = past.receive

        def measured(said: Any) -> None:
            parts.append(len(getattr(said, "content", b"")))
            receive(said)

        monkeypatch.setattr(past, "receive", measured)
        await until(lambda: past.has_present)
        with monkeypatch.context() as patched:
            there = await harness.ask("GET", "/v1/jobs?limit=10000", who="operator")
            patched.setattr(HistoryService, "has_present", False)
            here = await harness.ask("GET", "/v1/jobs?limit=10000", who="operator")
        assert there.body == here.body and len(there.body["jobs"]) == 200
        assert sum(parts) > PART_BYTES_MAX >= max(parts)
        assert not past._parts


@story
async def test_a_process_that_hangs_costs_one_read_its_time_limit(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Harness(config) as harness:
        past = await serving(harness)
        pid = past.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with monkeypatch.context() as patched:
            patched.setattr("forebay.cluster.api.history_service.service.ANSWER_S", 0.3)
            assert (await harness.ask("GET", "/v1/jobs", who="operator")).status == 503
        assert not past.has_present
        assert (await harness.ask("GET", "/v1/jobs", who="operator")).status == 200
        os.kill(pid, signal.SIGCONT)
        await harness.submit(script=PLAIN, hold=True)
        await until(lambda: past.has_present)
        found = await harness.ask("GET", "/v1/jobs", who="operator")
        assert [one["job_id"] for one in found.body["jobs"]] == [1]


@story
async def test_with_few_jobs_the_replica_answers_itself_and_feeds_nothing(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.cluster.api.history_service.entry_feed.JOBS_HERE_MAX", 1)
    async with Harness(config) as harness:
        past = harness.service.past
        past.start()
        past._wanted.set()
        await until(lambda: past.process.link is not None)
        asked = count_reads(past, monkeypatch)
        for number in (1, 2):
            await harness.submit(script=PLAIN, hold=True)
            assert (await harness.ask("GET", "/v1/jobs", who="operator")).status == 200
            assert asked == [], number
        harness.controller.journal.flush_hints()  # as consensus does after a quiet second
        await until(lambda: past.has_present)
        assert (await harness.ask("GET", "/v1/jobs", who="operator")).status == 200 and len(asked) == 1
