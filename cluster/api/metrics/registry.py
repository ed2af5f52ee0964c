"""Metrics registry of one replica, including counters of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from forebay.cluster.api.history_service import HistoryService
from forebay.cluster.api.metrics.replica import CertificateCollector, ReplicaCollector
from forebay.cluster.api.metrics.work import WorkCollector
from forebay.cluster.api.render import Verdicts
from forebay.cluster.api.sinks import EventSinks
from forebay.cluster.api.traces import Tracer
from forebay.cluster.server import Controller
from forebay.cluster.server.tlog import Publisher
from forebay.cluster.system.eventloop import SlicedWork

SYNC_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Bounds of the sync histogram, seconds: from an idle NVMe to a disk that should be replaced."""

LATENCY_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Bounds of the request histogram, seconds: from a stale read to the longest poll."""

SYNCS_KEPT_MAX = 4096
"""Sync durations kept until a scrape, count: about 100 KiB."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsRegistry:
    """The registry of one replica."""

    def __init__(
        self,
        controller: Controller,
        past: HistoryService,
        tracer: Tracer,
        sinks: EventSinks,
        publisher: Callable[[], Publisher],
        verdicts: Verdicts,
    ) -> None:
        self._registry = CollectorRegistry()
        self._controller = controller
        self._rendering = asyncio.Lock()
        self._replica = ReplicaCollector(controller, past, tracer, sinks, publisher)
        self._work = WorkCollector(controller, verdicts)
        self._registry.register(self._replica)
        self._registry.register(self._work)
        self._registry.register(CertificateCollector(controller))
        # Memory, processor time and open files of this process, under the names common to all exporters.
        ProcessCollector(registry=self._registry)
        self._sync_times_s: list[float] = []
        """Durations not yet in `_syncs`: updating a histogram is too slow between a sync and its response."""
        self._syncs = Histogram(
            "forebay_journal_sync_seconds",
            "Duration of each durable journal write.",
            buckets=SYNC_BUCKETS_S,
            registry=self._registry,
        )
        self.requests = Histogram(
            "forebay_api_request_seconds",
            "Duration of API requests by route and status class, including the wait of long polls.",
            ["route", "status"],
            buckets=LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        self.workers = Gauge("forebay_api_workers", "API workers of this replica.", registry=self._registry)
        self.workers_started = Counter(
            "forebay_api_workers_started_total",
            "API workers started; more than forebay_api_workers if some have ended and were restarted.",
            registry=self._registry,
        )
        self.problems = Counter(
            "forebay_api_problems_total", "API error responses by code.", ["code"], registry=self._registry
        )

    def record_sync(self, duration_s: float) -> None:
        """Record the duration of a durable journal write."""
        self._sync_times_s.append(duration_s)
        if len(self._sync_times_s) >= SYNCS_KEPT_MAX:
            self._tell_syncs()

    async def text(self, work: SlicedWork) -> bytes:
        """Return all metrics in Prometheus's text format."""
        async with self._rendering:
            self._tell_syncs()
            self._replica.read()
            await self._work.read(self._controller.state, work)
            # In a thread, because rendering takes longer than a heartbeat may wait.
            return await asyncio.to_thread(generate_latest, self._registry)

    def _tell_syncs(self) -> None:
        times_s, self._sync_times_s = self._sync_times_s, []
        for duration_s in times_s:
            self._syncs.observe(duration_s)
