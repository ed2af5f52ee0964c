"""External jobs: the table of phases and commands, and what must be true of them whatever comes in whichever order."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model.accounts import Account, AccountUser, Limit, LimitKind
from forebay.replica.model.buffers import Access, BufferState
from forebay.replica.model.job_states import JobState
from forebay.replica.operations.external_jobs import ExternalJobPhase, external_job_phase, find_external_job
from forebay.replica.scheduler.index import SchedulingIndex
from forebay.replica.scheduler.scheduling_cycle import space_for_setups
from forebay.replica.values.errors import Rejection, RejectionCode
from forebay.replica.views.jobs import verdict_of
from tests.replica.external_job_world import (
    CLUSTER,
    COMMANDS,
    DATA,
    MOVERS,
    OTHER,
    RESULTS,
    WANTED,
    WAYS,
    ExternalJobWorld,
    asked,
    world_at,
)
from tests.replica.test_reservations import reserve
from tests.replica.world import OPERATOR, SCRIPT, agent, user

PAIRS = list(itertools.product(ExternalJobPhase, COMMANDS))
PAGE = Path(__file__).parents[2] / "replica" / "DESIGN.md"


def table() -> dict[tuple[ExternalJobPhase, str], str]:
    """Return the table of replica/DESIGN.md: phase and command -> what follows."""
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("|")
    ]
    heads = next(row for row in rows if row[0] == "phase")
    start = rows.index(heads)
    found = {}
    for row in rows[start + 2 : start + 2 + len(ExternalJobPhase)]:
        for head, cell in zip(heads[1:], row[1:], strict=True):
            found[ExternalJobPhase(row[0]), head] = cell
    return found


def after(world: ExternalJobWorld, command: str) -> str:
    """Return what a command leads to, in the words of the table."""
    before, jobs = find_external_job(world.state, "slurm:42"), world.state.next_job
    revision = world.state.revision
    outcome = COMMANDS[command](world)
    if isinstance(outcome, Rejection):
        return "rejected"
    if not any(entry.events for batch in world.ledger[revision:] for entry in batch.entries):
        return "="
    if world.state.next_job == jobs:
        return str(world.phase())
    if before.job is None:
        return "next"
    old = world.state.jobs[before.job.id]
    return f"next, {external_job_phase(old, world.state.buffers[old.id])}"


def test_the_table_has_every_phase_and_every_command() -> None:
    assert set(table()) == set(PAIRS)


@pytest.mark.parametrize(("phase", "command"), PAIRS)
def test_each_phase_and_command_lead_to_what_the_page_says(phase: ExternalJobPhase, command: str) -> None:
    assert after(world_at(phase), command) == table()[phase, command]


@pytest.mark.parametrize(("phase", "command"), PAIRS)
def test_a_command_that_comes_again_changes_nothing(phase: ExternalJobPhase, command: str) -> None:
    world = world_at(phase)
    first = after(world, command)
    assert after(world, command) in ("=", "rejected")
    assert (first == "rejected") == isinstance(COMMANDS[command](world), Rejection)


WITH_RESULTS = [
    phase
    for phase in ExternalJobPhase
    if phase.value.startswith(("running", "post-run", "staging-out", "stage-out", "retained"))
]


@pytest.mark.parametrize(("phase", "command"), list(itertools.product(WITH_RESULTS, COMMANDS)))
def test_nothing_but_a_teardown_with_hurry_takes_results(phase: ExternalJobPhase, command: str) -> None:
    world = world_at(phase)
    job = world.external_job().id
    COMMANDS[command](world)
    gone = world.state.buffers[job].state in (BufferState.TEARDOWN, BufferState.COMPLETE)
    assert gone == (command == "teardown --hurry" and phase is not ExternalJobPhase.RETAINED)


@pytest.mark.parametrize(("phase", "command"), PAIRS)
def test_a_command_for_an_earlier_epoch_changes_nothing(phase: ExternalJobPhase, command: str) -> None:
    world = world_at(ExternalJobPhase.OVER)
    before = world.external_job().id
    if phase is not ExternalJobPhase.NONE:
        WAYS[phase](world)
    late = {
        "setup": lambda: world.setup(epoch=1),
        "setup of another": lambda: world.setup(request=OTHER, epoch=1),
        "stage-in": lambda: world.stage_in(epoch=1),
        "run begins": lambda: world.begin(epoch=1),
        "run ends": lambda: world.end(epoch=1),
        "stage-out": lambda: world.stage_out(epoch=1),
        "teardown": lambda: world.tear_down(epoch=1),
        "teardown --hurry": lambda: world.tear_down(epoch=1, hurry=True),
    }[command]
    jobs, buffers = world.state.jobs, world.state.buffers
    outcome = late()
    assert (world.state.jobs, world.state.buffers) == (jobs, buffers)
    assert world.external_job().id != before or phase is ExternalJobPhase.NONE
    if command in ("run ends", "stage-out", "teardown", "teardown --hurry"):
        assert outcome == 0


def test_a_setup_that_names_its_epoch_never_ends_a_run() -> None:
    world = world_at(ExternalJobPhase.RUNNING)
    assert world.setup(epoch=1) == 0
    assert world.phase() is ExternalJobPhase.RUNNING


# ---- what an external job is


def test_an_external_job_is_never_run_and_takes_no_cpus() -> None:
    world = world_at(ExternalJobPhase.STAGED_IN)
    world.advance(3600)
    assert world.phase() is ExternalJobPhase.STAGED_IN
    world.begin()
    assert world.orders() == ()
    assert world.state.jobs[world.external_job().id].request.cpus == 0
    native = world.submit(script=SCRIPT, cpus=8)
    assert world.state.jobs[native].state is JobState.CONFIGURING


def test_nothing_is_staged_before_its_scheduler_says_so() -> None:
    world = world_at(ExternalJobPhase.SET_UP)
    assert world.free() == 90
    assert world.orders() == ()
    world.stage_in()
    assert [order.stage for order in world.orders()] == ["stage_in"]


def test_nothing_is_staged_out_before_its_scheduler_says_so() -> None:
    world = world_at(ExternalJobPhase.POST_RUN)
    assert world.orders() == ()
    world.stage_out()
    assert [order.stage for order in world.orders()] == ["stage_out"]


def test_it_has_exactly_the_space_that_its_setup_brings() -> None:
    world = ExternalJobWorld()
    world.setup(request=asked(37, DATA))
    assert world.free() == 63


def test_the_number_in_its_paths_is_that_of_its_scheduler() -> None:
    world = ExternalJobWorld()
    world.setup("4711", asked(1, "#DW stage_in type=file source=/in/%j destination=$DW_JOB_STRIPED/%x.%u"))
    asked_for = world.external_job("4711").request.buffer
    assert asked_for is not None
    assert asked_for.stage_in[0].outside == "/in/4711"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (c.CancelJob(1), "only its scheduler controls"),
        (c.HoldJob(1), "only its scheduler controls"),
        (c.RequeueJob(1), "only its scheduler controls"),
        (c.SuspendJob(1), "only its scheduler controls"),
        (c.ResumeJob(1), "only its scheduler controls"),
        (c.UpdateJob(1), "only its scheduler controls"),
    ],
)
def test_what_becomes_of_an_external_job_its_own_scheduler_says(command: c.Command, words: str) -> None:
    for phase in (ExternalJobPhase.STAGED_IN, ExternalJobPhase.RUNNING, ExternalJobPhase.STAGE_OUT_FAILED):
        world = world_at(phase)
        rejection = world.settle(command)
        assert isinstance(rejection, Rejection)
        assert words in rejection.sentence
        assert "slurm:42" in rejection.sentence


@pytest.mark.parametrize("phase", ExternalJobPhase)
def test_every_phase_has_a_reason_that_names_what_is_awaited(phase: ExternalJobPhase) -> None:
    world = world_at(phase)
    if phase is ExternalJobPhase.NONE:
        return
    verdict = world.verdict(world.external_job().id)
    assert verdict.sentence
    if phase is ExternalJobPhase.WAITING:
        assert verdict.reason == "BurstBufferResources"


# ---- setup: who gets space, and what is said to who gets none


def test_a_setup_waits_for_space_and_then_fails_with_who_has_it() -> None:
    world = world_at(ExternalJobPhase.WAITING)
    world.advance(19)
    assert world.phase() is ExternalJobPhase.WAITING
    world.advance(1)
    assert world.phase() is ExternalJobPhase.OVER
    message = world.external_job().message
    assert message == (
        "no space became free within 20 s: 10 of pool fast were requested, and 5 of 100 are free; of it, slurm:1 95"
    )


def limited(world: ExternalJobWorld, most: int) -> None:
    """Let the user of the external jobs have so much of all pools at a time."""
    limits = (Limit(LimitKind.GRP_BB, "fast", most),)
    assert world.settle(c.SetAccount(Account("people", members=(AccountUser(WANTED.user),), limits=limits))) == 0
    world.configure(DefaultAccount="people")


def test_a_setup_over_a_limit_by_itself_is_refused_at_once_with_the_limit() -> None:
    world = ExternalJobWorld()
    limited(world, 5)
    rejection = world.setup("1", asked(6, DATA))
    assert isinstance(rejection, Rejection)
    assert rejection.code is RejectionCode.LIMIT_EXCEEDED
    assert rejection.sentence == (
        "AssocGrpBB: account people never permits the job: change the job, or ask an operator to change the limit "
        "(in_use 0, asked 6, limit 5)"
    )
    assert world.phase("1") is ExternalJobPhase.NONE


def test_a_setup_that_a_limit_keeps_waiting_fails_with_the_limit_and_not_with_space() -> None:
    world = ExternalJobWorld()
    limited(world, 10)
    world.setup("1", asked(6, DATA))
    world.setup("2", asked(6, DATA))
    world.advance(20)
    assert world.phase("2") is ExternalJobPhase.OVER
    message = "AssocGrpBB for 20 s: account people has reached a limit (in_use 6, asked 6, limit 10)"
    assert world.external_job("2").message == message


def test_why_an_external_job_waits_names_the_limit_or_the_reservation_that_keeps_it() -> None:
    world = ExternalJobWorld()
    limited(world, 10)
    world.setup("1", asked(6, DATA))
    world.setup("2", asked(6, DATA))
    why = verdict_of(world.state, world.external_job("2").id)
    assert (str(why.reason), why.sentence) == ("AssocGrpBB", "account people has reached a limit")
    assert why.figures == (("in_use", "6"), ("asked", "6"), ("limit", "10"))
    limited(world, 100)
    assert world.phase("2") is ExternalJobPhase.SET_UP
    reserve(world, 3_600, 3_600, 70)
    world.setup("3", asked(31, DATA))
    why = verdict_of(world.state, world.external_job("3").id)
    assert why.sentence == "reservation r starts before the job would release its space"
    world.settle(c.DeleteReservation("r"))
    limited(world, 1_000)
    world.setup("4", asked(89, DATA))
    assert (
        verdict_of(world.state, world.external_job("4").id).sentence == "the external job waits for space in its pool"
    )


def test_a_setup_that_waits_gets_the_space_that_is_given_back() -> None:
    world = world_at(ExternalJobPhase.WAITING)
    world.advance(10)
    world.tear_down("1", hurry=True)
    assert world.phase() is ExternalJobPhase.SET_UP


def test_a_setup_that_failed_is_tried_again_as_the_next_epoch() -> None:
    world = world_at(ExternalJobPhase.WAITING)
    world.advance(20)
    world.setup()
    assert (world.phase(), find_external_job(world.state, "slurm:42").epoch) == (ExternalJobPhase.WAITING, 2)


def test_external_jobs_get_space_in_the_order_in_which_they_came() -> None:
    world = ExternalJobWorld()
    world.setup("1", asked(95, DATA))
    for job in ("2", "3", "4"):
        world.setup(job, asked(40, DATA))
    world.tear_down("1")
    assert [world.phase(job) for job in "234"] == [
        ExternalJobPhase.SET_UP,
        ExternalJobPhase.SET_UP,
        ExternalJobPhase.WAITING,
    ]


REFUSED = [
    ({"request": replace(WANTED, user="root")}, "User root can not allocate burst buffers"),
    ({"uid": 0}, "User root can not allocate burst buffers"),
    ({"request": asked(101, DATA)}, "exceeds the capacity of pool fast"),
    ({"request": asked(10, pool="fsat")}, "pool 'fsat' does not exist"),
    ({"request": replace(WANTED, buffer=None)}, "requests no space"),
    ({"job": "../7"}, "letters, digits, _ or -"),
    ({"job": "1" * 41}, "letters, digits, _ or -"),
    ({"job": ""}, "letters, digits, _ or -"),
    ({"request": asked(1, "#DW stage_in type=file source=/etc/shadow destination=$DW_JOB_STRIPED/a")}, "is outside"),
]


@pytest.mark.parametrize(("how", "words"), REFUSED)
def test_a_setup_that_cannot_be_had_is_refused_and_changes_nothing(how: dict[str, Any], words: str) -> None:
    world = world_at(ExternalJobPhase.STAGED_IN)
    jobs = world.state.jobs
    rejection = world.setup(**{"job": "42", **how})
    assert isinstance(rejection, Rejection)
    assert words in rejection.sentence
    assert world.state.jobs == jobs


def test_a_pool_that_is_on_the_nodes_is_refused_with_those_that_are_not() -> None:
    world = ExternalJobWorld({"fast": 100, "local": 100})
    world.settle(c.ChangePool("local", filesystem=""))
    rejection = world.setup(request=asked(10, pool="local"))
    assert isinstance(rejection, Rejection)
    assert "pool local has its buffers on nodes" in rejection.sentence
    assert rejection.remedy == "use one of: fast"


def test_access_mode_private_is_refused() -> None:
    world = ExternalJobWorld()
    assert WANTED.buffer is not None
    rejection = world.setup(request=replace(WANTED, buffer=replace(WANTED.buffer, access=(Access.PRIVATE,))))
    assert isinstance(rejection, Rejection)
    assert "access_mode=private is not possible" in rejection.sentence


def test_a_user_who_may_have_no_buffers_has_none_as_an_external_job() -> None:
    world = ExternalJobWorld(deny_users=("alan",))
    rejection = world.setup()
    assert isinstance(rejection, Rejection)
    assert rejection.sentence == "User found in DenyUsers"


# ---- whose external jobs they are


def test_the_same_name_of_another_cluster_is_refused_with_the_address_of_the_first() -> None:
    world = world_at(ExternalJobPhase.STAGED_IN)
    for command in (
        c.RegisterScheduler("another", "head7"),
        c.TearDownExternalJob("another", "42"),
        c.StageInExternalJob("x", "42"),
    ):
        rejection = world.ask(command)
        assert isinstance(rejection, Rejection)
        assert "last seen at head1" in rejection.sentence
        assert "forebay slurm release slurm" in rejection.remedy
    assert world.phase() is ExternalJobPhase.STAGED_IN


def test_another_host_of_the_same_cluster_takes_over() -> None:
    world = world_at(ExternalJobPhase.STAGED_IN)
    assert world.ask(c.RegisterScheduler(CLUSTER, "backup2")) == 0
    assert world.begin() != 0
    rejection = world.ask(c.RegisterScheduler("another", "head7"))
    assert isinstance(rejection, Rejection)
    assert "last seen at backup2" in rejection.sentence


def test_a_name_that_an_operator_releases_is_free_for_another_cluster() -> None:
    world = ExternalJobWorld()
    assert world.settle(c.ReleaseScheduler("slurm")) == 0
    assert world.ask(c.RegisterScheduler("another", "head7")) == 0
    assert isinstance(world.setup(), Rejection)


def test_a_scheduler_has_its_own_external_jobs_and_no_others() -> None:
    world = world_at(ExternalJobPhase.STAGED_IN)
    pbs = c.Actor(c.ActorRole.SCHEDULER, "pbs")
    world.ask(c.RegisterScheduler("pbs-1", "head3"), pbs)
    assert world.ask(c.TearDownExternalJob("pbs-1", "42", True), pbs) == 0
    assert world.phase() is ExternalJobPhase.STAGED_IN
    assert isinstance(world.ask(c.BeginExternalJobRun("pbs-1", "42"), pbs), Rejection)


EXTERNAL_JOB_COMMANDS = (
    c.RegisterScheduler(CLUSTER, "head1"),
    c.SetUpExternalJob(CLUSTER, "42", 1000, WANTED),
    c.StageInExternalJob(CLUSTER, "42"),
    c.BeginExternalJobRun(CLUSTER, "42"),
    c.EndExternalJobRun(CLUSTER, "42"),
    c.StageOutExternalJob(CLUSTER, "42"),
    c.TearDownExternalJob(CLUSTER, "42"),
)


@pytest.mark.parametrize("command", EXTERNAL_JOB_COMMANDS)
def test_nobody_but_a_scheduler_asks_for_external_jobs(command: c.Command) -> None:
    world = world_at(ExternalJobPhase.STAGED_IN)
    for actor in (OPERATOR, user("alan"), user("slurm"), agent("n1"), c.CONTROLLER):
        rejection = world.settle(command, actor)
        assert isinstance(rejection, Rejection)
        assert rejection.code is RejectionCode.PERMISSION_DENIED


def test_a_scheduler_asks_for_nothing_else() -> None:
    world = world_at(ExternalJobPhase.STAGED_IN)
    for command in (c.CancelJob(1), c.ClearBuffer(1), c.ExportBuffer(1), c.ReleaseScheduler("slurm"), c.ReleaseJob(1)):
        rejection = world.ask(command)
        assert isinstance(rejection, Rejection)
        assert rejection.code is RejectionCode.PERMISSION_DENIED


# ---- what lingers


def test_what_was_torn_down_before_it_ran_is_taken_up_by_a_setup_of_the_same() -> None:
    world = world_at(ExternalJobPhase.LINGERING)
    before = world.external_job()
    assert world.orders() == ()
    world.setup()
    assert world.phase() is ExternalJobPhase.SET_UP
    taken = world.external_job()
    assert (taken.id, taken.mover) == (before.id, before.mover)
    assert taken.external_job is not None
    assert taken.external_job.epoch == 2
    world.stage_in()
    assert world.order(taken.id).attempt > before.attempt - 1
    world.finish_operation()
    assert world.phase() is ExternalJobPhase.STAGED_IN


def test_a_teardown_that_comes_late_never_finds_what_was_taken_up_since() -> None:
    world = world_at(ExternalJobPhase.LINGERING)
    world.setup()
    world.stage_in()
    world.finish_operation()
    world.begin()
    assert world.tear_down(hurry=True, epoch=1) == 0
    assert world.phase() is ExternalJobPhase.RUNNING


def test_a_setup_that_comes_late_takes_nothing_up() -> None:
    world = world_at(ExternalJobPhase.LINGERING)
    assert world.setup(epoch=1) == 0
    assert world.phase() is ExternalJobPhase.LINGERING
    assert world.setup(epoch=2) != 0
    assert world.phase() is ExternalJobPhase.SET_UP


def test_what_is_taken_up_and_not_staged_lingers_again() -> None:
    world = world_at(ExternalJobPhase.LINGERING)
    world.setup()
    world.tear_down()
    assert world.phase() is ExternalJobPhase.LINGERING


def test_a_report_of_a_stage_in_that_was_torn_down_no_longer_counts() -> None:
    world = world_at(ExternalJobPhase.STAGING_IN)
    order = world.order(world.external_job().id)
    world.tear_down(hurry=True)
    late = world.report(world.external_job().id, c.OperationDone(1, 1), order)
    assert isinstance(late, Rejection)
    assert late.code is RejectionCode.STALE_ATTEMPT


def test_it_lingers_for_as_long_as_agreed() -> None:
    world = world_at(ExternalJobPhase.LINGERING)
    world.advance(299)
    assert world.phase() is ExternalJobPhase.LINGERING
    world.advance(1)
    assert world.phase() is ExternalJobPhase.TEARDOWN
    world.finish_operation()
    assert world.free() == 100


def test_nothing_lingers_where_the_site_says_so() -> None:
    world = world_at(ExternalJobPhase.STAGED_IN)
    world.configure(ExternalJobLinger="0")
    world.tear_down()
    assert world.phase() is ExternalJobPhase.TEARDOWN


@pytest.mark.parametrize("native", [True, False])
def test_anybodys_need_of_space_takes_the_oldest_that_lingers_first(native: bool) -> None:
    world = ExternalJobWorld()
    for job in ("1", "2", "3"):
        world.ready(job, asked(30, DATA))
        world.advance(1)
    for job in ("2", "1", "3"):
        world.tear_down(job)
        world.advance(1)
    if native:
        needs = world.submit("#DW jobdw capacity=35 access_mode=striped type=scratch")
    else:
        world.setup("9", asked(35, DATA))
        needs = world.external_job("9").id
    assert [world.phase(job) for job in "213"] == [
        ExternalJobPhase.TEARDOWN,
        ExternalJobPhase.LINGERING,
        ExternalJobPhase.LINGERING,
    ]
    assert world.state.buffers[needs].held_bytes == 0
    world.finish_operation("2")
    assert world.state.buffers[needs].held_bytes == 35


def test_nothing_that_lingers_gives_way_in_vain() -> None:
    world = ExternalJobWorld()
    world.running("1", asked(60, DATA))
    world.ready("2", asked(30, DATA))
    world.tear_down("2")
    world.setup("3", asked(50, DATA))
    assert world.phase("2") is ExternalJobPhase.LINGERING


def test_what_ran_never_lingers() -> None:
    for phase in WITH_RESULTS:
        for command in COMMANDS:
            world = world_at(phase)
            COMMANDS[command](world)
            assert world.phase() is not ExternalJobPhase.LINGERING


# ---- what is retained


def test_what_is_retained_counts_is_exported_later_and_then_gone() -> None:
    world = world_at(ExternalJobPhase.RETAINED)
    assert world.free() == 90
    job = world.external_job().id
    assert world.settle(c.ExportBuffer(job), user()) == job
    assert [order.stage for order in world.orders()] == ["stage_out"]
    world.finish_operation()
    world.finish_operation()
    assert (world.phase(), world.free()) == (ExternalJobPhase.OVER, 100)


def test_what_is_retained_before_any_export_is_exported_on_request() -> None:
    world = world_at(ExternalJobPhase.RUNNING)
    world.tear_down()
    assert world.orders() == ()
    assert world.settle(c.ExportBuffer(world.external_job().id), OPERATOR) != 0
    assert [order.stage for order in world.orders()] == ["stage_out"]


def test_a_stage_out_that_goes_on_as_it_is_retained_goes_on() -> None:
    world = world_at(ExternalJobPhase.STAGING_OUT)
    order = world.order(world.external_job().id)
    world.tear_down()
    assert world.phase() is ExternalJobPhase.RETAINED
    assert world.orders() == (order,)
    world.finish_operation()
    assert world.phase() is ExternalJobPhase.TEARDOWN


def test_what_is_retained_is_removed_only_with_discard() -> None:
    world = world_at(ExternalJobPhase.RETAINED)
    job = world.external_job().id
    refused = world.settle(c.ClearBuffer(job))
    assert isinstance(refused, Rejection) and refused.sentence.startswith("job slurm:42 has results")
    assert refused.remedy.startswith("export it (forebay buffer export) to retry")
    assert world.settle(c.ClearBuffer(job, discard=True)) == job
    again = world.settle(c.ExportBuffer(job))
    assert isinstance(again, Rejection) and again.sentence.startswith("job slurm:42 has no results")
    assert world.phase() is ExternalJobPhase.TEARDOWN


def test_nobody_but_its_user_and_operators_export_it() -> None:
    world = world_at(ExternalJobPhase.RETAINED)
    assert isinstance(world.settle(c.ExportBuffer(world.external_job().id), user("eve")), Rejection)


def test_a_job_number_used_again_never_mixes_with_what_is_retained() -> None:
    world = world_at(ExternalJobPhase.RETAINED)
    old = world.external_job()
    world.setup()
    new = world.external_job()
    assert new.id != old.id
    assert (old.external_job and old.external_job.epoch, new.external_job and new.external_job.epoch) == (1, 2)
    assert world.free() == 80


def test_an_epoch_is_not_used_twice_while_anything_of_its_name_is_there() -> None:
    world = ExternalJobWorld(finished_jobs_kept=0)
    world.running()
    world.tear_down()
    for expected in (2, 3, 4):
        world.setup(request=OTHER)
        assert find_external_job(world.state, "slurm:42").epoch == expected
        world.tear_down()
        world.run_pass()
        assert find_external_job(world.state, "slurm:42").job is None
    world.settle(c.ClearBuffer(1, discard=True))
    world.done(1)
    assert not world.state.external_jobs
    world.setup()
    assert find_external_job(world.state, "slurm:42").epoch == 1


# ---- external jobs and native jobs


def test_a_native_job_is_passed_by_so_many_external_jobs_and_no_more() -> None:
    world = ExternalJobWorld(max_passes=3)
    world.running("0", asked(40, DATA))
    native = world.submit("#DW jobdw capacity=80 access_mode=striped type=scratch")
    for job in range(1, 9):
        world.setup(str(job), asked(5, DATA))
    given = [job for job in range(1, 9) if world.phase(str(job)) is ExternalJobPhase.SET_UP]
    assert given == [1, 2, 3]
    assert world.state.jobs[native].passed == 3
    for job in (0, 1, 2, 3):
        world.tear_down(str(job), hurry=True)
    while world.state.buffers[native].held_bytes == 0:
        world.finish_operation("0")
    assert [job for job in range(4, 9) if world.phase(str(job)) is ExternalJobPhase.SET_UP] == [4, 5, 6, 7]


def test_an_external_job_gets_space_before_native_jobs_that_always_wait() -> None:
    world = ExternalJobWorld()
    natives = [world.submit("#DW jobdw capacity=50 access_mode=striped type=scratch") for _ in range(6)]
    world.setup(request=asked(50, DATA))
    assert world.phase() is ExternalJobPhase.WAITING
    world.done(natives[0])
    while world.state.buffers[natives[0]].held_bytes:
        world.done(natives[0])
    assert world.phase() is ExternalJobPhase.SET_UP


@pytest.mark.parametrize("why", ["it is held", "no node is there for it"])
def test_who_was_passed_often_and_does_not_wait_for_space_keeps_no_external_job_back(why: str) -> None:
    world = ExternalJobWorld(max_passes=1)
    world.running("0", asked(40, DATA))
    native = world.submit("#DW jobdw capacity=80 access_mode=striped type=scratch")
    world.setup("1", asked(5, DATA))
    assert world.state.jobs[native].passed == 1
    world.setup("2", asked(5, DATA))
    assert world.phase("2") is ExternalJobPhase.WAITING
    world.settle(c.HoldJob(native) if why == "it is held" else c.DrainNode("n1", "x"))
    assert world.phase("2") is ExternalJobPhase.SET_UP


def free_shown(world: ExternalJobWorld, pool: str = "fast") -> int:
    return space_for_setups(SchedulingIndex(world.state), [pool], world.at)[pool]


def test_nothing_is_free_for_external_jobs_while_a_native_job_was_passed_as_often_as_may_be() -> None:
    world = ExternalJobWorld(max_passes=1)
    world.running("0", asked(40, DATA))
    native = world.submit("#DW jobdw capacity=80 access_mode=striped type=scratch")
    assert free_shown(world) == 60
    world.setup("1", asked(5, DATA))
    assert free_shown(world) == 0
    world.settle(c.HoldJob(native))
    assert free_shown(world) == 55


def test_what_a_coming_reservation_needs_is_not_free_for_external_jobs() -> None:
    world = ExternalJobWorld()
    reserve(world, 3_600, 3_600, 70)
    assert free_shown(world) == 30
    world.setup(request=asked(31, DATA))
    assert world.phase() is ExternalJobPhase.WAITING


def test_a_setup_takes_what_lingers_rather_than_wait_for_a_stage_out() -> None:
    world = ExternalJobWorld()
    world.running("1", asked(50, DATA, RESULTS))
    world.end("1")
    world.stage_out("1")
    world.ready("2", asked(50, DATA))
    world.tear_down("2", hurry=True)
    assert free_shown(world) == 50
    world.setup("3", asked(50, DATA))
    assert world.phase("2") is ExternalJobPhase.TEARDOWN
    world.finish_operation("2")
    assert world.phase("3") is ExternalJobPhase.SET_UP


# ---- what only one of the two knows of


def _events(world: ExternalJobWorld) -> list[e.Event]:
    return [event for batch in world.ledger for entry in batch.entries for event in entry.events]


@pytest.mark.parametrize("phase", [ExternalJobPhase.SET_UP, ExternalJobPhase.STAGING_IN, ExternalJobPhase.STAGED_IN])
def test_what_its_scheduler_no_longer_knows_and_never_ran_does_not_linger(phase: ExternalJobPhase) -> None:
    world = world_at(phase)
    assert not isinstance(world.ask(c.TearDownExternalJob(CLUSTER, "42", reason="Slurm does not know it")), Rejection)
    assert world.phase() in (ExternalJobPhase.TEARDOWN, ExternalJobPhase.OVER)
    assert [event.reason for event in _events(world) if isinstance(event, e.TeardownStarted)] == [
        "Slurm does not know it"
    ]


@pytest.mark.parametrize(
    "phase", [ExternalJobPhase.RUNNING, ExternalJobPhase.POST_RUN, ExternalJobPhase.STAGE_OUT_FAILED]
)
def test_what_its_scheduler_no_longer_knows_and_ran_is_retained_with_the_reason(phase: ExternalJobPhase) -> None:
    world = world_at(phase)
    assert not isinstance(world.ask(c.TearDownExternalJob(CLUSTER, "42", reason="Slurm does not know it")), Rejection)
    assert world.phase() is ExternalJobPhase.RETAINED
    assert "Slurm does not know it" in world.external_job().comment


def test_an_external_job_that_is_missed_is_an_event_and_nothing_else() -> None:
    world = ExternalJobWorld()
    before = world.state
    assert world.ask(c.ReportMissingExternalJob(CLUSTER, "42", "staged-in")) == 0
    assert (world.state.external_jobs, world.state.jobs) == (before.external_jobs, before.jobs)
    world.setup()
    assert world.ask(c.ReportMissingExternalJob(CLUSTER, "42", "staged-in")) == 0  # it is there
    assert [event for event in _events(world) if isinstance(event, e.ExternalJobMissing)] == [
        e.ExternalJobMissing("slurm:42", "staged-in")
    ]


@pytest.mark.parametrize("text", ["x" * 10_000, "a\nb", "\x1b[2J"])
def test_what_a_scheduler_says_is_bounded_and_has_no_control_characters(text: str) -> None:
    world = world_at(ExternalJobPhase.STAGED_IN)
    for command in (c.TearDownExternalJob(CLUSTER, "42", reason=text), c.ReportMissingExternalJob(CLUSTER, "43", text)):
        rejection = world.ask(command)
        assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.INVALID_FIELD
    assert world.phase() is ExternalJobPhase.STAGED_IN


def test_nothing_takes_over_from_the_mover_of_an_external_job_that_waits_for_an_operator() -> None:
    world = ExternalJobWorld(stage_retries=0)
    world.setup()
    world.stage_in()
    job = world.external_job()
    world.fail()
    before = world.external_job()
    assert before.stuck and before.mover
    world.settle(c.DrainNode(before.mover, "x"))
    world.advance(1_000)
    after = world.external_job()
    assert (after.mover, after.attempt, after.stuck, after.message) == (
        before.mover,
        before.attempt,
        True,
        before.message,
    )
    assert not any(order.job == job.id for mover in MOVERS for order in world.orders(mover))
