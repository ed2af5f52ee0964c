"""Sessions, and the cached replies to their commands (law 6).

The cached replies of a session are a plain dict that never changes once it is in a State. A batch copies it once and
settles any number of commands on the copy; a persistent tree of all keys would copy a path for each command.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar, overload

import immutables
from msgspec.structs import replace

from forebay.replica.messages import CachedReply, Session
from forebay.replica.values import Instant, decode_reply_key, reply_key

T = TypeVar("T")


class SessionReplies:
    """Cached replies of sessions: an immutable map from `replica.values.reply_key`."""

    __slots__ = ("_of", "_total")

    def __init__(self, answers: Iterable[tuple[bytes, CachedReply]] = ()) -> None:
        """Build the map from (key, receipt) pairs.

        Raises:
            ValueError: a key is not that of a command in a session.
        """
        of: dict[int, dict[int, CachedReply]] = {}
        for key, receipt in answers:
            session, sequence = decode_reply_key(key)
            of.setdefault(session, {})[sequence] = receipt
        self._of = immutables.Map(of)
        self._total = sum(map(len, of.values()))

    def find(self, session: int, sequence: int) -> CachedReply | None:
        """Return the cached reply to a command of a session, or None."""
        own = self._of.get(session)
        return None if own is None else own.get(sequence)

    @overload
    def get(self, key: bytes, /) -> CachedReply | None: ...
    @overload
    def get(self, key: bytes, default: T, /) -> CachedReply | T: ...
    def get(self, key: bytes, default: T | None = None, /) -> CachedReply | T | None:
        """Return the cached reply for a key, or `default`."""
        found = self.find(*decode_reply_key(key))
        return default if found is None else found

    def __getitem__(self, key: bytes, /) -> CachedReply:
        found = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def __contains__(self, key: object, /) -> bool:
        return isinstance(key, bytes) and self.get(key) is not None

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[bytes]:
        return (key for key, _ in self.items())

    def items(self) -> Iterator[tuple[bytes, CachedReply]]:
        """Yield (key, receipt) pairs in no particular order."""
        for session, own in self._of.items():
            for sequence, receipt in own.items():
                yield reply_key(session, sequence), receipt

    def values(self) -> Iterator[CachedReply]:
        """Yield the receipts in no particular order."""
        return (receipt for own in self._of.values() for receipt in own.values())

    def copy_of(self, session: int) -> dict[int, CachedReply]:
        """Return a copy of a session's cached replies, by sequence number."""
        return dict(self._of.get(session, ()))

    def with_changes(self, own: dict[int, dict[int, CachedReply]], ended: list[int], total: int) -> SessionReplies:
        """Return a copy with the replies of some sessions replaced and those of ended sessions removed.

        `total` is the new count.
        """
        of = self._of.mutate()
        for session in ended:
            of.pop(session, None)
        for session, receipts in own.items():
            if receipts:
                of[session] = receipts
            else:
                of.pop(session, None)
        made = SessionReplies.__new__(SessionReplies)
        made._of, made._total = of.finish(), total
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SessionReplies) and self._of == other._of

    __hash__ = None  # type: ignore[assignment]  # compared in tests only; a hash would walk over everything

    def __repr__(self) -> str:
        return f"Answers({list(self.items())!r})"


class SessionDraft:
    """A session under modification, with the attributes of a `Session`."""

    __slots__ = ("acknowledged", "actor", "newest", "number", "opened_at", "own", "used_at")

    def __init__(self, session: Session, own: dict[int, CachedReply]) -> None:
        self.number = session.number
        self.actor = session.actor
        self.opened_at = session.opened_at
        self.used_at = session.used_at
        self.acknowledged = session.acknowledged
        self.newest = session.newest
        self.own = own
        """Cached replies by sequence number."""

    @property
    def answers(self) -> int:
        """Return the number of cached replies."""
        return len(self.own)

    def finish(self) -> Session:
        """Return the modified session."""
        return Session(
            self.number, self.actor, self.opened_at, self.used_at, self.acknowledged, self.newest, len(self.own)
        )


class SessionsBuilder:
    """Sessions and their cached replies under modification, part of a StateBuilder."""

    __slots__ = ("_answers", "_drafts", "_ended", "_sessions", "_total")

    def __init__(self, sessions: immutables.Map[int, Session], answers: SessionReplies) -> None:
        self._sessions = sessions.mutate()
        self._answers = answers
        self._drafts: dict[int, SessionDraft] = {}
        self._ended: list[int] = []
        self._total = len(answers)

    def get(self, number: int) -> Session | SessionDraft | None:
        """Return an open session, or None."""
        return self._drafts.get(number) or self._sessions.get(number)

    def find(self, number: int, sequence: int) -> CachedReply | None:
        """Return the cached reply to a command of a session, or None."""
        draft = self._drafts.get(number)
        return self._answers.find(number, sequence) if draft is None else draft.own.get(sequence)

    @property
    def answers(self) -> int:
        """Return the number of cached replies of all sessions."""
        return self._total

    def change(self, number: int) -> SessionDraft | None:
        """Return an open session for modification, or None."""
        draft = self._drafts.get(number)
        if draft is None and (session := self._sessions.get(number)) is not None:
            draft = self._drafts[number] = SessionDraft(session, self._answers.copy_of(number))
        return draft

    def add(self, draft: SessionDraft, sequence: int, receipt: CachedReply) -> None:
        """Cache the reply to a command that has none."""
        draft.own[sequence] = receipt
        self._total += 1

    def drop(self, draft: SessionDraft, first: int, last: int) -> int:
        """Delete the cached replies to a range of commands; return their number."""
        own, dropped = draft.own, 0
        for sequence in range(first, last + 1):
            if own.pop(sequence, None) is not None:
                dropped += 1
        self._total -= dropped
        return dropped

    def open(self, session: Session) -> None:
        """Add a session whose number is not in use."""
        self._sessions[session.number] = session

    def end(self, number: int) -> Session | SessionDraft | None:
        """Delete a session with its cached replies; return it."""
        session = self.get(number)
        if session is not None:
            self._drafts.pop(number, None)
            self._ended.append(number)
            self._total -= session.answers
            del self._sessions[number]
        return session

    def set_back(self, at: Instant) -> None:
        """Limit the last-use times of sessions to `at`, after the clock was set back."""
        sessions = self._sessions.finish()
        self._sessions = sessions.mutate()
        for number, session in sessions.items():
            if session.used_at > at:
                self._sessions[number] = replace(session, used_at=at)
        for draft in self._drafts.values():
            draft.used_at = min(draft.used_at, at)

    def finish(self) -> tuple[immutables.Map[int, Session], SessionReplies]:
        """Return the new sessions and replies; the builder must not be used afterwards."""
        for number, draft in self._drafts.items():
            self._sessions[number] = draft.finish()
        own = {number: draft.own for number, draft in self._drafts.items()}
        answers = self._answers.with_changes(own, self._ended, self._total) if own or self._ended else self._answers
        return self._sessions.finish(), answers
