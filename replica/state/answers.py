"""The sessions of programs, and the answers to their commands that are still kept (law 6).

What one session has outstanding is a plain dict that is never changed once it is in a State: a batch copies it once,
and settles any number of its commands on the copy. A persistent tree of all keys would copy a path for each command.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar, overload

import immutables
from msgspec.structs import replace

from replica.messages import Receipt, Session
from replica.values import Instant, answer_key, answered

T = TypeVar("T")


class Answers:
    """The kept answers: a map from `replica.values.answer_key`. Immutable."""

    __slots__ = ("_of", "_total")

    def __init__(self, answers: Iterable[tuple[bytes, Receipt]] = ()) -> None:
        """Hold `answers`, (key, receipt). ValueError where a key is that of no command in a session."""
        of: dict[int, dict[int, Receipt]] = {}
        for key, receipt in answers:
            session, sequence = answered(key)
            of.setdefault(session, {})[sequence] = receipt
        self._of = immutables.Map(of)
        self._total = sum(map(len, of.values()))

    def find(self, session: int, sequence: int) -> Receipt | None:
        """Return the answer to a command of a session, if it is kept."""
        own = self._of.get(session)
        return None if own is None else own.get(sequence)

    @overload
    def get(self, key: bytes, /) -> Receipt | None: ...
    @overload
    def get(self, key: bytes, default: T, /) -> Receipt | T: ...
    def get(self, key: bytes, default: T | None = None, /) -> Receipt | T | None:
        """Return the answer of a key, or `default`."""
        found = self.find(*answered(key))
        return default if found is None else found

    def __getitem__(self, key: bytes, /) -> Receipt:
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

    def items(self) -> Iterator[tuple[bytes, Receipt]]:
        """Walk over (key, receipt), in no order."""
        for session, own in self._of.items():
            for sequence, receipt in own.items():
                yield answer_key(session, sequence), receipt

    def values(self) -> Iterator[Receipt]:
        """Walk over the receipts, in no order."""
        return (receipt for own in self._of.values() for receipt in own.values())

    def copy_of(self, session: int) -> dict[int, Receipt]:
        """Return a copy of the answers of one session, by sequence number."""
        return dict(self._of.get(session, ()))

    def changed(self, own: dict[int, dict[int, Receipt]], ended: list[int], total: int) -> Answers:
        """Return the answers where some sessions have others, and some were ended; `total` of them in all."""
        of = self._of.mutate()
        for session in ended:
            of.pop(session, None)
        for session, receipts in own.items():
            if receipts:
                of[session] = receipts
            else:
                of.pop(session, None)
        made = Answers.__new__(Answers)
        made._of, made._total = of.finish(), total
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answers) and self._of == other._of

    __hash__ = None  # type: ignore[assignment]  # compared in tests only; a hash would walk over everything

    def __repr__(self) -> str:
        return f"Answers({list(self.items())!r})"


class SessionDraft:
    """A session in which commands are being settled; whatever a `Session` says, it says too."""

    __slots__ = ("acknowledged", "actor", "newest", "number", "opened_at", "own", "used_at")

    def __init__(self, session: Session, own: dict[int, Receipt]) -> None:
        self.number = session.number
        self.actor = session.actor
        self.opened_at = session.opened_at
        self.used_at = session.used_at
        self.acknowledged = session.acknowledged
        self.newest = session.newest
        self.own = own
        """The answers that are kept, by sequence number."""

    @property
    def answers(self) -> int:
        """How many they are."""
        return len(self.own)

    def finish(self) -> Session:
        """Return what it has come to."""
        return Session(
            self.number, self.actor, self.opened_at, self.used_at, self.acknowledged, self.newest, len(self.own)
        )


class SessionsBuilder:
    """Sessions and their answers being changed: what a StateBuilder of the state holds."""

    __slots__ = ("_answers", "_drafts", "_ended", "_sessions", "_total")

    def __init__(self, sessions: immutables.Map[int, Session], answers: Answers) -> None:
        self._sessions = sessions.mutate()
        self._answers = answers
        self._drafts: dict[int, SessionDraft] = {}
        self._ended: list[int] = []
        self._total = len(answers)

    def get(self, number: int) -> Session | SessionDraft | None:
        """Return a session that is open."""
        return self._drafts.get(number) or self._sessions.get(number)

    def find(self, number: int, sequence: int) -> Receipt | None:
        """Return the answer to a command of a session, if it is kept."""
        draft = self._drafts.get(number)
        return self._answers.find(number, sequence) if draft is None else draft.own.get(sequence)

    @property
    def answers(self) -> int:
        """Answers that are kept in all sessions, count."""
        return self._total

    def change(self, number: int) -> SessionDraft | None:
        """Return a session that is open as what can be changed."""
        draft = self._drafts.get(number)
        if draft is None and (session := self._sessions.get(number)) is not None:
            draft = self._drafts[number] = SessionDraft(session, self._answers.copy_of(number))
        return draft

    def add(self, draft: SessionDraft, sequence: int, receipt: Receipt) -> None:
        """Keep the answer to a command that has none."""
        draft.own[sequence] = receipt
        self._total += 1

    def drop(self, draft: SessionDraft, first: int, last: int) -> int:
        """Forget the answers to some commands of a session; return how many there were."""
        own, dropped = draft.own, 0
        for sequence in range(first, last + 1):
            if own.pop(sequence, None) is not None:
                dropped += 1
        self._total -= dropped
        return dropped

    def open(self, session: Session) -> None:
        """Begin a session; there is none of its number."""
        self._sessions[session.number] = session

    def end(self, number: int) -> Session | SessionDraft | None:
        """Forget a session and its answers; return what it was."""
        session = self.get(number)
        if session is not None:
            self._drafts.pop(number, None)
            self._ended.append(number)
            self._total -= session.answers
            del self._sessions[number]
        return session

    def set_back(self, at: Instant) -> None:
        """Have what was used later by the clock count from `at`."""
        sessions = self._sessions.finish()
        self._sessions = sessions.mutate()
        for number, session in sessions.items():
            if session.used_at > at:
                self._sessions[number] = replace(session, used_at=at)
        for draft in self._drafts.values():
            draft.used_at = min(draft.used_at, at)

    def finish(self) -> tuple[immutables.Map[int, Session], Answers]:
        """Return the next sessions and answers; the builder must not be used afterwards."""
        for number, draft in self._drafts.items():
            self._sessions[number] = draft.finish()
        own = {number: draft.own for number, draft in self._drafts.items()}
        answers = self._answers.changed(own, self._ended, self._total) if own or self._ended else self._answers
        return self._sessions.finish(), answers
