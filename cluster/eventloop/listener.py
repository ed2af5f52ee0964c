"""Accepting TLS connections a few at a time, so that a crowd of handshakes does not hold up what else the loop does.

The cryptography of one handshake takes a millisecond or two of the loop's thread. asyncio's own listener accepts all
that wait in one turn, and when 256 clients come at once the next turn does 256 handshakes: no heartbeat leaves
meanwhile, and leadership moves. Here a turn of the loop begins at most ACCEPTS_PER_TURN, and a pause follows, which
becomes longer as long as the loop comes late to its end: a storm of clients slows down itself and nobody else.

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
from collections.abc import Callable
from contextlib import suppress
from typing import Final

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

ACCEPTS_PER_TURN = 2
"""Handshakes that begin in one turn of the loop, count: a few milliseconds."""

ACCEPT_PAUSE_S = 0.004
"""Between such turns, seconds: other work gets at least half of the time, and 500 clients come in within a second."""

ACCEPT_PAUSE_S_MAX = 0.256
"""The longest such pause, seconds: eight clients a second come in even where the loop has hardly any time."""

LATE_S_MAX = 0.01
"""How late the loop may come to the end of a pause, seconds; where it comes later, the next pause is twice as long."""

HANDSHAKES_MAX = 64
"""Connections that have not finished their handshake, count; for a further one the oldest is closed. Clients may send
their last flights all at once: this many take a few hundredths of a second."""

HANDSHAKE_S_MAX = 10.0
"""How long a handshake may take, seconds."""

BACKLOG = 1024
"""Connections that the kernel may hold before they are accepted, count: two seconds' worth."""

RETRY_S = 0.1
"""The pause after a failure to accept, seconds: out of descriptors, mostly."""


def next_pause_s(pause_s: float, late_s: float) -> float:
    """Return the pause that follows one to whose end the loop came so much too late."""
    return min(2 * pause_s, ACCEPT_PAUSE_S_MAX) if late_s > LATE_S_MAX else max(pause_s / 2, ACCEPT_PAUSE_S)


ProtocolFactory = Callable[[], asyncio.BaseProtocol]


class Acceptor:
    """Listens at one address and hands each connection that has shown its certificate to a protocol."""

    def __init__(self, factory: ProtocolFactory, address: Address, tls: Callable[[], ssl.SSLContext]) -> None:
        """`factory` makes the protocol of a connection; `tls` returns the context of the next handshake, which must
        ask for client certificates."""
        self._factory = factory
        self._address = address
        self._tls = tls
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: dict[asyncio.Task[None], socket.socket] = {}
        """Handshakes under way, oldest first."""

    @property
    def port(self) -> int:
        """The port that it listens on."""
        if self._socket is None:
            raise RuntimeError("the server does not listen")
        return int(self._socket.getsockname()[1])

    async def start(self) -> None:
        """Listen; OSError if the address cannot be used."""
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(
            self._address.host, self._address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = infos[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setblocking(False)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
        except OSError as error:
            listening.close()
            raise OSError(error.errno, f"{self._address}: {os.strerror(error.errno or 0)}") from error
        self._socket = listening
        self._accepting = loop.create_task(self._accept(listening))

    async def stop(self) -> None:
        """Stop listening and end the handshakes under way; connections that are made go on."""
        tasks = [*self._handshakes]
        if self._accepting is not None:
            tasks.append(self._accepting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        begun, pause_s = 0, ACCEPT_PAUSE_S
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:
                LOGGER.error("a connection to %s could not be accepted: %s", self._address, error)
                await asyncio.sleep(RETRY_S)
                continue
            if len(self._handshakes) >= HANDSHAKES_MAX:
                # Shut down, not closed: the descriptor belongs to its transport, which ends when it reads the end.
                with suppress(OSError):
                    self._handshakes.pop(next(iter(self._handshakes))).shutdown(socket.SHUT_RDWR)
            task = loop.create_task(self._handshake(connection))
            self._handshakes[task] = connection
            task.add_done_callback(self._done)
            begun += 1
            if begun % ACCEPTS_PER_TURN == 0:
                due_s = loop.time() + pause_s
                await asyncio.sleep(pause_s)
                pause_s = next_pause_s(pause_s, loop.time() - due_s)

    async def _handshake(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                self._factory, connection, ssl=self._tls(), ssl_handshake_timeout=HANDSHAKE_S_MAX
            )
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError; asyncio has closed the socket
            connection.close()
            LOGGER.debug("a handshake at %s failed: %s", self._address, error)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOGGER.error("a handshake at %s failed", self._address, exc_info=error)
