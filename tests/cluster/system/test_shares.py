"""Shares of a processor: in the long run none is exceeded, and an identity that uses little never waits."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.system.eventloop import ProcessorShares, ShareExceeded, shares

SHARE, RESERVE_S, WAIT_S, WAITING = 0.25, 2.0, 2.0, 2


class Time:
    """A clock that sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def made(clock: Time) -> ProcessorShares:
    return ProcessorShares(clock.monotonic_s, share=SHARE, reserve_s=RESERVE_S, wait_s_max=WAIT_S, waiting_max=WAITING)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    monkeypatch.setattr(shares.asyncio, "sleep", found.sleep)
    return found


async def used(one: ProcessorShares, who: str, cost_s: float, clock: Time) -> float:
    """Use the worker, and return the seconds that were waited."""
    began_s = clock.now_s
    async with one.use(who):
        waited_s = clock.now_s - began_s
        one.charge(who, cost_s)
    return waited_s


@given(st.lists(st.tuples(st.floats(0.001, 3.0), st.floats(0.0, 10.0)), max_size=60))
def test_no_identity_uses_more_than_its_share_for_long(uses: list[tuple[float, float]]) -> None:
    clock, total_s, last_s = Time(), 0.0, 0.0

    async def story() -> None:
        nonlocal total_s, last_s
        one = made(clock)
        for cost_s, pause_s in uses:
            clock.now_s += pause_s
            try:
                await used(one, "a", cost_s, clock)
            except ShareExceeded as error:
                assert error.after_s > WAIT_S
                continue
            total_s, last_s = total_s + cost_s, cost_s
            # The last use began while all earlier ones were paid for.
            assert total_s - last_s <= RESERVE_S + SHARE * (clock.now_s - 100.0) + 1e-6
            await used(one, "b", 0.0001, clock)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shares.asyncio, "sleep", clock.sleep)
        asyncio.run(story())


def test_after_its_reserve_an_identity_waits_then_is_rejected_and_others_are_not(clock: Time) -> None:
    async def story() -> None:
        one = made(clock)
        assert [await used(one, "a", cost_s, clock) for cost_s in (1.0, 1.0, 0.4)] == [0.0, 0.0, 0.0]
        assert await used(one, "a", 1.0, clock) == pytest.approx(0.4 / SHARE)
        with pytest.raises(ShareExceeded) as raised:
            await used(one, "a", 1.0, clock)
        assert raised.value.after_s == pytest.approx(1.0 / SHARE)
        assert await used(one, "b", 1.0, clock) == 0.0
        clock.now_s += raised.value.after_s
        assert await used(one, "a", 0.1, clock) <= 1e-9
        clock.now_s += 1_000
        assert [await used(one, "a", 1.0, clock) for _ in range(3)] == [0.0, 0.0, 0.0]
        with pytest.raises(ShareExceeded):  # a pause restores the reserve, once
            await used(one, "a", 1.0, clock)

    asyncio.run(story())


def test_those_who_wait_are_bounded_and_uses_under_way_count_before_their_cost_is_known() -> None:
    clock = Time()
    began, go = [], asyncio.Event()

    async def call(one: ProcessorShares, number: int) -> None:
        async with one.use("a"):
            began.append(number)
            await go.wait()

    async def story() -> None:
        one = made(clock)
        for _ in range(200):
            one.charge("a", 0.1)  # its cost is known
        clock.now_s += 200 * 0.1 / SHARE + 100
        tasks = [asyncio.create_task(call(one, number)) for number in range(26)]
        await asyncio.sleep(0.01)
        assert began == [*range(21)], "as many as the reserve is for, and one that goes beyond it"
        rejected = [task.exception() for task in tasks if task.done()]
        assert [type(error) for error in rejected] == [ShareExceeded] * (26 - 21 - WAITING)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with one.use("a"):  # what was given up is not charged
            pass

    asyncio.run(story())


def test_identities_that_owe_nothing_are_forgotten(clock: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "ACCOUNTS_MAX", 3)

    async def story() -> None:
        one = made(clock)
        for who in "abcdefgh":
            await used(one, who, 0.1, clock)
            clock.now_s += 1.0
        assert len(one._accounts) <= 4
        assert "h" in one._accounts

    asyncio.run(story())
