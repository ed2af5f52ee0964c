"""`forebay submit`: a batch script becomes a job."""

import os
import sys
from pathlib import Path
from typing import Final

import click

from cluster.cli.commands.options import JSON_OPTION, job_options
from cluster.cli.exits import INVALID_REQUEST_LINE, NODE_COUNT_LINE, PERMISSION_LINE, ExitCode, Failure, bad_input
from cluster.cli.session import exit_code_of, session
from cluster.cli.submission import Prepared, located, prepare, read_bounded
from cluster.cli.text import note, present
from cluster.client import ApiError, Client
from cluster.schemas import JobView, SubmitRequest, instant_of
from cluster.schemas import operations as ops
from replica.values import SCRIPT_BYTES_MAX

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
"""Codes of refusals that concern the burst-buffer request wherever they are: Slurm's line is printed last for them."""

PERMISSION_SENTENCES: Final = frozenset(
    {
        PERMISSION_LINE,
        "User root can not allocate burst buffers",
        "User not found in AllowUsers",
        "User found in DenyUsers",
    }
)
"""Refusals that concern who asks for a burst buffer, not what is asked."""

REQUEST_PLACES: Final = ("script", "--bb")
"""How places begin that lie in the request (`--bbf` too): any refusal there concerns it."""


@click.command("submit", no_args_is_help=True)
@click.argument("script", metavar="SCRIPT")
@job_options()
@click.option("--export", metavar="NAME=VALUE", multiple=True, help="A variable for the job; NAME alone copies it.")
@click.option("--uid", "owner", metavar="USER", help="On behalf of this user (operators only).")
@click.option("--command-id", metavar="ID", help="Repeat a submit whose outcome was unknown: it happens once.")
@JSON_OPTION
def submit(
    script: str, owner: str | None, command_id: str | None, as_json: bool, export: tuple[str, ...],
    **given: str | bool | None,
) -> None:  # fmt: skip
    """Submit a batch script, or - for standard input.

    #SBATCH lines at the top of the script are read for the same options by Slurm's names (--job-name, --time,
    --cpus-per-task, …), and --ntasks=1; an unknown one is refused. The command line wins. #DW and #BB lines (#BB_LUA
    where the site has a Lua script) are the burst-buffer request. Prints `Submitted batch job ID`. A refused request
    prints its place and cause, and last `Burst Buffer request invalid`.
    """
    if command_id is not None:
        _check_command_id(command_id)
    current = session()
    prepared = prepare(
        _read_script(script),
        script,
        given,
        export,
        directory=Path.cwd(),
        environment=os.environ,
        now=current.clock.now(),
    )
    for warning in prepared.warnings:
        note(f"forebay: warning: {warning}")

    async def send(client: Client) -> JobView:
        request = SubmitRequest(command_id=command_id or client.new_command_id(), user=owner, **prepared.fields)
        try:
            return await client.call(ops.SUBMIT_JOB, request)
        except ApiError as error:
            raise _failure(error, prepared) from error

    job = current.ask(send)
    for warning in job.warnings:
        note(f"forebay: warning: {warning}")
    present(job, as_json, lambda: f"Submitted batch job {job.job_id}")


def _check_command_id(command_id: str) -> None:
    try:
        instant_of(command_id)
    except ValueError as error:
        sentence, _, remedy = str(error).partition(": ")
        raise bad_input(sentence, remedy or "use the id that the error message named", place="--command-id") from None


def _read_script(script: str) -> bytes:
    if script != "-":
        return read_bounded(Path(script), SCRIPT_BYTES_MAX, "the script", "")
    return sys.stdin.buffer.read(SCRIPT_BYTES_MAX + 1)


def _failure(error: ApiError, prepared: Prepared) -> Failure:
    """Return the failure of a submit, its place in the user's own terms."""
    code = exit_code_of(error)
    remedy = error.remedy
    if code is ExitCode.OUTCOME_UNKNOWN and error.command_id is not None:
        remedy = (
            f"repeat the same submit with --command-id {error.command_id}: if it did happen, it happens no second time"
        )
    concerned = error.code in REQUEST_CODES or error.place.startswith(REQUEST_PLACES)
    invalid = concerned and code in (ExitCode.BAD_INPUT, ExitCode.REFUSED, ExitCode.PERMISSION_DENIED)
    last = INVALID_REQUEST_LINE if invalid else ""
    if error.sentence in PERMISSION_SENTENCES:
        last = PERMISSION_LINE
    elif error.sentence == NODE_COUNT_LINE:
        last = NODE_COUNT_LINE
    place = located(error.place, prepared.sources)
    return Failure(code, error.sentence, remedy, place=place, last=last)
