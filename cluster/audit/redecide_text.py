"""Result of deciding a ledger again, as a table and as JSON."""

from pathlib import Path
from typing import Any, Final

import click
import msgspec

from forebay.cluster.api.render import record_event
from forebay.cluster.audit.deciding import CommandOutcome
from forebay.cluster.audit.redecide import DecisionDifference, Deviation, RedecidingReplay, lacking
from forebay.cluster.cli.text import fields_table, format_time, show, show_json, table
from forebay.cluster.system import format_instant
from forebay.replica.messages import Event
from forebay.replica.values import plain

SHOWN_MAX: Final = 20
"""Number of differences in the table, those with another effect first; `--json` has more."""

_HERE: Final = {None: "", True: "; this release decides as the ledger", False: "; this release also decides otherwise"}

Json = dict[str, Any]


def show_redecided(
    done: RedecidingReplay, release: Path | None, states_differ: tuple[str, ...], *, as_json: bool
) -> None:
    """Print the result; `states_differ`: tables in which another release's final state differs."""
    if as_json:
        show_json(_as_json(done, release, states_differ))
        return
    total = done.total
    rows: list[tuple[str, str | int | None]] = [
        ("Entries", f"{done.entries}, up to {done.last_index}"),
        ("Revisions", f"{done.first_revision} to {done.state.revision}" if done.first_revision else "none"),
        ("DecidedBy", "this release" if release is None else str(release)),
        ("Rebuilt", f"{done.rebuilt_share:.2%} of the commands with an effect"),
        *((f"{one[:1].upper()}{one[1:]}", done.by_deviation[one]) for one in Deviation if done.by_deviation[one]),
    ]
    if release is not None:
        rows.append(("States", f"differ in {', '.join(states_differ)}" if states_differ else "the same at the end"))
    counts = [(kind, *msgspec.structs.astuple(tally)) for kind, tally in sorted(done.tallies.items())]
    columns = ("COMMAND", "SAME", "DIFFERENT", "NOT-REBUILT", "NO-TRACE")
    show(fields_table(rows))
    click.echo()
    show(table(columns, [*counts, ("all", *msgspec.structs.astuple(total))], right=frozenset(columns[1:])))
    for kind, lacks in _lacking(done).items():
        click.echo(f"{kind}: the ledger does not keep {lacks}")
    shown = sorted(done.differences, key=lambda one: not one.deviation.is_grave)[:SHOWN_MAX]
    for one in shown:
        click.echo(f"\n{first_words(one)}{_HERE[one.here]}")
        click.echo(f"  ledger   {_words(one.ledger)}\n  decided  {_words(one.decided)}")
    if total.different > len(shown):
        click.echo(f"\n{total.different - len(shown)} more are not shown here")


def first_words(one: DecisionDifference) -> str:
    """Format a differing decision and its difference in one line."""
    job = "" if one.job is None else f", job {one.job}"
    at = format_time(format_instant(one.at))
    return (
        f"entry {one.index}, revision {one.revision}, {at}, {one.command} of {plain(one.actor)}{job}: {one.deviation}"
    )


def _lacking(done: RedecidingReplay) -> dict[str, str]:
    return lacking(kind for kind, tally in sorted(done.tallies.items()) if tally.not_rebuilt)


def _words(outcome: CommandOutcome) -> str:
    if outcome.fault:
        return plain(f"cannot be decided: {outcome.fault}")
    if outcome.rejection is not None:
        return plain(f"rejected ({outcome.rejection.code.name.lower()}): {outcome.rejection.sentence}")
    return "; ".join(map(_event_words, outcome.events)) or "nothing"


def _event_words(event: Event) -> str:
    record = record_event(event)
    said = ((name, value) for name, value in record["detail"].items() if value not in (None, "", 0, False, [], {}))
    return plain(" ".join([record["event"], *(f"{name}={value}" for name, value in said)]))


def _as_json(done: RedecidingReplay, release: Path | None, states_differ: tuple[str, ...]) -> Json:
    found: Json = {
        "entries": done.entries,
        "first_index": done.first_index,
        "last_index": done.last_index,
        "first_revision": done.first_revision,
        "revision": done.state.revision,
        "release": None if release is None else str(release),
        **msgspec.structs.asdict(done.total),
        "rebuilt_share": round(done.rebuilt_share, 6),
        "differences_by_class": {one.value: done.by_deviation[one] for one in Deviation},
        "commands": {kind: msgspec.structs.asdict(tally) for kind, tally in sorted(done.tallies.items())},
        "not_kept": _lacking(done),
        "differences": [_difference(one) for one in done.differences],
    }
    if release is not None:
        found["states_differ"] = list(states_differ)
    return found


def _difference(one: DecisionDifference) -> Json:
    found: Json = {
        "index": one.index,
        "revision": one.revision,
        "at": format_instant(one.at),
        "job": one.job,
        "command": one.command,
        "actor": one.actor,
        "class": one.deviation.value,
        "ledger": _outcome(one.ledger),
        "decided": _outcome(one.decided),
    }
    return found if one.here is None else {**found, "decided_here_as_in_ledger": one.here}


def _outcome(outcome: CommandOutcome) -> Json:
    rejection = outcome.rejection
    return {
        "events": [record_event(event) for event in outcome.events],
        "rejection": None
        if rejection is None
        else msgspec.structs.asdict(rejection) | {"code": rejection.code.name.lower()},
        "fault": outcome.fault or None,
    }
