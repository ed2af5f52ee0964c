"""A holder of a removed replica's key claims to be a later member. It must not stop the others permanently."""

import itertools
import logging

import pytest

from forebay.cluster.consensus.frames import (
    AppendReply,
    Heartbeat,
    RemovalNotice,
    VoteRequest,
    decode_body,
    encode_frame,
)
from forebay.cluster.consensus.interface import RemovedFromCluster, Role
from forebay.cluster.consensus.leader_election import TERM_HIGH, TERM_JUMP_MAX, TERM_STEP_MAX
from forebay.cluster.consensus.membership_change import FORSAKEN_TIMEOUTS
from forebay.cluster.consensus.state import first_seq
from forebay.wal.configuration import unknown
from tests.cluster.consensus.harness import TIMING, Harness
from tests.cluster.consensus.memory_journal import Disk
from tests.cluster.consensus.simulator import CLUSTER, Simulation
from tests.cluster.consensus.test_membership_hazards import FOUNDERS

LATEST = 1 << 62
"""Highest term that a frame can contain."""

HOSTILE = "r9#1000000"
"""Replica that others cannot distinguish from a newly added one."""


@pytest.mark.parametrize("sender", ["r9", HOSTILE, "r2"])
def test_unreachable_term_is_ignored_from_any_sender(sender: str, caplog: pytest.LogCaptureFixture) -> None:
    with Simulation(3, membership=True) as sim, caplog.at_level(logging.ERROR):
        leader = sim.commit(b"\x01a")
        term = sim.engine(leader.name).term
        for victim in sim.replicas.values():
            engine = sim.engine(victim.name)
            for message in (
                Heartbeat(LATEST, 1, 0, True),
                VoteRequest(LATEST, 1, LATEST, LATEST, False),
                VoteRequest(LATEST, 1, LATEST, LATEST, False, transfer=True),
                AppendReply(LATEST, 1, 0, rejected=True),
            ):
                for _ in range(10):
                    if sender != victim.name:
                        engine.receive(sender, message)
            sim.tick(victim)
            assert engine.term == term
        sim.commit(b"\x01b")
        lines = [record for record in caplog.records if "elections cannot advance so far" in record.message]
        assert len(lines) == {"r9": 0, "r2": 2, HOSTILE: 3}[sender], "once per peer, replica and minute"


def disk_at(term: int) -> Disk:
    disk = Disk()
    disk.hard = (term, None)
    return disk


OFFERED = (1, TERM_STEP_MAX, TERM_STEP_MAX + 1, TERM_JUMP_MAX, TERM_JUMP_MAX + 1, TERM_HIGH, LATEST)


@pytest.mark.parametrize("sender", ["r2", HOSTILE])
def test_replica_campaigns_above_any_accepted_term_and_the_others_follow(sender: str) -> None:
    for own, more in itertools.product((0, 7, TERM_HIGH - 1, TERM_HIGH, TERM_HIGH + TERM_STEP_MAX), OFFERED):
        offered = min(own + more, LATEST)
        reach = TERM_STEP_MAX if offered > TERM_HIGH else LATEST if sender == "r2" else TERM_JUMP_MAX
        harness = Harness(disk=disk_at(own), bootstrap=FOUNDERS)
        harness.give(sender, Heartbeat(offered, 1, 0, True))
        assert harness.engine.term == (offered if offered - own <= reach else own)
        assert harness.engine.term <= TERM_HIGH + 2 * TERM_STEP_MAX
        harness.win()
        beat = encode_frame(CLUSTER, "r1", Heartbeat(harness.engine.term, 1, 0, True))
        behind = Harness(me="r2", disk=disk_at(own), bootstrap=FOUNDERS)
        behind.give("r1", decode_body(CLUSTER, beat[4:]).message)
        if harness.engine.term <= TERM_HIGH or harness.engine.term - own <= TERM_STEP_MAX:
            assert (behind.engine.term, behind.engine.leader) == (harness.engine.term, "r1")


def test_joining_replica_accepts_any_term_of_the_others() -> None:
    harness = Harness(me="r4#7", bootstrap=unknown())
    harness.give("r2", Heartbeat(5 * TERM_JUMP_MAX, 1, 0, True))
    assert harness.engine.term == 5 * TERM_JUMP_MAX
    harness.give("r2", Heartbeat(LATEST, 1, 0, True))
    assert harness.engine.term == 5 * TERM_JUMP_MAX


@pytest.mark.parametrize("sender", ["r9", HOSTILE])
def test_member_believes_a_removal_notice_only_from_known_members(sender: str) -> None:
    notice = RemovalNotice(1, first_seq("r1") + 1, 10**6)
    harness = Harness(bootstrap=FOUNDERS)
    harness.lead()
    harness.give(sender, notice)
    assert harness.engine.role is Role.LEADER and not harness.engine.stopped
    with pytest.raises(RemovedFromCluster):
        harness.give("r2", notice)


def test_member_without_a_leader_for_long_believes_any_removal_notice() -> None:
    """All members that it knew may have been replaced, so no known member could notify it."""
    notice = RemovalNotice(1, first_seq("r1") + 1, 10**6)
    harness = Harness(bootstrap=FOUNDERS)
    harness.give("r2", Heartbeat(1, 1, 0, True))
    harness.wait((FORSAKEN_TIMEOUTS - 1) * TIMING.election_max_s)
    harness.give("r2", Heartbeat(1, 2, 0, True))
    harness.wait((FORSAKEN_TIMEOUTS - 1) * TIMING.election_max_s)
    harness.give("r8#9", notice)
    harness.wait(2 * TIMING.election_max_s)
    with pytest.raises(RemovedFromCluster):
        harness.give("r8#9", notice)


def test_replica_outside_its_own_configuration_believes_any_removal_notice() -> None:
    harness = Harness(me="r4#7", bootstrap=unknown())
    with pytest.raises(RemovedFromCluster):
        harness.give("r8#9", RemovalNotice(1, first_seq("r4#7") + 1, 9))


def test_peer_with_excessive_claims_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()
    harness.lead()
    with caplog.at_level(logging.ERROR):
        for _ in range(100):
            harness.wait(TIMING.heartbeat_s)
            (beat, *_) = harness.take(Heartbeat, "r2")
            harness.give("r2", AppendReply(harness.engine.term, beat.seq, 10**6))
            harness.give("r3", AppendReply(harness.engine.term, beat.seq, 1))
    assert [record.message for record in caplog.records] == ["r2 claims entries up to 1000000; this leader has 1"]
    assert harness.engine.role is Role.LEADER
