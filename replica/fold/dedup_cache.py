"""Deduplication cache and sessions (law 6).

For each command ID, find out whether the command is new, has a cached reply, or may have been settled long ago. Also
the limits of the cache, and the folds of session events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from forebay.replica.messages import Actor, CachedReply, Request, Session, command_digest
from forebay.replica.messages import events as e
from forebay.replica.state import Facts, StateBuilder
from forebay.replica.values import (
    RECEIPTS_LEAST,
    RECEIPTS_MAX,
    RECEIPTS_PER_ACTOR_MAX,
    SESSION_OUTSTANDING_LEAST,
    Instant,
    LedgerViolation,
    Rejection,
    RejectionCode,
    client_ms,
    decode_session_command_id,
    is_in_session,
)


def is_certainly_new(state: Facts, request: Request) -> bool:
    """Return whether a command is certainly new and its reply may be cached.

    This is a cheap test for the common case. If it fails, `look_up_reply` and `may_cache_next_reply` decide.
    """
    command_id = request.id
    if is_in_session(command_id):
        said = decode_session_command_id(command_id)
        session = state.sessions.get(said.session)
        # A sequence number above the newest one was never settled and needs no lookup.
        if session is None or said.sequence <= session.newest or session.actor != request.actor:
            return False
    elif client_ms(command_id) <= state.receipts_horizon_ms or command_id in state.receipts:
        return False
    return state.kept.get(request.actor, 0) < REPLY_LIMITS.least or may_cache_reply(state, request.actor)


def find_reply(state: Facts, command_id: bytes) -> CachedReply | None:
    """Return the cached reply to a command, if any."""
    if is_in_session(command_id):
        said = decode_session_command_id(command_id)
        return state.session_reply(said.session, said.sequence)
    return state.receipts.get(command_id)


def may_be_forgotten(state: Facts, command_id: bytes) -> bool:
    """Return whether a command outside sessions may have been settled, and its cached reply dropped."""
    return client_ms(command_id) <= state.receipts_horizon_ms and command_id not in state.receipts


def look_up_reply(state: Facts, request: Request) -> CachedReply | Rejection | None:
    """Return the cached reply to a command; None if the command is new.

    Return a Rejection if the reply may have been dropped, if the ID was used for another command, or if the session is
    not one of the actor's.
    """
    if is_in_session(request.id):
        said = decode_session_command_id(request.id)
        session = state.sessions.get(said.session)
        if session is None or session.actor != request.actor:
            return unknown_session_rejection(said.session)
        known = state.session_reply(said.session, said.sequence)
        if known is None and said.sequence <= session.acknowledged:
            return Rejection(
                RejectionCode.COMMAND_TOO_OLD,
                f"the reply to command {said.sequence} of session {said.session} was dropped: its program acknowledged "
                f"replies up to {session.acknowledged}",
                "use a higher sequence number for a new command; check whether this one was carried out",
                "command_id",
            )
        return _compare_digest(known, request)
    if may_be_forgotten(state, request.id):
        return Rejection(
            RejectionCode.COMMAND_TOO_OLD,
            "the command ID is older than the cached replies, so the command may have been carried out already",
            "check whether it was, and resend it with a new command ID if not",
            "command_id",
        )
    return _compare_digest(state.receipts.get(request.id), request)


def _compare_digest(known: CachedReply | None, request: Request) -> CachedReply | Rejection | None:
    if known is None or not known.digest or known.digest == command_digest(request):
        return known
    return Rejection(
        RejectionCode.COMMAND_ID_REUSED,
        f"the command ID was used for another command, settled at revision {known.revision}",
        "use a new command ID for each new command",
        "command_id",
    )


class CacheLimits(NamedTuple):
    """Limits on cached entries."""

    least: int
    """Number guaranteed to each actor."""
    of_one: int
    """Maximum for one actor."""
    of_all: int
    """Maximum in total."""


REPLY_LIMITS: Final = CacheLimits(RECEIPTS_LEAST, RECEIPTS_PER_ACTOR_MAX, RECEIPTS_MAX)
"""Limits on cached replies."""


def may_cache(own: int, total: int, bounds: CacheLimits) -> bool:
    """Return whether an actor with `own` of the `total` cached entries may have another one.

    Beyond its guarantee, an actor may use at most a quarter of the free entries, so some always remain free.
    """
    return own < bounds.least or own < min(bounds.of_one, (bounds.of_all - total) // 4)


def may_cache_reply(state: Facts, actor: Actor) -> bool:
    """Return whether the reply to another command of an actor may be cached."""
    return may_cache(state.kept.get(actor, 0), state.replies_kept, REPLY_LIMITS)


def may_cache_next_reply(state: Facts, request: Request) -> bool:
    """Return whether the reply to a command may be cached.

    A session with few outstanding commands may always continue, whatever other entries its actor has, because each of
    its commands acknowledges an earlier reply.
    """
    if not request.id or may_cache_reply(state, request.actor):
        return True
    if not is_in_session(request.id):
        return False
    said = decode_session_command_id(request.id)
    return said.sequence - said.acknowledged <= SESSION_OUTSTANDING_LEAST


def unknown_session_rejection(session: int) -> Rejection:
    """Build the rejection of a command whose session has ended, was never opened, or belongs to another actor."""
    return Rejection(
        RejectionCode.UNKNOWN_SESSION,
        f"session {session} does not exist: it was closed, has expired, or belongs to another user",
        "open another one, and check whether unanswered commands were carried out",
        "session",
    )


def _fold_session_opened(builder: StateBuilder, event: e.SessionOpened) -> None:
    if event.session != builder.revision:
        raise LedgerViolation(f"session {event.session} was opened at revision {builder.revision}")
    at = Instant(builder.at)
    builder.sessions.open(Session(event.session, event.actor, at, at))


def _fold_sessions_ended(builder: StateBuilder, event: e.SessionsEnded) -> None:
    for number in event.sessions:
        builder.end_session(number)


def _fold_cached_replies_dropped(builder: StateBuilder, event: e.CachedRepliesDropped) -> None:
    builder.drop_replies(event.through)


SESSION_FOLDS: dict[type, Callable[[StateBuilder, Any], None]] = {
    e.SessionOpened: _fold_session_opened,
    e.SessionsEnded: _fold_sessions_ended,
    e.CachedRepliesDropped: _fold_cached_replies_dropped,
}
"""Event type -> fold, merged in `replica.fold.fold`."""
