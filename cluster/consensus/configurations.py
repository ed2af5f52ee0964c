"""Configurations: which one is in force at which entry (H13), and which comes next for a change (H12; thesis 4.1).

A configuration is in force from when it is appended. What is kept: the last one that is known to be committed, and
those after it, which a truncation may undo. At a start they are read again: the caller gives what snapshot and ledger
have as of the applied index, the rest is in the journal.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

import msgspec

from cluster.consensus.interface import ChangeRefused
from wal import (
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
    """Configurations of one replica's journal, oldest first; the last one is in force."""

    def __init__(self, base: ConfigurationAt) -> None:
        """Begin with `base`, which nothing in the journal can undo."""
        self._placed = [base]

    @property
    def in_force(self) -> Configuration:
        """The newest in the journal, committed or not: whoever counts, counts by this one."""
        return self._placed[-1].configuration

    @property
    def index(self) -> int:
        """Index of the entry that brought the one in force; 0 if no entry did."""
        return self._placed[-1].index

    def at(self, index: int) -> Configuration:
        """The one that is in force behind the entry at `index`, at or after the newest one that is committed."""
        behind = (known.configuration for known in reversed(self._placed) if known.index <= index)
        return next(behind, self._placed[0].configuration)

    def committed(self, commit_index: int) -> Configuration:
        """The newest that is known to be committed."""
        return next(known.configuration for known in reversed(self._placed) if self._is_committed(known, commit_index))

    def known(self) -> Iterable[Configuration]:
        """From the newest committed one on: a truncation may bring any of these into force."""
        return [placed.configuration for placed in self._placed]

    def appended(self, entries: Iterable[Entry], *, read_back: bool = False) -> bool:
        """Note entries that were appended; return whether another configuration is in force now.

        `read_back`: they were accepted before this replica started, so what its file says does not matter any more.
        CodecError for one that this release cannot read, BrokenInvariant for what no leader may append.
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
        """Note that the entries from `index` on are gone; return whether another configuration is in force now."""
        kept = [placed for placed in self._placed[1:] if placed.index < index]
        changed = len(kept) + 1 != len(self._placed)
        self._placed[1:] = kept
        return changed

    def installed(self, index: int, placed: ConfigurationAt | None, last_index: int) -> bool:
        """Note a snapshot at `index` with the configuration `placed`, after which the journal has `last_index`.

        Return whether another configuration is in force now.
        """
        before = self._placed[-1]
        if placed is None:  # a machine that does not keep them: what was there up to the snapshot is all that is known
            placed = next((one for one in reversed(self._placed) if one.index <= index), self._placed[0])
        self._placed = [placed, *(one for one in self._placed if index < one.index <= last_index)]
        return self._placed[-1] != before

    def forget_before(self, commit_index: int) -> None:
        """Drop those that a newer committed one has replaced."""
        committed = [at for at, known in enumerate(self._placed) if self._is_committed(known, commit_index)]
        del self._placed[: committed[-1]]

    def _is_committed(self, placed: ConfigurationAt, commit_index: int) -> bool:
        return placed is self._placed[0] or placed.index <= commit_index


def may_be_later(identity: str, committed: Configuration) -> bool:
    """Whether a member that `committed` does not have may have been added since: then it must be listened to."""
    return incarnation_of(identity) > committed.version


def _check_bootstrap(file: Configuration, founded: Configuration) -> None:
    """Refuse a bootstrap by other members than the file names: two clusters could come of one."""
    if file.voters and founded.version == 1 and file.voter_ids != founded.voter_ids:
        raise BrokenInvariant(
            f"the cluster was founded with the replicas {', '.join(founded.voter_ids)}, but this replica's "
            f"configuration file says {', '.join(file.voter_ids)}; make the files equal, or let this replica join"
        )


def _check_step(one: Configuration, two: ConfigurationAt) -> None:
    """Refuse what would break the rule that majorities of neighbours meet (thesis 4.1), whoever appended it."""
    new = two.configuration
    if new.change.action is ChangeKind.RECOVER and len(new.voters) == 1 and new.version == one.version + 1:
        return  # the incarnation before is over, and with it its majorities
    if new.version != one.version + 1 or len(set(one.voter_ids) ^ set(new.voter_ids)) > 1:
        raise BrokenInvariant(
            f"entry {two.index} has version {new.version} of the configuration with the voters "
            f"{', '.join(new.voter_ids)}; before it is version {one.version} with {', '.join(one.voter_ids)}"
        )


def _check_keys(one: Configuration, two: ConfigurationAt) -> None:
    """Refuse another key for a member that has one: what it signed could not be verified any more."""
    keys = {member.id: member.key for member in one.members() if member.key}
    for member in two.configuration.members():
        if keys.get(member.id, member.key) != member.key:
            raise BrokenInvariant(f"entry {two.index} has another key for {member.id} than the configuration before it")


def recovered(current: Configuration, survivor: Member, *, actor: str, at: int) -> Configuration:
    """Return the configuration that a new incarnation begins with: one member, and nobody of the incarnation before."""
    change = Change(ChangeKind.RECOVER, survivor.id, actor, at)
    return Configuration(current.version + 1, (survivor,), (), change)


# ---- the next configuration: one member at a time ----


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Change of the members as it is asked for. `name` is a member's name, or its id."""

    action: ChangeKind
    name: str
    peer: str = ""
    api: str = ""
    actor: str = "leader"
    id: bytes = b""
    key: bytes = b""
    """For an update: the member's public key, where the configuration has none."""


def next_configuration(current: Configuration, wanted: Wanted, *, at: int) -> Configuration:
    """Return the configuration after `current`; ChangeRefused says why there is none."""
    return _RULES[wanted.action](current, wanted, at)


def _add(current: Configuration, wanted: Wanted, at: int) -> Configuration:
    known = current.member(wanted.name)
    if known is not None:
        raise ChangeRefused("member_exists", f"{known.name} is a member already", "choose another name, or replace it")
    _refuse_taken(current.members(), wanted)
    if len(current.voters) + len(current.learners) >= VOTERS_MAX:
        raise ChangeRefused("too_many", f"there are {VOTERS_MAX} replicas already", "remove one first")
    version = current.version + 1
    added = Member(identity_of(wanted.name, version), wanted.peer, wanted.api)
    return _successor(current, wanted, at, current.voters, (*current.learners, added), added.id)


def _promote(current: Configuration, wanted: Wanted, at: int) -> Configuration:
    member = _member(current, wanted.name)
    if current.votes(member.id):
        raise ChangeRefused("already_votes", f"{member.name} votes already", "nothing needs to be done")
    learners = tuple(other for other in current.learners if other is not member)
    return _successor(current, wanted, at, (*current.voters, member), learners, member.id)


def _remove(current: Configuration, wanted: Wanted, at: int) -> Configuration:
    member = _member(current, wanted.name)
    voters = tuple(other for other in current.voters if other is not member)
    if not voters:
        raise ChangeRefused("last_voter", f"{member.name} is the only one that votes", "add another replica first")
    learners = tuple(other for other in current.learners if other is not member)
    return _successor(current, wanted, at, voters, learners, member.id)


def _replace(current: Configuration, wanted: Wanted, at: int) -> Configuration:
    """One entry: whoever voted under the old id does no more, and whoever has the new one learns first."""
    member = _member(current, wanted.name)
    smaller = _remove(current, wanted, at)
    returning = Member(identity_of(member.name, smaller.version), wanted.peer or member.peer, wanted.api or member.api)
    return _successor(current, wanted, at, smaller.voters, (*smaller.learners, returning), returning.id)


def _update(current: Configuration, wanted: Wanted, at: int) -> Configuration:
    """Other addresses, the same id: what it promised stands, and it counts as before, whether it answers or not."""
    member = _member(current, wanted.name)
    _refuse_taken((other for other in current.members() if other is not member), wanted)
    key = member.key or wanted.key
    moved = Member(member.id, wanted.peer or member.peer, wanted.api or member.api, key)
    if moved == member:
        raise ChangeRefused("same_addresses", f"{member.name} has these addresses already", "nothing needs to be done")
    voters = tuple(moved if one is member else one for one in current.voters)
    learners = tuple(moved if one is member else one for one in current.learners)
    return _successor(current, wanted, at, voters, learners, member.id)


def _refuse_taken(others: Iterable[Member], wanted: Wanted) -> None:
    """Refuse an address that another member has, and one for both: two would be dialled there."""
    if wanted.peer and wanted.peer == wanted.api:
        raise ChangeRefused("address_taken", f"{wanted.peer} is given twice", "peer and api need an address each")
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
    wanted: Wanted,
    at: int,
    voters: tuple[Member, ...],
    learners: tuple[Member, ...],
    subject: str,
) -> Configuration:
    if len(learners) > LEARNERS_MAX:
        raise ChangeRefused("too_many", f"{LEARNERS_MAX} replicas are learning already", "wait for one to catch up")
    change = Change(wanted.action, subject, wanted.actor, at, wanted.id)
    return Configuration(current.version + 1, _sorted(voters), _sorted(learners), change)


def _sorted(members: tuple[Member, ...]) -> tuple[Member, ...]:
    return tuple(sorted(members, key=lambda member: member.id))


def _member(current: Configuration, name: str) -> Member:
    found = current.member(name)
    if found is None:
        known = ", ".join(member.name for member in current.members()) or "none"
        raise ChangeRefused("unknown_member", f"there is no replica {name!r}", f"members are {known}")
    return found
