"""Server of the channel: reads commands, has the controller settle them, and answers each at once.

Permissions are checked where the API checks them (`cluster.api.service.ApiService.admit`), and rejections have the same
codes and sentences. The channel is cheaper: no HTTP, no task per command, and all responses of one loop iteration share
a TLS record.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter, deque
from collections.abc import Callable
from typing import cast

import msgspec

from forebay.cluster.api import request_decoding
from forebay.cluster.api.web import (
    COMMIT_WAIT_S,
    LONG_CHARACTERS,
    Backend,
    Problem,
    Program,
    Redirect,
    body_problem,
    internal_error,
    outcome_unknown,
    permit,
)
from forebay.cluster.schemas import (
    CHANNEL_VERSION,
    FRAME_BYTES_MAX,
    NOT_LEADER,
    OUTSTANDING_MAX,
    PEOPLE,
    BulkCommand,
    ChannelProtocolError,
    CommandFrame,
    FailureFrame,
    FrameSplitter,
    HelloFrame,
    SubmitCommand,
    SuccessFrame,
    check_hello,
    decode_from_client,
    encode_frame,
)
from forebay.cluster.security import Identity, IdentityError
from forebay.cluster.system import Address, LogRateLimiter
from forebay.cluster.system.eventloop import Acceptor, ReadingProtocol, read_buffer

LOGGER = logging.getLogger(__name__)

CONNECTIONS_MAX = 1024
"""Open connections, count: each carries many clients' commands."""

CONNECTIONS_PER_IDENTITY_MAX = 512
"""Open connections of one identity, count: half of all, so that others can always connect."""

IDLE_S_MAX = 300.0
"""Longest silence of a connection without outstanding commands, seconds; the program reconnects when needed."""

FRAME_S_MAX = 10.0
"""Time for a started frame to arrive, seconds: the largest one at 50 kB/s."""

SWEEP_PERIOD_S = 0.5
"""Interval of checks for overdue commands and idle connections, seconds."""

UNREAD_BYTES_MAX = 1024 * 1024
"""Unread responses of a program, bytes: the largest possible outstanding amount. Beyond that it is disconnected."""

_command_decoder = msgspec.msgpack.Decoder(BulkCommand)


class ChannelServer:
    """Listens at a replica's channel address."""

    def __init__(
        self,
        core: Backend,
        *,
        address: Address,
        tls: Callable[[], ssl.SSLContext],
        listening: socket.socket | None = None,
    ) -> None:
        """`tls` returns a context that requests client certificates of the cluster's authority.

        `listening`: a listening socket shared with other processes.
        """
        self.core = core
        self.reader = request_decoding.SubmitDecoder()
        self._listening = listening
        self.connections: set[_Connection] = set()
        self.held: Counter[Identity] = Counter()
        """Open connections by identity."""
        self.buffer = read_buffer()
        self._limiter = LogRateLimiter(asyncio.get_running_loop().time)
        self._acceptor = Acceptor(lambda: _Connection(self), address, tls)
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        """Listening port."""
        return self._acceptor.port

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: The address cannot be used.
        """
        await self._acceptor.start(self._listening)
        self._sweep()

    async def stop(self) -> None:
        """Stop listening and close; clients retry elsewhere."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._acceptor.stop()
        for connection in list(self.connections):
            connection.close()

    def warn(self, sentence: str, kind: str) -> None:
        """Log a message that clients can cause at will, at most one of its kind per minute."""
        self._limiter.log(LOGGER, logging.WARNING, sentence, kind)

    def take_in(self, connection: _Connection, identity: Identity) -> str:
        """Register a connection; return the reason if it is rejected, else an empty string."""
        if len(self.connections) >= CONNECTIONS_MAX:
            return f"{CONNECTIONS_MAX} connections are open, the maximum"
        if self.held[identity] >= CONNECTIONS_PER_IDENTITY_MAX:
            return f"{identity} has {CONNECTIONS_PER_IDENTITY_MAX} connections open, the maximum for one identity"
        self.connections.add(connection)
        self.held[identity] += 1
        return ""

    def give_back(self, connection: _Connection, identity: Identity) -> None:
        """Unregister a connection."""
        self.connections.discard(connection)
        self.held[identity] -= 1
        if not self.held[identity]:
            del self.held[identity]

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweeper = loop.call_later(SWEEP_PERIOD_S, self._sweep)
        now_s = loop.time()
        for connection in list(self.connections):
            connection.sweep(now_s)


class _LocalCommandClient:
    """Receiver of one command's result, notified at once so that responses leave before the next batch is decided."""

    __slots__ = ("_connection", "number", "since_s")

    def __init__(self, connection: _Connection, number: int, since_s: float) -> None:
        self._connection = connection
        self.number = number
        self.since_s = since_s
        """Loop time at which the command was accepted."""

    def is_gone(self) -> bool:
        return not self._connection.has_waiting(self)

    def report_settled(self, revision: int, job: int) -> None:
        self._connection.answer(self, SuccessFrame(self.number, revision, job))

    def report_failure(self, error: Problem | Redirect) -> None:
        self._connection.answer(self, error)


class _Connection(ReadingProtocol):
    """Program's connection. Reads and results are processed in callbacks."""

    def __init__(self, server: ChannelServer) -> None:
        super().__init__(server.buffer)
        self._server = server
        self._core = server.core
        self._program: Program | None = None
        """Receiver of its commands while the connection is open."""
        self._loop = asyncio.get_running_loop()
        self._cutter = FrameSplitter(FRAME_BYTES_MAX)
        self._transport: asyncio.Transport | None = None
        self._identity: Identity | None = None
        """Registered identity while the connection is open."""
        self._elsewhere: Redirect | Problem | None = None
        """Redirect or error for the commands being processed, if this replica does not lead."""
        self._greeted = False
        self._waiting: dict[int, _LocalCommandClient] = {}
        """Outstanding commands by number, oldest first."""
        self._reading: set[asyncio.Task[None]] = set()
        self._out: list[bytes] = []
        self._flush_soon = False
        self._bodies: deque[bytes] = deque()
        """Frames of the last read that exceed the limit of outstanding commands; reading is paused meanwhile."""
        self._paused = False
        self._heard_s = self._loop.time()
        self._frame_since_s: float | None = None
        """Start time of the unfinished frame; None without one."""

    # asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        try:
            identity = self._core.peers.admit(transport)
            permit(identity, PEOPLE, "use the channel")
        except (IdentityError, Problem) as problem:
            self._server.warn(f"a connection of {_host_of(transport)} is rejected: {problem}", "rejected")
            transport.abort()
            return
        if full := self._server.take_in(self, identity):
            self._server.warn(f"a connection of {_host_of(transport)} is rejected: {full}", "rejected")
            transport.abort()
            return
        self._identity = identity
        self._program = self._core.program(self._core.peers.certificate_of(transport))
        self._send(HelloFrame(CHANNEL_VERSION, self._core.cluster_id))

    def data_received(self, data: bytes) -> None:
        if self._identity is None or self._transport is None or self._transport.is_closing():
            return
        self._heard_s = self._loop.time()
        try:
            bodies = list(self._cutter.feed(data))
            if self._cutter.is_between:
                self._frame_since_s = None
            elif bodies or self._frame_since_s is None:
                self._frame_since_s = self._heard_s
            self._bodies.extend(bodies)
            self._work()
        except ChannelProtocolError as error:
            self._server.warn(f"the channel of {self._identity} is closed: {error}", "closed")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        # Its commands stand; resent ones are answered from cached replies.
        self._core.peers.forget(self._transport)
        if self._identity is not None:
            self._server.give_back(self, self._identity)
        if self._program is not None:
            self._program.leave()
        self._waiting.clear()
        self._bodies.clear()
        self._identity = None

    # Commands

    def _work(self) -> None:
        """Process received frames up to the limit; pause reading beyond it."""
        assert self._transport is not None
        self._elsewhere = self._core.elsewhere()  # once for all, because the loop does not run in between
        while self._bodies and len(self._waiting) < OUTSTANDING_MAX:
            self._take(self._bodies.popleft())
        full = bool(self._bodies)
        if full != self._paused:
            self._paused = full
            (self._transport.pause_reading if full else self._transport.resume_reading)()

    def _take(self, body: bytes) -> None:
        assert self._identity is not None
        try:
            message = decode_from_client(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ChannelProtocolError(f"not a frame of version {CHANNEL_VERSION}: {error}") from error
        if isinstance(message, HelloFrame):
            check_hello(message, self._core.cluster_id)
            self._greeted = True
            return
        if not self._greeted:
            raise ChannelProtocolError("a command came before the greeting")
        number = message.number
        if number in self._waiting:
            raise ChannelProtocolError(f"number {number} is in use by a waiting command")
        asker = self._waiting[number] = _LocalCommandClient(self, number, self._heard_s)
        try:
            self._begin(message, self._identity, asker)
            return
        except (Problem, Redirect) as error:
            found: Problem | Redirect = error
        except Exception as error:
            LOGGER.error("a command of %s failed", self._identity, exc_info=error)
            found = internal_error(FAULT_REMEDY, "unknown")
        if self._waiting.pop(number, None) is not None:
            self._send_failure(number, found)

    def _begin(self, ask: CommandFrame, identity: Identity, asker: _LocalCommandClient) -> None:
        if self._elsewhere is not None:
            # Redirect first, because only the leader can check content, age and the provider's validation against
            # current state.
            raise self._elsewhere
        try:
            command = _command_decoder.decode(ask.command)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise body_problem(error) from error
        assert self._program is not None
        content = bytes(ask.command)
        if not isinstance(command, SubmitCommand):
            self._program.take(command, content, None, asker)
        elif request_decoding.text_characters(command) <= LONG_CHARACTERS:
            self._program.take(
                command, content, request_decoding.decode_submit(command, identity, self._core.site), asker
            )
        else:
            task = self._loop.create_task(self._take_long(self._program, command, content, identity, asker))
            self._reading.add(task)
            task.add_done_callback(self._reading.discard)

    async def _take_long(
        self, program: Program, command: BulkCommand, content: bytes, identity: Identity, asker: _LocalCommandClient
    ) -> None:
        """Decode a long command outside the loop before it is accepted."""
        try:
            found = await self._server.reader.read(command, identity, self._core.site)
            if (elsewhere := self._core.elsewhere()) is not None:
                raise elsewhere
            program.take(command, content, found, asker)
        except (Problem, Redirect) as error:
            if not asker.is_gone():
                asker.report_failure(error)
        except Exception as error:
            LOGGER.error("a command of %s failed", identity, exc_info=error)
            if not asker.is_gone():
                asker.report_failure(internal_error(FAULT_REMEDY, "unknown"))

    def has_waiting(self, asker: _LocalCommandClient) -> bool:
        """Return True if the program is connected and has received no reply to this command yet."""
        return self._waiting.get(asker.number) is asker

    def answer(self, asker: _LocalCommandClient, outcome: SuccessFrame | Problem | Redirect) -> None:
        """Send the outcome to the program; called by the controller when the command's entry is applied."""
        number = asker.number
        del self._waiting[number]
        if isinstance(outcome, SuccessFrame):
            self._send(outcome)
        else:
            self._send_failure(number, outcome)
        if self._paused and len(self._waiting) == OUTSTANDING_MAX // 2:
            self._loop.call_soon(self._resume)

    def _send_failure(self, number: int, found: Problem | Redirect) -> None:
        if isinstance(found, Redirect):
            self._redirect(number)
        else:
            self._fail(number, found)

    def _fail(self, number: int, problem: Problem) -> None:
        leader = self._core.leader_channel if problem.status == 503 else ""
        try:
            self._send(failure_frame(number, problem, leader))
        except ValueError as error:  # text that is none, such as half a surrogate pair
            LOGGER.error("a reply to %s cannot be encoded", self._identity, exc_info=error)
            self._send(failure_frame(number, internal_error(FAULT_REMEDY, "unknown"), leader))

    def _redirect(self, number: int) -> None:
        leader = self._core.leader_channel
        sentence = "this replica does not lead; nothing was changed"
        remedy = f"send it to {leader}" if leader else "ask another replica"
        self._send(FailureFrame(number, 307, NOT_LEADER, sentence, remedy, "", "rejected", leader))

    # Bounds

    def sweep(self, now_s: float) -> None:
        """Report an unknown outcome for overdue commands, and close the connection if it is idle or too slow."""
        for number, asker in list(self._waiting.items()):
            if now_s - asker.since_s < COMMIT_WAIT_S:
                break  # the remaining commands came later
            del self._waiting[number]
            self._fail(number, outcome_unknown())
        slow = self._frame_since_s is not None and not self._paused and now_s - self._frame_since_s > FRAME_S_MAX
        if slow or (not self._waiting and not self._out and now_s - self._heard_s > IDLE_S_MAX):
            self.close()
        if self._paused and len(self._waiting) <= OUTSTANDING_MAX // 2:
            self._resume()

    def close(self) -> None:
        """Send what is ready and end the connection."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _resume(self) -> None:
        if not self._paused or self._transport is None or self._transport.is_closing():
            return
        self.data_received(b"")

    def _send(self, message: HelloFrame | SuccessFrame | FailureFrame) -> None:
        self._out.append(encode_frame(message))
        if not self._waiting:
            self._flush()  # no other reply follows in this loop iteration
        elif not self._flush_soon:
            self._flush_soon = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_soon = False
        transport = self._transport
        if transport is None or transport.is_closing() or not self._out:
            self._out.clear()
            return
        out, self._out = self._out, []
        transport.write(out[0] if len(out) == 1 else b"".join(out))
        if transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
            self._server.warn(f"{self._identity} does not read its replies; its channel is closed", "closed")
            transport.abort()


# ---- replies to failed commands, bounded so that any program can read them


WORDS_CHARACTERS_MAX = 4000
"""Longest sentence, remedy or place in a reply, characters: four times the longest message.

All three, with four bytes for each character, fit into ANSWER_BYTES_MAX. A place can contain a field name of the
program's, which may be as long as its frame.
"""

FAULT_REMEDY = "report this with the replica's log, and send the command again with the same command_id"
"""Remedy for a fault of this release."""


def failure_frame(number: int, problem: Problem, leader: str) -> FailureFrame:
    """Return the reply to the failed command `number`; overlong texts are cut."""
    view = problem.view
    sentence, remedy, place = (_truncate(text) for text in (view.sentence, view.remedy, view.place))
    return FailureFrame(number, problem.status, view.code, sentence, remedy, place, view.outcome, leader)


def _host_of(transport: asyncio.Transport) -> str:
    return str((transport.get_extra_info("peername") or ("an unknown address",))[0])


def _truncate(text: str) -> str:
    return text if len(text) <= WORDS_CHARACTERS_MAX else text[: WORDS_CHARACTERS_MAX - 1] + "…"
