"""A read now and a read at a past revision are one function: compared for every read of the state, during a day."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import closing
from typing import Any

import msgspec
import pytest

from forebay.cluster.api.history_service.frames import PastQuery, PastReply, PresentQuery
from forebay.cluster.api.past_reads import HandlerReader
from forebay.cluster.api.statuses import LiveValues
from forebay.cluster.schemas.operations import OPERATIONS
from forebay.cluster.server.applied_log import AppliedEntry
from forebay.replica.state import State
from tests.cluster.api.test_past_reads import target_of
from tests.contract.day import Repeated, requests
from tests.contract.in_memory import InMemory

STATE_READS = [one for one in OPERATIONS.values() if one.live is not None]
"""Reads of the state, which the history service's process answers."""

OF_THE_REPLICA = frozenset({"replicas", "metrics"})
"""Values that there are of the present only, so that no past can be asked about what shows them."""

ASKED = {
    "list_jobs": ({}, {"state": "PENDING", "expected": "yes"}, {"collapse": "yes"}, {"limit": "2", "after": "0"}),
    "list_nodes": ({}, {"state": "IDLE"}, {"limit": "1"}),
    "list_buffers": ({}, {"live": "yes"}, {"limit": "0"}),
    "show_burst": ({}, {"format": "text"}),
}
"""Queries of an operation; others are asked without any."""

EVERY = 9
"""After every so many requests of the day all of them are asked, count."""


class Present:
    """The state of the day's replica, as the process has it."""

    def __init__(self, replica: InMemory) -> None:
        self._replica = replica

    @property
    def state(self) -> State:
        return self._replica.state

    def index_of(self, revision: int) -> int:
        return self._replica.applied_log.index_of(revision)

    def recent(self, first: int) -> list[AppliedEntry] | None:
        return self._replica.applied_log.recent(first)


def test_what_has_no_past_is_what_shows_the_replica_itself() -> None:
    then = {one.name for one in OPERATIONS.values() if "at" in one.query}
    without = {one.name for one in STATE_READS if OF_THE_REPLICA.intersection(one.live or ())}
    assert without == {"show_overview", "show_metrics"} and not then & without


def content_of(found: PastReply) -> Any:
    """Return an answer without the moment of the past that it names."""
    if found.content_type != "application/json" or not found.content:
        return found.content
    body = msgspec.json.decode(found.content)
    if isinstance(body, dict) and found.status == 200:
        body.pop("at", None)
    return body


@pytest.mark.campaign(3)
def test_every_read_of_the_state_is_the_same_now_and_then() -> None:
    compared: Counter[str] = Counter()

    async def run() -> None:
        day, chance = Repeated(), random.Random(5)
        present: Any = Present(day.replica)
        with closing(HandlerReader()) as reader:
            for number, line in enumerate(requests()):
                await day.do(line)
                state = day.replica.state
                if number % EVERY or not state.revision:
                    continue
                for one in STATE_READS:
                    if OF_THE_REPLICA.intersection(one.live or ()):
                        continue
                    role, _, name = chance.choice(("operator operator", "user ada", "user ben")).partition(" ")
                    query = chance.choice(ASKED.get(one.name, ({},)))
                    job = target_of("{id}", day.replica, chance)
                    params = {"id": job} if "{id}" in one.path else {}
                    live = msgspec.msgpack.encode(LiveValues())
                    now = PresentQuery(1, 0, state.at, one.name, params, query, role, name, False, live)
                    then = PastQuery(1, 0, int(state.revision), state.at, one.name, params, query, role, name, False)
                    # The process has no loop of its own around its reads.
                    said = await asyncio.to_thread(reader.present, now, present, day.replica.timeline)
                    said_then = await asyncio.to_thread(reader.past, then, state)
                    assert said.status == said_then.status, (number, one.name, said.content, said_then.content)
                    assert said.content_type == said_then.content_type, one.name
                    assert content_of(said) == content_of(said_then), (number, one.name, role, query)
                    compared[one.name] += said.status < 400

    asyncio.run(run())
    wanted = {one.name for one in STATE_READS if not OF_THE_REPLICA.intersection(one.live or ())}
    assert {name for name, count in compared.items() if count >= 5} == wanted
