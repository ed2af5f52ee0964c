"""Laws of the scheduling index: advanced it equals one built afresh, and it decides what a walk over all jobs does."""

from __future__ import annotations

from random import Random
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from forebay.replica.fold.fold import fold
from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.messages.entries import Entry
from forebay.replica.model.buffers import BufferState
from forebay.replica.model.configuration import Site
from forebay.replica.model.job_states import JobState
from forebay.replica.model.jobs import Hold
from forebay.replica.model.pools import Pool
from forebay.replica.model.requests import (
    BufferRequest,
    Dependency,
    DependencyKind,
    JobOptions,
    JobRequest,
    with_options,
)
from forebay.replica.model.stages import Stage
from forebay.replica.operations.outcomes import active_stage, failure_events, script_end_events, success_events
from forebay.replica.operations.slots import OperationSlots, assign_slots
from forebay.replica.scheduler import admission, scheduling_cycle
from forebay.replica.scheduler.gates import REPLAN_S
from forebay.replica.scheduler.index import TOUCHES, SchedulingIndex, Touches
from forebay.replica.scheduler.index_row import NO_ROW, index_row
from forebay.replica.scheduler.scheduling_cycle import run_cycle, verdicts_of
from forebay.replica.state.invariants import find_violations
from forebay.replica.state.state import EMPTY, State
from forebay.replica.values.errors import Rejection
from forebay.replica.values.sorted_keys import CHUNK_KEYS_MAX, SortedKeys
from forebay.replica.values.units import NEVER, Instant, seconds
from tests.replica.reference import reference_scheduler
from tests.replica.reference.reference_scheduler import next_due
from tests.replica.reference.reference_scheduler import run_cycle as reference_events
from tests.replica.scheduler.contents import SMALL_INDEXES, contents, held
from tests.replica.test_histories import Histories
from tests.replica.world import OPERATOR, SCRIPT, START, World, user

LATER_S = (1, REPLAN_S, 1_000, 200_000)

CROWD_MAX = 40
"""Jobs of a random history that are not over, before it may submit another array: checking all of them at every step,
and having each end, takes time that grows with the cube of their number, and finds no more."""


def assert_agrees(index: SchedulingIndex, state: State, at: Instant) -> None:
    assert index.state is state
    # Now, and at one instant to come: at the next step at another one.
    for later_s in (0, LATER_S[state.revision % len(LATER_S)]):
        then = Instant(at + seconds(later_s))
        assert run_cycle(index, then) == reference_events(state, then)
        assert index.next_due(then) == next_due(state, then)
    assert_explains(index, state, at, sorted(state.unfinished))
    assert contents(index) == contents(SchedulingIndex(state))


def assert_explains(index: SchedulingIndex, state: State, at: Instant, jobs: list[int]) -> None:
    """What is said of a job is what the pass decides, whether one job is asked about or all are."""
    said = reference_scheduler.plan(state, at).verdicts
    assert verdicts_of(index, jobs, at) == {job_id: said[job_id] for job_id in jobs}
    for job_id in jobs[at % 7 :: 7]:
        assert verdicts_of(index, [job_id], at) == {job_id: said[job_id]}


class IndexedWorld(World):
    """A world whose index is advanced with each batch and compared, before the passes and after."""

    def __init__(self, *arguments: Any, **changes: Any) -> None:
        self.index = SchedulingIndex(EMPTY)
        self.passes = True
        super().__init__(*arguments, **changes)

    def commit(self, entry: Entry) -> None:
        super().commit(entry)
        self.index.advance(self.state, entry.events)
        assert_agrees(self.index, self.state, self.at)

    def run_pass(self) -> None:
        if self.passes:
            super().run_pass()


class IndexHistories(Histories):
    """Random histories with everything that an index holds: dependencies, policies, purges, batches without a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.world = IndexedWorld(
            {"fast": 100, "bulk": 50},
            granularity=5,
            nodes=3,
            cpus=2,
            stage_retries=1,
            max_passes=2,
            finished_jobs_kept=2,
        )

    @rule(data=st.data(), kind=st.sampled_from(DependencyKind), bb=st.sampled_from(["", "capacity=20", "capacity=60"]))
    def submits_with_dependencies(self, data: st.DataObject, kind: DependencyKind, bb: str) -> None:
        kind = kind.for_job
        first, second = self.some_job(data), self.some_job(data)
        dependencies = tuple(Dependency(kind, job) for job in (first, second) if job is not None)
        self.world.try_submit(bb, dependencies=dependencies, cpus=data.draw(st.integers(1, 2)))

    @rule(data=st.data(), submits=st.integers(1, 4))
    def several_commands_go_into_one_batch(self, data: st.DataObject, submits: int) -> None:
        world = self.world
        assert isinstance(world, IndexedWorld)
        world.passes = False
        for _ in range(submits):
            world.try_submit(data.draw(st.sampled_from(["", "capacity=5", "capacity=90 pool=fast"])))
            job = self.some_job(data)
            if job is not None:
                world.settle(c.CancelJob(job), user())
        world.passes = True
        world.run_pass()

    @precondition(lambda self: len(self.world.state.unfinished) <= CROWD_MAX)
    @rule(
        data=st.data(),
        tasks=st.sets(st.integers(0, 30), min_size=1, max_size=14),
        throttle=st.sampled_from([0, 1, 3]),
        bb=st.sampled_from(["", "capacity=5", "capacity=40 pool=fast"]),
    )
    def submits_an_array(self, data: st.DataObject, tasks: set[int], throttle: int, bb: str) -> None:
        dependencies = ()
        other = self.some_job(data)
        if other is not None and data.draw(st.booleans()):
            kind = data.draw(st.sampled_from([kind for kind in DependencyKind if not kind.is_for_array]))
            dependencies = (Dependency(kind, other),)
        self.world.try_submit(bb, array=tuple(sorted(tasks)), throttle=throttle, dependencies=dependencies)

    @rule(data=st.data(), what=st.sampled_from([c.CancelJob, c.HoldJob, c.ReleaseJob]), some=st.booleans())
    def steers_an_array(self, data: st.DataObject, what: type[c.CancelJob], some: bool) -> None:
        arrays = sorted(self.world.state.arrays)
        if arrays:
            array = data.draw(st.sampled_from(arrays))
            tasks = sorted(self.world.state.arrays[array])
            chosen = data.draw(st.sets(st.sampled_from(tasks), min_size=1)) if some else None
            self.world.settle(what(array, tasks=None if chosen is None else tuple(sorted(chosen))), user())

    @rule(name=st.sampled_from(["daily", "weekly"]), singleton=st.booleans(), bb=st.sampled_from(["", "capacity=5"]))
    def submits_one_of_a_name(self, name: str, singleton: bool, bb: str) -> None:
        self.world.try_submit(bb, name=name, options=JobOptions(singleton=singleton))

    @rule(hold_s=st.sampled_from([0, 2, 50]), stages=st.sampled_from([1, 2, 100]))
    def changes_the_policy(self, hold_s: int, stages: int) -> None:
        changed = (ConfSetting("StagedHoldTime", str(hold_s)), ConfSetting("OperationsPerStage", str(stages)))
        self.world.settle(c.ConfigureSite(changed, partial=True), OPERATOR)


IndexHistories.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestIndexHistories = IndexHistories.TestCase
TestIndexHistories.pytestmark = [pytest.mark.campaign(3)]  # type: ignore[attr-defined]


# Crowds: large worlds made of events, which random users and agents move on ------------------------------------------


def crowd(random: Random, jobs: int, nodes: int = 8) -> State:
    site = Site(max_passes=3, finished_jobs_kept=20, staged_hold_time_s=500, operations_per_stage_max=24)
    pools = tuple(Pool(f"p{number}", size, 1) for number, size in enumerate((1_000, 5_000, 300)))
    state = fold(EMPTY, [e.ClusterFounded("id", "crowd", site, pools)], START)
    state = fold(state, [e.NodeRegistered(f"n{n}", random.choice((2, 4, 16)), "i", "s") for n in range(nodes)], START)
    while state.next_job <= jobs:
        state = fold(state, submission(random, state), START)
    return state


def submission(random: Random, state: State) -> tuple[e.Event, ...]:
    """Return what submits a job, one of a name that waits for earlier ones, or an array."""
    job = submitted(random, state.next_job)
    chance = random.randrange(8)
    if chance == 0:
        tasks = tuple(sorted(random.sample(range(40), random.randrange(1, 25))))
        array = e.SubmittedTasks(tasks, random.choice((0, 0, 1, 3, 12)))
        return (msgspec.structs.replace(job, array=array),)
    if chance == 1:
        named = msgspec.structs.replace(job.request, name=random.choice(("weekly", "daily")))
        options = JobOptions(singleton=bool(random.randrange(4)))
        return (msgspec.structs.replace(job, request=with_options(named, options)),)
    return (job,)


def submitted(random: Random, job: int) -> e.JobSubmitted:
    spec = JobRequest(
        name="job",
        user="alan",
        script=SCRIPT,
        workdir="/out",
        time_limit_s=random.choice((10, 60, 3_600)),
        cpus=random.choice((1, 1, 2, 4, 16)),
        priority=random.randrange(4),
        begin_at=Instant(START + seconds(random.choice((5, 50, 900)))) if not random.randrange(6) else NEVER,
        deadline=Instant(START + seconds(random.choice((30, 4_000)))) if not random.randrange(8) else NEVER,
        # Of a number that is no array, a kind for arrays finds none: such an array is over.
        dependencies=tuple(
            Dependency(random.choice(list(DependencyKind)), random.randrange(1, job))
            for _ in range(random.randrange(3))
        )
        if job > 1 and not random.randrange(3)
        else (),
    )
    size = random.choice((0, 10, 50, 200, 290))
    request = None if random.randrange(4) == 0 else BufferRequest("", size, (), "scratch", (), (), "")
    pool = f"p{random.randrange(3)}" if request is not None and size else ""
    hold = Hold.USER if not random.randrange(10) else Hold.NONE
    asked = msgspec.structs.replace(spec, buffer=request)
    return e.JobSubmitted(job, asked, pool, size if request is not None else 0, hold)


def happening(random: Random, state: State, job_id: int, at: Instant) -> tuple[e.Event, ...]:
    """Return what an agent or a user might bring about for a job next."""
    job, buffer = state.jobs[job_id], state.buffers.get(job_id)
    if job.state is JobState.PENDING and not random.randrange(8):
        if job.hold:
            return (e.JobReleased(job_id),)
        if buffer is None or buffer.state is BufferState.PENDING:
            return (e.JobCancelled(job_id),) if random.randrange(2) else (e.JobHeld(job_id, Hold.USER),)
        return (e.JobHeld(job_id, Hold.USER),)
    stage = active_stage(job, buffer)
    if stage is None:
        return ()
    if stage is Stage.RUN:
        if job.state is JobState.CONFIGURING:
            return (e.RunStarted(job_id),)
        return script_end_events(state, job, buffer, random.choice((JobState.COMPLETED, JobState.FAILED)), 0, 0, "")
    assert buffer is not None
    if not random.randrange(6):
        return failure_events(state, job, stage, "it broke", at)
    return assign_slots(state, OperationSlots(state.operations), success_events(state, job, buffer, stage, 1, 1, ""))


def node_happening(random: Random, state: State) -> tuple[e.Event, ...]:
    name = random.choice(sorted(state.nodes))
    node = state.nodes[name]
    if node.down:
        return (e.NodeCameBack(name),)
    if node.drained:
        return (e.NodeResumed(name),)
    return (random.choice((e.NodeDrained(name, "x"), e.NodeWentDown(name, "x"), e.NodeRegistered(name, 4, "j", "s"))),)


@pytest.mark.campaign(4)
@pytest.mark.parametrize("seed", range(12))
def test_in_a_crowd_the_index_decides_what_walking_over_all_jobs_decides(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    if seed % 3 == 1:
        for module in (reference_scheduler, scheduling_cycle):
            monkeypatch.setattr(module, "EVENTS_PER_CYCLE_MAX", 7)
    if seed % 3 == 2:
        monkeypatch.setattr(admission, "CANDIDATES_BEHIND_MAX", 3)
    state, at = crowd(random, 300), START
    index, kinds = SchedulingIndex(state), set()
    assert not index.prepare(100)
    for step in range(120):
        expected = reference_events(state, at)
        assert run_cycle(index, at) == expected
        assert index.next_due(at) == next_due(state, at)
        kinds |= {type(event) for event in expected}
        batch = list(expected)
        state = fold(state, expected, at)
        if random.randrange(3):
            for job_id in random.sample(sorted(state.unfinished), min(12, len(state.unfinished))):
                events = happening(random, state, job_id, at)
                state = fold(state, events, at)
                batch += events
        if not random.randrange(12):
            events = node_happening(random, state)
            state = fold(state, events, at)
            batch += events
        if not random.randrange(3):
            events = submission(random, state)
            events = events if not events[0].request.dependencies else ()
            state = fold(state, events, at)
            batch += events
        index.advance(state, batch)
        if step % 4 == 0:
            index.prepare(5)
        if step % 10 == 0:
            assert contents(index) == contents(SchedulingIndex(state))
            assert_explains(index, state, at, sorted(state.unfinished))
            assert find_violations(state) == []
        at = Instant(at + seconds(random.choice((0, 0, 1, 20, 300))))
    assert {e.BufferAllocated, e.RunOrdered, e.JobBecameEligible} <= kinds


def test_a_pass_that_is_asked_for_twice_gives_the_same_and_leaves_nothing_behind() -> None:
    state = crowd(Random(1), 200)
    index = SchedulingIndex(state)
    before = contents(index)
    first = run_cycle(index, START)
    assert first and run_cycle(index, START) == first
    assert contents(index) == before


def test_the_table_of_what_events_touch_has_every_kind_that_is_not_simply_about_its_job() -> None:
    assert set(TOUCHES) < set(get_args(e.Event))
    for kind in get_args(e.Event):
        has_job = "job" in kind.__struct_fields__
        assert has_job or kind in TOUCHES, kind
        # What is about a job touches it, unless it changes nothing that an index holds.
        touches = TOUCHES.get(kind, Touches.JOB)
        assert not has_job or touches in (Touches.JOB, Touches.JOB_AND_NAME) or kind in _JOB_NOT_TOUCHED, kind


@pytest.mark.parametrize("seed", range(4))
def test_each_small_index_is_what_the_rows_are_whatever_they_were_and_in_whatever_order_they_came(seed: int) -> None:
    random = Random(seed)
    first = crowd(random, 150)
    second = moved_on(random, first)
    direct, by_way = (SchedulingIndex(second) for _ in range(2))
    replace_rows(random, by_way, first)
    replace_rows(random, by_way, second)
    replace_rows(random, direct, second)
    for name in SMALL_INDEXES:
        assert held(getattr(by_way, name)) == held(getattr(direct, name)), name
    assert contents(SchedulingIndex(second)) == contents(direct)
    # And rows that leave take all with them.
    empty = SchedulingIndex(second)
    empty.nodes.change(second.nodes)
    empty.nodes.refresh(second, {})
    replace_rows(random, by_way, second, leave=True)
    for name in SMALL_INDEXES:
        assert held(getattr(by_way, name)) == held(getattr(empty, name)), name


def moved_on(random: Random, state: State) -> State:
    at = START
    for _ in range(20):
        state = fold(state, reference_events(state, at), at)
        for job_id in random.sample(sorted(state.unfinished), 20):
            if job_id in state.unfinished:
                state = fold(state, happening(random, state, job_id, at), at)
        at = Instant(at + seconds(30))
    return state


def replace_rows(random: Random, index: SchedulingIndex, state: State, *, leave: bool = False) -> None:
    """Tell every small index the rows of all jobs of a state, in any order, in place of those that they know."""
    jobs = sorted({*index._rows, *state.unfinished})
    random.shuffle(jobs)
    for job_id in jobs:
        before, after = index._rows.pop(job_id, NO_ROW), NO_ROW
        if job_id in state.unfinished and not leave:
            after = index_row(state, state.jobs[job_id], state.buffers.get(job_id), index.queues.names)
            index._rows[job_id] = after
        for small in (*index._of_all, *index._of_few):
            small.apply(job_id, before, after)
        for follows in (index.dependencies, index.singletons):
            follows.apply(state, job_id, before, after)
    index.arrays.refresh(state)
    index.nodes.change(state.nodes)
    index.nodes.refresh(state, index.queues.heads)
    index._touched.clear()


_JOB_NOT_TOUCHED = (e.JobSubmitted, e.MailSent, e.MailDropped)


def test_no_more_than_so_many_candidates_behind_the_reservation_head_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "CANDIDATES_BEHIND_MAX", 2)
    world = IndexedWorld({"fast": 100}, max_passes=9)
    world.submit("capacity=60")
    first = world.submit("capacity=100", priority=9)
    for _ in range(2):
        world.submit("capacity=50")
    too_far = world.submit("capacity=10")
    assert world.reason(too_far) == "BurstBufferResources"
    near = world.submit("capacity=10", priority=2)
    assert world.reason(near) == "BurstBufferStageIn"
    assert world.state.jobs[first].passed == 0  # it ends in time


def test_a_down_node_s_operations_are_not_due_and_are_again_when_it_is_back() -> None:
    world = IndexedWorld({"fast": 100}, stage_in_timeout_s=10, timeouts="fixed", node_down_restage_s=0)
    job = world.submit("capacity=40")
    assert next_due(world.state, world.at) == world.at + seconds(10)
    world.settle(c.MarkNodeDown("n1", "x"), c.CONTROLLER)
    assert next_due(world.state, world.at) is None
    world.advance(100)
    assert world.shown(job)[2] == "staging-in"
    world.settle(c.MarkNodeBack("n1"), c.CONTROLLER)
    assert next_due(world.state, world.at) == world.at + seconds(10)


@pytest.mark.parametrize("seed", range(5))
def test_sorted_keys_are_a_sorted_set(seed: int) -> None:
    random = Random(seed)
    keys: SortedKeys[int] = SortedKeys()
    model: set[int] = set()
    for _ in range(6 * CHUNK_KEYS_MAX):
        key = random.randrange(4 * CHUNK_KEYS_MAX)
        if key not in model and random.randrange(4):
            keys.add(key)
            model.add(key)
        else:
            keys.discard(key)
            model.discard(key)
        assert bool(keys) == bool(model)
        assert keys.first_after(key) == min((other for other in model if other > key), default=None)
    assert list(keys) == sorted(model)
    for key in sorted(model):
        assert keys.first == key
        keys.discard(key)
    assert not keys and list(keys) == []
    for key in range(3 * CHUNK_KEYS_MAX):
        keys.add(key)
    assert list(keys) == list(range(3 * CHUNK_KEYS_MAX))


@pytest.mark.parametrize("seed", range(6))
def test_an_index_that_is_built_in_portions_while_the_world_goes_on_is_the_same(seed: int) -> None:
    random = Random(seed)
    state, at = crowd(random, 150), START
    index, portions = SchedulingIndex(state), 0
    while not index.prepare(10):
        portions += 1
        if portions > 30:
            continue
        batch: list[e.Event] = [*reference_events(state, at)[:9], *node_happening(random, state)]
        state = fold(state, batch, at)
        for job_id in random.sample(sorted(state.unfinished), 20):
            events = happening(random, state, job_id, at)
            state = fold(state, events, at)
            batch += events
        index.advance(state, batch)
        at = Instant(at + seconds(1))
    assert portions >= 15
    assert contents(index) == contents(SchedulingIndex(state))
    assert run_cycle(index, at) == reference_events(state, at)


@pytest.mark.parametrize("kind", [kind for kind in DependencyKind if kind.is_for_array])
def test_who_waits_for_a_whole_array_is_noted_once_and_asked_again_when_all_tasks_have_come_so_far(
    kind: DependencyKind,
) -> None:
    """Each waiter was noted for each task: two arrays of 1,001 made a million entries, and a user may name 64."""
    world = IndexedWorld(cpus=64)
    array = world.submit(array=tuple(range(8)), hold=Hold.USER)
    waiter = world.submit(array=tuple(range(6)), dependencies=(Dependency(kind, array),))
    world.index.catch_up()
    noted = world.index.dependencies._waiting
    assert [len(who) for who in noted.values()] == [6], "one key for the array, and each waiter once"
    for number in range(8):
        assert world.reason(waiter) == "Dependency"
        assert not isinstance(world.settle(c.ReleaseJob(array, tasks=(number,)), user()), Rejection)
        world.finish(array + number)
    expected = "DependencyNeverSatisfied" if kind.for_job is DependencyKind.AFTER_NOT_OK else "None"
    assert world.reason(waiter) == expected
    assert {world.index.dependencies._behind[key] == set() for key in world.index.dependencies._behind} <= {True}
    assert not isinstance(world.settle(c.RequeueJob(array, tasks=(3,)), user()), Rejection)
