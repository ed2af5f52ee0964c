"""Shared filesystems and movers: who stages for whom, who takes over, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from forebay.replica.messages import commands as c
from forebay.replica.model.buffers import Buffer, BufferState
from forebay.replica.model.job_states import JobState
from forebay.replica.model.pools import NO_LAYOUT, FilesystemLayout, ObservedFilesystem, Pool, SharedFilesystem
from forebay.replica.model.requests import BufferRequest, CreatePersistent, DestroyPersistent
from forebay.replica.model.stages import Stage
from forebay.replica.operations import directory_in_filesystem, persistent_directory
from forebay.replica.scheduler.persistent import persistent_request
from forebay.replica.values.errors import Rejection, RejectionCode
from tests.replica.scheduler.test_index import IndexedWorld
from tests.replica.test_histories import Histories
from tests.replica.test_persistent import asks
from tests.replica.world import OPERATOR, World, agent, beside_space, user

MOVERS = ("m1", "m2")
IDENTITY = "bb0"
HERE = (ObservedFilesystem("bb", IDENTITY),)


class FilesystemWorld(IndexedWorld):
    """A world whose pool `bulk` has its buffers in a shared filesystem with two movers; its index is compared at
    every step.
    """

    def __init__(self, *arguments: Any, **changes: Any) -> None:
        super().__init__(*arguments, **changes)
        self.made(c.AddFilesystem("bb", "/bb/fast"))
        for mover in MOVERS:
            self.made(c.AdmitNode(mover))
            self.register(mover)
        self.made(c.ChangePool("bulk", filesystem="bb"))

    def made(self, command: c.Command) -> None:
        outcome = self.settle(command)
        assert not isinstance(outcome, Rejection), outcome

    def register(self, node: str, cpus: int = 8, instance: str = "i1", storage: str = "s1") -> Rejection | int:
        if not node.startswith("m"):
            return super().register(node, cpus, instance, storage)
        return self.settle(c.RegisterNode(node, 0, instance, storage, filesystems=HERE), agent(node))


def filesystem_world(**changes: Any) -> FilesystemWorld:
    return FilesystemWorld({"fast": 100, "bulk": 100}, nodes=2, cpus=4, **changes)


def refused(world: World, command: c.Command, code: RejectionCode, actor: c.Actor = OPERATOR) -> str:
    outcome = world.settle(command, actor)
    assert isinstance(outcome, Rejection) and outcome.code is code, outcome
    return outcome.sentence


# ---- the life of a job


def test_a_mover_of_a_shared_filesystem_that_was_removed_and_made_again_is_its_mover_when_it_comes_again() -> None:
    world = filesystem_world()
    for command in (c.ChangePool("bulk", filesystem=""), c.RemoveFilesystem("bb"), c.AddFilesystem("bb", "/bb/fast")):
        world.made(command)
    assert world.state.filesystems["bb"].movers == ()
    world.register("m1")
    assert (world.state.filesystems["bb"].movers, world.state.filesystems["bb"].identity) == (("m1",), IDENTITY)


def test_a_mover_stages_and_any_node_runs_the_script() -> None:
    world = filesystem_world()
    job = world.submit("capacity=10 pool=bulk", cpus=4)
    filler = world.submit(cpus=4)
    staging = world.order(job)
    assert (world.agent_of(job), staging.stage, world.state.jobs[job].node) == ("m1", "stage_in", "")
    filesystem = staging.filesystem
    assert filesystem is not None
    assert (filesystem.name, filesystem.path, filesystem.identity, filesystem.directory) == (
        "bb",
        "/bb/fast",
        IDENTITY,
        f"test/{job}.{staging.attempt}",
    )
    world.done(job)
    # The first node is taken, so it runs on the other one, and not where anybody staged.
    ran_on = world.agent_of(job)
    assert {ran_on, world.agent_of(filler)} == {"n1", "n2"}
    assert world.order(job).filesystem == filesystem
    world.done(job)
    assert (world.order(job).stage, world.agent_of(job)) == ("post_run", ran_on)
    world.done(job)
    assert (world.order(job).stage, world.agent_of(job)) == ("stage_out", "m1")
    world.done(job)
    assert (world.order(job).stage, world.agent_of(job)) == ("teardown", "m1")
    world.done(job)
    assert world.state.buffers[job].state is BufferState.COMPLETE and world.free("bulk") == 100
    assert not any(job in jobs for jobs in world.state.on_node.values())


def test_the_mover_with_the_fewest_transfers_is_chosen_and_the_first_by_name_among_equals() -> None:
    world = filesystem_world()
    jobs = [world.submit("capacity=10 pool=bulk") for _ in range(4)]
    assert [world.agent_of(job) for job in jobs] == ["m1", "m2", "m1", "m2"]
    world.done(jobs[1])
    assert world.agent_of(world.submit("capacity=10 pool=bulk")) == "m2"


def test_no_script_ever_runs_on_a_mover() -> None:
    world = filesystem_world()
    jobs = [world.submit(cpus=1) for _ in range(12)]
    world.settle(c.DrainNode("n1", "x"))
    world.settle(c.DrainNode("n2", "x"))
    assert not world.orders("m1") and not world.orders("m2")
    assert {world.state.jobs[job].node for job in jobs} <= {"n1", "n2", ""}


def test_a_job_waits_while_no_mover_is_up_and_says_so() -> None:
    world = filesystem_world()
    for mover in MOVERS:
        world.settle(c.DrainNode(mover, "x"))
    job, other = world.submit("capacity=10 pool=bulk"), world.submit("capacity=10 pool=fast")
    assert world.verdict(job).sentence == "no mover of the shared filesystem of pool bulk is up"
    assert world.order(other).stage == "stage_in", "a pool without a shared filesystem has nothing to do with it"
    world.settle(c.ResumeNode("m2"))
    assert world.agent_of(job) == "m2"


def test_a_requeued_job_begins_with_any_mover() -> None:
    world = filesystem_world()
    job = world.submit("capacity=10 pool=bulk")
    first = world.order(job).filesystem
    world.done(job)
    world.report(job, c.ScriptStarted())
    world.settle(c.RequeueJob(job), user())
    world.report(job, c.ScriptEnded(JobState.CANCELLED))
    while world.order(job).stage != "stage_in":
        world.done(job)
    assert (world.state.jobs[job].node, world.order(job).stage) == ("", "stage_in")
    filesystem = world.order(job).filesystem
    assert filesystem is not None and filesystem != first, "a later life of the buffer has a directory of its own"
    world.finish(job)


# ---- takeover


def bring_to(world: World, stage: str) -> int:
    job = world.submit("capacity=10 pool=bulk")
    while world.order(job).stage != stage:
        world.done(job)
    return job


@pytest.mark.parametrize("stage", ["stage_in", "stage_out", "teardown"])
@pytest.mark.parametrize("drained", [False, True])
def test_another_mover_takes_over_and_late_reports_of_the_first_are_refused(stage: str, drained: bool) -> None:
    world = filesystem_world()
    job = bring_to(world, stage)
    former, old = world.agent_of(job), world.order(job)
    down = c.DrainNode(former, "x") if drained else c.MarkNodeDown(former, "silent")
    world.settle(down, OPERATOR if drained else c.CONTROLLER)
    assert world.agent_of(job) == "m2" and not world.orders(former)
    new = world.order(job)
    assert (new.stage, new.filesystem) == (old.stage, old.filesystem) and new.attempt > old.attempt
    report = c.ReportOperation(former, job, old.attempt, Stage[stage.upper()], c.OperationDone(1, 1))
    refused(world, report, RejectionCode.STALE_ATTEMPT, agent(former))
    world.settle(c.MarkNodeBack(former) if not drained else c.ResumeNode(former), OPERATOR if drained else c.CONTROLLER)
    refused(world, report, RejectionCode.STALE_ATTEMPT, agent(former))
    assert world.agent_of(job) == "m2", "nobody goes back because the first is there again"
    world.finish(job)


def test_a_running_job_is_not_touched_by_the_end_of_its_mover() -> None:
    world = filesystem_world()
    job = bring_to(world, "run")
    order, node = world.order(job), world.agent_of(job)
    world.settle(c.MarkNodeDown("m1", "silent"), c.CONTROLLER)
    assert (world.order(job), world.agent_of(job)) == (order, node)
    world.done(job)
    world.done(job)
    assert (world.order(job).stage, world.agent_of(job)) == ("stage_out", "m2")


def test_an_operation_waits_for_the_only_mover_and_its_time_stands_still() -> None:
    world = filesystem_world()
    job = bring_to(world, "stage_in")
    for mover in MOVERS:
        world.settle(c.MarkNodeDown(mover, "silent"), c.CONTROLLER)
    attempt = world.state.jobs[job].attempt
    world.advance(10**6)
    assert world.state.jobs[job].attempt == attempt and world.state.jobs[job].failures == 0
    assert world.verdict(job).sentence.endswith("is down, and no other mover of its shared filesystem is up")
    world.settle(c.MarkNodeBack("m1"), c.CONTROLLER)
    world.finish(job)


def test_a_failed_operation_is_tried_again_by_whoever_takes_over() -> None:
    world = filesystem_world(stage_retries=2)
    job = bring_to(world, "stage_in")
    world.report(job, c.OperationFailed("it broke"))
    assert not world.orders("m1")
    world.settle(c.DrainNode("m1", "x"))
    assert world.order(job).stage == "stage_in" and world.agent_of(job) == "m2"
    assert world.state.jobs[job].failures == 1, "how often it failed is not forgotten"


@pytest.mark.parametrize("stage", ["stage_in", "stage_out", "teardown"])
def test_nothing_takes_over_an_operation_that_waits_for_an_operator(stage: str) -> None:
    world = filesystem_world(stage_retries=0)
    job = bring_to(world, stage)
    world.report(job, c.OperationFailed("it broke"))
    former = world.state.jobs[job]
    assert former.stuck
    world.settle(c.DrainNode("m1", "x"))
    world.advance(1_000)
    after = world.state.jobs[job]
    assert (after.mover, after.attempt, after.stuck, after.failures) == ("m1", former.attempt, True, former.failures)
    assert not world.orders("m2")


def test_the_restart_of_an_agent_starts_only_its_own_operations_again() -> None:
    world = filesystem_world()
    first, second = (world.submit("capacity=10 pool=bulk") for _ in range(2))
    before = world.order(second).attempt
    attempt = world.order(first).attempt
    world.register("m1", instance="i2")
    assert world.order(first).attempt == attempt + 1 and world.order(second).attempt == before
    world.done(first)
    running = world.order(first)
    world.register("m1", instance="i3")
    assert world.order(first) == running


# ---- what is refused


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("bb/other", "is not absolute"),
        ("/", "is not in its shortest form"),
        ("/bb//x", "is not in its shortest form"),
        ("/bb/./x", "is not in its shortest form"),
        ("/bb/x/", "is not in its shortest form"),
        ("/bb/../x", "goes up with .."),
        ("/bb/fast", "are nested"),
        ("/bb/fast/more", "are nested"),
        ("/bb", "are nested"),
    ],
)
def test_a_path_that_could_not_be_a_shared_filesystem_of_its_own_is_refused(path: str, words: str) -> None:
    world = filesystem_world()
    assert words in refused(world, c.AddFilesystem("other", path), RejectionCode.INVALID_FIELD)
    assert world.settle(c.AddFilesystem("other", "/bb/fast2")) == 0, "a name that only begins alike is not below it"


def test_shared_filesystems_are_made_once_and_removed_when_no_pool_names_them() -> None:
    world = filesystem_world()
    revision = world.state.filesystems
    assert world.settle(c.AddFilesystem("bb", "/bb/fast")) == 0 and world.state.filesystems == revision
    refused(world, c.AddFilesystem("bb", "/bb/slow"), RejectionCode.WRONG_STATE)
    assert "in use by pool bulk" in refused(world, c.RemoveFilesystem("bb"), RejectionCode.WRONG_STATE)
    assert world.settle(c.ChangePool("bulk", filesystem="")) == 0
    assert world.settle(c.RemoveFilesystem("bb")) == 0 and not world.state.filesystems
    refused(world, c.RemoveFilesystem("bb"), RejectionCode.INVALID_FIELD)


@pytest.mark.parametrize(
    ("quota", "layout", "place"),
    [
        ("zfs", NO_LAYOUT, "filesystem.quota"),
        ("", NO_LAYOUT, "filesystem.quota"),
        ("lustre", FilesystemLayout("gpfs"), "filesystem.layout"),
        ("lustre", FilesystemLayout("none", 4), "filesystem.layout"),
        ("lustre", FilesystemLayout("lustre", -2), "filesystem.stripe_count"),
        ("lustre", FilesystemLayout("lustre", 2_001), "filesystem.stripe_count"),
        ("cephfs", FilesystemLayout("cephfs", -1), "filesystem.stripe_count"),
        ("lustre", FilesystemLayout("lustre", 1, 65_535), "filesystem.stripe_size"),
        ("lustre", FilesystemLayout("lustre", 1, 1 << 32), "filesystem.stripe_size"),
        ("lustre", FilesystemLayout("lustre", pool="-r"), "filesystem.stripe_pool"),
        ("lustre", FilesystemLayout("lustre", pool="x" * 65), "filesystem.stripe_pool"),
    ],
)
def test_adapters_that_do_not_exist_or_cannot_be_are_refused(quota: str, layout: FilesystemLayout, place: str) -> None:
    world = filesystem_world()
    for name, path in (("other", "/bb/fast2"), ("bb", "/bb/fast")):
        decided = world.settle(c.AddFilesystem(name, path, quota, layout))
        assert isinstance(decided, Rejection) and decided.code is RejectionCode.INVALID_FIELD
        assert decided.place == place and decided.remedy


def test_adapters_change_and_movers_stay_and_orders_carry_them() -> None:
    world = filesystem_world()
    before = world.state.filesystems["bb"]
    layout = FilesystemLayout("lustre", -1, 1 << 20, "flash")
    assert world.settle(c.AddFilesystem("bb", "/bb/fast", "lustre")) == 0
    assert world.settle(c.AddFilesystem("bb", "/bb/fast", layout=layout)) == 0
    after = world.state.filesystems["bb"]
    assert after == msgspec.structs.replace(before, quota="lustre", layout=layout) and after.movers == before.movers
    # Nothing changes, so nothing is written.
    assert world.settle(c.AddFilesystem("bb", "/bb/fast", "lustre", layout)) == 0
    assert world.state.filesystems["bb"] is after


def test_a_pool_names_a_shared_filesystem_that_there_is_and_keeps_it_while_it_is_used() -> None:
    world = filesystem_world()
    refused(world, c.ChangePool("fast", filesystem="bc"), RejectionCode.INVALID_FIELD)
    refused(world, c.ChangePool("new", exists=False, quantity=1, filesystem="bc"), RejectionCode.INVALID_FIELD)
    job = world.submit("capacity=10 pool=bulk")
    assert f"job {job}" in refused(world, c.ChangePool("bulk", filesystem=""), RejectionCode.WRONG_STATE)
    # Whoever sets a pool anew without a word of its shared filesystem leaves it where it is.
    assert world.settle(c.SetPool(Pool("bulk", 200, 1))) == 0 and world.state.pools["bulk"].filesystem == "bb"
    assert world.settle(c.ChangePool("new", exists=False, quantity=1, filesystem="bb")) == 0


def test_a_mover_that_sees_another_file_system_at_the_path_is_refused() -> None:
    world = filesystem_world()
    world.made(c.AdmitNode("m3"))
    elsewhere = c.RegisterNode("m3", 0, "i1", "s1", filesystems=(ObservedFilesystem("bb", "other"),))
    assert "a file system other than bb" in refused(world, elsewhere, RejectionCode.STORAGE_CHANGED, agent("m3"))
    for filesystems, cpus in (((ObservedFilesystem("bc", "x"),), 0), ((HERE[0], HERE[0]), 0), (HERE, 4), ((), 0)):
        command = c.RegisterNode("m3", cpus, "i1", "s1", filesystems=filesystems)
        refused(world, command, RejectionCode.INVALID_FIELD, agent("m3"))


def test_a_node_with_jobs_does_not_become_a_mover_nor_a_mover_a_node() -> None:
    world = filesystem_world()
    job = world.submit("capacity=10 pool=bulk")
    refused(world, c.RegisterNode("m1", 4, "i2", "s1"), RejectionCode.WRONG_STATE, agent("m1"))
    world.done(job)
    node = world.agent_of(job)
    refused(world, c.RegisterNode(node, 0, "i2", "s1", filesystems=HERE), RejectionCode.WRONG_STATE, agent(node))
    world.finish(job)
    assert world.settle(c.RegisterNode("m1", 4, "i2", "s1"), agent("m1")) == 0
    assert world.state.filesystems["bb"].movers == ("m2",)


def test_a_cluster_is_founded_with_shared_filesystems() -> None:
    from forebay.replica.decide.decide import decide
    from forebay.replica.model.configuration import Site
    from forebay.replica.state.state import EMPTY
    from forebay.replica.values.units import Instant

    def founded(filesystems: tuple[SharedFilesystem, ...], pool: str) -> Any:
        command = c.FoundCluster("id", "test", Site(), (Pool("p", 9, 1, filesystem=pool),), (), filesystems)
        return decide(EMPTY, c.Request(b"", c.CONTROLLER, command), Instant(1))

    accepted = founded((SharedFilesystem("bb", "/bb/fast"),), "bb")
    assert accepted.events[0].filesystems == (SharedFilesystem("bb", "/bb/fast"),)
    for filesystems, pool in (
        ((), "bb"),
        ((SharedFilesystem("a", "/x"), SharedFilesystem("b", "/x/y")), "a"),
        ((SharedFilesystem("a", "x"),), ""),
    ):
        assert isinstance(founded(filesystems, pool), Rejection)


# ---- persistent buffers in a shared filesystem

USES_LAKE = beside_space(uses=("lake",))
DESTROYS_LAKE = beside_space(destroys=(DestroyPersistent("lake", place="line 3"),))


def lake_world(**changes: Any) -> FilesystemWorld:
    world = filesystem_world(**changes)
    world.configure(Flags="EnablePersistent")
    return world


def creates_lake(pool: str = "bulk") -> BufferRequest:
    return beside_space(creates=(CreatePersistent("lake", 10, pool, place="line 2"),))


def submitted(world: World, request: BufferRequest, **more: Any) -> int:
    job = asks(world, request, **more)
    assert isinstance(job, int), job
    return job


def with_lake(world: World, pool: str = "bulk", **more: Any) -> int:
    job = submitted(world, creates_lake(pool), nodes=0, **more)
    world.finish(job)
    assert world.state.persistent["lake"].state is BufferState.ALLOCATED
    return job


def lies_at(world: World, job: int) -> str:
    return dict(world.order(job).persistent)["lake"].directory


def test_a_mover_makes_a_persistent_buffer_and_its_jobs_run_on_any_node() -> None:
    world = lake_world()
    maker = submitted(world, creates_lake(), nodes=0)
    order = world.order(maker)
    assert (world.agent_of(maker), [one.name for one in order.creates]) == ("m1", ["lake"])
    assert lies_at(world, maker) == f"test/lake.{maker}.{order.attempt}" and order.filesystem is not None
    assert world.free("bulk") == 90
    world.finish(maker)
    lake = world.state.persistent["lake"]
    assert (lake.state, lake.node, lake.filesystem) == (BufferState.ALLOCATED, "", "bb")
    users = [submitted(world, USES_LAKE, cpus=4) for _ in range(2)]
    for job in users:
        assert world.agent_of(job) in MOVERS and world.order(job).stage == "stage_in"
        world.done(job)
    assert {world.agent_of(job) for job in users} == {"n1", "n2"}, "no node is the buffer's"
    for job in users:
        assert dict(world.order(job).persistent)["lake"].path == "/bb/fast"
        world.finish(job)
    remover = submitted(world, DESTROYS_LAKE, nodes=0)
    assert world.agent_of(remover) in MOVERS
    assert lies_at(world, remover) == lake.directory and world.free("bulk") == 90
    world.finish(remover)
    assert "lake" not in world.state.persistent and world.free("bulk") == 100


def test_a_persistent_buffer_that_is_made_again_lies_elsewhere() -> None:
    world = lake_world()
    with_lake(world)
    first = world.state.persistent["lake"].directory
    world.finish(submitted(world, DESTROYS_LAKE, nodes=0))
    with_lake(world)
    assert world.state.persistent["lake"].directory != first


def test_a_job_that_is_requeued_makes_its_persistent_buffer_elsewhere_when_it_is_gone() -> None:
    world = lake_world()
    job = submitted(world, creates_lake())
    world.done(job)
    first = world.state.persistent["lake"].directory
    world.settle(c.RequeueJob(job), user())
    while world.order(job).stage != "teardown":
        world.report(job, c.ScriptEnded(JobState.CANCELLED)) if world.order(job).stage == "run" else world.done(job)
    world.finish(submitted(world, DESTROYS_LAKE, nodes=0))
    world.done(job)
    assert world.state.persistent["lake"].directory != first
    world.finish(job)


def test_no_directory_of_a_persistent_buffer_is_that_of_a_job_or_of_another_one() -> None:
    state = lake_world().state
    names = ["lake", "lake.1", "lake.1.2", "_1", "a.1"]
    found = [persistent_directory(state, name, job, attempt) for name in names for job in (1, 2) for attempt in (1, 2)]
    lives = [(job, epoch) for job in (1, 2) for epoch in (1, 2)]
    jobs = [
        directory_in_filesystem(state, Buffer(job, BufferState.PENDING, "", 0, epoch=epoch)) for job, epoch in lives
    ]
    assert len(set(found + jobs)) == len(found) + len(jobs)


@pytest.mark.parametrize("drained", [False, True])
@pytest.mark.parametrize("removing", [False, True])
def test_another_mover_goes_on_making_and_removing_a_persistent_buffer(drained: bool, removing: bool) -> None:
    world = lake_world()
    if removing:
        with_lake(world)
    job = submitted(world, DESTROYS_LAKE if removing else creates_lake(), nodes=0)
    former, old, directory = world.agent_of(job), world.order(job), lies_at(world, job)
    down = c.DrainNode(former, "x") if drained else c.MarkNodeDown(former, "silent")
    world.settle(down, OPERATOR if drained else c.CONTROLLER)
    other = world.agent_of(job)
    assert {former, other} == set(MOVERS) and lies_at(world, job) == directory
    late = c.ReportOperation(former, job, old.attempt, Stage.STAGE_IN, c.PersistentChanged("lake"))
    refused(world, late, RejectionCode.STALE_ATTEMPT, agent(former))
    assert world.report(job, c.PersistentChanged("lake")) == job
    assert ("lake" in world.state.persistent) != removing
    world.finish(job)
    assert world.free("bulk") == (100 if removing else 90)


def test_who_makes_a_persistent_buffer_where_no_mover_is_up_waits_and_reads_why() -> None:
    world = lake_world()
    for mover in MOVERS:
        world.settle(c.DrainNode(mover, "x"))
    job = submitted(world, creates_lake(), nodes=0)
    assert world.verdict(job).sentence == "no mover of shared filesystem bb is up"
    world.settle(c.ResumeNode("m2"))
    assert world.agent_of(job) == "m2"


def test_a_job_has_space_of_its_own_beside_a_persistent_buffer_in_the_same_shared_filesystem() -> None:
    world = lake_world()
    with_lake(world)
    job = submitted(world, USES_LAKE, bb="capacity=10 pool=bulk")
    filesystem = world.order(job).filesystem
    assert filesystem is not None and filesystem.directory == f"test/{job}.{world.order(job).attempt}"
    assert world.free("bulk") == 80
    world.finish(job)
    assert world.free("bulk") == 90


def test_a_job_that_needs_two_shared_filesystems_has_a_mover_of_both_and_waits_where_none_is_up() -> None:
    world = lake_world()
    world.made(c.AddFilesystem("cc", "/bb/slow"))
    world.made(c.ChangePool("fast", filesystem="cc"))
    world.made(c.AdmitNode("m0"))
    seen = (ObservedFilesystem("cc", "cc0"),)
    assert world.settle(c.RegisterNode("m0", 0, "i1", "s1", filesystems=seen), agent("m0")) == 0
    with_lake(world)
    job = submitted(world, USES_LAKE, bb="capacity=10 pool=fast")
    assert world.verdict(job).sentence == "no mover of all of the shared filesystems cc, bb is up"
    both = (*HERE, *seen)
    assert world.settle(c.RegisterNode("m2", 0, "i2", "s1", filesystems=both), agent("m2")) == 0
    world.settle(c.ResumeNode("m2"))
    assert world.agent_of(job) == "m2" and world.order(job).filesystem.name == "cc"
    world.settle(c.MarkNodeDown("m2", "silent"), c.CONTROLLER)
    assert world.agent_of(job) == "m2", "m0 and m1 see one shared filesystem each"
    assert world.settle(c.RegisterNode("m1", 0, "i2", "s1", filesystems=both), agent("m1")) == 0
    assert world.agent_of(job) == "m1"
    world.finish(job)


def test_what_lies_in_a_shared_filesystem_and_what_lies_on_a_node_is_refused_in_one_job_with_where_it_stands() -> None:
    world = lake_world()
    for request, bb, words, where in (
        (creates_lake("bulk"), "capacity=10 pool=fast", "lake is created in shared filesystem bb", "line 2"),
        (creates_lake("fast"), "capacity=10 pool=bulk", "lake is created on one node", "line 2"),
    ):
        answer = asks(world, request, bb=bb)
        assert isinstance(answer, Rejection) and words in answer.sentence and answer.place == where, answer
    with_lake(world, "fast")
    answer = asks(world, USES_LAKE, bb="capacity=10 pool=bulk")
    assert isinstance(answer, Rejection) and "persistent buffer lake is on one node" in answer.sentence
    assert answer.place == "persistentdw name=lake"


def test_a_job_that_waits_for_a_name_is_told_when_that_comes_where_the_job_cannot_use_it() -> None:
    world = lake_world()
    job = submitted(world, USES_LAKE, bb="capacity=10 pool=bulk")
    with_lake(world, "fast")
    assert world.verdict(job).sentence == (
        "persistent buffer lake is on one node, and pool bulk has its buffers in shared filesystem bb: "
        "no job can use both"
    )


def test_a_shared_filesystem_stays_while_a_persistent_buffer_or_a_job_that_removed_one_is_there() -> None:
    world = lake_world()
    with_lake(world)
    assert "lake" in refused(world, c.ChangePool("bulk", filesystem=""), RejectionCode.WRONG_STATE)
    remover = submitted(world, DESTROYS_LAKE, nodes=0)
    world.report(remover, c.PersistentChanged("lake"))
    world.made(c.ChangePool("bulk", filesystem=""))
    assert f"job {remover}" in refused(world, c.RemoveFilesystem("bb"), RejectionCode.WRONG_STATE)
    world.finish(remover)
    assert world.settle(c.RemoveFilesystem("bb")) == 0


def test_an_operator_clears_a_persistent_buffer_in_a_shared_filesystem_and_its_name_is_free() -> None:
    world = lake_world()
    with_lake(world)
    first = world.state.persistent["lake"].directory
    world.settle(c.ClearBuffer(name="lake", discard=True))
    assert world.free("bulk") == 100
    with_lake(world)
    assert world.state.persistent["lake"].directory != first


# ---- random histories


class FilesystemHistories(Histories):
    """As Histories, with one pool in a shared filesystem, and movers that come and go."""

    def new_world(self) -> World:
        world = FilesystemWorld(
            {"fast": 100, "bulk": 50}, granularity=5, nodes=3, cpus=2, stage_retries=1, max_passes=2
        )
        world.configure(Flags="EnablePersistent")
        return world

    @rule(node=st.sampled_from(MOVERS), what=st.sampled_from(["drain", "resume", "down", "back", "restart"]))
    def changes_a_mover(self, node: str, what: str) -> None:
        self.changes_a_node(node, what)

    @rule(size=st.integers(1, 50))
    def submits_to_the_place(self, size: int) -> None:
        self.world.try_submit(f"capacity={size} pool=bulk")

    def is_hopeless(self, job: int) -> bool:
        """Nor does a persistent buffer come that nobody makes, or space that persistent buffers keep."""
        state = self.world.state
        buffer = state.buffers.get(job)
        if super().is_hopeless(job) or buffer is None or buffer.state is not BufferState.PENDING:
            return super().is_hopeless(job)
        kept = sum(one.granted_bytes for one in state.persistent.values() if one.pool == buffer.pool)
        crowded = buffer.pool in state.pools and kept + buffer.granted_bytes > state.pools[buffer.pool].usable_bytes
        return crowded or persistent_request(state.jobs[job]) is not None

    @rule(what=st.sampled_from(["creates", "uses", "destroys"]), name=st.sampled_from(["a", "b"]), nodes=st.booleans())
    def works_with_persistent_buffers(self, what: str, name: str, nodes: bool) -> None:
        request = {
            "creates": beside_space(creates=(CreatePersistent(name, 10, "bulk" if name == "a" else "fast"),)),
            "uses": beside_space(uses=(name,)),
            "destroys": beside_space(destroys=(DestroyPersistent(name),)),
        }[what]
        asks(self.world, request, bb="capacity=5 pool=bulk" if nodes and name == "a" else "", nodes=int(nodes))

    @invariant()
    def who_uses_what_lies_in_a_place_has_a_mover(self) -> None:
        state = self.world.state
        for name, jobs in state.using.items():
            placed = name in state.persistent and bool(state.persistent[name].filesystem)
            assert all(bool(state.jobs[job].mover) == placed for job in jobs)

    @invariant()
    def nothing_is_ordered_twice(self) -> None:
        ordered = [
            order.job
            for node in self.world.state.nodes
            for order in self.world.orders(node)
            if not self.is_given_up(node, order)
        ]
        assert len(ordered) == len(set(ordered))

    @invariant()
    def what_can_be_moved_is_moved(self) -> None:
        state = self.world.state
        up = any(state.nodes[mover].is_up for mover in MOVERS)
        for mover in MOVERS:
            if up and not state.nodes[mover].is_up:
                assert not self.world.orders(mover)

    @invariant()
    def movers_run_no_scripts(self) -> None:
        for mover in MOVERS:
            assert all(order.stage in ("stage_in", "stage_out", "teardown") for order in self.world.orders(mover))


FilesystemHistories.TestCase.settings = settings(max_examples=12, stateful_step_count=40, deadline=None)
TestFilesystemHistories = FilesystemHistories.TestCase


def test_a_node_that_is_known_registers_again_where_no_further_node_may(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(nodes=2)
    world.settle(c.AdmitNode("third"))
    monkeypatch.setattr("forebay.replica.decide.cluster.NODES_MAX", len(world.state.nodes))
    assert not isinstance(world.register("n1", instance="i2"), Rejection)
    refused(world, c.RegisterNode("third", 4, "i1", "s1"), RejectionCode.LIMIT_EXCEEDED, agent("third"))
