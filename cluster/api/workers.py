"""Supervision of a replica's API workers by the controller process: start, serve their sockets, restart.

A worker ends TLS, so its identities are trusted. The controller still checks everything that depends on the state
(revocation, leadership, commands) and bounds a worker's requests. It disconnects a worker that sends an invalid frame;
the worker exits and is restarted.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from forebay.cluster.api.local_backend import FAULT_REMEDY, LocalBackend
from forebay.cluster.api.web import (
    ApiRequest,
    Problem,
    Program,
    Redirect,
    Response,
    Stream,
    body_problem,
    decode,
    internal_error,
    permit,
)
from forebay.cluster.api.worker import frames as f
from forebay.cluster.ipc import FrameConnection, SupervisedProcess
from forebay.cluster.schemas import OPERATIONS, BulkCommand, ChannelProtocolError
from forebay.cluster.security import Identity, PeerCertificate, Role, TlsFiles, revocable_as
from forebay.cluster.system import Address
from forebay.cluster.system.eventloop import BYTES_PER_SLICE, listen
from forebay.replica.values import NEVER

LOGGER = logging.getLogger(__name__)

WATCH_PERIOD_S = 0.25
"""Interval of updates to workers, seconds; the controller checks its own connections as often."""

DRAIN_S = 5.0
"""Time for a worker to exit, seconds: longer than its requests may take."""

_command_decoder = msgspec.msgpack.Decoder(BulkCommand)


class ApiWorkers:
    """API workers of one replica."""

    def __init__(
        self, core: LocalBackend, *, count: int, api: Address, channel: Address | None, files: TlsFiles
    ) -> None:
        """`files`: the replica's certificate, key and authorities, which the workers read themselves."""
        self.core = core
        self.count = count
        self.links: set[WorkerLink] = set()
        self._api = api
        self._channel = channel
        self._files = files
        self._sockets: list[socket.socket] = []
        self._processes: list[SupervisedProcess] = []
        self._watch: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        """Port of the API."""
        return int(self._sockets[0].getsockname()[1])

    @property
    def pids(self) -> list[int]:
        """PIDs of the running workers."""
        return [process.pid for process in self._processes if process.pid is not None]

    async def start(self) -> None:
        """Listen, and start the workers.

        Raises:
            OSError: An address cannot be used.
        """
        self._sockets.append(await listen(self._api))
        if self._channel is not None:
            self._sockets.append(await listen(self._channel))
        descriptors = [one.fileno() for one in self._sockets]
        words = [*map(str, descriptors), *(["-1"] if self._channel is None else [])]
        self._processes = [
            SupervisedProcess(
                f"API worker {number}",
                "forebay.cluster.api.worker",
                lambda: WorkerLink(self),
                arguments=lambda: words,
                descriptors=descriptors,
                stop_signal=signal.SIGTERM,
                stop_s=DRAIN_S,
            )
            for number in range(self.count)
        ]
        for process in self._processes:
            process.start()
        self._tell()

    async def stop(self) -> None:
        """Let the workers stop accepting, complete pending requests, and exit."""
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(*(process.stop() for process in self._processes))
        for listening in self._sockets:
            listening.close()

    def refresh(self) -> None:
        """Let the workers reload their certificates."""
        for process in self._processes:
            process.send_signal(signal.SIGHUP)

    def welcome(self) -> f.Welcome:
        """Return the first frame to a worker."""
        files, channel = self._files, self._channel
        return f.Welcome(
            f.WORKER_VERSION,
            self.core.cluster_id,
            str(self._api),
            "" if channel is None else str(channel),
            str(files.authority),
            str(files.certificate),
            str(files.key),
            self.core.access,
        )

    def count_serving(self) -> None:
        """Update the metric of serving workers."""
        self.core.service.metrics.workers = sum(link.greeted for link in self.links)

    def _tell(self) -> None:
        self._watch = asyncio.get_running_loop().call_later(WATCH_PERIOD_S, self._tell)
        for link in list(self.links):
            link.tell()


class WorkerLink(FrameConnection[f.FromController, f.FromWorker]):
    """Controller's end of the socket to one worker."""

    def __init__(self, workers: ApiWorkers) -> None:
        super().__init__(f.CONTROLLER_CODEC, "an API worker")
        self._workers = workers
        self._core = workers.core
        self._service = workers.core.service
        self._loop = asyncio.get_running_loop()
        self.greeted = False
        """True if the worker has started and serves."""
        self._told: tuple[object, object] | None = None
        """Site and revocations last sent to the worker."""
        self._current: f.RevisionUpdate | None = None
        self._elsewhere: Redirect | Problem | None = None
        """Redirect or error for the commands being processed, if this replica does not lead."""
        self._identities: dict[tuple[str, str], Identity] = {}
        self._requests: dict[int, _Request] = {}
        self._programs: dict[int, _Program] = {}
        self.commands = 0
        """Outstanding commands, count."""

    def connected(self) -> None:
        self._service.metrics.workers_started += 1
        self._workers.links.add(self)
        self.send(self._workers.welcome())
        self.tell()

    def data_received(self, data: bytes) -> None:
        if self.is_open:
            self._elsewhere = self._core.elsewhere()  # once for all frames, because the loop does not run in between
            super().data_received(data)

    def disconnected(self) -> None:
        self._workers.links.discard(self)
        self._workers.count_serving()
        for request in list(self._requests.values()):
            request.gone.set()
            request.written.set()
        for program in self._programs.values():
            program.local.leave()
        self._programs.clear()

    def tell(self) -> None:
        """Send changed state to the worker."""
        state = self._service.controller.state
        if self._told is None or state.site is not self._told[0] or state.revocations is not self._told[1]:
            self._told = state.site, state.revocations
            self.send(f.SiteSettings(state.site, dict(state.revocations)))
        self._tell_current()

    def _tell_current(self) -> None:
        current = f.RevisionUpdate(self._core.revision, self._core.leader_channel)
        if current != self._current:
            self._current = current
            self.send(current)

    def fail(self, number: int, error: Problem | Redirect) -> None:
        """Report a failure."""
        self._tell_current()
        if isinstance(error, Redirect):
            self.send(f.RedirectResponse(number, error.base))
            return
        try:
            self.send(f.FailureResponse(number, error.status, error.view, error.headers))
        except ValueError as wrong:  # text that cannot be encoded, such as half a surrogate pair
            LOGGER.error("a response cannot be encoded", exc_info=wrong)
            fault = internal_error(FAULT_REMEDY, "unknown")
            self.send(f.FailureResponse(number, fault.status, fault.view, fault.headers))

    # From the worker

    def receive(self, frame: f.FromWorker) -> None:
        if isinstance(frame, f.Greeting):
            if frame.version != f.WORKER_VERSION:
                raise ChannelProtocolError(
                    f"it uses protocol version {frame.version}, and this replica {f.WORKER_VERSION}"
                )
            self.greeted = True
            self._workers.count_serving()
            return
        if not self.greeted:
            raise ChannelProtocolError("a frame came before the greeting")
        match frame:
            case f.CommandReceived():
                self._order(frame)
            case f.RequestReceived():
                self._ask(frame)
            case f.RequestAbandoned():
                if (request := self._requests.get(frame.number)) is not None:
                    request.gone.set()
                    request.written.set()
            case f.ChunkWritten():
                if (request := self._requests.get(frame.number)) is not None:
                    request.written.set()
            case f.ProgramConnected():
                self._check_room()
                if frame.program in self._programs:
                    raise ChannelProtocolError(f"program {frame.program} exists already")
                shown = self._certificate(frame.role, frame.name, frame.serial)
                self._programs[frame.program] = _Program(self._core.program(shown), shown)
            case f.ProgramDisconnected():
                if (program := self._programs.pop(frame.program, None)) is not None:
                    program.local.leave()
            case f.ResponsesObserved():
                for route, status, duration_s, code in frame.answers:
                    if (route != "none" and route not in OPERATIONS) or not 100 <= status <= 599 or len(code) > 64:
                        raise ChannelProtocolError("it reports a response with an invalid route, status or code")
                    self._core.observe(route, status, duration_s, code)

    def _check_room(self) -> None:
        if len(self._requests) + self.commands + len(self._programs) >= 2 * f.OUTSTANDING_MAX:
            raise ChannelProtocolError(f"more than {2 * f.OUTSTANDING_MAX} of its requests wait")

    def _certificate(self, role: Role, name: str, serial: str, through: str = "") -> PeerCertificate:
        identity = self._identities.get((role, name))
        if identity is None:
            if len(self._identities) > f.OUTSTANDING_MAX:
                self._identities.clear()
            identity = self._identities[role, name] = Identity(role, name)
        return PeerCertificate(identity, serial, NEVER, revocable_as(identity, serial, through), through)

    def _revocation_problem(self, shown: PeerCertificate) -> Problem | None:
        revocations: Mapping[str, Any] = self._service.controller.state.revocations
        for key in shown.revocable_as if revocations else ():
            if key in revocations:
                words = f"{key} was revoked by {revocations[key].by}"
                return Problem(401, "not_identified", words, "use another certificate")
        return None

    def _order(self, frame: f.CommandReceived) -> None:
        program = self._programs.get(frame.program)
        if program is None:
            raise ChannelProtocolError(f"program {frame.program} does not exist")
        self._check_room()
        try:
            if (revoked := self._revocation_problem(program.shown)) is not None:
                raise revoked
            if self._elsewhere is not None:
                raise self._elsewhere
            try:
                request = _command_decoder.decode(frame.content)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise body_problem(error) from error
            asker = _RemoteCommandClient(self, frame.number)
            try:
                program.local.take(request, frame.content, frame.prepared, asker)
            except (Problem, Redirect) as error:
                asker.report_failure(error)
        except (Problem, Redirect) as error:
            self.fail(frame.number, error)

    def _ask(self, frame: f.RequestReceived) -> None:
        self._check_room()
        operation = OPERATIONS.get(frame.operation)
        if operation is None or frame.number in self._requests:
            raise ChannelProtocolError(f"request {frame.number} of {frame.operation[:64]!r} is invalid")
        request = self._requests[frame.number] = _Request()
        task = self._loop.create_task(self._answer(frame, request))
        request.task = task

    async def _answer(self, frame: f.RequestReceived, request: _Request) -> None:
        number = frame.number
        try:
            try:
                outcome = await self._core.respond(self._build_request(frame, request))
            except (Problem, Redirect) as error:
                self.fail(number, error)
                return
            if isinstance(outcome, Response):
                await self._respond(number, outcome)
            else:
                await self._stream(number, request, outcome)
        except Exception:
            LOGGER.exception("a response to an API worker failed")
            self.fail(number, internal_error("report it with the replica's log", "unknown"))
        finally:
            del self._requests[number]

    def _build_request(self, frame: f.RequestReceived, request: _Request) -> ApiRequest:
        operation = OPERATIONS[frame.operation]
        shown = self._certificate(frame.role, frame.name, frame.serial, frame.through)
        if (revoked := self._revocation_problem(shown)) is not None:
            raise revoked
        permit(shown.identity, operation.roles, f"{operation.method} {operation.path}")
        body = None
        prepared = frame.prepared
        if operation.has_body and (prepared is None or not prepared.fits(self._core.site)):
            body = decode(frame.content, operation.request)
        return ApiRequest(
            operation,
            shown,
            frame.params,
            frame.query,
            body,
            frame.content,
            prepared,
            frame.last_event_id,
            request.gone,
        )

    async def _respond(self, number: int, response: Response) -> None:
        """Send a response, a large one in slices."""
        content = response.content
        first = content[: f.PART_BYTES_MAX]
        left_bytes = len(content) - len(first)
        self.send(f.ResponseStart(number, response.status, response.revision, response.content_type, first, left_bytes))
        if not left_bytes:
            return
        work = self._service.slices.work(number)
        for begin in range(len(first), len(content), f.PART_BYTES_MAX):
            await self.room.wait()
            await work.take(0, size_bytes=BYTES_PER_SLICE)
            self.send(f.ResponseChunk(number, content[begin : begin + f.PART_BYTES_MAX]))

    async def _stream(self, number: int, request: _Request, stream: Stream) -> None:
        """Send a stream, each chunk after the worker has written the previous one."""
        try:
            self.send(f.StreamStart(number, stream.revision, stream.content_type))
            async with aclosing(stream.parts) as parts:
                async for part in parts:
                    if request.gone.is_set():
                        return
                    request.written.clear()
                    self.send(f.StreamChunkSent(number, part.payload, part.farewell))
                    await request.written.wait()
                    if request.gone.is_set():
                        return
            self.send(f.StreamEnd(number))
        except ConnectionError:
            pass  # the subscriber has disconnected
        finally:
            stream.release()


class _Request:
    """A worker's pending request."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        """Set when its client disconnects."""
        self.written = asyncio.Event()
        """Set when the last chunk of its stream was written."""
        self.task: asyncio.Task[None] | None = None


class _Program:
    """A channel connection at a worker."""

    def __init__(self, local: Program, shown: PeerCertificate) -> None:
        self.local = local
        self.shown = shown


class _RemoteCommandClient:
    """Receiver of the result of a worker's command."""

    __slots__ = ("_done", "_link", "_number")

    def __init__(self, link: WorkerLink, number: int) -> None:
        self._link = link
        self._number = number
        self._done = False
        link.commands += 1

    def is_gone(self) -> bool:
        return self._done

    def report_settled(self, revision: int, job: int) -> None:
        self._end()
        self._link.send(f.CommandSettled(self._number, revision, job))

    def report_failure(self, error: Problem | Redirect) -> None:
        self._end()
        self._link.fail(self._number, error)

    def _end(self) -> None:
        self._done = True
        self._link.commands -= 1
