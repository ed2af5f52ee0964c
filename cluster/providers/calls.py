"""Provider calls from a replica, in worker processes, with limited concurrency.

A worker handles one request at a time and is reused, so that a request takes about ten milliseconds instead of the
start of an interpreter. After any error, the worker is ended and its request fails.

The leader requests the pools every 30 seconds, as Slurm does, and issues a command only for changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from forebay.cluster.providers.interface import Local, OperationError, PoolReport
from forebay.cluster.providers.limits import (
    ANSWER_BYTES_MAX,
    CALLS_IDLE_MAX,
    CALLS_MAX,
    CALLS_WAITING_MAX,
    POOL_POLL_S,
    REQUEST_BYTES_MAX,
)
from forebay.cluster.providers.worker import LENGTH_BYTES, CallAnswer, CallRequest
from forebay.cluster.system import TREE, VARIABLES, Clock
from forebay.replica.messages import CONTROLLER, ChangePool, Command, Request
from forebay.replica.model import Pool, PoolUnit, Provision, format_amount, pool_unit, provider_facts, provision_of
from forebay.replica.state import State

logger = logging.getLogger(__name__)

WORKER_SLACK_S: Final = 10.0
"""Seconds that a worker may take in addition to its call: to start, and to kill a call that hangs."""

WORKER_GRACE_S: Final = 5.0
"""Seconds between SIGTERM and SIGKILL of a worker, which meanwhile ends its call and removes a directory."""

_PASSED_ON: Final = ("PATH", "LANG", "LC_ALL", "TMPDIR", "PYTHONHASHSEED", *VARIABLES)


class TooManyCalls(Exception):
    """The queue of waiting requests is full; the request was not sent."""


class ProviderCalls:
    """Worker processes of one replica."""

    def __init__(self) -> None:
        """Begin without workers."""
        self._turn = asyncio.Semaphore(CALLS_MAX)
        self._waiting = 0
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()
        self._closed = False

    async def ask(self, request: CallRequest, timeout_s: float) -> CallAnswer:
        """Return the provider's answer. `timeout_s` limits the call itself and is enforced by the worker.

        Raises:
            OperationError: The call failed.
            TooManyCalls: The queue is full.
        """
        data = msgspec.json.encode(request)
        if len(data) > REQUEST_BYTES_MAX:
            raise OperationError(
                request.operation, f"the job's script and options have more than {REQUEST_BYTES_MAX} bytes"
            )
        if self._waiting >= CALLS_WAITING_MAX or self._closed:
            raise TooManyCalls
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        try:
            answer = await self._call_worker(request, data, timeout_s + WORKER_SLACK_S)
        finally:
            self._turn.release()
        if answer.failed:
            raise OperationError(answer.operation, answer.failed)
        return answer

    async def _call_worker(self, request: CallRequest, data: bytes, timeout_s: float) -> CallAnswer:
        worker: asyncio.subprocess.Process | None = None
        fine = False
        try:
            async with asyncio.timeout(timeout_s):
                worker = self._idle.pop() if self._idle else await self._start()
                assert worker.stdin is not None and worker.stdout is not None
                worker.stdin.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)
                await worker.stdin.drain()
                length = int.from_bytes(await worker.stdout.readexactly(LENGTH_BYTES), "big")
                if length > ANSWER_BYTES_MAX:
                    raise ValueError(f"an answer of {length} bytes")
                answer = msgspec.json.decode(await worker.stdout.readexactly(length), type=CallAnswer)
            fine = True
            return answer
        except TimeoutError:
            raise OperationError(request.operation, "the worker did not answer in time") from None
        except (OSError, EOFError, ValueError, msgspec.DecodeError) as error:
            raise OperationError(request.operation, f"the worker failed: {error}") from error
        finally:
            if worker is not None:
                if fine and len(self._idle) < CALLS_IDLE_MAX and not self._closed:
                    self._idle.append(worker)
                else:
                    # Shield the end of the worker from a cancellation of the caller.
                    await asyncio.shield(self._end(worker))

    async def _start(self) -> asyncio.subprocess.Process:
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | {"PYTHONPATH": str(TREE)}
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "forebay.cluster.providers.worker",
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            cwd="/",
            limit=2 * ANSWER_BYTES_MAX,
        )
        self._all.add(worker)
        return worker

    async def _end(self, worker: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            worker.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(worker.wait(), WORKER_GRACE_S)
        except TimeoutError:
            logger.error("a provider worker did not end; killing it")
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
            await worker.wait()
        self._all.discard(worker)

    async def close(self) -> None:
        """End every worker with its call."""
        self._closed = True
        self._idle.clear()
        await asyncio.gather(*(self._end(worker) for worker in list(self._all)))


class PoolWatch:
    """Requests the cluster's pools from the provider while this replica leads."""

    def __init__(
        self,
        calls: ProviderCalls,
        local: Local,
        *,
        state: Callable[[], State],
        leads: Callable[[], bool],
        submit: Callable[[Request], object],
        clock: Clock,
    ) -> None:
        """Prepare; `submit` queues commands that the leader itself issues."""
        self._calls = calls
        self._local = local
        self._state = state
        self._leads = leads
        self._submit = submit
        self._clock = clock
        self._next_s = 0.0
        self._asked: Provision | None = None
        self._task: asyncio.Task[None] | None = None
        self._logged = ""
        self._foreign: dict[str, int] = {}
        """Usage of each pool by other clients of the provider, as last logged."""

    def poll(self) -> None:
        """Start a request if one is due; return at once. Called frequently."""
        state = self._state()
        provision = provision_of(state)
        if not self._leads() or provision is None:
            self.stop()
            return
        if self._task is not None and not self._task.done():
            return
        now_s = self._clock.monotonic_s()
        if provision != self._asked:
            self._asked, self._next_s = provision, 0.0
        if now_s < self._next_s:
            return
        self._next_s = now_s + POOL_POLL_S
        self._task = asyncio.get_running_loop().create_task(self._ask(provision), name="pools")

    def stop(self) -> None:
        """Abandon the current request, because this replica no longer leads or is stopping."""
        if self._task is not None:
            self._task.cancel()
        self._task, self._asked = None, None

    async def _ask(self, provision: Provision) -> None:
        before = self._state()
        try:
            request = CallRequest(operation="pools", provision=provision, local=self._local)
            answer = await self._calls.ask(request, provision.other_timeout_s)
        except (OperationError, TooManyCalls) as error:
            message = f"the pools of provider {provision.provider} are unavailable: {error}"
            if message != self._logged:
                logger.warning("%s", message)
            self._logged = message
            return
        self._logged = ""
        if not self._leads() or answer.pools is None:
            return
        state = self._state()
        self._log_foreign(before, state, answer.pools)
        for command in changes(state, answer.pools):
            try:
                self._submit(Request(b"", CONTROLLER, command))
            except Exception as error:  # the queue is full, or this replica no longer leads: retry in 30 s
                logger.info("a pool cannot be updated, retrying: %s", error)
                return

    def _log_foreign(self, before: State, after: State, reports: tuple[PoolReport, ...]) -> None:
        """Log changes in the usage of the pools by other clients of the provider."""
        foreign = foreign_bytes(before, after, reports)
        if foreign == self._foreign:
            return
        self._foreign = foreign
        for name, size in sorted(foreign.items()):
            unit, drained = pool_unit(after.pools, name), after.pools[name].out_of_service_bytes
            logger.warning(
                "other clients of the provider use at least %s of pool %s, so setups of jobs may fail; "
                "`forebay pool drain %s %s` withholds that amount from jobs",
                *(format_amount(size, unit), name, name, format_amount(drained + size, unit)),
            )


def foreign_bytes(before: State, after: State, reports: tuple[PoolReport, ...]) -> dict[str, int]:
    """Return the minimum usage of each pool by other clients, derived from the free capacity that the provider reports.

    The state holds the capacity of this cluster's jobs from before setup until after teardown. Used capacity beyond the
    capacity held in both states (before and after the request) and the capacity out of service belongs to other
    clients.
    """
    found = {}
    for report in reports:
        pool = after.pools.get(report.name)
        if pool is None or report.free is None:
            continue
        used = (report.quantity - max(0, report.free)) * report.granularity
        held = max(state.held_bytes.get(report.name, 0) for state in (before, after))
        if used > held + pool.out_of_service_bytes:
            found[report.name] = used - held - pool.out_of_service_bytes
    return found


def changes(state: State, reports: tuple[PoolReport, ...]) -> Iterator[Command]:
    """Yield the commands that make the cluster's pools match the provider's report; none if they already do.

    A pool that was reported earlier, to any leader, and is now missing gets quantity 0. Jobs keep its capacity, but no
    new capacity is granted.
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
                is_reported=True,
            )
        elif (known.quantity_bytes, known.granularity_bytes, known.is_reported) != (total, report.granularity, True):
            yield ChangePool(report.name, quantity=total, granularity=report.granularity, is_reported=True)
    reported = {report.name for report in reports}
    for name, known in sorted(state.pools.items()):
        if known.is_reported and name not in reported and known.quantity_bytes:
            yield ChangePool(name, quantity=0)
