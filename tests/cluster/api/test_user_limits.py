"""One user may ask for so much and no more: by the minute, and at a time. Nobody else waits for him."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.api.web.limits import RECOUNT_S, Bucket
from forebay.cluster.client.channel import ChannelError
from forebay.cluster.config.config import Config
from forebay.cluster.config.limits import DEFAULT_LIMITS, LimitsConfig
from forebay.cluster.config.toml import InvalidValue
from tests.clocks import ManualClock
from tests.cluster.channel.test_channel import channel_of, connect
from tests.cluster.channel.test_channel import submission as on_the_channel
from tests.cluster.harness import Harness, story, until
from tests.cluster.server.test_proposer import START


def limited(config: Config, **limits: int) -> Config:
    return msgspec.structs.replace(config, limits=LimitsConfig(**limits))  # type: ignore[arg-type]


@given(
    st.integers(1, 1_000),
    st.lists(st.tuples(st.integers(0, 3_000), st.floats(0, 200)), max_size=60),
)
def test_a_bucket_gives_a_minutes_worth_at_once_and_then_no_more_than_so_much_a_minute(
    per_minute: int, asked: list[tuple[int, float]]
) -> None:
    now_s, taken = 0.0, 0
    bucket = Bucket(per_minute, now_s)
    for amount, passes_s in asked:
        now_s += passes_s
        wait_s = bucket.wait_s(amount, now_s)
        assert 0 <= wait_s <= 60
        if wait_s:
            assert bucket.wait_s(amount, now_s + wait_s + 0.001) == 0
            now_s += wait_s + 0.001
        if amount <= per_minute:  # more than it ever holds is taken from a full one, once
            bucket.take(amount)
            taken += amount
        assert taken <= per_minute + per_minute * now_s / 60 + 0.001


@story
async def test_a_user_who_sends_too_many_commands_waits_and_nobody_else_does(config: Config) -> None:
    clock = ManualClock(START)
    async with Harness(limited(config, commands_per_minute=3), clock=clock) as harness:
        answers = [await harness.submit(hold=True) for _ in range(4)]
        assert [answer.status for answer in answers] == [201, 201, 201, 429]
        refused = answers[-1]
        assert (refused.code, refused.headers["Retry-After"]) == ("too_many_requests", "20")
        assert refused.sentence.startswith("user alice has sent 3 commands within a minute")
        assert refused.body["error"]["outcome"] == "rejected"
        for who in ("bob", "operator"):
            assert (await harness.submit(who=who)).status == 201
        body = {"commands": [{"type": "hold_job", "job_id": 1, "command_id": harness.new_id()} for _ in range(2)]}
        bulk = await harness.ask("POST", "/v1/commands", body, who="alice")
        assert [result["status"] for result in bulk.body["results"]] == [429, 429]
        async with channel_of(harness) as server:
            connection = await connect(harness, server)
            with pytest.raises(ChannelError) as told:
                await connection.ask(on_the_channel(harness))
            assert (told.value.status, told.value.code) == (429, "too_many_requests")
            connection.close()
        clock.advance(20)
        assert (await harness.submit(hold=True)).status == 201
        assert (await harness.submit(hold=True)).status == 429


@story
async def test_a_retry_of_what_was_carried_out_is_not_counted(config: Config) -> None:
    async with Harness(limited(config, commands_per_minute=1), clock=ManualClock(START)) as harness:
        body = harness.job(hold=True)
        for _ in range(3):
            answer = await harness.ask("POST", "/v1/jobs", body, who="alice")
            assert (answer.status, answer.body["job_id"]) == (201, 1)


@story
async def test_a_user_who_sends_too_many_bytes_waits(config: Config) -> None:
    mib = 1024 * 1024
    async with Harness(limited(config, bytes_per_minute=8 * mib), clock=ManualClock(START)) as harness:
        script = "#!/bin/sh\n" + "#" * 250_000
        statuses = [(await harness.submit(hold=True, script=script)).status for _ in range(40)]
        accepted = statuses.count(201)
        assert statuses == [201] * accepted + [429] * (40 - accepted)
        assert accepted == 8 * mib // (250_000 + 600) or accepted == 33


@pytest.mark.parametrize("what", ["jobs", "scripts"])
@story
async def test_a_user_has_so_many_jobs_and_may_submit_again_when_some_are_over(config: Config, what: str) -> None:
    clock = ManualClock(START)
    bound: dict[str, Any] = {"jobs": 5} if what == "jobs" else {"script_bytes": 256 * 1024}
    script = "#!/bin/sh\n" + "#" * (20 if what == "jobs" else 50_000)
    async with Harness(limited(config, **bound), clock=clock) as harness:

        async def submitted(**more: Any) -> int:
            clock.advance(RECOUNT_S + 1)
            answer = await harness.submit(script=script, hold=True, **more)
            await until(lambda: not harness.service.limits._counting)
            return answer.status

        assert [await submitted() for _ in range(6)] == [201] * 5 + [429]
        assert (await harness.submit(who="bob", script=script, hold=True)).status == 201
        await harness.ask("POST", "/v1/jobs/1/cancel", {"command_id": harness.new_id()}, who="alice")
        # The first one only learns that there may be room again.
        assert [await submitted(), await submitted(), await submitted()] == [429, 201, 429]
        # A leader that has just begun counts what there is; until it has, it believes what it was told.
        await harness.restart()
        assert [await submitted(), await submitted()][-1] == 429
        if what == "jobs":
            assert await submitted(array="1-6") == 429


@pytest.mark.parametrize("wrong", [{"bytes_per_minute": 1024}, {"script_bytes": 1024}])
def test_bounds_that_one_request_exceeds_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match="bytes"):
        LimitsConfig(**wrong)


def test_the_bounds_are_on_where_nothing_is_said(config: Config) -> None:
    assert config.limits == DEFAULT_LIMITS == LimitsConfig()
