"""GET /v1/burst is what `scontrol show burst` shows: as JSON, as text, and to users what is theirs where it must."""

from __future__ import annotations

import asyncio
import datetime
from typing import Any

import msgspec

from forebay.cluster.config.config import Config
from forebay.cluster.schemas.burst import BurstAnswer, burst_text
from forebay.replica.model.job_states import JobState
from tests.cluster.harness import Harness, story, until

MIB = 1024**2
ASKED = "#!/bin/sh\n#DW jobdw capacity=40MiB access_mode=striped type=scratch\ntrue\n"


async def node(harness: Harness, name: str = "n1") -> None:
    agent = {"command_id": harness.new_id(), "instance": "i", "storage_id": "s", "cpus": 2}
    await harness.ask("POST", f"/v1/agents/{name}/register", agent, who=name)


async def report(harness: Harness, job: int, stage: str, result: dict[str, Any]) -> None:
    attempt = harness.controller.state.jobs[job].attempt
    row = {"command_id": harness.new_id(), "job": job, "attempt": attempt, "stage": stage, "result": result}
    answer = await harness.ask("POST", "/v1/agents/n1/reports", {"reports": [row]}, who="n1")
    assert answer.status == 200, answer
    assert answer.body["results"][0]["outcome"] == "accepted", answer


@story
async def test_the_text_is_the_answer_in_slurms_form_and_unknown_accounts_are_said_to_be(config: Config) -> None:
    async with Harness(config) as harness:
        harness.accounts["alice"] = 1001
        await node(harness)
        await harness.submit(script=ASKED)
        await harness.submit(script=ASKED, who="bob")
        await until(lambda: harness.controller.state.jobs[2].attempt > 0)
        answer = await harness.ask("GET", "/v1/burst", who="bob")
        view = msgspec.convert(answer.body, BurstAnswer)
        text = await harness.ask("GET", "/v1/burst?format=text", who="bob")
        assert text.status == 200
        assert text.body.decode() == burst_text(view) + "\n"
        lines = burst_text(view, zone=datetime.UTC).splitlines()
        assert lines[0] == (
            "Name=native DefaultPool=fast Granularity=8MiB TotalSpace=96MiB FreeSpace=16MiB UsedSpace=80MiB"
        )
        assert lines[1].startswith("  PoolName[0]=wide Granularity=32MiB TotalSpace=256MiB")
        created = view.buffers[0].create_time
        assert created is not None
        assert lines[-5:] == [
            f"    JobID=2 CreateTime={created[:19]} Pool=fast Size=40MiB State=allocated UserID=bob(unknown)",
            lines[-4],
            "  Per User Buffer Use:",
            "    UserID=alice(1001) Used=40MiB",
            "    UserID=bob(unknown) Used=40MiB",
        ]
        assert lines[-4].endswith("Pool=fast Size=40MiB State=allocated UserID=alice(1001)")


@story
async def test_a_format_that_is_not_known_is_refused_with_those_that_are(config: Config) -> None:
    async with Harness(config) as harness:
        answer = await harness.ask("GET", "/v1/burst?format=xml", who="alice")
        assert answer.status == 400
        assert answer.body["error"]["remedy"] == "use json or text"


@story
async def test_with_private_data_users_see_their_own_and_operators_all(config: Config) -> None:
    async with Harness(config) as harness:
        await node(harness)
        await harness.submit(script=ASKED)
        await harness.submit(script=ASKED, who="bob")
        await until(lambda: harness.controller.state.jobs[2].attempt > 0)
        state = harness.controller.state

        site = msgspec.structs.replace(state.site, flags=("PrivateData",))
        harness.controller._state = msgspec.structs.replace(state, site=site)
        seen = {}
        for who in ("alice", "bob", "operator"):
            answer = await harness.ask("GET", "/v1/burst", who=who)
            seen[who] = [row["user"] for row in answer.body["buffers"]], [row["user"] for row in answer.body["uses"]]
        assert seen == {
            "alice": (["alice"], ["alice"]),
            "bob": (["bob"], ["bob"]),
            "operator": (["bob", "alice"], ["alice", "bob"]),
        }
        # What is free is no secret.
        assert answer.body["pools"][0]["free"] == 16 * MIB


@story
async def test_a_job_is_shown_with_its_users_number_and_what_it_asked_for(config: Config) -> None:
    async with Harness(config) as harness:
        harness.accounts["alice"] = 1001
        body = {"script": ASKED, "comment": "physics", "mail_types": ["stage_out"], "nice": 3}
        submitted = await harness.submit(**body)
        assert submitted.status == 201, submitted
        shown = (await harness.ask("GET", "/v1/jobs/1", who="alice")).body
        assert shown["uid"] == 1001
        assert shown["tres"] == "cpu=1,node=1,bb/native=40M"
        assert {key: shown["details"][key] for key in ("comment", "mail_types", "nice", "nodes")} == {
            "comment": "physics",
            "mail_types": ["stage_out"],
            "nice": 3,
            "nodes": 1,
        }
        await harness.submit(script="#!/bin/sh\ntrue\n")
        assert (await harness.ask("GET", "/v1/jobs/2", who="alice")).body["details"] is None


@story
async def test_the_mail_of_a_job_leaves_the_replica_that_leads_and_is_settled_in_the_ledger(config: Config) -> None:
    from forebay.cluster.server.mail import Mailer

    sent: list[str] = []
    async with Harness(config) as harness:
        controller = harness.controller

        async def send(mail: Any) -> None:
            sent.append(mail.key)

        controller.register(
            Mailer(
                state=lambda: controller.state,
                leads=lambda: controller.leads,
                submit=controller.submit,
                sender=lambda state: send,
                clock=controller.clock,
            )
        )
        await node(harness)
        submitted = await harness.submit(script=ASKED, mail_types=["stage_out"])
        assert submitted.status == 201, submitted
        await until(lambda: harness.controller.state.jobs[1].attempt > 0)
        await report(harness, 1, "stage_in", {"type": "done"})
        await until(lambda: controller.state.jobs[1].state is JobState.CONFIGURING)
        await report(harness, 1, "run", {"type": "started"})
        await report(harness, 1, "run", {"type": "ended", "result": 6, "exit_code": 0})
        await report(harness, 1, "post_run", {"type": "done"})
        assert not controller.state.mails
        await report(harness, 1, "stage_out", {"type": "done"})
        async with asyncio.timeout(20):
            while controller.state.mails or not sent:
                await asyncio.sleep(0.01)
        assert len(sent) == 1 and sent[0].startswith("1.stage_out.")
        history = await harness.ask("GET", "/v1/jobs/1/history", who="alice")
        assert "mail was sent: stage-out" in [row["sentence"] for row in history.body["rows"]]


@story
async def test_persistent_buffers_are_among_the_buffers_and_private_where_data_is(config: Config) -> None:
    async with Harness(config) as harness:
        await until(lambda: harness.controller.state.feature_level >= 1)
        agent = {"command_id": harness.new_id(), "instance": "i", "storage_id": "s", "cpus": 2}
        await harness.ask("POST", "/v1/agents/n1/register", agent, who="n1")
        made = "#!/bin/sh\n#BB create_persistent name=lake capacity=8MiB access=striped type=scratch\n"
        answer = await harness.submit(who="operator", script=made, nodes=0)
        assert answer.status == 201, answer
        await harness.submit(who="alice")
        await until(lambda: "lake" in harness.controller.state.persistent)
        for path in ("/v1/buffers", "/v1/buffers?live=yes"):
            first, *others = (await harness.ask("GET", path, who="alice")).body["buffers"]
            assert {key: first[key] for key in ("name", "job_id", "user", "state", "made_by", "node", "unit")} == {
                "name": "lake", "job_id": None, "user": "operator", "state": "allocating",
                "made_by": answer.body["job_id"], "node": "n1", "unit": "bytes",
            }  # fmt: skip
            assert first["held_bytes"] == first["capacity_bytes"] == 8 * 2**20
            assert all(row["job_id"] and row["name"] is None for row in others) and others
        flags = {
            "command_id": harness.new_id(),
            "partial": True,
            "settings": [{"key": "Flags", "value": "PrivateData"}],
        }
        assert (await harness.ask("POST", "/v1/configuration", flags)).status == 200
        rows = (await harness.ask("GET", "/v1/buffers", who="alice")).body["buffers"]
        assert [(row["user"], row["name"]) for row in rows] == [("alice", None)]
        assert "lake" in [row["name"] for row in (await harness.ask("GET", "/v1/buffers")).body["buffers"]]
