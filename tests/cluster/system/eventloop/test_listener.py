"""Many simultaneous handshakes do not block the event loop."""

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
async def test_one_turn_of_the_loop_begins_only_a_few_handshakes(
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
    monkeypatch.setattr(module, "BEGUN_PER_S", 0)  # on a busy machine, long turns begin more handshakes
    crowd = [connected(acceptor.port) for _ in range(CROWD)]  # all connections wait before the first is accepted
    for one in crowd:
        one.send(b"\x16")
    turn()
    await until(lambda: begun == CROWD)
    assert 0 < most_in_a_turn <= BEGUN_PER_TURN
    await acceptor.stop()
    for one in crowd:
        one.close()


@story
async def test_loop_with_long_turns_accepts_many_connections_while_busy(
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
    # About nine turns accept all connections and begin the first handshakes. One connection, or a few handshakes, per
    # turn would need more than forty.
    assert turns <= 20
    await acceptor.stop()
    for one in crowd:
        one.close()


@given(st.floats(0, 100))
def test_number_of_handshakes_per_turn_has_a_lower_and_an_upper_bound(turn_s: float) -> None:
    assert BEGUN_PER_TURN <= begun_after(turn_s) <= BEGUN_PER_TURN_MAX
    assert begun_after(turn_s) <= begun_after(turn_s + 1)


class Client:
    """End of a TLS connection that proceeds only on command."""

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
        """Send the first message of the handshake."""
        with pytest.raises(ssl.SSLWantReadError):
            self._tls.do_handshake()
        await self._send()

    async def asks(self) -> bytes:
        """Complete the handshake and send a request immediately; return the answer, or b"" without one."""
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
    """Echoes all data."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        cast(asyncio.WriteTransport, self.transport).write(data)  # uvloop has its own transport class


@story
async def test_active_clients_of_a_crowd_all_get_an_answer(config: Config) -> None:
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
async def test_silent_connections_give_way_to_later_ones(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
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
async def test_open_handshake_gives_its_place_to_other_addresses_first(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANDSHAKES_MAX", 3)
    acceptor = await listening(config, Echo)
    tls = client_context(config.tls_files("alice"))
    held = [Client(acceptor.port, tls) for _ in range(5)]
    for one in held:
        await one.hello()
    await until(lambda: len(acceptor._handshakes) == 3)
    # No handshake has timed out: the test would hang if another address had to wait.
    monkeypatch.setattr(module, "GIVE_WAY_S", 1_000.0)
    other = Client(acceptor.port, tls, "127.0.0.2")
    await other.hello()
    assert await other.asks() == b"ask"
    assert await held[0].asks() == b""
    # The next waiting connection gets the free place.
    await until(lambda: [one.host for one in acceptor._handshakes.values()] == ["127.0.0.1"] * 3)
    monkeypatch.setattr(module, "GIVE_WAY_S", 0.0)
    mine = Client(acceptor.port, tls)
    await mine.hello()
    assert await mine.asks() == b"ask"
    for one in (*held, other, mine):
        one.socket.close()
    await acceptor.stop()


@story
async def test_address_in_use_is_named(config: Config) -> None:
    first = await listening(config)
    second = Acceptor(
        asyncio.Protocol, Address("127.0.0.1", first.port), lambda: server_context(config.tls_files("r1"))
    )
    with pytest.raises(OSError, match=str(first.port)):
        await second.start()
    await first.stop()


@given(st.floats(ACCEPT_PAUSE_S, ACCEPT_PAUSE_S_MAX), st.lists(st.floats(0, 1), max_size=30))
def test_late_loop_accepts_fewer_clients_until_it_is_on_time(pause_s: float, late_s: list[float]) -> None:
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
