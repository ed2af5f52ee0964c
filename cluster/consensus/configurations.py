"""Cluster configurations: the one in force at each entry (H13), and the successor for a change (H12; thesis 4.1).

A configuration is in force once it is appended. This module keeps the last committed configuration and its successors,
which a truncation may undo. After a restart they are read again, from the configuration at the applied index that the
caller provides.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

import msgspec

from forebay.cluster.consensus.interface import ChangeRefused
from forebay.wal import (
    LEARNERS_MAX,
    VOTERS_MAX,
    BrokenInvariant,
    Change,
    ChangeKind,
    Configuration,
    ConfigurationAt,
    Entry,
    Member,
    decode_configuration,
    identity_of,
    incarnation_of,
    is_configuration,
)


class Configurations:
    """Configurations in one replica's journal, oldest first; the last one is in force."""

    def __init__(self, base: ConfigurationAt) -> None:
        """Start with `base`, which nothing in the journal can undo."""
        self._placed = [base]

    @property
    def in_force(self) -> Configuration:
        """Newest configuration in the journal, committed or not; it determines majorities."""
        return self._placed[-1].configuration

    @property
    def index(self) -> int:
        """Index of the entry with the configuration in force; 0 if no entry has it."""
        return self._placed[-1].index

    def at(self, index: int) -> Configuration:
        """Return the configuration in force after entry `index`, which must not precede the newest committed one."""
        behind = (known.configuration for known in reversed(self._placed) if known.index <= index)
        return next(behind, self._placed[0].configuration)

    def committed(self, commit_index: int) -> Configuration:
        """Return the newest configuration known to be committed."""
        return next(known.configuration for known in reversed(self._placed) if self._is_committed(known, commit_index))

    def known(self) -> Iterable[Configuration]:
        """Return the newest committed configuration and its successors; truncation may bring any into force."""
        return [placed.configuration for placed in self._placed]

    def appended(self, entries: Iterable[Entry], *, read_back: bool = False) -> bool:
        """Record appended entries; return whether the configuration in force has changed.

        `read_back`: the entries are from before this start, so the configuration file no longer matters.

        Raises:
            CodecError: This release cannot read a configuration.
            BrokenInvariant: No leader may append a configuration.
        """
        before = len(self._placed)
        for entry in entries:
            if is_configuration(entry.data):
                self._placed.append(ConfigurationAt(entry.index, decode_configuration(entry.data)))
        for one, two in pairwise(self._placed[before - 1 :]):
            if one.configuration.version == 0:
                if not read_back:
                    _check_bootstrap(one.configuration, two.configuration)
            else:
                _check_step(one.configuration, two)
                _check_keys(one.configuration, two)
        return len(self._placed) != before

    def truncated_from(self, index: int) -> bool:
        """Record that entries from `index` on were cut; return whether the configuration in force has changed."""
        kept = [placed for placed in self._placed[1:] if placed.index < index]
        changed = len(kept) + 1 != len(self._placed)
        self._placed[1:] = kept
        return changed

    def installed(self, index: int, placed: ConfigurationAt | None, last_index: int) -> bool:
        """Record a snapshot at `index` with configuration `placed`; the journal then ends at `last_index`.

        Returns whether the configuration in force has changed.
        """
        before = self._placed[-1]
        if placed is None:  # this machine keeps no configurations, so the last one up to the snapshot stays valid
            placed = next((one for one in reversed(self._placed) if one.index <= index), self._placed[0])
        self._placed = [placed, *(one for one in self._placed if index < one.index <= last_index)]
        return self._placed[-1] != before

    def forget_before(self, commit_index: int) -> None:
        """Drop configurations replaced by a newer committed one."""
        committed = [at for at, known in enumerate(self._placed) if self._is_committed(known, commit_index)]
        del self._placed[: committed[-1]]

    def _is_committed(self, placed: ConfigurationAt, commit_index: int) -> bool:
        return placed is self._placed[0] or placed.index <= commit_index


def may_be_later(identity: str, committed: Configuration) -> bool:
    """Return whether a member unknown to `committed` may have been added by a later configuration."""
    return incarnation_of(identity) > committed.version


def _check_bootstrap(file: Configuration, founded: Configuration) -> None:
    """Reject a bootstrap whose members differ from the configuration file's: two clusters could result."""
    if file.voters and founded.version == 1 and file.voter_ids != founded.voter_ids:
        raise BrokenInvariant(
            f"the cluster was founded with the replicas {', '.join(founded.voter_ids)}, but this replica's "
            f"configuration file says {', '.join(file.voter_ids)}; make the files equal, or let this replica join"
        )


def _check_step(one: Configuration, two: ConfigurationAt) -> None:
    """Reject a configuration whose majorities might not overlap its predecessor's (thesis 4.1)."""
    new = two.configuration
    if new.change.action is ChangeKind.RECOVER and len(new.voters) == 1 and new.version == one.version + 1:
        return  # the previous incarnation has ended, so its majorities no longer matter
    if new.version != one.version + 1 or len(set(one.voter_ids) ^ set(new.voter_ids)) > 1:
        raise BrokenInvariant(
            f"entry {two.index} has configuration version {new.version} with the voters {', '.join(new.voter_ids)}, "
            f"but the previous version is {one.version} with {', '.join(one.voter_ids)}"
        )


def _check_keys(one: Configuration, two: ConfigurationAt) -> None:
    """Reject a second key for a member: its earlier signatures could no longer be verified."""
    keys = {member.id: member.key for member in one.members() if member.key}
    for member in two.configuration.members():
        if keys.get(member.id, member.key) != member.key:
            raise BrokenInvariant(f"entry {two.index} changes the key of {member.id}")


def recovery_configuration(current: Configuration, survivor: Member, *, actor: str, at: int) -> Configuration:
    """Return the first configuration of a new incarnation, with `survivor` as its only member."""
    change = Change(ChangeKind.RECOVER, survivor.id, actor, at)
    return Configuration(current.version + 1, (survivor,), (), change)


# ---- the next configuration: one member at a time ----


class MemberChange(msgspec.Struct, frozen=True, kw_only=True):
    """Requested membership change. `name` is a member's name or ID."""

    action: ChangeKind
    name: str
    peer: str = ""
    api: str = ""
    actor: str = "leader"
    id: bytes = b""
    key: bytes = b""
    """Public key of the member, for an update of a configuration that lacks the key."""


def next_configuration(current: Configuration, wanted: MemberChange, *, at: int) -> Configuration:
    """Return the configuration after `current`.

    Raises:
        ChangeRefused: The change is impossible; the message explains why.
    """
    return _RULES[wanted.action](current, wanted, at)


def _add(current: Configuration, wanted: MemberChange, at: int) -> Configuration:
    known = current.member(wanted.name)
    if known is not None:
        raise ChangeRefused(
            "member_exists",
            f"{known.name} is a member already",
            f"choose another name, or run `forebay cluster replace {known.name}`",
        )
    _refuse_taken(current.members(), wanted)
    if len(current.voters) + len(current.learners) >= VOTERS_MAX:
        raise ChangeRefused("too_many", f"the limit of {VOTERS_MAX} replicas is reached", "remove one first")
    version = current.version + 1
    added = Member(identity_of(wanted.name, version), wanted.peer, wanted.api)
    return _successor(current, wanted, at, current.voters, (*current.learners, added), added.id)


def _promote(current: Configuration, wanted: MemberChange, at: int) -> Configuration:
    member = _member(current, wanted.name)
    if current.votes(member.id):
        raise ChangeRefused("already_votes", f"{member.name} is already a voter", "no action is needed")
    learners = tuple(other for other in current.learners if other is not member)
    return _successor(current, wanted, at, (*current.voters, member), learners, member.id)


def _remove(current: Configuration, wanted: MemberChange, at: int) -> Configuration:
    member = _member(current, wanted.name)
    voters = tuple(other for other in current.voters if other is not member)
    if not voters:
        raise ChangeRefused("last_voter", f"{member.name} is the only voter", "add another replica first")
    learners = tuple(other for other in current.learners if other is not member)
    return _successor(current, wanted, at, voters, learners, member.id)


def _replace(current: Configuration, wanted: MemberChange, at: int) -> Configuration:
    """Replace a member in one entry: the old ID loses its vote, and the new ID starts as a learner."""
    member = _member(current, wanted.name)
    smaller = _remove(current, wanted, at)
    returning = Member(identity_of(member.name, smaller.version), wanted.peer or member.peer, wanted.api or member.api)
    return _successor(current, wanted, at, smaller.voters, (*smaller.learners, returning), returning.id)


def _update(current: Configuration, wanted: MemberChange, at: int) -> Configuration:
    """Change a member's addresses. ID, promises and vote stay. The member need not be reachable."""
    member = _member(current, wanted.name)
    _refuse_taken((other for other in current.members() if other is not member), wanted)
    key = member.key or wanted.key
    moved = Member(member.id, wanted.peer or member.peer, wanted.api or member.api, key)
    if moved == member:
        raise ChangeRefused("same_addresses", f"{member.name} has these addresses already", "no action is needed")
    voters = tuple(moved if one is member else one for one in current.voters)
    learners = tuple(moved if one is member else one for one in current.learners)
    return _successor(current, wanted, at, voters, learners, member.id)


def _refuse_taken(others: Iterable[Member], wanted: MemberChange) -> None:
    """Reject an address that another member uses, or that is given for both peer and API."""
    if wanted.peer and wanted.peer == wanted.api:
        raise ChangeRefused("address_taken", f"{wanted.peer} is given for both peer and api", "give each its own")
    for member in others:
        for address in (wanted.peer, wanted.api):
            if address and address in (member.peer, member.api):
                raise ChangeRefused(
                    "address_taken", f"{address} is the address of {member.name}", "give each replica its own"
                )


_RULES: Final = {
    ChangeKind.ADD: _add,
    ChangeKind.PROMOTE: _promote,
    ChangeKind.REMOVE: _remove,
    ChangeKind.REPLACE: _replace,
    ChangeKind.UPDATE: _update,
}


def _successor(
    current: Configuration,
    wanted: MemberChange,
    at: int,
    voters: tuple[Member, ...],
    learners: tuple[Member, ...],
    subject: str,
) -> Configuration:
    if len(learners) > LEARNERS_MAX:
        raise ChangeRefused(
            "too_many", f"{LEARNERS_MAX} new replicas are already catching up", "wait until one of them has caught up"
        )
    change = Change(wanted.action, subject, wanted.actor, at, wanted.id)
    return Configuration(current.version + 1, _sorted(voters), _sorted(learners), change)


def _sorted(members: tuple[Member, ...]) -> tuple[Member, ...]:
    return tuple(sorted(members, key=lambda member: member.id))


def _member(current: Configuration, name: str) -> Member:
    found = current.member(name)
    if found is None:
        known = ", ".join(member.name for member in current.members()) or "none"
        raise ChangeRefused("unknown_member", f"replica {name!r} does not exist", f"use one of: {known}")
    return found
