"""Command `forebay submit`: submit batch scripts as jobs."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from forebay.cluster.cli.commands.options import job_options, split_into_requests
from forebay.cluster.cli.exits import (
    INVALID_REQUEST_LINE,
    NODE_COUNT_LINE,
    PERMISSION_LINE,
    ExitCode,
    Failure,
    bad_input,
    join_failures,
)
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.group import exit_with, report
from forebay.cluster.cli.session import Session, exit_code_of, session
from forebay.cluster.cli.submission import IgnoredOption, PreparedSubmit, locate, prepare, read_bounded, read_typed
from forebay.cluster.cli.text import note, present, show_json
from forebay.cluster.client import ApiError, error_of_view
from forebay.cluster.schemas import SubmitRequest, instant_of
from forebay.cluster.schemas import operations as ops
from forebay.replica.values import SUBMITTED_SCRIPT_BYTES_MAX

if TYPE_CHECKING:
    from forebay.cluster.client import Client
    from forebay.cluster.schemas import CommandResult, JobView

STANDARD_INPUT: Final = "-"

ARGUMENTS_FOLLOW: Final = "--"
"""Separator between scripts and the arguments of a script."""

WRAP_NAME: Final = "wrap"
"""Name of a job submitted with --wrap, as in Slurm."""

_ARGUMENTS: Final = "forebay.arguments"
_SETTINGS: Final = "forebay.settings"
_IGNORED: Final = "forebay.ignored"
"""Keys in the click context: the script's arguments, sbatch options that set a field, and ignored sbatch options."""

SCRIPTS_MAX: Final = 10_000
"""Maximum number of scripts of one command: ten requests; all scripts are in memory before the first is sent."""

LIST_BYTES_MAX: Final = SUBMITTED_SCRIPT_BYTES_MAX
"""Largest list of scripts on standard input, bytes."""

REQUEST_CODES: Final = frozenset(
    {
        "unknown_pool",
        "capacity_over_total",
        "invalid_capacity",
        "no_default_pool",
        "invalid_directive",
        "provider_refused",
    }
)
"""Codes that always mean a rejected burst-buffer request, whatever the place; Slurm's line is printed last."""

PERMISSION_SENTENCES: Final = frozenset(
    {
        PERMISSION_LINE,
        "User root can not allocate burst buffers",
        "User not found in AllowUsers",
        "User found in DenyUsers",
    }
)
"""Rejections caused by the user's permissions, not by the request."""

IGNORED_PLACE: Final = "ignored_options"
"""Place in the error if the site rejects options without effect."""

REQUEST_PLACES: Final = ("script", "--bb")
"""Prefixes of places within the burst-buffer request (`--bbf` too)."""


class _Script(NamedTuple):
    """Script on the command line, with its prepared request."""

    name: str
    prepared: PreparedSubmit


class _SubmitCommand(click.Command):
    """Command that passes the words after `--` to the script, and accepts every option of sbatch."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Extract script arguments and sbatch options that this command lacks, and parse the rest.

        Raises:
            Failure: bad input, if an sbatch option is rejected.
        """
        own, given = args, list[str]()
        if ARGUMENTS_FOLLOW in args:
            at = args.index(ARGUMENTS_FOLLOW)
            own, given = args[:at], args[at + 1 :]
        ctx.meta[_ARGUMENTS] = tuple(given)
        ctx.meta[_SETTINGS], ctx.meta[_IGNORED] = dict[str, str](), list[IgnoredOption]()
        while True:
            try:
                return super().parse_args(ctx, list(own))
            except click.NoSuchOption as error:
                typed = read_typed(own, error.option_name)
                if typed.args == own:
                    raise
            own = typed.args
            ctx.meta[_SETTINGS] |= typed.settings
            ctx.meta[_IGNORED] += typed.ignored


@click.command("submit", cls=_SubmitCommand, no_args_is_help=True)
@click.argument("scripts", metavar="SCRIPT… [-- ARGUMENT…]", nargs=-1)
@job_options()
@click.option("--wrap", metavar="COMMAND", help="Run this command with /bin/sh instead of a script.")
@click.option("-W", "--wait", "waits", is_flag=True, help="Wait for the job, and exit with its exit code.")
@click.option("--parsable", is_flag=True, help="Print only the job's ID.")
@click.option(
    "--export", metavar="NAME=VALUE", multiple=True, help="Pass a variable to the job; NAME alone copies yours."
)
@click.option("--uid", "owner", metavar="USER", help="Submit on behalf of this user (operators).")
@click.option("--command-id", metavar="ID", help="Repeat the submit with this ID, which takes effect at most once.")
@JSON_OPTION
def submit(
    scripts: tuple[str, ...], owner: str | None, command_id: str | None, as_json: bool, export: tuple[str, ...],
    wrap: str | None, waits: bool, parsable: bool, **given: str | bool | None,
) -> None:  # fmt: skip
    """Submit batch scripts.

    #SBATCH lines at the top of a script set options by Slurm's names (--job-name, --time, --cpus-per-task, …); the
    command line takes precedence. One warning lists the sbatch options that have no effect here, such as --mem. #DW and
    #BB lines (#BB_LUA with a Lua provider) are the burst-buffer request. The command prints `Submitted batch job ID`.
    For a rejected request it prints every place and cause, then `Burst Buffer request invalid` as the last line.

    The script - is standard input: a script, which begins with #!, or a list of scripts, one for each line. Several
    scripts become one job each, with the same options. Nothing is submitted if one of them cannot be read or is not a
    batch script. If the controller rejects a script, the others are still submitted; the exit code is that of the first
    rejection.
    """
    if command_id is not None:
        _check_command_id(command_id)
    current = session()
    meta = click.get_current_context().meta
    arguments: tuple[str, ...] = meta[_ARGUMENTS]
    found = _wrap_command(wrap, scripts, arguments) if wrap is not None else list(_read_scripts(scripts))
    if not found:
        raise bad_input("no script is given", "give a script, - for standard input, or --wrap COMMAND")
    if command_id is not None and len(found) > 1:
        remedy = "submit each script with its own ID"
        raise bad_input("several scripts are given", remedy, place="--command-id")
    made = list[_Script]()
    for name, data in found:
        try:
            prepared = prepare(
                data,
                name,
                given | meta[_SETTINGS],
                export,
                ignored=meta[_IGNORED],
                directory=Path.cwd(),
                environment=os.environ,
                home=None if owner is None else _home_of(owner),
                now=current.clock.now(),
                arguments=arguments,
            )
        except Failure as error:
            if made and not data.startswith(b"#!"):
                error.remedy += f"; to pass arguments to a script, write them after {ARGUMENTS_FOLLOW}"
            raise
        made.append(_Script(name, prepared))
    for script in made:
        for warning in script.prepared.warnings:
            note(f"forebay: warning: {warning}")
    waits = waits or any(script.prepared.waits for script in made)
    parsable = parsable or any(script.prepared.parsable for script in made)
    if waits and as_json:
        raise bad_input("--wait and --json exclude each other", "use one of them")
    line = "{}" if parsable else "Submitted batch job {}"
    if len(made) == 1:
        jobs: tuple[int, ...] = (_submit_one(current, made[0].prepared, owner, command_id, None if as_json else line),)
        code = ExitCode.OK
    else:
        jobs, code = _submit_all(current, made, owner, None if as_json else line)
    if code is not ExitCode.OK:
        exit_with(code)
    if waits:
        from forebay.cluster.cli.submission import wait_until_finished

        sys.stdout.flush()
        ended = current.ask(lambda client: wait_until_finished(client, jobs, note), on_a_loop=True)
        if ended:
            raise click.exceptions.Exit(ended)


def _home_of(user: str) -> str:
    """Return the home directory of another user, empty if the account is unknown here."""
    try:
        return pwd.getpwnam(user).pw_dir
    except KeyError:
        return ""


def _wrap_command(command: str, scripts: tuple[str, ...], arguments: tuple[str, ...]) -> list[tuple[str, bytes]]:
    """Return a script that runs the command of --wrap, and its name."""
    if scripts or arguments:
        raise bad_input("a script or arguments are given as well", "use either --wrap or a script", place="--wrap")
    return [(WRAP_NAME, f"#!/bin/sh\n# Made by forebay submit --wrap.\n\n{command}\n".encode(errors="surrogateescape"))]


def _submit_one(
    current: Session, prepared: PreparedSubmit, owner: str | None, command_id: str | None, line: str | None
) -> int:
    """Submit a script and return the job's ID; print it in the format `line`, or as JSON if that is None."""

    async def send(client: Client) -> JobView:
        request = SubmitRequest(command_id=command_id or client.new_command_id(), user=owner, **prepared.fields)
        try:
            return await client.call(ops.SUBMIT_JOB, request)
        except ApiError as error:
            raise _failure(error, prepared) from error

    job = current.ask(send)
    for warning in job.warnings:
        note(f"forebay: warning: {warning}")
    present(job, line is None, lambda: str(line).format(job.job_id))
    return job.job_id


def _submit_all(
    current: Session, scripts: Sequence[_Script], owner: str | None, line: str | None
) -> tuple[tuple[int, ...], ExitCode]:
    """Submit scripts in as few requests as possible and print the results in order, as `_submit_one` does.

    Return the jobs, and the exit code of the first failure.
    """
    from forebay.cluster.schemas import JobsAnswer, SubmitCommand

    async def send(client: Client) -> tuple[int, list[JobView | ApiError]]:
        commands = [
            SubmitCommand(command_id=client.new_command_id(), user=owner, **script.prepared.fields)
            for script in scripts
        ]
        outcomes: list[JobView | ApiError] = []
        revision = 0
        for part in split_into_requests(commands):
            try:
                answer = await client.commands(part)
            except ApiError as error:
                outcomes += [_for_one_command(error, command.command_id) for command in part]
                outcomes += [_not_sent(error) for _ in commands[len(outcomes) :]]
                break
            revision = answer.revision
            outcomes += map(_outcome, answer.results)
        return revision, outcomes

    revision, outcomes = current.ask(send)
    jobs = []
    failures = []
    for script, outcome in zip(scripts, outcomes, strict=True):
        if isinstance(outcome, ApiError):
            failures.append(_add_script_name(_failure(outcome, script.prepared), script.name))
            report(failures[-1])
            continue
        jobs.append(outcome)
        for warning in outcome.warnings:
            note(f"forebay: warning: {script.name}: {warning}")
        if line is not None:
            click.echo(line.format(outcome.job_id))
    if line is None:
        show_json(JobsAnswer(revision=revision, jobs=tuple(jobs)))
    return tuple(job.job_id for job in jobs), failures[0].code if failures else ExitCode.OK


def _outcome(result: CommandResult) -> JobView | ApiError:
    if result.error is not None:
        return error_of_view(result.status, result.error, result.command_id)
    assert result.job is not None, "a submit that succeeded has a job"
    return result.job


def _for_one_command(error: ApiError, command_id: str) -> ApiError:
    """Return the error of one command in a request that failed as a whole."""
    return ApiError(
        error.status, error.code, error.sentence, remedy=error.remedy, outcome=error.outcome, command_id=command_id
    )


def _not_sent(error: ApiError) -> ApiError:
    """Return the error of a command that was not sent, because an earlier request failed as a whole."""
    sentence = "the script was not submitted, because an earlier request failed"
    return ApiError(error.status, error.code, sentence, remedy="submit it again")


def _add_script_name(failure: Failure, name: str) -> Failure:
    """Return the failure with the script's name in its place."""
    if failure.place.startswith(name):
        return failure
    place = f"{name}, {failure.place}" if failure.place else name
    named = Failure(failure.code, failure.sentence, failure.remedy, place=place, last=failure.last, kind=failure.kind)
    named.others = tuple(_add_script_name(one, name) for one in failure.others)
    return named


def _check_command_id(command_id: str) -> None:
    try:
        instant_of(command_id)
    except ValueError as error:
        sentence, _, remedy = str(error).partition(": ")
        raise bad_input(sentence, remedy or "use the ID from the error message", place="--command-id") from None


def _read_scripts(names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield each script's name and content; replace `-` by the scripts listed on standard input, if it is a list."""
    if names.count(STANDARD_INPUT) > 1:
        raise bad_input("standard input is given twice", f"use {STANDARD_INPUT} once")
    count = 0
    for name in names:
        listed: Sequence[str] = (name,)
        if name == STANDARD_INPUT:
            data = sys.stdin.buffer.read(SUBMITTED_SCRIPT_BYTES_MAX + 1)
            listed = _script_list(data)
            if not listed:
                count += 1
                yield name, data
        for one in listed:
            count += 1
            if count > SCRIPTS_MAX:
                raise bad_input(f"more than {SCRIPTS_MAX} scripts are given", "submit them in several commands")
            yield one, read_bounded(Path(one), SUBMITTED_SCRIPT_BYTES_MAX, "the script", "")


def _script_list(data: bytes) -> Sequence[str]:
    """Return the script names in the lines of standard input; empty if it is a script itself.

    Input that begins with `#!` is a script. Other input is a list if its first line names a file; otherwise it is
    rejected as a script without an interpreter line.
    """
    if data.startswith(b"#!") or len(data) > LIST_BYTES_MAX:
        return ()
    lines = [line.strip() for line in data.decode("utf-8", "surrogateescape").split("\n")]
    names = [line for line in lines if line]
    return names if names and "\0" not in names[0] and Path(names[0]).is_file() else ()


def _failure(error: ApiError, prepared: PreparedSubmit) -> Failure:
    """Return the failure of a submit, with its place translated to the user's files and options."""
    if error.place == IGNORED_PLACE and prepared.ignored:
        return join_failures([one.rejection() for one in prepared.ignored])
    code = exit_code_of(error)
    remedy = error.remedy
    if code is ExitCode.OUTCOME_UNKNOWN and error.command_id is not None:
        remedy = f"repeat the same submit with --command-id {error.command_id}: it takes effect at most once"
    concerned = error.code in REQUEST_CODES or error.place.startswith(REQUEST_PLACES)
    invalid = concerned and code in (ExitCode.BAD_INPUT, ExitCode.REFUSED, ExitCode.PERMISSION_DENIED)
    last = INVALID_REQUEST_LINE if invalid else ""
    if error.sentence in PERMISSION_SENTENCES:
        last = PERMISSION_LINE
    elif error.sentence == NODE_COUNT_LINE:
        last = NODE_COUNT_LINE
    place = locate(error.place, prepared.sources)
    failure = Failure(code, error.sentence, remedy, place=place, last=last, kind=error.code)
    failure.others = tuple(
        Failure(code, one.sentence, one.remedy, place=locate(one.place, prepared.sources)) for one in error.others
    )
    return failure
