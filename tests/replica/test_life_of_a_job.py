"""The life of a job, told as the sequence of what people see (SEMANTICS.md, States)."""

from __future__ import annotations

import pytest

from forebay.replica.messages import commands as c
from forebay.replica.model.job_states import JobState
from forebay.replica.model.jobs import Hold
from forebay.replica.model.nodes import CAPACITY_CONTROLS, PROCESS_CONTROLS
from forebay.replica.values.errors import Rejection, RejectionCode
from tests.replica.world import OPERATOR, World, agent, user

STAGE_OUT = "burst_buffer/native: Stage-out in progress"


def test_a_job_goes_through_the_states_that_slurm_documents() -> None:
    world = World({"fast": 100})
    first = world.submit("capacity=40")
    assert world.shown(first) == ("PENDING", "BurstBufferStageIn", "staging-in")
    assert world.free() == 60
    world.done(first)
    assert world.shown(first) == ("CONFIGURING", "None", "pre-run")
    order = world.order(first)
    world.report(first, c.ScriptStarted(), order)
    assert world.shown(first) == ("RUNNING", "None", "running")
    world.report(first, c.ScriptEnded(JobState.COMPLETED), order)
    assert world.shown(first) == ("STAGE_OUT", STAGE_OUT, "post-run")
    world.done(first)
    assert world.shown(first) == ("STAGE_OUT", STAGE_OUT, "staging-out")
    world.done(first)
    assert world.shown(first) == ("COMPLETED", "None", "teardown")
    assert world.free() == 60
    world.done(first)
    assert world.shown(first) == ("COMPLETED", "None", "complete")
    assert world.free() == 100


def test_of_two_jobs_of_60_from_100_one_stages_and_the_other_waits_for_space_in_the_same_pass() -> None:
    world = World({"fast": 100})
    first, second = world.submit("capacity=60"), world.submit("capacity=60")
    assert world.shown(first)[1:] == ("BurstBufferStageIn", "staging-in")
    assert world.shown(second)[1:] == ("BurstBufferResources", "pending")
    world.finish(first)
    assert world.shown(second)[1:] == ("BurstBufferStageIn", "staging-in")


def test_more_than_the_pool_has_is_refused_at_submit_with_the_place_and_changes_no_job() -> None:
    world = World({"fast": 100})
    rejection = world.try_submit("capacity=500")
    assert isinstance(rejection, Rejection)
    assert rejection.code is RejectionCode.CAPACITY_OVER_TOTAL
    assert rejection.place == "--bb line 1, column 1"
    assert not world.state.jobs


def test_a_begin_time_in_the_future_is_shown_and_not_the_shortfall() -> None:
    world = World({"fast": 100})
    world.submit("capacity=100")
    later = world.submit("capacity=100", begin_at=world.at + 10_000_000)
    assert world.reason(later) == "BeginTime"
    world.advance(11)
    assert world.reason(later) == "BurstBufferResources"


def test_a_request_is_rounded_up_to_the_granularity_of_its_pool() -> None:
    world = World({"fast": 100}, granularity=8)
    job = world.submit("capacity=9")
    assert world.state.buffers[job].granted_bytes == 16
    assert isinstance(world.try_submit("capacity=97"), Rejection), "96 is the most whole grains of 100"


def test_a_job_without_a_buffer_runs_and_ends_without_stage_out() -> None:
    world = World()
    job = world.submit()
    assert world.state.jobs[job].state is JobState.CONFIGURING
    world.done(job)
    assert world.state.jobs[job].state is JobState.COMPLETED
    assert job in world.state.finished


@pytest.mark.parametrize("stage", ["staging-in", "staged-in", "pre-run"])
def test_a_job_cancelled_before_its_script_started_is_torn_down_without_stage_out(stage: str) -> None:
    world = World(cpus=1)
    other = world.submit()
    job = world.submit("capacity=40")
    if stage != "staging-in":
        world.done(job)
    if stage == "pre-run":
        world.done(other)
    assert world.state.buffers[job].state.word == stage
    world.settle(c.CancelJob(job))
    if stage == "pre-run":
        assert world.order(job).cancel
        world.report(job, c.ScriptEnded(JobState.CANCELLED))
    assert world.shown(job) == ("CANCELLED", "None", "teardown")
    world.done(job)
    assert world.free() == 100


@pytest.mark.parametrize("hurry", [False, True])
def test_a_running_job_that_is_cancelled_stages_out_unless_hurried(hurry: bool) -> None:
    world = World()
    job = world.submit("capacity=40")
    world.done(job)
    order = world.order(job)
    world.report(job, c.ScriptStarted(), order)
    world.settle(c.CancelJob(job, hurry))
    assert world.order(job).cancel
    world.report(job, c.ScriptEnded(JobState.FAILED, signal=15), order)
    assert world.shown(job)[2] == ("teardown" if hurry else "post-run")
    world.finish(job)
    assert world.state.jobs[job].state is JobState.CANCELLED
    assert world.free() == 100


def test_a_pending_job_that_is_cancelled_is_complete_at_once() -> None:
    world = World({"fast": 100})
    world.submit("capacity=100")
    job = world.submit("capacity=100")
    world.settle(c.CancelJob(job))
    assert world.shown(job) == ("CANCELLED", "None", "complete")


def test_cancelling_during_stage_out_changes_nothing_and_with_hurry_ends_it() -> None:
    world = World()
    job = world.submit("capacity=40")
    world.done(job)
    world.done(job)
    world.done(job)
    assert world.shown(job)[2] == "staging-out"
    attempt = world.order(job).attempt
    world.settle(c.CancelJob(job))
    assert world.order(job).attempt == attempt
    world.settle(c.CancelJob(job, hurry=True))
    assert world.shown(job) == ("COMPLETED", "None", "teardown")
    assert world.order(job).attempt > attempt


def test_a_failed_stage_in_is_retried_with_back_off_and_then_held_with_its_message_and_its_space() -> None:
    world = World(stage_retries=2, retry_backoff_s=2)
    job = world.submit("capacity=40")
    attempts = []
    for backoff_s in (2, 4):
        attempts.append(world.order(job).attempt)
        world.report(job, c.OperationFailed("no such file"))
        assert world.reason(job) == "BurstBufferStageIn"
        assert not world.orders(), "nothing is ordered until the retry is due"
        world.advance(backoff_s - 0.1)
        assert not world.orders()
        world.advance(0.1)
    attempts.append(world.order(job).attempt)
    assert attempts == sorted(set(attempts)), "every order has its own attempt"
    world.report(job, c.OperationFailed("no such file"))
    assert world.shown(job) == ("PENDING", "burst_buffer/native: slurm_bb_data_in: no such file", "staging-in")
    assert world.state.jobs[job].hold is Hold.SYSTEM
    assert world.free() == 60, "the space is kept so that somebody can look"
    assert not isinstance(world.settle(c.ReleaseJob(job), user()), Rejection), "its user may release it"
    world.finish(job)
    assert world.state.jobs[job].state is JobState.COMPLETED


def test_a_failure_that_does_not_go_away_by_itself_is_not_retried() -> None:
    world = World(stage_retries=5)
    job = world.submit("capacity=40")
    world.report(job, c.OperationFailed("/in/a does not exist", final=True))
    assert world.shown(job) == ("PENDING", "burst_buffer/native: slurm_bb_data_in: /in/a does not exist", "staging-in")
    world.advance(1_000_000)
    assert not world.orders()


def test_a_failed_stage_out_keeps_the_only_copy_until_it_is_released() -> None:
    world = World(stage_retries=0)
    job = world.submit("capacity=40")
    for _ in range(3):
        world.done(job)
    world.report(job, c.OperationFailed("disk full"))
    assert world.state.jobs[job].comment.endswith(" burst_buffer/native: slurm_bb_data_out: disk full")
    assert world.shown(job) == ("STAGE_OUT", "burst_buffer/native: slurm_bb_data_out: disk full", "staging-out")
    world.advance(1_000_000)
    assert not world.orders()
    assert world.free() == 60
    world.settle(c.ReleaseJob(job), user())
    world.finish(job)
    assert world.free() == 100


def test_a_job_that_was_cancelled_while_it_was_held_cannot_be_released_any_more() -> None:
    world = World(stage_retries=0)
    job = world.submit("capacity=40")
    world.report(job, c.OperationFailed("/in/a does not exist", final=True))
    assert world.state.jobs[job].hold is not Hold.NONE
    world.settle(c.CancelJob(job), user())
    world.finish(job)
    settled = world.settle(c.ReleaseJob(job), user())
    assert isinstance(settled, Rejection)
    assert settled.code is RejectionCode.WRONG_STATE


def test_a_failed_teardown_keeps_its_space_counted_and_is_retried() -> None:
    world = World(stage_retries=1)
    job = world.submit("capacity=40")
    for _ in range(4):
        world.done(job)
    world.report(job, c.OperationFailed("busy"))
    assert world.shown(job) == ("COMPLETED", "burst_buffer/native: teardown: busy", "teardown-fail")
    assert world.free() == 60
    world.advance(2)
    assert world.shown(job)[2] == "teardown"
    world.report(job, c.OperationFailed("busy"))
    world.advance(1_000_000)
    assert world.shown(job)[2] == "teardown-fail", "the limit of retries is reached: it stays listed"
    world.settle(c.ReleaseJob(job))
    world.finish(job)
    assert world.free() == 100


def test_an_operation_over_its_time_fails_and_its_late_report_is_refused() -> None:
    world = World(stage_in_timeout_s=10, stage_retries=1, timeouts="fixed")
    job = world.submit("capacity=40")
    order = world.order(job)
    world.advance(10)
    assert not world.orders()
    late = world.report(job, c.OperationDone(), order)
    assert isinstance(late, Rejection) and late.code is RejectionCode.STALE_ATTEMPT
    world.advance(2)
    assert world.order(job).attempt == order.attempt + 1
    late = world.report(job, c.OperationDone(), order)
    assert isinstance(late, Rejection) and late.code is RejectionCode.STALE_ATTEMPT
    world.advance(10)
    assert world.reason(job) == "burst_buffer/native: slurm_bb_data_in: Timeout @ 10000 msec"


def test_a_restarted_agent_gets_its_staging_again_as_a_new_attempt_and_its_script_as_the_same() -> None:
    world = World(cpus=1)
    runs, stages = world.submit("capacity=40"), world.submit("capacity=40")
    world.done(runs)
    before = {order.job: order for order in world.orders()}
    world.register("n1", cpus=1, instance="i2")
    after = {order.job: order for order in world.orders()}
    assert after[stages].attempt == before[stages].attempt + 1
    assert after[runs].attempt == before[runs].attempt
    assert isinstance(world.report(stages, c.OperationDone(), before[stages]), Rejection)


def test_an_agent_with_another_disk_is_refused_while_jobs_have_data_on_the_former_one() -> None:
    world = World()
    job = world.submit("capacity=40")
    rejection = world.register("n1", instance="i2", storage="s2")
    assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.STORAGE_CHANGED
    world.finish(job)
    assert not isinstance(world.register("n1", instance="i2", storage="s2"), Rejection)


@pytest.mark.parametrize("processes", PROCESS_CONTROLS)
@pytest.mark.parametrize("capacity", CAPACITY_CONTROLS)
def test_a_node_says_how_it_ends_jobs_and_holds_buffers_and_a_change_of_either_is_known(
    processes: str, capacity: str
) -> None:
    world = World()
    assert not isinstance(
        world.settle(c.RegisterNode("n1", 8, "i1", "s1", "", processes, capacity), agent("n1")), Rejection
    )
    node = world.state.nodes["n1"]
    assert (node.process_control, node.capacity_control) == (processes, capacity)


@pytest.mark.parametrize("field", ["process_control", "capacity_control"])
def test_a_node_that_promises_what_nobody_knows_is_refused_by_the_field(field: str) -> None:
    world = World()
    command = c.RegisterNode("n1", 8, "i2", "s1", **{field: "hope"})
    rejection = world.settle(command, agent("n1"))
    assert isinstance(rejection, Rejection) and (rejection.code, rejection.place) == (
        RejectionCode.INVALID_FIELD,
        field,
    )


def test_clocks_of_operations_stand_still_while_their_node_is_down() -> None:
    world = World(stage_in_timeout_s=10, timeouts="fixed")
    job = world.submit("capacity=40")
    world.settle(c.MarkNodeDown("n1", "silent for 30 s"), c.CONTROLLER)
    world.advance(1000)
    assert world.state.jobs[job].failures == 0
    world.settle(c.MarkNodeBack("n1"), c.CONTROLLER)
    world.advance(9)
    assert world.state.jobs[job].failures == 0
    world.advance(1)
    assert world.state.jobs[job].failures == 1


def test_a_job_whose_node_is_down_says_so_wherever_it_is_in_its_life() -> None:
    world = World({"fast": 100})
    job = world.submit("capacity=40")

    def started() -> None:
        world.report(job, c.ScriptStarted(), world.order(job))

    def ended() -> None:
        world.report(job, c.ScriptEnded(JobState.COMPLETED), world.order(job))

    seen = []
    for step in (lambda: world.done(job), started, ended, *[lambda: world.done(job)] * 3):
        before = world.reason(job)
        world.settle(c.MarkNodeDown("n1", "silent for 30 s"), c.CONTROLLER)
        seen.append(world.shown(job)[2])
        assert world.reason(job) == "NodeDown", seen
        world.settle(c.MarkNodeBack("n1"), c.CONTROLLER)
        assert world.reason(job) == before
        step()
    assert seen == ["staging-in", "pre-run", "running", "post-run", "staging-out", "teardown"]
    world.settle(c.MarkNodeDown("n1", "silent for 30 s"), c.CONTROLLER)
    assert world.shown(job) == ("COMPLETED", "None", "complete")


def test_draining_a_node_revokes_what_was_staged_there_and_stages_it_elsewhere() -> None:
    world = World(nodes=2, cpus=1)
    busy = [world.submit(), world.submit()]
    job = world.submit("capacity=40")
    world.done(job)
    assert world.shown(job) == ("PENDING", "Resources", "staged-in")
    node = world.state.jobs[job].node
    world.settle(c.DrainNode(node, "maintenance"))
    assert world.shown(job) == ("PENDING", "BurstBufferOperation", "teardown")
    world.done(job)
    assert world.shown(job) == ("PENDING", "BurstBufferStageIn", "staging-in")
    assert world.state.jobs[job].node != node
    for other in busy:
        world.finish(other)
    world.finish(job)


def test_a_held_job_gives_its_staged_space_back_after_the_site_limit() -> None:
    world = World(cpus=1, staged_hold_time_s=60)
    world.submit()
    job = world.submit("capacity=40")
    world.done(job)
    world.settle(c.HoldJob(job), user())
    world.advance(59)
    assert world.free() == 60
    world.advance(1)
    world.done(job)
    assert world.shown(job) == ("PENDING", "JobHeldUser", "pending")
    assert world.free() == 100


def test_the_site_limit_of_a_hold_counts_from_the_hold_and_not_from_the_buffer() -> None:
    world = World(cpus=1, staged_hold_time_s=60)
    world.submit(time_limit_s=100_000)
    job = world.submit("capacity=40")
    world.done(job)
    world.advance(1_000)
    world.settle(c.HoldJob(job), user())
    held_at = world.at
    world.advance(59)
    assert world.shown(job)[2] == "staged-in"
    world.advance(1)
    assert world.shown(job)[2] == "teardown"
    assert world.state.jobs[job].held_at == held_at


def test_a_revoked_job_that_was_cancelled_meanwhile_does_not_come_back() -> None:
    world = World(cpus=1, staged_hold_time_s=60)
    world.submit()
    job = world.submit("capacity=40")
    world.done(job)
    world.settle(c.HoldJob(job), user())
    world.advance(60)
    world.settle(c.CancelJob(job))
    world.done(job)
    assert world.shown(job) == ("CANCELLED", "None", "complete")


def test_users_act_on_their_own_jobs_only() -> None:
    world = World()
    job = world.submit("capacity=40", who="alan")
    for command in (c.CancelJob(job), c.HoldJob(job), c.ReleaseJob(job)):
        rejection = world.settle(command, user("brenda"))
        assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.PERMISSION_DENIED


def test_an_agent_reports_for_its_own_node_only() -> None:
    world = World(nodes=2)
    job = world.submit("capacity=40")
    order = world.order(job)
    from forebay.replica.model.stages import Stage

    report = c.ReportOperation(world.state.jobs[job].node, job, order.attempt, Stage.STAGE_IN, c.OperationDone())
    other = "n2" if report.node == "n1" else "n1"
    for actor in (agent(other), OPERATOR, user()):
        rejection = world.settle(report, actor)
        assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.PERMISSION_DENIED


def test_dependencies_follow_the_guide_for_jobs_with_buffers() -> None:
    from forebay.replica.model.requests import Dependency, DependencyKind

    world = World()
    parent = world.submit("capacity=40")
    with_buffer = world.submit("capacity=10", dependencies=(Dependency(DependencyKind.AFTER_OK, parent),))
    without = world.submit(dependencies=(Dependency(DependencyKind.AFTER_OK, parent),))
    after_buffer = world.submit(dependencies=(Dependency(DependencyKind.AFTER_BURST_BUFFER, parent),))
    never = world.submit(dependencies=(Dependency(DependencyKind.AFTER_NOT_OK, parent),))
    waiting = [with_buffer, without, after_buffer, never]
    assert {world.reason(job) for job in waiting} == {"Dependency"}
    world.done(parent)
    world.done(parent)
    assert world.shown(parent)[2] == "post-run"
    assert world.state.jobs[without].state is JobState.CONFIGURING, "one without a buffer does not wait for stage-out"
    assert world.reason(with_buffer) == "Dependency"
    world.done(parent)
    world.done(parent)
    assert world.shown(parent)[2] == "teardown"
    assert world.reason(with_buffer) == "BurstBufferStageIn"
    assert world.reason(after_buffer) == "Dependency"
    world.done(parent)
    assert world.state.jobs[after_buffer].state is JobState.CONFIGURING
    assert world.reason(never) == "DependencyNeverSatisfied"


def test_finished_jobs_beyond_the_number_kept_leave_the_state_oldest_first() -> None:
    world = World(finished_jobs_kept=2)
    jobs = [world.submit("capacity=10") for _ in range(4)]
    for job in jobs:
        world.finish(job)
    assert sorted(world.state.jobs) == jobs[2:]
    rejection = world.settle(c.CancelJob(jobs[0]))
    assert isinstance(rejection, Rejection) and "history" in rejection.remedy
