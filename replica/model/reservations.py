"""Reservations of burst-buffer space in some pools, for a period, for some users and accounts.

While a reservation is active, its jobs may use its space and all free space; other jobs may use free space except the
part that its jobs do not hold yet. Before it begins, other jobs get only space that they would release by then. Source:
SEMANTICS.md, Scheduling (`BurstBuffer=[plugin:][pool:]#[units]`).
"""

from __future__ import annotations

from collections.abc import Callable

import immutables
import msgspec

from forebay.replica.model.accounts import check_name
from forebay.replica.values import ACCOUNT_USERS_MAX, POOLS_MAX, SIZE_BYTES_MAX, Instant, Rejection, RejectionCode


class ReservedSpace(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Reserved space of one pool, in bytes or units of the pool."""

    pool: str
    size_bytes: int


class Reservation(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A reservation, from `start_at` up to but not including `end_at`. Times are Instants."""

    name: str
    start_at: Instant
    end_at: Instant
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    """Users and accounts that may use it."""
    space: tuple[ReservedSpace, ...] = ()
    active: bool = False
    """True if it has begun; set by an event, so that reasons are a function of the State."""

    def admits(self, user: str, account: str) -> bool:
        """Return whether a job of the user in the account may use the reservation."""
        return user in self.users or (bool(account) and account in self.accounts)

    def size_in(self, pool: str) -> int:
        """Return the reserved space of a pool, bytes."""
        return sum(space.size_bytes for space in self.space if space.pool == pool)


Reservations = immutables.Map[str, Reservation]

HeldSpace = Callable[[str, str], int]
"""(reservation, pool) -> space held by the reservation's jobs, bytes."""


def unused_space(reservation: Reservation, pool: str, held: HeldSpace) -> int:
    """Return the reserved space that the reservation's jobs do not hold yet, bytes."""
    return max(0, reservation.size_in(pool) - held(reservation.name, pool))


def check_reservation(reservation: Reservation, pools: immutables.Map[str, object], at: Instant) -> Rejection | None:
    """Return a rejection if the reservation cannot be created at `at`, or None."""
    rejection = check_name(reservation.name, "reservation.name")
    if rejection is not None:
        return rejection
    if not 0 < reservation.start_at < reservation.end_at:
        return _invalid("end", "the reservation's end is not after its start", "choose an end after its start")
    if reservation.end_at <= at:
        return _invalid("end", "the reservation's end is in the past", "choose a later end")
    if not reservation.users and not reservation.accounts:
        return _invalid("users", "the reservation names no users and no accounts", "name users or accounts")
    for place, names in (("users", reservation.users), ("accounts", reservation.accounts)):
        if len(names) > ACCOUNT_USERS_MAX:
            return _invalid(place, f"{len(names)} names are listed", f"list at most {ACCOUNT_USERS_MAX}")
        for name in names:
            rejection = check_name(name, f"reservation.{place}")
            if rejection is not None:
                return rejection
    if not reservation.space or len(reservation.space) > POOLS_MAX:
        return _invalid("burst_buffer", "it reserves no space", "name a pool and a size, for example fast:10TiB")
    listed = [space.pool for space in reservation.space]
    if len(set(listed)) != len(listed):
        return _invalid("burst_buffer", "a pool is listed twice", "list each once")
    for space in reservation.space:
        if space.pool not in pools:
            known = ", ".join(sorted(pools)) or "none"
            return _invalid("burst_buffer", f"pool {space.pool!r} does not exist", f"use one of: {known}")
        if not 0 < space.size_bytes <= SIZE_BYTES_MAX:
            return _invalid("burst_buffer", f"{space.size_bytes} is not a valid size", "reserve at least one byte")
    return None


def _invalid(place: str, sentence: str, remedy: str) -> Rejection:
    return Rejection(RejectionCode.INVALID_FIELD, sentence, remedy, f"reservation.{place}")
