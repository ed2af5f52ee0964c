"""Cluster of real processes, one of which scripts/drill kills at a random moment."""

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.job_fields import SubmitRequest
from forebay.cluster.schemas.jobs import JobView
from tests.faults import drill, verify
from tests.repo.tree import ROOT

ROUNDS = 4
"""Number of kills, enough to show that the path works; longer runs use scripts/drill."""


@pytest.mark.campaign(3)
def test_random_kills_lose_nothing_and_run_nothing_twice() -> None:
    line = [str(ROOT / "scripts" / "drill"), "--rounds", str(ROUNDS)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=1800, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["rounds"], summary["failed"]) == (ROUNDS, 0)
    assert summary["acknowledged"] >= ROUNDS


KILLED_EARLY = """#!/bin/sh
#BB capacity=17MiB pool=fast
#DW stage_out type=file source=$DW_JOB_STRIPED/never-written destination=%d/results/never-written
kill -9 $$
"""


async def killed_early(directory: Path) -> JobView:
    """Return how the drill takes a job whose script was killed before it wrote what is staged out."""
    drilled = drill.Drill(directory, seed=1)
    drilled.cluster.found(drill.POOLS, drill.COPY_RATE)
    drilled.cluster.start_all()
    try:
        async with drilled.cluster.client(drill.USER) as client:
            request = SubmitRequest(
                command_id=client.new_command_id(),
                script=KILLED_EARLY,
                time_limit_s=300,
                workdir=str(drilled.cluster.work),
            )
            job = (await client.call(ops.SUBMIT_JOB, request)).job_id
            drilled.excused.add(job)
            views = await drilled.wait_over(client, [job])
            await verify.free_capacity(client)
            return views[job]
    finally:
        drilled.cluster.stop_all()


def test_a_script_killed_before_its_result_does_not_block_a_round(tmp_path: Path) -> None:
    job = asyncio.run(killed_early(tmp_path / "drill"))
    assert (job.state, job.burst_buffer_state, job.signal) == ("FAILED", "complete", 9)
