"""Facts about what is set aside for whom: accounts, QOS, licences, reservations, the rules of scheduling."""

from __future__ import annotations

import msgspec

from replica.model.accounts import Account, License, Qos, SchedulingRules
from replica.model.reservations import Reservation


class AccountSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=60):
    """An account was made or changed; `account` is all of it as it is now."""

    account: Account


class AccountDeleted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=61):
    """An account without accounts below it is no more."""

    account: str


class QosSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=62):
    """A QOS was made or changed."""

    qos: Qos


class QosDeleted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=63):
    """A QOS is no more."""

    qos: str


class LicenseSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=64):
    """There are so many of a licence from here on."""

    license: License


class LicenseDeleted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=65):
    """A licence is no more."""

    license: str


class ReservationSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=66):
    """A reservation was made or changed."""

    reservation: Reservation


class ReservationDeleted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=67):
    """An operator took a reservation away; its jobs wait with that reason."""

    reservation: str


class ReservationStarted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=68):
    """The start of a reservation has come."""

    reservation: str


class ReservationEnded(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=69):
    """The end of a reservation has come; it is no more."""

    reservation: str


class SchedulingRulesSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=70):
    """The site's rules of scheduling were changed."""

    rules: SchedulingRules
