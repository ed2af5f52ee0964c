"""Every matching event arrives at least once, and first arrivals are in order, whatever leaders and receivers do."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from forebay.cluster.api.sinks import delivery as delivery_module
from forebay.cluster.api.sinks.cloud_events import GAP_TYPE, incarnation_of
from forebay.cluster.api.sinks.delivery import GONE_RETRY_S, REFUSED_RETRY_S, RETRY_S, RETRY_S_MAX, SinkState
from forebay.cluster.api.sinks.sending import ACCEPTED, PostOutcome, PostResult
from forebay.cluster.api.sinks.sinks import ADVANCE_S, ADVANCE_SKIPPED, FORMER_KEPT_S, EventSinks
from forebay.cluster.api.sinks.source import LedgerSource, Position
from forebay.cluster.config.sinks import SinkConfig
from forebay.cluster.schemas.event_kinds import EVENT_KINDS, NEVER_DELIVERED, kind_name, selected_kinds
from forebay.cluster.server.applied_log import AppliedEntry, AppliedLog, Transition
from forebay.cluster.server.pending import NotLeading, Settlement
from forebay.cluster.system.eventloop.slices import Slices
from forebay.replica.messages import Batch, Entry, is_routine
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model.job_states import JobState
from forebay.replica.model.nodes import Recovery
from forebay.replica.values.errors import Rejection
from forebay.replica.values.limits import SINK_MARKS_MAX
from forebay.replica.values.units import Revision
from forebay.wal import Gap
from tests.clocks import ManualClock
from tests.cluster.harness import story
from tests.cluster.loop_watch import LoopWatch
from tests.replica.world import World

LINES_MAX = 50_000
"""Lines of Python in one callback, count: some five milliseconds."""

STEPS = 400
"""Turns of the loop in which everything that can happen does."""

PLACE = Path("/nowhere/secret")


def sink(name: str = "audit", **more: Any) -> SinkConfig:
    return SinkConfig(name, "https://events.example.org", PLACE, **more)


class Leader:
    """A replica that leads, or believes so."""

    def __init__(self, cluster: Cluster, sinks: tuple[SinkConfig, ...]) -> None:
        self.leads = True
        """Whether it believes so."""
        self.is_heard = True
        """Whether its commands are settled."""
        self.cluster = cluster
        self.pauses: list[float] = []
        self.sinks = EventSinks(
            sinks,
            state=lambda: cluster.world.state,
            leads=lambda: self.leads,
            submit=self.submit,
            source=lambda name: LedgerSource(
                lambda: cluster.world.state, cluster.log, cluster.ledger, lambda: cluster.slices.work(name)
            ),
            post=self.post,
            clock=cluster.clock,
            sleep=self.sleep,
        )

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)

    async def post(self, sink: SinkConfig, body: bytes) -> PostResult:
        return await self.cluster.post(sink, body)

    def submit(self, request: c.Request) -> asyncio.Future[Settlement]:
        if not self.leads:
            raise NotLeading(None)
        answer: asyncio.Future[Settlement] = asyncio.get_running_loop().create_future()
        if not self.is_heard:
            answer.set_exception(NotLeading(None))
            return answer
        outcome = self.cluster.settle(request.command, request.actor)
        state = self.cluster.world.state
        answer.set_result(
            Settlement(state.revision, 0, outcome if isinstance(outcome, Rejection) else None, state, True)
        )
        return answer


class Cluster:
    """A ledger, the leaders that deliver its events, and the receiver, which checks every mark against arrivals."""

    def __init__(self) -> None:
        self.world = World(cpus=32)
        self.clock = ManualClock(self.world.at)
        self.slices = Slices()
        self.ledger: Any = SimpleNamespace(gaps=lambda: (), pruned_range=lambda: None)
        self.log = AppliedLog(None, self.ledger, index=0, revision=Revision(0))  # type: ignore[arg-type]
        self.entries: list[AppliedEntry] = []
        self.arrived: dict[str, list[dict[str, Any]]] = {}
        """Sink -> events by first arrival."""
        self.ids: set[tuple[str, str]] = set()
        self.posts: list[int] = []
        self.post: Callable[[SinkConfig, bytes], Awaitable[PostResult]] = self.accept
        self.begun: dict[str, int] = {}
        """Sink -> mark at which it began."""
        self.feed()

    def settle(self, command: c.Command, actor: c.Actor) -> Rejection | int:
        outcome = self.world.settle(command, actor)
        self.feed()
        return outcome

    def feed(self) -> None:
        """Apply what was settled, and check that no mark is ahead of its receiver."""
        for batch in self.world.ledger[len(self.entries) :]:
            index, revision = len(self.entries) + 1, Revision(batch.base + len(batch.entries))
            entry = AppliedEntry(index, 1, b"", Revision(batch.base), revision, batch, False, 1)
            self.entries.append(entry)
            self.log.applied(Transition(self.world.state, self.world.state, entry))
        for name, mark in self.world.state.sink_marks.items():
            self.begun.setdefault(name, mark)

    def expected(self, config: SinkConfig, until: int | None = None) -> list[str]:
        """Return the IDs that a sink has to be sent up to a revision."""
        kinds, found = selected_kinds(config.kinds), []
        for entry in self.entries:
            assert entry.batch is not None
            for place, command in enumerate(entry.batch.entries):
                revision = entry.base + place + 1
                if self.begun[config.name] < revision <= (until or revision):
                    found += [f"id/{revision}/{n}" for n, one in enumerate(command.events) if type(one) in kinds]
        return found

    def take(self, sink: SinkConfig, body: bytes) -> None:
        events = json.loads(body)
        assert 0 < len(events) <= sink.batch
        self.posts.append(len(events))
        for event in events:
            if (sink.name, event["id"]) not in self.ids:
                self.ids.add((sink.name, event["id"]))
                self.arrived.setdefault(sink.name, []).append(event)

    def first_arrivals(self, name: str = "audit") -> list[str]:
        return [event["id"] for event in self.arrived.get(name, ())]

    async def accept(self, sink: SinkConfig, body: bytes) -> PostResult:
        self.take(sink, body)
        return ACCEPTED

    def check(self, *sinks: SinkConfig) -> None:
        """Check that first arrivals are in order without a gap, and contain everything up to the mark."""
        for config in sinks:
            if config.name not in self.begun:
                continue
            due, found = self.expected(config), self.first_arrivals(config.name)
            assert found == due[: len(found)]
            mark = self.world.state.sink_marks.get(config.name, 0)
            assert found[: len(self.expected(config, mark))] == self.expected(config, mark), "the mark is ahead"

    async def rest(self, *leaders: Leader, steps: int = STEPS) -> None:
        for leader in leaders:
            leader.sinks.poll()
        for _ in range(steps):
            await asyncio.sleep(0)

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.world.advance(seconds)

    def job(self, *, ends: bool = True) -> None:
        job = self.world.submit()
        if ends and any(order.job == job for order in self.world.orders()):
            self.world.report(job, c.ScriptStarted())
            self.world.report(job, c.ScriptEnded(JobState.COMPLETED))
        self.feed()


class Life:
    """One random history: commands, requests that fail before or after the receiver, and leaders that die or linger."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cluster = Cluster()
        filters: list[tuple[str, ...]] = [(), ("job",), ("job_submitted", "node"), ("pool", "state_digested")]
        self.sinks = tuple(
            sink(f"s{number}", kinds=self.random.choice(filters), batch=self.random.choice([1, 2, 7, 100]))
            for number in range(self.random.randint(1, 3))
        )
        self.cluster.post = self.post
        self.leaders: list[Leader] = []
        self.elect()

    async def post(self, sink: SinkConfig, body: bytes) -> PostResult:
        for _ in range(self.random.choice([0, 1, 5, 40])):
            await asyncio.sleep(0)
        fate = self.random.random()
        if fate < 0.2:
            return PostResult(self.random.choice([PostOutcome.FAILED, PostOutcome.REFUSED, PostOutcome.GONE]), "no")
        self.cluster.take(sink, body)
        for _ in range(self.random.choice([0, 1, 5, 40])):
            await asyncio.sleep(0)
        return PostResult(PostOutcome.FAILED, "the reply was lost") if fate < 0.4 else ACCEPTED

    def elect(self) -> None:
        """Change the leader: the former one dies, notices it later, or delivers on without being heard."""
        for former in self.leaders:
            former.is_heard = False
            if self.random.random() < 0.5:
                former.leads = False
                if self.random.random() < 0.5:
                    former.sinks.stop()
        self.leaders.append(Leader(self.cluster, self.sinks))

    async def live(self) -> None:
        for _ in range(self.random.randint(10, 30)):
            match self.random.randint(0, 7):
                case 0 | 1:
                    self.cluster.job(ends=self.random.random() < 0.5)
                case 2:
                    digest = c.RecordStateDigest(self.cluster.world.state.revision, b"12345678" * 4)
                    self.cluster.settle(digest, c.CONTROLLER)
                case 3:
                    self.cluster.settle(c.DrainNode("n1", "why"), c.Actor(c.ActorRole.OPERATOR, "op"))
                case 4:
                    self.elect()
                case _:
                    self.cluster.advance(self.random.choice([0.5, 6.0]))
            await self.cluster.rest(*self.leaders, steps=self.random.choice([0, 3, 60]))
            self.cluster.check(*self.sinks)
        for leader in self.leaders:
            leader.sinks.stop()
        self.cluster.post = self.cluster.accept
        last = Leader(self.cluster, self.sinks)
        for _ in range(4):
            self.cluster.advance(ADVANCE_S)
            await self.cluster.rest(last)
        self.cluster.check(*self.sinks)
        for one in self.sinks:
            assert self.cluster.first_arrivals(one.name) == self.cluster.expected(one)
            assert set(last.sinks.deliveries) == {one.name for one in self.sinks}
        last.sinks.stop()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_every_event_arrives_in_order_through_any_history_of_leaders(seed: int) -> None:
    async def live() -> None:
        await Life(seed).live()

    asyncio.run(live())


@story
async def test_a_sink_begins_where_the_leader_first_sees_it_and_an_idle_cluster_writes_nothing() -> None:
    cluster, config = Cluster(), sink()
    cluster.job()
    begin = cluster.world.state.revision
    leader = Leader(cluster, (config,))
    await cluster.rest(leader)
    assert dict(cluster.world.state.sink_marks) == {"audit": begin}
    assert not cluster.posts
    cluster.job()
    done = cluster.world.state.revision
    await cluster.rest(leader)
    assert cluster.first_arrivals() == cluster.expected(config) != []
    assert cluster.world.state.sink_marks["audit"] == begin, "not yet due"
    for _ in range(20):
        cluster.advance(3600)
        await cluster.rest(leader, steps=50)
        cluster.settle(c.RecordStateDigest(cluster.world.state.revision, bytes(32)), c.CONTROLLER)
    assert cluster.world.state.sink_marks["audit"] >= done
    names = [entry.command for batch in cluster.world.ledger for entry in batch.entries]
    assert names.count("advance_sinks") == 2, "one to begin, one for the job, none for bookkeeping"
    leader.sinks.stop()


@story
async def test_a_filter_that_matches_nothing_still_advances_now_and_then() -> None:
    cluster, config = Cluster(), sink(kinds=("drill",))
    leader = Leader(cluster, (config,))
    await cluster.rest(leader)
    begin = cluster.world.state.sink_marks["audit"]
    while cluster.world.state.revision < begin + ADVANCE_SKIPPED // 2:
        cluster.settle(c.DrainNode("n9", "there is no such node"), c.Actor(c.ActorRole.OPERATOR, "op"))
    cluster.advance(3600)
    await cluster.rest(leader)
    assert cluster.world.state.sink_marks["audit"] == begin
    while cluster.world.state.revision < begin + ADVANCE_SKIPPED + 10:
        cluster.settle(c.DrainNode("n9", "there is no such node"), c.Actor(c.ActorRole.OPERATOR, "op"))
    await cluster.rest(leader)
    await cluster.rest(leader)
    assert cluster.world.state.sink_marks["audit"] > begin + ADVANCE_SKIPPED
    assert not cluster.posts
    leader.sinks.stop()


@story
async def test_the_mark_of_a_former_sink_outlives_a_rolling_change_of_the_configuration() -> None:
    cluster, config = Cluster(), sink()
    leader = Leader(cluster, (config,))
    await cluster.rest(leader)
    leader.sinks.renew(())
    assert not leader.sinks.deliveries
    cluster.job()
    cluster.advance(FORMER_KEPT_S - 1)
    await cluster.rest(leader)
    assert "audit" in cluster.world.state.sink_marks
    leader.sinks.renew((config,))
    await cluster.rest(leader)
    assert cluster.first_arrivals() == cluster.expected(config) != []
    leader.sinks.renew(())
    for _ in range(2):
        cluster.advance(FORMER_KEPT_S)
        await cluster.rest(leader)
    assert not cluster.world.state.sink_marks


@story
async def test_former_marks_give_way_at_once_if_new_sinks_need_their_space() -> None:
    cluster = Cluster()
    leader = Leader(cluster, ())
    for first in range(0, 3 * 8, 8):
        leader.sinks.renew(tuple(sink(f"s{first + number}") for number in range(8)))
        await cluster.rest(leader)
        assert {f"s{first + number}" for number in range(8)} <= set(cluster.world.state.sink_marks)
        assert len(cluster.world.state.sink_marks) <= SINK_MARKS_MAX
    leader.sinks.stop()


@story
async def test_a_leader_that_is_deposed_stops_and_one_that_leads_again_continues() -> None:
    cluster, config = Cluster(), sink()
    leader = Leader(cluster, (config,))
    await cluster.rest(leader)
    leader.leads = False
    cluster.job()
    await cluster.rest()
    assert not cluster.posts and not leader.sinks.deliveries["audit"].is_running
    leader.leads = True
    await cluster.rest(leader)
    assert cluster.first_arrivals() == cluster.expected(config) != []
    leader.leads = False
    leader.sinks.poll()
    assert not leader.sinks.deliveries


@story
async def test_a_rejected_mark_is_not_submitted_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    monkeypatch.setattr("forebay.replica.decide.sinks.SINK_MARKS_MAX", 0)
    leader = Leader(cluster, (sink(),))
    before = cluster.world.state.revision
    await cluster.rest(leader)
    assert not cluster.world.state.sink_marks
    assert cluster.world.state.revision <= before + 2, "one command, and a cycle at most"


@story
async def test_a_changed_sink_continues_from_its_position_with_its_new_filter() -> None:
    cluster, config = Cluster(), sink()
    leader = Leader(cluster, (config,))
    await cluster.rest(leader)
    cluster.job()
    await cluster.rest(leader)
    before = len(cluster.first_arrivals())
    leader.sinks.renew((sink(kinds=("job_submitted",)),))
    cluster.job()
    await cluster.rest(leader)
    events = cluster.arrived["audit"][before:]
    assert [event["type"] for event in events] == ["forebay.job_submitted"]
    leader.sinks.stop()


@story
async def test_pauses_grow_and_a_receivers_wish_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_module, "JITTER", 0.0)
    cluster, config = Cluster(), sink()
    leader = Leader(cluster, (config,))
    await cluster.rest(leader)
    results = [PostResult(PostOutcome.FAILED, "status 503")] * 9
    results += [PostResult(PostOutcome.FAILED, "status 503", 1234.0)]
    results += [PostResult(PostOutcome.REFUSED, "status 400"), PostResult(PostOutcome.GONE, "status 410")]
    states: list[SinkState] = []

    async def answer(sink: SinkConfig, body: bytes) -> PostResult:
        states.append(leader.sinks.deliveries["audit"].state)
        if not results:
            return await cluster.accept(sink, body)
        return results.pop(0)

    cluster.post = answer
    cluster.job()
    leader.pauses.clear()
    await cluster.rest(leader, steps=2000)
    pauses = [pause for pause in leader.pauses if pause != delivery_module.LINGER_S]
    doubled = [min(RETRY_S_MAX, RETRY_S * 2.0**number) for number in range(9)]
    assert pauses == [*doubled, 1234.0, REFUSED_RETRY_S, GONE_RETRY_S]
    assert states[1] is SinkState.FAILING and states[11] is SinkState.REFUSED and states[12] is SinkState.GONE
    delivery = leader.sinks.deliveries["audit"]
    assert (delivery.state, delivery.failures, delivery.error) == (SinkState.ACTIVE, 12, "status 410")
    assert cluster.first_arrivals() == cluster.expected(config)
    leader.sinks.stop()


@story
async def test_pruned_revisions_become_a_gap_that_names_them_and_missing_ones_are_waited_for() -> None:
    cluster, config = Cluster(), sink()
    leader = Leader(cluster, (config,))
    await cluster.rest(leader)
    leader.sinks.stop()
    begin = cluster.world.state.sink_marks["audit"]
    for _ in range(3):
        cluster.job()
    kept_from = len(cluster.entries) - 3
    kept = cluster.entries[kept_from:]
    last = kept[0].base
    gap = Gap(1, kept[0].index - 1, 0, last)
    pruned: Any = None

    def absent(revision: int) -> int:
        raise LookupError(f"revision {revision} is not available")

    cluster.ledger = SimpleNamespace(
        gaps=lambda: (gap,), pruned_range=lambda: pruned, describe_location=lambda revision: "archive a",
        index_of_revision=absent, applied_revision=10**9,
    )  # fmt: skip
    cluster.log = AppliedLog(None, cluster.ledger, index=gap.last_index, revision=Revision(last))  # type: ignore[arg-type]
    for entry in kept:
        cluster.log.applied(Transition(cluster.world.state, cluster.world.state, entry))
    leader = Leader(cluster, (config,))
    await cluster.rest(leader)
    assert leader.sinks.deliveries["audit"].state is SinkState.FAILING and not cluster.arrived
    pruned = SimpleNamespace(below=gap.last_index + 1)
    await cluster.rest(leader)
    first, *rest = cluster.arrived["audit"]
    assert first["type"] == GAP_TYPE and first["subject"] == "sink/audit"
    assert first["id"] == f"id/{begin + 1}-{last}/gap"
    assert (first["data"]["first_revision"], first["data"]["last_revision"]) == (begin + 1, last)
    assert [event["id"] for event in rest] == [one for one in cluster.expected(config) if int(one.split("/")[1]) > last]
    assert leader.sinks.deliveries["audit"].state is SinkState.ACTIVE
    leader.sinks.stop()


@pytest.mark.parametrize("kinds", [("job_submitted",), ("mail",), ()])
def test_reading_a_long_ledger_never_holds_the_loop(kinds: tuple[str, ...]) -> None:
    """Every batch has the most commands, with many events each: most filters match none of them, one matches all."""
    sent = c.kind_of(c.SettleMails(()))
    events = tuple(e.MailSent(1, "1.begin.1") for _ in range(100))
    command = Entry(b"x" * 16, c.CONTROLLER, sent, events, None, b"")
    selected = frozenset({e.MailSent}) if kinds == ("mail",) else selected_kinds(kinds) - {e.MailSent}

    async def read() -> int:
        cluster = Cluster()
        begin, revision = cluster.log.last_index, cluster.world.state.revision
        first = Position(revision)
        for number in range(20):
            batch = Batch(Revision(revision), cluster.world.at, (command,) * 512)
            revision += 512
            index = begin + number + 1
            applied = AppliedEntry(index, 1, b"", batch.base, Revision(revision), batch, False, 1)
            cluster.log.applied(Transition(cluster.world.state, cluster.world.state, applied))
        state = replace(cluster.world.state, revision=Revision(revision))
        source = LedgerSource(lambda: state, cluster.log, cluster.ledger, lambda: cluster.slices.work("sink"))
        found, position = 0, first
        while found < 3_000 and (batch_read := await source.read(position, selected, 1_000)) is not None:
            found, position = found + len(batch_read.events), batch_read.after
        return found

    with LoopWatch().watching() as watch:
        found = asyncio.run(read())
    assert (found >= 3_000) is (kinds == ("mail",))
    assert watch.callback.lines < LINES_MAX


def test_filters_select_groups_and_events_and_never_the_sinks_own() -> None:
    usual = {kind_name(kind) for kind in selected_kinds(())}
    assert {"job_submitted", "pool_set", "drill_started", "site_configured", "mail_sent"} <= usual
    assert not {"state_digested", "session_opened", "sink_advanced", "sink_removed"} & usual
    assert all(not is_routine(kind) for kind in selected_kinds(()))
    assert {kind_name(kind) for kind in selected_kinds(("pool", "state_digested"))} == {
        *("pool_set", "pool_removed", "state_digested")
    }
    assert {kind_name(kind) for kind in selected_kinds(("cluster",))} == {
        *("cluster_founded", "feature_level_raised", "site_configured", "transfer_rules_set", "scheduling_rules_set"),
        *("cluster_recovered", "usage_reset", "external_job_missing", "certificate_revoked", "certificates_unrevoked"),
        "clock_set",
    }
    assert not NEVER_DELIVERED & set(EVENT_KINDS.values())
    with pytest.raises(LookupError):
        selected_kinds(("sink_advanced",))


def test_an_event_belongs_to_the_incarnation_that_wrote_its_entry() -> None:
    recoveries = {n: Recovery(n, "00", "op", "r1", kept_index=index) for n, index in ((2, 100), (3, 250))}
    assert [incarnation_of(recoveries, index) for index in (1, 100, 101, 250, 251, None)] == [1, 1, 2, 2, 3, 3]
    assert incarnation_of({}, 7) == incarnation_of({}, None) == 1
