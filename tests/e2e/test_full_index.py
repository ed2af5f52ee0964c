"""Disk with space for the journal but not for the history index, with a real replica and history service."""

import asyncio
import contextlib
import errno
from pathlib import Path

import pytest

from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import operations as ops
from tests.faults import faults
from tests.faults.bare import BareCluster, held_job
from tests.faults.faults import Plan
from tests.faults.kernel import Unable

WAIT_S = 90.0
"""Time limit of the whole test, seconds: it detects a hang."""

LOOK_S = 0.2


@pytest.mark.campaign(3)
def test_a_full_disk_does_not_damage_the_history_index(fast_path: Path) -> None:
    async def revisions(user: Client, job: int) -> list[int]:
        """Ask r1 until it answers."""
        while True:
            with contextlib.suppress(ApiError):
                at = site.config.replica("r1").api
                found = await user.call(ops.SHOW_JOB_HISTORY, id=job, stale=True, replica=at)
                return [row.revision for row in found.rows]
            await asyncio.sleep(LOOK_S)

    async def said(sentence: str) -> str:
        while sentence not in (text := site.log("r1").read_text()):
            await asyncio.sleep(LOOK_S)
        return text

    async def run() -> None:
        async with site.client() as user, asyncio.timeout(WAIT_S):
            async with site.client("operator") as operator:
                await site.leader(operator)
            first = await user.call(ops.SUBMIT_JOB, held_job(user, "before"))
            assert await revisions(user, first.job_id) == [first.revision]
            faults.change(Plan("write", error=errno.ENOSPC, needle="/index/"), plan)
            second = await user.call(ops.SUBMIT_JOB, held_job(user, "meanwhile"))
            text = await said("because the disk has no space for the index of the history service")
            assert "Traceback" not in text and faults.hits(plan)
            faults.change(Plan("nothing"), plan)
            assert await revisions(user, second.job_id) == [second.revision]
            assert await revisions(user, first.job_id) == [first.revision]
            assert "rebuilding" not in site.log("r1").read_text()

    site, plan = BareCluster(fast_path), fast_path / "r1.faults"
    try:
        library = faults.build(fast_path / "shim")
    except Unable as error:
        pytest.skip(str(error))
    site.found()
    site.environments["r1"] = faults.environment(library, Plan("nothing"), plan)
    site.start_all()
    try:
        asyncio.run(run())
    finally:
        site.stop_all()
