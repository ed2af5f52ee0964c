"""The leader's look at the provider's pools: every 30 seconds, as in Slurm; a command only where something changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from cluster.providers.calls import Calls, TooManyCalls
from cluster.providers.interface import Local, OperationError, PoolReport
from cluster.providers.limits import POOL_POLL_S
from cluster.providers.worker import CallRequest
from cluster.system import Clock
from replica.messages import CONTROLLER, ChangePool, Command, Request
from replica.model import Pool, PoolUnit, Provision, provider_facts, provision_of
from replica.state import State

logger = logging.getLogger(__name__)


class PoolWatch:
    """Asks the provider of the cluster for its pools while this replica leads."""

    def __init__(
        self,
        calls: Calls,
        local: Local,
        *,
        state: Callable[[], State],
        leads: Callable[[], bool],
        submit: Callable[[Request], object],
        clock: Clock,
    ) -> None:
        """`submit` queues a command of the leader's own."""
        self._calls = calls
        self._local = local
        self._state = state
        self._leads = leads
        self._submit = submit
        self._clock = clock
        self._next_s = 0.0
        self._asked: Provision | None = None
        self._task: asyncio.Task[None] | None = None
        self._reported: set[str] = set()
        """Pools that this provider has told this leader of: one that it does not tell of any more has nothing left."""
        self._logged = ""

    def poll(self) -> None:
        """Ask if it is time; return at once. Called often."""
        state = self._state()
        provision = provision_of(state)
        if not self._leads() or provision is None:
            self.stop()
            return
        if self._task is not None and not self._task.done():
            return
        now_s = self._clock.monotonic_s()
        if provision != self._asked:
            # Another provider, or other programs: what was reported means nothing any more.
            self._asked, self._next_s = provision, 0.0
            self._reported.clear()
        if now_s < self._next_s:
            return
        self._next_s = now_s + POOL_POLL_S
        self._task = asyncio.get_running_loop().create_task(self._ask(provision), name="pools")

    def stop(self) -> None:
        """Give up what is under way: somebody else leads, or the replica stops."""
        if self._task is not None:
            self._task.cancel()
        self._task, self._asked = None, None
        self._reported.clear()

    async def _ask(self, provision: Provision) -> None:
        try:
            request = CallRequest(operation="pools", provision=provision, local=self._local)
            answer = await self._calls.ask(request, provision.other_timeout_s)
        except (OperationError, TooManyCalls) as error:
            message = f"the pools of the provider {provision.provider} are not known: {error}"
            if message != self._logged:
                logger.warning("%s", message)
            self._logged = message
            return
        self._logged = ""
        if not self._leads() or answer.pools is None:
            return
        state = self._state()
        for command in changes(state, answer.pools, frozenset(self._reported)):
            try:
                self._submit(Request(b"", CONTROLLER, command))
            except Exception as error:  # a full queue or a lost lead: asked again in 30 s
                logger.info("a pool is not changed: %s", error)
                return
        self._reported.update(pool.name for pool in answer.pools)


def changes(state: State, reports: tuple[PoolReport, ...], before: frozenset[str]) -> Iterator[Command]:
    """Give the commands that make the cluster's pools those that the provider reports: none where they are so already.

    `before`: names that were reported earlier. A pool that is missing now is given the quantity 0: nothing is taken
    from who holds a part of it, and nobody gets more.
    """
    site = state.site
    first_is_default = provider_facts(site.provider).first_pool_is_default and not (
        site.default_pool or any(pool.is_default for pool in state.pools.values())
    )
    for number, report in enumerate(reports):
        total = report.quantity * report.granularity
        unit = PoolUnit.BYTES if report.is_bytes else PoolUnit.COUNT
        known: Pool | None = state.pools.get(report.name)
        default = report.name == site.default_pool or (first_is_default and number == 0)
        if known is None:
            yield ChangePool(
                report.name,
                exists=False,
                quantity=total,
                granularity=report.granularity,
                unit=unit,
                is_default=default or None,
            )
        elif (known.quantity_bytes, known.granularity_bytes) != (total, report.granularity):
            yield ChangePool(report.name, quantity=total, granularity=report.granularity)
    for name in sorted(before - {report.name for report in reports}):
        known = state.pools.get(name)
        if known is not None and known.quantity_bytes:
            yield ChangePool(name, quantity=0)
