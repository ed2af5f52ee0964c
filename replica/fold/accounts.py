"""Fold events of accounts, QOS, licences, reservations, scheduling settings and transfer measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import immutables
from msgspec.structs import replace

from forebay.replica.messages import events as e
from forebay.replica.model import (
    Buffer,
    Stage,
    rates_of,
    sort_members,
    usage,
)
from forebay.replica.state import StateBuilder
from forebay.replica.values import LedgerViolation

V = TypeVar("V")


def _without(records: immutables.Map[str, V], name: str, what: str) -> immutables.Map[str, V]:
    if name not in records:
        raise LedgerViolation(f"an event is about {what} {name!r}, which does not exist")
    return records.delete(name)


def _fold_account_set(builder: StateBuilder, event: e.AccountSet) -> None:
    builder.accounts = builder.accounts.set(event.account.name, sort_members(event.account))


def _fold_account_deleted(builder: StateBuilder, event: e.AccountDeleted) -> None:
    builder.accounts = _without(builder.accounts, event.account, "account")
    builder.consumed = usage.remove_consumption(builder.consumed, "a", event.account)


def _fold_qos_set(builder: StateBuilder, event: e.QosSet) -> None:
    builder.qos = builder.qos.set(event.qos.name, event.qos)


def _fold_qos_deleted(builder: StateBuilder, event: e.QosDeleted) -> None:
    builder.qos = _without(builder.qos, event.qos, "QOS")
    builder.consumed = usage.remove_consumption(builder.consumed, "q", event.qos)


def _fold_license_set(builder: StateBuilder, event: e.LicenseSet) -> None:
    builder.licenses = builder.licenses.set(event.license.name, event.license)


def _fold_license_deleted(builder: StateBuilder, event: e.LicenseDeleted) -> None:
    builder.licenses = _without(builder.licenses, event.license, "licence")


def _fold_reservation_set(builder: StateBuilder, event: e.ReservationSet) -> None:
    builder.reservations = builder.reservations.set(event.reservation.name, event.reservation)


def _fold_reservation_started(builder: StateBuilder, event: e.ReservationStarted) -> None:
    reservation = builder.reservations.get(event.reservation)
    if reservation is None:
        raise LedgerViolation(f"the reservation {event.reservation!r} began, which does not exist")
    builder.reservations = builder.reservations.set(reservation.name, replace(reservation, active=True))


def _fold_reservation_removed(builder: StateBuilder, event: e.ReservationEnded | e.ReservationDeleted) -> None:
    builder.reservations = _without(builder.reservations, event.reservation, "reservation")


def _fold_scheduling_rules_set(builder: StateBuilder, event: e.SchedulingRulesSet) -> None:
    builder.scheduling_rules = event.rules


SCHEDULING_FOLDS: Mapping[type, Callable[[Any, Any], None]] = {
    e.AccountSet: _fold_account_set,
    e.AccountDeleted: _fold_account_deleted,
    e.QosSet: _fold_qos_set,
    e.QosDeleted: _fold_qos_deleted,
    e.LicenseSet: _fold_license_set,
    e.LicenseDeleted: _fold_license_deleted,
    e.ReservationSet: _fold_reservation_set,
    e.ReservationDeleted: _fold_reservation_removed,
    e.ReservationStarted: _fold_reservation_started,
    e.ReservationEnded: _fold_reservation_removed,
    e.SchedulingRulesSet: _fold_scheduling_rules_set,
}


def measure_operation(builder: StateBuilder, buffer: Buffer, stage: Stage, moved_bytes: int) -> None:
    """Add a completed operation to the measured rates; `buffer` is its record during the operation."""
    rates = rates_of(builder.rates.get(buffer.pool), buffer.pool)
    took_us = builder.at - buffer.changed_at
    if stage is Stage.STAGE_IN:
        rates = replace(rates, stage_in=rates.stage_in.with_operation(took_us, moved_bytes, buffer.granted_bytes))
    elif stage is Stage.STAGE_OUT:
        rates = replace(rates, stage_out=rates.stage_out.with_operation(took_us, moved_bytes, buffer.granted_bytes))
    else:
        rates = replace(rates, teardown=rates.teardown.with_operation(took_us, moved_bytes, buffer.granted_bytes))
    builder.rates = builder.rates.set(buffer.pool, rates)


def _fold_partition_set(builder: StateBuilder, event: e.PartitionSet) -> None:
    builder.partitions = builder.partitions.set(event.partition.name, event.partition)


def _fold_partition_deleted(builder: StateBuilder, event: e.PartitionDeleted) -> None:
    if event.partition not in builder.partitions:
        raise LedgerViolation(f"an event is about partition {event.partition!r}, which does not exist")
    builder.partitions = builder.partitions.delete(event.partition)


def _fold_usage_reset(builder: StateBuilder, event: e.UsageReset) -> None:
    builder.consumed = usage.remove_consumption(builder.consumed, event.whose, event.name)
