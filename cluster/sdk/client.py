"""Synchronous Python API of a cluster: the asynchronous one over a blocking socket, without an event loop."""

from __future__ import annotations

import datetime
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from forebay.cluster.client import finish
from forebay.cluster.sdk.async_client import DEADLINE_S, AsyncClient

if TYPE_CHECKING:
    from forebay.cluster.schemas import (
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


class Client:
    """Access to a cluster under one identity; a context manager.

        with Client.connect() as client:
            job = client.submit(Path("job.sh"), bb="capacity=10GiB")
            client.wait(job, check=True)

    Every method raises a subclass of ForebayError. Calls find the leader, and are repeated over failovers with the same
    command ID, so that a command takes effect at most once. A client uses no thread and no event loop, so it also works
    in a notebook. Use one client for each thread.
    """

    def __init__(self, client: AsyncClient) -> None:
        """Wrap an asynchronous client over a blocking transport; programs use `connect`."""
        self._client = client

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

        opened = open_client(config, identity, urls, authority, certificate, key, deadline_s=deadline_s, blocking=True)
        return cls(AsyncClient(opened))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        finish(self._client.close())

    def new_command_id(self) -> str:
        """Return a new command ID, to pass to a command and to every repetition of it."""
        return self._client.new_command_id()

    def submit(
        self,
        script: str | os.PathLike[str],
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
        command_id: str | None = None,
        **options: Unpack[SubmitOptions],
    ) -> JobView:
        """Submit a script and return its job. See `AsyncClient.submit`."""
        return finish(
            self._client.submit(
                script, arguments=arguments, environment=environment, user=user, command_id=command_id, **options
            )
        )

    def cancel(self, job: int | str | JobView, *, hurry: bool = False, command_id: str | None = None) -> JobView:
        """Cancel a job, an array, or tasks of one, and return the first of them. See `AsyncClient.cancel`."""
        return finish(self._client.cancel(job, hurry=hurry, command_id=command_id))

    def job(self, job: int | str | JobView) -> JobView:
        """Return one job as it is now, with its transfers and expected start. See `AsyncClient.job`."""
        return finish(self._client.job(job))

    def jobs(
        self,
        *,
        state: str | Iterable[str] | None = None,
        user: str | None = None,
        name: str | None = None,
        job: int | str | None = None,
        at: int | datetime.datetime | None = None,
        limit: int | None = None,
    ) -> list[JobView]:
        """Return jobs by ID. See `AsyncClient.jobs`."""
        return finish(self._client.jobs(state=state, user=user, name=name, job=job, at=at, limit=limit))

    def wait(self, job: int | str | JobView, *, timeout_s: float | None = None, check: bool = False) -> JobView:
        """Wait until a job has ended, and return it. See `AsyncClient.wait`."""
        return finish(self._client.wait(job, timeout_s=timeout_s, check=check))

    def wait_all(
        self, jobs: Iterable[int | str | JobView], *, timeout_s: float | None = None, check: bool = False
    ) -> list[JobView]:
        """Wait until all these jobs have ended, and return them in order. See `AsyncClient.wait_all`."""
        return finish(self._client.wait_all(jobs, timeout_s=timeout_s, check=check))

    def history(self, job: int | str | JobView, *, last: int | None = None) -> HistoryAnswer:
        """Return what happened to a job. See `AsyncClient.history`."""
        return finish(self._client.history(job, last=last))

    def events(
        self, *, from_revision: int = 0, after: EventView | None = None, timeout_s: float | None = None
    ) -> Generator[EventView, None, None]:
        """Iterate over the events of the cluster. See `AsyncClient.events`."""
        stream = self._client.events(from_revision=from_revision, after=after, timeout_s=timeout_s)

        async def next_event() -> EventView | None:
            return await anext(stream, None)

        try:
            while (event := finish(next_event())) is not None:
                yield event
        finally:
            finish(stream.aclose())

    def transfers(self) -> list[TransferView]:
        """Return the transfers that are queued, running or stuck, by job."""
        return finish(self._client.transfers())

    def job_transfers(self, job: int | str | JobView) -> JobTransfersView:
        """Return the transfer of a job, its receipts, and the results that were not staged out."""
        return finish(self._client.job_transfers(job))

    def buffers(self) -> list[BufferView]:
        """Return the buffers of jobs and the persistent buffers."""
        return finish(self._client.buffers())

    def pools(self) -> list[PoolView]:
        """Return the pools with their free space."""
        return finish(self._client.pools())

    def status(self) -> StatusView:
        """Return the status of the replica that answers: cluster, leader, revision, version."""
        return finish(self._client.status())
