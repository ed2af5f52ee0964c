"""Client of a cluster: one typed call for every operation of the API.

    async with Client.from_config(config, "operator") as client:
        request = SubmitRequest(command_id=client.new_command_id(), script=…, time_limit_s=60, workdir="/home/a")
        job = await client.call(operations.SUBMIT_JOB, request)
        held = await client.call(operations.HOLD_JOB, id=job.job_id)

A call raises ApiError; its `deadline_s` includes retries. A write is identified by the command ID of its request. To
retry a write with an unknown outcome, even from another process, send the same request again.

The client runs on an event loop or, with a `BlockingExchange` and `finish`, without one.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast

import msgspec
from msgspec.structs import replace

from forebay.cluster.client.access_methods import AccessMethod, GatewayAccess, MungeAccess, access_method_of
from forebay.cluster.client.attempt import AttemptError, Streaming
from forebay.cluster.client.calls import (
    ATTEMPT_S,
    DEADLINE_S,
    EARLIER,
    REDIRECT_STATUSES,
    RETRY_STATUSES,
    TOO_MANY,
    BackOff,
    Caller,
    ClientCall,
    Endpoints,
    is_definite,
    send_again,
    sleep_for,
)
from forebay.cluster.client.errors import BAD_ANSWER, OUTCOME_UNKNOWN, ApiError, error_of
from forebay.cluster.client.last_leader import RememberedEndpoints
from forebay.cluster.client.session_ids import SessionIds
from forebay.cluster.schemas import ApiOperation, Command, Parameter, new_command_id, operations
from forebay.cluster.system import Address, Clock, SystemClock

if TYPE_CHECKING:
    from forebay.cluster.client.page_proxy import PageProxy
    from forebay.cluster.config import AccessConfig
    from forebay.cluster.schemas import (
        BulkAnswer,
        BulkCommand,
        CommandResult,
        EventView,
        PollAnswer,
        PollRequest,
        RegisterAnswer,
        RegisterRequest,
        ReportsAnswer,
        ReportsRequest,
    )

_T = TypeVar("_T")
_Asked = TypeVar("_Asked")

_JSON: Final = msgspec.json.Encoder()

UNKNOWN: Final = "unknown"
OK: Final = 200

FULL_QUEUE_S: Final = 1.0
"""Shortest wait after a full queue, seconds: a replica's Retry-After, which bulk results do not include."""

LEAST_S: Final = 0.1
"""Shortest useful time for a request, seconds: one that is cut short turns a rejection into an unknown outcome."""


class Client:
    """Access to a cluster under one identity; an asynchronous context manager, or call close()."""

    def __init__(
        self,
        endpoints: Iterable[Address] | Endpoints,
        way: AccessMethod | None,
        *,
        clock: Clock | None = None,
        deadline_s: float = DEADLINE_S,
        unreachable_s: float | None = None,
        blocking: bool = False,
        exchange: Streaming | None = None,
        sleep: Callable[[float], Awaitable[None]] | None = None,
    ) -> None:
        """Prepare to use the replicas at `endpoints` (API addresses) without connecting.

        `deadline_s` is the default deadline; `unreachable_s` ends a call earlier if nothing listens anywhere. With
        `blocking`, `finish` runs calls one at a time. `way` is the certificate or other access method; None with an
        `exchange`, which replaces the network, as `sleep` replaces its waits.

        Raises:
            TlsError: A certificate or key is malformed, expired, readable by others, or of another authority.
        """
        self._clock = clock or SystemClock()
        self._endpoints = endpoints if isinstance(endpoints, Endpoints) else Endpoints(endpoints)
        self._way = way
        if exchange is None:
            assert way is not None
            exchange = _blocking(way, self._clock) if blocking else _on_a_loop(way, self._clock)
        self._exchange = exchange
        self._sleep = sleep or (_sleep if blocking else sleep_for)
        self._unreachable_s = unreachable_s
        self._caller = self._caller_of(self._endpoints)
        self._deadline_s = deadline_s
        self._session_ids = SessionIds(self._open_session, self._clock)

    @classmethod
    def from_config(
        cls,
        config: AccessConfig,
        identity: str | None,
        *,
        clock: Clock | None = None,
        deadline_s: float = DEADLINE_S,
        unreachable_s: float | None = None,
        blocking: bool = False,
    ) -> Client:
        """Return a client of the configured cluster as `identity`, by default as this process's account.

        Raises:
            ConfigError, TlsError: No access method is available.
        """
        way = access_method_of(config, identity)
        endpoints = (
            RememberedEndpoints(config.endpoints, config.cluster.id) if blocking else Endpoints(config.endpoints)
        )
        return cls(endpoints, way, clock=clock, deadline_s=deadline_s, unreachable_s=unreachable_s, blocking=blocking)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._exchange.close()

    def reach_at(self, endpoints: Iterable[Address]) -> None:
        """Use these API addresses from now on."""
        self._endpoints.renew(endpoints)

    def new_command_id(self) -> str:
        """Return a new ID for a single command."""
        return new_command_id(self._clock)

    async def next_command_id(self) -> str:
        """Return the ID of the next command, numbered in a session that is opened on demand.

        The cluster keeps cached replies of single commands for ten minutes and limits them by user. In a session it
        keeps only unacknowledged ones.

        Raises:
            ApiError: No session can be opened.
        """
        return await self._session_ids.next_id()

    async def _open_session(self) -> int:
        return (await self.call(operations.OPEN_SESSION)).session

    async def call(
        self,
        operation: ApiOperation[_Asked, _T],
        request: _Asked | None = None,
        *,
        stale: bool = False,
        replica: Address | None = None,
        deadline_s: float | None = None,
        attempt_s: float = ATTEMPT_S,
        once: bool = False,
        **parameters: Parameter,
    ) -> _T:
        """Perform an operation and return its response.

        If the body would only hold a command ID, `request` is created. `stale`: accept the state of any replica.
        `replica`: ask only this one about its own state. `attempt_s` limits each request. `once`: try each replica
        once. `parameters` are named as in the OpenAPI document; None and False are omitted.

        Raises:
            TypeError: The operation has no such parameter.
        """
        if request is None and issubclass(operation.request, Command):
            request = operation.request(command_id=self.new_command_id())
        if (stale or replica is not None) and not operation.own:
            parameters["stale"] = "ok"
        if deadline_s is None:
            deadline_s = self._deadline_s
        call = ClientCall(
            method=operation.method,
            target=operation.target(parameters),
            body=None if request is None else _JSON.encode(request),
            command_id=_command_id(request),
            leader_only=not (stale or operation.own or replica is not None),
            deadline_s=deadline_s,
            attempt_s=deadline_s if operation.slow else attempt_s,
            once=once,
        )
        value, _ = await self._perform(call, operation.answer, replica)
        return value

    async def ask_once(
        self,
        operation: ApiOperation[_Asked, _T],
        request: _Asked | None = None,
        *,
        replica: Address,
        timeout_s: float,
        **parameters: Parameter,
    ) -> _T | None:
        """Ask one replica once, without following redirects; None if it does not answer, does not lead, or is busy.

        Intended for measuring individual replicas.
        """
        body = None if request is None else _JSON.encode(request)
        target = operation.target(parameters)
        try:
            answer = await self._exchange.send(
                replica, operation.method, target, body, timeout_s=timeout_s, connect_s=timeout_s
            )
        except AttemptError:
            return None
        if answer.status < 300:
            return msgspec.json.decode(answer.body, type=operation.answer)
        if answer.status in REDIRECT_STATUSES | RETRY_STATUSES:
            return None
        raise error_of(answer.status, answer.body, who=str(replica), command_id=_command_id(request))

    async def commands(self, commands: Sequence[BulkCommand], *, deadline_s: float | None = None) -> BulkAnswer:
        """Send many commands in one request.

        Each gets its own result, in order, and a rejection does not stop the others.

        A successful request can contain commands that failed temporarily, because the replica lost its leadership or
        its queue was full. Only those are resent, with the same IDs, until the deadline. The response's revision is
        that of the last request.

        A command's result accounts for all requests that contained it. A temporary failure says nothing about earlier
        requests: a command that may have taken effect stays unknown until a response that `is_definite`.
        """
        left_s = self._deadline_s if deadline_s is None else deadline_s
        from forebay.cluster.schemas import BulkAnswer

        until_s = self._clock.monotonic_s() + left_s
        back_off = BackOff()
        answer = await self._send(commands, left_s)
        results = list(answer.results)
        while waiting := [at for at, result in enumerate(results) if result.status in RETRY_STATUSES]:
            wait_s = back_off.wait_s(FULL_QUEUE_S if any(results[at].status == TOO_MANY for at in waiting) else 0.0)
            left_s = until_s - self._clock.monotonic_s() - wait_s
            if left_s < LEAST_S:
                break
            await self._sleep(wait_s)
            try:
                answer = await self._send([commands[at] for at in waiting], left_s)
            except ApiError as error:
                if error.outcome == UNKNOWN:
                    for at in waiting:
                        results[at] = _unknown(results[at])
                break
            for at, result in zip(waiting, answer.results, strict=True):
                was_unknown = _is_unknown(results[at])
                results[at] = _unknown(result) if was_unknown and not _is_definite(result) else result
        for result in results:
            if not _is_unknown(result):
                code = "" if result.error is None else result.error.code
                self._session_ids.note_rejection(result.command_id, result.status, code)
        return BulkAnswer(revision=answer.revision, results=tuple(results))

    async def _send(self, commands: Sequence[BulkCommand], deadline_s: float) -> BulkAnswer:
        from forebay.cluster.schemas import BulkRequest

        # Any of the IDs distinguishes an unknown outcome; the whole request is resent.
        marker = commands[0].command_id if commands else None
        body = msgspec.json.encode(BulkRequest(commands=tuple(commands)))
        row = operations.SEND_COMMANDS
        call = ClientCall(method=row.method, target=row.path, body=body, command_id=marker, deadline_s=deadline_s)
        answer, unsure = await self._perform(call, row.answer)
        if len(answer.results) != len(commands):
            raise ApiError(
                OK,
                BAD_ANSWER,
                f"{len(commands)} commands were sent and {len(answer.results)} answered",
                remedy="check that client and replicas are of the same release",
                outcome=UNKNOWN,
                command_id=marker,
            )
        if unsure:
            answer = replace(
                answer, results=tuple(one if _is_definite(one) else _unknown(one) for one in answer.results)
            )
        return answer

    async def sleep(self, duration_s: float) -> None:
        """Wait as between retries, on the event loop or without one, seconds."""
        await self._sleep(duration_s)

    def events(
        self,
        *,
        from_revision: int = 0,
        after: tuple[int, int] | None = None,
        give_up_s: float | None = None,
        quiet_s: float | None = None,
    ) -> AsyncGenerator[EventView, None]:
        """Iterate over the events of all revisions after `from_revision`, reconnecting as needed.

        `after`: continue after the event with this revision and sequence instead. `quiet_s`: end after about this many
        seconds without an event, by default never. To stop early, close it:
        `async with contextlib.aclosing(client.events()) as events`.
        """
        from forebay.cluster.client.events import GIVE_UP_S, EventStream, StreamPosition

        position = StreamPosition(from_revision) if after is None else StreamPosition(after[0] - 1, after)
        stream = EventStream(
            self._exchange,
            self._endpoints,
            self._clock,
            position,
            give_up_s=GIVE_UP_S if give_up_s is None else give_up_s,
            quiet_s=quiet_s,
            sleep=self._sleep,
        )
        return stream.read()

    def page_proxy(self, port: int = 0) -> PageProxy:
        """Return a loopback proxy of the status page with this client's access; port 0: a free one.

        It serves on an event loop.
        """
        from forebay.cluster.client.own_account_relay import relay_of
        from forebay.cluster.client.page_proxy import PageProxy

        assert self._way is not None
        return PageProxy(relay_of(self._way), self._endpoints, port)

    # Operations of agents

    async def register(self, node: str, request: RegisterRequest) -> RegisterAnswer:
        """Register an agent that has just started."""
        return await self.call(operations.REGISTER_NODE, request, node=node)

    async def poll(self, node: str, request: PollRequest, replica: Address) -> PollAnswer:
        """Wait up to `wait_s` for the node's orders to differ from those at `seen_revision`; return all orders.

        Asks the chosen replica once. The deadline starts after `wait_s`.
        """
        row = operations.POLL_ORDERS
        call = ClientCall(
            method=row.method,
            target=row.target({"node": node}),
            body=_JSON.encode(request),
            leader_only=False,
            deadline_s=self._deadline_s + request.wait_s,
            attempt_s=ATTEMPT_S + request.wait_s,
            once=True,
        )
        answer, _ = await self._perform(call, row.answer, replica)
        return answer

    async def members(self, replica: Address) -> list[Address]:
        """Return the API addresses of the voting replicas, according to `replica`."""
        rows = (await self.call(operations.LIST_MEMBERS, replica=replica)).members
        return [Address.parse(row.api) for row in rows if row.votes and row.api]

    async def report(self, node: str, request: ReportsRequest) -> ReportsAnswer:
        """Report results; every result in the response, accepted or rejected, is acknowledged."""
        return await self.call(operations.REPORT_OPERATIONS, request, node=node)

    def _caller_of(self, endpoints: Endpoints) -> Caller:
        return Caller(self._exchange, endpoints, self._clock, sleep=self._sleep, unreachable_s=self._unreachable_s)

    async def _perform(self, call: ClientCall, kind: type[_T], only: Address | None = None) -> tuple[_T, bool]:
        """Return the response, and whether an earlier request of this call may have taken effect."""
        caller = self._caller if only is None else self._caller_of(Endpoints([only]))
        try:
            answer = await caller.perform(call)
        except ApiError as error:
            if call.command_id is not None and error.outcome != UNKNOWN:
                self._session_ids.note_rejection(call.command_id, error.status, error.code)
            raise
        if call.command_id is not None:
            self._session_ids.acknowledge(call.command_id)
        try:
            if kind is bytes:
                return cast("_T", answer.body), answer.unsure
            if kind is str:
                return cast("_T", answer.body.decode()), answer.unsure
            return msgspec.json.decode(answer.body, type=kind), answer.unsure
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ApiError(
                answer.status,
                BAD_ANSWER,
                f"the answer to {call.method} {call.target} is not valid: {error}",
                remedy="check that client and replicas are of the same release",
                outcome="rejected" if call.command_id is None else "unknown",
                command_id=call.command_id,
            ) from error


def _command_id(request: object) -> str | None:
    """Return an ID that identifies the request's outcome: any of its command IDs, or None."""
    if isinstance(request, Command):
        return request.command_id
    # An agent's reports
    reports: Sequence[Command] = getattr(request, "reports", ())
    return reports[0].command_id if reports else None


def _blocking(way: AccessMethod, clock: Clock) -> Streaming:
    if isinstance(way, GatewayAccess):
        from forebay.cluster.client.own_account import GatewayExchange

        return GatewayExchange(way, clock)
    if isinstance(way, MungeAccess):
        from forebay.cluster.client.own_account import by_munge

        return by_munge(way, clock)
    from forebay.cluster.client.blocking import BlockingExchange

    return BlockingExchange(way, clock)


def _on_a_loop(way: AccessMethod, clock: Clock) -> Streaming:
    if isinstance(way, GatewayAccess):
        from forebay.cluster.client.own_account_loop import GatewayLoopExchange

        return GatewayLoopExchange(way, clock)
    if isinstance(way, MungeAccess):
        from forebay.cluster.client.own_account_loop import MungeLoopExchange

        return MungeLoopExchange(way, clock)
    from forebay.cluster.client.exchange import Exchange

    return Exchange(way, clock)


async def _sleep(duration_s: float) -> None:
    """Sleep without an event loop, seconds; a signal interrupts it."""
    threading.Event().wait(duration_s)


def _is_definite(result: CommandResult) -> bool:
    return is_definite(result.status, result.error.code if result.error is not None else "")


def _is_unknown(result: CommandResult) -> bool:
    return result.error is not None and result.error.outcome == UNKNOWN


def _unknown(result: CommandResult) -> CommandResult:
    """Mark a result as unknown because of an earlier request."""
    if result.error is None or _is_unknown(result):
        return result
    sentence, remedy = f"{result.error.sentence}. {EARLIER}", send_again(result.command_id)
    error = replace(result.error, code=OUTCOME_UNKNOWN, sentence=sentence, remedy=remedy, outcome=UNKNOWN)
    return replace(result, error=error)


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run `coroutine` to completion in its own loop and return its result, for synchronous callers.

    KeyboardInterrupt cancels it first, so that connections are closed.

    Raises:
        RuntimeError: A loop is already running; await the coroutine instead.
    """
    import asyncio

    with asyncio.Runner() as runner:
        return runner.run(coroutine)
