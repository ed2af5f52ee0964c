"""Commands for the cluster's status, feature level and time, for sessions of client programs, and for event sinks."""

from collections.abc import Awaitable, Callable

import click

from forebay.cluster.cli.confirmation import confirm_first
from forebay.cluster.cli.exits import ExitCode, Failure
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.group import exit_with
from forebay.cluster.cli.session import UNKNOWN_ROUTE, Session, session
from forebay.cluster.cli.text import (
    fields_table,
    format_age,
    format_time,
    note,
    present,
    show,
    show_json,
    status_lines,
    table,
)
from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import (
    FEATURE_LEVEL_MAX,
    ClockAnswer,
    FeatureLevelAnswer,
    FeatureLevelRequest,
    OverviewAnswer,
    PoolsAnswer,
    SetClockRequest,
)
from forebay.cluster.schemas import operations as ops
from forebay.replica.values import plain


@click.command("status")
@JSON_OPTION
def status(as_json: bool) -> None:
    """Show whether the cluster needs attention.

    The exit code is 0 if nothing needs attention, and 1 otherwise. The status page, /page at each replica, shows more.
    """
    current = session()

    async def ask(client: Client) -> tuple[OverviewAnswer, PoolsAnswer]:
        overview = await client.call(ops.SHOW_OVERVIEW, stale=current.stale)
        return overview, await client.call(ops.LIST_POOLS, stale=current.stale)

    overview, pools = current.ask(ask)
    present(overview, as_json, lambda: "\n".join(status_lines(overview, pools.pools)))
    if overview.needs_count:
        exit_with(ExitCode.REFUSED)


@click.command("feature-level")
@JSON_OPTION
def show_feature_level(as_json: bool) -> None:
    """Show the feature level of each replica (operators).

    The cluster uses new features only after their level was raised, so replicas of two releases can run together.
    """
    current = session()
    _show(_ask_feature_level(current, lambda client: client.call(ops.SHOW_FEATURE_LEVEL, stale=current.stale)), as_json)


@click.command("raise-feature-level")
@click.argument("level", type=click.IntRange(2, FEATURE_LEVEL_MAX), required=False)
@JSON_OPTION
def raise_feature_level(level: int | None, as_json: bool) -> None:
    """Raise the feature level by one (operators).

    Rejected unless every replica's release knows the level. The level cannot be lowered: a replica of an earlier
    release stops and names the release that it needs.
    """

    async def change(client: Client) -> FeatureLevelAnswer:
        wanted = level
        if wanted is None:
            known = await client.call(ops.SHOW_FEATURE_LEVEL)
            wanted = known.next_level
            if wanted is None:
                raise Failure(
                    ExitCode.REFUSED,
                    f"feature level {known.feature_level} is the highest that the leader's release knows",
                    "upgrade the replicas first if there is a later release",
                )
        request = FeatureLevelRequest(command_id=client.new_command_id(), level=wanted)
        return await client.call(ops.RAISE_FEATURE_LEVEL, request)

    _show(_ask_feature_level(session(), change), as_json)


@click.command("clock")
@JSON_OPTION
def show_clock(as_json: bool) -> None:
    """Show the cluster's time and wrong clocks of replicas."""
    _show_clock(session().read(ops.SHOW_CLOCK), as_json)


@click.command("set-clock")
@click.argument("time", required=False)
@JSON_OPTION
def set_clock(time: str | None, as_json: bool) -> None:
    """Set the cluster's time back (operators).

    TIME defaults to the latest wall clock of a majority. Use it only if the cluster's time is ahead; a time that is
    behind catches up by itself. Timestamps of unfinished jobs that are later than the new time become the new time;
    begin times and reservations do not change.
    """

    async def change(client: Client) -> ClockAnswer:
        wanted = time
        if wanted is None:
            wanted = (await client.call(ops.SHOW_CLOCK)).latest
            if wanted is None:
                raise Failure(
                    ExitCode.REFUSED,
                    "no majority of the replicas reports a wall clock",
                    "start more replicas (see `forebay cluster members`), or give TIME",
                )
        return await client.call(ops.SET_CLOCK, SetClockRequest(command_id=client.new_command_id(), at=wanted))

    _show_clock(session().ask(change), as_json)


def _show_clock(answer: ClockAnswer, as_json: bool) -> None:
    if as_json:
        show_json(answer)
        return
    ahead = f"{answer.ahead_s:.3f} s" if answer.ahead_s else None
    show(
        fields_table([("Time", answer.at), ("Earliest", answer.earliest), ("Latest", answer.latest), ("Ahead", ahead)])
    )
    for name in answer.off:
        note(f"the wall clock of {plain(name)} differs from a majority's: set it, and check its time service")


def _ask_feature_level(current: Session, ask: Callable[[Client], Awaitable[FeatureLevelAnswer]]) -> FeatureLevelAnswer:
    """Send a feature-level request.

    Raises:
        Failure: if the replica is of an earlier release, which has no feature levels.
    """

    async def perform(client: Client) -> FeatureLevelAnswer:
        try:
            return await ask(client)
        except ApiError as error:
            if error.code != UNKNOWN_ROUTE:
                raise
            raise Failure(
                ExitCode.REFUSED,
                "the replica that answered has a release without feature levels, so the cluster is at level 1",
                "upgrade every replica first (`forebay cluster probe --json` shows their versions)",
            ) from error

    return current.ask(perform)


def _show(answer: FeatureLevelAnswer, as_json: bool) -> None:
    if as_json:
        show_json(answer)
        return
    show(fields_table([("FeatureLevel", answer.feature_level), ("NeedsRelease", answer.release or None)]))
    rows = ((one.name, "yes" if one.votes else "no", one.known, one.version or None) for one in answer.members)
    show(table(("REPLICA", "VOTES", "KNOWN-LEVEL", "VERSION"), rows, right=frozenset({"KNOWN-LEVEL"})))
    if answer.next_level is None:
        return
    what = f"feature level {answer.next_level} (release {answer.next_release}: {answer.next_brings})"
    if answer.may_be_raised:
        note(f"{what} is available: forebay cluster raise-feature-level")
    else:
        note(f"{what} is not available yet: upgrade every replica first")


@click.command("list")
@JSON_OPTION
def list_sessions(as_json: bool) -> None:
    """List client sessions; operators see all.

    ANSWERS is the number of replies that are kept for retries.
    """
    answer = session().read(ops.LIST_SESSIONS)
    if as_json:
        show_json(answer)
        return
    rows = [
        (row.session, row.actor, format_time(row.opened_at), format_time(row.used_at), row.acknowledged, row.answers)
        for row in answer.sessions
    ]
    heads = ("SESSION", "CLIENT", "OPENED", "LAST-USED", "ACKNOWLEDGED", "ANSWERS")
    show(table(heads, rows, right=frozenset({"SESSION", "ACKNOWLEDGED", "ANSWERS"})))


@click.command("close")
@click.argument("number", metavar="SESSION", type=click.IntRange(min=1))
@JSON_OPTION
@confirm_first("Close session {number}, and discard its kept answers?")
def close_session(number: int, as_json: bool) -> None:
    """Close a session.

    The session's program can then no longer retrieve outstanding replies.
    """
    answer = session().write(ops.CLOSE_SESSION, session=number)
    present(answer, as_json, lambda: f"Closed session {number}.")


@click.command("list")
@JSON_OPTION
def list_sinks(as_json: bool) -> None:
    """List the event sinks (operators).

    MARK is the revision up to which the receiver has accepted all events. The lag is shown in revisions and as the age
    of the oldest event that it has not accepted.
    """
    answer = session().read(ops.LIST_SINKS)
    if as_json:
        show_json(answer)
        return
    rows = [
        (row.name, row.state, row.mark, row.lag_revisions, format_age(row.lag_s), row.url, row.error or None)
        for row in answer.sinks
    ]
    heads = ("SINK", "STATE", "MARK", "LAG", "LAG-TIME", "URL", "LAST-ERROR")
    show(table(heads, rows, right=frozenset({"MARK", "LAG", "LAG-TIME"})))
