"""Client of the channel: many commands in flight on one connection, each answered when durable.

    async with ChannelClient.from_config(config, "alice") as channel:
        command_id = await channel.next_command_id()
        submit = SubmitCommand(command_id=command_id, script=…, time_limit_s=60, workdir="/home/alice")
        done = await channel.perform(submit)

`ChannelClient` finds and follows the leader, and resends a command with the same ID until its deadline.
`ChannelConnection` is one connection to one replica, for programs that do this themselves.
"""

import asyncio
import random
import ssl
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Final, Self, cast

import msgspec

from forebay.cluster.client.calls import ATTEMPT_S, DEADLINE_S, RETRY_STATUSES, BackOff, is_definite, unknown_after
from forebay.cluster.client.errors import BAD_ANSWER, NO_ANSWER, OUTCOME_UNKNOWN, UNREACHABLE, ApiError
from forebay.cluster.client.session_ids import SessionIds
from forebay.cluster.config import Config, ConfigError
from forebay.cluster.schemas import (
    ANSWER_BYTES_MAX,
    CHANNEL_VERSION,
    NOT_LEADER,
    OUTSTANDING_MAX,
    BulkCommand,
    ChannelProtocolError,
    CommandFrame,
    FailureFrame,
    FrameSplitter,
    HelloFrame,
    OpenSessionCommand,
    SuccessFrame,
    check_hello,
    decode_from_replica,
    encode_body,
    encode_frame,
    new_command_id,
)
from forebay.cluster.security import Credentials, TlsFiles
from forebay.cluster.system import Address, AddressError, Clock, SystemClock
from forebay.cluster.system.eventloop import ReadingProtocol, read_buffer

CONNECT_S: Final = 3.0
"""Time for connecting, TLS and the greeting, seconds; a LAN needs milliseconds, a loaded replica a second."""

SILENT_LOOKS: Final = 5
LOOK_S: Final = ATTEMPT_S / SILENT_LOOKS
"""Interval of checks on a connection with outstanding commands, seconds, and the number of consecutive silent checks
after which it is given up. A running replica answers each command sooner, even if only with an unknown outcome. Checks
are counted instead of seconds, so that a client that was itself stopped first reads its backlog.
"""

_REDIRECT: Final = 307


class ChannelError(ApiError):
    """Response to a failed command; `leader`: the leader's channel, or empty."""

    leader: str = ""


class ChannelConnection(ReadingProtocol):
    """Connection to one replica."""

    def __init__(self, address: Address, cluster_id: str) -> None:
        super().__init__(read_buffer())
        self.address = address
        self._cluster_id = cluster_id
        self._loop = asyncio.get_running_loop()
        self._cutter = FrameSplitter(ANSWER_BYTES_MAX)
        self._transport: asyncio.Transport | None = None
        self._greeting: asyncio.Future[None] = self._loop.create_future()
        self._answers: dict[int, asyncio.Future[SuccessFrame]] = {}
        self._number = 0
        self._out: list[bytes] = []
        self._flush_soon = False
        self._answered_at_once = 0
        """Responses in the last read, count: as many commands may follow at once."""
        self._watch: asyncio.TimerHandle | None = None
        """Next check for a silent replica; None while no command is outstanding."""
        self._heard = False
        self._silent_looks = 0
        self._end = "broke"

    @classmethod
    async def open(cls, address: Address, tls: ssl.SSLContext, cluster_id: str) -> "ChannelConnection":
        """Connect and exchange greetings within CONNECT_S. `tls` comes from `cluster.security.Credentials`.

        Raises:
            ApiError: The connection failed.
        """
        loop = asyncio.get_running_loop()
        connection: ChannelConnection | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: cls(address, cluster_id), address.host, address.port, ssl=tls, server_hostname=address.host
                )
                await asyncio.shield(connection._greeting)
        except (OSError, TimeoutError, ChannelProtocolError) as error:
            if connection is not None:
                connection.close()
            why = str(error) or type(error).__name__
            raise ApiError(NO_ANSWER, UNREACHABLE, f"the channel of {address} cannot be used: {why}") from error
        return connection

    @property
    def is_open(self) -> bool:
        """Return True if commands can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def outstanding(self) -> int:
        """Return the number of unanswered commands."""
        return len(self._answers)

    def ask(self, command: BulkCommand) -> asyncio.Future[SuccessFrame]:
        """Send a command; the future yields its result, or ApiError with `outcome` rejected or unknown.

        Raises:
            ApiError: 429 if OUTSTANDING_MAX commands are outstanding, 413 if the command exceeds a frame.
        """
        answer: asyncio.Future[SuccessFrame] = self._loop.create_future()
        if not self.is_open:
            raise ApiError(NO_ANSWER, UNREACHABLE, f"the channel to {self.address} is closed")
        if len(self._answers) >= OUTSTANDING_MAX:
            raise ApiError(429, "too_many_outstanding", f"{OUTSTANDING_MAX} commands are already waiting for answers")
        number = self._number = self._number + 1
        try:
            frame = encode_frame(CommandFrame(number, msgspec.Raw(encode_body(command))))
        except ValueError as error:
            raise ApiError(413, "limit_exceeded", str(error), remedy="send a smaller command") from error
        self._answers[number] = answer
        self._out.append(frame)
        if self._watch is None:
            self._watch = self._loop.call_later(LOOK_S, self._look)
        if len(self._answers) == 1 and self._answered_at_once <= 1:
            self._flush()  # no other command is outstanding or imminent, so do not wait for more
        elif not self._flush_soon:
            self._flush_soon = True
            self._loop.call_soon(self._flush)
        return answer

    def close(self) -> None:
        """Close the connection; outstanding commands get an unknown outcome."""
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        self._flush_soon = False
        out, self._out = self._out, []
        if self.is_open and self._transport is not None:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    def _look(self) -> None:
        """Give up a hung replica, whose kernel keeps the connection open although another replica leads."""
        self._watch = None
        self._silent_looks = 0 if self._heard else self._silent_looks + 1
        self._heard = False
        if not self._answers:
            self._silent_looks = 0
        elif self._silent_looks > SILENT_LOOKS:
            self._end = f"was silent for {SILENT_LOOKS * LOOK_S:g} s"
            self.close()
        else:
            self._watch = self._loop.call_later(LOOK_S, self._look)

    # asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the greeting."""
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.write(encode_frame(HelloFrame(CHANNEL_VERSION, self._cluster_id)))

    def data_received(self, data: bytes) -> None:
        """Process the complete responses."""
        self._heard = True
        self._answered_at_once = 0
        try:
            for body in self._cutter.feed(data):
                self._take(body)
                self._answered_at_once += 1
        except (ChannelProtocolError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            if not self._greeting.done():
                self._greeting.set_exception(ChannelProtocolError(str(error)))
            self.close()

    def _take(self, body: bytes) -> None:
        message = decode_from_replica(body)
        if isinstance(message, HelloFrame):
            check_hello(message, self._cluster_id)
            if not self._greeting.done():
                self._greeting.set_result(None)
            return
        answer = self._answers.pop(message.number, None)
        if answer is None or answer.done():
            return
        if isinstance(message, SuccessFrame):
            answer.set_result(message)
        else:
            answer.set_exception(_error_of(message))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail outstanding commands with an unknown outcome."""
        if not self._greeting.done():
            self._greeting.set_exception(
                ChannelProtocolError("the replica closed it at once; it may be rejecting this certificate")
            )
            self._greeting.exception()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(
                    ApiError(
                        NO_ANSWER,
                        OUTCOME_UNKNOWN,
                        f"the channel to {self.address} {self._end} before the answer arrived",
                        remedy="send it again with the same command_id; it takes effect once",
                        outcome="unknown",
                    )
                )


class ChannelClient:
    """Channel to the current leader, under one identity."""

    def __init__(
        self,
        addresses: Iterable[Address],
        tls: TlsFiles,
        cluster_id: str,
        *,
        chance: Callable[[], float] = random.random,
        clock: Clock | None = None,
    ) -> None:
        """Prepare without connecting. `addresses`: channel addresses of the replicas.

        Raises:
            TlsError: The files cannot be used.
        """
        self._addresses = list(addresses)
        if not self._addresses:
            raise ValueError("no replica offers a channel")
        self._credentials = Credentials(tls)
        self._cluster_id = cluster_id
        self._chance = chance
        self._next = 0
        self._connection: ChannelConnection | None = None
        self._connecting = asyncio.Lock()
        self._clock = clock or SystemClock()
        self._session_ids = SessionIds(self._open_session, self._clock)

    @classmethod
    def from_config(cls, config: Config, identity: str) -> "ChannelClient":
        """Return a channel to the configured cluster.

        Raises:
            ConfigError: No replica offers a channel, or the certificate files are missing.
        """
        addresses = [replica.channel for replica in config.replicas if replica.channel is not None]
        if not addresses:
            raise ConfigError(
                config.file, "replica.channel", "no replica offers a channel", 'write channel = "HOST:PORT" for each'
            )
        return cls(addresses, config.tls_files(identity), config.cluster.id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    async def next_command_id(self) -> str:
        """Return the ID of the next command, numbered in a session that is opened on demand.

        The cluster keeps a session's cached replies until they are acknowledged, those of single commands for ten
        minutes.

        Raises:
            ApiError: No session can be opened.
        """
        return await self._session_ids.next_id()

    async def _open_session(self) -> int:
        return (await self.perform(OpenSessionCommand(command_id=new_command_id(self._clock)))).revision

    async def perform(self, command: BulkCommand, *, deadline_s: float = DEADLINE_S) -> SuccessFrame:
        """Execute one command, resending it with its ID while the outcome is unknown.

        Raises:
            ApiError: The command was rejected, or its outcome is unknown at the deadline.
        """
        try:
            done = await self._perform(command, deadline_s)
        except ApiError as error:
            if error.outcome != "unknown":
                self._session_ids.note_rejection(command.command_id, error.status, error.code)
            raise
        self._session_ids.acknowledge(command.command_id)
        return done

    async def _perform(self, command: BulkCommand, deadline_s: float) -> SuccessFrame:
        back_off = BackOff(self._chance)
        may_have_happened = False  # an earlier request may have taken effect
        is_out = False  # a request was written and is unanswered
        last: ApiError | None = None
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    connection: ChannelConnection | None = None
                    try:
                        connection = await self._connect()
                        answer = connection.ask(command)
                        is_out = True
                        return await answer
                    except ApiError as error:
                        is_out = False  # its own outcome says whether it may have taken effect
                        if error.status not in (NO_ANSWER, _REDIRECT) and error.status not in RETRY_STATUSES:
                            error.command_id = command.command_id
                            if may_have_happened and not _is_definite(error):
                                raise unknown_after(error, command.command_id) from error
                            raise
                        may_have_happened = may_have_happened or error.outcome == "unknown"
                        last = error
                        moved = self._move(connection, error)
                    if not moved:
                        await asyncio.sleep(back_off.wait_s())
        except TimeoutError:
            why = f": {last}" if last is not None else ""
            unknown = may_have_happened or is_out
            raise ApiError(
                NO_ANSWER,
                OUTCOME_UNKNOWN if unknown else UNREACHABLE,
                f"no replica executed the command within {deadline_s:g} s{why}",
                remedy="send it again with the same command_id",
                outcome="unknown" if unknown else "rejected",
                command_id=command.command_id,
            ) from last

    async def _connect(self) -> ChannelConnection:
        async with self._connecting:
            if self._connection is None or not self._connection.is_open:
                address = self._addresses[self._next % len(self._addresses)]
                self._credentials.refresh()
                tls = self._credentials.client_context()
                try:
                    self._connection = await ChannelConnection.open(address, tls, self._cluster_id)
                except ApiError:
                    self._next += 1
                    raise
            return self._connection

    def _move(self, connection: ChannelConnection | None, error: ApiError) -> bool:
        """Switch to another replica after `error`; return True if it was named, so that no wait is needed."""
        if connection is None or connection is not self._connection:
            return connection is not None  # another task has switched already
        leader = error.leader if isinstance(error, ChannelError) else ""
        if error.code != NOT_LEADER and connection.is_open and not leader:
            return False  # busy, or between leaders: this replica is as good as any
        self._connection = None
        if connection.outstanding == 0:
            connection.close()
        try:
            named = Address.parse(leader) if leader else None
        except AddressError:
            named = None
        if named is not None and named in self._addresses:
            self._next = self._addresses.index(named)
            return named != connection.address
        self._next += 1
        return False


def _is_definite(error: ApiError) -> bool:
    return error.outcome != "unknown" and is_definite(error.status, error.code)


def _error_of(message: FailureFrame) -> ApiError:
    error = ChannelError(
        message.status,
        message.code or BAD_ANSWER,
        message.sentence,
        remedy=message.remedy,
        place=message.place,
        outcome=message.outcome,
    )
    error.leader = message.leader
    return error
