"""Accepting TLS connections a few at a time, so that a crowd of handshakes does not hold up what else the loop does.

The cryptography of one handshake takes a millisecond or two of the loop's thread. asyncio's own listener accepts all
that wait in one turn, and when 256 clients come at once the next turn does 256 handshakes: no heartbeat leaves
meanwhile, and leadership moves. Here a turn of the loop begins at most BEGUN_PER_TURN, more only where it takes long
anyway, and a pause follows, which becomes longer as long as the loop comes late to its end: a storm of clients slows
down itself and nobody else.

A client of TLS 1.3 believes itself connected as soon as it has sent its last flight, and sends a request behind it. So
nobody whose handshake goes on is cut for a later one: with HANDSHAKES_MAX under way the others wait, unanswered. Who
says nothing at all takes no such place, and whoever holds one and does not go on loses it after GIVE_WAY_S; at once
where it is wanted by another address that has fewer.

Connections are read into a buffer that is there already. For a protocol that takes bytes as they come, uvloop and
asyncio make room for 256 KiB before each read of a TLS connection. Measured with messages of 200 bytes on eight
connections: 31 to 37 us of a processor for a message and its answer, and 11 to 12 us where the protocol names a buffer
of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from cluster.system import Address

READ_BYTES_MAX: Final = 64 * 1024
"""Bytes that a connection reads at once: four records of TLS, or some hundred commands."""


def read_buffer() -> memoryview:
    """Return a buffer for the connections of one event loop: each read is over before the next one begins."""
    return memoryview(bytearray(READ_BYTES_MAX))


class ReadingProtocol(asyncio.BufferedProtocol):
    """A protocol that reads into the buffer it was given, and hands on what came as `data_received`."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer: Final = buffer

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the loop reads into."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Hand on what was read."""
        self.data_received(self._buffer[:nbytes].tobytes())

    def data_received(self, data: bytes) -> None:
        """Take what the other end sent."""
        raise NotImplementedError


LOGGER = logging.getLogger(__name__)

ACCEPTS_PER_TURN = 64
"""Connections that are accepted in one turn of the loop, count: some 50 us each."""

BEGUN_PER_TURN = 2
"""Handshakes that begin in one turn of the loop, count: a few milliseconds; ..."""

BEGUN_PER_S = 200
"""... but so many for each second that a turn takes, ..."""

BEGUN_PER_TURN_MAX = 32
"""... and this many at the most, count. A turn in which 256 programs are answered takes 0.2 s: with two in each, those
of them that had not come in yet were shut out for as long as the others had something to ask."""

ACCEPT_PAUSE_S = 0.004
"""Between such turns, seconds: other work gets at least half of the time, and 500 clients come in within a second."""

ACCEPT_PAUSE_S_MAX = 0.016
"""The longest such pause, seconds: a hundred clients a second come in even where the loop has hardly any time, and take
a quarter of it."""

LATE_S_MAX = 0.01
"""How late the loop may come to the end of a pause, seconds; where it comes later, the next pause is twice as long."""

HANDSHAKES_MAX = 64
"""Handshakes under way, count; further ones wait. Clients may send their last flights all at once: this many take a few
hundredths of a second."""

GIVE_WAY_S = 3.0
"""How long a handshake that others of its own address wait for may take, seconds: a process that opens hundreds of
connections at once needs one."""

WAITING_MAX = 1024
"""Connections accepted whose handshake has not begun, count. For a further one the oldest that has said nothing is
closed; where all have, no more are accepted, and wait in the backlog."""

HANDSHAKE_S_MAX = 10.0
"""How long a connection may say nothing, and how long a handshake that has begun may take, seconds."""

BACKLOG = 1024
"""Connections that the kernel may hold before they are accepted, count: two seconds' worth."""

RETRY_S = 0.1
"""The pause after a failure to accept, seconds: out of descriptors, mostly."""


def next_pause_s(pause_s: float, late_s: float) -> float:
    """Return the pause that follows one to whose end the loop came so much too late."""
    return min(2 * pause_s, ACCEPT_PAUSE_S_MAX) if late_s > LATE_S_MAX else max(pause_s / 2, ACCEPT_PAUSE_S)


def begun_after(turn_s: float) -> int:
    """Return how many handshakes may begin after a pause and a turn of the loop that took so long together."""
    return max(BEGUN_PER_TURN, min(BEGUN_PER_TURN_MAX, int(turn_s * BEGUN_PER_S)))


ProtocolFactory = Callable[[], asyncio.BaseProtocol]


class _UnderWay(NamedTuple):
    """A handshake that has begun."""

    connection: socket.socket
    host: str
    since_s: float


async def listen(address: Address) -> socket.socket:
    """Return a socket that listens; OSError if the address cannot be used."""
    infos = await asyncio.get_running_loop().getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, _, _, _, place = infos[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise OSError(error.errno, f"{address}: {os.strerror(error.errno or 0)}") from error
    return listening


class Acceptor:
    """Listens at one address and hands each connection that has shown its certificate to a protocol."""

    def __init__(self, factory: ProtocolFactory, address: Address, tls: Callable[[], ssl.SSLContext]) -> None:
        """`factory` makes the protocol of a connection; `tls` returns the context of the next handshake, which must
        ask for client certificates."""
        self._factory = factory
        self._address = address
        self._tls = tls
        self._socket: socket.socket | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        """One for each connection until its handshake is over."""
        self._silent: dict[asyncio.Task[None], None] = {}
        """Those that have said nothing, oldest first."""
        self._line: dict[str, deque[tuple[asyncio.Task[None], socket.socket, asyncio.Future[None]]]] = {}
        """Those that have, by their address: who is to begin next comes first."""
        self._handshakes: dict[asyncio.Task[None], _UnderWay] = {}
        """Those that have begun, oldest first."""
        self._change = asyncio.Event()
        """Set when somebody comes into the line, or a handshake is over."""

    @property
    def port(self) -> int:
        """The port that it listens on."""
        if self._socket is None:
            raise RuntimeError("the server does not listen")
        return int(self._socket.getsockname()[1])

    async def start(self, listening: socket.socket | None = None) -> None:
        """Listen, at `listening` where that is given; OSError if the address cannot be used."""
        loop = asyncio.get_running_loop()
        self._socket = listening = listening or await listen(self._address)
        listening.setblocking(False)
        self._pumps = [loop.create_task(self._accept(listening)), loop.create_task(self._begin())]

    async def stop(self) -> None:
        """Stop listening and end the handshakes under way; connections that are made go on."""
        tasks = [*self._tasks, *self._pumps]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()

    async def _accept(self, listening: socket.socket) -> None:
        # Not by sock_accept(): uvloop's takes one connection in a turn of the loop, however many wait.
        loop = asyncio.get_running_loop()
        while True:
            await _readable(listening)
            for _ in range(ACCEPTS_PER_TURN):
                try:
                    connection, address = listening.accept()
                except BlockingIOError:  # all are accepted, here or by another process that listens
                    break
                except OSError as error:
                    LOGGER.error("a connection to %s could not be accepted: %s", self._address, error)
                    await asyncio.sleep(RETRY_S)
                    break
                connection.setblocking(False)
                task = loop.create_task(self._connect(connection, str(address[0])))
                self._tasks.add(task)
                self._silent[task] = None
                task.add_done_callback(self._done)
                while self._waiting() > WAITING_MAX:
                    if self._silent:
                        next(iter(self._silent)).cancel()
                    await asyncio.sleep(ACCEPT_PAUSE_S)

    def _waiting(self) -> int:
        return len(self._silent) + sum(len(line) for line in self._line.values())

    async def _begin(self) -> None:
        """Let those in the line begin, a few at a time."""
        loop = asyncio.get_running_loop()
        begun, may_begin, pause_s = 0, BEGUN_PER_TURN, ACCEPT_PAUSE_S
        while True:
            self._change.clear()
            host = self._next_host()
            if host is None:
                await self._change.wait()
                continue
            if len(self._handshakes) >= HANDSHAKES_MAX and (wait_s := self._give_way(host)) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._change.wait()
                continue
            line = self._line.pop(host)
            task, connection, turn = line.popleft()
            if line:
                self._line[host] = line  # behind those who have as many
            if turn.done():
                continue  # it went away
            self._handshakes[task] = _UnderWay(connection, host, loop.time())
            turn.set_result(None)
            begun += 1
            if begun >= may_begin:
                since_s = loop.time()
                await asyncio.sleep(pause_s)
                turn_s = loop.time() - since_s
                begun, may_begin, pause_s = 0, begun_after(turn_s), next_pause_s(pause_s, turn_s - pause_s)

    def _next_host(self) -> str | None:
        """Return of whose address the next one begins: who has the fewest under way."""
        held = Counter(one.host for one in self._handshakes.values())
        return min(self._line, key=held.__getitem__, default=None)

    def _give_way(self, host: str) -> float:
        """Close a handshake that gives way to one from `host`; return how many seconds to wait where none does yet."""
        held = Counter(one.host for one in self._handshakes.values())
        most = max(held, key=held.__getitem__)
        greedy = most if held[most] > held[host] + 1 else None
        task, oldest = next(one for one in self._handshakes.items() if greedy in (None, one[1].host))
        wait_s = 0.0 if greedy else GIVE_WAY_S - (asyncio.get_running_loop().time() - oldest.since_s)
        if wait_s <= 0:
            del self._handshakes[task]
            # Shut down, not closed: the descriptor belongs to its transport, which ends when it reads the end.
            with suppress(OSError):
                oldest.connection.shutdown(socket.SHUT_RDWR)
        return max(0.0, wait_s)

    async def _connect(self, connection: socket.socket, host: str) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(HANDSHAKE_S_MAX):
                await _readable(connection)
            del self._silent[task]
            turn: asyncio.Future[None] = loop.create_future()
            self._line.setdefault(host, deque()).append((task, connection, turn))
            self._change.set()
            # Without a bound of time: whoever no longer wants it has closed it, and its handshake ends as it begins.
            await turn
        except (OSError, TimeoutError, asyncio.CancelledError) as error:
            connection.close()
            LOGGER.debug("a connection to %s ended before its handshake: %s", self._address, error)
            return
        try:
            await loop.connect_accepted_socket(
                self._factory, connection, ssl=self._tls(), ssl_handshake_timeout=HANDSHAKE_S_MAX
            )
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError; asyncio has closed the socket
            connection.close()
            LOGGER.debug("a handshake at %s failed: %s", self._address, error)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._silent.pop(task, None)
        self._handshakes.pop(task, None)
        self._change.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            LOGGER.error("a handshake at %s failed", self._address, exc_info=error)


async def _readable(connection: socket.socket) -> None:
    """Wait until the other end has sent something, or gone."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[None] = loop.create_future()

    def heard() -> None:
        if not came.done():
            came.set_result(None)

    loop.add_reader(connection, heard)
    try:
        await came
    finally:
        loop.remove_reader(connection)
