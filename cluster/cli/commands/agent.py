"""Commands `forebay node buffers` and `forebay node receipt`: read a node's directory on the node itself."""

import os
import sys
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Final

import click
import msgspec

from forebay.cluster.agent.files import BUFFERS, PERSISTENT, FilesystemRefused, PathRefused
from forebay.cluster.agent.processes import AccountRefused, account_for, become
from forebay.cluster.agent.receipts import (
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
from forebay.cluster.agent.transfer import Algorithm, ReceiptDifference, raw_lines, read_lines
from forebay.cluster.cli.exits import ExitCode, Failure, bad_input
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.session import Session, session
from forebay.cluster.cli.text import note, present, table
from forebay.cluster.client import ApiError, Client
from forebay.cluster.config import AgentConfig, ConfigError
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system import JobProcess, SystemClock, readable_size
from forebay.replica.values import plain

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


_NODE = click.option("--name", metavar="NODE", help="Use this node's agent; needed if a machine has several.")


@click.command("buffers")
@_NODE
@JSON_OPTION
def agent_buffers(name: str | None, as_json: bool) -> None:
    """List the buffers on this node.

    Run it on the node, as the agent's account. A buffer that the cluster does not know, for example after a backup was
    restored, has the STATE UNKNOWN; the agent keeps it until you remove its directory.
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
        note(f"{unknown} of these buffers are unknown to the cluster: save their data, then remove their directories")


def _node_buffers(home: Path, jobs: list[int], named: list[str], states: dict[int | str, str]) -> Iterator[NodeBuffer]:
    for job in jobs:
        yield NodeBuffer(path=str(home / BUFFERS / str(job)), job_id=job, state=states.get(job, UNKNOWN))
    for name in named:
        yield NodeBuffer(path=str(home / PERSISTENT / name), name=name, state=states.get(name, UNKNOWN))


@click.command("receipt")
@_NODE
@click.option("--job", type=click.IntRange(min=1), required=True, metavar="N", help="Show the files of this job.")
@click.option("--stage", type=click.Choice(STAGES), help="Only this stage.")
@click.option("--attempt", type=click.IntRange(min=1), metavar="A", help="Show this attempt.  [default: the last one]")
@click.option("--digest", metavar="ALGORITHM:HEX", help="Compare with this digest.  [default: the ledger's]")
@click.option("--recheck", is_flag=True, help="Read every destination again and compare.")
@click.option(
    "--filesystem",
    type=Path,
    metavar="PATH",
    help="Read the transfer's receipt on the shared filesystem mounted at PATH.",
)
@click.option("--as-user", metavar="USER", help="Read the destinations as this user, if the file server rejects root.")
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

    The receipt has a line for every file that the agent moved. Its digest is compared with --digest or with the
    ledger's receipt; without either, a note says so.

    Run it on the node, as the agent's account. With --filesystem it reads the receipt of a buffer on a shared
    filesystem, from any machine that mounts it, as long as the buffer exists. With --recheck it names each file that
    differs at its destination.

    Exit codes: 7 if a digest, file or line differs; 3 if the receipt is not on this node; 6 if it is not readable.
    """
    current = session()
    home = filesystem or _agent(current, name).directory
    given = _algorithm(digest)
    if as_user is not None and not recheck:
        raise bad_input("--as-user has no effect without --recheck", "add --recheck")
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
                    f"the receipt of job {job}, {which.stage} attempt {which.attempt}, has the digest {found}, "
                    f"not {wanted}",
                    "the file is damaged or was changed: trust the receipt in the ledger instead",
                )
            if not wanted:
                note(f"The digest {found} was not compared: no replica answered; use --digest.")
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
            str(error), "give the mount point of the shared filesystem: forebay pool filesystem list"
        ) from error
    except (PermissionError, FileNotFoundError) as error:
        raise _unreadable(home, error) from error
    except ValueError as error:
        raise Failure(ExitCode.VERIFICATION_FAILED, str(error), "the file on this node is damaged") from error
    if differing:
        raise Failure(
            ExitCode.VERIFICATION_FAILED,
            f"{len(differing)} files differ at their destinations",
            "find out who changed them, and copy them again from their source",
        )


def _agent(current: Session, name: str | None) -> AgentConfig:
    config = current.config()
    if name is not None:
        return config.agent(name)
    here = [agent for agent in config.agents if agent.directory.is_dir()]
    if len(here) != 1:
        raise bad_input(
            f"{len(here)} agents of the configuration have a directory on this machine",
            f"choose one with --name: {', '.join(one.name for one in here or config.agents)}",
            place="--name",
        )
    return here[0]


def _algorithm(digest: str | None) -> Algorithm | None:
    try:
        return algorithm_of(digest) if digest else None
    except ValueError as error:
        raise bad_input(str(error), "`forebay transfer receipt JOB` shows the digest") from error


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
            f"{home} has no receipt of job {job}{what}{number}",
            f"run this on the node that `forebay transfer receipt {job}` names, or add --filesystem PATH if the buffer "
            "was on a shared filesystem; agents remove the oldest receipts, and movers the receipts of removed buffers",
        )
    return found[-1]


def _ledger_digest(current: Session, which: StoredReceipt) -> str:
    """Return the digest in the ledger; print a note and return an empty string if no replica answers."""
    try:
        answer = current.read(ops.LIST_RECEIPTS, id=which.job, stage=which.stage, attempt=which.attempt)
    except (ConfigError, Failure) as failure:
        note(f"The ledger's receipt could not be read: {failure.sentence}.")
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
        raise bad_input(str(error), "give an ordinary user of this node", place="--as-user") from error
    except PathRefused as error:
        raise Failure(ExitCode.NOT_FOUND, str(error), "run this where the destination is mounted") from error
    if sys.stderr.isatty():
        click.echo(err=True)
    return found


def _progress() -> Callable[[int, int], None]:
    """Return a callback that counts files and bytes and shows the progress on a terminal."""
    clock, files, size_bytes = SystemClock(), 0, 0
    shown_s = clock.monotonic_s()

    def count(more_files: int, more_bytes: int) -> None:
        nonlocal files, size_bytes, shown_s
        files, size_bytes, now_s = files + more_files, size_bytes + more_bytes, clock.monotonic_s()
        if now_s - shown_s >= PROGRESS_S and sys.stderr.isatty():
            shown_s = now_s
            click.echo(f"\r{files} files, {readable_size(size_bytes)} compared", err=True, nl=False)

    return count


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
        return Failure(ExitCode.NOT_FOUND, f"{error.filename or home} does not exist", "run this on the agent's node")
    remedy = "run this as the agent's account" if os.geteuid() else "correct the permissions of the directory"
    return Failure(ExitCode.PERMISSION_DENIED, f"{error.filename or home} is not readable", remedy)
