"""A historian's process, and what it answers from a state of the past: by the same handlers that answer from now.

`python -m cluster.api.past_reads`, as `cluster.api.history_service` says. The handlers are loaded with the first
question.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, cast

import msgspec

from cluster.api.history_service import PastQuery, PastReply
from cluster.api.history_service.__main__ import main
from cluster.system import SystemClock
from replica.state import State
from replica.values import NEVER, Instant

if TYPE_CHECKING:
    from cluster.api.service import ApiService


class _Controller:
    """What handlers of reads ask of a controller: there is no leader here, and nobody who has just been heard."""

    name = "the past"
    leads = False
    liveness = None

    def __init__(self, state: State) -> None:
        self.state = state


class _Clock:
    """The clock at a moment of the past."""

    def __init__(self, at: Instant) -> None:
        self._at = at

    def now(self) -> Instant:
        return self._at


class _Service:
    """What handlers of reads ask of a service, at one state."""

    def __init__(self, state: State, *, is_private: bool) -> None:
        from cluster.api.render import Verdicts
        from cluster.system.eventloop import Identities, Slices

        self.controller = _Controller(state)
        self.clock = _Clock(state.at)
        self.slices = Slices()
        self.verdicts = Verdicts()
        self.identities = Identities(SystemClock())
        self.is_private = is_private
        self.then = state.at
        self.digests = asyncio.Semaphore(1)

    async def current(self) -> State:
        """Return the state."""
        return self.controller.state


def answer_past_query(asked: PastQuery, state: State) -> PastReply:
    """Return what somebody would have been answered at a state."""
    from cluster.api.local_backend import ROUTES
    from cluster.api.service import ApiCall
    from cluster.api.web import ApiRequest, Problem
    from cluster.security import Identity, PeerCertificate, Role

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

    from cluster.api.web import Stream

    return asyncio.run(handled())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], answer_past_query))
