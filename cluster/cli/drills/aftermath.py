"""What is held against each other once a drill is over: acknowledged writes, and the states of replicas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

from cluster.cli.drills.figures import Probe
from cluster.client import ApiError, Client
from cluster.schemas import Command
from cluster.schemas import operations as ops
from cluster.system import Address, Clock

AGAIN_AT_ONCE: Final = 32
"""Acknowledged writes that are sent again at a time, count."""

AGREE_S: Final = 10.0
"""Seconds in which all replicas are to hold the same state afterwards."""

LOOK_S: Final = 0.1
"""Seconds between two looks at them."""

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


async def states_agree(client: Client, replicas: dict[str, Address], clock: Clock) -> bool:
    """Whether all replicas come to hold the same state at the same revision."""
    until_s = clock.monotonic_s() + AGREE_S
    while clock.monotonic_s() < until_s:
        statuses = await of_each(replicas, lambda at: client.call(ops.SHOW_STATUS, replica=at, digest=True))
        states = {(status.revision, status.state_digest) for status in statuses.values()}
        if len(statuses) == len(replicas) and len({revision for revision, _ in states}) == 1:
            return len(states) == 1
        await asyncio.sleep(LOOK_S)
    return False


async def of_each(replicas: dict[str, Address], ask: Callable[[Address], Awaitable[_T]]) -> dict[str, _T]:
    """Return what each replica answers that does."""

    async def one(at: Address) -> _T | None:
        try:
            return await ask(at)
        except ApiError:
            return None

    answers = await asyncio.gather(*map(one, replicas.values()))
    return {name: answer for name, answer in zip(replicas, answers, strict=True) if answer is not None}
