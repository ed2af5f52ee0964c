"""A program's ids: numbered, acknowledged as far as all are answered, in another session where one cannot be used."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

import forebay.cluster.client.session_ids as module
from forebay.cluster.client.session_ids import REST_S, SessionIds
from forebay.replica.values.command_ids import decode_session_command_id
from forebay.replica.values.limits import SESSION_IDLE_S_MAX
from forebay.replica.values.units import Instant
from tests.clocks import ManualClock

WINDOW = 6


class Opened:
    def __init__(self) -> None:
        self.count = 0

    async def __call__(self) -> int:
        await asyncio.sleep(0)
        self.count += 1
        return 100 + self.count


STEPS = st.lists(st.tuples(st.sampled_from(["next", "answer", "refuse", "gone"]), st.integers(0, 9)), max_size=60)


@given(STEPS)
def test_an_id_acknowledges_exactly_the_answers_before_the_first_that_is_outstanding(
    steps: list[tuple[str, int]],
) -> None:
    async def story() -> None:
        opened = Opened()
        ids = SessionIds(opened, ManualClock(Instant(0)))
        given_out: list[str] = []
        answered: set[str] = set()
        for what, place in steps:
            if what == "next":
                made = await ids.next_id()
                said = decode_session_command_id(bytes.fromhex(made))
                mine = [
                    one for one in given_out if decode_session_command_id(bytes.fromhex(one)).session == said.session
                ]
                first = next((number for number, one in enumerate(mine) if one not in answered), len(mine))
                assert said.acknowledged == first, "it gave up an answer that is outstanding, or keeps one that is here"
                assert said.sequence == len(mine) + 1 <= first + WINDOW
                given_out.append(made)
            elif given_out:
                one = given_out[-1 - place % len(given_out)]
                if what == "answer":
                    ids.acknowledge(one)
                    answered.add(one)
                elif what == "refuse":
                    ids.note_rejection(one, 404, "unknown_job")
                    answered.add(one)
                else:
                    count, current = opened.count, decode_session_command_id(bytes.fromhex(given_out[-1])).session
                    ids.note_rejection(one, 404, "unknown_session")
                    again = decode_session_command_id(bytes.fromhex(await ids.next_id()))
                    if decode_session_command_id(bytes.fromhex(one)).session == current:
                        assert opened.count == count + 1 and (again.sequence, again.acknowledged) == (1, 0)
                    given_out.append(f"{again.session:012x}8001{0x8000000000000000 | again.sequence:016x}")

    with_window = module.SESSION_WINDOW_MAX
    module.SESSION_WINDOW_MAX = WINDOW  # type: ignore[misc]
    try:
        asyncio.run(story())
    finally:
        module.SESSION_WINDOW_MAX = with_window  # type: ignore[misc]


def test_many_who_ask_at_once_open_one_session_and_a_rest_opens_another() -> None:
    async def story() -> None:
        opened, clock = Opened(), ManualClock(Instant(0))
        ids = SessionIds(opened, clock)
        made = await asyncio.gather(*(ids.next_id() for _ in range(20)))
        assert opened.count == 1 and len(set(made)) == 20
        assert REST_S < SESSION_IDLE_S_MAX
        clock.advance(REST_S - 1)
        await ids.next_id()
        assert opened.count == 1
        clock.advance(REST_S + 1)
        await ids.next_id()
        assert opened.count == 2

    asyncio.run(story())


def test_an_answer_to_an_id_of_elsewhere_changes_nothing() -> None:
    async def story() -> None:
        ids = SessionIds(Opened(), ManualClock(Instant(0)))
        for other in ("017f22e279b07cc398c4dc0c0c07398f", "", "no id", "0" * 32):
            ids.acknowledge(other)
            ids.note_rejection(other, 404, "unknown_session")
        first = await ids.next_id()
        ids.acknowledge("017f22e279b07cc398c4dc0c0c07398f")
        ids.note_rejection("017f22e279b07cc398c4dc0c0c07398f", 404, "unknown_session")
        second = decode_session_command_id(bytes.fromhex(await ids.next_id()))
        assert (second.sequence, second.acknowledged) == (2, 0)
        ids.acknowledge(first)
        third = decode_session_command_id(bytes.fromhex(await ids.next_id()))
        assert (third.sequence, third.acknowledged) == (3, 1)

    asyncio.run(story())


def test_whoever_waits_for_a_session_gets_his_id_in_one_turn_of_the_loop_with_all_others() -> None:
    """One lock let them out one a turn, and a leader made a batch of each."""

    async def story() -> None:
        may_open = asyncio.Event()
        turns: list[int] = []
        turn = 0

        async def open_session() -> int:
            await may_open.wait()
            return 7

        async def one(ids: SessionIds) -> None:
            await ids.next_id()
            turns.append(turn)

        ids = SessionIds(open_session, ManualClock(Instant(0)))
        waiting = [asyncio.create_task(one(ids)) for _ in range(20)]
        await asyncio.sleep(0)
        may_open.set()
        while len(turns) < len(waiting):
            turn += 1
            await asyncio.sleep(0)
        assert len(set(turns)) == 1

    asyncio.run(story())


def test_a_session_that_cannot_be_opened_is_an_error_of_everybody_who_waits_and_is_tried_again_by_the_next() -> None:
    async def story() -> None:
        tries = 0

        async def open_session() -> int:
            nonlocal tries
            tries += 1
            await asyncio.sleep(0)
            if tries == 1:
                raise ConnectionError("no replica answers")
            return 7

        ids = SessionIds(open_session, ManualClock(Instant(0)))
        results = await asyncio.gather(*(ids.next_id() for _ in range(3)), return_exceptions=True)
        assert [type(one) for one in results] == [ConnectionError] * 3 and tries == 1
        assert decode_session_command_id(bytes.fromhex(await ids.next_id())).session == 7

    asyncio.run(story())
