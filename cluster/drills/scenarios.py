"""Scenarios of drills: target, fault, duration, and consequences for users."""

from __future__ import annotations

from typing import Final

import msgspec

from forebay.cluster.drills.helper import NEEDS

HOLD_S: Final = 5
"""Default duration of a fault, seconds: several elections."""

AWAY_S: Final = 1
"""Default time for which the survivor is stopped before the majority is lost, seconds, so that writes are lost."""

GOAL_MS: Final = 500
"""Default goal: longest stop of writes, milliseconds."""

COPY_GOAL_MS: Final = 60_000
"""Goal of scenarios that load a state from disk, milliseconds."""

UPGRADE_GOAL_MS: Final = 2_000
"""Goal for an upgrade of a copy, milliseconds: running and starting replicas share one machine."""

NODE_DOWN_MORE_S: Final = 5
"""Seconds for which an agent stays stopped after its node is DOWN."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Kind of drill."""

    name: str
    of: str
    """Required role of the target: leader, follower, member or agent."""
    does: str
    """Predicate that follows the target's name in a sentence; `{hold_s}` stands for the fault's duration, seconds."""
    means: str
    """Consequences for the rest of the cluster."""
    takes_over: bool = False
    """True if another replica must take over if the target leads."""
    keeps_waiting: bool = False
    """True if requests to the target hang during the fault instead of failing at once."""
    on_copy: bool = False
    """True if the drill runs on a copy of the cluster's state, on this machine."""
    goal_ms: int = GOAL_MS

    @property
    def needed_capability(self) -> str:
        """Capability that the target's machine must allow; empty if no helper is needed."""
        return NEEDS.get(self.name, "")

    def fault_for(self, hold_s: int) -> str:
        """Return the predicate with the fault's duration."""
        return self.does.format(hold_s=hold_s)

    def stops_writes(self, *, leads: bool) -> bool:
        """Return whether writes are expected to stop. `leads` is True if the target is the leader."""
        if self.name == "switchover":
            return True
        return self.on_copy or (leads and not self.targets_agent)

    @property
    def targets_agent(self) -> bool:
        """True if the target is an agent."""
        return self.of == "agent"


_ELECTED: Final = "the others elect a new leader; scripts and transfers continue"
_NO_VOTE: Final = "the others continue without the target; scripts and transfers continue"

_UNTOUCHED: Final = "the cluster itself only answers status requests; its agents, jobs and mail are not affected"

SCENARIOS: Final = {
    one.name: one
    for one in (
        Scenario(
            name="switchover",
            of="follower",
            does="takes over the leadership",
            means="no process ends; scripts and transfers continue, and agents report to the new leader",
        ),
        Scenario(
            name="leader-kill",
            of="leader",
            does="is killed (SIGKILL) and restarted after at most {hold_s} s",
            means=_ELECTED,
            takes_over=True,
        ),
        Scenario(
            name="leader-hang",
            of="leader",
            does="is stopped (SIGSTOP) for {hold_s} s and continues",
            means=_ELECTED,
            takes_over=True,
            keeps_waiting=True,
        ),
        Scenario(
            name="follower-stop",
            of="follower",
            does="is stopped (SIGSTOP) for {hold_s} s and continues",
            means=_NO_VOTE,
            keeps_waiting=True,
        ),
        Scenario(
            name="agent-kill",
            of="agent",
            does="is killed (SIGKILL) and restarted after at most {hold_s} s",
            means="scripts continue, and the new agent process finds them; transfers restart as new attempts",
        ),
        Scenario(
            name="node-down",
            of="agent",
            does="is stopped (SIGSTOP) for {hold_s} s, until its node is DOWN, and continues",
            means="scripts continue; the node gets no new work while it is DOWN, and is UP again afterwards",
        ),
        Scenario(
            name="partition",
            of="member",
            does="cannot exchange data with replicas and clients for {hold_s} s",
            means="the others continue, with a new leader if the target led; its agents poll another replica",
            takes_over=True,
            keeps_waiting=True,
        ),
        Scenario(
            name="partition-in",
            of="member",
            does="receives nothing from the other replicas for {hold_s} s",
            means="the others continue, with a new leader if the target led",
            takes_over=True,
            keeps_waiting=True,
        ),
        Scenario(
            name="partition-out",
            of="member",
            does="cannot send to the other replicas for {hold_s} s",
            means="the others continue, with a new leader if the target led",
            takes_over=True,
            keeps_waiting=True,
        ),
        Scenario(
            name="disk-full",
            of="member",
            does="has no free space on its file system for {hold_s} s",
            means="the target stops at the first failed write and is restarted; the others continue, with a new leader "
            "if the target led",
        ),
        Scenario(
            name="slow-disk",
            of="follower",
            does="has a disk limited to ten writes a second for {hold_s} s",
            means="the others commit without the target, which catches up afterwards",
        ),
        Scenario(
            name="restore",
            of="member",
            does="the snapshot is restored after a total loss; two more replicas join",
            means=_UNTOUCHED,
            on_copy=True,
            goal_ms=COPY_GOAL_MS,
        ),
        Scenario(
            name="majority-lost",
            of="member",
            does="two of the three replicas and their disks are lost, and the cluster is recovered from the third",
            means=_UNTOUCHED,
            on_copy=True,
            goal_ms=COPY_GOAL_MS,
        ),
        Scenario(
            name="upgrade",
            of="member",
            does="the replicas are upgraded to another release one at a time, under load",
            means=_UNTOUCHED,
            on_copy=True,
            goal_ms=UPGRADE_GOAL_MS,
        ),
    )
}
"""Scenarios by name, as `replica.model.SCENARIOS` lists them."""
