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

from forebay.cluster.api.history_service import service as linking
from forebay.cluster.api.history_service.__main__ import HistoryProcess
from forebay.cluster.api.history_service.follower import Point
from forebay.cluster.api.history_service.frames import REPLICA_CODEC, SERVICE_CODEC, CancelQuery, QueryFailure, WhyQuery
from forebay.cluster.api.history_service.service import HistoryService, HistoryServiceTimeout
from forebay.cluster.ipc import ChildSocket
from forebay.cluster.system import SystemClock
from forebay.replica.state import EMPTY
from forebay.replica.values.units import NEVER

WORDS = "there was no such job"


def why(number: int, through: int = 0) -> WhyQuery:
    return WhyQuery(number, through, 1, NEVER, 1, None, "")


class Asked:
    """What answers questions, slowly: while one is answered something may be sent."""

    def __init__(self, meanwhile: Callable[[int], None]) -> None:
        self.numbers: list[int] = []
        self._meanwhile = meanwhile

    def why(self, asked: WhyQuery) -> QueryFailure:
        self.numbers.append(asked.number)
        self._meanwhile(asked.number)
        return QueryFailure(asked.number, 0, 1, WORDS)


def answered(questions: list[int], given_up: dict[int, list[int]]) -> list[int]:
    """Return which questions are answered, where `given_up` says what is given up while each is being answered."""
    ours, its = socket.socketpair()

    def meanwhile(number: int) -> None:
        for gone in given_up.get(number, []):
            ours.sendall(REPLICA_CODEC.encode(CancelQuery(gone)))

    follower: Any = SimpleNamespace(ledger=SimpleNamespace(applied_index=9), index=9, reached=Point(9, EMPTY))
    with ours, its:
        with patch("forebay.cluster.api.history_service.__main__.IndexScrub"):
            process = HistoryProcess(ChildSocket(its, SERVICE_CODEC), follower, None, None, None)  # type: ignore[arg-type]
        asked = process._questions = Asked(meanwhile)  # type: ignore[assignment]
        for number in questions:
            ours.sendall(REPLICA_CODEC.encode(why(number)))
        process._receive()
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

    async def story() -> None:
        controller: Any = SimpleNamespace(
            ledger=SimpleNamespace(applied_index=9),
            journal=SimpleNamespace(),
            follow=lambda observer: None,
            clock=SystemClock(),
        )
        historian = HistoryService(controller)
        historian.process.link = SimpleNamespace(send=sent.append)  # type: ignore[assignment]
        monkeypatch.setattr(historian, "start", lambda: None)
        monkeypatch.setattr(linking, "ANSWER_S", 0.02)
        with pytest.raises(HistoryServiceTimeout):
            await historian._ask(why(1), 0)
        waits = asyncio.create_task(historian._ask(why(2), 0))
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        hears = asyncio.create_task(historian._ask(why(3), 0))
        await asyncio.sleep(0)
        historian._questions[3][1].set_result(QueryFailure(3, 0, 1, WORDS))
        assert (await hears).number == 3
        assert [(type(one), one.number) for one in sent] == [
            (WhyQuery, 1), (CancelQuery, 1), (WhyQuery, 2), (CancelQuery, 2), (WhyQuery, 3),
        ]  # fmt: skip

    asyncio.run(story())
