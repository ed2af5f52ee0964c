"""Decide commands about sessions, and the expiry of sessions and cached replies (law 6)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, Final

from forebay.replica.fold import CacheLimits, may_cache, unknown_session_rejection
from forebay.replica.messages import Acceptance, Actor, ActorRole, Decision, Session
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.state import Facts, State
from forebay.replica.values import (
    MICROSECONDS_PER_SECOND,
    RECEIPTS_DROPPED_MAX,
    RECEIPTS_KEPT_S,
    SESSION_IDLE_S_MAX,
    SESSIONS_EXPIRED_MAX,
    SESSIONS_LEAST,
    SESSIONS_MAX,
    SESSIONS_PER_ACTOR_MAX,
    Instant,
    Rejection,
    RejectionCode,
    decode_session_command_id,
    is_in_session,
)

_IDLE_US: Final = SESSION_IDLE_S_MAX * MICROSECONDS_PER_SECOND


def is_expiry_due(state: State, at: Instant) -> bool:
    """Return whether `ExpireCachedReplies` would have events at `at`."""
    return bool(_due_through(state, at)) or any(_has_expired(one, at) for one in state.sessions.values())


def _has_expired(session: Session, at: Instant) -> bool:
    return at - session.used_at > _IDLE_US


def _due_through(state: State, at: Instant) -> int:
    """Return the revision up to which cached replies have expired (after RECEIPTS_KEPT_S); 0 if none has."""
    due = at // MICROSECONDS_PER_SECOND - RECEIPTS_KEPT_S
    if not state.receipt_seconds or state.receipt_seconds[0][0] >= due:
        return 0
    return next((first - 1 for second, first in state.receipt_seconds if second >= due), state.revision)


def _expire_answers(state: State, actor: Actor, command: c.ExpireCachedReplies, at: Instant) -> Decision:
    events: list[e.Event] = []
    through = _due_through(state, at)
    if through:
        oldest = [receipt.revision for _, receipt in islice(state.receipts.items(), RECEIPTS_DROPPED_MAX)]
        events.append(e.CachedRepliesDropped(min(through, oldest[-1]) if oldest else through))
    expired: list[int] = []
    numbers = 0
    for session in sorted((one for one in state.sessions.values() if _has_expired(one, at)), key=_number):
        numbers += session.newest - session.acknowledged
        if len(expired) >= SESSIONS_EXPIRED_MAX or (expired and numbers > RECEIPTS_DROPPED_MAX):
            break
        expired.append(session.number)
    if expired:
        events.append(e.SessionsEnded(tuple(expired), "expired"))
    return Acceptance(tuple(events))


def _number(session: Session) -> int:
    return session.number


def _open_session(state: State, actor: Actor, command: c.OpenSession, at: Instant) -> Decision:
    own = sum(session.actor == actor for session in state.sessions.values())
    bounds = CacheLimits(SESSIONS_LEAST, SESSIONS_PER_ACTOR_MAX, SESSIONS_MAX)
    if not may_cache(own, len(state.sessions), bounds):
        return Rejection(
            RejectionCode.LIMIT_EXCEEDED,
            f"{actor} has {own} of {len(state.sessions)} sessions; the limits are {SESSIONS_PER_ACTOR_MAX} per actor "
            f"and {SESSIONS_MAX} in total",
            "close an unused one (forebay support session list), or wait: a session expires when it is idle for "
            f"{SESSION_IDLE_S_MAX} s",
        )
    return Acceptance((e.SessionOpened(state.revision + 1, actor),))


def _close_session(state: Facts, actor: Actor, command: c.CloseSession, at: Instant) -> Decision:
    session = state.sessions.get(command.session)
    if session is None or (session.actor != actor and actor.role is not ActorRole.OPERATOR):
        return unknown_session_rejection(command.session)
    return Acceptance((e.SessionsEnded((command.session,), "closed"),))


def own_session_rejection(request: c.Request, command: c.CloseSession) -> Rejection | None:
    """Return the rejection of a command that closes its own session, or None. Its reply could not be cached."""
    if not is_in_session(request.id) or decode_session_command_id(request.id).session != command.session:
        return None
    remedy = "use a command ID outside the session"
    return Rejection(RejectionCode.WRONG_STATE, "a session cannot be closed by a command in it", remedy, "command_id")


SESSIONS_BY_KEY: dict[type, Callable[[Facts, Actor, Any, Instant], Decision]] = {c.CloseSession: _close_session}
"""Command type -> handler that needs lookups by key only."""

SESSIONS_BY_SCAN: dict[type, Callable[[State, Actor, Any, Instant], Decision]] = {
    c.OpenSession: _open_session,
    c.ExpireCachedReplies: _expire_answers,
}
"""Command type -> handler that needs a complete State."""
