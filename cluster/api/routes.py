"""Every route in one table: method, path, who may use it, what it takes, what it answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import msgspec
from aiohttp import web

from cluster.api import accounting, agents, capacity, configuration, events, history, jobs, ledger, members, transfers
from cluster.api import accounting as partitions
from cluster.api import capacity as bbstat
from cluster.api import capacity as burst
from cluster.api import capacity as pools
from cluster.api import jobs as runs
from cluster.api import jobs as updates
from cluster.api import members as levels
from cluster.api.service import Call, Reply
from cluster.api.web import PEOPLE, Problem
from cluster.schemas import (
    BurstAnswer,
    EventView,
    FeatureLevelAnswer,
    HandedAnswer,
    LedgerAnswer,
    ProviderStatus,
    SnapshotView,
)
from cluster.schemas import accounts as av
from cluster.schemas import accounts as pv
from cluster.schemas import configuration as cv
from cluster.schemas import jobs as v
from cluster.schemas import requests as r
from cluster.schemas import requests as rv
from cluster.schemas import transfers as tv
from cluster.security import Role

Handler = Callable[[Call], Awaitable[Reply | web.StreamResponse]]

SEGMENT_CHARACTERS_MAX = 256
"""One part of a path, characters: names have at most 64."""

OPERATORS = frozenset({Role.OPERATOR})
AGENTS = frozenset({Role.AGENT})
AUDITORS = frozenset({Role.OPERATOR, Role.REPLICA})
REPLICAS = frozenset({Role.REPLICA})
EVERYBODY = frozenset(Role)

STALE = {"stale": "`ok`: answer at once from the replica that is asked, however old its state is"}


class Route(msgspec.Struct, frozen=True):
    """One thing that can be asked."""

    method: str
    path: str
    roles: frozenset[Role]
    handler: Handler
    answer: Any
    body: Any = None
    query: Mapping[str, str] = {}
    status: int = 200
    tag: str = "jobs"

    @property
    def name(self) -> str:
        """The operation in one word with underscores, for metrics and the OpenAPI document."""
        return f"{self.handler.__module__.rsplit('.', 1)[-1]}_{self.handler.__name__}"

    @property
    def summary(self) -> str:
        """The first line of the handler's documentation."""
        return (self.handler.__doc__ or "").strip().splitlines()[0]


def _kept(what: str, listing: Handler, answer: Any) -> Iterator[Route]:
    """Yield the route that lists one kind of record of accounting."""
    yield Route("GET", f"/v1/{what}", PEOPLE, listing, answer, query=STALE, tag="accounting")


def _changed(what: str, setting: Handler, deleting: Handler, answer: Any, body: Any) -> Iterator[Route]:
    """Yield the routes that change one record of accounting, and take it away."""
    yield Route("PUT", f"/v1/{what}/{{name}}", OPERATORS, setting, answer, body, tag="accounting")
    yield Route("POST", f"/v1/{what}/{{name}}/delete", OPERATORS, deleting, answer, av.DeleteRequest, tag="accounting")


ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/jobs", PEOPLE, jobs.submit, v.JobView, r.SubmitRequest, status=201),
    Route(
        "GET",
        "/v1/jobs",
        PEOPLE,
        jobs.list_jobs,
        v.JobsAnswer,
        query={
            "state": "job states, separated by commas",
            "user": "only jobs of this user",
            "job": "only this job, or these tasks: `12`, `12_3`, `12_[1-4]`; `12` is all tasks of an array",
            "after": "only jobs with a larger id, the smallest first: for reading all of them, page by page",
            "limit": f"at most so many jobs (default {jobs.JOBS_LISTED}, at most {jobs.JOBS_LISTED_MAX})",
            **STALE,
        },
    ),
    Route("POST", "/v1/commands", PEOPLE, jobs.bulk, v.BulkAnswer, r.BulkRequest),
    Route("GET", "/v1/jobs/{id}", PEOPLE, jobs.show, v.JobView, query=STALE),
    Route("GET", "/v1/jobs/{id}/history", PEOPLE, history.history, v.HistoryAnswer, query=STALE),
    Route(
        "GET",
        "/v1/jobs/{id}/why",
        PEOPLE,
        history.why,
        v.WhyView,
        query={"at": "the revision to explain; now if left out", **STALE},
    ),
    Route("GET", "/v1/jobs/{id}/estimate", PEOPLE, accounting.estimate, av.EstimateView, query=STALE),
    *_kept("accounts", accounting.accounts, av.AccountsAnswer),
    *_changed("accounts", accounting.set_account, accounting.delete_account, av.AccountsAnswer, av.AccountRequest),
    *_kept("qos", accounting.qos, av.QosAnswer),
    *_changed("qos", accounting.set_qos, accounting.delete_qos, av.QosAnswer, av.QosRequest),
    *_kept("licenses", accounting.licenses, av.LicensesAnswer),
    *_changed("licenses", accounting.set_license, accounting.delete_license, av.LicensesAnswer, av.LicenseRequest),
    *_kept("reservations", accounting.reservations, av.ReservationsAnswer),
    *_changed(
        "reservations",
        accounting.set_reservation,
        accounting.delete_reservation,
        av.ReservationsAnswer,
        av.ReservationRequest,
    ),
    *_kept("scheduling", accounting.scheduling, av.SchedulingAnswer),
    Route(
        "PUT",
        "/v1/scheduling",
        OPERATORS,
        accounting.set_scheduling,
        av.SchedulingAnswer,
        av.SchedulingRequest,
        tag="accounting",
    ),
    *_kept("partitions", partitions.partitions, pv.PartitionsAnswer),
    Route(
        "PUT",
        "/v1/partitions/{name}",
        OPERATORS,
        partitions.set_partition,
        pv.PartitionsAnswer,
        pv.PartitionRequest,
        tag="accounting",
    ),
    Route(
        "POST",
        "/v1/partitions/{name}/delete",
        OPERATORS,
        partitions.delete_partition,
        pv.PartitionsAnswer,
        pv.PartitionDeleteRequest,
        tag="accounting",
    ),
    *_kept("usage", partitions.usage, pv.UsageAnswer),
    Route(
        "POST",
        "/v1/usage/reset",
        OPERATORS,
        partitions.reset_usage,
        pv.UsageAnswer,
        pv.UsageResetRequest,
        tag="accounting",
    ),
    Route("POST", "/v1/jobs/{id}/update", PEOPLE, updates.update, v.JobView, r.UpdateRequest),
    Route("POST", "/v1/jobs/{id}/cancel", PEOPLE, jobs.cancel, v.JobView, r.CancelRequest),
    Route("POST", "/v1/jobs/{id}/hold", PEOPLE, jobs.hold, v.JobView, r.HoldRequest),
    Route("POST", "/v1/jobs/{id}/release", PEOPLE, jobs.release, v.JobView, r.ReleaseRequest),
    Route("POST", "/v1/jobs/{id}/suspend", PEOPLE, runs.suspend, v.JobView, rv.SuspendRequest),
    Route("POST", "/v1/jobs/{id}/resume", PEOPLE, runs.resume, v.JobView, rv.ContinueRequest),
    Route("POST", "/v1/jobs/{id}/requeue", PEOPLE, runs.requeue, v.JobView, rv.RequeueRequest),
    Route("POST", "/v1/jobs/{id}/clear", OPERATORS, runs.clear, v.JobView, rv.ClearRequest),
    Route(
        "POST",
        "/v1/persistent/{name}/clear",
        OPERATORS,
        runs.clear_persistent,
        rv.PersistentCleared,
        rv.ClearRequest,
        tag="capacity",
    ),
    Route("GET", "/v1/pools", PEOPLE, capacity.pools, v.PoolsAnswer, query=STALE, tag="capacity"),
    Route("POST", "/v1/pools/{name}/add", OPERATORS, pools.add, v.PoolView, cv.PoolAddRequest, tag="capacity"),
    Route("POST", "/v1/pools/{name}/change", OPERATORS, pools.change, v.PoolView, cv.PoolChangeRequest, tag="capacity"),
    Route(
        "POST",
        "/v1/pools/{name}/remove",
        OPERATORS,
        pools.remove,
        cv.PoolRemovedAnswer,
        cv.PoolRemoveRequest,
        tag="capacity",
    ),
    Route(
        "GET",
        "/v1/configuration",
        OPERATORS,
        configuration.show,
        cv.ConfigurationAnswer,
        query=STALE,
        tag="configuration",
    ),
    Route(
        "POST",
        "/v1/configuration",
        OPERATORS,
        configuration.configure,
        cv.ConfigurationAnswer,
        cv.ConfigureRequest,
        tag="configuration",
    ),
    Route(
        "POST",
        "/v1/configuration/diff",
        OPERATORS,
        configuration.diff,
        cv.CompareAnswer,
        cv.CompareRequest,
        tag="configuration",
    ),
    Route("PUT", "/v1/pools/{name}", OPERATORS, capacity.set_pool, v.PoolView, r.PoolRequest, tag="capacity"),
    Route(
        "GET",
        "/v1/buffers",
        PEOPLE,
        capacity.buffers,
        v.BuffersAnswer,
        query={"live": "`yes`: only buffers that hold or wait for something", **STALE},
        tag="capacity",
    ),
    Route(
        "GET",
        "/v1/burst",
        PEOPLE,
        burst.burst,
        BurstAnswer,
        query={"format": "`json`, or `text`: what `scontrol show burst` prints; json if left out", **STALE},
        tag="capacity",
    ),
    Route(
        "GET",
        "/v1/bbstat",
        PEOPLE,
        bbstat.status,
        ProviderStatus,
        query={"arguments": "what the provider is asked, a JSON list of texts; nothing if left out"},
        tag="capacity",
    ),
    Route("GET", "/v1/nodes", PEOPLE, capacity.nodes, v.NodesAnswer, query=STALE, tag="nodes"),
    Route("POST", "/v1/nodes/{name}/drain", OPERATORS, capacity.drain, v.NodeView, r.DrainRequest, tag="nodes"),
    Route("POST", "/v1/nodes/{name}/resume", OPERATORS, capacity.resume, v.NodeView, r.ResumeRequest, tag="nodes"),
    Route("GET", "/v1/transfers", PEOPLE, transfers.list_transfers, tv.TransfersAnswer, tag="transfers"),
    Route("GET", "/v1/transfers/{id}", PEOPLE, transfers.show, tv.JobTransfersView, tag="transfers"),
    Route(
        "GET",
        "/v1/transfers/{id}/receipts",
        PEOPLE,
        transfers.receipts,
        tv.ReceiptsAnswer,
        query={"stage": "only of `stage_in` or `stage_out`", "attempt": "only of this attempt", **STALE},
        tag="transfers",
    ),
    Route("GET", "/v1/members", EVERYBODY, ledger.members, v.MembersAnswer, query=STALE, tag="cluster"),
    Route("POST", "/v1/members", OPERATORS, members.add, v.MembersAnswer, r.AddMemberRequest, tag="cluster"),
    Route(
        "POST", "/v1/members/transfer", OPERATORS, members.transfer, v.TransferAnswer, r.TransferRequest, tag="cluster"
    ),
    Route(
        "POST", "/v1/members/{name}/remove", OPERATORS, members.remove, v.MembersAnswer, r.MemberRequest, tag="cluster"
    ),
    Route(
        "POST",
        "/v1/members/{name}/replace",
        OPERATORS,
        members.replace,
        v.MembersAnswer,
        r.MemberRequest,
        tag="cluster",
    ),
    Route(
        "GET",
        "/v1/status",
        EVERYBODY,
        ledger.status,
        v.StatusView,
        query={"digest": "`yes`: with the digest of the state", **STALE},
        tag="cluster",
    ),
    Route(
        "GET",
        "/v1/ledger",
        AUDITORS,
        ledger.read,
        LedgerAnswer,
        query={
            "from": "index of the first entry",
            "limit": f"at most so many entries (default {ledger.ENTRIES_READ}, at most {ledger.ENTRIES_READ_MAX})",
            **STALE,
        },
        tag="cluster",
    ),
    Route(
        "GET",
        "/v1/ledger/history",
        REPLICAS,
        ledger.history,
        HandedAnswer,
        query={"last": "index of the last entry", **STALE},
        tag="cluster",
    ),
    Route("GET", "/v1/digests", AUDITORS, ledger.digests, v.DigestsAnswer, query=STALE, tag="cluster"),
    Route("GET", "/v1/feature-level", OPERATORS, levels.show, FeatureLevelAnswer, query=STALE, tag="cluster"),
    Route(
        "POST",
        "/v1/feature-level",
        OPERATORS,
        levels.raise_level,
        FeatureLevelAnswer,
        r.FeatureLevelRequest,
        tag="cluster",
    ),
    Route("POST", "/v1/snapshots", OPERATORS, ledger.save_snapshot, SnapshotView, tag="cluster"),
    Route(
        "GET",
        "/v1/events",
        PEOPLE,
        events.stream,
        EventView,
        query={"from": "send events of revisions after this one; from now on if left out"},
        tag="cluster",
    ),
    Route(
        "POST", "/v1/agents/{node}/register", AGENTS, agents.register, v.RegisterAnswer, r.RegisterRequest, tag="agents"
    ),
    Route("POST", "/v1/agents/{node}/poll", AGENTS, agents.poll, v.PollAnswer, r.PollRequest, tag="agents"),
    Route("POST", "/v1/agents/{node}/reports", AGENTS, agents.reports, v.ReportsAnswer, r.ReportsRequest, tag="agents"),
    Route("GET", "/v1/openapi.json", EVERYBODY, ledger.document, dict[str, Any], query=STALE, tag="cluster"),
    Route("GET", "/healthz", EVERYBODY, ledger.healthy, str, tag="cluster"),
    Route("GET", "/readyz", EVERYBODY, ledger.ready, str, tag="cluster"),
    Route("GET", "/metrics", EVERYBODY, ledger.metrics, str, tag="cluster"),
)


def _tables() -> dict[int, list[tuple[tuple[str, ...], dict[str, Route]]]]:
    found: dict[int, list[tuple[tuple[str, ...], dict[str, Route]]]] = {}
    for route in ROUTES:
        parts = tuple(route.path.strip("/").split("/"))
        rows = found.setdefault(len(parts), [])
        methods = next((methods for known, methods in rows if known == parts), None)
        if methods is None:
            methods = {}
            rows.append((parts, methods))
        methods[route.method] = route
    return found


_TABLES = _tables()


def find_route(method: str, raw_path: str) -> tuple[Route, dict[str, str]]:
    """Return the route and the parameters in the path, decoded; Problem 404 or 405."""
    parts = raw_path.strip("/").split("/")
    for known, methods in _TABLES.get(len(parts), ()):
        if all(wanted == part or wanted[0] == "{" for wanted, part in zip(known, parts, strict=True)):
            params = {
                wanted[1:-1]: _segment(part) for wanted, part in zip(known, parts, strict=True) if wanted[0] == "{"
            }
            route = methods.get(method)
            if route is None:
                allowed = ", ".join(sorted(methods))
                raise Problem(
                    405,
                    "method_not_allowed",
                    f"{method} is not possible here",
                    f"use {allowed}",
                    headers={"Allow": allowed},
                )
            return route, params
    raise Problem(
        404, "unknown_route", f"there is nothing at {raw_path[:SEGMENT_CHARACTERS_MAX]}", "see /v1/openapi.json"
    )


def _segment(part: str) -> str:
    try:
        text = unquote(part, errors="strict")
    except UnicodeDecodeError as error:
        raise Problem(400, "invalid_field", "the path is not UTF-8", "encode it as UTF-8", "path") from error
    if not text or len(text) > SEGMENT_CHARACTERS_MAX or not text.isprintable():
        raise Problem(
            400, "invalid_field", f"{text[:64]!r} cannot be part of a path", "write a name or a number", "path"
        )
    return text


def check_query(route: Route, query: Mapping[str, str], names: list[str]) -> None:
    """Refuse query parameters that the route does not know, twice given ones, and unknown words; Problem 400."""
    for name in names:
        if name not in route.query:
            known = ", ".join(sorted(route.query)) or "none"
            raise Problem(
                400,
                "unknown_query",
                f"the query parameter {name!r} is unknown here",
                f"known are: {known}",
                f"query {name}",
            )
    if len(names) != len(set(names)):
        raise Problem(400, "invalid_field", "a query parameter is given twice", "give each once", "query")
    for name, word in (("stale", "ok"), ("digest", "yes"), ("live", "yes")):
        if query.get(name, word) != word:
            raise Problem(
                400,
                "invalid_field",
                f"{name} is {query[name]!r}",
                f"write {name}={word}, or leave it out",
                f"query {name}",
            )
