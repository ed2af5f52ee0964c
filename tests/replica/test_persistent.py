"""Persistent buffers: created, used, destroyed and owned; their space, and what outlives what."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.grammar.directives import parse_request
from forebay.replica.grammar.lexer import DirectiveRejected
from forebay.replica.messages import commands as c
from forebay.replica.model.buffers import BufferState
from forebay.replica.model.requests import BufferRequest, CreatePersistent, DestroyPersistent, JobOptions, JobRequest
from forebay.replica.values.errors import Rejection, RejectionCode
from forebay.replica.values.verdicts import Reason
from forebay.replica.views.jobs import persistent_notes
from tests.replica.world import OPERATOR, SCRIPT, World, agent, beside_space, user

CREATES_LAKE = beside_space(creates=(CreatePersistent("lake", 40),))
USES_LAKE = beside_space(uses=("lake",))
DESTROYS_LAKE = beside_space(destroys=(DestroyPersistent("lake"),))


def world(**fields: Any) -> World:
    """A site that lets users create and destroy."""
    made = World(**fields)
    made.settle(c.ConfigureSite(settings=(ConfSetting("Flags", "EnablePersistent"),), partial=True))
    assert "EnablePersistent" in made.state.site.flags
    return made


def asks(
    here: World, options: BufferRequest, *, who: str = "alan", bb: str = "", actor: c.Actor | None = None, **more: Any
) -> int | Rejection:
    spec = {"name": "job", "user": who, "script": SCRIPT, "workdir": "/out", "time_limit_s": 60}
    request = parse_request(SCRIPT, bb) or options
    fields = {key: more.pop(key) for key in tuple(more) if key in JobRequest.__struct_fields__}
    named = {name: getattr(options, name) for name in ("creates", "destroys", "uses")}
    asked = JobRequest(**{**spec, **fields}, buffer=replace(request, **named), options=JobOptions(**more))
    return here.settle(c.SubmitJob(asked), actor or user(who))


def submitted(here: World, options: BufferRequest, **more: Any) -> int:
    job = asks(here, options, **more)
    assert isinstance(job, int), job
    return job


def lake(here: World) -> str:
    return here.state.persistent["lake"].state.word if "lake" in here.state.persistent else "none"


def made(here: World, **more: Any) -> int:
    job = submitted(here, CREATES_LAKE, nodes=0, **more)
    here.finish(job)
    assert lake(here) == "allocated"
    return job


def test_a_persistent_buffer_holds_its_space_from_allocating_to_deleted_and_outlives_its_jobs() -> None:
    here = world()
    job = submitted(here, CREATES_LAKE, nodes=0)
    assert (lake(here), here.free()) == ("allocating", 60)
    assert [create.name for create in here.order(job).creates] == ["lake"]
    here.done(job)
    assert (lake(here), here.free()) == ("allocated", 60)
    assert here.state.jobs[job].state.name == "COMPLETED"
    here.finish(job)
    assert (lake(here), here.free()) == ("allocated", 60)
    remover = submitted(here, DESTROYS_LAKE, nodes=0)
    assert (lake(here), here.free()) == ("deleting", 60)
    assert [destroy.name for destroy in here.order(remover).destroys] == ["lake"]
    here.done(remover)
    assert (lake(here), here.free()) == ("none", 100)
    here.finish(remover)
    assert here.state.jobs[remover].state.name == "COMPLETED"


def test_a_job_of_no_nodes_runs_no_script() -> None:
    here = world()
    job = submitted(here, CREATES_LAKE, nodes=0)
    here.done(job)
    assert here.order(job).stage == "teardown"
    assert here.state.jobs[job].started_at == 0


def test_a_job_waits_until_the_buffer_that_it_uses_is_allocated_and_then_runs_where_it_is() -> None:
    here = world(nodes=3)
    waiter = submitted(here, USES_LAKE)
    assert here.shown(waiter) == ("PENDING", Reason.BURST_BUFFER_RESOURCES, "pending")
    maker = submitted(here, CREATES_LAKE, nodes=0)
    assert here.state.jobs[waiter].node == ""
    here.done(maker)
    where = here.state.persistent["lake"].node
    assert here.state.jobs[waiter].node == where
    assert here.order(waiter).uses == ("lake",)


def test_jobs_share_a_buffer_and_it_is_not_destroyed_while_one_works_with_it() -> None:
    here = world()
    made(here)
    users = [submitted(here, USES_LAKE), submitted(here, USES_LAKE, who="ben")]
    remover = submitted(here, DESTROYS_LAKE, nodes=0)
    for job in users:
        assert lake(here) == "allocated"
        assert "persistent buffer lake is in use" in here_why(here, remover)
        here.finish(job)
    assert lake(here) == "deleting"
    later = submitted(here, USES_LAKE)
    assert here.shown(later)[2] == "pending"
    here.finish(remover)
    assert "persistent buffer lake does not exist yet" in here_why(here, later)


def here_why(here: World, job: int) -> str:
    from forebay.replica.views.jobs import verdict_of

    return verdict_of(here.state, job).sentence


def test_the_same_owner_and_name_again_succeeds_and_takes_nothing_more() -> None:
    here = world()
    first = made(here)
    again = submitted(here, CREATES_LAKE, nodes=0)
    here.finish(again)
    assert here.state.jobs[again].state.name == "COMPLETED"
    assert (here.free(), here.state.persistent["lake"].job) == (60, first)


def test_a_name_that_another_user_owns_holds_the_job_with_slurms_words_and_a_release_tries_again() -> None:
    here = world()
    made(here, who="ben")
    job = submitted(here, CREATES_LAKE)
    assert here.shown(job) == ("PENDING", "Burst buffer create_persistent error", "pending")
    assert "Duplicate buffer name" in here.state.jobs[job].comment
    assert here.free() == 60
    here.finish(submitted(here, DESTROYS_LAKE, who="ben", nodes=0))
    here.settle(c.ReleaseJob(job), user())
    assert here.shown(job)[2] == "staging-in"
    assert here.state.persistent["lake"].user == "alan"


def test_only_the_owner_or_an_operator_destroys_and_others_are_held() -> None:
    here = world()
    made(here, who="ben")
    job = submitted(here, DESTROYS_LAKE, nodes=0)
    denied = "burst_buffer/native: Delete buffer lake permission denied"
    assert here.shown(job) == ("PENDING", denied, "pending")
    forged = submitted(here, DESTROYS_LAKE, nodes=0, by_operator=True)
    assert here.shown(forged) == ("PENDING", denied, "pending")
    here.finish(submitted(here, DESTROYS_LAKE, nodes=0, actor=OPERATOR))
    assert lake(here) == "none"


def test_destroying_an_unknown_name_succeeds() -> None:
    here = world()
    job = submitted(here, DESTROYS_LAKE, nodes=0)
    here.finish(job)
    assert here.state.jobs[job].state.name == "COMPLETED"


def test_users_may_neither_create_nor_destroy_unless_the_site_says_so_and_operators_may() -> None:
    here = World()
    for options in (CREATES_LAKE, DESTROYS_LAKE):
        rejection = asks(here, options, nodes=0)
        assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.PERMISSION_DENIED
    assert isinstance(asks(here, CREATES_LAKE, nodes=0, actor=OPERATOR), int)


def test_a_creator_that_is_cancelled_before_the_buffer_is_there_leaves_nothing_of_it() -> None:
    here = world()
    job = submitted(here, CREATES_LAKE)
    here.settle(c.CancelJob(job), user())
    assert (lake(here), here.free()) == ("deleting", 60)
    assert [destroy.name for destroy in here.order(job).destroys] == ["lake"]
    here.finish(job)
    assert (lake(here), here.free()) == ("none", 100)


def test_a_creation_that_fails_holds_the_job_and_its_space_and_a_release_tries_again() -> None:
    here = world(stage_retries=0)
    job = submitted(here, CREATES_LAKE)
    here.report(job, c.OperationFailed("no room", operation="create_persistent"))
    assert here.shown(job) == ("PENDING", "Burst buffer create_persistent error", "staging-in")
    assert (lake(here), here.free()) == ("allocating", 60)
    here.settle(c.ReleaseJob(job), user())
    here.done(job)
    assert lake(here) == "allocated"


REST_OF_THE_STAGE_IN = {
    "under way": lambda here, job: None,
    "failed": lambda here, job: here.report(job, c.OperationFailed("no such file", True, "setup")),
    "cancelled": lambda here, job: here.settle(c.CancelJob(job), user()),
    "lost with its agent": lambda here, job: here.register("n1", instance="i2"),
    "done": lambda here, job: here.done(job),
}


@pytest.mark.parametrize("rest", REST_OF_THE_STAGE_IN)
@pytest.mark.parametrize("flags", ["EnablePersistent", "EnablePersistent,TeardownFailure"])
def test_a_buffer_is_allocated_once_created_and_stays_whatever_becomes_of_the_rest_of_its_creators_stage_in(
    rest: str, flags: str
) -> None:
    here = world(stage_retries=0)
    here.configure(Flags=flags)
    job = submitted(here, CREATES_LAKE)
    waiter = submitted(here, USES_LAKE)
    assert (lake(here), here.shown(waiter)[2]) == ("allocating", "pending")
    assert here.report(job, c.PersistentChanged("lake")) == job
    assert (lake(here), here.shown(job)[2], here.shown(waiter)[2]) == ("allocated", "staging-in", "staging-in")
    assert here.order(job).creates == (), "a later attempt does not make it again"
    REST_OF_THE_STAGE_IN[rest](here, job)
    assert (lake(here), here.shown(waiter)[2], here.free()) == ("allocated", "staging-in", 60)


@pytest.mark.parametrize("rest", REST_OF_THE_STAGE_IN)
def test_a_buffer_is_gone_once_destroyed_whatever_becomes_of_the_rest_of_that_stage_in(rest: str) -> None:
    here = world(stage_retries=0)
    made(here)
    job = submitted(here, DESTROYS_LAKE)
    assert (lake(here), here.free()) == ("deleting", 60)
    assert here.report(job, c.PersistentChanged("lake")) == job
    assert (lake(here), here.free()) == ("none", 100)
    REST_OF_THE_STAGE_IN[rest](here, job)
    assert (lake(here), here.free()) == ("none", 100)


def test_what_an_unfinished_creation_left_is_gone_once_removed_though_the_teardown_fails() -> None:
    here = world(stage_retries=0)
    job = submitted(here, CREATES_LAKE)
    here.settle(c.CancelJob(job), user())
    assert here.order(job).stage == "teardown" and here.report(job, c.PersistentChanged("lake")) == job
    assert (lake(here), here.free()) == ("none", 100)
    here.report(job, c.OperationFailed("it broke"))
    assert here.shown(job)[2] == "teardown-fail"


def test_an_agent_says_only_of_buffers_that_its_order_makes_or_removes_that_they_are_there_or_gone() -> None:
    here = world(pools={"fast": 200})
    submitted(here, CREATES_LAKE)
    other = submitted(here, beside_space(creates=(CreatePersistent("pond", 40),)))
    for name in ("lake", "nothing", "x" * 5000):
        rejection = here.report(other, c.PersistentChanged(name))
        assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.STALE_ATTEMPT
    assert lake(here) == "allocating"
    assert here.report(other, c.PersistentChanged("pond")) == other
    assert isinstance(here.report(other, c.PersistentChanged("pond")), Rejection), "it is known"


def test_who_wants_more_than_is_free_is_first_in_line_and_is_not_passed_without_bound() -> None:
    here = world(max_passes=1)
    holder = here.submit("capacity=80", time_limit_s=999)
    maker = submitted(here, beside_space(creates=(CreatePersistent("lake", 100),)))
    passing = [here.submit("capacity=10", time_limit_s=9999) for _ in range(3)]
    assert [here.state.buffers[job].state.word for job in passing] == ["staging-in", "pending", "pending"]
    for job in (holder, passing[0]):
        here.settle(c.CancelJob(job), user())
        here.finish(job)
    assert here.shown(maker)[2] == "staging-in"


def test_a_buffer_and_the_jobs_that_name_it_survive_an_agent_that_is_replaced() -> None:
    here = world()
    job = submitted(here, CREATES_LAKE)
    here.register("n1", instance="i2")
    assert here.order(job).attempt == 2
    here.finish(job)
    assert lake(here) == "allocated"


def test_an_operator_clears_a_buffer_that_cannot_be_removed_and_nobody_else() -> None:
    here = world()
    made(here)
    job = submitted(here, USES_LAKE)
    for actor in (user(), agent("n1")):
        assert isinstance(here.settle(c.ClearBuffer(name="lake", discard=True), actor), Rejection)
    busy = here.settle(c.ClearBuffer(name="lake", discard=True))
    assert isinstance(busy, Rejection) and "in use by 1 jobs" in busy.sentence
    here.finish(job)
    assert isinstance(here.settle(c.ClearBuffer(name="lake")), Rejection)
    assert not isinstance(here.settle(c.ClearBuffer(name="lake", discard=True)), Rejection)
    assert (lake(here), here.free()) == ("none", 100)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (beside_space(creates=(CreatePersistent("1st", 1),)), "starts with a digit"),
        (beside_space(creates=(CreatePersistent("../x", 1),)), "'../x'"),
        (beside_space(creates=(CreatePersistent("lake", 1), CreatePersistent("lake", 2))), "names lake twice"),
        (beside_space(uses=("lake",), destroys=(DestroyPersistent("lake"),)), "creates or uses"),
        (beside_space(uses=tuple(f"b{n}" for n in range(65))), "the job has 65 persistentdw"),
    ],
)
def test_names_that_cannot_be_are_refused_before_a_job_waits_for_them(options: BufferRequest, words: str) -> None:
    rejection = asks(world(), options)
    assert isinstance(rejection, Rejection) and words in rejection.sentence


@pytest.mark.parametrize("state", list(BufferState))
def test_a_persistent_buffer_has_no_state_of_a_jobs_buffer(state: BufferState) -> None:
    from forebay.replica.model.buffers import PERSISTENT_STATES, TRANSITIONS

    leads_to = {after for (before, _), after in TRANSITIONS.items() if before is state}
    if state in PERSISTENT_STATES:
        assert leads_to <= PERSISTENT_STATES | {BufferState.DELETED}


@pytest.mark.parametrize(
    ("again", "says"),
    [
        (CreatePersistent("lake", 40), ""),
        (CreatePersistent("lake", 20), "it has 40, not 20"),
        (CreatePersistent("lake", 60), "it has 40, not 60"),
        (CreatePersistent("lake", 40, "slow"), "it is in pool fast, not slow"),
    ],
)
def test_creating_what_exists_succeeds_only_if_it_is_the_same(again: CreatePersistent, says: str) -> None:
    here = world(pools={"fast": 100, "slow": 100})
    made(here)
    job = submitted(here, beside_space(creates=(again,)), nodes=0)
    if says:
        assert here.shown(job) == ("PENDING", "Burst buffer create_persistent error", "pending")
        assert says in here.state.jobs[job].comment
        # Once the buffer is gone, a release creates it anew.
        gone = submitted(here, DESTROYS_LAKE, nodes=0)
        here.finish(gone)
        assert lake(here) == "none"
        here.settle(c.ReleaseJob(job), OPERATOR)
    here.finish(job)
    assert lake(here) == "allocated"


def test_a_submitter_is_told_of_persistent_buffers_that_do_not_exist() -> None:
    here = world(pools={"fast": 100})
    destroys, uses = submitted(here, DESTROYS_LAKE, nodes=0), submitted(here, USES_LAKE)
    assert persistent_notes(here.state, destroys) == (
        "persistent buffer lake does not exist; destroying it has no effect",
    )
    assert persistent_notes(here.state, uses) == (
        "persistent buffer lake does not exist; the job waits until it is created",
    )
    created = submitted(here, beside_space(creates=(CreatePersistent("pond", 1),), uses=("pond",)))
    assert persistent_notes(here.state, created) == ()


def test_two_names_with_one_variable_are_rejected() -> None:
    here = world(pools={"fast": 100})
    made(here)
    pond = submitted(here, beside_space(creates=(CreatePersistent("a-2", 1),)), nodes=0)
    here.finish(pond)
    found = asks(here, beside_space(creates=(CreatePersistent("a_2", 1),)), nodes=0)
    assert isinstance(found, Rejection) and "'a_2' and 'a-2' have the same variable $DW_PERSISTENT_STRIPED_a_2" in (
        found.sentence
    )
    both = beside_space(creates=(CreatePersistent("b.c", 1), CreatePersistent("b+c", 1)))
    assert isinstance(asks(here, both, nodes=0), Rejection)


@pytest.mark.parametrize("spelling", ["$DW_PERSISTENT_STRIPED_lake_2", "${DW_PERSISTENT_STRIPED_lake-2}"])
def test_a_directive_may_spell_the_variable_as_a_shell_does_or_as_the_name(spelling: str) -> None:
    script = f"#!/bin/sh\n#DW persistentdw name=lake-2\n#DW stage_in type=file source=/in/a destination={spelling}/a\n"
    request = parse_request(script)
    assert request is not None and request.uses == ("lake-2",)
    with pytest.raises(DirectiveRejected, match="have the same variable"):
        parse_request("#!/bin/sh\n#DW persistentdw name=lake-2\n#DW persistentdw name=lake_2\n")
