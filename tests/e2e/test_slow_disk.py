"""Replica with a slow disk: a library delays the syncs of one of three processes."""

import asyncio
from pathlib import Path

import pytest

from forebay.cluster.schemas import operations as ops
from tests.faults import faults
from tests.faults.bare import REPLICAS, BareCluster, held_job
from tests.faults.faults import Plan
from tests.faults.kernel import Unable

DELAY_MS = 60
HANDED_OVER_S = 60.0
"""Time limit, seconds: it detects a hang."""


async def write_until_another_leads(site: BareCluster, slow: str) -> str:
    async with site.client() as user, site.client("operator") as operator, asyncio.timeout(HANDED_OVER_S):
        while (leader := await site.leader(operator)) == slow:
            await user.call(ops.SUBMIT_JOB, held_job(user, "slow"))
        return leader


def test_a_leader_with_a_slow_disk_transfers_leadership_with_a_reason(fast_path: Path) -> None:
    async def run() -> None:
        async with site.client("operator") as operator:
            slow = await site.leader(operator)
            faults.change(Plan("slow", needle="", delay_ms=DELAY_MS), plans[slow])
            second = await write_until_another_leads(site, slow)
            async with asyncio.timeout(HANDED_OVER_S):
                while f"leadership was transferred to {second}: a sync takes " not in site.log(slow).read_text():
                    await asyncio.sleep(0.05)
            overview = await operator.call(ops.SHOW_OVERVIEW, stale=True, replica=site.config.replica(slow).api)
            said = {need.subject: need.sentence for need in overview.needs if "for a sync" in need.sentence}
            assert list(said) == [f"replica {slow}"], overview.needs
            times = {member.name: member.sync_s or 0.0 for member in overview.members}
            assert times[slow] >= DELAY_MS / 1000 > times[second]

    site, plans = BareCluster(fast_path), {name: fast_path / f"{name}.faults" for name in REPLICAS}
    try:
        library = faults.build(fast_path / "shim")
    except Unable as error:
        pytest.skip(str(error))
    site.found()
    for name, plan in plans.items():
        site.environments[name] = faults.environment(library, Plan("nothing"), plan)
    site.start_all()
    try:
        asyncio.run(run())
    finally:
        site.stop_all()
