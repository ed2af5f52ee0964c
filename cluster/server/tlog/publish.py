"""Publication of checkpoints: the leader collects its peers' signatures of their own roots, and distributes the result.

A checkpoint follows every PERIOD_S in which entries were committed. The leader is not trusted: each replica signs by
its own tree, the leader counts only signatures of its own root, and a replica stops if it receives a checkpoint with
another root that a majority has signed. To forge the history, an attacker must alter a majority of ledgers within one
period.

Witnesses are asked shortly before a checkpoint is published, and slow witnesses again after it. A checkpoint without
enough cosignatures is published anyway: the cluster never waits for outside parties.

A starting replica requests the others' checkpoints. If one of them has this replica's signature over more entries than
it has recorded as signed, its directory was rolled back, and it stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from forebay.cluster.security.proofs import (
    Checkpoint,
    NoteError,
    Signature,
    VerifierKey,
    parse_checkpoint,
    parse_note,
    verify_note,
)
from forebay.cluster.security.proofs import write_note as written
from forebay.cluster.server.divergence import Verdict, judge
from forebay.cluster.server.tlog.cosigning import BEFORE_PUBLICATION_S, Cosigning, Submit
from forebay.cluster.server.tlog.signing import LedgerAltered, Signer, SignRefused
from forebay.cluster.system import Clock, make_private_directory, replace_private
from forebay.cluster.system.eventloop import Background
from forebay.replica.messages import RecordHistories

LOGGER = logging.getLogger(__name__)

PERIOD_S: Final = 10.0
"""Interval between two checkpoints, seconds, if entries were committed. A forger has less time than that."""

POLL_S: Final = 1.0
"""Interval of checks whether a checkpoint is due, seconds."""

ASK_AGAIN_S: Final = 15.0
"""Pause before a silent peer is asked again for its published checkpoint, seconds."""

LAST_S: Final = 2.0
"""Time limit of the last checkpoint before a leadership transfer, seconds: less than a service manager waits."""

COUNTED_S: Final = 60.0
"""Interval between two records of job counts, seconds: the delay of a proof of completeness."""

CHECKPOINT_NAME: Final = "checkpoint"

INQUIRY: Final = "keep its directory for an examination, and bring the replica back with `forebay cluster replace`"


class SignedCheckpoint(NamedTuple):
    """Reply of a replica: its key, the root of its own ledger, and the checkpoint with its signature or None."""

    key: VerifierKey
    root: bytes
    note: str | None


class CountedHistories(NamedTuple):
    """Record counts of each job in a number of entries: the last job, and the root over the counts."""

    jobs: int
    root: bytes


class Counting(NamedTuple):
    """Callbacks of a publisher for counting and recording job histories."""

    counted: Callable[[int], Awaitable[tuple[CountedHistories, bytes]]]
    """Counts the records in the first entries. Returns the counts, and the root that the ledger last recorded for them.

    Raises LookupError or TimeoutError.
    """
    record: Callable[[RecordHistories], None]
    """Submits a record of the counts."""


Ask = Callable[[str, int, bytes], Awaitable[SignedCheckpoint]]
"""Asks a peer to sign the checkpoint of a size if its tree has this root; any exception means no answer."""

Hand = Callable[[str, str], Awaitable[None]]
"""Sends a note to a peer."""

CountOf = Callable[[str, int, bytes], Awaitable[CountedHistories | None]]
"""Asks a peer to count the records in the first entries with this root; None if the peer cannot."""

KeyOf = Callable[[str], Awaitable[VerifierKey]]
"""Requests a peer's key."""

NoteOf = Callable[[str], Awaitable[str]]
"""Requests a peer's last checkpoint: a note, or empty; any exception means no answer."""


async def _no_note(peer: str) -> str:
    return ""


async def _nobody(*asked: object) -> NoReturn:
    raise LookupError("there is no peer to ask")


class LogPeers(NamedTuple):
    """Requests of a publisher to the other replicas and the witnesses."""

    ask: Ask
    hand: Hand
    key_of: KeyOf
    note_of: NoteOf = _no_note
    submit: Submit = _nobody
    count_of: CountOf = _nobody


NOBODY: Final = LogPeers(_nobody, _nobody, _nobody)
"""Requests of a replica without peers."""


class NoteNotTaken(Exception):
    """The received note is not a checkpoint of a majority; the message gives the reason."""


class Publisher(Background):
    """Checkpoints of one replica: a leader collects signatures, a follower receives checkpoints from its leader."""

    def __init__(
        self,
        signer: Signer,
        directory: Path,
        *,
        name: str,
        leads: Callable[[], bool],
        applied_index: Callable[[], int],
        tree_size: Callable[[], int],
        root: Callable[[int], Awaitable[bytes]],
        peers: Callable[[], tuple[str, ...]],
        asked: LogPeers,
        cosigning: Cosigning,
        counting: Counting | None = None,
        clock: Clock,
        fail: Callable[[BaseException], NoReturn],
    ) -> None:
        """Read the last checkpoint from disk.

        `directory` is that of the replica's tree, `tree_size` its known size. `root` returns the tree's root at a size,
        and waits until the tree has that size. `peers` returns the other members. `fail` stops the replica.
        """
        super().__init__(fail)
        self._signer = signer
        self._path = directory / CHECKPOINT_NAME
        self._name = name
        self._leads = leads
        self._applied_index = applied_index
        self._tree_size = tree_size
        self._root = root
        self._peers = peers
        self._asked = asked
        self.cosigning: Final = cosigning
        """Witnesses."""
        self._counting = counting
        self._clock = clock
        self._keys: dict[str, VerifierKey] = {}
        self._heard: set[str] = set()
        """Peers whose checkpoints were compared with this replica's signatures since the start."""
        self.doubt = ""
        """Logged reason to suspect that this replica's key was replaced; empty if none."""
        self.note, self.published = self._read()
        """Last note, or empty, and its checkpoint."""
        self.published_s = clock.monotonic_s()
        """Time of the last publication, by the monotonic clock; initially the start of this process."""
        self.witnessed_by = cosigning.cosigned_by(self.note)
        """Names of the witnesses that cosigned the last checkpoint."""
        self._unwitnessed_since_s = None if self._is_witnessed() else self.published_s
        self.failed = 0
        """Number of checkpoints that failed for lack of a majority."""

    @property
    def origin(self) -> str:
        """First line of this cluster's checkpoints."""
        return self._signer.origin

    @property
    def key(self) -> VerifierKey:
        """Key that verifies this replica's signatures."""
        return self._signer.key

    @property
    def size(self) -> int:
        """Number of entries of the last published checkpoint; 0 before the first one."""
        return 0 if self.published is None else self.published.size

    @property
    def unwitnessed_s(self) -> float:
        """Time for which checkpoints have lacked cosignatures, seconds; 0 if the last checkpoint has enough."""
        since_s = self._unwitnessed_since_s
        return 0.0 if since_s is None else self._clock.monotonic_s() - since_s

    async def keys(self) -> Mapping[str, VerifierKey]:
        """Return the keys of this replica and of peers that answer, by name."""
        peers = self._peers()
        found = await asyncio.gather(*map(self._asked.key_of, peers), return_exceptions=True)
        self._keys |= {peer: key for peer, key in zip(peers, found, strict=True) if isinstance(key, VerifierKey)}
        return {self._name: self._signer.key} | {peer: self._keys[peer] for peer in peers if peer in self._keys}

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._publish_when_due())
            group.create_task(self._ask_late_witnesses())

    async def _ask_late_witnesses(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if self._leads():
                await self.ask_late_witnesses()

    async def ask_late_witnesses(self) -> None:
        """Request missing cosignatures of the published checkpoint from due witnesses, and distribute them."""
        found = self.published
        if found is None:
            return
        signatures = await self.cosigning.collect(found, self.note)
        if signatures and found == self.published:
            self._take(self.note + "".join(one.line() for one in signatures), found)
            await self._hand_on()

    async def _publish_when_due(self) -> None:
        due_s = counted_s = self._clock.monotonic_s()
        due_s += PERIOD_S
        counted_s += COUNTED_S
        ask_due_s = self._clock.monotonic_s()
        while True:
            await asyncio.sleep(POLL_S)
            if self._clock.monotonic_s() >= ask_due_s:
                await self.check_signed()
                ask_due_s = self._clock.monotonic_s() + ASK_AGAIN_S
            if self._clock.monotonic_s() < due_s or not self._leads() or self._applied_index() <= self.size:
                continue
            try:
                if await self.publish() and self._clock.monotonic_s() >= counted_s:
                    await self.record_histories()
                    counted_s = self._clock.monotonic_s() + COUNTED_S
            except (LookupError, SignRefused, TimeoutError) as error:
                self._missed(str(error))
            due_s = self._clock.monotonic_s() + PERIOD_S

    async def check_signed(self) -> None:
        """Compare this replica's recorded signatures with the checkpoints of peers not asked since the start.

        Does not return if a checkpoint has this replica's signature over more entries than it has recorded as signed.
        """
        peers = [peer for peer in self._peers() if peer not in self._heard]
        notes = await asyncio.gather(*map(self._asked.note_of, peers), return_exceptions=True)
        for peer, note in zip(peers, notes, strict=True):
            if isinstance(note, str):
                self._check_signed(note, peer)
                self._heard.add(peer)

    def _check_signed(self, note: str, peer: str) -> None:
        try:
            found = parse_checkpoint(verify_note(note.encode(), [self._signer.key])[0])
        except NoteError:
            self._doubt_key(note, peer)
            return
        signed = 0 if self._signer.last is None else self._signer.last.size
        if found.size > signed:
            self._fail(
                LedgerAltered(
                    f"{self._name} has signed {found.size} entries, as the checkpoint of {peer} shows, but its own "
                    f"record shows {signed}: its directory was rolled back, and lacks acknowledged entries; {INQUIRY}"
                )
            )

    def _doubt_key(self, note: str, peer: str) -> None:
        """Report a peer's checkpoint that has as many signatures as there are members, but not this replica's.

        This is no reason to stop: for some seconds after a member left, a replica that was absent finds such a
        checkpoint.
        """
        try:
            _, signatures = parse_note(note.encode())
        except NoteError:
            return  # the peer has no checkpoint yet
        count = sum(one.name == self._signer.origin for one in signatures)
        if self._signer.last is not None and count > len(self._peers()):
            self.doubt = (
                f"{count} replicas have signed the checkpoint of {peer}, but none with the key of {self._name}, which "
                "signed earlier ones: unless a member has just left, its key was replaced, and its directory with it"
            )
            LOGGER.error("%s; compare with an earlier output of `forebay audit keys`; %s", self.doubt, INQUIRY)

    async def record_histories(self) -> bool:
        """Submit the record counts of the published entries if a majority counts the same and the ledger lacks them.

        Returns whether the counts were submitted.
        """
        found, counting = self.published, self._counting
        if found is None or counting is None:
            return False
        try:
            mine, recorded = await counting.counted(found.size)
        except (LookupError, TimeoutError) as error:
            LOGGER.info("record counts of jobs cannot be recorded at present: %s", error)
            return False
        if mine.root == recorded or not mine.jobs:
            return False
        peers = self._peers()
        theirs = await asyncio.gather(
            *(self._asked.count_of(peer, found.size, found.root) for peer in peers), return_exceptions=True
        )
        same = 1 + sum(one == mine for one in theirs)
        if same < _majority(len(peers) + 1):
            others = {peer: one for peer, one in zip(peers, theirs, strict=True) if one != mine}
            LOGGER.warning(
                "%d of %d replicas count the same records of jobs in %d entries: %s",
                same,
                len(peers) + 1,
                found.size,
                others,
            )
            return False
        counting.record(RecordHistories(found.size, mine.jobs, mine.root))
        return True

    async def conclude(self) -> None:
        """Publish a checkpoint of all applied entries while this replica still leads, within LAST_S.

        For a leader about to transfer its leadership, so that its term is proven. If this fails, the next leader's
        checkpoint covers the entries. At the very start of a term there is no tree yet, and no checkpoint is made.
        """
        if not self._leads() or self._applied_index() <= self.size or not self._tree_size():
            return
        try:
            async with asyncio.timeout(LAST_S):
                await self.publish(whole=True)
        except (LookupError, SignRefused, TimeoutError) as error:
            self._missed(str(error) or f"{LAST_S:g} s were not enough before the transfer of leadership")

    async def publish(self, *, whole: bool = False) -> bool:
        """Publish a checkpoint of the entries that can be proven now; return whether a majority has signed it.

        `whole`: cover all applied entries, however long the trees take. Does not return if a majority has another
        ledger. Exceptions of `root` also propagate.

        Raises:
            SignRefused: This replica does not sign now.
        """
        # The present size of this replica's tree, which the peers' trees reach too under any load. `whole` uses the
        # applied entries instead.
        peers, size = self._peers(), self._tree_size()
        if whole or size <= self.size:
            size = self._applied_index()
        try:
            mine, signature = await self._signer.sign(size, self._root)
        except LedgerAltered as error:
            self._fail(error)
        asked = await asyncio.gather(
            *(self._asked.ask(peer, size, mine.root) for peer in peers), return_exceptions=True
        )
        answers = {peer: one for peer, one in zip(peers, asked, strict=True) if isinstance(one, SignedCheckpoint)}
        self._judge(mine, {peer: one.root.hex() for peer, one in answers.items()}, len(peers) + 1)
        signatures = [signature]
        for peer, one in answers.items():
            if one.note is not None and (theirs := _signature(mine, one.note, one.key)) is not None:
                signatures.append(theirs)
                self._keys[peer] = one.key
        if len(signatures) < _majority(len(peers) + 1):
            errors = [f"{peer}: {one}" for peer, one in zip(peers, asked, strict=True) if isinstance(one, Exception)]
            signed = f"{len(signatures)} of {len(peers) + 1} replicas signed the first {size} entries"
            self._missed("; ".join([signed, *errors]))
            return False
        if not whole:
            note, within_s = written(mine.text(), signatures), BEFORE_PUBLICATION_S
            signatures += await self.cosigning.collect(mine, note, within_s=within_s, only_prompt=True)
        if mine.size > self.size:  # a later checkpoint of another leader may have arrived meanwhile
            self._take(written(mine.text(), signatures), mine)
            await self._hand_on()
        return True

    async def _hand_on(self) -> None:
        """Send the last checkpoint to the peers. A peer that does not accept it gets the next one."""
        peers, note, size = self._peers(), self.note, self.size
        handed = await asyncio.gather(*(self._asked.hand(peer, note) for peer in peers), return_exceptions=True)
        for peer, error in zip(peers, handed, strict=True):
            if isinstance(error, Exception):
                LOGGER.debug("%s did not accept the checkpoint of %d entries: %s", peer, size, error)

    async def sign(self, size: int, root: str) -> SignedCheckpoint:
        """Return the root of this replica's ledger at a size, with a signature if the root equals `root` (hexadecimal).

        Ends the process if the ledger lacks entries that were signed before. Exceptions from computing the root
        propagate.
        root propagate.

        Raises:
            SignRefused: This replica does not sign now.
        """
        own = await self._root(size)
        if own.hex() != root:
            LOGGER.error(
                "the leader's tree of the first %d entries has the root %s, but the tree of %s has the root %s; one of "
                "the ledgers was altered",
                size,
                root[:16],
                self._name,
                own.hex()[:16],
            )
            return SignedCheckpoint(self.key, own, None)
        try:
            found, signature = await self._signer.sign(size, self._root)
        except LedgerAltered as error:
            self._fail(error)
        return SignedCheckpoint(self.key, found.root, written(found.text(), [signature]))

    async def take(self, note: str) -> None:
        """Accept the checkpoint that the leader sent.

        Does not return if a majority has signed another root than this replica's. Exceptions of `root` also propagate.

        Raises:
            NoteNotTaken: The note is not a checkpoint of this cluster signed by a majority.
        """
        try:
            found = parse_checkpoint(parse_note(note.encode())[0])
            if found.origin != self._signer.origin:
                raise NoteNotTaken(
                    f"the checkpoint belongs to {found.origin}, and this replica to {self._signer.origin}"
                )
            if found.size <= self.size:
                if found == self.published:
                    self._add_cosignatures(note, found)
                return
            least = _majority(len(self._peers()) + 1)
            if self._signers(note) < least:
                await self.keys()
            count = self._signers(note)
        except NoteError as error:
            raise NoteNotTaken(str(error)) from error
        if count < least:
            raise NoteNotTaken(f"{count} known replicas signed the checkpoint, and a majority is {least}")
        if await self._root(found.size) != found.root:
            self._fail(
                LedgerAltered(
                    f"a majority signed a root of the first {found.size} entries that differs from that of "
                    f"{self._name}: its history was altered; {INQUIRY}"
                )
            )
        self._take(note, found)

    def _add_cosignatures(self, note: str, found: Checkpoint) -> None:
        """Add cosignatures of witnesses to the published checkpoint."""
        have, handed = self.cosigning.lines_of(self.note), self.cosigning.lines_of(note)
        added = [one.line() for key, one in handed.items() if key not in have]
        if added:
            self._take(self.note + "".join(added), found)

    def _is_witnessed(self) -> bool:
        return self.published is None or len(self.witnessed_by) >= self.cosigning.needed

    def _signers(self, note: str) -> int:
        known = {self._signer.key, *(self._keys[peer] for peer in self._peers() if peer in self._keys)}
        try:
            return len(verify_note(note.encode(), list(known))[1])
        except NoteError:
            return 0

    def _judge(self, mine: Checkpoint, theirs: Mapping[str, str], members: int) -> None:
        verdict = judge(mine.root.hex(), theirs, members)
        others = ", ".join(f"{peer} {root[:16]}" for peer, root in sorted(theirs.items()))
        if verdict is Verdict.ODD:
            self._fail(
                LedgerAltered(
                    f"the tree of {self._name} over the first {mine.size} entries has the root {mine.root.hex()[:16]}; "
                    f"the majority has another ({others}): its history was altered; {INQUIRY}"
                )
            )
        if {mine.root.hex()} != {mine.root.hex(), *theirs.values()}:
            LOGGER.error(
                "the trees of the first %d entries differ: %s %s, %s; one of the ledgers was altered",
                mine.size,
                self._name,
                mine.root.hex()[:16],
                others,
            )

    def _missed(self, sentence: str) -> None:
        self.failed += 1
        LOGGER.warning("no checkpoint is published: %s", sentence)

    def _take(self, note: str, found: Checkpoint) -> None:
        now_s = self._clock.monotonic_s()
        if found != self.published:
            self.published_s = now_s
        self.note, self.published, self.witnessed_by = note, found, self.cosigning.cosigned_by(note)
        if self._is_witnessed():
            self._unwitnessed_since_s = None
        elif self._unwitnessed_since_s is None:
            self._unwitnessed_since_s = now_s
        # The file is not synced, and a full disk is tolerated: the next checkpoint replaces a lost one.
        try:
            make_private_directory(self._path.parent)
            replace_private(self._path, note.encode(), durable=False)
        except OSError as error:
            LOGGER.warning("the checkpoint of %d entries could not be written to disk: %s", found.size, error)

    def _read(self) -> tuple[str, Checkpoint | None]:
        try:
            note = self._path.read_text(encoding="utf-8")
            found = parse_checkpoint(parse_note(note.encode())[0])
        except (OSError, ValueError):
            return "", None
        if found.origin != self._signer.origin:
            # Ignore a checkpoint of a previous incarnation.
            return "", None
        applied = self._applied_index()
        if found.size > applied:
            # No majority signs more than is committed, and this checkpoint would block all later ones.
            LOGGER.error(
                "%s covers %d entries, and this replica has %d: the checkpoint is ignored",
                self._path,
                found.size,
                applied,
            )
            return "", None
        return note, found


def _majority(members: int) -> int:
    return members // 2 + 1


def _signature(checkpoint: Checkpoint, note: str, key: VerifierKey) -> Signature | None:
    """Return the key's signature in a note, if the note has exactly this checkpoint; otherwise None."""
    try:
        text, _ = verify_note(note.encode(), [key])
        _, (signature,) = parse_note(note.encode())
    except ValueError:
        return None
    return signature if text == checkpoint.text() and key.name == checkpoint.origin else None
