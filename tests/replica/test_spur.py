"""What SPUR.md says, sentence by sentence: the cases of Spur's tests, and where Spur goes wrong."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from forebay.replica.grammar.lexer import DirectiveRejected
from forebay.replica.messages import commands as c
from forebay.replica.model.accounts import License, Limit, LimitKind
from forebay.replica.model.jobs import Hold
from forebay.replica.model.requests import Dependency, DependencyKind, JobOptions, JobRequest
from forebay.replica.model.transfers import TransferRules
from forebay.replica.state.digest import state_digest
from forebay.replica.values.errors import Rejection, RejectionCode
from forebay.replica.values.units import seconds
from tests.replica.test_accounting import changed, given, qos
from tests.replica.world import SCRIPT, World, user

# Cases from its tests -------------------------------------------------------------------------------------------------


def test_500_requested_from_a_pool_of_100_is_refused_at_submit() -> None:
    rejection = World({"fast": 100}).try_submit("capacity=500")
    assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.CAPACITY_OVER_TOTAL


def test_40_of_100_is_staging_in_with_60_free_held_off_dispatch_and_afterwards_staged_in_and_dispatchable() -> None:
    world = World({"fast": 100})
    job = world.submit("capacity=40")
    assert world.shown(job) == ("PENDING", "BurstBufferStageIn", "staging-in")
    assert world.free() == 60
    world.settle(c.HoldJob(job), user())
    world.done(job)
    assert world.shown(job)[2] == "staged-in"
    world.settle(c.ReleaseJob(job), user())
    assert world.shown(job) == ("CONFIGURING", "None", "pre-run")


def test_of_two_jobs_of_60_from_100_one_stages_and_the_other_shows_burst_buffer_resources_in_the_same_pass() -> None:
    world = World({"fast": 100})
    world.settle(c.DrainNode("n1", "x"))
    first, second = world.submit("capacity=60"), world.submit("capacity=60")
    world.settle(c.ResumeNode("n1"))
    assert [world.reason(first), world.reason(second)] == ["BurstBufferStageIn", "BurstBufferResources"]


def test_60_is_held_while_staged_and_running_and_100_is_free_after_teardown() -> None:
    world = World({"fast": 100})
    job = world.submit("capacity=60")
    free = []
    while job in world.state.unfinished:
        free.append(world.free())
        world.done(job)
    assert set(free) == {40}
    assert world.free() == 100


def test_a_throttled_task_neither_stages_nor_reserves() -> None:
    world = World({"fast": 160})
    spec = JobRequest("job", "alan", SCRIPT, "/out", 60)
    from forebay.replica.grammar.directives import parse_request

    asked = replace(spec, buffer=parse_request(SCRIPT, "capacity=60"))
    command = c.SubmitJob(asked, tasks=(0, 1, 2), throttle=1)
    first = world.settle(command, user())
    assert isinstance(first, int)
    assert world.free() == 100
    assert [world.reason(job) for job in range(first, first + 3)] == [
        "BurstBufferStageIn",
        "JobArrayTaskLimit",
        "JobArrayTaskLimit",
    ]


def test_with_a_begin_time_in_the_future_and_a_shortfall_begin_time_is_shown_and_not_the_shortfall() -> None:
    world = World({"fast": 100})
    world.submit("capacity=100")
    assert world.reason(world.submit("capacity=100", begin_at=world.at + seconds(100))) == "BeginTime"


def test_commands_without_capacity_reserve_nothing_and_still_stage() -> None:
    world = World({"fast": 100})
    world.state = replace(world.state, transfer_rules=TransferRules(backends=("native", "command")))
    job = world.submit("stage_in:true;")
    assert world.shown(job)[1:] == ("BurstBufferStageIn", "staging-in")
    assert world.free() == 100


@pytest.mark.parametrize("text", ["nonsense", "capacity=abc", "capacity="])
def test_nonsense_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(DirectiveRejected) as refused:
        World({"fast": 100}).try_submit(text)
    assert "column" in refused.value.rejection.place


# The order of the gates -----------------------------------------------------------------------------------------------


def test_each_gate_names_its_reason_until_it_opens_and_then_the_next_one_does() -> None:
    world = World({"fast": 100}, cpus=1)
    changed(world, c.SetLicense(License("matlab", 0)))
    changed(world, c.SetLicense(License("matlab", 1)))
    qos(world, Limit(LimitKind.GRP_BB, "fast", 10))
    blocker = world.submit(time_limit_s=100_000)
    world.report(blocker, c.ScriptStarted())
    full = given(world, "capacity=90", time_limit_s=100_000)
    spec = JobRequest(
        "job",
        "alan",
        SCRIPT,
        "/out",
        60,
        begin_at=world.at + seconds(10),  # type: ignore[arg-type]
        dependencies=(Dependency(DependencyKind.AFTER, full),),
    )
    from forebay.replica.grammar.directives import parse_request

    options = JobOptions(qos="q", licenses=(("matlab", 1),))
    asked = replace(spec, buffer=parse_request(SCRIPT, "capacity=50"), options=options)
    job = world.settle(c.SubmitJob(asked, Hold.USER), user())
    assert isinstance(job, int)
    reasons = [world.reason(job)]
    world.settle(c.ReleaseJob(job), user())
    reasons.append(world.reason(job))
    world.advance(10)
    reasons.append(world.reason(job))
    world.report(blocker, c.ScriptEnded(world.state.jobs[blocker].state.__class__.COMPLETED))
    world.done(full)
    world.report(full, c.ScriptStarted())
    reasons.append(world.reason(job))
    changed(world, c.SetLicense(License("matlab", 0)))
    qos(world, Limit(LimitKind.GRP_BB, "fast", 100))
    reasons.append(world.reason(job))
    changed(world, c.SetLicense(License("matlab", 1)))
    reasons.append(world.reason(job))
    world.finish(full)
    reasons.append(world.reason(job))
    world.done(job)
    reasons.append(world.reason(job))
    assert reasons == [
        "JobHeldUser",
        "BeginTime",
        "Dependency",
        "QOSGrpBB",
        "Licenses",
        "BurstBufferResources",
        "BurstBufferStageIn",
        "None",
    ]


def test_a_hold_a_deadline_and_a_begin_time_are_never_overwritten_by_a_later_gate() -> None:
    world = World({"fast": 100})
    changed(world, c.SetLicense(License("matlab", 1)))
    given(world, licenses=(("matlab", 1),))
    asked = {"licenses": (("matlab", 1),)}
    held = given(world, "capacity=50", **asked)
    world.settle(c.HoldJob(held), user())
    late = given(world, "capacity=50", deadline=world.at + seconds(30), **asked)
    begins = given(world, "capacity=50", begin_at=world.at + seconds(30), **asked)
    assert [world.reason(job) for job in (held, late, begins)] == ["JobHeldUser", "DeadLine", "BeginTime"]


# Where Spur goes wrong ------------------------------------------------------------------------------------------------


def test_1_stage_state_is_in_the_ledger_so_a_new_leader_has_it() -> None:
    from forebay.replica.fold.apply import apply_batch
    from forebay.replica.state.state import EMPTY

    world = World({"fast": 100})
    world.done(world.submit("capacity=40"))
    world.submit("capacity=30")
    replayed = EMPTY
    for batch in world.ledger:
        following = apply_batch(replayed, batch)
        assert following is not None
        replayed = following
    assert state_digest(replayed) == state_digest(world.state)
    assert replayed.held_bytes["fast"] == 70


def test_2_a_job_that_waits_again_gives_back_its_buffer_and_stages_again() -> None:
    world = World({"fast": 100}, nodes=2)
    job = world.submit("capacity=60", hold=Hold.NONE)
    node = world.state.jobs[job].node
    world.settle(c.HoldJob(job), user())
    world.done(job)
    world.settle(c.DrainNode(node, "x"))
    assert world.shown(job)[2] == "teardown"
    world.done(job)
    world.settle(c.ReleaseJob(job), user())
    assert world.shown(job)[2] == "staging-in"
    assert world.free() == 40


def test_3_a_large_request_of_high_priority_is_not_passed_by_small_ones_for_ever() -> None:
    world = World({"fast": 100}, max_passes=5)
    small = [world.submit("capacity=40", time_limit_s=10_000) for _ in range(2)]
    large = world.submit("capacity=100", priority=9)
    for _ in range(50):
        if world.state.buffers[large].state.word != "pending":
            break
        small.append(world.submit("capacity=40", time_limit_s=10_000))
        world.advance(1)
        world.finish(next(job for job in small if job in world.state.unfinished and world.state.jobs[job].node))
    assert world.state.buffers[large].state.word == "staging-in"


def test_4_a_staging_job_takes_no_licence_and_no_headroom_of_a_qos_while_nothing_runs() -> None:
    world = World({"fast": 100})
    changed(world, c.SetLicense(License("matlab", 1)))
    qos(world, Limit(LimitKind.MAX_JOBS_PER_USER, "", 1), Limit(LimitKind.GRP_CPUS, "", 1))
    given(world, "capacity=10", qos="q", licenses=(("matlab", 1),))
    runs = given(world, qos="q", licenses=(("matlab", 1),))
    assert world.state.jobs[runs].state.name == "CONFIGURING"


def test_5_a_held_job_s_staged_capacity_is_torn_down_after_the_site_s_limit_with_an_event_that_says_so() -> None:
    from forebay.replica.messages import events as e

    world = World({"fast": 100}, staged_hold_time_s=50)
    job = world.submit("capacity=40")
    world.settle(c.HoldJob(job), user())
    world.done(job)
    world.advance(51)
    assert world.shown(job)[2] == "teardown"
    events = [event for batch in world.ledger for entry in batch.entries for event in entry.events]
    (why,) = [event.reason for event in events if isinstance(event, e.AllocationRevoked)]
    assert "StagedHoldTime" in why


@pytest.mark.parametrize(("text", "size"), [("100MB", 100 * 10**6), ("1.5KiB", 1536)])
def test_6_units_are_exact(text: str, size: int) -> None:
    world = World({"fast": 10**15})
    job = world.submit(script=f"#!/bin/sh\n#DW jobdw capacity={text} access_mode=striped type=scratch\n")
    assert world.state.buffers[job].granted_bytes == size


def test_8_one_decision_is_one_entry_of_a_batch() -> None:
    world = World({"fast": 100})
    before = len(world.ledger)
    given(world, "capacity=10", nice=3)
    submitted = world.ledger[before].entries
    assert len(submitted) == 1
    assert [type(event).__name__ for event in submitted[0].events] == ["JobSubmitted"]


def test_9_a_report_of_an_earlier_attempt_no_longer_counts() -> None:
    world = World({"fast": 100})
    job = world.submit("capacity=10")
    order = world.order(job)
    world.register("n1", instance="i2")
    rejection = world.report(job, c.OperationDone(1, 1), order)
    assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.STALE_ATTEMPT


def test_11_a_duplicate_submit_after_a_lost_reply_makes_one_job() -> None:
    world = World()
    command = c.SubmitJob(JobRequest("job", "alan", SCRIPT, "/out", 60))
    first = world.settle(command, user(), b"\x07" * 16)
    assert world.settle(command, user(), b"\x07" * 16) == first
    assert len(world.state.jobs) == 1
