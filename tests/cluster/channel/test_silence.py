"""A replica that hangs keeps its connections: a program must not wait for it while another one leads."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from forebay.cluster.client import channel as channel_module
from forebay.cluster.client.channel import ChannelClient, ChannelConnection
from forebay.cluster.client.errors import OUTCOME_UNKNOWN, ApiError
from forebay.cluster.config.config import Config
from forebay.cluster.schemas.channel_frames import CHANNEL_VERSION, HelloFrame, SuccessFrame, encode_frame
from forebay.cluster.security.tls import client_context, server_context
from forebay.cluster.system.address import Address
from tests.cluster.channel.test_channel import channel_of, connect, submission
from tests.cluster.harness import Harness, story, until

LOOK_S = 0.02


@pytest.fixture(autouse=True)
def looks_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "LOOK_S", LOOK_S)


@contextlib.asynccontextmanager
async def hung_replica(config: Config, *, trickle: bytes = b"") -> AsyncIterator[Address]:
    """A replica that greets, and then answers nothing: at most the same few bytes of an answer again and again."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_frame(HelloFrame(CHANNEL_VERSION, config.cluster.id)))
        with contextlib.suppress(OSError):
            while trickle and not writer.is_closing():
                await asyncio.sleep(LOOK_S / 2)
                writer.write(trickle)
                await writer.drain()
            await reader.read(-1)
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=server_context(config.tls_files("r1")))
    async with server:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1])


@story
async def test_a_program_turns_from_a_replica_that_hangs_to_one_that_leads_and_its_command_is_carried_out_once(
    config: Config,
) -> None:
    async with Harness(config) as harness, channel_of(harness) as server, hung_replica(config) as hung:
        addresses = [hung, Address("127.0.0.1", server.port)]
        async with ChannelClient(addresses, config.tls_files("alice"), config.cluster.id) as channel:
            commands = [submission(harness) for _ in range(3)]
            done = await asyncio.gather(*[channel.perform(command, deadline_s=20.0) for command in commands])
            assert sorted(answer.job for answer in done) == [1, 2, 3]
            assert len(harness.controller.state.jobs) == 3


@story
async def test_a_connection_that_is_given_up_says_so_and_leaves_the_outcome_unknown(config: Config) -> None:
    async with Harness(config) as harness, hung_replica(config) as hung:
        connection = await ChannelConnection.open(hung, client_context(config.tls_files("alice")), config.cluster.id)
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(ApiError) as told:
            await connection.ask(submission(harness))
        assert asyncio.get_running_loop().time() - began_s >= channel_module.SILENT_LOOKS * LOOK_S
        assert (told.value.outcome, told.value.code) == ("unknown", OUTCOME_UNKNOWN)
        assert f"was silent for {channel_module.SILENT_LOOKS * LOOK_S:g} s before the answer arrived" in str(told.value)
        assert not connection.is_open


@story
async def test_a_replica_that_says_anything_at_all_is_waited_for(config: Config) -> None:
    # Answers to commands with numbers that nobody has asked for.
    unasked = encode_frame(SuccessFrame(1 << 20, 1, 1))
    async with Harness(config) as harness, hung_replica(config, trickle=unasked) as slow:
        connection = await ChannelConnection.open(slow, client_context(config.tls_files("alice")), config.cluster.id)
        answer = connection.ask(submission(harness))
        await asyncio.sleep(4 * channel_module.SILENT_LOOKS * LOOK_S)
        assert connection.is_open and not answer.done()
        connection.close()
        with pytest.raises(ApiError, match="broke before the answer arrived"):
            await answer


@story
async def test_nobody_looks_at_a_connection_on_which_nothing_waits(config: Config) -> None:
    async with Harness(config) as harness, channel_of(harness) as server:
        connection = await connect(harness, server)
        await connection.ask(submission(harness))
        await until(lambda: connection._watch is None)
        await asyncio.sleep(4 * channel_module.SILENT_LOOKS * LOOK_S)
        assert connection.is_open
        assert (await connection.ask(submission(harness))).job == 2
        connection.close()
