"""Membership (H12, H13) and leadership transfer: each rule as a scenario, simulated or in the harness."""

from typing import Any

import pytest
from pysyncobj import SyncObj, SyncObjConf
from pysyncobj.node import Node

from forebay.cluster.consensus.configurations import MemberChange
from forebay.cluster.consensus.engine import Engine
from forebay.cluster.consensus.frames import (
    AppendReply,
    AppendRequest,
    Heartbeat,
    Message,
    RemovalNotice,
    SnapshotChunk,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from forebay.cluster.consensus.interface import ChangeRefused, HistoryElsewhere, NotLeader, RemovedFromCluster, Role
from forebay.cluster.consensus.leadership_transfer import TARGET_LAG_ENTRIES
from forebay.cluster.consensus.membership_change import PROMOTION_LAG_ENTRIES
from forebay.cluster.consensus.state import first_seq
from forebay.wal.configuration import (
    ChangeKind,
    Configuration,
    ConfigurationAt,
    Member,
    decode_configuration,
    encode_configuration,
    initial,
    is_configuration,
    unknown,
)
from forebay.wal.failures import BrokenInvariant
from tests.cluster.consensus.harness import STAND_S, TIMING, Harness, StockHarness
from tests.cluster.consensus.memory_journal import Disk, MemoryJournal
from tests.cluster.consensus.simulator import SimClock, Simulation, carries

FOUNDERS = initial(tuple(map(Member, ("r1", "r2", "r3"))))


def world(seed: int = 1, replicas: int = 3) -> Simulation:
    return Simulation(seed, replicas=replicas, membership=True)


def changed(sim: Simulation, action: ChangeKind, name: str) -> Configuration:
    """Change the membership at the leader, and wait until the change is applied there."""
    leader = sim.elect()
    assert sim.run(5.0, until=lambda: leader.change(action, name)), (action, name)
    sim.tick(leader)
    index = leader.journal.last_index
    engine = sim.engine(leader.name)
    assert sim.run(5.0, until=lambda: engine.applied_index >= index)
    return engine.configuration


def promoted(sim: Simulation, identity: str) -> Configuration:
    leader = sim.elect()
    assert sim.run(5.0, until=lambda: sim.engine(leader.name).promotable() == identity)
    return changed(sim, ChangeKind.PROMOTE, identity)


def rejection(sim: Simulation, action: ChangeKind, name: str) -> str:
    leader = sim.elect()
    with pytest.raises(ChangeRefused) as refused:
        sim.engine(leader.name).change(MemberChange(action=action, name=name))
    return refused.value.code


def pump(sim: Simulation, number: int) -> None:
    for count in range(number):
        sim.commit(b"\x01%d" % count)


class Bench(Harness):
    """Single engine whose members are in its journal."""

    def __init__(self, *, me: str = "r1", disk: Disk | None = None, **given: Any) -> None:
        super().__init__(3, me=me, disk=disk, **(given or {"bootstrap": FOUNDERS}))


def that_voted() -> Disk:
    """Return the disk of a founder that voted in term 1 and has no entry yet."""
    disk = Disk()
    disk.hard = (1, "r2")
    return disk


# ---- bootstrap ----


def test_h13_first_leader_writes_the_founders_to_the_journal_and_files_no_longer_matter() -> None:
    with world() as sim:
        sim.commit(b"\x01a")
        for replica in sim.replicas.values():
            first = replica.journal.entry(1).data
            assert is_configuration(first)
            agreed = decode_configuration(first)
            assert (agreed.version, agreed.voter_ids) == (1, ("r1", "r2", "r3"))
            # A later edit of a replica's file has no effect when the replica restarts.
            replica.bootstrap = initial((Member("r1"), Member("r9")))
            replica.crash()
        for replica in sim.replicas.values():
            replica.start()
            assert replica.engine is not None
            assert replica.engine.configuration.voter_ids == ("r1", "r2", "r3")
        sim.connect_all()
        sim.commit(b"\x01b")
        sim.converge()


def test_h12_founder_whose_file_names_other_founders_stops_with_a_message() -> None:
    bench = Bench(disk=that_voted(), bootstrap=initial((Member("r1"), Member("r2"))))
    entry = encode_configuration(initial(FOUNDERS.voters, version=1))
    with pytest.raises(BrokenInvariant, match="founded with the replicas r1, r2, r3.*file says r1, r2"):
        bench.give("r2", AppendRequest(1, 1, 0, 0, 0, True, [(1, entry)]))


def history(index: int) -> list[Message]:
    """Return messages that a peer with so many entries may send."""
    return [
        VoteRequest(7, 1, index, 7, pre=True),
        VoteRequest(8, 1, index, 7, pre=False),
        AppendRequest(7, 1, index, 7, index, True, []),
        AppendRequest(7, 1, 0, 0, 0, True, [(7, b"\x01a")] * index),
        Heartbeat(7, 1, index, True),
        SnapshotChunk(7, 1, index, 7, 100, 0, b""),
    ]


@pytest.mark.parametrize("number", range(len(history(1))))
def test_founder_without_data_stops_when_a_peer_shows_a_history(number: int) -> None:
    bench = Bench(me="r3")
    bench.wait(STAND_S)
    for request in bench.take(VoteRequest, "r1"):
        bench.give("r1", VoteReply(6, request.seq, False, True))
    assert bench.engine.term == 0, "a term in a reply is neither a history nor a promise"
    bench.out.clear()
    with pytest.raises(HistoryElsewhere, match="forebay cluster recover"):
        bench.give("r1", history(5)[number])
    assert (bench.out, bench.engine.stopped, bench.disk.hard) == ([], True, (0, None))
    # A founder that has voted before belongs to that history.
    Bench(me="r3", disk=that_voted()).give("r1", history(5)[number])


def test_founding_a_cluster_needs_the_vote_of_every_founder(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    for _ in range(40):
        bench.wait(STAND_S)
        for request in bench.take(VoteRequest, "r2"):
            bench.give("r2", VoteReply(0, request.seq, True, request.pre))
    assert (bench.engine.role, bench.engine.term) == (Role.CANDIDATE, 0)
    said = [record.getMessage() for record in caplog.records if "not founded yet" in record.getMessage()]
    assert len(said) in (2, 3) and all("r3: every founder" in line and "--found-without" in line for line in said)
    bench.wait(STAND_S)
    for peer, request in [(to, one) for to, one in bench.out if isinstance(one, VoteRequest)][-2:]:
        bench.give(peer, VoteReply(0, request.seq, True, True))
    assert bench.engine.term == 1, "all founders have reported that they are new"


def test_operator_may_omit_a_founder_that_never_ran_but_not_a_majority() -> None:
    for without, role in ((("r3",), Role.LEADER), (("r2", "r3"), Role.CANDIDATE)):
        bench = Bench(bootstrap=FOUNDERS, found_without=frozenset(without))
        for _ in range(3):
            bench.wait(STAND_S)
            for request in bench.take(VoteRequest, "r2") if "r2" not in without else ():
                bench.give("r2", VoteReply(bench.engine.term, request.seq, True, request.pre))
                for again in bench.take(VoteRequest, "r2"):
                    bench.give("r2", VoteReply(bench.engine.term, again.seq, True, again.pre))
        assert bench.engine.role is role


# ---- one change at a time ----


def test_h12_second_change_waits_until_the_first_is_committed_and_applied() -> None:
    with world() as sim:
        leader = sim.elect()
        for other in sim.others(leader):
            sim.isolate(other.name)
        assert leader.change(ChangeKind.ADD, "r4")
        assert rejection(sim, ChangeKind.ADD, "r5") == "change_under_way"
        sim.heal()
        engine = sim.engine(leader.name)
        assert sim.run(5.0, until=lambda: engine.applied_index == leader.journal.last_index)
        assert sim.elect() is leader
        assert changed(sim, ChangeKind.ADD, "r5").version == 3


def test_h12_leader_changes_nothing_before_its_first_entry_is_applied() -> None:
    bench = Bench()
    bench.win()
    with pytest.raises(NotLeader, match="own first entry"):
        bench.engine.change(MemberChange(action=ChangeKind.ADD, name="r4"))


def test_h12_configuration_cannot_be_an_ordinary_proposal() -> None:
    bench = Bench()
    bench.lead()
    with pytest.raises(ValueError, match="configuration"):
        bench.engine.propose(encode_configuration(initial(FOUNDERS.voters, version=2)))


def test_h12_leader_that_appends_two_steps_at_once_stops_the_receivers() -> None:
    bench = Bench(disk=that_voted())
    first = encode_configuration(initial(FOUNDERS.voters, version=1))
    leap = encode_configuration(initial((Member("r1"), Member("r8#2"), Member("r9#2")), version=2))
    with pytest.raises(BrokenInvariant, match="version 2"):
        bench.give("r2", AppendRequest(1, 1, 0, 0, 0, True, [(1, first), (1, leap)]))


def test_h12_two_leaders_that_remove_each_other_never_both_commit() -> None:
    with world() as sim:
        old = sim.elect()
        sim.commit(b"\x01a")
        kept, gone = sim.others(old)
        assert old.change(ChangeKind.REMOVE, gone.name)  # in force at once: the two remaining replicas are a majority
        sim.isolate(old.name)
        sim.tick(old)
        assert sim.run(5.0, until=lambda: sim.leader() not in (None, old))
        new = sim.leader()
        assert new is not None
        assert sim.run(5.0, until=lambda: sim.engine(new.name).promotable() is None and new.propose(b"\x01b"))
        sim.tick(new)
        assert sim.run(5.0, until=lambda: b"\x01b" in sim.acknowledged)
        assert sim.engine(old.name).configuration.voter_ids != ("r1", "r2", "r3")
        sim.converge()
        assert sim.engine(old.name).configuration.voter_ids == ("r1", "r2", "r3")
        assert kept.removed is None and gone.removed is None


def test_h12_stock_engine_has_two_changes_in_flight_at_once() -> None:
    def engine(me: Any, others: Any, *, conf: Any, **given: Any) -> SyncObj:
        return SyncObj(me, others, conf=SyncObjConf(autoTick=False, dynamicMembershipChange=True), **given)

    stock = StockHarness(engine=engine)  # type: ignore[arg-type]
    stock.win()
    last = stock.private("raftLog")[-1][1]
    stock.give("r2", type="next_node_idx", next_node_idx=last + 1, reset=False, success=True)
    stock.engine.doTick()  # its own first entry is committed and applied
    before, applied = len(stock.private("raftLog")), stock.private("raftLastApplied")
    for name in ("r4", "r5"):
        stock.engine.addNodeToCluster(Node(name))
        stock.engine.doTick()
    assert stock.private("raftLastApplied") == applied, "neither change is committed"
    assert len(stock.private("raftLog")) == before + 2
    assert {node.id for node in stock.private("otherNodes")} == {"r2", "r3", "r4", "r5"}


# ---- learners ----


def test_h12_vote_of_a_learner_is_not_counted() -> None:
    members = Configuration(2, FOUNDERS.voters, (Member("r4#2"),), FOUNDERS.change)
    bench = Bench(configuration=ConfigurationAt(0, members))
    bench.wait(STAND_S)
    (request, *_) = bench.take(VoteRequest)
    assert request.pre
    for peer in ("r4#2", "r9"):
        bench.give(peer, VoteReply(bench.engine.term, request.seq, True, True))
    assert (bench.engine.role, bench.engine.term) == (Role.CANDIDATE, 0)
    bench.give("r3", VoteReply(bench.engine.term, request.seq, True, True))
    assert bench.engine.term == 1, "it campaigns with the vote of a voter"


def test_h12_learner_is_not_counted_for_commits_votes_or_reads() -> None:
    with world() as sim:
        added = changed(sim, ChangeKind.ADD, "r4")
        assert added.learners[0].id == "r4#2"
        learner = sim.join("r4#2")
        leader = sim.elect()
        assert sim.run(5.0, until=lambda: sim.engine(leader.name).promotable() == "r4#2")
        for other in sim.others(leader):
            if other is not learner:
                other.crash()
        answers: list[int | None] = []
        engine = sim.engine(leader.name)
        engine.read(answers.append)
        leader.propose(b"\x01lonely")
        sim.tick(leader)
        sim.run(3.0)
        assert b"\x01lonely" not in sim.acknowledged
        assert answers == [None]
        assert engine.role is not Role.LEADER
        assert sim.engine("r4#2").role is Role.FOLLOWER


def test_h12_learner_is_promoted_only_after_it_has_caught_up() -> None:
    with world() as sim:
        changed(sim, ChangeKind.ADD, "r4")
        sim.filter = lambda sender, receiver, message: receiver != "r4#2" or not carries(message)
        sim.join("r4#2")
        pump(sim, PROMOTION_LAG_ENTRIES + 5)
        leader = sim.elect()
        assert sim.engine(leader.name).promotable() is None
        assert rejection(sim, ChangeKind.PROMOTE, "r4") == "lagging"
        sim.filter = lambda sender, receiver, message: True
        assert promoted(sim, "r4#2").voter_ids == ("r1", "r2", "r3", "r4#2")
        sim.converge()


def test_h12_joined_replica_counts_once_it_is_a_voter() -> None:
    with world() as sim:
        changed(sim, ChangeKind.ADD, "r4")
        sim.join("r4#2")
        promoted(sim, "r4#2")
        changed(sim, ChangeKind.ADD, "r5")
        sim.join("r5#4")
        promoted(sim, "r5#4")
        for name in ("r2", "r3"):
            sim.replicas[name].crash()
        sim.commit(b"\x01three of five")
        sim.converge()


# ---- other addresses ----


def test_member_keeps_its_vote_when_its_addresses_change() -> None:
    with world() as sim:
        leader = sim.elect()
        down, other = (replica.name for replica in sim.others(leader))
        sim.replicas[down].crash()
        for name in (down, leader.name):
            wanted = MemberChange(action=ChangeKind.UPDATE, name=name, peer=f"{name}.new:1", api=f"{name}.new:2")
            sim.engine(leader.name).change(wanted)
            sim.tick(leader)
            sim.commit(b"\x01moved " + name.encode())
            configuration = sim.engine(leader.name).configuration
            moved = configuration.by_id(name)
            assert moved is not None and (moved.peer, moved.api) == (f"{name}.new:1", f"{name}.new:2")
            assert configuration.voter_ids == ("r1", "r2", "r3")
        assert sim.engine(leader.name).addresses[down] == f"{down}.new:1"
        refusals = {
            MemberChange(action=ChangeKind.UPDATE, name=other, peer=f"{down}.new:1"): "address_taken",
            MemberChange(action=ChangeKind.UPDATE, name=other, api=f"{down}.new:1"): "address_taken",
            MemberChange(action=ChangeKind.UPDATE, name=other, peer="x:1", api="x:1"): "address_taken",
            MemberChange(action=ChangeKind.UPDATE, name=down, api=f"{down}.new:2"): "same_addresses",
            MemberChange(action=ChangeKind.UPDATE, name="r9", api="x:1"): "unknown_member",
        }
        for wanted, code in refusals.items():
            with pytest.raises(ChangeRefused) as refused:
                sim.engine(leader.name).change(wanted)
            assert refused.value.code == code
        sim.replicas[down].start()
        sim.converge()


# ---- removal ----


def test_removed_replica_is_notified_and_stops_with_a_message() -> None:
    with world() as sim:
        leader = sim.elect()
        gone = sim.others(leader)[0]
        changed(sim, ChangeKind.REMOVE, gone.name)
        assert sim.run(5.0, until=lambda: gone.removed is not None)
        assert f"{gone.name} was removed from the cluster by version 2" in str(gone.removed)
        sim.commit(b"\x01without it")
        sim.converge()


def test_replica_removed_while_it_was_down_stops_at_its_start() -> None:
    with world() as sim:
        leader = sim.elect()
        gone = sim.others(leader)[0]
        sim.isolate(gone.name)
        assert sim.run(3.0, until=lambda: sim.engine(gone.name).role is Role.CANDIDATE)
        term = sim.engine(leader.name).term
        assert sim.run(5.0, until=lambda: leader.change(ChangeKind.REMOVE, gone.name))
        sim.tick(leader)
        sim.run(1.0)
        sim.heal()
        assert sim.run(5.0, until=lambda: gone.removed is not None)
        assert sim.leader() is leader and sim.engine(leader.name).term == term
        gone.removed = None
        gone.start()
        sim.connect_all()
        assert sim.run(5.0, until=lambda: gone.removed is not None)


def test_h13_replica_whose_journal_records_its_removal_does_not_start() -> None:
    disk = Disk()
    disk.applied = disk.commit = 2
    later = Configuration(2, FOUNDERS.voters[1:], (), FOUNDERS.change)
    with pytest.raises(RemovedFromCluster, match="r1 was removed"):
        Engine(
            me="r1",
            journal=MemoryJournal(_with_base(disk, 2)),
            machine=Bench(),
            timing=TIMING,
            clock=SimClock(),
            uniform=lambda low, high: low,
            links=Bench(),
            configuration=ConfigurationAt(2, later),
        )


def _with_base(disk: Disk, index: int) -> Disk:
    disk.base = (index, 1)
    disk.hard = (1, None)
    return disk


def test_leader_is_removed_only_after_a_transfer() -> None:
    with world() as sim:
        old = sim.elect()
        assert rejection(sim, ChangeKind.REMOVE, old.name) == "leader"
        assert rejection(sim, ChangeKind.REPLACE, old.name) == "leader"
        with pytest.raises(ChangeRefused) as refused:
            sim.engine(old.name).change(MemberChange(action=ChangeKind.REPLACE, name=old.name))
        assert "forebay cluster transfer" in refused.value.remedy
        sim.engine(old.name).transfer()
        sim.tick(old)
        assert sim.run(5.0, until=lambda: sim.leader() not in (None, old))
        changed(sim, ChangeKind.REMOVE, old.name)
        assert sim.run(5.0, until=lambda: old.removed is not None)
        sim.converge()


def test_removal_that_leaves_no_responding_majority_is_rejected() -> None:
    with world() as sim:
        leader = sim.elect()
        sim.commit(b"\x01a")
        dead, alive = sim.others(leader)
        dead.crash()
        sim.run(2.0)
        assert rejection(sim, ChangeKind.REMOVE, alive.name) == "no_majority"
        changed(sim, ChangeKind.REMOVE, dead.name)
        assert rejection(sim, ChangeKind.REMOVE, leader.name) == "leader"


@pytest.mark.parametrize(
    ("me", "own", "told", "stops"),
    [
        ("r1", 3, 2, False),  # older than this replica's configuration, which includes it
        ("r1", 3, 4, True),
        ("r1#5", 5, 4, False),  # from before it was added
        ("r1#5", 5, 6, True),
    ],
)
def test_removal_notice_counts_only_if_it_is_newer(me: str, own: int, told: int, stops: bool) -> None:
    members = tuple(sorted((Member(me), Member("r2"), Member("r3")), key=lambda member: member.id))
    disk = _with_base(Disk(), 4)
    disk.applied = disk.commit = 4
    bench = Bench(me=me, disk=disk, configuration=ConfigurationAt(4, initial(members, version=own)))
    notice = RemovalNotice(1, first_seq(me) + 1, told)
    if stops:
        with pytest.raises(RemovedFromCluster):
            bench.give("r2", notice)
    else:
        bench.give("r2", notice)
        assert bench.engine.role is Role.FOLLOWER


def test_removal_notice_for_a_predecessor_at_this_address_is_ignored() -> None:
    members = tuple(sorted((Member("r1#5"), Member("r2"), Member("r3")), key=lambda member: member.id))
    disk = _with_base(Disk(), 4)
    disk.applied = disk.commit = 4
    bench = Bench(me="r1#5", disk=disk, configuration=ConfigurationAt(4, initial(members, version=5)))
    bench.give("r2", RemovalNotice(1, 7, 6))  # the notice answers r1's reply to a leader's seventh request
    assert bench.engine.role is Role.FOLLOWER
    assert not bench.engine.stopped


def test_non_member_changes_nothing_and_is_notified_once_that_is_committed() -> None:
    bench = Bench()
    bench.lead()
    term = bench.engine.term
    for message in (VoteRequest(term + 5, 1, 99, 99, False), AppendReply(term, 1, 1), Heartbeat(term + 5, 1, 0, True)):
        bench.give("r9", message)
        assert bench.take(RemovalNotice, "r9") == [RemovalNotice(term, 1, 1)]
    bench.give("r9", RemovalNotice(term, 1, 1 << 40))
    assert bench.take(RemovalNotice, "r9") == [], "notices are not answered with notices"
    assert (bench.engine.role, bench.engine.term, bench.engine.stopped) == (Role.LEADER, term, False)


def test_member_unknown_to_this_replica_is_followed() -> None:
    bench = Bench(disk=that_voted())
    first = encode_configuration(initial(FOUNDERS.voters, version=1))
    bench.give("r2", AppendRequest(1, 1, 0, 0, 1, True, [(1, first)]))
    bench.give("r4#3", AppendRequest(2, 1, 1, 1, 1, True, [(2, b"\x01a")]))
    assert bench.engine.leader == "r4#3"
    assert bench.take(AppendReply, "r4#3")[-1].match_index == 2


# ---- in force when appended, undone when truncated, there after a restart ----


def test_h13_unapplied_configuration_is_in_force_after_a_restart() -> None:
    bench = Bench()
    bench.lead()
    bench.engine.change(MemberChange(action=ChangeKind.ADD, name="r4"))
    bench.settle()
    assert bench.disk.applied <= bench.disk.commit < len(bench.disk.entries)
    again = Bench(disk=bench.disk)
    assert again.engine.configuration.learners[0].id == "r4#2"
    assert set(again.engine.addresses) == {"r2", "r3", "r4#2"}


def test_h13_truncating_its_entry_undoes_a_configuration() -> None:
    with world() as sim:
        old = sim.elect()
        sim.commit(b"\x01a")
        sim.isolate(old.name)
        assert old.change(ChangeKind.ADD, "r4")
        sim.tick(old)
        assert sim.engine(old.name).configuration.version == 2
        assert sim.run(5.0, until=lambda: sim.leader() not in (None, old))
        sim.commit(b"\x01b")
        sim.converge()
        assert sim.engine(old.name).configuration.version == 1
        assert changed(sim, ChangeKind.ADD, "r5").learners[0].id == "r5#2"


def test_h13_snapshot_includes_the_members() -> None:
    with world() as sim:
        changed(sim, ChangeKind.ADD, "r4")
        pump(sim, 20)
        for name in ("r1", "r2", "r3"):
            sim.replicas[name].take_snapshot()
        joined = sim.join("r4#2")
        assert sim.run(5.0, until=lambda: joined.installs == 1)
        assert sim.engine("r4#2").configuration.learners[0].id == "r4#2"
        promoted(sim, "r4#2")
        joined.crash()
        joined.start()
        assert sim.engine("r4#2").configuration.votes("r4#2")
        sim.connect_all()
        sim.converge()


@pytest.mark.parametrize("step", range(1, 12))
def test_h13_crash_of_all_replicas_during_a_replacement_loses_nothing(step: int) -> None:
    with world(seed=step) as sim:
        leader = sim.elect()
        sim.commit(b"\x01a")
        lost = sim.others(leader)[0]
        lost.crash()
        lost.removed = RemovedFromCluster(lost.name, 0)  # its disk is lost, so it never starts again
        joined = False

        def drive() -> None:
            nonlocal joined
            for replica in list(sim.replicas.values()):
                engine = replica.engine
                if engine is None or engine.role is not Role.LEADER:
                    continue
                if engine.configuration.holds(lost.name):
                    replica.change(ChangeKind.REPLACE, lost.name)
                learner = engine.promotable()
                if learner is not None:
                    replica.change(ChangeKind.PROMOTE, learner)
                placed = replica.placed()
                new = None if placed is None else placed.configuration.member(lost.name)
                if new is not None and new.id != lost.name and not joined:
                    joined = True
                    sim.join(new.id)
                sim.tick(replica)

        for moment in range(400):
            sim.run(0.005)
            drive()
            if moment == 3 * step:
                for replica in sim.replicas.values():
                    if replica.engine is not None:
                        replica.crash()
                for replica in sim.replicas.values():
                    if replica.removed is None:
                        replica.start()
                sim.connect_all()
        sim.commit(b"\x01b")
        assert sim.run(
            10.0, until=lambda: drive() is None and len(sim.engine(sim.elect().name).configuration.voters) == 3
        )
        configuration = sim.engine(sim.elect().name).configuration
        assert not configuration.holds(lost.name) and configuration.member(lost.name) is not None
        sim.converge()


# ---- a lost disk ----


def test_h12_wiped_replica_under_a_new_id_cannot_complete_an_old_majority() -> None:
    """r3 lacks the promises of r1 and r2. r2 lost its disk and returns empty: with r3 it must form no majority."""
    with world() as sim:
        sim.commit(b"\x01a")
        r1, r2, r3 = (sim.replicas[name] for name in ("r1", "r2", "r3"))
        sim.engine(sim.elect().name).transfer("r1") if sim.elect() is not r1 else None
        assert sim.run(5.0, until=lambda: sim.leader() is r1)
        sim.isolate("r3")
        sim.commit(b"\x01promised")
        r1.crash()
        r2.crash()
        r2.removed = RemovedFromCluster("r2", 0)
        sim.cut.clear()
        sim.join("r2#2")
        sim.connect_all()
        sim.run(5.0)
        assert sim.leader() is None and r3.engine is not None and r3.engine.role is not Role.LEADER
        r1.start()
        sim.connect_all()
        changed(sim, ChangeKind.REPLACE, "r2")
        promoted(sim, "r2#2")
        sim.converge()


def test_joining_replica_does_not_vote_before_it_knows_the_members() -> None:
    bench = Bench(me="r2", bootstrap=unknown())
    bench.give("r3", VoteRequest(4, 1, 9, 3, False))
    bench.wait(3 * TIMING.election_max_s)
    assert bench.take(VoteReply) == [] and bench.take(VoteRequest) == []
    assert bench.engine.term == 0


# ---- transfer ----


def test_transfer_takes_no_election_timeout_and_loses_nothing_under_load() -> None:
    with world() as sim:
        number = 0
        for _ in range(12):
            old = sim.elect()
            for _ in range(5):
                assert old.propose(b"\x01%d" % number)
                number += 1
            began_s = sim.clock.now_s
            target = sim.engine(old.name).transfer()
            with pytest.raises(NotLeader, match="transferring leadership"):
                sim.engine(old.name).propose(b"\x01late")
            sim.tick(old)
            assert sim.run(1.0, until=lambda old=old: sim.leader() not in (None, old))  # type: ignore[misc]
            assert sim.clock.now_s - began_s < TIMING.election_min_s / 2
            assert sim.elect().name == target
        sim.run(1.0)
        sim.converge()
        history = sim.elect().history
        assert sum(1 for _, _, data in history if data[:1] == b"\x01") == number


def test_transfer_to_an_unsuitable_target_is_rejected() -> None:
    with world() as sim:
        leader = sim.elect()
        sim.commit(b"\x01a")
        behind, dead = sim.others(leader)
        changed(sim, ChangeKind.ADD, "r4")
        sim.join("r4#2")
        sim.filter = lambda sender, receiver, message: receiver != behind.name or not carries(message)
        pump(sim, TARGET_LAG_ENTRIES + 5)
        dead.crash()
        assert sim.elect() is leader
        wanted = {behind.name: "lagging", dead.name: "silent", "r4": "learner", "r9": "unknown_member"}
        for name, code in {**wanted, leader.name: "leader"}.items():
            with pytest.raises(ChangeRefused) as refused:
                sim.engine(leader.name).transfer(name)
            assert refused.value.code == code, name
        with pytest.raises(ChangeRefused, match="entries behind"):
            sim.engine(leader.name).transfer()
        assert sim.engine(leader.name).ready


def test_leader_continues_if_its_target_does_not_take_over() -> None:
    with world() as sim:
        leader = sim.elect()
        sim.commit(b"\x01a")
        sim.filter = lambda sender, receiver, message: not isinstance(message, TimeoutNow)
        engine = sim.engine(leader.name)
        engine.transfer()
        sim.tick(leader)
        assert not engine.ready
        assert sim.run(2 * TIMING.election_max_s, until=lambda: engine.ready)
        sim.filter = lambda sender, receiver, message: True
        assert sim.commit(b"\x01b") is leader


def test_read_is_answered_during_a_transfer() -> None:
    with world() as sim:
        leader = sim.elect()
        sim.commit(b"\x01a")
        sim.filter = lambda sender, receiver, message: not isinstance(message, TimeoutNow)
        engine = sim.engine(leader.name)
        engine.transfer()
        answers: list[int | None] = []
        engine.read(answers.append)
        sim.tick(leader)
        assert sim.run(0.1, until=lambda: bool(answers))
        assert answers == [engine.commit_index]


def test_only_the_followed_leader_may_tell_a_replica_to_campaign() -> None:
    bench = Bench(disk=that_voted())
    first = encode_configuration(initial(FOUNDERS.voters, version=1))
    bench.give("r2", AppendRequest(3, 1, 0, 0, 1, True, [(3, first)]))
    for peer, message in (("r3", TimeoutNow(3, 2)), ("r2", TimeoutNow(2, 2))):
        bench.give(peer, message)
        assert (bench.engine.role, bench.engine.term) == (Role.FOLLOWER, 3)
    bench.give("r2", TimeoutNow(3, 2))
    assert bench.engine.term == 4
    assert {message.transfer for message in bench.take(VoteRequest)} == {True}


def test_h14_vote_request_of_a_transfer_is_granted_despite_a_live_leader() -> None:
    for transfer in (False, True):
        bench = Bench(me="r3", disk=that_voted())
        first = encode_configuration(initial(FOUNDERS.voters, version=1))
        bench.give("r1", AppendRequest(3, 1, 0, 0, 1, True, [(3, first)]))
        bench.give("r2", VoteRequest(4, 9, 1, 3, False, transfer))
        assert [reply.granted for reply in bench.take(VoteReply, "r2")] == ([True] if transfer else [])
