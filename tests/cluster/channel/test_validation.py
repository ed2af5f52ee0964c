"""A site's provider and the channel: a submit is validated there as it is over HTTP, and holds up nobody."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import forebay.cluster.api.worker.channel as channel_module
import forebay.cluster.providers.calls as calls_module
from forebay.cluster.api.worker.channel import ChannelServer
from forebay.cluster.client.channel import ChannelConnection, ChannelError
from forebay.cluster.client.errors import ApiError
from forebay.cluster.config.config import Config
from forebay.cluster.providers.limits import CALLS_MAX
from forebay.cluster.schemas import requests as r
from tests.cluster.channel.test_channel import channel_of, connect, submission
from tests.cluster.harness import PATIENCE_S, PLAIN, Harness, story, until
from tests.cluster.provided import configure, provided, script
from tests.cluster.providers.conftest import Programs


@contextlib.asynccontextmanager
async def provided_channel(
    config: Config, directory: Path, *, validate_s: int = 60
) -> AsyncIterator[tuple[Harness, Programs, ChannelServer, ChannelConnection]]:
    config, programs = provided(config, directory)
    async with Harness(config) as harness, channel_of(harness) as server:
        await configure(harness, programs, validate_s=validate_s)
        connection = await connect(harness, server)
        try:
            yield harness, programs, server, connection
        finally:
            connection.close()


def validations(programs: Programs) -> int:
    return sum(call.startswith("process ") for call in programs.calls())


@story
async def test_a_submit_is_validated_by_the_script_and_refused_with_its_words(config: Config, tmp_path: Path) -> None:
    async with provided_channel(config, tmp_path / "programs") as (harness, programs, _, connection):
        good = submission(harness, script=script())
        assert (await connection.ask(good)).job == 1
        with pytest.raises(ChannelError) as told:
            await connection.ask(submission(harness, script=script("process:fail:not_for_you")))
        assert (told.value.status, told.value.code) == (400, "provider_refused")
        assert (told.value.sentence, told.value.outcome) == ("burst_buffer/lua: not for you", "rejected")
        assert validations(programs) == 2
        # A retry and a job without a buffer are no questions for the provider.
        assert (await connection.ask(good)).job == 1
        assert (await connection.ask(submission(harness, script=PLAIN))).job == 2
        assert validations(programs) == 2


@story
async def test_a_program_that_hangs_holds_up_its_own_submit_only(config: Config, tmp_path: Path) -> None:
    opened = provided_channel(config, tmp_path / "programs", validate_s=2)
    async with opened as (harness, programs, _, connection):
        assert (await connection.ask(submission(harness, script=PLAIN))).job == 1
        slow = connection.ask(submission(harness, script=script("process:spin")))
        await until(lambda: validations(programs) == 1)
        assert (await connection.ask(submission(harness, script=PLAIN))).job == 2
        assert (await connection.ask(r.CancelCommand(command_id=harness.new_id(), job_id=1))).revision
        assert not slow.done()
        with pytest.raises(ChannelError) as told:
            await slow
        assert told.value.sentence == "burst_buffer/lua: Timeout @ 2000 msec"


@story
async def test_more_submits_than_may_wait_for_the_provider_take_turns(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "CALLS_WAITING_MAX", CALLS_MAX)
    monkeypatch.setattr(channel_module, "COMMIT_WAIT_S", PATIENCE_S)  # however long so many processes take
    async with provided_channel(config, tmp_path / "programs") as (harness, programs, _, connection):
        many = [connection.ask(submission(harness, script=script())) for _ in range(3 * CALLS_MAX)]
        assert {answer.job for answer in await asyncio.gather(*many)} == set(range(1, 3 * CALLS_MAX + 1))
        assert validations(programs) == 3 * CALLS_MAX


@story
async def test_a_replica_that_does_not_lead_asks_no_provider(config: Config, tmp_path: Path) -> None:
    async with provided_channel(config, tmp_path / "programs") as (harness, programs, _, connection):
        harness.engine.depose(None)
        with pytest.raises(ChannelError) as told:
            await connection.ask(submission(harness, script=script()))
        assert (told.value.status, told.value.code, told.value.outcome) == (503, "no_leader", "rejected")
        assert validations(programs) == 0


@story
async def test_a_program_that_goes_away_while_its_submit_is_validated_does_not_take_it_back(
    config: Config, tmp_path: Path
) -> None:
    async with provided_channel(config, tmp_path / "programs") as (harness, programs, server, connection):
        answer = connection.ask(submission(harness, script=script("process:sleep:0.3")))
        await until(lambda: validations(programs) == 1)
        connection.close()
        await until(lambda: not server.connections)
        with pytest.raises(ApiError) as told:
            await answer
        assert told.value.outcome == "unknown"
        await until(lambda: len(harness.controller.state.jobs) == 1)
