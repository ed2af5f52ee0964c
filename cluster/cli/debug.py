"""Command `forebay support debug`: collect diagnostics of the cluster and this machine in one file without secrets.

It never reads keys, or scripts and environments of jobs, and includes only the jobs named with --job.
"""

from __future__ import annotations

import asyncio
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import click
import msgspec

from forebay.cluster.cli.check import find_local_processes, run_checks
from forebay.cluster.cli.exits import Failure, bad_input
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.session import session
from forebay.cluster.cli.text import json_text, note, show_json
from forebay.cluster.client import ApiError
from forebay.cluster.config import ConfigError
from forebay.cluster.config.toml import redact
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system import format_instant, new_private_file
from forebay.replica.values import MESSAGE_CHARACTERS_MAX, MICROSECONDS_PER_SECOND, plain

if TYPE_CHECKING:
    from forebay.cluster.client import Client
    from forebay.cluster.config import Config
    from forebay.cluster.schemas import ApiOperation

ANSWER_S: Final = 5.0
"""Time limit of each request, seconds: a cluster that needs diagnostics may not answer at all."""

PART_BYTES_MAX: Final = 4 << 20
"""Largest part, bytes; of a longer file only the end is kept."""

LOGS_MAX: Final = 64
"""Largest number of --log options."""

FILES_MAX: Final = 5_000
"""Maximum number of files listed for one directory."""

JOURNAL_LINES: Final = 20_000
"""Maximum number of lines read from the machine's journal."""

JOURNAL_S: Final = 20.0
"""Time limit for reading the machine's journal, seconds."""

UNITS: Final = "forebay-*"
"""Units of the packages, as `journalctl` matches them."""

KERNEL: Final = ("loadavg", "meminfo", "uptime", "pressure/cpu", "pressure/io", "pressure/memory", "self/limits")
"""Files of /proc that show the machine's load and limits."""

REDACTED: Final = "(redacted)"
"""Replacement for values of [provider] environment."""

SECRET_CHARACTERS_MIN: Final = 6
"""Shortest value that is removed from every part, characters: shorter values occur within ordinary words."""

NEVER: Final = b"PRIVATE KEY-----"
"""Mark of a private key: a part that contains it is left out."""

_JOB: Final = re.compile(r"[0-9]+(_[0-9]+)?", re.ASCII)
_STAMP: Final = re.compile(r"[-:]")

_OF_THE_CLUSTER: Final[dict[str, ApiOperation[None, Any]]] = {
    "overview": ops.SHOW_OVERVIEW,
    "members": ops.LIST_MEMBERS,
    "nodes": ops.LIST_NODES,
    "pools": ops.LIST_POOLS,
    "configuration": ops.SHOW_CONFIGURATION,
    "clock": ops.SHOW_CLOCK,
    "feature-level": ops.SHOW_FEATURE_LEVEL,
    "leaders": ops.LIST_LEADERS,
    "drills": ops.LIST_DRILLS,
}
_OF_A_REPLICA: Final[dict[str, ApiOperation[None, Any]]] = {
    "status": ops.SHOW_STATUS,
    "digests": ops.LIST_DIGESTS,
    "snapshots": ops.LIST_SNAPSHOTS,
    "readiness": ops.SHOW_READINESS,
    "metrics": ops.SHOW_METRICS,
}
_OF_A_JOB: Final[dict[str, ApiOperation[None, Any]]] = {
    "job": ops.SHOW_JOB,
    "history": ops.SHOW_JOB_HISTORY,
    "why": ops.EXPLAIN_JOB,
    "transfers": ops.SHOW_JOB_TRANSFERS,
}


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """File of the bundle, or the reason it is missing."""

    name: str
    size: int | None
    """Bytes; null if it is missing."""
    missing: str = ""


class DebugAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `debug --json`, and content of `contents.json` in the bundle."""

    file: str
    parts: tuple[Part, ...]


class Bundle:
    """Collected parts by name."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        """Remove `secrets` from every part, except short ones, which would match ordinary words."""
        self._secrets = [value.encode() for value in secrets if len(value) >= SECRET_CHARACTERS_MIN]
        self.found: dict[str, bytes] = {}
        self.missing: dict[str, str] = {}

    def add(self, name: str, content: bytes) -> None:
        """Add the end of a part; leave out one that contains a private key."""
        if NEVER in content:
            self.missing[name] = "it contains a private key"
        else:
            for secret in self._secrets:
                content = content.replace(secret, REDACTED.encode())
            self.found[name] = content[-PART_BYTES_MAX:]

    def take(self, name: str, read: Callable[[], bytes]) -> None:
        """Add the result of `read`, or the reason that it failed."""
        try:
            self.add(name, read())
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
            self.missing[name] = said[:MESSAGE_CHARACTERS_MAX] or f"exit code {error.returncode}"
        except (OSError, subprocess.SubprocessError) as error:
            self.missing[name] = str(error)

    def parts(self) -> tuple[Part, ...]:
        """Return present and missing parts, sorted by name."""
        rows = [Part(name=name, size=len(content)) for name, content in self.found.items()]
        rows += [Part(name=name, size=None, missing=plain(why)) for name, why in self.missing.items()]
        return tuple(sorted(rows, key=lambda row: row.name))


@click.command("debug")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write to this new file.  [default: forebay-debug-CLUSTER-TIME.tar.gz]",
)
@click.option(
    "--job", "jobs", multiple=True, metavar="JOB", help="Include the history of this job, with file names; repeatable."
)
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"Include the last {PART_BYTES_MAX >> 20} MiB of this log; repeatable.",
)
@JSON_OPTION
def debug(output: Path | None, jobs: tuple[str, ...], logs: tuple[Path, ...], as_json: bool) -> None:
    """Write diagnostics without secrets to one file.

    Run it on each machine with a problem, as the account that Forebay runs as. It works even if the cluster is down;
    the file then lists the missing parts. The file never contains keys, scripts, job environments or values of
    [provider] environment; it does contain names of nodes, pools, users in the configuration, and files of --job.
    """
    if len(logs) > LOGS_MAX:
        raise bad_input(f"{len(logs)} logs are given", f"use at most {LOGS_MAX}", place="--log")
    for job in jobs:
        if _JOB.fullmatch(job) is None:
            raise bad_input(f"{job!r} is not a job", "give an ID such as 42, or 42_7 for an array task", place="--job")
    current = session()
    config = current.config()
    now = current.clock.now()
    stamp = _STAMP.sub("", str(format_instant(now)))[:15]
    output = output or Path(f"forebay-debug-{config.cluster.name}-{stamp}.tar.gz")
    try:
        # Create the file before any request, so that an unwritable path fails at once.
        with new_private_file(output) as file:
            bundle = Bundle(value for _, value in config.provider.environment)
            note("collecting from the cluster and its replicas")
            try:
                current.ask(lambda client: _add_answers(bundle, client, config, jobs), on_a_loop=True)
            except Failure as failure:
                bundle.missing["cluster"] = failure.sentence
            except ConfigError as error:
                # A replica's machine may have no certificate of a user.
                bundle.missing["cluster"] = error.sentence
            note("collecting from this machine")
            _add_machine(bundle, config)
            bundle.add("machine/check.json", _json(run_checks(config, find_local_processes(config), current.clock)))
            for number, log in enumerate(logs, start=1):
                bundle.take(f"logs/{number}-{log.name}", partial(_end_of, log))
            answer = DebugAnswer(file=str(output), parts=bundle.parts())
            bundle.add("contents.json", _json(answer))
            _write(file, bundle, now // MICROSECONDS_PER_SECOND)
    except OSError as error:
        raise bad_input(f"{output} cannot be written: {error.strerror}", "name another file with --output") from error
    if as_json:
        show_json(answer)
        return
    gone = [part for part in answer.parts if part.size is None]
    for part in gone:
        note(f"missing: {part.name}: {part.missing}")
    click.echo(f"Wrote {plain(str(output))}: {len(answer.parts) - len(gone)} parts. Review it before you send it.")


async def _add_answers(bundle: Bundle, client: Client, config: Config, jobs: tuple[str, ...]) -> None:
    """Send all requests concurrently and add the answers."""

    async def one(name: str, operation: ApiOperation[None, Any], **more: Any) -> None:
        name += ".txt" if operation.content_type == ops.TEXT else ".json"
        try:
            found = await client.call(operation, deadline_s=ANSWER_S, **more)
        except ApiError as error:
            bundle.missing[name] = error.sentence
        else:
            bundle.add(name, found.encode() if isinstance(found, str) else _json(found))

    asks = [one(f"cluster/{name}", operation) for name, operation in _OF_THE_CLUSTER.items()]
    for row in config.replicas:
        asks += [
            one(f"replicas/{row.name}/{name}", operation, replica=row.api, attempt_s=ANSWER_S)
            for name, operation in _OF_A_REPLICA.items()
        ]
    for job in jobs:
        asks += [one(f"jobs/{job}/{name}", operation, id=job) for name, operation in _OF_A_JOB.items()]
    await asyncio.gather(*asks)


def _add_machine(bundle: Bundle, config: Config) -> None:
    about = {
        "python": sys.version,
        "system": platform.platform(),
        "host": platform.node(),
        "account": os.geteuid(),
        "processors": os.cpu_count(),
        "packages": _versions(),
    }
    bundle.add("machine/about.json", _json(about))
    bundle.take("forebay.toml", partial(_redact, config.file))
    for name in KERNEL:
        bundle.take(f"machine/{name.replace('/', '-')}.txt", Path("/proc", name).read_bytes)
    directories = {config.tls.certificates, config.storage.directory, *(one.directory for one in config.agents)}
    rows = [row for directory in sorted(directories) for row in _list_directory(directory)]
    bundle.add("machine/files.json", _json(rows))
    program = shutil.which("journalctl")
    if program is None:
        bundle.missing["logs/journal.txt"] = "journalctl is not installed"
        return
    command = [program, "--no-pager", "--output=short-iso", f"--unit={UNITS}", f"--lines={JOURNAL_LINES}"]

    def journal() -> bytes:
        done = subprocess.run(command, capture_output=True, timeout=JOURNAL_S, check=True, stdin=subprocess.DEVNULL)
        return done.stdout

    bundle.take("logs/journal.txt", journal)


def _redact(file: Path) -> bytes:
    """Return a configuration without the values of [provider] environment, which may be passwords.

    Raises:
        OSError: if the file cannot be read or parsed.
    """
    try:
        return redact(file.read_text(encoding="utf-8"), ("provider", "environment"), REDACTED).encode()
    except ValueError as error:
        raise OSError(f"{error}: attach the file by hand, without secrets") from error


def _list_directory(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the files in two levels of a directory, except in buffers, whose files belong to users."""
    try:
        usage = shutil.disk_usage(directory)
    except OSError as error:
        yield {"path": str(directory), "missing": str(error)}
        return
    yield {"path": str(directory), "disk": usage.total, "free": usage.free}
    count = 0
    for depth, pattern in enumerate(("*", "*/*")):
        for path in sorted(directory.glob(pattern)):
            if depth and path.parent.name == "buffers":
                continue
            count += 1
            if count > FILES_MAX:
                yield {"path": str(directory), "missing": f"more than {FILES_MAX} files"}
                return
            try:
                found = path.lstat()
            except OSError as error:
                yield {"path": str(path), "missing": str(error)}
                continue
            yield {"path": str(path), "size": found.st_size, "mode": f"{found.st_mode:o}", "owner": found.st_uid}


def _versions() -> dict[str, str]:
    import importlib.metadata

    return {one.name: one.version for one in importlib.metadata.distributions()}


def _end_of(file: Path) -> bytes:
    with file.open("rb") as log:
        log.seek(max(0, log.seek(0, io.SEEK_END) - PART_BYTES_MAX))
        return log.read(PART_BYTES_MAX)


def _json(value: Any) -> bytes:
    return f"{json_text(value)}\n".encode()


def _write(file: IO[bytes], bundle: Bundle, at_s: int) -> None:
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in sorted(bundle.found.items()):
            member = tarfile.TarInfo(f"forebay-debug/{name}")
            member.size, member.mtime, member.mode = len(content), at_s, 0o600
            archive.addfile(member, io.BytesIO(content))
