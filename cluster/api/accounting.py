"""Accounts, QOS, licences, reservations, the rules of scheduling, and when a job should start."""

from __future__ import annotations

from collections.abc import Callable

from cluster.api.privacy import check_sight, only_user
from cluster.api.service import Call, Reply
from cluster.api.web import Problem, bad
from cluster.schemas import accounts as v
from cluster.system import format_instant, parse_instant
from replica.grammar import TextFault, format_limits, format_reserved, parse_limits, parse_reserved
from replica.messages import commands as c
from replica.model import (
    Account,
    AccountUser,
    JobState,
    License,
    Limit,
    Partition,
    PartitionState,
    Qos,
    Reservation,
    SchedulingRules,
)
from replica.scheduler import effective_priority, rules_of
from replica.state import State
from replica.values import EVERY_NODE, MICROSECONDS_PER_SECOND, Instant, NodeListFault, format_nodes, parse_nodes


async def _settled(call: Call, command: c.Command, listing: Callable[[State], Reply]) -> Reply:
    """Have a change settled, and answer with the list of what it is about as it is afterwards."""
    return listing((await call.service.settle(call, command)).state)


async def accounts(call: Call) -> Reply:
    """List the accounts with their users and limits."""
    return _accounts(await call.state())


async def set_account(call: Call) -> Reply:
    """Make an account, or change all of it."""
    body: v.AccountRequest = call.body
    strange = sorted(set(body.user_limits) - set(body.users))
    if strange:
        raise bad(f"{strange[0]!r} is not among the users", "list the user in users, too", "user_limits")
    members = tuple(
        AccountUser(user, _limits(body.user_limits.get(user, {}), f"user_limits.{user}")) for user in body.users
    )
    limits = _limits(body.limits, "limits")
    return await _settled(call, c.SetAccount(Account(call.params["name"], body.parent, members, limits)), _accounts)


async def delete_account(call: Call) -> Reply:
    """Take an account away; its jobs wait with InvalidAccount."""
    return await _settled(call, c.DeleteAccount(call.params["name"]), _accounts)


def _accounts(state: State) -> Reply:
    rows = tuple(
        v.AccountView(
            name=account.name,
            parent=account.parent or None,
            users=tuple(member.user for member in account.members),
            limits=format_limits(account.limits),
            user_limits={member.user: format_limits(member.limits) for member in account.members if member.limits},
        )
        for _, account in sorted(state.accounts.items())
    )
    return Reply(state.revision, v.AccountsAnswer(revision=state.revision, accounts=rows))


async def qos(call: Call) -> Reply:
    """List the QOS with their limits."""
    return _qos(await call.state())


async def set_qos(call: Call) -> Reply:
    """Make a QOS, or change all of it."""
    body: v.QosRequest = call.body
    limits = _limits(body.limits, "limits")
    record = Qos(call.params["name"], body.priority, limits, body.users, body.accounts, body.deny_on_limit)
    return await _settled(call, c.SetQos(record), _qos)


async def delete_qos(call: Call) -> Reply:
    """Take a QOS away; its jobs wait with InvalidQOS."""
    return await _settled(call, c.DeleteQos(call.params["name"]), _qos)


def _qos(state: State) -> Reply:
    rows = tuple(
        v.QosView(
            name=record.name,
            priority=record.priority,
            limits=format_limits(record.limits),
            users=record.users,
            accounts=record.accounts,
            deny_on_limit=record.deny_on_limit,
        )
        for _, record in sorted(state.qos.items())
    )
    return Reply(state.revision, v.QosAnswer(revision=state.revision, qos=rows))


async def licenses(call: Call) -> Reply:
    """List the licences and how many of each running jobs have."""
    return _licenses(await call.state())


async def set_license(call: Call) -> Reply:
    """Say how many of a licence there are."""
    return await _settled(call, c.SetLicense(License(call.params["name"], call.body.total)), _licenses)


async def delete_license(call: Call) -> Reply:
    """Take a licence away."""
    return await _settled(call, c.DeleteLicense(call.params["name"]), _licenses)


def _licenses(state: State) -> Reply:
    rows = tuple(
        v.LicenseView(name=name, total=record.total, in_use=state.use.get(("licenses", "l", name, "", ""), 0))
        for name, record in sorted(state.licenses.items())
    )
    return Reply(state.revision, v.LicensesAnswer(revision=state.revision, licenses=rows))


async def reservations(call: Call) -> Reply:
    """List the reservations of burst-buffer space that have not ended."""
    return _reservations(await call.state())


async def set_reservation(call: Call) -> Reply:
    """Make a reservation of burst-buffer space, or change all of it."""
    body: v.ReservationRequest = call.body
    state = await call.service.current()
    try:
        space = parse_reserved(body.burst_buffer, state.pools, state.site.provider)
    except TextFault as fault:
        raise bad(fault.sentence, fault.remedy, "burst_buffer") from fault
    start_at = call.service.clock.now() if body.start is None else _instant(body.start, "start")
    reservation = Reservation(
        call.params["name"], start_at, _instant(body.end, "end"), body.users, body.accounts, space
    )
    return await _settled(call, c.SetReservation(reservation), _reservations)


async def delete_reservation(call: Call) -> Reply:
    """Take a reservation away; its jobs wait with ReservationDeleted."""
    return await _settled(call, c.DeleteReservation(call.params["name"]), _reservations)


def _reservations(state: State) -> Reply:
    rows = tuple(
        v.ReservationView(
            name=name,
            state="ACTIVE" if record.active else "INACTIVE",
            start=format_instant(record.start_at) or "",
            end=format_instant(record.end_at) or "",
            users=record.users,
            accounts=record.accounts,
            burst_buffer=format_reserved(record.space),
            held_bytes=sum(state.use.get(("bb", "r", name, "", space.pool), 0) for space in record.space),
        )
        for name, record in sorted(state.reservations.items())
    )
    return Reply(state.revision, v.ReservationsAnswer(revision=state.revision, reservations=rows))


async def scheduling(call: Call) -> Reply:
    """Show the rules of scheduling, and what was measured of transfers."""
    return _scheduling(await call.state())


async def set_scheduling(call: Call) -> Reply:
    """Change all of the rules of scheduling."""
    body: v.SchedulingRequest = call.body
    rules = SchedulingRules(
        body.size_points_per_gib,
        body.default_account,
        body.default_qos,
        body.accounts_required,
        body.revocations_max,
        body.revoke_after_s,
    )
    return await _settled(call, c.SetSchedulingRules(rules), _scheduling)


def _scheduling(state: State) -> Reply:
    rules = rules_of(state)
    rates = tuple(
        v.RateView(
            pool=pool,
            stage_ins=rates.stage_in.count,
            stage_in_bytes_per_s=rates.stage_in.bytes_per_s,
            stage_in_mean_s=rates.stage_in.mean_us / MICROSECONDS_PER_SECOND,
            stage_outs=rates.stage_out.count,
            stage_out_bytes_per_s=rates.stage_out.bytes_per_s,
            stage_out_mean_s=rates.stage_out.mean_us / MICROSECONDS_PER_SECOND,
            drain_s=rates.drain_us / MICROSECONDS_PER_SECOND,
        )
        for pool, rates in sorted(state.rates.items())
    )
    answer = v.SchedulingAnswer(
        revision=state.revision,
        size_points_per_gib=rules.size_points_per_gib,
        default_account=rules.default_account or None,
        default_qos=rules.default_qos or None,
        accounts_required=rules.accounts_required,
        revocations_max=rules.revocations_max,
        revoke_after_s=rules.revoke_after_s,
        rates=rates,
    )
    return Reply(state.revision, answer)


async def estimate(call: Call) -> Reply:
    """Say when a job should start, computed from the queue, time limits and measured transfers, and why not sooner."""
    state = await call.state()
    job_id = call.job_in(state)
    job = state.jobs.get(job_id)
    if job is None:
        raise Problem(404, "unknown_job", f"there is no job {job_id} in the state", "see /v1/jobs", "job id")
    check_sight(call, state, job_id)
    at = Instant(max(state.at, call.service.clock.now())) if job.state is JobState.PENDING else state.at
    if job.state is JobState.PENDING:
        await call.service.verdicts.ready(state)
    found = call.service.verdicts.estimate_at_any(state, job_id, at)
    view = v.EstimateView(
        revision=state.revision,
        job_id=job_id,
        state=job.state.name,
        priority=effective_priority(state, job, state.buffers.get(job_id)),
        start=format_instant(found.start_at),
        steps=tuple(
            v.EstimateStep(what=step.what, until=format_instant(step.until), sentence=step.sentence)
            for step in found.steps
        ),
    )
    return Reply(state.revision, view)


def _limits(texts: dict[str, str], place: str) -> tuple[Limit, ...]:
    try:
        return parse_limits(texts)
    except TextFault as fault:
        raise bad(fault.sentence, fault.remedy, place) from fault


def _instant(text: str, place: str) -> Instant:
    try:
        return parse_instant(text)
    except ValueError as error:
        raise bad(str(error), "write it as 2026-01-31T12:00:00Z", place) from error


# ---- partitions, and what accounts, their users and QOS have used of burst buffers


async def partitions(call: Call) -> Reply:
    """List the partitions."""
    return _partitions(await call.state())


async def set_partition(call: Call) -> Reply:
    """Make a partition, or change all of it."""
    body: v.PartitionRequest = call.body
    every = body.nodes.upper() == EVERY_NODE
    record = Partition(
        name=call.params["name"],
        nodes=() if every or not body.nodes else _nodes(body.nodes),
        every_node=every,
        state=PartitionState[body.state],
        is_default=body.default,
        max_time_s=_max_time_s(body.max_time_s),
        min_nodes=body.min_nodes,
        max_nodes=body.max_nodes,
        users=body.users,
        accounts=body.accounts,
    )
    settled = await call.service.settle(call, c.SetPartition(record))
    return _partitions(settled.state)


async def delete_partition(call: Call) -> Reply:
    """Take a partition away; its jobs wait with PartitionConfig."""
    settled = await call.service.settle(call, c.DeletePartition(call.params["name"]))
    return _partitions(settled.state)


def _nodes(text: str) -> tuple[str, ...]:
    try:
        return parse_nodes(text)
    except NodeListFault as fault:
        sentence, _, remedy = str(fault).partition("; ")
        raise bad(sentence, remedy or f"write names, or {EVERY_NODE}", "nodes") from fault


def _max_time_s(max_time_s: int | None) -> int:
    if max_time_s is not None and max_time_s <= 0:
        raise bad(f"the longest time limit is {max_time_s} s", "use at least 1 s, or null for any", "max_time_s")
    return max_time_s or 0


def _partitions(state: State) -> Reply:
    rows = tuple(_view(state, partition) for _, partition in sorted(state.partitions.items()))
    return Reply(state.revision, v.PartitionsAnswer(revision=state.revision, partitions=rows))


def _view(state: State, partition: Partition) -> v.PartitionView:
    names = state.nodes if partition.every_node else partition.nodes
    up = [node for name in names if (node := state.nodes.get(name)) is not None and not node.down and not node.drained]
    return v.PartitionView(
        name=partition.name,
        state=partition.state.name,
        default=partition.is_default,
        nodes=EVERY_NODE if partition.every_node else format_nodes(partition.nodes),
        nodes_up=len(up),
        cpus=sum(node.cpus for node in up),
        max_time_s=partition.max_time_s or None,
        min_nodes=partition.min_nodes,
        max_nodes=partition.max_nodes,
        users=partition.users,
        accounts=partition.accounts,
    )


async def usage(call: Call) -> Reply:
    """List what accounts, their users and QOS have used of burst buffers."""
    return _usage(call, await call.state())


async def reset_usage(call: Call) -> Reply:
    """Have what an account, or a QOS, has used count as nothing from here on."""
    body: v.UsageResetRequest = call.body
    if (body.account is None) == (body.qos is None):
        raise bad("it is not said whose usage", "name an account, or a QOS", "account")
    command = c.ResetUsage("q", body.qos) if body.qos is not None else c.ResetUsage("a", body.account or "")
    settled = await call.service.settle(call, command)
    return _usage(call, settled.state)


def _usage(call: Call, state: State) -> Reply:
    rows: list[v.UsageView] = []
    only = only_user(call, state)
    for key in sorted(state.consumed):
        whose, name, user, pool = key.split("/")
        if only is not None and user != only:
            continue
        rows.append(
            v.UsageView(
                account=name if whose == "a" else None,
                qos=name if whose == "q" else None,
                user=user or None,
                pool=pool or None,
                byte_minutes=state.consumed[key],
            )
        )
    return Reply(state.revision, v.UsageAnswer(revision=state.revision, usage=tuple(rows)))
