"""A site is reminded of a drill scenario that was not run within its period, once, and then weekly."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from forebay.cluster.config import DrillConfig
from forebay.cluster.server.mail import DrillReminder
from forebay.cluster.server.mail.drill_reminder import AGAIN_US, DAY_US, LATE_US, LOOK_S, letters_due
from forebay.cluster.server.mail.sending import Post, SendFailed
from forebay.cluster.server.mail.text import Letter, message_of
from forebay.replica.model import SCENARIOS, Drill, DrillVerdict
from forebay.replica.state import EMPTY, State
from forebay.replica.values import Instant
from tests.clocks import ManualClock
from tests.cluster.harness import story

TRIED = Instant(1_790_000_000_000_000)
DAYS = 30
DUE = Instant(TRIED + DAYS * DAY_US)
CONFIG = DrillConfig(every_days={"switchover": DAYS}, remind=("ops@example.org", "root"))


def state_of(drills: Iterable[Drill] = (), name: str = "demo") -> State:
    kept = EMPTY.drills
    for drill in drills:
        kept = kept.set(drill.id, drill)
    return replace(EMPTY, name=name, cluster_id="cafe", drills=kept)


def drill(number: int = 1, *, verdict: DrillVerdict = DrillVerdict.PASSED, ended: int = TRIED) -> Drill:
    return Drill(
        number, "switchover", "r2", "operator", 60, verdict=verdict, at=Instant(ended), ended_at=Instant(ended)
    )


@pytest.mark.parametrize("verdict", list(DrillVerdict))
def test_only_a_completed_drill_counts_as_run(verdict: DrillVerdict) -> None:
    tried = state_of([drill(verdict=DrillVerdict.FAILED), drill(2, verdict=verdict, ended=TRIED + DAY_US)])
    counts = verdict in (DrillVerdict.PASSED, DrillVerdict.FAILED)
    assert bool(list(letters_due(CONFIG, tried, DUE))) is not counts
    assert bool(list(letters_due(CONFIG, tried, DUE + DAY_US))) is counts


@given(st.integers(-2 * AGAIN_US, 10 * AGAIN_US))
def test_reminder_is_due_at_one_moment_then_weekly_and_never_before(late_us: int) -> None:
    found = list(letters_due(CONFIG, state_of([drill()]), DUE + late_us))
    assert [letter.recipient for letter in found] == (
        list(CONFIG.remind) if late_us >= 0 and late_us % AGAIN_US < LATE_US else []
    )
    weeks = late_us // AGAIN_US
    for letter in found:
        assert letter == next(
            one
            for one in letters_due(CONFIG, state_of([drill()]), DUE + weeks * AGAIN_US)
            if one.recipient == letter.recipient
        ), "every attempt must send the same letter"
    assert len({letter.message_id for letter in found}) == len(found)


def test_scenario_that_never_ran_is_reported_within_a_week() -> None:
    hours = range(0, AGAIN_US, LATE_US)
    found = [letter for hour in hours for letter in letters_due(CONFIG, state_of(), int(TRIED) + hour)]
    assert {letter.recipient for letter in found} == set(CONFIG.remind)
    assert len({letter.message_id for letter in found}) == 2
    assert all("has never run" in letter.body for letter in found)


@given(st.text(min_size=1, max_size=60), st.sampled_from(SCENARIOS))
def test_cluster_name_cannot_become_a_header(name: str, scenario: str) -> None:
    config = DrillConfig(every_days={scenario: 1}, remind=("ops",))
    [letter] = letters_due(config, state_of(name=name), 5 * AGAIN_US + DAY_US)
    raw = message_of(letter, sender="forebay", recipient="ops")
    assert raw.isascii() and raw.count(b"\r\nMessage-ID: ") == 1 and raw.count(b"\r\nSubject: ") == 1


class Site:
    """Leader that sends reminders; the test decides the result of each send."""

    def __init__(self) -> None:
        self.clock = ManualClock(DUE)
        self.taken: list[Letter] = []
        self.post: Post | None = self.take
        self.state = state_of([drill()])
        self.config = CONFIG
        self.reminder = DrillReminder(
            state=lambda: self.state, config=lambda: self.config, post=lambda: self.post, clock=self.clock
        )

    async def take(self, letter: Letter) -> None:
        self.taken.append(letter)

    async def look(self) -> None:
        self.reminder.poll()
        for _ in range(3):
            await asyncio.sleep(0)
        self.clock.advance(LOOK_S)


@story
async def test_leader_sends_a_reminder_once_and_again_after_a_week() -> None:
    site = Site()
    for _ in range(3):
        await site.look()
    assert [letter.recipient for letter in site.taken] == list(CONFIG.remind)
    site.clock.set_wall(Instant(DUE + AGAIN_US))
    await site.look()
    assert len(site.taken) == 4 and len({letter.message_id for letter in site.taken}) == 4


@story
async def test_rejected_reminder_is_retried_while_it_is_due() -> None:
    site = Site()

    async def refuse(letter: Letter) -> None:
        raise SendFailed("greylisted")

    site.post = refuse
    await site.look()
    site.post = site.take
    await site.look()
    assert len(site.taken) == 2
    site.post = None
    site.clock.set_wall(Instant(DUE + AGAIN_US))
    await site.look()
    assert len(site.taken) == 2, "mail is disabled"


@story
async def test_next_leader_sends_the_same_letter() -> None:
    first, second = Site(), Site()
    for site in (first, second):
        await site.look()
        site.reminder.stop()
    assert first.taken == second.taken


@story
async def test_site_without_reminders_gets_none() -> None:
    site = Site()
    site.config = DrillConfig()
    await site.look()
    assert site.taken == []
