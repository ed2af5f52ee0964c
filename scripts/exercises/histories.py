"""Clients that write and read through the API, what they saw, and whether that can be true."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from math import inf
from typing import NamedTuple, TypeVar

from cluster.client import ApiError, Client
from cluster.client.requests import PoolRequest
from cluster.client.views import JobView, PoolsAnswer
from exercises.bare import held_job
from exercises.linearizability import UNKNOWN, HeldJob, Model, Operation, Register, Verdict, check, goes_back
from exercises.local_cluster import ExerciseFailed

DEADLINE_S = 4.0
"""How long a client waits for one answer, retries included, seconds; then the outcome is unknown to it."""

THINK_S = 0.03
"""Longest pause of a client between two operations, seconds."""

LIVE_JOBS = 5
"""Jobs that clients work on at a time, count: an older one is left alone, so that histories stay short."""

POOL_WRITES = 40
"""Writes of one pool after which another one is used, count."""

ACTIONS = {"submit": 8, "hold": 22, "release": 22, "show": 22, "write": 12, "read": 14}
"""What clients do, with weights."""

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
        return self.client.job(job, stale=self.stale)

    def pools(self) -> Awaitable[PoolsAnswer]:
        """Ask for the pools."""
        return self.client.pools(stale=self.stale)


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

    @property
    def operations(self) -> int:
        """How many operations were begun."""
        return sum(map(len, self.histories.values()))

    @property
    def unknown(self) -> int:
        """How many operations nobody knows the outcome of."""
        return sum(operation.answer is UNKNOWN for history in self.histories.values() for operation in history)

    async def work(self, client: Client, who: str, stale: Client | None = None) -> None:
        """Do one operation after the other, for ever. With `stale` reads ask that client for what may be old."""
        reader = Reader(client if stale is None else stale, stale is not None)
        while True:
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
        view = await self._call(who, name, "submit", None, lambda: client.submit(request), lambda view: "done")
        if view is not None:
            self.acknowledged[name] = view.job_id
            self.jobs = [*self.jobs[-LIVE_JOBS + 1 :], (name, view.job_id)]

    async def use_job(self, client: Client, reader: "Reader", who: str, action: str, name: str, job: int) -> None:
        """Hold, release or show a job."""
        if action == "show":
            await self._call(who, name, action, None, lambda: reader.job(job), _held)
            return
        command_id = client.new_command_id()
        send = client.hold if action == "hold" else client.release
        await self._call(who, name, action, None, lambda: send(job, command_id=command_id), lambda view: "done")

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
        await self._call(who, pool, action, (size,), lambda: client.set_pool(pool, request), lambda view: "done")

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
                answer = "refused"
            elif error.status == NOT_FOUND and action == "show":
                answer = "absent"
            elif error.status >= 400 and error.outcome == "refused" and error.status not in (429, 503):
                raise ExerciseFailed(f"{action} of {subject} was refused: {error}") from error
        returned_s = time.monotonic()
        if answer is not UNKNOWN:
            history[place] = Operation(who, action, value, answer, called_s, returned_s)
        if view is not None:
            self.answers.append((called_s, returned_s, view.revision))  # type: ignore[attr-defined]
            if action not in ("show", "read"):
                self.last_write_called_s = max(called_s, self.last_write_called_s)
        return view

    async def look_at_everything(self, client: Client) -> None:
        """Read every object once more, at the end, so that the histories say what became of each; look for what was
        lost, doubled or made up."""
        called_s = time.monotonic()
        answer = await client.jobs(limit=LIST_MAX)
        pools = _sizes(await client.pools())
        returned_s = time.monotonic()
        if answer.truncated:
            raise ExerciseFailed(f"more than {LIST_MAX} jobs: the exercise was too long to see them all")
        counts = Counter(job.name for job in answer.jobs)
        doubled = sorted(name for name, count in counts.items() if count > 1)
        made_up = sorted(set(counts) - self.submitted)
        found = {job.name: job for job in answer.jobs}
        lost = sorted(name for name, job in self.acknowledged.items() if name not in found or found[name].job_id != job)
        if doubled or made_up or lost:
            raise ExerciseFailed(f"doubled: {doubled[:10]}; made up: {made_up[:10]}; lost: {lost[:10]}")
        for subject, history in self.histories.items():
            seen: Hashable
            if isinstance(self.models[subject], Register):
                history.append(Operation("end", "read", None, (pools.get(subject),), called_s, returned_s))
            else:
                job = found.get(subject)
                seen = "absent" if job is None else _held(job)
                history.append(Operation("end", "show", None, seen, called_s, returned_s))

    def check(self) -> int:
        """Check all histories; return how many configurations it took. ExerciseFailed for the first that is not
        linearizable or could not be checked to its end."""
        back = goes_back(self.answers)
        if back is not None:
            raise ExerciseFailed(f"stale: revision {back[1]} was answered to a call made after {back[0]} was answered")
        total = 0
        for subject, history in self.histories.items():
            found = check(history, self.models[subject])
            total += found.configurations
            if found.verdict is not Verdict.LINEARIZABLE:
                rows = "\n  ".join(map(_line, sorted(history, key=lambda operation: operation.called_s)))
                raise ExerciseFailed(
                    f"the history of {subject} is {found.verdict} ({found.configurations} configurations); "
                    f"the search stands before: {found.stuck_at and _line(found.stuck_at)}\n  {rows}"
                )
        return total


def _held(job: JobView) -> str:
    return "held" if job.hold else "free"


def _sizes(answer: PoolsAnswer) -> dict[str, int]:
    return {pool.name: pool.quantity_bytes // MIB for pool in answer.pools}


def _line(operation: Operation) -> str:
    until = "?" if operation.returned_s == inf else f"{operation.returned_s:.4f}"
    value = "" if operation.value is None else f" {operation.value}"
    return f"{operation.called_s:.4f} - {until} {operation.who}: {operation.action}{value} -> {operation.answer}"
