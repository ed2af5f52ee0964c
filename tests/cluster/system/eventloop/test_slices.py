"""Long work is sliced: one slice in each turn of the loop, with any number of callers."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.system.eventloop.slices import (
    BYTES_PER_SLICE,
    PARTS_PER_RECORD,
    RECORDS_PER_SLICE,
    SlicedWork,
    Slices,
    iterate_paced,
)
from tests.cluster.harness import story


@story
@pytest.mark.parametrize("kind", ["records", "parts", "bytes"])
async def test_one_turn_of_the_loop_runs_one_slice_for_all_callers(kind: str) -> None:
    slices, done, turns = Slices(), 0, []
    units = {"records": RECORDS_PER_SLICE, "parts": RECORDS_PER_SLICE * PARTS_PER_RECORD, "bytes": BYTES_PER_SLICE}
    size = units[kind] // 16

    async def caller(work: SlicedWork) -> None:
        nonlocal done
        for _ in range(100):
            match kind:
                case "records":
                    await work.take(size)
                case "parts":
                    await work.take(0, parts=size)
                case _:
                    await work.take(0, size_bytes=size)
            done += 1

    def count() -> None:
        turns.append(done)
        if done < 1_000:
            asyncio.get_running_loop().call_soon(count)

    callers = [asyncio.ensure_future(caller(slices.work(number % 3))) for number in range(10)]
    count()
    await asyncio.gather(*callers)
    assert max(after - before for before, after in zip(turns, turns[1:], strict=False)) <= 16
    assert done == 1_000


@story
async def test_unused_part_of_a_slice_is_lost_in_the_next_turn() -> None:
    slices = Slices()
    work = slices.work("alice")
    await work.take()
    held, turned = slices.work("bob"), False

    def turn() -> None:
        nonlocal turned
        turned = True

    for _ in range(4):
        await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(turn)
    await work.take()
    assert turned
    await held.take()


@story
async def test_many_callers_of_one_account_delay_only_that_account() -> None:
    slices, order = Slices(), []

    async def caller(who: str) -> None:
        work = slices.work(who)
        for _ in range(3):
            await work.take(RECORDS_PER_SLICE)
            order.append(who)

    await asyncio.gather(*(caller("many") for _ in range(50)), caller("one"))
    assert order.index("one") <= 2
    assert [place for place, who in enumerate(order) if who == "one"][-1] <= 8


@story
async def test_cancelled_caller_passes_its_turn_to_the_next() -> None:
    slices = Slices()
    gone = asyncio.ensure_future(slices.work("alice").take())
    stays = asyncio.ensure_future(slices.work("alice").take())
    await asyncio.sleep(0)
    gone.cancel()
    async with asyncio.timeout(20):
        await stays


@given(st.lists(st.integers()), st.booleans())
def test_sliced_sort_equals_sorted(items: list[int], reverse: bool) -> None:
    @story
    async def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("forebay.cluster.system.eventloop.slices.SORTED_AT_ONCE", 3)
            found = await Slices().work("alice").sort(items, reverse=reverse)
        assert list(found) == sorted(items, reverse=reverse)

    run()


@story
async def test_paced_items_are_complete_and_in_order() -> None:
    work = Slices().work("alice")
    assert [item async for item in iterate_paced(range(300), work)] == list(range(300))
    assert [item async for item in iterate_paced(range(300), work, parts=1)] == list(range(300))
