"""Users of the cluster: clients that retry with the same command ID, and agents that often report late."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from forebay.cluster.api.web import Problem
from forebay.cluster.server.liveness import AgentReport
from forebay.cluster.server.pending import NotLeading, QueueFull, Settlement
from forebay.replica.messages import commands as c
from forebay.replica.model.buffers import Access, Transfer, TransferKind
from forebay.replica.model.job_states import JobState
from forebay.replica.model.jobs import Hold
from forebay.replica.model.orders import Order
from forebay.replica.model.pools import Pool
from forebay.replica.model.requests import BufferRequest, JobRequest
from forebay.replica.model.stages import Stage
from forebay.replica.state.state import State
from forebay.replica.values.command_ids import encode_session_command_id
from forebay.replica.values.errors import RejectionCode
from forebay.replica.views.orders import orders_for
from forebay.wal import BrokenInvariant, StorageFailed
from tests.simulation import whole
from tests.simulation.doors import RIGHT_S, OwnClock, command_id, off_s, pass_the_door, seconds_off
from tests.simulation.replicas import SimReplica

if TYPE_CHECKING:
    from tests.simulation.world import World

OPERATOR = c.Actor(c.ActorRole.OPERATOR, "operator")
GRAIN_BYTES = 1 << 20
TRIES_MAX = 60
"""Maximum number of attempts of one command; a client without an answer then gives up with an unknown outcome."""


_WITHOUT_ENTRY = frozenset({RejectionCode.COMMAND_TOO_OLD, RejectionCode.UNKNOWN_SESSION})
"""Rejections that depend only on the command ID, and so are not in the ledger."""


class Hurried:
    """Clients of the channel, which are notified at the commit, before the scheduling cycle."""

    def __init__(self, told: asyncio.Future[Settlement]) -> None:
        self.done = told.done
        self.cancelled = told.cancelled
        self.set_result = told.set_result
        self.set_exception = told.set_exception


class Caller:
    """External client that sends one request at a time to the supposed leader, until it is answered."""

    def __init__(self, world: World, name: str, *, hurried: bool = False) -> None:
        """`hurried`: it sends commands over the channel."""
        self.world = world
        self.name = name
        self.hurried = hurried
        self.rng = world.fork()
        self.target = self.rng.choice(world.names)
        self.patience_s = 0.6 * world.pace
        self.clock = OwnClock(world, name)
        self._number = 0
        self._try = 0
        self._uncertain = False
        """True if an attempt of the command may have been executed, or may still be."""

    def new_id(self) -> bytes:
        """Return a command id as clients make them: the time, then what is unique."""
        self._number += 1
        return command_id(self.name, self._number, self.clock.now_ms())

    def begin(self, what: c.Request | None) -> None:
        """Send a command, or with None a read; `done` or `gave_up` follows."""
        self.what = what
        self.tries = 0
        self._uncertain = False
        if what is None:
            # Reads go to whoever believes to lead, also where that is not true any more.
            self.target = self.rng.choice(
                [name for name in self.world.names if self.world.believes(name)] or [self.target]
            )
        self.floor = self.world.oracle.floor
        self._send()

    def done(self, answer: Settlement | State) -> None:
        raise NotImplementedError

    def gave_up(self) -> None:
        raise NotImplementedError

    def _send(self) -> None:
        self.tries += 1
        if self.tries > TRIES_MAX and not self.world.ending:
            self._try += 1
            self.gave_up()
            return
        self._try += 1
        world, attempt = self.world, self._try
        if world.rng.random() >= world.request_losses:
            world.timeline.after(self._latency_s(), self._enter, attempt, self.what, self.target)
            if world.rng.random() < world.request_copies:
                # The same request by two ways: a retry that overtakes, or a proxy that repeats.
                world.timeline.after(
                    self._latency_s() * 5, self._enter, attempt, self.what, self.rng.choice(world.names)
                )
        world.timeline.after(self.patience_s, self._tire, attempt)

    def _latency_s(self) -> float:
        return 0.000_2 + 0.001 * self.rng.random()

    def _enter(self, attempt: int, what: c.Request | None, target: str) -> None:
        replica = self.world.replicas[target]
        if replica.up:
            replica.loop.call_soon(self._arrive, attempt, what, replica, replica.generation)
        else:
            self.world.timeline.after(self._latency_s(), self._refused, attempt, None)

    def _arrive(self, attempt: int, what: c.Request | None, replica: SimReplica, generation: int) -> None:
        """On the replica's loop: what its API does with the request."""
        controller = replica.controller
        if controller is None or not replica.serves:
            return
        if what is None:
            task = asyncio.get_running_loop().create_task(controller.current())
            task.add_done_callback(lambda done: self._leave(attempt, what, replica, generation, done))
            return
        try:
            if controller.leads and controller.state.revision:
                what = replace(what, id=pass_the_door(replica, what))
            if self.hurried:
                answer = asyncio.get_running_loop().create_future()
                controller.queue(what, Hurried(answer))
            else:
                answer = controller.submit(what)
        except NotLeading as error:
            self._reply(replica, generation, self._refused, attempt, error.leader)
        except (StorageFailed, BrokenInvariant) as error:
            replica.stop_for(error)
        except Problem as problem:
            self._reply(replica, generation, self._turned_away, attempt, replica.called, problem)
        except QueueFull:
            self._reply(replica, generation, self._refused, attempt, replica.called)
        else:
            answer.add_done_callback(lambda done: self._leave(attempt, what, replica, generation, done))
            if self.rng.random() < 0.02:
                replica.loop.call_later(self.rng.uniform(0, 0.02), answer.cancel)  # the connection is gone

    def _leave(
        self, attempt: int, what: c.Request | None, replica: SimReplica, generation: int, done: asyncio.Future[Any]
    ) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if isinstance(error, NotLeading):
            self._reply(replica, generation, self._refused, attempt, error.leader)
        elif error is not None:
            self._reply(replica, generation, self._refused, attempt, None)
        else:
            answer = done.result()
            if what is not None:
                self._check(replica.name, what, answer)
            self._reply(replica, generation, self._got, attempt, replica.name, answer)

    def _check(self, name: str, what: c.Request, answer: Settlement) -> None:
        rejection = answer.rejection
        if not what.id:
            self.world.counts["heard_without_receipt"] += 1
        elif rejection is None or rejection.code not in _WITHOUT_ENTRY:
            code = None if rejection is None else int(rejection.code)
            self.world.oracle.answered(name, what.id, answer.revision, answer.job, code)

    def _reply(self, replica: SimReplica, generation: int, call: Any, *arguments: Any) -> None:
        if replica.generation == generation and not replica.disk.dead:
            if self.world.rng.random() >= self.world.request_losses:
                leaves_s = replica.clock.monotonic_s()
                self.world.timeline.at(leaves_s + self._latency_s(), call, *arguments)

    def _refused(self, attempt: int, leader: str | None) -> None:
        if attempt == self._try:
            self._uncertain = self._uncertain or leader is None
            known = None if leader is None else self.world.place_of(leader)
            self.target = self.rng.choice(self.world.names) if known is None else known.name
            self._try += 1
            self.world.timeline.after(self.rng.uniform(0.005, 0.06) * self.world.pace, self._again, self._try)

    def _turned_away(self, attempt: int, leader: str, problem: Problem) -> None:
        """The API worker rejected it: follow the rejection's remedy."""
        what, world = self.what, self.world
        if problem.status != 400:
            self._refused(attempt, leader)
            return
        if attempt != self._try or what is None:
            return
        self._try += 1
        world.counts["turned_away"] += 1
        world.note("away", self.name, problem.view.sentence)
        if what.actor.role is c.ActorRole.AGENT:
            world.violate(f"the agent of {self.name} is not heard: {problem.view.sentence}")
        if not self._uncertain and abs(off_s(world.timeline, what.id)) < RIGHT_S and world.clocks_are_right():
            world.violate(f"{self.name}, whose clock is right, is turned away: {problem.view.sentence}")
        is_ahead = problem.view.outcome == "rejected"
        if is_ahead or not self._uncertain:
            self.clock.set_back(seconds_off(problem) * (1.0 if is_ahead else -1.0))
        # An id that is too old may have been carried out already, unless every other try of it was refused.
        if is_ahead or not (self._uncertain or world.request_copies or what.id in world.oracle.effects):
            self.begin(replace(what, id=self.new_id()))
        else:
            self.gave_up()

    def _again(self, attempt: int) -> None:
        if attempt == self._try:
            self._send()

    def _tire(self, attempt: int) -> None:
        if attempt == self._try:
            self._uncertain = True
            self.target = self.rng.choice(self.world.names)
            self._send()

    def _got(self, attempt: int, name: str, answer: Settlement | State) -> None:
        if attempt != self._try:
            return
        self._try += 1
        oracle = self.world.oracle
        if isinstance(answer, State):
            oracle.read(name, self.floor, answer)
            oracle.floor = max(oracle.floor, answer.revision)
        else:
            rejection = answer.rejection
            assert self.what is not None
            if rejection is None or rejection.code not in _WITHOUT_ENTRY:
                code = None if rejection is None else int(rejection.code)
                oracle.heard(self.what.id, answer.revision, answer.job, code)
                self.world.note("ack", self.name, answer.revision, answer.job, code)
        self.done(answer)


class SimClient(Caller):
    """User or operator who sends one command at a time."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, f"c{number}", hurried=number % 2 == 1)
        self.actor = c.Actor(c.ActorRole.USER, f"user{number % 2}")
        self.has_session = number % 3 == 2
        """Whether it numbers its commands in a session."""
        self._session = 0
        self._sequence = 0
        self.jobs: list[int] = []
        self.think_s = self.rng.choice((0.01, 0.05, 0.2))
        self.submitted = 0
        self.stopped = False
        self.answers = 0

    def next(self) -> None:
        """Choose the next action."""
        if not self.stopped:
            opens = self.has_session and not self._session
            self.begin(c.Request(self.new_id(), self.actor, c.OpenSession()) if opens else self._idea())

    def done(self, answer: Settlement | State) -> None:
        self.answers += 1
        if isinstance(answer, Settlement):
            if answer.rejection is not None and answer.rejection.code is RejectionCode.UNKNOWN_SESSION:
                self._session = 0
            elif self.what is not None and isinstance(self.what.command, c.OpenSession) and answer.rejection is None:
                self._session, self._sequence = answer.revision, 0
        if isinstance(answer, Settlement) and answer.rejection is None and self.what is not None:
            if isinstance(self.what.command, c.SubmitJob):
                self.jobs.append(answer.job)
        self.gave_up()

    def gave_up(self) -> None:
        self.world.timeline.after(self.think_s * self.rng.uniform(0.2, 2.0) * self.world.lull, self.next)

    def request(self, command: c.Command, *, operator: bool = False) -> c.Request:
        """Make a request with an id of its own."""
        if operator or not self._session:
            return c.Request(self.new_id(), OPERATOR if operator else self.actor, command)
        # Whether the one before was answered or given up: nobody asks for it any more, and it cannot happen any more.
        self._sequence += 1
        return c.Request(
            encode_session_command_id(self._session, self._sequence, self._sequence - 1), self.actor, command
        )

    def _idea(self) -> c.Request | None:
        rng, draw = self.rng, self.rng.random()
        if draw < 0.25:
            return None
        if rng.random() < 0.5:
            return whole.idea(self)
        if draw < 0.62 or not self.jobs:
            return self.request(self.submission())
        job = rng.choice(self.jobs[-4:])
        if draw < 0.74:
            return self.request(c.CancelJob(job, hurry=rng.random() < 0.3))
        if draw < 0.80:
            return self.request(c.HoldJob(job))
        if draw < 0.92:
            return self.request(c.ReleaseJob(job), operator=True)
        if draw < 0.925:
            return self.request(whole.raised(self), operator=True)
        if draw < 0.96:
            pool = Pool("fast", rng.choice((6, 8, 10)) * GRAIN_BYTES, GRAIN_BYTES, is_default=True)
            return self.request(c.SetPool(pool), operator=True)
        node = rng.choice(self.world.nodes)
        commands = (c.DrainNode(node, "for a test"), c.ResumeNode(node), c.LoseNode(node, "for a test"))
        return self.request(rng.choice(commands), operator=True)

    def submission(self) -> c.SubmitJob:
        """Make a job whose name is unique, so that its effects can be counted."""
        rng = self.rng
        self.submitted += 1
        spec = JobRequest(
            name=f"{self.name}-{self.submitted}",
            user=self.actor.name,
            # Some longer than a sector of the disk, or two: a write of theirs can be torn.
            script="#!/bin/sh\n" + "#" * rng.choice((0, 0, 600, 1500)),
            workdir="/out",
            time_limit_s=60,
            cpus=rng.choice((1, 1, 2)),
        )
        request = None
        if rng.random() < 0.85:
            staged = (Transfer(TransferKind.FILE, "/in/a", "$DW_JOB_STRIPED/a"),)
            request = BufferRequest(
                pool="" if rng.random() < 0.8 else "slow",
                capacity_bytes=rng.randrange(1, 4) * GRAIN_BYTES - 5,
                access=(Access.STRIPED,),
                type="scratch",
                stage_in=staged if rng.random() < 0.7 else (),
                stage_out=(),
                text="#DW jobdw",
            )
        return c.SubmitJob(replace(spec, buffer=request), Hold.USER if rng.random() < 0.1 else Hold.NONE)


class SimAgent(Caller):
    """Agent of one node, which polls, works and reports; reports are kept until they are answered."""

    def __init__(self, world: World, node: str) -> None:
        super().__init__(world, node)
        self.node = node
        self.actor = c.Actor(c.ActorRole.AGENT, node)
        self.instance = 0
        self.silent_s = 0.0
        self._outbox: list[c.ReportOperation | c.RegisterNode] = []
        self._known: set[tuple[int, int, str]] = set()
        self._ran: dict[int, int] = {}
        self._standing: set[tuple[int, int]] = set()
        """Scripts that must not end, by job and attempt."""
        self._epoch = 0
        self._busy = False
        self.polls_anywhere = world.profile == "all"
        """Whether it polls followers too, as real agents do; else mostly leaders, which takes no messages."""

    def start(self) -> None:
        """Start the agent's process: it registers, and begins to poll."""
        self.instance += 1
        self._epoch += 1
        self._known = {known for known in self._known if known[2] == "run"}
        self._outbox.append(self.registration())
        self._post()
        self._poll(self._epoch)

    def registration(self) -> c.RegisterNode:
        """What this process of the agent says of itself."""
        return c.RegisterNode(self.node, 8, f"i{self.instance}", f"{self.node}-disk")

    def _poll(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        world = self.world
        world.timeline.after(self.rng.uniform(0.03, 0.1) * world.pace, self._poll, epoch)
        if world.timeline.now_s < self.silent_s:
            return
        replica = world.replicas[self.rng.choice(world.names)]
        leaders = [name for name in world.names if world.replicas[name].leads]
        if leaders and self.rng.random() < 0.9 and not self.polls_anywhere:
            replica = world.replicas[self.rng.choice(leaders)]
        if replica.up:
            replica.loop.call_soon(self._ask, replica, epoch)

    def ask(self, replica: SimReplica) -> None:
        """Poll this replica, whoever it is."""
        replica.loop.call_soon(self._ask, replica, self._epoch)

    def _ask(self, replica: SimReplica, epoch: int) -> None:
        controller = replica.controller
        if controller is not None and replica.serves and self.polls_anywhere:
            said = AgentReport(self.node, f"i{self.instance}")
            proof = asyncio.get_running_loop().create_task(controller.polls.prove(self.node, said))
            floor = self.world.oracle.floor
            proof.add_done_callback(lambda done: self._proven(replica, epoch, floor, done))
            return
        if controller is None or not replica.serves or not controller.leads:
            return
        replica.guarded(controller.node_watch.heard, self.node)
        orders = orders_for(controller.state, self.node)
        self.world.timeline.after(self._latency_s(), self._take, epoch, orders)

    def _proven(self, replica: SimReplica, epoch: int, floor: int, done: asyncio.Task[None]) -> None:
        """What a replica answers is no older than the question, whether it leads or follows."""
        if done.cancelled() or done.exception() is not None or replica.disk.dead or replica.controller is None:
            return
        self.world.counts["polls_proven"] += 1
        self.world.counts["polls_of_followers"] += not replica.leads
        self.world.oracle.read(replica.name, floor, replica.controller.state)
        orders = orders_for(replica.controller.state, self.node)
        self.world.timeline.after(self._latency_s(), self._take, epoch, orders)

    def _take(self, epoch: int, orders: tuple[Order, ...]) -> None:
        if epoch != self._epoch:
            return
        self._standing = {(order.job, order.attempt) for order in orders if order.suspend and not order.cancel}
        for order in orders:
            key = (order.job, order.attempt, order.stage)
            if key in self._known:
                continue
            self._known.add(key)
            self.world.note("order", self.node, order.job, order.attempt, order.stage)
            slow = self.rng.random() < self.world.slow_reports
            took_s = self.rng.uniform(0.5, 3.0) if slow else self.rng.uniform(0.005, 0.1)
            if order.stage == "run":
                self._run(order, took_s * 3)
            else:
                result: c.OperationResult = c.OperationDone(1, 1, receipt=whole.receipt(order))
                if self.rng.random() < self.world.failing_stages:
                    operation = self.rng.choice(whole.OPERATIONS[order.stage])
                    failing = self.rng.random() < 0.1
                    result = c.OperationFailed("a test", failing, operation, whole.receipt(order, complete=False))
                if whole.checkpoints(order):
                    self.world.timeline.after(took_s / 2, self._finished, epoch, order, whole.reached(order))
                self.world.timeline.after(took_s, self._finished, epoch, order, result)

    def _run(self, order: Order, took_s: float) -> None:
        if order.started:
            self.world.violate(f"the script of job {order.job} is taken for started; its agent never started it")
        known, self._ran[order.job] = self._ran.get(order.job, order.attempt), order.attempt
        if known != order.attempt and not self.world.oracle.lives.may_run(order.job, known, order.attempt):
            self.world.violate(f"the script of job {order.job} was ordered as attempt {known} and {order.attempt}")
        if order.has_buffer:
            if self.rng.random() < self.world.failing_stages / 2:
                failed = c.OperationFailed("a test", operation="pre_run")
                self.world.timeline.after(took_s / 3, self._finished, None, order, failed)
                return
        self.world.timeline.after(took_s / 3, self._finished, None, order, c.ScriptStarted())
        self.world.timeline.after(took_s, self._end, order)

    def _end(self, order: Order) -> None:
        """A script comes to its end, unless it stands still. It outlives its agent: whichever runs then finds it."""
        if (order.job, order.attempt) in self._standing:
            self.world.timeline.after(0.05, self._end, order)
        else:
            self._finished(None, order, c.ScriptEnded(JobState.COMPLETED))

    def _finished(self, epoch: int | None, order: Order, result: c.OperationResult) -> None:
        if epoch is not None and epoch != self._epoch:
            return  # a worker dies with its agent
        report = c.ReportOperation(self.node, order.job, order.attempt, Stage[order.stage.upper()], result)
        self._outbox.append(report)
        if self.rng.random() < 0.05:
            self.world.timeline.after(self.rng.uniform(0.5, 2.0), self._outbox.append, report)  # told twice, and late
        self._post()

    def _post(self) -> None:
        if not self._busy and self._outbox:
            self._busy = True
            self.begin(c.Request(self.new_id(), self.actor, self._outbox[0]))

    def done(self, answer: Settlement | State) -> None:
        self._busy = False
        assert isinstance(answer, Settlement)
        if answer.rejection is None or answer.rejection.code is not RejectionCode.COMMAND_TOO_OLD:
            del self._outbox[0]  # else it is sent again with a new id, as cluster.api.agents has it
        self._post()

    def gave_up(self) -> None:
        self._busy = False
        self._post()
