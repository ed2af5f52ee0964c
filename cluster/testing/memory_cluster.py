"""Cluster in memory for tests of programs that use the Python API."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from forebay.cluster.client import Client as ClusterClient
from forebay.cluster.sdk import AsyncClient, Client
from forebay.cluster.security import Identity, Role
from forebay.cluster.system import format_instant
from forebay.cluster.testing.agents import FailingStage, JobPlan
from forebay.cluster.testing.exchange import ADDRESS, MemoryExchange
from forebay.cluster.testing.simulation import Simulation
from forebay.replica.model import Site

POOLS: Final[Mapping[str, str]] = {"fast": "100GiB"}
"""Default pools and their sizes; the first one is the default pool."""

IDLE_STEP_S: Final = 3_600.0
IDLE_S_MAX: Final = 366 * 86_400.0
"""Step and longest simulated time of `run_until_idle`, seconds."""


class MemoryCluster:
    """Cluster in memory. Its decisions are those of a real one; its agents only report what the test planned.

    Time stands still until `advance` is called, or a client waits.
    """

    def __init__(self, pools: Mapping[str, str], granularity: str, nodes: int, cpus: int, site: Site) -> None:
        """Found it; tests use `cluster`."""
        self._simulation = Simulation(dict(pools), granularity, nodes, cpus, site)

    def client(self, user: str = "alice", *, operator: bool = False) -> Client:
        """Return a client of this user. Its waits move the clock."""
        return Client(AsyncClient(self._client(user, operator, on_a_loop=False), self._simulation.clock))

    def async_client(self, user: str = "alice", *, operator: bool = False) -> AsyncClient:
        """Return an asynchronous client of this user. Its waits move the clock, and let other tasks run."""
        return AsyncClient(self._client(user, operator, on_a_loop=True), self._simulation.clock)

    def plan(
        self,
        name: str,
        *,
        stage_in_s: float = 1.0,
        run_s: float = 10.0,
        stage_out_s: float = 1.0,
        exit_code: int = 0,
        signal: int = 0,
        fail: FailingStage | None = None,
        message: str = "the test planned this failure",
    ) -> None:
        """Plan what happens to the jobs of this name from now on. Times are simulated seconds.

        Args:
            name: Name of the jobs.
            stage_in_s: Duration of their stage-in.
            run_s: Duration of their scripts; one beyond the time limit ends as TIMEOUT.
            stage_out_s: Duration of their stage-out.
            exit_code: Exit code of their scripts.
            signal: Signal that ends their scripts; 0: none.
            fail: Stage that fails for good: `stage_in`, `stage_out` or `teardown`.
            message: Message of that failure.
        """
        plan = JobPlan(
            stage_in_s=stage_in_s,
            run_s=run_s,
            stage_out_s=stage_out_s,
            exit_code=exit_code,
            signal=signal,
            fail=fail,
            message=message,
        )
        self._simulation.plan(name, plan)

    def advance(self, duration_s: float) -> None:
        """Move the clock by so many seconds, and let everything happen that is due until then."""
        if duration_s < 0:
            raise ValueError(f"the clock cannot go back by {-duration_s:g} s")
        self._simulation.advance(duration_s)

    def run_until_idle(self) -> None:
        """Move the clock until no job is staging or running. Jobs that wait for a release keep waiting."""
        passed_s = 0.0
        while self._simulation.agents.next_due() is not None:
            if passed_s > IDLE_S_MAX:
                raise RuntimeError("jobs have not ended within a simulated year")
            due = self._simulation.agents.next_due()
            assert due is not None
            step_s = min(IDLE_STEP_S, max(0.001, (due - self._simulation.clock.at) / 1_000_000))
            self._simulation.advance(step_s)
            passed_s += step_s

    @property
    def now(self) -> str:
        """Simulated time, ISO 8601 in UTC."""
        return format_instant(self._simulation.clock.now()) or ""

    @property
    def revision(self) -> int:
        """Revision of the state."""
        return self._simulation.state.revision

    def _client(self, user: str, operator: bool, *, on_a_loop: bool) -> ClusterClient:
        identity = Identity(Role.OPERATOR if operator else Role.USER, user)

        async def sleep(duration_s: float) -> None:
            self._simulation.advance(duration_s)
            if on_a_loop:
                await asyncio.sleep(0)

        exchange = MemoryExchange(self._simulation, identity)
        return ClusterClient([ADDRESS], None, clock=self._simulation.clock, exchange=exchange, sleep=sleep)


@contextmanager
def cluster(
    pools: Mapping[str, str] = POOLS, *, granularity: str = "1MiB", nodes: int = 2, cpus: int = 8
) -> Iterator[MemoryCluster]:
    """Yield a cluster in memory.

    Args:
        pools: Name and size of each pool, for example `{"fast": "1TiB", "wide": "4TiB"}`; the first is the default.
        granularity: Granularity of the pools.
        nodes: Compute nodes, `n1` and so on.
        cpus: CPUs of each node.
    """
    site = Site(sources=("/",), destinations=("/",), flags=("EnablePersistent",))
    yield MemoryCluster(pools, granularity, nodes, cpus, site)
