"""Turns: limits are kept, every caller gets a turn, and identities alternate."""

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.system.eventloop import Turns


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans()), max_size=30),
)
def test_all_callers_get_a_turn_within_the_limits(
    most: int, most_each: int, callers: list[tuple[str, int, bool]]
) -> None:
    having, done = Counter[str](), Counter[str]()

    async def call(turns: Turns, who: str, length: int) -> None:
        async with turns.turn(who):
            having[who] += 1
            assert having.total() <= most and having[who] <= most_each
            try:
                for _ in range(length):
                    await asyncio.sleep(0)
            finally:
                having[who] -= 1
        done[who] += 1

    async def story() -> None:
        turns = Turns(most, most_each)
        tasks = [asyncio.create_task(call(turns, who, length)) for who, length, _ in callers]
        await asyncio.sleep(0)
        for task, (_, _, is_given_up) in zip(tasks, callers, strict=True):
            if is_given_up:
                task.cancel()
                await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await asyncio.gather(*tasks, return_exceptions=True)
        expected = Counter(who for (who, _, _), task in zip(callers, tasks, strict=True) if not task.cancelled())
        assert done == expected
        async with turns.turn("d"):  # no turn is still taken
            pass

    asyncio.run(story())


def test_identity_with_many_requests_waits_without_delaying_others() -> None:
    order: list[str] = []

    async def call(turns: Turns, who: str) -> None:
        async with turns.turn(who):
            order.append(who)
            await asyncio.sleep(0)

    async def story() -> None:
        turns = Turns(1, 1)
        await asyncio.gather(*(call(turns, who) for who in "aaaaaab"))

    asyncio.run(story())
    assert order.index("b") <= 2
