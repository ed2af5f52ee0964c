"""Changes of a record that name the version they were made from: of two that were made from one, one is rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from forebay.replica.decide import record_etag
from forebay.replica.messages import commands as c
from forebay.replica.model.accounts import Account, AccountUser, License, Qos
from forebay.replica.model.partitions import Partition
from forebay.replica.model.reservations import Reservation, ReservedSpace
from forebay.replica.values import ABSENT, Instant, Rejection, RejectionCode, seconds
from tests.replica.world import OPERATOR, World


class Kind(NamedTuple):
    """Kind of record: its map in the state, its commands, and three versions of one record."""

    records: str
    change: Callable[..., Any]
    delete: Callable[[str], Any]
    versions: tuple[Any, Any, Any]


def reservation(hours: int) -> Reservation:
    start = Instant(World().at + seconds(60))
    return Reservation(
        "one", start, Instant(start + seconds(3600 * hours)), ("alan",), (), (ReservedSpace("fast", 10),)
    )


KINDS = {
    "account": Kind("accounts", c.SetAccount, c.DeleteAccount, tuple(
        Account("one", "", tuple(AccountUser(user) for user in users)) for users in ("a", "ab", "abc")
    )),
    "qos": Kind("qos", c.SetQos, c.DeleteQos, tuple(Qos("one", priority=number) for number in (1, 2, 3))),
    "license": Kind("licenses", c.SetLicense, c.DeleteLicense, tuple(License("one", number) for number in (1, 2, 3))),
    "partition": Kind("partitions", c.SetPartition, c.DeletePartition, tuple(
        Partition("one", every_node=True, max_time_s=number) for number in (60, 120, 180)
    )),
    "reservation": Kind("reservations", c.SetReservation, c.DeleteReservation, tuple(map(reservation, (1, 2, 3)))),
}  # fmt: skip


def rejection(world: World, command: c.Command) -> str:
    """Return the sentence of the rejection, empty if the command is carried out."""
    result = world.settle(command)
    if not isinstance(result, Rejection):
        return ""
    assert (result.code, result.place) == (RejectionCode.WRONG_STATE, "if_match"), result
    return result.sentence


@pytest.mark.parametrize("name", KINDS)
def test_a_change_of_a_version_that_is_no_longer_there_is_rejected(name: str) -> None:
    kind, world = KINDS[name], World({"fast": 1_000})
    first, second, third = kind.versions
    assert "was deleted" in rejection(world, kind.change(second, record_etag(first)))
    assert rejection(world, kind.change(first, ABSENT)) == ""
    assert "was created" in rejection(world, kind.change(third, ABSENT))
    seen = record_etag(getattr(world.state, kind.records)["one"])
    assert rejection(world, kind.change(second, seen)) == ""
    assert "was changed" in rejection(world, kind.change(third, seen))
    assert getattr(world.state, kind.records)["one"] == second
    assert rejection(world, kind.change(third)) == "", "who names no version means any"
    assert rejection(world, kind.delete("one")) == ""
    assert "was deleted" in rejection(world, kind.change(first, seen))
    assert len({record_etag(one) for one in (None, *kind.versions)}) == 4


def test_a_reservation_that_became_active_is_still_the_version_that_its_operator_saw() -> None:
    world = World({"fast": 1_000})
    world.settle(c.SetReservation(reservation(1)))
    seen = record_etag(world.state.reservations["one"])
    world.advance(120)
    assert world.state.reservations["one"].active and record_etag(world.state.reservations["one"]) == seen


@pytest.mark.parametrize("name", KINDS)
def test_a_command_that_is_rebuilt_from_its_event_has_the_digest_of_the_one_that_was_sent(name: str) -> None:
    sent = KINDS[name].change(KINDS[name].versions[0], ABSENT)
    rebuilt = replace(sent, if_match=None)
    assert len({c.command_digest(c.Request(b"id", OPERATOR, command)) for command in (sent, rebuilt)}) == 1
