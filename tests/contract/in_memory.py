"""One replica in memory: requests of the HTTP API in, answers out, on a clock that is moved by hand.

Everything between the bytes of a body and the answer's record is the product's: routes, decoding, handlers, deciding,
folding, the scheduling index and its passes. Left out are sockets, consensus and storage: what is decided is committed
at once, each command as a batch of its own, each pass behind it likewise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import msgspec
from msgspec.structs import replace

from forebay.cluster.api.history_service.frames import (
    NO_JOB,
    EventPageQuery,
    EventPageReply,
    IndexProgress,
    JobRecord,
    PastQuery,
    PastReply,
    QueryFailure,
    RecordsQuery,
    RecordsReply,
    WhyReply,
)
from forebay.cluster.api.local_backend import handler_of
from forebay.cluster.api.past_reads import HandlerReader
from forebay.cluster.api.render.jobs import why_view
from forebay.cluster.api.render.reasons import JobVerdicts
from forebay.cluster.api.service import ApiCall, ApiService, Reply
from forebay.cluster.api.web.authentication import permit
from forebay.cluster.api.web.bodies import decode
from forebay.cluster.api.web.exchange import ApiRequest
from forebay.cluster.api.web.problems import Problem
from forebay.cluster.api.web.routing import check_query, find_operation
from forebay.cluster.config.limits import DEFAULT_LIMITS
from forebay.cluster.consensus import Role as RaftRole
from forebay.cluster.providers.interface import NO_LOCAL
from forebay.cluster.schemas.base import made_of
from forebay.cluster.schemas.command_ids import new_command_id
from forebay.cluster.security.identity import Identity, Role
from forebay.cluster.security.peers import PeerCertificate
from forebay.cluster.server.applied_log import AppliedLog
from forebay.cluster.server.liveness import AgentReport, Liveness, OrderWatch, Transfer
from forebay.cluster.server.pending import Asker, Settlement, resolve
from forebay.cluster.server.totals.jobs import TransferTotals
from forebay.replica.decide.arrays import job_of_task
from forebay.replica.fold.apply import apply_batch
from forebay.replica.fold.dedup_cache import find_reply, look_up_reply
from forebay.replica.messages import commands as c
from forebay.replica.messages.entries import Batch, Entry
from forebay.replica.messages.events import jobs_of
from forebay.replica.scheduler.index import SchedulingIndex
from forebay.replica.scheduler.scheduling_cycle import run_cycle
from forebay.replica.state.state import EMPTY, State
from forebay.replica.values.errors import Rejection
from forebay.replica.values.units import NEVER, Instant, Revision
from forebay.replica.views.jobs import buffer_word
from forebay.replica.views.orders import orders_for
from forebay.wal.codec import decode_batch, encode_batch
from tests.cluster.transitions import transition_of
from tests.replica.world import START, World

JOBS_INDEXED = 1_000_000
PASSES_MAX = 64
"""Passes behind one command, count: a plan settles after two or three."""

UIDS = {"ada": 20_001, "ben": 20_002, "cyd": 20_003, "root": 0}
"""Accounts of every machine that the day is repeated on."""


class Answer(NamedTuple):
    """Status and body of an answer, as JSON would give it back."""

    status: int
    body: Any


class Timeline:
    """All states that there were, in place of a historian: what it must answer, by looking at each of them."""

    progress = IndexProgress(0, 0, 0, 0)
    has_present = False

    def __init__(self) -> None:
        self._settled: list[tuple[Batch, State]] = []

    def append(self, batch: Batch, after: State) -> None:
        """Note a batch of one command, and the state after it."""
        self._settled.append((batch, after))

    def records(self, asked: RecordsQuery) -> RecordsReply:
        found = [record for batch, after in self._settled for record in records_of(asked.job, batch, after)]
        return RecordsReply(tuple(found[: asked.limit]), True)

    def event_page(self, asked: EventPageQuery) -> EventPageReply:
        raise AttributeError("pages of events are not of this house")

    def _state(self, revision: int, at: Instant) -> State:
        states = [
            after for batch, after in self._settled if (after.revision <= revision if revision else batch.at <= at)
        ]
        return states[-1] if states else EMPTY

    async def read_past(
        self,
        who: Identity,
        operation: str,
        params: dict[str, str],
        query: dict[str, str],
        *,
        revision: int,
        at: Instant,
        is_private: bool,
    ) -> PastReply | QueryFailure:
        state, whose = self._state(revision, at), (str(who.role), who.name)
        asked = PastQuery(0, 0, revision, at, operation, params, query, *whose, is_private)
        # A historian has no loop of its own around it.
        with closing(HandlerReader()) as reader:
            return await asyncio.to_thread(reader.past, asked, state)

    async def why(
        self,
        job: int,
        who: object,
        *,
        revision: int = 0,
        at: Instant = NEVER,
        tasks: tuple[int, ...] | None = None,
        external_job: str = "",
    ) -> WhyReply | QueryFailure:
        state = self._state(revision, at)
        found = (
            state.external_jobs[external_job].job
            if external_job in state.external_jobs
            else job_of_task(state, job, tasks)
        )
        if found is None or found not in state.jobs:
            return QueryFailure(0, NO_JOB, state.revision, f"there was no job {job} at revision {state.revision}")
        asked = state.jobs[found]
        view = why_view(state, found, JobVerdicts(state).of(found))
        return WhyReply(0, view, asked.request.user, "" if asked.external_job is None else asked.external_job.scheduler)


def records_of(job_id: int, batch: Batch, after: State) -> Iterator[JobRecord]:
    """Yield what a historian must say of a batch of one command and a job, by a walk over the state after it."""
    (entry,) = batch.entries
    events = tuple(event for event in entry.events if job_id in jobs_of(event))
    if not events:
        return
    job = after.jobs.get(job_id)
    data = encode_batch(Batch(batch.base, batch.at, (replace(entry, events=events),)))
    if job is None:
        yield JobRecord(int(after.revision), data, "", None, 0, "None")
    else:
        word, reason = buffer_word(after, job_id), JobVerdicts(after).reason(job_id)
        yield JobRecord(int(after.revision), data, job.state.name, word, job.attempt, reason)


class Accounts:
    """The name service of every machine that the day is repeated on."""

    async def uids(self, names: Iterable[str]) -> dict[str, int | None]:
        return {name: UIDS.get(name) for name in names}


class Unasked:
    """A provider that finds every request valid, in place of one that is asked in processes of its own."""

    def is_needed(self, state: State) -> bool:
        return False

    async def validate(self, state: State, command_id: bytes, command: c.SubmitJob) -> None:
        pass

    def check_validated(self, state: State, command_id: bytes, command: c.SubmitJob) -> None:
        pass


class InMemory(World):
    """A world with the API in front of it. Requests are sent one after the other, inside of a running loop."""

    def __init__(self, **founding: Any) -> None:
        self._index: SchedulingIndex | None = None
        self._entries = 0
        self.timeline = Timeline()
        self.applied_log = AppliedLog(
            SimpleNamespace(),  # type: ignore[arg-type]  # only asked for what is no longer in memory
            SimpleNamespace(first_index=1),  # type: ignore[arg-type]
            index=0,
            revision=Revision(0),
        )
        self.at = START
        self.liveness = Liveness(self)
        self.orders_watch = OrderWatch(Revision(0))
        self.transfer_totals = TransferTotals()
        super().__init__(**founding)
        self.service = ApiService(self._controller(), version="test", fail=self._fail)
        self.service.identities = Accounts()  # type: ignore[assignment]
        self.service.providing = Unasked()  # type: ignore[assignment]
        self.service.past = self.timeline  # type: ignore[assignment]
        self.service.records = self.timeline
        self._ids = 0

    # The clock

    def now(self) -> Instant:
        return self.at

    def of_clients(self) -> Instant:
        return self.at

    def monotonic_s(self) -> float:
        return (self.at - START) / 1_000_000

    def advance(self, seconds: float) -> None:
        """Let time pass, with a scheduling pass at each instant at which one could do something."""
        until = Instant(self.at + int(seconds * 1_000_000))
        for _ in range(10_000):
            due = self._indexed().next_due(self.at)
            if due is None or due > until:
                break
            self.at = Instant(max(due, self.at + 1))
            self.run_pass()
        self.at = until
        self.run_pass()

    # What is decided is committed at once

    def commit(self, entry: Entry) -> None:
        before = self.state
        data = encode_batch(Batch(Revision(before.revision), self.at, (entry,)))
        # Through the bytes of the ledger: what cannot be read back as it was is seen.
        batch = decode_batch(data)
        after = apply_batch(before, batch)
        assert after is not None
        self.state, self.at = after, Instant(after.at)
        self._entries += 1
        self.ledger.append(batch)
        applied = transition_of(before, after, batch, index=self._entries)
        self.applied_log.applied(applied)
        self.timeline.append(batch, after)
        self.orders_watch.applied(applied)
        for node in after.nodes:
            if orders_for(before, node) != orders_for(after, node):
                # Else its agent would hear of them when its poll ends.
                assert self.orders_watch.changed_since(node, before.revision), (node, batch)
        self.transfer_totals.applied(applied)
        if self._index is not None:
            self._index.advance(after, [event for one in batch.entries for event in one.events])

    def run_pass(self) -> None:
        if not self.state.feature_level:
            return
        for _ in range(PASSES_MAX):
            events = run_cycle(self._indexed(), self.at)
            if not events:
                return
            self.commit_pass(events)
        raise AssertionError(f"the scheduler still finds changes after {PASSES_MAX} cycles")

    def _indexed(self) -> SchedulingIndex:
        if self._index is None or self._index.state is not self.state:
            self._index = SchedulingIndex(self.state)
        while not self._index.prepare(JOBS_INDEXED):
            pass
        return self._index

    # What handlers ask

    def _controller(self) -> Any:
        house = self

        class Controller(SimpleNamespace):
            @property
            def state(self) -> State:
                return house.state

            @property
            def applied_index(self) -> int:
                return house.applied_log.last_index

        return Controller(
            name="r1",
            config=SimpleNamespace(
                provider_here=lambda: NO_LOCAL, cluster=SimpleNamespace(id="test"), limits=DEFAULT_LIMITS, sinks=()
            ),
            clock=self,
            agreed=self,
            applied_log=self.applied_log,
            liveness=self.liveness,
            orders=self.orders_watch,
            transfer_totals=self.transfer_totals,
            engine=SimpleNamespace(role=RaftRole.LEADER, leader="r1"),
            leads=True,
            follow=lambda observer: None,
            current=self._current,
            queue=self._queue,
            node_watch=SimpleNamespace(heard=self.liveness.heard),
            polls=SimpleNamespace(prove=self._prove),
        )

    async def _current(self) -> State:
        return self.state

    async def _prove(self, node: str, said: AgentReport) -> None:
        rows = (made_of(row, Transfer, node=node, updated_at=self.at) for row in said.progress)
        self.liveness.progressed(node, rows, self.state)

    def _queue(self, request: c.Request, asker: Asker) -> None:
        known = look_up_reply(self.state, request) if request.id else None
        if isinstance(known, Rejection):
            resolve(asker, Settlement(Revision(self.state.revision), 0, known, self.state, False))
            return
        outcome: Rejection | int = 0
        if known is None:
            outcome = self.settle(request.command, request.actor, request.id or None)
            known = find_reply(self.state, request.id) if request.id else None
        if known is not None:
            resolve(asker, Settlement(known.revision, known.job, known.rejection, self.state, False))
        else:
            rejection = outcome if isinstance(outcome, Rejection) else None
            resolve(asker, Settlement(Revision(self.state.revision), 0, rejection, self.state, True))

    def _fail(self, error: BaseException) -> NoReturn:
        raise error

    # Requests

    def new_id(self) -> str:
        """Return an id as clients make it, the next one at this moment."""
        self._ids += 1
        return new_command_id(self, lambda count: self._ids.to_bytes(count, "big"))

    async def ask(self, who: str, method: str, target: str, body: Any = None) -> Answer:
        """Send a request as `role name`; a body that lacks command ids is given new ones."""
        role, _, name = who.partition(" ")
        identity = Identity(Role(role), name or role)
        path, _, query_text = target.partition("?")
        query = dict(pair.partition("=")[::2] for pair in query_text.split("&") if pair)
        try:
            operation, params = find_operation(method, path)
            permit(identity, operation.roles, f"{operation.method} {operation.path}")
            check_query(operation, query, list(query))
            sent = None
            if operation.has_body:
                sent = decode(msgspec.json.encode({} if body is None else body), operation.request)
            shown = PeerCertificate(identity, "", Instant(0))
            asked = ApiRequest(operation, shown, params, query, sent, b"", None, None, asyncio.Event())
            reply = await handler_of(asked)(ApiCall(self.service, asked))
        except Problem as problem:
            return Answer(problem.status, msgspec.to_builtins(problem.body))
        assert isinstance(reply, Reply), reply
        if reply.content is not None and "at" in query and reply.content_type == "application/json":
            return Answer(operation.status, msgspec.json.decode(reply.content))
        if reply.content is not None:
            return Answer(operation.status, reply.content.decode())
        return Answer(operation.status, msgspec.json.decode(msgspec.json.encode(reply.view)))
