"""Commands for the cluster's status, feature level and time, and for sessions of client programs."""

from collections.abc import Awaitable, Callable

import click

from cluster.cli.confirmation import confirm_first
from cluster.cli.exits import ExitCode, Failure
from cluster.cli.global_options import JSON_OPTION
from cluster.cli.group import exit_with
from cluster.cli.session import UNKNOWN_ROUTE, Session, session
from cluster.cli.text import (
    fields_table,
    format_time,
    note,
    present,
    show,
    show_json,
    status_lines,
    table,
)
from cluster.client import ApiError, Client
from cluster.schemas import (
    FEATURE_LEVEL_MAX,
    ClockAnswer,
    FeatureLevelAnswer,
    FeatureLevelRequest,
    OverviewAnswer,
    PoolsAnswer,
    SetClockRequest,
)
from cluster.schemas import operations as ops
from replica.values import plain


@click.command("status")
@JSON_OPTION
def status(as_json: bool) -> None:
    """Show whether the cluster needs attention.

    The exit code is 0 only if nothing needs attention, and 1 otherwise. A browser shows more at /page of each replica.
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

    What came with a level is not used before the cluster is at it, so replicas of two releases agree meanwhile.
    """
    current = session()
    _show(_ask_feature_level(current, lambda client: client.call(ops.SHOW_FEATURE_LEVEL, stale=current.stale)), as_json)


@click.command("raise-feature-level")
@click.argument("level", type=click.IntRange(2, FEATURE_LEVEL_MAX), required=False)
@JSON_OPTION
def raise_feature_level(level: int | None, as_json: bool) -> None:
    """Raise the feature level by one (operators).

    Refused unless every replica says that it knows the level. It never goes down: an earlier release that meets the
    level stops and names the release that it needs.
    """

    async def change(client: Client) -> FeatureLevelAnswer:
        wanted = level
        if wanted is None:
            known = await client.call(ops.SHOW_FEATURE_LEVEL)
            wanted = known.next_level
            if wanted is None:
                raise Failure(
                    ExitCode.REFUSED,
                    f"the cluster has feature level {known.feature_level}, the highest that its leader knows",
                    "nothing is left to raise; upgrade the replicas first if a later release is there",
                )
        request = FeatureLevelRequest(command_id=client.new_command_id(), level=wanted)
        return await client.call(ops.RAISE_FEATURE_LEVEL, request)

    _show(_ask_feature_level(session(), change), as_json)


@click.command("clock")
@JSON_OPTION
def show_clock(as_json: bool) -> None:
    """Show the cluster's time and each clock that is off."""
    _show_clock(session().read(ops.SHOW_CLOCK), as_json)


@click.command("set-clock")
@click.argument("time", required=False)
@JSON_OPTION
def set_clock(time: str | None, as_json: bool) -> None:
    """Set the cluster's time back (operators).

    To TIME, or to what a majority's wall clocks say.

    Only where it is ahead of them: where it is behind it follows by itself. What it had measured of jobs that are not
    over, and what it was to do later, counts from then on at the latest; begin times and reservations stay as written.
    """

    async def change(client: Client) -> ClockAnswer:
        wanted = time
        if wanted is None:
            wanted = (await client.call(ops.SHOW_CLOCK)).latest
            if wanted is None:
                raise Failure(
                    ExitCode.REFUSED,
                    "the wall clocks of a majority of the replicas cannot be read",
                    "see `forebay cluster members`",
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
        note(f"the wall clock of {plain(name)} is off from those of a majority: set it, and see to its time service")


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
                "the replica that answered is of a release that knows no feature levels, so the cluster is at level 1",
                "`forebay cluster probe --json` shows the version of each; upgrade every replica first",
            ) from error

    return current.ask(perform)


def _show(answer: FeatureLevelAnswer, as_json: bool) -> None:
    if as_json:
        show_json(answer)
        return
    show(fields_table([("FeatureLevel", answer.feature_level), ("NeedsRelease", answer.release or None)]))
    rows = ((one.name, "yes" if one.votes else "no", one.known, one.version or None) for one in answer.members)
    show(table(("REPLICA", "VOTES", "KNOWS", "VERSION"), rows, right=frozenset({"KNOWS"})))
    if answer.next_level is None:
        return
    what = f"feature level {answer.next_level} (release {answer.next_release}: {answer.next_brings})"
    if answer.may_be_raised:
        note(f"{what} may be turned on: forebay cluster raise-feature-level")
    else:
        note(f"{what} may not be turned on yet: upgrade every replica to a release that knows it first")


@click.command("list")
@JSON_OPTION
def list_sessions(as_json: bool) -> None:
    """List sessions, yours or as an operator all.

    With the answers that are kept for them.
    """
    answer = session().read(ops.LIST_SESSIONS)
    if as_json:
        show_json(answer)
        return
    rows = [
        (row.session, row.actor, format_time(row.opened_at), format_time(row.used_at), row.acknowledged, row.answers)
        for row in answer.sessions
    ]
    heads = ("SESSION", "OF", "OPENED", "USED", "ACKNOWLEDGED", "ANSWERS")
    show(table(heads, rows, right=frozenset({"SESSION", "ACKNOWLEDGED", "ANSWERS"})))


@click.command("close")
@click.argument("number", metavar="SESSION", type=click.IntRange(min=1))
@JSON_OPTION
@confirm_first("Close session {number}, and forget the answers that its program waits for?")
def close_session(number: int, as_json: bool) -> None:
    """Close a session.

    Its program can then no longer ask for the answers that it still waits for.
    """
    answer = session().write(ops.CLOSE_SESSION, session=number)
    present(answer, as_json, lambda: f"Closed session {number}.")
