"""Leader's queue: from a command to the entry that settles it, and back to the waiting caller.

Theory of operation
===================

Commands wait in one bounded queue. The pump takes as many as fit, decides them in order against the *speculative* state
(the applied state and all batches in flight), and proposes them as one batch (law 5). Up to `BATCHES_IN_FLIGHT_MAX`
batches are under way at once. Meanwhile the queue collects the next batch, so batches grow with the load, and a single
command is never delayed to fill a batch. When an entry is applied, its waiters are notified; an answer never precedes
the commit (law 4).

A command that takes long to decide and fold, such as the submit of the largest array, takes several turns of the loop.
Its batch is a private draft meanwhile, and other commands wait. A loss of leadership drops the draft.

A scheduling cycle follows each decision. While other batches are under way, the cycle is the last part of the batch. A
batch that is proposed alone does not wait for the cycle: the cycle runs while the peers write the batch, and its result
follows in a separate entry, for which the batch's waiters also wait. Waiters that only need the commit are notified
first; the cycle then runs afterwards, or with the next command or read.

A known command ID is answered from its cached reply, without an entry (law 6): at once if the reply is applied, or with
the batch in flight that contains the command.

When leadership is lost, the outcome of batches in flight is unknown here, and their waiters get OutcomeUnknown.
Commands that were only queued have certainly not happened, and get NotLeading. In both cases the client resends the
same ID.

If `decide` raises for a command, the command is answered with CannotDecide and not proposed. Otherwise one request that
clients resend to each new leader could stop all replicas (hazard H6). `decide` is pure, so nothing is left half done.
Any other exception in this module stops the replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from forebay.cluster.consensus import Engine, NotLeader, Role
from forebay.cluster.server.agreed_time import AgreedTime
from forebay.cluster.server.applied_log import Transition
from forebay.cluster.server.pass_timer import PassTimer
from forebay.cluster.server.pending import (
    ENTRIES_BYTES_MAX,
    OWN,
    STEPS_PER_TURN,
    USERS,
    Answer,
    Asker,
    CannotDecide,
    Counts,
    Decided,
    Draft,
    InFlight,
    NotLeading,
    OutcomeUnknown,
    QueueFull,
    Settlement,
    Waiter,
    Waiting,
    entry_of,
    entry_too_large,
    journal_full,
    level_of,
    notify,
    reject,
    resolve,
    steps_of,
    steps_to_decide,
    too_many_answers,
    weight_bytes,
)
from forebay.cluster.server.planner import Planner
from forebay.replica.decide import decide, decide_steps, is_by_key
from forebay.replica.fold import SpeculativeState, is_certainly_new, look_up_reply, may_cache_next_reply
from forebay.replica.messages import CONTROLLER, Batch, Decision, Entry, Request, RunSchedulingCycle, kind_of
from forebay.replica.state import State
from forebay.replica.values import COMMANDS_PER_BATCH_MAX, Instant, Rejection, Revision, StepRunner, Steps
from forebay.wal import batch_of_encoded, encode_entry

__all__ = [
    "Answer",
    "CannotDecide",
    "Counts",
    "NotLeading",
    "OutcomeUnknown",
    "Proposer",
    "QueueFull",
    "Settlement",
]

LOGGER = logging.getLogger(__name__)

QUEUE_COMMANDS_MAX = 4096
"""Maximum number of waiting commands: eight full batches, a tenth of a second of work."""

QUEUE_BYTES_MAX = 64 * 1024 * 1024
"""Maximum size of scripts and directives in the queue: 4096 of the largest would exceed a gigabyte."""

BATCHES_IN_FLIGHT_MAX = 4
"""Maximum number of batches proposed and not applied: by measurement, more do not help (HAZARDS.md)."""


_BATCH_ROOM_BYTES = 2 * ENTRIES_BYTES_MAX
"""Maximum size of a batch together with a command that then turns out not to fit."""


class Proposer:
    """Decides commands in order and proposes them in batches, while this replica leads and is ready."""

    def __init__(
        self,
        *,
        engine: Engine,
        applied: Callable[[], State],
        fill_with: Callable[[int], float],
        clock: AgreedTime,
        fail: Callable[[BaseException], NoReturn],
    ) -> None:
        """Initialize an idle proposer. `applied` returns the applied state; `fail` stops the replica.

        `fill_with` returns the used share of the journal after adding this many bytes, from 0 to 1.
        """
        self._engine = engine
        self._applied = applied
        self._fill_with = fill_with
        self._clock = clock
        self._fail = fail
        self._queue: deque[Waiting] = deque()
        self._queue_bytes = 0
        self._in_flight: deque[InFlight] = deque()
        self._pump_handle: asyncio.Handle | None = None
        self._planner = Planner()
        self._pass_timer = PassTimer(
            next_due=self._next_due, idle=self._is_idle, wake=self._wake, clock=clock, fail=fail
        )
        self._leading_term = 0
        self._draft: Draft | None = None
        """Batch under construction over several turns of the loop; nothing else is proposed until it is complete."""
        self._unpassed: InFlight | None = None
        """Batch that was proposed alone, and whose cycle has not run yet."""
        self._passed_index = 0
        """Index of the last entry with a separate cycle."""
        self._open = False
        """True if commands are accepted."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.counts = Counts()

    @property
    def leading(self) -> bool:
        """Return whether a command would be accepted now."""
        return self._engine.role == Role.LEADER and self._engine.ready

    @property
    def queued(self) -> int:
        """Number of commands waiting to be decided."""
        return len(self._queue)

    @property
    def batches_in_flight(self) -> int:
        """Number of batches proposed and not applied."""
        return len(self._in_flight)

    def submit(self, request: Request) -> Answer:
        """Queue a command and return the future of its answer.

        Raises:
            QueueFull: The queue has no space for it.
            NotLeading: This replica cannot decide commands.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        answer: Answer = self._loop.create_future()
        self.queue(request, answer)
        return answer

    def queue(self, request: Request, asker: Asker) -> None:
        """Queue a command whose answer goes to `asker`. Raises the exceptions of `submit`."""
        # `_open` is as of consensus' last notification, because asking the engine each time would cost as much as
        # queueing. A command that arrives just before the notification is rejected by it.
        if not self._open:
            raise NotLeading(self._engine.leader)
        weight = weight_bytes(request)
        if len(self._queue) >= QUEUE_COMMANDS_MAX or self._queue_bytes + weight > QUEUE_BYTES_MAX:
            self.counts.queue_full += 1
            raise QueueFull(f"the queue has {len(self._queue)} commands already")
        self._queue.append(Waiting(request, asker, weight))
        self._queue_bytes += weight
        self._wake()

    @property
    def pass_timer(self) -> PassTimer:
        """Timing of scheduling cycles."""
        return self._pass_timer

    def schedule(self) -> None:
        """Request a scheduling cycle, with the next batch or in a batch of its own."""
        self._pass_timer.schedule()

    def pass_now(self) -> int:
        """Run the pending cycle; return the index of the last entry with a separate cycle, or 0."""
        try:
            if self._unpassed is not None and self.leading:
                self._pass_behind(self._unpassed)
        except Exception as error:
            self._fail(error)
        return self._passed_index

    def leadership_changed(self) -> None:
        """Handle a change of role, term or readiness. Called by consensus; must not raise."""
        term = self._engine.term if self._engine.role == Role.LEADER else 0
        if term != self._leading_term:
            self._abandon()
            self._leading_term = term
        self._open = self.leading
        if self._open:
            self.schedule()
        else:
            self._pass_timer.stop()

    def precomputed(self, before: State, data: bytes) -> tuple[Batch, State] | None:
        """Return the batch in `data` and the state after it, if `data` is the next batch in flight, decided on
        `before`.

        The leader folded the batch while deciding it. For this state and these bytes `apply_batch` would return the
        same, so the leader need not fold twice. Returns None for any other entry.
        """
        if not self._in_flight:
            return None
        head = self._in_flight[0]
        if head.speculative.base is not before or (head.data is not data and head.data != data):
            return None
        return head.batch, head.after

    def applied(self, transition: Transition) -> None:
        """Answer the waiters of the applied entry."""
        index, state = transition.entry.index, transition.after
        if self._in_flight:
            head = self._in_flight[0]
            # An entry may be applied before `propose` has returned; the batch then has no index yet.
            if head.index in (0, index):
                if (
                    transition.entry.void
                    or (head.index and head.term != transition.entry.term)
                    or state.revision != head.last
                ):
                    self._abandon()
                else:
                    self._in_flight.popleft()
                    waits = head is self._unpassed and self.leading  # during a transfer, the new leader runs the cycle
                    notified, head.waiters = head.by_hurry() if waits else (head.waiters, [])
                    notify(notified, state)
                    if waits:
                        self._wake()
            elif index > head.index:
                self._abandon()
        if self.leading:
            if self._queue or self._pass_timer.due:
                self._wake()
            elif not self._in_flight and self._unpassed is None:
                self._pass_timer.rest()

    def installed(self) -> None:
        """Handle a snapshot that replaced the state: the outcome of batches in flight is unknown."""
        self._abandon()

    def stop(self) -> None:
        """Abandon all waiters and timers."""
        self._open = False
        self._abandon()
        self._pass_timer.stop()
        if self._pump_handle is not None:
            self._pump_handle.cancel()
            self._pump_handle = None

    # The pump

    def _wake(self) -> None:
        if self._pump_handle is None:
            # Run later in this turn of the loop, so that other arrivals share the batch.
            self._pump_handle = asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_handle = None
        try:
            if not self.leading or len(self._in_flight) >= BATCHES_IN_FLIGHT_MAX:
                return
            # Founding the cluster waits for a majority's clocks, and all other commands wait for the founding.
            if not self._clock.begin():
                return
            if self._unpassed is not None:
                self._pass_behind(self._unpassed)
            elif self._queue or self._pass_timer.due:
                self._propose_batch()
            # At most one batch a turn, so that heartbeats and other connections get their share of the loop.
            if (self._queue or self._pass_timer.due) and len(self._in_flight) < BATCHES_IN_FLIGHT_MAX:
                self._wake()
        except Exception as error:
            self._fail(error)

    def _propose_batch(self) -> None:
        """Propose the next batch. A batch that takes long to make continues in another turn."""
        draft = self._draft
        if draft is None:
            base = self._in_flight[-1].after if self._in_flight else self._applied()
            draft = self._draft = Draft(SpeculativeState(base, self._clock.stamp(base.at)))
        if not self._fill(draft):
            return
        self._draft = None
        batch, entries, waiters = draft.batch, draft.entries, draft.waiters
        if entries and batch.facts.at != batch.at:
            self._clock_was_set(batch, entries, waiters)
            return
        size_bytes, decided = draft.size_bytes, draft.is_decided
        wants_pass = self._pass_timer.wanted(decided=decided)
        if wants_pass and decided and not self._in_flight:
            self._propose(batch, entries, waiters, passed=False)
            if not all(waiter.is_hurried for waiter in waiters):
                self._wake()
            return
        if wants_pass:
            entry_of_pass = self._pass(batch, decided)
            if entry_of_pass is not None:
                encoded = encode_entry(entry_of_pass)
                if batch.entries and size_bytes + len(encoded) > ENTRIES_BYTES_MAX:
                    self._pass_timer.due = True
                else:
                    batch.add(entry_of_pass)
                    entries.append(encoded)
        if not batch.entries:
            if not self._in_flight and not self._pass_timer.due:
                self._pass_timer.rest()
            return
        self._propose(batch, entries, waiters)

    def _fill(self, draft: Draft) -> bool:
        """Decide waiting commands within a turn's limit; return whether the batch should be proposed."""
        batch, queue = draft.batch, self._queue
        is_scarce = self._fill_with(_BATCH_ROOM_BYTES) > USERS.fill_max
        left = STEPS_PER_TURN
        while queue and draft.steps < COMMANDS_PER_BATCH_MAX:
            waiting = queue[0]
            if draft.long is None:
                is_routine_one = is_certainly_new(batch.facts, waiting.request)
                if waiting.answer.cancelled() or not (is_routine_one or self._is_to_be_decided(waiting, draft)):
                    self._dequeue()
                    continue
                # If a whole batch fits below the lowest level, individual commands need no check.
                wants_bytes = draft.size_bytes + waiting.weight_bytes
                if (is_scarce or wants_bytes > _BATCH_ROOM_BYTES) and self._refused_for_room(waiting, wants_bytes):
                    self._dequeue()
                    continue
                steps = steps_to_decide(batch.facts, waiting.request)
                if steps > left and left < STEPS_PER_TURN:
                    return False
                left -= steps
                if steps > STEPS_PER_TURN and is_by_key(waiting.request.command):
                    draft.long = StepRunner(_deciding(waiting.request, draft))
            if draft.long is not None:
                try:
                    if not draft.long.advance(STEPS_PER_TURN):
                        return False
                except Exception as error:
                    draft.long = None
                    self._cannot_decide(waiting, error)
                    self._dequeue()
                    continue
                decided, draft.long = draft.long.result, None
                if decided is None:
                    break
                entry, encoded, job = decided
            else:
                decision = self._decide(waiting, batch)
                if decision is None:
                    self._dequeue()
                    continue
                entry, encoded = decision
                if draft.size_bytes + len(encoded) > ENTRIES_BYTES_MAX:
                    break
                settled = self._settle(waiting, batch, entry)
                if settled is None:
                    self._dequeue()
                    continue
                job = settled
            self._dequeue()
            draft.size_bytes += len(encoded)
            draft.steps += steps_of(entry)
            draft.entries.append(encoded)
            draft.is_decided = draft.is_decided or bool(entry.events)
            draft.waiters.append(Waiter(waiting.answer, Revision(batch.revision), job, entry.rejection, True))
            if batch.facts.at != batch.at:
                break
        return True

    def _clock_was_set(self, batch: SpeculativeState, entries: list[bytes], waiters: list[Waiter]) -> None:
        """Propose a batch that ends by setting the clock back. Later commands are decided at the new time."""
        self._clock.applied(Instant(batch.facts.at))
        self._propose(batch, entries, waiters)
        self._planner.forget()
        self._pass_timer.set_back()

    def _pass_behind(self, flight: InFlight) -> None:
        """Run the cycle of a batch that was proposed without one. The batch's waiters wait for both entries."""
        self._unpassed = None
        self._planner.closed(flight.speculative)
        batch = SpeculativeState(flight.after, self._clock.stamp(flight.after.at))
        if (entry := self._pass(batch, True)) is not None:
            batch.add(entry)
            flight.waiters, waiters = flight.by_hurry()
            self._propose(batch, [encode_entry(entry)], waiters)
            self._passed_index = self._in_flight[-1].index if self._in_flight else 0
        elif flight not in self._in_flight:
            notify(flight.waiters, self._applied())
            if not self._pass_timer.due:
                self._pass_timer.rest()

    def _propose(
        self, batch: SpeculativeState, entries: list[bytes], waiters: list[Waiter], *, passed: bool = True
    ) -> None:
        agreed = Batch(batch.base.revision, batch.at, tuple(batch.entries))
        flight = InFlight(batch, agreed, batch_of_encoded(agreed.base, agreed.at, entries), waiters)
        self._in_flight.append(flight)
        self._unpassed = None if passed else flight
        try:
            flight.index, flight.term = self._engine.propose(flight.data)
        except NotLeader:
            self._abandon()
            return
        self.counts.batches += 1
        self.counts.commands += len(agreed.entries)
        for entry in agreed.entries:
            if entry.rejection is not None:
                self.counts.rejections[entry.rejection.code.name.lower()] += 1
        if passed:
            self._planner.closed(batch)

    def _dequeue(self) -> None:
        self._queue_bytes -= self._queue.popleft().weight_bytes

    def _is_to_be_decided(self, waiting: Waiting, draft: Draft) -> bool:
        """Return whether a command is new and its reply may be cached; otherwise answer it."""
        facts = draft.batch.facts
        if self._answered_before(waiting, draft.batch, draft.waiters):
            return False
        if may_cache_next_reply(facts, waiting.request):
            return True
        self.counts.too_many_answers += 1
        self._refuse(waiting, too_many_answers(facts, waiting.request.actor))
        return False

    def _answered_before(self, waiting: Waiting, batch: SpeculativeState, waiters: list[Waiter]) -> bool:
        """Answer a command with a known ID, or let it wait for the batch that settles it; return False if it is new."""
        known = look_up_reply(batch.facts, waiting.request) if waiting.request.id else None
        if known is None:
            return False
        applied = self._applied()
        if isinstance(known, Rejection):
            # The cached outcome needs no decision, and so no entry.
            self.counts.rejections[known.code.name.lower()] += 1
            resolve(waiting.answer, Settlement(applied.revision, 0, known, applied, True))
            return True
        self.counts.receipts_answered += 1
        if known.revision <= applied.revision:
            resolve(waiting.answer, Settlement(known.revision, known.job, known.rejection, applied, False))
            return True
        waiter = Waiter(waiting.answer, known.revision, known.job, known.rejection, False)
        if known.revision > batch.base.revision:
            waiters.append(waiter)
            return True
        for flight in self._in_flight:
            if flight.first <= known.revision <= flight.last:
                flight.waiters.append(waiter)
                return True
        raise AssertionError(f"no batch in flight carries revision {known.revision}")

    def _refused_for_room(self, waiting: Waiting, wants_bytes: int) -> bool:
        """Reject a command if the journal lacks space for its batch with this many bytes; return whether it was
        rejected.

        The check is here, not in `queue`, because earlier commands take space first. Nothing is written for the
        command.
        """
        level = level_of(waiting.request)
        fill = self._fill_with(wants_bytes)
        if fill <= level.fill_max:
            return False
        self.counts.journal_full += 1
        self._refuse(waiting, journal_full(level, fill))
        return True

    def _refuse(self, waiting: Waiting, error: QueueFull) -> None:
        if not waiting.answer.done():
            reject(waiting.answer, error)

    def _decide(self, waiting: Waiting, batch: SpeculativeState) -> tuple[Entry, bytes] | None:
        """Return the entry that settles the command, and its encoding; None if deciding failed and was answered."""
        request = waiting.request
        try:
            facts = batch.facts if is_by_key(request.command) else batch.state()
            return _written(request, decide(facts, request, batch.at))
        except Exception as error:
            self._cannot_decide(waiting, error)
            return None

    def _settle(self, waiting: Waiting, batch: SpeculativeState, entry: Entry) -> int | None:
        """Add the entry to the batch; return its job. None if folding failed and was answered."""
        try:
            return batch.add(entry)
        except Exception as error:
            self._cannot_decide(waiting, error)
            return None

    def _cannot_decide(self, waiting: Waiting, error: Exception) -> None:
        request = waiting.request
        if request.actor == CONTROLLER:
            raise error
        LOGGER.error(
            "deciding %s of %s failed; it is not proposed", kind_of(request.command), request.actor, exc_info=error
        )
        if not waiting.answer.done():
            reject(waiting.answer, CannotDecide(f"{type(error).__name__}: {error}"))

    def _pass(self, batch: SpeculativeState, decided: bool) -> Entry | None:
        """Return the entry of a scheduling cycle over the batch so far; None without events or if it must wait."""
        if not batch.facts.feature_level or self._fill_with(0) > OWN.fill_max:
            self._pass_timer.due = False
            return None
        started_s = self._clock.monotonic_s()
        if not self._planner.prepare(batch):
            # A new leader indexes all jobs once, a portion per turn of the loop; the cycle runs after the last portion.
            self._pass_timer.due = True
            return None
        events = self._planner.run_cycle(batch)
        cost_s = self._clock.monotonic_s() - started_s
        self._pass_timer.passed(batch.at, cost_s=cost_s, found=bool(events), decided=decided)
        return Entry(b"", CONTROLLER, kind_of(RunSchedulingCycle()), events) if events else None

    def _next_due(self, after: Instant) -> Instant | None:
        return self._planner.next_due(self._applied(), after)

    def _is_idle(self) -> bool:
        return self.leading and not self._in_flight and not self._queue

    # End of leadership

    def _abandon(self) -> None:
        self._planner.forget()
        flights, self._in_flight, self._passed_index = self._in_flight, deque(), 0
        if self._unpassed is not None and self._unpassed not in flights:
            flights.appendleft(self._unpassed)
        self._unpassed = None
        for flight in flights:
            for waiter in flight.waiters:
                if not waiter.answer.done():
                    self.counts.outcomes_unknown += 1
                    reject(waiter.answer, OutcomeUnknown("leadership was lost before the command was committed"))
        draft, self._draft = self._draft, None
        for waiter in [] if draft is None else draft.waiters:  # never proposed
            if not waiter.answer.done():
                reject(waiter.answer, NotLeading(self._engine.leader))
        if not self.leading:
            queue, self._queue = self._queue, deque()
            self._queue_bytes = 0
            for waiting in queue:
                if not waiting.answer.done():
                    reject(waiting.answer, NotLeading(self._engine.leader))


def _deciding(request: Request, draft: Draft) -> Steps[Decided | None]:
    """Decide a command and fold the result, in steps; None if the batch has no space for it."""
    batch = draft.batch
    entry, encoded = _written(request, (yield from decide_steps(batch.facts, request, batch.at)))
    if draft.size_bytes + len(encoded) > ENTRIES_BYTES_MAX:
        return None
    job = yield from batch.add_steps(entry)
    return entry, encoded, job


def _written(request: Request, decision: Decision) -> tuple[Entry, bytes]:
    """Return the entry that settles a command by a decision, encoded."""
    if isinstance(decision, Rejection):
        entry = entry_of(request, rejection=decision)
    else:
        entry = entry_of(request, decision.events)
    encoded = encode_entry(entry)
    if len(encoded) > ENTRIES_BYTES_MAX:
        entry = entry_too_large(request, len(encoded))
        encoded = encode_entry(entry)
    return entry, encoded
