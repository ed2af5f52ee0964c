"""Worker's side of the socket to the controller: sends requests and commands, receives responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping

from forebay.cluster.api.web import (
    AccessRules,
    ApiRequest,
    CommandClient,
    DecodedSubmit,
    IdentityAssertions,
    Problem,
    Redirect,
    Response,
    Stream,
    StreamChunk,
    queue_full,
)
from forebay.cluster.api.worker import frames as f
from forebay.cluster.ipc import FrameConnection
from forebay.cluster.schemas import BulkCommand, ChannelProtocolError
from forebay.cluster.schemas import operations as ops
from forebay.cluster.security import PeerCertificate, Peers
from forebay.cluster.system import SystemClock
from forebay.cluster.system.eventloop import Slices
from forebay.replica.model import DEFAULT_SITE, Revocation, Site

LOGGER = logging.getLogger(__name__)

OBSERVE_PERIOD_S = 0.5
"""Interval of response counts sent to the controller, seconds; scrapes can lag other workers by this much."""


class _Waiting:
    """A pending request: received parts of its response, and its wake-up."""

    def __init__(self) -> None:
        self.begun: asyncio.Future[f.ResponseStart | f.StreamStart] = asyncio.get_running_loop().create_future()
        self.parts: asyncio.Queue[bytes | f.StreamChunkSent | None] = asyncio.Queue()
        """Further parts of its response, bounded by the controller; for a stream at most one."""


class RemoteBackend(FrameConnection[f.FromWorker, f.FromController]):
    """Worker's end of the socket; `cluster.api.workers` has the other."""

    def __init__(self, lost: Callable[[], None]) -> None:
        """`lost` is called when the controller disconnects."""
        super().__init__(f.WORKER_CODEC, "the controller")
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._requests: dict[int, _Waiting] = {}
        self._commands: dict[int, CommandClient] = {}
        self._revocations: Mapping[str, Revocation] = {}
        self._observed: list[tuple[str, int, float, str]] = []
        self._teller: asyncio.TimerHandle | None = None
        self.welcome: asyncio.Future[f.Welcome] = self._loop.create_future()
        self.cluster_id = ""
        self.vouching = IdentityAssertions(AccessRules(), "")
        self.peers = Peers("", SystemClock())
        self.slices = Slices()
        self.revision = 0
        self.site: Site = DEFAULT_SITE
        self.leader_channel = ""

    def connected(self) -> None:
        self.send(f.Greeting(f.WORKER_VERSION))

    def disconnected(self) -> None:
        self._lost()

    def receive(self, frame: f.FromController) -> None:
        match frame:
            case f.CommandSettled():
                asker = self._commands.pop(frame.number, None)
                self.revision = max(self.revision, frame.revision)
                if asker is not None and not asker.is_gone():
                    asker.report_settled(frame.revision, frame.job)
            case f.ResponseStart() | f.StreamStart():
                self.revision = max(self.revision, frame.revision)
                waiting = self._requests.get(frame.number)
                if waiting is not None and not waiting.begun.done():
                    waiting.begun.set_result(frame)
            case f.ResponseChunk():
                self._part(frame.number, frame.content)
            case f.StreamChunkSent():
                self._part(frame.number, frame)
            case f.StreamEnd():
                self._part(frame.number, None)
            case f.FailureResponse():
                view = frame.problem
                self._fail(
                    frame.number,
                    Problem(
                        frame.status,
                        view.code,
                        view.sentence,
                        view.remedy,
                        view.place,
                        outcome=view.outcome,
                        headers=frame.headers,
                    ),
                )
            case f.RedirectResponse():
                self._fail(frame.number, Redirect(frame.base))
            case f.SiteSettings():
                self.site, self._revocations = frame.site, frame.revocations
            case f.RevisionUpdate():
                self.revision, self.leader_channel = frame.revision, frame.leader_channel
            case f.Welcome():
                self._begin(frame)

    def _begin(self, welcome: f.Welcome) -> None:
        if welcome.version != f.WORKER_VERSION:
            raise ChannelProtocolError(
                f"it uses protocol version {welcome.version}, and this API worker {f.WORKER_VERSION}"
            )
        self.cluster_id = welcome.cluster_id
        self.vouching = IdentityAssertions(welcome.access, welcome.cluster_id)
        self.peers = Peers(welcome.cluster_id, SystemClock())
        self.peers.follow(lambda: self._revocations)
        if not self.welcome.done():
            self.welcome.set_result(welcome)
        self._tell()

    def _part(self, number: int, part: bytes | f.StreamChunkSent | None) -> None:
        waiting = self._requests.get(number)
        if waiting is not None:
            waiting.parts.put_nowait(part)

    def _fail(self, number: int, error: Problem | Redirect) -> None:
        asker = self._commands.pop(number, None)
        if asker is not None:
            if not asker.is_gone():
                asker.report_failure(error)
            return
        waiting = self._requests.get(number)
        if waiting is not None and not waiting.begun.done():
            waiting.begun.set_exception(error)

    def _next(self) -> int:
        if len(self._requests) + len(self._commands) >= f.OUTSTANDING_MAX:
            raise queue_full("too many requests are waiting for this replica's controller process")
        self._number += 1
        return self._number

    # Backend interface

    async def respond(self, asked: ApiRequest) -> Response | Stream:
        """Return the controller's response.

        Raises:
            Problem: The request failed.
            Redirect: Another replica leads.
        """
        if asked.operation is ops.SHOW_METRICS:
            self._report()  # the response must include earlier counts
        number = self._next()
        waiting = self._requests[number] = _Waiting()
        identity = asked.identity
        leaving = self._loop.create_task(self._follow(number, asked.gone))
        stays = False
        try:
            self.send(
                f.RequestReceived(
                    number,
                    asked.operation.name,
                    identity.role,
                    identity.name,
                    asked.certificate.serial,
                    asked.params,
                    asked.query,
                    asked.content,
                    asked.prepared,
                    asked.last_event_id,
                    asked.certificate.through,
                )
            )
            begun = await waiting.begun
            if isinstance(begun, f.StreamStart):
                stays = True

                def release() -> None:
                    leaving.cancel()
                    if self._requests.pop(number, None) is not None:
                        self.send(f.RequestAbandoned(number))

                return Stream(begun.revision, begun.content_type, self._parts(number, waiting), release)
            content = begun.content
            if begun.left_bytes:
                whole, size_bytes = [content], len(content) + begun.left_bytes
                while size_bytes > sum(map(len, whole)):
                    part = await waiting.parts.get()
                    assert isinstance(part, bytes)
                    whole.append(part)
                content = b"".join(whole)
            return Response(begun.status, begun.revision, content, begun.content_type)
        finally:
            if not stays:
                leaving.cancel()
                del self._requests[number]

    async def _parts(self, number: int, waiting: _Waiting) -> AsyncGenerator[StreamChunk, None]:
        while isinstance(part := await waiting.parts.get(), f.StreamChunkSent):
            yield StreamChunk(part.payload, part.farewell)
            self.send(f.ChunkWritten(number))

    async def _follow(self, number: int, gone: asyncio.Event) -> None:
        """Notify the controller when a request's client disconnects, and end its stream."""
        await gone.wait()
        self.send(f.RequestAbandoned(number))
        self._part(number, None)

    def elsewhere(self) -> Redirect | Problem | None:
        """Return None: the controller redirects each command itself."""
        return None

    def program(self, certificate: PeerCertificate) -> RemoteProgram:
        """Return the program of a new channel connection."""
        self._number += 1  # the listener bounds the connections
        number, identity = self._number, certificate.identity
        self.send(f.ProgramConnected(number, identity.role, identity.name, certificate.serial))
        return RemoteProgram(self, number)

    def order(self, program: int, content: bytes, prepared: DecodedSubmit | None, asker: CommandClient) -> None:
        """Send a command.

        Raises:
            Problem: Too many commands are outstanding.
        """
        number = self._next()
        self._commands[number] = asker
        self.send(f.CommandReceived(number, program, content, prepared))

    def close_program(self, program: int) -> None:
        """Report that a connection ended, and drop its outstanding commands."""
        self.send(f.ProgramDisconnected(program))
        for number in [number for number, asker in self._commands.items() if asker.is_gone()]:
            del self._commands[number]

    def observe(self, route: str, status: int, duration_s: float, code: str) -> None:
        """Count a response, to be reported to the controller."""
        self._observed.append((route, status, duration_s, code))
        if len(self._observed) >= f.OBSERVATIONS_MAX:
            self._report()

    def _tell(self) -> None:
        self._teller = self._loop.call_later(OBSERVE_PERIOD_S, self._tell)
        self._report()

    def _report(self) -> None:
        if self._observed:
            answers, self._observed = tuple(self._observed), []
            self.send(f.ResponsesObserved(answers))


class RemoteProgram:
    """Connection of the channel."""

    def __init__(self, core: RemoteBackend, number: int) -> None:
        self._core = core
        self._number = number

    def take(self, request: BulkCommand, content: bytes, prepared: DecodedSubmit | None, asker: CommandClient) -> None:
        """Send a command to the controller."""
        self._core.order(self._number, content, prepared, asker)

    def leave(self) -> None:
        """Report that the connection ended."""
        self._core.close_program(self._number)
