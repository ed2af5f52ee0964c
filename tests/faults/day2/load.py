"""Clients that work during exercises: one submits jobs, one writes; both record acknowledgements."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, NamedTuple

from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.job_fields import SubmitRequest
from forebay.cluster.schemas.jobs import JobView
from forebay.cluster.schemas.requests import CancelRequest
from tests.faults import verify
from tests.faults.day2.site import PATIENCE_S, Site, until
from tests.faults.hosts import JOBS
from tests.faults.local_cluster import USER, RunFailed
from tests.faults.workload import EXAMPLES, Workload, space_of

NUMBERS: Final = 100_000
"""Numbers in the input: what a job stages is moved in about half a second."""

UNDER_WAY: Final = 3
"""Jobs that are not over, at most: the machine is shared with all that they run on."""

WRITE_EVERY_S: Final = 0.05
LOOK_S: Final = 0.2
DEADLINE_S: Final = 5.0
"""How long a client waits for an answer, seconds: then it does not know, and goes on with another command."""

ASKED_AGAIN: Final = 20
"""Acknowledged writes that are sent once more with their ids at the end of a row, count: the newest."""

OVER_S: Final = 240.0
"""How long the jobs of a row may take, seconds."""


class Acknowledged(NamedTuple):
    """What a client was told: the request, the example it is of (empty: a write), and the revision of the answer."""

    request: SubmitRequest
    example: str
    revision: int


class Load:
    """The clients, and what they know."""

    def __init__(self, site: Site, *, seed: int) -> None:
        self.site = site
        self.workload = Workload(site.work, numbers=NUMBERS, seed=seed)
        self.jobs: dict[int, Acknowledged] = {}
        """Of this row: jobs that stage and compute, and jobs that are only written."""
        self.twice: set[int] = set()
        """Jobs that may have run again: they were under way in what a recovery began with."""
        self.unrecorded: set[int] = set()
        """Jobs of which the ledger need not say everything any more: they wrote a line themselves when they had run."""
        self.acknowledged = self.completed = self.lost = 0
        self._may = asyncio.Event()
        self._idle = [asyncio.Event(), asyncio.Event()]
        self._clients: list[Client] = []

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Have both clients at work."""
        async with self.site.client(USER) as writer, self.site.client(USER) as submitter:
            self._clients = [writer, submitter]
            tasks = [asyncio.create_task(self._write(writer)), asyncio.create_task(self._submit(submitter))]
            self._may.set()
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                for ended in await asyncio.gather(*tasks, return_exceptions=True):
                    if isinstance(ended, Exception):
                        raise ended

    def move(self) -> None:
        """Have the clients look where the operator's forebay.toml says that replicas are."""
        assert self.site.config is not None
        for client in self._clients:
            client.reach_at(self.site.config.endpoints)

    async def commits(self, count: int = 10) -> None:
        """Wait until so many more commands are acknowledged."""
        wanted = self.acknowledged + count

        async def acknowledged() -> bool:
            return self.acknowledged >= wanted

        await until(acknowledged, f"{count} more commands are acknowledged")

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Have the clients wait: nothing is under way then."""
        self._may.clear()
        async with asyncio.timeout(PATIENCE_S):
            for one in self._idle:
                await one.wait()
        try:
            yield
        finally:
            for one in self._idle:
                one.clear()
            self._may.set()

    def unrecord(self) -> None:
        """Expect the ledger to begin later than what was acknowledged so far."""
        self.unrecorded |= self.jobs.keys()

    async def forget(self, revision: int) -> int:
        """Leave out what was acknowledged behind a revision and is gone; return how much. What was under way may run
        again.

        RunFailed where what is gone had been acknowledged before.
        """
        async with self.paused():
            views = await self.views()
            gone = {job: one for job, one in self.jobs.items() if job not in views}
            early = {job: one.revision for job, one in gone.items() if one.revision <= revision}
            if early:
                raise RunFailed(f"{early} were acknowledged up to revision {revision}, and are gone")
            for job in gone:
                del self.jobs[job]
            self.twice |= {job for job, one in self.jobs.items() if one.example and not verify.over(views[job])}
            self.lost += len(gone)
            return len(gone)

    async def views(self) -> dict[int, JobView]:
        """Return the jobs that there are."""
        async with self.site.client(USER) as client:
            return await verify.jobs(client)

    async def settle(self) -> str:
        """Stop, and hold what clients know against the cluster: what was acknowledged is there and has one answer, and
        jobs have completed once with right results. Then the next row begins."""
        async with self.paused():
            examples = {job: one for job, one in self.jobs.items() if one.example}
            writes = {job: one for job, one in self.jobs.items() if not one.example}
            views: dict[int, JobView] = {}

            async def over() -> bool:
                views.update(await self.views())
                missing = sorted(self.jobs.keys() - views.keys())
                if missing:
                    raise RunFailed(f"jobs {missing[:10]} were acknowledged, and are not there")
                return all(verify.over(views[job]) for job in examples)

            try:
                await until(over, "jobs are over", patience_s=OVER_S)
            except RunFailed as error:
                left = {job: views[job] for job in examples if job in views and not verify.over(views[job])}
                told = "; ".join(f"{job} is {one.state} ({one.reason})" for job, one in left.items())
                raise RunFailed(f"{error}: {told}") from error
            wrong = {job: (views[job].state, views[job].reason) for job in examples if views[job].state != "COMPLETED"}
            other = [job for job, one in self.jobs.items() if views[job].name != one.request.name]
            if wrong or other:
                raise RunFailed(f"not completed: {wrong}; somebody else's: {other}")
            for job, one in examples.items():
                self.workload.check_result(one.example, job)
            ran = self.workload.completions()
            again = [job for job in (self.unrecorded & examples.keys()) - self.twice if ran[job] != 1]
            if again:
                raise RunFailed(f"jobs {again} did not run to their end once")
            async with self.site.client(USER) as client:
                once = [job for job in examples if job not in self.twice | self.unrecorded]
                await verify.ran_once(client, self.workload, once, all_complete=True)
                for job, one in list(writes.items())[-ASKED_AGAIN:]:
                    answered = (await client.call(ops.SUBMIT_JOB, one.request)).job_id
                    if answered != job:
                        raise RunFailed(f"the command of job {job}, sent again, became job {answered}")
                for job in writes:
                    await client.call(ops.CANCEL_JOB, CancelRequest(command_id=client.new_command_id()), id=job)
            self.completed += len(examples)
            self.jobs, self.twice, self.unrecorded = {}, set(), set()
            return f"{len(writes)} writes kept, {len(examples)} jobs completed once with right results"

    async def _turn(self, number: int) -> None:
        """Wait here while the clients are paused."""
        while not self._may.is_set():
            self._idle[number].set()
            await self._may.wait()

    async def _acknowledged(self, client: Client, request: SubmitRequest, example: str = "") -> None:
        # Who gets no answer does not know; what it asked for may or may not be done.
        with contextlib.suppress(ApiError):
            answer = await client.call(ops.SUBMIT_JOB, request, deadline_s=DEADLINE_S)
            self.jobs[answer.job_id] = Acknowledged(request, example, answer.revision)
            self.acknowledged += 1

    async def _write(self, client: Client) -> None:
        for number in itertools.count():
            await self._turn(0)
            await self._acknowledged(client, request_of(client, "#!/bin/sh\ntrue\n", f"w{number}", self.site.work))
            await asyncio.sleep(WRITE_EVERY_S)

    async def _submit(self, client: Client) -> None:
        for example in itertools.cycle(JOBS):
            await self._turn(1)
            while await self._full(client):
                await asyncio.sleep(LOOK_S)
                await self._turn(1)
            text = (EXAMPLES / f"{example}.sh").read_text()
            await self._acknowledged(client, request_of(client, text, example, self.site.work, hold=False), example)

    async def _full(self, client: Client) -> bool:
        mine = [job for job, one in self.jobs.items() if one.example]
        try:
            views = {job.job_id: job for job in (await client.call(ops.LIST_JOBS, deadline_s=DEADLINE_S)).jobs}
        except ApiError:
            return True
        return sum(job in views and not verify.over(views[job]) for job in mine) >= UNDER_WAY


def request_of(client: Client, script: str, name: str, work: Path, *, hold: bool = True) -> SubmitRequest:
    """Return the request for a job; one that is held only stands in the state."""
    return SubmitRequest(
        command_id=client.new_command_id(),
        script=script,
        time_limit_s=300,
        workdir=str(work),
        name=name,
        bb=space_of(name),
        hold=hold,
    )
