"""Commands `forebay node buffers` and `forebay node receipt`: read a node's directory on the node itself."""

import os
import sys
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Final

import click
import msgspec

from cluster.agent.files import BUFFERS, PERSISTENT, FilesystemRefused, PathRefused
from cluster.agent.processes import AccountRefused, account_for, become
from cluster.agent.receipts import (
    ReceiptSource,
    StoredReceipt,
    algorithm_of,
    differences,
    digest_of_lines,
    list_receipts,
    node_sources,
    open_receipt,
    place_sources,
)
from cluster.agent.transfer import Algorithm, ReceiptDifference, raw_lines, read_lines
from cluster.cli.exits import ExitCode, Failure, bad_input
from cluster.cli.global_options import JSON_OPTION
from cluster.cli.session import Session, session
from cluster.cli.text import note, present, readable_size, table
from cluster.client import ApiError, Client
from cluster.config import AgentConfig, ConfigError
from cluster.schemas import operations as ops
from cluster.system import JobProcess, SystemClock
from replica.values import plain

STAGES: Final = ("stage_in", "stage_out")

UNKNOWN: Final = "UNKNOWN"
"""State of a buffer that the cluster does not know."""

PROGRESS_S: Final = 1.0
"""Seconds between two progress lines of a comparison."""


class NodeBuffer(msgspec.Struct, frozen=True, kw_only=True):
    """Buffer on a node, as `node buffers --json` prints it."""

    path: str
    job_id: int | None = None
    name: str | None = None
    """Name of a persistent buffer."""
    state: str
    """State of the job or persistent buffer; UNKNOWN if the cluster does not know it."""


class NodeBuffersAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `node buffers --json`."""

    node: str
    buffers: tuple[NodeBuffer, ...]


_NODE = click.option("--name", metavar="NODE", help="Look at this agent; needed where a machine has several.")


@click.command("buffers")
@_NODE
@JSON_OPTION
def agent_buffers(name: str | None, as_json: bool) -> None:
    """List the buffers on this node that its agent keeps.

    Run it on the node, as the agent's account. The STATE of a buffer that the cluster does not know, as after a backup
    was restored, is UNKNOWN: the agent keeps it until you remove its directory.
    """
    current = session()
    agent = _agent(current, name)
    try:
        jobs = sorted(int(path.name) for path in (agent.directory / BUFFERS).iterdir() if path.name.isdecimal())
        named = sorted(path.name for path in (agent.directory / PERSISTENT).iterdir() if path.name[0] != ".")
    except (PermissionError, FileNotFoundError) as error:
        raise _unreadable(agent.directory, error) from error

    async def ask(client: Client) -> dict[int | str, str]:
        found: dict[int | str, str] = {}
        for job in jobs:
            try:
                found[job] = (await client.call(ops.SHOW_JOB, id=job)).state
            except ApiError as error:
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
        if named:
            buffers = (await client.call(ops.LIST_BUFFERS)).buffers
            found |= {one.name: one.state for one in buffers if one.name is not None}
        return found

    answer = NodeBuffersAnswer(
        node=agent.name, buffers=tuple(_node_buffers(agent.directory, jobs, named, current.ask(ask)))
    )
    rows = ((one.name or one.job_id, one.state, one.path) for one in answer.buffers)
    present(answer, as_json, lambda: table(("BUFFER", "STATE", "PATH"), rows))
    unknown = sum(one.state == UNKNOWN for one in answer.buffers)
    if unknown and not as_json:
        note(f"the cluster does not know {unknown} of them: copy what you need, then remove their directories")


def _node_buffers(home: Path, jobs: list[int], named: list[str], states: dict[int | str, str]) -> Iterator[NodeBuffer]:
    for job in jobs:
        yield NodeBuffer(path=str(home / BUFFERS / str(job)), job_id=job, state=states.get(job, UNKNOWN))
    for name in named:
        yield NodeBuffer(path=str(home / PERSISTENT / name), name=name, state=states.get(name, UNKNOWN))


@click.command("receipt")
@_NODE
@click.option("--job", type=click.IntRange(min=1), required=True, metavar="N", help="Job whose files are shown.")
@click.option("--stage", type=click.Choice(STAGES), help="Only of this stage.")
@click.option("--attempt", type=click.IntRange(min=1), metavar="A", help="Attempt to show.  [default: the last one]")
@click.option("--digest", metavar="ALGORITHM:HEX", help="Expected digest of the lines.  [default: the ledger's]")
@click.option("--recheck", is_flag=True, help="Read every destination again, and compare.")
@click.option("--filesystem", type=Path, metavar="PATH", help="Look on the shared filesystem mounted here.")
@click.option("--as-user", metavar="USER", help="Read the destinations as this user, on file servers that reject root.")
@JSON_OPTION
def agent_receipt(
    name: str | None,
    job: int,
    stage: str | None,
    attempt: int | None,
    digest: str | None,
    recheck: bool,
    filesystem: Path | None,
    as_user: str | None,
    as_json: bool,
) -> None:
    """Print and verify the transfer receipt kept on this node.

    It says what the agent did to every file, and proves that the ledger's receipt is of that.

    Run it on the node, as the agent's account: the lines never leave it. With --filesystem it is what movers did for a
    buffer there, on any machine that mounts the shared filesystem, until the buffer is removed. Their digest is
    compared with --digest, or else with the receipt of the ledger if a replica can be asked; if neither is there, a
    remark says so. With --recheck each file that is not at its destination as it was put there is named. A digest or a
    file that differs, or a damaged line, ends with exit code 7; a receipt that is not on this node with 3; one that may
    not be read with 6.
    """
    current = session()
    home = filesystem or _agent(current, name).directory
    given = _algorithm(digest)
    if as_user is not None and not recheck:
        raise bad_input("--as-user says who reads the destinations, and nothing is to be read", "add --recheck")
    try:
        cluster = current.config().cluster.name
        sources = node_sources(home, job) if filesystem is None else place_sources(filesystem, cluster, job)
        which = _find_receipt(home, sources, job, stage, attempt)
        with open_receipt(which) as descriptor:
            wanted = digest or _ledger_digest(current, which)
            algorithm = given or _algorithm(wanted) or "xxh3-128"
            found = digest_of_lines(descriptor, algorithm)
            if wanted and found != wanted:
                raise Failure(
                    ExitCode.VERIFICATION_FAILED,
                    f"the lines of {which.stage} attempt {which.attempt} of job {job} come to {found}, not to {wanted}",
                    "they are damaged, or not what was reported: trust the receipt of the ledger, not these lines",
                )
            if not wanted:
                note(f"The lines come to {found}, which was compared with nothing: give --digest.")
            differing = _differences(which, descriptor, algorithm, as_user) if recheck else []
            if as_json:
                _show_json(which, descriptor, found, bool(wanted), differing, recheck)
            elif recheck:
                for one in differing:
                    click.echo(f"{plain(one.path)} {plain(one.why)}")
            else:
                _show(descriptor)
    except FilesystemRefused as error:
        raise bad_input(
            str(error), "name the directory that the place is mounted at: forebay pool filesystem list"
        ) from error
    except (PermissionError, FileNotFoundError) as error:
        raise _unreadable(home, error) from error
    except ValueError as error:
        raise Failure(ExitCode.VERIFICATION_FAILED, str(error), "the file on this node cannot be believed") from error
    if differing:
        raise Failure(
            ExitCode.VERIFICATION_FAILED,
            f"{len(differing)} files are not at their destinations as they were put there",
            "copy them again from where they came from, and look at what changed them",
        )


def _agent(current: Session, name: str | None) -> AgentConfig:
    config = current.config()
    if name is not None:
        return config.agent(name)
    here = [agent for agent in config.agents if agent.directory.is_dir()]
    if len(here) != 1:
        raise bad_input(
            f"{len(here)} agents of the configuration have their directory on this node",
            f"say which one with --name: {', '.join(one.name for one in here or config.agents)}",
        )
    return here[0]


def _algorithm(digest: str | None) -> Algorithm | None:
    try:
        return algorithm_of(digest) if digest else None
    except ValueError as error:
        raise bad_input(str(error), "forebay transfer receipt JOB shows it") from error


def _find_receipt(
    home: Path, sources: list[ReceiptSource], job: int, stage: str | None, attempt: int | None
) -> StoredReceipt:
    found = [
        one for one in list_receipts(sources, job) if stage in (None, one.stage) and attempt in (None, one.attempt)
    ]
    if not found:
        what = f" of {stage}" if stage else ""
        number = f" of attempt {attempt}" if attempt else ""
        raise Failure(
            ExitCode.NOT_FOUND,
            f"in {home} no receipt of job {job}{what}{number} is kept",
            f"run it on the node that forebay transfer receipt {job} names, or give --filesystem PATH if the buffer "
            "was in a shared filesystem. The oldest receipts are removed, those in a shared filesystem with the buffer",
        )
    return found[-1]


def _ledger_digest(current: Session, which: StoredReceipt) -> str:
    """Return the digest in the ledger; print a note and return an empty string if no replica answers."""
    try:
        answer = current.read(ops.LIST_RECEIPTS, id=which.job, stage=which.stage, attempt=which.attempt)
    except (ConfigError, Failure) as failure:
        note(f"The ledger's receipt could not be asked for: {failure.sentence}.")
        return ""
    return answer.receipts[-1].digest if answer.receipts else ""


def _differences(
    which: StoredReceipt, descriptor: int, algorithm: Algorithm, user: str | None
) -> list[ReceiptDifference]:
    try:
        if user is not None:
            become(account_for("switch", user), JobProcess())
        found = list(differences(which, descriptor, algorithm, _progress()))
    except AccountRefused as error:
        raise bad_input(str(error), "name an ordinary user of this node") from error
    except PathRefused as error:
        raise Failure(ExitCode.NOT_FOUND, str(error), "run this where the destination is mounted") from error
    if sys.stderr.isatty():
        click.echo(err=True)
    return found


def _progress() -> Callable[[int, int], None]:
    """Return a callback that counts files and bytes and shows the progress on a terminal."""
    clock, files, size_bytes = SystemClock(), 0, 0
    shown_s = clock.monotonic_s()

    def told(more_files: int, more_bytes: int) -> None:
        nonlocal files, size_bytes, shown_s
        files, size_bytes, now_s = files + more_files, size_bytes + more_bytes, clock.monotonic_s()
        if now_s - shown_s >= PROGRESS_S and sys.stderr.isatty():
            shown_s = now_s
            click.echo(f"\r{files} files, {readable_size(size_bytes)} compared", err=True, nl=False)

    return told


def _show(descriptor: int) -> None:
    for line in read_lines(descriptor):
        path = plain(line.path) or "."
        if line.kind == "left out":
            click.echo(f"left out   {path} ({plain(line.reason)})")
            continue
        words = [f"{line.kind:<10}", line.mode]
        if line.kind == "file":
            words += [str(line.size), line.digest or "-"]
        if line.flags:
            words.append(f"[{','.join(line.flags)}]")
        click.echo(" ".join([*words, path]))


def _show_json(
    which: StoredReceipt,
    descriptor: int,
    digest: str,
    proven: bool,
    differing: list[ReceiptDifference],
    rechecked: bool,
) -> None:
    """Print one JSON object line by line, because it may have millions of lines."""
    head = msgspec.json.encode(
        {
            "job_id": which.job,
            "stage": which.stage,
            "attempt": which.attempt,
            "digest": digest,
            "proven": proven,
            "rechecked": rechecked,
            "differences": [{"path": plain(one.path), "why": plain(one.why)} for one in differing],
        }
    )
    click.echo(head.decode()[:-1] + ',"lines":[', nl=False)
    for number, (_, line) in enumerate(raw_lines(descriptor)):
        click.echo(("," if number else "") + "\n" + line.decode().rstrip("\n"), nl=False)
    click.echo("\n]}")


def _unreadable(home: Path, error: OSError) -> Failure:
    if isinstance(error, FileNotFoundError):
        return Failure(ExitCode.NOT_FOUND, f"{error.filename or home} is not there", "run this on the agent's node")
    remedy = "run this as the agent's account" if os.geteuid() else "look at the permissions of the directory"
    return Failure(ExitCode.PERMISSION_DENIED, f"{error.filename or home} may not be read", remedy)
