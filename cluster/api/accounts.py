"""Handlers of accounts, QOS, licences, reservations, scheduling rules, partitions, usage, and start estimates."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from forebay.cluster.api.privacy import check_may_see, only_user
from forebay.cluster.api.service import ApiCall, CommandBody, Reply, Route, encode_view, handles
from forebay.cluster.api.web import Problem, bad_request, unknown_job
from forebay.cluster.schemas import Answer, ApiOperation, Command, made_of
from forebay.cluster.schemas import accounts as v
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system import format_instant, parse_instant
from forebay.cluster.system.eventloop import SlicedWork, iterate_paced
from forebay.replica.decide import record_etag
from forebay.replica.grammar import LimitTextError, format_limits, format_reserved, parse_limits, parse_reserved
from forebay.replica.messages import commands as c
from forebay.replica.model import (
    Account,
    AccountUser,
    JobState,
    License,
    Limit,
    Partition,
    PartitionState,
    Qos,
    Reservation,
)
from forebay.replica.scheduler import effective_priority
from forebay.replica.state import State
from forebay.replica.values import (
    EVERY_NODE,
    MICROSECONDS_PER_SECOND,
    Instant,
    NodeListError,
    format_nodes,
    parse_nodes,
)

_Listed = TypeVar("_Listed", bound=Answer)
Listing = Callable[[State, SlicedWork], Awaitable[_Listed]]
"""Builds a response with all records of one kind in a state, in slices."""


def _list_route(operation: ApiOperation[None, _Listed], listing: Listing[_Listed]) -> Route:
    """Return the route that lists one kind of record."""

    async def listed(call: ApiCall[None]) -> Reply[_Listed]:
        state = await call.state()
        return Reply(state.revision, await listing(state, call.work))

    return handles(operation)(listed)


def _delete_route(
    operation: ApiOperation[Command, _Listed], command: Callable[[str], c.Command], listing: Listing[_Listed]
) -> Route:
    """Return the route that deletes the record named in the path."""

    async def deleted(call: ApiCall[Command]) -> Reply[_Listed]:
        return await _settle_and_list(call, command(call.params["name"]), listing)

    return handles(operation)(deleted)


async def _settle_and_list(call: ApiCall[CommandBody], command: c.Command, listing: Listing[_Listed]) -> Reply[_Listed]:
    """Settle a change, and respond with the resulting list."""
    state = (await call.service.settle(call, command)).state
    return Reply(state.revision, await listing(state, call.work))


@handles(ops.SET_ACCOUNT)
async def set_account(call: ApiCall[v.AccountRequest]) -> Reply[v.AccountsAnswer]:
    body = call.body
    strange = sorted(set(body.user_limits) - set(body.users))
    if strange:
        raise bad_request(f"{strange[0]!r} has limits but is not in users", "add this user to users", "user_limits")
    members = tuple(
        AccountUser(user, _limits(body.user_limits.get(user, {}), f"user_limits.{user}")) for user in body.users
    )
    limits = _limits(body.limits, "limits")
    return await _settle_and_list(
        call, c.SetAccount(Account(call.params["name"], body.parent, members, limits), body.if_match), _accounts
    )


async def _accounts(state: State, work: SlicedWork) -> v.AccountsAnswer:
    rows = [
        v.AccountView(
            name=account.name,
            parent=account.parent or None,
            users=tuple(member.user for member in account.members),
            limits=format_limits(account.limits),
            user_limits={member.user: format_limits(member.limits) for member in account.members if member.limits},
            etag=record_etag(account),
        )
        async for _, account in iterate_paced(sorted(state.accounts.items()), work)
    ]
    return v.AccountsAnswer(revision=state.revision, accounts=tuple(rows))


list_accounts = _list_route(ops.LIST_ACCOUNTS, _accounts)
delete_account = _delete_route(ops.DELETE_ACCOUNT, c.DeleteAccount, _accounts)


@handles(ops.SET_QOS)
async def set_qos(call: ApiCall[v.QosRequest]) -> Reply[v.QosAnswer]:
    body = call.body
    limits = _limits(body.limits, "limits")
    qos = made_of(body, Qos, name=call.params["name"], limits=limits)
    return await _settle_and_list(call, c.SetQos(qos, body.if_match), _qos)


async def _qos(state: State, work: SlicedWork) -> v.QosAnswer:
    rows = [
        made_of(record, v.QosView, limits=format_limits(record.limits), etag=record_etag(record))
        async for _, record in iterate_paced(sorted(state.qos.items()), work)
    ]
    return v.QosAnswer(revision=state.revision, qos=tuple(rows))


list_qos = _list_route(ops.LIST_QOS, _qos)
delete_qos = _delete_route(ops.DELETE_QOS, c.DeleteQos, _qos)


@handles(ops.SET_LICENSE)
async def set_license(call: ApiCall[v.LicenseRequest]) -> Reply[v.LicensesAnswer]:
    license = License(call.params["name"], call.body.total)
    return await _settle_and_list(call, c.SetLicense(license, call.body.if_match), _licenses)


async def _licenses(state: State, work: SlicedWork) -> v.LicensesAnswer:
    rows = [
        made_of(
            record,
            v.LicenseView,
            in_use=state.use.get(("licenses", "l", name, "", ""), 0),
            etag=record_etag(record),
        )
        async for name, record in iterate_paced(sorted(state.licenses.items()), work)
    ]
    return v.LicensesAnswer(revision=state.revision, licenses=tuple(rows))


list_licenses = _list_route(ops.LIST_LICENSES, _licenses)
delete_license = _delete_route(ops.DELETE_LICENSE, c.DeleteLicense, _licenses)


@handles(ops.SET_RESERVATION)
async def set_reservation(call: ApiCall[v.ReservationRequest]) -> Reply[v.ReservationsAnswer]:
    body = call.body
    state = await call.service.current()
    try:
        space = parse_reserved(body.burst_buffer, state.pools, state.site.provider)
    except LimitTextError as fault:
        raise bad_request(fault.sentence, fault.remedy, "burst_buffer") from fault
    start_at = call.service.clock.now() if body.start is None else _instant(body.start, "start")
    reservation = Reservation(
        call.params["name"], start_at, _instant(body.end, "end"), body.users, body.accounts, space
    )
    return await _settle_and_list(call, c.SetReservation(reservation, body.if_match), _reservations)


async def _reservations(state: State, work: SlicedWork) -> v.ReservationsAnswer:
    rows = [
        made_of(
            record,
            v.ReservationView,
            state="ACTIVE" if record.active else "INACTIVE",
            start=format_instant(record.start_at) or "",
            end=format_instant(record.end_at) or "",
            burst_buffer=format_reserved(record.space),
            held_bytes=sum(state.use.get(("bb", "r", name, "", space.pool), 0) for space in record.space),
            etag=record_etag(record),
        )
        async for name, record in iterate_paced(sorted(state.reservations.items()), work)
    ]
    return v.ReservationsAnswer(revision=state.revision, reservations=tuple(rows))


list_reservations = _list_route(ops.LIST_RESERVATIONS, _reservations)
delete_reservation = _delete_route(ops.DELETE_RESERVATION, c.DeleteReservation, _reservations)


async def _scheduling(state: State, work: SlicedWork) -> v.SchedulingAnswer:
    rules = state.scheduling_rules
    rates = [
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
        async for pool, rates in iterate_paced(sorted(state.rates.items()), work)
    ]
    return made_of(
        rules,
        v.SchedulingAnswer,
        revision=state.revision,
        default_account=rules.default_account or None,
        default_qos=rules.default_qos or None,
        rates=tuple(rates),
    )


show_scheduling_rules = _list_route(ops.SHOW_SCHEDULING_RULES, _scheduling)


@handles(ops.ESTIMATE_JOB)
async def estimate_job(call: ApiCall[None]) -> Reply[v.EstimateView]:
    state = await call.state()
    job_id = call.job_in(state)
    job = state.jobs.get(job_id)
    if job is None:
        raise unknown_job(f"job {job_id} does not exist")
    check_may_see(call, state, job_id)
    if job.external_job is not None:
        sentence = f"{job.external_job.name} is a job of another scheduler, which alone can estimate its start"
        raise Problem(409, "wrong_state", sentence, f"ask that scheduler for its job {job.external_job.job}", "job id")
    at = Instant(max(state.at, call.service.clock.now())) if job.state is JobState.PENDING else state.at
    found = await call.service.verdicts.estimate(state, job_id, at, call.work)
    view = v.EstimateView(
        revision=state.revision,
        job_id=job_id,
        state=job.state.name,
        priority=effective_priority(state, job, state.buffers.get(job_id)),
        start=format_instant(found.start_at),
        steps=tuple(made_of(step, v.EstimateStep, until=format_instant(step.until)) for step in found.steps),
    )
    return Reply(state.revision, view)


def _limits(texts: dict[str, str], place: str) -> tuple[Limit, ...]:
    try:
        return parse_limits(texts)
    except LimitTextError as fault:
        raise bad_request(fault.sentence, fault.remedy, place) from fault


def _instant(text: str, place: str) -> Instant:
    try:
        return parse_instant(text)
    except ValueError as error:
        raise bad_request(str(error), "write it as 2026-01-31T12:00:00Z", place) from error


@handles(ops.SET_PARTITION)
async def set_partition(call: ApiCall[v.PartitionRequest]) -> Reply[v.PartitionsAnswer]:
    body = call.body
    every = body.nodes.upper() == EVERY_NODE
    record = made_of(
        body,
        Partition,
        name=call.params["name"],
        nodes=() if every or not body.nodes else _nodes(body.nodes),
        every_node=every,
        state=PartitionState[body.state],
        is_default=body.default,
        max_time_s=_max_time_s(body.max_time_s),
    )
    return await _settle_and_list(call, c.SetPartition(record, body.if_match), _partitions)


def _nodes(text: str) -> tuple[str, ...]:
    try:
        return parse_nodes(text)
    except NodeListError as fault:
        sentence, _, remedy = str(fault).partition("; ")
        raise bad_request(sentence, remedy or f"write names, or {EVERY_NODE}", "nodes") from fault


def _max_time_s(max_time_s: int | None) -> int:
    if max_time_s is not None and max_time_s <= 0:
        raise bad_request(
            f"max_time_s is {max_time_s}, and must be at least 1", "use 1 or more, or null for no limit", "max_time_s"
        )
    return max_time_s or 0


async def _partitions(state: State, work: SlicedWork) -> v.PartitionsAnswer:
    rows = []
    for _, partition in sorted(state.partitions.items()):
        # The view counts the CPUs of each node.
        await work.take(parts=len(state.nodes if partition.every_node else partition.nodes))
        rows.append(encode_view(_view(state, partition)))
    return v.PartitionsAnswer(revision=state.revision, partitions=tuple(rows))


list_partitions = _list_route(ops.LIST_PARTITIONS, _partitions)
delete_partition = _delete_route(ops.DELETE_PARTITION, c.DeletePartition, _partitions)


def _view(state: State, partition: Partition) -> v.PartitionView:
    names = state.nodes if partition.every_node else partition.nodes
    up = [node for name in names if (node := state.nodes.get(name)) is not None and not node.down and not node.drained]
    return made_of(
        partition,
        v.PartitionView,
        state=partition.state.name,
        default=partition.is_default,
        nodes=EVERY_NODE if partition.every_node else format_nodes(partition.nodes),
        nodes_up=len(up),
        cpus=sum(node.cpus for node in up),
        max_time_s=partition.max_time_s or None,
        etag=record_etag(partition),
    )


@handles(ops.LIST_USAGE)
async def list_usage(call: ApiCall[None]) -> Reply[v.UsageAnswer]:
    return await _usage(call, await call.state())


@handles(ops.RESET_USAGE)
async def reset_usage(call: ApiCall[v.UsageResetRequest]) -> Reply[v.UsageAnswer]:
    body = call.body
    if (body.account is None) == (body.qos is None):
        raise bad_request("no account or QOS is given", "give either account or qos", "account")
    command = c.ResetUsage("q", body.qos) if body.qos is not None else c.ResetUsage("a", body.account or "")
    return await _usage(call, (await call.service.settle(call, command)).state)


async def _usage(call: ApiCall[Any], state: State) -> Reply[v.UsageAnswer]:
    rows: list[v.UsageView] = []
    work, only = call.work, only_user(call, state)
    for key in await work.sort(state.consumed):
        whose, name, user, pool = key.split("/")
        if only is not None and user != only:
            await work.take(0, parts=2)
            continue
        await work.take(0, parts=8)
        view = v.UsageView(
            account=name if whose == "a" else None,
            qos=name if whose == "q" else None,
            user=user or None,
            pool=pool or None,
            byte_minutes=state.consumed[key],
        )
        rows.append(encode_view(view))
    return Reply(state.revision, v.UsageAnswer(revision=state.revision, usage=tuple(rows)))
