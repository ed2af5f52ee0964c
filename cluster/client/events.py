"""The cluster's events, in order, each once, for as long as somebody reads: connections break, the stream goes on.

Law: what is yielded is what one unbroken stream would have yielded. Events of one command share its revision, so a
stream that broke in the middle of a revision is asked for that revision again, and what had been seen of it is dropped
by its sequence number.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

import msgspec

from cluster.client.attempt import AttemptError
from cluster.client.calls import REDIRECT_STATUSES, REDIRECTS_MAX, RETRY_STATUSES, BackOff, Endpoints, redirection
from cluster.client.errors import BAD_ANSWER, NO_ANSWER, UNREACHABLE, ApiError, error_of
from cluster.client.exchange import Exchange
from cluster.client.sse import ServerSentEvent, SseParser, StreamBroken
from cluster.schemas import EventView
from cluster.system import Address, Clock

IDLE_S: Final = 45.0
"""Seconds of silence after which a stream counts as dead: three of the server's keep-alive comments, 15 s apart."""

CONNECT_S: Final = 2.0
"""Seconds to connect to one replica before the next one is tried."""

GIVE_UP_S: Final = 60.0
"""Seconds without any replica that streams, after which the reader is told: far longer than any election."""

STEADY_S: Final = 10.0
"""Seconds after which a stream that still shows life was no vain attempt, events or not: less than the server's 15 s
between keep-alive comments, and far more than the longest wait between rounds, so that nothing is asked often by it."""

GONE: Final = 410
"""Status with which a replica says that it does not hold the history that was asked for."""


class StreamPosition(msgspec.Struct):
    """How far a reader is: it has everything of the revisions up to `complete`, and of the next one `seen`."""

    complete: int
    seen: tuple[int, int] = (-1, -1)

    def accept(self, event: EventView) -> bool:
        """Say whether the event is new, and remember it; ApiError if the stream went back or left something out."""
        at = (event.revision, event.sequence)
        if at <= self.seen or event.revision <= self.complete:
            return False
        # A later revision has begun: the one before it is complete.
        if event.revision > self.seen[0] > self.complete:
            self.complete = self.seen[0]
        follows = event.sequence == (self.seen[1] + 1 if event.revision == self.seen[0] else 0)
        if not follows:
            raise ApiError(
                NO_ANSWER,
                BAD_ANSWER,
                f"the event stream left something out before event {event.sequence} of revision {event.revision}",
                remedy=f"read again from revision {self.complete}",
            )
        self.seen = at
        return True


class EventStream:
    """Reads events of revisions after `from_revision` from whichever replica streams them."""

    def __init__(
        self,
        exchange: Exchange,
        endpoints: Endpoints,
        clock: Clock,
        *,
        from_revision: int,
        give_up_s: float = GIVE_UP_S,
        idle_s: float = IDLE_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        if from_revision < 0:
            raise ValueError(f"from_revision is {from_revision}; write 0 for everything, or a revision")
        self._exchange = exchange
        # Its own copy: that a stream ended says nothing about who leads.
        self._endpoints = Endpoints(endpoints.order)
        self._clock = clock
        self._position = StreamPosition(from_revision)
        self._give_up_s = give_up_s
        self._idle_s = idle_s
        self._sleep = sleep
        self._chance = chance

    async def read(self) -> AsyncGenerator[EventView, None]:
        """Yield events for ever; ApiError if a replica refuses, or none has streamed for `give_up_s`."""
        back_off = BackOff(self._chance)
        heard_s = self._clock.monotonic_s()
        tried: set[Address] = set()
        trouble = ""
        streamed = False
        untrusted: AttemptError | None = None
        not_held: ApiError | None = None
        target = self._endpoints.next_after(tried)
        redirects = 0
        while True:
            if target is None:
                if untrusted is not None and not streamed:
                    # Nobody in the whole round could be talked to, and trust does not come by waiting.
                    raise untrusted
                if self._clock.monotonic_s() - heard_s >= self._give_up_s:
                    raise ApiError(
                        NO_ANSWER,
                        UNREACHABLE,
                        f"no replica has streamed events for {self._give_up_s:g} s; the last trouble: {trouble}",
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
                        # A replica that streams and at once breaks off, over and over, must not be asked in a storm:
                        # only progress, or a stream that lasted, gives all others their turn without a wait.
                        if item is not None or heard_s - asked_s >= STEADY_S:
                            back_off = BackOff(self._chance)
                            tried = {target}
                        if item is not None:
                            yield item
                            # How long the reader was busy with it says nothing about the replicas.
                            heard_s = self._clock.monotonic_s()
                trouble = f"{target} ended the stream"
            except AttemptError as failure:
                untrusted = failure if failure.is_untrusted else untrusted
                trouble = failure.sentence
            except ApiError as error:
                if error.status != GONE:
                    raise
                # A replica that was caught up by a snapshot lacks this history; another one may hold it.
                untrusted, not_held, trouble = None, error, error.sentence
            except StreamBroken as broken:
                untrusted = None
                trouble = f"{target}: {broken}"
            self._endpoints.demote(target)
            redirects += following is not None
            target = following if following and redirects <= REDIRECTS_MAX else self._endpoints.next_after(tried)

    async def _follow(self, address: Address) -> AsyncGenerator[EventView | Address | None, None]:
        """Yield the new events of one connection, or the one address that it redirects to; None for a sign of life.

        A sign of life is that the stream was opened, and whatever arrives on it, keep-alive comments too.
        """
        path = f"/v1/events?from={self._position.complete}"
        async with self._exchange.stream(address, path, connect_s=CONNECT_S, idle_s=self._idle_s) as (answer, chunks):
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
            yield None
            async for chunk in chunks:
                yield None
                for raw in parser.feed(chunk):
                    event = _decode(raw)
                    if self._position.accept(event):
                        yield event


def _decode(raw: ServerSentEvent) -> EventView:
    try:
        return msgspec.json.decode(raw.data, type=EventView)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StreamBroken(f"event {raw.id or '?'} cannot be read: {error}") from error
