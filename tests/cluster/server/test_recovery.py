"""A lost majority: one replica's data continues as a cluster without loss, and former members are excluded."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.client.errors import ApiError
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.requests import AddMemberRequest
from tests.cluster.cli.double import on_a_terminal
from tests.cluster.harness import PATIENCE_S, story
from tests.cluster.server.test_first_start import said
from tests.cluster.server.test_membership import Site, members, site_of_three, voters
from tests.cluster.test_serve import ROOT, request


def forebay(site: Site, *words: str, code: int = 0) -> Any:
    """Run an offline command as an operator; return its JSON, or its message on failure."""
    found = subprocess.run(
        [sys.executable, "-m", "forebay.cluster.cli", "--config", str(site.config.file), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == code, found.stdout + found.stderr
    return json.loads(found.stdout) if code == 0 else found.stderr


def said_no(site: Site) -> int:
    """Run the recovery on a terminal, answer no, and return the exit code."""
    with on_a_terminal(site.config, "cluster", "recover", "--name", "r1") as (ours, _, process):
        os.write(ours, b"n\n")
        _, asked = process.communicate(timeout=PATIENCE_S)
        assert b"Do it? [y/N]" in asked and b"nothing was changed" in asked, asked
        return process.returncode


@pytest.mark.campaign(3)
@story
async def test_survivors_data_becomes_a_cluster_and_former_members_are_excluded(
    tmp_path: Path,
) -> None:
    async with site_of_three(tmp_path) as site:
        home = site.config.storage.directory
        async with site.client() as operator, site.client("alice") as alice:
            jobs = [(await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path))).job_id for _ in range(3)]
            assert "held by another process" in forebay(site, "cluster", "recover", "--name", "r1", code=1)
            await site.kill("r3")
            assert "a majority runs" in forebay(site, "cluster", "recover", "--name", "r3", "--yes", code=1)
            jobs += [(await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path))).job_id for _ in range(3)]
            for name in ("r1", "r2"):
                await site.kill(name)

            # The plan is shown first, and nothing is done until its ID is confirmed.
            plan = forebay(site, "cluster", "recover", "--name", "r1", "--json")
            assert (plan["done"], plan["members"], plan["incarnation"]) == (False, ["r1", "r2", "r3"], "1")
            assert plan["jobs"] == {"PENDING": 6} and plan["lost_jobs_first"] == 7
            assert forebay(site, "cluster", "recover", "--name", "r1", "--json")["plan"] == plan["plan"]
            # On a terminal the operator is asked, and may decline.
            assert await asyncio.to_thread(said_no, site) == ExitCode.INTERRUPTED
            assert forebay(site, "cluster", "recover", "--name", "r1", "--json") == plan
            assert "the plan changed" in forebay(
                site, "cluster", "recover", "--name", "r1", "--confirm", "0" * 8, code=1
            )
            done = forebay(
                site, "cluster", "recover", "--name", "r1", "--confirm", plan["plan"], "--by", "ops", "--json"
            )
            assert done["done"] and done["begun"].startswith("2-")
            assert (done["kept_index"], done["kept_revision"]) == (plan["kept_index"], plan["kept_revision"])

            # A second recovery before a start would only skip job IDs.
            again = forebay(site, "cluster", "recover", "--name", "r1", "--yes", code=1)
            assert f"was already recovered as incarnation {done['begun']}, and has not run since" in again

            # A former member that returns while the new cluster is down is detected at the first frame.
            await site.start("r2")
            await said(site, "r2", "replica r2 of cluster")
            await site.start("r1")
            code, last = await site.ends("r2")
            assert code == 77 and "incarnation 1 of the cluster, which has ended" in last, last
            # Another former member is rejected before it participates.
            await members(operator, lambda found: voters(found) == ["r1"])
            await site.start("r3")
            code, last = await site.ends("r3")
            assert code == 66 and f"r1 has incarnation {done['begun']}" in last, last
            # From then on it is rejected without asking.
            for name in ("r2", "r3"):
                await site.start(name)
                code, last = await site.ends(name)
                assert (
                    code == 66 and "incarnation over" in last and "run `forebay cluster add` with its name" in last
                ), last

            # All of the survivor's data is there; IDs of lost jobs are not reused; auditors see the recovery.
            assert [job.job_id for job in (await alice.call(ops.LIST_JOBS)).jobs] == jobs == [1, 2, 3, 4, 5, 6]
            jobs.append((await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path))).job_id)
            assert jobs[-1] == done["first_job"] > 6
            for job in (1, jobs[-1]):
                told = await alice.call(ops.SHOW_JOB_HISTORY, id=str(job))
                assert told.rows[0].event == "job_submitted", told
            status = await operator.call(ops.SHOW_STATUS)
            assert (status.incarnation, status.leader) == (done["begun"], "r1")
            entries = (await operator.call(ops.READ_LEDGER, **{"from": plan["kept_index"] + 1}, limit=2)).entries
            assert [row["change"] for row in entries[0].records] == ["recover"]
            recovery = entries[1].records[0]["events"][0]["detail"]["recovery"]
            assert (recovery["by"], recovery["incarnation"], recovery["kept_index"]) == ("ops", 2, plan["kept_index"])
            keys = (await operator.call(ops.LIST_LOG_KEYS, alone=True, replica=site.config.replica("r1").api)).origin
            assert keys == f"forebay/{site.config.cluster.id}/{done['begun']}"

            # The others join like new replicas.
            shutil.move(home / "r2", tmp_path / "old-r2")
            row = site.config.replica("r2")
            addition = AddMemberRequest(
                command_id=operator.new_command_id(), name="r2", peer=str(row.peer), api=str(row.api)
            )
            await operator.call(ops.ADD_MEMBER, addition)
            await site.start("r2", "--join")
            found = await members(operator, lambda found: len(voters(found)) == 2)
            assert found.incarnation == done["begun"]
            jobs.append((await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path))).job_id)
            site.processes["r2"].send_signal(signal.SIGTERM)
            assert (await site.ends("r2"))[0] == 0
            await site.start("r2")
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    with contextlib.suppress(ApiError):
                        status = await operator.call(ops.SHOW_STATUS, replica=row.api, deadline_s=2)
                        if status.ready and status.incarnation == done["begun"]:
                            break
                    await asyncio.sleep(0.05)
            assert [job.job_id for job in (await alice.call(ops.LIST_JOBS)).jobs] == jobs
