"""A journal that fills up rejects commands by kind and in time, so that no replica stops for lack of space."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import pytest

from forebay.cluster.config.config import MAP_SIZE_BYTES_MIN, Config
from forebay.cluster.config.limits import LimitsConfig
from forebay.cluster.server.pending import AGENTS, CANCELS, OPERATORS, OWN, USERS, JournalFull, level_of
from forebay.replica.messages import commands as c
from tests.cluster.harness import Harness, story
from tests.cluster.server.test_proposer import command_id, submit

ALICE, OPERATOR = c.Actor(c.ActorRole.USER, "alice"), c.Actor(c.ActorRole.OPERATOR, "operator")
NODE = c.Actor(c.ActorRole.AGENT, "n1")
REGISTER = c.RegisterNode("n1", 2, "instance", "disk")
UNBOUNDED = LimitsConfig(commands_per_minute=10_000_000, bytes_per_minute=2**40)  # type: ignore[arg-type]

KINDS: dict[str, tuple[c.Actor, c.Command, float]] = {
    "a submit": (ALICE, c.HoldJob(1), USERS.fill_max),
    "an update": (ALICE, c.ReleaseJob(1), USERS.fill_max),
    "a cancel": (ALICE, c.CancelJob(2), CANCELS.fill_max),
    "an operator's": (OPERATOR, c.DrainNode("n1", "full"), OPERATORS.fill_max),
    "a report": (NODE, REGISTER, AGENTS.fill_max),
    "the leader's": (c.CONTROLLER, c.MarkNodeDown("n1", "silent"), OWN.fill_max),
}


def small(config: Config) -> Config:
    storage = msgspec.structs.replace(config.storage, map_size_bytes=MAP_SIZE_BYTES_MIN)
    return msgspec.structs.replace(config, storage=storage, limits=UNBOUNDED)


def test_more_important_commands_have_space_for_longer() -> None:
    levels = [level_of(c.Request(b"", actor, command)) for actor, command, _ in KINDS.values()]
    assert [level.fill_max for level in levels] == [most for _, _, most in KINDS.values()]
    assert levels == sorted(levels, key=lambda level: level.fill_max)
    assert USERS.fill_max < CANCELS.fill_max < OPERATORS.fill_max < AGENTS.fill_max < OWN.fill_max < 1


@pytest.mark.parametrize("fill", [most + more for _, _, most in KINDS.values() for more in (0.0, 0.001)])
@story
async def test_at_each_level_exactly_the_kinds_without_space_are_rejected(
    config: Config, monkeypatch: pytest.MonkeyPatch, fill: float
) -> None:
    async with Harness(config) as harness:
        for _ in range(2):
            await submit(harness)
        await harness.controller.submit(c.Request(command_id(), NODE, REGISTER))
        monkeypatch.setattr(harness.controller.proposer, "_fill_with", lambda size_bytes: fill)
        for kind, (actor, command, most) in KINDS.items():
            before = harness.controller.state.revision
            answer = harness.controller.submit(c.Request(command_id() if actor.name else b"", actor, command))
            if fill <= most:
                await answer
            else:
                with pytest.raises(JournalFull, match="full; above"):
                    await answer
                assert harness.controller.state.revision == before, kind


@story
async def test_retry_needs_no_space_and_a_rejection_gives_the_reason(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Harness(config) as harness:
        carried_out = harness.job(hold=True)
        assert (await harness.ask("POST", "/v1/jobs", carried_out, who="alice")).status == 201
        monkeypatch.setattr(harness.controller.proposer, "_fill_with", lambda size_bytes: 0.82)
        refused = await harness.submit()
        assert (refused.status, refused.code, refused.body["error"]["outcome"]) == (507, "journal_full", "rejected")
        assert refused.sentence.startswith("the journal is 82% full; above 80% commands of users are rejected")
        assert "map_size" in refused.body["error"]["remedy"]
        again = await harness.ask("POST", "/v1/jobs", carried_out, who="alice")
        assert (again.status, again.body["job_id"]) == (201, 1)
        cancel = {"command_id": harness.new_id()}
        assert (await harness.ask("POST", "/v1/jobs/1/cancel", cancel, who="alice")).status == 200


@pytest.mark.campaign(3)
@story
async def test_user_who_fills_the_journal_with_updates_stops_no_replica(config: Config) -> None:
    async with Harness(small(config)) as harness:
        await harness.ask("POST", "/v1/agents/n1/register", who="n1", body={
            "command_id": harness.new_id(), "instance": "i", "storage_id": "s", "cpus": 2,
        })  # fmt: skip
        job = (await harness.submit(hold=True)).body["job_id"]

        async def flood(who: str, commands: list[dict[str, Any]]) -> set[int]:
            body = {"commands": [{"command_id": harness.new_id(), **command} for command in commands]}
            answer = await harness.ask("POST", "/v1/commands", body, who=who)
            return {result["status"] for result in answer.body["results"]}

        # Fill most of it with large commands, and the rest with many updates.
        while (answer := await harness.submit(hold=True, script="#!/bin/sh\n" + "#" * 250_000)).status == 201:
            pass
        assert (answer.status, answer.code) == (507, "journal_full")
        update = {"type": "update_job", "job_id": job, "comment": "y" * 1000}
        async with asyncio.timeout(120):
            while 507 not in (found := await flood("alice", [update] * 200)):
                assert found == {200}
            assert harness.controller.journal_fill <= USERS.fill_max
            # Commands that free space are still accepted, and so are those of operators and agents.
            assert await flood("alice", [{"type": "cancel_job", "job_id": job}]) == {200}
            reasons = (f"{'full ' * 200}{number}" for number in itertools.count())
            while 507 not in await flood("operator", [
                {"type": "drain_node", "node": "n1", "reason": next(reasons)} for _ in range(500)
            ]):  # fmt: skip
                pass
        assert USERS.fill_max < harness.controller.journal_fill <= OPERATORS.fill_max
        node = c.Request(command_id(), NODE, msgspec.structs.replace(REGISTER, instance="another"))
        assert (await harness.controller.submit(node)).rejection is None
        harness.controller.save_snapshot().result(timeout=60)
        harness.storage.journal.flush_hints()
        assert not harness.failures
        await harness.restart()
        assert harness.controller.journal_fill < AGENTS.fill_max
