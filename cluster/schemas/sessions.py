"""What the API says of the sessions of programs."""

from cluster.schemas.base import Answer, View


class SessionView(View, frozen=True, kw_only=True):
    """One session, as it was at the revision of the answer."""

    session: int
    actor: str
    """Whose it is: `user:NAME` or `operator:NAME`."""
    opened_at: str
    used_at: str
    """When its last command was settled, to ten seconds."""
    acknowledged: int
    """Its program has every answer up to this sequence number."""
    answers: int
    """Answers that are kept for it."""


class SessionsAnswer(Answer, frozen=True, kw_only=True):
    """The caller's sessions; all, for an operator."""

    sessions: tuple[SessionView, ...]


class OpenedSession(Answer, frozen=True, kw_only=True):
    """A session that was opened, and what its program has to keep to."""

    session: int
    window: int
    """Commands that may be outstanding, count."""
    idle_s: int
    """Seconds of the cluster's clock after which it ends if nothing comes."""
