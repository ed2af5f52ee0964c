"""Laws that hold for a call whatever the replicas do: over every script of answers, in virtual time."""

import asyncio
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.cluster.client.attempt import AttemptError, HttpResponse
from forebay.cluster.client.calls import CONNECT_S, REDIRECTS_MAX, UNREACHABLE_S, Caller, ClientCall, Endpoints
from forebay.cluster.client.errors import UNREACHABLE, UNTRUSTED, ApiError
from forebay.cluster.client.exchange import Exchange
from forebay.cluster.system.address import Address
from tests.clocks import ManualClock

REPLICAS = tuple(Address("127.0.0.1", port) for port in (1, 2, 3))
COMMAND_ID = "017f22e279b07cc398c4dc0c0c07398f"
DEADLINE_S = 8.0
SLACK_S = 1e-6
"""Manual time is kept in whole microseconds."""


def error_body(outcome: str, code: str = "c") -> bytes:
    return json.dumps({"error": {"code": code, "sentence": "s", "outcome": outcome}}).encode()


HAPPENINGS = {
    "ok": HttpResponse(201, b"{}"),
    "rejected": HttpResponse(409, error_body("rejected")),
    "reused": HttpResponse(409, error_body("rejected", "command_id_reused")),
    "forbidden": HttpResponse(403, error_body("rejected")),
    "full": HttpResponse(507, error_body("rejected")),
    "busy": HttpResponse(429, error_body("rejected"), retry_after="1"),
    "no leader": HttpResponse(503, error_body("rejected")),
    "unknown": HttpResponse(503, error_body("unknown")),
    "to 1": HttpResponse(307, b"", location="https://127.0.0.1:1/v1/jobs"),
    "to 2": HttpResponse(307, b"", location="https://127.0.0.1:2/v1/jobs"),
    "nowhere": HttpResponse(307, b"", location="http://x"),
    "down": AttemptError("down", code=UNREACHABLE, may_have_arrived=False),
    "nobody": AttemptError("nobody", code=UNREACHABLE, may_have_arrived=False, nobody_listens=True),
    "cut": AttemptError("cut", code=UNREACHABLE, may_have_arrived=True),
    "silent": AttemptError("silent", code=UNREACHABLE, may_have_arrived=True),
    "untrusted": AttemptError("untrusted", code=UNTRUSTED, may_have_arrived=False),
}
ENDS = {"ok", "rejected", "reused", "forbidden", "full"}
ARRIVES = {"ok", "unknown", "cut", "silent"}


class Script(Exchange):
    """Answers each request with the next happening, and with the last one for ever; time passes as it would."""

    def __init__(self, clock: ManualClock, happenings: list[str]) -> None:
        self._clock = clock
        self._happenings = happenings
        self.sent: list[tuple[Address, str, str, bytes | None]] = []
        self.happened: list[str] = []
        self.connects_s: list[float] = []

    async def send(
        self, address: Address, method: str, target: str, body: bytes | None, *, timeout_s: float, connect_s: float
    ) -> HttpResponse:
        assert timeout_s > 0
        self.connects_s.append(connect_s)
        self.sent.append((address, method, target, body))
        kind = self._happenings[min(len(self.happened), len(self._happenings) - 1)]
        self.happened.append(kind)
        self._clock.advance(timeout_s if kind == "silent" else min(timeout_s, 0.001))
        happening = HAPPENINGS[kind]
        if isinstance(happening, AttemptError):
            raise happening
        return happening


def perform(
    happenings: list[str], deadline_s: float = DEADLINE_S, unreachable_s: float | None = None
) -> tuple[Script, HttpResponse | ApiError, float]:
    """Perform one write against the script; return it, what came of it, and how long it took, seconds."""
    clock = ManualClock()
    script = Script(clock, happenings)

    async def sleep(duration_s: float) -> None:
        clock.advance(duration_s)

    caller = Caller(script, Endpoints(REPLICAS), clock, unreachable_s=unreachable_s, sleep=sleep, chance=lambda: 0.5)
    call = ClientCall(method="POST", target="/v1/jobs", body=b"{}", command_id=COMMAND_ID, deadline_s=deadline_s)

    async def run() -> HttpResponse | ApiError:
        try:
            return await caller.perform(call)
        except ApiError as error:
            return error

    return script, asyncio.run(run()), clock.monotonic_s()


def check(happenings: list[str]) -> None:
    script, came, took_s = perform(happenings)
    happened = script.happened
    # One deadline for everything.
    assert took_s <= DEADLINE_S + SLACK_S
    # The same request, and with it the same command id, each time.
    assert {request[1:] for request in script.sent} == {("POST", "/v1/jobs", b"{}")}
    # It ends at the first answer or rejection, and not before without cause.
    assert not ENDS & set(happened[:-1])
    if isinstance(came, HttpResponse):
        assert happened[-1] == "ok"
        assert came.unsure == bool(ARRIVES & set(happened[:-1]))
        return
    # A rejection of the content would have met the first request, too; one of the caller, or a full disk, would not.
    if happened[-1] == "rejected":
        assert (came.status, came.outcome) == (409, "rejected")
        return
    # It says unknown exactly where something may have arrived.
    assert (came.outcome == "unknown") == bool(ARRIVES & set(happened))
    assert came.command_id == COMMAND_ID
    # No storm: a round asks three replicas over at most REDIRECTS_MAX hops each, and rounds are apart.
    assert len(happened) <= 3 * (REDIRECTS_MAX + 1) * 20


@pytest.mark.parametrize("first", HAPPENINGS)
def test_the_laws_hold_over_the_product_of_two_happenings_and_an_end(first: str) -> None:
    for second, end in itertools.product(HAPPENINGS, HAPPENINGS):
        check([first, second, end])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(sorted(HAPPENINGS)), min_size=1, max_size=40))
def test_the_laws_hold_over_any_script(happenings: list[str]) -> None:
    check(happenings)


@pytest.mark.parametrize("trouble", ["busy", "no leader", "unknown", "down", "cut", "nowhere", "to 1", "to 2"])
def test_a_trouble_that_passes_in_time_is_survived(trouble: str) -> None:
    _, came, _ = perform([trouble] * 6 + ["ok"])
    assert isinstance(came, HttpResponse)


def test_a_person_is_told_within_a_second_that_nothing_listens_anywhere() -> None:
    _, came, took_s = perform(["nobody"], unreachable_s=UNREACHABLE_S)
    assert isinstance(came, ApiError) and UNREACHABLE_S <= took_s < 1
    assert came.sentence.startswith("nothing listens at 127.0.0.1:1, 127.0.0.1:2, 127.0.0.1:3")
    assert (came.code, came.outcome) == (UNREACHABLE, "rejected")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(sorted(HAPPENINGS)), min_size=1, max_size=40))
def test_nobody_is_given_up_before_the_deadline_while_anybody_listens(happenings: list[str]) -> None:
    patient, came, took_s = perform(happenings)
    script, hasty, hasty_s = perform(happenings, unreachable_s=UNREACHABLE_S)
    if script.happened == patient.happened:
        assert (type(hasty), hasty_s) == (type(came), took_s)
        return
    assert isinstance(hasty, ApiError) and hasty.sentence.startswith("nothing listens")
    assert set(script.happened[-3:]) == {"nobody"}
    # What may have arrived before is unknown all the same.
    assert (hasty.outcome == "unknown") == bool(ARRIVES & set(script.happened))


def test_waiting_for_a_full_queue_is_as_long_as_it_says() -> None:
    _, came, took_s = perform(["busy", "busy", "busy", "ok"])
    assert isinstance(came, HttpResponse)
    assert 1.0 <= took_s < 2.0


def test_only_untrusted_replicas_end_a_call_in_its_first_round() -> None:
    script, came, _ = perform(["untrusted"])
    assert isinstance(came, ApiError)
    assert came.code == UNTRUSTED
    assert [request[0] for request in script.sent] == list(REPLICAS)


def test_an_answer_says_more_than_the_silence_that_the_deadline_cut_short() -> None:
    script, came, _ = perform(["busy", "busy", "busy", "silent"], deadline_s=3.0)
    assert script.happened == ["busy", "busy", "busy", "silent"]
    assert isinstance(came, ApiError) and came.status == 429


def test_each_round_gives_a_new_connection_twice_the_time_of_the_one_before() -> None:
    script, _, _ = perform(["down"])
    assert script.connects_s[:9] == [CONNECT_S] * 3 + [2 * CONNECT_S] * 3 + [4 * CONNECT_S] * 3
