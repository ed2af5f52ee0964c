"""What is held against each other once a drill is over: acknowledged writes, and the states of replicas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Final, TypeVar

from cluster.cli.drills.figures import Probe
from cluster.client import ApiError, Client, stretches
from cluster.schemas import Command, StateDigestAnswer, StatusView, StoryRow
from cluster.schemas import operations as ops
from cluster.system import Address, Clock

AGAIN_AT_ONCE: Final = 32
"""Acknowledged writes that are sent again at a time, count."""

AGREE_S: Final = 60.0
"""Seconds in which all replicas are to say which state they hold afterwards: who looks into the past may be behind."""

LOOK_S: Final = 0.1
"""Seconds between two looks at them."""

ROWS_AT_ONCE: Final = 1_000
"""Rows of what happened that are asked for at a time, count."""

STRETCH_S: Final = 30.0
"""How long one stretch of what happened may take, seconds: whoever looks may be behind, and nobody waits for it."""

_T = TypeVar("_T")


async def answered_again(client: Client, drill: int, writes: Iterable[Probe]) -> dict[str, int]:
    """Return the revision that each acknowledged write is answered with when it is sent again, by command id."""
    found, room = dict[str, int](), asyncio.Semaphore(AGAIN_AT_ONCE)

    async def again(command_id: str) -> None:
        async with room:
            with contextlib.suppress(ApiError):
                answer = await client.call(ops.PROBE_DRILL, Command(command_id=command_id), drill=drill)
                found[command_id] = answer.revision

    await asyncio.gather(*(again(one.command_id) for one in writes if one.answered_s is not None))
    return found


async def disagreement(client: Client, replicas: dict[str, Address], clock: Clock) -> str:
    """Return why the replicas cannot be said to hold the same state, in words; empty where they do.

    Where commands go on, no two of them are met at the same revision: then each says what it had at the one that was
    the last of any, as soon as it has come there.
    """
    until_s, revision = clock.monotonic_s() + AGREE_S, 0
    while True:
        states: dict[str, StatusView | StateDigestAnswer] = {}
        if not revision:
            states |= await of_each(replicas, lambda at: client.call(ops.SHOW_STATUS, replica=at, digest=True))
            if len({state.revision for state in states.values()}) > 1:
                revision = max(state.revision for state in states.values())
        if revision:
            states = {**await _held_at(client, replicas, revision)}
        if len(states) == len(replicas):
            agree = len({(state.revision, state.state_digest) for state in states.values()}) == 1
            return "" if agree else "not all replicas hold the same state"
        if clock.monotonic_s() > until_s:
            silent = ", ".join(sorted(replicas.keys() - states.keys()))
            return f"{silent} did not say within {AGREE_S:g} s which state is held there"
        await asyncio.sleep(LOOK_S)


async def _held_at(client: Client, replicas: dict[str, Address], revision: int) -> dict[str, StateDigestAnswer]:
    """Return what each replica held at a revision, of those that say so."""
    return await of_each(
        replicas, lambda at: client.call(ops.SHOW_STATE_DIGEST, at=str(revision), replica=at, stale=True)
    )


async def happened(client: Client, rows_max: int | None = None, **asked: Any) -> AsyncIterator[StoryRow]:
    """Yield what happened, oldest first, to its end or `rows_max` rows of it."""
    count = 0
    async for answer in stretches(client, limit=ROWS_AT_ONCE, deadline_s=STRETCH_S, **asked):
        for row in answer.rows:
            if count == rows_max:
                return
            count += 1
            yield row


async def of_each(replicas: dict[str, Address], ask: Callable[[Address], Awaitable[_T]]) -> dict[str, _T]:
    """Return what each replica answers that does."""

    async def one(at: Address) -> _T | None:
        try:
            return await ask(at)
        except ApiError:
            return None

    answers = await asyncio.gather(*map(one, replicas.values()))
    return {name: answer for name, answer in zip(replicas, answers, strict=True) if answer is not None}
