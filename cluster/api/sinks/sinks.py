"""The leader's duty for event sinks: one delivery for each, and their marks in the replicated state.

A mark is the revision up to which a receiver has accepted all events. It is recorded seldom, because each record is an
entry of the ledger, and never for bookkeeping alone: an idle cluster writes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from forebay.cluster.api.sinks.cloud_events import gap_of
from forebay.cluster.api.sinks.delivery import Post, SinkDelivery, Sleep
from forebay.cluster.api.sinks.source import EventSource, Position
from forebay.cluster.config import SinkConfig
from forebay.cluster.server import Answer, NotLeading, QueueFull
from forebay.cluster.system import Clock
from forebay.replica.messages import CONTROLLER, AdvanceSinks, Request
from forebay.replica.state import State
from forebay.replica.values import SINK_MARKS_MAX

LOGGER = logging.getLogger(__name__)

ADVANCE_S: Final = 5.0
"""Shortest time between two records of a mark, seconds: a new leader repeats at most as much."""

ADVANCE_EVENTS: Final = 1_000
"""Accepted events after which a mark is recorded sooner, count: what a new leader repeats at most, roughly."""

ADVANCE_SKIPPED: Final = 1_000
"""Revisions without events for a sink after which its mark is recorded, count: a new leader searches as many again."""

FORMER_KEPT_S: Final = 600.0
"""Time for which the mark of a sink without configuration is kept, seconds.

The replicas get a new configuration one after the other, and a leader without it must not lose the mark.
"""


class EventSinks:
    """Event sinks of one replica, active while it leads."""

    def __init__(
        self,
        sinks: Sequence[SinkConfig],
        *,
        state: Callable[[], State],
        leads: Callable[[], bool],
        submit: Callable[[Request], Answer],
        source: Callable[[str], EventSource],
        post: Post,
        clock: Clock,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """Create it; `submit` as `Controller.submit`; `source` returns the events for a sink, by its name.

        `clock` is the agreed time.
        """
        self._configured = {sink.name: sink for sink in sinks}
        self._state = state
        self._leads = leads
        self._submit = submit
        self._source = source
        self._post = post
        self._clock = clock
        self._sleep = sleep
        self._recorded: dict[str, tuple[float, int]] = {}
        """Last record of each mark: its time on the monotonic clock, and the notable events accepted until then."""
        self._former_s: dict[str, float] = {}
        """Time since which a mark has no configured sink."""
        self._answer: Answer | None = None
        self.deliveries: dict[str, SinkDelivery] = {}
        """Present deliveries, by name."""

    @property
    def configured(self) -> tuple[SinkConfig, ...]:
        """Configured sinks."""
        return tuple(self._configured.values())

    def renew(self, sinks: Sequence[SinkConfig]) -> None:
        """Use these sinks from now on; a changed one continues from its position."""
        self._configured = {sink.name: sink for sink in sinks}
        self.poll()

    def poll(self) -> None:
        """Begin and end deliveries, and record marks that are due; return at once."""
        if not self._leads():
            self.stop()
            return
        state = self._state()
        for name in [name for name in self.deliveries if name not in self._configured]:
            self.deliveries.pop(name).stop()
        for name, sink in self._configured.items():
            present = self.deliveries.get(name)
            if name in state.sink_marks and not (present and present.is_running and present.config == sink):
                self._begin(sink, Position(state.sink_marks[name]), present)
        self._record(state)

    def stop(self) -> None:
        """End all deliveries: leadership was lost, or the replica stops."""
        for delivery in self.deliveries.values():
            delivery.stop()
        self.deliveries.clear()
        self._recorded.clear()
        self._former_s.clear()
        self._answer = None

    def _begin(self, sink: SinkConfig, mark: Position, former: SinkDelivery | None) -> None:
        delivery = SinkDelivery(
            sink,
            mark if former is None else max(mark, former.position),
            source=self._source(sink.name),
            post=self._post,
            leads=self._leads,
            gap=self._gap,
            clock=self._clock,
            sleep=self._sleep,
        )
        if former is not None:
            former.stop()
            delivery.notable, delivery.notable_revision = former.notable, former.notable_revision
        self.deliveries[sink.name] = delivery
        self._recorded.setdefault(sink.name, (self._clock.monotonic_s(), delivery.notable))
        delivery.start()

    def _gap(self, sink: str, first: int, last: int, reason: str) -> bytes:
        return gap_of(self._state(), sink, first, last, reason, self._clock.now())

    def _record(self, state: State) -> None:
        """Submit the marks that are due, unless a record is pending."""
        if self._answer is not None:
            return
        now_s = self._clock.monotonic_s()
        marks: dict[str, int] = {name: state.revision for name in self._configured if name not in state.sink_marks}
        for name, delivery in self.deliveries.items():
            if self._is_due(delivery, state.sink_marks.get(name), now_s):
                marks[name] = delivery.position.revision
        removed = self._removed(state, now_s, len(marks.keys() - state.sink_marks.keys()))
        if not marks and not removed:
            return
        try:
            self._answer = self._submit(Request(b"", CONTROLLER, AdvanceSinks(tuple(marks.items()), removed)))
        except (QueueFull, NotLeading):
            return  # the next call retries
        for name in marks.keys() & self.deliveries.keys():
            self._recorded[name] = now_s, self.deliveries[name].notable
        self._answer.add_done_callback(self._done)

    def _is_due(self, delivery: SinkDelivery, mark: int | None, now_s: float) -> bool:
        if mark is None or delivery.position.revision <= mark:
            return False
        if delivery.notable_revision > mark:
            recorded_s, recorded = self._recorded[delivery.config.name]
            return now_s - recorded_s >= ADVANCE_S or delivery.notable - recorded >= ADVANCE_EVENTS
        return delivery.position.revision - mark >= ADVANCE_SKIPPED

    def _removed(self, state: State, now_s: float, new: int) -> tuple[str, ...]:
        """Return the marks to remove: of sinks that are no longer configured, after a while or if space is needed."""
        former = [name for name in state.sink_marks if name not in self._configured]
        self._former_s = {name: self._former_s.get(name, now_s) for name in former}
        needs_space = len(state.sink_marks) + new > SINK_MARKS_MAX
        return tuple(sorted(name for name in former if needs_space or now_s - self._former_s[name] >= FORMER_KEPT_S))

    def _done(self, answer: Answer) -> None:
        failed = answer.cancelled() or answer.exception() is not None
        if answer is not self._answer:
            return
        self._answer = None
        if failed:
            return  # the next call retries
        rejection = answer.result().rejection
        if rejection is not None:
            LOGGER.error("marks of event sinks could not be recorded: %s", rejection.sentence)
        elif self._leads():
            self.poll()
