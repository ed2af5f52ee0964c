"""Laws of the scheduling index with limits, licences, reservations and preemption."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from forebay.replica.fold.fold import fold
from forebay.replica.grammar.directives import parse_request
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model.accounts import Account, AccountUser, License, Limit, LimitKind, Qos, SchedulingRules
from forebay.replica.model.buffers import BufferState
from forebay.replica.model.job_states import JobState
from forebay.replica.model.partitions import Partition, PartitionState
from forebay.replica.model.requests import BufferRequest, Dependency, DependencyKind, JobChange, JobOptions, JobRequest
from forebay.replica.model.reservations import Reservation, ReservedSpace
from forebay.replica.scheduler import admission, scheduling_cycle
from forebay.replica.scheduler.index import SchedulingIndex
from forebay.replica.scheduler.scheduling_cycle import run_cycle, verdicts_of
from forebay.replica.state.invariants import find_violations
from forebay.replica.state.state import State
from forebay.replica.values.units import NEVER, Instant, seconds
from tests.replica.reference import reference_scheduler
from tests.replica.reference.reference_scheduler import next_due, plan
from tests.replica.reference.reference_scheduler import run_cycle as reference_events
from tests.replica.scheduler.contents import contents
from tests.replica.scheduler.test_index import IndexHistories, crowd, happening, node_happening, submitted
from tests.replica.world import OPERATOR, SCRIPT, START, user

USERS = ("alan", "eve", "bo")
POOLS = ("p0", "p1", "p2")


def some_limits(random: Random, kinds: tuple[LimitKind, ...], most: int = 400) -> tuple[Limit, ...]:
    chosen = random.sample(kinds, random.randrange(min(3, len(kinds)) + 1))
    return tuple(
        Limit(kind, random.choice((*POOLS, "native")), random.randrange(most) * (50 if "MINUTES" in kind.name else 1))
        if kind.counts_space
        else Limit(kind, "", random.randrange(1, 12))
        for kind in chosen
    )


K = LimitKind
QOS_KINDS = (
    K.GRP_BB,
    K.GRP_BB_MINUTES,
    K.GRP_BB_RUN_MINUTES,
    K.MAX_BB_PER_USER,
    K.MAX_BB_PER_ACCOUNT,
    K.GRP_NODES,
    K.GRP_CPUS,
)
ACCOUNT_KINDS = (K.GRP_BB, K.GRP_BB_MINUTES, K.GRP_BB_RUN_MINUTES, K.MAX_JOBS_PER_USER, K.GRP_NODES, K.MAX_BB_PER_JOB)


def change(random: Random, state: State, at: Instant) -> tuple[e.Event, ...]:
    """Return what an operator might change."""
    what = random.randrange(11)
    name = str(random.randrange(3))
    if what == 8:
        nodes = tuple(sorted(random.sample(sorted(state.nodes), random.randrange(len(state.nodes) + 1))))
        every, up = not random.randrange(4), random.choice((PartitionState.UP, *PartitionState))
        limits = {"max_time_s": random.choice((0, 0, 60)), "max_nodes": random.choice((None, None, 0))}
        users = USERS[:2] if not random.randrange(4) else ()
        return (e.PartitionSet(Partition(f"t{name}", () if every else nodes, every, up, users=users, **limits)),)
    if what == 9 and state.partitions and not random.randrange(3):
        return (e.PartitionDeleted(random.choice(sorted(state.partitions))),)
    if what == 10:
        pool = random.choice(sorted(state.pools))
        size = random.choice((20, 100, 250, 1_000, 5_000))
        return (e.PoolSet(msgspec.structs.replace(state.pools[pool], quantity_bytes=size)),)
    if what == 0:
        members = tuple(
            AccountUser(user, some_limits(random, ACCOUNT_KINDS)) for user in USERS[: random.randrange(1, 4)]
        )
        parent = "a0" if name != "0" and "a0" in state.accounts else ""
        return (e.AccountSet(Account(f"a{name}", parent, members, some_limits(random, ACCOUNT_KINDS, 900))),)
    if what == 1:
        return (e.QosSet(Qos(f"q{name}", random.randrange(3), some_limits(random, QOS_KINDS))),)
    if what == 2:
        return (e.LicenseSet(License(f"l{name}", random.randrange(4))),)
    if what == 3 and f"q{name}" in state.qos and not random.randrange(3):
        return (e.QosDeleted(f"q{name}"),)
    if what == 4:
        rules = SchedulingRules(revocations_max=random.randrange(3), revoke_after_s=random.choice((0, 30)))
        return (e.SchedulingRulesSet(rules),)
    if what == 5 and f"r{name}" in state.reservations and not random.randrange(3):
        return (e.ReservationDeleted(f"r{name}"),)
    start_at = Instant(at + seconds(random.choice((-5, 20, 400))))
    space = tuple(ReservedSpace(pool, random.randrange(20, 200)) for pool in random.sample(POOLS, 2))
    end_at = Instant(at + seconds(random.choice((500, 3_000))))
    active = start_at <= at and bool(random.randrange(2))
    return (e.ReservationSet(Reservation(f"r{name}", start_at, end_at, USERS[:2], ("a1",), space, active)),)


def with_options(random: Random, submit: e.JobSubmitted) -> tuple[e.Event, ...]:
    submit = msgspec.structs.replace(submit, request=msgspec.structs.replace(submit.request, user=random.choice(USERS)))
    if not random.randrange(4):
        return (submit,)
    options = JobOptions(
        account=random.choice(("", "a0", "a1", "a2")),
        qos=random.choice(("", "q0", "q1")),
        licenses=((f"l{random.randrange(3)}", random.randrange(1, 3)),) if not random.randrange(4) else (),
        reservation=f"r{random.randrange(3)}" if not random.randrange(6) else "",
        nice=random.randrange(-2, 3),
        partition=f"t{random.randrange(3)}" if random.randrange(3) else "",
        singleton=not random.randrange(8),
        any_of=not random.randrange(4),
    )
    return (msgspec.structs.replace(submit, request=msgspec.structs.replace(submit.request, options=options)),)


def update(random: Random, state: State) -> tuple[e.Event, ...]:
    """Return what a user might change of a job that waits."""
    waiting = [job for job in sorted(state.unfinished) if state.jobs[job].state is JobState.PENDING]
    if not waiting:
        return ()
    job_id = random.choice(waiting)
    job, buffer = state.jobs[job_id], state.buffers.get(job_id)
    if not random.randrange(4) and (buffer is None or buffer.state is BufferState.PENDING):
        size = random.choice((0, 10, 200))
        request = BufferRequest("", size, (), "scratch", (), (), "")
        pool = random.choice(POOLS) if size else ""
        return (e.JobUpdated(job_id, buffer=request, pool=pool, granted_bytes=size),)
    kinds = [kind for kind in DependencyKind if not kind.is_for_array]
    before = [other for other in (job_id // 2, job_id - 1) if other > 0]
    others = tuple(Dependency(random.choice(kinds), other) for other in before[: random.randrange(3)])
    changes: dict[str, object] = {
        "name": random.choice(("job", "daily", "weekly")),
        "priority": random.randrange(4),
        "time_limit_s": random.choice((10, 3_600)),
        "begin_at": Instant(state.at + random.choice((0, 10_000_000))),
        "deadline": random.choice((NEVER, Instant(state.at + seconds(100)))),
        "dependencies": others,
        "singleton": not random.randrange(3),
        "any_of": bool(random.randrange(2)),
        "account": random.choice(("", "a0", "a1")),
        "qos": random.choice(("", "q0", "q1")),
        "reservation": random.choice(("", "", "r0", "r1")),
        "partition": random.choice(("", "t0", "t1")),
    }
    chosen = random.sample(sorted(changes), random.randrange(1, 4))
    return (e.JobUpdated(job.id, JobChange(**{field: changes[field] for field in chosen})),)  # type: ignore[arg-type]


def limited_crowd(random: Random, jobs: int) -> State:
    state = crowd(random, 0)
    for _ in range(14):
        state = fold(state, change(random, state, START), START)
    for number in range(1, jobs + 1):
        state = fold(state, with_options(random, submitted(random, number)), START)
    return state


@pytest.mark.parametrize("seed", range(6))
def test_in_a_crowd_with_limits_the_index_decides_what_walking_over_all_jobs_decides(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    if seed % 3 == 1:
        for module in (reference_scheduler, scheduling_cycle):
            monkeypatch.setattr(module, "EVENTS_PER_CYCLE_MAX", 7)
    if seed % 3 == 2:
        for name in ("CANDIDATES_BEHIND_MAX", "SKIPPED_MAX"):
            monkeypatch.setattr(admission, name, 3)
    state, at = limited_crowd(random, 80), START
    index = SchedulingIndex(state)
    kinds: set[type] = set()
    reasons: set[str] = set()
    for step in range(60):
        planned = plan(state, at)
        expected = planned.events
        assert expected == reference_events(state, at)
        assert run_cycle(index, at) == expected
        assert index.next_due(at) == next_due(state, at)
        if step % 5 == 0:
            assert verdicts_of(index, sorted(state.unfinished), at) == planned.verdicts
            reasons |= {str(verdict.reason) for verdict in planned.verdicts.values()}
        kinds |= {type(event) for event in expected}
        batch = list(expected)
        state = fold(state, expected, at)
        if random.randrange(3):
            for job_id in random.sample(sorted(state.unfinished), min(12, len(state.unfinished))):
                events = happening(random, state, job_id, at)
                state = fold(state, events, at)
                batch += events
        if not random.randrange(3):
            events = change(random, state, at)
            state = fold(state, events, at)
            batch += events
        if not random.randrange(2):
            events = update(random, state)
            state = fold(state, events, at)
            batch += events
        if not random.randrange(12):
            events = node_happening(random, state)
            state = fold(state, events, at)
            batch += events
        if not random.randrange(3):
            events = with_options(random, submitted(random, state.next_job))
            state = fold(state, events, at)
            batch += events
        index.advance(state, batch)
        if step % 10 == 0:
            assert contents(index) == contents(SchedulingIndex(state))
            assert find_violations(state) == []
        at = Instant(at + seconds(random.choice((0, 0, 1, 20, 300))))
    assert {e.BufferAllocated, e.RunOrdered} <= kinds
    assert len(reasons) > 12, reasons


class LimitedIndexHistories(IndexHistories):
    """Random histories with accounts, QOS, licences, reservations and rules that change."""

    @rule(seed=st.integers(0, 10_000))
    def an_operator_changes_something(self, seed: int) -> None:
        world = self.world
        pools = {"p0": "fast", "p1": "bulk", "p2": "bulk"}
        for event in change(Random(seed), world.state, world.at):
            match event:
                case e.AccountSet():
                    world.settle(c.SetAccount(event.account))
                case e.QosSet():
                    world.settle(c.SetQos(event.qos))
                case e.LicenseSet():
                    world.settle(c.SetLicense(event.license))
                case e.PartitionSet():
                    world.settle(c.SetPartition(event.partition))
                case e.PartitionDeleted():
                    world.settle(c.DeletePartition(event.partition))
                case e.SchedulingRulesSet():
                    world.configure(
                        RevocationsMax=str(event.rules.revocations_max), RevokeAfter=str(event.rules.revoke_after_s)
                    )
                case e.ReservationSet():
                    space = {pools[one.pool]: one.size_bytes // 4 for one in event.reservation.space}
                    listed = tuple(ReservedSpace(pool, size) for pool, size in sorted(space.items()))
                    world.settle(c.SetReservation(msgspec.structs.replace(event.reservation, space=listed)))

    @rule(
        seed=st.integers(0, 10_000),
        bb=st.sampled_from(["", "capacity=20", "capacity=60", "capacity=40 pool=bulk"]),
        priority=st.integers(0, 3),
    )
    def submits_with_a_scheduling_class(self, seed: int, bb: str, priority: int) -> None:
        random = Random(seed)
        spec = JobRequest("job", "alan", SCRIPT, "/out", random.choice((10, 60, 3_600)), priority=priority)
        (event,) = with_options(random, e.JobSubmitted(1, spec))
        assert isinstance(event, e.JobSubmitted)
        given = event.request.options
        asked = msgspec.structs.replace(
            event.request,
            user=spec.user,
            buffer=parse_request(SCRIPT, bb) if bb else None,
            options=given if given is None else msgspec.structs.replace(given, any_of=False),
        )
        self.world.settle(c.SubmitJob(asked), user())

    @rule(data=st.data(), seed=st.integers(0, 10_000), bb=st.sampled_from(["", "capacity=5", "capacity=90"]))
    def changes_a_job(self, data: st.DataObject, seed: int, bb: str) -> None:
        job, random = self.some_job(data), Random(seed)
        if job is None:
            return
        kinds = [kind for kind in DependencyKind if not kind.is_for_array]
        other = self.some_job(data)
        change = JobChange(
            name=random.choice((None, "daily", "weekly")),
            priority=random.choice((None, 0, 3)),
            time_limit_s=random.choice((None, 5, 500)),
            begin_at=random.choice((None, NEVER, Instant(self.world.at + 5_000_000))),
            dependencies=random.choice((None, (), (Dependency(random.choice(kinds), other or 1),))),
            singleton=random.choice((None, True, False)),
            any_of=random.choice((None, True, False)),
            account=random.choice((None, "", "a0", "a1")),
            qos=random.choice((None, "", "q0")),
            partition=random.choice((None, "", "t0", "t1")),
        )
        request = parse_request(SCRIPT, bb) if bb else None
        self.world.settle(c.UpdateJob(job, change, request), random.choice((OPERATOR, user())))

    def teardown(self) -> None:
        """At the end nothing keeps jobs back any more, and everything comes to an end."""
        world = self.world
        for name in sorted(world.state.reservations):
            world.settle(c.DeleteReservation(name))
        for name in sorted(world.state.qos):
            world.settle(c.SetQos(Qos(name)))
        for name in sorted(world.state.accounts):
            world.settle(c.SetAccount(Account(name, world.state.accounts[name].parent, tuple(map(AccountUser, USERS)))))
        for name in sorted(world.state.licenses):
            world.settle(c.SetLicense(License(name, 9)))
        for name in sorted(world.state.partitions):
            world.settle(c.SetPartition(Partition(name, every_node=True)))
        for job in sorted(world.state.unfinished):
            options = world.state.jobs[job].request.options
            if options is not None and (options.reservation or options.partition not in {"", *world.state.partitions}):
                world.settle(c.CancelJob(job), user())
        super().teardown()


LimitedIndexHistories.TestCase.settings = settings(max_examples=6, stateful_step_count=12, deadline=None)
TestLimitedIndexHistories = LimitedIndexHistories.TestCase
