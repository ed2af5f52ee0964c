"""Properties over random histories: whatever users, operators, agents and time do, the books balance."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from forebay.replica.fold.apply import apply_batch
from forebay.replica.fold.history import HistoryFold
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.messages.entries import Batch
from forebay.replica.model.buffers import HOLDING, BufferState
from forebay.replica.model.job_states import JobState
from forebay.replica.model.orders import Order
from forebay.replica.model.stages import Stage
from forebay.replica.operations.outcomes import waiting_stage
from forebay.replica.state.derived import derive
from forebay.replica.state.digest import DigestChecker, state_digest
from forebay.replica.state.invariants import find_violations
from forebay.replica.state.state import EMPTY
from forebay.replica.values.errors import Rejection
from forebay.replica.views.jobs import verdicts
from tests.replica.reference.reference_scheduler import next_due, plan
from tests.replica.world import OPERATOR, World, user


class Histories(RuleBasedStateMachine):
    """Three nodes, two pools, users who submit, hold, release and cancel, agents that succeed, fail, repeat and
    restart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.world = self.new_world()
        self.old_orders: list[tuple[str, Order]] = []
        self.instances = 1

    def new_world(self) -> World:
        return World({"fast": 100, "bulk": 50}, granularity=5, nodes=3, cpus=2, stage_retries=1, max_passes=2)

    def is_hopeless(self, job: int) -> bool:
        """Whether the job would wait for ever, however honest everybody is."""
        return self.world.reason(job) in ("DeadLine", "DependencyNeverSatisfied")

    def waits_for_a_person(self, job: int) -> bool:
        """Whether a release changes anything: asked before, since refusals fill the ledger without testing more."""
        record, buffer = self.world.state.jobs[job], self.world.state.buffers.get(job)
        return record.hold > 0 or (buffer is not None and waiting_stage(record, buffer) is not None)

    def some_job(self, data: st.DataObject) -> int | None:
        jobs = sorted(self.world.state.jobs)
        return data.draw(st.sampled_from(jobs)) if jobs else None

    @rule(
        size=st.integers(1, 100),
        pool=st.sampled_from(["fast", "bulk"]),
        priority=st.integers(0, 3),
        limit=st.integers(1, 9999),
    )
    def submits(self, size: int, pool: str, priority: int, limit: int) -> None:
        self.world.try_submit(f"capacity={size} pool={pool}", priority=priority, time_limit_s=limit)

    @rule(begin=st.integers(0, 50), deadline=st.integers(0, 200))
    def submits_without_buffer(self, begin: int, deadline: int) -> None:
        now = self.world.at
        self.world.submit(begin_at=now + begin * 10**6, deadline=now + deadline * 10**6 if deadline else 0, cpus=2)

    @rule(data=st.data(), hurry=st.booleans())
    def cancels(self, data: st.DataObject, hurry: bool) -> None:
        job = self.some_job(data)
        if job is not None:
            self.world.settle(c.CancelJob(job, hurry), user())

    @rule(data=st.data(), release=st.booleans(), operator=st.booleans())
    def holds_or_releases(self, data: st.DataObject, release: bool, operator: bool) -> None:
        job = self.some_job(data)
        if job is not None:
            self.world.settle(c.ReleaseJob(job) if release else c.HoldJob(job), OPERATOR if operator else user())

    @rule(data=st.data(), outcome=st.sampled_from(["done", "failed", "started", "ended"]))
    def reports(self, data: st.DataObject, outcome: str) -> None:
        orders = [(node, order) for node in sorted(self.world.state.nodes) for order in self.world.orders(node)]
        if not orders:
            return
        node, order = data.draw(st.sampled_from(orders))
        self.old_orders.append((node, order))
        self.report(node, order, outcome)

    @rule(data=st.data(), outcome=st.sampled_from(["done", "failed", "started", "ended"]))
    def reports_late(self, data: st.DataObject, outcome: str) -> None:
        if self.old_orders:
            node, order = data.draw(st.sampled_from(self.old_orders))
            self.report(node, order, outcome)

    def report(self, node: str, order: Order, outcome: str) -> None:
        results: dict[str, c.OperationResult] = {
            "done": c.OperationDone(1, 1),
            "failed": c.OperationFailed("it broke"),
            "started": c.ScriptStarted(),
            "ended": c.ScriptEnded(JobState.FAILED, 1),
        }
        actor = c.Actor(c.ActorRole.AGENT, node)
        report = c.ReportOperation(node, order.job, order.attempt, Stage[order.stage.upper()], results[outcome])
        self.world.settle(report, actor)

    @rule(
        node=st.sampled_from(["n1", "n2", "n3"]),
        what=st.sampled_from(["drain", "resume", "down", "back", "restart", "lost"]),
    )
    def changes_a_node(self, node: str, what: str) -> None:
        if what == "restart":
            self.instances += 1
            self.world.register(node, cpus=2, instance=f"i{self.instances}")
        elif what in ("drain", "resume"):
            self.world.settle(c.DrainNode(node, "x") if what == "drain" else c.ResumeNode(node))
        elif what == "lost":
            self.world.settle(c.LoseNode(node, "x"))
        else:
            self.world.settle(c.MarkNodeDown(node, "x") if what == "down" else c.MarkNodeBack(node), c.CONTROLLER)

    @rule(seconds=st.sampled_from([0.5, 3, 100, 1000, 100_000]))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(quantity=st.integers(0, 200))
    def resizes_a_pool(self, quantity: int) -> None:
        pool = self.world.state.pools["bulk"]
        # Growing only: shrinking below what is held is checked by itself, and would void the check in World.commit.
        quantity = max(quantity, pool.quantity_bytes)
        self.world.settle(c.SetPool(msgspec.structs.replace(pool, quantity_bytes=quantity)))

    @invariant()
    def reasons_are_those_of_the_gates(self) -> None:
        said = verdicts(self.world.state)
        assert set(said) == set(self.world.state.unfinished)
        for job_id, verdict in said.items():
            job, buffer = self.world.state.jobs[job_id], self.world.state.buffers.get(job_id)
            assert verdict.reason
            if job.state is JobState.CONFIGURING:
                assert verdict.reason == ("NodeDown" if self.world.state.nodes[job.node].down else "None")
            native = (
                job.external_job is None
            )  # nothing holds an external job back whose scheduler has not asked for more
            waits = buffer is not None and native and job.state is JobState.PENDING and not job.hold
            if waits and buffer is not None and verdict.reason == "None":
                assert buffer.state is BufferState.STAGED_IN

    @invariant()
    def a_pass_is_at_rest_and_says_when_it_will_not_be(self) -> None:
        assert plan(self.world.state, self.world.at).events == ()
        due = next_due(self.world.state, self.world.at)
        assert due is None or due > self.world.at

    @invariant()
    def no_job_runs_without_its_data(self) -> None:
        for job in self.world.state.jobs.values():
            if job.request.buffer is not None and job.state in (JobState.CONFIGURING, JobState.RUNNING):
                assert self.world.state.buffers[job.id].state in HOLDING

    def a_builder_for_all_batches_comes_to_what_one_for_each_does(self) -> None:
        """Whoever looks at the state, or at none but the last; checkpoints are seen by both."""
        never, looked, single = HistoryFold(EMPTY), HistoryFold(EMPTY), EMPTY
        digests = DigestChecker(EMPTY)
        for index, batch in enumerate(self.world.ledger, start=1):
            void = msgspec.structs.replace(batch, base=batch.base + 1)
            for history in (never, looked):
                assert not history.take(index, void), "it was decided on another revision"
                assert history.take(index, batch)
            before, single = single, apply_batch(single, batch) or single
            digests.observe(index, before, batch, single)
            assert (never.revision, never.at) == (single.revision, single.at)
            if index % 3:
                assert looked.state == single
        assert never.state == looked.state == single
        for history in (never, looked):
            assert (history.digests.recorded, history.digests.compared) == (digests.recorded, digests.compared)

    def teardown(self) -> None:
        """At the end: replay gives the same digest, and with honest agents everything comes to an end."""
        world = self.world
        replayed = EMPTY
        runs: Counter[int] = Counter()
        for batch in world.ledger:
            decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=Batch)
            assert decoded == batch
            following = apply_batch(replayed, decoded)
            assert following is not None
            replayed = following
            for event in (event for entry in batch.entries for event in entry.events):
                if isinstance(event, e.RunStarted):
                    runs[event.job] += 1
                    assert runs[event.job] == 1, "a script was started twice"
                elif isinstance(event, e.RunRequeued):
                    runs[event.job] = 0
        assert state_digest(replayed) == state_digest(world.state)
        assert derive(replayed) == replayed
        self.a_builder_for_all_batches_comes_to_what_one_for_each_does()
        for node in sorted(world.state.nodes):
            self.instances += 1
            world.settle(c.ResumeNode(node))
            world.register(node, cpus=2, instance=f"i{self.instances}")
        for _ in range(3 * len(world.state.jobs) + 50):
            if not world.state.unfinished:
                break
            for job in sorted(world.state.unfinished):
                if job in world.state.unfinished:
                    if self.waits_for_a_person(job):
                        world.settle(c.ReleaseJob(job))
                    if self.is_hopeless(job):
                        world.settle(c.CancelJob(job))
            for node in sorted(world.state.nodes):
                for order in world.orders(node):
                    if any(current == order for current in world.orders(node)):
                        if order.suspend:
                            world.settle(c.ResumeJob(order.job))
                        if self.is_given_up(node, order):
                            self.report(node, order, "done")
                        else:
                            world.done(order.job)
            world.advance(500)
        assert not world.state.unfinished, [
            world.shown(job) for job in world.state.unfinished if job in world.state.buffers
        ]
        kept: Counter[str] = Counter()
        for buffer in world.state.persistent.values():
            assert buffer.state is BufferState.ALLOCATED
            kept[buffer.pool] += buffer.granted_bytes
        assert dict(world.state.held_bytes) == dict(kept)
        assert not world.state.abandoned, "every node has returned"
        assert find_violations(world.state) == []

    def is_given_up(self, node: str, order: Order) -> bool:
        given_up = self.world.state.abandoned.get(node)
        return given_up is not None and given_up.find(order.job, order.attempt) is not None


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase
TestHistories.pytestmark = [pytest.mark.campaign(3)]  # type: ignore[attr-defined]


def test_the_same_command_id_gets_the_first_answer_and_changes_nothing() -> None:
    world = World()
    command_id = b"\x01" * 16
    spec = msgspec.structs.replace(world_spec(), name="once")
    first = world.settle(c.SubmitJob(spec), user(), command_id)
    revision = world.state.revision
    assert world.settle(c.SubmitJob(spec), user(), command_id) == first
    refused = b"\x02" * 16
    rejection = world.settle(c.CancelJob(99), user(), refused)
    assert isinstance(rejection, Rejection)
    world.submit()
    assert world.settle(c.CancelJob(99), user(), refused) == rejection
    assert world.state.revision > revision and len(world.state.jobs) == 2


def world_spec() -> object:
    from forebay.replica.model.requests import JobRequest
    from tests.replica.world import SCRIPT

    return JobRequest("job", "alan", SCRIPT, "/out", 60)


def test_a_command_id_is_for_one_command_of_one_actor() -> None:
    from forebay.replica.fold.dedup_cache import look_up_reply
    from forebay.replica.values.errors import RejectionCode

    world = World()
    job = world.submit()
    command_id = b"\x03" * 16
    world.settle(c.HoldJob(job), user(), command_id)
    again = look_up_reply(world.state, c.Request(command_id, user(), c.HoldJob(job)))
    assert again == world.state.receipts[command_id]
    for actor, command in ((OPERATOR, c.HoldJob(job)), (user(), c.ReleaseJob(job)), (user(), c.HoldJob(job + 1))):
        other = look_up_reply(world.state, c.Request(command_id, actor, command))
        assert isinstance(other, Rejection) and other.code is RejectionCode.COMMAND_ID_REUSED
