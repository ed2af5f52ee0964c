"""Replicas of a copy join one at a time, as soon as the cluster permits the next."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.cluster.client import ApiError
from forebay.cluster.drills.copies import replicas
from forebay.cluster.drills.copies.replicas import Copy
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system import Address, SystemClock


class FakeCopy(Copy):
    """Copy with scripted answers to additions, whose members vote at once."""

    def __init__(self, answers: list[ApiError | None]) -> None:
        self._clock = SystemClock()
        self._running = {}
        self.answers, self.added, self.started = answers, [], []  # type: ignore[var-annotated]
        at = Address("127.0.0.1", 1)
        self.config = SimpleNamespace(replica=lambda name: SimpleNamespace(peer=at, api=at))  # type: ignore[assignment]
        self.client = SimpleNamespace(call=self._call, new_command_id=lambda: str(len(self.started)))  # type: ignore[assignment]

    async def _call(self, operation: object, request: Any = None, **_: object) -> object:
        if operation is ops.LIST_MEMBERS:
            return SimpleNamespace(members=[SimpleNamespace(name=name, votes=True) for name in self.started])
        error = self.answers.pop(0)
        if error is not None:
            raise error
        self.added.append((request.name, request.command_id))
        return "members"

    async def start(self, name: str, *_: str) -> None:
        self.started.append(name)


def under_way() -> ApiError:
    return ApiError(409, "change_under_way", "another change of the members is under way")


def test_adding_a_replica_waits_for_the_previous_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "LOOK_S", 0.001)
    copy = FakeCopy([None, under_way(), under_way(), None])
    asyncio.run(copy.join_replicas(("r2", "r3")))
    assert copy.added == [("r2", "0"), ("r3", "1")] and copy.started == ["r2", "r3"]


def test_another_rejection_of_an_addition_ends_the_exercise() -> None:
    copy = FakeCopy([ApiError(409, "no_majority", "too few answer")])
    with pytest.raises(ApiError, match="too few answer"):
        asyncio.run(copy.join_replicas(("r2",)))
    assert copy.started == []
