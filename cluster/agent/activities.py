"""What an agent is doing: at most one activity for a job, each a task, each ending in a report or in nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import cast

import msgspec

from cluster.agent.accounts import Mode
from cluster.agent.home import Home
from cluster.agent.leftovers import SWEEP, jobs_with_leftovers
from cluster.agent.limits import PROVIDED_WORKERS_MAX, WORKERS_MAX
from cluster.agent.operations import Operation
from cluster.agent.outbox import Outbox
from cluster.agent.progress import Rate
from cluster.agent.provided_step import ProvidedStep
from cluster.agent.reconcile import RUN, Cancel, End, Forget, Known, Start, Suspend, plan
from cluster.agent.removal import RemovalFailed
from cluster.agent.room import GivenUp
from cluster.agent.sentences import order_named, result_said
from cluster.agent.step_record import StepRecord, recorded_jobs, remove_record
from cluster.agent.steps import Step
from cluster.agent.work import failure
from cluster.client.requests import PROGRESS_ROWS_MAX, Progress, Report, StageWord
from cluster.clock import Clock
from cluster.providers.interface import NO_LOCAL, Local
from replica.commands import OperationDone, OperationFailed, ScriptEnded, ScriptStarted
from replica.orders import Order

logger = logging.getLogger(__name__)

MOVING = frozenset({"stage_in", "stage_out"})


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the configuration says about one agent."""

    node: str
    accounts: Mode
    copy_rate_bytes_s: int = 0
    kill_wait_s: float = 30.0
    local: Local = NO_LOCAL
    """Where this machine has the programs of the site's provider."""


class Activity:
    """One order being carried out; `task` is None for one that an earlier agent finished."""

    def __init__(self, order: Order, work: Operation | Step | ProvidedStep | None) -> None:
        """Begin with an order and what carries it out."""
        self.order = order
        self.work = work
        self.task: asyncio.Task[None] | None = None
        self.finished = work is None
        self.unwanted = asyncio.Event()
        """Set when nobody asks for the result any more, or when this agent is to let go of it."""
        self.rate = Rate()
        self.suspended: bool | None = None
        """Whether the script was told to stand still; None: this agent has told it neither, another one may have."""

    @property
    def known(self) -> Known:
        """The activity as the comparison with the orders sees it."""
        return Known(self.order.attempt, self.order.stage, self.finished, self.suspended)

    def suspend(self, suspended: bool) -> None:
        """Have the script stand still, or go on."""
        self.suspended = suspended
        if isinstance(self.work, Step | ProvidedStep):
            self.work.suspend(suspended)


class Activities:
    """All of them."""

    def __init__(self, home: Home, outbox: Outbox, settings: Settings, clock: Clock) -> None:
        """Begin with none."""
        self._home = home
        self._outbox = outbox
        self._settings = settings
        self._clock = clock
        self._by_job: dict[int, Activity] = {}
        self._orders: tuple[Order, ...] | None = None
        self.failed: BaseException | None = None
        """Why the agent has to stop: something that must not happen did."""
        self.started_moving = asyncio.Event()
        """Set when data begins to move, so that a long poll can give way to short ones."""
        self.broken = asyncio.Event()
        self._sweeping: asyncio.Task[None] | None = None
        self._sweep: Operation | None = None
        self._swept: set[int] = set()
        """Jobs whose leftovers this agent has looked at already: once is enough until it starts again."""

    def take_up(self) -> None:
        """Take up what an earlier agent left: scripts that run or have ended, and results that are not acknowledged."""
        for report in self._outbox.reports():
            if not isinstance(report.result, ScriptStarted):
                self._by_job[report.job] = Activity(_order_of(report), None)
        for job in recorded_jobs(self._home.steps):
            record = StepRecord(self._home.steps, job)
            wanted = record.order()
            record.close()
            if wanted is None:
                logger.error("steps/%s has no order.json: it is left alone, and its job can have no script here", job)
            elif job not in self._by_job:
                self._begin(wanted.order)

    def reconcile(self, orders: Iterable[Order] | None = None) -> None:
        """Compare what is going on with the orders that stand (None: those of last time) and do what follows."""
        if orders is not None:
            self._orders = tuple(orders)
        if self._orders is None:
            return
        workers = sum(
            1 for activity in self._by_job.values() if isinstance(activity.work, Operation) and not activity.finished
        )
        for step in plan(self._orders, {job: activity.known for job, activity in self._by_job.items()}):
            match step:
                case Cancel(job):
                    self._end(self._by_job[job])
                case Suspend(job, suspended):
                    self._by_job[job].suspend(suspended)
                case End(job):
                    self._by_job[job].unwanted.set()
                    self._end(self._by_job[job])
                case Forget(job):
                    del self._by_job[job]
                case Start(order):
                    if order.stage != RUN:
                        if workers >= (WORKERS_MAX if order.provision is None else PROVIDED_WORKERS_MAX):
                            continue
                        workers += 1
                    self._begin(order)
        self._tidy()

    def progress(self) -> tuple[Progress, ...]:
        """Return how far each operation is."""
        now_s = self._clock.monotonic_s()
        rows = []
        for job, activity in sorted(self._by_job.items()):
            if activity.finished or not isinstance(activity.work, Operation):
                continue
            counters = activity.work.counters()
            order = activity.order
            rows.append(
                Progress(
                    job=job,
                    attempt=order.attempt,
                    stage=cast(StageWord, order.stage),
                    rate_bytes_s=activity.rate.sample(counters.bytes_done, now_s),
                    **counters._asdict(),
                )
            )
        return tuple(rows[:PROGRESS_ROWS_MAX])

    @property
    def moving(self) -> bool:
        """Whether data is being moved."""
        return any(activity.order.stage in MOVING and not activity.finished for activity in self._by_job.values())

    def acknowledged(self, report: Report, *, accepted: bool) -> None:
        """Take note that the controller has a report."""
        if accepted and isinstance(report.result, ScriptEnded):
            # The job can only run again in a new life, as another attempt.
            self._remove_record(report.job)

    async def stop(self) -> None:
        """End the workers and let go of the scripts, which run on."""
        tasks = []
        for activity in self._by_job.values():
            if activity.task is None or activity.task.done():
                continue
            if isinstance(activity.work, Operation) or (
                isinstance(activity.work, ProvidedStep) and activity.work.preparing
            ):
                activity.unwanted.set()
                activity.work.end()
            else:
                activity.task.cancel()
            tasks.append(activity.task)
        if self._sweeping is not None and not self._sweeping.done():
            self._sweeping.cancel()
            if self._sweep is not None:
                self._sweep.end()
            tasks.append(self._sweeping)
        await asyncio.gather(*tasks, return_exceptions=True)

    # How

    def _begin(self, order: Order) -> None:
        work: Operation | Step | ProvidedStep
        settings = self._settings
        if order.stage == RUN and order.provision is not None:
            work = ProvidedStep(
                self._home,
                order,
                settings.node,
                settings.accounts,
                settings.kill_wait_s,
                settings.local,
                lambda: self._outbox.add(order.job, order.attempt, RUN, ScriptStarted()),
            )
        elif order.stage == RUN:
            work = Step(
                self._home,
                order,
                settings.node,
                settings.accounts,
                settings.kill_wait_s,
                lambda: self._outbox.add(order.job, order.attempt, RUN, ScriptStarted()),
            )
        else:
            work = Operation(
                self._home,
                order,
                settings.accounts,
                settings.copy_rate_bytes_s,
                settings.local,
                settings.node,
            )
        logger.info("%s begins", order_named(order))
        activity = Activity(order, work)
        self._by_job[order.job] = activity
        activity.task = asyncio.get_running_loop().create_task(
            self._guarded(activity), name=f"{order.stage} {order.job}"
        )
        if order.stage in MOVING:
            self.started_moving.set()

    def _end(self, activity: Activity) -> None:
        if activity.work is not None:
            activity.work.end()

    async def _guarded(self, activity: Activity) -> None:
        try:
            await self._carry_out(activity)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # A result that cannot be kept must not be half known: the agent stops, and its next start takes it up.
            self.failed = error
            self.broken.set()
            return
        self.reconcile()

    async def _carry_out(self, activity: Activity) -> None:
        order, work = activity.order, activity.work
        assert work is not None
        result: OperationDone | OperationFailed | ScriptEnded | None = await work.run()
        if activity.unwanted.is_set() or result is None:
            self._drop(activity)
            return
        if order.stage == "teardown" and isinstance(result, OperationDone):
            try:
                remove_record(self._home.steps, order.job)
            except RemovalFailed as error:
                result = failure(str(error))
        logger.info("%s %s", order_named(order), result_said(order.stage, result))
        kept = result
        try:
            # Until it is durable it is not sent: an agent that forgot what it had said would do it again.
            await self._home.room.keep_trying(
                f"the result of {order_named(order)}",
                lambda: self._outbox.add(order.job, order.attempt, order.stage, kept),
                activity.unwanted,
            )
        except GivenUp:
            self._drop(activity)
            return
        activity.finished = True

    def _drop(self, activity: Activity) -> None:
        """Forget an activity whose result nobody asks for."""
        order = activity.order
        logger.info("%s was ended: it is not wanted any more", order_named(order))
        if isinstance(activity.work, Step | ProvidedStep):
            self._remove_record(order.job)
        if self._by_job.get(order.job) is activity:
            del self._by_job[order.job]

    def _remove_record(self, job: int) -> None:
        try:
            remove_record(self._home.steps, job)
        except RemovalFailed as error:
            logger.error("job %s: %s", job, error)

    def _tidy(self) -> None:
        """Remove the records of scripts that nobody asks for any more."""
        recorded = recorded_jobs(self._home.steps)
        if recorded:
            wanted = {order.job for order in self._orders or ()} | set(self._by_job)
            wanted |= {report.job for report in self._outbox.reports()}
            for job in recorded:
                if job not in wanted:
                    self._remove_record(job)
        if self._sweeping is None or self._sweeping.done():
            left = [job for job in jobs_with_leftovers(self._home.leftovers) if self._is_orphan(job)]
            if left:
                self._sweeping = asyncio.get_running_loop().create_task(self._sweep_all(left), name=SWEEP)

    def _is_orphan(self, job: int) -> bool:
        """Whether what a stage-out left has nobody who will remove it."""
        ordered = any(order.job == job for order in self._orders or ())
        return not ordered and job not in self._by_job and job not in self._swept

    async def _sweep_all(self, jobs: Iterable[int]) -> None:
        settings = self._settings
        for job in jobs:
            if not self._is_orphan(job):
                continue
            self._swept.add(job)
            order = Order(job=job, attempt=0, stage=SWEEP, user="", name="", workdir="")
            self._sweep = Operation(self._home, order, settings.accounts, settings.copy_rate_bytes_s)
            try:
                await self._sweep.run()
            except OSError as error:
                logger.warning("job %s: what a killed stage_out left is not removed: %s", job, error.strerror)


def _order_of(report: Report) -> Order:
    """Return as much of a report's order as tells it from others."""
    return Order(job=report.job, attempt=report.attempt, stage=report.stage, user="", name="", workdir="")
