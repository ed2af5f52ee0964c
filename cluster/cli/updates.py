"""`forebay job update`: what `scontrol update` changes of a pending job."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from cluster.cli.exits import bad_input
from cluster.cli.jobs import JOB_ID, each
from cluster.cli.moments import parse_begin, parse_duration
from cluster.cli.session import session
from cluster.cli.submission import (
    is_any,
    listed,
    parse_count,
    parse_dependencies,
    parse_nice,
    read_bbf,
)
from cluster.schemas import UpdateCommand, UpdateRequest
from replica.values import PRIORITY_MAX


@click.command("update")
@click.argument("job_ids", metavar="JOB…", type=JOB_ID, nargs=-1, required=True)
@click.option("-J", "--name", "--job-name", "name", metavar="NAME", help="Name of the job.")
@click.option("-t", "--time-limit", "--time", "time", metavar="TIME", help="Only an operator raises it.")
@click.option("--priority", metavar="N", help="Only an operator raises it.")
@click.option("--nice", metavar="N", help="Only an operator makes it negative.")
@click.option("--begin", metavar="TIME", help="Not before, or now.")
@click.option("--deadline", metavar="TIME", help="Dropped if it cannot be over by then; an empty one for none.")
@click.option("-d", "--dependency", metavar="KIND:JOB,…", help="What it waits for; an empty one for nothing.")
@click.option("-A", "--account", metavar="NAME", help="Account that it counts for; an empty one for none.")
@click.option("-q", "--qos", metavar="NAME", help="Quality of service; an empty one for none.")
@click.option("-L", "--licenses", metavar="NAME[:N],…", help="Licences that it needs; an empty one for none.")
@click.option("--reservation", metavar="NAME", help="Reservation that it may use; an empty one for none.")
@click.option("-p", "--partition", metavar="NAME", help="Where it runs; an empty one for the default.")
@click.option("--requeue/--no-requeue", default=None, help="Whether it may be run again after a failure of its node.")
@click.option("--mail-type", metavar="TYPE,…", help="When to send mail.")
@click.option("--mail-user", metavar="ADDRESS", help="To whom; an empty one for the user.")
@click.option("--comment", metavar="TEXT", help="Kept with the job.")
@click.option("--bb", metavar="TEXT", help="Burst-buffer request instead of all that it asked for.")
@click.option("--bbf", metavar="FILE", help="The same in a file.")
def update(job_ids: tuple[str, ...], **given: Any) -> None:
    """Change jobs that wait: what is named becomes as it is here. Of an array or its tasks, those that wait.

    The burst-buffer request can be changed until the job has its space.
    """
    fields = _fields(given)
    if not fields:
        raise bad_input("it is not said what to change", "name an option, for example --time-limit 2:00:00")
    each(
        job_ids,
        lambda client, job_id: client.update_job(job_id, UpdateRequest(command_id=client.new_command_id(), **fields)),
        lambda command_id, job_id: UpdateCommand(command_id=command_id, job_id=job_id, **fields),
    )


def _fields(given: dict[str, Any]) -> dict[str, Any]:
    now = session().clock.now()
    fields: dict[str, Any] = {
        field: given[field]
        for field in ("name", "account", "qos", "reservation", "partition", "requeue", "mail_user", "comment", "bb")
        if given[field] is not None
    }

    def convert(option: str, field: str, read: Callable[[str], Any], empty: Any = None) -> None:
        text = given[option]
        if text is None:
            return
        try:
            fields[field] = empty if text == "" and empty is not None else read(text)
        except ValueError as error:
            sentence, _, remedy = str(error).partition("; ")
            raise bad_input(sentence, remedy, place=f"--{option.replace('_', '-')}") from None

    convert("time", "time_limit_s", parse_duration)
    convert("priority", "priority", lambda text: parse_count(text, "the priority", 0, PRIORITY_MAX))
    convert("nice", "nice", parse_nice)
    convert("begin", "begin_at", lambda text: parse_begin(text, now) or "", "")
    convert("deadline", "deadline", lambda text: parse_begin(text, now) or "", "")
    convert("dependency", "dependencies", parse_dependencies, ())
    convert("licenses", "licenses", listed, ())
    convert("mail_type", "mail_types", listed, ())
    if given["dependency"] is not None:
        fields["dependency_any"] = is_any(given["dependency"])
    if given["bbf"] is not None:
        fields["bbf"] = read_bbf(Path(given["bbf"]), "--bbf")
    return fields
