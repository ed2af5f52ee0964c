"""Folding what belongs to accounts, QOS, licences, reservations, the rules of scheduling, and measured transfers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import immutables
from msgspec.structs import replace

from replica.messages import events as e
from replica.model import (
    Buffer,
    Stage,
    rates_of,
    usage,
    with_members_sorted,
)
from replica.state import StateBuilder
from replica.values import LedgerViolation

V = TypeVar("V")


def _without(records: immutables.Map[str, V], name: str, what: str) -> immutables.Map[str, V]:
    if name not in records:
        raise LedgerViolation(f"an event is about {what} {name!r}, which does not exist")
    return records.delete(name)


def _account_set(draft: StateBuilder, event: e.AccountSet) -> None:
    draft.accounts = draft.accounts.set(event.account.name, with_members_sorted(event.account))


def _account_deleted(draft: StateBuilder, event: e.AccountDeleted) -> None:
    draft.accounts = _without(draft.accounts, event.account, "account")
    draft.consumed = usage.without(draft.consumed, "a", event.account)


def _qos_set(draft: StateBuilder, event: e.QosSet) -> None:
    draft.qos = draft.qos.set(event.qos.name, event.qos)


def _qos_deleted(draft: StateBuilder, event: e.QosDeleted) -> None:
    draft.qos = _without(draft.qos, event.qos, "QOS")
    draft.consumed = usage.without(draft.consumed, "q", event.qos)


def _license_set(draft: StateBuilder, event: e.LicenseSet) -> None:
    draft.licenses = draft.licenses.set(event.license.name, event.license)


def _license_deleted(draft: StateBuilder, event: e.LicenseDeleted) -> None:
    draft.licenses = _without(draft.licenses, event.license, "licence")


def _reservation_set(draft: StateBuilder, event: e.ReservationSet) -> None:
    draft.reservations = draft.reservations.set(event.reservation.name, event.reservation)


def _reservation_started(draft: StateBuilder, event: e.ReservationStarted) -> None:
    reservation = draft.reservations.get(event.reservation)
    if reservation is None:
        raise LedgerViolation(f"the reservation {event.reservation!r} began, which does not exist")
    draft.reservations = draft.reservations.set(reservation.name, replace(reservation, active=True))


def _reservation_gone(draft: StateBuilder, event: e.ReservationEnded | e.ReservationDeleted) -> None:
    draft.reservations = _without(draft.reservations, event.reservation, "reservation")


def _scheduling_rules_set(draft: StateBuilder, event: e.SchedulingRulesSet) -> None:
    draft.scheduling_rules = event.rules


SCHEDULING_FOLDS: Mapping[type, Callable[[Any, Any], None]] = {
    e.AccountSet: _account_set,
    e.AccountDeleted: _account_deleted,
    e.QosSet: _qos_set,
    e.QosDeleted: _qos_deleted,
    e.LicenseSet: _license_set,
    e.LicenseDeleted: _license_deleted,
    e.ReservationSet: _reservation_set,
    e.ReservationDeleted: _reservation_gone,
    e.ReservationStarted: _reservation_started,
    e.ReservationEnded: _reservation_gone,
    e.SchedulingRulesSet: _scheduling_rules_set,
}


def measure(draft: StateBuilder, buffer: Buffer, stage: Stage, moved_bytes: int) -> None:
    """Add an operation that has just succeeded to what is measured; `buffer` is as it was while it was under way."""
    rates = rates_of(draft.rates.get(buffer.pool), buffer.pool)
    took_us = draft.at - buffer.changed_at
    if stage is Stage.STAGE_IN:
        rates = replace(rates, stage_in=rates.stage_in.with_one(took_us, moved_bytes, buffer.granted_bytes))
    elif stage is Stage.STAGE_OUT:
        rates = replace(rates, stage_out=rates.stage_out.with_one(took_us, moved_bytes, buffer.granted_bytes))
    else:
        rates = replace(rates, teardown=rates.teardown.with_one(took_us, moved_bytes, buffer.granted_bytes))
    draft.rates = draft.rates.set(buffer.pool, rates)


def _partition_set(draft: StateBuilder, event: e.PartitionSet) -> None:
    draft.partitions = draft.partitions.set(event.partition.name, event.partition)


def _partition_deleted(draft: StateBuilder, event: e.PartitionDeleted) -> None:
    if event.partition not in draft.partitions:
        raise LedgerViolation(f"an event is about partition {event.partition!r}, which does not exist")
    draft.partitions = draft.partitions.delete(event.partition)


def _usage_reset(draft: StateBuilder, event: e.UsageReset) -> None:
    draft.consumed = usage.without(draft.consumed, event.whose, event.name)
