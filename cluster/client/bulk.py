"""The client's call for many commands at once, each with a result of its own.

A request that came through may still hold commands that could not be carried out at that moment: the replica stopped
leading in the midst of them, or its queue was full. Those, and only those, are sent again with the same ids until the
deadline, as a command that is sent alone is.

What is told of a command is true of all requests that it was in. "Not now" says nothing of the requests before it: one
that may have been carried out stays unknown until an answer that `tells`.
"""

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from cluster.client.calls import EARLIER, RETRY_STATUSES, TOO_MANY, BackOff, Call, send_again, tells
from cluster.client.errors import BAD_ANSWER, OUTCOME_UNKNOWN, ApiError
from cluster.schemas import jobs, operations, requests
from cluster.system import Clock

_T = TypeVar("_T")

UNKNOWN: Final = "unknown"
OK: Final = 200

FULL_QUEUE_S: Final = 1.0
"""Least wait after a full queue, seconds: what a replica's Retry-After says, which single results have no room for."""

LEAST_S: Final = 0.1
"""Seconds that a request must have to be worth sending: one that is cut short makes a refusal an unknown outcome."""


class BulkCalls(Protocol):
    """What the call needs of a client."""

    _clock: Clock
    _deadline_s: float

    async def _perform(self, call: Call, kind: type[_T]) -> tuple[_T, bool]: ...


class Bulk:
    """Mixed into the client."""

    async def commands(
        self: BulkCalls, commands: Sequence[requests.BulkCommand], *, deadline_s: float | None = None
    ) -> jobs.BulkAnswer:
        """Send many commands in one request; each gets its own result, in order, and a refusal of one stops none.

        Commands that could not be carried out at the moment are sent again until the deadline, after the others. The
        answer's revision is that of the last request.
        """
        left_s = self._deadline_s if deadline_s is None else deadline_s
        until_s = self._clock.monotonic_s() + left_s
        back_off = BackOff()
        answer = await _send(self, commands, left_s)
        results = list(answer.results)
        while waiting := [at for at, result in enumerate(results) if result.status in RETRY_STATUSES]:
            wait_s = back_off.wait_s(FULL_QUEUE_S if any(results[at].status == TOO_MANY for at in waiting) else 0.0)
            left_s = until_s - self._clock.monotonic_s() - wait_s
            if left_s < LEAST_S:
                break
            await asyncio.sleep(wait_s)
            try:
                answer = await _send(self, [commands[at] for at in waiting], left_s)
            except ApiError as error:
                if error.outcome == UNKNOWN:
                    for at in waiting:
                        results[at] = _unknown(results[at])
                break
            for at, result in zip(waiting, answer.results, strict=True):
                was_unknown = _is_unknown(results[at])
                results[at] = _unknown(result) if was_unknown and not _tells(result) else result
        return jobs.BulkAnswer(revision=answer.revision, results=tuple(results))


async def _send(client: BulkCalls, commands: Sequence[requests.BulkCommand], deadline_s: float) -> jobs.BulkAnswer:
    # Any of the ids tells an unknown outcome apart; the whole request is what is sent again.
    marker = commands[0].command_id if commands else None
    body = msgspec.json.encode(requests.BulkRequest(commands=tuple(commands)))
    row = operations.SEND_COMMANDS
    call = Call(method=row.method, target=row.path, body=body, command_id=marker, deadline_s=deadline_s)
    answer, unsure = await client._perform(call, row.answer)
    if len(answer.results) != len(commands):
        raise ApiError(
            OK,
            BAD_ANSWER,
            f"{len(commands)} commands were sent and {len(answer.results)} answered",
            remedy="check that client and replicas are of the same release",
            outcome=UNKNOWN,
            command_id=marker,
        )
    if unsure:
        answer = replace(answer, results=tuple(one if _tells(one) else _unknown(one) for one in answer.results))
    return answer


def _tells(result: jobs.CommandResult) -> bool:
    return tells(result.status, result.error.code if result.error is not None else "")


def _is_unknown(result: jobs.CommandResult) -> bool:
    return result.error is not None and result.error.outcome == UNKNOWN


def _unknown(result: jobs.CommandResult) -> jobs.CommandResult:
    """Return the result with what it does not know: whether an earlier request was carried out."""
    if result.error is None or _is_unknown(result):
        return result
    sentence, remedy = f"{result.error.sentence}. {EARLIER}", send_again(result.command_id)
    error = replace(result.error, code=OUTCOME_UNKNOWN, sentence=sentence, remedy=remedy, outcome=UNKNOWN)
    return replace(result, error=error)
