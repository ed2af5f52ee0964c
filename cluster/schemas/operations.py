"""Table of the API's operations, the source of routes, client calls and the OpenAPI document.

An operation's name is part of the contract: the metric label `route` and the OpenAPI operationId contain it. It is
imperative. An operation that is one command of the state machine has its name (`replica.messages.kind_of`).
"""

import re
from collections.abc import Callable, Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from forebay.cluster.schemas.base import Command, Json
from forebay.cluster.schemas.job_fields import SubmitRequest, UpdateRequest
from forebay.cluster.security import Role
from forebay.replica.lazy_exports import LazyModule
from forebay.replica.values import NODES_MAX

if TYPE_CHECKING:
    from forebay.cluster.schemas import accounts as a
    from forebay.cluster.schemas import agents, ledger, overview, sessions
    from forebay.cluster.schemas import burst as b
    from forebay.cluster.schemas import certificates as s
    from forebay.cluster.schemas import configuration as c
    from forebay.cluster.schemas import drills as d
    from forebay.cluster.schemas import external_jobs as g
    from forebay.cluster.schemas import jobs as j
    from forebay.cluster.schemas import requests as r
    from forebay.cluster.schemas import transfers as t
else:
    # Schemas are built on first use, because one CLI command needs two of these hundred.
    a, b, c, j = map(
        LazyModule, [f"forebay.cluster.schemas.{name}" for name in ("accounts", "burst", "configuration", "jobs")]
    )
    agents, r, s, t = map(
        LazyModule, [f"forebay.cluster.schemas.{name}" for name in ("agents", "requests", "certificates", "transfers")]
    )
    d, g, ledger, overview, sessions = map(
        LazyModule,
        [f"forebay.cluster.schemas.{name}" for name in ("drills", "external_jobs", "ledger", "overview", "sessions")],
    )

Asked = TypeVar("Asked")
Answered = TypeVar("Answered", covariant=True)

PEOPLE: Final = frozenset({Role.OPERATOR, Role.USER})
"""Roles that submit and manage jobs through the API, in bulk and on the channel."""

_OPERATORS: Final = frozenset({Role.OPERATOR})
_AGENTS: Final = frozenset({Role.AGENT})
_REPLICAS: Final = frozenset({Role.REPLICA})
_LEDGER_READERS: Final = frozenset({Role.OPERATOR, Role.REPLICA})
_AUDITORS: Final = _LEDGER_READERS | {Role.AUDITOR}
"""Roles that read ledger proofs; an auditor reads nothing else."""
_SCHEDULERS: Final = frozenset({Role.SCHEDULER})
_DRILLS: Final = frozenset({Role.OPERATOR, Role.DRILL})
"""Roles that run drills."""
_DRILL_WATCHERS: Final = PEOPLE | {Role.DRILL}
_READERS: Final = PEOPLE | _SCHEDULERS
"""Users, operators, and other schedulers for their own external jobs.

`ApiCall.job_in` hides all other jobs from a scheduler.
"""
_EVERYBODY: Final = frozenset(Role) - {Role.AUDITOR, Role.MONITOR, Role.GATEWAY}
"""All participating roles; a gateway only acts on behalf of users."""
_WATCHERS: Final = _EVERYBODY | {Role.MONITOR}
"""Roles that read metrics and health; a monitor reads nothing else."""

JOBS_LISTED: Final = 1_000
"""Default number of jobs in a list."""

JOBS_LISTED_MAX: Final = 10_000
"""Jobs in one list, count: about ten megabytes of JSON; filter by state or user to get fewer."""

EXPECTED_LISTED_MAX: Final = 100
"""Jobs in one list with expected starts, count: each requires the jobs ahead of it."""

TRANSFERS_LISTED_MAX: Final = 10_000
"""Transfers in one list, count: more than twice the default limit on operations of a stage."""

ENTRIES_READ: Final = 100
"""Default number of ledger entries in one response."""

ENTRIES_READ_MAX: Final = 1_000
"""Ledger entries in one response, count."""

EXTERNAL_JOB_WAIT_S_MAX: Final = 30
"""Longest wait of a query about an external job, seconds: below the idle timeouts of common proxies and firewalls."""

JSON: Final = "application/json"
TEXT: Final = "text/plain"
BYTES: Final = "application/octet-stream"
EVENT_STREAM: Final = "text/event-stream"

HISTORY_LIMIT: Final = 1_000
HISTORY_LIMIT_MAX: Final = 10_000
"""Commands in one history page, count."""

LEADERS_LIMIT: Final = 100
LEADERS_LIMIT_MAX: Final = 1_000
"""Leader terms in one response, count."""

DIFF_LIMIT: Final = 1_000
DIFF_LIMIT_MAX: Final = 10_000
"""Changes in one response, count."""

HISTORY_OF: Final = (
    "pool", "filesystem", "node", "partition", "reservation", "buffer", "account", "qos", "license", "scheduler",
)  # fmt: skip
"""Kinds of named records that belong to no job; `buffer`: persistent ones."""

_THEN: Final = {
    "at": "revision, or time such as 2026-01-31T12:00:00Z, of the state to show; default: the current state"
}
_PATIENCE: Final = {
    "while": "comma-separated phases; respond once the job is in another one",
    "wait_s": f"longest wait in seconds (default 0, maximum {EXTERNAL_JOB_WAIT_S_MAX})",
}
_STALE: Final = {"stale": "`ok`: allow a stale read from this replica"}
_PARAMETER: Final = re.compile(r"\{([a-z_]+)\}")

REST: Final = "tile"
"""Parameter that matches the rest of a path, including slashes."""

LiveValue = Literal["contacts", "progress", "replicas", "metrics"]
"""Values of a replica that its state does not contain: contacts and progress of its agents, and its and its peers'
statuses, and its metrics.
"""

Parameter = str | int | bool | None
"""Path or query parameter. True is sent as `yes`; False and None are omitted."""


class ApiOperation(msgspec.Struct, Generic[Asked, Answered], frozen=True):
    """Operation of the API."""

    name: str
    method: str
    path: str
    roles: frozenset[Role]
    asks: Callable[[], type[Asked]]
    answers: Callable[[], type[Answered]]
    summary: str
    query: Mapping[str, str] = {}
    """Query parameters and their meaning."""
    status: int = 200
    """HTTP status of success."""
    tag: str = "jobs"
    content_type: str = JSON
    own: bool = False
    """True if each replica answers for itself, without a leader."""
    slow: bool = False
    """True if one replica may use the whole timeout of the call."""
    live: tuple[LiveValue, ...] | None = None
    """For a read of the state, which depends only on the state, the time, the caller and these values; with many jobs a
    process beside the replica answers it. None: the replica itself answers.
    """

    of_ledger: bool = False
    """True if it reads records of the ledger; always answered by the process beside the replica."""

    @property
    def request(self) -> type[Asked]:
        """Type of the body; NoneType for none."""
        return self.asks()

    @property
    def answer(self) -> type[Answered]:
        """Type of a successful response."""
        return self.answers()

    @property
    def has_body(self) -> bool:
        """Return whether a request carries a body."""
        return self.request is not NoneType

    @property
    def path_parameters(self) -> list[str]:
        """Names of the parameters in the path."""
        return _PARAMETER.findall(self.path)

    def target(self, parameters: Mapping[str, Parameter]) -> str:
        """Return the encoded path and query.

        Raises:
            TypeError: A parameter is missing or unknown.
        """
        names = self.path_parameters
        wrong = {*names} - {*parameters} or {*parameters} - {*names} - {*self.query}
        if wrong:
            raise TypeError(f"{self.name} takes {', '.join([*names, *self.query]) or 'no parameters'}: {sorted(wrong)}")
        path = _PARAMETER.sub(
            lambda found: quote(str(parameters[found[1]]), safe="/" if found[1] == REST else ""), self.path
        )
        sent = {
            name: "yes" if value is True else value
            for name, value in parameters.items()
            if name not in names and value is not None and value is not False
        }
        return f"{path}?{urlencode(sent)}" if sent else path


def _get(
    name: str,
    path: str,
    roles: frozenset[Role],
    answer: Callable[[], type[Answered]],
    summary: str,
    query: Mapping[str, str] | None = None,
    *,
    stale: bool = True,
    then: bool = False,
    **more: Any,
) -> ApiOperation[None, Answered]:
    """Return the row of a read. `stale`: any replica may answer from its own state. `then`: the read accepts a past
    revision or time.
    """
    known = {**(query or {}), **(_THEN if then else {}), **(_STALE if stale else {})}
    return ApiOperation(name, "GET", path, roles, lambda: NoneType, answer, summary, known, **more)


def _write(
    name: str,
    where: str,
    roles: frozenset[Role],
    request: Callable[[], type[Asked]],
    answer: Callable[[], type[Answered]],
    summary: str,
    **more: Any,
) -> ApiOperation[Asked, Answered]:
    """Return the row of an operation with a body or an effect; `where` is method and path."""
    method, path = where.split()
    return ApiOperation(name, method, path, roles, request, answer, summary, **more)


# fmt: off

# Jobs

SUBMIT_JOB = _write("submit_job", "POST /v1/jobs", PEOPLE, lambda: SubmitRequest, lambda: j.JobView,
    "Submit a job.", status=201)
LIST_JOBS = _get("list_jobs", "/v1/jobs", PEOPLE, lambda: j.JobsAnswer,
    "List jobs by ID: the newest `limit` jobs, or the next ones after `after`.",
    {
        "state": "comma-separated job states",
        "user": "only jobs of this user",
        "name": "only jobs whose name contains this text, in upper or lower case",
        "external_jobs": "`yes`: only external jobs, which other schedulers manage",
        "job": "only this job, array task or tasks: `12`, `12_3`, `12_[1-4]`; the ID of an array selects all its tasks",
        "after": "only jobs with a larger ID, the smallest first; use it to read all jobs page by page",
        "before": "only jobs with a smaller ID, the largest first",
        "collapse": "`yes`: one row for all tasks of an array in the same state",
        "expected": f"`yes`: include expected starts of pending jobs; the limit is then {EXPECTED_LISTED_MAX} jobs",
        "limit": f"number of jobs (default {JOBS_LISTED}, maximum {JOBS_LISTED_MAX})",
    }, then=True, live=())
SEND_COMMANDS = _write("send_commands", "POST /v1/commands", PEOPLE, lambda: r.BulkRequest, lambda: j.BulkAnswer,
    "Run several commands in order; a rejected command does not stop the others.")
SHOW_JOB = _get("show_job", "/v1/jobs/{id}", PEOPLE, lambda: j.JobView,
    "Show one job.", then=True, live=("progress",))
SHOW_JOB_HISTORY = _get("show_job_history", "/v1/jobs/{id}/history", _READERS, lambda: j.HistoryAnswer,
    "Show a job's events, oldest first, each with the job's state and reason after it.",
    {"last": "number of rows, counted from the last"}, of_ledger=True)
EXPLAIN_JOB = _get("explain_job", "/v1/jobs/{id}/why", _READERS, lambda: j.WhyView,
    "Explain why a job waits, now or at a past time.",
    {"at": "revision, or time such as 2026-01-31T12:00:00Z; default: now"}, live=())
ESTIMATE_JOB = _get("estimate_job", "/v1/jobs/{id}/estimate", PEOPLE, lambda: a.EstimateView,
    "Estimate when a job starts, from the queue, time limits and measured transfers, and explain why not earlier.",
    live=())
UPDATE_JOB = _write("update_job", "POST /v1/jobs/{id}/update", PEOPLE, lambda: UpdateRequest, lambda: j.JobView,
    "Change a pending job, or the pending tasks of an array.")
CANCEL_JOB = _write("cancel_job", "POST /v1/jobs/{id}/cancel", PEOPLE, lambda: r.CancelRequest, lambda: j.JobView,
    "Cancel a job; `hurry` skips its stage-out.")
HOLD_JOB = _write("hold_job", "POST /v1/jobs/{id}/hold", PEOPLE, lambda: Command, lambda: j.JobView,
    "Hold a pending job.")
RELEASE_JOB = _write("release_job", "POST /v1/jobs/{id}/release", PEOPLE, lambda: r.ReleaseRequest, lambda: j.JobView,
    "Release a held job, or retry its failed operation; `partial` lets a stage-out skip missing files.")
SUSPEND_JOB = _write("suspend_job", "POST /v1/jobs/{id}/suspend", PEOPLE, lambda: Command, lambda: j.JobView,
    "Suspend the script of a running job; suspended time does not count against its limit.")
RESUME_JOB = _write("resume_job", "POST /v1/jobs/{id}/resume", PEOPLE, lambda: Command, lambda: j.JobView,
    "Resume the script of a suspended job.")
REQUEUE_JOB = _write("requeue_job", "POST /v1/jobs/{id}/requeue", PEOPLE, lambda: Command, lambda: j.JobView,
    "End the job's run or release its buffer, and queue the job again from stage-in.")
CLEAR_BUFFER = _write("clear_buffer", "POST /v1/jobs/{id}/clear", _OPERATORS, lambda: r.ClearRequest, lambda: j.JobView,
    "Drop the record of a buffer that cannot be removed; `discard` also drops results that were not staged out.")
EXPORT_BUFFER = _write("export_buffer", "POST /v1/jobs/{id}/export", PEOPLE,
    lambda: r.ReleaseRequest, lambda: j.JobView,
    "Export retained results, or retry a failed stage-out; `partial` skips missing files.")

# Accounts, QOS, licences, reservations, scheduling, partitions, usage

LIST_ACCOUNTS = _get("list_accounts", "/v1/accounts", PEOPLE, lambda: a.AccountsAnswer,
    "List the accounts with their users and limits.", tag="accounting", live=())
SET_ACCOUNT = _write("set_account", "PUT /v1/accounts/{name}", _OPERATORS,
    lambda: a.AccountRequest, lambda: a.AccountsAnswer,
    "Create or replace an account.", tag="accounting")
DELETE_ACCOUNT = _write("delete_account", "POST /v1/accounts/{name}/delete", _OPERATORS,
    lambda: Command, lambda: a.AccountsAnswer,
    "Delete an account; its jobs wait with reason InvalidAccount.", tag="accounting")
LIST_QOS = _get("list_qos", "/v1/qos", PEOPLE, lambda: a.QosAnswer,
    "List the QOS with their limits.", tag="accounting")
SET_QOS = _write("set_qos", "PUT /v1/qos/{name}", _OPERATORS, lambda: a.QosRequest, lambda: a.QosAnswer,
    "Create or replace a QOS.", tag="accounting")
DELETE_QOS = _write("delete_qos", "POST /v1/qos/{name}/delete", _OPERATORS, lambda: Command, lambda: a.QosAnswer,
    "Delete a QOS; its jobs wait with reason InvalidQOS.", tag="accounting")
LIST_LICENSES = _get("list_licenses", "/v1/licenses", PEOPLE, lambda: a.LicensesAnswer,
    "List the licences and how many of each are in use.", tag="accounting")
SET_LICENSE = _write("set_license", "PUT /v1/licenses/{name}", _OPERATORS,
    lambda: a.LicenseRequest, lambda: a.LicensesAnswer,
    "Set the total number of a licence.", tag="accounting")
DELETE_LICENSE = _write("delete_license", "POST /v1/licenses/{name}/delete", _OPERATORS,
    lambda: Command, lambda: a.LicensesAnswer,
    "Delete a licence.", tag="accounting")
LIST_REVOCATIONS = _get("list_revocations", "/v1/revocations", _OPERATORS, lambda: s.RevocationsAnswer,
    "List the revoked certificates.", tag="certificates")
REVOKE_CERTIFICATE = _write("revoke_certificate", "PUT /v1/revocations/{certificate}", _OPERATORS,
    lambda: s.RevocationRequest, lambda: s.RevocationsAnswer,
    "Revoke a certificate, or all certificates of a holder, and close their connections.", tag="certificates")
UNREVOKE_CERTIFICATE = _write("unrevoke_certificate", "POST /v1/revocations/{certificate}/delete", _OPERATORS,
    lambda: Command, lambda: s.RevocationsAnswer,
    "Remove a certificate or a holder from the revocation list.", tag="certificates")
LIST_RESERVATIONS = _get("list_reservations", "/v1/reservations", PEOPLE, lambda: a.ReservationsAnswer,
    "List the burst-buffer reservations that have not ended.", tag="accounting")
SET_RESERVATION = _write("set_reservation", "PUT /v1/reservations/{name}", _OPERATORS,
    lambda: a.ReservationRequest, lambda: a.ReservationsAnswer,
    "Create or replace a burst-buffer reservation.", tag="accounting")
DELETE_RESERVATION = _write("delete_reservation", "POST /v1/reservations/{name}/delete", _OPERATORS,
    lambda: Command, lambda: a.ReservationsAnswer,
    "Delete a reservation; its jobs wait with reason ReservationDeleted.", tag="accounting")
SHOW_SCHEDULING_RULES = _get("show_scheduling_rules", "/v1/scheduling", PEOPLE, lambda: a.SchedulingAnswer,
    "Show the scheduling rules and the measured transfer rates.", tag="accounting")
LIST_PARTITIONS = _get("list_partitions", "/v1/partitions", PEOPLE, lambda: a.PartitionsAnswer,
    "List the partitions.", tag="accounting")
SET_PARTITION = _write("set_partition", "PUT /v1/partitions/{name}", _OPERATORS,
    lambda: a.PartitionRequest, lambda: a.PartitionsAnswer,
    "Create or replace a partition.", tag="accounting")
DELETE_PARTITION = _write("delete_partition", "POST /v1/partitions/{name}/delete", _OPERATORS,
    lambda: Command, lambda: a.PartitionsAnswer,
    "Delete a partition; its jobs wait with reason PartitionConfig.", tag="accounting")
LIST_USAGE = _get("list_usage", "/v1/usage", PEOPLE, lambda: a.UsageAnswer,
    "List the burst-buffer usage of accounts, their users, and QOS.", tag="accounting", live=())
RESET_USAGE = _write("reset_usage", "POST /v1/usage/reset", _OPERATORS,
    lambda: a.UsageResetRequest, lambda: a.UsageAnswer,
    "Reset the usage of an account or a QOS to zero.", tag="accounting")

# Pools, buffers, the configuration

LIST_POOLS = _get("list_pools", "/v1/pools", PEOPLE, lambda: j.PoolsAnswer,
    "List pools with their free capacity.", tag="capacity", then=True, live=())
SET_POOL = _write("set_pool", "PUT /v1/pools/{name}", _OPERATORS, lambda: r.PoolRequest, lambda: j.PoolView,
    "Create or change a pool.", tag="capacity")
ADD_POOL = _write("add_pool", "POST /v1/pools/{name}/add", _OPERATORS, lambda: c.PoolAddRequest, lambda: j.PoolView,
    "Create a pool; rejected if it exists.", tag="capacity")
CHANGE_POOL = _write("change_pool", "POST /v1/pools/{name}/change", _OPERATORS,
    lambda: c.PoolChangeRequest, lambda: j.PoolView,
    "Change fields of a pool, also while it is in use; buffers keep the space they hold.", tag="capacity")
REMOVE_POOL = _write("remove_pool", "POST /v1/pools/{name}/remove", _OPERATORS,
    lambda: Command, lambda: c.PoolRemovedAnswer,
    "Remove a pool; rejected, with the holders, while jobs hold its space or wait for it.", tag="capacity")
LIST_FILESYSTEMS = _get("list_filesystems", "/v1/filesystems", PEOPLE | _AGENTS, lambda: j.FilesystemsAnswer,
    "List shared filesystems with their movers and pools.",
    tag="capacity", then=True, live=())
ADD_FILESYSTEM = _write("add_filesystem", "POST /v1/filesystems/{name}/add", _OPERATORS,
    lambda: c.FilesystemAddRequest, lambda: j.FilesystemsAnswer,
    "Add a shared filesystem, which all nodes mount at the same path, or change the adapters of one.", tag="capacity")
REMOVE_FILESYSTEM = _write("remove_filesystem", "POST /v1/filesystems/{name}/remove", _OPERATORS,
    lambda: Command, lambda: j.FilesystemsAnswer,
    "Remove a shared filesystem that no pool uses; its files stay.", tag="capacity")
LIST_BUFFERS = _get("list_buffers", "/v1/buffers", PEOPLE, lambda: j.BuffersAnswer,
    "List buffers: persistent ones, those that hold or wait for space, and unless `live` the newest others.",
    {
        "live": "`yes`: only buffers that hold space or wait for it",
        "retained": "`yes`: only retained buffers: those of external jobs torn down before their results were exported",
    }, tag="capacity", then=True, live=())
CLEAR_PERSISTENT_BUFFER = _write("clear_persistent_buffer", "POST /v1/persistent/{name}/clear", _OPERATORS,
    lambda: r.ClearRequest, lambda: r.PersistentClearedAnswer,
    "Drop the record of a persistent buffer that cannot be removed; `discard` also drops an intact one.",
    tag="capacity")
SHOW_BURST = _get("show_burst", "/v1/burst", PEOPLE, lambda: b.BurstAnswer,
    "Show pools, settings, allocated buffers and usage by user, as `scontrol show burst` does.",
    {"format": "`json` (default), or `text` in the format of `scontrol show burst`"},
    tag="capacity", then=True, live=())
SHOW_PROVIDER_STATUS = _get("show_provider_status", "/v1/bbstat", PEOPLE, lambda: b.ProviderStatus,
    "Show the status of the site's burst-buffer provider, as `scontrol show bbstat` does.",
    {"arguments": "arguments for the provider, a JSON list of strings; default: none"},
    stale=False, tag="capacity", slow=True)
SHOW_CONFIGURATION = _get("show_configuration", "/v1/configuration", _OPERATORS, lambda: c.ConfigurationAnswer,
    "Show the cluster configuration, including defaults.", tag="configuration", then=True)
CONFIGURE_SITE = _write("configure_site", "POST /v1/configuration", _OPERATORS,
    lambda: c.ConfigureRequest, lambda: c.ConfigurationAnswer,
    "Change the configuration; all changes apply at once, or none.", tag="configuration")
COMPARE_CONFIGURATION = _write("compare_configuration", "POST /v1/configuration/diff", _OPERATORS,
    lambda: c.CompareRequest, lambda: c.CompareAnswer,
    "Show the effect of a configuration change, or why it would be rejected, without making it.",
    tag="configuration")

# Nodes and their agents, transfers

LIST_NODES = _get("list_nodes", "/v1/nodes", _DRILL_WATCHERS, lambda: j.NodesAnswer,
    "List nodes with the jobs that use them.",
    {
        "state": "comma-separated node states",
        "after": "only nodes with a later name; use it to read all nodes page by page",
        "limit": f"number of nodes; default: all, at most {NODES_MAX}",
    }, tag="nodes", then=True, live=("contacts",))
ADMIT_NODE = _write("admit_node", "POST /v1/nodes/{name}/admit", _OPERATORS, lambda: Command, lambda: j.AdmittedAnswer,
    "Admit a node that the cluster was not founded with, so that its agent can register.")
DRAIN_NODE = _write("drain_node", "POST /v1/nodes/{name}/drain", _OPERATORS, lambda: r.DrainRequest, lambda: j.NodeView,
    "Drain a node: it receives no new work.", tag="nodes")
RESUME_NODE = _write("resume_node", "POST /v1/nodes/{name}/resume", _OPERATORS, lambda: Command, lambda: j.NodeView,
    "Resume a drained node.", tag="nodes")
LOSE_NODE = _write("lose_node", "POST /v1/nodes/{name}/lost", _OPERATORS,
    lambda: r.LostRequest, lambda: j.NodeLostAnswer,
    "Declare a down node lost: its jobs end or are requeued, and their space is freed.", tag="nodes")
REGISTER_NODE = _write("register_node", "POST /v1/agents/{node}/register", _AGENTS,
    lambda: agents.RegisterRequest, lambda: j.RegisterAnswer,
    "Register an agent after its start.", tag="agents")
POLL_ORDERS = _write("poll_orders", "POST /v1/agents/{node}/poll", _AGENTS,
    lambda: agents.PollRequest, lambda: j.PollAnswer,
    "Return all orders of the node, at once or as soon as they may differ from those at `seen_revision`.",
    tag="agents")
REPORT_OPERATIONS = _write("report_operations", "POST /v1/agents/{node}/reports", _AGENTS,
    lambda: agents.ReportsRequest, lambda: j.ReportsAnswer,
    "Report results of operations, in order; rejected ones are acknowledged too.", tag="agents")
LIST_TRANSFERS = _get("list_transfers", "/v1/transfers", _DRILL_WATCHERS, lambda: t.TransfersAnswer,
    "List running, queued and failed transfers, with the progress that agents last reported to this leader.",
    {
        "after": "only transfers of jobs with a larger ID; use it to read all transfers page by page",
        "limit": f"number of transfers (default and maximum {TRANSFERS_LISTED_MAX})",
    }, tag="transfers", live=("progress",))
SHOW_JOB_TRANSFERS = _get("show_job_transfers", "/v1/transfers/{id}", _READERS, lambda: t.JobTransfersView,
    "Show a job's current and past transfers and its unexported files.", stale=False, tag="transfers")
LIST_RECEIPTS = _get("list_receipts", "/v1/transfers/{id}/receipts", PEOPLE, lambda: t.ReceiptsAnswer,
    "List all transfer receipts of a job, oldest first, optionally of one `stage` or `attempt`.",
    {"stage": "only `stage_in` or `stage_out`", "attempt": "only this attempt"}, tag="transfers", of_ledger=True)

# External jobs: buffers whose jobs belong to another scheduler

REGISTER_SCHEDULER = _write("register_scheduler", "POST /v1/scheduler/register", _SCHEDULERS,
    lambda: g.RegisterSchedulerRequest, lambda: g.SchedulersAnswer,
    "Register the scheduler named by the certificate; rejected if another cluster is registered "
    "under that name.", tag="external_jobs")
SHOW_SCHEDULER_SITE = _get("show_scheduler_site", "/v1/scheduler/site", _SCHEDULERS, lambda: g.SchedulerSiteAnswer,
    "Show the pools for external jobs with their free space, and the accepted values of requests.",
    stale=False, tag="external_jobs")
LIST_SCHEDULERS = _get("list_schedulers", "/v1/schedulers", PEOPLE, lambda: g.SchedulersAnswer,
    "List the registered schedulers.", tag="external_jobs")
RELEASE_SCHEDULER = _write("release_scheduler", "POST /v1/schedulers/{name}/release", _OPERATORS,
    lambda: Command, lambda: g.SchedulersAnswer,
    "Release a scheduler's name so that another cluster can register under it.", tag="external_jobs")
LIST_EXTERNAL_JOBS = _get("list_external_jobs", "/v1/external-jobs", _SCHEDULERS, lambda: g.ExternalJobsAnswer,
    "List the caller's external jobs, each with its last epoch.",
    {"live": "`yes`: only unfinished external jobs"}, stale=False, tag="external_jobs")
SHOW_EXTERNAL_JOB = _get("show_external_job", "/v1/external-jobs/{job}", _SCHEDULERS, lambda: g.ExternalJobAnswer,
    "Show one of the caller's external jobs, at once or as soon as it leaves the phases in `while`.",
    _PATIENCE, stale=False, tag="external_jobs")
SET_UP_EXTERNAL_JOB = _write("set_up_external_job", "POST /v1/external-jobs/{job}/setup", _SCHEDULERS,
    lambda: g.SetUpExternalJobRequest, lambda: g.ExternalJobAnswer,
    "Request the space of an external job, or resume a lingering one; the job may wait for space.",
    query=_PATIENCE, tag="external_jobs")
STAGE_IN_EXTERNAL_JOB = _write("stage_in_external_job", "POST /v1/external-jobs/{job}/stage-in", _SCHEDULERS,
    lambda: g.ExternalJobCommand, lambda: g.ExternalJobAnswer,
    "Start the stage-in of an external job.", query=_PATIENCE, tag="external_jobs")
BEGIN_EXTERNAL_JOB_RUN = _write("begin_external_job_run", "POST /v1/external-jobs/{job}/begin-run", _SCHEDULERS,
    lambda: g.ExternalJobCommand, lambda: g.ExternalJobAnswer,
    "Report that an external job started.", tag="external_jobs")
END_EXTERNAL_JOB_RUN = _write("end_external_job_run", "POST /v1/external-jobs/{job}/end-run", _SCHEDULERS,
    lambda: g.ExternalJobCommand, lambda: g.ExternalJobAnswer,
    "Report that an external job ended.", tag="external_jobs")
STAGE_OUT_EXTERNAL_JOB = _write("stage_out_external_job", "POST /v1/external-jobs/{job}/stage-out", _SCHEDULERS,
    lambda: g.ExternalJobCommand, lambda: g.ExternalJobAnswer,
    "Stage out the results of an external job, then tear it down.", query=_PATIENCE, tag="external_jobs")
TEAR_DOWN_EXTERNAL_JOB = _write("tear_down_external_job", "POST /v1/external-jobs/{job}/teardown", _SCHEDULERS,
    lambda: g.TearDownExternalJobRequest, lambda: g.ExternalJobAnswer,
    "Release an external job: its buffer lingers, is retained or is removed.", query=_PATIENCE, tag="external_jobs")
MISS_EXTERNAL_JOB = _write("miss_external_job", "POST /v1/external-jobs/{job}/miss", _SCHEDULERS,
    lambda: g.MissExternalJobRequest, lambda: g.ExternalJobAnswer,
    "Record that the scheduler lists an external job that does not exist here.", tag="external_jobs")
LIST_PERSISTENT = _get("list_persistent", "/v1/persistent", _SCHEDULERS, lambda: g.PersistentsAnswer,
    "List the persistent buffers on shared filesystems, of all creators.", stale=False, tag="external_jobs")
MAKE_PERSISTENT = _write("make_persistent", "POST /v1/persistent/{name}/make", _SCHEDULERS,
    lambda: g.MakePersistentRequest, lambda: g.PersistentAnswer,
    "Create a persistent buffer for a user; repeat the request to see its progress.", tag="external_jobs")
REMOVE_PERSISTENT = _write("remove_persistent", "POST /v1/persistent/{name}/remove", _SCHEDULERS,
    lambda: g.RemovePersistentRequest, lambda: g.PersistentAnswer,
    "Remove a user's persistent buffer; repeat the request to see its progress.", tag="external_jobs")

# Replicas, the ledger

LIST_MEMBERS = _get("list_members", "/v1/members", _EVERYBODY, lambda: j.MembersAnswer,
    "List the replicas as the responding one sees them: the leader, unless `stale=ok`.", tag="cluster")
ADD_MEMBER = _write("add_member", "POST /v1/members", _OPERATORS, lambda: r.AddMemberRequest, lambda: j.MembersAnswer,
    "Add a replica; it joins as a learner and votes once it has caught up.", tag="cluster")
REMOVE_MEMBER = _write("remove_member", "POST /v1/members/{name}/remove", _OPERATORS,
    lambda: Command, lambda: j.MembersAnswer,
    "Remove a replica permanently; a leader transfers its leadership first.", tag="cluster")
REPLACE_MEMBER = _write("replace_member", "POST /v1/members/{name}/replace", _OPERATORS,
    lambda: Command, lambda: j.MembersAnswer,
    "Replace a replica that lost its data: it returns as a learner under a new ID, and votes once it has caught up.",
    tag="cluster")
UPDATE_MEMBER = _write("update_member", "POST /v1/members/{name}/update", _OPERATORS,
    lambda: r.UpdateMemberRequest, lambda: j.MembersAnswer,
    "Change the addresses of a replica; its ID, data and vote stay.", tag="cluster")
TRANSFER_LEADERSHIP = _write("transfer_leadership", "POST /v1/members/transfer", _DRILLS,
    lambda: r.TransferRequest, lambda: j.TransferAnswer,
    "Transfer leadership to the named replica, or to the most advanced one.", tag="cluster")
LIST_DRILLS = _get("list_drills", "/v1/drills", _DRILL_WATCHERS, lambda: d.DrillsAnswer,
    "List the latest drills, newest first, and the drill locks.", tag="drills")
SHOW_DRILL = _get("show_drill", "/v1/drills/{drill}", _DRILL_WATCHERS | {Role.HELPER}, lambda: d.DrillAnswer,
    "Show one drill.", tag="drills")
START_DRILL = _write("start_drill", "POST /v1/drills", _DRILLS, lambda: d.StartDrillRequest, lambda: d.DrillAnswer,
    "Start a drill; rejected while another one is under way or an operator holds a drill lock.", status=201,
    tag="drills")
CONFIRM_DRILL = _write("confirm_drill", "POST /v1/drills/{drill}/confirm", _OPERATORS,
    lambda: Command, lambda: d.DrillAnswer,
    "Confirm, as a second operator, a drill that waits for confirmation.", tag="drills")
ABORT_DRILL = _write("abort_drill", "POST /v1/drills/{drill}/abort", _DRILLS,
    lambda: d.AbortDrillRequest, lambda: d.DrillAnswer,
    "Abort a drill: its coordinator undoes the fault.", tag="drills")
END_DRILL = _write("end_drill", "POST /v1/drills/{drill}/end", _DRILLS,
    lambda: d.EndDrillRequest, lambda: d.DrillAnswer,
    "Report the result and measurements of a drill.", tag="drills")
PROBE_DRILL = _write("probe_drill", "POST /v1/drills/{drill}/probe", _DRILLS,
    lambda: Command, lambda: d.DrillProbeAnswer,
    "Probe, during a drill, whether commands are settled; the command changes nothing else.", tag="drills")
LOCK_DRILLS = _write("lock_drills", "POST /v1/drill-locks", _OPERATORS,
    lambda: d.AbortDrillRequest, lambda: d.DrillsAnswer,
    "Lock drills: none can start, and the one under way is aborted.", tag="drills")
UNLOCK_DRILLS = _write("unlock_drills", "POST /v1/drill-locks/{name}/remove", _OPERATORS,
    lambda: Command, lambda: d.DrillsAnswer,
    "Remove an operator's drill lock.", tag="drills")
SHOW_FEATURE_LEVEL = _get("show_feature_level", "/v1/feature-level", _OPERATORS, lambda: ledger.FeatureLevelAnswer,
    "Show the feature level of the cluster and the highest level each replica supports.", tag="cluster")
RAISE_FEATURE_LEVEL = _write("raise_feature_level", "POST /v1/feature-level", _OPERATORS,
    lambda: r.FeatureLevelRequest, lambda: ledger.FeatureLevelAnswer,
    "Raise the feature level by one; rejected unless every replica supports the next level.", tag="cluster")
LIST_SESSIONS = _get("list_sessions", "/v1/sessions", PEOPLE, lambda: sessions.SessionsAnswer,
    "List the caller's client sessions; for an operator, all sessions.", tag="cluster")
OPEN_SESSION = _write("open_session", "POST /v1/sessions", PEOPLE, lambda: Command, lambda: sessions.OpenedSession,
    "Open a session for a program that sends many commands; the program numbers them and acknowledges replies.",
    tag="cluster")
CLOSE_SESSION = _write("close_session", "POST /v1/sessions/{session}/close", PEOPLE,
    lambda: Command, lambda: sessions.SessionsAnswer,
    "Close a session and drop its cached replies.", tag="cluster")
SHOW_CLOCK = _get("show_clock", "/v1/clock", PEOPLE, lambda: ledger.ClockAnswer,
    "Show the cluster's time, the wall clocks of a majority of the replicas, and the replicas whose clock deviates.",
    tag="cluster")
SET_CLOCK = _write("set_clock", "POST /v1/clock", _OPERATORS, lambda: r.SetClockRequest, lambda: ledger.ClockAnswer,
    "Set the cluster's time back to a majority's wall clocks, if it is ahead of them.", tag="cluster")
SHOW_OVERVIEW = _get("show_overview", "/v1/overview", PEOPLE, lambda: overview.OverviewAnswer,
    "Show an overview: replicas, counts of jobs, nodes and transfers, and items that need attention.",
    tag="cluster", live=("progress", "replicas"))
LIST_SINKS = _get("list_sinks", "/v1/sinks", _OPERATORS, lambda: overview.SinksAnswer,
    "List the event sinks: how far the leader has delivered to each, and the last error.",
    stale=False, tag="cluster")
SHOW_STATUS = _get("show_status", "/v1/status", _EVERYBODY, lambda: j.StatusView,
    "Show the status of this replica.",
    {"digest": "`yes`: include the digest of the state"}, tag="cluster", own=True)
LIST_DIGESTS = _get("list_digests", "/v1/digests", _LEDGER_READERS | _DRILLS, lambda: j.DigestsAnswer,
    "Show this replica's recent digests of state and ledger, which its peers compare with their own.",
    {"ledger": "ledger index of an additional digest; default, also if not applied yet: the last applied entry"},
    tag="cluster", own=True)
SHOW_STATE_DIGEST = _get("show_state_digest", "/v1/state-digest", _LEDGER_READERS | _DRILLS,
    lambda: j.StateDigestAnswer,
    "Show the digest of the state; it is equal on all replicas at the same revision.",
    tag="cluster", then=True, live=())
SHOW_HISTORY = _get("show_history", "/v1/history", _DRILL_WATCHERS, lambda: ledger.StoryAnswer,
    "List events and rejected commands between two times, oldest first, one page at a time.",
    {
        "from": "first revision, or time such as 2026-01-31T12:00:00Z; default: the beginning",
        "to": "last revision or time; default: now",
        "after": "continue after this revision: the `read` of the previous page",
        "job": "only this job",
        "user": "only jobs and commands of this user",
        "account": "only jobs of this account",
        "actor": "only commands of this sender: `admin`, or `operator admin`",
        "kind": "comma-separated event names; `rejected`: rejected commands",
        "of": f"only records of this kind: {', '.join(HISTORY_OF)}",
        "name": "only the record with this name",
        "limit": f"number of commands (default {HISTORY_LIMIT}, maximum {HISTORY_LIMIT_MAX})",
    }, tag="cluster", own=True, of_ledger=True)
LIST_LEADERS = _get("list_leaders", "/v1/history/leaders", _DRILL_WATCHERS, lambda: ledger.LeadersAnswer,
    "List the leaders' terms, oldest first, with the time without a leader before each.",
    {"limit": f"number of terms, counted from the last (default {LEADERS_LIMIT}, maximum {LEADERS_LIMIT_MAX})"},
    tag="cluster", own=True)
LIST_POOL_USE = _get("list_pool_use", "/v1/history/pools", PEOPLE, lambda: overview.PoolUseAnswer,
    "Show the usage of each pool over the last day, as far as this replica has recorded it.",
    {"name": "only this pool; default: the first pools by name"}, tag="capacity", own=True)
SHOW_DIFF = _get("show_diff", "/v1/diff", PEOPLE, lambda: ledger.DiffAnswer,
    "Show the differences between two past states, and the last command that changed each record.",
    {
        "from": "first state: a revision, or a time such as 2026-01-31T12:00:00Z",
        "to": "second state; default: the current one",
        "job": "only this job",
        "of": f"only records of this kind: {', '.join(HISTORY_OF)}",
        "name": "only the record with this name",
        "limit": f"number of changes (default {DIFF_LIMIT}, maximum {DIFF_LIMIT_MAX})",
    }, tag="cluster", own=True)
READ_LEDGER = _get("read_ledger", "/v1/ledger", _LEDGER_READERS, lambda: ledger.LedgerAnswer,
    "Read ledger entries of this replica, with their digests.",
    {
        "from": "index of the first entry",
        "limit": f"number of entries (default {ENTRIES_READ}, maximum {ENTRIES_READ_MAX})",
    }, tag="cluster", own=True)
READ_STORED_ENTRIES = _get("read_stored_entries", "/v1/ledger/history", _REPLICAS, lambda: ledger.HandedAnswer,
    "Supply stored entries to a replica that received a snapshot instead of them.",
    {"last": "index of the last entry"}, tag="cluster", own=True)
READ_CHECKPOINT = _get("read_checkpoint", "/v1/tlog/checkpoint", _AUDITORS, lambda: str,
    "Return the last ledger checkpoint signed by a majority of the replicas: a C2SP signed note.",
    stale=False, tag="cluster", content_type=TEXT, own=True)
READ_TILE = _get("read_tile", "/v1/tlog/tile/{tile}", _AUDITORS, lambda: bytes,
    "Return a tile of the ledger's Merkle tree, or a bundle of its leaves, named as in C2SP "
        "tlog-tiles: `0/x001/067`, `entries/000.p/5`.",
    stale=False, tag="cluster", content_type=BYTES, own=True)
LIST_LOG_KEYS = _get("list_log_keys", "/v1/tlog/keys", _AUDITORS, lambda: ledger.LogKeysAnswer,
    "List the replicas' public keys for checkpoints.",
    {"alone": "`yes`: only this replica's key, without requests to its peers"},
    stale=False, tag="cluster", own=True)
SIGN_CHECKPOINT = _write("sign_checkpoint", "POST /v1/tlog/sign", _REPLICAS,
    lambda: ledger.SignRequest, lambda: ledger.SignedAnswer,
    "Sign a checkpoint if this replica's own ledger has the same root.", tag="cluster", own=True)
TAKE_CHECKPOINT = _write("take_checkpoint", "POST /v1/tlog/checkpoint", _REPLICAS,
    lambda: ledger.CheckpointRequest, lambda: ledger.CheckpointAnswer,
    "Store the checkpoint collected by the leader.", tag="cluster", own=True)
PROVE_JOB = _get("prove_job", "/v1/jobs/{id}/proof", _OPERATORS, lambda: bytes,
    "Return a proof of a job's history under the last checkpoint, in the format of `verify_proof.py`.",
    stale=False, tag="cluster", content_type=BYTES, own=True)
SAVE_SNAPSHOT = _write("save_snapshot", "POST /v1/snapshots", _OPERATORS, lambda: NoneType, lambda: ledger.SnapshotView,
    "Write a snapshot on this replica.", tag="cluster", own=True)
LIST_SNAPSHOTS = _get("list_snapshots", "/v1/snapshots", _OPERATORS, lambda: ledger.SnapshotsAnswer,
    "List the snapshots this replica can send, newest first.", stale=False, tag="cluster",
    own=True)
FETCH_SNAPSHOT = _get("fetch_snapshot", "/v1/snapshots/{name}", _OPERATORS, lambda: bytes,
    "Return a part of a snapshot of this replica, at most 256 KiB; empty at its end.",
    {"offset": "offset of the first byte (default 0)"}, stale=False, tag="cluster", content_type=BYTES, own=True)
STREAM_EVENTS = _get("stream_events", "/v1/events", PEOPLE, lambda: ledger.EventView,
    "Stream all events after revision `from` (or the header Last-Event-ID), then new ones as they occur.",
    {"from": "stream events after this revision; default: new events only"},
    stale=False, tag="cluster", content_type=EVENT_STREAM, own=True)
SHOW_OPENAPI = _get("show_openapi", "/v1/openapi.json", _EVERYBODY, lambda: Json,
    "Return the OpenAPI document.", tag="cluster", own=True)
SHOW_HEALTH = _get("show_health", "/healthz", _WATCHERS, lambda: str,
    "Report that the process is alive.", stale=False, tag="cluster", content_type=TEXT, own=True)
SHOW_READINESS = _get("show_readiness", "/readyz", _WATCHERS, lambda: str,
    "Report whether a command sent here can be committed now: 200, or 503 with the reason.",
    stale=False, tag="cluster", content_type=TEXT, own=True)
SHOW_METRICS = _get("show_metrics", "/metrics", _WATCHERS, lambda: str,
    "Return metrics in Prometheus's text format.", stale=False, tag="cluster", content_type=TEXT, own=True,
    live=("contacts", "progress", "metrics"))

# fmt: on

OPERATIONS: Final = {row.name: row for row in tuple(globals().values()) if isinstance(row, ApiOperation)}
"""Operations by name, in the order of this table."""
