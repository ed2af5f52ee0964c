"""A crowd of handshakes leaves the loop its turns."""

import asyncio
import socket
from typing import Any

import pytest

import cluster.eventloop.listener as module
from cluster.config.config import Config
from cluster.eventloop.listener import ACCEPTS_PER_TURN, Acceptor
from cluster.security.tls import client_context, server_context
from cluster.system.address import Address
from tests.cluster.harness import story, until

CROWD = 40


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port))


async def listening(config: Config, factory: Any = asyncio.Protocol) -> Acceptor:
    acceptor = Acceptor(factory, Address("127.0.0.1", 0), lambda: server_context(config.tls_files("r1")))
    await acceptor.start()
    return acceptor


@story
async def test_no_turn_of_the_loop_begins_more_than_a_few_handshakes(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    acceptor = await listening(config)
    begun, most_in_a_turn, in_this_turn = 0, 0, 0

    async def begin(*arguments: Any, **options: Any) -> None:
        nonlocal begun, in_this_turn
        begun, in_this_turn = begun + 1, in_this_turn + 1

    def turn() -> None:
        nonlocal most_in_a_turn, in_this_turn
        most_in_a_turn, in_this_turn = max(most_in_a_turn, in_this_turn), 0
        loop.call_soon(turn)

    monkeypatch.setattr(loop, "connect_accepted_socket", begin)
    crowd = [connected(acceptor.port) for _ in range(CROWD)]  # all of them wait before the first is accepted
    turn()
    await until(lambda: begun == CROWD)
    assert 0 < most_in_a_turn <= ACCEPTS_PER_TURN
    await acceptor.stop()
    for one in crowd:
        one.close()


@story
async def test_who_holds_a_handshake_open_gives_way_to_those_who_come_later(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANDSHAKES_MAX", 3)
    acceptor = await listening(config)
    silent = [connected(acceptor.port) for _ in range(5)]
    await until(lambda: len(acceptor._handshakes) == 3)
    silent[0].settimeout(10)
    assert await asyncio.to_thread(silent[0].recv, 1) == b""
    tls = client_context(config.tls_files("alice"))
    _, writer = await asyncio.open_connection("127.0.0.1", acceptor.port, ssl=tls)
    writer.close()
    for one in silent:
        one.close()
    await acceptor.stop()
    assert len(acceptor._handshakes) == 0


@story
async def test_an_address_that_is_taken_is_named(config: Config) -> None:
    first = await listening(config)
    second = Acceptor(
        asyncio.Protocol, Address("127.0.0.1", first.port), lambda: server_context(config.tls_files("r1"))
    )
    with pytest.raises(OSError, match=str(first.port)):
        await second.start()
    await first.stop()
