"""Who waits for what: commands in the leader's queue, batches in flight, and how their answers are given."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import msgspec

from replica.decide import jobs_of_command
from replica.fold import SpeculativeState
from replica.messages import (
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
from replica.state import Facts, State
from replica.values import (
    BATCH_BYTES_MAX,
    RECEIPTS_MAX,
    RECEIPTS_PER_ACTOR_MAX,
    InSteps,
    Refusal,
    RefusalCode,
    Revision,
)


class QueueFull(Exception):
    """The queue is full; nothing has happened, and the client may try again later."""


class JournalFull(QueueFull):
    """The journal has no room for a command of this kind; nothing has happened."""


class TooManyAnswers(QueueFull):
    """As many answers are kept for the actor as may be; nothing has happened."""


class NotLeading(Exception):
    """This replica cannot decide; nothing has happened. `leader` is the name of who may, if known."""

    def __init__(self, leader: str | None) -> None:
        super().__init__(f"this replica does not lead; leader: {leader or 'unknown'}")
        self.leader = leader


class OutcomeUnknown(Exception):
    """Leadership was lost while the command was under way: the same id must be sent again to learn the outcome."""


class CannotDecide(Exception):
    """Deciding the command failed with a fault of the program; nothing has happened."""


class Settled(msgspec.Struct, frozen=True):
    """The answer to one command. `state` is the applied state when it is given; `revision` that of the command."""

    revision: Revision
    job: int
    refusal: Refusal | None
    state: State
    fresh: bool
    """False where the answer came from a receipt: this was a retry."""


class Asker(Protocol):
    """Who gets the answer to a command: a future of it, or whatever takes it in the same way, at once.

    The methods are those of a future. They are called from the loop, never out of `Proposer.submit`; `set_result` and
    `set_exception` once at most, and must not raise: consensus would stop for it.
    """

    def done(self) -> bool:
        """Whether nobody waits any more."""
        ...

    def cancelled(self) -> bool:
        """Whether whoever asked has taken it back."""
        ...

    def set_result(self, result: Settled, /) -> None:
        """Take the answer."""
        ...

    def set_exception(self, exception: Exception, /) -> None:
        """Learn why there is none."""
        ...


Answer = asyncio.Future[Settled]


class Waiting(msgspec.Struct, frozen=True):
    """A command in the queue."""

    request: Request
    answer: Asker
    weight_bytes: int


class Waiter(msgspec.Struct, frozen=True):
    """Who waits for an entry that is in flight, and what the answer will be."""

    answer: Asker
    revision: Revision
    job: int
    refusal: Refusal | None
    fresh: bool

    @property
    def is_hurried(self) -> bool:
        """Whether the answer says no more than that the command is committed: it does not wait for the pass.

        Who has a future gets a state with the answer, in which the scheduler has examined what was decided.
        """
        return not isinstance(self.answer, asyncio.Future)


class InFlight:
    """A batch that was proposed: what it was decided on and comes to, and who waits for it."""

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
        """Return those who want no more than to know that their command is committed, and the others."""
        hurried = [waiter for waiter in self.waiters if waiter.is_hurried]
        return hurried, [waiter for waiter in self.waiters if not waiter.is_hurried]

    @property
    def after(self) -> State:
        """The state after it. Made when it is asked for first: by then the batch is on its way to the others."""
        return self.speculative.state()


def resolve(answer: Asker, settled: Settled) -> None:
    """Give the answer, if somebody still waits for it."""
    # The waiter may have gone, by its deadline or its connection: the command stands all the same.
    if not answer.done():
        answer.set_result(settled)


def notify(waiters: list[Waiter], state: State) -> None:
    """Answer those who wait for what is applied now, in `state`."""
    for waiter in waiters:
        resolve(waiter.answer, Settled(waiter.revision, waiter.job, waiter.refusal, state, waiter.fresh))


def reject(answer: Asker, error: Exception) -> None:
    """Give an exception as the answer."""
    answer.set_exception(error)
    if isinstance(answer, asyncio.Future):
        # Read once here: where the waiter has gone, asyncio would report the exception as forgotten.
        answer.exception()


# ---- what the proposer of a replica has done


class Counts(msgspec.Struct):
    """What the proposer has done since the process started."""

    batches: int = 0
    commands: int = 0
    receipts_answered: int = 0
    queue_full: int = 0
    journal_full: int = 0
    too_many_answers: int = 0
    outcomes_unknown: int = 0
    refusals: Counter[str] = msgspec.field(default_factory=Counter)


# ---- the entry that settles a command, and what a command weighs while it waits to be settled


ENTRY_OVERHEAD_BYTES = 64
"""What an entry takes in a batch besides its own encoding, bytes, rounded up generously."""

ENTRIES_BYTES_MAX = BATCH_BYTES_MAX - 1024
"""The entries of one batch, bytes: what surrounds them (kind, base, instant) takes far less than the rest."""


def entry_of(request: Request, events: tuple[Event, ...] = (), refusal: Refusal | None = None) -> Entry:
    """Return the entry that settles `request` with these events, or with this refusal."""
    # What has no fields has nothing to be proven; of the leader's own commands nobody asks again.
    digest = command_digest(request) if request.id or request.command.__struct_fields__ else b""
    return Entry(request.id, request.actor, kind_of(request.command), events, refusal, digest)


def entry_too_large(request: Request, size_bytes: int) -> Entry:
    """Return the entry that refuses `request`, whose own would have this size."""
    refusal = Refusal(
        RefusalCode.LIMIT_EXCEEDED,
        f"the command would take {size_bytes} bytes of the ledger; one entry has at most {ENTRIES_BYTES_MAX}",
        "send a smaller script, environment or set of directives",
    )
    return entry_of(request, refusal=refusal)


def weight_bytes(request: Request) -> int:
    """Return what a command takes while it waits, bytes: its texts, and something for the rest."""
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
    """Return as how many commands one counts in a batch: what folding it takes is by its jobs, and by its events."""
    return max(1, steps_of_events(entry.events))


def steps_of_events(events: Sequence[Event]) -> int:
    """Return how many steps folding the events takes: one each, and one for each task of an array."""
    return len(events) if not events or type(events[0]) is not JobSubmitted else len(jobs_of(events[0]))


STEPS_PER_TURN = 128
"""Commands decided, and events folded, in one turn of the loop, count: some 20 us each, and 40 us with both. A command
about an array counts as one for each task, a submit with directives also for each DIRECTIVES_PER_STEP bytes of them."""

DIRECTIVES_PER_STEP = 64
"""Directives that are read as quickly as a step, bytes: one line."""


def steps_to_decide(state: Facts, request: Request) -> int:
    """Return about how many steps it takes to decide a command and to fold what it leads to."""
    command, buffer = request.command, None
    jobs = jobs_of_command(state, command)
    if type(command) is SubmitJob:
        buffer = command.request.buffer
    elif type(command) is UpdateJob:
        buffer = command.buffer
    return jobs if buffer is None else jobs * (1 + len(buffer.text) // DIRECTIVES_PER_STEP)


class Draft:
    """A batch under construction; it may take several turns of the loop."""

    __slots__ = ("batch", "entries", "is_decided", "long", "size_bytes", "steps", "waiters")

    def __init__(self, batch: SpeculativeState) -> None:
        self.batch = batch
        self.entries: list[bytes] = []
        """Those of the batch, encoded."""
        self.waiters: list[Waiter] = []
        self.size_bytes = 0
        self.steps = 0
        self.is_decided = False
        """Whether there is an event in it."""
        self.long: InSteps[Decided | None] | None = None
        """The command at the head of the queue, as far as it is decided and folded, where that takes several turns."""


Decided = tuple[Entry, bytes, int]
"""The entry that settles a command, its encoding, and the job that it made or concerns."""


# ---- room in the journal: what is refused first when it becomes scarce


class Level(msgspec.Struct, frozen=True):
    """How full the journal may be for commands of one kind, from 0 to 1, and who they are of."""

    fill_max: float
    words: str


USERS = Level(0.80, "what users ask for")
CANCELS = Level(0.85, "what users ask for")
"""A user's cancels have a little more room than what else users ask for: they end what would need more."""
OPERATORS = Level(0.90, "what operators ask for")
AGENTS = Level(0.95, "what agents report")
OWN = Level(0.98, "what the leader does by itself")
"""The rest is for elections and members: they are what an operator needs to make room."""

STORED_BYTES_PER_BYTE = 2
"""What an entry takes in LMDB for each of its bytes, at most: rows of its digest and revision, pages half full."""


def level_of(request: Request) -> Level:
    """Return how full the journal may be for a command."""
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
    """Return what a command is answered for which there is no room."""
    return JournalFull(
        f"the journal is {fill:.0%} full; above {level.fill_max:.0%} {level.words} is refused, and there is still room "
        "for what matters more"
    )


def too_many_answers(state: Facts, actor: Actor) -> TooManyAnswers:
    """Return what a command is answered whose own answer could not be kept."""
    kept, total = state.kept.get(actor, 0), state.answers_kept
    return TooManyAnswers(
        f"{kept} answers of {actor} are kept, of {total} in all; at most {RECEIPTS_PER_ACTOR_MAX} are, and no more "
        f"than a quarter of what is free of {RECEIPTS_MAX}"
    )
