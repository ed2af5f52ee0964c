"""Commands waiting in the leader's queue, batches in flight, and delivery of their answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import msgspec

from forebay.replica.decide import jobs_of_command
from forebay.replica.fold import SpeculativeState
from forebay.replica.messages import (
    Actor,
    ActorRole,
    Batch,
    CancelJob,
    Entry,
    Event,
    JobSubmitted,
    Request,
    SubmitJob,
    UpdateJob,
    command_digest,
    jobs_of,
    kind_of,
)
from forebay.replica.state import Facts, State
from forebay.replica.values import (
    BATCH_BYTES_MAX,
    RECEIPTS_MAX,
    RECEIPTS_PER_ACTOR_MAX,
    Rejection,
    RejectionCode,
    Revision,
    StepRunner,
)


class QueueFull(Exception):
    """Command rejected because the queue is full; nothing has happened, and the client may retry later."""


class JournalFull(QueueFull):
    """Command rejected because the journal has no space for its kind; nothing has happened."""


class TooManyAnswers(QueueFull):
    """Command rejected because the actor's cached replies are at their limit; nothing has happened."""


class NotLeading(Exception):
    """Command at a replica that cannot decide; nothing has happened. `leader` is the leader's name, if known."""

    def __init__(self, leader: str | None) -> None:
        super().__init__(f"this replica does not lead; leader: {leader or 'unknown'}")
        self.leader = leader


class OutcomeUnknown(Exception):
    """Loss of leadership with the command under way: resend the same ID to learn the outcome."""


class CannotDecide(Exception):
    """Program fault while deciding the command; nothing has happened."""


class Settlement(msgspec.Struct, frozen=True):
    """Answer to one command. `state` is the applied state at that time; `revision` is the command's."""

    revision: Revision
    job: int
    rejection: Rejection | None
    state: State
    fresh: bool
    """False for a cached reply: the command was a retry."""


class Asker(Protocol):
    """Receiver of a command's answer: a future, or an object with the same methods that handles it at once.

    The methods are called from the loop, never from within `Proposer.submit`; `set_result` and `set_exception` at most
    once, and they must not raise, because consensus would stop.
    """

    def done(self) -> bool:
        """Return whether the answer is no longer awaited."""
        ...

    def cancelled(self) -> bool:
        """Return whether the caller has cancelled the request."""
        ...

    def set_result(self, result: Settlement, /) -> None:
        """Receive the answer."""
        ...

    def set_exception(self, exception: Exception, /) -> None:
        """Receive the failure."""
        ...


Answer = asyncio.Future[Settlement]


class Waiting(msgspec.Struct, frozen=True):
    """Command in the queue."""

    request: Request
    answer: Asker
    weight_bytes: int


class Waiter(msgspec.Struct, frozen=True):
    """Receiver waiting for an entry in flight, with the answer it will get."""

    answer: Asker
    revision: Revision
    job: int
    rejection: Rejection | None
    fresh: bool

    @property
    def is_hurried(self) -> bool:
        """Return whether the answer only confirms the commit, so that it need not wait for the scheduling cycle.

        The receiver of a future gets a state in which the scheduler has examined the decision.
        """
        return not isinstance(self.answer, asyncio.Future)


class InFlight:
    """Proposed batch: its base state, its result, and its waiters."""

    __slots__ = ("batch", "data", "first", "index", "last", "term", "speculative", "waiters")

    def __init__(self, speculative: SpeculativeState, batch: Batch, data: bytes, waiters: list[Waiter]) -> None:
        self.index = 0
        self.term = 0
        self.speculative = speculative
        self.batch = batch
        self.data = data
        self.first = Revision(batch.base + 1)
        self.last = Revision(speculative.revision)
        self.waiters = waiters

    def by_hurry(self) -> tuple[list[Waiter], list[Waiter]]:
        """Return the waiters that only need the commit, and the others."""
        hurried = [waiter for waiter in self.waiters if waiter.is_hurried]
        return hurried, [waiter for waiter in self.waiters if not waiter.is_hurried]

    @property
    def after(self) -> State:
        """State after the batch. Computed on first use: by then the batch is on its way to the others."""
        return self.speculative.state()


def resolve(answer: Asker, settled: Settlement) -> None:
    """Deliver the answer if it is still awaited."""
    # The waiter may be gone because of a timeout or a lost connection: the command stands.
    if not answer.done():
        answer.set_result(settled)


def notify(waiters: list[Waiter], state: State) -> None:
    """Answer the waiters for the entry just applied, with `state`."""
    for waiter in waiters:
        resolve(waiter.answer, Settlement(waiter.revision, waiter.job, waiter.rejection, state, waiter.fresh))


def reject(answer: Asker, error: Exception) -> None:
    """Deliver an exception as the answer."""
    answer.set_exception(error)
    if isinstance(answer, asyncio.Future):
        # Retrieve it once: if the waiter is gone, asyncio would report the exception as never retrieved.
        answer.exception()


# ---- counters


class Counts(msgspec.Struct):
    """Counters of the proposer since the process started."""

    batches: int = 0
    commands: int = 0
    receipts_answered: int = 0
    queue_full: int = 0
    journal_full: int = 0
    too_many_answers: int = 0
    outcomes_unknown: int = 0
    rejections: Counter[str] = msgspec.field(default_factory=Counter)


# ---- entries that settle commands, and the weight of waiting commands


ENTRY_OVERHEAD_BYTES = 64
"""Overhead of an entry in a batch beside its own encoding, bytes, rounded up generously."""

ENTRIES_BYTES_MAX = BATCH_BYTES_MAX - 1024
"""Maximum size of a batch's entries: the rest (kind, base, time) takes far less than the difference."""


def entry_of(request: Request, events: tuple[Event, ...] = (), rejection: Rejection | None = None) -> Entry:
    """Return the entry that settles `request` with these events, or with this rejection."""
    # Commands without fields need no proof, and the leader's own commands are never repeated.
    digest = command_digest(request) if request.id or request.command.__struct_fields__ else b""
    return Entry(request.id, request.actor, kind_of(request.command), events, rejection, digest)


def entry_too_large(request: Request, size_bytes: int) -> Entry:
    """Return the entry that rejects `request`, whose own entry would have this size."""
    rejection = Rejection(
        RejectionCode.LIMIT_EXCEEDED,
        f"the command would take {size_bytes} bytes of the ledger; an entry has at most {ENTRIES_BYTES_MAX}",
        "send a smaller script, environment or set of directives",
    )
    return entry_of(request, rejection=rejection)


def weight_bytes(request: Request) -> int:
    """Return the memory a waiting command takes, bytes: its texts, and an allowance for the rest."""
    command = request.command
    if type(command) is UpdateJob:
        return ENTRY_OVERHEAD_BYTES + (0 if command.buffer is None else len(command.buffer.text))
    if type(command) is not SubmitJob:
        return ENTRY_OVERHEAD_BYTES
    job = command.request
    text = "" if job.buffer is None else job.buffer.text
    environment = sum(len(name) + len(value) for name, value in job.environment)
    return ENTRY_OVERHEAD_BYTES + len(job.script) + len(text) + environment


def steps_of(entry: Entry) -> int:
    """Return the cost of folding an entry in steps, by its jobs and events."""
    return max(1, steps_of_events(entry.events))


def steps_of_events(events: Sequence[Event]) -> int:
    """Return the cost of folding events in steps: one each, and one for each task of an array."""
    return len(events) if not events or type(events[0]) is not JobSubmitted else len(jobs_of(events[0]))


STEPS_PER_TURN = 128
"""Commands decided, and events folded, in one turn of the loop, count: about 20 us each, and 40 us with both. A command
about an array counts once for each task; a submit also counts once for each DIRECTIVES_PER_STEP bytes of directives.
"""

DIRECTIVES_PER_STEP = 64
"""Size of directives read in the time of one step: one line."""


def steps_to_decide(state: Facts, request: Request) -> int:
    """Estimate the steps to decide a command and to fold the result."""
    command, buffer = request.command, None
    jobs = jobs_of_command(state, command)
    if type(command) is SubmitJob:
        buffer = command.request.buffer
    elif type(command) is UpdateJob:
        buffer = command.buffer
    return jobs if buffer is None else jobs * (1 + len(buffer.text) // DIRECTIVES_PER_STEP)


class Draft:
    """Batch under construction; it may take several turns of the loop."""

    __slots__ = ("batch", "entries", "is_decided", "long", "size_bytes", "steps", "waiters")

    def __init__(self, batch: SpeculativeState) -> None:
        self.batch = batch
        self.entries: list[bytes] = []
        """Encoded entries of the batch."""
        self.waiters: list[Waiter] = []
        self.size_bytes = 0
        self.steps = 0
        self.is_decided = False
        """Whether it contains an event."""
        self.long: StepRunner[Decided | None] | None = None
        """First command of the queue while it is decided and folded over several turns."""


Decided = tuple[Entry, bytes, int]
"""Entry that settles a command, its encoding, and the job it made or concerns."""


# ---- space in the journal: order of rejection when it becomes scarce


class Level(msgspec.Struct, frozen=True):
    """Maximum fill of the journal for commands of one kind, from 0 to 1, and their origin."""

    fill_max: float
    words: str


USERS = Level(0.80, "commands of users")
CANCELS = Level(0.85, "commands of users")
"""A user's cancels have slightly more space than other requests: they end jobs that would need more."""
OPERATORS = Level(0.90, "commands of operators")
AGENTS = Level(0.95, "reports of agents")
OWN = Level(0.98, "commands of the leader itself")
"""The rest is for elections and membership changes, which an operator may need to make space."""

STORED_BYTES_PER_BYTE = 2
"""Maximum size of an entry in LMDB as a multiple of its size: rows of digest and revision, pages half full."""


def level_of(request: Request) -> Level:
    """Return the maximum fill of the journal for a command."""
    match request.actor.role:
        case ActorRole.USER:
            return CANCELS if isinstance(request.command, CancelJob) else USERS
        case ActorRole.OPERATOR | ActorRole.DRILL:
            return OPERATORS
        case ActorRole.AGENT:
            return AGENTS
        case _:
            return OWN


def journal_full(level: Level, fill: float) -> JournalFull:
    """Return the rejection of a command for which there is no space."""
    return JournalFull(
        f"the journal is {fill:.0%} full; above {level.fill_max:.0%} {level.words} are rejected, because the "
        "remaining space is reserved for more important commands"
    )


def too_many_answers(state: Facts, actor: Actor) -> TooManyAnswers:
    """Return the rejection of a command whose reply could not be cached."""
    kept, total = state.kept.get(actor, 0), state.replies_kept
    return TooManyAnswers(
        f"the deduplication cache has {kept} replies for {actor}, and {total} in total; an actor may have at most "
        f"{RECEIPTS_PER_ACTOR_MAX}, and at most a quarter of those free of {RECEIPTS_MAX}"
    )
