"""Restart of operations by a new leader, as Slurm's controller does, if the site has restart-policy slurm.

With the other policy, operations continue. See SEMANTICS.md, "When the controller dies".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from forebay.cluster.server.pending import Answer, CannotDecide, NotLeading, OutcomeUnknown, QueueFull
from forebay.cluster.system.eventloop import failure_logged
from forebay.replica.messages import CONTROLLER, Request, RestartOperations
from forebay.replica.model import HOLDING, BufferState
from forebay.replica.state import State
from forebay.replica.values import RESTARTED_MAX

LOGGER = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause before retrying a portion that did not fit into the queue, seconds."""

_NOTHING_UNDER_WAY = frozenset({BufferState.RUNNING, BufferState.SUSPENDED, BufferState.TEARDOWN_FAIL})


def jobs_under_way(state: State) -> list[int]:
    """Return the IDs of jobs with an operation under way, ascending."""
    return sorted(
        job_id
        for job_id, buffer in state.buffers.items()
        if buffer.state in HOLDING and buffer.state not in _NOTHING_UNDER_WAY
    )


class OperationRestart:
    """Restarts operations once in each term that this replica leads."""

    def __init__(
        self,
        *,
        state: Callable[[], State],
        leads: Callable[[], bool],
        term: Callable[[], int],
        submit: Callable[[Request], Answer],
    ) -> None:
        """Initialize. `submit` is `Controller.submit`; `term` returns the term that this replica leads, or 0."""
        self._state = state
        self._leads = leads
        self._term_led = term
        self._submit = submit
        self._task: asyncio.Task[None] | None = None
        self._term = 0

    def poll(self) -> None:
        """Restart the operations under way, once in each term."""
        term = self._term_led()
        if term == self._term or not self._leads():
            return
        self._term = term
        self.stop()
        state = self._state()
        if state.site.restart_policy == "slurm":
            self._task = asyncio.create_task(self._restart(jobs_under_way(state)))
            self._task.add_done_callback(failure_logged(LOGGER, "operations could not be started again"))

    def stop(self) -> None:
        """Abandon pending work."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _restart(self, jobs: list[int]) -> None:
        LOGGER.info("starting the operations of %d jobs again (restart-policy slurm)", len(jobs))
        while jobs and self._leads():
            portion, rest = jobs[:RESTARTED_MAX], jobs[RESTARTED_MAX:]
            with suppress(QueueFull):
                try:
                    await self._submit(Request(b"", CONTROLLER, RestartOperations(tuple(portion))))
                except (NotLeading, OutcomeUnknown, CannotDecide):
                    return
                jobs = rest
                continue
            await asyncio.sleep(RETRY_S)
