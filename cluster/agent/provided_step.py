"""A run where a site's provider has a part in it: pre_run, then the script with the variables that `paths` gave."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cluster.agent.files import FileRefused
from cluster.agent.home import Home
from cluster.agent.operation import Operation
from cluster.agent.processes import Mode
from cluster.agent.scripts import Step, StepRecord, recorded_jobs
from cluster.agent.worker import PRE_RUN, paths_of
from cluster.providers.interface import Local
from replica.messages import OperationFailed, ScriptEnded
from replica.model import JobState, Order


class ProvidedStep:
    """One run of one job: an operation, then a script."""

    def __init__(
        self,
        home: Home,
        order: Order,
        node: str,
        accounts: Mode,
        kill_wait_s: float,
        local: Local,
        on_started: Callable[[], None],
    ) -> None:
        """Prepare; `on_started` is called once when the script is known to run and that has not been reported yet."""
        self._home = home
        self._order = order
        self._node = node
        self._accounts: Mode = accounts
        self._kill_wait_s = kill_wait_s
        self._on_started = on_started
        before = msgspec.structs.replace(order, stage=PRE_RUN)
        self._operation: Operation | None = Operation(home, before, accounts, 0, local, node)
        self._step: Step | None = None
        self._ended = False
        self._suspended: bool | None = None

    @property
    def preparing(self) -> bool:
        """Whether the script has not been handed over yet, so that ending this leaves nothing."""
        return self._step is None

    def end(self) -> None:
        """Have it ended, whichever part it is in. `run` then returns how."""
        self._ended = True
        if self._step is not None:
            self._step.end()
        elif self._operation is not None:
            self._operation.end()

    def suspend(self, suspended: bool) -> None:
        """Have the script stand still, or go on."""
        self._suspended = suspended
        if self._step is not None:
            self._step.suspend(suspended)

    async def run(self) -> ScriptEnded | OperationFailed:
        """See the run through and return how it ended. Cancelling this leaves a script running."""
        order = self._order
        if not (order.started or self._ended or order.cancel or self._is_recorded()):
            assert self._operation is not None
            outcome = await self._operation.run()
            if outcome is None:
                return ScriptEnded(JobState.CANCELLED)
            if isinstance(outcome, OperationFailed):
                return outcome if outcome.operation else msgspec.structs.replace(outcome, operation=PRE_RUN)
        self._operation = None
        try:
            variables = paths_of(self._home.calls, order.job)
        except (FileRefused, msgspec.DecodeError) as error:
            return OperationFailed(f"what paths gave the job cannot be read: {error}", True, "paths")
        self._step = Step(self._home, order, self._node, self._accounts, self._kill_wait_s, self._on_started, variables)
        if self._ended:
            self._step.end()
        if self._suspended is not None:
            self._step.suspend(self._suspended)
        return await self._step.run()

    def _is_recorded(self) -> bool:
        """Whether the script of this order was handed over already: then pre_run is over."""
        if self._order.job not in recorded_jobs(self._home.steps):
            return False
        record = StepRecord(self._home.steps, self._order.job)
        try:
            wanted = record.order()
        except FileRefused:
            # The step says what is wrong with it.
            return True
        finally:
            record.close()
        return wanted is not None and wanted.order.attempt >= self._order.attempt
