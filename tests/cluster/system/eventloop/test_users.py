"""User numbers are looked up for output, and an unresponsive name service delays nothing."""

from __future__ import annotations

import os
import pwd
import threading

from forebay.cluster.system.accounts import group_name, uid_of
from forebay.cluster.system.eventloop.users import KEPT_S, Identities
from tests.clocks import ManualClock
from tests.cluster.harness import story

ME = pwd.getpwuid(os.getuid())


def test_local_account_has_a_number_and_an_unknown_one_has_none() -> None:
    assert uid_of(ME.pw_name) == ME.pw_uid
    assert uid_of("nobody-is-called-so") is None
    assert uid_of("1234") == 1234
    assert uid_of("") is None and uid_of("a\0b") is None
    assert group_name(2**70) is None and group_name(-(2**40)) is None


@story
async def test_answer_is_cached_for_a_limited_time() -> None:
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
async def test_unresponsive_name_service_is_asked_once_and_awaited_briefly() -> None:
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
async def test_failing_name_service_returns_no_number() -> None:
    def fail(name: str) -> int | None:
        raise OSError("no such server")

    assert await Identities(ManualClock(), lookup=fail).uids(["alice"]) == {"alice": None}
