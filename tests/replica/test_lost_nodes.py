"""A node that does not answer: what an operator gives up on it, what leaves it by itself, and what a return finds."""

from __future__ import annotations

import pytest

from forebay.replica.messages import commands as c
from forebay.replica.model.buffers import BufferState
from forebay.replica.model.job_states import ENDED, JobState
from forebay.replica.model.requests import JobOptions
from forebay.replica.model.stages import Stage
from forebay.replica.operations.lost_nodes import Loss, loses_results, loss_of
from forebay.replica.values.errors import Rejection, RejectionCode
from tests.replica.world import OPERATOR, World, agent, user

PLAIN = "#DW jobdw capacity=10 pool=fast access_mode=striped type=scratch\n"
OUT = PLAIN + "#DW stage_out type=file source=$DW_JOB_STRIPED/r destination=/out/r\n"
STAGES = ("stage_in", "staged", "pre_run", "run", "post_run", "stage_out", "teardown")


def down(here: World, node: str = "n1") -> None:
    assert not isinstance(here.settle(c.MarkNodeDown(node, "silent"), c.CONTROLLER), Rejection)


def lose(here: World, node: str = "n1") -> None:
    assert not isinstance(here.settle(c.LoseNode(node, "it burnt"), OPERATOR), Rejection)


def reach(here: World, stage: str, directives: str, **spec: object) -> int:
    """Return a job that has come to a stage on n1: `staged` waits for CPUs there, `pre_run` has its script ordered."""
    script = f"#!/bin/sh\n{directives}true\n"
    taken = 0
    if stage == "staged":
        taken = here.submit("", cpus=8, script=script.replace(directives, ""), options=JobOptions(requeue=False))
        here.report(taken, c.ScriptStarted())
    job = here.submit("", script=script, **spec)
    order = {"staged": "stage_in", "pre_run": "run"}.get(stage, stage)
    while here.order(job).stage != order:
        if here.order(job).stage == "run":
            here.report(job, c.ScriptStarted())
            here.report(job, c.ScriptEnded(JobState.COMPLETED, 0))
        else:
            here.done(job)
    if stage == "staged":
        here.done(job)
        assert here.state.buffers[job].state is BufferState.STAGED_IN
    if stage == "run":
        here.report(job, c.ScriptStarted())
    return job


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("requeues", [False, True])
@pytest.mark.parametrize("directives", [OUT, PLAIN], ids=["results", "plain"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_lost_node_gives_everything_up_and_becomes_what_was_said(
    stage: str, directives: str, requeues: bool, cancel: bool
) -> None:
    here = World(requeue_on_node_fail=requeues)
    job = reach(here, stage, directives)
    down(here)
    if cancel:
        here.settle(c.CancelJob(job), user())
    before, buffer = here.state.jobs[job], here.state.buffers[job]
    said, loses = loss_of(here.state, before, buffer), loses_results(before, buffer)
    lose(here)
    assert not here.state.on_node.get("n1"), "nothing is left there"
    assert here.free() == 100
    after = here.state.jobs[job]
    waits = after.state is JobState.PENDING
    assert (said in (Loss.STAGED_AGAIN, Loss.REQUEUED)) == waits, (said, after.state)
    assert (said is Loss.REQUEUED) == bool(after.effective_interruptions.requeues)
    if said is Loss.ENDED:
        assert after.state is (JobState.CANCELLED if cancel else JobState.NODE_FAIL)
    if said is Loss.RESULTS_LOST:
        assert loses and after.state is JobState.NODE_FAIL
    if said is Loss.REMOVED:
        assert after.state in ENDED and after.state is not JobState.NODE_FAIL
    # Another node does what waits.
    here.register("n2", storage="s2")
    if waits:
        assert here.order(job).stage == "stage_in" and here.agent_of(job) == "n2"
        here.finish(job)
        assert here.state.jobs[job].state is JobState.COMPLETED


@pytest.mark.parametrize("requeues", [False, True])
def test_a_job_without_a_buffer_ends_or_waits_again(requeues: bool) -> None:
    here = World(requeue_on_node_fail=requeues)
    job = here.submit("")
    here.report(job, c.ScriptStarted())
    down(here)
    lose(here)
    assert here.state.jobs[job].state is (JobState.PENDING if requeues else JobState.NODE_FAIL)
    assert "n1" not in here.state.abandoned


def test_a_requeue_that_waits_for_the_node_is_carried_out_when_it_is_lost() -> None:
    here = World(requeue_on_node_fail=False)
    job = reach(here, "run", PLAIN)
    down(here)
    here.settle(c.RequeueJob(job), user())
    assert here.state.jobs[job].state is JobState.RUNNING
    lose(here)
    assert here.state.jobs[job].state is JobState.PENDING


@pytest.mark.parametrize("restarted", [False, True])
def test_an_agent_that_returns_removes_what_was_given_up_and_its_reports_do_not_count(restarted: bool) -> None:
    here = World(requeue_on_node_fail=True)
    job = reach(here, "run", OUT)
    late = here.order(job)
    down(here)
    lose(here)
    (given_up,) = here.state.abandoned["n1"].buffers
    assert (given_up.job, given_up.user) == (job, "alan")
    rejection = here.settle(c.ReportOperation("n1", job, late.attempt, Stage.RUN, c.ScriptEnded(JobState.COMPLETED, 0)))
    assert isinstance(rejection, Rejection)
    if restarted:
        here.register("n1", instance="i2")
    else:
        here.settle(c.MarkNodeBack("n1"), c.CONTROLLER)
    assert here.state.nodes["n1"].is_up and not here.state.nodes["n1"].lost
    # The job waits for its staging on the same node: what is left of its former life is removed first.
    (order,) = here.orders("n1")
    assert (order.job, order.stage, order.attempt, order.user) == (job, "teardown", given_up.attempt, "alan")
    assert order.hurry and order.has_buffer

    def report(result: c.OperationResult) -> Rejection | int:
        return here.settle(c.ReportOperation("n1", job, order.attempt, Stage.TEARDOWN, result), agent("n1"))

    assert not isinstance(report(c.OperationFailed("it is busy")), Rejection)
    assert "n1" in here.state.abandoned, "it is still there"
    assert not isinstance(report(c.OperationDone()), Rejection)
    assert "n1" not in here.state.abandoned
    rejection = report(c.OperationDone())
    assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.STALE_ATTEMPT
    assert here.order(job).stage == "stage_in"
    here.finish(job)
    assert here.state.jobs[job].state is JobState.COMPLETED


def test_another_disk_has_nothing_of_what_was_given_up() -> None:
    here = World()
    reach(here, "run", OUT)
    down(here)
    lose(here)
    here.register("n1", instance="i2", storage="another")
    assert "n1" not in here.state.abandoned and here.orders("n1") == ()


def test_a_persistent_buffer_that_was_being_created_is_removed_by_the_agent_that_returns() -> None:
    here = World()
    here.configure(Flags="EnablePersistent")
    job = here.submit(
        "",
        script="#!/bin/sh\n#BB create_persistent name=lake capacity=10 pool=fast access=striped type=scratch\ntrue\n",
    )
    assert here.order(job).stage == "stage_in"
    down(here)
    lose(here)
    assert "lake" not in here.state.persistent and here.free() == 100
    here.settle(c.CancelJob(job), user())
    here.settle(c.MarkNodeBack("n1"), c.CONTROLLER)
    (order,) = here.orders("n1")
    assert [one.name for one in order.destroys] == ["lake"]
    # One that is created under the name before that is another one.
    here.submit(
        "",
        script="#!/bin/sh\n#BB create_persistent name=lake capacity=10 pool=fast access=striped type=scratch\ntrue\n",
    )
    assert next(one for one in here.orders("n1") if one.job == job).destroys == ()


@pytest.mark.parametrize("stage", STAGES)
def test_only_what_has_not_started_leaves_a_node_that_is_down_for_long(stage: str) -> None:
    here = World(node_down_restage_s=300, requeue_on_node_fail=True)
    job = reach(here, stage, OUT)
    here.register("n2", storage="s2")
    down(here)
    here.advance(299)
    before = here.state.jobs[job]
    assert before.node == "n1"
    here.advance(2)
    if stage in ("stage_in", "staged"):
        assert here.agent_of(job) == "n2" and here.order(job).stage == "stage_in"
        assert [one.job for one in here.state.abandoned["n1"].buffers] == [job]
    else:
        assert here.state.jobs[job] == before, "it may have run there"


@pytest.mark.parametrize("held", [False, True])
def test_a_site_that_wants_no_restaging_and_a_job_whose_staging_failed_wait_for_the_node(held: bool) -> None:
    here = World(node_down_restage_s=300 if held else 0, stage_retries=0)
    job = here.submit("", script=f"#!/bin/sh\n{PLAIN}true\n")
    if held:
        here.report(job, c.OperationFailed("no such file"))
    here.register("n2", storage="s2")
    down(here)
    here.advance(100_000)
    assert here.state.jobs[job].node == "n1"


def test_a_node_that_was_down_for_a_while_begins_anew() -> None:
    here = World(node_down_restage_s=300)
    job = here.submit("", script=f"#!/bin/sh\n{PLAIN}true\n")
    here.register("n2", storage="s2")
    for _ in range(3):
        down(here)
        here.advance(200)
        here.settle(c.MarkNodeBack("n1"), c.CONTROLLER)
    assert here.state.jobs[job].node == "n1"


def test_nothing_but_a_node_that_is_down_is_lost() -> None:
    here = World()
    assert isinstance(rejection := here.settle(c.LoseNode("n9", "")), Rejection)
    assert rejection.code is RejectionCode.UNKNOWN_NODE
    assert isinstance(rejection := here.settle(c.LoseNode("n1", "")), Rejection)
    assert "its agent answers" in rejection.sentence and "drain" in rejection.remedy
    down(here)
    assert isinstance(rejection := here.settle(c.LoseNode("n1", ""), user()), Rejection)
    assert rejection.code is RejectionCode.PERMISSION_DENIED
    lose(here)
    assert here.state.nodes["n1"].reason == "declared lost by operator: it burnt"
    revision = here.state.revision
    lose(here)
    assert here.state.revision == revision + 1 and not here.ledger[-1].entries[0].events


def test_a_buffer_on_a_node_that_is_down_is_not_cleared_before_the_node_is_lost() -> None:
    here = World()
    job = reach(here, "stage_out", OUT)
    down(here)
    rejection = here.settle(c.ClearBuffer(job=job, discard=True))
    assert isinstance(rejection, Rejection) and "forebay node lost n1" in rejection.remedy


def test_what_a_provider_has_is_for_an_operator_to_look_at() -> None:
    here = World(provider="generic", start_stage_in="/opt/in", start_stage_out="/opt/out")
    job = here.submit("capacity=10 pool=fast")
    assert here.order(job).stage == "stage_in"
    here.advance(0)
    down(here)
    here.advance(100_000)
    assert here.state.buffers[job].state is BufferState.STAGING_IN, "its teardown cannot be run from elsewhere"
    lose(here)
    assert here.state.buffers[job].state is BufferState.TEARDOWN_FAIL
    assert "provider" in here.state.jobs[job].message
    assert not isinstance(here.settle(c.ClearBuffer(job=job)), Rejection)
    assert here.free() == 100
