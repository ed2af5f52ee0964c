"""Changing a job that waits: what may be changed, by whom, and what follows; dependencies of which one is enough."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.grammar.directives import read_request
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model.accounts import Account, AccountUser, License, Limit, LimitKind, Qos
from forebay.replica.model.job_states import JobState
from forebay.replica.model.jobs import Hold
from forebay.replica.model.partitions import Partition, PartitionState
from forebay.replica.model.requests import (
    DEFAULT_PRIORITY,
    BufferRequest,
    Dependency,
    DependencyKind,
    JobChange,
    JobOptions,
    JobRequest,
    with_options,
)
from forebay.replica.values.errors import Rejection, RejectionCode
from forebay.replica.values.units import NEVER, Instant, seconds
from tests.replica.scheduler.test_estimates import of as estimated
from tests.replica.scheduler.test_index import IndexedWorld
from tests.replica.world import OPERATOR, SCRIPT, World, user

K = DependencyKind


def world(**changes: Any) -> World:
    return IndexedWorld({"fast": 100, "bulk": 50}, **{"nodes": 1, "cpus": 2, **changes})


def update(made: World, job: int, who: c.Actor | None = None, **changes: Any) -> Rejection | int:
    return made.settle(c.UpdateJob(job, JobChange(**changes)), who or user())


def refused(outcome: Rejection | int) -> Rejection:
    assert isinstance(outcome, Rejection), outcome
    return outcome


def rebuffer(made: World, job: int, bb: str) -> Rejection | int:
    return made.settle(c.UpdateJob(job, buffer=read_request(SCRIPT, bb).request), user())


def events_of_last(made: World) -> list[e.Event]:
    return [event for entry in made.ledger[-1].entries for event in entry.events]


# Who may, and when ---------------------------------------------------------------------------------------------------


def test_its_user_may_lower_time_limit_and_priority_and_only_an_operator_raises_them() -> None:
    made = world()
    job = made.submit(hold=Hold.USER, priority=5, who="alan")
    assert isinstance(update(made, job, time_limit_s=30, priority=4, nice=7), int)
    for changes in ({"time_limit_s": 31}, {"priority": 5}, {"nice": -1}):
        rejection = refused(update(made, job, **changes))
        assert (rejection.code, [rejection.place]) == (RejectionCode.PERMISSION_DENIED, list(changes))
        assert isinstance(update(made, job, OPERATOR, **changes), int)
    record = made.state.jobs[job]
    assert (record.request.time_limit_s, record.request.priority) == (31, 5)
    assert made.state.jobs[job].request.options.nice == -1
    # What an operator has set, the user may keep or worsen.
    assert isinstance(update(made, job, nice=-1), int) and isinstance(update(made, job, nice=0), int)
    assert refused(update(made, job, user("eve"), comment="x")).code is RejectionCode.PERMISSION_DENIED


@pytest.mark.parametrize("ended", [False, True])
def test_only_a_job_that_waits_can_be_changed(ended: bool) -> None:
    made = world()
    job = made.submit()
    if ended:
        made.finish(job)
    rejection = refused(update(made, job, OPERATOR, comment="x"))
    assert rejection.code is RejectionCode.WRONG_STATE and "only pending jobs" in rejection.remedy
    assert refused(update(made, 99, OPERATOR, comment="x")).code is RejectionCode.UNKNOWN_JOB


@pytest.mark.parametrize("nice", (-1, 0, 1))
@pytest.mark.parametrize("priority", range(4))
@pytest.mark.parametrize("role", c.ActorRole)
def test_who_submits_as_a_user_never_puts_a_job_before_those_of_others(
    role: c.ActorRole, priority: int, nice: int
) -> None:
    made = world()
    request = JobRequest("job", "alan", SCRIPT, "/out", 60, priority=priority)
    answer = made.settle(c.SubmitJob(with_options(request, JobOptions(nice=nice))), c.Actor(role, "alan"))
    wrong = ["priority"] * (priority > DEFAULT_PRIORITY) + ["nice"] * (nice < 0)
    if role is c.ActorRole.OPERATOR or (role is c.ActorRole.USER and not wrong):
        assert isinstance(answer, int)
    else:
        rejection = refused(answer)
        assert rejection.code is RejectionCode.PERMISSION_DENIED
        assert role is not c.ActorRole.USER or rejection.place == wrong[0]


def test_what_is_so_already_is_no_change_and_leaves_no_event() -> None:
    made = world()
    made.settle(c.SetQos(Qos("high")))
    job = made.submit(hold=Hold.USER, options=JobOptions(qos="high", comment="one"), priority=3)
    update(made, job, priority=3, qos="high", comment="one", begin_at=NEVER, dependencies=(), any_of=False)
    assert events_of_last(made) == []
    update(made, job, priority=3, comment="two")
    assert events_of_last(made) == [e.JobUpdated(job, JobChange(comment="two"))]


@pytest.mark.parametrize(
    "changes,place",
    [
        ({"name": "a\nb"}, "name"),
        ({"name": ""}, "name"),
        ({"time_limit_s": 0}, "time_limit_s"),
        ({"priority": -1}, "priority"),
        ({"nice": 2**31}, "nice"),
        ({"account": "none"}, "account"),
        ({"qos": "none"}, "qos"),
        ({"reservation": "none"}, "reservation"),
        ({"licenses": (("none", 1),)}, "licenses"),
        ({"partition": "none"}, "partition"),
        ({"comment": "x\ny"}, "comment"),
        ({"mail_types": ("often",)}, "mail_types"),
        ({"dependencies": (Dependency(K.AFTER_OK, 99),)}, "dependencies"),
    ],
)
def test_what_a_submit_would_refuse_is_refused_with_its_place(changes: dict[str, Any], place: str) -> None:
    made = world()
    made.settle(c.SetPartition(Partition("p", every_node=True)))
    job = made.submit(hold=Hold.USER)
    before = made.state.jobs[job]
    assert refused(update(made, job, OPERATOR, **changes)).place == place
    assert made.state.jobs[job] == before


# What follows --------------------------------------------------------------------------------------------------------


def test_priority_nice_and_qos_move_a_job_in_its_line() -> None:
    made = world()
    made.settle(c.SetQos(Qos("high", priority=100)))
    made.submit(cpus=2)
    first, second, third = (made.submit(cpus=2) for _ in range(3))
    update(made, third, OPERATOR, priority=50)
    assert [made.reason(job) for job in (first, second, third)] == ["Priority", "Priority", "Resources"]
    update(made, second, qos="high")
    assert [made.reason(job) for job in (first, second, third)] == ["Priority", "Resources", "Priority"]
    update(made, second, nice=1_000)
    assert made.reason(third) == "Resources"


def test_begin_time_and_deadline_come_go_and_pass() -> None:
    made = world()
    made.submit(cpus=2)
    job = made.submit(cpus=2)
    update(made, job, begin_at=Instant(made.at + seconds(100)))
    assert made.reason(job) == "BeginTime"
    update(made, job, begin_at=NEVER)
    assert made.reason(job) == "Resources"
    update(made, job, deadline=Instant(made.at + seconds(10)))
    assert made.reason(job) == "DeadLine"
    update(made, job, deadline=Instant(made.at + seconds(1_000)))
    assert made.reason(job) == "Resources"
    update(made, job, deadline=NEVER)
    made.advance(5_000)
    assert made.reason(job) == "Resources"


def test_a_job_that_may_begin_at_once_begins() -> None:
    made = world()
    job = made.submit("capacity=5", begin_at=Instant(made.at + seconds(100)))
    assert made.shown(job)[2] == "pending"
    update(made, job, begin_at=NEVER)
    assert made.shown(job)[2] == "staging-in"


def test_dependencies_are_replaced_and_the_jobs_they_named_may_be_forgotten() -> None:
    made = world(finished_jobs_kept=0)
    first, second = made.submit(), made.submit()
    waits = made.submit(dependencies=(Dependency(K.AFTER_OK, first),))
    update(made, waits, dependencies=(Dependency(K.AFTER_OK, second),))
    made.finish(first)
    assert first not in made.state.jobs  # nobody waits for it any more
    assert made.reason(waits) == "Dependency"
    made.finish(second)
    assert made.reason(waits) == "None"


def test_a_name_makes_a_job_one_of_its_name_and_no_longer_of_the_former() -> None:
    made = world()
    other = made.submit(name="other", hold=Hold.USER)
    first = made.submit(name="daily", hold=Hold.USER)
    second = made.submit(name="daily", options=JobOptions(singleton=True))
    assert dict(made.verdict(second).figures)["waits_for"] == f"singleton:{first}"
    update(made, first, name="weekly")
    assert made.reason(second) == "None"
    made.finish(second)
    third = made.submit(name="daily", options=JobOptions(singleton=True), cpus=2, begin_at=Instant(made.at + 10**9))
    update(made, other, name="daily")
    made.advance(5_000)
    assert dict(made.verdict(third).figures)["waits_for"] == f"singleton:{other}"
    made.settle(c.CancelJob(other))
    assert made.reason(third) == "None"


@pytest.mark.parametrize("by", ["dependency", "chain", "singleton", "array", "itself"])
def test_a_job_that_would_wait_for_itself_is_refused(by: str) -> None:
    made = world()
    first = made.submit(name="daily", hold=Hold.USER)
    if by == "singleton":
        made.submit(name="daily", options=JobOptions(singleton=True), hold=Hold.USER)
    elif by == "array":
        made.submit(dependencies=(Dependency(K.AFTER_ANY, first),), array=(1, 2))
    else:
        made.submit(dependencies=(Dependency(K.AFTER_ANY, first),))
    last = 2
    if by == "chain":
        last = made.submit(dependencies=(Dependency(K.AFTER_OK, 2),))
    wanted = Dependency(K.AFTER_ANY, first if by == "itself" else last)
    rejection = refused(update(made, first, dependencies=(wanted,)))
    assert rejection.place == "dependencies" and "wait for itself" in rejection.sentence


def test_renaming_a_job_into_a_circle_is_refused() -> None:
    made = world()
    first = made.submit(name="a", hold=Hold.USER)
    second = made.submit(name="b", options=JobOptions(singleton=True), hold=Hold.USER)
    update(made, first, dependencies=(Dependency(K.AFTER_ANY, second),))
    assert "wait for itself" in refused(update(made, first, name="b")).sentence
    assert isinstance(update(made, first, name="b", dependencies=()), int)


def test_account_and_qos_take_effect_at_once_and_submitted_jobs_count_where_they_are() -> None:
    made = world()
    limit = Limit(LimitKind.MAX_SUBMIT_JOBS_PER_USER, "", 1)
    made.settle(c.SetQos(Qos("one", limits=(limit,))))
    made.settle(c.SetAccount(Account("physics", members=(AccountUser("alan"),))))
    first, second = made.submit(hold=Hold.USER), made.submit(hold=Hold.USER)
    assert isinstance(update(made, first, qos="one", account="physics"), int)
    assert made.state.use[("submitted", "q", "one", "alan", "")] == 1
    assert refused(update(made, second, qos="one")).code is RejectionCode.LIMIT_EXCEEDED
    # Nothing of the QOS is asked where it does not change.
    assert isinstance(update(made, first, account="", comment="x"), int)
    assert isinstance(update(made, first, qos=""), int) and isinstance(update(made, second, qos="one"), int)
    assert ("submitted", "q", "one", "alan", "") in made.state.use


def test_all_tasks_that_move_to_a_qos_count_together() -> None:
    made = world()
    made.settle(c.SetQos(Qos("two", limits=(Limit(LimitKind.MAX_SUBMIT_JOBS_PER_USER, "", 2),))))
    array = made.submit(hold=Hold.USER, array=(1, 2, 3))
    assert refused(update(made, array, qos="two")).code is RejectionCode.LIMIT_EXCEEDED
    change = c.UpdateJob(array, JobChange(qos="two"), tasks=(1, 3))
    assert isinstance(made.settle(change, user()), int)
    assert [made.state.jobs[array + task].request.effective_options.qos for task in range(3)] == ["two", "", "two"]


def test_the_tasks_of_an_array_that_wait_are_changed_and_the_others_left() -> None:
    made = world(cpus=1)
    array = made.submit(array=(1, 2, 3))
    assert made.state.jobs[array].state is JobState.CONFIGURING
    assert isinstance(update(made, array, comment="later"), int)
    assert [made.state.jobs[array + number].request.effective_options.comment for number in range(3)] == [
        "",
        "later",
        "later",
    ]
    rejection = refused(made.settle(c.UpdateJob(array, JobChange(comment="x"), tasks=(1,)), user()))
    assert "only pending jobs" in rejection.remedy
    assert refused(made.settle(c.UpdateJob(array, JobChange(comment="x"), tasks=(9,)), user())).place == "job"


def test_a_qos_that_denies_on_its_limits_denies_changes_too() -> None:
    made = world()
    limits = (Limit(LimitKind.MAX_BB_PER_JOB, "fast", 10),)
    made.settle(c.SetQos(Qos("strict", limits=limits, deny_on_limit=True)))
    job = made.submit("capacity=20 pool=fast", hold=Hold.USER)
    assert "QOSMaxBBPerJob" in refused(update(made, job, qos="strict")).sentence
    assert isinstance(rebuffer(made, job, "capacity=10 pool=fast"), int)
    assert isinstance(update(made, job, qos="strict"), int)
    assert "QOSMaxBBPerJob" in refused(rebuffer(made, job, "capacity=11 pool=fast")).sentence


def test_a_new_partition_is_decided_as_at_submit_and_what_is_staged_elsewhere_is_staged_again() -> None:
    made = world(nodes=2)
    for partition in (
        Partition("a", ("n1",)),
        Partition("b", ("n2",)),
        Partition("shut", ("n1",), state=PartitionState.DRAIN),
    ):
        made.settle(c.SetPartition(partition))
    made.submit(cpus=2, options=JobOptions(partition="a"))
    job = made.submit("capacity=5", options=JobOptions(partition="a"))
    made.done(job)
    assert made.shown(job)[1:] == ("Resources", "staged-in")
    assert refused(update(made, job, partition="shut")).code is RejectionCode.WRONG_STATE
    update(made, job, partition="b")
    assert made.shown(job)[2] == "teardown"
    made.done(job)
    assert made.state.jobs[job].node == "n2"


def test_licences_and_accounts_that_are_required_are_asked_for() -> None:
    made = world()
    made.settle(c.SetLicense(License("matlab", 2)))
    made.settle(c.SetAccount(Account("physics", members=(AccountUser("alan"),))))
    job = made.submit(hold=Hold.USER, options=JobOptions(account="physics"))
    assert refused(update(made, job, licenses=(("matlab", 3),))).place == "licenses"
    assert isinstance(update(made, job, licenses=(("matlab", 2),)), int)
    made.configure(AccountsRequired="yes")
    assert refused(update(made, job, account="")).place == "account"


# The burst-buffer request --------------------------------------------------------------------------------------------


def test_a_request_is_changed_until_it_has_its_space() -> None:
    made = world()
    made.submit("capacity=90 pool=fast")
    job = made.submit("capacity=80 pool=fast")
    assert made.reason(job) == "BurstBufferResources"
    assert isinstance(rebuffer(made, job, "capacity=10 pool=fast"), int)
    assert made.shown(job)[2] == "staging-in" and made.state.buffers[job].granted_bytes == 10
    rejection = refused(rebuffer(made, job, "capacity=5"))
    assert rejection.code is RejectionCode.WRONG_STATE and "staging-in" in rejection.sentence
    assert made.state.held_bytes["fast"] == 100


def test_a_job_without_a_buffer_may_get_one_and_waits_for_the_stage_out_of_others_from_then_on() -> None:
    made = world()
    first = made.submit("capacity=5")
    waits = made.submit(dependencies=(Dependency(K.AFTER_OK, first),))
    rebuffer(made, waits, "capacity=7 pool=bulk")
    assert made.state.jobs[waits].request.buffer is not None
    for _ in range(3):
        made.done(first)  # staged in, run, post-run: its stage-out is under way
    assert made.reason(waits) == "Dependency"
    made.done(first)
    assert made.shown(waits)[2] == "staging-in" and made.state.held_bytes["bulk"] == 7


@pytest.mark.parametrize(
    "bb,code",
    [
        ("capacity=101 pool=fast", RejectionCode.CAPACITY_OVER_TOTAL),
        ("capacity=1 pool=none", RejectionCode.UNKNOWN_POOL),
    ],
)
def test_a_request_that_a_submit_would_refuse_is_refused(bb: str, code: RejectionCode) -> None:
    made = world()
    job = made.submit(hold=Hold.USER)
    assert refused(rebuffer(made, job, bb)).code is code


def test_the_request_of_an_array_or_of_a_site_with_a_provider_is_not_changed() -> None:
    made = world()
    array = made.submit("capacity=5", hold=Hold.USER, array=(1, 2))
    assert "share" in refused(rebuffer(made, array, "capacity=6")).sentence
    job = made.submit(hold=Hold.USER)
    made.settle(c.ConfigureSite(settings=(ConfSetting("BurstBufferType", "burst_buffer/lua"),), partial=True))
    request = BufferRequest("", 0, (), "scratch", (), (), "#BB_LUA x")
    rejection = refused(made.settle(c.UpdateJob(job, buffer=request), user()))
    assert rejection.sentence == "Requested operation not supported on this system"


# One of several dependencies -----------------------------------------------------------------------------------------


def any_of(made: World, *dependencies: Dependency, singleton: bool = False, **spec: Any) -> int:
    fields = {"name": "job", "user": "alan", "script": SCRIPT, "workdir": "/out", "time_limit_s": 60, **spec}
    array = fields.pop("array", ())
    options = JobOptions(singleton=singleton, any_of=True)
    command = c.SubmitJob(JobRequest(**fields, dependencies=dependencies, options=options), tasks=array)
    outcome = made.settle(command, user())
    assert isinstance(outcome, int), outcome
    return outcome


def test_one_of_several_is_enough_and_never_only_where_none_can_be_met() -> None:
    made = world(cpus=4)
    first, second = made.submit(), made.submit()
    waits = any_of(made, Dependency(K.AFTER_NOT_OK, first), Dependency(K.AFTER_OK, second))
    verdict = made.verdict(waits)
    assert (verdict.reason, dict(verdict.figures)["waits_for"]) == ("Dependency", "afternotok:1?afterok:2")
    made.finish(first)  # afternotok can no longer be met, and the other can
    assert dict(made.verdict(waits).figures)["waits_for"] == "afterok:2"
    never = any_of(made, Dependency(K.AFTER_NOT_OK, first), Dependency(K.AFTER_NOT_OK, second))
    made.finish(second)
    assert made.reason(waits) == "None"
    verdict = made.verdict(never)
    assert (verdict.reason, dict(verdict.figures)) == (
        "DependencyNeverSatisfied",
        {"dependency": "afternotok:1?afternotok:2"},
    )


def test_all_tasks_of_an_array_wait_for_one_of_several() -> None:
    made = world(cpus=8)
    first, second = made.submit(), made.submit()
    array = any_of(made, Dependency(K.AFTER_OK, first), Dependency(K.AFTER_OK, second), array=(1, 2))
    assert [made.reason(array + task) for task in range(2)] == ["Dependency"] * 2
    made.finish(second)
    assert [made.reason(array + task) for task in range(2)] == ["None"] * 2


def test_singleton_may_be_one_of_several() -> None:
    made = world(cpus=8)
    first, other = made.submit(name="daily"), made.submit()
    waits = any_of(made, Dependency(K.AFTER_OK, other), singleton=True, name="daily")
    assert made.reason(waits) == "Dependency"
    made.finish(first)
    assert made.reason(waits) == "None"


def test_any_and_all_are_changed_into_each_other_and_their_record_goes_with_the_job() -> None:
    made = world(cpus=8, finished_jobs_kept=0)
    first, second = made.submit(), made.submit()
    both = (Dependency(K.AFTER_OK, first), Dependency(K.AFTER_OK, second))
    job = any_of(made, *both)
    assert made.state.jobs[job].request.effective_options.any_of
    update(made, job, dependencies=both, any_of=False)
    assert made.state.jobs[job].request.options is None
    made.finish(first)
    assert made.reason(job) == "Dependency"
    update(made, job, dependencies=(Dependency(K.AFTER_OK, second), Dependency(K.AFTER, second)), any_of=True)
    assert made.reason(job) == "Dependency" and made.state.jobs[job].request.effective_options.any_of
    made.finish(second)
    made.finish(job)
    assert job not in made.state.jobs


def test_one_dependency_alone_needs_no_record() -> None:
    made = world()
    first = made.submit()
    alone = any_of(made, Dependency(K.AFTER_OK, first))
    assert made.state.jobs[alone].request.options is None


def test_an_estimate_waits_for_the_first_of_several() -> None:
    made = world(cpus=8)
    long, short = made.submit(time_limit_s=5_000), made.submit(time_limit_s=100)
    for job in (long, short):
        made.report(job, c.ScriptStarted())
    job = any_of(made, Dependency(K.AFTER_OK, long), Dependency(K.AFTER_OK, short))
    found = estimated(made, job)
    assert found.is_known and found.start_at < made.at + seconds(4_000)
