"""Tree of commands: section, group, name and implementation of each command.

A command is imported on its first use, because imports take most of a short command's time. So the table has the
one-line help of the commands in `forebay --help`; the help of a group's commands is in their docstrings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class Leaf(NamedTuple):
    """Command of the outermost level."""

    summary: str
    """First sentence of its docstring."""
    target: str
    """`module:name` below `cluster.cli`."""


class Branch(NamedTuple):
    """Group of commands."""

    summary: str
    children: Mapping[str, str | Branch]
    """Name of a command -> its target, as in `Leaf`, or a subgroup."""


TREE: Final[Mapping[str, Mapping[str, Leaf | Branch]]] = MappingProxyType(
    {
        "Everyday": {
            "submit": Leaf("Submit batch scripts.", "commands.submit:submit"),
            "queue": Leaf("List jobs, by default those that have not ended.", "commands.job:queue"),
            "cancel": Leaf("Cancel jobs.", "commands.job_changes:cancel"),
            "status": Leaf("Show whether the cluster needs attention.", "commands.cluster:status"),
            "page": Leaf("Open the status page in a browser.", "page:page"),
            "top": Leaf("Watch the cluster full-screen; q quits.", "top:top"),
            "job": Branch(
                "Show, explain, change, hold and requeue jobs.",
                {
                    "show": "commands.job:show_job",
                    "why": "commands.job:why",
                    "history": "commands.job:history",
                    "estimate": "commands.job:estimate",
                    "update": "commands.job_changes:update",
                    "hold": "commands.job_changes:hold",
                    "release": "commands.job_changes:release",
                    "requeue": "commands.job_changes:requeue",
                    "suspend": "commands.job_changes:suspend",
                    "resume": "commands.job_changes:resume",
                },
            ),
            "buffer": Branch(
                "List, export and clear burst buffers.",
                {
                    "list": "commands.buffer:list_buffers",
                    "export": "commands.buffer:export",
                    "clear": "commands.buffer:clear",
                },
            ),
            "transfer": Branch(
                "Show transfers, their progress and their receipts.",
                {
                    "list": "commands.transfer:list_transfers",
                    "show": "commands.transfer:show_transfer",
                    "receipt": "commands.transfer:receipt",
                },
            ),
        },
        "Operators": {
            "pool": Branch(
                "Show, create, resize and drain pools of storage.",
                {
                    "list": "commands.pool:list_pools",
                    "show": "commands.pool:show_pool",
                    "create": "commands.pool:create_pool",
                    "set": "commands.pool:set_pool",
                    "delete": "commands.pool:delete_pool",
                    "drain": "commands.pool:drain_pool",
                    "resume": "commands.pool:resume_pool",
                    "history": "commands.pool:show_pool_use",
                    "filesystem": Branch(
                        "Show and change shared filesystems, which all nodes mount.",
                        {
                            "list": "commands.pool:list_filesystems",
                            "add": "commands.pool:add_filesystem",
                            "set": "commands.pool:set_filesystem",
                            "delete": "commands.pool:delete_filesystem",
                            "mark": "commands.pool:mark_filesystem",
                            "check": "commands.pool:check_shared_filesystem",
                        },
                    ),
                },
            ),
            "node": Branch(
                "Show, admit, drain and resume nodes, or declare them lost.",
                {
                    "list": "commands.node:list_nodes",
                    "show": "commands.node:show_node",
                    "admit": "commands.node:admit",
                    "drain": "commands.node:drain",
                    "resume": "commands.node:resume",
                    "lost": "commands.node:declare_lost",
                    "buffers": "commands.agent:agent_buffers",
                    "receipt": "commands.agent:agent_receipt",
                },
            ),
            "policy": Branch(
                "Show and change accounts, QOS, partitions and other limits.",
                {
                    "account": "commands.account:account_group",
                    "qos": "commands.account:qos_group",
                    "license": "commands.account:license_group",
                    "partition": "commands.node:partition_group",
                    "reservation": "commands.account:reservation_group",
                    "usage": Branch(
                        "Show and reset the usage that GrpBBMinutes limits.",
                        {"list": "commands.account:list_usage", "reset": "commands.account:reset_usage"},
                    ),
                    "scheduling": "commands.account:show_scheduling",
                },
            ),
            "config": Branch(
                "Show, compare and change the cluster's configuration.",
                {
                    "show": "commands.config:show_configuration",
                    "set": "commands.config:set_keys",
                    "diff": "commands.config:diff",
                    "apply": "commands.config:apply",
                },
            ),
            "cluster": Branch(
                "Create the cluster, show and change its replicas.",
                {
                    "init": "commands.local:init",
                    "up": "commands.local:up",
                    "check": "check:check",
                    "members": "commands.member:list_members",
                    "probe": "commands.member:probe",
                    "add": "commands.member:add",
                    "replace": "commands.member:replace",
                    "remove": "commands.member:remove",
                    "update": "commands.member:update",
                    "transfer": "commands.member:transfer",
                    "snapshot": "commands.backup:snapshot",
                    "recover": "audit.offline:recover",
                    "clock": "commands.cluster:show_clock",
                    "set-clock": "commands.cluster:set_clock",
                    "feature-level": "commands.cluster:show_feature_level",
                    "raise-feature-level": "commands.cluster:raise_feature_level",
                },
            ),
            "sink": Branch("List the receivers of events.", {"list": "commands.cluster:list_sinks"}),
            "backup": Branch(
                "Create, inspect and restore backups.",
                {
                    "create": "commands.backup:create",
                    "inspect": "audit.offline:inspect",
                    "restore": "audit.offline:restore_backup",
                },
            ),
            "cert": Branch(
                "Issue, list and revoke certificates.",
                {
                    "issue": "commands.certificate:issue_certificate",
                    "list": "commands.certificate:list_certificates",
                    "revoke": "commands.certificate:revoke_certificate",
                    "unrevoke": "commands.certificate:unrevoke_certificate",
                    "revocations": "commands.certificate:list_revocations",
                    "renew-authority": "commands.certificate:renew",
                    "retire-authority": "commands.certificate:retire",
                },
            ),
            "drill": Branch(
                "Plan and run failover drills.",
                {
                    "plan": "commands.drill:plan",
                    "run": "commands.drill:run",
                    "list": "commands.drill:list_drills",
                    "show": "commands.drill:show_drill",
                    "confirm": "commands.drill:confirm",
                    "abort": "commands.drill:abort",
                    "lock": "commands.drill:lock",
                    "unlock": "commands.drill:unlock",
                },
            ),
        },
        "Audit": {
            "audit": Branch(
                "Verify, replay, prove and search the cluster's history.",
                {
                    "history": "audit.history:history",
                    "diff": "audit.history:diff",
                    "leaders": "audit.history:leaders",
                    "verify": "audit.offline:verify",
                    "replay": "audit.offline:replay",
                    "redecide": "audit.offline:redecide",
                    "whatif": "audit.offline:whatif",
                    "report": "audit.offline:report",
                    "jobs": "audit.offline:jobs",
                    "dump": "audit.offline:dump",
                    "prove": "audit.offline:prove",
                    "checkpoint": "audit.proofs:show_checkpoint",
                    "consistency": "audit.proofs:consistency",
                    "keys": "audit.proofs:show_keys",
                    "archive": "audit.offline:archive",
                    "prune": "audit.offline:prune",
                    "retain": "audit.offline:retain",
                    "restore": "audit.offline:restore_ledger",
                    "witness": Branch(
                        "Create a witness's key, and list the ledgers it has cosigned.",
                        {"key": "audit.witness:create_key", "list": "audit.witness:list_logs"},
                    ),
                },
            ),
        },
        "Services": {
            "run": Branch(
                "Run a process of the cluster in the foreground.",
                {
                    "replica": "commands.services:replica",
                    "agent": "commands.services:agent",
                    "gateway": "commands.services:gateway",
                    "bridge": "commands.services:bridge",
                    "helper": "commands.services:helper",
                    "witness": "audit.witness:run",
                },
            ),
            "slurm": Branch(
                "Connect a Slurm cluster, and show its buffers and jobs.",
                {
                    "install": "commands.slurm:install",
                    "jobs": "commands.slurm:jobs",
                    "schedulers": "commands.slurm:list_schedulers",
                    "release": "commands.slurm:release_scheduler",
                    "burst": "commands.buffer:burst",
                    "bbstat": "commands.buffer:bbstat",
                },
            ),
            "support": Branch(
                "Collect diagnostics, close sessions, set up completion.",
                {
                    "debug": "debug:debug",
                    "session": Branch(
                        "Show and close sessions of client programs.",
                        {"list": "commands.cluster:list_sessions", "close": "commands.cluster:close_session"},
                    ),
                    "completion": "app:completion",
                },
            ),
        },
    }
)
"""Section of `forebay --help` -> its commands and groups, in this order."""

GUESSES: Final[Mapping[tuple[str, ...], tuple[str, ...]]] = MappingProxyType(
    {
        **dict.fromkeys([("ls",), ("list",), ("jobs",), ("ps",), ("squeue",), ("job", "list")], ("queue",)),
        **dict.fromkeys([("job", "ls"), ("job", "jobs"), ("qstat",), ("bjobs",)], ("queue",)),
        **dict.fromkeys([("kill",), ("scancel",), ("qdel",), ("job", "cancel"), ("job", "kill")], ("cancel",)),
        **dict.fromkeys([("sbatch",), ("qsub",), ("job", "submit")], ("submit",)),
        **dict.fromkeys([("show",), ("job", "status"), ("job", "info")], ("job", "show")),
        ("why",): ("job", "why"),
        ("sacct",): ("audit", "jobs"),
        **{(group, "ls"): (group, "list") for group in ("buffer", "transfer", "pool", "node", "cert", "drill")},
        ("nodes",): ("node", "list"),
        ("sinfo",): ("node", "list"),
        ("pools",): ("pool", "list"),
        ("buffers",): ("buffer", "list"),
        ("transfers",): ("transfer", "list"),
        ("members",): ("cluster", "members"),
        ("cluster", "list"): ("cluster", "members"),
        ("cluster", "status"): ("status",),
    }
)
"""Words that users guess -> the command that runs instead."""

SYNONYMS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "add": "create", "new": "create", "rm": "delete", "del": "delete", "ls": "list", "get": "show",
        "describe": "show", "info": "show", "overview": "status", "start": "run", "serve": "replica",
        "ledger": "audit", "log": "history", "events": "history", "member": "members", "replica": "members",
        "certificate": "cert", "certs": "cert", "place": "filesystem", "user": "account", "logs": "debug",
    }
)  # fmt: skip
"""Word that users guess -> the word whose commands are suggested."""


def paths(below: Mapping[str, str | Branch | Leaf] | None = None, *before: str) -> Iterator[tuple[str, ...]]:
    """Yield the names of every command and group."""
    children = below if below is not None else {n: one for section in TREE.values() for n, one in section.items()}
    for name, entry in children.items():
        yield (*before, name)
        if isinstance(entry, Branch):
            yield from paths(entry.children, *before, name)
