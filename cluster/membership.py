"""The replicas of the cluster as this one sees them: who they are, who leads, how far each is."""

from __future__ import annotations

from collections.abc import Callable

from cluster.client.views import MemberView
from cluster.consensus import Role
from cluster.engine import Engine, Peer
from replica.units import Revision
from wal.configuration import Member

UNKNOWN = "unknown"
LEARNER = "learner"


def members(
    me: str,
    engine: Engine,
    *,
    api_of: Callable[[str], str | None],
    peer_of: Callable[[str], str | None],
    applied_index: int,
    revision: Revision,
) -> list[MemberView]:
    """Return one row per member of the configuration in force, by name; what only another one could know is null.

    A leader knows how far each peer's journal is; a follower knows of its leader only that it leads.
    """
    peers = {peer.name: peer for peer in engine.peers()}
    configuration = engine.configuration
    rows = []
    for member in sorted(configuration.members(), key=lambda member: member.name):
        votes = configuration.votes(member.id)
        peer_address = member.peer or peer_of(member.name) or ""
        if member.name == me:
            rows.append(
                MemberView(
                    name=member.name,
                    id=member.id,
                    votes=votes,
                    peer=peer_address,
                    api=api_of(member.name) or "",
                    role=str(engine.role) if votes else LEARNER,
                    reachable=True,
                    term=engine.term,
                    commit_index=engine.commit_index,
                    applied_index=applied_index,
                    revision=revision,
                    lag_entries=max(0, engine.commit_index - applied_index),
                    last_contact_s=0.0,
                )
            )
            continue
        peer = peers.get(member.name)
        leads = engine.role == Role.LEADER
        rows.append(
            MemberView(
                name=member.name,
                id=member.id,
                votes=votes,
                peer=peer_address,
                api=api_of(member.name) or "",
                role=_role(member, engine, peer, votes=votes),
                reachable=peer is not None and peer.connected,
                term=engine.term if member.name == engine.leader else None,
                lag_entries=peer.lag_entries if leads and peer is not None else None,
                last_contact_s=None if peer is None else peer.last_contact_s,
                sending_snapshot=peer is not None and peer.sending_snapshot,
            )
        )
    return rows


def _role(member: Member, engine: Engine, peer: Peer | None, *, votes: bool) -> str:
    if member.name == engine.leader:
        return str(Role.LEADER)
    if not votes:
        return LEARNER
    if engine.role == Role.LEADER and peer is not None and peer.connected:
        return str(Role.FOLLOWER)
    return UNKNOWN
