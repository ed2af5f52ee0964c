"""Simulated agents: they report the result of each order after a planned time, and move no data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from forebay.cluster.api.web.problems import Problem
from forebay.replica.messages import commands as c
from forebay.replica.model import JobState, Order, Stage
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant
from forebay.replica.views import orders_for

if TYPE_CHECKING:
    from forebay.cluster.testing.simulation import Simulation

_STAGES: Final = {stage.word: stage for stage in Stage}

FailingStage = Literal["stage_in", "stage_out", "teardown"]


TEARDOWN_S: Final = 0.1
"""Duration of the removal of a buffer, simulated seconds."""


class JobPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Planned course of jobs. Times are simulated seconds.

    `fail`: stage that fails for good, with `message`, until the plan is changed and the job released.
    """

    stage_in_s: float = 1.0
    run_s: float = 10.0
    stage_out_s: float = 1.0
    exit_code: int = 0
    signal: int = 0
    fail: FailingStage | None = None
    message: str = "the test planned this failure"


class SimulatedAgents:
    """Agents of all nodes."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.plans: dict[str, JobPlan] = {}
        """Name of a job -> its plan; other jobs have the default one."""
        self._begun: dict[tuple[int, int, str], Instant] = {}
        """Job, attempt and stage of an order -> time at which its agent began."""

    def next_due(self) -> Instant | None:
        """Return the time at which the next order ends, or None."""
        due = [self._due(order) for _, order in self._orders()]
        return min(due) if due else None

    def perform_due(self) -> None:
        """Report the results of all orders that end by now."""
        for node, order in self._orders():
            if self._due(order) <= self._simulation.clock.at:
                self._report(node, order, self._result(order))

    def _orders(self) -> list[tuple[str, Order]]:
        """Return the current orders that are not suspended, with their nodes; a script begins with its order."""
        state = self._simulation.state
        found = [(node, order) for node in sorted(state.nodes) for order in orders_for(state, node)]
        for node, order in found:
            if order.stage == Stage.RUN.word and not order.started:
                self._report(node, order, c.ScriptStarted())
        if any(not order.started and order.stage == Stage.RUN.word for _, order in found):
            return self._orders()
        keys = {_key(order) for _, order in found}
        self._begun = {key: self._begun.get(key, self._simulation.clock.at) for key in keys}
        return [(node, order) for node, order in found if order.cancel or not order.suspend]

    def _due(self, order: Order) -> Instant:
        plan, begun = self._plan(order), self._begun[_key(order)]
        if order.cancel:
            return self._simulation.clock.at
        run_s = min(plan.run_s, order.time_limit_s) if order.time_limit_s else plan.run_s
        times_s = {
            Stage.STAGE_IN.word: plan.stage_in_s,
            Stage.RUN.word: run_s,
            Stage.STAGE_OUT.word: plan.stage_out_s,
        }
        return Instant(begun + round(times_s.get(order.stage, TEARDOWN_S) * MICROSECONDS_PER_SECOND))

    def _result(self, order: Order) -> c.OperationResult:
        plan = self._plan(order)
        if order.stage != Stage.RUN.word:
            if order.stage == plan.fail:
                return c.OperationFailed(plan.message, final=True)
            return c.OperationDone(files=len(order.transfers))
        if order.cancel:
            return c.ScriptEnded(JobState.CANCELLED)
        if order.time_limit_s and plan.run_s > order.time_limit_s:
            return c.ScriptEnded(JobState.TIMEOUT)
        failed = plan.exit_code or plan.signal
        return c.ScriptEnded(JobState.FAILED if failed else JobState.COMPLETED, plan.exit_code, plan.signal)

    def _plan(self, order: Order) -> JobPlan:
        return self.plans.get(order.name) or JobPlan()

    def _report(self, node: str, order: Order, result: c.OperationResult) -> None:
        command = c.ReportOperation(node, order.job, order.attempt, _STAGES[order.stage], result)
        try:
            self._simulation.settle(command, c.Actor(c.ActorRole.AGENT, node))
        except Problem:
            # The order ended with an earlier report of the same moment, as it can for a real agent.
            del self._begun[_key(order)]


def _key(order: Order) -> tuple[int, int, str]:
    return order.job, order.attempt, order.stage
