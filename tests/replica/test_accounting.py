"""Accounts, QOS, licences: who may have how much, and the reasons byte for byte."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.grammar.directives import parse_request
from forebay.replica.messages import commands as c
from forebay.replica.model.accounts import (
    ACCOUNT_REASONS,
    QOS_REASONS,
    Account,
    AccountUser,
    License,
    Limit,
    LimitKind,
    Qos,
)
from forebay.replica.model.requests import JobOptions, JobRequest, with_options
from forebay.replica.state.derived import derive
from forebay.replica.values.errors import Rejection, RejectionCode
from tests.replica.world import SCRIPT, World, submitter, user

K = LimitKind


def tried(world: World, bb: str = "", who: str = "alan", **asked: Any) -> Rejection | int:
    options = {field: asked.pop(field) for field in JobOptions.__struct_fields__ if field in asked}
    fields: dict[str, Any] = {"name": "job", "user": who, "script": SCRIPT, "workdir": "/out", "time_limit_s": 60}
    request = parse_request(SCRIPT, bb) if bb else None
    asked_for = JobRequest(**fields | asked, buffer=request)
    submit = c.SubmitJob(with_options(asked_for, JobOptions(**options)))
    return world.settle(submit, submitter(submit.request, who))


def given(world: World, bb: str = "", who: str = "alan", **asked: Any) -> int:
    result = tried(world, bb, who, **asked)
    assert isinstance(result, int), result
    return result


def changed(world: World, command: c.Command) -> None:
    assert not isinstance(result := world.settle(command), Rejection), result


def qos(world: World, *limits: Limit, **fields: Any) -> None:
    changed(world, c.SetQos(Qos("q", limits=limits, **fields)))


def account(
    world: World, *limits: Limit, name: str = "a", parent: str = "", users: tuple[str, ...] = ("alan",)
) -> None:
    changed(world, c.SetAccount(Account(name, parent, tuple(AccountUser(one) for one in users), limits)))


def test_the_reasons_are_those_of_the_document_byte_for_byte() -> None:
    assert set(QOS_REASONS.values()) | set(ACCOUNT_REASONS.values()) == set(
        "QOSGrpBB QOSGrpBBMinutes QOSGrpBBRunMinutes QOSMaxBBPerJob QOSMaxBBPerNode QOSMaxBBPerUser QOSMinBB "
        "MaxBBPerAccount AssocGrpBBMinutes "
        "QOSMaxJobsPerUserLimit QOSMaxSubmitJobPerUserLimit QOSGrpNodeLimit QOSGrpCpuLimit AssocGrpBB "
        "AssocGrpBBRunMinutes AssocMaxBBPerJob AssocMaxBBPerNode AssocMaxBBMinutesPerJob AssocMaxJobsLimit "
        "AssocGrpNodeLimit".split()
    )


@pytest.mark.parametrize(
    ("limit", "bb", "reason"),
    [
        (Limit(K.MAX_BB_PER_JOB, "fast", 39), "capacity=40", "QOSMaxBBPerJob"),
        (Limit(K.MAX_BB_PER_NODE, "native", 39), "capacity=40", "QOSMaxBBPerNode"),
        (Limit(K.MIN_BB, "fast", 41), "capacity=40", "QOSMinBB"),
        (Limit(K.MIN_BB, "fast", 1), "", "QOSMinBB"),
        (Limit(K.GRP_BB, "fast", 39), "capacity=40", "QOSGrpBB"),
        (Limit(K.MAX_BB_PER_USER, "fast", 39), "capacity=40", "QOSMaxBBPerUser"),
        (Limit(K.GRP_BB_RUN_MINUTES, "fast", 39), "capacity=40", "QOSGrpBBRunMinutes"),
        (Limit(K.MAX_JOBS_PER_USER, "", 0), "capacity=40", "QOSMaxJobsPerUserLimit"),
        (Limit(K.GRP_NODES, "", 0), "capacity=40", "QOSGrpNodeLimit"),
        (Limit(K.GRP_CPUS, "", 0), "capacity=40", "QOSGrpCpuLimit"),
    ],
)
def test_a_limit_of_a_qos_is_tested_before_staging_and_names_its_reason(limit: Limit, bb: str, reason: str) -> None:
    world = World({"fast": 100})
    qos(world, limit)
    job = given(world, bb, qos="q")
    assert world.reason(job) == reason
    assert world.free() == 100
    qos(world)
    assert world.reason(job) == ("BurstBufferStageIn" if bb else "None")


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        (Limit(K.MAX_BB_PER_JOB, "fast", 39), "AssocMaxBBPerJob"),
        (Limit(K.MAX_BB_PER_NODE, "fast", 39), "AssocMaxBBPerNode"),
        (Limit(K.MAX_BB_MINUTES_PER_JOB, "fast", 39), "AssocMaxBBMinutesPerJob"),
        (Limit(K.GRP_BB, "fast", 39), "AssocGrpBB"),
        (Limit(K.GRP_BB_RUN_MINUTES, "fast", 39), "AssocGrpBBRunMinutes"),
        (Limit(K.MAX_JOBS_PER_USER, "", 0), "AssocMaxJobsLimit"),
        (Limit(K.GRP_NODES, "", 0), "AssocGrpNodeLimit"),
    ],
)
def test_a_limit_of_an_account_a_parent_or_a_user_in_it_names_its_reason(limit: Limit, reason: str) -> None:
    for whose in ("account", "parent", "user"):
        world = World({"fast": 100})
        account(world, *([limit] if whose == "parent" else []), name="above", users=())
        own = (limit,) if whose == "account" else ()
        members = (AccountUser("alan", (limit,) if whose == "user" else ()), AccountUser("eve"))
        changed(world, c.SetAccount(Account("a", "above", members, own)))
        job, other = given(world, "capacity=40", account="a"), given(world, "capacity=40", "eve", account="a")
        assert world.reason(job) == reason, whose
        assert world.reason(other) == (reason if whose != "user" else "BurstBufferStageIn")


def test_a_user_is_found_in_an_account_in_whatever_order_its_users_were_named() -> None:
    names = ["mo", "alan", "eve", "zoe", "bo"]
    world = World({"fast": 100})
    command = c.SetAccount(Account("a", members=tuple(map(AccountUser, names))))
    changed(world, command)
    found = world.state.accounts["a"]
    assert [member and member.user for member in map(found.member, names)] == names
    assert found.member("") is found.member("b") is found.member("zz") is Account("none").member("mo") is None
    events = len(world.ledger[-1].entries[0].events)
    assert world.settle(command) == 0 and (events, len(world.ledger[-1].entries[0].events)) == (1, 0)


@pytest.mark.parametrize(
    ("kind", "reason", "same_user"),
    [
        (K.GRP_BB, "QOSGrpBB", False),
        (K.MAX_BB_PER_USER, "QOSMaxBBPerUser", True),
        (K.MAX_BB_PER_ACCOUNT, "MaxBBPerAccount", False),
        (K.GRP_BB_RUN_MINUTES, "QOSGrpBBRunMinutes", False),
    ],
)
def test_space_held_by_others_counts_from_staging_to_teardown(kind: K, reason: str, same_user: bool) -> None:
    world = World({"fast": 1000})
    account(world, users=("alan", "eve"))
    qos(world, Limit(kind, "fast", 100))
    first = given(world, "capacity=60", qos="q", account="a")
    second = given(world, "capacity=60", "alan" if same_user else "eve", qos="q", account="a")
    assert world.reason(second) == reason
    if same_user:
        assert world.reason(given(world, "capacity=60", "eve", qos="q", account="a")) == "BurstBufferStageIn"
    for _ in range(4):
        world.done(first)
        assert world.reason(second) == reason
    world.finish(first)
    assert world.reason(second) == "BurstBufferStageIn"


def test_a_group_limit_counts_the_accounts_below_it() -> None:
    world = World({"fast": 1000})
    account(world, Limit(K.GRP_BB, "fast", 100), name="all", users=())
    account(world, name="left", parent="all")
    account(world, name="right", parent="all")
    given(world, "capacity=60", account="left")
    assert world.reason(given(world, "capacity=60", account="right")) == "AssocGrpBB"
    assert world.reason(given(world, "capacity=40", account="right")) == "BurstBufferStageIn"


def test_the_nearest_limit_for_each_job_counts() -> None:
    world = World({"fast": 1000})
    account(world, Limit(K.MAX_BB_PER_JOB, "fast", 10), name="all", users=())
    account(world, Limit(K.MAX_BB_PER_JOB, "fast", 50), name="a", parent="all")
    assert world.reason(given(world, "capacity=40", account="a")) == "BurstBufferStageIn"


def test_staging_takes_no_licence_and_no_jobs_of_a_qos() -> None:
    world = World({"fast": 100}, cpus=8)
    changed(world, c.SetLicense(License("matlab", 1)))
    qos(world, Limit(K.MAX_JOBS_PER_USER, "", 1))
    jobs = [given(world, "capacity=10", qos="q", licenses=(("matlab", 1),)) for _ in range(2)]
    assert [world.reason(job) for job in jobs] == ["BurstBufferStageIn"] * 2
    world.done(jobs[1])
    assert world.state.jobs[jobs[1]].state.name == "CONFIGURING"
    world.done(jobs[0])
    assert world.reason(jobs[0]) == "QOSMaxJobsPerUserLimit"
    qos(world)
    assert world.reason(jobs[0]) == "Licenses"
    world.done(jobs[1])
    assert world.state.jobs[jobs[1]].state.name == "STAGE_OUT"
    assert world.reason(jobs[0]) == "Licenses"  # until the end of post-run
    world.done(jobs[1])
    assert world.state.jobs[jobs[0]].state.name == "CONFIGURING"


def test_a_job_without_a_licence_neither_stages_nor_keeps_others_back() -> None:
    world = World({"fast": 100})
    changed(world, c.SetLicense(License("matlab", 1)))
    given(world, licenses=(("matlab", 1),))
    waits = given(world, "capacity=100", licenses=(("matlab", 1),), priority=9)
    other = given(world, "capacity=100")
    assert world.reason(waits) == "Licenses"
    assert world.reason(other) == "BurstBufferStageIn"


def test_an_account_or_qos_that_is_taken_away_makes_its_jobs_wait_with_that_reason() -> None:
    world = World({"fast": 100}, cpus=1)
    account(world)
    qos(world)
    given(world)
    job = given(world, account="a", qos="q")
    assert world.reason(job) in ("Resources", "Priority")
    changed(world, c.DeleteQos("q"))
    assert world.reason(job) == "InvalidQOS"
    account(world, users=("eve",))
    assert world.reason(job) == "InvalidAccount"
    changed(world, c.DeleteAccount("a"))
    assert world.reason(job) == "InvalidAccount"


@pytest.mark.parametrize(
    ("asked", "code", "place"),
    [
        ({"account": "x"}, RejectionCode.INVALID_FIELD, "account"),
        ({"account": "b"}, RejectionCode.PERMISSION_DENIED, "account"),
        ({"qos": "x"}, RejectionCode.INVALID_FIELD, "qos"),
        ({"qos": "closed"}, RejectionCode.PERMISSION_DENIED, "qos"),
        ({"licenses": (("x", 1),)}, RejectionCode.INVALID_FIELD, "licenses"),
        ({"licenses": (("matlab", 3),)}, RejectionCode.LIMIT_EXCEEDED, "licenses"),
        ({"licenses": (("matlab", 0),)}, RejectionCode.INVALID_FIELD, "licenses"),
        ({"reservation": "x"}, RejectionCode.INVALID_FIELD, "reservation"),
        ({"nice": 2**31}, RejectionCode.INVALID_FIELD, "nice"),
    ],
)
def test_what_a_job_may_not_ask_for_is_refused_at_submit_with_its_place(
    asked: dict[str, Any], code: RejectionCode, place: str
) -> None:
    world = World()
    account(world, name="b", users=("eve",))
    changed(world, c.SetQos(Qos("closed", users=("eve",))))
    changed(world, c.SetLicense(License("matlab", 2)))
    rejection = tried(world, **asked)
    assert isinstance(rejection, Rejection)
    assert (rejection.code, rejection.place) == (code, place)
    assert rejection.remedy


def test_submitted_jobs_are_counted_without_a_walk_and_more_are_refused() -> None:
    world = World()
    qos(world, Limit(K.MAX_SUBMIT_JOBS_PER_USER, "", 2))
    first = given(world, qos="q")
    given(world, qos="q")
    rejection = tried(world, qos="q")
    assert isinstance(rejection, Rejection) and "QOSMaxSubmitJobPerUserLimit" in rejection.sentence
    given(world, who="eve", qos="q")
    world.finish(first)
    given(world, qos="q")
    assert derive(world.state).use == world.state.use


def test_a_qos_that_denies_on_a_limit_refuses_what_it_alone_forbids() -> None:
    world = World({"fast": 100})
    qos(world, Limit(K.MAX_BB_PER_JOB, "fast", 10), deny_on_limit=True)
    rejection = tried(world, "capacity=20", qos="q")
    assert isinstance(rejection, Rejection) and rejection.sentence.startswith("QOSMaxBBPerJob: ")
    given(world, "capacity=10", qos="q")


def test_the_site_s_default_account_and_qos_are_filled_in_and_an_account_may_be_required() -> None:
    world = World()
    account(world)
    qos(world)
    world.configure(DefaultAccount="a", DefaultQOS="q", AccountsRequired="yes")
    job = given(world)
    assert (world.state.jobs[job].request.options.account, world.state.jobs[job].request.options.qos) == ("a", "q")
    rejection = tried(world, who="eve")
    assert isinstance(rejection, Rejection) and rejection.place == "account"


def test_a_priority_counts_nice_qos_and_size() -> None:
    world = World({"fast": 100 * 1024**3})
    changed(world, c.SetQos(Qos("q", priority=5)))
    world.configure(SizePointsPerGiB="1")
    blocker = given(world, "capacity=100GiB")
    jobs = {
        "nice": given(world, "capacity=90GiB", nice=30),
        "plain": given(world, "capacity=90GiB"),
        "qos": given(world, "capacity=90GiB", qos="q"),
        "large": given(world, "capacity=96GiB"),
    }
    order = []
    world.finish(blocker)
    while jobs:
        name = next(name for name, job in jobs.items() if world.state.buffers[job].state.word == "staging-in")
        order.append(name)
        world.finish(jobs.pop(name))
    assert order == ["large", "qos", "plain", "nice"]


@pytest.mark.parametrize(
    "command",
    [
        c.SetAccount(Account("a", parent="nowhere")),
        c.SetAccount(Account("a", parent="a")),
        c.SetAccount(Account("-")),
        c.SetAccount(Account("a", limits=(Limit(K.MAX_BB_PER_USER, "fast", 1),))),
        c.SetAccount(Account("a", limits=(Limit(K.GRP_BB, "", 1),))),
        c.SetAccount(Account("a", limits=(Limit(K.GRP_BB, "fast", -1),))),
        c.SetAccount(Account("a", members=(AccountUser("x"), AccountUser("x")))),
        c.SetQos(Qos("q", limits=(Limit(K.MAX_BB_MINUTES_PER_JOB, "fast", 1),))),
        c.SetQos(Qos("q", limits=(Limit(K.MIN_BB, "fast", 1), Limit(K.MIN_BB, "fast", 2)))),
        c.SetLicense(License("x", -1)),
        c.DeleteLicense("x"),
        c.DeleteQos("x"),
        c.DeleteAccount("x"),
        c.DeleteReservation("x"),
        c.ConfigureSite((ConfSetting("DefaultQOS", "x"),), partial=True),
        c.ConfigureSite((ConfSetting("RevocationsMax", "-1"),), partial=True),
    ],
)
def test_a_record_that_makes_no_sense_is_refused_and_changes_nothing(command: c.Command) -> None:
    world = World()
    before = world.state
    assert isinstance(world.settle(command), Rejection)
    assert (world.state.accounts, world.state.qos, world.state.licenses) == (
        before.accounts,
        before.qos,
        before.licenses,
    )


def test_nobody_but_an_operator_changes_them() -> None:
    world = World()
    rejection = world.settle(c.SetLicense(License("x", 1)), user())
    assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.PERMISSION_DENIED


def test_an_account_with_accounts_below_it_is_not_deleted() -> None:
    world = World()
    account(world, name="all")
    account(world, name="a", parent="all")
    rejection = world.settle(c.DeleteAccount("all"))
    assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.WRONG_STATE
    changed(world, c.DeleteAccount("a"))
    changed(world, c.DeleteAccount("all"))
