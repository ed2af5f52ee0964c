"""Bugs to plant in how members change: see `bugs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from forebay.cluster.consensus import NotLeader, configurations, membership_change, raft_log
from forebay.cluster.consensus.configurations import Configurations, MemberChange
from forebay.cluster.consensus.state import Outbox, RaftState
from forebay.cluster.server import storage as storage_module
from forebay.cluster.server.proposer import Proposer


def two_changes_at_once() -> list[Any]:
    """A leader takes a change of the members although the one before it is not committed (H12)."""
    return [patch.object(Configurations, "index", property(lambda self: 0))]


def changed_too_early() -> list[Any]:
    """A leader changes the members before its own first entry is committed: a known fault of thesis 4.1 as printed."""
    original = membership_change.change

    def change(raft: RaftState, wanted: MemberChange) -> tuple[int, int]:
        if not raft.leads:
            raise NotLeader(raft.leader)
        with patch.object(RaftState, "require_ready", lambda self: None):
            return original(raft, wanted)

    return [patch.object(membership_change, "change", change)]


def learner_counted() -> list[Any]:
    """What a learner acknowledges counts as if it voted."""

    def reached(self: Any, own: Any, of: Any) -> Any:
        members = list(self.configuration.members())
        values = [own if one.id == self.me else of(self.progress[one.id]) for one in members]
        return sorted(values, reverse=True)[self.configuration.majority - 1]

    return [patch.object(RaftState, "reached", reached)]


def configurations_not_read_back() -> list[Any]:
    """After a restart only what is applied says who is a member, not what the journal has after it (H13)."""
    return [patch.object(raft_log, "read_configurations", lambda *given: None)]


def starts_without_data() -> list[Any]:
    """A replica whose disk is empty starts as if it had never run."""
    original = storage_module.first_start_mark

    def mark(config: Any, name: str) -> Path:
        path = original(config, name)
        path.touch()
        return path

    return [patch.object(storage_module, "first_start_mark", mark)]


def id_given_again() -> list[Any]:
    """A replica that is added, or replaced, has its bare name for an id: who has it was somebody before."""
    return [patch.object(configurations, "identity_of", lambda name, version: name)]


def removed_not_told() -> list[Any]:
    """Nobody tells a removed replica that it is one, and it does not find out."""
    original = membership_change.concerns

    def concerns(raft: RaftState, peer: str, message: Any) -> bool:
        with patch.object(Outbox, "send", lambda *given: None):
            return original(raft, peer, message)

    return [
        patch.object(membership_change, "concerns", concerns),
        patch.object(raft_log, "leave_if_removed", lambda raft: None),
    ]


def entry_of_another_term_taken_for_ones_own() -> list[Any]:
    """What is applied where a batch was proposed answers whoever waits for that batch, of whatever term it is."""
    original = Proposer.applied

    def applied(self: Any, index: int, term: int, state: Any, *, void: bool) -> None:
        own = next((flight.term for flight in self._in_flight if flight.index == index), term)
        original(self, index, own, state, void=void)

    return [patch.object(Proposer, "applied", applied)]


PLANTS_OF_MEMBERS = (
    entry_of_another_term_taken_for_ones_own,
    two_changes_at_once,
    changed_too_early,
    learner_counted,
    configurations_not_read_back,
    starts_without_data,
    id_given_again,
    removed_not_told,
)
