"""The channel's places are shared: nobody alone keeps the others out, and what is given back can be had again."""

import asyncio

import pytest

import forebay.cluster.api.worker.channel as server_module
from forebay.cluster.client.channel import ChannelConnection
from forebay.cluster.client.errors import ApiError
from forebay.cluster.config.config import Config
from forebay.cluster.security.identity import Identity, Role
from forebay.cluster.security.tls import client_context
from tests.cluster.channel.test_channel import channel_of, connect, submission
from tests.cluster.harness import Harness, story, until

BOB = Identity(Role.USER, "bob")


@story
async def test_one_holder_of_a_certificate_cannot_take_all_the_places(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "CONNECTIONS_PER_IDENTITY_MAX", 2)
    async with Harness(config) as harness, channel_of(harness) as server:
        held: list[ChannelConnection] = [await connect(harness, server, "bob") for _ in range(2)]
        with pytest.raises(ApiError, match="closed it at once"):
            await connect(harness, server, "bob")
        assert "user bob has 2 connections open" in caplog.text
        operator = await connect(harness, server, "operator")
        assert (await operator.ask(submission(harness))).job == 1
        assert server.held[BOB] == 2, "who was turned away holds no place"

        held.pop().close()
        await until(lambda: server.held[BOB] == 1)
        held.append(await connect(harness, server, "bob"))
        for connection in (*held, operator):
            connection.close()
        await until(lambda: not server.connections)
        assert not server.held


@story
async def test_all_together_have_no_more_than_all_places_and_give_them_back(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "CONNECTIONS_MAX", 2)
    async with Harness(config) as harness, channel_of(harness) as server:
        held = [await connect(harness, server, who) for who in ("alice", "bob")]
        with pytest.raises(ApiError, match="closed it at once"):
            await connect(harness, server, "operator")
        assert "2 connections are open" in caplog.text
        held.pop().close()
        await until(lambda: len(server.connections) == 1)
        held.append(await connect(harness, server, "operator"))
        for connection in held:
            connection.close()
        await until(lambda: not server.connections)
        assert not server.held


def test_the_share_leaves_as_much_to_others() -> None:
    assert 2 * server_module.CONNECTIONS_PER_IDENTITY_MAX <= server_module.CONNECTIONS_MAX


@story
async def test_a_frame_that_trickles_in_is_cut(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "FRAME_S_MAX", 0.1)
    monkeypatch.setattr(server_module, "SWEEP_PERIOD_S", 0.02)
    async with Harness(config) as harness, channel_of(harness) as server:
        tls = client_context(config.tls_files("alice"))
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=tls, server_hostname="127.0.0.1")
        writer.write((1000).to_bytes(4, "big"))
        end = asyncio.ensure_future(reader.read())
        while not end.done():
            writer.write(b"x")
            await asyncio.sleep(0.01)
        writer.close()
        await until(lambda: not server.connections)
