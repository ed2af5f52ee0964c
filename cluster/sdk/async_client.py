"""Asynchronous Python API of a cluster."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack

import msgspec

from forebay.cluster.schemas import operations as ops
from forebay.cluster.sdk.errors import (
    WAIT_TIMEOUT,
    InvalidRequestError,
    JobFailedError,
    UnavailableError,
    WaitTimeoutError,
    converted_errors,
)
from forebay.cluster.system import SystemClock
from forebay.replica.model import ENDED, JobState

if TYPE_CHECKING:
    from forebay.cluster.client import Client as ClusterClient
    from forebay.cluster.schemas import (
        ApiOperation,
        BufferView,
        EventView,
        HistoryAnswer,
        JobTransfersView,
        JobView,
        PoolView,
        StatusView,
        TransferView,
    )
    from forebay.cluster.sdk.submission import SubmitOptions
    from forebay.cluster.system import Clock

DEADLINE_S: Final = 30.0
"""Default time limit of one call including retries, seconds: many elections long."""

POLL_S: Final = 0.1
"""First interval between looks at a job, seconds: a small job finishes in less than two of them."""

POLL_S_MAX: Final = 5.0
"""Longest interval, seconds: hundreds of waiting programs are a small load for a replica."""

GROWTH: Final = 1.3
"""Factor from one interval to the next."""

_ENDED: Final = frozenset(state.name for state in ENDED)
_T = TypeVar("_T")
_Asked = TypeVar("_Asked")


class AsyncClient:
    """Access to a cluster under one identity, for asyncio; an asynchronous context manager.

        async with AsyncClient.connect() as client:
            job = await client.submit(Path("job.sh"), bb="capacity=10GiB")
            await client.wait(job, check=True)

    Every method raises a subclass of ForebayError. Calls find the leader, and are repeated over failovers with the same
    command ID, so that a command takes effect at most once.
    """

    def __init__(self, client: ClusterClient, clock: Clock | None = None) -> None:
        """Wrap a client of the cluster; programs use `connect`."""
        self._client = client
        self._clock = clock or SystemClock()

    @classmethod
    def connect(
        cls,
        config: str | os.PathLike[str] | None = None,
        *,
        identity: str | None = None,
        urls: str | Sequence[str] | None = None,
        authority: str | os.PathLike[str] | None = None,
        certificate: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> Self:
        """Return a client, which connects when it is first used.

        Without arguments it uses the configuration and identity that `forebay` would use: $FOREBAY_CONFIG or
        forebay.toml in the usual places, $FOREBAY_IDENTITY or this account.

        Args:
            config: Path of a forebay.toml.
            identity: Name of the certificate to show; default: this account.
            urls: Addresses of replicas, `https://host:port`, in place of a configuration.
            authority: With `urls`: file of the cluster's authority, ca.pem.
            certificate: With `urls`: file of the certificate to show.
            key: With `urls`: file of its key; default: the certificate's name with the suffix .key.
            deadline_s: Time limit of one call including its retries, seconds.

        Raises:
            ConfigurationError: The access is incomplete, or a file cannot be used.
        """
        from forebay.cluster.sdk.connecting import open_client

        return cls(
            open_client(config, identity, urls, authority, certificate, key, deadline_s=deadline_s, blocking=False)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    def new_command_id(self) -> str:
        """Return a new command ID, to pass to a command and to every repetition of it."""
        return self._client.new_command_id()

    async def submit(
        self,
        script: str | os.PathLike[str],
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
        command_id: str | None = None,
        **options: Unpack[SubmitOptions],
    ) -> JobView:
        """Submit a script and return its job. Warnings are in the job's `warnings`.

        For an array this is the first task; its `job_id` names the whole array.

        `#SBATCH`, `#DW` and `#BB` lines of the script are read as by `forebay submit`; options take precedence.

        Args:
            script: Text of a script as `str`, or the path of its file as `pathlib.Path`.
            arguments: Arguments of the script.
            environment: Variables for the job, in addition to those of `#SBATCH --export`.
            user: User to submit for (operators).
            command_id: ID of a submit whose outcome is unknown, to repeat it.
            options: See SubmitOptions.

        Raises:
            InvalidRequestError: The script or an option is invalid; `place` says where.
            RejectedError: A limit does not allow it.
        """
        from forebay.cluster.sdk.submission import submit_request

        request, warnings = submit_request(
            script,
            options,
            arguments=arguments,
            environment=environment or {},
            user=user,
            command_id=command_id or self.new_command_id(),
            now=self._clock.now(),
        )
        job = await self._call(ops.SUBMIT_JOB, request)
        return msgspec.structs.replace(job, warnings=(*warnings, *job.warnings)) if warnings else job

    async def cancel(self, job: int | str | JobView, *, hurry: bool = False, command_id: str | None = None) -> JobView:
        """Cancel a job, an array, or tasks of one, and return the first of them.

        Args:
            job: Job ID, reference such as `12_[1-4]`, or job.
            hurry: Skip stage-out and discard results that were not staged out.
            command_id: ID of a cancellation whose outcome is unknown, to repeat it.

        Raises:
            NotFoundError: There is no such job.
        """
        request = ops.CANCEL_JOB.request(command_id=command_id or self.new_command_id(), hurry=hurry)
        return await self._call(ops.CANCEL_JOB, request, id=_reference(job))

    async def job(self, job: int | str | JobView) -> JobView:
        """Return one job as it is now, with its transfers and expected start.

        Raises:
            NotFoundError: There is no such job, or it finished too long ago; its history remains.
        """
        return await self._call(ops.SHOW_JOB, id=_reference(job))

    async def jobs(
        self,
        *,
        state: str | Iterable[str] | None = None,
        user: str | None = None,
        name: str | None = None,
        job: int | str | None = None,
        at: int | datetime.datetime | None = None,
        limit: int | None = None,
    ) -> list[JobView]:
        """Return jobs by ID.

        Args:
            state: Only jobs in this state or these states, for example `RUNNING`.
            user: Only jobs of this user.
            name: Only jobs whose name contains this text.
            job: Only this job, array or tasks.
            at: Revision or time of a past state to list.
            limit: At most so many, the newest; default: all.
        """
        asked: dict[str, Any] = {
            "state": state if isinstance(state, str) or state is None else ",".join(state),
            "user": user,
            "name": name,
            "job": None if job is None else str(job),
            "at": _moment(at),
        }
        if limit is not None and limit <= ops.JOBS_LISTED_MAX:
            return list((await self._call(ops.LIST_JOBS, **asked, limit=limit)).jobs)
        found: list[JobView] = []
        while True:
            last = found[-1].job_id if found else 0
            page = await self._call(ops.LIST_JOBS, **asked, limit=ops.JOBS_LISTED, after=last)
            found += page.jobs
            if not page.truncated:
                return found if limit is None else found[-limit:]

    async def wait(self, job: int | str | JobView, *, timeout_s: float | None = None, check: bool = False) -> JobView:
        """Wait until a job has ended, after its stage-out, and return it.

        Args:
            job: Job ID, reference of one array task, or job.
            timeout_s: Longest wait, seconds; default: no limit.
            check: Raise JobFailedError unless the job's state is COMPLETED.

        Raises:
            WaitTimeoutError: The job has not ended in time; it continues.
            JobFailedError: With `check`: it ended in another state than COMPLETED.
            ValueError: The reference names several tasks; use `wait_all`.
        """
        reference = _reference(job)
        found = await self._wait([reference], timeout_s, check)
        if len(found) > 1:
            raise ValueError(f"{reference} names {len(found)} tasks; use wait_all")
        return found[0]

    async def wait_all(
        self, jobs: Iterable[int | str | JobView], *, timeout_s: float | None = None, check: bool = False
    ) -> list[JobView]:
        """Wait until all these jobs have ended, and return them in order, an array as its tasks.

        Arguments and errors are those of `wait`.
        """
        return await self._wait([_reference(job) for job in jobs], timeout_s, check)

    async def history(self, job: int | str | JobView, *, last: int | None = None) -> HistoryAnswer:
        """Return what happened to a job: `rows`, oldest first, each with the job's state after it.

        Args:
            job: Job ID, reference of one array task, or job. Finished jobs keep their history.
            last: At most so many rows, counted from the last.
        """
        return await self._call(ops.SHOW_JOB_HISTORY, id=_reference(job), last=last)

    async def events(
        self, *, from_revision: int = 0, after: EventView | None = None, timeout_s: float | None = None
    ) -> AsyncGenerator[EventView, None]:
        """Iterate over the events of the cluster: each once, in order, across failovers.

        Args:
            from_revision: Begin after this revision; 0: with the first event that is held.
            after: Begin after this event, to resume exactly where an earlier iteration stopped.
            timeout_s: End after about this many seconds without an event; default: never.

        Raises:
            NotFoundError: No replica holds events so old.
        """
        position = None if after is None else (after.revision, after.sequence)
        with converted_errors():
            stream = self._client.events(from_revision=from_revision, after=position, quiet_s=timeout_s)
            async with contextlib.aclosing(stream):
                async for event in stream:
                    yield event

    async def transfers(self) -> list[TransferView]:
        """Return the transfers that are queued, running or stuck, by job."""
        found: list[TransferView] = []
        while True:
            last = found[-1].job_id if found else 0
            page = await self._call(ops.LIST_TRANSFERS, after=last)
            found += page.transfers
            if not page.truncated:
                return found

    async def job_transfers(self, job: int | str | JobView) -> JobTransfersView:
        """Return the transfer of a job in the current state, its receipts, and the results that were not staged out."""
        return await self._call(ops.SHOW_JOB_TRANSFERS, id=_reference(job))

    async def buffers(self) -> list[BufferView]:
        """Return the buffers of jobs and the persistent buffers."""
        return list((await self._call(ops.LIST_BUFFERS)).buffers)

    async def pools(self) -> list[PoolView]:
        """Return the pools with their free space."""
        return list((await self._call(ops.LIST_POOLS)).pools)

    async def status(self) -> StatusView:
        """Return the status of the replica that answers: cluster, leader, revision, version."""
        return await self._call(ops.SHOW_STATUS)

    async def _call(
        self,
        operation: ApiOperation[_Asked, _T],
        request: _Asked | None = None,
        *,
        deadline_s: float | None = None,
        **parameters: Any,
    ) -> _T:
        with converted_errors():
            return await self._client.call(operation, request, deadline_s=deadline_s, **parameters)

    async def _wait(self, references: Sequence[str], timeout_s: float | None, check: bool) -> list[JobView]:
        until_s = None if timeout_s is None else self._clock.monotonic_s() + timeout_s
        found: list[JobView] = []
        for reference in references:
            found += await self._wait_for(reference, until_s, timeout_s)
        failed = next((job for job in found if job.state != JobState.COMPLETED.name), None)
        if check and failed is not None:
            raise JobFailedError(failed)
        return found

    async def _wait_for(self, reference: str, until_s: float | None, timeout_s: float | None) -> tuple[JobView, ...]:
        """Return the named jobs once all have ended."""
        pause_s = POLL_S
        states = "unknown"
        while True:
            left_s = float("inf") if until_s is None else until_s - self._clock.monotonic_s()
            try:
                deadline_s = min(DEADLINE_S, max(left_s, POLL_S_MAX))
                asked = self._call(ops.LIST_JOBS, job=reference, limit=ops.JOBS_LISTED_MAX, deadline_s=deadline_s)
                jobs = (await asked).jobs
            except UnavailableError:
                if until_s is None or self._clock.monotonic_s() < until_s:
                    raise
            else:
                if all(job.state in _ENDED for job in jobs):
                    return jobs
                states = ", ".join(sorted({job.state for job in jobs} - _ENDED))
            if left_s <= 0:
                message = f"job {reference} has not ended within {timeout_s:g} s; its state is {states}"
                raise WaitTimeoutError(WAIT_TIMEOUT, message, "wait longer, or see why it waits with `forebay job why`")
            await self._client.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * GROWTH, POLL_S_MAX)


def _reference(job: int | str | JobView) -> str:
    """Return the reference of a job; the ID of an array's first task alone would name the whole array."""
    if isinstance(job, int | str):
        return str(job)
    details = job.details
    if details is None or details.array_job_id is None:
        return str(job.job_id)
    return f"{details.array_job_id}_{details.array_task_id}"


def _moment(at: int | datetime.datetime | None) -> str | None:
    if isinstance(at, datetime.datetime):
        if at.tzinfo is None:
            raise InvalidRequestError(
                "invalid_field", f"the time {at} has no zone", "pass a time with tzinfo", place="at"
            )
        return at.isoformat()
    return None if at is None else str(at)
