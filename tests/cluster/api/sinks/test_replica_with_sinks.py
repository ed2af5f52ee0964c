"""A replica that leads sends its events to a real receiver, lists how far it got, and says when to look after it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from forebay.cluster.api.watch import attention as attention_module
from forebay.cluster.config.config import Config
from forebay.cluster.config.sinks import SinkConfig
from tests.cluster.api.sinks.receiver import Receiver
from tests.cluster.harness import Harness, story, until


@asynccontextmanager
async def delivering(config: Config, *sinks: SinkConfig) -> AsyncIterator[Harness]:
    harness = Harness(replace(config, sinks=sinks))
    async with harness:
        harness.controller.register(harness.service.sinks, on_change=harness.service.sinks.poll)
        harness.service.sinks.poll()
        try:
            await until(lambda: len(harness.service.sinks.deliveries) == len(sinks))
            yield harness
        finally:
            harness.service.sinks.stop()
            await harness.service.sink_client.close()


async def streamed(harness: Harness, after: int) -> list[tuple[int, int, str]]:
    """Return the events after a revision, as the event stream has them."""
    found = []
    for applied in await harness.applied():
        for place, entry in enumerate(applied.batch.entries if applied.batch is not None else ()):
            if (revision := applied.base + place + 1) > after:
                found += [(revision, number, type(event).__name__) for number, event in enumerate(entry.events)]
    return found


@story
async def test_a_jobs_events_arrive_as_the_event_stream_shows_them_without_its_script(
    config: Config, tmp_path: Path
) -> None:
    async with Receiver(tmp_path) as receiver, delivering(config, receiver.sink(kinds=("job",))) as harness:
        begin = harness.controller.state.sink_marks["audit"]
        submitted = await harness.submit(script="#!/bin/sh\necho KEPT-SECRET\n", environment={"A": "KEPT-SECRET"})
        assert submitted.status == 201
        await until(lambda: len(receiver.arrived) >= 1)
        event = next(iter(receiver.arrived.values()))
        cluster = harness.controller.state.cluster_id
        assert (event["specversion"], event["source"]) == ("1.0", f"/forebay/{cluster}")
        assert (event["type"], event["subject"]) == ("forebay.job_submitted", "job/1")
        assert event["id"] == f"{cluster}/{event['data']['revision']}/{event['data']['sequence']}"
        assert event["time"] == event["data"]["at"] and event["data"]["revision"] > begin
        assert event["data"]["actor"] == "user alice" and event["data"]["detail"]["request"]["name"] == "job"
        assert "KEPT-SECRET" not in str(receiver.bodies)


@story
async def test_with_private_data_a_job_event_says_only_that_it_happened(config: Config, tmp_path: Path) -> None:
    async with Receiver(tmp_path) as receiver, delivering(config, receiver.sink(kinds=("job",))) as harness:
        state = harness.controller.state
        harness.controller._state = replace(state, site=replace(state.site, flags=("PrivateData",)))
        assert (await harness.submit(name="KEPT-SECRET")).status == 201
        await until(lambda: len(receiver.arrived) >= 1)
        event = next(iter(receiver.arrived.values()))
        assert (event["data"]["job_id"], event["data"]["detail"]) == (1, {})
        assert "KEPT-SECRET" not in str(receiver.bodies)


@story
async def test_sinks_are_listed_measured_and_need_attention_when_they_fail(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_module, "SINK_NOTICE_S", 0.0)
    good, bad = Receiver(tmp_path), Receiver(tmp_path)
    bad.answer = 503
    async with good, bad, delivering(config, good.sink("audit"), bad.sink("monitor", kinds=("job",))) as harness:
        sinks = harness.service.sinks
        assert (await harness.submit()).status == 201
        await until(lambda: bool(good.arrived) and sinks.deliveries["monitor"].failures > 0)
        answer = await harness.ask("GET", "/v1/sinks")
        rows: dict[str, dict[str, Any]] = {row["name"]: row for row in answer.body["sinks"]}
        assert (answer.status, answer.body["replica"], set(rows)) == (200, "r1", {"audit", "monitor"})
        assert rows["audit"]["state"] == "active" and rows["audit"]["events"] == len(good.arrived)
        assert rows["audit"]["url"] == good.sink().url and rows["audit"]["mark"] is not None
        assert rows["monitor"]["state"] == "failing" and rows["monitor"]["error"] == "status 503"
        assert rows["monitor"]["lag_revisions"] > 0 and rows["monitor"]["lag_s"] > 0
        assert rows["monitor"]["failing_since"] is not None and rows["monitor"]["kinds"] == ["job"]
        for who in ("alice", "prometheus", "auditor", "slurm"):
            assert (await harness.ask("GET", "/v1/sinks", who=who)).status == 403
        metrics = (await harness.ask("GET", "/metrics", who="prometheus")).body.decode()
        for line in ('forebay_sink_lag_revisions{sink="monitor"}', 'forebay_sink_failures_total{sink="monitor"}'):
            assert float(metrics.split(line)[1].split()[0]) > 0
        assert 'forebay_sink_failures_total{sink="audit"} 0.0' in metrics
        needs = (await harness.ask("GET", "/v1/overview")).body["needs"]
        assert [(need["kind"], need["subject"]) for need in needs if need["kind"] == "sink"] == [
            ("sink", "sink monitor")
        ]
        bad.answer = 200
        sinks.renew((good.sink("audit"), bad.sink("monitor", kinds=("job",), batch=7)))
        await until(lambda: bool(bad.arrived) and sinks.deliveries["monitor"].state.value == "active")
        assert bad.revisions == sorted(bad.revisions)


@story
async def test_a_receiver_that_is_killed_twice_gets_all_events_in_order_also_from_the_ledger_on_disk(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.cluster.server.applied_log.RECENT_ENTRIES_MAX", 3)
    monkeypatch.setattr("forebay.cluster.api.sinks.delivery.RETRY_S_MAX", 0.05)
    receiver = Receiver(tmp_path)
    async with delivering(config, receiver.sink(batch=3)) as harness:
        begin = harness.controller.state.sink_marks["audit"]
        for _ in range(2):
            for _ in range(5):
                assert (await harness.submit()).status == 201
            await receiver.start()
            await until(lambda: len(receiver.arrived) > 2)
            await receiver.kill()
        for _ in range(5):
            assert (await harness.submit()).status == 201
        await receiver.start()
        delivery = harness.service.sinks.deliveries["audit"]
        await until(lambda: delivery.position.revision == harness.controller.state.revision)
        found = [(one["data"]["revision"], one["data"]["sequence"]) for one in receiver.arrived.values()]
        routine = {"StateDigested", "HistoriesCounted", "DisclosureKeyDrawn", "SinkAdvanced", "CachedRepliesDropped"}
        assert found == [row[:2] for row in await streamed(harness, begin) if row[2] not in routine]
        assert max(map(len, receiver.bodies)) <= 3
        await receiver.kill()
