"""What keeps others from space and CPUs, and what does not: suspended jobs, stuck teardowns, oversize, usage."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model.accounts import Account, AccountUser, Limit, LimitKind, Qos
from forebay.replica.model.job_states import JobState
from forebay.replica.model.jobs import Hold
from forebay.replica.model.pools import Pool
from forebay.replica.model.requests import JobOptions, JobRequest
from forebay.replica.model.usage import scheduling_class_of
from forebay.replica.scheduler import admission, scheduling_cycle
from forebay.replica.scheduler.quotas import QuotaCheck
from forebay.replica.values.units import SIZE_BYTES_MAX
from tests.replica.reference.reference_scheduler import run_cycle as reference_events
from tests.replica.scheduler.test_estimates import of as estimated
from tests.replica.scheduler.test_index import IndexedWorld
from tests.replica.scheduler.test_preemption import revoked, staged_behind_a_full_node
from tests.replica.world import World, user

# Suspended jobs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bb", ["", "capacity=5"])
def test_a_suspended_job_gives_its_cpus_to_others_and_takes_them_again_when_it_is_resumed(bb: str) -> None:
    made = IndexedWorld({"fast": 100}, cpus=2)
    first = made.submit(bb, cpus=2)
    if bb:
        made.done(first)
    made.report(first, c.ScriptStarted())
    second = made.submit(cpus=2)
    assert made.reason(second) == "Resources"
    made.settle(c.SuspendJob(first), user())
    assert made.state.jobs[second].state is JobState.CONFIGURING
    assert made.state.held_bytes.get("fast", 0) == (5 if bb else 0)  # its data stays
    # As in Slurm: at once, whoever has them by then.
    made.settle(c.ResumeJob(first), user())
    assert made.state.jobs[first].state is JobState.RUNNING
    third = made.submit(cpus=1)
    assert dict(made.verdict(third).figures)["free_cpus"] == "n1:-2"
    made.finish(second)
    assert made.reason(third) == "Resources"
    made.finish(first)
    assert made.state.jobs[third].state is JobState.CONFIGURING


def test_a_suspended_job_goes_on_counting_against_limits_of_what_runs() -> None:

    made = IndexedWorld(cpus=8)
    made.settle(c.SetQos(Qos("one", limits=(Limit(LimitKind.MAX_JOBS_PER_USER, "", 1),))))
    first = made.submit(options=JobOptions(qos="one"))
    made.report(first, c.ScriptStarted())
    made.settle(c.SuspendJob(first), user())
    second = made.submit(options=JobOptions(qos="one"))
    assert made.reason(second) == "QOSMaxJobsPerUserLimit"


# Stuck teardowns -----------------------------------------------------------------------------------------------------


def stuck_teardown(world: World, size: int) -> int:
    """Have a job end whose buffer cannot be removed until somebody releases it."""
    job = world.submit(f"capacity={size}", cpus=1)
    while world.shown(job)[2] != "teardown":
        world.done(job)
    world.report(job, c.OperationFailed("it is busy", final=True))
    assert world.shown(job)[2] == "teardown-fail" and world.state.jobs[job].stuck
    return job


def test_space_that_nobody_gives_back_does_not_keep_others_from_giving_way() -> None:
    world, _, waiting = staged_behind_a_full_node(RevokeAfter="0")
    stuck = stuck_teardown(world, 20)
    urgent = world.submit("capacity=20", priority=9)
    # As much as the urgent one asks for is being removed, but nobody knows when.
    assert revoked(world, waiting)
    world.done(waiting)
    assert world.shown(urgent)[2] == "staging-in"
    assert world.state.held_bytes["fast"] == 40 and world.state.jobs[stuck].stuck


def test_a_teardown_that_is_tried_again_is_waited_for() -> None:
    world, _, waiting = staged_behind_a_full_node(RevokeAfter="0")
    job = world.submit("capacity=20", cpus=1)
    while world.shown(job)[2] != "teardown":
        world.done(job)
    world.report(job, c.OperationFailed("it is busy"))
    assert world.shown(job)[2] == "teardown-fail" and not world.state.jobs[job].stuck
    world.submit("capacity=20", priority=9)
    assert not revoked(world, waiting)


def test_nobody_can_say_when_space_comes_that_waits_for_a_person() -> None:
    made = IndexedWorld({"fast": 100}, nodes=2)
    stuck = stuck_teardown(made, 60)
    job = made.submit("capacity=50")
    assert not estimated(made, job).is_known
    assert "expected_start_us" not in dict(made.verdict(job).figures)
    made.settle(c.ReleaseJob(stuck))
    assert estimated(made, job).is_known


# Requests that are too large -----------------------------------------------------------------------------------------


def shrunk(jobs: int, **changes: Any) -> IndexedWorld:
    """A world with a pool that has shrunk below what many jobs wait for."""
    made = IndexedWorld({"fast": 100, "bulk": 100}, cpus=64, **changes)
    for _ in range(jobs):
        made.submit("capacity=90 pool=fast", hold=Hold.USER)
    made.settle(c.SetPool(Pool("fast", 50, 1, is_default=True)))
    for job in range(1, jobs + 1):
        made.settle(c.ReleaseJob(job))
    return made


def test_requests_larger_than_their_pool_are_not_checked_and_do_not_keep_others_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = shrunk(12)
    small = made.submit("capacity=10 pool=fast", hold=Hold.USER)
    checked: list[int] = []
    real = admission.space_decision

    def counted(current: admission.CycleState, request: admission.SpaceRequest) -> admission.SpaceDecision:
        checked.append(request.job.id)
        return real(current, request)

    made.passes = False
    made.settle(c.ReleaseJob(small))
    monkeypatch.setattr(scheduling_cycle, "space_decision", counted)
    events = scheduling_cycle.run_cycle(made.index, made.at)
    assert checked == [small]
    assert [type(event) for event in events] == [e.BufferAllocated]
    assert events == reference_events(made.state, made.at)


def test_a_pool_that_grows_again_admits_them_and_one_that_shrinks_keeps_them_back() -> None:
    made = shrunk(3)
    assert [made.reason(job) for job in (1, 2, 3)] == ["BurstBufferResources"] * 3
    assert "that pool fast has in service" in made.verdict(1).sentence
    made.settle(c.SetPool(Pool("fast", 90, 1, is_default=True)))
    assert made.shown(1)[2] == "staging-in" and "not have enough free" in made.verdict(2).sentence
    made.settle(c.SetPool(Pool("fast", 95, 1, is_default=True, out_of_service_bytes=10)))
    assert "that pool fast has in service" in made.verdict(2).sentence


def test_tasks_of_an_array_and_what_a_limit_skips_are_decided_the_same(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(admission, "SKIPPED_MAX", 2)
    made = IndexedWorld({"fast": 100}, cpus=64)
    made.settle(c.SetQos(Qos("small", limits=(Limit(LimitKind.GRP_BB, "fast", 100),))))
    made.submit("capacity=40", options=JobOptions(qos="small"))
    for size in (90, 90, 90, 20):
        made.submit(f"capacity={size}", options=JobOptions(qos="small"), hold=Hold.USER)
    array = made.submit("capacity=80", array=(1, 2, 3), hold=Hold.USER, throttle=2)
    made.settle(c.SetPool(Pool("fast", 60, 1, is_default=True)))
    for job in (2, 3, 4, 5, array):
        made.settle(c.ReleaseJob(job))
    # Those before it that ask for more than the pool has do not count as skipped.
    assert made.shown(5)[2] == "staging-in"
    made.settle(c.SetPool(Pool("fast", 200, 1, is_default=True)))
    assert [made.shown(array + task)[2] for task in range(3)] == ["staging-in", "pending", "pending"]


# What was used -------------------------------------------------------------------------------------------------------


def limited(kind: str, value: int) -> World:

    made = IndexedWorld({"fast": 100, "bulk": 100}, cpus=64)
    limit = (Limit(LimitKind.GRP_BB_MINUTES, "fast", value),)
    members = (AccountUser("alan"), AccountUser("eve"))
    made.settle(c.SetAccount(Account("top", limits=limit if kind == "parent" else ())))
    own = (AccountUser("alan", limit), AccountUser("eve")) if kind == "user" else members
    made.settle(c.SetAccount(Account("lab", "top", own, limit if kind == "account" else ())))
    made.settle(c.SetQos(Qos("q", limits=limit if kind == "qos" else ())))
    return made


@pytest.mark.parametrize(
    "kind,reason",
    [
        ("account", "AssocGrpBBMinutes"),
        ("parent", "AssocGrpBBMinutes"),
        ("user", "AssocGrpBBMinutes"),
        ("qos", "QOSGrpBBMinutes"),
    ],
)
def test_space_times_time_is_used_up_and_counts_again_from_nothing_when_it_is_reset(kind: str, reason: str) -> None:

    made = limited(kind, 100)
    options = JobOptions(account="lab", qos="q")
    first = made.submit("capacity=40 pool=fast", options=options, time_limit_s=60)  # at most 40 byte-minutes
    made.advance(120)  # it is held for two minutes
    second = made.submit("capacity=70 pool=fast", options=options, time_limit_s=60)
    verdict = made.verdict(second)
    assert (verdict.reason, dict(verdict.figures)) == (
        reason,
        {"in_use": "40 minutes", "asked": "70 minutes", "limit": "100 minutes"},
    )
    made.finish(first)
    # What was used is what was held, not what was asked for.
    assert made.state.consumed["a/lab//fast"] == made.state.consumed["q/q//"] == 80
    assert dict(made.verdict(second).figures)["in_use"] == "80 minutes"
    other = made.submit("capacity=70 pool=bulk", options=options)
    assert made.shown(other)[2] == "staging-in"
    third = made.submit("capacity=20 pool=fast", options=options, time_limit_s=60)
    assert made.shown(third)[2] == "staging-in"
    whose, name = ("q", "q") if kind == "qos" else ("a", "top" if kind == "parent" else "lab")
    if kind == "parent":
        made.settle(c.ResetUsage("a", "lab"))
    made.settle(c.ResetUsage(whose, name))
    made.finish(third)
    assert made.shown(second)[2] == "staging-in"


def test_a_job_that_exceeds_it_by_itself_waits_with_the_limit_s_name_and_figures() -> None:

    made = limited("qos", 100)
    job = made.submit("capacity=60 pool=fast", options=JobOptions(qos="q"), time_limit_s=61)
    assert made.verdict(job).reason == "QOSGrpBBMinutes"
    assert dict(made.verdict(job).figures) == {"in_use": "0 minutes", "asked": "120 minutes", "limit": "100 minutes"}


def test_other_users_of_the_account_do_not_count_for_a_user_s_own_limit() -> None:

    made = limited("user", 50)
    eve = made.submit("capacity=90 pool=fast", who="eve", options=JobOptions(account="lab"))
    made.advance(300)
    made.finish(eve)
    assert made.shown(made.submit("capacity=50 pool=fast", options=JobOptions(account="lab")))[2] == "staging-in"


def test_usage_goes_with_its_account_or_qos_and_never_overflows() -> None:

    made = World({"fast": SIZE_BYTES_MAX})

    made.settle(c.SetAccount(Account("lab", members=(AccountUser("alan"),))))
    made.settle(c.SetQos(Qos("q")))
    job = made.submit(f"capacity={SIZE_BYTES_MAX // 2}", options=JobOptions(account="lab", qos="q"))
    made.advance(600)
    made.finish(job)
    assert set(made.state.consumed.values()) == {SIZE_BYTES_MAX}
    assert len(made.state.consumed) == 6
    made.settle(c.DeleteQos("q"))
    assert not any(key.startswith("q/") for key in made.state.consumed)
    made.settle(c.DeleteAccount("lab"))
    assert not made.state.consumed


def test_what_a_tree_of_accounts_used_is_summed_once_for_all_candidates_of_a_pass() -> None:

    made = World({"fast": 100})
    made.settle(c.SetQos(Qos("q", limits=(Limit(LimitKind.GRP_BB_MINUTES, "fast", 5),))))
    scheduling_class = scheduling_class_of(JobRequest("job", "alan", "", "", 1, options=JobOptions(qos="q")))
    quotas = QuotaCheck(made.state, made.at)
    assert quotas.space_gate(scheduling_class, "fast", 5, 60) is None
    quotas._state = msgspec.structs.replace(made.state, consumed=made.state.consumed.set("q/q//fast", 99))
    assert quotas.space_gate(scheduling_class, "fast", 5, 60) is None
    fresh = QuotaCheck(quotas._state, made.at).space_gate(scheduling_class, "fast", 5, 60)
    assert fresh is not None and fresh.reason == "QOSGrpBBMinutes"


def test_the_site_may_hold_what_is_too_large_at_submit_and_a_pass_does_not_check_it() -> None:
    made = IndexedWorld({"fast": 100})
    made.settle(c.ConfigureSite(settings=(ConfSetting("HoldOversized", "yes"),), partial=True))
    large = made.submit("capacity=500")
    assert made.reason(large) == "BurstBufferResources"
    assert made.index.queues.queues[("large", "fast", 0, None)].first[1] == large
