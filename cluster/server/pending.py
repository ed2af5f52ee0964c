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
    """Command sent to a replica that cannot decide; nothing has happened. `leader` is the leader's name, if known."""

    def __init__(self, leader: str | None) -> None:
        super().__init__(f"this replica does not lead; leader: {leader or 'unknown'}")
        self.leader = leader


class OutcomeUnknown(Exception):
    """Leadership was lost before the command was committed. Resend it with the same ID to learn the outcome."""


class CannotDecide(Exception):
    """A fault of the program prevents deciding the command; nothing has happened."""


class Settlement(msgspec.Struct, frozen=True):
    """Answer to one command: its revision, and the applied state at the time of the answer."""

    revision: Revision
    job: int
    rejection: Rejection | None
    state: State
    fresh: bool
    """False for a cached reply: the command was a retry."""


class Asker(Protocol):
    """Receiver of a command's answer: a future, or an object with these methods that handles the answer at once.

    The methods are called from the loop, never inside `Proposer.submit`. `set_result` or `set_exception` is called at
    most once. Neither may raise, because that would stop consensus.
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
        """Return whether the receiver only needs the commit, so that the answer need not wait for the scheduling cycle.

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
        """State after the batch. Computed on first use, when the batch has usually been sent to the peers."""
        return self.speculative.state()


def resolve(answer: Asker, settled: Settlement) -> None:
    """Deliver the answer if it is still awaited."""
    # After a timeout or a lost connection nothing awaits the answer; the command remains valid.
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
        # Retrieve the exception: otherwise asyncio reports it if nothing awaits the future.
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
"""Maximum size of a batch's entries: the rest (kind, base, time) takes far less than 1 KiB."""


def entry_of(request: Request, events: tuple[Event, ...] = (), rejection: Rejection | None = None) -> Entry:
    """Return the entry that settles `request` with these events, or with this rejection."""
    # Commands without fields need no digest, and the leader's own commands are never resent.
    digest = command_digest(request) if request.id or request.command.__struct_fields__ else b""
    return Entry(request.id, request.actor, kind_of(request.command), events, rejection, digest)


def entry_too_large(request: Request, size_bytes: int) -> Entry:
    """Return the entry that rejects `request`, because its entry would have `size_bytes`."""
    rejection = Rejection(
        RejectionCode.LIMIT_EXCEEDED,
        f"the command would take {size_bytes} bytes of the ledger; an entry has at most {ENTRIES_BYTES_MAX}",
        "send a smaller script, environment or set of directives",
    )
    return entry_of(request, rejection=rejection)


def weight_bytes(request: Request) -> int:
    """Return the memory that a waiting command takes, bytes: its texts, and an allowance for the rest."""
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
    """Return the cost of folding an entry, in steps (at least 1)."""
    return max(1, steps_of_events(entry.events))


def steps_of_events(events: Sequence[Event]) -> int:
    """Return the cost of folding events, in steps: one for each event, or for each task of a submitted array."""
    return len(events) if not events or type(events[0]) is not JobSubmitted else len(jobs_of(events[0]))


STEPS_PER_TURN = 128
"""Commands decided, and events folded, in one turn of the loop: 20 us each, 40 us for both. A command about an array
counts once for each task; a submit also counts once for each DIRECTIVES_PER_STEP bytes of directives.
"""

DIRECTIVES_PER_STEP = 64
"""Size of directives that are parsed in the time of one step, bytes: one line."""


def steps_to_decide(state: Facts, request: Request) -> int:
    """Estimate the cost of deciding a command and folding the result, in steps."""
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
        """True if the batch contains an event."""
        self.long: StepRunner[Decided | None] | None = None
        """Run of the first command in the queue, if it is decided and folded over several turns."""


Decided = tuple[Entry, bytes, int]
"""Entry that settles a command, its encoding, and the job that it creates or concerns."""


# ---- space in the journal: order of rejection when it becomes scarce


class Level(msgspec.Struct, frozen=True):
    """Maximum fill of the journal for commands of one origin, from 0 to 1, and the origin's name."""

    fill_max: float
    words: str


USERS = Level(0.80, "commands of users")
CANCELS = Level(0.85, "commands of users")
"""A user's cancels have slightly more space than other requests: they end jobs that would need more."""
OPERATORS = Level(0.90, "commands of operators")
AGENTS = Level(0.95, "reports of agents")
OWN = Level(0.98, "commands of the leader itself")
"""The rest is reserved for elections and membership changes, which an operator may need to make space."""

STORED_BYTES_PER_BYTE = 2
"""Maximum size of an entry in LMDB as a multiple of its data: digest and revision rows, half-full pages."""


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
    """Return the exception for a command for which the journal has no space."""
    return JournalFull(
        f"the journal is {fill:.0%} full; above {level.fill_max:.0%} {level.words} are rejected, because the "
        "remaining space is reserved for more important commands"
    )


def too_many_answers(state: Facts, actor: Actor) -> TooManyAnswers:
    """Return the exception for a command whose reply could not be cached."""
    kept, total = state.kept.get(actor, 0), state.replies_kept
    return TooManyAnswers(
        f"the deduplication cache has {kept} replies for {actor}, and {total} in total; an actor may have at most "
        f"{RECEIPTS_PER_ACTOR_MAX}, and at most a quarter of those free of {RECEIPTS_MAX}"
    )
