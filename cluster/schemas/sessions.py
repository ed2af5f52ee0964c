"""Schemas of program sessions."""

from forebay.cluster.schemas.base import Answer, View


class SessionView(View, frozen=True, kw_only=True):
    """Session, as of the revision in the response."""

    session: int
    actor: str
    """Owner: `user:NAME` or `operator:NAME`."""
    opened_at: str
    used_at: str
    """Settlement time of its last command, to ten seconds."""
    acknowledged: int
    """Last sequence number up to which the program has acknowledged all replies."""
    answers: int
    """Cached replies, count."""


class SessionsAnswer(Answer, frozen=True, kw_only=True):
    """The caller's sessions, or all sessions for an operator."""

    sessions: tuple[SessionView, ...]


class OpenedSession(Answer, frozen=True, kw_only=True):
    """A new session and its limits."""

    session: int
    window: int
    """Commands that may be outstanding, count."""
    idle_s: int
    """Idle time after which the session ends, seconds of the cluster's clock."""
