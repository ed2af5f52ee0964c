"""The client and the server of this project understand each other: every method, against a real replica."""

from forebay.cluster.client import Client
from forebay.cluster.config.config import Config
from forebay.cluster.schemas import agents as agent_schemas
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas import requests as r
from forebay.cluster.schemas.job_fields import SubmitRequest
from forebay.replica.messages.commands import OperationDone
from tests.cluster.harness import SCRIPT, Harness, story


@story
async def test_every_method_of_the_client_gets_its_answer(config: Config) -> None:
    async with Harness(config):
        async with (
            Client(config.endpoints, config.tls_files("operator")) as operator,
            Client(config.endpoints, config.tls_files("alice")) as alice,
            Client(config.endpoints, config.tls_files("n1")) as agent,
        ):
            registration = agent_schemas.RegisterRequest(
                command_id=agent.new_command_id(), instance="i", storage_id="s", cpus=2
            )
            assert (await agent.register("n1", registration)).revision > 0
            submission = SubmitRequest(
                command_id=alice.new_command_id(),
                script=SCRIPT,
                time_limit_s=60,
                workdir=str(config.file.parent / "out"),
            )
            job = await alice.call(ops.SUBMIT_JOB, submission)
            assert job.job_id == 1
            polled = await agent.poll("n1", agent_schemas.PollRequest(instance="i", wait_s=0), config.endpoints[0])
            assert [order.stage for order in polled.orders] == ["stage_in"]
            report = agent_schemas.OperationReport(
                command_id=agent.new_command_id(), job=1, attempt=1, stage="stage_in", result=OperationDone()
            )
            reported = await agent.report("n1", agent_schemas.ReportsRequest(reports=(report,)))
            assert [result.outcome for result in reported.results] == ["accepted"]
            assert (await alice.call(ops.SHOW_JOB, id=1)).attempt >= 1
            assert [found.job_id for found in (await alice.call(ops.LIST_JOBS, state="CONFIGURING")).jobs] == [1]
            assert (await alice.call(ops.SHOW_JOB_HISTORY, id=1)).complete
            assert (await alice.call(ops.EXPLAIN_JOB, id=1)).reason == "None"
            assert (await alice.call(ops.EXPLAIN_JOB, id=1, at=job.revision)).reason == job.reason
            assert {pool.name for pool in (await alice.call(ops.LIST_POOLS)).pools} == {"fast", "wide"}
            pool = r.PoolRequest(command_id=operator.new_command_id(), quantity="1GiB", granularity="1MiB")
            assert (await operator.call(ops.SET_POOL, pool, name="new")).free_bytes == 2**30
            assert (await alice.call(ops.LIST_BUFFERS)).buffers[0].state == "pre-run"
            drain = r.DrainRequest(command_id=operator.new_command_id(), reason="dust")
            assert (await operator.call(ops.DRAIN_NODE, drain, name="n1")).state == "DRAINING"
            assert (await operator.call(ops.RESUME_NODE, name="n1")).state == "UP"
            assert (await alice.call(ops.LIST_NODES, stale=True)).nodes[0].last_contact_s is not None
            assert (await alice.call(ops.LIST_TRANSFERS)).transfers == ()
            held = r.SubmitCommand(
                command_id=alice.new_command_id(),
                script="#!/bin/sh\n",
                time_limit_s=1,
                workdir="/no/../where",
                hold=True,
            )
            assert [result.status for result in (await alice.commands([held])).results] == [400]
            assert (await alice.call(ops.CANCEL_JOB, id=1)).cancelled
            assert (await operator.call(ops.LIST_MEMBERS)).leader == "r1"
            status = await operator.call(ops.SHOW_STATUS, replica=config.endpoints[0], digest=True)
            assert status.ready and status.state_digest
            ledger = await operator.call(ops.READ_LEDGER, **{"from": 1}, limit=100)
            assert ledger.entries[-1].digest == status.ledger_digest
            assert (await operator.call(ops.SAVE_SNAPSHOT)).revision == status.revision
            assert "/v1/jobs" in (await alice.call(ops.SHOW_OPENAPI))["paths"]
