"""Export of traces with OpenTelemetry's own exporter; the only module that imports it."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, Final

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from forebay.cluster.api.traces.spans import JobSpan

SERVICE: Final = "forebay"

EXPORT_S: Final = 5.0
"""Time for a collector to respond, including the exporter's retries, seconds."""

LATE_S: Final = 2 * EXPORT_S
"""Hard time limit of an export, seconds; a collector that trickles bytes never times out by itself."""

NANOSECONDS_PER_MICROSECOND: Final = 1_000


class _Late(BaseException):
    """The export exceeded its time; not caught by the exporter."""


class Exporter:
    """Sends the spans of jobs to one collector."""

    def __init__(self, url: str, cluster: str) -> None:
        """Send to `url`; connects with the first trace."""
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # failures are logged here, once
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_S, session=_session())
        self._resource = Resource({"service.name": SERVICE, "forebay.cluster.id": cluster})
        self._scope = InstrumentationScope(SERVICE)
        signal.signal(signal.SIGALRM, _raise_late)

    def send(self, traces: Iterable[tuple[bytes, Sequence[JobSpan]]]) -> bool:
        """Send traces, each an ID and its spans; return True if the collector accepted them."""
        spans = [self._span(trace_id, span) for trace_id, found in traces for span in found]
        signal.setitimer(signal.ITIMER_REAL, LATE_S)
        try:
            return bool(self._exporter.export(spans) is SpanExportResult.SUCCESS)
        except (_Late, MemoryError):
            return False
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _span(self, trace_id: bytes, span: JobSpan) -> Any:
        return ReadableSpan(
            name=span.name,
            context=_context(trace_id, span.span_id),
            parent=None if span.parent_id is None else _context(trace_id, span.parent_id),
            resource=self._resource,
            attributes=span.attributes,
            events=[
                Event(one.name, {"forebay.revision": one.revision}, one.at * NANOSECONDS_PER_MICROSECOND)
                for one in span.events
            ],
            kind=SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR if span.has_failed else StatusCode.UNSET),
            start_time=span.began_at * NANOSECONDS_PER_MICROSECOND,
            end_time=span.ended_at * NANOSECONDS_PER_MICROSECOND,
            instrumentation_scope=self._scope,
        )


def _context(trace_id: bytes, span_id: bytes) -> Any:
    return SpanContext(
        int.from_bytes(trace_id), int.from_bytes(span_id), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )


def _session() -> requests.Session:
    """Return a session that ignores redirects and environment proxies."""
    session = requests.Session()
    session.trust_env = False
    session.max_redirects = 0
    return session


def _raise_late(number: int, frame: FrameType | None) -> None:
    raise _Late
