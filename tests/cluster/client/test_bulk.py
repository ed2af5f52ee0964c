"""Many commands in one request against real TLS servers: what could not be carried out at the moment is sent again."""

import asyncio
import json
from typing import Any

import pytest

from forebay.cluster.client import ApiError, Client
from forebay.cluster.client.client import FULL_QUEUE_S, LEAST_S
from forebay.cluster.schemas.jobs import BulkAnswer
from forebay.cluster.schemas.requests import HoldCommand
from tests.cluster.client.misbehaving import (
    REQUEST_S,
    Behaviour,
    Misbehaving,
    Pki,
    answering,
    dropping,
    failing,
    job,
    serving,
)

IDS = ("a" * 32, "b" * 32, "c" * 32)
COMMANDS = tuple(HoldCommand(command_id=one, job_id=str(at)) for at, one in enumerate(IDS))
DEADLINE_S = 20.0
SHORT_S = 3.5 * REQUEST_S


pytestmark = pytest.mark.usefixtures("either_way")


def done(command_id: str) -> dict[str, Any]:
    return {"command_id": command_id, "status": 200, "revision": 3, "job": job(IDS.index(command_id))}


def refused(command_id: str, status: int, code: str = "no_leader", outcome: str = "rejected") -> dict[str, Any]:
    error = {"code": code, "sentence": f"it is {code}", "outcome": outcome}
    return {"command_id": command_id, "status": status, "error": error}


def results(*each: dict[str, Any]) -> Behaviour:
    return answering({"revision": 9, "results": list(each)})


def sent(server: Misbehaving) -> list[list[str]]:
    """Return the command ids of each request, in order."""
    return [[one["command_id"] for one in json.loads(body)["commands"]] for _, _, body in server.requests]


async def ask(pki: Pki, *behaviours: Behaviour, deadline_s: float | None = None) -> tuple[BulkAnswer, list[list[str]]]:
    """Return the answer and what each request had; a `deadline_s` is one on the clock of the server."""
    async with serving(pki.replica, *behaviours) as server:
        clock = None if deadline_s is None else server.clock
        async with Client([server.address], pki.operator, deadline_s=deadline_s or DEADLINE_S, clock=clock) as client:
            return await client.commands(COMMANDS), sent(server)


def told(answer: BulkAnswer) -> list[tuple[str, int, str]]:
    """Return command, status, and outcome of each result."""
    return [(one.command_id[0], one.status, one.error.outcome if one.error else "done") for one in answer.results]


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_commands_that_could_not_be_carried_out_are_sent_again_alone_with_the_same_ids(pki: Pki, status: int) -> None:
    a, b, c = IDS
    first = results(refused(a, status), refused(b, 404, "unknown_job"), refused(c, status, outcome="unknown"))
    answer, requests = asyncio.run(ask(pki, first, results(refused(a, status), done(c)), results(done(a))))
    assert requests == [[a, b, c], [a, c], [a]]
    assert told(answer) == [("a", 200, "done"), ("b", 404, "rejected"), ("c", 200, "done")]
    assert [one.job.job_id if one.job else None for one in answer.results] == [0, None, 2]


def test_what_may_have_been_carried_out_stays_unknown_until_somebody_knows(pki: Pki) -> None:
    a, b, c = IDS
    late = refused(a, 503, "outcome_unknown", "unknown")
    first, then = results(late, refused(b, 503), done(c)), results(refused(a, 503), refused(b, 503))
    answer, requests = asyncio.run(ask(pki, first, then, deadline_s=SHORT_S))
    assert len(requests) > 2 and requests[1:] == [[a, b]] * (len(requests) - 1)
    assert told(answer) == [("a", 503, "unknown"), ("b", 503, "rejected"), ("c", 200, "done")]


A, B, C = IDS
NOT_NOW = refused(B, 503)
LOST = refused(B, 503, "outcome_unknown", "unknown")


@pytest.mark.parametrize(
    ("behaviours", "outcome"),
    [
        ((results(done(A), NOT_NOW, done(C)), failing(503, "no_leader")), "rejected"),
        ((results(done(A), NOT_NOW, done(C)), dropping()), "unknown"),
        ((results(done(A), NOT_NOW, done(C)), dropping(), results(NOT_NOW)), "unknown"),
        ((results(done(A), NOT_NOW, done(C)), dropping(), failing(403, "permission_denied")), "unknown"),
        ((dropping(), results(done(A), NOT_NOW, done(C)), results(NOT_NOW)), "unknown"),
        ((dropping(), results(done(A), refused(B, 507), done(C))), "unknown"),
        ((dropping(), results(done(A), refused(B, 409), done(C))), "rejected"),
        ((results(done(A), LOST, done(C)), results(refused(B, 507))), "unknown"),
        ((results(done(A), LOST, done(C)), results(NOT_NOW), results(refused(B, 409))), "rejected"),
        ((results(done(A), LOST, done(C)), results(NOT_NOW), results(done(B))), "done"),
    ],
)
def test_what_may_have_been_carried_out_is_never_called_refused(
    pki: Pki, behaviours: tuple[Behaviour, ...], outcome: str
) -> None:
    answer, _ = asyncio.run(ask(pki, *behaviours, deadline_s=SHORT_S))
    assert [told(answer)[at] for at in (0, 2)] == [("a", 200, "done"), ("c", 200, "done")]
    assert told(answer)[1][2] == outcome
    error = answer.results[1].error
    assert (error is not None and error.code == "outcome_unknown") == (outcome == "unknown")


def test_a_full_queue_is_given_the_time_that_replicas_ask_for(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(duration_s: float) -> None:
        waits.append(duration_s)

    monkeypatch.setattr("forebay.cluster.client.client.sleep_for", sleep)
    first = results(refused(A, 503), refused(B, 429, "queue_full"), done(C))
    asyncio.run(ask(pki, first, results(NOT_NOW, done(B)), results(done(A))))
    assert waits[0] == FULL_QUEUE_S > waits[1]


def test_nothing_is_sent_again_that_would_be_cut_short(pki: Pki) -> None:
    """It would be unknown then, which it is not now."""
    deadline_s = REQUEST_S + LEAST_S
    answer, requests = asyncio.run(ask(pki, results(NOT_NOW, NOT_NOW, NOT_NOW), deadline_s=deadline_s))
    assert len(requests) == 1 and {outcome for _, _, outcome in told(answer)} == {"rejected"}


def test_an_answer_with_too_few_results_is_no_answer(pki: Pki) -> None:
    with pytest.raises(ApiError) as caught:
        asyncio.run(ask(pki, results(done(IDS[0]))))
    assert (caught.value.code, caught.value.outcome) == ("bad_answer", "unknown")
    assert caught.value.sentence == "3 commands were sent and 1 answered"
