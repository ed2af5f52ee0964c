"""A crowd of handshakes leaves the loop its turns."""

import asyncio
import socket
import ssl
import time
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forebay.cluster.system.eventloop.listener as module
from forebay.cluster.config.config import Config
from forebay.cluster.security.tls import client_context, server_context
from forebay.cluster.system.address import Address
from forebay.cluster.system.eventloop.listener import (
    ACCEPT_PAUSE_S,
    ACCEPT_PAUSE_S_MAX,
    BEGUN_PER_TURN,
    BEGUN_PER_TURN_MAX,
    LATE_S_MAX,
    Acceptor,
    begun_after,
    next_pause_s,
)
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
    monkeypatch.setattr(module, "BEGUN_PER_S", 0)  # on a busy machine a turn is long, and more begin in it
    crowd = [connected(acceptor.port) for _ in range(CROWD)]  # all of them wait before the first is accepted
    for one in crowd:
        one.send(b"\x16")
    turn()
    await until(lambda: begun == CROWD)
    assert 0 < most_in_a_turn <= BEGUN_PER_TURN
    await acceptor.stop()
    for one in crowd:
        one.close()


@story
async def test_a_loop_whose_turns_are_long_lets_a_crowd_in_while_it_is_busy(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    acceptor = await listening(config)
    begun, turns = 0, 0

    async def begin(*arguments: Any, **options: Any) -> None:
        nonlocal begun
        begun += 1

    def turn() -> None:
        nonlocal turns
        time.sleep(0.1)
        if begun < CROWD:
            turns += 1
            loop.call_soon(turn)

    monkeypatch.setattr(loop, "connect_accepted_socket", begin)
    crowd = [connected(acceptor.port) for _ in range(CROWD)]
    for one in crowd:
        one.send(b"\x16")
    turn()
    await until(lambda: begun == CROWD)
    # Nine are needed until all are accepted and heard and the first have begun; one accepted, or a few begun in each
    # turn would be more than forty.
    assert turns <= 20
    await acceptor.stop()
    for one in crowd:
        one.close()


@given(st.floats(0, 100))
def test_a_turn_lets_in_no_fewer_than_a_few_and_no_more_than_a_bound(turn_s: float) -> None:
    assert BEGUN_PER_TURN <= begun_after(turn_s) <= BEGUN_PER_TURN_MAX
    assert begun_after(turn_s) <= begun_after(turn_s + 1)


class Client:
    """One end of a TLS connection that goes on only when it is told to."""

    def __init__(self, port: int, tls: ssl.SSLContext, host: str = "127.0.0.1") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), source_address=(host, 0))
        self.socket.setblocking(False)
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls.wrap_bio(self._came, self._goes, server_hostname="127.0.0.1")

    async def _send(self) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, self._goes.read())

    async def _receive(self) -> None:
        data = await asyncio.get_running_loop().sock_recv(self.socket, 65536)
        if not data:
            raise ConnectionError("disconnected")
        self._came.write(data)

    async def hello(self) -> None:
        """Send the first flight."""
        with pytest.raises(ssl.SSLWantReadError):
            self._tls.do_handshake()
        await self._send()

    async def asks(self) -> bytes:
        """End the handshake, and send a request right behind; return the answer, b"" where there is none."""
        try:
            while True:
                try:
                    self._tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    await self._receive()
            self._tls.write(b"ask")
            await self._send()
            while True:
                try:
                    return self._tls.read(100)
                except ssl.SSLWantReadError:
                    await self._receive()
        except (ConnectionError, ssl.SSLError):
            return b""


class Echo(asyncio.Protocol):
    """Answers with what it was sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        cast(asyncio.WriteTransport, self.transport).write(data)  # uvloop's is none by inheritance


@story
async def test_nobody_of_a_crowd_who_goes_on_is_disconnected_in_place_of_an_answer(config: Config) -> None:
    acceptor = await listening(config, Echo)
    tls = client_context(config.tls_files("alice"))
    crowd = [Client(acceptor.port, tls) for _ in range(2 * module.HANDSHAKES_MAX + 10)]
    for one in crowd:
        await one.hello()
    await until(lambda: len(acceptor._handshakes) == module.HANDSHAKES_MAX)
    assert [await one.asks() for one in crowd] == [b"ask"] * len(crowd)
    assert not acceptor._handshakes
    for one in crowd:
        one.socket.close()
    await acceptor.stop()


@story
async def test_who_says_nothing_takes_no_place_and_gives_way_to_those_who_come_later(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANDSHAKES_MAX", 3)
    monkeypatch.setattr(module, "WAITING_MAX", 3)
    acceptor = await listening(config)
    silent = [connected(acceptor.port) for _ in range(5)]
    silent[0].settimeout(10)
    assert await asyncio.to_thread(silent[0].recv, 1) == b""
    assert not acceptor._handshakes
    tls = client_context(config.tls_files("alice"))
    _, writer = await asyncio.open_connection("127.0.0.1", acceptor.port, ssl=tls)
    writer.close()
    for one in silent:
        one.close()
    await acceptor.stop()
    assert len(acceptor._handshakes) == 0


@story
async def test_who_holds_a_handshake_open_loses_it_at_once_to_another_address_and_in_time_to_his_own(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANDSHAKES_MAX", 3)
    acceptor = await listening(config, Echo)
    tls = client_context(config.tls_files("alice"))
    held = [Client(acceptor.port, tls) for _ in range(5)]
    for one in held:
        await one.hello()
    await until(lambda: len(acceptor._handshakes) == 3)
    # Nobody's time is up: were another address not let in at once, this would hang.
    monkeypatch.setattr(module, "GIVE_WAY_S", 1_000.0)
    other = Client(acceptor.port, tls, "127.0.0.2")
    await other.hello()
    assert await other.asks() == b"ask"
    assert await held[0].asks() == b""
    # The place of who was let in goes to the next of them.
    await until(lambda: [one.host for one in acceptor._handshakes.values()] == ["127.0.0.1"] * 3)
    monkeypatch.setattr(module, "GIVE_WAY_S", 0.0)
    mine = Client(acceptor.port, tls)
    await mine.hello()
    assert await mine.asks() == b"ask"
    for one in (*held, other, mine):
        one.socket.close()
    await acceptor.stop()


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
