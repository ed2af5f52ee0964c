"""Questions about the past that nobody waits for any more: whoever asks again does not wait behind them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.api.past import link as linking
from cluster.api.past.__main__ import Process
from cluster.api.past.frames import AskWhy, GiveUp, Unanswered, decode_ask, encode
from cluster.api.past.link import Historian, HistorianLate
from cluster.schemas import LENGTH
from replica.values.units import NEVER

WORDS = "there was no such job"


def why(number: int, through: int = 0) -> AskWhy:
    return AskWhy(number, through, 1, NEVER, 1, None, "")


class Asked:
    """What answers questions, slowly: while one is answered something may be sent."""

    def __init__(self, meanwhile: Callable[[int], None]) -> None:
        self.numbers: list[int] = []
        self._meanwhile = meanwhile

    def why(self, asked: AskWhy) -> Unanswered:
        self.numbers.append(asked.number)
        self._meanwhile(asked.number)
        return Unanswered(asked.number, 0, 1, WORDS)


def answered(questions: list[int], given_up: dict[int, list[int]]) -> list[int]:
    """Return which questions are answered, where `given_up` says what is given up while each is being answered."""
    ours, its = socket.socketpair()

    def meanwhile(number: int) -> None:
        for gone in given_up.get(number, []):
            ours.sendall(encode(GiveUp(gone)))

    follower: Any = SimpleNamespace(ledger=SimpleNamespace(applied_index=9), index=9)
    with ours, its:
        with patch("cluster.api.past.__main__.IndexScrub"):
            process = Process(its, follower, None, None, None)  # type: ignore[arg-type]
        asked = process._questions = Asked(meanwhile)  # type: ignore[assignment]
        for number in questions:
            ours.sendall(encode(why(number)))
        assert process._read()
        process._answer()
        return asked.numbers


@given(st.integers(1, 12), st.dictionaries(st.integers(0, 12), st.lists(st.integers(0, 12), max_size=6), max_size=6))
def test_what_is_given_up_while_another_one_is_answered_is_not_answered(
    count: int, given_up: dict[int, list[int]]
) -> None:
    numbers, gone, expected = list(range(count)), set[int](), list[int]()
    for number in numbers:
        if number not in gone:
            expected.append(number)
            gone |= {one for one in given_up.get(number, []) if one not in expected}
    assert answered(numbers, given_up) == expected


def test_who_waits_no_longer_gives_his_question_up_and_who_was_answered_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []

    def take(data: bytes) -> None:
        sent.append(decode_ask(data[LENGTH.size :]))

    async def story() -> None:
        controller: Any = SimpleNamespace(ledger=SimpleNamespace(applied_index=9), journal=SimpleNamespace())
        historian = Historian(controller)
        historian._writer = SimpleNamespace(write=take)  # type: ignore[assignment]
        monkeypatch.setattr(historian, "start", lambda: None)
        monkeypatch.setattr(linking, "ANSWER_S", 0.02)
        with pytest.raises(HistorianLate):
            await historian._ask(why(1), 0)
        waits = asyncio.create_task(historian._ask(why(2), 0))
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        hears = asyncio.create_task(historian._ask(why(3), 0))
        await asyncio.sleep(0)
        historian._questions[3][1].set_result(Unanswered(3, 0, 1, WORDS))
        assert (await hears).number == 3
        assert [(type(one), one.number) for one in sent] == [
            (AskWhy, 1), (GiveUp, 1), (AskWhy, 2), (GiveUp, 2), (AskWhy, 3),
        ]  # fmt: skip

    asyncio.run(story())
