"""Transfers as the replicas agree on them: rules, receipts, checkpoints, turns, shares, lateness, lost results."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from forebay.replica.decide.decide import decide
from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.messages.entries import Acceptance
from forebay.replica.model.stages import Stage, awaited_slot, moving_keys
from forebay.replica.model.transfers import (
    CHECKPOINT_BYTES,
    CHECKPOINT_PERIOD_S,
    DEFAULT_TRANSFER_RULES,
    LEFT_OUT_CHARACTERS_MAX,
    LEFT_OUT_NAMED_MAX,
    RECEIPTS_PER_JOB_MAX,
    LeftOut,
    RateShares,
    TransferCheckpoint,
    TransferReceipt,
    clip_receipt,
)
from forebay.replica.operations.outcomes import PROVIDER_SLACK_S
from forebay.replica.operations.slots import OperationSlots, grant_slots
from forebay.replica.operations.transfer_limits import active_rules
from forebay.replica.state.state import State
from forebay.replica.values.errors import Rejection
from forebay.replica.values.units import SIZE_BYTES_MAX, Instant, seconds
from forebay.replica.views.jobs import not_exported
from forebay.replica.views.orders import orders_for
from tests.replica.operations.test_slots import ordered, run
from tests.replica.reference.reference_scheduler import next_due
from tests.replica.scheduler.test_index import IndexedWorld
from tests.replica.test_histories import Histories
from tests.replica.world import World, agent

OUT = "#!/bin/sh\n#DW jobdw capacity=10 access_mode=striped type=scratch\n#DW stage_out type=file source=$DW_JOB_STRIPED/{0} destination=/out/{0}\ntrue\n"  # noqa: E501
CROWD_MAX = 12
"""Jobs of a random history that are not over before it may submit more: to look at all of them at each step, and have
each end, takes time that grows with the cube of their number, and finds no more."""


def receipt(stage: Stage = Stage.STAGE_IN, attempt: int = 1, **fields: object) -> TransferReceipt:
    return msgspec.structs.replace(TransferReceipt(stage, attempt, files=1, size_bytes=7, digest="x"), **fields)


def staged_out(world: World, job: int) -> None:
    """Take a job to its stage-out."""
    run(world, job)
    assert world.shown(job)[2] == "staging-out"


# Receipts ------------------------------------------------------------------------------------------------------------


def test_a_receipt_is_kept_with_what_follows_from_its_transfer_in_one_entry_and_goes_with_its_job() -> None:
    world = World(finished_jobs_kept=0)
    job = world.submit("capacity=10")
    attempt = world.order(job).attempt
    assert world.report(job, c.OperationDone(1, 7, "d", receipt())) == job
    reported = next(batch for batch in world.ledger if any(e_.receipt for e_ in _recorded(batch.entries[0].events)))
    assert [type(event) for event in reported.entries[0].events] == [e.TransferRecorded, e.StagedIn]
    assert _recorded(reported.entries[0].events)[0] == e.TransferRecorded(job, "n1", receipt(attempt=attempt))
    assert world.state.transfers[job].receipts == (receipt(attempt=attempt),)
    world.finish(job)
    world.submit()
    assert job not in world.state.jobs and job not in world.state.transfers


def _recorded(events: tuple[e.Event, ...]) -> list[e.TransferRecorded]:
    return [event for event in events if isinstance(event, e.TransferRecorded)]


def test_a_failed_transfer_has_a_receipt_too_and_the_stage_and_attempt_are_those_of_the_order() -> None:
    world = World(stage_retries=2)
    job = world.submit("capacity=10")
    first = world.order(job).attempt
    said = receipt(Stage.STAGE_OUT, 99, complete=False)
    world.report(job, c.OperationFailed("it broke", receipt=said))
    assert world.state.transfers[job].receipts == (receipt(attempt=first, complete=False),)
    world.advance(10)
    world.report(job, c.OperationDone(receipt=receipt()))
    assert [one.complete for one in world.state.transfers[job].receipts] == [False, True]
    assert [one.attempt for one in world.state.transfers[job].receipts] == [first, first + 1]


def test_a_late_report_leaves_no_receipt() -> None:
    world = World(stage_retries=2)
    job = world.submit("capacity=10")
    order = world.order(job)
    world.report(job, c.OperationFailed("it broke"), order)
    assert isinstance(world.report(job, c.OperationDone(receipt=receipt()), order), Rejection)
    assert isinstance(world.report(job, c.TransferProgressed(TransferCheckpoint(Stage.STAGE_IN, 1)), order), Rejection)
    assert job not in world.state.transfers


def test_of_many_receipts_those_of_failed_attempts_go_first_and_the_oldest() -> None:
    world = World(stage_retries=1_000)
    job = world.submit("capacity=10")
    for _ in range(RECEIPTS_PER_JOB_MAX + 3):
        world.report(job, c.OperationFailed("it broke", receipt=receipt(complete=False)))
        world.advance(1_000)
    last = world.order(job).attempt
    world.report(job, c.OperationDone(receipt=receipt()))
    kept = world.state.transfers[job].receipts
    assert len(kept) == RECEIPTS_PER_JOB_MAX and kept[-1].complete
    assert [one.attempt for one in kept] == list(range(last - RECEIPTS_PER_JOB_MAX + 1, last + 1))


@given(
    path=st.text(max_size=2_000),
    number=st.integers(-(2**80), 2**80),
    count=st.integers(0, 60),
    word=st.text(max_size=400),
)
@settings(max_examples=60, deadline=None)
def test_whatever_an_agent_says_in_a_receipt_is_bounded_and_can_be_written_and_read_again(
    path: str, number: int, count: int, word: str
) -> None:
    said = TransferReceipt(
        Stage.STAGE_OUT, 1, backends=(word,) * count, files=number, size_bytes=number, left_out=number,
        left_out_first=(LeftOut("\udcff" + path, word),) * count, verify=word, algorithm=word, digest=word,
        manifest_digest=word, started_at=Instant(number), ended_at=Instant(number),
    )  # fmt: skip
    kept = clip_receipt(said, Stage.STAGE_IN, 5)
    assert (kept.stage, kept.attempt) == (Stage.STAGE_IN, 5)
    assert 0 <= kept.files <= SIZE_BYTES_MAX and 0 <= kept.started_at <= SIZE_BYTES_MAX
    assert len(kept.left_out_first) <= LEFT_OUT_NAMED_MAX
    for one in kept.left_out_first:
        assert len(one.path) <= LEFT_OUT_CHARACTERS_MAX and one.path.endswith(path[-100:].replace("\udcff", ""))
        assert len(one.reason) <= LEFT_OUT_CHARACTERS_MAX
    data = msgspec.msgpack.encode(kept)
    assert len(data) < 32 * 1024
    assert msgspec.msgpack.decode(data, type=TransferReceipt) == kept
    assert clip_receipt(kept, Stage.STAGE_IN, 5) == kept


# Checkpoints ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_written_down_at_most_every_half_minute_or_sixty_four_gibibytes_and_ends_nothing() -> None:
    world = World()
    job = world.submit("capacity=10")
    order = world.order(job)

    def says(size_bytes: int) -> tuple[e.Event, ...]:
        checkpoint = TransferCheckpoint(Stage.STAGE_OUT, 77, 1, size_bytes, at=Instant(5))
        assert not isinstance(world.report(job, c.TransferProgressed(checkpoint), order), Rejection)
        assert world.order(job) == order
        return world.ledger[-1].entries[0].events

    begun_at = world.at
    assert [type(event) for event in says(1)] == [e.TransferCheckpointed]
    kept = TransferCheckpoint(Stage.STAGE_IN, order.attempt, 1, 1, at=begun_at)
    assert world.state.transfers[job].checkpoint == kept
    assert says(2) == () and says(CHECKPOINT_BYTES) == ()
    assert says(CHECKPOINT_BYTES + 1) != ()
    world.advance(CHECKPOINT_PERIOD_S)
    assert says(CHECKPOINT_BYTES + 2) != ()
    world.report(job, c.OperationDone(receipt=receipt()))
    assert world.state.transfers[job].checkpoint is None


def test_a_checkpoint_of_an_earlier_attempt_does_not_keep_back_the_first_of_the_next() -> None:
    world = World(stage_retries=3)
    job = world.submit("capacity=10")
    first = world.order(job)
    world.report(job, c.TransferProgressed(TransferCheckpoint(Stage.STAGE_IN, 1, 1, 1)))
    world.report(job, c.OperationFailed("it broke"))
    world.advance(2)
    world.report(job, c.TransferProgressed(TransferCheckpoint(Stage.STAGE_IN, 1, 1, 1)))
    checkpoint = world.state.transfers[job].checkpoint
    assert checkpoint is not None and checkpoint.attempt == first.attempt + 1


# Lateness ------------------------------------------------------------------------------------------------------------


def test_with_progress_timeouts_a_transfer_may_take_as_long_as_it_advances_up_to_a_cap() -> None:
    world = World(stage_in_timeout_s=10, stage_retries=1)
    world.configure(TransferTimeMax="1000", TransferStallTime="20")
    job = world.submit("capacity=10")
    order = world.order(job)
    assert order.timeout_s == 1_000 and order.rules is not None and order.rules.stall_s == 20
    world.advance(1_000)
    assert world.order(job) == order  # its agent keeps the time, and says which limit it was
    world.advance(60)
    assert world.state.jobs[job].message == (
        "burst_buffer/native: slurm_bb_data_in: the operation took longer than TransferTimeMax, 1000 s"
    )


def test_teardown_and_post_run_have_their_own_time_and_providers_keep_slurms() -> None:
    world = World(other_timeout_s=30, stage_in_timeout_s=10)
    job = world.submit("capacity=10")
    staged_out(world, job)
    assert world.order(job).timeout_s == DEFAULT_TRANSFER_RULES.hard_cap_s
    world.done(job)
    assert world.order(job).stage == "teardown" and world.order(job).timeout_s == 30
    world.configure(BurstBufferType="burst_buffer/lua")
    other = world.submit("capacity=10")
    order = world.order(other)
    assert (order.rules, order.timeout_s) == (None, 10)


# Rates ---------------------------------------------------------------------------------------------------------------


def test_orders_say_how_fast_a_transfer_may_go_and_change_while_it_goes_on() -> None:
    world = World()
    job = world.submit("capacity=10")
    before = world.order(job)
    world.configure(TransferRate="10MiB", TransferRatePerNode="0")
    after = world.order(job)
    assert (after.job, after.attempt) == (before.job, before.attempt)
    assert after.shares == RateShares(10 * 2**20, None, 0)
    world.configure(TransferRatePerNode="unlimited")
    assert world.order(job).shares == RateShares(10 * 2**20, None, None)


def test_what_the_cluster_and_a_user_may_do_is_shared_by_the_nodes_and_the_cluster_s_evenly_by_users() -> None:
    world = World({"fast": 1_000}, nodes=2)
    world.configure(TransferRatePerUser="900", TransferRateOfCluster="1200")
    alans = [world.submit("capacity=10", who="alan") for _ in range(3)]
    bens = [world.submit("capacity=10", who="ben")]
    nodes = {job: world.state.jobs[job].node for job in (*alans, *bens)}
    for job in (*alans, *bens):
        shares = world.order(job).shares
        assert shares is not None
        mine = alans if job in alans else bens
        here = sum(1 for other in mine if nodes[other] == nodes[job])
        assert shares.user_bytes_s == 900 * here // len(mine)
    assert _node_rates(world.state) == {
        node: sum(
            600 * sum(1 for job in jobs if nodes[job] == node) // len(jobs) for jobs in (alans, bens)
        )
        for node in ("n1", "n2")
    }  # fmt: skip
    assert sum(rate for rate in _node_rates(world.state).values() if rate is not None) == 1_200


def _node_rates(state: State) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for node in state.nodes:
        for order in orders_for(state, node):
            if order.shares is not None:
                found[node] = order.shares.node_bytes_s
    return found


def test_a_share_is_never_the_pause_that_nobody_asked_for_and_a_pause_is_one_everywhere() -> None:
    world = World({"fast": 1_000}, nodes=3)
    world.configure(TransferRateOfCluster="1")
    jobs = [world.submit("capacity=10") for _ in range(9)]
    assert set(_node_rates(world.state).values()) == {1}
    world.configure(TransferRateOfCluster="0", TransferRatePerUser="0")
    assert {world.order(job).shares for job in jobs} == {RateShares(None, 0, 0)}


# At once -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "under_way"), [("TransfersAtOnce", 2), ("TransfersPerUser", 4), ("TransfersPerNode", 4)]
)
def test_only_so_many_transfers_are_under_way_and_the_others_wait_with_their_space(key: str, under_way: int) -> None:
    world = IndexedWorld({"fast": 1_000}, nodes=2)
    world.configure(**{key: "2"})
    jobs = [world.submit("capacity=10", who=who) for who in ("alan", "ben") * 4]
    assert len(ordered(world, "stage_in")) == under_way
    waiting = [job for job in jobs if job not in ordered(world, "stage_in")]
    assert world.free() == 920 and {world.shown(job)[2] for job in jobs} == {"staging-in"}
    assert "waits for a slot" in world.verdict(waiting[0]).sentence
    while ordered(world, "stage_in"):
        world.done(ordered(world, "stage_in")[0])
        assert len(ordered(world, "stage_in")) <= under_way
    assert {world.shown(job)[2] for job in jobs}.isdisjoint({"staging-in"})


@pytest.mark.parametrize("key", ["TransfersAtOnce", "TransfersPerUser", "TransfersPerNode"])
def test_one_pass_that_gives_space_to_many_lets_no_more_begin_than_may(key: str) -> None:
    world = IndexedWorld({"fast": 1_000})
    world.configure(**{key: "2"})
    world.settle(c.DrainNode("n1", "x"))
    for _ in range(5):
        world.submit("capacity=10")
    world.settle(c.ResumeNode("n1"))
    assert world.free() == 950 and len(ordered(world, "stage_in")) == 2


def test_new_rules_are_minded_for_what_is_under_way() -> None:
    world = IndexedWorld({"fast": 1_000}, stage_in_timeout_s=10)
    world.submit("capacity=10")
    assert next_due(world.state, world.at) == world.at + seconds(DEFAULT_TRANSFER_RULES.hard_cap_s + PROVIDER_SLACK_S)
    world.configure(TransferTimeouts="fixed")
    assert next_due(world.state, world.at) == world.at + seconds(10)


def test_a_limit_of_0_lets_none_begin_and_ends_none_and_a_larger_one_gives_turns_at_once() -> None:
    world = IndexedWorld({"fast": 1_000})
    first = world.submit("capacity=10")
    world.configure(TransfersAtOnce="0")
    second = world.submit("capacity=10")
    assert ordered(world, "stage_in") == [first]
    world.done(first)
    assert ordered(world, "stage_in") == []
    world.configure(TransfersAtOnce="unlimited")
    assert ordered(world, "stage_in") == [second]


def test_turns_go_to_the_user_who_has_the_fewest_transfers_under_way() -> None:
    world = IndexedWorld({"fast": 1_000})
    world.configure(TransfersAtOnce="2")
    greedy = [world.submit("capacity=10", who="alan") for _ in range(6)]
    modest = [world.submit("capacity=10", who="ben") for _ in range(2)]
    assert ordered(world, "stage_in") == greedy[:2]
    world.done(greedy[0])
    assert ordered(world, "stage_in") == [greedy[1], modest[0]]
    world.done(greedy[1])
    assert ordered(world, "stage_in") == [greedy[2], modest[0]]
    world.done(modest[0])
    assert ordered(world, "stage_in") == [greedy[2], modest[1]]


@pytest.mark.parametrize("provider", ["native", "lua"])
def test_one_user_s_stage_ins_leave_slots_to_the_others(provider: str) -> None:
    world = IndexedWorld({"fast": 10_000}, provider=provider)
    slots = world.state.site.operations_per_stage_max
    greedy = [world.submit("capacity=10", who="alan") for _ in range(slots + 12)]
    begun = ordered(world, "stage_in")
    assert begun == greedy[: slots // 2 + 1]
    assert "of this user" in world.verdict(greedy[-1]).sentence
    others = [world.submit("capacity=10", who=f"user{number}") for number in range(5)]
    assert ordered(world, "stage_in") == [*begun, *others]
    for job in greedy:
        world.done(job)
    assert not world.state.moving.get(("alan", ""), 0)


def test_stage_outs_beyond_the_stage_s_own_limit_get_their_turns_fairly_too() -> None:
    world = IndexedWorld({"fast": 1_000}, operations_per_stage_max=1)
    jobs = []
    for who in ("alan", "alan", "alan", "ben"):
        jobs.append(world.submit("capacity=10", who=who))
        run(world, jobs[-1])
        world.advance(1)
    turns = []
    while len(turns) < 4:
        turns.extend(ordered(world, "stage_out"))
        world.done(turns[-1])
    # Whoever comes next has none under way: it is as if users took turns only while somebody has one.
    assert turns == jobs


def test_a_transfer_that_waits_for_a_full_node_does_not_keep_back_its_user_s_on_others() -> None:
    world = World({"fast": 1_000}, nodes=2)
    world.configure(TransfersPerNode="1", TransfersAtOnce="1")
    jobs = [world.submit("capacity=10") for _ in range(4)]
    on = {job: world.state.jobs[job].node for job in jobs}
    slots = OperationSlots()
    for key in moving_keys("other", on[jobs[0]]):
        slots.begun[key] = 1
    world.configure(TransfersAtOnce="unlimited")
    state = msgspec.structs.replace(world.state, moving=type(world.state.moving)())
    line = [(Instant(number), job) for number, job in enumerate(jobs)]
    given_slots = list(grant_slots(state, slots, Stage.STAGE_IN, {"alan": line}, lambda job: True, 9))
    assert [event.job for event in given_slots] == [next(job for job in jobs if on[job] != on[jobs[0]])]


def test_several_turns_of_one_pass_go_to_users_by_turns_and_to_no_more_than_there_is_room_for() -> None:
    world = World({"fast": 1_000})
    world.configure(TransfersAtOnce="0")
    waiting: dict[str, list[tuple[Instant, int]]] = {}
    for number, who in enumerate(("alan", "alan", "alan", "ben", "ben", "carla")):
        waiting.setdefault(who, []).append((Instant(number), world.submit("capacity=10", who=who)))
    world.configure(TransfersAtOnce="unlimited")
    idle = msgspec.structs.replace(world.state, moving=type(world.state.moving)())

    def users(room: int, stage: Stage) -> list[str]:
        given_slots = grant_slots(idle, OperationSlots(), stage, waiting, lambda job: True, room)
        return [world.state.jobs[event.job].request.user for event in given_slots]

    assert users(9, Stage.STAGE_IN) == ["alan", "ben", "carla", "alan", "ben", "alan"]
    assert users(2, Stage.STAGE_IN) == ["alan", "ben"]
    assert users(9, Stage.TEARDOWN) == ["alan", "alan", "alan", "ben", "ben", "carla"]


# What was not exported -----------------------------------------------------------------------------------------------


def test_what_is_not_exported_is_said_while_the_buffer_has_it_and_when_it_is_lost() -> None:
    world = World(stage_retries=0)
    job = world.submit(script=OUT.format("r"))
    assert not_exported(world.state, job) == ()
    world.done(job)
    world.done(job)
    assert [(one.path, one.why, one.lost) for one in not_exported(world.state, job)] == [
        ("/out/r", "stage-out has not begun", False)
    ]
    world.done(job)
    assert not_exported(world.state, job)[0].why == "it is being staged out"
    world.report(job, c.OperationFailed("no space left"))
    (missing,) = not_exported(world.state, job)
    assert "no space left; the buffer is kept until" in missing.why and not missing.lost
    world.settle(c.CancelJob(job, hurry=True))
    (missing,) = not_exported(world.state, job)
    assert missing.lost and missing.why == "the buffer was removed without stage-out"
    world.finish(job)
    assert not_exported(world.state, job)[0].lost


def test_what_a_complete_stage_out_left_out_is_said_by_name_for_as_long_as_the_job_is_known() -> None:
    world = World()
    job = world.submit(script=OUT.format("r"))
    staged_out(world, job)
    left_out = receipt(left_out=18, left_out_first=(LeftOut("/buffer/fifo", "a FIFO"),))
    world.report(job, c.OperationDone(receipt=left_out))
    world.finish(job)
    assert [(one.path, one.why, one.lost) for one in not_exported(world.state, job)] == [
        ("/buffer/fifo", "a FIFO", True),
        ("17 more", "see the receipt on its node", True),
    ]
    record = world.state.jobs[job]
    asked = record.request.buffer
    assert asked is not None
    lake = tuple(msgspec.structs.replace(one, inside="${DW_PERSISTENT_STRIPED_lake}/r") for one in asked.stage_out)
    kept = msgspec.structs.replace(record.request, buffer=msgspec.structs.replace(asked, stage_out=lake))
    jobs = world.state.jobs.set(job, msgspec.structs.replace(record, request=kept))
    state = msgspec.structs.replace(world.state, jobs=jobs)
    assert [one.lost for one in not_exported(state, job)] == [False, False]
    other = world.submit(script=OUT.format("s"))
    staged_out(world, other)
    world.done(other)
    world.finish(other)
    assert not_exported(world.state, other) == ()


# Rules ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings_", "said"),
    [
        ({"TransferBackends": "template"}, "is not set"),
        ({"TransferStallTime": "0"}, "TransferStallTime is 0"),
        ({"TransferTimeMax": "99999999999"}, "TransferTimeMax is 99999999999"),
        ({"TransfersAtOnce": "1000001"}, "TransfersAtOnce is 1000001"),
    ],
)
def test_rules_that_cannot_be_used_are_refused_as_a_whole_with_the_name_of_the_key(
    settings_: dict[str, str], said: str
) -> None:
    world = World()
    changes = tuple(ConfSetting(key, value) for key, value in {"TransferVerify": "size", **settings_}.items())
    rejection = world.settle(c.ConfigureSite(changes, partial=True))
    assert isinstance(rejection, Rejection) and said in rejection.sentence, rejection
    assert world.state.transfer_rules == DEFAULT_TRANSFER_RULES


def test_a_change_of_the_rules_counts_as_one_of_the_configuration() -> None:
    world = World()
    world.configure(TransferVerify="read_back")
    revision = world.state.site.revision
    assert revision and world.state.transfer_rules.verify == "read_back"
    late = world.settle(c.ConfigureSite((ConfSetting("TransferVerify", "size"),), True, revision - 1))
    assert isinstance(late, Rejection)
    again = decide(
        world.state,
        c.Request(
            b"1" * 16,
            c.Actor(c.ActorRole.OPERATOR, "o"),
            c.ConfigureSite((ConfSetting("TransferVerify", "read_back"),), True),
        ),
        world.at,
    )
    assert again == Acceptance(())


# Random histories ----------------------------------------------------------------------------------------------------


class Transfers(Histories):
    """As Histories, with three users, limits that change, receipts and checkpoints; its index is compared at each
    step with one built afresh.
    """

    def new_world(self) -> World:
        return IndexedWorld({"fast": 100, "bulk": 50}, granularity=5, nodes=3, cpus=2, stage_retries=1, max_passes=2)

    @initialize()
    def nothing_is_limited(self) -> None:
        self.most: dict[str, int | None] = {}

    @precondition(lambda self: len(self.world.state.unfinished) <= CROWD_MAX)
    @rule(who=st.sampled_from(["alan", "ben", "carla"]), size=st.sampled_from([1, 5, 10]), count=st.integers(1, 4))
    def submits_some(self, who: str, size: int, count: int) -> None:
        for _ in range(count):
            self.world.try_submit(f"capacity={size}", who=who)

    @rule(
        user=st.sampled_from(["0", "1", "2", "unlimited"]),
        node=st.sampled_from(["0", "1", "2", "unlimited"]),
        cluster=st.sampled_from(["1", "3", "unlimited"]),
        stages=st.sampled_from(["1", "2", "3", "5", "128"]),
    )
    def the_site_limits_transfers(self, user: str, node: str, cluster: str, stages: str) -> None:
        self.world.configure(
            TransfersPerUser=user, TransfersPerNode=node, TransfersAtOnce=cluster, OperationsPerStage=stages
        )
        self.note()

    def note(self) -> None:
        """Note the most that each key may count from now on: its limit, or what there was when it was set."""
        rules, moving = self.world.state.transfer_rules, self.world.state.moving
        self.most = {}
        for kind, limit in (("user", rules.user_at_once), ("node", rules.node_at_once), ("all", rules.cluster_at_once)):
            counts = [count for key, count in moving.items() if _kind(key) == kind]
            self.most[kind] = None if limit is None else max([limit, *counts])

    @rule(data=st.data(), complete=st.booleans(), checkpoint=st.booleans())
    def an_agent_says_what_it_moved(self, data: st.DataObject, complete: bool, checkpoint: bool) -> None:
        orders = [(node, order) for node in sorted(self.world.state.nodes) for order in self.world.orders(node)]
        moving = [(node, order) for node, order in orders if order.rules is not None]
        if moving:
            node, order = data.draw(st.sampled_from(moving))
            stage = Stage[order.stage.upper()]
            result: c.OperationResult = c.OperationDone(receipt=receipt(stage, complete=True))
            if checkpoint:
                result = c.TransferProgressed(TransferCheckpoint(stage, order.attempt, 1, 1))
            elif not complete:
                result = c.OperationFailed("it broke", receipt=receipt(stage, complete=False))
            self.world.settle(c.ReportOperation(node, order.job, order.attempt, stage, result), agent(node))

    @invariant()
    def no_more_are_under_way_than_may_be(self) -> None:
        for key, count in self.world.state.moving.items():
            most = self.most.get(_kind(key)) if _kind(key) else None
            assert most is None or count <= most, (key, count, most)

    @invariant()
    def nobody_waits_for_a_turn_without_a_reason(self) -> None:
        """A transfer waits while its stage has slots only by a limit, or where its user has more than are left."""
        rules = active_rules(self.world.state)
        assert rules is not None
        if (rules.user_at_once, rules.node_at_once, rules.cluster_at_once) == (None, None, None):
            state = self.world.state
            for stage in (Stage.STAGE_IN, Stage.STAGE_OUT):
                waiting = [job for job in state.unfinished if _waits(state, job) is stage]
                free = state.site.operations_per_stage_max - state.operations.get(stage, 0)
                loads = [state.moving.get((state.jobs[job].request.user, ""), 0) for job in waiting]
                assert free <= 0 or all(load > free for load in loads), (stage, free, loads)

    def teardown(self) -> None:
        if hasattr(self, "most"):
            self.world.configure(
                TransfersPerUser="unlimited", TransfersPerNode="unlimited", TransfersAtOnce="unlimited",
                OperationsPerStage="128",
            )  # fmt: skip
        super().teardown()
        assert not self.world.state.moving


def _kind(key: tuple[str, str]) -> str:
    user, node = key
    return "" if user and node else "user" if user else "node" if node else "all"


def _waits(state: State, job: int) -> Stage | None:
    return awaited_slot(state.jobs[job], state.buffers.get(job))


Transfers.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestTransfers = Transfers.TestCase
