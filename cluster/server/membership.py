"""Members of the cluster as this replica knows them, and membership operations of operators and the leader."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from forebay.cluster.config import Config
from forebay.cluster.consensus import ChangeRefused, Engine, MemberChange, NotLeader, Peer, Role
from forebay.cluster.schemas import MemberView
from forebay.cluster.server.pending import NotLeading, OutcomeUnknown
from forebay.replica.values import Revision
from forebay.wal import ChangeKind, Configuration, Member

LOGGER = logging.getLogger(__name__)

UNKNOWN = "unknown"
LEARNER = "learner"
REFUSED = "rejected"

CHANGE_WAIT_S = 4.0
"""Time limit for the commit of a membership change, seconds: less than a client waits for one replica."""

HAND_OVER_S = 2.0
"""Time limit for the leadership transfer of a stopping leader, seconds. The service manager's timeout must also suffice
for the final writes.
"""


class Membership:
    """Changes membership and leadership through consensus, and resolves the members' addresses."""

    def __init__(
        self,
        me: str,
        config: Config,
        engine: Engine,
        *,
        leads: Callable[[], bool],
        wait_applied: Callable[[int], Awaitable[None]],
    ) -> None:
        """Initialize. `leads` returns whether this replica may decide; `wait_applied` waits for an entry."""
        self._me = me
        self._config = config
        self._engine = engine
        self._leads = leads
        self._wait_applied = wait_applied

    def api_of(self, name: str) -> str | None:
        """Return the API address of replica `name`: from this machine's file, otherwise from the cluster's
        configuration.

        If the replica is connected at the configuration's peer address and the file has another one, the file is older
        than a `cluster update`; the configuration's API address is then used.
        """
        member = self._engine.configuration.member(name)
        row = next((replica for replica in self._config.replicas if replica.name == name), None)
        if member is not None and member.api:
            is_older = row is not None and member.peer == self._engine.address_of(name) != str(row.peer)
            if row is None or is_older:
                return member.api
        return None if row is None else str(row.api)

    def reach(self, config: Config) -> None:
        """Dial the other members at this configuration's addresses."""
        self._config = config
        self._engine.reach_at(config.members)

    def peer_of(self, name: str) -> str | None:
        """Return the peer address of `name`: of its connection, else from the file, else from the configuration."""
        member = self._engine.configuration.member(name)
        known = self._engine.address_of(name) or self._config.members.get(name)
        return known or (member.peer if member is not None else None)

    def addresses_differ(self, name: str) -> str:
        """Return a message with the remedy if file and cluster have different addresses of `name`; else empty."""
        member = self._engine.configuration.member(name)
        row = next((replica for replica in self._config.replicas if replica.name == name), None)
        if member is None or row is None or not member.peer:
            return ""
        file, agreed = (str(row.peer), str(row.api)), (member.peer, member.api)
        if file == agreed:
            return ""
        says = f"the cluster has the addresses {' and '.join(agreed)}, and this replica's file has {' and '.join(file)}"
        if name != self._me and self._engine.address_of(name) == member.peer != file[0]:
            return f"{says}, where {name} does not listen: correct the file, and send this replica SIGHUP"
        return f"{says}: if the file is right, run `forebay cluster update {name} --peer {file[0]} --api {file[1]}`"

    async def change(self, wanted: MemberChange) -> Configuration:
        """Change the membership; return the configuration once it is applied.

        A command whose ID is in the present configuration was already carried out. For `wanted.action` see consensus.

        Raises:
            NotLeading: This replica does not lead.
            ChangeRefused: Consensus rejects the change.
            OutcomeUnknown: This replica lost its leadership before the change was applied, or the wait took too long.
        """
        if wanted.id and self._engine.configuration.change.id == wanted.id and self._leads():
            index, term = self._engine.last_index, self._engine.term
        else:
            try:
                index, term = self._engine.change(wanted)
            except NotLeader as error:
                raise NotLeading(error.leader) from error
        known = self._engine.configuration
        try:
            async with asyncio.timeout(CHANGE_WAIT_S):
                await self._wait_applied(index)
        except TimeoutError as error:
            raise OutcomeUnknown from error
        if self._engine.term != term:
            raise OutcomeUnknown  # another leader may have replaced the entry
        return known

    async def transfer(self, target: str | None) -> str | None:
        """Transfer leadership; return the new leader's name.

        Raises:
            NotLeading: This replica does not lead.
            ChangeRefused: Leadership cannot be transferred to the target.
        """
        try:
            return await self._engine.transfer(target)
        except NotLeader as error:
            raise NotLeading(error.leader) from error

    async def hand_over(self) -> None:
        """Transfer leadership before a requested stop, so that clients need not wait for an election timeout."""
        if not self._leads() or len(self._engine.configuration.voters) < 2:
            return
        with suppress(NotLeader, ChangeRefused, TimeoutError):
            async with asyncio.timeout(HAND_OVER_S):
                LOGGER.info("leadership was transferred to %s", await self._engine.transfer() or "another replica")

    def poll(self) -> None:
        """Promote a learner that has caught up, which completes `cluster add` and `cluster replace`.

        Also record a voter's key that the configuration lacks, for example of a founder that was absent at the
        founding.

        The ID of the operator's last command stays in the configuration, because the command may be repeated after a
        lost reply, and must not replace a member twice.
        """
        command_id = self._engine.configuration.change.id
        learner, unrecorded = self._engine.promotable(), self._engine.unrecorded()
        if learner is not None:
            wanted = MemberChange(action=ChangeKind.PROMOTE, name=learner, id=command_id)
        elif unrecorded is not None:
            wanted = MemberChange(action=ChangeKind.UPDATE, name=unrecorded[0], key=unrecorded[1], id=command_id)
        else:
            return
        try:
            self._engine.change(wanted)
        except (ChangeRefused, NotLeader) as error:
            LOGGER.info("%s of %s is postponed: %s", wanted.action.word, wanted.name, error)

    def stop(self) -> None:
        """Do nothing: when `poll` returns, a promotion is already an entry."""


def members(
    me: str,
    engine: Engine,
    places: Membership,
    *,
    applied_index: int,
    revision: Revision,
) -> list[MemberView]:
    """Return one row per member of the configuration in force, by name. Unknown fields are null.

    A leader knows the progress of each peer's journal; a follower knows only that its leader leads.
    """
    peers = {peer.name: peer for peer in engine.peers()}
    configuration = engine.configuration
    rows = []
    for member in sorted(configuration.members(), key=lambda member: member.name):
        votes = configuration.votes(member.id)
        peer_address, api = places.peer_of(member.name) or "", places.api_of(member.name) or ""
        differ = places.addresses_differ(member.name)
        if member.name == me:
            rows.append(
                MemberView(
                    name=member.name,
                    id=member.id,
                    votes=votes,
                    peer=peer_address,
                    api=api,
                    addresses_differ=differ,
                    role=str(engine.role) if votes else LEARNER,
                    reachable=True,
                    term=engine.term,
                    commit_index=engine.commit_index,
                    applied_index=applied_index,
                    revision=revision,
                    lag_entries=max(0, engine.commit_index - applied_index),
                    last_contact_s=0.0,
                    clock_offset_s=0.0,
                    clock_off=engine.clock_off,
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
                api=api,
                addresses_differ=differ,
                role=_role(member, engine, peer, votes=votes),
                reachable=peer is not None and peer.connected,
                term=engine.term if member.name == engine.leader else None,
                lag_entries=peer.lag_entries if leads and peer is not None else None,
                last_contact_s=None if peer is None else peer.last_contact_s,
                sending_snapshot=peer is not None and peer.sending_snapshot,
                forgot=peer is not None and peer.forgot,
                clock_offset_s=None if peer is None else peer.clock_offset_s,
                clock_off=peer is not None and peer.clock_off,
            )
        )
    return rows


def _role(member: Member, engine: Engine, peer: Peer | None, *, votes: bool) -> str:
    if member.name == engine.leader:
        return str(Role.LEADER)
    if peer is not None and peer.forgot:
        return REFUSED
    if not votes:
        return LEARNER
    if engine.role == Role.LEADER and peer is not None and peer.connected:
        return str(Role.FOLLOWER)
    return UNKNOWN
