"""A small world for tests of the core: one proposer, honest agents, a clock that is moved by hand, and no I/O."""

from __future__ import annotations

from typing import Any

from forebay.replica.decide.decide import decide
from forebay.replica.fold.apply import apply_batch
from forebay.replica.fold.dedup_cache import find_reply, look_up_reply
from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.grammar.directives import read_request
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.messages import features
from forebay.replica.messages.entries import Batch, Entry
from forebay.replica.model.buffers import Access
from forebay.replica.model.configuration import Site
from forebay.replica.model.job_states import JobState
from forebay.replica.model.jobs import Hold
from forebay.replica.model.orders import Order
from forebay.replica.model.pools import Pool
from forebay.replica.model.requests import (
    DEFAULT_PRIORITY,
    NO_OPTIONS,
    BufferRequest,
    JobOptions,
    JobRequest,
    with_options,
)
from forebay.replica.model.stages import Stage, agent_of
from forebay.replica.state.invariants import find_violations
from forebay.replica.state.state import EMPTY, State
from forebay.replica.values.errors import Rejection
from forebay.replica.values.units import Instant, Revision
from forebay.replica.values.verdicts import Verdict
from forebay.replica.views.jobs import buffer_word, reason_of, verdict_of
from forebay.replica.views.orders import orders_for
from tests.replica.reference.reference_scheduler import plan

OPERATOR = c.Actor(c.ActorRole.OPERATOR, "operator")
SCRIPT = "#!/bin/sh\ntrue\n"
POLICY = Site(sources=("/in",), destinations=("/out",), retry_backoff_s=2)
DISCLOSURE_KEY = bytes(range(32))
"""What the proofs of its ledger are salted with."""

ADMITTED = 8
"""Nodes that a world is founded with, count: n1, n2, …; others are admitted when they come."""

START = Instant(1_700_000_000_000_000)


def beside_space(**fields: Any) -> BufferRequest:
    """Return a request for no space of the job's own, with these fields."""
    return BufferRequest("", 0, (Access.STRIPED,), "scratch", (), (), "#BB persistent", **fields)


def user(name: str = "alan") -> c.Actor:
    return c.Actor(c.ActorRole.USER, name)


def submitter(request: JobRequest, who: str) -> c.Actor:
    """Return who may submit this: a priority, like a negative nice, is an operator's to give."""
    privileged = request.priority > DEFAULT_PRIORITY or request.effective_options.nice < 0
    return OPERATOR if privileged else user(who)


def agent(name: str) -> c.Actor:
    return c.Actor(c.ActorRole.AGENT, name)


class World:
    """Settles one command a batch, each followed by a scheduling pass, as the proposer does; checks every invariant."""

    def __init__(
        self,
        pools: dict[str, int] | None = None,
        granularity: int = 1,
        nodes: int = 1,
        cpus: int = 8,
        *,
        level: int = features.FEATURE_LEVEL_KNOWN,
        timeouts: str = "progress",
        cluster_id: str = "id",
        name: str = "test",
        start: Instant = START,
        **policy: Any,
    ):
        self.state: State = EMPTY
        self.at = start
        self.counter = 0
        self.ledger: list[Batch] = []
        self.reasons: list[tuple[int, dict[int, str]]] = []
        import msgspec

        site = msgspec.structs.replace(POLICY, **policy)
        founded = tuple(
            Pool(name, size, granularity, is_default=index == 0)
            for index, (name, size) in enumerate((pools or {"fast": 100}).items())
        )
        nodes_admitted = tuple(f"n{number + 1}" for number in range(ADMITTED))
        found = c.FoundCluster(cluster_id, name, site, founded, nodes_admitted, disclosure_key=DISCLOSURE_KEY)
        assert not isinstance(self.settle(found, c.CONTROLLER), Rejection)
        while self.state.feature_level < level:
            following = self.state.feature_level + 1
            assert not isinstance(self.settle(c.RaiseFeatureLevel(following, (("r1", following),))), Rejection)
        if timeouts != "progress":
            self.configure(TransferTimeouts=timeouts)
        for index in range(nodes):
            self.register(f"n{index + 1}", cpus=cpus)

    def settle(self, command: c.Command, actor: c.Actor = OPERATOR, command_id: bytes | None = None) -> Rejection | int:
        """Settle one command; return the rejection, or the first job its events name, or 0."""
        self.counter += 1
        command_id = command_id or (self.at // 1000).to_bytes(6, "big") + self.counter.to_bytes(10, "big")
        request = c.Request(command_id, actor, command)
        known = look_up_reply(self.state, request)
        if known is not None:
            return known if isinstance(known, Rejection) else known.rejection or known.job
        decision = decide(self.state, request, self.at)
        if isinstance(decision, Rejection):
            entry = Entry(command_id, actor, c.kind_of(command), (), decision, c.command_digest(request))
        else:
            events = decision.events
            entry = Entry(command_id, actor, c.kind_of(command), events, None, c.command_digest(request))
        self.commit(entry)
        self.run_pass()
        receipt = find_reply(self.state, command_id)
        assert receipt is not None
        return receipt.rejection or receipt.job

    def configure(self, **settings: str) -> None:
        """Change keys of the configuration, and leave the others."""
        changes = tuple(ConfSetting(key, value) for key, value in settings.items())
        outcome = self.settle(c.ConfigureSite(changes, partial=True))
        assert not isinstance(outcome, Rejection), outcome

    def commit(self, entry: Entry) -> None:
        batch = Batch(Revision(self.state.revision), self.at, (entry,))
        following = apply_batch(self.state, batch)
        assert following is not None
        self.state, self.at = following, Instant(following.at)
        self.ledger.append(batch)
        assert find_violations(self.state) == []
        for pool in self.state.pools.values():
            assert self.state.held_bytes.get(pool.name, 0) <= pool.quantity_bytes

    def run_pass(self) -> None:
        while events := plan(self.state, self.at).events:
            self.commit_pass(events)

    def commit_pass(self, events: tuple[e.Event, ...]) -> None:
        self.commit(Entry(b"", c.CONTROLLER, "run_scheduling_cycle", events))

    def advance(self, seconds: float) -> None:
        self.at = Instant(self.at + int(seconds * 1_000_000))
        self.run_pass()

    def register(self, node: str, cpus: int = 8, instance: str = "i1", storage: str = "s1") -> Rejection | int:
        if node not in self.state.admitted:
            self.settle(c.AdmitNode(node))
        return self.settle(c.RegisterNode(node, cpus, instance, storage), agent(node))

    def submit(
        self,
        bb: str = "",
        *,
        script: str = SCRIPT,
        who: str = "alan",
        hold: Hold = Hold.NONE,
        options: JobOptions = NO_OPTIONS,
        **spec: Any,
    ) -> int:
        result = self.try_submit(bb, script=script, who=who, hold=hold, options=options, **spec)
        assert isinstance(result, int), result
        return result

    def try_submit(
        self,
        bb: str = "",
        *,
        script: str = SCRIPT,
        who: str = "alan",
        hold: Hold = Hold.NONE,
        options: JobOptions = NO_OPTIONS,
        **spec: Any,
    ) -> Rejection | int:
        fields: dict[str, Any] = {"name": "job", "user": who, "script": script, "workdir": "/out", "time_limit_s": 60}
        array, throttle = spec.pop("array", ()), spec.pop("throttle", 0)
        spec["array"] = spec.pop("request_array", None)
        after_tasks = spec.pop("after_tasks", ())
        fields.update(spec)
        fields.setdefault("buffer", read_request(script, bb).request)
        request = with_options(JobRequest(**fields), options)
        return self.settle(c.SubmitJob(request, hold, array, throttle, after_tasks), submitter(request, who))

    def orders(self, node: str = "n1") -> tuple[Order, ...]:
        return orders_for(self.state, node)

    def agent_of(self, job: int) -> str:
        return agent_of(self.state.jobs[job], self.state.buffers.get(job))

    def order(self, job: int) -> Order:
        return next(order for order in self.orders(self.agent_of(job)) if order.job == job)

    def report(self, job: int, result: c.OperationResult, order: Order | None = None) -> Rejection | int:
        node = self.agent_of(job)
        order = order or self.order(job)
        return self.settle(c.ReportOperation(node, job, order.attempt, Stage[order.stage.upper()], result), agent(node))

    def done(self, job: int) -> None:
        """Report success of whatever is ordered for the job: for a script, its start and then its end."""
        order = self.order(job)
        if order.stage == "run":
            if not order.started:
                assert not isinstance(self.report(job, c.ScriptStarted(), order), Rejection)
            assert not isinstance(self.report(job, c.ScriptEnded(JobState.COMPLETED), order), Rejection)
        else:
            assert not isinstance(self.report(job, c.OperationDone(1, 1)), Rejection)

    def finish(self, job: int) -> None:
        while job in self.state.unfinished:
            self.done(job)

    def reason(self, job: int) -> str:
        return reason_of(self.state, job)

    def verdict(self, job: int) -> Verdict:
        return verdict_of(self.state, job)

    def shown(self, job: int) -> tuple[str, str, str]:
        """Return job state, reason and buffer state as people see them."""
        return self.state.jobs[job].state.name, self.reason(job), str(buffer_word(self.state, job))

    def free(self, pool: str = "fast") -> int:
        return self.state.pools[pool].usable_bytes - self.state.held_bytes.get(pool, 0)
