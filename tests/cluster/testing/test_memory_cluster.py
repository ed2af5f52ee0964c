"""The cluster in memory: time moves when the test says so, jobs go as planned, and users are kept apart."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

import forebay
import forebay.testing
from tests.repo.tree import ROOT

SCRIPT = """#!/bin/sh
#SBATCH --job-name=sum
#DW jobdw capacity=60GiB access_mode=striped type=scratch
#DW stage_in type=file source=/data/a destination=$DW_JOB_STRIPED/a
#DW stage_out type=file source=$DW_JOB_STRIPED/b destination=/data/b
true
"""


def test_nothing_happens_until_the_clock_moves() -> None:
    with forebay.testing.cluster() as cluster:
        client = cluster.client("dana")
        job = client.submit(SCRIPT)
        assert (job.user, job.burst_buffer_state) == ("dana", "staging-in")
        assert client.transfers()[0].stage == "stage_in"
        assert client.job(job) == client.job(job.job_id)
        states = []
        for _ in range(5):
            states.append(client.job(job).burst_buffer_state)
            cluster.advance(1)
        assert states == ["staging-in", "running", "running", "running", "running"]
        cluster.advance(20)
        assert client.job(job).state == "COMPLETED"
        assert cluster.now == "2026-01-01T00:00:25.000000Z"


def test_a_job_waits_for_space_that_another_one_holds() -> None:
    with forebay.testing.cluster({"fast": "100GiB"}) as cluster:
        client = cluster.client()
        first, second = client.submit(SCRIPT), client.submit(SCRIPT.replace("/data/b", "/data/c"))
        assert second.reason == "BurstBufferResources"
        assert client.pools()[0].free_bytes == 40 * 2**30
        ended = client.wait_all([first, second])
        assert [job.state for job in ended] == ["COMPLETED", "COMPLETED"]
        assert (ended[1].start_time or "") > (ended[0].end_time or "")


@pytest.mark.parametrize(
    ("plan", "state"),
    [
        ({"exit_code": 3}, "FAILED"),
        ({"signal": 9}, "FAILED"),
        ({"run_s": 10_000}, "TIMEOUT"),
    ],
)
def test_a_script_ends_as_planned(plan: dict[str, Any], state: str) -> None:
    with forebay.testing.cluster() as cluster:
        client = cluster.client()
        cluster.plan("sum", **plan)
        job = client.submit(SCRIPT, time_limit_s=600)
        with pytest.raises(forebay.JobFailedError) as caught:
            client.wait(job, check=True)
        assert caught.value.job.state == state
        assert caught.value.job.exit_code == plan.get("exit_code", 0)


@pytest.mark.parametrize("stage", ["stage_in", "stage_out"])
def test_a_stage_fails_as_planned_and_the_job_keeps_its_buffer(stage: Any) -> None:
    with forebay.testing.cluster() as cluster:
        client = cluster.client()
        cluster.plan("sum", fail=stage, message="no such file: /data/a")
        job = client.submit(SCRIPT)
        cluster.run_until_idle()
        found = client.job(job)
        assert found.system_comment.endswith("no such file: /data/a")
        assert client.transfers()[0].state == "failed"
        with pytest.raises(forebay.WaitTimeoutError) as caught:
            client.wait(job, timeout_s=60)
        assert isinstance(caught.value, TimeoutError)
        assert client.cancel(job, hurry=True).cancelled
        cluster.run_until_idle()
        assert client.pools()[0].held_bytes == 0


def test_users_may_not_touch_each_others_jobs_but_operators_may() -> None:
    with forebay.testing.cluster() as cluster:
        job = cluster.client("dana").submit(SCRIPT, hold=True)
        with pytest.raises(forebay.PermissionDeniedError):
            cluster.client("eve").cancel(job)
        with pytest.raises(forebay.PermissionDeniedError):
            cluster.client("eve").submit(SCRIPT, user="dana")
        assert cluster.client("root", operator=True).cancel(job).state == "CANCELLED"


def test_a_repeated_command_takes_effect_once_and_another_one_of_its_id_is_rejected() -> None:
    with forebay.testing.cluster() as cluster:
        client = cluster.client()
        command_id = client.new_command_id()
        first = client.submit(SCRIPT, command_id=command_id)
        assert client.submit(SCRIPT, command_id=command_id).job_id == first.job_id
        with pytest.raises(forebay.RejectedError) as caught:
            client.submit(SCRIPT, name="other", command_id=command_id)
        assert caught.value.code == "command_id_reused"


def test_events_resume_after_any_of_them_and_end_when_asked_to() -> None:
    with forebay.testing.cluster() as cluster:
        client = cluster.client()
        client.submit(SCRIPT)
        events = list(client.events(timeout_s=60))
        assert events[-1].event == "torn_down"
        for position, event in enumerate(events):
            assert list(client.events(after=event, timeout_s=1)) == events[position + 1 :]
        with pytest.raises(forebay.ForebayError) as caught:
            list(client.events(after=events[-1]))
        assert caught.value.code == "no_more_events"


def test_arrays_are_waited_for_task_by_task() -> None:
    with forebay.testing.cluster() as cluster:
        client = cluster.client()
        first = client.submit("#!/bin/sh\n", array="1-4%2", name="tasks")
        with pytest.raises(ValueError, match="wait_all"):
            client.wait(first.job_id)
        assert client.wait(first).job_id == first.job_id
        tasks = client.wait_all([first.job_id])
        assert [task.details and task.details.array_task_id for task in tasks] == [1, 2, 3, 4]
        assert len(client.history(tasks[3]).rows) >= 3
        assert [job.job_id for job in client.jobs(limit=2)] == [3, 4]


def test_past_states_are_listed() -> None:
    with forebay.testing.cluster() as cluster:
        client = cluster.client()
        job = client.submit(SCRIPT)
        cluster.run_until_idle()
        assert client.jobs()[0].state == "COMPLETED"
        assert client.jobs(at=job.revision)[0].state == "PENDING"
        with pytest.raises(forebay.InvalidRequestError):
            client.jobs(at=10_000)


def test_the_asynchronous_client_lets_other_tasks_run_while_it_waits() -> None:
    async def scenario() -> None:
        with forebay.testing.cluster() as cluster:
            async with cluster.async_client("dana") as client:
                jobs = [await client.submit(SCRIPT.replace("/data/b", f"/data/{n}")) for n in range(3)]
                ended = await asyncio.gather(*(client.wait(job, timeout_s=1_000) for job in jobs))
                assert [job.state for job in ended] == ["COMPLETED"] * 3

    asyncio.run(scenario())


def test_the_clock_does_not_go_back() -> None:
    with forebay.testing.cluster() as cluster, pytest.raises(ValueError, match="go back"):
        cluster.advance(-1)


SITE = {"setuptools"}
"""Loaded by site.py where it is installed."""


def test_it_needs_only_the_base_and_a_persistent_map() -> None:
    program = (
        "import sys, importlib.metadata as m\n"
        "import forebay.testing\n"
        "with forebay.testing.cluster() as cluster:\n"
        "    client = cluster.client()\n"
        "    client.wait(client.submit('#!/bin/sh\\n#BB capacity=1GiB\\n'))\n"
        "    list(client.events(timeout_s=1))\n"
        "packages = m.packages_distributions()\n"
        "print(*sorted({packages[n.split('.')[0]][0] for n in sys.modules if n.split('.')[0] in packages}))\n"
    )
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(printed.stdout.split()) <= {"forebay", "immutables", "msgspec", "typing_extensions"} | SITE
