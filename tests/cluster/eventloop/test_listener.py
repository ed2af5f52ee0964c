"""A crowd of handshakes leaves the loop its turns."""

import asyncio
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cluster.eventloop.listener as module
from cluster.config.config import Config
from cluster.eventloop.listener import (
    ACCEPT_PAUSE_S,
    ACCEPT_PAUSE_S_MAX,
    ACCEPTS_PER_TURN,
    LATE_S_MAX,
    Acceptor,
    next_pause_s,
)
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


@given(st.floats(ACCEPT_PAUSE_S, ACCEPT_PAUSE_S_MAX), st.lists(st.floats(0, 1), max_size=30))
def test_a_loop_that_comes_late_takes_fewer_clients_and_one_in_time_takes_them_again(
    pause_s: float, late_s: list[float]
) -> None:
    for late in late_s:
        before, pause_s = pause_s, next_pause_s(pause_s, late)
        assert ACCEPT_PAUSE_S <= pause_s <= ACCEPT_PAUSE_S_MAX
        assert pause_s >= before if late > LATE_S_MAX else pause_s <= before
    for _ in range(10):
        pause_s = next_pause_s(pause_s, 0.0)
    assert pause_s == ACCEPT_PAUSE_S
    for _ in range(10):
        pause_s = next_pause_s(pause_s, 1.0)
    assert pause_s == ACCEPT_PAUSE_S_MAX
