"""Call to the cluster: requests with the same command ID until a response or the deadline.

Theory of operation
===================

A call is a sequence of *rounds*. In a round each replica gets one turn, the most promising first. A redirect leads to
the leader within that turn, over at most REDIRECTS_MAX hops. A replica that cannot be reached, breaks off, or returns
429, 502, 503 or 504 ends its turn. After a round without success the call backs off, with jitter, and starts the next
one, until the deadline.

The body, including the command ID, is the same in every request. A command whose response was lost is therefore
answered, not repeated (law 6). Its outcome is *unknown* only if the deadline passes after a request may have arrived.

A rejection (any other status from 400) ends the call at once. So does a round in which every reachable replica rejected
the client's certificate or showed an untrusted one. An interactive call also ends once nothing has listened at any
address for half a second: the cluster is then down, not electing.
"""

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import replace

from forebay.cluster.client.attempt import AttemptError, HttpResponse, Sending
from forebay.cluster.client.errors import (
    ANSWER_TOO_LARGE,
    BAD_ANSWER,
    NO_ANSWER,
    OUTCOME_UNKNOWN,
    REDIRECT_LOOP,
    UNREACHABLE,
    UNTRUSTED,
    ApiError,
    error_of,
)
from forebay.cluster.system import Address, AddressError, Clock

_T = TypeVar("_T")

REDIRECTS_MAX: Final = 4
"""Redirects followed in a row, count: one is normal, two happen in an election; more mean that replicas disagree."""

DEADLINE_S: Final = 30.0
"""Default time limit of a call, seconds: many elections long, short enough for an interactive user."""

ATTEMPT_S: Final = 5.0
"""Time for one replica to respond before the next is tried, seconds: ten times the slowest healthy commit."""

CONNECT_S: Final = 1.0
"""Time for a new connection in the first round, seconds, including TLS: a hundred times a healthy one.

A frozen process accepts connections but never completes a handshake. The limit doubles each round, to reach replicas
that are slow because all clients connect at once.
"""

UNREACHABLE_S: Final = 0.5
"""Time an interactive call waits while nothing listens at any address, seconds. A restarting replica takes less."""

FIRST_WAIT_S: Final = 0.05
"""Wait before the second round, seconds: elections take tenths of a second, so an early retry often finds a leader."""

LONGEST_WAIT_S: Final = 1.0
"""Longest wait between rounds, seconds: 1,000 waiting clients then cost a replica about 1,500 requests a second."""

LEAST_SHARE: Final = 0.5
"""Fixed share of a wait; the rest is random, so that clients that failed together do not return together."""

RETRY_AFTER_S_MAX: Final = 60.0
"""Longest accepted Retry-After, seconds; the call's deadline bounds it anyway."""

ENDPOINTS_MAX: Final = 32
"""Addresses kept, count: configured ones and those learned from redirects. A cluster has at most five replicas."""

REDIRECT_STATUSES: Final = frozenset({307, 308})
RETRY_STATUSES: Final = frozenset({429, 502, 503, 504})
TOO_MANY: Final = 429
BLIND_REFUSALS: Final = frozenset({401, 403, 408, TOO_MANY})
"""Rejections below 500 that say nothing about an earlier request: permissions and limits can have changed since."""

RECEIPT_REFUSALS: Final = frozenset({"command_too_old", "command_id_reused", "unknown_session"})
"""Codes of a missing or mismatched cached reply; the earlier request may be the one that took effect. A mismatch occurs
if a replica of another release decoded the command differently.
"""


def is_definite(status: int, code: str = "") -> bool:
    """Return True if a response with this status settles earlier requests with the same command ID.

    A success does, because it carries the reply cached for that ID. So does a rejection that does not depend on the
    time of arrival: earlier requests were rejected too.
    """
    if status < 300:
        return True
    return 400 <= status < 500 and status not in BLIND_REFUSALS and code not in RECEIPT_REFUSALS


EARLIER: Final = "An earlier attempt may have arrived; whether the command took effect is unknown"
"""Appended to a rejection that does not settle earlier requests."""


def send_again(command_id: str) -> str:
    """Return the remedy for an unknown outcome."""
    return f"send it again with the same command id {command_id}"


def unknown_after(error: ApiError, command_id: str) -> ApiError:
    """Convert an indefinite rejection into an unknown outcome, because an earlier request may have taken effect."""
    return ApiError(
        error.status,
        OUTCOME_UNKNOWN,
        f"{error}. {EARLIER}",
        remedy=send_again(command_id),
        outcome="unknown",
        command_id=command_id,
    )


class ClientCall(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a call. `command_id` is set for writes; `leader_only` is false for stale reads."""

    method: str
    target: str
    """Path and query, encoded."""
    body: bytes | None = None
    command_id: str | None = None
    leader_only: bool = True
    deadline_s: float = DEADLINE_S
    attempt_s: float = ATTEMPT_S
    """Time limit of one request, seconds; a long poll adds its own wait."""
    once: bool = False
    """Try each replica once only; the caller chooses the next one."""


def finish(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine that only awaits a blocking exchange to completion.

    Raises:
        RuntimeError: The coroutine waits for an event loop.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: _T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a call without an event loop had to wait for one")


def draw_jitter() -> float:
    """Return a random number from 0 to 1; imports `random` only if a call has to wait."""
    import random

    return random.random()


async def sleep_for(duration_s: float) -> None:
    """Sleep on the running event loop, seconds."""
    import asyncio

    await asyncio.sleep(duration_s)


class BackOff:
    """Waits between the rounds of one call: growing, and randomized across clients."""

    def __init__(self, chance: Callable[[], float] = draw_jitter) -> None:
        self._chance = chance
        self._next_s = FIRST_WAIT_S

    def wait_s(self, retry_after_s: float = 0.0) -> float:
        """Return the next wait in seconds: at least `retry_after_s`, doubled each time up to LONGEST_WAIT_S."""
        wait_s = self._next_s * (LEAST_SHARE + (1 - LEAST_SHARE) * self._chance())
        self._next_s = min(LONGEST_WAIT_S, 2 * self._next_s)
        return max(wait_s, min(retry_after_s, RETRY_AFTER_S_MAX))


def parse_retry_after(text: str | None) -> float:
    """Return the seconds of a Retry-After header; 0.0 for none, a date or an invalid value."""
    try:
        seconds = float(text) if text else 0.0
    except ValueError:
        return 0.0
    return seconds if 0.0 < seconds < float("inf") else 0.0


def redirection(address: Address, location: str | None) -> Address:
    """Return the replica that a redirect of `address` leads to.

    Its certificate must prove that it is a replica of this cluster, as for any endpoint.

    Raises:
        ValueError: The redirect names no replica.
    """
    from urllib.parse import urlsplit

    parts = urlsplit(location or "")
    try:
        if parts.scheme != "https":
            raise AddressError(f"{location!r} is not an https address")
        return Address.parse(parts.netloc)
    except (AddressError, ValueError) as error:
        raise ValueError(f"{address} redirected to {location!r}: {error}") from error


class Endpoints:
    """API addresses of the replicas: the last leader first, recent failures last."""

    def __init__(self, addresses: Iterable[Address]) -> None:
        self._order = list(dict.fromkeys(addresses))
        if not self._order:
            raise ValueError("a client needs the api address of at least one replica")
        if len(self._order) > ENDPOINTS_MAX:
            raise ValueError(f"a client has {len(self._order)} addresses; at most {ENDPOINTS_MAX} are possible")

    def renew(self, addresses: Iterable[Address]) -> None:
        """Replace the addresses, keeping the order of known ones; an empty list changes nothing."""
        wanted = dict.fromkeys(addresses)
        if wanted:
            kept = [address for address in self._order if address in wanted]
            self._order = [*kept, *(address for address in wanted if address not in kept)][:ENDPOINTS_MAX]

    @property
    def order(self) -> tuple[Address, ...]:
        """Return the addresses in the order to try them."""
        return tuple(self._order)

    def next_after(self, tried: frozenset[Address] | set[Address]) -> Address | None:
        """Return the most promising untried address, or None."""
        return next((address for address in self._order if address not in tried), None)

    def prefer(self, address: Address) -> None:
        """Move the address of a leader to the front."""
        if address in self._order:
            self._order.remove(address)
        elif len(self._order) >= ENDPOINTS_MAX:
            return
        self._order.insert(0, address)

    def demote(self, address: Address) -> None:
        """Move an address that did not respond to the end."""
        if address in self._order:
            self._order.remove(address)
            self._order.append(address)


class Caller:
    """Performs calls over one exchange and remembers the last leader."""

    def __init__(
        self,
        exchange: Sending,
        endpoints: Endpoints,
        clock: Clock,
        *,
        unreachable_s: float | None = None,
        sleep: Callable[[float], Awaitable[None]] = sleep_for,
        chance: Callable[[], float] = draw_jitter,
    ) -> None:
        """Create it.

        `unreachable_s`: end a call once nothing has listened at any address for this long, seconds; None: only at its
        deadline.
        """
        self._exchange = exchange
        self._endpoints = endpoints
        self._clock = clock
        self._unreachable_s = unreachable_s
        self._sleep = sleep
        self._chance = chance

    async def perform(self, call: ClientCall) -> HttpResponse:
        """Return the first response with a status below 300.

        Raises:
            ApiError: The request was rejected, or the deadline passed.
        """
        run = _Run(call, self._exchange, self._endpoints, self._clock, BackOff(self._chance), self._unreachable_s)
        return await run.finish(self._sleep)


class _Run:
    """State of one call in progress."""

    def __init__(
        self,
        call: ClientCall,
        exchange: Sending,
        endpoints: Endpoints,
        clock: Clock,
        back_off: BackOff,
        unreachable_s: float | None,
    ) -> None:
        self._call = call
        self._exchange = exchange
        self._endpoints = endpoints
        self._clock = clock
        self._back_off = back_off
        self._unreachable_s = unreachable_s
        self._unreachable_since_s: float | None = None
        """Time since which nothing listens at any address; None: a replica does, or none was tried."""
        self._deadline_s = clock.monotonic_s() + call.deadline_s
        self._may_have_happened = False
        self._retry_after_s = 0.0
        self._last: ApiError | None = None
        """Last failed turn."""
        self._connect_s = CONNECT_S

    async def finish(self, sleep: Callable[[float], Awaitable[None]]) -> HttpResponse:
        while True:
            answer = await self._round()
            if answer is not None:
                return answer
            if self._call.once:
                raise self._last or self._gave_up()
            self._check_reachable()
            self._connect_s *= 2
            wait_s = self._back_off.wait_s(self._retry_after_s)
            if wait_s >= self._left_s():
                # No time remains after the wait, so fail now.
                raise self._gave_up()
            await sleep(wait_s)

    def _check_reachable(self) -> None:
        since_s, now_s = self._unreachable_since_s, self._clock.monotonic_s()
        if self._unreachable_s is None or since_s is None or now_s - since_s < self._unreachable_s:
            return
        addresses = ", ".join(map(str, self._endpoints.order))
        sentence = f"nothing listens at {addresses}: no replica runs there"
        raise self._error(NO_ANSWER, UNREACHABLE, sentence, "start the replicas, or name the right configuration")

    def _left_s(self) -> float:
        return self._deadline_s - self._clock.monotonic_s()

    async def _round(self) -> HttpResponse | None:
        """Try every replica once; return None if none gave a result."""
        tried: set[Address] = set()
        silent: set[Address] = set()
        troubles: list[ApiError] = []
        self._retry_after_s = 0.0
        target = self._endpoints.next_after(tried)
        redirects = 0
        while target is not None:
            if self._left_s() <= 0:
                raise self._gave_up()
            tried.add(target)
            outcome = await self._ask(target)
            if isinstance(outcome, HttpResponse):
                return outcome
            if isinstance(outcome, Address):
                redirects += 1
                if outcome in silent:
                    # The peers have not noticed the leader's failure; another wait for it would cost an attempt.
                    outcome = ApiError(
                        NO_ANSWER, UNREACHABLE, f"{target} redirected to {outcome}, which does not respond"
                    )
                elif redirects <= REDIRECTS_MAX:
                    target = outcome
                    continue
                else:
                    sentence = f"{target} redirected for the {redirects}th time in a row"
                    remedy = "run `forebay cluster members` to see the leader"
                    outcome = ApiError(NO_ANSWER, REDIRECT_LOOP, sentence, remedy=remedy)
            redirects = 0
            if outcome.status == NO_ANSWER and outcome.code == UNREACHABLE:
                silent.add(target)
            troubles.append(outcome)
            if self._last is None or outcome.status != NO_ANSWER or self._left_s() > 0:
                # A failure caused by the call's own deadline says less than an earlier response.
                self._last = outcome
            target = self._endpoints.next_after(tried)
        if not all(isinstance(trouble, AttemptError) and trouble.nobody_listens for trouble in troubles):
            self._unreachable_since_s = None
        elif self._unreachable_since_s is None:
            self._unreachable_since_s = self._clock.monotonic_s()
        untrusted = next((trouble for trouble in troubles if trouble.code == UNTRUSTED), None)
        if untrusted is not None and all(trouble.status == NO_ANSWER for trouble in troubles):
            raise self._error(untrusted.status, untrusted.code, untrusted.sentence, untrusted.remedy)
        return None

    async def _ask(self, address: Address) -> HttpResponse | Address | ApiError:
        """Send one request; return its response, a redirect target, or the reason the turn ended."""
        call = self._call
        timeout_s = min(self._left_s(), call.attempt_s)
        try:
            answer = await self._exchange.send(
                address, call.method, call.target, call.body, timeout_s=timeout_s, connect_s=self._connect_s
            )
        except AttemptError as failure:
            self._endpoints.demote(address)
            self._may_have_happened |= failure.may_have_arrived
            if failure.code == ANSWER_TOO_LARGE:
                raise self._error(NO_ANSWER, failure.code, failure.sentence, failure.remedy) from failure
            return failure
        if answer.status < 300:
            if call.leader_only:
                self._endpoints.prefer(address)
            return replace(answer, unsure=self._may_have_happened)
        if answer.status in REDIRECT_STATUSES:
            try:
                return redirection(address, answer.location)
            except ValueError as fault:
                return ApiError(answer.status, BAD_ANSWER, str(fault), remedy="check the api address of that replica")
        error = error_of(answer.status, answer.body, who=str(address), command_id=call.command_id)
        if answer.status not in RETRY_STATUSES:
            raise self._final(error)
        self._may_have_happened |= error.outcome == "unknown"
        if answer.status == TOO_MANY:
            # A full queue can predict its free space; the end of an election is unpredictable, so the call's back-off
            # applies.
            self._retry_after_s = max(self._retry_after_s, parse_retry_after(answer.retry_after))
        return error

    def _final(self, error: ApiError) -> ApiError:
        """Return the final error of a rejection, taking earlier requests into account."""
        if self._call.command_id is None or not self._may_have_happened or is_definite(error.status, error.code):
            return error
        return unknown_after(error, self._call.command_id)

    def _gave_up(self) -> ApiError:
        too_short = "the deadline is too short for a request"
        last = self._last or ApiError(NO_ANSWER, UNREACHABLE, too_short, remedy="allow more time")
        sentence = f"no replica answered within {self._call.deadline_s:g} s; the last error: {last.sentence}"
        if self._call.command_id is not None and self._may_have_happened:
            return self._error(
                last.status,
                OUTCOME_UNKNOWN,
                f"{sentence}; whether the command took effect is unknown",
                send_again(self._call.command_id),
            )
        remedy = last.remedy or "check that a majority of the replicas runs, and their addresses"
        return self._error(last.status, last.code, sentence, remedy)

    def _error(self, status: int, code: str, sentence: str, remedy: str) -> ApiError:
        unknown = self._call.command_id is not None and self._may_have_happened
        return ApiError(
            status,
            code,
            sentence,
            remedy=remedy,
            outcome="unknown" if unknown else "rejected",
            command_id=self._call.command_id,
        )
