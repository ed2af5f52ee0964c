"""Sessions of programs over HTTP and the channel: numbered commands, answers kept until they have arrived (law 6)."""

from __future__ import annotations

import importlib

import pytest
from msgspec.structs import replace

from forebay.cluster.api.service import COMMAND_AHEAD_S_MAX
from forebay.cluster.client.channel import ChannelClient
from forebay.cluster.client.client import Client
from forebay.cluster.client.errors import ApiError
from forebay.cluster.config.config import Config
from forebay.cluster.consensus import ClockBounds
from forebay.cluster.schemas import operations
from forebay.cluster.schemas.base import Command
from forebay.cluster.schemas.command_ids import new_command_id
from forebay.cluster.schemas.job_fields import SubmitRequest
from forebay.cluster.schemas.requests import HoldCommand, ReleaseCommand
from forebay.cluster.system.address import Address
from forebay.replica.messages.commands import Actor, ActorRole
from forebay.replica.values.command_ids import encode_session_command_id
from forebay.replica.values.units import Instant, seconds
from tests.clocks import ManualClock
from tests.cluster.channel.test_channel import channel_of, submission
from tests.cluster.harness import PLAIN, Answer, Harness, story, until

ALICE, BOB = Actor(ActorRole.USER, "alice"), Actor(ActorRole.USER, "bob")
START = Instant(1_750_000_000_000_000)


def id_at(at: Instant) -> str:
    return new_command_id(ManualClock(at))


async def opened(harness: Harness, who: str = "alice") -> int:
    answer = await harness.ask("POST", "/v1/sessions", {"command_id": harness.new_id()}, who=who)
    assert answer.status == 200 and answer.body["window"] and answer.body["idle_s"], answer
    return int(answer.body["session"])


async def cancel(harness: Harness, session: int, sequence: int, acknowledged: int, who: str = "alice") -> Answer:
    body = {"command_id": encode_session_command_id(session, sequence, acknowledged).hex()}
    return await harness.ask("POST", "/v1/jobs/77/cancel", body, who=who)


@story
async def test_a_retry_in_a_session_gets_the_first_answer_until_it_was_acknowledged(config: Config) -> None:
    async with Harness(config) as harness:
        session = await opened(harness)
        body = harness.job() | {"command_id": encode_session_command_id(session, 1, 0).hex()}
        first = await harness.ask("POST", "/v1/jobs", body, who="alice")
        assert first.status == 201
        await harness.restart()
        again = await harness.ask("POST", "/v1/jobs", body, who="alice")
        assert (again.status, again.body["job_id"]) == (201, first.body["job_id"])
        assert len(harness.controller.state.jobs) == 1
        other = await cancel(harness, session, 1, 0)
        assert (other.status, other.code) == (409, "command_id_reused")
        assert (await cancel(harness, session, 3, 2)).status == 404
        late = await harness.ask("POST", "/v1/jobs", body, who="alice")
        assert (late.status, late.code) == (400, "command_too_old")
        never = await cancel(harness, session, 2, 0)
        assert (never.status, never.code) == (400, "command_too_old"), "who acknowledged it wants it no more"
        assert len(harness.controller.state.jobs) == 1


@story
async def test_a_session_is_used_listed_and_closed_by_its_own_user_and_by_operators(config: Config) -> None:
    async with Harness(config) as harness:
        session = await opened(harness)
        hers = await opened(harness, "bob")
        for who in ("bob", "operator"):
            foreign = await cancel(harness, session, 1, 0, who)
            assert (foreign.status, foreign.code) == (404, "unknown_session")
        listed = {who: await harness.ask("GET", "/v1/sessions", who=who) for who in ("alice", "bob", "operator")}
        assert {who: [row["session"] for row in answer.body["sessions"]] for who, answer in listed.items()} == {
            "alice": [session],
            "bob": [hers],
            "operator": [session, hers],
        }
        assert listed["alice"].body["sessions"][0]["actor"] == "user:alice"
        close = {"command_id": harness.new_id()}
        assert (await harness.ask("POST", f"/v1/sessions/{hers}/close", close, who="alice")).status == 404
        itself = {"command_id": encode_session_command_id(session, 1, 0).hex()}
        answer = await harness.ask("POST", f"/v1/sessions/{session}/close", itself, who="alice")
        assert (answer.status, answer.code) == (409, "wrong_state")
        for number in (session, hers):
            close = {"command_id": harness.new_id()}
            assert (await harness.ask("POST", f"/v1/sessions/{number}/close", close)).status == 200
        assert (await cancel(harness, session, 2, 1)).code == "unknown_session"


@story
@pytest.mark.parametrize("text", ["0x1", "-1", "9" * 16, "one", "1.0", str(2**48)])
async def test_what_is_no_session_is_refused_by_name(config: Config, text: str) -> None:
    async with Harness(config) as harness:
        answer = await harness.ask("POST", f"/v1/sessions/{text}/close", {"command_id": harness.new_id()})
        assert answer.status == 400 and "support session list" in answer.body["error"]["remedy"]


@story
async def test_who_is_over_the_bound_is_refused_and_told_to_have_a_session_and_others_go_on(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = importlib.import_module("forebay.replica.fold.dedup_cache")
    monkeypatch.setattr(answers, "REPLY_LIMITS", answers.REPLY_LIMITS._replace(least=4, of_one=12))
    async with Harness(config) as harness:
        session = await opened(harness)
        first = {"command_id": harness.new_id()}
        assert (await harness.ask("POST", "/v1/jobs/7/cancel", first, who="bob")).status == 404
        codes = []
        for _ in range(14):
            body = {"command_id": harness.new_id()}
            codes.append((await harness.ask("POST", "/v1/jobs/7/cancel", body, who="alice")).status)
        assert codes == [404] * 11 + [429] * 3
        answer = await harness.ask("POST", "/v1/jobs/7/cancel", {"command_id": harness.new_id()}, who="alice")
        assert (answer.code, answer.body["error"]["outcome"]) == ("too_many_answers", "rejected")
        assert "/v1/sessions" in answer.body["error"]["remedy"] and "Retry-After" in answer.headers
        for sequence in range(1, 30):
            assert (await cancel(harness, session, sequence, sequence - 1)).status == 404, "her session goes on"
        again = await harness.ask("POST", "/v1/jobs/7/cancel", first, who="bob")
        assert again.status == 404 and harness.controller.state.kept[BOB] == 1


@story
async def test_a_fast_clock_and_a_flood_lock_nobody_out(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent 290 s ahead and 250 commands/s of anybody once made every honest command too old."""
    expiry = importlib.import_module("forebay.replica.decide.sessions")
    monkeypatch.setattr(expiry, "RECEIPTS_DROPPED_MAX", 16)
    clock = ManualClock(START)
    async with Harness(config, clock=clock) as harness:
        ahead = id_at(Instant(clock.now() + seconds(290)))
        body = {"command_id": ahead, "instance": "i1", "cpus": 8, "storage_id": "s1", "buffers": ""}
        registered = await harness.ask("POST", "/v1/agents/n1/register", body, who="n1")
        assert registered.status == 200, registered
        most = id_at(Instant(clock.now() + seconds(COMMAND_AHEAD_S_MAX - 1)))
        assert (await harness.ask("POST", "/v1/jobs/7/cancel", {"command_id": most}, who="bob")).status == 404
        flood = [{"type": "hold_job", "command_id": harness.new_id(), "job_id": 999} for _ in range(100)]
        await harness.ask("POST", "/v1/commands", {"commands": flood}, who="bob")
        kept = len(harness.controller.state.receipts)
        clock.advance(700)
        honest = await harness.ask("POST", "/v1/jobs/7/cancel", {"command_id": harness.new_id()}, who="alice")
        assert honest.status == 404, "the command is not too old: there is no such job"
        await until(lambda: len(harness.controller.state.receipts) < kept // 2)
        for behind_s in (0, 60, 250):
            made = id_at(Instant(clock.now() - seconds(behind_s)))
            honest = await harness.ask("POST", "/v1/jobs/7/cancel", {"command_id": made}, who="alice")
            assert honest.status == 404, f"made {behind_s} s ago"
        late = await harness.ask("POST", "/v1/jobs/7/cancel", {"command_id": most}, who="bob")
        assert (late.status, late.code) == (400, "command_too_old")


@story
async def test_programs_number_their_commands_and_what_is_kept_stays_small(config: Config) -> None:
    """By HTTP, in bulk and over the channel, with the project's own client."""
    async with Harness(config) as harness, channel_of(harness) as server:
        endpoints, files = [harness.config.replica("r1").api], harness.config.tls_files("alice")
        async with Client(endpoints, files) as client:
            for _ in range(5):
                request = SubmitRequest(**harness.job() | {"command_id": await client.next_command_id()})
                await client.call(operations.SUBMIT_JOB, request)
            many = [HoldCommand(command_id=await client.next_command_id(), job_id=999) for _ in range(300)]
            assert {result.status for result in (await client.commands(many)).results} == {404}
            state = harness.controller.state
            assert len(state.answers) == 300 and state.kept[ALICE] == 301, "one opened the session"
            request = SubmitRequest(**harness.job() | {"command_id": await client.next_command_id()})
            await client.call(operations.SUBMIT_JOB, request)
            assert len(harness.controller.state.answers) == 1
        address = Address("127.0.0.1", server.port)
        async with ChannelClient([address], files, harness.config.cluster.id) as channel:
            first = replace(submission(harness), command_id=await channel.next_command_id())
            job = (await channel.perform(first)).job
            for _ in range(20):
                await channel.perform(ReleaseCommand(command_id=await channel.next_command_id(), job_id=job))
                await channel.perform(HoldCommand(command_id=await channel.next_command_id(), job_id=job))
        sessions = harness.controller.state.sessions.values()
        assert sorted(session.answers for session in sessions) == [1, 1]
        assert len(harness.controller.state.jobs) == 7


@story
async def test_a_program_whose_session_has_ended_is_told_and_goes_on_in_another(config: Config) -> None:
    async with Harness(config) as harness:
        endpoints, files = [harness.config.replica("r1").api], harness.config.tls_files("alice")
        async with Client(endpoints, files) as client:
            await client.call(
                operations.HOLD_JOB, Command(command_id=await client.next_command_id()), id=await a_job(harness)
            )
            (session,) = harness.controller.state.sessions
            close = {"command_id": harness.new_id()}
            assert (await harness.ask("POST", f"/v1/sessions/{session}/close", close)).status == 200
            with pytest.raises(ApiError) as refused:
                await client.call(operations.HOLD_JOB, Command(command_id=await client.next_command_id()), id=1)
            assert (refused.value.code, refused.value.outcome) == ("unknown_session", "rejected")
            await client.call(operations.HOLD_JOB, Command(command_id=await client.next_command_id()), id=1)
            assert [session] != list(harness.controller.state.sessions)


async def a_job(harness: Harness) -> int:
    return int((await harness.submit(script=PLAIN)).body["job_id"])


@story
async def test_nobody_is_ahead_of_what_a_majoritys_clocks_may_say_where_the_leader_is_behind(config: Config) -> None:
    """A leader that caught up late, one replica down and another's clock far behind, called right clocks wrong."""
    async with Harness(config, clock=ManualClock(START)) as harness:
        harness.engine.bounds = ClockBounds(START, Instant(START + seconds(40)))
        for ahead_s, status in ((30, 404), (45, 404), (60, 400)):
            assert await status_of_one_from(harness, ahead_s) == status, ahead_s


@story
async def test_no_clock_of_one_replica_lets_an_id_of_later_than_a_minute_in(config: Config) -> None:
    """One replica down, another's clock an hour ahead: its dropped answer locked everybody out for most of an hour."""
    async with Harness(config, clock=ManualClock(START)) as harness:
        harness.engine.bounds = ClockBounds(START, Instant(START + seconds(3600)))
        for ahead_s, status in ((60, 404), (69, 404), (71, 400), (1800, 400)):
            assert await status_of_one_from(harness, ahead_s) == status, ahead_s


async def status_of_one_from(harness: Harness, ahead_s: int) -> int:
    body = {"command_id": id_at(Instant(START + seconds(ahead_s)))}
    return (await harness.ask("POST", "/v1/jobs/77/cancel", body, who="alice")).status
