"""What the next configuration is, for a change that somebody wants: one member at a time (thesis 4.1; H12). Pure."""

from typing import Final

import msgspec

from cluster.consensus.interface import ChangeRefused
from wal import (
    LEARNERS_MAX,
    VOTERS_MAX,
    Action,
    Change,
    Configuration,
    Member,
    identity_of,
)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A change as it is asked for. `name` is a member's name, or its id."""

    action: Action
    name: str
    peer: str = ""
    api: str = ""
    actor: str = "leader"
    id: bytes = b""


def following(current: Configuration, wanted: Wanted, *, at: int) -> Configuration:
    """Return the configuration after `current`; ChangeRefused says why there is none."""
    return _RULES[wanted.action](current, wanted, at)


def _add(current: Configuration, wanted: Wanted, at: int) -> Configuration:
    known = current.member(wanted.name)
    if known is not None:
        raise ChangeRefused("member_exists", f"{known.name} is a member already", "choose another name, or replace it")
    for member in current.members():
        for address in (wanted.peer, wanted.api):
            if address and address in (member.peer, member.api):
                raise ChangeRefused(
                    "address_taken", f"{address} is the address of {member.name}", "give the new replica its own"
                )
    if len(current.voters) + len(current.learners) >= VOTERS_MAX:
        raise ChangeRefused("too_many", f"there are {VOTERS_MAX} replicas already", "remove one first")
    version = current.version + 1
    added = Member(identity_of(wanted.name, version), wanted.peer, wanted.api)
    return _next(current, wanted, at, current.voters, (*current.learners, added), added.id)


def _promote(current: Configuration, wanted: Wanted, at: int) -> Configuration:
    member = _member(current, wanted.name)
    if current.votes(member.id):
        raise ChangeRefused("already_votes", f"{member.name} votes already", "nothing needs to be done")
    learners = tuple(other for other in current.learners if other is not member)
    return _next(current, wanted, at, (*current.voters, member), learners, member.id)


def _remove(current: Configuration, wanted: Wanted, at: int) -> Configuration:
    member = _member(current, wanted.name)
    voters = tuple(other for other in current.voters if other is not member)
    if not voters:
        raise ChangeRefused("last_voter", f"{member.name} is the only one that votes", "add another replica first")
    learners = tuple(other for other in current.learners if other is not member)
    return _next(current, wanted, at, voters, learners, member.id)


def _replace(current: Configuration, wanted: Wanted, at: int) -> Configuration:
    """One entry: whoever voted under the old id does no more, and whoever has the new one learns first."""
    member = _member(current, wanted.name)
    smaller = _remove(current, wanted, at)
    returning = Member(identity_of(member.name, smaller.version), wanted.peer or member.peer, wanted.api or member.api)
    return _next(current, wanted, at, smaller.voters, (*smaller.learners, returning), returning.id)


_RULES: Final = {Action.ADD: _add, Action.PROMOTE: _promote, Action.REMOVE: _remove, Action.REPLACE: _replace}


def _next(
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
