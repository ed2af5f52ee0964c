"""Do the replicas really hold the same state and history? Digests, compared for ever; the odd one out stops.

Every replica digests its State at the same entries: whenever the leader's clock in the batches has passed a whole
minute, every so many entries, and when nothing has changed for a minute. It keeps the last few digests, and asks its
peers for theirs. Where a majority of the
members agrees on a digest that is not its own, its state is wrong whatever the reason (a fault of memory, of a disk, of
the program), so it stops and says so (law 10). Where nobody has a majority, it says so loudly and goes on: it cannot
know who is right.

Ledgers are compared in the same way: when a replica starts, as of the last entry that it had applied, and at each
checkpoint. A history that was rewritten while the replica was down and hashed again is sound in itself, and may lead
to the very same state; only the others know that it is another one. Until they have said so it leads nobody who can
tell (`cluster.consensus.leader_election`).

What a majority has, the leader records in the ledger (`StateDigested`), so that an old ledger can be held against it,
and a snapshot against the ledger. A replica that has another digest of that state than is recorded stops like the odd
one out: it is. An idle cluster records nothing, since a record changes nothing that would have to be recorded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from enum import Enum
from typing import NamedTuple, NoReturn, Protocol

from cluster.server.pending import Answer, NotLeading, QueueFull
from cluster.system.eventloop import Background
from replica.messages import CONTROLLER, Batch, RecordStateDigest, Request
from replica.state import State, is_checkpoint, recorded_in, state_digest

LOGGER = logging.getLogger(__name__)

QUIET_S = 66.0
"""How long nothing has changed when the last state is digested, seconds: more than the minute that makes a checkpoint,
so that whatever comes next passes one, and whoever folds the ledger holds this state when it reads its digest."""

CHECKPOINTS_KEPT = 16
"""Digests kept, count: a peer that is a quarter of an hour behind still finds one in common."""

COMPARE_PERIOD_S = 5.0
"""How often peers are asked while there is a digest that was not compared with all of them, seconds."""


class Digests(NamedTuple):
    """Digests of one replica, entry index -> hexadecimal."""

    states: Mapping[int, str]
    """Of the state after an entry."""
    ledgers: Mapping[int, str]
    """Of the ledger up to an entry."""


Ask = Callable[[str, int], Awaitable[Digests]]
"""Returns the digests of a peer, among them that of its ledger up to the index given, or up to the last entry that it
has applied if that comes before; raises what it likes when the peer cannot be asked."""


class Chain(Protocol):
    """The ledger as its digests show it: `wal.Journal`."""

    @property
    def applied_index(self) -> int: ...
    def digest_at(self, index: int) -> bytes | None: ...


class Diverged(Exception):
    """This replica's state or ledger is not that of the majority."""


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


class _Pending(NamedTuple):
    """A state to be digested, as it is after an entry."""

    entry_index: int
    state: State
    changed: int
    """The last revision up to it that did more than record a digest."""


class _Digested(NamedTuple):
    revision: int
    changed: int


class _Recorded(NamedTuple):
    entry_index: int
    digest: str


class Checkpoints(Background):
    """The digests of one replica, and their comparison with those of its peers."""

    def __init__(
        self,
        name: str,
        peers: Callable[[], tuple[str, ...]],
        ask: Ask,
        fail: Callable[[BaseException], NoReturn],
        *,
        chain: Chain,
    ):
        """`peers` names the other members now; `fail` stops the replica; `chain` is its own ledger."""
        super().__init__(fail)
        self._name = name
        self._peers = peers
        self._ask = ask
        self._digests: dict[int, str] = {}
        self._digested: dict[int, _Digested] = {}
        """Entry index -> which state it was that was digested."""
        self._agreed = 0
        """The last entry after which a majority was seen to have this state."""
        self._recorded: dict[int, _Recorded] = {}
        """Revision -> what the ledger records of the state after it; the last CHECKPOINTS_KEPT."""
        self._changed = 0
        self._undigested: _Pending | None = None
        """The last state that changed something, unless it was a checkpoint."""
        self._quiet: asyncio.TimerHandle | None = None
        self._pending: deque[_Pending] = deque()
        self._woken = asyncio.Event()
        self._compared = 0
        self._chain = chain
        self._ledger_index = chain.applied_index
        """The entry up to which ledgers are to be compared next."""
        self._is_ledger_compared = not self._ledger_index
        """Whether every peer has answered for that entry."""
        self._of_states = self._of_ledgers = Verdict.UNDECIDED
        self._woken.set()  # what was there before the start is compared at once

    @property
    def verdict(self) -> Verdict:
        """What the last comparison said: of the states, unless a ledger is disputed."""
        return Verdict.DISPUTED if self._of_ledgers is Verdict.DISPUTED else self._of_states

    @property
    def digests(self) -> Mapping[int, str]:
        """Entry index -> digest of the state after it, hexadecimal; the last CHECKPOINTS_KEPT."""
        return self._digests

    @property
    def unrecorded(self) -> RecordStateDigest | None:
        """What is to be recorded: the newest digest that a majority has, if something changed since the last one."""
        digested = self._digested.get(self._agreed)
        if digested is None or digested.changed <= max(self._recorded, default=0):
            return None
        return RecordStateDigest(digested.revision, bytes.fromhex(self._digests[self._agreed]))

    async def stop(self) -> None:
        """End it, and wait until it has ended."""
        if self._quiet is not None:
            self._quiet.cancel()
        await super().stop()

    def applied(self, index: int, before: State, after: State, batch: Batch | None = None) -> None:
        """Note an applied entry; its state is digested in the background if it is a checkpoint.

        `batch` is what it settled, if anything. Does not return where that records another digest than this replica's.
        """
        records = 0
        for recorded in () if batch is None else recorded_in(batch):
            records += 1
            self._recorded[recorded.revision] = _Recorded(index, recorded.state.hex())
            while len(self._recorded) > CHECKPOINTS_KEPT:
                del self._recorded[min(self._recorded)]
            self._check_recorded(recorded.revision)
        changes = after.revision - before.revision > records
        if changes:
            self._changed = after.revision
        # A record alone makes no checkpoint: an idle cluster would go on with the digest of each digest.
        if (changes or not records) and is_checkpoint(index, before.at, after.at):
            # A State costs nothing to hold. When digesting is slower than applying for long, the newest are left out
            # here, and the peers' digests of them are simply not compared.
            if len(self._pending) < CHECKPOINTS_KEPT:
                self._pending.append(_Pending(index, after, self._changed))
            self._undigested = None
            self._woken.set()
        elif changes or (records and self._undigested is not None):
            # The very last state, with a record of an earlier one: whatever comes next comes behind it.
            self._undigested = _Pending(index, after, self._changed)
            if self._quiet is None:
                self._await_quiet(self._undigested)

    def _await_quiet(self, last: _Pending) -> None:
        """Have the last state digested if it still is the last one after QUIET_S."""

        def passed() -> None:
            self._quiet = None
            if self._undigested is last:
                self._undigested = None
                self._pending.append(last)
                self._woken.set()
            elif self._undigested is not None:
                self._await_quiet(self._undigested)

        self._quiet = asyncio.get_running_loop().call_later(QUIET_S, passed)

    def _check_recorded(self, revision: int) -> None:
        """Hold the digest of a state against the recorded one, if both are known; the odd one out does not return."""
        recorded = self._recorded.get(revision)
        index = next((index for index, one in self._digested.items() if one.revision == revision), None)
        if recorded is None or index is None or self._digests[index] == recorded.digest:
            return
        self._fail(
            Diverged(
                f"the state of {self._name} after revision {revision} has digest {self._digests[index][:16]}; the "
                f"majority had another, which entry {recorded.entry_index} records ({recorded.digest[:16]}); keep its "
                "directory for an inquiry, and bring the replica back with `forebay cluster replace`"
            )
        )

    async def _run(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            while self._pending:
                pending = self._pending.popleft()
                # In a thread: a large state takes longer than a heartbeat, and a State never changes.
                digest = await asyncio.to_thread(state_digest, pending.state)
                self._digests[pending.entry_index] = digest.hex()
                self._digested[pending.entry_index] = _Digested(pending.state.revision, pending.changed)
                self._ledger_index, self._is_ledger_compared = pending.entry_index, False
                while len(self._digests) > CHECKPOINTS_KEPT:
                    self._digested.pop(oldest := min(self._digests), None)
                    del self._digests[oldest]
                self._check_recorded(pending.state.revision)
            while self._is_unfinished and not self._pending:
                await self._compare()
                if self._is_unfinished:
                    await asyncio.sleep(COMPARE_PERIOD_S)

    @property
    def _is_unfinished(self) -> bool:
        """Whether there is a digest that was not compared with all peers."""
        return self._compared < max(self._digests, default=0) or not self._is_ledger_compared

    async def _compare(self) -> None:
        """Ask every peer, and judge what somebody else has too."""
        peers, index = self._peers(), self._ledger_index
        answers = await self._answers(peers, index)
        self._compare_states(peers, {peer: answer.states for peer, answer in answers.items()})
        await self._compare_ledgers(peers, index, {peer: answer.ledgers for peer, answer in answers.items()})

    async def _answers(self, peers: tuple[str, ...], index: int) -> dict[str, Digests]:
        answers = await asyncio.gather(*(self._ask(peer, index) for peer in peers), return_exceptions=True)
        return {peer: answer for peer, answer in zip(peers, answers, strict=True) if isinstance(answer, Digests)}

    async def _compare_ledgers(self, peers: tuple[str, ...], index: int, theirs: dict[str, Mapping[int, str]]) -> None:
        """Judge the ledgers up to `index`, or as far as the peers have them."""
        if not index:
            return
        verdict = self._judged_ledgers(theirs, len(peers) + 1)
        if verdict is Verdict.DISPUTED and len(theirs) > 1:
            # Peers that are behind name different entries, of which none has a majority; all of them have the first.
            first = min(max(digests, default=index) for digests in theirs.values())
            answers = await self._answers(peers, first)
            self._judged_ledgers({peer: answer.ledgers for peer, answer in answers.items()}, len(peers) + 1)
        self._of_ledgers = verdict
        if index == self._ledger_index:
            self._is_ledger_compared = all(index in theirs.get(peer, ()) for peer in peers)

    def _judged_ledgers(self, theirs: Mapping[str, Mapping[int, str]], members: int) -> Verdict:
        """Return what the ledgers say, at the first entry where they differ; the odd one out does not return."""
        verdict = Verdict.UNDECIDED
        for index in sorted({index for digests in theirs.values() for index in digests}):
            digest = self._chain.digest_at(index)
            if digest is None:
                continue
            mine, of_index = digest.hex(), _of_index(theirs, index)
            found = judge(mine, of_index, members)
            others = ", ".join(f"{peer} {other[:16]}" for peer, other in sorted(of_index.items()))
            if found is Verdict.ODD:
                self._fail(
                    Diverged(
                        f"the ledger of {self._name} up to entry {index} has digest {mine[:16]}; the majority has "
                        f"another ({others}): its history was altered; keep its directory for an inquiry, and bring "
                        "the replica back with `forebay cluster replace`"
                    )
                )
            if found is Verdict.DISPUTED:
                LOGGER.error(
                    "ledgers differ up to entry %d and no majority agrees: %s %s, %s; one of them was altered",
                    index,
                    self._name,
                    mine[:16],
                    others,
                )
                return found
            if found is Verdict.AGREES:
                verdict = found
        return verdict

    def _compare_states(self, peers: tuple[str, ...], theirs: dict[str, Mapping[int, str]]) -> None:
        """Judge every checkpoint that somebody else has too.

        Not the newest alone: where a peer is steadily a checkpoint behind, it never has a majority, the one before has.
        """
        common = sorted(index for index in self._digests if any(index in digests for digests in theirs.values()))
        if not common:
            if not peers:
                self._compared = self._agreed = max(self._digests, default=0)
            return
        verdict, decided = Verdict.UNDECIDED, common[-1]
        for index in common:
            found = self._judged(index, theirs, len(peers) + 1)
            if found is not Verdict.UNDECIDED:
                verdict, decided = found, index
            if found is Verdict.AGREES:
                self._agreed = index
        self._of_states = verdict
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
                    "`forebay cluster replace`"
                )
            )
        return verdict


def _of_index(theirs: Mapping[str, Mapping[int, str]], index: int) -> dict[str, str]:
    return {peer: digests[index] for peer, digests in theirs.items() if index in digests}


class DigestRecorder:
    """Digests of states that a majority has, written into the ledger by whoever leads, each once."""

    def __init__(self, checkpoints: Checkpoints, *, submit: Callable[[Request], Answer]) -> None:
        """`submit` as `Controller.submit`."""
        self._checkpoints = checkpoints
        self._submit = submit
        self._answer: Answer | None = None

    def poll(self) -> None:
        """Record the newest digest if something has changed since the last record, and none is under way."""
        unrecorded = self._checkpoints.unrecorded
        if unrecorded is not None and (self._answer is None or self._answer.done()):
            with suppress(QueueFull, NotLeading):
                self._answer = self._submit(Request(b"", CONTROLLER, unrecorded))
                # Whoever leads then has its own record to make.
                self._answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())

    def stop(self) -> None:
        """Forget what is under way: whoever leads records the next one."""
        self._answer = None
