"""Builder of the next State: folds a batch onto mutations of the maps it touches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from operator import attrgetter
from typing import Any

import immutables
from msgspec.structs import replace

from forebay.replica.messages import Actor, CachedReply
from forebay.replica.model import (
    ENDED,
    HOLDING,
    TRANSFERS,
    AbandonedBuffers,
    Account,
    AdmittedNode,
    Buffer,
    BufferInput,
    Consumed,
    Drill,
    DrillLock,
    ExternalJobEpochs,
    IllegalTransition,
    Job,
    JobRequest,
    JobTransfers,
    License,
    Mail,
    MovingKey,
    NameGroup,
    Node,
    Partition,
    PersistentBuffer,
    Pool,
    Qos,
    Rates,
    Recovery,
    Reservation,
    Revocation,
    Scheduler,
    SchedulingRules,
    SharedFilesystem,
    Site,
    Stage,
    TransferRules,
    UsageKey,
    destinations_of,
    job_names,
    moving_keys,
    next_state,
    occupied_slot,
    scheduling_class_of,
    usage,
    usage_of,
)
from forebay.replica.state.derived import is_finished, move_between_groups
from forebay.replica.state.session_replies import SessionsBuilder
from forebay.replica.state.single_replies import SingleRepliesBuilder
from forebay.replica.state.state import State
from forebay.replica.values import (
    MICROSECONDS_PER_SECOND,
    SESSION_USE_STEP_S,
    SESSION_WINDOW_MAX,
    Instant,
    LedgerViolation,
    Revision,
    client_ms,
    decode_session_command_id,
    is_in_session,
)

_SESSION_USE_STEP_US = SESSION_USE_STEP_S * MICROSECONDS_PER_SECOND

_DERIVED_FROM = frozenset({"state", "node", "mover", "order_at", "stuck", "external_job"})
"""Job fields on which the derived maps depend."""


class StateBuilder:
    """A State under modification. Its maps are mutated in place and finished into the next State in O(changes).

    A field is copied from the base on first access, because a batch of one command touches few of them: opening and
    closing mutations of all fields took a sixth of such a command's cost.
    """

    cluster_id: str
    name: str
    feature_level: int
    site: Site
    scheduling_rules: SchedulingRules
    transfer_rules: TransferRules
    next_job: int
    receipt_seconds: tuple[tuple[int, Revision], ...]
    oldest_receipt: int
    receipts_horizon_ms: int
    clock_set_back: int
    # Small maps that seldom change stay persistent maps, so that decisions can iterate over them.
    pools: immutables.Map[str, Pool]
    filesystems: immutables.Map[str, SharedFilesystem]
    nodes: immutables.Map[str, Node]
    persistent: immutables.Map[str, PersistentBuffer]
    accounts: immutables.Map[str, Account]
    qos: immutables.Map[str, Qos]
    licenses: immutables.Map[str, License]
    reservations: immutables.Map[str, Reservation]
    rates: immutables.Map[str, Rates]
    mails: immutables.Map[str, Mail]
    sink_marks: immutables.Map[str, int]
    partitions: immutables.Map[str, Partition]
    revocations: immutables.Map[str, Revocation]
    admitted: immutables.Map[str, AdmittedNode]
    abandoned: immutables.Map[str, AbandonedBuffers]
    schedulers: immutables.Map[str, Scheduler]
    drills: immutables.Map[int, Drill]
    drill_locks: immutables.Map[str, DrillLock]
    recoveries: immutables.Map[int, Recovery]
    consumed: Consumed
    # Mutations.
    jobs: immutables.MapMutation[int, Job]
    buffers: immutables.MapMutation[int, Buffer]
    external_jobs: immutables.MapMutation[str, ExternalJobEpochs]
    receipts: SingleRepliesBuilder
    sessions: SessionsBuilder
    """Sessions with their cached replies."""
    kept: immutables.MapMutation[Actor, int]
    transfers: immutables.MapMutation[int, JobTransfers]
    using: immutables.MapMutation[str, immutables.Map[int, bool]]
    held_bytes: immutables.MapMutation[str, int]
    unfinished: immutables.MapMutation[int, bool]
    finished: immutables.MapMutation[int, bool]
    on_node: immutables.MapMutation[str, immutables.Map[int, bool]]
    holders: immutables.MapMutation[str, immutables.Map[int, bool]]
    operations: immutables.MapMutation[int, int]
    arrays: immutables.MapMutation[int, immutables.Map[int, int]]
    named: immutables.MapMutation[str, immutables.Map[str, NameGroup]]
    use: immutables.MapMutation[UsageKey, int]
    destinations: immutables.MapMutation[str, immutables.Map[int, bool]]
    moving: immutables.MapMutation[MovingKey, int]

    def __init__(self, state: State) -> None:
        self._base = state
        self.revision: int = state.revision
        self.at: int = state.at

    def finish(self) -> State:
        """Return the next State, which shares untouched maps with the base. The builder must not be used afterwards."""
        taken = self.__dict__
        changes = {name: taken[name] for name in _TAKEN if name in taken}
        for name in _MUTATED:
            if name in taken:
                changes[name] = taken[name].finish()
        if "sessions" in taken:
            changes["sessions"], changes["answers"] = taken["sessions"].finish()
        return replace(self._base, revision=self.revision, at=self.at, **changes)

    @property
    def replies_kept(self) -> int:
        """Return the number of cached replies, as `State.replies_kept` does."""
        return len(self.receipts) + self.sessions.answers

    def session_reply(self, session: int, sequence: int) -> CachedReply | None:
        """Return a cached reply, as `State.session_reply` does."""
        return self.sessions.find(session, sequence)

    def job(self, job_id: int) -> Job:
        """Return a job that an event names.

        Raises:
            LedgerViolation: the job does not exist.
        """
        try:
            return self.jobs[job_id]
        except KeyError:
            raise LedgerViolation(f"an event names job {job_id}, which does not exist") from None

    def node(self, name: str) -> Node:
        """Return a node that an event names.

        Raises:
            LedgerViolation: the node does not exist.
        """
        try:
            return self.nodes[name]
        except KeyError:
            raise LedgerViolation(f"an event names node {name!r}, which does not exist") from None

    def put(self, job: Job, buffer: Buffer | None) -> None:
        """Store a job and its buffer, and update the derived maps.

        Most of a fold's work happens here. Unchanged values are detected inline, because a call for each map would cost
        more.
        """
        former = self.jobs.get(job.id)
        before = self.buffers.get(job.id)
        if job.request.options is not None or (former is not None and former.request.options is not None):
            self.count({} if former is None else usage_of(former, before), usage_of(job, buffer))
        was_there = former is not None and job.id in self.unfinished
        was_on, was_of = (former.node, former.mover) if former is not None and was_there else ("", "")
        former_stage = None if former is None else occupied_slot(former, before)
        self.jobs[job.id] = job
        stage = occupied_slot(job, buffer)
        if former_stage is not stage:
            self._count_turn(former_stage, stage)
        moved_by = former.staged_by if former is not None and former_stage in TRANSFERS else ""
        moves_by = job.staged_by if stage in TRANSFERS else ""
        if moved_by != moves_by:
            self._count_moving(job.request.user, moved_by, moves_by)
        was_named, is_named = former is not None and former.state not in ENDED, job.state not in ENDED
        if was_named is not is_named:
            self._keep_name(job, is_named)
        if buffer is not None and buffer is not before:
            held, holds = 0 if before is None else before.held_bytes, buffer.held_bytes
            if held != holds:
                self.hold(buffer.pool, holds - held)
                move_between_groups(
                    self.holders,
                    job.id,
                    before.pool if before is not None and held else "",
                    buffer.pool if holds else "",
                )
                if before is not None and not holds:
                    self._consume(job, before)
            self._count_use(job, before, buffer)
            self.buffers[job.id] = buffer
        over = not is_named and is_finished(job, buffer)
        was = former.request if former is not None and was_there else None
        if over or was is not job.request:
            self._keep_destinations(job, was, over=over)
        now_on, now_of = ("", "") if over else (job.node, job.mover)
        if was_on != now_on:
            move_between_groups(self.on_node, job.id, was_on, now_on)
        if was_of != now_of:
            move_between_groups(self.on_node, job.id, was_of, now_of)
        if was_there and not over:
            return
        into, out_of = (self.finished, self.unfinished) if over else (self.unfinished, self.finished)
        if job.id not in into:
            into[job.id] = True
            if job.id in out_of:
                del out_of[job.id]

    def _keep_destinations(self, job: Job, was: JobRequest | None, *, over: bool) -> None:
        """Index an unfinished job under its stage-out destinations, and remove it from those of its former request."""
        before = () if was is None else destinations_of(was)
        after = () if over else destinations_of(job.request)
        for path in before:
            if path not in after:
                move_between_groups(self.destinations, job.id, path, "")
        for path in after:
            if path not in before:
                move_between_groups(self.destinations, job.id, "", path)

    def _count_turn(self, before: Stage | None, after: Stage | None) -> None:
        for stage, difference in ((before, -1), (after, 1)):
            if stage is not None:
                count = self.operations.get(int(stage), 0) + difference
                if count:
                    self.operations[int(stage)] = count
                else:
                    del self.operations[int(stage)]

    def _count_moving(self, user: str, before: str, after: str) -> None:
        """Count a user's transfer on node `after` instead of `before`; "" is no node."""
        for node, difference in ((before, -1), (after, 1)):
            for key in moving_keys(user, node) if node else ():
                count = self.moving.get(key, 0) + difference
                if count:
                    self.moving[key] = count
                else:
                    del self.moving[key]

    def _keep_name(self, job: Job, is_there: bool) -> None:
        """Add the job to, or remove it from, the index of names."""
        user = job.request.user
        names = self.named.get(user)
        if is_there:
            self.named[user] = job_names.add_job(names, job.request.name, job.id)
        elif names is not None:
            names = job_names.remove_job(names, job.request.name, job.id)
            if names:
                self.named[user] = names
            else:
                del self.named[user]

    def rename(self, job: Job, name: str) -> None:
        """Index an unfinished job under another name; the caller changes its record."""
        user = job.request.user
        self.named[user] = job_names.add_job(
            job_names.remove_job(self.named[user], job.request.name, job.id), name, job.id
        )

    def _consume(self, job: Job, given_back: Buffer) -> None:
        """Add the usage of a buffer that has just released its space."""
        scheduling_class = scheduling_class_of(job.request)
        if scheduling_class is not None:
            self.consumed = usage.record_consumption(self.consumed, scheduling_class, given_back, self.at)

    def hold(self, pool: str, difference_bytes: int) -> None:
        """Change the held space of a pool by a difference.

        Raises:
            LedgerViolation: the pool would hold less than 0.
        """
        held = self.held_bytes.get(pool, 0) + difference_bytes
        if held < 0:
            raise LedgerViolation(f"pool {pool!r} would hold {held} bytes")
        if held:
            self.held_bytes[pool] = held
        elif pool in self.held_bytes:
            del self.held_bytes[pool]

    def change(self, job_id: int, buffer_input: BufferInput | None, **changes: Any) -> None:
        """Change fields of a job; with `buffer_input`, apply the input to its buffer."""
        job = replace(self.job(job_id), **changes)
        if buffer_input is None and _DERIVED_FROM.isdisjoint(changes):
            self.jobs[job_id] = job  # no derived map depends on these fields
            return
        buffer = self.buffers.get(job_id)
        if buffer_input is not None and buffer is not None:
            buffer = self.transition(buffer, buffer_input)
        self.put(job, buffer)

    def _count_use(self, job: Job, before: Buffer | None, buffer: Buffer) -> None:
        """Update the index of persistent buffers in use by the job."""
        asked = job.request.buffer
        was, uses = before is not None and before.state in HOLDING, buffer.state in HOLDING
        if was == uses or asked is None:
            return
        for name in dict.fromkeys(asked.uses):
            move_between_groups(self.using, buffer.job, name if was else "", name if uses else "")

    def transition(self, buffer: Buffer, buffer_input: BufferInput) -> Buffer:
        """Return the buffer after an input.

        Raises:
            LedgerViolation: the transition table has no row for it.
        """
        try:
            return replace(buffer, state=next_state(buffer.state, buffer_input), changed_at=Instant(self.at))
        except IllegalTransition as error:
            raise LedgerViolation(f"job {buffer.job}: {error}") from None

    def count(self, before: dict[UsageKey, int], after: dict[UsageKey, int]) -> None:
        """Replace `before` by `after` in the index of usage that counts against limits."""
        if before == after:
            return
        for key in before.keys() | after.keys():
            amount = self.use.get(key, 0) + after.get(key, 0) - before.get(key, 0)
            if amount:
                self.use[key] = amount
            elif key in self.use:
                del self.use[key]

    def settle(self, command_id: bytes, receipt: CachedReply) -> None:
        """Cache the reply to a command (law 6), and delete the replies that its program has acknowledged."""
        forgotten = 0
        if is_in_session(command_id):
            forgotten = self._settle_in_session(command_id, receipt)
        else:
            self.receipts.add(command_id, receipt)
            second, seconds = self.at // MICROSECONDS_PER_SECOND, self.receipt_seconds
            if not seconds or second > seconds[-1][0]:
                self.receipt_seconds = (*seconds, (second, Revision(receipt.revision)))
        self._count_kept(receipt.actor, 1 - forgotten)

    def _settle_in_session(self, command_id: bytes, receipt: CachedReply) -> int:
        try:
            said = decode_session_command_id(command_id)
        except ValueError as error:
            raise LedgerViolation(str(error)) from None
        sessions = self.sessions
        session = sessions.change(said.session)
        if session is None or session.actor != receipt.actor:
            raise LedgerViolation(f"command {command_id.hex()} was settled in a session that its actor does not have")
        sequence, acknowledged = said.sequence, session.acknowledged
        # A sequence number above the newest one was never settled and needs no lookup.
        if sequence > session.newest:
            session.newest = sequence
        elif sequence <= acknowledged or sequence in session.own:
            raise LedgerViolation(f"command {sequence} of session {said.session} was settled twice")
        forgotten = 0
        if said.acknowledged > acknowledged:
            last = min(said.acknowledged, acknowledged + SESSION_WINDOW_MAX)
            forgotten = sessions.drop(session, acknowledged + 1, last)
            session.acknowledged = said.acknowledged
        sessions.add(session, sequence, receipt)
        if self.at - session.used_at >= _SESSION_USE_STEP_US:
            session.used_at = Instant(self.at)
        return forgotten

    def end_session(self, number: int) -> None:
        """Delete a session and its cached replies.

        Raises:
            LedgerViolation: the session is not open.
        """
        session = self.sessions.end(number)
        if session is None:
            raise LedgerViolation(f"session {number} was ended, and is not open")
        self._count_kept(session.actor, -session.answers)

    def drop_replies(self, through: int) -> None:
        """Delete the cached replies to single commands settled up to a revision."""
        dropped = self.receipts.drop_through(through)
        for actor, count in dropped.of.items():
            self._count_kept(actor, -count)
        self.oldest_receipt = max(self.oldest_receipt, through + 1)
        self.receipts_horizon_ms = max(self.receipts_horizon_ms, client_ms(dropped.greatest_id))
        # Receipts of the second in which the deleted range ends start after that range.
        seconds = self.receipt_seconds if len(self.receipts) else ()
        nexts = [first for _, first in seconds[1:]]
        self.receipt_seconds = tuple(
            (second, max(first, Revision(through + 1)))
            for (second, first), following in zip_longest(seconds, nexts)
            if following is None or following > through + 1
        )

    def set_back_replies(self, at: Instant) -> None:
        """Limit the settlement times of cached replies to `at`, after the clock was set back.

        Later times would extend their retention.
        """
        second = at // MICROSECONDS_PER_SECOND
        self.receipt_seconds = tuple((min(second, settled), first) for settled, first in self.receipt_seconds)
        self.sessions.set_back(at)

    def _count_kept(self, actor: Actor, more: int) -> None:
        if not more:
            return
        count = self.kept.get(actor, 0) + more
        if count:
            self.kept[actor] = count
        else:
            del self.kept[actor]


class _LazyField:
    """A field of a builder, which is copied from the base at its first access and then a plain attribute."""

    def __init__(self, name: str, take: Callable[[Any], Any]) -> None:
        self._name = name
        self._take = take

    def __get__(self, builder: StateBuilder, owner: type[StateBuilder]) -> Any:
        found = builder.__dict__[self._name] = self._take(builder._base)
        return found


def _mutation_of(name: str) -> Callable[[State], Any]:
    return lambda base: getattr(base, name).mutate()


_OF_SESSIONS = ("sessions", "answers")
_FIELDS = [name for name in State.__struct_fields__ if name not in ("revision", "at", *_OF_SESSIONS)]
_MUTATED = [name for name in _FIELDS if "MapMutation" in StateBuilder.__annotations__[name] or name == "receipts"]
_TAKEN = [name for name in _FIELDS if name not in _MUTATED]

for _name in _TAKEN:
    setattr(StateBuilder, _name, _LazyField(_name, attrgetter(_name)))
for _name in _MUTATED:
    setattr(StateBuilder, _name, _LazyField(_name, _mutation_of(_name)))
StateBuilder.sessions = _LazyField("sessions", lambda base: SessionsBuilder(base.sessions, base.answers))  # type: ignore[assignment]

Facts = State | StateBuilder
"""Input of most decisions: a State, or a StateBuilder, so that a batch is decided without building a State for each
command.

A builder's large maps support lookup but not iteration.
"""
