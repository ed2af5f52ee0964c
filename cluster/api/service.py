"""Shared parts of all handlers: linearizable reads, command settlement, and the controller behind them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import msgspec

from forebay.cluster.api import request_decoding, web
from forebay.cluster.api.history_service import HistoryService, LedgerRecords
from forebay.cluster.api.metrics import MetricsRegistry
from forebay.cluster.api.provider_validation import ProviderValidation
from forebay.cluster.api.render import Verdicts
from forebay.cluster.api.sinks import EventSinks, LedgerSource, SinkClient
from forebay.cluster.api.statuses import LiveValues, Statuses
from forebay.cluster.api.traces import Tracer
from forebay.cluster.api.web import (
    COMMAND_TOO_OLD,
    COMMIT_WAIT_S,
    LONG_CHARACTERS,
    Problem,
    Redirect,
    Stream,
    UserLimits,
    actor_of,
    bad_request,
    no_leader,
    outcome_unknown,
    permission_denied,
    permit,
    queue_full,
    rejection_problem,
    too_busy,
    too_many_answers,
    unknown_job,
)
from forebay.cluster.config import Config
from forebay.cluster.consensus import Role as RaftRole
from forebay.cluster.schemas import PEOPLE, ApiOperation, BulkCommand, bytes_of, instant_in, requests
from forebay.cluster.security import Identity, Peers, Role
from forebay.cluster.server import (
    Answer,
    Asker,
    CannotDecide,
    Controller,
    JournalFull,
    NotLeading,
    OutcomeUnknown,
    QueueFull,
    Settlement,
    TooManyAnswers,
    Unavailable,
)
from forebay.cluster.server.tlog import (
    LOG_DIRECTORY,
    NOBODY,
    SIGNING_DIRECTORY,
    Cosigning,
    CountedHistories,
    Counting,
    LogPeers,
    Publisher,
    Signer,
    Witness,
    origin_of,
)
from forebay.cluster.system import Address
from forebay.cluster.system.eventloop import Identities, SlicedWork, Slices
from forebay.replica.decide import job_of_task
from forebay.replica.fold import find_reply, may_be_forgotten, may_cache_reply
from forebay.replica.messages import CONTROLLER, Command, RecordHistories, Request, SubmitJob
from forebay.replica.model import Tasks
from forebay.replica.state import State
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant, is_in_session

COMMAND_AGE_S_MAX = 300
"""Largest age of a command ID by the leader's clock, seconds: more than any retry takes."""

COMMAND_AHEAD_S_MAX = 10
"""Largest lead of a command ID over the leader's clock, seconds. After a cached reply is dropped, no older ID may be
accepted. Replies are kept for RECEIPTS_KEPT_S, longer than this, LEADER_LATE_S_MAX and COMMAND_AGE_S_MAX together.
"""

LEADER_LATE_S_MAX = 60
"""Largest assumed delay of a new leader's clock, seconds, if a majority's clocks leave it open.

With one replica down, a single clock an hour ahead must not admit an ID of that time.
"""

EXTERNAL_JOB_COLON = ":"
"""Occurs only in names of external jobs: `slurm:42`."""

NO_ID = b""

_Read = TypeVar("_Read")


RequestBody = TypeVar("RequestBody")
ResponseView = TypeVar("ResponseView")
CommandBody = TypeVar("CommandBody", bound=requests.Command)


class ApiCall(msgspec.Struct, Generic[RequestBody]):
    """Authenticated, decoded request, and the replica's service."""

    service: ApiService
    asked: web.ApiRequest

    @property
    def operation(self) -> ApiOperation[RequestBody, Any]:
        """Requested operation."""
        return self.asked.operation

    @property
    def identity(self) -> Identity:
        """Identity of the caller."""
        return self.asked.identity

    @property
    def params(self) -> dict[str, str]:
        """Path parameters."""
        return self.asked.params

    @property
    def query(self) -> dict[str, str]:
        """Query parameters."""
        return self.asked.query

    @property
    def body(self) -> RequestBody:
        """Request body; for a decoded submit, use `submission`."""
        body: RequestBody = self.asked.body
        return body

    @property
    def command_id(self) -> str:
        """Command ID of the request."""
        prepared = self.asked.prepared
        return prepared.command_id if prepared is not None else str(self.asked.body.command_id)

    async def submission(self) -> tuple[SubmitJob, tuple[str, ...]]:
        """Return the submit's command and its warnings.

        Raises:
            Problem: The submit is rejected.
        """
        site, prepared = self.service.controller.state.site, self.asked.prepared
        if prepared is not None and prepared.fits(site):
            return prepared.result()
        if self.asked.body is None:
            raise too_busy("the site's configuration has just changed")
        return await self.service.reading(
            self.asked.body, request_decoding.submission, self.asked.body, self.identity, site
        )

    @property
    def stale(self) -> bool:
        """Return whether the caller accepts this replica's own state, however old."""
        return self.query.get("stale") == "ok"

    @property
    def work(self) -> SlicedWork:
        """A new handle for the caller's sliced work (`cluster.system.eventloop.slices`)."""
        return self.service.slices.work(self.identity)

    async def state(self) -> State:
        """Return this replica's own state if `stale=ok`, else a linearizable one."""
        return self.service.controller.state if self.stale else await self.service.current()

    def integer(self, name: str, default: int, *, least: int, most: int) -> int:
        """Return a number from the query.

        Raises:
            Problem: 400, if the text is no number or outside the bounds.
        """
        text = self.query.get(name)
        if text is None:
            return default
        if not text.isascii() or not text.isdigit() or len(text) > 19 or not least <= int(text) <= most:
            raise bad_request(f"{name} is {text!r}", f"use a number from {least} to {most}", f"query {name}")
        return int(text)

    def job_reference(self) -> tuple[int, Tasks]:
        """Return the job or array in the path, and its tasks: `12`, `12_3`, `12_[1-4]`.

        `slurm:42` means the last epoch of an external job.

        Raises:
            Problem: 400, if the reference is invalid; 404, if the external job does not exist.
            Redirect: This replica cannot tell which epoch is the last one.
        """
        named = self.params["id"]
        if EXTERNAL_JOB_COLON not in named:
            return request_decoding.job_reference(named, "job id")
        controller = self.service.controller
        if not controller.leads:
            raise self.service.elsewhere(controller.engine.leader)
        return self._external_job_in(controller.state, named), None

    def _external_job_in(self, state: State, named: str) -> int:
        known = state.external_jobs.get(named)
        if known is None:
            raise unknown_job(f"there is no external job {named!r:.120} in the state")
        return known.job

    def one_reference(self) -> tuple[tuple[int, Tasks], str]:
        """Return the job in the path with its task, or else the name of an external job, whether it exists or not.

        Raises:
            Problem: 400, if the reference is invalid or names several tasks.
        """
        named = self.params["id"]
        if EXTERNAL_JOB_COLON in named:
            return (0, None), named
        job_id, tasks = self.job_reference()
        if tasks is not None and len(tasks) > 1:
            raise bad_request(
                "several tasks are named, and this request takes one",
                f"write for example {job_id}_{tasks[0]}",
                "job id",
            )
        return (job_id, tasks), ""

    def job_in(self, state: State) -> int:
        """Return the single job in the path at `state`.

        Raises:
            Problem: 400 for several jobs, 404 for none, 403 for an external job of another scheduler.
        """
        (job_id, tasks), external_job = self.one_reference()
        if external_job:
            job_id = self._external_job_in(state, external_job)
        if self.identity.role is Role.SCHEDULER:
            job = state.jobs.get(job_id)
            if job is None or job.external_job is None or job.external_job.scheduler != self.identity.name:
                raise permission_denied(
                    f"{self.identity} may read only its own external jobs", f"name the job {self.identity.name}:JOB"
                )
            return job_id
        found = job_of_task(state, job_id, tasks)
        if found is None and tasks is not None:
            raise unknown_job(f"array {job_id} has no task {tasks[0]}, or it is no longer in the state")
        return job_id if found is None else found


class Reply(msgspec.Struct, Generic[ResponseView]):
    """Response of a handler: a view to encode, or bytes with their type."""

    revision: int
    view: ResponseView | None = None
    content: bytes | None = None
    content_type: str = "application/json"


def is_long(request: requests.Request) -> bool:
    """Return True if decoding a request would block the loop for too long."""
    return request_decoding.text_characters(request) > LONG_CHARACTERS


def encode_view(view: Any) -> Any:
    """Encode a part of a response as JSON, within the slice that built it."""
    return msgspec.Raw(msgspec.json.encode(view))


Handler = Callable[[ApiCall[Any]], Awaitable[Reply[Any] | Stream]]


class Route(NamedTuple):
    """An operation and its handler."""

    operation: ApiOperation[Any, Any]
    handler: Handler


def handles(
    operation: ApiOperation[RequestBody, ResponseView],
) -> Callable[[Callable[[ApiCall[RequestBody]], Awaitable[Reply[ResponseView] | Stream]]], Route]:
    """Return a decorator that makes a route of a handler with the operation's types."""
    return lambda handler: Route(operation, handler)


class ApiService:
    """Services of the controller for handlers."""

    def __init__(
        self,
        controller: Controller,
        *,
        version: str,
        fail: Callable[[BaseException], NoReturn],
        peers: Peers | None = None,
        log_peers: LogPeers = NOBODY,
    ) -> None:
        """`fail` stops the replica; `peers` watches its connections, shared with the links to other replicas.

        `log_peers` are asked to sign checkpoints, and the witnesses through them.
        """
        self.peers = peers or Peers(controller.config.cluster.id, controller.clock)
        self.peers.follow(lambda: controller.state.revocations)
        self.controller = controller
        self.config = controller.config
        self.clock = controller.agreed
        self.version = version
        self.fail = fail
        self.slices = Slices()
        """All long work is sliced here, so that one iteration of the loop runs at most one slice."""
        self.verdicts = Verdicts(controller.applied_log)
        self.identities = Identities(controller.clock)
        self.providing = ProviderValidation(controller.config.provider_here())
        self.limits = UserLimits(
            controller.config.limits, controller.clock, state=lambda: self.controller.state, work=self.slices.work
        )
        self.is_private = False
        """True if other users' data is private, regardless of the state."""
        self.then: Instant | None = None
        """Time of the past state; None for the current one."""
        self.live: LiveValues | None = None
        """Values of another process's replica, in place of this one's; None: this process is the replica."""
        self.records: LedgerRecords | None = None
        """The ledger's records; only in the history service's process."""
        self._log_peers = log_peers
        self.past = HistoryService(controller)
        """History service, a process started with the replica or with the first query."""
        self.tracer = Tracer(controller)
        """Trace exporter, a process of its own if a collector is configured."""
        self.statuses = Statuses(controller)
        """Statuses of the other replicas."""
        self.sink_client = SinkClient(controller.clock)
        self.sinks = EventSinks(
            self.config.sinks,
            state=lambda: controller.state,
            leads=lambda: controller.leads,
            submit=lambda request: controller.submit(request),
            source=self._source_of,
            post=self.sink_client.post,
            clock=controller.agreed,
        )
        """Event sinks, active while this replica leads."""
        self.metrics = MetricsRegistry(controller, self.past, self.tracer, self.sinks, lambda: self.publisher)
        self.event_streams_of: Counter[Identity] = Counter()
        """Open event streams by reader."""
        self.digests = asyncio.Semaphore(1)
        self.scrapes = asyncio.Semaphore(1)
        """Bounds the threads that render metrics."""
        self._readers = asyncio.Semaphore(1)
        self.stopping = asyncio.Event()
        self.document = functools.lru_cache(maxsize=1)(lambda: msgspec.json.encode(web.document(version)))
        """Returns the OpenAPI document."""

    def _source_of(self, sink: str) -> LedgerSource:
        controller = self.controller
        work = functools.partial(self.slices.work, f"sink {sink}")
        return LedgerSource(lambda: controller.state, controller.applied_log, controller.ledger, work)

    def renew(self, config: Config) -> None:
        """Apply a new configuration: user limits, witnesses, trace collector and event sinks."""
        self.limits.renew(config.limits)
        self.sink_client.renew()
        self.sinks.renew(config.sinks)
        self.tracer.renew(config.traces)
        witnesses = (Witness(one.name, one.verifier) for one in config.witnesses)
        self.publisher.cosigning.renew(witnesses, config.witnesses_needed)

    def wake(self) -> None:
        """Wake waiting requests, because this replica is stopping."""
        self.stopping.set()
        self.statuses.stop()
        self.controller.orders.wake_all()
        self.controller.external_jobs.wake_all()

    @functools.cached_property
    def publisher(self) -> Publisher:
        """Publisher of signed checkpoints; StorageRefused on first use."""
        controller, past = self.controller, self.past
        home = self.config.storage.directory / controller.name
        signer = Signer(home / SIGNING_DIRECTORY, origin_of(self.config.cluster.id, controller.incarnation))
        signer.check_held(controller.journal.last_index)
        return Publisher(
            signer,
            home / LOG_DIRECTORY,
            name=controller.name,
            leads=lambda: controller.leads,
            applied_index=lambda: controller.applied_index,
            tree_size=lambda: past.progress.tree_size,
            root=past.root,
            peers=lambda: tuple(peer.name for peer in controller.engine.peers()),
            asked=self._log_peers,
            cosigning=Cosigning(
                (Witness(one.name, one.verifier) for one in self.config.witnesses),
                self.config.witnesses_needed,
                submit=self._log_peers.submit,
                consistency=past.consistency,
                applied_index=lambda: controller.applied_index,
                clock=controller.clock,
            ),
            counting=Counting(self._count, self._record),
            clock=controller.clock,
            fail=self.fail,
        )

    async def _count(self, size: int) -> tuple[CountedHistories, bytes]:
        found = await self.past.counts(size)
        return CountedHistories(found.jobs, found.root), found.recorded

    def _record(self, command: RecordHistories) -> None:
        with contextlib.suppress(QueueFull, NotLeading):
            answer = self.controller.submit(Request(b"", CONTROLLER, command))
            # The next leader counts again.
            answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())

    @property
    def event_streams(self) -> int:
        """Number of open event streams."""
        return self.event_streams_of.total()

    async def current(self) -> State:
        """Return a linearizable state on the leader; a follower redirects to it.

        Raises:
            Redirect: Another replica leads.
            Problem: 503, if no replica leads.
        """
        try:
            return await self.controller.current()
        except NotLeading as error:
            raise self.elsewhere(error.leader) from error
        except Unavailable as error:
            raise no_leader(str(error)) from error

    async def lead(self) -> None:
        """Wait briefly until this replica may decide.

        Raises:
            Redirect: Another replica leads.
            Problem: 503, if no replica leads.
        """
        engine = self.controller.engine
        if self.controller.leads and self.controller.state.revision:
            return
        if engine.role != RaftRole.LEADER:
            raise self.elsewhere(engine.leader)
        await self.current()
        if not self.controller.state.revision:
            raise no_leader("the cluster is being founded")

    def elsewhere(self, leader: str | None) -> Redirect | Problem:
        """Return the redirect to the leader, or the error without one."""
        if leader is None or leader == self.controller.name:
            return no_leader()
        api = self.controller.membership.api_of(leader)
        if api is None:
            return no_leader(f"the leader {leader!r} is not in this replica's configuration")
        return Redirect(Address.parse(api).url)

    # Commands

    def check_age(self, identity: Identity, command_id: str) -> bytes:
        """Return the command ID as bytes.

        A session's ID contains no time; its owner is checked when the command is decided.

        Raises:
            Problem: 400, if the ID is invalid, or new and too far from the cluster's time.
        """
        try:
            found = bytes_of(command_id)
        except ValueError as error:
            raise bad_request(str(error), "use an ID made by the client library", "command_id") from error
        if is_in_session(found):
            return found
        age_s = (self.clock.of_clients() - instant_in(found)) / MICROSECONDS_PER_SECOND
        if age_s < -COMMAND_AHEAD_S_MAX:
            may_be_late_s = (self.clock.at_most() - self.clock.of_clients()) / MICROSECONDS_PER_SECOND
            age_s = min(0.0, age_s + min(may_be_late_s, LEADER_LATE_S_MAX))
        is_ahead = age_s < 0
        most_s = COMMAND_AHEAD_S_MAX if is_ahead else COMMAND_AGE_S_MAX
        if abs(age_s) > most_s and find_reply(self.controller.state, found) is None:
            if is_ahead and not self.clock.is_read:
                # All replicas were down, and the cluster's time is old. It follows a majority's clocks once they are
                # read.
                raise no_leader("the leader has not read the clocks of a majority yet")
            raise Problem(
                400,
                COMMAND_TOO_OLD,
                f"the command id was made {abs(age_s):.0f} s {'from now' if is_ahead else 'ago'} by the "
                f"cluster's time; at most {most_s} s are accepted",
                f"set the clock of the client's machine back by {abs(age_s):.0f} s, and repeat the command"
                if is_ahead
                else "check whether the command was executed; if not, send it with a new command id. If the id is "
                "new, compare the machines' clocks",
                "command_id",
                # Cached replies expire, so a resent command's outcome can no longer be determined.
                outcome="rejected" if is_ahead else "unknown",
            )
        return found

    def fenced_id(self, identity: Identity, command_id: str) -> bytes:
        """Return the ID of a command that is safe without a cached reply, or none if no reply can be cached for it.

        An agent must be accepted with any clock, even after a long disconnection. Its reports are fenced by attempts,
        and its registrations by instances: a repeated one is rejected or changes nothing.
        """
        try:
            found = self.check_age(identity, command_id)
        except Problem:
            return NO_ID
        state = self.controller.state
        if is_in_session(found) or may_be_forgotten(state, found) or not may_cache_reply(state, actor_of(identity)):
            return NO_ID
        return found

    def begin(self, identity: Identity, command_id: bytes, command: Command) -> Answer:
        """Queue a command.

        Raises:
            Redirect: Another replica leads.
            Problem: 429 or 503, if the command cannot be queued.
        """
        answer: Answer = asyncio.get_running_loop().create_future()
        self._queue(Request(command_id, actor_of(identity), command), answer)
        return answer

    def _queue(self, request: Request, asker: Asker) -> None:
        try:
            self.controller.queue(request, asker)
        except NotLeading as error:
            raise self.elsewhere(error.leader) from error
        except QueueFull as error:
            raise self.problem_of(error) from error

    async def reading(self, request: requests.Request, read: Callable[..., _Read], *arguments: Any) -> _Read:
        """Return the result of `read` for a request, for long ones in a thread, one at a time."""
        if not is_long(request):
            return read(*arguments)
        async with self._readers:
            return await asyncio.to_thread(read, *arguments)

    async def validate(self, identity: Identity, command_id: str, command: Command) -> None:
        """Have the site's provider validate a submit, if it has one.

        Raises:
            Problem: 400, with the provider's objection.
        """
        if isinstance(command, SubmitJob):
            await self.providing.validate(self.controller.state, self.check_age(identity, command_id), command)

    async def prepare(self, identity: Identity, request: BulkCommand) -> Command | None:
        """Return the command for `admit` if decoding is long or the provider must validate it.

        None if `admit` decodes it itself. Raises the same errors as `admit`.
        """
        wanted = self.providing.is_needed(self.controller.state)
        if not wanted and not is_long(request):
            return None
        permit(identity, PEOPLE, "send commands")
        command = await self.reading(
            request, request_decoding.bulk_command, request, identity, self.controller.state.site
        )
        if wanted:
            await self.validate(identity, request.command_id, command)
        return command

    def admit(
        self,
        identity: Identity,
        request: BulkCommand,
        asker: Asker,
        *,
        size_bytes: int,
        prepared: Command | None = None,
    ) -> Command:
        """Check and queue one command of a program.

        `size_bytes`: size as sent; `prepared`: result of `prepare`.

        The only path of bulk and channel commands to the proposer; it checks permission, content and the age of the ID.
        Rejections by the state arrive as the command's result.

        Raises:
            Redirect: Another replica leads.
            Problem: The command is rejected.
        """
        permit(identity, PEOPLE, "send commands")
        command = prepared or request_decoding.bulk_command(request, identity, self.controller.state.site)
        command_id = self.check_age(identity, request.command_id)
        if find_reply(self.controller.state, command_id) is None:
            self.limits.charge(identity, command, size_bytes)
        if isinstance(command, SubmitJob):
            self.providing.check_validated(self.controller.state, command_id, command)
        self._queue(Request(command_id, actor_of(identity), command), asker)
        return command

    def deadline(self) -> float:
        """Return the deadline of responses awaited from now on, in the loop's time."""
        return asyncio.get_running_loop().time() + COMMIT_WAIT_S

    async def finish(self, answer: Answer, deadline: float | None = None) -> Settlement:
        """Wait for the result.

        `deadline`: shared by all commands of a request, so that their waits do not add up.

        Raises:
            Problem: The command was rejected; 503, if its outcome is unknown.
        """
        try:
            async with asyncio.timeout_at(self.deadline() if deadline is None else deadline):
                # Shielded, because a command continues after its client disconnects.
                settled = await asyncio.shield(answer)
        except (OutcomeUnknown, TimeoutError, NotLeading, CannotDecide, QueueFull) as error:
            raise self.problem_of(error) from error
        if settled.rejection is not None:
            raise rejection_problem(settled.rejection)
        return settled

    def problem_of(self, error: BaseException) -> Problem | Redirect:
        """Convert the error of a command without a result; unexpected errors are raised again."""
        match error:
            case OutcomeUnknown() | TimeoutError():
                return outcome_unknown()
            case NotLeading():
                return self.elsewhere(error.leader)
            case JournalFull():
                remedy = (
                    "prune old history (`forebay audit retain`), raise map_size in [storage] on every replica and "
                    "restart them one at a time, or make room on the disks"
                )
                return Problem(507, "journal_full", str(error), remedy)
            case TooManyAnswers():
                return too_many_answers(str(error))
            case QueueFull():
                return queue_full()
            case CannotDecide():
                return Problem(
                    500,
                    "internal_error",
                    "the command could not be decided because of a fault in this release; nothing was changed",
                    "report it with the replica's log",
                )
        raise error

    async def settle(self, call: ApiCall[CommandBody], command: Command) -> Settlement:
        """Settle one command for the caller, under the request's command ID."""
        await self.lead()
        command_id = self.check_age(call.identity, call.command_id)
        if find_reply(self.controller.state, command_id) is None:
            self.limits.charge(call.identity, command, call.asked.size_bytes)
        return await self.finish(self.begin(call.identity, command_id, command))
