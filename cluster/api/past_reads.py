"""Process of the history service, and reads from past states by the same handlers as current reads.

`python -m cluster.api.past_reads`, see `cluster.api.history_service`. The handlers are loaded with the first query.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, cast

import msgspec

from forebay.cluster.api.history_service import PastQuery, PastReply
from forebay.cluster.api.history_service.__main__ import main
from forebay.cluster.system import SystemClock
from forebay.replica.state import State
from forebay.replica.values import NEVER, Instant

if TYPE_CHECKING:
    from forebay.cluster.api.service import ApiService


class _Controller:
    """Controller substitute for read handlers: without a leader and without agent contacts."""

    name = "the past"
    leads = False
    liveness = None

    def __init__(self, state: State) -> None:
        self.state = state


class _Clock:
    """Clock fixed at a past time."""

    def __init__(self, at: Instant) -> None:
        self._at = at

    def now(self) -> Instant:
        return self._at


class _Service:
    """Service substitute for read handlers, at one state."""

    def __init__(self, state: State, *, is_private: bool) -> None:
        from forebay.cluster.api.render import Verdicts
        from forebay.cluster.system.eventloop import Identities, Slices

        self.controller = _Controller(state)
        self.clock = _Clock(state.at)
        self.slices = Slices()
        self.verdicts = Verdicts()
        self.identities = Identities(SystemClock())
        self.is_private = is_private
        self.then = state.at
        self.digests = asyncio.Semaphore(1)

    async def current(self) -> State:
        """Return the past state."""
        return self.controller.state


def answer_past_query(asked: PastQuery, state: State) -> PastReply:
    """Return the response a read would have had from a state."""
    from forebay.cluster.api.local_backend import ROUTES
    from forebay.cluster.api.service import ApiCall
    from forebay.cluster.api.web import ApiRequest, Problem
    from forebay.cluster.security import Identity, PeerCertificate, Role

    route = ROUTES[asked.operation]
    who = PeerCertificate(Identity(Role(asked.role), asked.name), "", NEVER)

    async def handled() -> PastReply:
        request = ApiRequest(route.operation, who, asked.params, asked.query, None, b"", None, None, asyncio.Event())
        call: ApiCall[Any] = ApiCall(cast("ApiService", _Service(state, is_private=asked.is_private)), request)
        try:
            reply = await route.handler(call)
        except Problem as problem:
            return PastReply(asked.number, state.revision, problem.status, msgspec.json.encode(problem.view), "")
        assert not isinstance(reply, Stream), asked.operation
        content = reply.content if reply.content is not None else msgspec.json.encode(reply.view)
        return PastReply(asked.number, state.revision, 200, content, reply.content_type)

    from forebay.cluster.api.web import Stream

    return asyncio.run(handled())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], answer_past_query))
