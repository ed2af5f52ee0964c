"""Quotas: the gates of accounts, QOS, licences and reservations.

`class_gate` depends on the job and the configured records only, so its verdict changes only with them. A `QuotaCheck`
also counts current usage and the grants of one scheduling cycle, to which it belongs. The cycle over the index and the
reference implementation of the tests call the same functions, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from forebay.replica.model import (
    ACCOUNT_REASONS,
    PROVIDERS,
    QOS_REASONS,
    Buffer,
    Job,
    Limit,
    LimitKind,
    PoolUnit,
    Qos,
    Reservation,
    SchedulingClass,
    UsageKey,
    ancestors,
    consumption_key,
    format_amount,
    holding_usage,
    individual_limits,
    is_group_limit,
    minutes_of,
    pool_unit,
    running_usage,
    scheduling_class_of,
    unused_space,
)
from forebay.replica.state import Facts
from forebay.replica.values import Instant, Reason, Verdict


class Scope(NamedTuple):
    """Owner of a limit: a QOS (q), an account with its subaccounts (a), or a user in an account (u)."""

    kind: str
    name: str
    user: str = ""

    @property
    def label(self) -> str:
        """Name of the scope in messages."""
        if self.kind == "q":
            return f"QOS {self.name}"
        return f"user {self.user} in account {self.name}" if self.kind == "u" else f"account {self.name}"

    def reason(self, kind: LimitKind) -> str:
        """Return the reason of a job that a limit of this kind blocks."""
        return QOS_REASONS[kind] if self.kind == "q" else ACCOUNT_REASONS[kind]


_TIMES_MINUTES = frozenset({LimitKind.GRP_BB_MINUTES, LimitKind.GRP_BB_RUN_MINUTES, LimitKind.MAX_BB_MINUTES_PER_JOB})
"""Kinds of limits whose values are amounts of space times minutes."""


class ExceededLimit(NamedTuple):
    """A limit that would be exceeded."""

    scope: Scope
    limit: Limit
    used: int
    asked: int
    unit: PoolUnit = PoolUnit.BYTES
    """Unit of a limit of space."""

    @property
    def verdict(self) -> Verdict:
        """Verdict on the job that the limit blocks."""
        word = "least" if self.limit.kind is LimitKind.MIN_BB else "limit"
        what = (
            "has reached a limit"
            if self.used
            else "never permits the job: change the job, or ask an operator to change the limit"
        )
        amounts = (("in_use", self.used), ("asked", self.asked), (word, self.limit.value))
        figures = tuple((name, self._amount(value)) for name, value in amounts)
        return Verdict(self.scope.reason(self.limit.kind), f"{self.scope.label} {what}", figures)

    def _amount(self, value: int) -> str:
        kind = self.limit.kind
        if not kind.counts_space:
            return str(value)
        return format_amount(value, self.unit) + (" minutes" if kind in _TIMES_MINUTES else "")


def class_gate(state: Facts, job: Job, buffer: Buffer | None) -> Verdict | None:
    """Return the verdict of the account and QOS records on a job, or None if they do not block it.

    Limits of space do not apply to a job that already holds its space.
    """
    scheduling_class = scheduling_class_of(job.request)
    if scheduling_class is None:
        return None
    user, account, qos = scheduling_class.user, scheduling_class.account, scheduling_class.qos
    if account:
        found = state.accounts.get(account)
        if found is None or found.member(user) is None:
            what = f"account {account} does not exist" if found is None else f"user {user} is not in account {account}"
            return Verdict(Reason.INVALID_ACCOUNT, what, (("account", account), ("user", user)))
    if qos:
        quality = state.qos.get(qos)
        if quality is None or not quality.admits(user, account):
            what = f"QOS {qos} does not exist" if quality is None else f"user {user} may not use QOS {qos}"
            return Verdict(Reason.INVALID_QOS, what, (("qos", qos), ("user", user)))
    if buffer is not None and buffer.held_bytes:
        return None
    pool, size = ("", 0) if buffer is None else (buffer.pool, buffer.granted_bytes)
    over = limit_exceeded_alone(state, scheduling_class, pool, size, job.request.time_limit_s, job.request.cpus)
    return None if over is None else over.verdict


def limit_exceeded_alone(
    state: Facts, scheduling_class: SchedulingClass, pool: str, size: int, time_limit_s: int, cpus: int
) -> ExceededLimit | None:
    """Return the first limit that a job exceeds on its own, whatever other jobs use, or None."""
    for scope, limit in _limits_of(state, scheduling_class):
        kind = limit.kind
        if kind.counts_space and kind is not LimitKind.MIN_BB and (not size or not limit.applies_to(pool)):
            continue
        asked = size if limit.applies_to(pool) else 0
        if kind is LimitKind.MIN_BB:
            if asked < limit.value:
                return ExceededLimit(scope, limit, 0, asked, pool_unit(state.pools, limit.tres))
            continue
        if kind in _TIMES_MINUTES:
            asked = size * minutes_of(time_limit_s)
        elif kind is LimitKind.MAX_BB_PER_NODE:
            asked = -(-size // max(1, scheduling_class.nodes))
        elif not kind.counts_space:
            asked = {LimitKind.GRP_CPUS: cpus, LimitKind.GRP_NODES: scheduling_class.nodes}.get(kind, 0)
        if asked > limit.value:
            return ExceededLimit(scope, limit, 0, asked, pool_unit(state.pools, limit.tres))
    return None


def _limits_of(state: Facts, scheduling_class: SchedulingClass) -> Iterator[tuple[Scope, Limit]]:
    """Yield the limits that apply to a scheduling class, with their scopes: those of the QOS first, as in Slurm."""
    qos = state.qos.get(scheduling_class.qos) if scheduling_class.qos else None
    if qos is not None:
        scope = Scope("q", qos.name)
        for limit in qos.limits:
            yield scope, limit
    if not scheduling_class.account:
        return
    scope = Scope("a", scheduling_class.account)
    for limit in individual_limits(state.accounts, scheduling_class.account, scheduling_class.user):
        yield scope, limit
    for number, account in enumerate(ancestors(state.accounts, scheduling_class.account)):
        member = account.member(scheduling_class.user) if number == 0 else None
        for limit in member.limits if member is not None else ():
            if is_group_limit(limit):
                yield Scope("u", account.name, scheduling_class.user), limit
        for limit in account.limits:
            if is_group_limit(limit):
                yield Scope("a", account.name), limit


class QuotaCheck:
    """Limits, licences and reservations in one scheduling cycle over `state` at `at`, including the cycle's grants."""

    def __init__(self, state: Facts, at: Instant) -> None:
        self._state = state
        self._at = at
        self._given: dict[UsageKey, int] = {}
        self._of_trees: dict[tuple[str, str, str], int] = {}
        """(resource, account, pool) -> usage of the account and its subaccounts."""
        self._children: dict[str, list[str]] | None = None
        self._checked: dict[tuple[SchedulingClass, int], Verdict | None] = {}
        self._limits: dict[SchedulingClass, tuple[tuple[Scope, Limit], ...]] = {}
        """Cached results of `_limits_of`, which iterates over accounts and their members."""
        self._set_aside: dict[tuple[str, str], int] = {}
        self._used_up: dict[tuple[Scope, str], int] = {}

    # Usage

    def used(self, what: str, whose: str, name: str, user: str = "", pool: str = "") -> int:
        """Return the usage counted under a key, including the grants of this cycle."""
        key = (what, whose, name, user, pool)
        return self._state.use.get(key, 0) + self._given.get(key, 0)

    def _tree_usage(self, what: str, account: str, pool: str) -> int:
        key = (what, account, pool)
        known = self._of_trees.get(key)
        if known is None:
            known = sum(self.used(what, "a", name, "", pool) for name in self._subaccounts(account))
            self._of_trees[key] = known
        return known

    def _subaccounts(self, account: str) -> Iterator[str]:
        if self._children is None:
            self._children = {}
            for name, record in self._state.accounts.items():
                self._children.setdefault(record.parent, []).append(name)
        waiting = [account]
        while waiting:
            name = waiting.pop()
            yield name
            waiting += self._children.get(name, ())

    def _give(self, uses: Iterable[tuple[UsageKey, int]]) -> None:
        for key, amount in uses:
            self._given[key] = self._given.get(key, 0) + amount
        self._of_trees.clear()
        self._checked.clear()
        self._set_aside.clear()

    def _limits_for(self, scheduling_class: SchedulingClass) -> tuple[tuple[Scope, Limit], ...]:
        known = self._limits.get(scheduling_class)
        if known is None:
            known = self._limits[scheduling_class] = tuple(_limits_of(self._state, scheduling_class))
        return known

    def give_run(self, scheduling_class: SchedulingClass | None, cpus: int) -> None:
        """Note that a job will run."""
        if scheduling_class is not None:
            self._give(running_usage(scheduling_class, cpus))

    def give_space(
        self, scheduling_class: SchedulingClass | None, pool: str, size_bytes: int, time_limit_s: int
    ) -> None:
        """Note that a job will hold space."""
        if scheduling_class is not None:
            self._give(holding_usage(scheduling_class, pool, size_bytes, time_limit_s))

    # Gates

    def run_gate(self, scheduling_class: SchedulingClass | None, cpus: int) -> Verdict | None:
        """Return the verdict of a limit on running jobs that blocks jobs of this class with these CPUs, or None."""
        if scheduling_class is None or not (scheduling_class.account or scheduling_class.qos):
            return None
        key = (scheduling_class, cpus)
        if key not in self._checked:
            self._checked[key] = next(
                (
                    over.verdict
                    for over in self._run_limits(scheduling_class, cpus)
                    if over.used + over.asked > over.limit.value
                ),
                None,
            )
        return self._checked[key]

    def _run_limits(self, scheduling_class: SchedulingClass, cpus: int) -> Iterator[ExceededLimit]:
        for scope, limit in self._limits_for(scheduling_class):
            if limit.kind is LimitKind.MAX_JOBS_PER_USER:
                yield ExceededLimit(scope, limit, self.used("jobs", scope.kind, scope.name, scheduling_class.user), 1)
            elif limit.kind is LimitKind.GRP_CPUS:
                yield ExceededLimit(scope, limit, self._group_usage("cpus", scope, ""), cpus)
            elif limit.kind is LimitKind.GRP_NODES:
                yield ExceededLimit(scope, limit, self._group_usage("nodes", scope, ""), scheduling_class.nodes)

    def _group_usage(self, what: str, scope: Scope, pool: str) -> int:
        """Return the total usage of all jobs in the scope of a limit."""
        if scope.kind == "a":
            return self._tree_usage(what, scope.name, pool)
        return self.used(what, "q" if scope.kind == "q" else "a", scope.name, scope.user, pool)

    def _group_consumption(self, scope: Scope, pool: str) -> int:
        """Return the total past consumption of all jobs in the scope of a limit."""
        known = self._used_up.get((scope, pool))
        if known is None:
            whose = "q" if scope.kind == "q" else "a"
            names = self._subaccounts(scope.name) if scope.kind == "a" else (scope.name,)
            keys = (consumption_key(whose, name, scope.user, pool) for name in names)
            known = self._used_up[scope, pool] = sum(self._state.consumed.get(key, 0) for key in keys)
        return known

    def space_gate(
        self, scheduling_class: SchedulingClass | None, pool: str, size_bytes: int, time_limit_s: int
    ) -> Verdict | None:
        """Return the verdict of a limit on held space that blocks a request of `size_bytes`, or None."""
        if scheduling_class is None or not size_bytes or not (scheduling_class.account or scheduling_class.qos):
            return None
        for scope, limit in self._limits_for(scheduling_class):
            if not limit.kind.counts_space or not limit.applies_to(pool):
                continue
            name = "" if limit.tres in PROVIDERS else pool
            asked, qos = size_bytes, scheduling_class.qos
            if limit.kind is LimitKind.GRP_BB:
                used = self._group_usage("bb", scope, name)
            elif limit.kind is LimitKind.GRP_BB_RUN_MINUTES:
                used, asked = self._group_usage("minutes", scope, name), size_bytes * minutes_of(time_limit_s)
            elif limit.kind is LimitKind.GRP_BB_MINUTES:
                # Count the full time limits of current holders, so that no job has to be ended when the limit is
                # reached.
                used = self._group_consumption(scope, name) + self._group_usage("minutes", scope, name)
                asked = size_bytes * minutes_of(time_limit_s)
            elif limit.kind is LimitKind.MAX_BB_PER_USER:
                used = self.used("bb", "q", qos, scheduling_class.user, name)
            elif limit.kind is LimitKind.MAX_BB_PER_ACCOUNT:
                used = self.used("bb", "qa", qos, scheduling_class.account, name)
            else:
                continue
            if used + asked > limit.value:
                return ExceededLimit(scope, limit, used, asked, pool_unit(self._state.pools, limit.tres)).verdict
        return None

    def license_gate(self, scheduling_class: SchedulingClass | None) -> Verdict | None:
        """Return the verdict of a licence that blocks jobs of this class, or None."""
        if scheduling_class is None:
            return None
        for name, count in scheduling_class.licenses:
            license = self._state.licenses.get(name)
            total = 0 if license is None else license.total
            used = self.used("licenses", "l", name)
            if used + count > total:
                figures = (("license", name), ("total", str(total)), ("in_use", str(used)), ("asked", str(count)))
                return Verdict(Reason.LICENSES, f"licence {name} does not have enough free", figures)
        return None

    # Reservations

    def _held_bytes(self, reservation: str, pool: str) -> int:
        return self.used("bb", "r", reservation, "", pool)

    def set_aside_bytes(self, pool: str, own: str) -> int:
        """Return the free bytes of a pool that are set aside for active reservations other than `own`."""
        known = self._set_aside.get((pool, own))
        if known is None:
            known = self._set_aside[pool, own] = sum(
                unused_space(reservation, pool, self._held_bytes)
                for reservation in self._state.reservations.values()
                if reservation.active and reservation.name != own
            )
        return known

    def own_bytes(self, pool: str, own: str) -> int:
        """Return the unused bytes of the active reservation `own` in a pool."""
        reservation = self._state.reservations.get(own) if own else None
        return 0 if reservation is None or not reservation.active else unused_space(reservation, pool, self._held_bytes)

    def reserved_releases(self, pool: str, own: str) -> list[tuple[int, int]]:
        """Return (end, bytes) of the space of a pool that is set aside for other reservations, in ascending order."""
        return sorted(
            (reservation.end_at, unused_space(reservation, pool, self._held_bytes))
            for reservation in self._state.reservations.values()
            if reservation.active and reservation.name != own and reservation.size_in(pool)
        )

    def upcoming_reservation_gate(
        self, pool: str, own: str, size_bytes: int, until: int, free_at: Callable[[Instant], int]
    ) -> Verdict | None:
        """Return the verdict of a reservation that needs the space of a job ending at `until`, or None.

        `free_at` returns the free space of the pool at an instant if all holders release their space in time.
        """
        if not size_bytes or not self._state.reservations:
            return None
        for coming in sorted(self._upcoming(pool, own), key=lambda one: (one.start_at, one.name)):
            if coming.start_at >= until:
                return None
            free, wanted = self._space_at_start(pool, own, coming, free_at)
            if size_bytes > free - wanted:
                figures = (
                    ("reservation", coming.name),
                    ("begins_at_us", str(coming.start_at)),
                    ("asked", str(size_bytes)),
                    ("free_then", str(free)),
                    ("set_aside_then", str(wanted)),
                )
                sentence = f"reservation {coming.name} starts before the job would release its space"
                return Verdict(Reason.BURST_BUFFER_RESOURCES, sentence, figures)
        return None

    def upcoming_space(self, pool: str, most: int, free_at: Callable[[Instant], int]) -> int:
        """Return the bytes of a pool, at most `most`, that upcoming reservations leave for a holder without an end.

        The result may be negative.
        """
        then = (self._space_at_start(pool, "", coming, free_at) for coming in self._upcoming(pool, ""))
        return min((free - wanted for free, wanted in then), default=most)

    def _space_at_start(
        self, pool: str, own: str, coming: Reservation, free_at: Callable[[Instant], int]
    ) -> tuple[int, int]:
        """Return the free bytes of a pool at the start of a reservation, and the bytes set aside then."""
        at = Instant(max(coming.start_at, self._at))
        wanted = sum(
            unused_space(other, pool, self._held_bytes)
            for other in self._state.reservations.values()
            if other.name != own and other.start_at <= at < other.end_at
        )
        return free_at(at), wanted

    def _upcoming(self, pool: str, own: str) -> Iterator[Reservation]:
        for reservation in self._state.reservations.values():
            if not reservation.active and reservation.name != own and reservation.size_in(pool):
                yield reservation


def submit_limit_exceeded(state: Facts, qos: Qos, user: str, jobs: int) -> ExceededLimit | None:
    """Return the limit on submitted jobs that `jobs` more jobs of the user would exceed, or None."""
    for limit in qos.limits:
        if limit.kind is LimitKind.MAX_SUBMIT_JOBS_PER_USER:
            used = state.use.get(("submitted", "q", qos.name, user, ""), 0)
            if used + jobs > limit.value:
                return ExceededLimit(Scope("q", qos.name), limit, used, jobs)
    return None
