"""Hazards outside the Raft rules: H6, H7, H18 to H24, and an idle cluster that writes nothing."""

import hashlib
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from pysyncobj import SyncObj, SyncObjConf, replicated

from forebay.cluster.consensus.frames import AppendReply, AppendRequest, encode_frame
from forebay.cluster.consensus.interface import NotLeader, Timing
from forebay.cluster.consensus.stock import stock_configuration
from forebay.wal.failures import BrokenInvariant, StorageFailed
from tests.cluster.consensus.harness import STAND_S, TIMING, Harness, StockHarness
from tests.cluster.consensus.simulator import CLUSTER, Simulation


def test_h06_exception_of_the_machine_stops_the_replica_without_a_retry() -> None:
    harness = Harness(replicas=1)
    harness.wait(STAND_S)
    calls: list[int] = []

    def poison(index: int, term: int, data: bytes) -> None:
        calls.append(index)
        raise ValueError("poison")

    harness.apply = poison  # type: ignore[method-assign]
    harness.engine.propose(b"\x01poison")
    with pytest.raises(ValueError, match="poison"):
        harness.engine.tick()
    assert harness.engine.stopped and harness.engine.applied_index == 1
    with pytest.raises(RuntimeError, match="stopped"):
        harness.engine.tick()
    assert calls == [2]


class Poisoned(SyncObj):  # type: ignore[misc]
    """Stock engine with a replicated method that raises."""

    calls = 0

    @replicated  # type: ignore[untyped-decorator]
    def poison(self) -> None:
        Poisoned.calls += 1
        raise ValueError("poison")


def test_h06_stock_engine_applies_a_poison_entry_repeatedly() -> None:
    stock = StockHarness(replicas=1, engine=Poisoned)
    stock.set_private("raftElectionDeadline", 0)
    stock.engine.doTick()
    stock.engine.poison()
    for _ in range(5):
        try:
            stock.engine.doTick()
        except ValueError:
            continue
    assert Poisoned.calls >= 3, "HAZARDS.md H6; if this fails, the release changed"


def test_h06_machine_that_does_not_record_applied_entries_stops_the_replica() -> None:
    harness = Harness(replicas=1)
    harness.apply = lambda index, term, data: None  # type: ignore[method-assign]
    with pytest.raises(BrokenInvariant, match="did not record"):
        harness.wait(STAND_S)


def test_h07_exception_of_a_callback_stops_the_replica_without_applying_twice() -> None:
    harness = Harness(replicas=1)
    harness.at_change = _raise
    with pytest.raises(ZeroDivisionError):
        harness.wait(STAND_S)
    assert harness.engine.stopped
    assert [index for index, _, _ in harness.applied] == [1]


def _raise() -> None:
    raise ZeroDivisionError


def test_h18_only_the_leader_takes_commands_and_stock_entry_points_are_closed() -> None:
    harness = Harness()
    harness.give("r2", AppendRequest(1, 1, 0, 0, 0, True, []))
    with pytest.raises(NotLeader) as rejection:
        harness.engine.propose(b"\x01a")
    assert rejection.value.leader == "r2"
    for way_in in (
        lambda: harness.engine.stock._applyCommand(b"x", None),
        lambda: harness.engine.stock.setCodeVersion(0),
        lambda: harness.engine.stock.transferLeadership(),
        lambda: harness.engine.stock._SyncObj__tryLogCompaction(),
        lambda: harness.engine.stock._SyncObj__loadDumpFile(clearJournal=True),
        lambda: harness.engine.stock._SyncObj__doApplyCommand(b"\x00" + pickle.dumps(0)),
        lambda: harness.engine.stock._SyncObj__doChangeCluster(["add", "r9"]),
    ):
        with pytest.raises(BrokenInvariant):
            way_in()
    assert harness.engine.stock._inlet._onUtilityMessageCallbacks == {}


def test_h19_command_is_committed_without_waiting_for_a_timer() -> None:
    with Simulation(1, latency_s=0.0) as sim:
        leader = sim.commit(b"\x01first")
        began_s = sim.clock.now_s
        for number in range(50):
            data = b"\x01%d" % number
            assert leader.propose(data)
            sim.tick(leader)
            assert sim.run(TIMING.heartbeat_s, until=lambda data=data: data in sim.acknowledged)  # type: ignore[misc]
        assert sim.clock.now_s == began_s


def test_h19_proposals_of_one_tick_share_one_sync_and_one_request() -> None:
    harness = Harness()
    harness.lead()
    syncs = harness.disk.syncs
    for number in range(100):
        harness.engine.propose(b"\x01%d" % number)
    harness.settle()
    assert harness.disk.syncs == syncs + 1
    assert [len(request.entries) for request in harness.take(AppendRequest, "r2")] == [100]


def test_h20_frame_is_hardly_larger_than_its_entries() -> None:
    data = os.urandom(64 * 1024)
    frame = encode_frame(CLUSTER, "r1", AppendRequest(1, 1, 0, 0, 0, True, [(1, data)]))
    assert data in frame and len(frame) < len(data) + 100


def test_h21_no_replicated_method_exists_whose_number_could_change() -> None:
    harness = Harness(replicas=1)
    assert harness.engine.stock._methodToID == {} and harness.engine.stock._idToMethod == {}


def test_h22_misspelt_option_is_rejected() -> None:
    with pytest.raises(TypeError, match="raftMinTimeOut"):
        stock_configuration(raftMinTimeOut=1.0)
    with pytest.raises(TypeError, match="elction_min_s"):
        Timing(elction_min_s=1.0)  # type: ignore[call-arg]
    assert SyncObjConf(raftMinTimeOut=99.0).raftMinTimeout == 0.4, "the stock engine ignores it; HAZARDS.md H22"


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"election_min_s": 0.1}, "heartbeats"),
        ({"election_max_s": 0.3}, "same moment"),
        ({"heartbeat_s": 0.0}, "above 0"),
        ({"heartbeat_s": float("nan")}, "above 0"),
        ({"reconnect_min_s": 2.0}, "reconnect_min_s"),
    ],
)
def test_h22_timing_that_cannot_keep_a_leader_is_rejected_with_a_reason(wrong: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Timing(**wrong)


def test_h23_failed_sync_stops_the_replica_and_its_promises() -> None:
    harness = Harness()
    harness.disk.fail_next = StorageFailed("EIO")
    harness.engine.receive("r2", AppendRequest(1, 1, 0, 0, 0, True, [(1, b"\x01a")]))
    with pytest.raises(StorageFailed):
        harness.engine.tick()
    assert harness.out == [] and harness.engine.stopped
    harness.disk.fail_next = None
    for call in (harness.engine.tick, lambda: harness.engine.receive("r2", AppendReply(1, 1, 1))):
        with pytest.raises(RuntimeError):
            call()
    assert harness.out == [] and not harness.engine.raft.outbox.holds
    assert harness.engine.stock.conf.autoTick is False


def test_h24_peers_are_asked_in_the_order_of_their_names_for_any_hash_seed() -> None:
    code = (
        "import hashlib; from tests.cluster.consensus.test_simulation import scenario\n"
        "with scenario(11, 5) as sim: print(hashlib.sha256(repr((sim.applied, sim.leaders)).encode()).hexdigest())"
    )
    root = Path(__file__).parents[3]
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1 and len(digests.pop().strip()) == hashlib.sha256().digest_size * 2


def test_idle_cluster_writes_its_marks_once_and_then_nothing() -> None:
    with Simulation(1) as sim:
        sim.commit(b"\x01a")
        sim.run(TIMING.idle_flush_s + 1.0)
        before = {name: replica.disk.syncs for name, replica in sim.replicas.items()}
        assert all(replica.disk.applied == len(replica.history) for replica in sim.replicas.values())
        sim.run(120.0)
        assert {name: replica.disk.syncs for name, replica in sim.replicas.items()} == before


def test_idle_cluster_ticks_for_heartbeats_only() -> None:
    with Simulation(1) as sim:
        leader = sim.commit(b"\x01a")
        sim.run(3.0)
        sim.sent = []
        sim.run(10.0)
        beats = 10.0 / TIMING.heartbeat_s
        assert len(sim.sent) <= 2 * len(sim.others(leader)) * (beats + 1)


def test_followers_learn_of_a_commit_soon_without_a_following_entry() -> None:
    with Simulation(1, latency_s=0.0) as sim:
        leader = sim.commit(b"\x01a")
        last = leader.journal.last_index
        assert sim.run(
            TIMING.commit_notice_s + 0.001,
            until=lambda: all(r.history[-1:][0][0] == last for r in sim.replicas.values()),
        )


def test_marks_out_of_order_are_rejected_at_construction() -> None:
    harness = Harness(replicas=1)
    harness.wait(STAND_S)
    harness.disk.commit = 99
    with pytest.raises(BrokenInvariant, match="out of order"):
        Harness(replicas=1, disk=harness.disk)


def test_long_catch_up_is_applied_in_slices(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    harness = Harness()
    apply = harness.apply

    def slow(index: int, term: int, data: bytes) -> None:
        harness.clock.now_s += 0.005
        apply(index, term, data)

    harness.apply = slow  # type: ignore[method-assign]
    harness.give("r2", AppendRequest(1, 1, 0, 0, 100, True, [(1, b"\x01x")] * 100))
    assert 1 <= len(harness.applied) < 20
    assert harness.engine.next_due_s() < harness.clock.now_s
    ticks = 0
    while len(harness.applied) < 100:
        harness.engine.tick()
        ticks += 1
    assert ticks > 5
    assert [index for index, _, _ in harness.applied] == list(range(1, 101))
