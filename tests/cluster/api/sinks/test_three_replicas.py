"""Three processes deliver to a receiver that is killed twice while the leader changes: every event, in order."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from forebay.cluster.client import Client
from forebay.cluster.client.errors import ApiError
from forebay.cluster.config.access import OPERATOR_NAME
from forebay.cluster.config.config import Config
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.event_kinds import kind_name, selected_kinds
from forebay.cluster.schemas.overview import SinkView
from tests.cluster.api.sinks.receiver import Receiver
from tests.cluster.harness import PATIENCE_S, story, until
from tests.cluster.test_serve import make, ready, request, running

KINDS = ("job",)


async def listed(client: Client) -> SinkView:
    """Return the sink as the leader lists it, once there is one."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(ApiError):
                (row,) = (await client.call(ops.LIST_SINKS)).sinks
                if row.mark is not None and row.state != "starting":
                    return row
            await asyncio.sleep(0.05)


async def in_ledger(client: Client) -> tuple[int, list[tuple[int, int]]]:
    """Return the mark at which the sink began, and the place of each event that it has to get."""
    names, begin, found = {kind_name(kind) for kind in selected_kinds(KINDS)}, None, []
    index = 1
    while entries := (await client.call(ops.READ_LEDGER, **{"from": index, "limit": 1000})).entries:
        index = entries[-1].index + 1
        for record in (record for entry in entries for record in entry.records):
            for sequence, event in enumerate(record.get("events", ())):
                if begin is None and event["event"] == "sink_advanced":
                    begin = int(event["detail"]["revision"])
                if event["event"] in names:
                    found.append((int(record["revision"]), sequence))
    assert begin is not None
    return begin, [place for place in found if place[0] > begin]


@story
async def test_every_event_arrives_in_order_though_the_receiver_and_the_leader_are_killed(tmp_path: Path) -> None:
    receiver = Receiver(tmp_path)
    file = make(tmp_path, 3).file
    table = f'\n[[sink]]\nname = "audit"\nurl = "{receiver.sink().url}"\nsecret_file = "{receiver.secret_file}"\n'
    file.write_text(file.read_text() + table + 'kinds = ["job"]\nbatch = 4\n')
    config = Config.load(file)
    async with (
        running(config, "r1", "r2", "r3") as processes,
        Client(config.endpoints, config.tls_files("alice")) as client,
        Client(config.endpoints, config.tls_files(OPERATOR_NAME)) as operator,
    ):
        await ready(client)
        await listed(operator)
        jobs: list[int] = []

        async def submit() -> None:
            for _ in range(6):
                jobs.append((await client.call(ops.SUBMIT_JOB, request(client, tmp_path))).job_id)

        def arrived() -> set[int]:
            events = receiver.arrived.values()
            return {event["data"]["job_id"] for event in events if event["type"] == "forebay.job_submitted"}

        await submit()
        await receiver.start()
        await until(lambda: len(receiver.arrived) >= 2)
        await receiver.kill()
        await submit()
        leader = (await client.call(ops.LIST_MEMBERS)).leader
        assert leader is not None
        processes[leader].kill()
        await submit()
        await receiver.start()
        await until(lambda: len(arrived()) > 6)
        await receiver.kill()
        await submit()
        await receiver.start()
        await until(lambda: arrived() == set(jobs))
        assert len(jobs) == 24 and (await listed(operator)).state == "active"
        begin, expected = await in_ledger(operator)
        async with asyncio.timeout(PATIENCE_S):
            while len(receiver.arrived) < len(expected):
                await asyncio.sleep(0.05)
        found = [(one["data"]["revision"], one["data"]["sequence"]) for one in receiver.arrived.values()]
        assert found == expected
        async with asyncio.timeout(PATIENCE_S):
            while (await listed(operator)).mark in (None, begin):
                await asyncio.sleep(0.2)
        await receiver.kill()
