"""Whether what clients saw of one object can be explained by one order of operations that respects real time.

The search is Wing and Gong's with Lowe's memory of configurations (G. Lowe, Testing for linearizability, 2017): take
any operation that began before every unfinished one has ended as the next, see whether the model allows its answer,
and remember each pair of (operations taken, state) so that none is searched twice. It is bounded: an unfinished check
says so, and counts as a failure.
"""

from collections.abc import Hashable, Sequence
from enum import StrEnum
from math import inf
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
        may always be had; where the operation could not have taken effect the state stays."""
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


def check(history: Sequence[Operation], model: Model, *, configurations_max: int = CONFIGURATIONS_MAX) -> Found:
    """Search for an order that explains the history of one object."""
    operations = sorted(history, key=lambda operation: operation.called_s)
    required = sum(1 << place for place, operation in enumerate(operations) if operation.answer is not UNKNOWN)
    first = (0, model.initial)
    seen = {first}
    stack = [first]
    furthest, stuck_at = -1, None
    while stack:
        taken, state = stack.pop()
        if taken & required == required:
            return Found(Verdict.LINEARIZABLE, len(seen))
        candidates, blocker = _next(operations, taken)
        if taken.bit_count() > furthest:
            furthest, stuck_at = taken.bit_count(), blocker
        for place in candidates:
            allowed, after = model.step(state, operations[place])
            following = (taken | 1 << place, after)
            if allowed and following not in seen:
                if len(seen) >= configurations_max:
                    return Found(Verdict.UNFINISHED, len(seen), stuck_at)
                seen.add(following)
                stack.append(following)
    return Found(Verdict.NOT_LINEARIZABLE, len(seen), stuck_at)


def _next(operations: Sequence[Operation], taken: int) -> tuple[list[int], Operation | None]:
    """Return the operations that may come next, the likeliest last, and the one that must come before any later call:
    what was not taken, ended first, and is the reason why later calls have to wait."""
    place = (~taken & (taken + 1)).bit_length() - 1
    ended_s, blocker = inf, None
    known: list[int] = []
    unknown: list[int] = []
    while place < len(operations):
        operation = operations[place]
        if operation.called_s > ended_s:
            break
        if not taken >> place & 1:
            if operation.answer is UNKNOWN:
                unknown.append(place)
            else:
                known.append(place)
                if operation.returned_s < ended_s:
                    ended_s, blocker = operation.returned_s, operation
        place += 1
    # Depth first from the end of the list: what ended first, and what nobody saw only when nothing else helps.
    known.sort(key=lambda place: operations[place].returned_s, reverse=True)
    return unknown + known, blocker


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
        return answer in (UNKNOWN, "done" if state == "held" else "refused"), "free"


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
