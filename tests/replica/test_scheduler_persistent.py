"""Persistent buffers of another scheduler's jobs: made and removed for a user that it names, used by its external
jobs.
"""

from __future__ import annotations

from typing import Any

import pytest

from forebay.replica.decide import find_persistent_job
from forebay.replica.messages import commands as c
from forebay.replica.model.buffers import Access
from forebay.replica.model.requests import CreatePersistent
from forebay.replica.operations.external_jobs import ExternalJobPhase
from forebay.replica.values.errors import Rejection, RejectionCode
from forebay.replica.views import persistent_paths
from tests.replica.external_job_world import CLUSTER, SLURM, ExternalJobWorld, asked
from tests.replica.test_persistent import DESTROYS_LAKE, asks, lake
from tests.replica.world import OPERATOR, agent, user

USES = "#DW persistentdw name=lake"
KEEPS = "#DW stage_in type=file source=/in/a destination=$DW_PERSISTENT_STRIPED_lake/a"


def world(flags: str = "EnablePersistent", **fields: Any) -> ExternalJobWorld:
    made = ExternalJobWorld(**fields)
    made.configure(Flags=flags)
    return made


def make(
    here: ExternalJobWorld, name: str = "lake", size: int = 40, *, who: str = "alan", **fields: Any
) -> Rejection | int:
    wanted = CreatePersistent(name, size, fields.pop("pool", "fast"), (Access.STRIPED,), "scratch", "capacity", "bare")
    command = c.MakePersistent(fields.pop("cluster", CLUSTER), who, fields.pop("uid", 1000), 100, wanted)
    return here.ask(command, **fields)


def remove(here: ExternalJobWorld, name: str = "lake", *, who: str = "alan", **fields: Any) -> Rejection | int:
    return here.ask(c.RemovePersistent(CLUSTER, who, fields.pop("uid", 1000), 100, name), **fields)


def carried_out(here: ExternalJobWorld, who: str = "alan") -> None:
    """Have a mover do what a command has begun, to its end."""
    job = find_persistent_job(here.state, who, "lake")
    assert job is not None
    here.finish(job.id)
    assert find_persistent_job(here.state, who, "lake") is None


def made(here: ExternalJobWorld) -> None:
    assert not isinstance(make(here), Rejection)
    carried_out(here)
    assert lake(here) == "allocated"


def test_a_persistent_buffer_is_its_users_and_lies_in_the_place_that_all_nodes_see() -> None:
    here = world()
    made(here)
    buffer = here.state.persistent["lake"]
    assert (buffer.user, buffer.gid, buffer.pool, buffer.granted_bytes) == ("alan", 100, "fast", 40)
    assert buffer.filesystem == "bb" and buffer.node == ""
    assert here.free() == 60
    assert not isinstance(remove(here), Rejection)
    carried_out(here)
    assert lake(here) == "none" and here.free() == 100


@pytest.mark.parametrize("how_far", ["waits", "begun", "made"])
def test_asking_again_makes_nothing_twice(how_far: str) -> None:
    here = world()
    if how_far == "waits":
        here.running("42", asked(80))
    if how_far == "made":
        made(here)
    else:
        make(here)
    jobs, revision = here.state.next_job, len(here.ledger)
    for _ in range(3):
        assert make(here) == 0
    assert here.state.next_job == jobs
    assert not any(entry.events for batch in here.ledger[revision:] for entry in batch.entries)


@pytest.mark.parametrize("how_far", ["none", "begun", "gone"])
def test_removing_again_removes_nothing_twice(how_far: str) -> None:
    here = world()
    if how_far != "none":
        made(here)
        remove(here)
    if how_far == "gone":
        carried_out(here)
    jobs, revision = here.state.next_job, len(here.ledger)
    for _ in range(3):
        assert remove(here) == 0
    assert here.state.next_job == jobs
    assert not any(entry.events for batch in here.ledger[revision:] for entry in batch.entries)


@pytest.mark.parametrize("how_far", ["waits", "begun"])
def test_what_is_not_made_yet_is_given_up(how_far: str) -> None:
    here = world()
    if how_far == "waits":
        here.running("42", asked(80))
    make(here)
    assert lake(here) == ("none" if how_far == "waits" else "allocating")
    job = find_persistent_job(here.state, "alan", "lake")
    remove(here)
    if how_far == "begun":
        assert lake(here) == "deleting" and job is not None
        here.finish(job.id)
    assert lake(here) == "none"
    assert here.free() == (20 if how_far == "waits" else 100)


def test_nobody_else_makes_or_removes_what_is_a_users_own() -> None:
    here = world()
    made(here)
    for outcome in (make(here, who="brenda", uid=1001), remove(here, who="brenda", uid=1001)):
        assert isinstance(outcome, Rejection) and outcome.code is RejectionCode.PERMISSION_DENIED
        assert "lake belongs to another user" in outcome.sentence
    assert lake(here) == "allocated"


@pytest.mark.parametrize("uid, who", [(0, "root"), (0, "alan"), (1000, "root"), (-1, "alan")])
def test_nothing_is_made_or_removed_for_root(uid: int, who: str) -> None:
    here = world()
    for outcome in (make(here, who=who, uid=uid), remove(here, who=who, uid=uid)):
        assert isinstance(outcome, Rejection)
        assert outcome.sentence == "User root can not allocate burst buffers"


def test_who_may_have_no_buffers_has_no_persistent_one() -> None:
    here = world()
    here.configure(DenyUsers="alan")
    for outcome in (make(here), remove(here)):
        assert isinstance(outcome, Rejection) and "DenyUsers" in outcome.sentence


def test_where_only_operators_make_persistent_buffers_no_scheduler_does() -> None:
    here = world("DisablePersistent")
    outcome = make(here)
    assert isinstance(outcome, Rejection) and outcome.code is RejectionCode.PERMISSION_DENIED
    assert "Flags=EnablePersistent" in outcome.remedy


def test_no_other_cluster_and_no_other_role_asks_for_them() -> None:
    here = world()
    assert isinstance(make(here, cluster="another"), Rejection)
    for actor in (OPERATOR, user("alan"), agent("n1"), c.CONTROLLER):
        for outcome in (make(here, actor=actor), remove(here, actor=actor)):
            assert isinstance(outcome, Rejection) and outcome.code is RejectionCode.PERMISSION_DENIED
    unknown = make(here, actor=c.Actor(c.ActorRole.SCHEDULER, "pbs"))
    assert isinstance(unknown, Rejection) and unknown.remedy == "register it first"


def test_a_pool_of_the_nodes_themselves_is_refused() -> None:
    here = world(pools={"fast": 100})
    here.settle(c.SetPool(here.state.pools["fast"].__class__("own", 100, 1)))
    outcome = make(here, pool="own")
    assert isinstance(outcome, Rejection) and "pool own has its buffers on nodes" in outcome.sentence
    assert outcome.remedy == "use one of: fast"


@pytest.mark.parametrize("name", ["1lake", "la/ke", "", ".lake", "x" * 300])
def test_what_can_be_no_name_is_refused(name: str) -> None:
    assert isinstance(make(world(), name), Rejection)


# ---- external jobs that use them


def uses(capacity: int = 10, *lines: str) -> Any:
    from msgspec.structs import replace

    request = asked(capacity or 10, USES, *lines)
    if capacity:
        return request
    assert request.buffer is not None
    return replace(request, buffer=replace(request.buffer, capacity_bytes=0))


@pytest.mark.parametrize("capacity", [0, 10])
def test_an_external_job_works_with_a_persistent_buffer_with_or_without_one_of_its_own(capacity: int) -> None:
    here = world()
    made(here)
    here.setup(request=uses(capacity, KEEPS))
    assert here.phase() is ExternalJobPhase.SET_UP
    assert here.buffer().filesystems == ("bb",) and here.free() == 60 - capacity
    assert persistent_paths(here.state, here.external_job().id) == {
        "lake": "/bb/" + here.state.persistent["lake"].directory
    }
    here.stage_in()
    [order] = [order for order in here.orders(here.external_job().mover) if order.job == here.external_job().id]
    assert order.uses == ("lake",) and dict(order.persistent)["lake"].directory.startswith("test/lake.")
    here.finish_operation()
    here.begin()
    remove(here)
    assert lake(here) == "allocated", "it is removed while a job works with it"
    here.end()
    here.stage_out()
    while here.phase() is not ExternalJobPhase.OVER:
        here.finish_operation()
    carried_out(here)
    assert lake(here) == "none" and here.free() == 100


def test_what_is_not_there_yet_is_waited_for_as_long_as_space_is() -> None:
    here = world()
    here.setup(request=uses())
    here.setup("43", asked(10))
    assert here.phase() is ExternalJobPhase.WAITING and here.phase("43") is ExternalJobPhase.SET_UP, (
        "it keeps others back"
    )
    made(here)
    assert here.phase() is ExternalJobPhase.SET_UP


def test_what_never_comes_fails_the_setup_with_its_name() -> None:
    here = world()
    here.setup(request=uses())
    here.advance(here.state.site.external_job_setup_wait_s + 1)
    assert here.phase() is ExternalJobPhase.OVER
    assert here.external_job().message == "persistent buffer lake does not exist"


def test_an_external_job_that_uses_one_never_lingers_and_so_keeps_nobody_from_removing_it() -> None:
    here = world()
    made(here)
    here.ready(request=uses(10))
    here.tear_down()
    assert here.phase() is ExternalJobPhase.TEARDOWN
    remove(here)
    here.finish_operation()
    carried_out(here)
    assert lake(here) == "none"


def test_one_that_is_on_a_node_is_refused() -> None:
    here = world()
    made(here)
    from msgspec.structs import replace

    kept = here.state.persistent["lake"]
    here.state = replace(
        here.state, persistent=here.state.persistent.set("lake", replace(kept, filesystem="", directory="", node="n1"))
    )
    from forebay.replica.decide import decide

    command = c.SetUpExternalJob(CLUSTER, "42", 1000, uses(0))
    outcome = decide(here.state, c.Request(bytes(16), SLURM, command), here.at)
    assert isinstance(outcome, Rejection) and "persistent buffer lake is on node n1" in outcome.sentence


def test_a_native_job_and_a_scheduler_remove_the_same_buffer_once() -> None:
    here = world()
    made(here)
    job = asks(here, DESTROYS_LAKE, nodes=0)
    assert isinstance(job, int)
    assert remove(here) == 0
    here.finish(job)
    assert lake(here) == "none"


def test_what_an_external_job_gets_in_a_pass_is_not_removed_in_that_pass() -> None:
    here = world()
    made(here)
    here.running("42", uses(60))
    here.setup("43", uses(50))
    remove(here)
    assert here.phase("43") is ExternalJobPhase.WAITING and lake(here) == "allocated"
    here.end()
    here.stage_out()
    while here.phase() is not ExternalJobPhase.OVER:
        here.finish_operation()
    assert (here.phase("43"), lake(here)) == (ExternalJobPhase.SET_UP, "allocated")


def test_movers_alone_are_enough() -> None:
    here = world(nodes=0)
    made(here)
    assert all(node.cpus == 0 for node in here.state.nodes.values())
