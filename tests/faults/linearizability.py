"""Linearizability check of the history of one object.

The search is Wing and Gong's with Lowe's memory of configurations (G. Lowe, Testing for linearizability, 2017): take
any operation that began before every unfinished one has ended as the next, see whether the model allows its answer, and
remember each pair of (operations taken, state) so that none is searched twice. It is bounded: an unfinished check says
so, and counts as a failure.
"""

from collections.abc import Hashable, Sequence
from enum import StrEnum
from math import inf
from operator import le
from typing import NamedTuple, Protocol

CONFIGURATIONS_MAX = 500_000
"""Configurations that one check may look at, count: seconds, and far more than a history of a few clients needs."""

UNKNOWN = None
"""The answer of an operation whose outcome nobody learned: it may take effect at any time after its call, or never."""


class Operation(NamedTuple):
    """One call as its client saw it: from when to when, what it asked, what it was answered."""

    who: str
    action: str
    value: Hashable
    answer: Hashable
    called_s: float
    returned_s: float = inf


class Model(Protocol):
    """A sequential object: what it is at first, and what an operation makes of it."""

    initial: Hashable

    def step(self, state: Hashable, operation: Operation) -> tuple[bool, Hashable]:
        """Return whether the operation may have its answer in this state, and the state after it. An UNKNOWN answer
        may always be had; where the operation could not have taken effect the state stays. The result may depend on
        action, value, and answer only."""
        ...


class Verdict(StrEnum):
    """What a check found."""

    LINEARIZABLE = "linearizable"
    NOT_LINEARIZABLE = "not linearizable"
    UNFINISHED = "unfinished"


class Found(NamedTuple):
    """A verdict; for any other than LINEARIZABLE the first operation that no order found so far could explain."""

    verdict: Verdict
    configurations: int
    stuck_at: Operation | None = None


class _History(NamedTuple):
    """One object's operations, as the search takes them."""

    known: list[Operation]
    """Operations that were answered, in the order of their calls."""
    unknown: list[list[Operation]]
    """Operations of unknown outcome: those of equal action and value together, in the order of their calls."""


class _Taken(NamedTuple):
    """Operations that an order has taken so far."""

    known: int
    """Positions in `known`, as bits."""
    unknown: tuple[int, ...]
    """How many of each list in `unknown`: always its first ones."""


def check(history: Sequence[Operation], model: Model, *, configurations_max: int = CONFIGURATIONS_MAX) -> Found:
    """Search for an order that explains the history of one object.

    The search does not grow with the subsets of operations of unknown outcome, and misses no order nevertheless:

    - Operations of equal action and value have equal effects, and none of unknown outcome must precede anything. Where
      an order takes n of them, it may take the n that were called first.
    - One that leaves the state as it is need not be taken.
    - Of two configurations with the same state and the same known operations taken, the one that has taken fewer of
      each kind can go on in every way in which the other can.
    """
    operations = _arranged(history)
    required = (1 << len(operations.known)) - 1
    first = _Taken(0, (0,) * len(operations.unknown))
    frontier: dict[tuple[int, Hashable], list[tuple[int, ...]]] = {(0, model.initial): [first.unknown]}
    stack: list[tuple[_Taken, Hashable]] = [(first, model.initial)]
    count, furthest, stuck_at = 1, -1, None
    while stack:
        taken, state = stack.pop()
        if taken.known == required:
            return Found(Verdict.LINEARIZABLE, count)
        following, blocker = _next(operations, taken, model, state)
        if taken.known.bit_count() > furthest:
            furthest, stuck_at = taken.known.bit_count(), blocker
        for after, then in following:
            least = frontier.setdefault((after.known, then), [])
            if any(_is_within(one, after.unknown) for one in least):
                continue
            if count >= configurations_max:
                return Found(Verdict.UNFINISHED, count, stuck_at)
            count += 1
            least[:] = [one for one in least if not _is_within(after.unknown, one)]
            least.append(after.unknown)
            stack.append((after, then))
    return Found(Verdict.NOT_LINEARIZABLE, count, stuck_at)


def _arranged(history: Sequence[Operation]) -> _History:
    known: list[Operation] = []
    unknown: dict[tuple[str, Hashable], list[Operation]] = {}
    for operation in sorted(history, key=lambda operation: operation.called_s):
        if operation.answer is UNKNOWN:
            unknown.setdefault((operation.action, operation.value), []).append(operation)
        else:
            known.append(operation)
    return _History(known, list(unknown.values()))


def _is_within(fewer: tuple[int, ...], more: tuple[int, ...]) -> bool:
    return all(map(le, fewer, more))


def _next(
    operations: _History, taken: _Taken, model: Model, state: Hashable
) -> tuple[list[tuple[_Taken, Hashable]], Operation | None]:
    """Return the configurations that may follow, the likeliest last, and the operation that must be taken before any
    later call: of those not taken, the one that ended first.
    """
    place = (~taken.known & (taken.known + 1)).bit_length() - 1
    ended_s, blocker = inf, None
    places: list[int] = []
    while place < len(operations.known):
        operation = operations.known[place]
        if operation.called_s > ended_s:
            break
        if not taken.known >> place & 1:
            places.append(place)
            if operation.returned_s < ended_s:
                ended_s, blocker = operation.returned_s, operation
        place += 1
    # Depth first from the end of the list: what ended first, and what has no answer only when nothing else helps.
    following: list[tuple[_Taken, Hashable]] = []
    for kind, (same, used) in enumerate(zip(operations.unknown, taken.unknown, strict=True)):
        if used < len(same) and same[used].called_s <= ended_s:
            allowed, after = model.step(state, same[used])
            if allowed and after != state:
                counts = (*taken.unknown[:kind], used + 1, *taken.unknown[kind + 1 :])
                following.append((taken._replace(unknown=counts), after))
    for place in sorted(places, key=lambda place: operations.known[place].returned_s, reverse=True):
        allowed, after = model.step(state, operations.known[place])
        if allowed:
            following.append((taken._replace(known=taken.known | 1 << place), after))
    return following, blocker


class Register:
    """An object with one value: `write` sets it, `read` answers it."""

    def __init__(self, initial: Hashable = None) -> None:
        self.initial = initial

    def step(self, state: Hashable, operation: Operation) -> tuple[bool, Hashable]:
        """A read answers the value that was written last."""
        if operation.action == "write":
            return True, operation.value
        return operation.answer is UNKNOWN or operation.answer == state, state


class HeldJob:
    """A job that only waits: submitted as held, then held and released and shown."""

    initial: Hashable = "absent"

    def step(self, state: Hashable, operation: Operation) -> tuple[bool, Hashable]:
        """Holding what is held changes nothing; releasing what is not held is refused; both need a job."""
        answer = operation.answer
        if operation.action == "submit":
            return state == "absent" and answer in (UNKNOWN, "done"), "held"
        if operation.action == "show":
            return answer in (UNKNOWN, state), state
        if state == "absent":
            return answer in (UNKNOWN, state), state
        if operation.action == "hold":
            return answer in (UNKNOWN, "done"), "held"
        return answer in (UNKNOWN, "done" if state == "held" else "rejected"), "free"


def goes_back(answers: Sequence[tuple[float, float, int]]) -> tuple[int, int] | None:
    """Return two revisions of which the later answer shows the older one, if any.

    `answers` are (called, returned, revision) of answers that claim to be current, over all objects: one that was
    called after another had returned must not show an older revision.
    """
    newest = 0
    ends = sorted((returned, revision) for _, returned, revision in answers)
    ended = 0
    for called, _, revision in sorted(answers):
        while ended < len(ends) and ends[ended][0] < called:
            newest = max(newest, ends[ended][1])
            ended += 1
        if revision < newest:
            return newest, revision
    return None
