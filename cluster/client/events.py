"""Event stream of the cluster: every event once and in order, across broken connections.

Law: it yields what one unbroken stream would have yielded. Events of one command share its revision. After a break
within a revision the stream requests that revision again and drops known events by their sequence number.
"""

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

import msgspec

from forebay.cluster.client.attempt import AttemptError, Streaming
from forebay.cluster.client.calls import (
    REDIRECT_STATUSES,
    REDIRECTS_MAX,
    RETRY_STATUSES,
    BackOff,
    Endpoints,
    draw_jitter,
    redirection,
    sleep_for,
)
from forebay.cluster.client.errors import BAD_ANSWER, NO_ANSWER, UNREACHABLE, ApiError, error_of
from forebay.cluster.client.sse import ServerSentEvent, SseParser, StreamBroken
from forebay.cluster.schemas import EventView
from forebay.cluster.system import Address, Clock

IDLE_S: Final = 45.0
"""Silence after which a stream counts as dead, seconds: three of the server's keep-alive comments, 15 s apart."""

CONNECT_S: Final = 2.0
"""Time to connect to one replica before the next is tried, seconds."""

GIVE_UP_S: Final = 60.0
"""Time without any streaming replica before the reader gets an error, seconds: far longer than any election."""

STEADY_S: Final = 10.0
"""Duration after which a live stream counts as a success even without events, seconds: less than the server's 15 s
between keep-alive comments, and much longer than the longest wait between rounds, which limits reconnects.
"""

LEAST_S: Final = 0.1
"""Shortest time for a replica to begin a stream, seconds."""

GONE: Final = 410
"""Status of a replica that does not hold the requested history."""


class StreamPosition(msgspec.Struct):
    """Progress of a reader: all revisions up to `complete`, and of the next one the events in `seen`."""

    complete: int
    seen: tuple[int, int] = (-1, -1)

    def accept(self, event: EventView) -> bool:
        """Record the event and return True if it is new.

        Raises:
            ApiError: The stream went back or skipped events.
        """
        at = (event.revision, event.sequence)
        if at <= self.seen or event.revision <= self.complete:
            return False
        follows = event.sequence == (self.seen[1] + 1 if event.revision == self.seen[0] else 0)
        if not follows:
            raise ApiError(
                NO_ANSWER,
                BAD_ANSWER,
                f"the event stream skipped events before event {event.sequence} of revision {event.revision}",
                remedy=f"read again from revision {self.complete}",
            )
        # A later revision has begun with its first event, so the previous one is complete.
        if event.revision > self.seen[0] > self.complete:
            self.complete = self.seen[0]
        self.seen = at
        return True


class EventStream:
    """Reads the events after a position from any replica that streams them."""

    def __init__(
        self,
        exchange: Streaming,
        endpoints: Endpoints,
        clock: Clock,
        position: StreamPosition,
        *,
        give_up_s: float = GIVE_UP_S,
        idle_s: float = IDLE_S,
        quiet_s: float | None = None,
        sleep: Callable[[float], Awaitable[None]] = sleep_for,
        chance: Callable[[], float] = draw_jitter,
    ) -> None:
        """`quiet_s`: end after about this many seconds without an event; None: never.

        Raises:
            ValueError: The position is before the first revision.
        """
        if position.complete < 0:
            raise ValueError(f"the revision {position.complete} does not exist; use a revision, or 0 for all events")
        self._exchange = exchange
        # A private copy, because the end of a stream says nothing about the leader.
        self._endpoints = Endpoints(endpoints.order)
        self._clock = clock
        self._position = position
        self._give_up_s = give_up_s
        self._idle_s = idle_s
        self._quiet_s = quiet_s
        self._last_event_s: float | None = None
        """Time of the last event, or of the first opening; None before it."""
        self._sleep = sleep
        self._chance = chance

    async def read(self) -> AsyncGenerator[EventView, None]:
        """Yield events, forever or until there were none for `quiet_s`.

        Raises:
            ApiError: A replica rejects the request, or none has streamed for `give_up_s`.
        """
        back_off = BackOff(self._chance)
        heard_s = self._clock.monotonic_s()
        tried: set[Address] = set()
        trouble = ""
        streamed = False
        untrusted: AttemptError | None = None
        not_held: ApiError | None = None
        target = self._endpoints.next_after(tried)
        redirects = 0
        while not self._is_quiet():
            if target is None:
                if untrusted is not None and not streamed:
                    # No replica of the round is trusted, and waiting does not change that.
                    raise untrusted
                if self._clock.monotonic_s() - heard_s >= self._give_up_s:
                    raise ApiError(
                        NO_ANSWER,
                        UNREACHABLE,
                        f"no replica has streamed events for {self._give_up_s:g} s; the last error: {trouble}",
                        remedy="check that the replicas run, and their addresses",
                    )
                if not_held is not None and not streamed:
                    raise not_held
                await self._sleep(back_off.wait_s())
                streamed, untrusted, not_held = False, None, None
                tried.clear()
                target = self._endpoints.next_after(tried)
                continue
            tried.add(target)
            following: Address | None = None
            asked_s = self._clock.monotonic_s()
            try:
                async with contextlib.aclosing(self._follow(target)) as items:
                    async for item in items:
                        if isinstance(item, Address):
                            following = item
                            break
                        heard_s, redirects, streamed = self._clock.monotonic_s(), 0, True
                        # A replica that repeatedly opens and breaks a stream must not be retried without a wait. Only
                        # progress, or a stream that lasted, resets the round.
                        if item is not None or heard_s - asked_s >= STEADY_S:
                            back_off = BackOff(self._chance)
                            tried = {target}
                        if item is not None:
                            yield item
                            # Exclude the time the reader spent on the event.
                            heard_s = self._last_event_s = self._clock.monotonic_s()
                trouble = f"{target} ended the stream"
            except AttemptError as failure:
                untrusted = failure if failure.is_untrusted else untrusted
                trouble = failure.sentence
            except ApiError as error:
                if error.status != GONE:
                    raise
                # A replica restored from a snapshot lacks this history; another may hold it.
                untrusted, not_held, trouble = None, error, error.sentence
            except StreamBroken as broken:
                untrusted = None
                trouble = f"{target}: {broken}"
            self._endpoints.demote(target)
            redirects += following is not None
            target = following if following and redirects <= REDIRECTS_MAX else self._endpoints.next_after(tried)

    def _is_quiet(self) -> bool:
        """Return whether no event came for the requested time."""
        if self._quiet_s is None or self._last_event_s is None:
            return False
        return self._clock.monotonic_s() - self._last_event_s >= self._quiet_s

    async def _follow(self, address: Address) -> AsyncGenerator[EventView | Address | None, None]:
        """Yield the new events of one connection, or a redirect target; None for each sign of life.

        A sign of life is the opening of the stream or any received data, including keep-alive comments.
        """
        path = f"/v1/events?from={self._position.complete}"
        idle_s = self._idle_s if self._quiet_s is None else max(LEAST_S, min(self._idle_s, self._quiet_s))
        async with self._exchange.stream(address, path, connect_s=CONNECT_S, idle_s=idle_s) as (answer, chunks):
            if answer.status in REDIRECT_STATUSES:
                try:
                    yield redirection(address, answer.location)
                except ValueError as fault:
                    raise StreamBroken(str(fault)) from fault
                return
            if answer.status != 200:
                error = error_of(answer.status, answer.body, who=str(address), command_id=None)
                if answer.status in RETRY_STATUSES:
                    raise StreamBroken(error.sentence)
                raise error
            parser = SseParser()
            if self._last_event_s is None:
                self._last_event_s = self._clock.monotonic_s()
            yield None
            async for chunk in chunks:
                yield None
                for raw in parser.feed(chunk):
                    event = _decode(raw)
                    if self._position.accept(event):
                        yield event
                if self._is_quiet():
                    return


def _decode(raw: ServerSentEvent) -> EventView:
    try:
        return msgspec.json.decode(raw.data, type=EventView)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StreamBroken(f"event {raw.id or '?'} is not valid: {error}") from error
