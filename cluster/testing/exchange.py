"""Transport of a client to a cluster in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import parse_qs

import msgspec

from forebay.cluster.api.web.problems import Problem
from forebay.cluster.client import ApiError
from forebay.cluster.client.attempt import HttpResponse, no_answer
from forebay.cluster.security import Identity
from forebay.cluster.system import Address
from forebay.cluster.testing.handlers import events_after, respond
from forebay.cluster.testing.simulation import Simulation
from forebay.replica.values import MICROSECONDS_PER_SECOND

ADDRESS: Final = Address("memory.invalid", 443)
"""Address of the only replica; no host has this name."""

SILENT_STREAMS_MAX: Final = 100
"""Streams without an event in a row, count; a reader without a time limit would then wait for ever."""


class MemoryExchange:
    """Requests of one identity. Waiting for events moves the simulated clock."""

    def __init__(self, simulation: Simulation, identity: Identity) -> None:
        self._simulation = simulation
        self._identity = identity
        self._silent_streams = 0
        self._newest = 0
        """Newest revision of which events were read."""

    async def send(
        self, address: Address, method: str, target: str, body: bytes | None, *, timeout_s: float, connect_s: float
    ) -> HttpResponse:
        """Return the response to a request."""
        try:
            status, view = respond(self._simulation, self._identity, method, target, body)
        except Problem as problem:
            return HttpResponse(problem.status, msgspec.json.encode(problem.body))
        return HttpResponse(status, msgspec.json.encode(view))

    @asynccontextmanager
    async def stream(
        self, address: Address, target: str, *, connect_s: float, idle_s: float
    ) -> AsyncIterator[tuple[HttpResponse, AsyncIterator[bytes]]]:
        """Yield a response without body, and the events after the position in `target` as they occur."""
        query = parse_qs(target.partition("?")[2])
        yield HttpResponse(200, b""), self._events(int(query["from"][0]), address, idle_s)

    async def close(self) -> None:
        """Do nothing; there is no connection."""

    async def _events(self, revision: int, address: Address, idle_s: float) -> AsyncIterator[bytes]:
        simulation = self._simulation
        until_s = simulation.clock.monotonic_s() + idle_s
        while True:
            for view, is_last in events_after(simulation, self._identity, revision):
                if view.revision > self._newest:
                    # A reader that resumes gets the last revision again, which is no news.
                    self._newest, self._silent_streams = view.revision, 0
                    until_s = simulation.clock.monotonic_s() + idle_s
                head = f"id: {view.revision}\n" if is_last else ""
                yield f"{head}event: {view.event}\ndata: ".encode() + msgspec.json.encode(view) + b"\n\n"
                revision = max(revision, view.revision)
            left_s = until_s - simulation.clock.monotonic_s()
            due = simulation.next_due()
            due_s = float("inf") if due is None else (due - simulation.clock.at) / MICROSECONDS_PER_SECOND
            if due_s < left_s:
                simulation.advance(due_s)
                continue
            simulation.advance(left_s)
            self._silent_streams += 1
            if self._silent_streams > SILENT_STREAMS_MAX:
                sentence = "no further event will come: nothing happens in the cluster"
                raise ApiError(404, "no_more_events", sentence, remedy="read with timeout_s, or submit a job first")
            raise no_answer(address, idle_s)
