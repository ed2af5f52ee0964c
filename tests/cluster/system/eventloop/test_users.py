"""The numbers of users are looked up where they are printed, and a name service that hangs holds up nobody."""

from __future__ import annotations

import os
import pwd
import threading

from forebay.cluster.system.accounts import group_name, uid_of
from forebay.cluster.system.eventloop.users import KEPT_S, Identities
from tests.clocks import ManualClock
from tests.cluster.harness import story

ME = pwd.getpwuid(os.getuid())


def test_an_account_of_this_machine_has_its_number_and_another_none() -> None:
    assert uid_of(ME.pw_name) == ME.pw_uid
    assert uid_of("nobody-is-called-so") is None
    assert uid_of("1234") == 1234
    assert uid_of("") is None and uid_of("a\0b") is None
    assert group_name(2**70) is None and group_name(-(2**40)) is None


@story
async def test_an_answer_is_kept_for_a_while_and_asked_for_again_after_it() -> None:
    asked: list[str] = []

    def lookup(name: str) -> int | None:
        asked.append(name)
        return len(asked)

    clock = ManualClock()
    identities = Identities(clock, lookup=lookup)
    assert await identities.uids(["alice", "bob", "alice"]) == {"alice": 1, "bob": 2}
    assert await identities.uids(["alice"]) == {"alice": 1}
    clock.advance(KEPT_S + 1)
    assert await identities.uids(["alice"]) == {"alice": 3}
    assert asked == ["alice", "bob", "alice"]


@story
async def test_a_name_service_that_hangs_is_waited_for_briefly_and_asked_once() -> None:
    go_on, asked = threading.Event(), []

    def hang(name: str) -> int | None:
        asked.append(name)
        go_on.wait(30)
        return 7

    identities = Identities(ManualClock(), lookup=hang, wait_s=0.05)
    assert await identities.uids(["alice"]) == {"alice": None}
    assert await identities.uids(["alice", "bob"]) == {"alice": None, "bob": None}
    go_on.set()
    identities._wait_s = 20
    assert await identities.uids(["alice", "bob"]) == {"alice": 7, "bob": 7}
    assert asked == ["alice", "bob"]


@story
async def test_a_name_service_that_fails_knows_nobody() -> None:
    def fail(name: str) -> int | None:
        raise OSError("no such server")

    assert await Identities(ManualClock(), lookup=fail).uids(["alice"]) == {"alice": None}
