"""Decide changes of accounts, QOS, licences, reservations and partitions, and whether jobs may use them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from forebay.replica.decide.checks import RejectionError, names_remedy, require
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model import (
    DEFAULT_SCHEDULING_RULES,
    JobOptions,
    JobRequest,
    Reservation,
    check_account,
    check_license,
    check_licenses_and_nice,
    check_partition,
    check_qos,
    check_reservation,
    scheduling_class_of,
    sort_members,
    with_options,
)
from forebay.replica.scheduler import limit_exceeded_alone, submit_limit_exceeded
from forebay.replica.state import Facts
from forebay.replica.values import (
    ABSENT,
    ACCOUNTS_MAX,
    LICENSES_MAX,
    PARTITIONS_MAX,
    QOS_MAX,
    RESERVATIONS_MAX,
    Instant,
    Rejection,
    RejectionCode,
    etag_of,
    format_size,
)

EventsOrRejection = tuple[e.Event, ...] | Rejection


def _unknown_name_rejection(what: str, name: str, known: list[str]) -> Rejection:
    plural = what if what.endswith("s") else f"{what}s"
    remedy = names_remedy(known, f"leave it out: this site has defined no {plural}")
    return Rejection(RejectionCode.INVALID_FIELD, f"{what} {name!r} does not exist", remedy, what)


def record_etag(record: msgspec.Struct | None) -> str:
    """Return the entity tag of an account, QOS, licence, reservation or partition; ABSENT for None.

    A reservation keeps its tag when it becomes active: only time changes that.
    """
    return etag_of(replace(record, active=False) if isinstance(record, Reservation) else record)


def _changed_rejection(what: str, name: str, known: msgspec.Struct | None, if_match: str | None) -> Rejection | None:
    """Return the rejection of a change that was made from another version of the record, or None."""
    if if_match is None or if_match == record_etag(known):
        return None
    happened = "was deleted" if known is None else "was created" if if_match == ABSENT else "was changed"
    sentence = f"{what} {name} {happened} since this change was prepared"
    return Rejection(RejectionCode.WRONG_STATE, sentence, "read the record again, and repeat the change", "if_match")


def _limit_rejection(what: str, most: int) -> Rejection:
    return Rejection(
        RejectionCode.LIMIT_EXCEEDED, f"the limit of {most} {what} records is reached", "delete an unused one", what
    )


def _set_account(state: Facts, command: c.SetAccount, at: Instant) -> EventsOrRejection:
    account, known = command.account, state.accounts.get(command.account.name)
    rejection = _changed_rejection("account", account.name, known, command.if_match) or check_account(
        state.accounts, account
    )
    if rejection is not None:
        return rejection
    if known is None and len(state.accounts) >= ACCOUNTS_MAX:
        return _limit_rejection("account", ACCOUNTS_MAX)
    return () if known == sort_members(account) else (e.AccountSet(account),)


def _delete_account(state: Facts, command: c.DeleteAccount, at: Instant) -> EventsOrRejection:
    if command.account not in state.accounts:
        return _unknown_name_rejection("account", command.account, sorted(state.accounts))
    below = sorted(name for name, account in state.accounts.items() if account.parent == command.account)
    if below:
        return Rejection(
            RejectionCode.WRONG_STATE,
            f"account {command.account} has subaccounts: {', '.join(below[:20])}",
            "delete them first, or change their parent",
            "account",
        )
    return (e.AccountDeleted(command.account),)


def _set_qos(state: Facts, command: c.SetQos, at: Instant) -> EventsOrRejection:
    qos, known = command.qos, state.qos.get(command.qos.name)
    rejection = _changed_rejection("QOS", qos.name, known, command.if_match) or check_qos(qos)
    if rejection is not None:
        return rejection
    if known is None and len(state.qos) >= QOS_MAX:
        return _limit_rejection("qos", QOS_MAX)
    return () if known == qos else (e.QosSet(qos),)


def _delete_qos(state: Facts, command: c.DeleteQos, at: Instant) -> EventsOrRejection:
    if command.qos not in state.qos:
        return _unknown_name_rejection("qos", command.qos, sorted(state.qos))
    return (e.QosDeleted(command.qos),)


def _set_license(state: Facts, command: c.SetLicense, at: Instant) -> EventsOrRejection:
    license, known = command.license, state.licenses.get(command.license.name)
    rejection = _changed_rejection("licence", license.name, known, command.if_match) or check_license(license)
    if rejection is not None:
        return rejection
    if known is None and len(state.licenses) >= LICENSES_MAX:
        return _limit_rejection("license", LICENSES_MAX)
    return () if known == license else (e.LicenseSet(license),)


def _delete_license(state: Facts, command: c.DeleteLicense, at: Instant) -> EventsOrRejection:
    if command.license not in state.licenses:
        return _unknown_name_rejection("license", command.license, sorted(state.licenses))
    return (e.LicenseDeleted(command.license),)


def _set_reservation(state: Facts, command: c.SetReservation, at: Instant) -> EventsOrRejection:
    known = state.reservations.get(command.reservation.name)
    # A reservation becomes active by an event only; a postponed one is no longer active.
    active = known is not None and known.active and command.reservation.start_at <= at
    reservation = replace(command.reservation, active=active)
    rejection = (
        _changed_rejection("reservation", reservation.name, known, command.if_match)
        or check_reservation(reservation, state.pools, at)
        or _overbooking_rejection(state, reservation)
    )
    if rejection is not None:
        return rejection
    if known is None and len(state.reservations) >= RESERVATIONS_MAX:
        return _limit_rejection("reservation", RESERVATIONS_MAX)
    return () if known == reservation else (e.ReservationSet(reservation),)


def _overbooking_rejection(state: Facts, new: Reservation) -> Rejection | None:
    """Return the rejection of a reservation that would overbook a pool, or None."""
    others = [other for other in state.reservations.values() if other.name != new.name]
    for space in new.space:
        starts = [new.start_at, *(other.start_at for other in others if new.start_at <= other.start_at < new.end_at)]
        for start_at in starts:
            taken = sum(other.size_in(space.pool) for other in others if other.start_at <= start_at < other.end_at)
            most = state.pools[space.pool].usable_bytes
            if taken + space.size_bytes > most:
                return Rejection(
                    RejectionCode.CAPACITY_OVER_TOTAL,
                    f"{format_size(taken + space.size_bytes)} of pool {space.pool} would be reserved at once, and it "
                    f"has {format_size(most)}",
                    "reserve less, or for another time",
                    "reservation.burst_buffer",
                )
    return None


def _delete_reservation(state: Facts, command: c.DeleteReservation, at: Instant) -> EventsOrRejection:
    if command.reservation not in state.reservations:
        return _unknown_name_rejection("reservation", command.reservation, sorted(state.reservations))
    return (e.ReservationDeleted(command.reservation),)


ACCOUNTING_BY_KEY: Mapping[type, Callable[[Facts, Any, Instant], EventsOrRejection]] = {
    c.SetAccount: _set_account,
    c.DeleteAccount: _delete_account,
    c.SetQos: _set_qos,
    c.DeleteQos: _delete_qos,
    c.SetLicense: _set_license,
    c.DeleteLicense: _delete_license,
    c.SetReservation: _set_reservation,
    c.DeleteReservation: _delete_reservation,
}
"""Command type -> handler. All of these commands require an operator."""


# Jobs ----------------------------------------------------------------------------------------------------------------


def admit_request(state: Facts, request: JobRequest, jobs: int) -> JobRequest:
    """Return the request with the site's default account and QOS filled in.

    `jobs` is the number of jobs that the request creates.

    Raises:
        RejectionError: The user may not use the account, QOS, licences or reservation, or would exceed a limit of jobs.
    """
    options = request.effective_options
    if not _has_accounting_options(options) and state.scheduling_rules == DEFAULT_SCHEDULING_RULES:
        return request
    require(check_licenses_and_nice(options.licenses, options.nice))
    rules, user = state.scheduling_rules, request.user
    account = "" if options.account else default_account(state, user)
    if account:
        options = replace(options, account=account)
    if not options.qos and rules.default_qos:
        qos = state.qos.get(rules.default_qos)
        if qos is not None and qos.admits(user, options.account):
            options = replace(options, qos=qos.name)
    check_admission(state, user, options, jobs)
    return with_options(request, options)


def drop_undefined_options(state: Facts, request: JobRequest, fields: Collection[str]) -> JobRequest:
    """Return the request without those of `fields` whose values the site has not defined.

    An account is dropped only if the site has no accounts at all. Otherwise the job would go uncharged.
    """
    options = request.effective_options
    known: dict[str, object] = {
        "account": options.account if state.accounts else "",
        "qos": options.qos if options.qos in state.qos else "",
        "licenses": tuple(one for one in options.licenses if one[0] in state.licenses),
        "reservation": options.reservation if options.reservation in state.reservations else "",
    }
    return with_options(request, replace(options, **{field: known[field] for field in fields if field in known}))


def default_account(state: Facts, user: str) -> str:
    """Return the default account of the user's jobs, or an empty string."""
    name = state.scheduling_rules.default_account
    account = state.accounts.get(name) if name else None
    return name if account is not None and account.member(user) is not None else ""


def _has_accounting_options(options: JobOptions) -> bool:
    return bool(options.account or options.qos or options.licenses or options.reservation or options.nice)


def check_admission(state: Facts, user: str, options: JobOptions, jobs: int) -> None:
    """Check that the user's jobs may have these options. `jobs` is the number of jobs added to the QOS.

    Raises:
        RejectionError: They may not.
    """
    require(_admission_rejection(state, user, options, jobs))


def _admission_rejection(state: Facts, user: str, options: JobOptions, jobs: int) -> Rejection | None:
    """Return the rejection of a job with these options, or None."""
    account = state.accounts.get(options.account) if options.account else None
    if options.account and account is None:
        return _unknown_name_rejection("account", options.account, sorted(state.accounts))
    if account is not None and account.member(user) is None:
        return _permission_rejection("account", f"user {user} is not in account {account.name}")
    if account is None and state.scheduling_rules.accounts_required:
        return Rejection(
            RejectionCode.INVALID_FIELD,
            "the job has no account, and this site requires one",
            "add --account=NAME",
            "account",
        )
    qos = state.qos.get(options.qos) if options.qos else None
    if options.qos and qos is None:
        return _unknown_name_rejection("qos", options.qos, sorted(state.qos))
    if qos is not None and not qos.admits(user, options.account):
        return _permission_rejection("qos", f"user {user} may not use QOS {qos.name}")
    over = None if qos is None or not jobs else submit_limit_exceeded(state, qos, user, jobs)
    if over is not None:
        return Rejection(
            RejectionCode.LIMIT_EXCEEDED,
            f"{over.verdict.reason}: user {user} has {over.used} jobs in QOS {options.qos}, which allows "
            f"{over.limit.value}",
            "wait until some have finished, or use another QOS",
            "qos",
        )
    for name, count in options.licenses:
        known = state.licenses.get(name)
        if known is None:
            return _unknown_name_rejection("licenses", name, sorted(state.licenses))
        if count > known.total:
            return Rejection(
                RejectionCode.LIMIT_EXCEEDED,
                f"licence {name}: {count} requested, but only {known.total} exist",
                f"request at most {known.total}",
                "licenses",
            )
    reservation = state.reservations.get(options.reservation) if options.reservation else None
    if options.reservation and reservation is None:
        return _unknown_name_rejection("reservation", options.reservation, sorted(state.reservations))
    if reservation is not None and not reservation.admits(user, options.account):
        return _permission_rejection("reservation", f"user {user} may not use reservation {reservation.name}")
    return None


def _permission_rejection(place: str, sentence: str) -> Rejection:
    return Rejection(RejectionCode.PERMISSION_DENIED, sentence, "omit it, or ask an operator for access", place)


def check_limits(state: Facts, request: JobRequest, pool: str, granted_bytes: int) -> None:
    """Check a job against the limits that it exceeds on its own, if its QOS has deny_on_limit.

    Raises:
        RejectionError: A limit is exceeded.
    """
    qos = state.qos.get(request.effective_options.qos) if request.effective_options.qos else None
    if qos is not None and qos.deny_on_limit:
        check_own_limits(state, request, pool, granted_bytes, "request less, or use another QOS")


def check_own_limits(state: Facts, request: JobRequest, pool: str, granted_bytes: int, remedy: str) -> None:
    """Check a job against all limits that it exceeds on its own, whatever other jobs use: it would wait forever.

    Raises:
        RejectionError: A limit is exceeded.
    """
    scheduling_class = scheduling_class_of(request)
    if scheduling_class is None:
        return
    over = limit_exceeded_alone(state, scheduling_class, pool, granted_bytes, request.time_limit_s, request.cpus)
    if over is None:
        return
    verdict = over.verdict
    figures = ", ".join(f"{name} {value}" for name, value in verdict.figures)
    raise RejectionError(
        RejectionCode.LIMIT_EXCEEDED,
        f"{verdict.reason}: {verdict.sentence} ({figures})",
        remedy,
        "qos",
    )


# ---- partitions and usage


def _set_partition(state: Facts, command: c.SetPartition) -> EventsOrRejection:
    partition, known = command.partition, state.partitions.get(command.partition.name)
    rejection = _changed_rejection("partition", partition.name, known, command.if_match) or check_partition(partition)
    if rejection is not None:
        return rejection
    if known is None and len(state.partitions) >= PARTITIONS_MAX:
        sentence = f"the limit of {PARTITIONS_MAX} partitions is reached"
        return Rejection(RejectionCode.LIMIT_EXCEEDED, sentence, "delete an unused one", "partition")
    if known == partition:
        return ()
    events: list[e.Event] = [e.PartitionSet(partition)]
    if partition.is_default:
        others = (one for name, one in sorted(state.partitions.items()) if one.is_default and name != partition.name)
        events = [*(e.PartitionSet(replace(other, is_default=False)) for other in others), *events]
    return tuple(events)


def _delete_partition(state: Facts, command: c.DeletePartition) -> EventsOrRejection:
    if command.partition not in state.partitions:
        return _unknown_name_rejection("partition", command.partition, sorted(state.partitions))
    return (e.PartitionDeleted(command.partition),)


def _reset_usage(state: Facts, command: c.ResetUsage) -> EventsOrRejection:
    if command.whose not in ("a", "q"):
        sentence = f"{command.whose[:16]!r} is neither an account (a) nor a QOS (q)"
        return Rejection(RejectionCode.INVALID_FIELD, sentence, "use a or q", "whose")
    what, known = ("account", state.accounts) if command.whose == "a" else ("qos", state.qos)
    if command.name not in known:
        return _unknown_name_rejection(what, command.name, sorted(known))
    prefix = f"{command.whose}/{command.name}/"
    return (e.UsageReset(command.whose, command.name),) if any(key.startswith(prefix) for key in state.consumed) else ()


PARTITIONS_BY_KEY: Mapping[type, Callable[[Facts, Any], EventsOrRejection]] = {
    c.SetPartition: _set_partition,
    c.DeletePartition: _delete_partition,
    c.ResetUsage: _reset_usage,
}
"""Command type -> handler. All of these commands require an operator."""
