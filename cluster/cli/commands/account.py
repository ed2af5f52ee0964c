"""`forebay account|qos|license|reservation|scheduling|usage …`: who may have how much, and when."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from cluster.cli.commands.options import JSON_OPTION, NAME, Kind, add_show_and_delete, names, print_records
from cluster.cli.exits import bad_input
from cluster.cli.session import session
from cluster.cli.text import show, show_json, size, table
from cluster.client import Client
from cluster.schemas import accounts as v
from cluster.schemas import operations as ops
from replica.values import plain

_T = TypeVar("_T")

_LIMIT = click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="LIMIT=VALUE",
    help="Such as MaxJobsPerUser=4 or GrpBB:bb/fast=10TiB; bb/NAME is a pool, or bb/native for all. Repeat for more.",
)


def _users(words: str = "Users, separated by commas.") -> Callable[[Any], Any]:
    return click.option("--users", callback=names, metavar="NAME,…", help=words)


def _accounts_option(words: str) -> Callable[[Any], Any]:
    return click.option("--accounts", callback=names, metavar="NAME,…", help=words)


def _pairs(texts: Iterable[str], option: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key or not value:
            raise bad_input(f"{text!r} is no limit", "write it as LIMIT=VALUE", place=option)
        if key in found:
            raise bad_input(f"{key} is set twice", "set each once", place=option)
        found[key] = value
    return found


def _limits_text(limits: dict[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in limits.items()) or "-"


# Accounts ------------------------------------------------------------------------------------------------------------


@click.group("account")
def account_group() -> None:
    """Show and change accounts, their users, and limits."""


@account_group.command("set")
@NAME
@click.option("--parent", default="", metavar="ACCOUNT", help="The account above it.  [default: none]")
@_users()
@_LIMIT
@click.option(
    "--user-limit",
    "user_limits",
    multiple=True,
    metavar="USER:LIMIT=VALUE",
    help="A limit of one user in this account; repeat for more.",
)
@JSON_OPTION
def set_account(
    name: str, parent: str, users: tuple[str, ...], limits: tuple[str, ...], user_limits: tuple[str, ...], as_json: bool
) -> None:
    """Make an account, or change all of it: what is not named is empty afterwards (operators)."""
    of_users: dict[str, dict[str, str]] = {}
    for text in user_limits:
        user, colon, rest = text.partition(":")
        if not colon:
            raise bad_input(f"{text!r} names no user", "write it as USER:LIMIT=VALUE", place="--user-limit")
        of_users.setdefault(user, {}).update(_pairs([rest], "--user-limit"))

    async def change(client: Client) -> v.AccountsAnswer:
        request = v.AccountRequest(
            command_id=client.new_command_id(),
            parent=parent,
            users=users,
            limits=_pairs(limits, "--limit"),
            user_limits=of_users,
        )
        return await client.call(ops.SET_ACCOUNT, request, name=name)

    print_records(ACCOUNTS, session().ask(change), as_json, name)


def _write_accounts(accounts: tuple[v.AccountView, ...]) -> None:
    rows = [
        (
            plain(row.name),
            plain(row.parent or "-"),
            plain(",".join(row.users) or "-"),
            plain(_limits_text(row.limits)),
            plain(" ".join(f"{user}:{_limits_text(limits)}" for user, limits in row.user_limits.items()) or "-"),
        )
        for row in accounts
    ]
    show(table(("ACCOUNT", "PARENT", "USERS", "LIMITS", "USER LIMITS"), rows, flexible=frozenset({"USERS", "LIMITS"})))


ACCOUNTS = Kind("account", "accounts", ops.LIST_ACCOUNTS, ops.DELETE_ACCOUNT, _write_accounts)
add_show_and_delete(
    account_group,
    ACCOUNTS,
    "List the accounts, or show one.",
    "Take an account away; its pending jobs wait with InvalidAccount (operators).",
)


# QOS -----------------------------------------------------------------------------------------------------------------


@click.group("qos")
def qos_group() -> None:
    """Show and change qualities of service: priority and limits."""


@qos_group.command("set")
@NAME
@click.option("--priority", type=click.IntRange(0), default=0, show_default=True, help="Added to that of its jobs.")
@_LIMIT
@_users("Users who may use it, separated by commas.  [default: everybody]")
@_accounts_option("Accounts whose jobs may use it, separated by commas.")
@click.option("--deny-on-limit", is_flag=True, help="Refuse at submit what one of its limits forbids by itself.")
@JSON_OPTION
def set_qos(
    name: str, priority: int, limits: tuple[str, ...], users: tuple[str, ...], accounts: tuple[str, ...],
    deny_on_limit: bool, as_json: bool,
) -> None:  # fmt: skip
    """Make a QOS, or change all of it: what is not named is empty afterwards (operators)."""

    async def change(client: Client) -> v.QosAnswer:
        request = v.QosRequest(
            command_id=client.new_command_id(),
            priority=priority,
            limits=_pairs(limits, "--limit"),
            users=users,
            accounts=accounts,
            deny_on_limit=deny_on_limit,
        )
        return await client.call(ops.SET_QOS, request, name=name)

    print_records(QOS, session().ask(change), as_json, name)


def _write_qos(qos: tuple[v.QosView, ...]) -> None:
    rows = [
        (
            plain(row.name),
            row.priority,
            plain(_limits_text(row.limits)),
            plain(",".join(row.users) or "-"),
            plain(",".join(row.accounts) or "-"),
            "yes" if row.deny_on_limit else "no",
        )
        for row in qos
    ]
    heads = ("QOS", "PRIORITY", "LIMITS", "USERS", "ACCOUNTS", "DENIES")
    show(table(heads, rows, right=frozenset({"PRIORITY"}), flexible=frozenset({"LIMITS"})))


QOS = Kind("QOS", "qos", ops.LIST_QOS, ops.DELETE_QOS, _write_qos)
add_show_and_delete(
    qos_group,
    QOS,
    "List the QOS, or show one.",
    "Take a QOS away; its pending jobs wait with InvalidQOS (operators).",
)


# Licences ------------------------------------------------------------------------------------------------------------


@click.group("license")
def license_group() -> None:
    """Show and change licences, which jobs have while they run."""


@license_group.command("set")
@NAME
@click.option("--total", type=click.IntRange(0), required=True, help="How many there are.")
@JSON_OPTION
def set_license(name: str, total: int, as_json: bool) -> None:
    """Say how many of a licence there are (operators); nothing is taken from jobs that run."""

    async def change(client: Client) -> v.LicensesAnswer:
        request = v.LicenseRequest(command_id=client.new_command_id(), total=total)
        return await client.call(ops.SET_LICENSE, request, name=name)

    print_records(LICENSES, session().ask(change), as_json, name)


def _write_licenses(licenses: tuple[v.LicenseView, ...]) -> None:
    rows = [(plain(row.name), row.total, row.in_use, max(0, row.total - row.in_use)) for row in licenses]
    show(table(("LICENSE", "TOTAL", "USED", "FREE"), rows, right=frozenset({"TOTAL", "USED", "FREE"})))


LICENSES = Kind("licence", "licenses", ops.LIST_LICENSES, ops.DELETE_LICENSE, _write_licenses)
add_show_and_delete(
    license_group,
    LICENSES,
    "List the licences and how many of each are in use, or show one.",
    "Take a licence away; its pending jobs wait with Licenses (operators).",
)


# Reservations --------------------------------------------------------------------------------------------------------


@click.group("reservation")
def reservation_group() -> None:
    """Show and change reservations of burst-buffer space."""


@reservation_group.command("set")
@NAME
@click.option("--start", metavar="TIME", help="ISO 8601 with a zone, e.g. 2026-01-31T12:00:00Z.  [default: now]")
@click.option("--end", metavar="TIME", required=True, help="ISO 8601 with a zone.")
@_users("Users who may use it, separated by commas.")
@_accounts_option("Accounts whose jobs may use it, separated by commas.")
@click.option(
    "--burst-buffer",
    "burst_buffer",
    required=True,
    metavar="[plugin:][pool:]#[units]",
    help="What it sets aside, e.g. fast:10TiB; more after commas.",
)
@JSON_OPTION
def set_reservation(
    name: str, start: str | None, end: str, users: tuple[str, ...], accounts: tuple[str, ...], burst_buffer: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Set space aside for a time, or change all of a reservation (operators).

    Its jobs may use its space and what is free for all; nobody else gets space that he would not give back in time.
    """

    async def change(client: Client) -> v.ReservationsAnswer:
        request = v.ReservationRequest(
            command_id=client.new_command_id(),
            start=start,
            end=end,
            users=users,
            accounts=accounts,
            burst_buffer=burst_buffer,
        )
        return await client.call(ops.SET_RESERVATION, request, name=name)

    print_records(RESERVATIONS, session().ask(change), as_json, name)


def _write_reservations(reservations: tuple[v.ReservationView, ...]) -> None:
    for row in reservations:
        users, accounts = ",".join(row.users) or "(null)", ",".join(row.accounts) or "(null)"
        click.echo(plain(f"ReservationName={row.name} StartTime={row.start} EndTime={row.end} State={row.state}"))
        click.echo(plain(f"   Users={users} Accounts={accounts} BurstBuffer={row.burst_buffer} Held={row.held_bytes}"))


RESERVATIONS = Kind("reservation", "reservations", ops.LIST_RESERVATIONS, ops.DELETE_RESERVATION, _write_reservations)
add_show_and_delete(
    reservation_group,
    RESERVATIONS,
    "List the reservations that have not ended, or show one.",
    "Take a reservation away; its pending jobs wait with ReservationDeleted (operators).",
)


# The rules, and estimates --------------------------------------------------------------------------------------------


@click.group("scheduling")
def scheduling_group() -> None:
    """Show and change the site's rules of scheduling."""


@scheduling_group.command("show")
@JSON_OPTION
def show_scheduling(as_json: bool) -> None:
    """Show the rules, and what was measured of each pool's transfers."""
    stale = session().stale
    _print_scheduling(session().ask(lambda client: client.call(ops.SHOW_SCHEDULING_RULES, stale=stale)), as_json)


@scheduling_group.command("set")
@click.option("--size-points", type=int, metavar="N", help="Priority points for each GiB of a request.")
@click.option("--default-account", metavar="NAME", help="Account of jobs that name none; an empty one for none.")
@click.option("--default-qos", metavar="NAME", help="QOS of jobs that name none; an empty one for none.")
@click.option("--accounts-required/--no-accounts-required", "required", default=None, help="Whether a job needs one.")
@click.option("--revocations", type=click.IntRange(0), help="How often one job's staged buffer may be taken back.")
@click.option("--revoke-after", type=click.IntRange(0), metavar="SECONDS", help="How long it must have waited before.")
@JSON_OPTION
def set_scheduling(
    size_points: int | None, default_account: str | None, default_qos: str | None, required: bool | None,
    revocations: int | None, revoke_after: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Change what is named of the rules (operators)."""

    def chosen(given: _T | None, present: _T) -> _T:
        return present if given is None else given

    async def change(client: Client) -> v.SchedulingAnswer:
        known = await client.call(ops.SHOW_SCHEDULING_RULES)
        request = v.SchedulingRequest(
            command_id=client.new_command_id(),
            size_points_per_gib=chosen(size_points, known.size_points_per_gib),
            default_account=chosen(default_account, known.default_account or ""),
            default_qos=chosen(default_qos, known.default_qos or ""),
            accounts_required=chosen(required, known.accounts_required),
            revocations_max=chosen(revocations, known.revocations_max),
            revoke_after_s=chosen(revoke_after, known.revoke_after_s),
        )
        return await client.call(ops.SET_SCHEDULING_RULES, request)

    _print_scheduling(session().ask(change), as_json)


def _print_scheduling(answer: v.SchedulingAnswer, as_json: bool) -> None:
    if as_json:
        show_json(answer)
        return
    click.echo(
        f"SizePointsPerGiB={answer.size_points_per_gib} AccountsRequired={'YES' if answer.accounts_required else 'NO'} "
        f"DefaultAccount={plain(answer.default_account or '(null)')} "
        f"DefaultQOS={plain(answer.default_qos or '(null)')} "
        f"RevocationsMax={answer.revocations_max} RevokeAfter={answer.revoke_after_s}"
    )
    for rate in answer.rates:
        click.echo(
            f"Pool={plain(rate.pool or '(null)')} StageIns={rate.stage_ins} StageInRate={rate.stage_in_bytes_per_s}B/s "
            f"StageOuts={rate.stage_outs} StageOutRate={rate.stage_out_bytes_per_s}B/s Drain={rate.drain_s:.0f}s"
        )


@click.group("usage")
def usage_group() -> None:
    """Show and reset what accounts and QOS have used of burst buffers, which GrpBBMinutes limits."""


@usage_group.command("show")
@click.option("--account", metavar="NAME", help="Only of this account.")
@click.option("--qos", metavar="NAME", help="Only of this QOS.")
@JSON_OPTION
def show_usage(account: str | None, qos: str | None, as_json: bool) -> None:
    """List the space that was held, times the minutes that it was."""
    stale = session().stale
    answer = session().ask(lambda client: client.call(ops.LIST_USAGE, stale=stale))
    rows = tuple(row for row in answer.usage if account in (None, row.account) and qos in (None, row.qos))
    _print_usage(v.UsageAnswer(revision=answer.revision, usage=rows), as_json)


@usage_group.command("reset")
@click.option("--account", metavar="NAME", help="Of this account, with all its users.")
@click.option("--qos", metavar="NAME", help="Of this QOS.")
@JSON_OPTION
def reset_usage(account: str | None, qos: str | None, as_json: bool) -> None:
    """Have what an account, or a QOS, has used count as nothing from here on (operators)."""
    if (account is None) == (qos is None):
        raise bad_input("it is not said whose usage", "name an account, or a QOS", place="--account")

    async def reset(client: Client) -> v.UsageAnswer:
        request = v.UsageResetRequest(command_id=client.new_command_id(), account=account, qos=qos)
        return await client.call(ops.RESET_USAGE, request)

    _print_usage(session().ask(reset), as_json)


def _print_usage(answer: v.UsageAnswer, as_json: bool) -> None:
    if as_json:
        show_json(answer)
        return
    rows = [
        (
            plain(row.account or "-"),
            plain(row.qos or "-"),
            plain(row.user or "-"),
            plain(row.pool or "all"),
            f"{size(row.byte_minutes)}-minutes",
        )
        for row in answer.usage
    ]
    show(table(("ACCOUNT", "QOS", "USER", "POOL", "USED"), rows, right=frozenset({"USED"})))
