"""Everything that can be asked of a cluster, one method each, typed.

    async with Client.from_config(config, "operator") as client:
        request = SubmitRequest(command_id=client.new_command_id(), script=…, time_limit_s=60, workdir="/home/a")
        job = await client.submit(request)

Each method may take a `deadline_s` for the whole call, retries included, and raises ApiError. A write takes a
`command_id`, or makes one: pass your own to retry, perhaps from another process, a call whose outcome is unknown.
"""

from collections.abc import AsyncGenerator, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from cluster.client.accounting import Accounting
from cluster.client.bulk import Bulk
from cluster.client.calls import ATTEMPT_S, DEADLINE_S, Call, Caller
from cluster.client.configuring import Configuring
from cluster.client.endpoints import Endpoints
from cluster.client.errors import BAD_ANSWER, ApiError
from cluster.client.events import GIVE_UP_S, EventStream
from cluster.client.exchange import Exchange
from cluster.client.partitions import Partitioning
from cluster.client.transferring import Transferring
from cluster.config import Config
from cluster.schemas import (
    BurstAnswer,
    EventView,
    FeatureLevelAnswer,
    HandedAnswer,
    LedgerAnswer,
    ProviderStatus,
    SnapshotView,
    new_command_id,
    requests,
)
from cluster.schemas import jobs as views
from cluster.schemas import requests as run_views
from cluster.security import TlsFiles, check_validity
from cluster.system import Address, Clock, SystemClock

_T = TypeVar("_T")

_JSON: Final = msgspec.json.Encoder()


def _path(job: int | str) -> str:
    """Return the path of a job, an array, or tasks of one: 12, "12_3", "12_[1-4]"."""
    return f"/v1/jobs/{quote(str(job), safe='')}"


class Client(Configuring, Accounting, Transferring, Partitioning, Bulk):
    """A connection to a cluster as one identity; use it as an asynchronous context manager, or call close()."""

    def __init__(
        self, endpoints: Iterable[Address], tls: TlsFiles, *, clock: Clock | None = None, deadline_s: float = DEADLINE_S
    ) -> None:
        """Prepare to talk to the replicas at `endpoints` (API addresses); nothing is connected yet.

        `deadline_s` holds for calls that do not name their own. TlsRefused if certificate or key cannot be used: it is
        malformed, expired, readable by others, or of another authority.
        """
        self._clock = clock or SystemClock()
        check_validity(tls.certificate, self._clock.now())
        self._endpoints = Endpoints(endpoints)
        self._exchange = Exchange(tls)
        self._caller = Caller(self._exchange, self._endpoints, self._clock)
        self._deadline_s = deadline_s

    @classmethod
    def from_config(
        cls, config: Config, identity: str, *, clock: Clock | None = None, deadline_s: float = DEADLINE_S
    ) -> "Client":
        """Return a client of the configured cluster as `identity`; ConfigError or TlsRefused if that cannot be."""
        return cls(config.endpoints, config.tls_files(identity), clock=clock, deadline_s=deadline_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._exchange.close()

    def new_command_id(self) -> str:
        """Return a fresh id for one command."""
        return new_command_id(self._clock)

    # Jobs

    async def submit(self, request: requests.SubmitRequest, *, deadline_s: float | None = None) -> views.JobView:
        """Submit a job; the answer has its id and state."""
        return await self._write("POST", "/v1/jobs", request, views.JobView, deadline_s)

    async def cancel(
        self, job: int | str, *, hurry: bool = False, command_id: str | None = None, deadline_s: float | None = None
    ) -> views.JobView:
        """Cancel a job; with `hurry` its results are not staged out and its buffer is lost."""
        request = requests.CancelRequest(command_id=command_id or self.new_command_id(), hurry=hurry)
        return await self._write("POST", f"{_path(job)}/cancel", request, views.JobView, deadline_s)

    async def hold(
        self, job: int | str, *, command_id: str | None = None, deadline_s: float | None = None
    ) -> views.JobView:
        """Hold a pending job back."""
        request = requests.HoldRequest(command_id=command_id or self.new_command_id())
        return await self._write("POST", f"{_path(job)}/hold", request, views.JobView, deadline_s)

    async def release(
        self, job: int | str, *, command_id: str | None = None, deadline_s: float | None = None
    ) -> views.JobView:
        """Release a held job; an operation that had failed is tried again."""
        request = requests.ReleaseRequest(command_id=command_id or self.new_command_id())
        return await self._write("POST", f"{_path(job)}/release", request, views.JobView, deadline_s)

    async def suspend(self, job: int | str, *, command_id: str | None = None) -> views.JobView:
        """Stop the script of a running job where it is."""
        request = run_views.SuspendRequest(command_id=command_id or self.new_command_id())
        return await self._write("POST", f"{_path(job)}/suspend", request, views.JobView, None)

    async def continue_job(self, job: int | str, *, command_id: str | None = None) -> views.JobView:
        """Let the script of a suspended job go on."""
        request = run_views.ContinueRequest(command_id=command_id or self.new_command_id())
        return await self._write("POST", f"{_path(job)}/resume", request, views.JobView, None)

    async def requeue(self, job: int | str, *, command_id: str | None = None) -> views.JobView:
        """End the present run of a job, or take back its buffer; it waits and stages in again."""
        request = run_views.RequeueRequest(command_id=command_id or self.new_command_id())
        return await self._write("POST", f"{_path(job)}/requeue", request, views.JobView, None)

    async def clear_buffer(
        self, job: int | str, *, discard: bool = False, command_id: str | None = None
    ) -> views.JobView:
        """Forget the buffer of a job that could not be removed (operators)."""
        request = run_views.ClearRequest(command_id=command_id or self.new_command_id(), discard=discard)
        return await self._write("POST", f"{_path(job)}/clear", request, views.JobView, None)

    async def clear_persistent(
        self, name: str, *, discard: bool = False, command_id: str | None = None
    ) -> run_views.PersistentCleared:
        """Forget a persistent buffer that cannot be removed (operators)."""
        request = run_views.ClearRequest(command_id=command_id or self.new_command_id(), discard=discard)
        path = f"/v1/persistent/{quote(name, safe='')}/clear"
        return await self._write("POST", path, request, run_views.PersistentCleared, None)

    async def jobs(
        self,
        *,
        states: Sequence[str] = (),
        user: str | None = None,
        job: int | str | None = None,
        limit: int | None = None,
        after: int | None = None,
        stale: bool = False,
        deadline_s: float | None = None,
    ) -> views.JobsAnswer:
        """List jobs, by id; `states` are Slurm's words, `job` names one job, an array or some of its tasks.

        The newest `limit`; with `after`, the first `limit` of those with a larger id.
        """
        query = {"state": ",".join(states) or None, "user": user, "job": job, "limit": limit, "after": after}
        return await self._read("/v1/jobs", query, views.JobsAnswer, stale, deadline_s)

    async def job(self, job: int | str, *, stale: bool = False, deadline_s: float | None = None) -> views.JobView:
        """Return one job."""
        return await self._read(_path(job), {}, views.JobView, stale, deadline_s)

    async def history(
        self, job: int | str, *, stale: bool = False, deadline_s: float | None = None
    ) -> views.HistoryAnswer:
        """Return what happened to a job, oldest first."""
        return await self._read(f"{_path(job)}/history", {}, views.HistoryAnswer, stale, deadline_s)

    async def why(
        self, job: int | str, *, at: int | None = None, stale: bool = False, deadline_s: float | None = None
    ) -> views.WhyView:
        """Explain why a job waits now, or waited at the revision `at`."""
        return await self._read(f"{_path(job)}/why", {"at": at}, views.WhyView, stale, deadline_s)

    # Pools, buffers, nodes, transfers

    async def pools(self, *, stale: bool = False, deadline_s: float | None = None) -> views.PoolsAnswer:
        """List pools with their free capacity."""
        return await self._read("/v1/pools", {}, views.PoolsAnswer, stale, deadline_s)

    async def set_pool(
        self, name: str, request: requests.PoolRequest, *, deadline_s: float | None = None
    ) -> views.PoolView:
        """Make or change a pool (operators)."""
        return await self._write("PUT", f"/v1/pools/{_segment(name)}", request, views.PoolView, deadline_s)

    async def buffers(
        self, *, live: bool = False, stale: bool = False, deadline_s: float | None = None
    ) -> views.BuffersAnswer:
        """List buffers; with `live` only those that hold or wait for something."""
        query = {"live": "yes" if live else None}
        return await self._read("/v1/buffers", query, views.BuffersAnswer, stale, deadline_s)

    async def burst(self, *, stale: bool = False, deadline_s: float | None = None) -> BurstAnswer:
        """Return what `scontrol show burst` shows; `cluster.schemas.burst.burst_text` prints it."""
        return await self._read("/v1/burst", {}, BurstAnswer, stale, deadline_s)

    async def bbstat(self, arguments: Iterable[str], *, deadline_s: float | None = None) -> ProviderStatus:
        """Return what the site's provider says to `bbstat ARGUMENTS`; it may take as long as the deadline."""
        query = urlencode({"arguments": _JSON.encode(tuple(arguments)).decode()})
        wait_s = self._deadline_s if deadline_s is None else deadline_s
        return await self._call("GET", f"/v1/bbstat?{query}", None, ProviderStatus, deadline_s, attempt_s=wait_s)

    async def nodes(self, *, stale: bool = False, deadline_s: float | None = None) -> views.NodesAnswer:
        """List nodes."""
        return await self._read("/v1/nodes", {}, views.NodesAnswer, stale, deadline_s)

    async def drain(
        self, node: str, *, reason: str, command_id: str | None = None, deadline_s: float | None = None
    ) -> views.NodeView:
        """Keep new work away from a node (operators)."""
        request = requests.DrainRequest(command_id=command_id or self.new_command_id(), reason=reason)
        return await self._write("POST", f"/v1/nodes/{_segment(node)}/drain", request, views.NodeView, deadline_s)

    async def resume(
        self, node: str, *, command_id: str | None = None, deadline_s: float | None = None
    ) -> views.NodeView:
        """Give a drained node new work again (operators)."""
        request = requests.ResumeRequest(command_id=command_id or self.new_command_id())
        return await self._write("POST", f"/v1/nodes/{_segment(node)}/resume", request, views.NodeView, deadline_s)

    # The cluster

    async def members(self, *, stale: bool = False, deadline_s: float | None = None) -> views.MembersAnswer:
        """List the replicas as the one that answers sees them (the leader, unless `stale`)."""
        return await self._read("/v1/members", {}, views.MembersAnswer, stale, deadline_s)

    async def add_member(
        self, name: str, *, peer: Address, api: Address, command_id: str | None = None, deadline_s: float | None = None
    ) -> views.MembersAnswer:
        """Add a replica, which learns first and votes once it has caught up (operators)."""
        request = requests.AddMemberRequest(
            command_id=command_id or self.new_command_id(), name=name, peer=str(peer), api=str(api)
        )
        return await self._write("POST", "/v1/members", request, views.MembersAnswer, deadline_s)

    async def remove_member(
        self, name: str, *, command_id: str | None = None, deadline_s: float | None = None
    ) -> views.MembersAnswer:
        """Remove a replica for good (operators)."""
        request = requests.MemberRequest(command_id=command_id or self.new_command_id())
        return await self._write(
            "POST", f"/v1/members/{_segment(name)}/remove", request, views.MembersAnswer, deadline_s
        )

    async def replace_member(
        self, name: str, *, command_id: str | None = None, deadline_s: float | None = None
    ) -> views.MembersAnswer:
        """Let a replica that lost its data come back under a new id (operators)."""
        request = requests.MemberRequest(command_id=command_id or self.new_command_id())
        return await self._write(
            "POST", f"/v1/members/{_segment(name)}/replace", request, views.MembersAnswer, deadline_s
        )

    async def transfer_leadership(
        self, name: str | None = None, *, command_id: str | None = None, deadline_s: float | None = None
    ) -> views.TransferAnswer:
        """Hand the leadership over to a replica, or to the one that is furthest (operators)."""
        request = requests.TransferRequest(command_id=command_id or self.new_command_id(), name=name)
        return await self._write("POST", "/v1/members/transfer", request, views.TransferAnswer, deadline_s)

    async def feature_level(
        self, replica: Address | None = None, *, stale: bool = False, deadline_s: float | None = None
    ) -> FeatureLevelAnswer:
        """Return the cluster's feature level and the highest that each replica knows (operators).

        As the leader sees it; as the replica at `replica` does, or with `stale` whichever answers.
        """
        query = {} if replica is None else {"stale": "ok"}
        return await self._read("/v1/feature-level", query, FeatureLevelAnswer, stale, deadline_s, only=replica)

    async def raise_feature_level(
        self, level: int, *, command_id: str | None = None, deadline_s: float | None = None
    ) -> FeatureLevelAnswer:
        """Raise the cluster's feature level to `level`, one above the present one (operators). It never goes down."""
        request = requests.FeatureLevelRequest(command_id=command_id or self.new_command_id(), level=level)
        return await self._write("POST", "/v1/feature-level", request, FeatureLevelAnswer, deadline_s)

    async def status(
        self, replica: Address | None = None, *, digest: bool = False, deadline_s: float | None = None
    ) -> views.StatusView:
        """Return the status of the replica at `replica`, or of whichever answers; `digest` adds the state digest."""
        query = {"digest": "yes" if digest else None}
        return await self._read("/v1/status", query, views.StatusView, True, deadline_s, only=replica)

    async def digests(self, replica: Address, *, deadline_s: float | None = None) -> views.DigestsAnswer:
        """Return the digests of states that the replica at `replica` has kept (operators and replicas)."""
        return await self._read("/v1/digests", {}, views.DigestsAnswer, True, deadline_s, only=replica)

    async def ledger(
        self, *, first_index: int, limit: int, replica: Address | None = None, deadline_s: float | None = None
    ) -> LedgerAnswer:
        """Return entries of the ledger that a replica holds, from `first_index` on."""
        query = {"from": first_index, "limit": limit}
        return await self._read("/v1/ledger", query, LedgerAnswer, True, deadline_s, only=replica)

    async def history_before(self, last: int, *, replica: Address, deadline_s: float | None = None) -> HandedAnswer:
        """Return entries of a replica's ledger that end with index `last`, as they are stored (replicas)."""
        return await self._read("/v1/ledger/history", {"last": last}, HandedAnswer, True, deadline_s, only=replica)

    async def save_snapshot(self, replica: Address | None = None, *, deadline_s: float | None = None) -> SnapshotView:
        """Let the replica at `replica`, or whichever answers, write a snapshot now (operators)."""
        return await self._call("POST", "/v1/snapshots", None, SnapshotView, deadline_s, stale=True, only=replica)

    async def openapi(self, *, deadline_s: float | None = None) -> dict[str, Any]:
        """Return the OpenAPI document of the server."""
        return await self._read("/v1/openapi.json", {}, dict[str, Any], True, deadline_s)

    def events(self, *, from_revision: int = 0, give_up_s: float = GIVE_UP_S) -> AsyncGenerator[EventView, None]:
        """Iterate over the events of all revisions after `from_revision`, for ever, over broken connections.

        Whoever stops early closes it: `async with contextlib.aclosing(client.events()) as events`.
        """
        stream = EventStream(
            self._exchange, self._endpoints, self._clock, from_revision=from_revision, give_up_s=give_up_s
        )
        return stream.read()

    # Agents

    async def register(
        self, node: str, request: requests.RegisterRequest, *, deadline_s: float | None = None
    ) -> views.RegisterAnswer:
        """Announce an agent that has just started."""
        path = f"/v1/agents/{_segment(node)}/register"
        return await self._write("POST", path, request, views.RegisterAnswer, deadline_s)

    async def poll(
        self, node: str, request: requests.PollRequest, *, deadline_s: float | None = None
    ) -> views.PollAnswer:
        """Wait for the node's orders to differ from those at `seen_revision`, at most `wait_s`; returns all of them.

        The deadline starts after `wait_s`.
        """
        return await self._call(
            "POST",
            f"/v1/agents/{_segment(node)}/poll",
            request,
            views.PollAnswer,
            (self._deadline_s if deadline_s is None else deadline_s) + request.wait_s,
            attempt_s=ATTEMPT_S + request.wait_s,
        )

    async def report(
        self, node: str, request: requests.ReportsRequest, *, deadline_s: float | None = None
    ) -> views.ReportsAnswer:
        """Report results; whatever is in the answer, accepted or refused, is acknowledged."""
        path = f"/v1/agents/{_segment(node)}/reports"
        marker = request.reports[0].command_id if request.reports else None
        return await self._call("POST", path, request, views.ReportsAnswer, deadline_s, command_id=marker)

    # How

    async def _write(
        self, method: str, path: str, request: requests.Command, kind: type[_T], deadline_s: float | None
    ) -> _T:
        return await self._call(method, path, request, kind, deadline_s, command_id=request.command_id)

    async def _read(
        self,
        path: str,
        query: dict[str, Any],
        kind: type[_T],
        stale: bool,
        deadline_s: float | None,
        *,
        only: Address | None = None,
    ) -> _T:
        if stale and only is None:
            query = {**query, "stale": "ok"}
        text = urlencode({key: value for key, value in query.items() if value is not None})
        target = f"{path}?{text}" if text else path
        return await self._call("GET", target, None, kind, deadline_s, stale=stale, only=only)

    async def _call(
        self,
        method: str,
        target: str,
        request: requests.Request | None,
        kind: type[_T],
        deadline_s: float | None,
        *,
        command_id: str | None = None,
        attempt_s: float = ATTEMPT_S,
        stale: bool = False,
        only: Address | None = None,
    ) -> _T:
        call = Call(
            method=method,
            target=target,
            body=None if request is None else _JSON.encode(request),
            command_id=command_id,
            leader_only=not stale,
            deadline_s=self._deadline_s if deadline_s is None else deadline_s,
            attempt_s=attempt_s,
        )
        value, _ = await self._perform(call, kind, only)
        return value

    async def _perform(self, call: Call, kind: type[_T], only: Address | None = None) -> tuple[_T, bool]:
        """Return the answer, and whether an earlier request of this call may have been carried out."""
        caller = self._caller if only is None else Caller(self._exchange, Endpoints([only]), self._clock)
        answer = await caller.perform(call)
        try:
            return msgspec.json.decode(answer.body, type=kind), answer.unsure
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ApiError(
                answer.status,
                BAD_ANSWER,
                f"the answer to {call.method} {call.target} cannot be read: {error}",
                remedy="check that client and replicas are of the same release",
                outcome="refused" if call.command_id is None else "unknown",
                command_id=call.command_id,
            ) from error


def _segment(name: str) -> str:
    return quote(name, safe="")
