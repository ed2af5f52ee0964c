"""Table of the API's operations, the source of routes, client calls and the OpenAPI document.

An operation's name is part of the contract: the metric label `route` and the OpenAPI operationId contain it. It is
imperative. An operation that is one command of the state machine has its name (`replica.messages.kind_of`).
"""

import re
from collections.abc import Callable, Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from cluster.schemas.base import Command, Json
from cluster.schemas.job_fields import SubmitRequest, UpdateRequest
from cluster.security import Role
from replica.faces import Later
from replica.values import NODES_MAX

if TYPE_CHECKING:
    from cluster.schemas import accounts as a
    from cluster.schemas import agents, ledger, overview, sessions
    from cluster.schemas import burst as b
    from cluster.schemas import certificates as s
    from cluster.schemas import configuration as c
    from cluster.schemas import drills as d
    from cluster.schemas import external_jobs as g
    from cluster.schemas import jobs as j
    from cluster.schemas import requests as r
    from cluster.schemas import transfers as t
else:
    # Schemas are built on first use, because one CLI command needs two of these hundred.
    a, b, c, j = map(Later, [f"cluster.schemas.{name}" for name in ("accounts", "burst", "configuration", "jobs")])
    agents, r, s, t = map(
        Later, [f"cluster.schemas.{name}" for name in ("agents", "requests", "certificates", "transfers")]
    )
    d, g, ledger, overview, sessions = map(
        Later, [f"cluster.schemas.{name}" for name in ("drills", "external_jobs", "ledger", "overview", "sessions")]
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

`ApiCall.job_in` hides all other jobs from those.
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

_THEN: Final = {"at": "how it was after a revision, or at a time, 2026-01-31T12:00:00Z; how it is if left out"}
_PATIENCE: Final = {
    "while": "phases to wait in, separated by commas, before the answer is given",
    "wait_s": f"wait for at most so many seconds (default 0, at most {EXTERNAL_JOB_WAIT_S_MAX})",
}
_STALE: Final = {"stale": "`ok`: answer at once from the replica that is asked, however old its state is"}
_PARAMETER: Final = re.compile(r"\{([a-z_]+)\}")

REST: Final = "tile"
"""Parameter that matches the rest of a path, including slashes."""

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
    """Whether each replica answers for itself, without a leader."""
    slow: bool = False
    """Whether one replica may use the whole timeout of the call."""

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
    "List jobs by id, the newest where there are more than `limit`; with `after` the next ones after that id.",
    {
        "state": "job states, separated by commas",
        "user": "only jobs of this user",
        "external_jobs": "`yes`: only external jobs, which are jobs of other schedulers",
        "job": "only this job, or these tasks: `12`, `12_3`, `12_[1-4]`; `12` is all tasks of an array",
        "after": "only jobs with a larger id, the smallest first: for reading all of them, page by page",
        "expected": f"`yes`: with when those that wait should start; at most {EXPECTED_LISTED_MAX} jobs then",
        "limit": f"at most so many jobs (default {JOBS_LISTED}, at most {JOBS_LISTED_MAX})",
    }, then=True)
SEND_COMMANDS = _write("send_commands", "POST /v1/commands", PEOPLE, lambda: r.BulkRequest, lambda: j.BulkAnswer,
    "Carry out many commands, in order; a refusal of one stops none of the others.")
SHOW_JOB = _get("show_job", "/v1/jobs/{id}", PEOPLE, lambda: j.JobView,
    "Show one job.", then=True)
SHOW_JOB_HISTORY = _get("show_job_history", "/v1/jobs/{id}/history", _READERS, lambda: j.HistoryAnswer,
    "Show what happened to a job, oldest first, with its state and reason after each event.",
    {"last": "only so many rows, the last ones"})
EXPLAIN_JOB = _get("explain_job", "/v1/jobs/{id}/why", _READERS, lambda: j.WhyView,
    "Explain what holds a job back, now or at a moment of the past.",
    {"at": "the revision to explain, or a time, 2026-01-31T12:00:00Z; now if left out"})
ESTIMATE_JOB = _get("estimate_job", "/v1/jobs/{id}/estimate", PEOPLE, lambda: a.EstimateView,
    "Say when a job should start, computed from the queue, time limits and measured transfers, and why not sooner.")
UPDATE_JOB = _write("update_job", "POST /v1/jobs/{id}/update", PEOPLE, lambda: UpdateRequest, lambda: j.JobView,
    "Change a job that waits, or those that wait of an array or of some of its tasks.")
CANCEL_JOB = _write("cancel_job", "POST /v1/jobs/{id}/cancel", PEOPLE, lambda: r.CancelRequest, lambda: j.JobView,
    "Cancel a job; with `hurry` nothing more is staged out.")
HOLD_JOB = _write("hold_job", "POST /v1/jobs/{id}/hold", PEOPLE, lambda: Command, lambda: j.JobView,
    "Hold a pending job back.")
RELEASE_JOB = _write("release_job", "POST /v1/jobs/{id}/release", PEOPLE, lambda: r.ReleaseRequest, lambda: j.JobView,
    "Release a held job, or order again what had failed for good; `partial`: a stage-out without what is not there.")
SUSPEND_JOB = _write("suspend_job", "POST /v1/jobs/{id}/suspend", PEOPLE, lambda: Command, lambda: j.JobView,
    "Stop the script of a running job where it is; its time limit stands still.")
RESUME_JOB = _write("resume_job", "POST /v1/jobs/{id}/resume", PEOPLE, lambda: Command, lambda: j.JobView,
    "Let the script of a suspended job go on.")
REQUEUE_JOB = _write("requeue_job", "POST /v1/jobs/{id}/requeue", PEOPLE, lambda: Command, lambda: j.JobView,
    "End the present run of a job, or take back its buffer, and let it wait and stage in again.")
CLEAR_BUFFER = _write("clear_buffer", "POST /v1/jobs/{id}/clear", _OPERATORS, lambda: r.ClearRequest, lambda: j.JobView,
    "Forget the buffer of a job that could not be removed; with `discard` also results that were not staged out.")
EXPORT_BUFFER = _write("export_buffer", "POST /v1/jobs/{id}/export", PEOPLE,
    lambda: r.ReleaseRequest, lambda: j.JobView,
    "Export results again that are parked, or could not be staged out; `partial`: without what is not there.")

# Accounts, QOS, licences, reservations, scheduling, partitions, usage

LIST_ACCOUNTS = _get("list_accounts", "/v1/accounts", PEOPLE, lambda: a.AccountsAnswer,
    "List the accounts with their users and limits.", tag="accounting")
SET_ACCOUNT = _write("set_account", "PUT /v1/accounts/{name}", _OPERATORS,
    lambda: a.AccountRequest, lambda: a.AccountsAnswer,
    "Make an account, or change all of it.", tag="accounting")
DELETE_ACCOUNT = _write("delete_account", "POST /v1/accounts/{name}/delete", _OPERATORS,
    lambda: Command, lambda: a.AccountsAnswer,
    "Take an account away; its jobs wait with InvalidAccount.", tag="accounting")
LIST_QOS = _get("list_qos", "/v1/qos", PEOPLE, lambda: a.QosAnswer,
    "List the QOS with their limits.", tag="accounting")
SET_QOS = _write("set_qos", "PUT /v1/qos/{name}", _OPERATORS, lambda: a.QosRequest, lambda: a.QosAnswer,
    "Make a QOS, or change all of it.", tag="accounting")
DELETE_QOS = _write("delete_qos", "POST /v1/qos/{name}/delete", _OPERATORS, lambda: Command, lambda: a.QosAnswer,
    "Take a QOS away; its jobs wait with InvalidQOS.", tag="accounting")
LIST_LICENSES = _get("list_licenses", "/v1/licenses", PEOPLE, lambda: a.LicensesAnswer,
    "List the licences and how many of each running jobs have.", tag="accounting")
SET_LICENSE = _write("set_license", "PUT /v1/licenses/{name}", _OPERATORS,
    lambda: a.LicenseRequest, lambda: a.LicensesAnswer,
    "Say how many of a licence there are.", tag="accounting")
DELETE_LICENSE = _write("delete_license", "POST /v1/licenses/{name}/delete", _OPERATORS,
    lambda: Command, lambda: a.LicensesAnswer,
    "Take a licence away.", tag="accounting")
LIST_REVOCATIONS = _get("list_revocations", "/v1/revocations", _OPERATORS, lambda: s.RevocationsAnswer,
    "List the certificates that are revoked.", tag="certificates")
REVOKE_CERTIFICATE = _write("revoke_certificate", "PUT /v1/revocations/{certificate}", _OPERATORS,
    lambda: s.RevocationRequest, lambda: s.RevocationsAnswer,
    "Refuse a certificate, or all of one holder, and close their connections.", tag="certificates")
UNREVOKE_CERTIFICATE = _write("unrevoke_certificate", "POST /v1/revocations/{certificate}/delete", _OPERATORS,
    lambda: Command, lambda: s.RevocationsAnswer,
    "Take a certificate or a holder off the list of those that are refused.", tag="certificates")
LIST_RESERVATIONS = _get("list_reservations", "/v1/reservations", PEOPLE, lambda: a.ReservationsAnswer,
    "List the reservations of burst-buffer space that have not ended.", tag="accounting")
SET_RESERVATION = _write("set_reservation", "PUT /v1/reservations/{name}", _OPERATORS,
    lambda: a.ReservationRequest, lambda: a.ReservationsAnswer,
    "Make a reservation of burst-buffer space, or change all of it.", tag="accounting")
DELETE_RESERVATION = _write("delete_reservation", "POST /v1/reservations/{name}/delete", _OPERATORS,
    lambda: Command, lambda: a.ReservationsAnswer,
    "Take a reservation away; its jobs wait with ReservationDeleted.", tag="accounting")
SHOW_SCHEDULING_RULES = _get("show_scheduling_rules", "/v1/scheduling", PEOPLE, lambda: a.SchedulingAnswer,
    "Show the rules of scheduling, and what was measured of transfers.", tag="accounting")
SET_SCHEDULING_RULES = _write("set_scheduling_rules", "PUT /v1/scheduling", _OPERATORS,
    lambda: a.SchedulingRequest, lambda: a.SchedulingAnswer,
    "Change all of the rules of scheduling.", tag="accounting")
LIST_PARTITIONS = _get("list_partitions", "/v1/partitions", PEOPLE, lambda: a.PartitionsAnswer,
    "List the partitions.", tag="accounting")
SET_PARTITION = _write("set_partition", "PUT /v1/partitions/{name}", _OPERATORS,
    lambda: a.PartitionRequest, lambda: a.PartitionsAnswer,
    "Make a partition, or change all of it.", tag="accounting")
DELETE_PARTITION = _write("delete_partition", "POST /v1/partitions/{name}/delete", _OPERATORS,
    lambda: Command, lambda: a.PartitionsAnswer,
    "Take a partition away; its jobs wait with PartitionConfig.", tag="accounting")
LIST_USAGE = _get("list_usage", "/v1/usage", PEOPLE, lambda: a.UsageAnswer,
    "List what accounts, their users and QOS have used of burst buffers.", tag="accounting")
RESET_USAGE = _write("reset_usage", "POST /v1/usage/reset", _OPERATORS,
    lambda: a.UsageResetRequest, lambda: a.UsageAnswer,
    "Have what an account, or a QOS, has used count as nothing from here on.", tag="accounting")

# Pools, buffers, the configuration

LIST_POOLS = _get("list_pools", "/v1/pools", PEOPLE, lambda: j.PoolsAnswer,
    "List pools with their derived free capacity.", tag="capacity", then=True)
SET_POOL = _write("set_pool", "PUT /v1/pools/{name}", _OPERATORS, lambda: r.PoolRequest, lambda: j.PoolView,
    "Make or change a pool.", tag="capacity")
ADD_POOL = _write("add_pool", "POST /v1/pools/{name}/add", _OPERATORS, lambda: c.PoolAddRequest, lambda: j.PoolView,
    "Make a pool that is not there.", tag="capacity")
CHANGE_POOL = _write("change_pool", "POST /v1/pools/{name}/change", _OPERATORS,
    lambda: c.PoolChangeRequest, lambda: j.PoolView,
    "Change what is named of a pool, whoever uses it; nothing is taken from who holds a part of it.", tag="capacity")
REMOVE_POOL = _write("remove_pool", "POST /v1/pools/{name}/remove", _OPERATORS,
    lambda: Command, lambda: c.PoolRemovedAnswer,
    "Remove a pool that nobody holds a part of or waits for; else refused with who does.", tag="capacity")
LIST_FILESYSTEMS = _get("list_filesystems", "/v1/filesystems", PEOPLE | _AGENTS, lambda: j.FilesystemsAnswer,
    "List shared filesystems, which all nodes mount, with their movers and pools.",
    tag="capacity", then=True)
ADD_FILESYSTEM = _write("add_filesystem", "POST /v1/filesystems/{name}/add", _OPERATORS,
    lambda: c.FilesystemAddRequest, lambda: j.FilesystemsAnswer,
    "Add a shared filesystem, which all nodes mount.", tag="capacity")
REMOVE_FILESYSTEM = _write("remove_filesystem", "POST /v1/filesystems/{name}/remove", _OPERATORS,
    lambda: Command, lambda: j.FilesystemsAnswer,
    "Remove a shared filesystem that no pool names; files in it stay.", tag="capacity")
LIST_BUFFERS = _get("list_buffers", "/v1/buffers", PEOPLE, lambda: j.BuffersAnswer,
    "List buffers: the persistent ones, those that hold or wait for something, and the newest others unless `live`.",
    {
        "live": "`yes`: only buffers that hold or wait for something",
        "parked": "`yes`: only those of external jobs that were torn down with results which nobody has exported",
    }, tag="capacity", then=True)
CLEAR_PERSISTENT_BUFFER = _write("clear_persistent_buffer", "POST /v1/persistent/{name}/clear", _OPERATORS,
    lambda: r.ClearRequest, lambda: r.PersistentClearedAnswer,
    "Forget a persistent buffer that cannot be removed; with `discard` also one that is whole.", tag="capacity")
SHOW_BURST = _get("show_burst", "/v1/burst", PEOPLE, lambda: b.BurstAnswer,
    "Show pools, settings, allocated buffers and their users, as `scontrol show burst` does.",
    {"format": "`json`, or `text`: what `scontrol show burst` prints; json if left out"}, tag="capacity", then=True)
SHOW_PROVIDER_STATUS = _get("show_provider_status", "/v1/bbstat", PEOPLE, lambda: b.ProviderStatus,
    "Ask the site's burst-buffer provider for its status, as `scontrol show bbstat` does.",
    {"arguments": "what the provider is asked, a JSON list of texts; nothing if left out"},
    stale=False, tag="capacity", slow=True)
SHOW_CONFIGURATION = _get("show_configuration", "/v1/configuration", _OPERATORS, lambda: c.ConfigurationAnswer,
    "Show the configuration of the site, with what is as by default.", tag="configuration", then=True)
CONFIGURE_SITE = _write("configure_site", "POST /v1/configuration", _OPERATORS,
    lambda: c.ConfigureRequest, lambda: c.ConfigurationAnswer,
    "Change the configuration: all of it in one entry, or nothing.", tag="configuration")
COMPARE_CONFIGURATION = _write("compare_configuration", "POST /v1/configuration/diff", _OPERATORS,
    lambda: c.CompareRequest, lambda: c.CompareAnswer,
    "Show what a change of the configuration would do, or why it would be refused; nothing is changed.",
    tag="configuration")

# Nodes and their agents, transfers

LIST_NODES = _get("list_nodes", "/v1/nodes", _DRILL_WATCHERS, lambda: j.NodesAnswer,
    "List nodes with the jobs that have something there.",
    {
        "state": "node states, separated by commas",
        "after": "only nodes with a later name: for reading all of them, page by page",
        "limit": f"at most so many nodes; all if left out, and there are at most {NODES_MAX}",
    }, tag="nodes", then=True)
ADMIT_NODE = _write("admit_node", "POST /v1/nodes/{name}/admit", _OPERATORS, lambda: Command, lambda: j.AdmittedAnswer,
    "Let the agent of a node register that the cluster was not founded with.")
DRAIN_NODE = _write("drain_node", "POST /v1/nodes/{name}/drain", _OPERATORS, lambda: r.DrainRequest, lambda: j.NodeView,
    "Keep new work from a node.", tag="nodes")
RESUME_NODE = _write("resume_node", "POST /v1/nodes/{name}/resume", _OPERATORS, lambda: Command, lambda: j.NodeView,
    "Give a drained node new work again.", tag="nodes")
LOSE_NODE = _write("lose_node", "POST /v1/nodes/{name}/lost", _OPERATORS,
    lambda: r.LostRequest, lambda: j.NodeLostAnswer,
    "Declare a node that is down lost: its jobs end or wait again, and their space is free.", tag="nodes")
REGISTER_NODE = _write("register_node", "POST /v1/agents/{node}/register", _AGENTS,
    lambda: agents.RegisterRequest, lambda: j.RegisterAnswer,
    "Announce an agent that has just started.", tag="agents")
POLL_ORDERS = _write("poll_orders", "POST /v1/agents/{node}/poll", _AGENTS,
    lambda: agents.PollRequest, lambda: j.PollAnswer,
    "Answer with all orders of the node, at once or as soon as they may differ from those at `seen_revision`.",
    tag="agents")
REPORT_OPERATIONS = _write("report_operations", "POST /v1/agents/{node}/reports", _AGENTS,
    lambda: agents.ReportsRequest, lambda: j.ReportsAnswer,
    "Settle results of operations, in order; what is refused is acknowledged too.", tag="agents")
LIST_TRANSFERS = _get("list_transfers", "/v1/transfers", _DRILL_WATCHERS, lambda: t.TransfersAnswer,
    "List what is moved, waits for its turn, or waits for somebody; with what agents told this leader last.",
    {
        "after": "only of jobs with a larger id: for reading all of them, page by page",
        "limit": f"at most so many transfers (default and at most {TRANSFERS_LISTED_MAX})",
    }, tag="transfers")
SHOW_JOB_TRANSFERS = _get("show_job_transfers", "/v1/transfers/{id}", _READERS, lambda: t.JobTransfersView,
    "Show what is moved for one job, what was, and what was not exported.", stale=False, tag="transfers")
LIST_RECEIPTS = _get("list_receipts", "/v1/transfers/{id}/receipts", PEOPLE, lambda: t.ReceiptsAnswer,
    "Give every receipt of a job that the ledger has, oldest first; of one `stage` or `attempt` if that is asked.",
    {"stage": "only of `stage_in` or `stage_out`", "attempt": "only of this attempt"}, tag="transfers")

# External jobs: buffers whose jobs belong to another scheduler

REGISTER_SCHEDULER = _write("register_scheduler", "POST /v1/scheduler/register", _SCHEDULERS,
    lambda: g.RegisterSchedulerRequest, lambda: g.SchedulersAnswer,
    "Register the scheduler that the certificate names; rejected if another cluster has it.", tag="external_jobs")
SHOW_SCHEDULER_SITE = _get("show_scheduler_site", "/v1/scheduler/site", _SCHEDULERS, lambda: g.SchedulerSiteAnswer,
    "Show the pools for external jobs with their free space, and the values requests accept.",
    stale=False, tag="external_jobs")
LIST_SCHEDULERS = _get("list_schedulers", "/v1/schedulers", PEOPLE, lambda: g.SchedulersAnswer,
    "List the other schedulers that have external jobs here.", tag="external_jobs")
RELEASE_SCHEDULER = _write("release_scheduler", "POST /v1/schedulers/{name}/release", _OPERATORS,
    lambda: Command, lambda: g.SchedulersAnswer,
    "Let another cluster have external jobs under the name of a scheduler.", tag="external_jobs")
LIST_EXTERNAL_JOBS = _get("list_external_jobs", "/v1/external-jobs", _SCHEDULERS, lambda: g.ExternalJobsAnswer,
    "List the caller's external jobs, each with its last epoch.",
    {"live": "`yes`: only external jobs that are not over"}, stale=False, tag="external_jobs")
SHOW_EXTERNAL_JOB = _get("show_external_job", "/v1/external-jobs/{job}", _SCHEDULERS, lambda: g.ExternalJobAnswer,
    "Show one of the caller's external jobs, at once or as soon as it is in another phase than those of `while`.",
    _PATIENCE, stale=False, tag="external_jobs")
SET_UP_EXTERNAL_JOB = _write("set_up_external_job", "POST /v1/external-jobs/{job}/setup", _SCHEDULERS,
    lambda: g.SetUpExternalJobRequest, lambda: g.ExternalJobAnswer,
    "Ask for the space of an external job, or take one up again that lingers; it may wait for space.",
    query=_PATIENCE, tag="external_jobs")
STAGE_IN_EXTERNAL_JOB = _write("stage_in_external_job", "POST /v1/external-jobs/{job}/stage-in", _SCHEDULERS,
    lambda: g.ExternalJobCommand, lambda: g.ExternalJobAnswer,
    "Have the data of an external job staged in.", query=_PATIENCE, tag="external_jobs")
BEGIN_EXTERNAL_JOB_RUN = _write("begin_external_job_run", "POST /v1/external-jobs/{job}/begin-run", _SCHEDULERS,
    lambda: g.ExternalJobCommand, lambda: g.ExternalJobAnswer,
    "Say that the job of an external job begins.", tag="external_jobs")
END_EXTERNAL_JOB_RUN = _write("end_external_job_run", "POST /v1/external-jobs/{job}/end-run", _SCHEDULERS,
    lambda: g.ExternalJobCommand, lambda: g.ExternalJobAnswer,
    "Say that the job of an external job has ended.", tag="external_jobs")
STAGE_OUT_EXTERNAL_JOB = _write("stage_out_external_job", "POST /v1/external-jobs/{job}/stage-out", _SCHEDULERS,
    lambda: g.ExternalJobCommand, lambda: g.ExternalJobAnswer,
    "Have the results of an external job exported; then it is torn down.", query=_PATIENCE, tag="external_jobs")
TEAR_DOWN_EXTERNAL_JOB = _write("tear_down_external_job", "POST /v1/external-jobs/{job}/teardown", _SCHEDULERS,
    lambda: g.TearDownExternalJobRequest, lambda: g.ExternalJobAnswer,
    "Be done with an external job: it lingers, is parked or removed.", query=_PATIENCE, tag="external_jobs")
MISS_EXTERNAL_JOB = _write("miss_external_job", "POST /v1/external-jobs/{job}/miss", _SCHEDULERS,
    lambda: g.MissExternalJobRequest, lambda: g.ExternalJobAnswer,
    "Say that there should be an external job, and is none: the ledger has it from then on.", tag="external_jobs")
LIST_PERSISTENT = _get("list_persistent", "/v1/persistent", _SCHEDULERS, lambda: g.PersistentsAnswer,
    "List the persistent buffers that all nodes see, whoever made them.", stale=False, tag="external_jobs")
MAKE_PERSISTENT = _write("make_persistent", "POST /v1/persistent/{name}/make", _SCHEDULERS,
    lambda: g.MakePersistentRequest, lambda: g.PersistentAnswer,
    "Have a persistent buffer made for a user; repeated, it says how far that is.", tag="external_jobs")
REMOVE_PERSISTENT = _write("remove_persistent", "POST /v1/persistent/{name}/remove", _SCHEDULERS,
    lambda: g.RemovePersistentRequest, lambda: g.PersistentAnswer,
    "Have a persistent buffer of a user removed; repeated, it says how far that is.", tag="external_jobs")

# Replicas, the ledger

LIST_MEMBERS = _get("list_members", "/v1/members", _EVERYBODY, lambda: j.MembersAnswer,
    "List the replicas as the one that answers sees them: the leader, unless `stale=ok`.", tag="cluster")
ADD_MEMBER = _write("add_member", "POST /v1/members", _OPERATORS, lambda: r.AddMemberRequest, lambda: j.MembersAnswer,
    "Add a replica: it learns, and votes once it has caught up.", tag="cluster")
REMOVE_MEMBER = _write("remove_member", "POST /v1/members/{name}/remove", _OPERATORS,
    lambda: Command, lambda: j.MembersAnswer,
    "Remove a replica for good; if it leads, the leadership goes to another one first.", tag="cluster")
REPLACE_MEMBER = _write("replace_member", "POST /v1/members/{name}/replace", _OPERATORS,
    lambda: Command, lambda: j.MembersAnswer,
    "Let a replica that lost its data come back under a new id: it counts for nothing until it has caught up.",
    tag="cluster")
UPDATE_MEMBER = _write("update_member", "POST /v1/members/{name}/update", _OPERATORS,
    lambda: r.UpdateMemberRequest, lambda: j.MembersAnswer,
    "Say where a replica is reached from now on: its id, its data and its vote stay.", tag="cluster")
TRANSFER_LEADERSHIP = _write("transfer_leadership", "POST /v1/members/transfer", _DRILLS,
    lambda: r.TransferRequest, lambda: j.TransferAnswer,
    "Hand the leadership over to the replica named, or to the one that is furthest.", tag="cluster")
LIST_DRILLS = _get("list_drills", "/v1/drills", _DRILL_WATCHERS, lambda: d.DrillsAnswer,
    "List the last drills, the newest first, and the operators who want none.", tag="drills")
SHOW_DRILL = _get("show_drill", "/v1/drills/{drill}", _DRILL_WATCHERS | {Role.HELPER}, lambda: d.DrillAnswer,
    "Show one drill.", tag="drills")
START_DRILL = _write("start_drill", "POST /v1/drills", _DRILLS, lambda: d.StartDrillRequest, lambda: d.DrillAnswer,
    "Say that a drill begins; refused while there is one, and while an operator wants none.", status=201, tag="drills")
CONFIRM_DRILL = _write("confirm_drill", "POST /v1/drills/{drill}/confirm", _OPERATORS,
    lambda: Command, lambda: d.DrillAnswer,
    "Agree, as another operator, to a drill that has begun and waits for that.", tag="drills")
ABORT_DRILL = _write("abort_drill", "POST /v1/drills/{drill}/abort", _DRILLS,
    lambda: d.AbortDrillRequest, lambda: d.DrillAnswer,
    "Have a drill end before its time: who carries it out undoes what it did.", tag="drills")
END_DRILL = _write("end_drill", "POST /v1/drills/{drill}/end", _DRILLS,
    lambda: d.EndDrillRequest, lambda: d.DrillAnswer,
    "Say how a drill ended, and what was measured.", tag="drills")
PROBE_DRILL = _write("probe_drill", "POST /v1/drills/{drill}/probe", _DRILLS,
    lambda: Command, lambda: d.DrillProbeAnswer,
    "See whether commands are settled, during a drill: nothing changes but that it was answered.", tag="drills")
LOCK_DRILLS = _write("lock_drills", "POST /v1/drill-locks", _OPERATORS,
    lambda: d.AbortDrillRequest, lambda: d.DrillsAnswer,
    "Have no drill begin, and the one under way end.", tag="drills")
UNLOCK_DRILLS = _write("unlock_drills", "POST /v1/drill-locks/{name}/remove", _OPERATORS,
    lambda: Command, lambda: d.DrillsAnswer,
    "Take back an operator's word that there shall be no drill.", tag="drills")
SHOW_FEATURE_LEVEL = _get("show_feature_level", "/v1/feature-level", _OPERATORS, lambda: ledger.FeatureLevelAnswer,
    "Show the feature level of the cluster, and the highest that each replica knows.", tag="cluster")
RAISE_FEATURE_LEVEL = _write("raise_feature_level", "POST /v1/feature-level", _OPERATORS,
    lambda: r.FeatureLevelRequest, lambda: ledger.FeatureLevelAnswer,
    "Raise the feature level by one; refused unless every replica says that it knows the next one.", tag="cluster")
LIST_SESSIONS = _get("list_sessions", "/v1/sessions", PEOPLE, lambda: sessions.SessionsAnswer,
    "List the caller's sessions of programs; all, for an operator.", tag="cluster")
OPEN_SESSION = _write("open_session", "POST /v1/sessions", PEOPLE, lambda: Command, lambda: sessions.OpenedSession,
    "Open a session for a program that sends many commands: it numbers them, and says which answers it has.",
    tag="cluster")
CLOSE_SESSION = _write("close_session", "POST /v1/sessions/{session}/close", PEOPLE,
    lambda: Command, lambda: sessions.SessionsAnswer,
    "Close a session: the answers that are kept for it are forgotten.", tag="cluster")
SHOW_CLOCK = _get("show_clock", "/v1/clock", PEOPLE, lambda: ledger.ClockAnswer,
    "Show the cluster's time, what the wall clocks of a majority of the replicas say, and whose clock is off.",
    tag="cluster")
SET_CLOCK = _write("set_clock", "POST /v1/clock", _OPERATORS, lambda: r.SetClockRequest, lambda: ledger.ClockAnswer,
    "Set the cluster's time back to what a majority's wall clocks say, where it is ahead of them.", tag="cluster")
SHOW_OVERVIEW = _get("show_overview", "/v1/overview", PEOPLE, lambda: overview.OverviewAnswer,
    "Show the cluster at a glance: replicas, counts of jobs, nodes and transfers, and what needs somebody.",
    tag="cluster")
SHOW_STATUS = _get("show_status", "/v1/status", _EVERYBODY, lambda: j.StatusView,
    "Show the replica that was asked, as it is now.",
    {"digest": "`yes`: with the digest of the state"}, tag="cluster", own=True)
LIST_DIGESTS = _get("list_digests", "/v1/digests", _LEDGER_READERS | _DRILLS, lambda: j.DigestsAnswer,
    "Show the digests of the last checkpoints of this replica, and of its ledger, which its peers compare with theirs.",
    {"ledger": "with that of the ledger up to this index; of the last applied entry if left out, or not applied yet"},
    tag="cluster", own=True)
SHOW_STATE_DIGEST = _get("show_state_digest", "/v1/state-digest", _LEDGER_READERS | _DRILLS,
    lambda: j.StateDigestAnswer,
    "Show the digest of the state, which two replicas and a snapshot have in common at the same revision.",
    tag="cluster", then=True)
SHOW_HISTORY = _get("show_history", "/v1/history", _DRILL_WATCHERS, lambda: ledger.StoryAnswer,
    "Tell what happened between two moments, oldest first, with refusals: a stretch, from which one goes on.",
    {
        "from": "what happened from a revision or a time on (2026-01-31T12:00:00Z); from the beginning if left out",
        "to": "what happened up to a revision or a time; up to now if left out",
        "after": "go on after this revision: the `read` of the answer before",
        "job": "of this job only",
        "user": "of this user's jobs, and what he asked for himself",
        "account": "of jobs that were submitted for this account",
        "actor": "what somebody asked for: `admin`, or `operator admin`",
        "kind": "events of these names only, with commas; `refused`: what was refused",
        "of": f"what was changed of one of {', '.join(HISTORY_OF)} ...",
        "name": "... or of the one with this name",
        "limit": f"at most so many commands (default {HISTORY_LIMIT}, at most {HISTORY_LIMIT_MAX})",
    }, tag="cluster", own=True)
LIST_LEADERS = _get("list_leaders", "/v1/history/leaders", _DRILL_WATCHERS, lambda: ledger.LeadersAnswer,
    "List the terms of leaders, oldest first: who led when, and how long nobody did.",
    {"limit": f"the last so many (default {LEADERS_LIMIT}, at most {LEADERS_LIMIT_MAX})"}, tag="cluster", own=True)
LIST_POOL_USE = _get("list_pool_use", "/v1/history/pools", PEOPLE, lambda: overview.PoolUseAnswer,
    "Show how full each pool was in the last day, as far as this replica has followed.",
    {"name": "of this pool only; of the first ones by name if left out"}, tag="capacity", own=True)
SHOW_DIFF = _get("show_diff", "/v1/diff", PEOPLE, lambda: ledger.DiffAnswer,
    "Show what is not what it was between two moments, and whose command changed each thing last.",
    {
        "from": "the first moment: a revision, or a time such as 2026-01-31T12:00:00Z",
        "to": "the second one; now if left out",
        "job": "of this job only",
        "of": f"only of one of {', '.join(HISTORY_OF)} ...",
        "name": "... or of the one with this name",
        "limit": f"at most so many changes (default {DIFF_LIMIT}, at most {DIFF_LIMIT_MAX})",
    }, tag="cluster", own=True)
READ_LEDGER = _get("read_ledger", "/v1/ledger", _LEDGER_READERS, lambda: ledger.LedgerAnswer,
    "Read entries of the ledger that this replica holds, with their digests.",
    {
        "from": "index of the first entry",
        "limit": f"at most so many entries (default {ENTRIES_READ}, at most {ENTRIES_READ_MAX})",
    }, tag="cluster", own=True)
READ_STORED_ENTRIES = _get("read_stored_entries", "/v1/ledger/history", _REPLICAS, lambda: ledger.HandedAnswer,
    "Hand over entries as they are stored to a replica that was sent a snapshot instead of them.",
    {"last": "index of the last entry"}, tag="cluster", own=True)
READ_CHECKPOINT = _get("read_checkpoint", "/v1/tlog/checkpoint", _AUDITORS, lambda: str,
    "Give the last checkpoint of the ledger that a majority of the replicas has signed: a signed note of C2SP.",
    stale=False, tag="cluster", content_type=TEXT, own=True)
READ_TILE = _get("read_tile", "/v1/tlog/tile/{tile}", _AUDITORS, lambda: bytes,
    "Give a tile of the ledger's tree, or a bundle of its leaves, as C2SP tlog-tiles names them: `0/x001/067`, "
    "`entries/000.p/5`.",
    stale=False, tag="cluster", content_type=BYTES, own=True)
LIST_LOG_KEYS = _get("list_log_keys", "/v1/tlog/keys", _AUDITORS, lambda: ledger.LogKeysAnswer,
    "List the keys that the replicas sign checkpoints with.",
    {"alone": "`yes`: that of the replica that is asked, which asks nobody else"},
    stale=False, tag="cluster", own=True)
SIGN_CHECKPOINT = _write("sign_checkpoint", "POST /v1/tlog/sign", _REPLICAS,
    lambda: ledger.SignRequest, lambda: ledger.SignedAnswer,
    "Sign a checkpoint, where this replica's own ledger comes to it.", tag="cluster", own=True)
TAKE_CHECKPOINT = _write("take_checkpoint", "POST /v1/tlog/checkpoint", _REPLICAS,
    lambda: ledger.CheckpointRequest, lambda: ledger.CheckpointAnswer,
    "Take the checkpoint that the leader has collected.", tag="cluster", own=True)
PROVE_JOB = _get("prove_job", "/v1/jobs/{id}/proof", _OPERATORS, lambda: bytes,
    "Prove what the ledger has of a job, under the last checkpoint: the file that `verify_proof.py` reads.",
    stale=False, tag="cluster", content_type=BYTES, own=True)
SAVE_SNAPSHOT = _write("save_snapshot", "POST /v1/snapshots", _OPERATORS, lambda: NoneType, lambda: ledger.SnapshotView,
    "Write a snapshot on the replica that was asked.", tag="cluster", own=True)
LIST_SNAPSHOTS = _get("list_snapshots", "/v1/snapshots", _OPERATORS, lambda: ledger.SnapshotsAnswer,
    "List the snapshots that the replica which was asked may hand out, the newest first.", stale=False, tag="cluster",
    own=True)
FETCH_SNAPSHOT = _get("fetch_snapshot", "/v1/snapshots/{name}", _OPERATORS, lambda: bytes,
    "Give a part of a snapshot of the replica that was asked, 256 KiB at most; nothing at its end.",
    {"offset": "the byte that it begins with; 0 if left out"}, stale=False, tag="cluster", content_type=BYTES, own=True)
STREAM_EVENTS = _get("stream_events", "/v1/events", PEOPLE, lambda: ledger.EventView,
    "Send all events of revisions after `from` (or the header Last-Event-ID), and then those that come.",
    {"from": "send events of revisions after this one; from now on if left out"},
    stale=False, tag="cluster", content_type=EVENT_STREAM, own=True)
SHOW_OPENAPI = _get("show_openapi", "/v1/openapi.json", _EVERYBODY, lambda: Json,
    "Give the OpenAPI document.", tag="cluster", own=True)
SHOW_HEALTH = _get("show_health", "/healthz", _WATCHERS, lambda: str,
    "Say that the process is alive.", stale=False, tag="cluster", content_type=TEXT, own=True)
SHOW_READINESS = _get("show_readiness", "/readyz", _WATCHERS, lambda: str,
    "Say whether a command sent here can be committed now: 200, or 503 with why not.",
    stale=False, tag="cluster", content_type=TEXT, own=True)
SHOW_METRICS = _get("show_metrics", "/metrics", _WATCHERS, lambda: str,
    "Give Prometheus what it scrapes.", stale=False, tag="cluster", content_type=TEXT, own=True)

# fmt: on

OPERATIONS: Final = {row.name: row for row in tuple(globals().values()) if isinstance(row, ApiOperation)}
"""Operations by name, in the order of this table."""
