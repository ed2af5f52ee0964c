"""Background loops over running transfers: rate distribution and checkpoint reports."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine

from forebay.cluster.agent.limits import CHECKPOINT_BYTES, CHECKPOINT_POLL_S, CHECKPOINT_S
from forebay.cluster.agent.operation import WorkerOperation
from forebay.cluster.agent.rate_governor import GOVERN_S, RateGovernor
from forebay.cluster.agent.runtime import ReportOutbox
from forebay.cluster.system import Clock
from forebay.replica.messages import TransferProgressed
from forebay.replica.model import Stage, TransferCheckpoint


class RateLoop:
    """Rates and checkpoints of one agent's transfers."""

    def __init__(self, outbox: ReportOutbox, clock: Clock, moving: Callable[[], Collection[WorkerOperation]]) -> None:
        """Begin; `moving` returns the operations that move data."""
        self.governor = RateGovernor()
        self._outbox = outbox
        self._clock = clock
        self._moving = moving
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reported: dict[tuple[int, int], tuple[float, int]] = {}
        """Time of the last checkpoint report and the durable bytes in it, by job and attempt."""

    def follow(self) -> None:
        """Start the loops that are needed; each stops when nothing moves."""
        if self.governor.governs:
            self._keep("rates", self._govern)
        if self._moving():
            self._keep("checkpoints", self._report)

    async def stop(self) -> None:
        """Stop the loops."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _keep(self, name: str, work: Callable[[], Coroutine[object, object, None]]) -> None:
        task = self._tasks.get(name)
        if task is None or task.done():
            self._tasks[name] = asyncio.get_running_loop().create_task(work(), name=name)

    async def _govern(self) -> None:
        while self.governor.governs:
            await asyncio.sleep(GOVERN_S)
            self.governor.poll(self._clock.monotonic_s())

    async def _report(self) -> None:
        while moving := self._moving():
            self._reported = {
                key: reported for key, reported in self._reported.items() if key in set(map(_key, moving))
            }
            for operation in moving:
                self._report_due(operation)
            await asyncio.sleep(CHECKPOINT_POLL_S)
        self._reported.clear()

    def _report_due(self, operation: WorkerOperation) -> None:
        """Report a checkpoint if one is due. If the disk is full, report it later."""
        order, counters, now_s = operation.order, operation.counters(), self._clock.monotonic_s()
        if order.rules is None:
            return
        reported_s, reported_bytes = self._reported.setdefault(_key(operation), (now_s, counters.durable_bytes))
        moved_bytes = counters.durable_bytes - reported_bytes
        if moved_bytes <= 0 or (now_s - reported_s < CHECKPOINT_S and moved_bytes < CHECKPOINT_BYTES):
            return
        reached = TransferCheckpoint(
            stage=Stage[order.stage.upper()],
            attempt=order.attempt,
            files=counters.durable_files,
            size_bytes=counters.durable_bytes,
            files_total=counters.files_total,
            total_bytes=counters.bytes_total,
        )
        with contextlib.suppress(OSError):
            self._outbox.add(order.job, order.attempt, order.stage, TransferProgressed(reached))
            self._reported[_key(operation)] = now_s, counters.durable_bytes


def _key(operation: WorkerOperation) -> tuple[int, int]:
    return operation.order.job, operation.order.attempt
