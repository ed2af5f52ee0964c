"""Links between replicas: TLS 1.3 with certificates on both sides, MessagePack frames, and two connections a pair (H5).

A replica dials every peer and sends on that connection; it reads the connections that its peers dialled. A broken
connection thus loses all messages in flight in one direction and keeps the order of the others. A peer without a known
address is not dialled, and gets replies on its own connection.

Any replica of the cluster may connect: the engine decides by the configuration in force whether the replica is a
member. A peer with a wrong certificate retries every second until an operator intervenes. The first log message
therefore names the failed check, the peer as far as known, and the remedy; later messages are rate-limited and counted.
"""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol, cast

from forebay.cluster.consensus.frames import (
    AnyMessage,
    AppendReply,
    FrameReader,
    FrameRefused,
    OtherIncarnation,
    RemovalNotice,
    encode_frame,
)
from forebay.cluster.consensus.interface import Timing
from forebay.cluster.security import Credentials, IdentityError, Peers, Role
from forebay.cluster.system import Address, LogRateLimiter
from forebay.cluster.system.eventloop import ReadingProtocol, read_buffer
from forebay.wal import Incarnation, name_of

_log = logging.getLogger(__name__)

HANDSHAKE_S: Final = 3.0
"""Maximum time for TCP and TLS together, seconds; a LAN needs milliseconds, a loaded machine a second."""

HANDSHAKES_MAX: Final = 16
"""Maximum number of connections without a verified certificate; one more closes the oldest."""

QUEUED_BYTES_MAX: Final = 16 << 20
"""Maximum size of data queued for one peer: several windows of entries and chunks; a peer with more does not read."""

INBOUND_MAX: Final = 64
"""Maximum number of connected replicas, with one connection each: members, and replicas that were removed or are
joining. The authority's certificates limit the names.
"""

BACKLOG: Final = 64

AT_ONCE_S: Final = 1.0
"""Age below which the end of a connection counts as a rejection by the peer, seconds."""

LINK_STEADY_S: Final = 5.0
"""Age above which a connection counts as stable, seconds: reconnecting then starts without back-off."""

# ---- failures of connections ----

_OWN_AUTHORITY: Final = "replicas need certificates of the cluster's own authority (`forebay cert issue`)"

_MESSAGES: Final = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": f"it presented no certificate; {_OWN_AUTHORITY}",
    "UNSUPPORTED_PROTOCOL": "it does not use TLS 1.3; only replicas of Forebay may use the peer address",
    "HTTP_REQUEST": "it uses HTTP without TLS; users and tools must use the API address",
    "WRONG_VERSION_NUMBER": "it does not use TLS; only replicas of Forebay may use the peer address",
    "TLSV1_ALERT_UNKNOWN_CA": f"it does not trust this replica's certificate; {_OWN_AUTHORITY}",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": f"it requires a certificate of this replica; {_OWN_AUTHORITY}",
}
"""Message for each handshake failure, by OpenSSL's name."""


def why(error: BaseException) -> str:
    """Return a message with the failed check and its remedy; never empty."""
    match error:
        case IdentityError() | FrameRefused():
            return str(error)
        case ssl.SSLCertVerificationError():
            message = getattr(error, "verify_message", None) or _reason(error)
            if "mismatch" in message:
                return (
                    f"its certificate is for other hosts ({message}); if its address changed, run `forebay cert issue "
                    "NAME --role replica --host HOST --replace`"
                )
            return f"its certificate is not valid ({message}); {_OWN_AUTHORITY}"
        case ssl.SSLError():
            reason = _reason(error)
            return _MESSAGES.get(reason) or f"the TLS handshake failed ({reason}); {_OWN_AUTHORITY}"
        case TimeoutError():
            return "it did not finish the TLS handshake in time; it is overloaded, or not a replica"
        case ConnectionRefusedError():
            return "nothing listens there: the replica is down, or has another address in the configuration"
        case ConnectionError():
            return (
                "it closed the connection at once: it rejects this replica's certificate or name, or it stopped; see "
                "its log"
            )
        case OSError() if error.strerror:
            return error.strerror
    return str(error) or type(error).__name__


def _reason(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason; errors raised by Python itself have none."""
    return getattr(error, "reason", None) or str(error) or type(error).__name__


def check_of(error: BaseException) -> str:
    """Return a short key of the failed check, for rate limits. Identity errors include the holder."""
    if isinstance(error, ssl.SSLError):
        return _reason(error)
    return str(error) if isinstance(error, IdentityError) else type(error).__name__


class ConnectionFailures:
    """Logs and counts failed connections, with at most one message per peer and check in PERIOD_S."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._limiter = LogRateLimiter(now_s)
        self.count = 0
        """Connections rejected by either side since the start."""

    def note(self, peer: str, message: str, error: BaseException, *, level: int = logging.WARNING) -> None:
        """Log `message` and the reason, unless the same was logged for that peer recently."""
        self.count += 1
        more = self._limiter.due(peer, check_of(error))
        if more is not None:
            _log.log(level, "%s: %s%s", message, why(error), more)


# ---- links ----


class Listener(Protocol):
    """Receiver of frames and link events."""

    def on_frame(self, peer: str, message: AnyMessage) -> None: ...
    def on_up(self, peer: str) -> None: ...
    def on_down(self, peer: str) -> None: ...
    def on_lost_sight(self, peer: str) -> None: ...
    def on_later_incarnation(self, peer: str, incarnation: Incarnation) -> None: ...


def set_timeouts(connection: socket.socket, timing: Timing) -> None:
    """Make the kernel close a connection whose peer acknowledges nothing, so that lost packets break the link."""
    unacknowledged_ms = round(4 * timing.election_max_s * 1000)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unacknowledged_ms)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class _Connection(ReadingProtocol):
    """Connection that carries frames, with a peer identified by its certificate."""

    def __init__(self, links: "TlsLinks") -> None:
        super().__init__(links.buffer)
        self._links = links
        self._reader = FrameReader(links.cluster_id)
        self.peer: str | None = None
        """Name in the peer's certificate."""
        self.member: str | None = None
        """Member ID in the peer's last frame."""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport = cast(asyncio.Transport, transport)
        self.peer = self._links.identify_peer(transport)

    def data_received(self, data: bytes) -> None:
        if self.peer is None or self.transport is None or self.transport.is_closing():
            return
        try:
            for frame in self._reader.feed(data):
                if name_of(frame.sender) != self.peer:
                    raise FrameRefused(f"a frame of {frame.sender!r} on the connection of {self.peer!r}")
                self.member = frame.sender
                self._links.listener.on_frame(frame.sender, frame.message)
        except OtherIncarnation as error:
            self._links.met_other_incarnation(self, error)
        except FrameRefused as error:
            message = f"the connection of replica {self.peer} is closed"
            self._links.failures.note(self.peer, message, error, level=logging.ERROR)
            self.transport.abort()


class _Inbound(_Connection):
    """Connection opened by a peer. Frames are read from it; only peers that are not dialled get replies on it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        try:
            super().connection_made(transport)
        except IdentityError as error:
            assert self.transport is not None
            self._links.connection_failed(transport.get_extra_info("peername"), error)
            self.transport.abort()
            return
        self._links.entered(self)

    def write(self, data: bytes) -> None:
        """Write a reply to a peer that cannot be dialled."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        transport.write(data)
        if transport.get_write_buffer_size() > QUEUED_BYTES_MAX:
            _log.warning("replica %s does not read its connection, which is closed", self.peer)
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._links.peers.forget(self.transport)
        self._links.left(self)


class _Outbound(_Connection):
    """Connection opened by this replica. Frames are written to it; a peer that cannot dial back replies on it."""

    def __init__(self, links: "TlsLinks", peer: str) -> None:
        super().__init__(links)
        self._wanted = name_of(peer)
        self.rejection: IdentityError | None = None
        """Reason why the peer is not the intended one."""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        try:
            super().connection_made(transport)
            if self.peer != self._wanted:
                raise IdentityError(f"replica {self.peer!r} answers at the address of {self._wanted!r}")
        except IdentityError as error:
            self.rejection, self.peer = error, None

    def connection_lost(self, exc: Exception | None) -> None:
        self._links.peers.forget(self.transport)
        if not self.lost.done():
            self.lost.set_result(None)


class _Dialler:
    """Maintains one connection to one peer, at the first address that works, with a queue of frames."""

    def __init__(self, links: "TlsLinks", peer: str, addresses: tuple[str, ...]) -> None:
        self.peer: Final = peer
        self.addresses = addresses
        self.address = addresses[0]
        """Current or next address. A host name is resolved again for each connection."""
        self._links: Final = links
        self._queue: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._nudge = asyncio.Event()

    def send(self, data: bytes) -> None:
        if self._transport is not None:
            self._queue.append(data)

    def flush(self) -> None:
        if not self._queue:
            return
        queue, self._queue = self._queue, []
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(queue[0] if len(queue) == 1 else b"".join(queue))
        if transport.get_write_buffer_size() > QUEUED_BYTES_MAX:
            _log.warning("replica %s does not read its connection, which is closed", self.peer)
            transport.abort()

    @property
    def is_up(self) -> bool:
        """Return whether the peer is connected at `address`."""
        return self._transport is not None

    def nudge(self) -> None:
        """Shorten the wait before the next attempt, because the peer is alive."""
        self._nudge.set()

    async def run(self) -> None:
        """Connect, and reconnect after each loss, until cancelled."""
        timing, delay_s = self._links.timing, self._links.timing.reconnect_min_s
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                await self._connection()
            except (OSError, TimeoutError, IdentityError) as error:
                is_refused = isinstance(error, ssl.SSLError | IdentityError)
                level = logging.WARNING if is_refused else logging.INFO
                message = f"no connection to replica {self.peer} at {self.address}"
                self._links.failures.note(self.peer, message, error, level=level)
                # After a failure, try the next address. A connection that worked is retried at the same one.
                following = self.addresses.index(self.address) + 1 if self.address in self.addresses else 0
                self.address = self.addresses[following % len(self.addresses)]
            if loop.time() - began_s > LINK_STEADY_S:
                delay_s = timing.reconnect_min_s
            self._nudge.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._links.uniform(delay_s / 2, delay_s)):
                    await self._nudge.wait()
                    # A live peer may still reject this replica, so a nudge shortens the wait but does not remove it.
                    await asyncio.sleep(timing.reconnect_min_s / 2)
                    delay_s = timing.reconnect_min_s
            delay_s = min(2 * delay_s, timing.reconnect_max_s)

    async def _connection(self) -> None:
        loop, address = asyncio.get_running_loop(), Address.parse(self.address)
        async with asyncio.timeout(HANDSHAKE_S):
            transport, protocol = await loop.create_connection(
                lambda: _Outbound(self._links, self.peer),
                address.host,
                address.port,
                ssl=self._links.credentials.client_context(),
                server_hostname=address.host,
            )
        try:
            if protocol.rejection is not None:
                raise protocol.rejection
            set_timeouts(transport.get_extra_info("socket"), self._links.timing)
            self._transport = transport
            self._links.listener.on_up(self.peer)
            up_s = loop.time()
            await protocol.lost
            if loop.time() - up_s < AT_ONCE_S:
                # With TLS 1.3, the peer checks this replica's certificate after the handshake has ended on this side.
                raise ConnectionAbortedError
        finally:
            was_up, self._transport = self._transport is not None, None
            self._queue.clear()
            transport.abort()
            if was_up:
                self._links.listener.on_down(self.peer)


class TlsLinks:
    """Links of one replica. `start` listens and dials; the engine calls `send` and `flush`."""

    def __init__(
        self,
        *,
        me: str,
        members: Mapping[str, str],
        cluster_id: str,
        tls: Credentials,
        peers: Peers,
        timing: Timing,
        uniform: Callable[[float, float], float],
        listener: Listener,
    ) -> None:
        self.cluster_id: Final = cluster_id
        self.buffer: Final = read_buffer()
        self.timing: Final = timing
        self.uniform: Final = uniform
        self.listener: Final = listener
        self.credentials: Final = tls
        self.peers: Final = peers
        self._me: Final = me
        self._address: Final = Address.parse(members[name_of(me)])
        self._diallers: dict[str, _Dialler] = {}
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._inbound: dict[str, _Inbound] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._handshakes: dict[asyncio.Task[None], socket.socket] = {}
        """Connections without a certificate yet, oldest first."""
        self._acknowledges = False
        """True if the next flush sends an acknowledgement."""
        self._socket: socket.socket | None = None
        self._started = False
        self.failures: Final = ConnectionFailures(lambda: asyncio.get_running_loop().time())
        self.set_peers({name: (address,) for name, address in members.items() if name != me})

    def set_peers(self, addresses: Mapping[str, tuple[str, ...]]) -> None:
        """Dial exactly these peers, by ID, at the first of their addresses that works.

        Existing links are not disturbed.
        """
        for peer, dialler in list(self._diallers.items()):
            places = addresses.get(peer, ())
            if dialler.address in places and (dialler.is_up or dialler.addresses == places):
                dialler.addresses = places
            else:
                del self._diallers[peer]
                task = self._dialling.pop(peer, None)
                if task is not None:
                    task.cancel()
        for peer in sorted(set(addresses) - set(self._diallers)):
            self._diallers[peer] = _Dialler(self, peer, addresses[peer])
            if self._started:
                self._dialling[peer] = self._spawn(self._diallers[peer].run())
        self._diallers = dict(sorted(self._diallers.items()))

    async def start(self) -> None:
        """Listen at this replica's address and dial the peers.

        Raises:
            OSError: The address cannot be used.
        """
        own = self._address
        infos = await asyncio.get_running_loop().getaddrinfo(
            own.host, own.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = infos[0]
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(BACKLOG)
        except OSError as error:
            self._socket.close()
            place = f"replica {self._me} cannot listen at {own}, its peer address in the configuration"
            raise OSError(error.errno, f"{place}: {os.strerror(error.errno or 0)}") from error
        self._spawn(self._accept(self._socket))
        self._started = True
        for peer, dialler in self._diallers.items():
            self._dialling[peer] = self._spawn(dialler.run())

    async def stop(self) -> None:
        """Close every connection and wait for the tasks to end."""
        self._started = False
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for inbound in list(self._inbound.values()):
            if inbound.transport is not None:
                inbound.transport.abort()
        if self._socket is not None:
            self._socket.close()

    def abort(self) -> None:
        """Stop at once, without waiting: nothing more is sent or received."""
        self._started = False
        for task in self._tasks:
            task.cancel()
        for inbound in self._inbound.values():
            if inbound.transport is not None:
                inbound.transport.abort()

    def send(self, peer: str, message: AnyMessage) -> None:
        """Queue a message for the peer with this ID. Without a connection the message is lost."""
        self._acknowledges = self._acknowledges or type(message) is AppendReply
        frame = encode_frame(self.cluster_id, self._me, message)
        dialler = self._diallers.get(peer)
        if dialler is not None:
            dialler.send(frame)
            return
        inbound = self._inbound.get(name_of(peer))
        if inbound is not None and inbound.member == peer:
            inbound.write(frame)

    def address_of(self, name: str) -> str | None:
        """Return the address at which replica `name` is connected now, or None."""
        reached = (one.address for one in self._diallers.values() if one.is_up and name_of(one.peer) == name)
        return next(reached, None)

    def flush(self) -> None:
        """Pass queued messages to the connections."""
        for dialler in self._diallers.values():
            dialler.flush()
        if self._acknowledges:
            # The leader was woken and replies to clients now; this replica only applies already acknowledged entries.
            # On a shared core the leader should run first (docs/explain/performance.md); otherwise this call returns at
            # once.
            self._acknowledges = False
            os.sched_yield()

    def identify_peer(self, transport: asyncio.BaseTransport) -> str:
        """Return the peer's name.

        Raises:
            IdentityError: The peer is not another replica of this cluster.
        """
        identity = self.peers.admit(transport)
        if identity.role is not Role.REPLICA:
            raise IdentityError(f"{identity} is not a replica")
        if identity.name == name_of(self._me):
            raise IdentityError(f"{identity} is this replica itself; each replica needs its own certificate")
        return identity.name

    def met_other_incarnation(self, connection: _Connection, error: OtherIncarnation) -> None:
        """Handle a frame of another incarnation: report a later one, and notify a peer whose incarnation has ended."""
        assert connection.peer is not None and connection.transport is not None
        if error.theirs.number > error.mine.number:
            self.listener.on_later_incarnation(connection.peer, error.theirs)
        elif error.theirs.number < error.mine.number and isinstance(connection, _Inbound):
            # Any frame of the later incarnation will do; its content does not matter.
            connection.write(encode_frame(self.cluster_id, self._me, RemovalNotice(0, 0, 0)))
        message = f"the connection of replica {connection.peer} is closed"
        if error.theirs.number == error.mine.number:
            message += "; the cluster was recovered twice, and one of the two clusters has to be stopped"
        self.failures.note(connection.peer, message, error, level=logging.ERROR)
        connection.transport.close()  # after sending written data

    def connection_failed(self, address: Any, error: BaseException) -> None:
        """Record a failed incoming connection from a socket address."""
        host = str(address[0]) if isinstance(address, tuple) and address else "an unknown address"
        self.failures.note(host, f"a connection from {host} to the peer address is rejected", error)

    def entered(self, inbound: _Inbound) -> None:
        """Register a peer's connection, and close an older one: each peer has at most one."""
        assert inbound.peer is not None and inbound.transport is not None
        if len(self._inbound) >= INBOUND_MAX and inbound.peer not in self._inbound:
            too_many = IdentityError(
                f"{INBOUND_MAX} connections of replicas are already open, more than a cluster needs"
            )
            self.connection_failed(inbound.transport.get_extra_info("peername"), too_many)
            inbound.transport.abort()
            return
        older = self._inbound.get(inbound.peer)
        self._inbound[inbound.peer] = inbound
        if older is not None and older.transport is not None:
            older.transport.abort()
        for dialler in self._diallers.values():
            if name_of(dialler.peer) == inbound.peer:
                dialler.nudge()

    def left(self, inbound: _Inbound) -> None:
        """Handle the end of a peer's connection."""
        if inbound.peer is not None and self._inbound.get(inbound.peer) is inbound:
            del self._inbound[inbound.peer]
            self.listener.on_lost_sight(inbound.member or inbound.peer)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            except OSError as error:
                # No descriptors are left, or the peer gave up. The listener must neither stop nor spin.
                _log.error("a connection could not be accepted: %s", error)
                await asyncio.sleep(self.timing.reconnect_min_s)
                continue
            if len(self._handshakes) >= HANDSHAKES_MAX:
                # Close the oldest: replicas finish in milliseconds, so a flood of connections cannot keep them out.
                # Shut down instead of closing, because the descriptor belongs to the transport, which ends at end of
                # file.
                with suppress(OSError):
                    self._handshakes.pop(next(iter(self._handshakes))).shutdown(socket.SHUT_RDWR)
                _log.warning("%d connections have presented no certificate; the oldest is closed", HANDSHAKES_MAX)
            self._handshakes[self._spawn(self._handshake(connection, address))] = connection
            await asyncio.sleep(0)  # sock_accept does not yield if a connection is waiting

    async def _handshake(self, connection: socket.socket, address: object) -> None:
        try:
            set_timeouts(connection, self.timing)
        except OSError:
            connection.close()
            return
        try:
            context = self.credentials.server_context()
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Inbound(self), connection, ssl=context, ssl_handshake_timeout=HANDSHAKE_S
            )
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError; asyncio has closed the socket
            self.connection_failed(address, error)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._handshakes.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a connection's task failed", exc_info=error)
