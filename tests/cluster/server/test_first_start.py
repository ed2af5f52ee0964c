"""No replica founds a second history beside an existing one: real processes, certificates and disks."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from forebay.cluster.client.errors import ApiError
from forebay.cluster.schemas import operations as ops
from tests.cluster.harness import PATIENCE_S, story
from tests.cluster.server.test_membership import Site, members, site_of_three
from tests.cluster.test_serve import request


async def said(site: Site, name: str, words: str) -> str:
    """Wait until a replica has logged these words; return the line."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for line in site.said[name]:
                if words in line:
                    return line
            await asyncio.sleep(0.05)


@pytest.mark.campaign(3)
@story
async def test_replicas_that_lost_their_data_found_no_second_history(
    tmp_path: Path,
) -> None:
    async with site_of_three(tmp_path) as site:
        async with site.client() as operator, site.client("alice") as alice:
            jobs = [(await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path))).job_id for _ in range(3)]
            await members(operator, lambda found: all(member.reachable for member in found.members))
            for name in ("r1", "r2", "r3"):
                await site.kill(name)
            for name in ("r2", "r3"):
                site.lose(name)

            # A majority without any history: the replicas wait, and log for which founder.
            for name in ("r2", "r3"):
                await site.start(name, "--first-start")
            for name in ("r2", "r3"):
                await said(site, name, "the cluster is not founded yet and waits for r1:")
                with contextlib.suppress(ApiError):
                    status = await operator.call(ops.SHOW_STATUS, replica=site.config.replica(name).api, deadline_s=5)
                    assert (status.leader, status.revision, status.last_index) == (None, 0, 0)

            # The third replica has the history: the others stop with a message, and have promised nothing.
            await site.start("r1")
            for name in ("r2", "r3"):
                code, last = await site.ends(name)
                assert code == 66 and "r1 has a history" in last and "forebay cluster recover" in last, last

            # They are also rejected before they create anything, wherever they start.
            site.lose("r2")
            await site.start("r2", "--first-start")
            code, last = await site.ends("r2")
            assert code == 66 and "r1 has a history" in last and "forebay cluster recover --name r1" in last, last
            assert not (site.config.storage.directory / "r2").exists()
            await site.start("r3")
            code, last = await site.ends("r3")
            assert code == 66 and "r1 has a history" in last, last

            # The third replica's data is unchanged.
            status = await operator.call(ops.SHOW_STATUS, replica=site.config.replica("r1").api)
            assert (status.leader, status.role) == (None, "candidate") and status.last_index > 3
            left = await alice.call(ops.LIST_JOBS, replica=site.config.replica("r1").api, stale=True)
            assert {job.job_id for job in left.jobs} <= set(jobs)
