"""Delivery of events to one sink: read, send, wait for the reply, and only then go on.

The position is soft state of the leader. It moves only after the receiver has accepted a batch, so each leader's
accepted batches continue without a gap from the mark at which it began, and the events before that mark were accepted
earlier. First arrivals are therefore in order, whichever replica leads.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Final

from forebay.cluster.api.sinks.cloud_events import batch_of
from forebay.cluster.api.sinks.sending import PostOutcome, PostResult
from forebay.cluster.api.sinks.source import EventBatch, EventSource, HistoryGap, Position
from forebay.cluster.config import SinkConfig
from forebay.cluster.schemas import selected_kinds
from forebay.cluster.system import Clock
from forebay.replica.values import MICROSECONDS_PER_SECOND, NEVER, Instant
from forebay.wal import LedgerBroken

LOGGER = logging.getLogger(__name__)

LINGER_S: Final = 0.1
"""Pause before new events are sent, seconds, so that those of a busy moment share a request."""

RETRY_S: Final = 1.0
RETRY_S_MAX: Final = 60.0
"""First and longest pause before a failed request is repeated, seconds; doubled each time."""

REFUSED_RETRY_S: Final = 300.0
"""Pause after a request that the receiver rejects, seconds: an operator has to change something first."""

GONE_RETRY_S: Final = 3_600.0
"""Pause after the receiver wants no more events, seconds."""

JITTER: Final = 0.5
"""Random part of a pause, as a share of it, so that sinks of one receiver do not retry together."""

HISTORY_WAIT_S: Final = 3_600.0
"""Time for peers to supply missing entries, seconds; then they count as lost. A history is complete in minutes."""

Post = Callable[[SinkConfig, bytes], Awaitable[PostResult]]
"""Sends a batch; never raises."""

Sleep = Callable[[float], Awaitable[None]]


class SinkState(StrEnum):
    """State of a delivery."""

    ACTIVE = "active"
    FAILING = "failing"
    """The last attempt failed; it is repeated."""
    REFUSED = "refused"
    GONE = "gone"


_STATES: Final = {
    PostOutcome.FAILED: SinkState.FAILING,
    PostOutcome.REFUSED: SinkState.REFUSED,
    PostOutcome.GONE: SinkState.GONE,
}


class SinkDelivery:
    """Delivery to one sink while this replica leads."""

    def __init__(
        self,
        config: SinkConfig,
        position: Position,
        *,
        source: EventSource,
        post: Post,
        leads: Callable[[], bool],
        gap: Callable[[str, int, int, str], bytes],
        clock: Clock,
        sleep: Sleep = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Create it; `start` begins it. `gap` returns the event for missing revisions; `clock` is the agreed time."""
        self.config = config
        self.position = position
        """Events that the receiver has accepted."""
        self.state = SinkState.ACTIVE
        self.notable = 0
        """Accepted events that are worth recording a mark, count."""
        self.notable_revision = 0
        """Revision at which the last of them is complete."""
        self.events = self.deliveries = self.failures = 0
        """Counts since this replica leads."""
        self.error = ""
        """Last error, kept after a success."""
        self.error_at = NEVER
        self.failing_since = NEVER
        """Time of the first failure since the last success; NEVER if the last attempt succeeded."""
        self.waiting_since = NEVER
        """Time of the oldest event being sent; NEVER for none."""
        self._kinds = selected_kinds(config.kinds)
        self._source = source
        self._post = post
        self._leads = leads
        self._gap = gap
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._tries = 0
        self._cannot_read = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin in the running loop."""
        self._task = asyncio.get_running_loop().create_task(self.run())

    @property
    def is_running(self) -> bool:
        """Return whether it delivers."""
        return self._task is not None and not self._task.done()

    def stop(self) -> None:
        """Abandon the present request."""
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Deliver until this replica no longer leads, or the task is cancelled."""
        while self._leads():
            try:
                batch = await self._next()
                if batch is None:
                    self.waiting_since = NEVER
                    await self._source.wait(self.position)
                    await self._sleep(LINGER_S)
                elif batch.events:
                    await self._deliver(batch)
                else:
                    self.position = batch.after
            except HistoryGap as gap:
                await self._unreadable(str(gap))
            except LedgerBroken as error:
                await self._unreadable(f"the ledger cannot be read: {error}")
            except Exception as error:
                LOGGER.error("sending events to sink %s failed unexpectedly", self.config.name, exc_info=error)
                await self._unreadable(f"unexpected error: {type(error).__name__}")

    async def _next(self) -> EventBatch | None:
        """Return the next events, or a gap in their place; None if there are none.

        Raises:
            HistoryGap: Peers may still supply the next events.
        """
        try:
            found = await self._source.read(self.position, self._kinds, self.config.batch)
        except HistoryGap as gap:
            if not gap.is_pruned and not self._has_waited():
                raise
            first, last = self.position.revision + 1, gap.last_revision
            LOGGER.warning("sink %s is not sent revisions %d to %d: %s", self.config.name, first, last, gap)
            content = self._gap(self.config.name, first, last, str(gap))
            return EventBatch((content,), Position(last), 1, self._clock.now())
        if self._cannot_read:
            self._recovered()
        return found

    def _has_waited(self) -> bool:
        return self._cannot_read and self.failing_for_s(self._clock.now()) >= HISTORY_WAIT_S

    async def _unreadable(self, sentence: str) -> None:
        self._cannot_read = True
        await self._failed(PostResult(PostOutcome.FAILED, sentence))

    async def _deliver(self, batch: EventBatch) -> None:
        """Send a batch until the receiver accepts it, or this replica no longer leads."""
        body, self.waiting_since = batch_of(batch.events), batch.at
        while self._leads():
            result = await self._post(self.config, body)
            if result.outcome is PostOutcome.ACCEPTED:
                self._accepted(batch)
                return
            await self._failed(result)

    def _accepted(self, batch: EventBatch) -> None:
        if self.state is not SinkState.ACTIVE:
            LOGGER.warning("sink %s accepts events again", self.config.name)
        self._recovered()
        self.position = batch.after
        self.deliveries += 1
        self.events += len(batch.events)
        if batch.notable:
            self.notable += batch.notable
            self.notable_revision = batch.after.revision + bool(batch.after.sequence)

    def _recovered(self) -> None:
        self.state, self._tries, self._cannot_read = SinkState.ACTIVE, 0, False
        self.failing_since = self.waiting_since = NEVER

    async def _failed(self, result: PostResult) -> None:
        now = self._clock.now()
        if self.state is not _STATES[result.outcome]:
            LOGGER.warning("sink %s accepts no events: %s", self.config.name, result.error)
        self.state, self.error, self.error_at = _STATES[result.outcome], result.error, now
        if self.failing_since == NEVER:
            self.failing_since = now
        self.failures += 1
        self._tries += 1
        await self._sleep(self._pause_s(result))

    def _pause_s(self, result: PostResult) -> float:
        """Return the pause before the next attempt, at least the one that the receiver requests."""
        match result.outcome:
            case PostOutcome.GONE:
                pause_s = GONE_RETRY_S
            case PostOutcome.REFUSED:
                pause_s = REFUSED_RETRY_S
            case _:
                pause_s = min(RETRY_S_MAX, RETRY_S * 2.0 ** min(self._tries - 1, 16))
        return max(pause_s * (1 - JITTER * self._jitter()), result.retry_after_s)

    def failing_for_s(self, now: Instant) -> float:
        """Return the time without success since the first failure, seconds; 0 if the last attempt succeeded."""
        return 0.0 if self.failing_since == NEVER else max(0.0, (now - self.failing_since) / MICROSECONDS_PER_SECOND)

    def lag_s(self, now: Instant) -> float:
        """Return the age of the oldest event that is read and not accepted, seconds."""
        return 0.0 if self.waiting_since == NEVER else max(0.0, (now - self.waiting_since) / MICROSECONDS_PER_SECOND)
