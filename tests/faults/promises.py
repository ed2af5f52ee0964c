"""Promises of a cluster to its clients, and their verification.

Each command goes through the real API. Acknowledged: it must be there, once, for ever. Unknown (the answer did not
come): at most once, and exactly once after it was sent again with the same id. Refused: not at all.
"""

import random
from collections import Counter
from collections.abc import Set as AbstractSet

import msgspec

from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.base import Command
from forebay.cluster.schemas.job_fields import SubmitRequest
from forebay.cluster.schemas.jobs import JobView
from forebay.cluster.schemas.requests import CancelCommand, CancelRequest, HoldCommand, ReleaseCommand, SubmitCommand
from tests.faults.bare import held_job, is_passing
from tests.faults.local_cluster import RunFailed

JOBS_LISTED_MAX = 10_000
"""Jobs in one list of the API, count: a generation of a cluster holds fewer."""

Change = HoldCommand | ReleaseCommand | CancelCommand
Shape = tuple[bool, bool]
"""Whether a job is held, and whether it is cancelled."""

REPEATED = 5
"""Acknowledged submits that are sent again after each fault, count."""


class Expected(msgspec.Struct):
    """One job as its only client knows it."""

    request: SubmitRequest
    job_id: int | None = None
    """None while no submit was acknowledged."""
    shape: Shape = (True, False)
    pending: Change | None = None
    """A change whose outcome is unknown."""


def after(shape: Shape, change: Change) -> Shape:
    """Return the shape that a change gives a job of this shape: clients change only jobs that are not cancelled."""
    return (shape[0], True) if isinstance(change, CancelCommand) else (isinstance(change, HoldCommand), False)


class Promises:
    """Everything that one generation of a cluster was asked and has answered."""

    def __init__(self, beside: AbstractSet[str] = frozenset()) -> None:
        """`beside` are the names of jobs that others submit, now and later."""
        self.beside = beside
        self.jobs: dict[str, Expected] = {}
        self.acknowledged = 0

    async def write(self, client: Client, who: str, chance: random.Random, *, bulk: int = 0) -> None:
        """Write commands one after the other, for ever; what is under way when this is cancelled is unknown."""
        mine: list[Expected] = []
        number = 0
        while True:
            number += 1
            if bulk:
                await self._submit_many(client, [f"{who}-{number}-{row}" for row in range(bulk)])
            elif not mine or chance.random() < 0.5:
                mine.append(await self._submit(client, f"{who}-{number}"))
            else:
                await self._change(client, mine, chance)

    async def _submit(self, client: Client, name: str) -> Expected:
        expected = self.jobs[name] = Expected(held_job(client, name))
        job = await client.call(ops.SUBMIT_JOB, expected.request)
        expected.job_id = job.job_id
        self.acknowledged += 1
        return expected

    async def _submit_many(self, client: Client, names: list[str]) -> None:
        commands = []
        for name in names:
            request = held_job(client, name)
            self.jobs[name] = Expected(request)
            commands.append(msgspec.convert(msgspec.structs.asdict(request), SubmitCommand))
        answer = await client.commands(commands)
        for name, result in zip(names, answer.results, strict=True):
            if result.status < 300:
                assert result.job is not None
                self.jobs[name].job_id = result.job.job_id
                self.acknowledged += 1
            elif result.error is None or (result.error.outcome == "rejected" and not is_passing(result.status)):
                raise RunFailed(f"submit of {name} was refused: {result.error}")

    async def _change(self, client: Client, mine: list[Expected], chance: random.Random) -> None:
        expected = chance.choice(mine)
        held, _ = expected.shape
        kind: type[Change] = ReleaseCommand if held else HoldCommand
        if chance.random() < 0.1:
            kind = CancelCommand
            mine.remove(expected)
        assert expected.job_id is not None
        expected.pending = kind(command_id=client.new_command_id(), job_id=expected.job_id)
        await self._send(client, expected)

    async def _send(self, client: Client, expected: Expected) -> None:
        """Send the pending change (again) and note that it was acknowledged."""
        change = expected.pending
        assert change is not None
        if isinstance(change, CancelCommand):
            await client.call(ops.CANCEL_JOB, CancelRequest(command_id=change.command_id), id=change.job_id)
        else:
            operation = ops.HOLD_JOB if isinstance(change, HoldCommand) else ops.RELEASE_JOB
            await client.call(operation, Command(command_id=change.command_id), id=change.job_id)
        expected.shape, expected.pending = after(expected.shape, change), None
        self.acknowledged += 1

    async def check(self, client: Client, chance: random.Random) -> int:
        """Look whether everything is as promised, before and after unknown commands are sent again; return how many
        those were. RunFailed says what was lost, doubled or made up."""
        await self.compare(client)
        unknown = 0
        name = ""
        try:
            for name, expected in self.jobs.items():  # noqa: B007
                if expected.job_id is None:
                    expected.job_id = (await client.call(ops.SUBMIT_JOB, expected.request)).job_id
                    self.acknowledged += 1
                    unknown += 1
                if expected.pending is not None:
                    await self._send(client, expected)
                    unknown += 1
            for name in chance.sample(sorted(self.jobs), min(REPEATED, len(self.jobs))):
                again = await client.call(ops.SUBMIT_JOB, self.jobs[name].request)
                if again.job_id != self.jobs[name].job_id:
                    raise RunFailed(f"{name} was job {self.jobs[name].job_id}, sent again it is {again.job_id}")
        except ApiError as error:
            raise RunFailed(f"{name}: sent again with the same id: {error}") from error
        await self.compare(client)
        return unknown

    async def compare(self, client: Client) -> None:
        """Compare what the cluster lists with what it has promised; RunFailed says what is broken."""
        answer = await client.call(ops.LIST_JOBS, limit=JOBS_LISTED_MAX)
        if answer.truncated:
            raise RunFailed(f"more than {JOBS_LISTED_MAX} jobs in a generation: the run cannot see them all")
        counts = Counter(job.name for job in answer.jobs)
        found = {job.name: job for job in answer.jobs}
        doubled = {name: count for name, count in counts.items() if count > 1}
        if doubled:
            raise RunFailed(f"jobs that were submitted once are there more than once: {doubled}")
        made_up = sorted(set(found) - set(self.jobs) - self.beside)
        if made_up:
            raise RunFailed(f"jobs that nobody submitted: {made_up}")
        lost = [name for name, expected in self.jobs.items() if expected.job_id is not None and name not in found]
        if lost:
            raise RunFailed(f"{len(lost)} acknowledged submits are lost: {lost[:10]} at revision {answer.revision}")
        for name, expected in self.jobs.items():
            if name in found:
                self._compare_one(expected, found[name])

    def _compare_one(self, expected: Expected, job: JobView) -> None:
        if expected.job_id is not None and job.job_id != expected.job_id:
            raise RunFailed(f"{job.name} was acknowledged as job {expected.job_id} and is job {job.job_id}")
        shape = (job.hold is not None, job.cancelled)
        allowed = {expected.shape}
        if expected.pending is not None:
            allowed.add(after(expected.shape, expected.pending))
        if shape not in allowed:
            raise RunFailed(
                f"job {job.job_id} ({job.name}) is (held, cancelled) = {shape}; acknowledged: {expected.shape}, "
                f"under way: {expected.pending}"
            )
