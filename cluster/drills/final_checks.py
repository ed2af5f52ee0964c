"""Checks after a drill: acknowledged writes, the states of the replicas, and the history of events and leaders.

A check that cannot be made raises CheckImpossible, because a missing answer under load is no evidence of a fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Final, TypeVar

import msgspec

from forebay.cluster.client import ApiError, Client, is_definite, read_event_pages
from forebay.cluster.drills.figures import Probe
from forebay.cluster.schemas import Command, LeaderTermView, StateDigestAnswer, StatusView, StoryRow
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system import Address, Clock

AGAIN_AT_ONCE: Final = 32
"""Maximum number of acknowledged writes that are resent concurrently."""

AGREE_S: Final = 60.0
"""Time limit for all replicas to report their states, seconds: a history service may be behind."""

LOOK_S: Final = 0.1
"""Seconds between two requests for the states."""

ROWS_AT_ONCE: Final = 1_000
"""Maximum number of events requested at once."""

STRETCH_S: Final = 30.0
"""Time limit for one event page, seconds: a history service may be behind."""

_T = TypeVar("_T")


class CheckImpossible(Exception):
    """Check that could not be made; its text is the reason."""


class Resent(msgspec.Struct, frozen=True):
    """Answers to acknowledged writes that were resent."""

    revisions: dict[str, int]
    """Revision of each answer, by command ID; writes that the cluster rejected are missing."""
    unanswered: dict[str, str]
    """Reasons for writes without a definite answer, by command ID."""

    def require_all(self) -> None:
        """Check that every write was answered.

        Raises:
            CheckImpossible: if a write has no definite answer.
        """
        if self.unanswered:
            why = next(iter(self.unanswered.values()))
            raise CheckImpossible(f"{len(self.unanswered)} writes had no answer when they were resent: {why}")


async def resend_writes(client: Client, drill: int, writes: Iterable[Probe]) -> Resent:
    """Resend each acknowledged write and return the answers."""
    found, room = Resent({}, {}), asyncio.Semaphore(AGAIN_AT_ONCE)

    async def again(command_id: str) -> None:
        async with room:
            try:
                answer = await client.call(ops.PROBE_DRILL, Command(command_id=command_id), drill=drill)
            except ApiError as error:
                if not is_definite(error.status, error.code):
                    found.unanswered[command_id] = str(error)
            else:
                found.revisions[command_id] = answer.revision

    await asyncio.gather(*(again(one.command_id) for one in writes if one.answered_s is not None))
    return found


async def find_disagreement(client: Client, replicas: dict[str, Address], clock: Clock) -> str:
    """Return a sentence if the replicas hold different states, or an empty string.

    Under load, replicas rarely report the same revision. Then each replica is asked for its digest at the highest
    revision reported so far, once the replica has reached that revision.

    Raises:
        CheckImpossible: if a replica did not report its state in time.
    """
    until_s, revision = clock.monotonic_s() + AGREE_S, 0
    while True:
        states: dict[str, StatusView | StateDigestAnswer] = {}
        if not revision:
            states |= await ask_each(replicas, lambda at: client.call(ops.SHOW_STATUS, replica=at, digest=True))
            if len({state.revision for state in states.values()}) > 1:
                revision = max(state.revision for state in states.values())
        if revision:
            states = {**await _digests_at(client, replicas, revision)}
        if len(states) == len(replicas):
            agree = len({(state.revision, state.state_digest) for state in states.values()}) == 1
            return "" if agree else "the replicas' states differ"
        if clock.monotonic_s() > until_s:
            silent = ", ".join(sorted(replicas.keys() - states.keys()))
            raise CheckImpossible(f"{silent or 'a replica'} did not report its state within {AGREE_S:g} s")
        await asyncio.sleep(LOOK_S)


async def _digests_at(client: Client, replicas: dict[str, Address], revision: int) -> dict[str, StateDigestAnswer]:
    """Return the state digests at a revision, by name of the replicas that answered."""
    return await ask_each(
        replicas, lambda at: client.call(ops.SHOW_STATE_DIGEST, at=str(revision), replica=at, stale=True)
    )


async def read_events(client: Client, rows_max: int | None = None, **asked: Any) -> AsyncIterator[StoryRow]:
    """Yield events, oldest first, at most `rows_max`."""
    count = 0
    async for answer in read_event_pages(client, limit=ROWS_AT_ONCE, deadline_s=STRETCH_S, **asked):
        for row in answer.rows:
            if count == rows_max:
                return
            count += 1
            yield row


async def terms_since(client: Client, clock: Clock, term: int) -> tuple[LeaderTermView, ...]:
    """Return the leaders' terms after `term`, oldest first, once the history has caught up.

    Raises:
        CheckImpossible: if the history did not catch up in time.
        ApiError: if the cluster did not answer.
    """
    until_s = clock.monotonic_s() + AGREE_S
    committed = (await client.call(ops.SHOW_STATUS)).commit_index
    while True:
        terms = (await client.call(ops.LIST_LEADERS)).terms
        if terms and terms[-1].last_index >= committed:
            return tuple(one for one in terms if one.term > term)
        if clock.monotonic_s() > until_s:
            raise CheckImpossible(f"the history did not reach entry {committed} within {AGREE_S:g} s")
        await asyncio.sleep(LOOK_S)


async def ask_each(replicas: dict[str, Address], ask: Callable[[Address], Awaitable[_T]]) -> dict[str, _T]:
    """Call `ask` for all replicas concurrently and return the successful answers by name."""

    async def one(at: Address) -> _T | None:
        try:
            return await ask(at)
        except ApiError:
            return None

    answers = await asyncio.gather(*map(one, replicas.values()))
    return {name: answer for name, answer in zip(replicas, answers, strict=True) if answer is not None}
