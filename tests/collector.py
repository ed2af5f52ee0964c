"""A collector of OpenTelemetry for tests: OTLP over HTTP on loopback, read with the library's own protobuf."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import Any, Final

import pytest

from tests.ports import free_ports

HAS_OTEL: Final = find_spec("opentelemetry") is not None and find_spec("opentelemetry.sdk") is not None

needs_otel = pytest.mark.skipif(not HAS_OTEL, reason="no OpenTelemetry: scripts/install-backends --otel")


class Collector:
    """What came, in the order in which it came."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        self.port = port
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.requests = 0
        self.status = 200
        """What is answered; what comes with another is not kept."""

    def take(self, path: str, kind: str, body: bytes) -> int:
        """Take one request, and return the status of the answer."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.requests += 1
        if self.status != 200:
            return self.status
        assert (path, kind) == ("/v1/traces", "application/x-protobuf")
        found = ExportTraceServiceRequest()
        found.ParseFromString(body)
        for of_resource in found.resource_spans:
            self.resources.append(values(of_resource.resource.attributes))
            for of_scope in of_resource.scope_spans:
                self.spans += of_scope.spans
        return 200

    def named(self, job: int) -> dict[str, Any]:
        """Return the spans of a job by name, of several of a name the last one."""
        return {span.name: span for span in self.spans if values(span.attributes).get("forebay.job.id") == job}


def values(attributes: Any) -> dict[str, Any]:
    """Return attributes as a dictionary."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens."""
    (port,) = free_ports(1)
    collector = Collector(port)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(collector.take(self.path, self.headers["Content-Type"], body))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
