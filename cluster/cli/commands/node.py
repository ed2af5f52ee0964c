"""Commands `forebay node …` and `forebay policy partition …`."""

from typing import Any, Final

import click

from forebay.cluster.cli.commands.options import (
    AT_OPTION,
    NAME,
    Kind,
    find_record,
    parse_names,
    record_group,
    replace_record,
)
from forebay.cluster.cli.confirmation import YES_OPTION, confirm
from forebay.cluster.cli.exits import bad_input, convert_input
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.session import session
from forebay.cluster.cli.text import (
    Listing,
    format_duration,
    list_fields,
    nodes_table,
    note,
    parse_duration,
    present,
    table,
)
from forebay.cluster.schemas import NodeLostAnswer, NodeView
from forebay.cluster.schemas import accounts as v
from forebay.cluster.schemas import operations as ops
from forebay.replica.values import NODES_MAX, plain

UNLIMITED: Final = "UNLIMITED"


def _listing(partitions: tuple[v.PartitionView, ...]) -> Listing:
    rows = [
        (
            row.name + ("*" if row.default else ""),
            row.state,
            "infinite" if row.max_time_s is None else format_duration(row.max_time_s),
            _job_nodes(row),
            row.nodes_up,
            row.cpus,
            row.nodes,
            ",".join(row.users) or "ALL",
            ",".join(row.accounts) or "ALL",
        )
        for row in partitions
    ]
    heads = ("PARTITION", "AVAIL", "TIMELIMIT", "JOB_SIZE", "UP", "CPUS", "NODELIST", "USERS", "ACCOUNTS")
    return table(heads, rows, right=frozenset({"UP", "CPUS"}), flexible=frozenset({"NODELIST", "USERS", "ACCOUNTS"}))


def _job_nodes(row: v.PartitionView) -> str:
    return f"{row.min_nodes}-{'infinite' if row.max_nodes is None else row.max_nodes}"


PARTITIONS = Kind("partition", "partitions", ops.LIST_PARTITIONS, ops.SET_PARTITION, ops.DELETE_PARTITION, _listing)
partition_group = record_group(
    PARTITIONS,
    "Show and change partitions: their nodes, users and limits.",
    "List the partitions; the default one has a star.",
    "Delete a partition (operators).\n\nIts pending jobs wait with PartitionConfig.",
)


@partition_group.command("set")
@NAME
@click.option("--nodes", metavar="LIST", help="Set the nodes, for example n[1-4],n7, or ALL.  [default: ALL]")
@click.option(
    "--state",
    type=click.Choice(["UP", "DOWN", "DRAIN", "INACTIVE"], case_sensitive=False),
    help="Set the state: DOWN starts no jobs, DRAIN accepts no jobs, INACTIVE does neither.  [default: UP]",
)
@click.option("--default/--no-default", "default", default=None, help="Use it for jobs that name no partition.")
@click.option("--max-time", metavar="TIME", help="Set the longest time limit, for example 2-12, or UNLIMITED.")
@click.option("--min-nodes", type=click.IntRange(0, NODES_MAX), help="Set the minimum number of nodes of a job.")
@click.option("--max-nodes", metavar="N", help="Set the maximum number of nodes of a job, or UNLIMITED.")
@click.option("--users", callback=parse_names, metavar="NAME,…", help="Set the allowed users; empty for all.")
@click.option(
    "--accounts", callback=parse_names, metavar="NAME,…", help="Set the accounts whose jobs are allowed; empty for all."
)
@JSON_OPTION
def set_partition(
    name: str, as_json: bool, max_time: str | None, max_nodes: str | None, state: str | None, **given: Any
) -> None:
    """Create or change a partition (operators)."""
    changes: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    if state is not None:
        changes["state"] = state.upper()
    if max_time is not None:
        changes["max_time_s"] = (
            None if max_time.upper() == UNLIMITED else convert_input(max_time, parse_duration, "--max-time")
        )
    if max_nodes is not None:
        changes["max_nodes"] = None if max_nodes.upper() == UNLIMITED else _count(max_nodes)

    def fields_of(present: v.PartitionView | None) -> dict[str, Any]:
        fields = ("nodes", "state", "default", "max_time_s", "min_nodes", "max_nodes", "users", "accounts")
        return {**({} if present is None else {field: getattr(present, field) for field in fields}), **changes}

    replace_record(PARTITIONS, name, as_json, fields_of)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 9:
        sentence = f"{text[:24]!r} is not a number of nodes"
        raise bad_input(sentence, f"write a number, or {UNLIMITED}", place="--max-nodes")
    return int(text)


@click.command("list")
@AT_OPTION
@JSON_OPTION
def list_nodes(at: str | None, as_json: bool) -> None:
    """List nodes, their state and their jobs."""
    answer = session().read(ops.LIST_NODES, at=at)
    present(answer, as_json, lambda: nodes_table(answer.nodes))


@click.command("show")
@NAME
@AT_OPTION
@JSON_OPTION
def show_node(name: str, at: str | None, as_json: bool) -> None:
    """Show a node in full."""
    node = find_record(session().read(ops.LIST_NODES, at=at).nodes, name, "node")
    present(node, as_json, lambda: list_fields(nodes_table((node,))))


@click.command("admit")
@NAME
@JSON_OPTION
def admit(name: str, as_json: bool) -> None:
    """Allow the agent of a new node to register (operators).

    Nodes that forebay.toml listed when the cluster was created need no admission.
    """
    answer = session().write(ops.ADMIT_NODE, name=name)
    present(answer, as_json, lambda: f"Node {plain(answer.node)} may register: start its agent.")


@click.command("drain")
@NAME
@click.option("--reason", required=True, metavar="TEXT", help="Set the reason shown for the node.")
@JSON_OPTION
def drain(name: str, reason: str, as_json: bool) -> None:
    """Start no new work on a node (operators).

    Running jobs and transfers continue.
    """
    if not reason.strip():
        raise bad_input("the reason is empty", 'give one, for example --reason "new disks"', place="--reason")
    node = session().write(ops.DRAIN_NODE, name=name, reason=reason)
    present(node, as_json, lambda: _state_line(node) + f" Reason={plain(node.reason)}")


@click.command("resume")
@NAME
@JSON_OPTION
def resume(name: str, as_json: bool) -> None:
    """Return a drained node to service (operators)."""
    node = session().write(ops.RESUME_NODE, name=name)
    present(node, as_json, lambda: _state_line(node))


@click.command("lost")
@NAME
@click.option("--reason", default="", metavar="TEXT", help="Set the reason shown for the node.")
@click.option("--dry-run", is_flag=True, help="Show the effect on its jobs, without changing anything.")
@YES_OPTION
@JSON_OPTION
def declare_lost(name: str, reason: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Declare a DOWN node lost, and give up its data (operators).

    Its running jobs end as NODE_FAIL or are requeued, pending jobs are staged on another node, and their space becomes
    free. Unexported results on the node are LOST. Switch the node off first, because processes on it cannot be stopped.
    """
    if not dry_run:
        confirm(f"Give up the data on node {name}, and LOSE its results (--dry-run lists them)?", yes=yes)
    _print_losses(session().write(ops.LOSE_NODE, name=name, reason=reason, dry_run=dry_run), as_json)


def _print_losses(answer: NodeLostAnswer, as_json: bool) -> None:
    rows = [
        (job.task or job.job_id, job.user, job.name, job.state, _LOSSES.get(job.loss, job.loss), ", ".join(job.results))
        for job in answer.jobs
    ]
    heads = ("JOBID", "USER", "NAME", "STATE", "THEN", "LOST-RESULTS")
    present(answer, as_json, lambda: table(heads, rows, right=frozenset({"JOBID"}), flexible=frozenset(heads[-1:])))
    for buffer in () if as_json else answer.persistent:
        remedy = f"to remove it: forebay buffer clear --name {buffer} --discard"
        note(f"persistent buffer {buffer} on node {answer.node} stays listed; {remedy}")


_LOSSES: Final = {
    "staged_again": "staged on another node",
    "requeued": "requeued",
    "ended": "ends",
    "results_lost": "ends without its results",
    "removed": "its buffer is given up",
}


def _state_line(node: NodeView) -> str:
    return f"NodeName={plain(node.name)} State={plain(node.state)}"
