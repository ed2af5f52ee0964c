"""TLS listener that begins a few handshakes at a time, so that a connection storm does not block the loop.

The cryptography of one handshake takes a millisecond or two of the loop's thread. asyncio's own listener accepts all
waiting connections in one turn. With 256 clients at once, the next turn does 256 handshakes, no heartbeat is sent, and
leadership moves. Here a turn of the loop begins at most BEGUN_PER_TURN handshakes (more only if the turn takes long
anyway), followed by a pause. The pause grows while the loop is late, so a storm slows only itself.

A TLS 1.3 client considers itself connected once it has sent its last flight, and sends a request right after it. A
running handshake is therefore never aborted for a later one: with HANDSHAKES_MAX under way, others wait. A client that
has sent nothing occupies no slot. A client that stalls in a handshake loses its slot after GIVE_WAY_S, and at once if
an address with fewer slots needs it.

Connections are read into a preallocated buffer. Otherwise uvloop and asyncio allocate 256 KiB before each read of a TLS
connection. Processor time for a message of 200 bytes and its answer, on eight connections: 31 to 37 us with that
allocation, 11 to 12 us with the preallocated buffer.
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

from forebay.cluster.system import Address

READ_BYTES_MAX: Final = 64 * 1024
"""Maximum size of one read: four TLS records, or some hundred commands."""


def read_buffer() -> memoryview:
    """Return a buffer for all connections of one event loop: each read ends before the next begins."""
    return memoryview(bytearray(READ_BYTES_MAX))


class ReadingProtocol(asyncio.BufferedProtocol):
    """Protocol that reads into a given buffer and passes the content to `data_received`."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer: Final = buffer

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer to read into."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on the content read."""
        self.data_received(self._buffer[:nbytes].tobytes())

    def data_received(self, data: bytes) -> None:
        """Process data from the peer."""
        raise NotImplementedError


LOGGER = logging.getLogger(__name__)

ACCEPTS_PER_TURN = 64
"""Maximum number of connections accepted in one turn of the loop: about 50 us each."""

BEGUN_PER_TURN = 2
"""Number of handshakes begun in one turn of the loop: a few milliseconds."""

BEGUN_PER_S = 200
"""Number of handshakes that may begin for each second that a turn takes."""

BEGUN_PER_TURN_MAX = 32
"""Maximum number of handshakes begun in one turn. A turn that answers 256 programs takes 0.2 s. With two handshakes in
each turn, waiting clients would be excluded as long as the others keep sending requests.
"""

ACCEPT_PAUSE_S = 0.004
"""Pause between turns with handshakes, seconds: other work gets half of the time; 500 clients connect in a second."""

ACCEPT_PAUSE_S_MAX = 0.016
"""Maximum pause, seconds: 100 clients a second can connect to a busy loop, in a quarter of its time."""

LATE_S_MAX = 0.01
"""Lateness of the loop at the end of a pause, seconds, above which the next pause is doubled."""

HANDSHAKES_MAX = 64
"""Maximum number of running handshakes.

Clients may send their last flights all at once: this many take a few hundredths of a second.
"""

GIVE_WAY_S = 3.0
"""Age after which a handshake gives way to others of its own address, seconds. A process that opens hundreds of
connections at once needs this long.
"""

WAITING_MAX = 1024
"""Maximum number of accepted connections whose handshake has not begun.

One more closes the oldest silent connection. If no connection is silent, accepting stops and connections wait in the
backlog.
"""

HANDSHAKE_S_MAX = 10.0
"""Maximum silence of a connection, and maximum duration of a handshake, seconds."""

BACKLOG = 1024
"""Number of connections that the kernel holds before they are accepted: two seconds' worth."""

RETRY_S = 0.1
"""Pause after a failure to accept, seconds: usually no descriptors are left."""


def next_pause_s(pause_s: float, late_s: float) -> float:
    """Return the pause after a pause of `pause_s` whose end the loop reached `late_s` too late."""
    return min(2 * pause_s, ACCEPT_PAUSE_S_MAX) if late_s > LATE_S_MAX else max(pause_s / 2, ACCEPT_PAUSE_S)


def begun_after(turn_s: float) -> int:
    """Return the number of handshakes that may begin after a turn, including its pause, of this duration."""
    return max(BEGUN_PER_TURN, min(BEGUN_PER_TURN_MAX, int(turn_s * BEGUN_PER_S)))


ProtocolFactory = Callable[[], asyncio.BaseProtocol]


class _UnderWay(NamedTuple):
    """Running handshake."""

    connection: socket.socket
    host: str
    since_s: float


async def listen(address: Address) -> socket.socket:
    """Return a listening socket.

    Raises:
        OSError: The address cannot be used.
    """
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
    """Listens at one address and passes each connection with a client certificate to a protocol."""

    def __init__(self, factory: ProtocolFactory, address: Address, tls: Callable[[], ssl.SSLContext]) -> None:
        """Create a listener; `factory` creates the protocol of a connection.

        `tls` returns the context of the next handshake, which must request client certificates.
        """
        self._factory = factory
        self._address = address
        self._tls = tls
        self._socket: socket.socket | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        """Task of each connection until its handshake ends."""
        self._silent: dict[asyncio.Task[None], None] = {}
        """Connections that have sent nothing, oldest first."""
        self._line: dict[str, deque[tuple[asyncio.Task[None], socket.socket, asyncio.Future[None]]]] = {}
        """Connections ready for a handshake by address; the next address comes first."""
        self._handshakes: dict[asyncio.Task[None], _UnderWay] = {}
        """Running handshakes, oldest first."""
        self._change = asyncio.Event()
        """Event: a connection is ready, or a handshake ended."""

    @property
    def port(self) -> int:
        """Port of the listener."""
        if self._socket is None:
            raise RuntimeError("the server is not listening")
        return int(self._socket.getsockname()[1])

    async def start(self, listening: socket.socket | None = None) -> None:
        """Listen, on the socket `listening` if given.

        Raises:
            OSError: The address cannot be used.
        """
        loop = asyncio.get_running_loop()
        self._socket = listening = listening or await listen(self._address)
        listening.setblocking(False)
        self._pumps = [loop.create_task(self._accept(listening)), loop.create_task(self._begin())]

    async def stop(self) -> None:
        """Stop listening and abort running handshakes; established connections continue."""
        tasks = [*self._tasks, *self._pumps]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()

    async def _accept(self, listening: socket.socket) -> None:
        # uvloop's sock_accept() accepts one connection per turn of the loop, regardless of how many wait.
        loop = asyncio.get_running_loop()
        while True:
            await _readable(listening)
            for _ in range(ACCEPTS_PER_TURN):
                try:
                    connection, address = listening.accept()
                except BlockingIOError:  # all were accepted, by this process or another listener
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
        """Begin waiting handshakes, a few at a time."""
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
                self._line[host] = line  # behind addresses with as many handshakes
            if turn.done():
                continue  # it disconnected
            self._handshakes[task] = _UnderWay(connection, host, loop.time())
            turn.set_result(None)
            begun += 1
            if begun >= may_begin:
                since_s = loop.time()
                await asyncio.sleep(pause_s)
                turn_s = loop.time() - since_s
                begun, may_begin, pause_s = 0, begun_after(turn_s), next_pause_s(pause_s, turn_s - pause_s)

    def _next_host(self) -> str | None:
        """Return the address whose handshake begins next: the address with the fewest under way."""
        held = Counter(one.host for one in self._handshakes.values())
        return min(self._line, key=held.__getitem__, default=None)

    def _give_way(self, host: str) -> float:
        """Close a handshake in favour of one from `host`; return the seconds to wait if none may be closed yet."""
        held = Counter(one.host for one in self._handshakes.values())
        most = max(held, key=held.__getitem__)
        greedy = most if held[most] > held[host] + 1 else None
        task, oldest = next(one for one in self._handshakes.items() if greedy in (None, one[1].host))
        wait_s = 0.0 if greedy else GIVE_WAY_S - (asyncio.get_running_loop().time() - oldest.since_s)
        if wait_s <= 0:
            del self._handshakes[task]
            # Shut down instead of close: the descriptor belongs to its transport, which ends at end of file.
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
            # No timeout: a client that gave up has closed the connection, and its handshake ends as it begins.
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
    """Wait until the peer has sent data or disconnected."""
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
