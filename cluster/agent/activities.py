"""Activities of an agent: at most one per job, each a task that ends with a report or is dropped."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from functools import partial
from typing import cast

from forebay.cluster.agent.capacity_watch import CapacityWatch
from forebay.cluster.agent.files import RemovalFailed
from forebay.cluster.agent.limits import (
    GATHER_FROM,
    HUNG_MAX,
    ORPHAN_S,
    PROVIDER_WORKERS_MAX,
    WORKERS_MAX,
)
from forebay.cluster.agent.messages import failure, order_label, result_message
from forebay.cluster.agent.operation import MOVING, AgentSettings, WorkerOperation
from forebay.cluster.agent.rate_loop import RateLoop
from forebay.cluster.agent.reconcile import (
    RUN,
    CancelScript,
    EndActivity,
    ForgetActivity,
    KnownActivity,
    StartActivity,
    SuspendScript,
    plan,
)
from forebay.cluster.agent.runtime import ReportOutbox, RetryAbandoned, StateDirectory
from forebay.cluster.agent.script_run import ProviderScriptRun, ScriptRun
from forebay.cluster.agent.scripts import ScriptRecord, recorded_jobs, remove_record
from forebay.cluster.agent.transfer import PHASES, Rate, workspace
from forebay.cluster.agent.worker import SWEEP, jobs_with_orphans
from forebay.cluster.schemas import PROGRESS_ROWS_MAX, OperationProgress, OperationReport, StageWord
from forebay.cluster.system import Clock, about
from forebay.replica.messages import (
    OperationDone,
    OperationFailed,
    PersistentChanged,
    ScriptEnded,
    ScriptStarted,
    TransferProgressed,
)
from forebay.replica.model import Order

logger = logging.getLogger(__name__)


class Activity:
    """Order being carried out; `task` is None if an earlier agent finished it."""

    def __init__(self, order: Order, work: WorkerOperation | ScriptRun | None) -> None:
        """Pair an order with the object that carries it out."""
        self.order = order
        self.work = work
        self.task: asyncio.Task[None] | None = None
        self.finished = work is None
        self.unwanted = asyncio.Event()
        """Set when the result is no longer needed, or when this agent is to abandon the activity."""
        self.rate = Rate()
        self.waits = 0
        """Rate-limit waits at the time of the last progress report."""
        self.suspended: bool | None = None
        """Last suspend state sent to the script; None if this agent has sent none."""

    @property
    def comparison_state(self) -> KnownActivity:
        """State of the activity for comparison with the orders."""
        return KnownActivity(self.order.attempt, self.order.stage, self.finished, self.suspended)

    def matches(self, order: Order) -> bool:
        """Return whether the activity carries out this order and has not finished."""
        mine = self.order
        return not self.finished and (mine.attempt, mine.stage) == (order.attempt, order.stage)

    def suspend(self, suspended: bool) -> None:
        """Suspend or resume the script."""
        self.suspended = suspended
        if isinstance(self.work, ScriptRun):
            self.work.suspend(suspended)


class Activities:
    """Activities of one agent, by job."""

    def __init__(self, home: StateDirectory, outbox: ReportOutbox, settings: AgentSettings, clock: Clock) -> None:
        """Begin without activities."""
        self._home = home
        self._outbox = outbox
        self._settings = settings
        self._clock = clock
        self._by_job: dict[int, Activity] = {}
        self._orders: tuple[Order, ...] | None = None
        self.failed: BaseException | None = None
        """Error that must stop the agent."""
        self.started_moving = asyncio.Event()
        """Set when a transfer begins, so that the long poll is replaced by short ones."""
        self.broken = asyncio.Event()
        self._stand_until_s: float | None = None
        """Time until which the orders are confirmed, on the monotonic clock."""
        self._rate_loop = RateLoop(outbox, clock, self._moving)
        self._watch = CapacityWatch(home, self._running)
        self._orphans: dict[int, float] = {}
        """Jobs without an order, and the time since when."""
        self._sweeping: asyncio.Task[None] | None = None
        self._sweep: WorkerOperation | None = None
        self._hung_logged = False
        self._swept: set[int] = set()
        """Jobs whose leftovers this agent has already examined, once per start."""

    def take_up(self) -> None:
        """Resume the state of an earlier agent: scripts that run or have ended, and unacknowledged results."""
        for report in self._outbox.reports():
            if not isinstance(report.result, ScriptStarted | TransferProgressed | PersistentChanged):
                self._by_job[report.job] = Activity(_order_of(report), None)
        for job in recorded_jobs(self._home.steps):
            record = ScriptRecord(self._home.steps, job)
            wanted = record.order()
            record.close()
            if wanted is None:
                logger.error(
                    "steps/%s has no order.json: its job cannot run a script here until the directory is removed",
                    job,
                    extra=about(job=job),
                )
            elif job not in self._by_job:
                self._begin(wanted.order)

    def confirm_orders(self, asked_s: float) -> None:
        """Confirm that the last orders were current when requested, at this monotonic time."""
        self._stand_until_s = asked_s + self._settings.order_age_s_max
        for order in self._orders or ():
            activity = self._by_job.get(order.job)
            if activity is not None and activity.matches(order) and isinstance(activity.work, WorkerOperation):
                activity.work.stands_until(self._stand_until_s)

    def reconcile(self, orders: Iterable[Order] | None = None) -> None:
        """Compare the activities with the orders (None: the previous ones) and take the resulting steps."""
        if orders is not None:
            self._orders = tuple(orders)
        if self._orders is None:
            return
        workers = sum(
            1
            for activity in self._by_job.values()
            if isinstance(activity.work, WorkerOperation) and not activity.finished
        )
        for step in plan(self._orders, {job: activity.comparison_state for job, activity in self._by_job.items()}):
            match step:
                case CancelScript(job):
                    self._end(self._by_job[job])
                case SuspendScript(job, suspended):
                    self._by_job[job].suspend(suspended)
                case EndActivity(job):
                    self._by_job[job].unwanted.set()
                    self._end(self._by_job[job])
                case ForgetActivity(job):
                    del self._by_job[job]
                case StartActivity(order):
                    if order.stage in MOVING and len(self._home.hung) >= HUNG_MAX:
                        self._log_hung()
                        continue
                    if order.stage != RUN:
                        if workers >= (WORKERS_MAX if order.provision is None else PROVIDER_WORKERS_MAX):
                            continue
                        workers += 1
                    self._begin(order)
        for order in self._orders:
            activity = self._by_job.get(order.job)
            if activity is not None and activity.matches(order) and isinstance(activity.work, WorkerOperation):
                activity.work.change(order)
        self._rate_loop.follow()
        self._watch.follow()
        self._tidy()

    def progress(self) -> tuple[OperationProgress, ...]:
        """Return the progress of each operation."""
        now_s = self._clock.monotonic_s()
        rows = []
        for job, activity in sorted(self._by_job.items()):
            if activity.finished or not isinstance(activity.work, WorkerOperation):
                continue
            counters = activity.work.counters()
            order, waits = activity.order, activity.work.waits
            held, activity.waits = waits != activity.waits, waits
            rows.append(
                OperationProgress(
                    job=job,
                    attempt=order.attempt,
                    stage=cast(StageWord, order.stage),
                    files_done=counters.files_done,
                    files_total=counters.files_total,
                    bytes_done=counters.bytes_done,
                    bytes_total=counters.bytes_total,
                    rate_bytes_s=activity.rate.sample(counters.bytes_done, now_s),
                    directories_done=counters.directories_done,
                    retries=counters.retries,
                    resumed_files=counters.resumed_files,
                    resumed_bytes=counters.resumed_bytes,
                    phase=PHASES[counters.phase] if 0 <= counters.phase < len(PHASES) else "",
                    file=activity.work.file,
                    waiting=held,
                )
            )
        return tuple(rows[:PROGRESS_ROWS_MAX])

    @property
    def are_many(self) -> bool:
        """True if many activities run, so that more results or orders are imminent."""
        return sum(not activity.finished for activity in self._by_job.values()) >= GATHER_FROM

    @property
    def moving(self) -> bool:
        """True while data is being moved."""
        return bool(self._moving())

    def note_acknowledged(self, report: OperationReport, *, accepted: bool) -> None:
        """Record that the controller has received a report."""
        if accepted and isinstance(report.result, ScriptEnded):
            # The job can run again only as a new attempt. Teardown makes the removal durable.
            self._remove_record(report.job, lasting=False)

    async def stop(self) -> None:
        """Stop the workers and detach from the scripts, which keep running."""
        tasks = []
        for activity in self._by_job.values():
            if activity.task is None or activity.task.done():
                continue
            if isinstance(activity.work, WorkerOperation):
                activity.unwanted.set()
                # The next agent resumes partial transfers.
                activity.work.end(resuming=True)
            elif isinstance(activity.work, ProviderScriptRun) and activity.work.preparing:
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
        await self._rate_loop.stop()
        await self._watch.stop()
        await self._home.buffer_syncs.let_go()
        await self._home.hung.let_go()

    def _begin(self, order: Order) -> None:
        work: WorkerOperation | ScriptRun
        if order.stage == RUN:
            run = ScriptRun if order.provision is None else ProviderScriptRun
            started = partial(self._outbox.add, order.job, order.attempt, RUN, ScriptStarted(), lasting=False)
            work = run(self._home, order, self._settings, started)
        else:
            changed = partial(self._outbox.add, order.job, order.attempt, order.stage)
            work = WorkerOperation(self._home, order, self._settings, self._rate_loop.governor, changed)
            if self._stand_until_s is not None:
                work.stands_until(self._stand_until_s)
        logger.info("%s begins", order_label(order), extra=about(job=order.job))
        activity = Activity(order, work)
        self._by_job[order.job] = activity
        activity.task = asyncio.get_running_loop().create_task(
            self._carry_out_guarded(activity), name=f"{order.stage} {order.job}"
        )
        if order.stage in MOVING:
            self.started_moving.set()

    def _end(self, activity: Activity) -> None:
        if activity.work is not None:
            activity.work.end()

    async def _carry_out_guarded(self, activity: Activity) -> None:
        try:
            await self._carry_out(activity)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # An undurable result must not be partly visible: the agent stops, and its next start takes up the activity.
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
        logger.info("%s %s", order_label(order), result_message(order.stage, result), extra=about(job=order.job))
        kept = result
        try:
            # Send the result only when it is durable: an agent that lost it would repeat the operation.
            await self._home.disk_full.keep_trying(
                f"the result of {order_label(order)}",
                lambda: self._outbox.add(
                    order.job, order.attempt, order.stage, kept, lasting=not _is_found_again(order, kept)
                ),
                activity.unwanted,
            )
        except RetryAbandoned:
            self._drop(activity)
            return
        activity.finished = True
        if order.stage == "stage_in" and isinstance(result, OperationDone):
            self._watch.note_staged_files(order.job, result.files)
        elif order.stage == "teardown":
            self._watch.forget(order.job)
            self._home.buffer_syncs.forget(order.job)
        if order.stage in MOVING and isinstance(result, OperationDone):
            self._forget_records(order.job, (order.stage,))

    def _moving(self) -> list[WorkerOperation]:
        """Return the operations that move data."""
        return [
            activity.work
            for activity in self._by_job.values()
            if activity.order.stage in MOVING and not activity.finished and isinstance(activity.work, WorkerOperation)
        ]

    def _running(self) -> dict[int, ScriptRun]:
        """Return the scripts that run or are about to."""
        return {
            job: activity.work
            for job, activity in self._by_job.items()
            if not activity.finished and isinstance(activity.work, ScriptRun)
        }

    def _log_hung(self) -> None:
        if not self._hung_logged:
            self._hung_logged = True
            logger.error(
                "%s processes hang in the kernel: this node moves no data until the filesystem they wait for responds",
                len(self._home.hung),
            )

    def _forget_records(self, job: int, stages: tuple[str, ...] = workspace.STAGES) -> None:
        """Remove resume records of a job's transfers, which are complete or cancelled."""
        try:
            workspace.forget(self._home.descriptor, job, stages)
        except OSError as error:
            logger.error("job %s: transfer records cannot be removed: %s", job, error.strerror, extra=about(job=job))

    def _drop(self, activity: Activity) -> None:
        """Drop an activity whose result is not needed."""
        order = activity.order
        logger.info("%s ended: it is no longer ordered", order_label(order), extra=about(job=order.job))
        if isinstance(activity.work, ScriptRun):
            self._remove_record(order.job)
        if self._by_job.get(order.job) is activity:
            del self._by_job[order.job]

    def _remove_record(self, job: int, *, lasting: bool = True) -> None:
        try:
            remove_record(self._home.steps, job, lasting=lasting)
        except RemovalFailed as error:
            logger.error("job %s: %s", job, error, extra=about(job=job))

    def _tidy(self) -> None:
        """Remove records of scripts that no order refers to."""
        recorded = recorded_jobs(self._home.steps)
        if recorded:
            wanted = {order.job for order in self._orders or ()} | set(self._by_job)
            wanted |= {report.job for report in self._outbox.reports()}
            for job in recorded:
                if job not in wanted:
                    self._remove_record(job)
        if self._sweeping is None or self._sweeping.done():
            left = [job for job in jobs_with_orphans(self._home.leftovers) if self._is_orphan(job)]
            if left:
                self._sweeping = asyncio.get_running_loop().create_task(self._sweep_all(left), name=SWEEP)

    def _is_orphan(self, job: int) -> bool:
        """Return whether leftovers of a transfer will be neither resumed nor removed by an order.

        A job that is held, or waits for its next attempt, has no order, but its buffer exists until teardown. ORPHAN_S
        is long compared with a retry and short compared with a hold.
        """
        if any(order.job == job for order in self._orders or ()) or job in self._by_job:
            self._orphans.pop(job, None)
            return False
        if job in self._swept:
            return False
        since_s = self._orphans.setdefault(job, self._clock.monotonic_s())
        try:
            os.stat(str(job), dir_fd=self._home.buffers, follow_symlinks=False)
        except FileNotFoundError:
            return True
        return self._clock.monotonic_s() - since_s >= ORPHAN_S

    async def _sweep_all(self, jobs: Iterable[int]) -> None:
        for job in jobs:
            if not self._is_orphan(job):
                continue
            self._swept.add(job)
            order = Order(job=job, attempt=0, stage=SWEEP, user="", name="", workdir="")
            self._sweep = WorkerOperation(self._home, order, self._settings)
            try:
                await self._sweep.run()
            except OSError as error:
                logger.warning(
                    "job %s: leftovers of a transfer cannot be removed: %s", job, error.strerror, extra=about(job=job)
                )
            self._forget_records(job)


def _is_found_again(order: Order, result: OperationDone | OperationFailed | ScriptEnded) -> bool:
    """Return whether a result lost in a power failure can be recovered or repeated without harm.

    The end of a script is in its durable record. Post-run leaves only a synced buffer, but a provider's post-run
    operation may run only once.
    """
    return isinstance(result, ScriptEnded) or (order.stage == "post_run" and order.provision is None)


def _order_of(report: OperationReport) -> Order:
    """Return the part of a report's order that identifies it."""
    return Order(job=report.job, attempt=report.attempt, stage=report.stage, user="", name="", workdir="")
