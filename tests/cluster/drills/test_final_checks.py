"""Comparison of states after a drill: equal states agree even on a busy cluster, and different states never do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from forebay.cluster.client import ApiError, Client
from forebay.cluster.drills import final_checks
from forebay.cluster.drills.final_checks import CheckImpossible, find_disagreement
from forebay.cluster.schemas import LeadersAnswer, LeaderTermView, StateDigestAnswer
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system import Address, SystemClock
from forebay.replica.values import Instant
from tests.clocks import ManualClock
from tests.cluster.drills.test_preconditions import STATUS
from tests.cluster.harness import story
from tests.cluster.server.tlog.test_cluster import pools_set, three
from tests.cluster.test_serve import make

REPLICAS = {f"r{port}": Address("127.0.0.1", port) for port in (1, 2, 3)}


class Replicas:
    """Double of `Client.call` for replicas whose revisions advance with each request."""

    def __init__(self, clock: ManualClock, steps: dict[str, int], *, odd: str = "", silent: str = "") -> None:
        self._clock = clock
        self._steps = steps
        self._odd = odd
        self._silent = silent
        self._revisions = dict.fromkeys(REPLICAS, 100)

    async def call(self, operation: Any, *, replica: Address, at: str | None = None, **more: Any) -> Any:
        self._clock.advance(0.1)
        name = f"r{replica.port}"
        self._revisions[name] += self._steps[name]
        now = self._revisions[name]
        if name == self._silent:
            raise ApiError(0, "unreachable", "it does not answer")
        revision = now if at is None else int(at)
        if revision > now:
            raise ApiError(404, "not_found", "that has not come yet")
        digest = f"{'odd' if name == self._odd else 'state'} {revision}"
        if operation is ops.SHOW_STATUS:
            return replace(STATUS, revision=revision, state_digest=digest)
        assert operation is ops.SHOW_STATE_DIGEST and more == {"stale": True}
        return StateDigestAnswer(revision=revision, state_digest=digest)


def asked(steps: dict[str, int], **faults: str) -> str:
    clock = ManualClock(Instant(0))
    replicas = cast("Client", Replicas(clock, steps, **faults))
    try:
        return asyncio.run(find_disagreement(replicas, REPLICAS, clock))
    except CheckImpossible as error:
        return f"not checked: {error}"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(final_checks, "LOOK_S", 0.0)
    yield


STEPS = st.fixed_dictionaries({name: st.integers(0, 5) for name in REPLICAS})


@given(STEPS)
def test_equal_states_agree_even_at_different_revisions(
    steps: dict[str, int],
) -> None:
    # A replica that stopped has no state at the revision of the others.
    stand = sorted(name for name in steps if not steps[name] and any(steps.values()))
    found = asked(steps)
    if stand:
        silent = f"{', '.join(stand)} did not report its state within {final_checks.AGREE_S:g} s"
        assert found in ("", f"not checked: {silent}")
    else:
        assert found == ""


@given(STEPS, st.sampled_from(sorted(REPLICAS)))
def test_a_replica_with_another_state_never_agrees(steps: dict[str, int], odd: str) -> None:
    assert asked(steps, odd=odd) != ""


@pytest.mark.parametrize("step", [0, 1])
def test_a_silent_replica_is_named_without_a_verdict(step: int) -> None:
    found = asked(dict.fromkeys(REPLICAS, step), silent="r2")
    assert found == f"not checked: r2 did not report its state within {final_checks.AGREE_S:g} s"


class Histories:
    """Double of `Client.call` for a history that catches up at the request of this number."""

    def __init__(self, clock: ManualClock, looks: int) -> None:
        self._clock = clock
        self._looks = looks

    async def call(self, operation: Any) -> Any:
        if operation is ops.SHOW_STATUS:
            return replace(STATUS, commit_index=30)
        assert operation is ops.LIST_LEADERS
        self._looks -= 1
        self._clock.advance(1.0)
        last = 30 if self._looks <= 0 else 29
        old = LeaderTermView(
            term=1, leader="r1", first_index=1, last_index=9, from_at=None, to_at=None, silent_s=None
        )  # fmt: skip
        return LeadersAnswer(
            revision=30, terms=(old, replace(old, term=2, leader="r2", first_index=10, last_index=last))
        )


@pytest.mark.parametrize("looks", [1, 2, int(final_checks.AGREE_S)])
def test_terms_are_read_after_the_history_has_caught_up(looks: int) -> None:
    clock = ManualClock(Instant(0))
    histories = cast("Client", Histories(clock, looks))
    found = asyncio.run(final_checks.terms_since(histories, clock, 1))
    assert [(one.term, one.leader, one.last_index) for one in found] == [(2, "r2", 30)]


def test_terms_are_not_checked_if_the_history_does_not_catch_up() -> None:
    clock = ManualClock(Instant(0))
    with pytest.raises(CheckImpossible, match="did not reach entry 30 within"):
        asyncio.run(final_checks.terms_since(cast("Client", Histories(clock, 1_000_000)), clock, 1))


@story
async def test_replicas_agree_under_constant_writes(tmp_path: Path) -> None:
    config = make(tmp_path / "site", 3)
    async with three(config) as them:
        await them.until_they_have(await pools_set(config, 5))
        replicas = {one.name: one.api for one in config.replicas}
        over = False

        async def write() -> int:
            count = 0
            while not over:
                await pools_set(config, 20)
                count += 20
            return count

        async with Client.from_config(config, "operator") as client:
            writing = asyncio.create_task(write())
            found = [await find_disagreement(client, replicas, SystemClock()) for _ in range(5)]
            over = True
            assert await writing > 0
        assert found == [""] * 5
