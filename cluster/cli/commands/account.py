"""Commands `forebay policy account`, `qos`, `license`, `reservation`, `scheduling` and `usage`."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from forebay.cluster.cli.commands.options import NAME, Kind, parse_names, record_group, set_record
from forebay.cluster.cli.confirmation import YES_OPTION, confirm
from forebay.cluster.cli.exits import bad_input
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.session import session
from forebay.cluster.cli.text import Listing, present, size, table
from forebay.cluster.schemas import accounts as v
from forebay.cluster.schemas import operations as ops
from forebay.replica.values import plain

_T = TypeVar("_T")


def _limits(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    """Return limits by name, parsed from LIMIT=VALUE texts.

    Raises:
        Failure: bad input, if a text has another form or a limit is given twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key or not value:
            raise bad_input(f"{text!r} is not a limit", "write LIMIT=VALUE", place=parameter.opts[0])
        if key in found:
            raise bad_input(f"{key} is given twice", "give each limit once", place=parameter.opts[0])
        found[key] = value
    return found


def _user_limits(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        user, colon, rest = text.partition(":")
        if not colon:
            raise bad_input(f"{text!r} has no user", "write USER:LIMIT=VALUE", place=parameter.opts[0])
        found.setdefault(user, {}).update(_limits(context, parameter, (rest,)))
    return found


def _existing_fields(*fields: str) -> Callable[[Any], dict[str, Any]]:
    """Return a function that copies these fields of a record into a request."""
    return lambda present: {field: getattr(present, field) for field in fields}


def _limits_text(limits: dict[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in limits.items())


_LIMIT = click.option(
    "--limit",
    "limits",
    multiple=True,
    callback=_limits,
    metavar="LIMIT=VALUE",
    help="Set a limit, such as MaxJobsPerUser=4 or GrpBB:bb/fast=10TiB (bb/native: all pools); -1 removes it; "
    "repeatable.",
)
_ACCOUNTS = click.option(
    "--accounts",
    callback=parse_names,
    metavar="NAME,…",
    help="Set the accounts whose jobs are allowed.",
)


# Accounts ------------------------------------------------------------------------------------------------------------


def _accounts_listing(accounts: tuple[v.AccountView, ...]) -> Listing:
    rows = [
        (
            row.name,
            row.parent,
            ",".join(row.users),
            _limits_text(row.limits),
            " ".join(f"{user}:{_limits_text(limits) or '-'}" for user, limits in row.user_limits.items()),
        )
        for row in accounts
    ]
    flexible = frozenset({"USERS", "LIMITS", "USER LIMITS"})
    return table(("ACCOUNT", "PARENT", "USERS", "LIMITS", "USER LIMITS"), rows, flexible=flexible)


ACCOUNTS = Kind("account", "accounts", ops.LIST_ACCOUNTS, ops.SET_ACCOUNT, ops.DELETE_ACCOUNT, _accounts_listing)
account_group = record_group(
    ACCOUNTS,
    "Show and change accounts, their users and limits.",
    "List the accounts.",
    "Delete an account (operators).\n\nIts pending jobs wait with InvalidAccount.",
)


@account_group.command("set")
@NAME
@click.option("--parent", metavar="ACCOUNT", help="Set the parent account; empty for none.")
@click.option("--users", callback=parse_names, metavar="NAME,…", help="Set the users of the account.")
@_LIMIT
@click.option(
    "--user-limit",
    "user_limits",
    multiple=True,
    callback=_user_limits,
    metavar="USER:LIMIT=VALUE",
    help="Set a limit of one user in this account; repeatable.",
)
@JSON_OPTION
def set_account(name: str, as_json: bool, **fields: Any) -> None:
    """Create or change an account (operators)."""

    def kept(present: v.AccountView) -> dict[str, Any]:
        users = present.users if fields["users"] is None else fields["users"]
        limits = {user: limits for user, limits in present.user_limits.items() if user in users}
        return {**_existing_fields("users", "limits")(present), "parent": present.parent or "", "user_limits": limits}

    set_record(ACCOUNTS, name, as_json, fields, kept)


# QOS -----------------------------------------------------------------------------------------------------------------


def _qos_listing(qos: tuple[v.QosView, ...]) -> Listing:
    rows = [
        (
            row.name,
            row.priority,
            _limits_text(row.limits),
            ",".join(row.users),
            ",".join(row.accounts),
            "yes" if row.deny_on_limit else "no",
        )
        for row in qos
    ]
    heads = ("QOS", "PRIORITY", "LIMITS", "USERS", "ACCOUNTS", "DENY-ON-LIMIT")
    flexible = frozenset({"LIMITS", "USERS", "ACCOUNTS"})
    return table(heads, rows, right=frozenset({"PRIORITY"}), flexible=flexible)


QOS = Kind("QOS", "qos", ops.LIST_QOS, ops.SET_QOS, ops.DELETE_QOS, _qos_listing)
qos_group = record_group(
    QOS,
    "Show and change QOS: priority and limits.",
    "List the QOS.",
    "Delete a QOS (operators).\n\nIts pending jobs wait with InvalidQOS.",
)


@qos_group.command("set")
@NAME
@click.option("--priority", type=click.IntRange(0), help="Add this to the priority of the QOS's jobs.")
@_LIMIT
@click.option(
    "--users",
    callback=parse_names,
    metavar="NAME,…",
    help="Set the allowed users; empty for all.",
)
@_ACCOUNTS
@click.option(
    "--deny-on-limit/--no-deny-on-limit",
    default=None,
    help="Reject a job at submit if it alone exceeds a limit.",
)
@JSON_OPTION
def set_qos(name: str, as_json: bool, **fields: Any) -> None:
    """Create or change a QOS (operators)."""
    set_record(QOS, name, as_json, fields, _existing_fields("priority", "limits", "users", "accounts", "deny_on_limit"))


# Licences ------------------------------------------------------------------------------------------------------------


def _licenses_listing(licenses: tuple[v.LicenseView, ...]) -> Listing:
    rows = [(row.name, row.total, row.in_use, max(0, row.total - row.in_use)) for row in licenses]
    return table(("LICENSE", "TOTAL", "USED", "FREE"), rows, right=frozenset({"TOTAL", "USED", "FREE"}))


LICENSES = Kind("licence", "licenses", ops.LIST_LICENSES, ops.SET_LICENSE, ops.DELETE_LICENSE, _licenses_listing)
license_group = record_group(
    LICENSES,
    "Show and change licences.",
    "List the licences and how many of each are in use.",
    "Delete a licence (operators).\n\nIts pending jobs wait with Licenses.",
)


@license_group.command("set")
@NAME
@click.option("--total", type=click.IntRange(0), required=True, help="Set the number of licences.")
@JSON_OPTION
def set_license(name: str, as_json: bool, total: int) -> None:
    """Create or change a licence (operators).

    Running jobs keep their licences.
    """
    set_record(LICENSES, name, as_json, {"total": total}, _existing_fields("total"))


# Reservations --------------------------------------------------------------------------------------------------------


def _reservations_listing(reservations: tuple[v.ReservationView, ...]) -> str:
    lines = []
    for row in reservations:
        users, accounts = ",".join(row.users) or "(null)", ",".join(row.accounts) or "(null)"
        lines += [
            plain(f"ReservationName={row.name} StartTime={row.start} EndTime={row.end} State={row.state}"),
            plain(f"   Users={users} Accounts={accounts} BurstBuffer={row.burst_buffer} Held={row.held_bytes}"),
        ]
    return "\n".join(lines)


RESERVATIONS = Kind(
    "reservation",
    "reservations",
    ops.LIST_RESERVATIONS,
    ops.SET_RESERVATION,
    ops.DELETE_RESERVATION,
    _reservations_listing,
    needed=("end", "burst_buffer"),
)
reservation_group = record_group(
    RESERVATIONS,
    "Show and change reservations of burst-buffer space.",
    "List the reservations that have not ended.",
    "Delete a reservation (operators).\n\nIts pending jobs wait with ReservationDeleted.",
)


@reservation_group.command("set")
@NAME
@click.option("--start", metavar="TIME", help="Set the start, for example 2026-01-31T12:00:00Z.  [default: now]")
@click.option("--end", metavar="TIME", help="Set the end, in the same form.")
@click.option("--users", callback=parse_names, metavar="NAME,…", help="Set the allowed users.")
@_ACCOUNTS
@click.option(
    "--burst-buffer",
    "burst_buffer",
    metavar="[plugin:][pool:]#[units]",
    help="Reserve this space, for example fast:10TiB; separate several with commas.",
)
@JSON_OPTION
def set_reservation(name: str, as_json: bool, **fields: Any) -> None:
    """Create or change a reservation (operators).

    Jobs in the reservation may use its space and other free space. Other jobs get that space only if they will free it
    before the start.
    """
    set_record(
        RESERVATIONS, name, as_json, fields, _existing_fields("start", "end", "users", "accounts", "burst_buffer")
    )


# Scheduling and usage ------------------------------------------------------------------------------------------------


@click.command("scheduling")
@JSON_OPTION
def show_scheduling(as_json: bool) -> None:
    """Show scheduling settings and measured transfer rates.

    Change the settings with `forebay config set`.
    """
    _print_scheduling(session().read(ops.SHOW_SCHEDULING_RULES), as_json)


def _print_scheduling(answer: v.SchedulingAnswer, as_json: bool) -> None:
    lines = [
        f"SizePointsPerGiB={answer.size_points_per_gib} AccountsRequired={'YES' if answer.accounts_required else 'NO'} "
        f"DefaultAccount={plain(answer.default_account or '(null)')} "
        f"DefaultQOS={plain(answer.default_qos or '(null)')} "
        f"RevocationsMax={answer.revocations_max} RevokeAfter={answer.revoke_after_s}",
        *(
            f"Pool={plain(rate.pool or '(null)')} StageIns={rate.stage_ins} StageInRate={rate.stage_in_bytes_per_s}B/s "
            f"StageOuts={rate.stage_outs} StageOutRate={rate.stage_out_bytes_per_s}B/s Drain={rate.drain_s:.0f}s"
            for rate in answer.rates
        ),
    ]
    present(answer, as_json, lambda: "\n".join(lines))


@click.command("list")
@click.option("--account", metavar="NAME", help="Only usage of this account.")
@click.option("--qos", metavar="NAME", help="Only usage with this QOS.")
@JSON_OPTION
def list_usage(account: str | None, qos: str | None, as_json: bool) -> None:
    """List the used space-time of accounts and QOS."""
    answer = session().read(ops.LIST_USAGE)
    rows = tuple(row for row in answer.usage if account in (None, row.account) and qos in (None, row.qos))
    _print_usage(v.UsageAnswer(revision=answer.revision, usage=rows), as_json)


@click.command("reset")
@click.option("--account", metavar="NAME", help="Reset this account, with all its users.")
@click.option("--qos", metavar="NAME", help="Reset the usage of this QOS.")
@YES_OPTION
@JSON_OPTION
def reset_usage(account: str | None, qos: str | None, yes: bool, as_json: bool) -> None:
    """Reset the usage of an account or a QOS (operators)."""
    if (account is None) == (qos is None):
        raise bad_input("no account or QOS is given", "use either --account or --qos", place="--account")
    confirm(f"Reset the usage of {account or qos} to zero?", yes=yes)
    _print_usage(session().write(ops.RESET_USAGE, account=account, qos=qos), as_json)


def _print_usage(answer: v.UsageAnswer, as_json: bool) -> None:
    heads = ("ACCOUNT", "QOS", "USER", "POOL", "USED")
    rows = [
        (row.account, row.qos, row.user, row.pool or "all", f"{size(row.byte_minutes)}-minutes") for row in answer.usage
    ]
    present(answer, as_json, lambda: table(heads, rows, right=frozenset({"USED"})))
