"""Membership changes by operators: add, remove, replace, each followed by a join if needed.

An operator works step by step: lists the members, requests a change until it is done or rejected, and starts an added
replica. Operators know which disks are lost, and request no change that would leave too few. How a replica joins is
`cluster.server.joining`, with an answer of the leader for what HTTP would have brought.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from unittest.mock import patch

from forebay.cluster.consensus import ChangeRefused, MemberChange
from forebay.cluster.consensus.configurations import next_configuration
from forebay.cluster.schemas.jobs import MemberView
from forebay.cluster.schemas.operations import LIST_MEMBERS, ApiOperation
from forebay.cluster.server import joining
from forebay.cluster.server.joining import JoiningRefused
from forebay.cluster.server.membership import members
from forebay.cluster.server.pending import NotLeading
from forebay.cluster.server.storage import member_note
from forebay.wal.configuration import ChangeKind, Configuration
from tests.simulation.loop import EPOCH_US
from tests.simulation.replicas import SimReplica
from tests.simulation.watched import WatchedController

if TYPE_CHECKING:
    from tests.simulation.world import World

_T = TypeVar("_T")
Steps = Generator[float, None, _T]
"""Work of a person: it yields the seconds until it goes on."""

Do = Callable[[WatchedController], Awaitable[Any]]

PATIENCE_S = 1.5
POLL_S = 0.02
TRIES_MAX = 12
VOTERS_MIN = 2
NEWCOMERS_MAX = 2
"""Members beyond the founders' number, count."""


class Unwise(Exception):
    """An operator would not ask for it: too few disks that are well would be left."""


class _Answering:
    """Stands in for `cluster.client.Client` while somebody joins: the cluster's answer is known already."""

    def __init__(self, rows: list[MemberView]) -> None:
        self._rows = tuple(rows)

    def from_config(self, *given: Any, **options: Any) -> _Answering:
        return self

    async def __aenter__(self) -> _Answering:
        return self

    async def __aexit__(self, *exception: object) -> None:
        return None

    async def call(self, operation: ApiOperation[Any, Any]) -> _Members:
        assert operation is LIST_MEMBERS
        return _Members(self._rows)


class _Members(NamedTuple):
    """`MembersAnswer`, as far as joining looks at it."""

    members: tuple[MemberView, ...]
    incarnation: str = "1"


class Operator:
    """Operator of the members."""

    def __init__(self, world: World, *, active: bool) -> None:
        self.world = world
        self.rng = world.fork()
        self.active = active and (world.profile == "membership" or self.rng.random() < 0.5)
        self.think_s = self.rng.choice((0.05, 0.2, 0.6))
        self._number = 0
        self._newcomers = 0
        self._founders = len(world.names)
        self._target = world.names[0]

    # The course of a day

    def begin(self) -> None:
        """Go to work."""
        if self.active:
            self.world.timeline.after(self.rng.uniform(0.2, 0.8), self._go_on, self._day())

    def _go_on(self, steps: Steps[None]) -> None:
        if self.world.violations:
            return
        try:
            delay_s = next(steps)
        except StopIteration:
            return
        self.world.timeline.after(delay_s, self._go_on, steps)

    def _day(self) -> Steps[None]:
        while True:
            rows = yield from self._look()
            if rows is not None:
                started = yield from self._start_who_was_added(rows)
                if not started:
                    yield from self._do_something(rows)
            yield self.think_s * self.rng.uniform(0.5, 1.5)

    def _do_something(self, rows: list[MemberView]) -> Steps[None]:
        rng = self.rng
        broken = [row.name for row in rows if not self.world.is_healthy(row.id) and not self._is_up(row.id)]
        if broken and (self.world.ending or rng.random() < 0.7):
            name = rng.choice(broken)
            if rng.random() < 0.3:
                self._join_too_early(next(row for row in rows if row.name == name), rows)
            yield from self._change(ChangeKind.REPLACE, name)
            return
        if self.world.ending:
            yield from self._clear_away(rows)
            return
        name = rng.choice(rows).name
        draw = rng.random()
        if draw < 0.35:
            if len(rows) < self._founders + NEWCOMERS_MAX:
                yield from self._add(rows)
        elif draw < 0.6:
            yield from self._change(ChangeKind.REMOVE, name)
        elif draw < 0.8:
            # Perhaps it was only out of sight, and goes on as who it was while its successor runs elsewhere.
            yield from self._change(ChangeKind.REPLACE, name)
        elif draw < 0.9:
            self._lose(rng.choice(rows).id)
        else:
            yield from self._ask(lambda controller: controller.membership.transfer(name if draw < 0.95 else None))

    def _add(self, rows: list[MemberView]) -> Steps[None]:
        gone = [
            replica.called
            for replica in self.world.replicas.values()
            if replica.removed and self.world.place_of(replica.called) is replica
        ]
        gone = sorted(set(gone) - {row.name for row in rows})
        if gone and self.rng.random() < 0.5:
            name = self.rng.choice(gone)
        else:
            self._newcomers += 1
            name = f"r{self._founders + self._newcomers}"
        replica = self.world.place_of(name) or self.world.new_place(name)
        yield from self._change(ChangeKind.ADD, name, replica.address)

    def _lose(self, identity: str) -> None:
        replica = self._running_as(identity)
        if replica is not None and self.world.may_lose(identity):
            self.world.lose_disk(replica)

    # One change

    def _change(self, action: ChangeKind, name: str, address: str = "") -> Steps[None]:
        world = self.world
        self._number += 1
        command_id = (EPOCH_US // 1000).to_bytes(6, "big") + b"member" + self._number.to_bytes(4, "big")
        api = f"{address}0" if address else ""
        wanted = MemberChange(action=action, name=name, peer=address, api=api, actor="operator", id=command_id)
        world.note("wanted", action.word, name)

        async def carry_out(controller: WatchedController) -> Configuration:
            known = controller.engine.configuration
            if not controller.leads or not controller.state.revision:
                raise NotLeading(controller.engine.leader)
            if action is ChangeKind.REMOVE and name == controller.name and len(known.voters) > 1:
                if known.change.id != wanted.id:  # as cluster.api.members.remove has it
                    await controller.membership.transfer(None)
                    raise NotLeading(controller.engine.leader)
            if known.change.id != wanted.id:
                self._think_twice(known, wanted)
            return await controller.membership.change(wanted)

        configuration = yield from self._ask(carry_out)
        if configuration is not None:
            world.counts[f"{action.word}_done"] += 1

    def _think_twice(self, known: Configuration, wanted: MemberChange) -> None:
        try:
            new = next_configuration(known, wanted, at=0)
        except ChangeRefused:
            return  # the cluster says so itself
        well = sum(self.world.is_healthy(voter) for voter in new.voter_ids)
        if well < new.majority or (len(new.voters) < VOTERS_MIN and wanted.action is ChangeKind.REMOVE):
            raise Unwise

    # Who is to be started

    def _start_who_was_added(self, rows: list[MemberView]) -> Steps[bool]:
        """Start a member that was added and does not run yet; say whether there was one."""
        for row in rows:
            if "#" not in row.id or any(replica.identity == row.id for replica in self.world.replicas.values()):
                continue
            yield self.think_s * self.rng.uniform(0.1, 1.0)
            replica = self.world.place_of(row.name)
            assert replica is not None
            if replica.up or (not replica.lost and not replica.removed and replica.identity):
                # The earlier one was not lost after all: the new one runs elsewhere, at its address.
                replica = self.world.new_place(row.name)
            elif replica.identity and self.rng.random() < 0.7:
                self.world.clear(replica)
            self._join(replica, rows)
            return True
        return False

    def _join_too_early(self, row: MemberView, rows: list[MemberView]) -> None:
        """Have a replica that lost its disk join before the cluster gave it another id: it must refuse.

        One that was learning and lost the note too cannot know it; DESIGN.md says what that means.
        """
        replica = self._running_as(row.id, lost=True)
        if replica is None or replica.up or not (row.votes or member_note(replica.config, replica.called).exists()):
            return
        self._join(replica, rows)
        if replica.up:
            self.world.violate(f"{replica.name} joins as {row.id}, whose disk was lost")

    def _join(self, replica: SimReplica, rows: list[MemberView]) -> None:
        """`forebay run replica --join`."""
        world = self.world
        coroutine = joining.join(replica.config, replica.called, clock=replica.clock)
        answer: Any = _Answering(rows)
        try:
            with patch.object(joining, "Client", answer):
                coroutine.send(None)
        except StopIteration as done:
            world.note("join", replica.name, done.value)
            world.counts["joined"] += 1
            replica.identity, replica.lost, replica.removed = done.value, "", False
            if not replica.up:
                replica.start()
        except JoiningRefused as error:
            # The directory is another in each run, and the trace must not be.
            world.note("join refused", replica.name, str(error).replace(str(world.directory), ""))
            world.counts["joins_refused"] += 1
            if not replica.up:
                world.clear(replica)  # the operator moves the directory away, as the sentence says

    # Asking

    def _look(self) -> Steps[list[MemberView] | None]:
        """Return the members, as the leader lists them; None if nobody answers."""

        async def list_them(controller: WatchedController) -> list[MemberView]:
            state = await controller.current()
            return members(
                controller.name,
                controller.engine,
                controller.membership,
                applied_index=controller.applied_index,
                revision=state.revision,
            )

        rows: list[MemberView] | None = yield from self._ask(list_them)
        return rows

    def _ask(self, do: Do) -> Steps[Any]:
        """Have something done by whoever leads; None if it was refused or nobody could."""
        world = self.world
        for _ in range(TRIES_MAX):
            replica = world.replicas[self._target]
            told: list[Any] = []
            if replica.up and world.rng.random() >= world.request_losses:
                replica.loop.call_soon(self._arrive, replica, replica.generation, do, told)
            waited_s = 0.0
            while replica.up and not told and waited_s < PATIENCE_S:
                yield POLL_S
                waited_s += POLL_S
            answer = told[0] if told else None
            if isinstance(answer, NotLeading):
                known = None if answer.leader is None else world.place_of(answer.leader)
                self._target = self.rng.choice(world.names) if known is None else known.name
            elif isinstance(answer, ChangeRefused | Unwise):
                world.counts[f"refused: {getattr(answer, 'code', 'unwise')}"] += 1
                world.note("change refused", str(answer))
                return None
            elif isinstance(answer, TypeError | AttributeError):
                raise answer  # a mistake of this world, not an answer in it
            elif answer is not None and not isinstance(answer, Exception):
                return answer
            else:
                self._target = self.rng.choice(world.names)
            yield self.rng.uniform(0.01, 0.08)
        return None

    def _arrive(self, replica: SimReplica, generation: int, do: Do, told: list[Any]) -> None:
        controller = replica.controller
        if controller is None or not replica.serves or replica.generation != generation:
            return
        task = replica.loop.create_task(self._do(do, controller))

        def answered(done: Any) -> None:
            if done.cancelled():
                return
            answer = done.exception() or done.result()
            if not replica.disk.dead and replica.generation == generation:
                if self.world.rng.random() >= self.world.request_losses:
                    told.append(answer)

        task.add_done_callback(answered)

    async def _do(self, do: Do, controller: WatchedController) -> Any:
        return await do(controller)

    # How it ends

    def is_done(self) -> bool:
        """Whether every member votes and runs, and nobody else does."""
        if not self.active:
            return True
        world = self.world
        leader = world.leader()
        agreed = world.oracle.members.newest
        if leader is None or agreed is None or leader.controller is None or agreed.learners:
            return False
        if leader.controller.journal.in_force != agreed:
            return False
        return all(self._is_up(voter) for voter in agreed.voter_ids) and not self._strangers(agreed)

    def _strangers(self, agreed: Configuration) -> list[SimReplica]:
        return [
            replica for replica in self.world.replicas.values() if replica.up and not agreed.holds(replica.identity)
        ]

    def _clear_away(self, rows: list[MemberView]) -> Steps[None]:
        """Stop by hand who can be told by nobody: of the voters that it asks, none is a member any more."""
        ids = {row.id for row in rows}
        for replica in self.world.replicas.values():
            if replica.controller is not None and replica.identity not in ids and replica.links is not None:
                asked = replica.controller.journal.in_force.voter_ids
                peers = replica.links.peers.items()
                reached = [self.world.places.get(address) for peer, address in peers if peer in asked]
                if not any(place and self.world.replicas[place].identity in ids for place in reached):
                    self.world.counts["stopped_by_hand"] += 1
                    replica.removed = True
                    replica.crash()
        yield 0.0

    def describe(self) -> str:
        """Describe the members."""
        agreed = self.world.oracle.members.newest
        if agreed is None:
            return "nobody founded the cluster"
        learners = ", ".join(member.id for member in agreed.learners) or "none"
        strangers = ", ".join(replica.identity for replica in self._strangers(agreed)) or "none"
        return f"voters {', '.join(agreed.voter_ids)}, learners {learners}, strangers that run {strangers}"

    def _running_as(self, identity: str, *, lost: bool = False) -> SimReplica | None:
        return next(
            (one for one in self.world.replicas.values() if one.identity == identity and bool(one.lost) is lost), None
        )

    def _is_up(self, identity: str) -> bool:
        replica = self._running_as(identity)
        return replica is not None and replica.up
