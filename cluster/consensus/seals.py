"""Seals: each entry carries the signature of the leader that accepted it, and each leader proves its election.

An attacker who knows all formats may write to the disk of a stopped replica. An entry appended to the log there looks
like an uncommitted entry from a leader, and the replica could lead and commit it. Each entry is therefore signed over
its index, term, previous term and bytes, with the leader's key from the configuration. The first entry of a term also
carries the signed votes of a majority, so a key stolen from a disk cannot sign for a term in which the replica was not
elected.

Entries without a valid seal are never acknowledged. A replica that finds one in its own log does not start. A replica
that receives one from a leader stops following that leader (`leader_election.distrust`).

Entries from before this replica's membership are not checked: they are trusted like a snapshot. A member whose key is
not in the configuration yet is trusted without a signature.
"""

import struct
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Annotated, Final

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta

from forebay.cluster.consensus.frames import Name
from forebay.wal import (
    SEAL_MAX_BYTES,
    VOTERS_MAX,
    BrokenInvariant,
    ChangeKind,
    Configuration,
    Entry,
    Member,
    decode_configuration,
    is_configuration,
    name_of,
)

SIGNATURE_BYTES: Final = 64

_ENTRY_HEAD: Final = b"forebay-entry/1\n"
_VOTE_HEAD: Final = b"forebay-vote/1\n"
_PLACE: Final = struct.Struct(">QQQ")
_TERM: Final = struct.Struct(">Q")

TERMS_KEPT: Final = 64
"""Number of terms whose leader is remembered. Unapplied entries are of the newest few terms."""

Signature = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


class SealBroken(BrokenInvariant):
    """Entry that the leader of its term did not accept in this form; the message gives the evidence."""


class KeyReplaced(BrokenInvariant):
    """This replica's key differs from its key in the configuration, so its directory was replaced."""

    def __init__(self, me: str, version: int) -> None:
        super().__init__(
            f"the key in signing/ of {name_of(me)} differs from its key in version {version} of the configuration: "
            "its directory was replaced, or emptied. Restore signing/ from a copy; or keep the directory for an "
            f"examination, run `forebay cluster replace {name_of(me)}` on another replica, move the directory away, "
            "and start it"
        )


class Seal(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Seal of an entry: the leader and its signature; in the first entry of a term also the votes of others."""

    leader: Name
    signature: Signature
    votes: Annotated[tuple[tuple[Name, Signature], ...], Meta(max_length=VOTERS_MAX)] = ()


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Seal)


def entry_text(cluster_id: str, entry: Entry, term_before: int) -> bytes:
    """Return the text that a leader signs for an entry. It has a digest of the data, because Ed25519 reads it twice."""
    place = _PLACE.pack(entry.index, term_before, entry.term)
    return b"".join([_ENTRY_HEAD, cluster_id.encode(), b"\n", place, sha256(entry.data).digest()])


def vote_text(cluster_id: str, term: int, candidate: str) -> bytes:
    """Return the text that a voter signs for a candidate."""
    return b"".join([_VOTE_HEAD, cluster_id.encode(), b"\n", _TERM.pack(term), candidate.encode()])


def is_signed(key: bytes, signature: bytes, text: bytes) -> bool:
    """Verify the signature of a text by a public key of 32 bytes."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


class SealChecks:
    """Verifies seals in the order of the entries, and remembers the leaders of recent terms."""

    def __init__(self, cluster_id: str, me: str) -> None:
        """Verify entries in the log of replica `me`."""
        self.cluster_id: Final = cluster_id
        self.me: Final = me
        self._leaders: dict[int, str] = {}

    def note(self, entry: Entry) -> None:
        """Record the sealer of a trusted entry as the leader of its term."""
        if entry.term not in self._leaders:
            seal = _read(entry)
            if seal is not None:
                self._remember(entry.term, seal.leader)

    def check(self, entry: Entry, term_before: int, configuration: Configuration) -> None:
        """Check an entry whose predecessor has `term_before`, with `configuration` in force.

        Raises:
            SealBroken: The leader of the entry's term did not accept the entry.
        """
        if not configuration.holds(self.me) or not any(one.key for one in configuration.voters):
            self.note(entry)
            return
        if is_configuration(entry.data) and decode_configuration(entry.data).change.action is ChangeKind.RECOVER:
            raise _broken(entry, "a leader never begins another incarnation of the cluster")
        seal = _read(entry)
        if seal is None:
            raise _broken(entry, "it has no signature")
        self._check_leader(entry, seal, term_before, configuration)
        leader = _voter(configuration, seal.leader)
        if leader is None:
            raise _broken(entry, f"its signer, {seal.leader}, is not a voter")
        if leader.key and not is_signed(leader.key, seal.signature, entry_text(self.cluster_id, entry, term_before)):
            raise _broken(entry, f"the signature of {seal.leader} is not valid")
        self._remember(entry.term, seal.leader)

    def is_vote(self, configuration: Configuration, voter: str, signature: bytes, term: int, candidate: str) -> bool:
        """Return whether a vote has a valid signature; True for a voter without known key."""
        known = _voter(configuration, voter)
        if known is None:
            return False
        return not known.key or is_signed(known.key, signature, vote_text(self.cluster_id, term, candidate))

    def _check_leader(self, entry: Entry, seal: Seal, term_before: int, configuration: Configuration) -> None:
        known = self._leaders.get(entry.term)
        if known is not None and known != seal.leader:
            raise _broken(entry, f"its signer is {seal.leader}, but {known} led term {entry.term}")
        if known is not None or entry.term == term_before:
            return
        voted = {seal.leader} | {
            voter
            for voter, signature in seal.votes
            if self.is_vote(configuration, voter, signature, entry.term, seal.leader)
        }
        if len(voted) < configuration.majority:
            raise _broken(
                entry,
                f"{seal.leader} signed it as the leader of term {entry.term}, but has the votes of only {len(voted)} "
                f"of {len(configuration.voters)} voters",
            )

    def _remember(self, term: int, leader: str) -> None:
        self._leaders[term] = leader
        while len(self._leaders) > TERMS_KEPT:
            del self._leaders[min(self._leaders)]


class Seals(SealChecks):
    """Seal checks, and signatures of one replica."""

    def __init__(self, cluster_id: str, me: str, private: Ed25519PrivateKey) -> None:
        """Sign with the replica's private key, which also signs checkpoints."""
        super().__init__(cluster_id, me)
        self._private: Final = private
        self.key: Final = private.public_key().public_bytes_raw()
        """Public key."""

    def vote(self, term: int, candidate: str) -> bytes:
        """Return the signature of a vote."""
        return self._private.sign(vote_text(self.cluster_id, term, candidate))

    def sealed(self, entry: Entry, term_before: int, votes: Mapping[str, bytes]) -> Entry:
        """Return the entry with this replica's seal as leader."""
        signature = self._private.sign(entry_text(self.cluster_id, entry, term_before))
        self._remember(entry.term, self.me)
        return entry._replace(seal=_encoder.encode(Seal(self.me, signature, tuple(sorted(votes.items())))))

    def check_own_key(self, configuration: Configuration) -> None:
        """Check that the configuration has this replica's key, or no key for it.

        Raises:
            KeyReplaced: The configuration has another key.
        """
        mine = configuration.by_id(self.me)
        if mine is not None and mine.key and mine.key != self.key:
            raise KeyReplaced(self.me, configuration.version)


def check_tail(
    seals: SealChecks, entries: Iterable[Entry], term_before: int, configuration: Configuration, *, known_index: int
) -> None:
    """Check entries of a replica's own log; the predecessor of the first has `term_before`.

    `known_index` is the last entry known to be committed. Up to there, a recovery may have begun an incarnation.

    Raises:
        SealBroken: The leader of an entry's term did not accept it.
    """
    for entry in entries:
        begun = decode_configuration(entry.data) if is_configuration(entry.data) else None
        is_recovery = begun is not None and begun.change.action is ChangeKind.RECOVER
        if is_recovery and entry.index <= known_index:
            seals.note(entry)
        else:
            seals.check(entry, term_before, configuration)
        configuration, term_before = begun or configuration, entry.term


def remedy_for(member: str) -> str:
    """Return the remedy for a replica whose log has an entry that no leader accepted."""
    name = name_of(member)
    return (
        f"the log of {name} was altered while it was stopped. Keep its directory for an examination, run `forebay "
        f"cluster replace {name}` on another replica, move the directory away, and start it"
    )


def _read(entry: Entry) -> Seal | None:
    if not entry.seal or len(entry.seal) > SEAL_MAX_BYTES:
        return None
    try:
        return _decoder.decode(entry.seal)
    except (msgspec.MsgspecError, UnicodeError):
        return None


def _voter(configuration: Configuration, identity: str) -> Member | None:
    return configuration.by_id(identity) if configuration.votes(identity) else None


def _broken(entry: Entry, why: str) -> SealBroken:
    return SealBroken(f"entry {entry.index} of term {entry.term} was not accepted by the leader of that term: {why}")
