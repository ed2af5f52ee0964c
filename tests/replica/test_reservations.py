"""Reservations of burst-buffer space: set aside for a time, and given to nobody who would be in the way."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model.reservations import Reservation, ReservedSpace
from forebay.replica.values.errors import Rejection, RejectionCode
from forebay.replica.values.units import Instant, seconds
from tests.replica.reference.reference_scheduler import next_due
from tests.replica.test_accounting import account, changed, given, tried
from tests.replica.world import World


def reservation(world: World, starts_s: int, lasts_s: int, size: int = 60, **fields: Any) -> Reservation:
    start_at = Instant(world.at + seconds(starts_s))
    chosen: dict[str, Any] = {"users": ("eve",), "space": (ReservedSpace("fast", size),)} | fields
    return Reservation("r", start_at, Instant(start_at + seconds(lasts_s)), **chosen)


def reserve(world: World, starts_s: int, lasts_s: int, size: int = 60, **fields: Any) -> None:
    changed(world, c.SetReservation(reservation(world, starts_s, lasts_s, size, **fields)))


def test_others_may_not_take_what_is_set_aside_and_its_jobs_may_use_it_and_what_is_free_for_all() -> None:
    world = World({"fast": 100})
    reserve(world, 0, 10_000)
    assert world.state.reservations["r"].active
    large = given(world, "capacity=50")
    assert world.reason(large) == "BurstBufferResources"
    assert world.reason(given(world, "capacity=40", priority=9)) == "BurstBufferStageIn"
    own = given(world, "capacity=60", "eve", reservation="r")
    assert world.reason(own) == "BurstBufferStageIn"
    world.finish(own)
    both = given(world, "capacity=60", "eve", reservation="r")
    assert world.reason(both) == "BurstBufferStageIn"
    assert world.reason(large) == "BurstBufferResources"
    world.advance(10_001)
    assert "r" not in world.state.reservations


def test_what_its_jobs_hold_is_not_set_aside_twice() -> None:
    world = World({"fast": 100})
    reserve(world, 0, 10_000)
    given(world, "capacity=60", "eve", reservation="r")
    assert world.reason(given(world, "capacity=40")) == "BurstBufferStageIn"
    assert world.free() == 0


def test_nobody_gets_space_that_he_would_not_give_back_before_a_reservation_begins() -> None:
    world = World({"fast": 100})
    reserve(world, 1_000, 1_000)
    assert world.reason(given(world, "capacity=50", time_limit_s=100)) == "BurstBufferStageIn"
    late = given(world, "capacity=50", time_limit_s=5_000)
    assert world.reason(late) == "BurstBufferResources"
    assert world.reason(given(world, "capacity=40", time_limit_s=5_000)) == "BurstBufferStageIn"
    small = given(world, "capacity=10", time_limit_s=100)
    assert world.reason(small) == "BurstBufferStageIn"


def test_what_holders_give_back_before_it_begins_counts() -> None:
    world = World({"fast": 100})
    given(world, "capacity=50", time_limit_s=100)
    reserve(world, 1_000, 1_000)
    assert world.reason(given(world, "capacity=40", time_limit_s=5_000)) == "BurstBufferStageIn"
    assert world.reason(given(world, "capacity=10", time_limit_s=5_000)) == "BurstBufferResources"


def test_a_job_of_a_reservation_waits_for_its_start_goes_first_and_says_when_it_is_no_more() -> None:
    world = World({"fast": 100})
    reserve(world, 100, 1_000)
    job = given(world, "capacity=100", "eve", reservation="r")
    assert world.reason(job) == "Reservation"
    assert next_due(world.state, world.at) == world.at + seconds(100)
    world.advance(100)
    assert world.reason(job) == "BurstBufferStageIn"
    second = given(world, "capacity=100", "eve", reservation="r")
    changed(world, c.DeleteReservation("r"))
    assert world.reason(second) == "ReservationDeleted"
    assert world.reason(job) == "ReservationDeleted"


def test_the_start_and_the_end_of_a_reservation_are_events_by_time_alone() -> None:
    world = World({"fast": 100})
    reserve(world, 100, 1_000)
    world.advance(100)
    world.advance(1_000)
    events = [event for batch in world.ledger for entry in batch.entries for event in entry.events]
    found = [event for event in events if isinstance(event, e.ReservationStarted | e.ReservationEnded)]
    assert found == [e.ReservationStarted("r"), e.ReservationEnded("r")]


def test_an_active_reservation_comes_before_any_priority() -> None:
    world = World({"fast": 100})
    blocker = given(world, "capacity=100")
    urgent = given(world, "capacity=100", priority=10**6)
    reserve(world, 0, 10_000, size=10)
    own = given(world, "capacity=100", "eve", reservation="r")
    world.finish(blocker)
    assert world.shown(own)[2] == "staging-in"
    assert world.shown(urgent)[2] == "pending"


def test_who_may_use_a_reservation_is_asked_at_submit_and_again_when_it_changes() -> None:
    world = World({"fast": 100}, cpus=1)
    account(world, users=("alan",))
    reserve(world, 0, 10_000, users=(), accounts=("a",))
    rejection = tried(world, "capacity=10", reservation="r")
    assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.PERMISSION_DENIED
    given(world, priority=9)
    job = given(world, "capacity=60", reservation="r", account="a")
    assert world.reason(job) == "BurstBufferStageIn"
    reserve(world, 0, 10_000, users=("bo",))
    assert world.reason(job) == "Reservation"


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"end_at": Instant(5)}, "reservation.end"),
        ({"users": ()}, "reservation.users"),
        ({"space": ()}, "reservation.burst_buffer"),
        ({"space": (ReservedSpace("x", 1),)}, "reservation.burst_buffer"),
        ({"space": (ReservedSpace("fast", 101),)}, "reservation.burst_buffer"),
        ({"space": (ReservedSpace("fast", 1), ReservedSpace("fast", 1))}, "reservation.burst_buffer"),
    ],
)
def test_a_reservation_that_makes_no_sense_is_refused_with_its_place(changes: dict[str, Any], place: str) -> None:
    import msgspec

    world = World({"fast": 100})
    rejection = world.settle(c.SetReservation(msgspec.structs.replace(reservation(world, 0, 100), **changes)))
    assert isinstance(rejection, Rejection)
    assert rejection.place == place


def test_a_pool_is_not_reserved_for_more_than_it_has_at_any_time() -> None:
    import msgspec

    world = World({"fast": 100})
    reserve(world, 100, 100, size=60)
    other = msgspec.structs.replace(reservation(world, 150, 100, size=60), name="other")
    rejection = world.settle(c.SetReservation(other))
    assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.CAPACITY_OVER_TOTAL
    changed(world, c.SetReservation(msgspec.structs.replace(reservation(world, 200, 100, size=60), name="other")))
