"""Clients that write and read through the API, their histories, and the check of these histories."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from collections.abc import Set as AbstractSet
from math import inf
from typing import NamedTuple, TypeVar

from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.base import Command
from forebay.cluster.schemas.jobs import JobView, PoolsAnswer
from forebay.cluster.schemas.requests import PoolRequest
from tests.faults.bare import BareCluster, held_job, refused
from tests.faults.linearizability import UNKNOWN, HeldJob, Model, Operation, Register, Verdict, check, goes_back
from tests.faults.local_cluster import REPLICAS, RunFailed

DEADLINE_S = 4.0
"""How long a client waits for one answer, retries included, seconds; then the outcome is unknown to it."""

HURRIED_S = 0.25
"""The same for a client that does not wait until others lead or are back: it goes on with unknown outcomes."""

DEADLINES_S = (DEADLINE_S, DEADLINE_S, HURRIED_S, HURRIED_S)
"""Clients beside the writers of another run: what half of them asked before a fault is answered after it."""

STALE_S = 0.5
"""How long a client waits for one replica's own word, seconds."""

COMMIT_S = 60.0
"""How long clients may wait for the first commit after everything was healed, seconds."""

THINK_S = 0.03
"""Longest pause of a client between two operations, seconds."""

LIVE_JOBS = 5
"""Jobs that clients work on at a time, count: an older one is left alone, so that histories stay short."""

POOL_WRITES = 40
"""Writes of one pool after which another one is used, count."""

ACTIONS = {"submit": 8, "hold": 22, "release": 22, "show": 22, "write": 12, "read": 14}
"""What clients do, with weights."""

READS = ("show", "read")

LIST_MAX = 10_000
MIB = 1 << 20
NOT_FOUND, REFUSED_WRONG_STATE = 404, 409

_View = TypeVar("_View")


class Reader(NamedTuple):
    """How a client reads: what is proven to be current, or what one replica happens to know."""

    client: Client
    stale: bool

    def job(self, job: int) -> Awaitable[JobView]:
        """Ask for a job."""
        return self.client.call(ops.SHOW_JOB, id=job, stale=self.stale)

    def pools(self) -> Awaitable[PoolsAnswer]:
        """Ask for the pools."""
        return self.client.call(ops.LIST_POOLS, stale=self.stale)


class Clients:
    """Everything that the clients did."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.histories: dict[str, list[Operation]] = {}
        self.models: dict[str, Model] = {}
        self.answers: list[tuple[float, float, int]] = []
        self.acknowledged: dict[str, int] = {}
        self.submitted: set[str] = set()
        self.jobs: list[tuple[str, int]] = []
        self.pool = "register-0"
        self.pool_writes = 0
        self.written = 0
        self.last_write_called_s = 0.0
        """When the write was sent that was sent last of all acknowledged ones."""
        self.objects_checked = 0
        self.configurations = 0
        self._resting = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def operations(self) -> int:
        """How many operations were begun."""
        return sum(map(len, self.histories.values()))

    @property
    def unknown(self) -> int:
        """How many operations nobody knows the outcome of."""
        return sum(operation.answer is UNKNOWN for history in self.histories.values() for operation in history)

    @property
    def figures(self) -> dict[str, int]:
        """What a run reports of its clients; nothing was checked unless all was."""
        return {
            "operations": self.operations,
            "unknown": self.unknown,
            "acknowledged_submits": len(self.acknowledged),
            "objects_checked": self.objects_checked,
            "configurations": self.configurations,
        }

    @contextlib.asynccontextmanager
    async def at_work(
        self, cluster: BareCluster, deadlines_s: Sequence[float] = DEADLINES_S, *, stale: bool = False
    ) -> AsyncIterator[None]:
        """Let a client with each of these deadlines work while the body runs, whatever is done to the cluster; at its
        end they finish what they have begun. Raises what ended a client, unless the body raises. With `stale` they
        take for current what they should not: then the checks must fail."""
        async with contextlib.AsyncExitStack() as stack:
            self._resting = False
            for number, deadline_s in enumerate(deadlines_s):
                client = await stack.enter_async_context(cluster.client("operator", deadline_s=deadline_s))
                other = None
                if stale:
                    api = cluster.config.replicas[number % len(REPLICAS)].api
                    tls = cluster.config.tls_files("operator")
                    other = await stack.enter_async_context(Client([api], tls, deadline_s=STALE_S))
                self._tasks.append(asyncio.create_task(self.work(client, f"client-{number}", other)))
            try:
                yield
                self._resting = True
                await asyncio.wait(self._tasks, timeout=DEADLINE_S)
            finally:
                for task in self._tasks:
                    task.cancel()
                ends = await asyncio.gather(*self._tasks, return_exceptions=True)
                self._tasks.clear()
            for end in ends:
                if isinstance(end, Exception):
                    raise end

    def check_working(self) -> None:
        """Raise what ended a client, if one has ended."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def commits_after(self, moment_s: float, cluster: BareCluster | None = None) -> float:
        """Wait until a write that was sent after `moment_s` is acknowledged and return when it was. With `cluster` none
        of its replicas may end meanwhile."""
        until = time.monotonic() + COMMIT_S
        while self.last_write_called_s <= moment_s:
            self.check_working()
            if cluster is not None:
                cluster.check_running()
            if time.monotonic() > until:
                raise RunFailed(f"no client could commit within {COMMIT_S:g} s of the fault or its end")
            await asyncio.sleep(0.01)
        return time.monotonic()

    async def work(self, client: Client, who: str, stale: Client | None = None) -> None:
        """Do one operation after the other until it is time to rest. With `stale` reads ask that client for what may
        be old."""
        reader = Reader(client if stale is None else stale, stale is not None)
        while not self._resting:
            action = self.chance.choices(list(ACTIONS), list(ACTIONS.values()))[0]
            if action == "submit" or not self.jobs:
                await self.submit(client, who)
            elif action in ("write", "read"):
                await self.use_pool(client, reader, who, action)
            else:
                await self.use_job(client, reader, who, action, *self.chance.choice(self.jobs))
            await asyncio.sleep(self.chance.uniform(0, THINK_S))

    async def submit(self, client: Client, who: str) -> None:
        """Submit a held job that others may then use."""
        name = f"job-{len(self.submitted)}"
        self.submitted.add(name)
        self.models[name] = HeldJob()
        request = held_job(client, name)
        view = await self._call(
            who, name, "submit", None, lambda: client.call(ops.SUBMIT_JOB, request), lambda view: "done"
        )
        if view is not None:
            self.acknowledged[name] = view.job_id
            self.jobs = [*self.jobs[-LIVE_JOBS + 1 :], (name, view.job_id)]

    async def use_job(self, client: Client, reader: "Reader", who: str, action: str, name: str, job: int) -> None:
        """Hold, release or show a job."""
        if action == "show":
            await self._call(who, name, action, None, lambda: reader.job(job), _held)
            return
        request = Command(command_id=client.new_command_id())
        change = ops.HOLD_JOB if action == "hold" else ops.RELEASE_JOB
        await self._call(who, name, action, None, lambda: client.call(change, request, id=job), lambda view: "done")

    async def use_pool(self, client: Client, reader: "Reader", who: str, action: str) -> None:
        """Write a size that nobody wrote before, or read the size."""
        pool = self.pool
        self.models[pool] = Register((None,))
        if action == "read":
            await self._call(who, pool, action, None, reader.pools, lambda answer: (_sizes(answer).get(pool),))
            return
        self.written += 1
        self.pool_writes += 1
        if self.pool_writes > POOL_WRITES:
            self.pool, self.pool_writes = f"register-{self.written}", 0
        size = self.written
        request = PoolRequest(command_id=client.new_command_id(), quantity=f"{size}MiB", granularity="1MiB")
        await self._call(
            who, pool, action, (size,), lambda: client.call(ops.SET_POOL, request, name=pool), lambda view: "done"
        )

    async def _call(
        self,
        who: str,
        subject: str,
        action: str,
        value: Hashable,
        send: Callable[[], Awaitable[_View]],
        answer_of: Callable[[_View], Hashable],
    ) -> _View | None:
        """Send a request and record what came of it."""
        history = self.histories.setdefault(subject, [])
        called_s = time.monotonic()
        place = len(history)
        # Recorded at once: a client that is ended in the middle of it leaves an operation of unknown outcome behind.
        history.append(Operation(who, action, value, UNKNOWN, called_s))
        answer: Hashable = UNKNOWN
        view = None
        try:
            view = await send()
            answer = answer_of(view)
        except ApiError as error:
            if error.status == REFUSED_WRONG_STATE and action == "release":
                answer = "rejected"
            elif error.status == NOT_FOUND and action in ("show", "hold", "release"):
                answer = "absent"
            elif refused(error):
                raise RunFailed(f"{action} of {subject} was refused: {error}") from error
        returned_s = time.monotonic()
        if answer is not UNKNOWN:
            history[place] = Operation(who, action, value, answer, called_s, returned_s)
        if view is not None:
            self.answers.append((called_s, returned_s, view.revision))  # type: ignore[attr-defined]
            if action not in READS:
                self.last_write_called_s = max(called_s, self.last_write_called_s)
        return view

    async def look_at_everything(self, client: Client, *, beside: AbstractSet[str] = frozenset()) -> None:
        """Read every object once more, at the end, so that the histories say what became of each; look for what was
        lost, doubled or made up. `beside` are the names of jobs that others submitted."""
        called_s = time.monotonic()
        answer = await client.call(ops.LIST_JOBS, limit=LIST_MAX)
        pools = _sizes(await client.call(ops.LIST_POOLS))
        returned_s = time.monotonic()
        if answer.truncated:
            raise RunFailed(f"more than {LIST_MAX} jobs: the run was too long to see them all")
        counts = Counter(job.name for job in answer.jobs)
        doubled = sorted(name for name, count in counts.items() if count > 1)
        made_up = sorted(set(counts) - self.submitted - beside)
        found = {job.name: job for job in answer.jobs}
        lost = sorted(name for name, job in self.acknowledged.items() if name not in found or found[name].job_id != job)
        for subject, history in self.histories.items():
            seen: Hashable
            if isinstance(self.models[subject], Register):
                history.append(Operation("end", "read", None, (pools.get(subject),), called_s, returned_s))
            else:
                job = found.get(subject)
                seen = "absent" if job is None else _held(job)
                history.append(Operation("end", "show", None, seen, called_s, returned_s))
        if doubled or made_up or lost:
            # A history that cannot be explained says more: it names the operations.
            self.check()
            raise RunFailed(f"doubled: {doubled[:10]}; made up: {made_up[:10]}; lost: {lost[:10]}")

    def check(self) -> None:
        """Check all histories and count what that took. RunFailed for the first that is not linearizable or could
        not be checked to its end."""
        self.objects_checked = self.configurations = 0
        back = goes_back(self.answers)
        stale = back and f"stale: revision {back[1]} was answered to a call made after {back[0]} was answered"
        for subject, history in self.histories.items():
            # A read that was not answered says nothing, and each would double what there is to search.
            telling = [
                operation for operation in history if operation.action not in READS or operation.answer is not UNKNOWN
            ]
            found = check(telling, self.models[subject])
            self.configurations += found.configurations
            if found.verdict is not Verdict.LINEARIZABLE:
                rows = "\n  ".join(map(_line, sorted(history, key=lambda operation: operation.called_s)))
                also = f"{stale}; " if stale else ""
                raise RunFailed(
                    f"{also}the history of {subject} is {found.verdict} ({found.configurations} configurations); "
                    f"the search stands before: {found.stuck_at and _line(found.stuck_at)}\n  {rows}"
                )
        if stale:
            raise RunFailed(stale)
        self.objects_checked = len(self.histories)


def _held(job: JobView) -> str:
    return "held" if job.hold else "free"


def _sizes(answer: PoolsAnswer) -> dict[str, int]:
    return {pool.name: pool.quantity_bytes // MIB for pool in answer.pools}


def _line(operation: Operation) -> str:
    until = "?" if operation.returned_s == inf else f"{operation.returned_s:.4f}"
    value = "" if operation.value is None else f" {operation.value}"
    return f"{operation.called_s:.4f} - {until} {operation.who}: {operation.action}{value} -> {operation.answer}"
