"""Which answers are kept: whether a command is new, was answered, or may have been answered and forgotten (law 6), and
what happens to sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from replica.messages import Actor, Receipt, Request, Session, command_digest
from replica.messages import events as e
from replica.state import Facts, StateBuilder
from replica.values import (
    RECEIPTS_LEAST,
    RECEIPTS_MAX,
    RECEIPTS_PER_ACTOR_MAX,
    SESSION_OUTSTANDING_LEAST,
    Instant,
    LedgerViolation,
    Refusal,
    RefusalCode,
    client_ms,
    is_in_session,
    numbered,
)


def is_routine(state: Facts, request: Request) -> bool:
    """Return whether a command is new and its answer may be kept: the common case, asked for each command.

    False where that takes a longer look: `receipt_for`, `may_settle`.
    """
    command_id = request.id
    if is_in_session(command_id):
        said = numbered(command_id)
        session = state.sessions.get(said.session)
        # What is newer than the newest was not settled, so it need not be looked up.
        if session is None or said.sequence <= session.newest or session.actor != request.actor:
            return False
    elif client_ms(command_id) <= state.receipts_horizon_ms or command_id in state.receipts:
        return False
    return state.kept.get(request.actor, 0) < ANSWERS_KEPT.least or may_keep_answer(state, request.actor)


def answer_to(state: Facts, command_id: bytes) -> Receipt | None:
    """Return the answer to a command, if it is kept."""
    if is_in_session(command_id):
        said = numbered(command_id)
        return state.answer_in(said.session, said.sequence)
    return state.receipts.get(command_id)


def is_forgotten(state: Facts, command_id: bytes) -> bool:
    """Return whether a single command may have been answered, and its answer dropped."""
    return client_ms(command_id) <= state.receipts_horizon_ms and command_id not in state.receipts


def receipt_for(state: Facts, request: Request) -> Receipt | Refusal | None:
    """Return the first answer to a command; None where it is new.

    A Refusal where it may have been answered and forgotten, its id was used for another command, or it names a session
    that its actor does not have.
    """
    if is_in_session(request.id):
        said = numbered(request.id)
        session = state.sessions.get(said.session)
        if session is None or session.actor != request.actor:
            return unknown_session(said.session)
        known = state.answer_in(said.session, said.sequence)
        if known is None and said.sequence <= session.acknowledged:
            return Refusal(
                RefusalCode.COMMAND_TOO_OLD,
                f"session {said.session} has every answer up to {session.acknowledged}, as its program said: that to "
                f"{said.sequence} is forgotten",
                "number a new command higher; look whether this one was carried out, if that is not known",
                "command_id",
            )
        return _compared(known, request)
    if is_forgotten(state, request.id):
        return Refusal(
            RefusalCode.COMMAND_TOO_OLD,
            "the command id is older than the answers that are kept, so it may have been carried out already",
            "look whether it was, and send it again with a new command id if not",
            "command_id",
        )
    return _compared(state.receipts.get(request.id), request)


def _compared(known: Receipt | None, request: Request) -> Receipt | Refusal | None:
    if known is None or not known.digest or known.digest == command_digest(request):
        return known
    return Refusal(
        RefusalCode.COMMAND_ID_REUSED,
        f"this command id was used for another command, settled at revision {known.revision}",
        "make a new command id for a new command; repeat an id only with the very same command",
        "command_id",
    )


class Bounds(NamedTuple):
    """How many of something are kept: for anybody whatever others have, for one actor, and for all together."""

    least: int
    of_one: int
    of_all: int


ANSWERS_KEPT: Final = Bounds(RECEIPTS_LEAST, RECEIPTS_PER_ACTOR_MAX, RECEIPTS_MAX)
"""How many answers are."""


def may_keep(own: int, total: int, bounds: Bounds) -> bool:
    """Return whether one more may be kept for somebody who has `own` of `total`.

    Beyond the least, nobody may have more than a quarter of what is free: what is left shrinks, and is never gone.
    """
    return own < bounds.least or own < min(bounds.of_one, (bounds.of_all - total) // 4)


def may_keep_answer(state: Facts, actor: Actor) -> bool:
    """Return whether the answer to one more command of an actor may be kept."""
    return may_keep(state.kept.get(actor, 0), state.answers_kept, ANSWERS_KEPT)


def may_settle(state: Facts, request: Request) -> bool:
    """Return whether the answer to a command may be kept.

    A session goes on whatever else its actor has, with few commands outstanding: one goes for each that comes.
    """
    if not request.id or may_keep_answer(state, request.actor):
        return True
    if not is_in_session(request.id):
        return False
    said = numbered(request.id)
    return said.sequence - said.acknowledged <= SESSION_OUTSTANDING_LEAST


def unknown_session(session: int) -> Refusal:
    """Return why a command that names a session is refused: it is over, was never opened, or is somebody else's."""
    return Refusal(
        RefusalCode.UNKNOWN_SESSION,
        f"you have no session {session}: it was closed, has expired, or is somebody else's",
        "open another one; what was sent in this one and not answered may have been carried out: look",
        "session",
    )


def _session_opened(builder: StateBuilder, event: e.SessionOpened) -> None:
    if event.session != builder.revision:
        raise LedgerViolation(f"session {event.session} was opened at revision {builder.revision}")
    at = Instant(builder.at)
    builder.sessions.open(Session(event.session, event.actor, at, at))


def _sessions_ended(builder: StateBuilder, event: e.SessionsEnded) -> None:
    for number in event.sessions:
        builder.end_session(number)


def _receipts_dropped(builder: StateBuilder, event: e.ReceiptsDropped) -> None:
    builder.drop_receipts(event.through)


SESSION_FOLDS: dict[type, Callable[[StateBuilder, Any], None]] = {
    e.SessionOpened: _session_opened,
    e.SessionsEnded: _sessions_ended,
    e.ReceiptsDropped: _receipts_dropped,
}
"""What each event does; `replica.fold.fold` has them all."""
