"""Command `forebay cluster check`: checks of a machine before its replica or agent is started."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import shutil
import socket
import ssl
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from forebay.cluster.cli.exits import ExitCode, Failure, bad_input
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.session import session
from forebay.cluster.cli.text import format_time, show, show_json, table
from forebay.cluster.config import ConfigError
from forebay.cluster.security import (
    IdentityError,
    Role,
    TlsError,
    certificate_of,
    client_context,
    identify,
    server_context,
)
from forebay.cluster.system import Clock, format_instant
from forebay.replica.values import MICROSECONDS_PER_SECOND, plain

if TYPE_CHECKING:
    from forebay.cluster.config import AgentConfig, Config, ReplicaConfig, TracesConfig

EXPIRY_NOTICE_S: Final = 30 * 86_400
"""Remaining validity of a certificate below which the check prints a note, seconds."""

ASK_S: Final = 2.0
"""Time limit for connecting to another replica's address, seconds."""

HANDSHAKE_S: Final = 20.0
"""Time limit for a process at a replica's address to show its certificate, seconds: a busy machine is slow."""

FREE_BYTES_LEAST: Final = 64 << 20
"""Disk space a replica needs at its start, bytes: its sync log, and the first entries and snapshots."""

TIMEX_BYTES: Final = 512
"""Size of the buffer for a `struct timex`, which has 208 bytes on x86-64. Its first field, 0, requests no change."""

TRACES_PACKAGE: Final = "opentelemetry-exporter-otlp-proto-http"
"""Package of `forebay[otel]` that sends traces."""

TIME_ERROR: Final = 5
"""Result of adjtimex(2) if no time service synchronises the clock."""


class CheckResult(StrEnum):
    """Result of one check."""

    OK = "ok"
    NOTE = "note"
    """Possible problem, perhaps intended or temporary, such as a peer that is not running yet."""
    FAIL = "FAIL"
    """The process would not start, or no client could use it."""


class CheckRow(msgspec.Struct, frozen=True, kw_only=True):
    """Check as `check --json` prints it."""

    name: str
    """Replica or agent that was checked."""
    check: str
    verdict: CheckResult
    found: str


class CheckAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `check --json`."""

    config: str
    checks: tuple[CheckRow, ...]


_Found = tuple[str, CheckResult, str]
"""Name of the check, its result, and the finding."""


@click.command("check")
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="NAME",
    help="Check this replica or agent; repeatable.  [default: those with a key here]",
)
@JSON_OPTION
def check(names: tuple[str, ...], as_json: bool) -> None:
    """Check that this machine is ready to start.

    Checks the certificate and its hosts, ports, disk, account, mounted shared filesystems, the clock's time service,
    and connections to the other replicas. Run it as root or as the account of the processes. It changes nothing. The
    exit code is 2 if a check FAILs. A replica that is already running passes.
    """
    current = session()
    config = current.config()
    known = _known(config)
    for name in names:
        if name not in known:
            raise bad_input(
                f"{name!r} is no replica or agent of {config.file}", f"use one of: {', '.join(sorted(known))}"
            )
    chosen = names or find_local_processes(config)
    if not chosen:
        raise bad_input(
            f"{config.tls.certificates} has no key of a replica or an agent of {config.file}",
            "copy this host's bundle from the machine where `forebay cluster init` ran, or use --name",
        )
    rows = run_checks(config, chosen, current.clock)
    if as_json:
        show_json(CheckAnswer(config=str(config.file), checks=rows))
    else:
        cells = ((row.name, row.check, row.verdict, plain(row.found)) for row in rows)
        show(table(("NAME", "CHECK", "RESULT", "FOUND"), cells, flexible=frozenset({"FOUND"})))
    failed = sum(row.verdict is CheckResult.FAIL for row in rows)
    if failed:
        remedy = "correct the failed checks before you start the processes"
        raise Failure(ExitCode.BAD_INPUT, f"{failed} of {len(rows)} checks failed", remedy)


def _known(config: Config) -> set[str]:
    return {*(one.name for one in config.replicas), *(one.name for one in config.agents)}


def find_local_processes(config: Config) -> tuple[str, ...]:
    """Return the names of the replicas and agents whose keys are on this machine.

    An agent that needs root is returned only to root.
    """
    others = set() if os.geteuid() == 0 else {one.name for one in config.agents if one.accounts != "own"}
    here = (name for name in sorted(_known(config) - others) if (config.tls.certificates / f"{name}.key").exists())
    return tuple(here)


def run_checks(config: Config, names: tuple[str, ...], clock: Clock) -> tuple[CheckRow, ...]:
    """Run all checks of the named processes and return the results in order.

    Root runs them as the account of each process.
    """
    rows = []
    for name in names:
        with _as_its_account(config, name):
            found = [*_checks(config, name, clock)]
        rows += [CheckRow(name=name, check=what, verdict=verdict, found=text) for what, verdict, text in found]
    return tuple(rows)


@contextlib.contextmanager
def _as_its_account(config: Config, name: str) -> Iterator[None]:
    """Let root act as the owner of a process's data directory, or else of its key."""
    home = next((one.directory for one in config.agents if one.name == name), config.storage.directory / name)
    places = (home, config.tls.certificates / f"{name}.key") if os.geteuid() == 0 else ()
    owner = next((path.stat() for path in places if path.exists()), None)
    if owner is None:
        yield
        return
    group_id = os.getegid()
    os.setegid(owner.st_gid)
    os.seteuid(owner.st_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group_id)


def _checks(config: Config, name: str, clock: Clock) -> Iterator[_Found]:
    replica = next((one for one in config.replicas if one.name == name), None)
    yield from _certificate(config, name, replica, clock)
    if replica is not None:
        yield from _ports(config, replica)
        yield _disk(config.storage.directory / name, FREE_BYTES_LEAST)
        yield from _peers(config, name)
        if config.traces.endpoint:
            yield _traces(config.traces)
    else:
        own = config.agent(name)
        yield _account(config, own)
        yield _disk(own.directory, 0)
        yield from _filesystems(config)
    yield _clock()


def _certificate(config: Config, name: str, replica: ReplicaConfig | None, clock: Clock) -> Iterator[_Found]:
    found = certificate_of(config.tls.certificates, name)
    role = Role.AGENT if replica is None else Role.REPLICA
    again = f"`forebay cert issue {name} --role {role.value} --replace` where ca.key is"
    if found.problem:
        yield "certificate", CheckResult.FAIL, found.problem
        return
    try:
        files = config.tls_files(name)
        server_context(files) if replica is not None else client_context(files)
    except (ConfigError, TlsError, ssl.SSLError, OSError) as error:
        yield "certificate", CheckResult.FAIL, str(error)
        return
    left_s = (found.valid_until - clock.now()) / MICROSECONDS_PER_SECOND
    until = f"valid until {format_time(format_instant(found.valid_until))}"
    if found.role != role.value or found.cluster_id != config.cluster.id:
        yield (
            "certificate",
            CheckResult.FAIL,
            f"is for the role {found.role} of cluster {found.cluster_id}: run {again}",
        )
    else:
        yield "certificate", CheckResult.NOTE if left_s < EXPIRY_NOTICE_S else CheckResult.OK, until
    if replica is None:
        return
    missing = sorted({replica.peer.host, replica.api.host} - set(found.addresses))
    if missing:
        hosts = " ".join(f"--host {host}" for host in sorted({replica.peer.host, replica.api.host}))
        yield (
            "certificate hosts",
            CheckResult.FAIL,
            f"{', '.join(missing)} is missing: run {again.replace('--replace', hosts + ' --replace')}",
        )
    else:
        yield "certificate hosts", CheckResult.OK, ", ".join(found.addresses)


def _ports(config: Config, replica: ReplicaConfig) -> Iterator[_Found]:
    other = functools.cache(lambda: _certificate_mismatch(config, replica))
    for what, address in (("peer", replica.peer), ("api", replica.api), ("channel", replica.channel)):
        if address is None:
            continue
        try:
            family, kind, _, _, place = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind) as trying:
                trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trying.bind(place)
                trying.listen(1)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                yield f"{what} port", CheckResult.FAIL, f"{address}: {error.strerror}: use an address of this host"
            elif why := other():
                sentence = f"{address} is used by another process, not {replica.name} ({why}): stop that process"
                yield f"{what} port", CheckResult.FAIL, sentence
            else:
                yield f"{what} port", CheckResult.OK, f"{address} is used by {replica.name}, which is running"
        else:
            yield f"{what} port", CheckResult.OK, f"{address} is free"


def _certificate_mismatch(config: Config, replica: ReplicaConfig) -> str:
    """Return why the process at the API address is not this replica, or an empty string if its certificate matches."""
    host, port = replica.api.host, replica.api.port
    try:
        context = client_context(config.tls_files(replica.name))
        with (
            socket.create_connection((host, port), timeout=HANDSHAKE_S) as connection,
            context.wrap_socket(connection, server_hostname=host) as secured,
        ):
            found = identify(secured.getpeercert(), cluster_id=config.cluster.id)
    except (ConfigError, TlsError, IdentityError, OSError) as error:  # ssl.SSLError is an OSError
        return str(error)
    return "" if found.role is Role.REPLICA and found.name == replica.name else f"its certificate is for {found}"


def _disk(directory: Path, least: int) -> _Found:
    there = next(one for one in (directory, *directory.parents) if one.exists())
    if not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        return "disk", CheckResult.FAIL, f"{there} is not writable for this account"
    free = shutil.disk_usage(there).free
    text = f"{free >> 20} MiB are free in {there}"
    return "disk", CheckResult.FAIL if free < least else CheckResult.OK, text


def _account(config: Config, own: AgentConfig) -> _Found:
    try:
        config.check_accounts(own, os.geteuid())
    except ConfigError as error:
        return "account", CheckResult.FAIL, f"{error.sentence}; {error.remedy}"
    return "account", CheckResult.OK, f"accounts = '{own.accounts}', and this is account {os.geteuid()}"


def _filesystems(config: Config) -> Iterator[_Found]:
    for filesystem in config.filesystems:
        is_there = os.path.isdir(filesystem.path)
        state = "mounted" if is_there else "missing: mount it, or only other nodes can stage its jobs"
        text = f"{filesystem.path} is {state}"
        yield f"shared filesystem {filesystem.name}", CheckResult.OK if is_there else CheckResult.NOTE, text


def _peers(config: Config, name: str) -> Iterator[_Found]:
    for other in config.replicas:
        if other.name == name:
            continue
        rejections = []
        for address in (other.peer, other.api):
            try:
                socket.create_connection((address.host, address.port), timeout=ASK_S).close()
            except OSError as error:
                rejections.append(f"{address}: {error.strerror or error}")
        if rejections:
            yield (
                f"reaches {other.name}",
                CheckResult.NOTE,
                f"{'; '.join(rejections)}: {other.name} may not be running yet",
            )
        else:
            yield f"reaches {other.name}", CheckResult.OK, f"{other.peer} and {other.api} accept connections"


def _traces(config: TracesConfig) -> _Found:
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version(TRACES_PACKAGE)
    except PackageNotFoundError:
        return (
            "traces",
            CheckResult.NOTE,
            "OpenTelemetry is not installed, so no traces are sent: pip install forebay[otel]",
        )
    return "traces", CheckResult.OK, f"traces go to {config.url}, with OpenTelemetry {found}"


def _clock() -> _Found:
    """Check with adjtimex(2) whether a time service synchronises the clock."""
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    if state == TIME_ERROR:
        return (
            "clock",
            CheckResult.NOTE,
            "no time service synchronises it: start one (chrony, ntpd)",
        )
    return "clock", CheckResult.OK, "a time service synchronises it"
