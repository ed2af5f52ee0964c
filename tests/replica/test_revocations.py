"""The list of revoked certificates: who may change it, what is in it, and that it stays bounded."""

import immutables
import msgspec
import pytest

from forebay.replica.messages import commands as c
from forebay.replica.model.accounts import Revocation, certificate_fault
from forebay.replica.values.errors import Rejection, RejectionCode
from forebay.replica.values.limits import REVOCATIONS_DROPPED_MAX, REVOCATIONS_MAX
from forebay.replica.values.units import NEVER, Instant
from tests.replica.world import World, user


def operator(name: str) -> c.Actor:
    return c.Actor(c.ActorRole.OPERATOR, name)


def revoked(world: World) -> list[str]:
    return sorted(world.state.revocations)


def test_what_is_revoked_is_in_the_list_until_it_is_taken_off() -> None:
    world = World()
    assert world.settle(c.RevokeCertificate("user:alan", "left"), operator("ada")) == 0
    found = world.state.revocations["user:alan"]
    assert (found.reason, found.by, found.until, found.at) == ("left", "ada", NEVER, world.state.at)
    world.settle(c.RevokeCertificate("serial:1f", "", Instant(world.at + 10_000_000)))
    assert revoked(world) == ["serial:1f", "user:alan"]
    world.settle(c.UnrevokeCertificate("user:alan"))
    assert revoked(world) == ["serial:1f"]
    rejection = world.settle(c.UnrevokeCertificate("user:alan"))
    assert isinstance(rejection, Rejection) and "'user:alan' is not revoked" in rejection.sentence


@pytest.mark.parametrize("command", [c.RevokeCertificate("user:bob", ""), c.UnrevokeCertificate("user:bob")])
def test_only_operators_change_the_list(command: c.Command) -> None:
    world = World()
    rejection = world.settle(command, user())
    assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.PERMISSION_DENIED


def test_nobody_revokes_himself() -> None:
    world = World()
    rejection = world.settle(c.RevokeCertificate("operator:ada", ""), operator("ada"))
    assert isinstance(rejection, Rejection) and "is your own identity" in rejection.sentence
    assert world.settle(c.RevokeCertificate("user:ada", ""), operator("ada")) == 0


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("serial:1f2e", True), ("user:alan", True), ("agent:n1", True), ("replica:r1", True), ("operator:ada", True),
        ("serial:", False), ("serial:0f", False), ("serial:1F", False), ("serial:" + "1" * 41, False), ("alan", False),
        ("user:", False), ("user:a b", False), ("nobody:alan", False), ("", False), ("user:../x", False),
    ],
)  # fmt: skip
def test_an_entry_is_a_serial_number_or_a_holder(text: str, right: bool) -> None:
    assert (certificate_fault(text) is None) == right
    rejection = World().settle(c.RevokeCertificate(text, ""))
    assert (rejection == 0) == right


def test_the_list_is_bounded_and_what_has_expired_makes_room() -> None:
    world = World()
    short = Instant(world.at + 1_000_000)
    listed = {}
    for number in range(REVOCATIONS_MAX):
        key = f"serial:{number + 1:x}"
        listed[key] = Revocation(key, until=short if number <= REVOCATIONS_DROPPED_MAX else NEVER)
    world.state = msgspec.structs.replace(world.state, revocations=immutables.Map(listed))
    rejection = world.settle(c.RevokeCertificate("user:late", ""))
    assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.LIMIT_EXCEEDED
    assert world.settle(c.RevokeCertificate("serial:1", "again", short)) == 0, "who is on the list may change"
    world.advance(2)
    assert world.settle(c.RevokeCertificate("user:late", "")) == 0
    assert len(world.state.revocations) == REVOCATIONS_MAX - REVOCATIONS_DROPPED_MAX + 1
    late = world.settle(c.RevokeCertificate("serial:abc", "", short))
    assert isinstance(late, Rejection) and "already expired" in late.sentence
