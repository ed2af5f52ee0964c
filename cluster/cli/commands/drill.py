"""Commands `forebay drill …`: plan, run and show failover drills of the running cluster."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from forebay.cluster.cli.exits import ExitCode, Failure, bad_input
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.session import session
from forebay.cluster.cli.text import Cell, fields_table, format_time, note, present, show, show_json, table
from forebay.cluster.drills.figures import SLOWER_MAX
from forebay.cluster.drills.helper import NOT_DONE
from forebay.cluster.schemas import operations as ops
from forebay.replica.model import SCENARIOS
from forebay.replica.values import MICROSECONDS_PER_SECOND, plain

if TYPE_CHECKING:
    from forebay.cluster.client import Client
    from forebay.cluster.config import ReplicaConfig
    from forebay.cluster.drills.coordinator import Coordinator
    from forebay.cluster.drills.preconditions import DrillRequest, Plan
    from forebay.cluster.schemas.drills import DrillAnswer, DrillView

ABORT_AFTER_S: Final = 5.0
"""Default time without an acknowledged write after which a drill is aborted, seconds."""

HOLD_S: Final = 5
"""Copy of `cluster.drills.scenarios.HOLD_S` for the help, which imports no scenario."""

HOLD_S_MAX: Final = 100
"""Longest duration of a fault, seconds: less than a helper allows."""

_SCENARIO = click.argument("scenario", type=click.Choice([*SCENARIOS, *NOT_DONE]))
_TARGET = click.option(
    "--target",
    metavar="NAME",
    help="Target this replica or agent.  [default: the leader, the best follower, or the busiest agent]",
)
_HOLD = click.option(
    "--hold-s", type=click.IntRange(1, HOLD_S_MAX), help=f"Hold the fault for this long.  [default: {HOLD_S}]"
)
_SPARE = click.option("--spare-jobs", is_flag=True, help="Fail if a job is staging out.")
_FORCE = click.option("--force", "forced", multiple=True, metavar="NAME", help="Skip this precondition.")
_PATH: Final = click.Path(path_type=Path)
_RELEASE = click.option(
    "--release", type=_PATH, metavar="TREE", help="Upgrade to this release, in an upgrade drill.  [default: this one]"
)
_BACKUP = click.option(
    "--backup", type=_PATH, metavar="FILE", help="Use this backup for a drill on a copy.  [default: a new one]"
)
_SCRATCH = click.option(
    "--scratch", type=_PATH, metavar="DIR", help="Make the copy in this directory.  [default: $TMPDIR or /tmp]"
)
_DRILL = click.argument("number", metavar="DRILL", type=click.IntRange(min=1))


@click.command("plan")
@_SCENARIO
@_TARGET
@_HOLD
@_SPARE
@_FORCE
@_RELEASE
@_BACKUP
@_SCRATCH
@JSON_OPTION
def plan(as_json: bool, **asked: Any) -> None:
    """Show what a drill would do and check its preconditions.

    switchover transfers the leadership. leader-kill, leader-hang, follower-stop, agent-kill and node-down signal a
    replica or an agent. The partition scenarios isolate a replica, disk-full fills its file system, and slow-disk
    limits its disk to ten writes a second. A helper on the target's machine injects these faults, if that machine's
    configuration allows them. restore, majority-lost and upgrade run on a copy of the cluster's state, on this machine.
    """

    async def ask(client: Client) -> Plan:
        from forebay.cluster.drills.preconditions import make_plan

        wanted = _drill_request(asked)
        return make_plan(await _coordinator(client).look(wanted), wanted)

    made = session().ask(ask, on_a_loop=True)
    if as_json:
        show_json(made)
    else:
        _show_plan(made)
        if not made.refused:
            note(f"to run it: {_run_command(made, _drill_request(asked))} --confirm {made.id}")


@click.command("run")
@_SCENARIO
@_TARGET
@_HOLD
@_SPARE
@_FORCE
@_RELEASE
@_BACKUP
@_SCRATCH
@click.option("--confirm", metavar="PLAN", help="Run the plan with this ID, as `drill plan` shows it.")
@click.option(
    "--goal-ms",
    type=click.IntRange(min=1),
    help="Fail if writes stop for longer than this.  [default: 500; on a copy 60000, in an upgrade 2000]",
)
@click.option(
    "--abort-after-s", type=click.FloatRange(0.1, 30), default=ABORT_AFTER_S, show_default=True,
    help="Abort if no write is acknowledged for this long.",
)  # fmt: skip
@click.option(
    "--abort-if-slower", "slower_max", type=click.IntRange(0, 1_000), default=SLOWER_MAX, show_default=True,
    metavar="TIMES", help="Abort if writes become this many times slower; 0: never.",
)  # fmt: skip
@click.option(
    "--automatic", is_flag=True, help="Run without --confirm, from a timer, if [drill] automatic names the scenario."
)
@JSON_OPTION
def run(
    confirm: str | None,
    goal_ms: int | None,
    abort_after_s: float,
    slower_max: int,
    automatic: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Run a drill whose plan was confirmed.

    A client outside the cluster sends a write every 10 ms and a read every 20 ms, first without a fault. Ctrl-C and
    SIGTERM abort the drill.
    """
    if automatic and (confirm is not None or asked["forced"]):
        raise bad_input("--automatic excludes --confirm and --force", "remove them, or --automatic")

    async def perform(client: Client) -> DrillAnswer:
        import asyncio
        import signal

        from forebay.cluster.drills.preconditions import make_plan
        from forebay.cluster.drills.scenarios import SCENARIOS as KNOWN
        from forebay.cluster.drills.stop_conditions import Goals

        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        coordinator, wanted = _coordinator(client), _drill_request(asked)
        found = await coordinator.look(wanted)
        made = make_plan(found, wanted)
        if not as_json:
            _show_plan(made)
        if automatic:
            _refuse_early(made.scenario, found.drills.drills)
        _refuse_unmet(made)
        if not automatic:
            _check_confirmation(made, wanted, confirm)
        goals = Goals(
            write_stop_us=(goal_ms or KNOWN[made.scenario].goal_ms) * 1000,
            abort_after_us=round(abort_after_s * MICROSECONDS_PER_SECOND),
            slower_max=slower_max,
        )
        return await coordinator.run(made, goals)

    from asyncio import CancelledError

    try:
        ended = session().ask(perform, on_a_loop=True)
    except CancelledError:
        raise Failure(ExitCode.INTERRUPTED, "drill aborted by SIGTERM", "see `forebay drill list`") from None
    present(ended, as_json, lambda: fields_table(_fields(ended)))
    if ended.verdict != "passed":
        raise Failure(
            ExitCode.VERIFICATION_FAILED,
            f"drill {ended.drill} {ended.verdict}: {ended.sentence}",
            f"see `forebay drill show {ended.drill}` and `forebay audit leaders`",
        )


def _drill_request(asked: dict[str, Any]) -> DrillRequest:
    from forebay.cluster.drills.preconditions import DrillRequest
    from forebay.cluster.drills.scenarios import SCENARIOS as KNOWN

    why = NOT_DONE.get(asked["scenario"])
    if why is not None:
        raise Failure(
            ExitCode.REFUSED, f"{asked['scenario']} is not possible: {why}", f"use one of: {', '.join(SCENARIOS)}"
        )
    on_copy = tuple(one.name for one in KNOWN.values() if one.on_copy)
    for name, scenarios in (("release", ("upgrade",)), ("backup", on_copy), ("scratch", on_copy)):
        if asked[name] is not None and asked["scenario"] not in scenarios:
            raise bad_input(f"the option is only for {', '.join(scenarios)}", "remove it", place=f"--{name}")
    paths = {name: path.absolute() for name, path in asked.items() if isinstance(path, Path)}
    return DrillRequest(**(asked | paths))


def _coordinator(client: Client) -> Coordinator:
    from forebay.cluster.client import Client
    from forebay.cluster.drills.coordinator import Coordinator
    from forebay.cluster.drills.copies.exercises import Exercise
    from forebay.cluster.drills.machines import Alarm, Machines
    from forebay.cluster.drills.probes import prober_starter

    current = session()
    config = current.config()
    replicas = {replica.name: replica.api for replica in config.replicas}
    identity = current.identity
    if identity is None:
        remedy = "use --identity with the name of a certificate with the role operator or drill"
        raise bad_input("a drill needs a certificate", remedy, place="--identity")
    machines = Machines(config, identity, current.clock)
    alarm = None
    if config.drill.prometheus:
        alarm = Alarm(config.drill.prometheus, config.drill.stop_when).ask
    return Coordinator(
        client,
        current.clock,
        replicas,
        machines,
        prober_starter(config.file, identity, replicas),
        note,
        require_second=config.drill.require_second,
        alarm=alarm,
        user=lambda: Client.from_config(config, identity, clock=current.clock),
        exercise=partial(Exercise, fetch_snapshot=_fetch_snapshot),
    )


async def _fetch_snapshot(client: Client, replica: ReplicaConfig, file: Path) -> None:
    from forebay.cluster.cli.commands.backup import newest_snapshot, receive_snapshot
    from forebay.cluster.drills.copies.exercises import SnapshotUnavailable

    try:
        _, row = await newest_snapshot(client, (replica,), saves=True)
        await receive_snapshot(client, replica, row, file)
    except Failure as failure:
        raise SnapshotUnavailable(str(failure)) from failure


def _run_command(made: Plan, wanted: DrillRequest) -> str:
    """Return the command that runs a plan."""
    hold = f" --hold-s {wanted.hold_s}" if wanted.hold_s is not None else ""
    spare = " --spare-jobs" if wanted.spare_jobs else ""
    forced = "".join(f" --force {name}" for name in made.forced)
    paths = (("release", made.release), ("backup", made.backup), ("scratch", made.scratch))
    of_copy = "".join(f" --{name} {plain(shlex.quote(path))}" for name, path in paths if path)
    return f"forebay drill run {made.scenario} --target {plain(made.target)}{hold}{spare}{forced}{of_copy}"


def _show_plan(made: Plan) -> None:
    rows: list[tuple[Cell, ...]] = [
        (one.name, "yes" if one.holds else ("forced" if one.name in made.forced else "no"), one.figure)
        for one in made.preconditions
    ]
    show(table(("PRECONDITION", "HOLDS", "FOUND"), rows))
    note(f"plan {made.id}: {made.will_happen}")


def _refuse_unmet(made: Plan) -> None:
    if not made.refused:
        return
    first = made.refused[0]
    remedy = first.remedy
    if first.may_be_forced:
        remedy += f"; or skip it: --force {first.name}"
    raise Failure(ExitCode.REFUSED, f"precondition {first.name} does not hold: {first.figure}", remedy)


def _refuse_early(scenario: str, drills: Iterable[DrillView]) -> None:
    from forebay.cluster.drills.preconditions import manual_reason

    why = manual_reason(scenario, session().config().drill.automatic, drills)
    if why is not None:
        raise Failure(ExitCode.REFUSED, *why)


def _check_confirmation(made: Plan, wanted: DrillRequest, confirm: str | None) -> None:
    again = f"{_run_command(made, wanted)} --confirm {made.id}"
    if confirm is None:
        raise bad_input("the plan is not confirmed", again, place="--confirm")
    if confirm != made.id:
        raise Failure(
            ExitCode.REFUSED,
            f"plan {confirm[:16]!r} is outdated: the cluster or the options have changed; the plan is now {made.id}",
            f"check the new plan, then: {again}",
        )


@click.command("list")
@JSON_OPTION
def list_drills(as_json: bool) -> None:
    """List the last drills, newest first, and the locks."""
    answer = session().read(ops.LIST_DRILLS)
    if as_json:
        show_json(answer)
        return
    rows = [
        (one.drill, format_time(one.began), one.scenario, one.target, one.by, one.verdict, _stop_ms(one))
        for one in answer.drills
    ]
    heads = ("DRILL", "BEGAN", "SCENARIO", "TARGET", "BY", "VERDICT", "WRITE-STOP")
    show(table(heads, rows, right=frozenset({"DRILL", "WRITE-STOP"})))
    for lock in answer.locks:
        note(f"drills are locked by {plain(lock.by)} since {format_time(lock.since)}: {plain(lock.reason)}")


@click.command("show")
@_DRILL
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write an HTML page to this file.",
)
@JSON_OPTION
def show_drill(number: int, page: Path | None, as_json: bool) -> None:
    """Show a drill's verdict and figures.

    The page of --html shows leaders and write stops over time, and the events during the drill.
    """
    current = session()

    async def ask(client: Client) -> tuple[DrillAnswer, tuple[DrillView, ...]]:
        answer = await client.call(ops.SHOW_DRILL, drill=number, stale=current.stale)
        listed = (await client.call(ops.LIST_DRILLS, stale=current.stale)).drills
        return answer, tuple(one for one in listed if one.drill < number)

    answer, before = current.ask(ask)
    if page is not None:
        _write_page(page, answer, before)
    if as_json:
        show_json(answer)
        return
    if page is not None:
        return
    from forebay.cluster.drills.preconditions import earlier_stops_us

    show(fields_table(_fields(answer)))
    earlier_us = earlier_stops_us(before, answer.scenario)
    if earlier_us:
        stops = ", ".join(map(_ms, earlier_us))
        note(f"write stops of earlier drills, newest first: {stops}")


def _write_page(output: Path, drill: DrillAnswer, before: tuple[DrillView, ...]) -> None:
    from forebay.cluster.cli.files import write_whole
    from forebay.cluster.drills.final_checks import read_events
    from forebay.cluster.drills.report import ROWS_MAX, render_page

    if drill.ended is None:
        raise Failure(ExitCode.REFUSED, f"drill {drill.drill} has not ended yet", "try again after its end")

    async def ask(client: Client) -> str:
        window: dict[str, Any] = {"from": drill.began, "to": drill.ended}
        terms = (await client.call(ops.LIST_LEADERS)).terms
        story = tuple([row async for row in read_events(client, ROWS_MAX + 1, **window)])
        return render_page(drill, before, terms, story, f"forebay drill show {drill.drill} --html {output.name}")

    write_whole(output, session().ask(ask).encode(), "--html")
    note(f"Wrote {plain(str(output))}.")


@click.command("confirm")
@_DRILL
@JSON_OPTION
def confirm(number: int, as_json: bool) -> None:
    """Approve a waiting drill as the second operator.

    Needed if [drill] has `require_second`.
    """
    answer = session().write(ops.CONFIRM_DRILL, drill=number)
    present(answer, as_json, lambda: f"Approved drill {number}: {plain(answer.scenario)} of {plain(answer.target)}.")


@click.command("abort")
@_DRILL
@click.option("--reason", required=True, help="Record this reason.")
@JSON_OPTION
def abort(number: int, reason: str, as_json: bool) -> None:
    """Abort the running drill."""
    answer = session().write(ops.ABORT_DRILL, drill=number, reason=reason)
    present(answer, as_json, lambda: f"Aborting drill {number}: {plain(answer.abort)}")


@click.command("lock")
@click.option("--reason", required=True, help="Set the reason shown to other operators.")
@JSON_OPTION
def lock(reason: str, as_json: bool) -> None:
    """Forbid drills until they are unlocked.

    A running drill is aborted.
    """
    answer = session().write(ops.LOCK_DRILLS, reason=reason)
    unlock = ", ".join(f"forebay drill unlock {plain(shlex.quote(one.by))}" for one in answer.locks)
    present(answer, as_json, lambda: f"Drills are locked. To unlock them: {unlock}")


@click.command("unlock")
@click.argument("name")
@JSON_OPTION
def unlock(name: str, as_json: bool) -> None:
    """Remove an operator's lock."""
    answer = session().write(ops.UNLOCK_DRILLS, name=name)
    left = ", ".join(one.by for one in answer.locks)
    locked = f"Removed the lock of {plain(name)}; drills are still locked by {plain(left)}."
    present(answer, as_json, lambda: locked if left else "Drills are unlocked.")


def _stop_ms(one: DrillView) -> str:
    stop_us = one.figures.get("write_stop_us")
    return "" if stop_us is None else _ms(stop_us)


def _ms(length_us: int) -> str:
    return f"{length_us / 1000:.1f} ms"


def _fields(one: DrillView) -> Iterable[tuple[str, str | int | None]]:
    yield "Drill", str(one.drill)
    yield "Scenario", f"{one.scenario} of {one.target}"
    yield "By", one.by
    yield "Began", format_time(one.began)
    yield "Ended", format_time(one.ended)
    yield "Verdict", one.verdict
    yield "Result", one.sentence
    if one.abort:
        yield "Aborted by", one.abort
    if one.forced:
        yield "Forced", ", ".join(one.forced)
    from forebay.cluster.drills.figure_labels import display_order, format_figure, label_of

    for name in display_order(one.figures):
        yield label_of(name), format_figure(name, one.figures[name])
