"""Loops over what is moved: rates shared out several times a second, and reports of what is durable."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine

from cluster.agent.home import Outbox
from cluster.agent.limits import CHECKPOINT_BYTES, CHECKPOINT_POLL_S, CHECKPOINT_S
from cluster.agent.operation import Operation
from cluster.agent.rate_governor import GOVERN_S, RateGovernor
from cluster.system import Clock
from replica.messages import OperationReached
from replica.model import Stage, TransferCheckpoint


class RateLoop:
    """Rates and checkpoints of what one agent moves."""

    def __init__(self, outbox: Outbox, clock: Clock, moving: Callable[[], Collection[Operation]]) -> None:
        """Begin; `moving` returns the operations that move data at the moment."""
        self.governor = RateGovernor()
        self._outbox = outbox
        self._clock = clock
        self._moving = moving
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reported: dict[tuple[int, int], tuple[float, int]] = {}
        """By job and attempt: when the controller was told last, and how many bytes were durable then."""

    def follow(self) -> None:
        """See that what is moving is followed from now on, for as long as anything is."""
        if self.governor.governs:
            self._keep("rates", self._govern)
        if self._moving():
            self._keep("checkpoints", self._report)

    async def stop(self) -> None:
        """Follow nothing any more."""
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

    def _report_due(self, operation: Operation) -> None:
        """Report a checkpoint if one is due. Soft: what the disk does not take is said later."""
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
            self._outbox.add(order.job, order.attempt, order.stage, OperationReached(reached))
            self._reported[_key(operation)] = now_s, counters.durable_bytes


def _key(operation: Operation) -> tuple[int, int]:
    return operation.order.job, operation.order.attempt
