"""Linearizable reads (ReadIndex, thesis 6.4): one round of heartbeats confirms leadership for many waiting reads.

A round counts if a majority has answered requests that were sent after its reads arrived. The engine then answers the
reads with its commit index, once this leader has applied the first entry of its leadership. `log_replication` has the
messages for reads of followers.
"""

from collections.abc import Callable

ReadWaiter = Callable[[int | None], None]
"""Called once, with the commit index to wait for, or None when leadership was lost."""


class ReadRounds:
    """Rounds of heartbeats, at most one at a time. A read that arrives during a round waits for the next round."""

    def __init__(self) -> None:
        self._waiting: list[ReadWaiter] = []
        self._asked: list[ReadWaiter] = []
        self._asked_seq = 0

    def add(self, waiter: ReadWaiter) -> None:
        """Let a read wait for the next round."""
        self._waiting.append(waiter)

    @property
    def wants_round(self) -> bool:
        """Return whether reads are waiting and no round is under way."""
        return bool(self._waiting) and not self._asked

    @property
    def under_way(self) -> bool:
        """Return whether a round is under way, so that a reply may complete it."""
        return bool(self._asked)

    def start(self, first_seq: int) -> None:
        """Start a round; replies to request `first_seq` or later count."""
        self._asked, self._waiting = self._waiting, []
        self._asked_seq = first_seq

    def answer(self, quorum_seq: int, commit_index: int) -> None:
        """Complete the round if a majority answered its requests (`quorum_seq`)."""
        if self._asked and quorum_seq >= self._asked_seq:
            asked, self._asked = self._asked, []
            for waiter in asked:
                waiter(commit_index)

    def abandon(self) -> None:
        """Answer every waiter with None, because leadership is lost."""
        waiters, self._asked, self._waiting = self._asked + self._waiting, [], []
        for waiter in waiters:
            waiter(None)
