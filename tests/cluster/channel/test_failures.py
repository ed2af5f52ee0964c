"""Whatever becomes of a command, its program is told, in a frame that it can read, and nobody else notices."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.cluster.api.local_backend import CommandWaiter, LocalProgram
from forebay.cluster.api.service import ApiService
from forebay.cluster.api.web.problems import Problem
from forebay.cluster.api.worker.channel import WORDS_CHARACTERS_MAX, failure_frame
from forebay.cluster.client.channel import ChannelError
from forebay.cluster.config.config import Config
from forebay.cluster.providers.limits import CALLS_MAX
from forebay.cluster.schemas.channel_frames import ANSWER_BYTES_MAX, FRAME_BYTES_MAX, encode_frame
from tests.cluster.channel.test_channel import channel_of, connect, submission
from tests.cluster.channel.test_validation import provided_channel
from tests.cluster.harness import Harness, story, until
from tests.cluster.provided import script


class Surprise(Exception):
    """What nobody foresees."""


def surprise(*_: object, **__: object) -> Any:
    raise Surprise("something")


async def surprise_later(*_: object, **__: object) -> None:
    raise Surprise("something")


@story
async def test_what_is_unforeseen_is_answered_as_unknown_and_the_connection_goes_on(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Harness(config) as harness, channel_of(harness) as server:
        connection = await connect(harness, server)
        with monkeypatch.context() as patched:
            patched.setattr(ApiService, "admit", surprise)
            with pytest.raises(ChannelError) as told:
                await connection.ask(submission(harness))
        assert (told.value.status, told.value.code, told.value.outcome) == (500, "internal_error", "unknown")
        assert "Surprise" in caplog.text
        assert (await connection.ask(submission(harness))).job == 1
        connection.close()


@story
async def test_what_is_unforeseen_while_a_submit_is_validated_is_answered_as_unknown(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with provided_channel(config, tmp_path / "programs") as (harness, _, __, connection):
        for name, wrong in (("prepare", surprise_later), ("admit", surprise)):
            with monkeypatch.context() as patched:
                patched.setattr(ApiService, name, wrong)
                with pytest.raises(ChannelError) as told:
                    await connection.ask(submission(harness, script=script()))
            assert (told.value.status, told.value.code, told.value.outcome) == (500, "internal_error", "unknown")
        assert "Surprise" in caplog.text
        assert (await connection.ask(submission(harness, script=script()))).job == 1


@story
async def test_an_error_of_the_proposer_that_nobody_foresaw_is_answered_as_unknown(config: Config) -> None:
    async with Harness(config, automatic=False) as harness, channel_of(harness) as server:
        connection = await connect(harness, server)
        answer = connection.ask(submission(harness))
        await until(lambda: harness.engine.uncommitted > 0)
        (other_end,) = server.connections
        (asker,) = other_end._waiting.values()
        assert isinstance(other_end._program, LocalProgram)
        CommandWaiter(other_end._program, asker).set_exception(Surprise("something"))
        with pytest.raises(ChannelError) as told:
            await answer
        assert (told.value.status, told.value.outcome) == (500, "unknown")
        harness.engine.commit()
        connection.close()


@pytest.mark.parametrize("characters", [WORDS_CHARACTERS_MAX + 1, ANSWER_BYTES_MAX, FRAME_BYTES_MAX * 3 // 4])
def test_a_rejection_that_repeats_what_a_program_made_up_is_bounded_and_stays_a_rejection(
    config: Config, characters: int
) -> None:
    @story
    async def run() -> None:
        async with Harness(config) as harness, channel_of(harness) as server:
            connection = await connect(harness, server)
            other = connection.ask(submission(harness))
            body = msgspec.to_builtins(submission(harness))
            with pytest.raises(ChannelError) as told:
                await connection.ask({**body, "x" * characters: 1})  # type: ignore[arg-type]
            assert (told.value.status, told.value.outcome) == (400, "rejected")
            assert told.value.sentence.endswith("…")
            assert len(told.value.place) == WORDS_CHARACTERS_MAX
            assert (await other).job == 1
            connection.close()

    run()


def test_the_longest_words_fit_into_an_answer() -> None:
    long = "\N{GRINNING FACE}" * FRAME_BYTES_MAX
    frame = encode_frame(failure_frame(1, Problem(400, "x" * 64, long, long, long), "x" * 300))
    assert len(frame) < ANSWER_BYTES_MAX


@story
async def test_words_that_are_no_text_are_answered_as_unknown(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise Problem(400, "invalid_field", "half a pair: \ud800")

    async with Harness(config) as harness, channel_of(harness) as server:
        connection = await connect(harness, server)
        with monkeypatch.context() as patched:
            patched.setattr(ApiService, "admit", refuse)
            with pytest.raises(ChannelError) as told:
                await connection.ask(submission(harness))
        assert (told.value.status, told.value.outcome) == (500, "unknown")
        assert (await connection.ask(submission(harness))).job == 1
        connection.close()


@story
async def test_a_replica_that_does_not_lead_judges_no_command(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Harness(config) as harness, channel_of(harness) as server:
        connection = await connect(harness, server)
        harness.engine.depose(None)
        too_old = msgspec.structs.replace(submission(harness), command_id="000000000000700080" + "0" * 14)
        wrong = submission(harness, bb="capacity=lots")
        unheard_of = {**msgspec.to_builtins(submission(harness)), "of_a_later_release": 1}
        for command in (too_old, wrong, unheard_of):
            with pytest.raises(ChannelError) as told:
                await connection.ask(command)
            assert (told.value.status, told.value.code, told.value.outcome) == (503, "no_leader", "rejected")
        harness.engine.lead()
        for command in (too_old, wrong, unheard_of):
            with pytest.raises(ChannelError) as told:
                await connection.ask(command)
            assert told.value.status == 400
        connection.close()


@story
async def test_a_replica_that_stops_leading_while_the_provider_is_asked_judges_the_submit_no_more(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with provided_channel(config, tmp_path / "programs") as (harness, _, __, connection):

        async def deposed(*_: object) -> None:
            harness.engine.depose(None)

        monkeypatch.setattr(ApiService, "prepare", deposed)
        monkeypatch.setattr(ApiService, "admit", surprise)
        with pytest.raises(ChannelError) as told:
            await connection.ask(submission(harness, script=script()))
        assert (told.value.status, told.value.code, told.value.outcome) == (503, "no_leader", "rejected")


@story
async def test_a_submit_that_waits_for_its_turn_is_not_judged_once_this_replica_stops_leading(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with provided_channel(config, tmp_path / "programs") as (harness, _, __, connection):
        judged = 0
        go_on = asyncio.Event()

        async def judge(*_: object) -> None:
            nonlocal judged
            judged += 1
            await go_on.wait()

        monkeypatch.setattr(ApiService, "prepare", judge)
        answers = [connection.ask(submission(harness, script=script())) for _ in range(CALLS_MAX + 1)]
        await until(lambda: judged == CALLS_MAX)
        harness.engine.depose(None)
        go_on.set()
        told = await asyncio.gather(*answers, return_exceptions=True)
        assert [(error.status, error.code) for error in told if isinstance(error, ChannelError)] == [
            (503, "no_leader")
        ] * (CALLS_MAX + 1)
        assert judged == CALLS_MAX
