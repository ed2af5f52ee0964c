"""The replicas of the cluster as this one sees them: who they are, who leads, how far each is."""

from __future__ import annotations

from cluster.client.views import MemberView
from cluster.config import Config
from cluster.consensus import Role
from cluster.engine import Engine, Peer
from replica.units import Revision

UNKNOWN = "unknown"


def members(config: Config, me: str, engine: Engine, *, applied_index: int, revision: Revision) -> list[MemberView]:
    """Return one row per configured replica; what only another one could know is null.

    A leader knows how far each peer's journal is; a follower knows of its leader only that it leads.
    """
    peers = {peer.name: peer for peer in engine.peers()}
    rows = []
    for replica in config.replicas:
        if replica.name == me:
            rows.append(
                MemberView(
                    name=replica.name,
                    peer=str(replica.peer),
                    api=str(replica.api),
                    role=str(engine.role),
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
        peer = peers.get(replica.name)
        leads = engine.role == Role.LEADER
        rows.append(
            MemberView(
                name=replica.name,
                peer=str(replica.peer),
                api=str(replica.api),
                role=_role(replica.name, engine, peer),
                reachable=peer is not None and peer.connected,
                term=engine.term if replica.name == engine.leader else None,
                lag_entries=peer.lag_entries if leads and peer is not None else None,
                last_contact_s=None if peer is None else peer.last_contact_s,
                sending_snapshot=peer is not None and peer.sending_snapshot,
            )
        )
    return rows


def _role(name: str, engine: Engine, peer: Peer | None) -> str:
    if name == engine.leader:
        return str(Role.LEADER)
    if engine.role == Role.LEADER and peer is not None and peer.connected:
        return str(Role.FOLLOWER)
    return UNKNOWN
