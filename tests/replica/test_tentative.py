"""A batch that is decided entry by entry on one builder comes to what deciding and settling one at a time comes to."""

from __future__ import annotations

from itertools import cycle
from typing import TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.replica.decide.decide import decide, decide_steps, is_by_key, jobs_of_command
from forebay.replica.fold.apply import SpeculativeState, apply_batch, apply_batch_steps, apply_entry
from forebay.replica.fold.dedup_cache import look_up_reply
from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.grammar.directives import parse_request
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.messages.entries import Batch, Decision, Entry
from forebay.replica.model.jobs import Hold
from forebay.replica.model.partitions import Partition, PartitionState
from forebay.replica.model.pools import Pool
from forebay.replica.model.requests import Dependency, DependencyKind, JobChange, JobRequest
from forebay.replica.model.stages import Stage
from forebay.replica.state.state import State
from forebay.replica.values.errors import LedgerViolation, Rejection
from forebay.replica.values.steps import StepRunner, Steps, run_to_end
from forebay.replica.values.units import Instant
from tests.replica.world import OPERATOR, SCRIPT, World, agent, user

JOBS = st.integers(1, 6)

T = TypeVar("T")


def submission(who: str, bb: str, hold: Hold) -> c.SubmitJob:
    buffer = parse_request(SCRIPT, bb)
    return c.SubmitJob(JobRequest("job", who, SCRIPT, "/out", 60, buffer=buffer), hold)


ARRAY = (0, 2, 3, 7)

ARRAYS: st.SearchStrategy[tuple[c.Command, c.Actor]] = st.one_of(
    st.builds(
        lambda bb, output, throttle: (
            msgspec.structs.replace(
                one := submission("alan", bb, Hold.USER),
                request=msgspec.structs.replace(one.request, output=output),
                tasks=ARRAY,
                throttle=throttle,
            ),
            user(),
        ),
        st.sampled_from(["", "capacity=10", "capacity=1000"]),
        st.sampled_from(["", "all.out", "%a.out", "../%a", "%q"]),
        st.integers(0, 3),
    ),
    st.builds(
        lambda kind, job, tasks, who: (kind(job, tasks=tasks), who),
        st.sampled_from([c.CancelJob, c.HoldJob, c.ReleaseJob, c.RequeueJob, c.SuspendJob, c.ResumeJob]),
        JOBS,
        st.sampled_from([None, (0,), (2, 7), (1,), ARRAY]),
        st.sampled_from([user(), user("ada"), OPERATOR]),
    ),
    st.builds(
        lambda job, tasks, nice, other: (
            c.UpdateJob(
                job,
                JobChange(nice=nice, dependencies=other and (Dependency(DependencyKind.AFTER_ANY, other),)),
                tasks=tasks,
            ),
            user(),
        ),
        JOBS,
        st.sampled_from([None, (0,), (2, 7), (1,)]),
        st.integers(-1, 2),
        st.none() | JOBS,
    ),
)
"""What is asked about arrays; there are few jobs, so that most numbers are of tasks."""

REQUESTS: st.SearchStrategy[tuple[c.Command, c.Actor]] = st.one_of(
    st.builds(
        lambda bb, hold: (submission("alan", bb, hold), user()),
        st.sampled_from(["", "capacity=10", "capacity=60", "capacity=1000", "capacity=5 pool=nowhere"]),
        st.sampled_from([Hold.NONE, Hold.USER]),
    ),
    st.builds(lambda job, hurry: (c.CancelJob(job, hurry), user()), JOBS, st.booleans()),
    st.builds(lambda job, who: (c.HoldJob(job), who), JOBS, st.sampled_from([user(), user("ada"), OPERATOR])),
    st.builds(lambda job, who: (c.ReleaseJob(job), who), JOBS, st.sampled_from([user(), OPERATOR])),
    st.builds(lambda instance: (c.RegisterNode("n1", 8, instance, "s1"), agent("n1")), st.sampled_from(["i1", "i2"])),
    st.builds(lambda drained: (c.DrainNode("n1", "") if drained else c.ResumeNode("n1"), OPERATOR), st.booleans()),
    st.builds(lambda down: (c.MarkNodeDown("n1", "") if down else c.MarkNodeBack("n1"), c.CONTROLLER), st.booleans()),
    st.builds(lambda size: (c.SetPool(Pool("fast", size, 1, is_default=True)), OPERATOR), st.integers(50, 200)),
    st.builds(lambda size: (c.ChangePool("bulk", size % 2 == 0, quantity=size), OPERATOR), st.integers(0, 9)),
    st.just((c.RemovePool("bulk"), OPERATOR)),
    st.builds(
        lambda key, value, at: (c.ConfigureSite((ConfSetting(key, value),), True, at), OPERATOR),
        st.sampled_from(["AllowUsers", "DenyUsers", "MaxPasses", "DefaultPool", "HoldOversized"]),
        st.sampled_from(["alan", "ada", "3", "bulk", "yes"]),
        st.none() | st.integers(0, 20),
    ),
    st.builds(
        lambda name, up: (
            c.SetPartition(Partition(name, ("n1",), state=PartitionState(up), is_default=up == 1)),
            OPERATOR,
        ),
        st.sampled_from(["p", "q"]),
        st.integers(1, 4),
    ),
    st.builds(lambda name: (c.DeletePartition(name), OPERATOR), st.sampled_from(["p", "q"])),
    st.builds(lambda whose: (c.ResetUsage(whose, "x"), OPERATOR), st.sampled_from(["a", "q", "z"])),
    st.builds(
        lambda job, other, name, partition, any_of, bb: (
            c.UpdateJob(
                job,
                JobChange(
                    name=name,
                    partition=partition,
                    dependencies=(Dependency(DependencyKind.AFTER_ANY, other),),
                    singleton=any_of,
                    any_of=any_of,
                ),
                parse_request(SCRIPT, bb),
            ),
            user(),
        ),
        JOBS,
        JOBS,
        st.sampled_from([None, "job", "other"]),
        st.sampled_from([None, "", "p"]),
        st.booleans(),
        st.sampled_from(["", "capacity=7", "capacity=7000"]),
    ),
    st.just((c.RunSchedulingCycle(), c.CONTROLLER)),
    st.builds(
        lambda job, attempt: (
            c.ReportOperation("n1", job, attempt, Stage.STAGE_IN, c.OperationDone(1, 1)),
            agent("n1"),
        ),
        JOBS,
        st.integers(1, 3),
    ),
)


def entry_of(request: c.Request, decision: Decision) -> Entry:
    if isinstance(decision, Rejection):
        return Entry(request.id, request.actor, c.kind_of(request.command), (), decision)
    return Entry(request.id, request.actor, c.kind_of(request.command), decision.events)


@settings(max_examples=150, deadline=None)
@given(asked=st.lists(REQUESTS, max_size=25), wholes=st.sets(st.integers(0, 25)))
def test_one_builder_for_all_is_the_same_as_a_state_for_each(
    asked: list[tuple[c.Command, c.Actor]], wholes: set[int]
) -> None:
    base = World().state
    at = Instant(base.at + 1)
    batch, single = SpeculativeState(base, at), base
    for number, (command, actor) in enumerate(asked):
        command_id = b"" if actor == c.CONTROLLER else bytes([255]) * 6 + number.to_bytes(10, "big")
        request = c.Request(command_id, actor, command)
        if number in wholes:
            assert batch.state() == single  # asking for the whole in between changes nothing
        decided = decide(batch.facts if is_by_key(command) else batch.state(), request, at)
        assert decided == decide(single, request, at)
        entry = entry_of(request, decided)
        batch.add(entry)
        single = apply_entry(single, entry, at)
        assert batch.revision == single.revision
        if command_id:
            assert look_up_reply(batch.facts, request) == look_up_reply(single, request)
    assert batch.state() == single
    assert apply_batch(base, Batch(base.revision, at, tuple(batch.entries))) == (single if asked else base_at(base, at))


@settings(max_examples=150, deadline=None)
@given(asked=st.lists(ARRAYS | REQUESTS, max_size=12), slices=st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_what_is_decided_and_folded_in_steps_comes_to_what_it_comes_to_at_once(
    asked: list[tuple[c.Command, c.Actor]], slices: list[int]
) -> None:
    sizes = cycle(slices)

    def in_slices(steps: Steps[T]) -> T:
        work = StepRunner(steps)
        while not work.advance(next(sizes)):
            pass
        return work.result

    base = World().state
    at = Instant(base.at + 1)
    batch, single = SpeculativeState(base, at), base
    for number, (command, actor) in enumerate(asked):
        request = c.Request(bytes([255]) * 6 + number.to_bytes(10, "big"), actor, command)
        facts = batch.facts if is_by_key(command) else batch.state()
        decided = in_slices(decide_steps(facts, request, at))
        assert decided == decide(single, request, at)
        assert jobs_of_command(facts, command) >= 1
        entry = entry_of(request, decided)
        assert in_slices(batch.add_steps(entry)) == SpeculativeState(single, at).add(entry)
        single = apply_entry(single, entry, at)
    assert batch.state() == single
    agreed = Batch(base.revision, at, tuple(batch.entries))
    assert in_slices(apply_batch_steps(base, agreed)) == apply_batch(base, agreed)


def base_at(base: State, at: Instant) -> State:
    """An empty batch changes nothing."""
    found = apply_batch(base, Batch(base.revision, at, ()))
    assert found is not None
    return found


def test_an_entry_that_cannot_be_folded_leaves_nothing_behind_even_of_its_first_events() -> None:
    base = World().state
    at = Instant(base.at + 1)
    batch = SpeculativeState(base, at)
    request = c.Request(b"\xff" * 15 + b"1", user(), submission("alan", "capacity=10", Hold.USER))
    good = entry_of(request, decide(batch.facts, request, at))
    batch.add(good)
    job = base.next_job
    broken = Entry(b"\xff" * 15 + b"2", user(), "hold_job", (e.JobReleased(job), e.JobHeld(job + 7, Hold.USER)))
    with pytest.raises(LedgerViolation, match="does not exist"):
        batch.add(broken)
    with pytest.raises(LedgerViolation, match="does not exist"):
        run_to_end(batch.add_steps(broken))
    assert batch.entries == [good]
    assert batch.facts.jobs[job].hold is Hold.USER
    half = batch.add_steps(broken)
    next(half)
    half.close()  # given up after the first event: a lead that is over
    assert batch.facts.jobs[job].hold is Hold.USER
    assert batch.state() == apply_entry(base, good, at)


def test_what_walks_over_jobs_is_not_decided_on_a_builder() -> None:
    batch = SpeculativeState(World().state, Instant(World().at))
    batch.add(Entry(b"", c.CONTROLLER, "run_scheduling_cycle", ()))
    command = c.RunSchedulingCycle()
    assert not is_by_key(command)
    with pytest.raises(TypeError, match="complete State"):
        decide(batch.facts, c.Request(b"", c.CONTROLLER, command), batch.at)


def test_a_clock_that_goes_back_is_refused_before_anything_is_decided() -> None:
    base = World().state
    with pytest.raises(ValueError, match="go back"):
        SpeculativeState(base, Instant(base.at - 1))
