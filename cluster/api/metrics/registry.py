"""Metrics of one replica that are not in its state, including those of requests."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable

from forebay.cluster.api.history_service import HistoryService
from forebay.cluster.api.metrics.families import MetricFamily, counter, counters, gauge, histogram
from forebay.cluster.api.metrics.replica import ReplicaMetrics
from forebay.cluster.api.sinks import EventSinks
from forebay.cluster.api.traces import Tracer
from forebay.cluster.server import Controller, Durations
from forebay.cluster.server.tlog import Publisher

SYNC_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Bounds of the sync histogram, seconds: from an idle NVMe to a disk that should be replaced."""

LATENCY_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Bounds of the request histogram, seconds: from a stale read to the longest poll."""

SYNCS_KEPT_MAX = 4096
"""Sync durations kept until a scrape, count: about 100 KiB."""


class MetricsRegistry:
    """The registry of one replica."""

    def __init__(
        self,
        controller: Controller,
        past: HistoryService,
        tracer: Tracer,
        sinks: EventSinks,
        publisher: Callable[[], Publisher],
    ) -> None:
        self.pid = os.getpid()
        """Process whose memory and processor time are reported."""
        self._replica = ReplicaMetrics(controller, past, tracer, sinks, publisher)
        self._sync_times_s: list[float] = []
        """Durations not yet in `_syncs`: updating a histogram is too slow between a sync and its response."""
        self._syncs = Durations(SYNC_BUCKETS_S)
        self._requests: defaultdict[tuple[str, str], Durations] = defaultdict(lambda: Durations(LATENCY_BUCKETS_S))
        """Durations by route and status class."""
        self._problems: Counter[str] = Counter()
        self.workers = 0
        """API workers that serve, count."""
        self.workers_started = 0

    def record_request(self, route: str, status: int, duration_s: float, code: str) -> None:
        """Record a response; `code`: that of its error, if it is one."""
        self._requests[route, f"{status // 100}xx"].add_s(duration_s)
        if code:
            self._problems[code] += 1

    def record_sync(self, duration_s: float) -> None:
        """Record the duration of a durable journal write."""
        self._sync_times_s.append(duration_s)
        if len(self._sync_times_s) >= SYNCS_KEPT_MAX:
            self._tell_syncs()

    def families(self) -> list[MetricFamily]:
        """Return the present values."""
        self._tell_syncs()
        requests = MetricFamily(
            "forebay_api_request_seconds",
            "Duration of API requests by route and status class, including the wait of long polls.",
            "histogram",
            ("route", "status"),
        )
        for labels, durations in self._requests.items():
            requests.add_durations(durations, *labels)
        return [
            *self._replica.families(),
            histogram("forebay_journal_sync_seconds", "Duration of each durable journal write.", self._syncs),
            requests,
            gauge("forebay_api_workers", "API workers of this replica.", self.workers),
            counter(
                "forebay_api_workers_started",
                "API workers started; more than forebay_api_workers if some have ended and were restarted.",
                self.workers_started,
            ),
            counters("forebay_api_problems", "API error responses by code.", "code", self._problems),
        ]

    def _tell_syncs(self) -> None:
        times_s, self._sync_times_s = self._sync_times_s, []
        for duration_s in times_s:
            self._syncs.add_s(duration_s)
