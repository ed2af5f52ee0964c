"""Process of the history service, and reads from its states by the same handlers as in the replica.

`python -m cluster.api.past_reads`, see `cluster.api.history_service`. The handlers are loaded with the first query.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from forebay.cluster.api.history_service import PastQuery, PastReply, PresentQuery, PresentState
from forebay.cluster.api.history_service.__main__ import main
from forebay.cluster.system import SystemClock
from forebay.replica.state import State
from forebay.replica.values import NEVER, Instant
from forebay.wal import JobIndexBroken, LedgerBroken

if TYPE_CHECKING:
    from forebay.cluster.api.history_service.queries import HistoryQueries
    from forebay.cluster.api.metrics import MetricFamily
    from forebay.cluster.api.service import ApiService
    from forebay.cluster.api.statuses import LiveValues
    from forebay.cluster.api.web import Problem
    from forebay.cluster.server import AgentReports

LOGGER = logging.getLogger(__name__)


class _Controller:
    """Controller substitute for read handlers: without consensus, and with reported agent contacts at most."""

    liveness: AgentReports | None = None

    def __init__(self, state: State) -> None:
        self.state = state
        self.name = "the history service"

    @property
    def leads(self) -> bool:
        """Return whether contacts are reported, as only a leader does."""
        return self.liveness is not None


class _Metrics:
    """Registry substitute: metrics that the replica sent."""

    def __init__(self, live: LiveValues) -> None:
        self.pid = live.pid
        self._live = live

    def families(self) -> Sequence[MetricFamily]:
        """Return them."""
        return self._live.metrics


class _Clock:
    """Clock that stands still."""

    def __init__(self, at: Instant) -> None:
        self.at = at

    def now(self) -> Instant:
        return self.at


class _Service:
    """Service substitute for read handlers, at one state."""

    def __init__(self, state: State, *, present: PresentState | None, is_private: bool = False) -> None:
        from forebay.cluster.api.render import Verdicts
        from forebay.cluster.system.eventloop import Identities, Slices

        self.controller = _Controller(state)
        self.clock = _Clock(state.at)
        self.slices = Slices()
        self.verdicts = Verdicts(present)
        self.identities = Identities(SystemClock())
        self.is_private = is_private
        self.then = state.at if present is None else None
        self.digests = asyncio.Semaphore(1)
        self.scrapes = asyncio.Semaphore(1)
        self.live: LiveValues | None = None
        self.records: HistoryQueries | None = None

    def set_live(self, live: LiveValues) -> None:
        """Use these values of the replica."""
        self.live, self.metrics = live, _Metrics(live)
        self.controller.name, self.controller.liveness = live.replica, live.agents

    async def current(self) -> State:
        """Return the state."""
        return self.controller.state


class HandlerReader:
    """Answers reads by the handlers of the API."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._present: _Service | None = None

    def close(self) -> None:
        """Close its event loop."""
        self._loop.close()

    def prepare(self) -> None:
        """Load the handlers, so that the first read need not wait for them."""
        importlib.import_module("forebay.cluster.api.local_backend")

    def past(self, asked: PastQuery, state: State) -> PastReply:
        """Return the response a read would have had from a state."""
        return self._loop.run_until_complete(
            _respond(asked, _Service(state, present=None, is_private=asked.is_private))
        )

    def present(self, asked: PresentQuery, state: PresentState, history: HistoryQueries) -> PastReply:
        """Return the response to a read from the present state, and from the records of the ledger."""
        if self._present is None:
            self._present = _Service(state.state, present=state)
            self._present.records = history
        self._present.controller.state = state.state
        self._present.clock.at = asked.now
        self._present.set_live(_decode_live(asked.live))
        return self._loop.run_until_complete(_respond(asked, self._present))


def _decode_live(data: bytes) -> LiveValues:
    from forebay.cluster.api.statuses import LiveValues

    return msgspec.msgpack.decode(data, type=LiveValues)


async def _respond(asked: PastQuery | PresentQuery, service: _Service) -> PastReply:
    from forebay.cluster.api.local_backend import ROUTES
    from forebay.cluster.api.service import ApiCall
    from forebay.cluster.api.web import ApiRequest, Problem, Stream, internal_error
    from forebay.cluster.security import Identity, PeerCertificate, Role

    route, state = ROUTES[asked.operation], service.controller.state
    who = PeerCertificate(Identity(Role(asked.role), asked.name), "", NEVER)
    request = ApiRequest(route.operation, who, asked.params, asked.query, None, b"", None, None, asyncio.Event())
    call: ApiCall[Any] = ApiCall(cast("ApiService", service), request)
    try:
        reply = await route.handler(call)
    except Problem as problem:
        return _failure(asked, state, problem)
    except (JobIndexBroken, LedgerBroken, OSError):
        raise  # the index is made again, or the next process reads again
    except Exception:
        LOGGER.exception("%s failed", asked.operation)
        return _failure(asked, state, internal_error("report this with the replica's log", "rejected"))
    assert not isinstance(reply, Stream), asked.operation
    content = reply.content if reply.content is not None else msgspec.json.encode(reply.view)
    return PastReply(asked.number, state.revision, 200, content, reply.content_type)


def _failure(asked: PastQuery | PresentQuery, state: State, problem: Problem) -> PastReply:
    return PastReply(asked.number, state.revision, problem.status, msgspec.json.encode(problem.view), "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], HandlerReader()))
