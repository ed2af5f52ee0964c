"""Job arrays: one entry for all tasks, throttles before anything is reserved, commands about some of them."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.replica.decide.arrays import job_of_task
from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model.arrays import ArrayError, format_reference, format_tasks, parse_array, parse_reference
from forebay.replica.model.job_states import JobState
from forebay.replica.model.jobs import Hold
from forebay.replica.model.requests import (
    AfterTask,
    ArrayTask,
    Dependency,
    DependencyKind,
    JobOptions,
)
from forebay.replica.values import limits
from forebay.replica.values.errors import Rejection, RejectionCode
from tests.replica.world import OPERATOR, World, user


def tasks_of(world: World, array: int) -> list[int]:
    return [job for _, job in sorted(world.state.arrays[array].items())]


def reasons(world: World, array: int) -> list[str]:
    return [world.reason(job) for job in tasks_of(world, array)]


@pytest.mark.parametrize(
    ("text", "tasks", "throttle"),
    [
        ("1-3", (1, 2, 3), 0),
        ("0-10:5", (0, 5, 10), 0),
        ("1,4,7", (1, 4, 7), 0),
        ("7,1-3:2%2", (1, 3, 7), 2),
        ("1000", (1000,), 0),
    ],
)
def test_an_array_is_read_as_slurm_reads_it(text: str, tasks: tuple[int, ...], throttle: int) -> None:
    assert parse_array(text) == (tasks, throttle)


@pytest.mark.parametrize(
    "text", ["", "a", "3-1", "1-", "-1", "1-3:0", "1,1", "1-3,2", "1001", "1%", "1%0", "1%x", "1-3%-1", "²", "1 2"]
)
def test_what_is_no_array_is_refused_in_words(text: str) -> None:
    with pytest.raises(ArrayError, match=r"\w+ \w+"):
        parse_array(text)


@pytest.mark.parametrize("text", ["12", "12_3", "12_[1-4]", "12_[1-4,7]"])
def test_a_reference_is_read_and_shown_alike(text: str) -> None:
    assert format_reference(*parse_reference(text)) == text


@pytest.mark.parametrize("text", ["", "x", "1_", "_1", "1_[", "1_[]", "1_1_1", "1-3", "1_[3-1]", "1_x"])
def test_what_names_no_job_is_refused(text: str) -> None:
    with pytest.raises(ArrayError):
        parse_reference(text)


def test_tasks_in_a_row_are_shown_as_a_range() -> None:
    assert format_tasks((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"
    assert format_tasks(()) == ""


def test_an_array_is_one_entry_and_each_task_has_a_buffer_of_its_own() -> None:
    world = World({"fast": 100})
    before = len(world.ledger)
    array = world.submit("capacity=10", array=(1, 2, 3))
    made = world.ledger[before].entries[0].events
    assert len(made) == 1 and isinstance(made[0], e.JobSubmitted)
    assert tasks_of(world, array) == [array, array + 1, array + 2]
    assert world.state.next_job == array + 3
    assert [world.shown(job)[2] for job in tasks_of(world, array)] == ["staging-in"] * 3
    assert world.free() == 70
    assert [world.state.jobs[job].request.array for job in tasks_of(world, array)] == [
        ArrayTask(1, 1), ArrayTask(1, 2), ArrayTask(1, 3)
    ]  # fmt: skip
    for job in tasks_of(world, array):
        world.finish(job)
    assert world.free() == 100


def test_what_has_symbols_is_expanded_for_each_task() -> None:
    world = World({"fast": 100})
    script = "#!/bin/sh\n#DW jobdw capacity=10 type=scratch access_mode=striped\n" + (
        "#DW stage_in type=file source=/in/%A.%a destination=$DW_JOB_STRIPED/%j\ntrue\n"
    )
    array = world.submit(script=script, array=(3, 8), output="%A_%a.out")
    first, second = tasks_of(world, array)
    assert [world.state.jobs[job].request.output for job in (first, second)] == ["/out/1_3.out", "/out/1_8.out"]
    assert world.state.jobs[first].request.buffer.stage_in[0].outside == "/in/1.3"
    assert world.state.jobs[second].request.buffer.stage_in[0].outside == "/in/1.8"
    assert world.state.jobs[second].request.buffer.stage_in[0].inside == f"$DW_JOB_STRIPED/{second}"
    other = world.submit(array=(1, 2))
    assert world.state.jobs[other + 1].request.output == f"/out/forebay-{other}_2.out"


def test_a_throttled_task_neither_stages_nor_reserves() -> None:
    """SPUR.md: an array with a throttle, pool 160, 60 each."""
    world = World({"fast": 160})
    array = world.submit("capacity=60", array=(1, 2, 3), throttle=1)
    assert reasons(world, array) == ["BurstBufferStageIn", "JobArrayTaskLimit", "JobArrayTaskLimit"]
    assert world.free() == 100
    first, second, third = tasks_of(world, array)
    world.done(first)
    assert world.state.jobs[first].state is JobState.CONFIGURING
    assert reasons(world, array)[1:] == ["JobArrayTaskLimit"] * 2
    world.done(first)
    # Its script has ended: its results are still there, but it no longer counts.
    assert reasons(world, array)[1:] == ["BurstBufferStageIn", "JobArrayTaskLimit"]
    assert world.free() == 40


def test_a_throttle_holds_for_tasks_without_a_buffer_and_keeps_nobody_else_back() -> None:
    world = World(cpus=8)
    array = world.submit(array=tuple(range(6)), throttle=2)
    other = world.submit()
    states = [world.state.jobs[job].state for job in tasks_of(world, array)]
    assert states == [JobState.CONFIGURING] * 2 + [JobState.PENDING] * 4
    assert reasons(world, array)[2:] == ["JobArrayTaskLimit"] * 4
    assert world.state.jobs[other].state is JobState.CONFIGURING
    world.finish(array)
    assert world.state.jobs[array + 2].state is JobState.CONFIGURING


def test_a_held_task_takes_no_room_from_the_others() -> None:
    world = World(cpus=8)
    array = world.submit(array=(1, 2, 3), throttle=1, hold=Hold.USER)
    world.settle(c.ReleaseJob(array, (2, 3)), user())
    assert reasons(world, array) == ["JobHeldUser", "None", "JobArrayTaskLimit"]


def test_only_so_many_tasks_hold_space_before_they_start() -> None:
    """Transcript 10: of 30 tasks ten are staged, the others wait with BurstBufferResources."""
    world = World({"fast": 1_000}, cpus=1)
    array = world.submit("capacity=1", array=tuple(range(1, 31)))
    assert reasons(world, array) == ["BurstBufferStageIn"] * 10 + ["BurstBufferResources"] * 20
    world.done(array)
    assert reasons(world, array).count("BurstBufferStageIn") == 10  # one has started, so an eleventh stages
    assert not isinstance(
        world.settle(c.ConfigureSite((ConfSetting("ArrayStageCount", "12"),), partial=True)), Rejection
    )
    assert reasons(world, array).count("BurstBufferStageIn") == 12


@pytest.mark.parametrize(
    ("tasks", "cancelled"),
    [(None, {1, 2, 3, 4}), ((2,), {2}), ((2, 4), {2, 4})],
)
def test_cancelling_names_the_array_or_some_of_its_tasks(tasks: tuple[int, ...] | None, cancelled: set[int]) -> None:
    world = World({"fast": 100})
    array = world.submit("capacity=10", array=(1, 2, 3, 4))
    world.settle(c.CancelJob(array, tasks=tasks), user())
    over = {task for task, job in world.state.arrays[array].items() if world.state.jobs[job].state.name == "CANCELLED"}
    assert over == cancelled


def test_holding_and_releasing_a_whole_array_is_one_entry() -> None:
    world = World(cpus=1)
    array = world.submit(array=(1, 2, 3))
    world.settle(c.HoldJob(array), user())
    assert reasons(world, array) == ["None", "JobHeldUser", "JobHeldUser"]  # the first runs already
    assert isinstance(world.settle(c.HoldJob(array, (1,)), user()), Rejection)
    world.settle(c.ReleaseJob(array, (3,)), user())
    assert reasons(world, array) == ["None", "JobHeldUser", "Resources"]
    assert isinstance(world.settle(c.CancelJob(array), user("ada")), Rejection)


def test_an_unknown_task_or_an_array_that_is_none_is_refused_by_name() -> None:
    world = World()
    array, single = world.submit(array=(1, 2)), world.submit()
    for command, words in (
        (c.CancelJob(array, tasks=(1, 9)), "task 9 of array"),
        (c.CancelJob(single, tasks=(1,)), "array 3 does not exist"),
        (c.CancelJob(77, tasks=(1,)), "job 77 does not exist"),
    ):
        rejection = world.settle(command, OPERATOR)
        assert isinstance(rejection, Rejection) and words in rejection.sentence


@pytest.mark.parametrize(
    ("tasks", "asked", "words"),
    [
        ((1, 1), {}, "ascending"),
        ((2, 1), {}, "ascending"),
        ((limits.ARRAY_SIZE_MAX,), {}, "too large"),
        ((1, 2), {"options": JobOptions(nodes=0)}, "Node count"),
        ((), {"throttle": 2}, "without an array"),
        ((), {"request_array": ArrayTask(3, 1)}, "set by the controller"),
        ((1,), {"throttle": -1}, "throttle"),
    ],
)
def test_an_array_that_cannot_be_is_refused(tasks: tuple[int, ...], asked: dict[str, Any], words: str) -> None:
    rejection = World().try_submit(array=tasks, **asked)
    assert isinstance(rejection, Rejection) and words in rejection.sentence


def test_an_array_is_bounded_in_bytes() -> None:
    script = "#!/bin/sh\n#DW jobdw capacity=1 type=scratch access_mode=striped\n" + "".join(
        f"#DW stage_in type=file source=/in/{'x' * 200}{n}.%a destination=$DW_JOB_STRIPED/{n}\n" for n in range(400)
    )
    large = World().try_submit(script=script + "true\n", array=tuple(range(1_000)))
    assert isinstance(large, Rejection) and large.code is RejectionCode.LIMIT_EXCEEDED and "too large" in large.sentence


def test_the_largest_array_is_one_entry_below_the_bound_of_a_batch() -> None:
    world = World({"fast": 10_000})
    array = world.submit("capacity=1", array=tuple(range(limits.ARRAY_SIZE_MAX)), script="#!/bin/sh\n" + "#" * 99_999)
    assert len(world.state.arrays[array]) == limits.ARRAY_SIZE_MAX
    world.settle(c.CancelJob(array), user())
    assert {job.state for job in world.state.jobs.values()} == {JobState.CANCELLED}


def test_a_purged_task_leaves_the_index_and_the_last_one_takes_the_array_along() -> None:
    world = World(cpus=8, finished_jobs_kept=0)
    array = world.submit(array=(1, 2))
    world.finish(array)
    assert dict(world.state.arrays[array]) == {2: array + 1}
    assert job_of_task(world.state, array, None) == array + 1
    world.finish(array + 1)
    assert array not in world.state.arrays


# Dependencies on arrays ----------------------------------------------------------------------------------------------


def fail(world: World, job: int) -> None:
    world.report(job, c.ScriptStarted())
    world.report(job, c.ScriptEnded(JobState.FAILED, 1))


def after(kind: DependencyKind, job: int) -> dict[str, Any]:
    return {"dependencies": (Dependency(kind, job),)}


@pytest.mark.parametrize(
    ("kind", "all_ok", "one_failed"),
    [
        (DependencyKind.AFTER_OK, "None", "DependencyNeverSatisfied"),
        (DependencyKind.AFTER_NOT_OK, "DependencyNeverSatisfied", "None"),
        (DependencyKind.AFTER_ANY, "None", "None"),
    ],
)
def test_a_dependency_on_an_array_is_one_on_all_its_tasks(kind: DependencyKind, all_ok: str, one_failed: str) -> None:
    for ending, expected in (("ok", all_ok), ("failed", one_failed)):
        world = World(cpus=8)
        array = world.submit(array=(1, 2))
        waiter = world.submit(**after(kind, array))
        assert world.state.jobs[waiter].request.dependencies == (Dependency(kind.for_array, array),)
        assert world.reason(waiter) == "Dependency"
        world.finish(array)
        assert world.reason(waiter) == "Dependency"
        if ending == "ok":
            world.finish(array + 1)
        else:
            fail(world, array + 1)
        assert world.reason(waiter) == expected


def test_a_dependency_on_one_task_is_on_that_task_alone() -> None:
    world = World(cpus=8)
    array = world.submit(array=(4, 5))
    waiter = world.submit(after_tasks=(AfterTask(DependencyKind.AFTER_OK, array, 4),))
    assert world.reason(waiter) == "Dependency"
    world.finish(array)
    assert world.reason(waiter) == "None"
    rejection = world.try_submit(after_tasks=(AfterTask(DependencyKind.AFTER_OK, array, 6),))
    assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.UNKNOWN_DEPENDENCY


def test_a_kind_for_arrays_is_refused_where_there_is_no_array() -> None:
    world = World()
    job = world.submit()
    for kind in DependencyKind:
        if kind.is_for_array:
            rejection = world.try_submit(**after(kind, job))
            assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.UNKNOWN_DEPENDENCY


def test_after_an_array_means_after_all_its_tasks_have_started() -> None:
    world = World(cpus=8)
    array = world.submit(array=(1, 2), throttle=1)
    waiter = world.submit(**after(DependencyKind.AFTER, array))
    world.finish(array)
    assert world.reason(waiter) == "Dependency"
    world.report(array + 1, c.ScriptStarted())
    assert world.reason(waiter) == "None"
