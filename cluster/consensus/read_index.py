"""Linearizable reads (ReadIndex, thesis 6.4): one round of heartbeats confirms leadership to many waiters.

A follower asks its leader for the index, which the leader gives once a round that began after the question has
confirmed it; the follower applies up to there, and its own state answers.
"""

from collections.abc import Callable

ReadWaiter = Callable[[int | None], None]
"""Called once, with the commit index to wait for, or None when leadership was lost."""


class ReadRounds:
    """Rounds of heartbeats, at most one under way; a read that comes meanwhile waits for the next one."""

    def __init__(self) -> None:
        self._waiting: list[ReadWaiter] = []
        self._asked: list[ReadWaiter] = []
        self._asked_seq = 0

    def add(self, waiter: ReadWaiter) -> None:
        """Wait for a round that starts from now on."""
        self._waiting.append(waiter)

    @property
    def wants_round(self) -> bool:
        """Whether somebody waits and no round is under way."""
        return bool(self._waiting) and not self._asked

    @property
    def under_way(self) -> bool:
        """Whether a round is, so that an answer may release somebody."""
        return bool(self._asked)

    def start(self, first_seq: int) -> None:
        """A round starts: an answer to a request `first_seq` or later counts."""
        self._asked, self._waiting = self._waiting, []
        self._asked_seq = first_seq

    def answer(self, quorum_seq: int, commit_index: int) -> None:
        """Release the round if a majority answered its requests (`quorum_seq`)."""
        if self._asked and quorum_seq >= self._asked_seq:
            asked, self._asked = self._asked, []
            for waiter in asked:
                waiter(commit_index)

    def abandon(self) -> None:
        """Leadership is lost: answer every waiter with None."""
        waiters, self._asked, self._waiting = self._asked + self._waiting, [], []
        for waiter in waiters:
            waiter(None)
