"""Options and arguments that several commands share, and the commands of policy records (accounts, QOS, …)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import msgspec

from forebay.cluster.cli.confirmation import confirm_first
from forebay.cluster.cli.exits import ExitCode, Failure, bad_input, convert_input
from forebay.cluster.cli.global_options import JSON_OPTION, CommandGroup
from forebay.cluster.cli.session import session
from forebay.cluster.system import FORMAT_VARIABLE, FORMATS

if TYPE_CHECKING:
    from forebay.cluster.cli.text import Listing
    from forebay.cluster.client import Client
    from forebay.cluster.schemas import ApiOperation, BulkCommand, Command

Function = TypeVar("Function", bound=Callable[..., Any])


def _log_as(context: click.Context, parameter: click.Parameter, form: str | None) -> None:
    if form is not None:
        os.environ[FORMAT_VARIABLE] = form


LOG_FORMAT_OPTION = click.option(
    "--log-format", type=click.Choice(FORMATS), callback=_log_as, expose_value=False,
    help=f"Set the log format.  [default: ${FORMAT_VARIABLE}, or journald in a systemd service, or text]",
)  # fmt: skip
"""Log format of the process that replaces this one, and of its children."""


def parse_past_time(context: click.Context, parameter: click.Parameter, typed: str | None) -> str | None:
    """Return a revision or past time in the form that the API takes; None if none is given.

    Raises:
        Failure: bad input, if the text is neither.
    """
    if typed is None or (typed.isascii() and typed.isdigit()):
        return typed
    from forebay.cluster.cli.text import parse_past

    place = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
    return convert_input(typed, lambda text: parse_past(text, session().clock.now()), place)


AT_OPTION = click.option(
    "--at", callback=parse_past_time,
    metavar="REVISION|TIME", help="Show the state at a past revision or time: 1207, 10:03, 2026-01-31T10:03:00.",
)  # fmt: skip


JOB_ID_MAX: Final = 2**63 - 1

PAGE_JOBS: Final = 10_000
"""Number of jobs requested at once: the API's limit."""

WATCH_PERIOD_S: Final = 1.0
"""Seconds between two listings of --watch: fast enough for the eye, no load for a leader."""


class JobReference(click.ParamType):  # type: ignore[type-arg]
    """Reference to jobs: `12`, `12_3` (an array task), `12_[1-4,7]` (several), `slurm:42` (an external job)."""

    name = "job"

    def convert(self, value: str, parameter: click.Parameter | None, context: click.Context | None) -> str:
        """Return the reference without leading zeros."""
        from forebay.replica.model import (
            ArrayError,
            external_job_id_fault,
            format_reference,
            parse_reference,
            scheduler_fault,
        )

        scheduler, colon, number = value.partition(":")
        if colon:
            fault = scheduler_fault(scheduler) or external_job_id_fault(number)
            if fault is not None:
                self.fail(f"{fault}; write for example slurm:42", parameter, context)
            return value
        try:
            job_id, tasks = parse_reference(value)
        except ArrayError as fault:
            self.fail(str(fault), parameter, context)
        if not 1 <= job_id <= JOB_ID_MAX:
            self.fail(f"{value!r} is not a job; job IDs begin at 1", parameter, context)
        return format_reference(job_id, tasks)


JOB_ID = JobReference()


def job_options(*, change: bool = False) -> Callable[[Function], Function]:
    """Return a decorator that adds the options of JOB_FIELDS, with `change` only those that can be changed."""

    from forebay.cluster.schemas import JOB_FIELDS

    def decorate(function: Function) -> Function:
        for row in reversed(JOB_FIELDS):
            text = row.change if change else row.help
            if text is not None:
                shape: dict[str, Any] = {"metavar": row.metavar} if row.metavar else {"is_flag": True, "default": None}
                click.option(*row.options, row.field, help=text, **shape)(function)
        return function

    return decorate


NAME = click.argument("name")


CHANGE_TRIES: Final = 10
"""Number of attempts to change a record that other operators change at the same time."""

NO_LIMIT: Final = "-1"
"""Value that removes a limit, as in sacctmgr."""

BULK_BYTES_MAX: Final = 4 * 1024 * 1024
"""Largest request with many commands, bytes: half of a replica's limit."""


def split_into_requests(commands: Sequence[BulkCommand]) -> Iterator[Sequence[BulkCommand]]:
    """Yield slices of the commands in order, each small enough for one request."""
    import msgspec

    from forebay.cluster.schemas import BULK_COMMANDS_MAX

    first = size_bytes = 0
    for at, command in enumerate(commands):
        more_bytes = len(msgspec.json.encode(command)) + 1
        if at > first and (at - first == BULK_COMMANDS_MAX or size_bytes + more_bytes > BULK_BYTES_MAX):
            yield commands[first:at]
            first, size_bytes = at, 0
        size_bytes += more_bytes
    if first < len(commands):
        yield commands[first:]


def parse_names(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Return comma-separated names; None if the option is not given."""
    return None if value is None else tuple(name.strip() for name in value.split(",") if name.strip())


class Kind(msgspec.Struct, frozen=True):
    """Kind of policy record with its operations and table."""

    word: str
    """Noun for messages, for example `account`."""
    field: str
    """Field of an answer that has the records."""
    listed: ApiOperation[None, Any]
    changed: ApiOperation[Any, Any]
    deleted: ApiOperation[Command, Any]
    listing: Callable[[tuple[Any, ...]], Listing | str]
    """Formats records for display."""
    needed: tuple[str, ...] = ()
    """Fields that a new record requires."""


def print_records(kind: Kind, answer: Any, as_json: bool, name: str | None = None) -> None:
    """Print the records of an answer, or only the one called `name`."""
    from forebay.cluster.cli.text import present

    rows = tuple(row for row in getattr(answer, kind.field) if name in (None, row.name))
    present(_replace_records(answer, kind, rows), as_json, lambda: kind.listing(rows))


def _replace_records(answer: Any, kind: Kind, rows: tuple[Any, ...]) -> Any:
    import msgspec

    return msgspec.structs.replace(answer, **{kind.field: rows})


def find_record(rows: Sequence[Any], name: str, word: str) -> Any:
    """Return the row called `name`.

    Raises:
        Failure: not found, with the known names.
    """
    for row in rows:
        if row.name == name:
            return row
    known = ", ".join(row.name for row in rows[:20])
    remedy = f"use one of: {known}" if known else f"the cluster has no {word}"
    raise Failure(ExitCode.NOT_FOUND, f"{word} {name!r} does not exist", remedy)


def set_record(
    kind: Kind, name: str, as_json: bool, changes: dict[str, Any], kept: Callable[[Any], dict[str, Any]]
) -> None:
    """Create or change a record and print it.

    `changes` has the new value of each field of the request, or None if the option was not given. A dictionary of
    limits changes only the limits it names; the value -1 removes a limit. `kept` returns the unchanged fields of the
    present record.
    """

    def fields_of(present: Any) -> dict[str, Any]:
        fields = {} if present is None else kept(present)
        for field, value in changes.items():
            if value is not None:
                fields[field] = _merge_limits(fields.get(field, {}), value) if isinstance(value, dict) else value
        if missing := [field for field in kind.needed if field not in fields]:
            option = f"--{missing[0].replace('_', '-')}"
            raise bad_input(f"{kind.word} {name!r} does not exist yet", f"add {option} to create it", place=option)
        return fields

    replace_record(kind, name, as_json, fields_of)


def replace_record(kind: Kind, name: str, as_json: bool, fields_of: Callable[[Any], dict[str, Any]]) -> None:
    """Put a record and print it; `fields_of` returns the request's fields, given the present record or None.

    The record is read again if another operator changes it meanwhile, so that neither change is lost.
    """

    async def change(client: Client) -> Any:
        from forebay.cluster.client import ApiError

        tries_left = CHANGE_TRIES
        while True:
            listed = await client.call(kind.listed)
            present = next((row for row in getattr(listed, kind.field) if row.name == name), None)
            etag = "" if present is None else present.etag
            request = kind.changed.request(command_id=client.new_command_id(), if_match=etag, **fields_of(present))
            try:
                return await client.call(kind.changed, request, name=name)
            except ApiError as error:
                tries_left -= 1
                if error.place != "if_match" or not tries_left:
                    raise

    print_records(kind, session().ask(change), as_json, name)


def _merge_limits(present: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the present limits, or limits by user, with `changes` applied."""
    changed = dict(present)
    for key, value in changes.items():
        if isinstance(value, dict):
            changed[key] = _merge_limits(present.get(key, {}), value)
            continue
        for known in [known for known in changed if _limit_key(known) == _limit_key(key)]:
            del changed[known]
        if value != NO_LIMIT:
            changed[key] = value
    return {key: value for key, value in changed.items() if value != {}}


def _limit_key(text: str) -> tuple[str, str, str]:
    """Return a limit's key regardless of case: grpbb:BB/fast and GrpBB:bb/fast are the same limit."""
    word, _, space = text.partition(":")
    prefix, _, name = space.partition("/")
    return word.lower(), prefix.lower(), name


def record_group(kind: Kind, about: str, listing: str, deleting: str) -> click.Group:
    """Return a group with the commands list, show and delete for a kind; the texts are their help."""
    group = CommandGroup(help=about)

    @group.command("list", help=listing)
    @JSON_OPTION
    def list_records(as_json: bool) -> None:
        print_records(kind, session().read(kind.listed), as_json)

    @group.command("show", help=f"Show one {kind.word} in full.")
    @NAME
    @JSON_OPTION
    def show_record(name: str, as_json: bool) -> None:
        from forebay.cluster.cli.text import list_fields, present

        answer = session().read(kind.listed)
        row = find_record(getattr(answer, kind.field), name, kind.word)
        present(_replace_records(answer, kind, (row,)), as_json, lambda: list_fields(kind.listing((row,))))

    @group.command("delete", help=deleting)
    @NAME
    @JSON_OPTION
    @confirm_first(f"Delete the {kind.word} {{name}}?")
    def delete_record(name: str, as_json: bool) -> None:
        print_records(kind, session().write(kind.deleted, name=name), as_json)

    return group
