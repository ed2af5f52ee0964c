"""`forebay job suspend|resume|requeue` and `forebay buffer clear`: what is done to runs and to stuck buffers."""

import click

from cluster.cli.exits import bad_input
from cluster.cli.jobs import JOB_ID, each
from cluster.cli.session import session
from cluster.schemas import ContinueCommand, RequeueCommand, SuspendCommand


@click.command("suspend")
@click.argument("job_ids", metavar="JOB…", type=JOB_ID, nargs=-1, required=True)
def suspend(job_ids: tuple[str, ...]) -> None:
    """Stop running jobs where they are; their time limits stand still."""
    each(
        job_ids,
        lambda client, job_id: client.suspend(job_id),
        lambda command_id, job_id: SuspendCommand(command_id=command_id, job_id=job_id),
    )


@click.command("resume")
@click.argument("job_ids", metavar="JOB…", type=JOB_ID, nargs=-1, required=True)
def resume(job_ids: tuple[str, ...]) -> None:
    """Let suspended jobs go on where they were stopped."""
    each(
        job_ids,
        lambda client, job_id: client.continue_job(job_id),
        lambda command_id, job_id: ContinueCommand(command_id=command_id, job_id=job_id),
    )


@click.command("requeue")
@click.argument("job_ids", metavar="JOB…", type=JOB_ID, nargs=-1, required=True)
def requeue(job_ids: tuple[str, ...]) -> None:
    """End the present run of jobs, or take back their buffers; they wait and stage in again."""
    each(
        job_ids,
        lambda client, job_id: client.requeue(job_id),
        lambda command_id, job_id: RequeueCommand(command_id=command_id, job_id=job_id),
    )


@click.command("clear")
@click.argument("job_ids", metavar="[JOB…]", type=JOB_ID, nargs=-1)
@click.option("--name", metavar="NAME", help="Clear the persistent buffer of this name.")
@click.option("--discard", is_flag=True, help="Also where the only copy of somebody's data is LOST by it.")
def clear(job_ids: tuple[str, ...], name: str | None, discard: bool) -> None:
    """Take buffers that cannot be removed out of the list, and free their space (operators).

    Nothing is removed by it: see to what is left on the storage by hand.
    """
    if bool(job_ids) == (name is not None):
        raise bad_input("it is not said which buffer", "name jobs, or a persistent buffer with --name")
    if name is None:
        each(job_ids, lambda client, job_id: client.clear_buffer(job_id, discard=discard))
        return
    wanted = name
    answer = session().ask(lambda client: client.clear_persistent(wanted, discard=discard))
    click.echo(f"the persistent buffer {answer.name} is cleared")


JOB_COMMANDS = (suspend, resume, requeue)
BUFFER_COMMANDS = (clear,)
