"""The Python API against a real replica over TLS, and the cluster in memory beside it: both give the same answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

import forebay
import forebay.testing
from forebay import AsyncClient, Client, EventView, JobView
from forebay.cluster.config.config import Config
from tests.cluster.harness import Harness, story
from tests.cluster.sdk.agent import Agent, access

SCRIPT = """#!/bin/sh
#SBATCH --job-name=sum
#DW jobdw capacity=10MiB access_mode=striped type=scratch
true
"""

OWN_TO_A_CLUSTER = frozenset(
    "revision submit_time eligible_time start_time end_time workdir output uid node expected_start expected_after "
    "burst_buffer_path create_time change_time path".split()
)
"""Fields that differ between two clusters of the same history: times, places, and the number of commands before."""


def common(view: Any) -> dict[str, Any]:
    """Return the fields of a view that two clusters share."""
    found: dict[str, Any] = msgspec.to_builtins(view)
    return {name: value for name, value in found.items() if name not in OWN_TO_A_CLUSTER}


async def read(events: AsyncGenerator[EventView, None]) -> list[EventView]:
    """Read events until a job's buffer is removed."""
    found = []
    async with contextlib.aclosing(events):
        async for event in events:
            found.append(event)
            if event.event == "torn_down":
                break
    return found


@story
async def test_every_method_gets_its_answer_with_and_without_a_loop(config: Config) -> None:
    workdir = str(config.file.parent / "out")
    async with Harness(config), AsyncClient.connect(**access(config, "alice")) as client:
        agent = Agent(config, "n1")
        await agent.register()
        job = await client.submit(SCRIPT, workdir=workdir, name="other", cpus=2)
        assert (job.job_id, job.name, job.cpus, job.user) == (1, "other", 2, "alice")
        await agent.work()
        assert (await client.wait(job, check=True)).state == "COMPLETED"
        assert (await client.history(job)).rows[-1].event == "torn_down"
        events = await read(client.events())
        assert [event.job_id for event in events if event.event == "job_submitted"] == [1]
        later = await read(client.events(after=events[3]))
        assert later == events[4:]
        assert [event async for event in client.events(after=events[-1], timeout_s=0.1)] == []

        def without_a_loop() -> None:
            with Client.connect(**access(config, "alice")) as blocking:
                assert blocking.job(1) == blocking.wait(1)
                assert [one.job_id for one in blocking.jobs(name="OTHER")] == [1]
                assert [event for _, event in zip(events, blocking.events(), strict=False)] == events
                assert [event for _, event in zip(later, blocking.events(after=events[3]), strict=False)] == later
                assert list(blocking.events(after=events[-1], timeout_s=0.1)) == []
                assert [pool.name for pool in blocking.pools()] == ["fast", "wide"]
                assert [buffer.job_id for buffer in blocking.buffers()] == [1]
                assert (blocking.transfers(), blocking.job_transfers(1).transfer) == ([], None)
                assert blocking.status().role == "leader"
                held = blocking.submit("#!/bin/sh\n", workdir=workdir, hold=True)
                assert blocking.cancel(held).state == "CANCELLED"
                with pytest.raises(forebay.NotFoundError) as caught:
                    blocking.job(99)
                assert (caught.value.code, caught.value.command_id) == ("unknown_job", None)

        await asyncio.to_thread(without_a_loop)
        await agent.close()


@story
async def test_a_command_that_is_repeated_with_its_id_takes_effect_once(config: Config) -> None:
    async with Harness(config), AsyncClient.connect(**access(config, "alice")) as client:
        command_id = client.new_command_id()
        options: Any = {"workdir": str(config.file.parent / "out"), "command_id": command_id}
        first = await client.submit("#!/bin/sh\n", **options)
        assert (await client.submit("#!/bin/sh\n", **options)).job_id == first.job_id
        assert [job.job_id for job in await client.jobs()] == [first.job_id]


@story
async def test_the_cluster_in_memory_answers_as_a_real_one(config: Config) -> None:
    pools = {"fast": "96MiB"}
    async with Harness(config), AsyncClient.connect(**access(config, "alice")) as real:
        agent = Agent(config, "n1")
        await agent.register()
        with forebay.testing.cluster(pools, granularity="8MiB", nodes=1) as cluster:
            memory = cluster.async_client("alice")
            cluster.plan("sum", stage_in_s=0, run_s=0, stage_out_s=0)
            workdir = str(config.file.parent / "out")
            pairs = []
            for client in (real, memory):
                first = await client.submit(SCRIPT, workdir=workdir)
                second = await client.submit(SCRIPT.replace("10MiB", "2MiB"), workdir=workdir, array="1-2")
                held = await client.submit(SCRIPT, workdir=workdir, hold=True, name="held")
                rejections = []
                for script in ("#!/bin/sh\n#DW jobdw capacity=1TiB\n", "#!/bin/sh\n#DW jobdw capacity=x\n"):
                    with pytest.raises(forebay.ForebayError) as caught:
                        await client.submit(script, workdir=workdir)
                    rejections.append((type(caught.value), caught.value.code, caught.value.place))
                waiting = [common(job) for job in (first, second, held)]
                if client is real:
                    await agent.work()
                else:
                    cluster.run_until_idle()
                cancelled = await client.cancel(held)
                histories = [
                    [(row.event, row.state, row.reason, row.actor, row.sentence.replace("n2", "n1")) for row in rows]
                    for rows in [(await client.history(number)).rows for number in (1, 2, 3, 4)]
                ]
                jobs = [common(job) for job in await client.jobs()]
                pool = common((await client.pools())[0])
                pairs.append((rejections, waiting, common(cancelled), histories, jobs, pool))
            await memory.close()
        await agent.close()
    for found, expected in zip(pairs[1], pairs[0], strict=True):
        assert found == expected


def test_a_job_of_another_size_differs() -> None:
    with forebay.testing.cluster() as cluster:
        client = cluster.client()
        one, other = client.submit(SCRIPT), client.submit("#!/bin/sh\n", bb="capacity=1GiB", name="sum")
    assert isinstance(one, JobView)
    assert common(one) != common(other)
