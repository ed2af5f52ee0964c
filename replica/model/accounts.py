"""Accounts, QOS, licences, limits, scheduling rules, and certificate revocations.

A limit has a kind, a resource and a value. Kinds and reasons are Slurm's, byte for byte: accounts have those of Slurm's
associations, QOS their own. Sources: SPUR.md; sacctmgr(1).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from operator import attrgetter
from types import MappingProxyType
from typing import Final

import immutables
import msgspec

from forebay.replica.model.provider import PROVIDERS
from forebay.replica.values import (
    ACCOUNT_DEPTH_MAX,
    ACCOUNT_USERS_MAX,
    LICENSES_PER_JOB_MAX,
    LIMITS_PER_RECORD_MAX,
    NEVER,
    NICE_MAX,
    PRIORITY_MAX,
    SIZE_BYTES_MAX,
    Instant,
    Rejection,
    RejectionCode,
    name_fault,
)


class LimitKind(IntEnum):
    """Kinds of limits. The numbers are wire numbers (law 12)."""

    GRP_BB = 1
    """Space held by all jobs together."""
    GRP_BB_MINUTES = 2
    """Accumulated space times holding time (`replica.model.usage`)."""
    GRP_BB_RUN_MINUTES = 3
    """Space held by all jobs together, times their time limits."""
    MAX_BB_PER_JOB = 4
    MAX_BB_PER_NODE = 5
    MAX_BB_PER_USER = 6
    MIN_BB = 7
    """Minimum request of a job."""
    MAX_BB_PER_ACCOUNT = 8
    MAX_BB_MINUTES_PER_JOB = 9
    MAX_JOBS_PER_USER = 10
    MAX_SUBMIT_JOBS_PER_USER = 11
    GRP_NODES = 12
    GRP_CPUS = 13

    @property
    def word(self) -> str:
        """Return the limit's name in configuration, for example `MaxBBPerJob`."""
        return _WORDS[self]

    @property
    def counts_space(self) -> bool:
        """Return whether the limit counts space (or space times minutes) and can apply to a single pool."""
        return self not in _COUNTS


_WORDS = {
    LimitKind.GRP_BB: "GrpBB",
    LimitKind.GRP_BB_MINUTES: "GrpBBMinutes",
    LimitKind.GRP_BB_RUN_MINUTES: "GrpBBRunMinutes",
    LimitKind.MAX_BB_PER_JOB: "MaxBBPerJob",
    LimitKind.MAX_BB_PER_NODE: "MaxBBPerNode",
    LimitKind.MAX_BB_PER_USER: "MaxBBPerUser",
    LimitKind.MIN_BB: "MinBB",
    LimitKind.MAX_BB_PER_ACCOUNT: "MaxBBPerAccount",
    LimitKind.MAX_BB_MINUTES_PER_JOB: "MaxBBMinutesPerJob",
    LimitKind.MAX_JOBS_PER_USER: "MaxJobsPerUser",
    LimitKind.MAX_SUBMIT_JOBS_PER_USER: "MaxSubmitJobsPerUser",
    LimitKind.GRP_NODES: "GrpNodes",
    LimitKind.GRP_CPUS: "GrpCPUs",
}
_COUNTS = frozenset(
    {
        LimitKind.MAX_JOBS_PER_USER,
        LimitKind.MAX_SUBMIT_JOBS_PER_USER,
        LimitKind.GRP_NODES,
        LimitKind.GRP_CPUS,
    }
)

QOS_REASONS: Mapping[LimitKind, str] = MappingProxyType(
    {
        LimitKind.GRP_BB: "QOSGrpBB",
        LimitKind.GRP_BB_MINUTES: "QOSGrpBBMinutes",
        LimitKind.GRP_BB_RUN_MINUTES: "QOSGrpBBRunMinutes",
        LimitKind.MAX_BB_PER_JOB: "QOSMaxBBPerJob",
        LimitKind.MAX_BB_PER_NODE: "QOSMaxBBPerNode",
        LimitKind.MAX_BB_PER_USER: "QOSMaxBBPerUser",
        LimitKind.MIN_BB: "QOSMinBB",
        LimitKind.MAX_BB_PER_ACCOUNT: "MaxBBPerAccount",
        LimitKind.MAX_JOBS_PER_USER: "QOSMaxJobsPerUserLimit",
        LimitKind.MAX_SUBMIT_JOBS_PER_USER: "QOSMaxSubmitJobPerUserLimit",
        LimitKind.GRP_NODES: "QOSGrpNodeLimit",
        LimitKind.GRP_CPUS: "QOSGrpCpuLimit",
    }
)
"""Limits that a QOS may set, each with the reason shown for a job that exceeds it."""

ACCOUNT_REASONS: Mapping[LimitKind, str] = MappingProxyType(
    {
        LimitKind.GRP_BB: "AssocGrpBB",
        LimitKind.GRP_BB_MINUTES: "AssocGrpBBMinutes",
        LimitKind.GRP_BB_RUN_MINUTES: "AssocGrpBBRunMinutes",
        LimitKind.MAX_BB_PER_JOB: "AssocMaxBBPerJob",
        LimitKind.MAX_BB_PER_NODE: "AssocMaxBBPerNode",
        LimitKind.MAX_BB_MINUTES_PER_JOB: "AssocMaxBBMinutesPerJob",
        LimitKind.MAX_JOBS_PER_USER: "AssocMaxJobsLimit",
        LimitKind.GRP_NODES: "AssocGrpNodeLimit",
    }
)
"""Limits that an account, or one user in it, may set (Slurm: an association), with the reasons shown."""

TRES_PREFIX = "bb/"
"""Prefix of the resource name in a limit on space, as in Slurm: `bb/NAME`."""


class Limit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A limit on a resource.

    `tres` is the NAME of `bb/NAME`: a pool, or a provider's name for all pools together; empty if the limit does not
    count space. `value` is in bytes or units of the pool, times minutes for kinds that count minutes.
    """

    kind: LimitKind
    tres: str
    value: int

    def applies_to(self, pool: str) -> bool:
        """Return whether space of the pool counts towards the limit."""
        return self.tres == pool or self.tres in PROVIDERS


class AccountUser(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A user in an account. The limits apply to this user in this account, and override those of the account."""

    user: str
    limits: tuple[Limit, ...] = ()


class Account(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An account. Usage of its users counts towards its limits and those of all its ancestors."""

    name: str
    parent: str = ""
    members: tuple[AccountUser, ...] = ()
    """Sorted by name (`sort_members`) in every State."""
    limits: tuple[Limit, ...] = ()

    def member(self, user: str) -> AccountUser | None:
        """Return a member of the account, or None."""
        # Called several times for each candidate of a scheduling cycle; an account may have thousands of members.
        place = bisect_left(self.members, user, key=attrgetter("user"))
        found = self.members[place] if place < len(self.members) else None
        return found if found is not None and found.user == user else None


def sort_members(account: Account) -> Account:
    """Return the account with its members in the order that `Account.member` searches."""
    return msgspec.structs.replace(account, members=tuple(sorted(account.members, key=attrgetter("user"))))


class Qos(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A quality of service."""

    name: str
    priority: int = 0
    """Added to the priority of its jobs."""
    limits: tuple[Limit, ...] = ()
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    """Users and accounts that may use the QOS; all may if both are empty."""
    deny_on_limit: bool = False
    """True if a job that exceeds a per-job limit is rejected at submit instead of waiting (Flags=DenyOnLimit)."""

    def admits(self, user: str, account: str) -> bool:
        """Return whether a job of the user in the account may use the QOS."""
        return not (self.users or self.accounts) or user in self.users or account in self.accounts


class License(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A licence that jobs hold while they run. `total` is the number of licences."""

    name: str
    total: int


class SchedulingRules(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The site's settings for priority, accounts and revocation."""

    size_points_per_gib: int = 0
    """Priority points for each whole GiB of a request; negative values prefer small requests."""
    default_account: str = ""
    """Account of jobs that name none and whose user is a member of it."""
    default_qos: str = ""
    """QOS of jobs that name none and may use it."""
    accounts_required: bool = False
    """True if a job must have an account (Slurm: AccountingStorageEnforce=associations)."""
    revocations_max: int = 1
    """Number of times that the staged buffer of one job may be revoked for other jobs; 0: never."""
    revoke_after_s: int = 300
    """Time a staged job must have waited before its buffer may be revoked, seconds."""


DEFAULT_SCHEDULING_RULES = SchedulingRules()
"""Scheduling rules of a cluster without configuration."""

Accounts = immutables.Map[str, Account]


def ancestors(accounts: Accounts, name: str) -> Iterator[Account]:
    """Yield the account and its ancestors, nearest first, up to the first that does not exist."""
    for _ in range(ACCOUNT_DEPTH_MAX):
        account = accounts.get(name)
        if account is None:
            return
        yield account
        name = account.parent


def individual_limits(accounts: Accounts, name: str, user: str) -> tuple[Limit, ...]:
    """Return the limits that apply to each job or each user of an account.

    For each kind and resource the nearest limit applies: the user's own, then the account's, then those of its
    ancestors.
    """
    found: dict[tuple[LimitKind, str], Limit] = {}
    for number, account in enumerate(ancestors(accounts, name)):
        member = account.member(user) if number == 0 else None
        for limit in (*(member.limits if member is not None else ()), *account.limits):
            if limit.kind not in _GROUP:
                found.setdefault((limit.kind, limit.tres), limit)
    return tuple(found.values())


_GROUP = frozenset(
    {
        LimitKind.GRP_BB,
        LimitKind.GRP_BB_MINUTES,
        LimitKind.GRP_BB_RUN_MINUTES,
        LimitKind.GRP_NODES,
        LimitKind.GRP_CPUS,
    }
)


def is_group_limit(limit: Limit) -> bool:
    """Return whether the limit applies to all jobs together."""
    return limit.kind in _GROUP


# Validation of records -----------------------------------------------------------------------------------------------


def _invalid(place: str, sentence: str, remedy: str) -> Rejection:
    return Rejection(RejectionCode.INVALID_FIELD, sentence, remedy, place)


def check_name(name: str, place: str) -> Rejection | None:
    """Return a rejection if the name is invalid, or None."""
    fault = name_fault(name)
    return None if fault is None else _invalid(place, f"the name {fault}", "choose another name")


def check_limits(limits: tuple[Limit, ...], known: Mapping[LimitKind, str], place: str) -> Rejection | None:
    """Return a rejection if the limits are invalid, or None. `known` has the kinds that are supported here."""
    if len(limits) > LIMITS_PER_RECORD_MAX:
        return _invalid(place, f"{len(limits)} limits are given", f"set at most {LIMITS_PER_RECORD_MAX}")
    seen: set[tuple[LimitKind, str]] = set()
    for limit in limits:
        if limit.kind not in known:
            words = ", ".join(kind.word for kind in known)
            return _invalid(place, f"the limit {limit.kind.word} does not exist here", f"use one of {words}")
        if limit.kind.counts_space != bool(limit.tres):
            remedy = f"write {limit.kind.word} with bb/NAME" if limit.kind.counts_space else "leave out bb/NAME"
            return _invalid(place, f"the limit {limit.kind.word} has the name {limit.tres!r}", remedy)
        rejection = check_name(limit.tres, place) if limit.tres else None
        if rejection is not None:
            return rejection
        if not 0 <= limit.value <= SIZE_BYTES_MAX:
            return _invalid(place, f"{limit.kind.word} is {limit.value}", f"use a number from 0 to {SIZE_BYTES_MAX}")
        if (limit.kind, limit.tres) in seen:
            return _invalid(place, f"the limit {limit.kind.word} is set twice", "set it once")
        seen.add((limit.kind, limit.tres))
    return None


def _check_names(names: Iterable[str], place: str) -> Rejection | None:
    listed = tuple(names)
    if len(listed) > ACCOUNT_USERS_MAX:
        return _invalid(place, f"{len(listed)} names are listed", f"list at most {ACCOUNT_USERS_MAX}")
    if len(set(listed)) != len(listed):
        return _invalid(place, "a name is listed twice", "list each once")
    return next((rejection for name in listed if (rejection := check_name(name, place)) is not None), None)


def check_account(accounts: Accounts, account: Account) -> Rejection | None:
    """Return a rejection if the account is invalid or its parent does not fit, or None."""
    rejection = (
        check_name(account.name, "account.name")
        or _check_names((member.user for member in account.members), "account.users")
        or check_limits(account.limits, ACCOUNT_REASONS, "account.limits")
    )
    for member in account.members:
        rejection = rejection or check_limits(member.limits, ACCOUNT_REASONS, f"account.users.{member.user}")
    if rejection is None and sum(len(member.limits) for member in account.members) > ACCOUNT_USERS_MAX:
        rejection = _invalid(
            "account.users", "its users have too many limits of their own", f"set at most {ACCOUNT_USERS_MAX} in all"
        )
    if rejection is not None or not account.parent:
        return rejection
    if account.parent not in accounts:
        return _invalid("account.parent", f"account {account.parent!r} does not exist", "create the parent first")
    above = [one.name for one in ancestors(accounts, account.parent)]
    if account.name in above:
        return _invalid("account.parent", f"{account.parent!r} is below {account.name!r}", "choose another parent")
    deepest = _depth_below(accounts, account.name) if account.name in accounts else 1
    if len(above) + deepest > ACCOUNT_DEPTH_MAX:
        return _invalid(
            "account.parent", "the accounts are nested too deeply", f"use at most {ACCOUNT_DEPTH_MAX} levels"
        )
    return None


def _depth_below(accounts: Accounts, name: str) -> int:
    depth = 1
    for other in accounts:
        line = [one.name for one in ancestors(accounts, other)]
        if name in line:
            depth = max(depth, line.index(name) + 1)
    return depth


def check_qos(qos: Qos) -> Rejection | None:
    """Return a rejection if the QOS is invalid, or None."""
    rejection = (
        check_name(qos.name, "qos.name")
        or check_limits(qos.limits, QOS_REASONS, "qos.limits")
        or _check_names(qos.users, "qos.users")
        or _check_names(qos.accounts, "qos.accounts")
    )
    if rejection is None and not 0 <= qos.priority <= PRIORITY_MAX:
        rejection = _invalid("qos.priority", f"priority is {qos.priority}", f"use a number from 0 to {PRIORITY_MAX}")
    return rejection


def check_license(license: License) -> Rejection | None:
    """Return a rejection if the licence is invalid, or None."""
    rejection = check_name(license.name, "license.name")
    if rejection is None and not 0 <= license.total <= SIZE_BYTES_MAX:
        rejection = _invalid("license.total", f"total is {license.total}", f"use a number from 0 to {SIZE_BYTES_MAX}")
    return rejection


_RULE_BOUNDS: dict[str, tuple[int, int]] = {
    "size_points_per_gib": (-1_000_000, 1_000_000),
    "revocations_max": (0, 1_000),
    "revoke_after_s": (0, 365 * 86_400),
}


def check_rules(rules: SchedulingRules) -> Rejection | None:
    """Return a rejection if the rules are out of range, or None."""
    for field, (least, most) in _RULE_BOUNDS.items():
        value = getattr(rules, field)
        if not least <= value <= most:
            return _invalid(f"rules.{field}", f"{field} is {value}", f"use a number from {least} to {most}")
    for field in ("default_account", "default_qos"):
        rejection = check_name(getattr(rules, field), f"rules.{field}") if getattr(rules, field) else None
        if rejection is not None:
            return rejection
    return None


def check_licenses_and_nice(licenses: tuple[tuple[str, int], ...], nice: int) -> Rejection | None:
    """Return a rejection if a job's licences or nice value are invalid, or None.

    The function does not check whether the licences exist.
    """
    if abs(nice) > NICE_MAX:
        return _invalid("nice", f"nice is {nice}", f"use a number from {-NICE_MAX} to {NICE_MAX}")
    if len(licenses) > LICENSES_PER_JOB_MAX:
        return _invalid(
            "licenses", f"the job requests {len(licenses)} licences", f"request at most {LICENSES_PER_JOB_MAX}"
        )
    if len({name for name, _ in licenses}) != len(licenses):
        return _invalid("licenses", "a licence is listed twice", "list each once")
    for name, count in licenses:
        rejection = check_name(name, "licenses")
        if rejection is None and not 0 < count <= SIZE_BYTES_MAX:
            rejection = _invalid("licenses", f"{count} of licence {name} are requested", "request at least one")
        if rejection is not None:
            return rejection
    return None


# ---- revoked certificates

SERIAL: Final = "serial"
HOLDERS: Final = ("replica", "agent", "operator", "user", "scheduler", "gateway")

_DIGITS: Final = re.compile(r"[1-9a-f][0-9a-f]{0,39}", re.ASCII)
"""A serial number has at most 20 octets (RFC 5280, 4.1.2.2)."""


class Revocation(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A revoked certificate, or all certificates of one holder: `serial:1f2e…` or `user:alan`."""

    certificate: str
    reason: str = ""
    by: str = ""
    """The operator who revoked it."""
    at: Instant = NEVER
    until: Instant = NEVER
    """Expiry of the certificate, after which the record is deleted; NEVER: until an operator lifts the revocation."""


def certificate_fault(certificate: str) -> str | None:
    """Return the fault of a certificate reference, to follow `the certificate `, or None if it is valid."""
    kind, colon, rest = certificate.partition(":")
    if not colon or kind not in (SERIAL, *HOLDERS):
        return f"{certificate!r:.80} is neither serial:NUMBER nor {', '.join(f'{holder}:NAME' for holder in HOLDERS)}"
    if kind == SERIAL:
        return None if _DIGITS.fullmatch(rest) else f"{certificate!r:.80} has no serial number in hexadecimal digits"
    fault = name_fault(rest)
    return None if fault is None else f"{certificate!r:.80} has a name that {fault}"
