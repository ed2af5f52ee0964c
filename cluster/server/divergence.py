"""Do the replicas really hold the same state? Digests of the same entries, compared for ever; the odd one out stops.

Every replica digests its State at the same entries: whenever the leader's clock in the batches has passed a whole
minute, and every so many entries. It keeps the last few digests, and asks its peers for theirs. Where a majority of the
members agrees on a digest that is not its own, its state is wrong whatever the reason (a fault of memory, of a disk, of
the program), so it stops and says so (law 10). Where nobody has a majority, it says so loudly and goes on: it cannot
know who is right.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from typing import NamedTuple, NoReturn

from cluster.eventloop import Background
from replica.state import State, state_digest
from replica.values import Instant, seconds

LOGGER = logging.getLogger(__name__)

CHECKPOINT_ENTRIES = 4096
"""Entries after which states are digested at the latest, count: under full load a few times a minute."""

CHECKPOINT_S = 60
"""Whole seconds of the leader's clock that make a checkpoint when they pass."""

CHECKPOINTS_KEPT = 16
"""Digests kept, count: a peer that is a quarter of an hour behind still finds one in common."""

COMPARE_PERIOD_S = 5.0
"""How often peers are asked while there is a digest that was not compared with all of them, seconds."""

Ask = Callable[[str], Awaitable[Mapping[int, str]]]
"""Returns the digests of a peer, entry index -> hexadecimal; raises what it likes when the peer cannot be asked."""


class Diverged(Exception):
    """This replica's state is not that of the majority."""


class Verdict(Enum):
    """What one checkpoint says of this replica."""

    AGREES = "agrees"
    """A majority, this replica included, has the same digest."""
    UNDECIDED = "undecided"
    """Too few have been heard; nobody contradicts."""
    DISPUTED = "disputed"
    """Somebody contradicts, and no majority is known."""
    ODD = "odd"
    """A majority agrees on another digest."""


def judge(mine: str, theirs: Mapping[str, str], members: int) -> Verdict:
    """Return what a checkpoint shows: `theirs` are the digests of the peers that have one for the same entry."""
    majority = members // 2 + 1
    votes = Counter(theirs.values())
    if votes[mine] + 1 >= majority:
        return Verdict.AGREES
    if any(count >= majority for digest, count in votes.items() if digest != mine):
        return Verdict.ODD
    return Verdict.DISPUTED if set(votes) - {mine} else Verdict.UNDECIDED


def is_checkpoint(index: int, before: Instant, after: Instant) -> bool:
    """Return whether the state after entry `index` is to be digested: by every replica, or by none."""
    period = seconds(CHECKPOINT_S)
    return index % CHECKPOINT_ENTRIES == 0 or before // period != after // period


class _Pending(NamedTuple):
    entry_index: int
    state: State


class Checkpoints(Background):
    """The digests of one replica, and their comparison with those of its peers."""

    def __init__(
        self, name: str, peers: Callable[[], tuple[str, ...]], ask: Ask, fail: Callable[[BaseException], NoReturn]
    ):
        """`peers` names the other members now; `fail` stops the replica."""
        super().__init__(fail)
        self._name = name
        self._peers = peers
        self._ask = ask
        self._digests: dict[int, str] = {}
        self._pending: deque[_Pending] = deque()
        self._woken = asyncio.Event()
        self._compared = 0
        self.verdict = Verdict.UNDECIDED

    @property
    def digests(self) -> Mapping[int, str]:
        """Entry index -> digest of the state after it, hexadecimal; the last CHECKPOINTS_KEPT."""
        return self._digests

    def applied(self, index: int, before: State, after: State) -> None:
        """Note an applied entry; its state is digested in the background if it is a checkpoint."""
        if is_checkpoint(index, before.at, after.at):
            # A State costs nothing to hold. When digesting is slower than applying for long, the newest are left out
            # here, and the peers' digests of them are simply not compared.
            if len(self._pending) < CHECKPOINTS_KEPT:
                self._pending.append(_Pending(index, after))
            self._woken.set()

    async def _run(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            while self._pending:
                pending = self._pending.popleft()
                # In a thread: a large state takes longer than a heartbeat, and a State never changes.
                digest = await asyncio.to_thread(state_digest, pending.state)
                self._digests[pending.entry_index] = digest.hex()
                while len(self._digests) > CHECKPOINTS_KEPT:
                    del self._digests[min(self._digests)]
            while self._digests and self._compared < max(self._digests) and not self._pending:
                await self._compare()
                if self._compared < max(self._digests):
                    await asyncio.sleep(COMPARE_PERIOD_S)

    async def _compare(self) -> None:
        """Ask every peer, and judge every checkpoint that somebody else has too.

        Not the newest alone: where a peer is steadily a checkpoint behind, it never has a majority, the one before has.
        """
        peers = self._peers()
        answers = await asyncio.gather(*(self._ask(peer) for peer in peers), return_exceptions=True)
        theirs = {peer: answer for peer, answer in zip(peers, answers, strict=True) if isinstance(answer, Mapping)}
        common = sorted(index for index in self._digests if any(index in digests for digests in theirs.values()))
        if not common:
            if not peers:
                self._compared = max(self._digests)
            return
        verdict, decided = Verdict.UNDECIDED, common[-1]
        for index in common:
            found = self._judged(index, theirs, len(peers) + 1)
            if found is not Verdict.UNDECIDED:
                verdict, decided = found, index
        self.verdict = verdict
        if verdict is Verdict.DISPUTED:
            mine = self._digests[decided]
            LOGGER.error(
                "states differ after entry %d and no majority agrees: %s %s, %s",
                decided,
                self._name,
                mine,
                _of_index(theirs, decided),
            )
        newest = common[-1]
        if newest == max(self._digests) and all(newest in theirs.get(peer, ()) for peer in peers):
            self._compared = newest

    def _judged(self, index: int, theirs: Mapping[str, Mapping[int, str]], members: int) -> Verdict:
        """Return what one checkpoint says; the odd one out does not return."""
        mine, of_index = self._digests[index], _of_index(theirs, index)
        verdict = judge(mine, of_index, members)
        if verdict is Verdict.ODD:
            others = ", ".join(f"{peer} {digest[:16]}" for peer, digest in sorted(of_index.items()))
            self._fail(
                Diverged(
                    f"the state of {self._name} after entry {index} has digest {mine[:16]}; the majority has another "
                    f"({others}); keep its directory for an inquiry, and bring the replica back with "
                    "`forebay member replace`"
                )
            )
        return verdict


def _of_index(theirs: Mapping[str, Mapping[int, str]], index: int) -> dict[str, str]:
    return {peer: digests[index] for peer, digests in theirs.items() if index in digests}
