"""Pools live: added, resized, drained in part, given another granularity, unit or default, removed, while in use."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from msgspec.structs import replace

from forebay.replica.decide.decide import decide
from forebay.replica.decide.pools import overcommitted_bytes, pool_users
from forebay.replica.fold.apply import apply_batch
from forebay.replica.fold.fold import fold
from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.messages.entries import Acceptance, Batch, Entry
from forebay.replica.model.job_states import JobState
from forebay.replica.model.orders import Order
from forebay.replica.model.pools import (
    Pool,
    PoolUnit,
    format_amount,
    format_slurm_amount,
    parse_amount,
    parse_unit,
    pool_unit,
)
from forebay.replica.model.requests import CreatePersistent
from forebay.replica.model.stages import Stage
from forebay.replica.scheduler.index import SchedulingIndex
from forebay.replica.scheduler.scheduling_cycle import run_cycle, verdicts_of
from forebay.replica.state.digest import state_digest
from forebay.replica.state.invariants import find_violations
from forebay.replica.values.errors import Rejection, RejectionCode
from forebay.replica.values.units import Revision, SizeError, format_slurm_size
from forebay.replica.views.jobs import pool_use, reason_of, verdict_of
from tests.replica.reference.reference_scheduler import plan
from tests.replica.test_configuration import imaged
from tests.replica.world import OPERATOR, World, agent, beside_space, user

HUGE = 2**63 - 1


def refused(world: World, command: c.Command, code: RejectionCode) -> Rejection:
    answer = world.settle(command)
    assert isinstance(answer, Rejection) and answer.code is code, answer
    return answer


def drained(world: World) -> World:
    """Cancel all jobs and let the agents tear down what they have."""
    for job in sorted(world.state.unfinished):
        world.settle(c.CancelJob(job, hurry=True), OPERATOR)
    for _ in range(20):
        for order in world.orders():
            report(world, order)
    return world


def report(world: World, order: Order) -> None:
    """Have the agent say that an order is done; a script is cancelled."""
    result: c.OperationResult = c.OperationDone()
    if order.stage == "run":
        result = c.ScriptEnded(JobState.CANCELLED)
    command = c.ReportOperation("n1", order.job, order.attempt, Stage[order.stage.upper()], result)
    assert not isinstance(world.settle(command, agent("n1")), Rejection)


def test_a_pool_is_added_and_only_once() -> None:
    world = World()
    assert world.settle(c.ChangePool("bulk", exists=False, quantity=50, granularity=5)) == 0
    assert world.state.pools["bulk"] == Pool("bulk", 50, 5)
    assert (
        "pool 'bulk' already exists"
        in refused(world, c.ChangePool("bulk", exists=False, quantity=1), RejectionCode.WRONG_STATE).sentence
    )
    refused(world, c.ChangePool("none", quantity=1), RejectionCode.UNKNOWN_POOL)
    refused(world, c.ChangePool("new", exists=False), RejectionCode.INVALID_FIELD)
    refused(world, c.ChangePool("-x", exists=False, quantity=1), RejectionCode.INVALID_FIELD)
    refused(world, c.ChangePool("new", exists=False, quantity=HUGE + 1), RejectionCode.INVALID_FIELD)
    refused(world, c.ChangePool("fast", granularity=0), RejectionCode.INVALID_FIELD)
    refused(world, c.ChangePool("fast", out_of_service=-1), RejectionCode.INVALID_FIELD)


def test_a_pool_without_a_granularity_gets_the_sites() -> None:
    world = World()
    assert world.settle(c.ConfigureSite((ConfSetting("Granularity", "4K"),), True)) == 0
    assert world.settle(c.ChangePool("bulk", exists=False, quantity=2**20)) == 0
    assert world.state.pools["bulk"].granularity_bytes == 4096


def test_a_change_leaves_all_of_the_pool_as_it_is_that_it_does_not_name() -> None:
    world = World(granularity=5)
    assert world.settle(c.ChangePool("fast", out_of_service=10)) == 0
    assert world.state.pools["fast"] == Pool("fast", 100, 5, True, 10)
    assert world.settle(c.ChangePool("fast", quantity=200)) == 0
    assert world.state.pools["fast"] == Pool("fast", 200, 5, True, 10)
    before = world.state.pools
    assert world.settle(c.ChangePool("fast", quantity=200)) == 0
    assert world.ledger[-1].entries[0].events == () and world.state.pools == before


def test_a_pool_may_shrink_below_what_is_in_use_and_nothing_is_taken_from_holders() -> None:
    world = World({"fast": 100})
    first, second = world.submit("capacity=60"), world.submit("capacity=30")
    # Another world counts what is held against the quantity: here the pool shrinks below it, on purpose.
    decided = c.ChangePool("fast", quantity=50)
    answer = decide(world.state, c.Request(b"1" * 16, OPERATOR, decided), world.at)
    assert isinstance(answer, Acceptance)
    state = fold(world.state, answer.events, world.at)
    use = pool_use(state, "fast")
    assert (use.held_bytes, use.free_bytes, overcommitted_bytes(use.pool, use.held_bytes)) == (90, 0, 40)
    assert [state.buffers[job].held_bytes for job in (first, second)] == [60, 30]
    assert find_violations(state) == []
    assert state_digest(imaged(state)) == state_digest(state)


def test_draining_a_part_keeps_new_requests_out_and_resuming_lets_them_in() -> None:
    world = World({"fast": 100})
    assert world.settle(c.ChangePool("fast", out_of_service=70)) == 0
    assert pool_use(world.state, "fast").free_bytes == 30
    answer = world.try_submit("capacity=40")
    assert isinstance(answer, Rejection) and answer.code is RejectionCode.CAPACITY_OVER_TOTAL
    assert world.settle(c.ChangePool("fast", out_of_service=100)) == 0
    answer = world.try_submit("capacity=40")
    assert isinstance(answer, Rejection) and answer.code is RejectionCode.CAPACITY_OVER_TOTAL
    assert answer.sentence == "pool fast is out of service"
    assert world.settle(c.ChangePool("fast", out_of_service=0)) == 0
    job = world.submit("capacity=40")
    assert world.state.held_bytes["fast"] == 40 and world.state.jobs[job].state is JobState.PENDING


def test_a_job_that_waited_for_a_larger_pool_gets_its_space_in_the_pass_after_it_grew() -> None:
    world = World({"fast": 100})
    world.submit("capacity=80")
    waiting = world.submit("capacity=80")
    assert reason_of(world.state, waiting) == "BurstBufferResources"
    assert world.settle(c.ChangePool("fast", quantity=160)) == 0
    assert reason_of(world.state, waiting) == "BurstBufferStageIn"


def test_a_new_granularity_is_for_requests_to_come_and_what_was_granted_keeps_its_size() -> None:
    world = World({"fast": 100}, granularity=10)
    before = world.submit("capacity=11")
    assert world.state.buffers[before].granted_bytes == 20
    assert world.settle(c.ChangePool("fast", granularity=7)) == 0
    assert world.state.buffers[before].held_bytes == 20
    use = pool_use(world.state, "fast")
    assert (use.pool.usable_bytes, use.free_bytes) == (98, 78)
    after = world.submit("capacity=11")
    assert world.state.buffers[after].granted_bytes == 14


def test_one_pool_is_the_default_whatever_is_changed() -> None:
    world = World({"fast": 100, "bulk": 50})
    assert world.settle(c.ChangePool("bulk", is_default=True)) == 0
    assert [pool.name for pool in world.state.pools.values() if pool.is_default] == ["bulk"]
    assert world.settle(c.ChangePool("bulk", is_default=False)) == 0
    assert not any(pool.is_default for pool in world.state.pools.values())
    answer = world.try_submit("capacity=1")
    assert isinstance(answer, Rejection) and answer.code is RejectionCode.NO_DEFAULT_POOL


def test_a_pool_is_removed_only_when_nobody_holds_a_part_of_it_or_waits_for_one() -> None:
    world = World({"fast": 100, "bulk": 50})
    holding, waiting = world.submit("capacity=80"), world.submit("capacity=80", who="brenda")
    answer = refused(world, c.RemovePool("fast"), RejectionCode.WRONG_STATE)
    assert f"job {holding} of alan holds 80" in answer.sentence
    assert f"job {waiting} of brenda waits for 80" in answer.sentence
    assert "forebay pool drain" in answer.remedy
    drained(world)
    assert world.settle(c.RemovePool("fast")) == 0
    assert sorted(world.state.pools) == ["bulk"]
    refused(world, c.RemovePool("fast"), RejectionCode.UNKNOWN_POOL)
    answer = world.try_submit("capacity=1 pool=fast")
    assert isinstance(answer, Rejection) and answer.code is RejectionCode.UNKNOWN_POOL
    assert state_digest(imaged(world.state)) == state_digest(world.state)


def test_a_pool_where_a_job_will_make_a_persistent_buffer_is_not_removed() -> None:
    world = World({"fast": 100, "bulk": 50})
    for asked in ("bulk", ""):
        creates = (CreatePersistent("alpha", 200, asked),)
        job = world.submit(begin_at=world.at + 10**9, who="alan")
        record = world.state.jobs[job]
        request = replace(record.request, buffer=beside_space(directives_kind="bb", creates=creates))
        state = replace(world.state, jobs=world.state.jobs.set(job, replace(record, request=request)))
        named = asked or "fast"
        assert [who for who in pool_users(state, named) if "alpha" in who] == [
            f"job {job} of alan will create alpha there"
        ]


def test_of_many_users_of_a_pool_some_are_named_and_the_others_counted() -> None:
    world = World({"fast": 1000})
    for _ in range(12):
        world.submit("capacity=1")
    assert refused(world, c.RemovePool("fast"), RejectionCode.WRONG_STATE).sentence.endswith(" and 4 more")


# Units ----------------------------------------------------------------------------------------------------------------


def test_a_pool_may_count_nodes_or_anything_and_says_so_to_all_replicas() -> None:
    world = World({"fast": 100})
    assert world.settle(c.ChangePool("nodes", exists=False, quantity=4, granularity=1, unit=PoolUnit.NODES)) == 0
    assert [type(event) for event in world.ledger[-1].entries[0].events] == [e.PoolSet]
    assert (
        pool_unit(world.state.pools, "nodes") is PoolUnit.NODES
        and pool_unit(world.state.pools, "fast") is PoolUnit.BYTES
    )
    assert imaged(world.state).pools == world.state.pools
    assert world.settle(c.ChangePool("nodes", unit=PoolUnit.BYTES)) == 0
    assert pool_unit(world.state.pools, "nodes") is PoolUnit.BYTES
    assert world.settle(c.ChangePool("nodes", unit=PoolUnit.COUNT)) == 0
    assert world.settle(c.RemovePool("nodes")) == 0
    assert pool_unit(world.state.pools, "nodes") is PoolUnit.BYTES


def test_what_a_pool_counts_does_not_change_while_it_is_in_use() -> None:
    world = World({"fast": 100})
    world.submit("capacity=1")
    answer = refused(world, c.ChangePool("fast", unit=PoolUnit.COUNT), RejectionCode.WRONG_STATE)
    assert "its unit cannot be changed" in answer.sentence


@pytest.mark.parametrize(
    ("text", "unit", "amount"),
    [
        ("4N", PoolUnit.NODES, 4),
        ("4nodes", PoolUnit.NODES, 4),
        ("4", PoolUnit.NODES, 4),
        ("4", PoolUnit.COUNT, 4),
        ("2K", PoolUnit.COUNT, 2048),
        ("1.5K", PoolUnit.BYTES, 1536),
        ("1.5TB", PoolUnit.BYTES, 1_500_000_000_000),
    ],
)
def test_an_amount_is_read_in_the_units_of_its_pool(text: str, unit: PoolUnit, amount: int) -> None:
    assert parse_amount(text, unit) == amount


@pytest.mark.parametrize(
    ("text", "unit", "said"),
    [
        ("4N", PoolUnit.BYTES, "is in nodes, and the pool counts bytes"),
        ("4N", PoolUnit.COUNT, "is in nodes, and the pool counts units"),
        ("1.5", PoolUnit.COUNT, "is not a whole number"),
        ("1.5", PoolUnit.NODES, "is not a number of nodes"),
        ("4K", PoolUnit.NODES, "is not a number of nodes"),
        ("0", PoolUnit.NODES, "is zero"),
        ("9" * 30, PoolUnit.NODES, "overflows"),
        ("9" * 50, PoolUnit.NODES, "overflows"),
        ("-4", PoolUnit.COUNT, "has a sign"),
        ("", PoolUnit.NODES, "is not a number of nodes"),
    ],
)
def test_an_amount_that_its_pool_cannot_count_is_refused(text: str, unit: PoolUnit, said: str) -> None:
    with pytest.raises(SizeError, match=said):
        parse_amount(text, unit)


def test_units_have_words() -> None:
    assert [parse_unit(word) for word in ("bytes", "Nodes", "COUNT", "tapes")] == [*PoolUnit, None]


@pytest.mark.parametrize(
    ("size", "printed"),
    [
        (0, "0"),
        (4, "4"),
        (1023, "1023"),
        (2048, "2KiB"),
        (1000, "1KB"),
        (200 * 2**30, "200GiB"),
        (5800 * 2**30, "5800GiB"),
        (5 * 10**9, "5GB"),
        (1_048_577 * 1024, "1048577KiB"),
        (1024 * 10**6, "1024MB"),
        (9223372036854775810, "9223372036854775810"),
        (18014398509481983 * 1024, "18014398509481983KiB"),
    ],
)
def test_sizes_are_printed_as_slurm_prints_them(size: int, printed: str) -> None:
    assert format_slurm_size(size) == printed


def test_amounts_are_printed_in_their_units() -> None:
    assert [format_amount(4096, unit) for unit in PoolUnit] == ["4KiB", "4096N", "4096"]
    assert [format_slurm_amount(4096, unit) for unit in PoolUnit] == ["4KiB", "4096N", "4KiB"]


# Whatever operators do ------------------------------------------------------------------------------------------------


class LivePools(RuleBasedStateMachine):
    """Operators change pools while jobs come and go: nothing is lost, nothing is taken, and the books balance."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World({"fast": 100, "bulk": 60})
        # The world's own check that nothing is held beyond the quantity does not hold where pools shrink.
        self.world.commit = self.commit  # type: ignore[method-assign]
        assert self.world.settle(c.ConfigureSite((ConfSetting("HoldOversized", "yes"),), True)) == 0

    def commit(self, entry: object) -> None:
        assert isinstance(entry, Entry)
        world, before = self.world, self.world.state
        following = apply_batch(before, Batch(Revision(before.revision), world.at, (entry,)))
        assert following is not None and find_violations(following) == []
        kinds = {type(event) for event in entry.events}
        if kinds & {e.PoolSet, e.PoolRemoved}:
            assert dict(following.held_bytes) == dict(before.held_bytes), "a change of pools took or gave space"
        for event in entry.events:
            if isinstance(event, e.BufferAllocated):
                pool = following.pools[following.buffers[event.job].pool]
                assert following.held_bytes.get(pool.name, 0) <= pool.usable_bytes, "space was given that is not there"
        assert sum(pool.is_default for pool in following.pools.values()) <= 1
        walked = plan(following, world.at)
        assert run_cycle(SchedulingIndex(following), world.at) == walked.events
        assert verdicts_of(SchedulingIndex(following), following.unfinished, world.at) == walked.verdicts
        world.state = following

    @rule(size=st.integers(1, 130), pool=st.sampled_from(["fast", "bulk", "new"]))
    def submits(self, size: int, pool: str) -> None:
        self.world.try_submit(f"capacity={size} pool={pool}")

    @rule(
        pool=st.sampled_from(["fast", "bulk", "new"]),
        quantity=st.none() | st.integers(0, 120),
        granularity=st.none() | st.integers(1, 9),
        out=st.none() | st.integers(0, 120),
        default=st.none() | st.booleans(),
        unit=st.none() | st.sampled_from(PoolUnit),
        exists=st.booleans(),
    )
    def changes(
        self, pool: str, quantity: int | None, granularity: int | None, out: int | None, default: bool | None,
        unit: PoolUnit | None, exists: bool,
    ) -> None:  # fmt: skip
        self.world.settle(c.ChangePool(pool, exists, quantity, granularity, out, default, unit))

    @rule(pool=st.sampled_from(["fast", "bulk", "new"]))
    def removes(self, pool: str) -> None:
        in_use = pool in self.world.state.pools and bool(list(pool_users(self.world.state, pool)))
        answer = self.world.settle(c.RemovePool(pool))
        assert isinstance(answer, Rejection) or not in_use

    @rule()
    def agents_work(self) -> None:
        drained(self.world) if len(self.world.state.unfinished) > 6 else self.one_report()

    def one_report(self) -> None:
        for order in self.world.orders()[:1]:
            report(self.world, order)


TestLivePools = LivePools.TestCase
TestLivePools.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_users_change_no_pools() -> None:
    world = World()
    for command in (c.ChangePool("fast", quantity=1), c.RemovePool("fast")):
        answer = world.settle(command, user())
        assert isinstance(answer, Rejection) and answer.code is RejectionCode.PERMISSION_DENIED


def test_who_waits_for_more_than_a_shrunken_pool_has_keeps_nobody_from_it() -> None:
    world = World({"fast": 100}, max_passes=1)
    holder = world.submit("capacity=80")
    waiting = world.submit("capacity=80", priority=5)
    assert reason_of(world.state, waiting) == "BurstBufferResources"
    drained_to = c.ChangePool("fast", out_of_service=15)
    assert world.settle(drained_to) == 0
    assert "more than its pool has" not in verdict_of(world.state, waiting).sentence
    assert world.settle(c.ChangePool("fast", out_of_service=20)) == 0
    world.settle(c.CancelJob(holder, hurry=True), OPERATOR)
    for _ in range(6):
        for order in world.orders():
            if order.job == holder:
                report(world, order)
    assert world.settle(c.ChangePool("fast", out_of_service=30)) == 0
    assert world.state.buffers[waiting].held_bytes == 80, "what was given before stays given"
    later = world.submit("capacity=70", who="brenda")
    assert world.settle(c.ChangePool("fast", out_of_service=60)) == 0
    world.settle(c.CancelJob(waiting, hurry=True), OPERATOR)
    for _ in range(6):
        for order in world.orders():
            report(world, order)
    assert "exceeds the 40 that pool" in verdict_of(world.state, later).sentence
    small = [world.submit("capacity=10") for _ in range(4)]
    assert {reason_of(world.state, job) for job in small} == {"BurstBufferStageIn"}
