"""Commands `forebay cluster init` and `forebay cluster up`: create a cluster, and run it on one machine."""

import asyncio
import contextlib
import os
import pwd
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import click
import msgspec

from forebay.cluster.cli.commands.local_cluster import list_children, run
from forebay.cluster.cli.commands.options import LOG_FORMAT_OPTION
from forebay.cluster.cli.exits import ExitCode, Failure, bad_input
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.session import session
from forebay.cluster.cli.text import format_time, note, present
from forebay.cluster.client import Client, GatewayAccess, connect_gateway
from forebay.cluster.client import run as run_to_end
from forebay.cluster.config import (
    GUIDE_NAME,
    HOSTS_NAME,
    OPERATOR_NAME,
    Config,
    FileOwner,
    Founding,
    FoundingRefused,
    PoolSpec,
    create_site,
    guide_of,
    hosts_of,
)
from forebay.cluster.schemas import operations as ops
from forebay.cluster.security import certificate_of, is_name
from forebay.cluster.system import SystemClock, account_of, as_logged, enable_command, format_instant

READY_S: Final = 60.0
"""Seconds that `up` waits for a leader before it reports that there is none: an election takes less than one."""

LOOK_S: Final = 0.05
"""Interval at which `up` tries to connect to its gateway, seconds."""

_STANDARD: Final = Founding()


class InitAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `init --json`."""

    config: str
    replicas: int
    agents: int
    valid_until: str | None
    """End of the certificates' validity."""
    next: tuple[str, ...]
    """Next steps, one line each."""


@click.command("init")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--cluster-name", "name", default=_STANDARD.name, show_default=True, help="Set the cluster's name.")
@click.option(
    "--replicas", type=int, default=_STANDARD.replicas, show_default=True, help="Set the number of replicas: 1, 3 or 5."
)
@click.option("--agents", type=int, default=_STANDARD.agents, show_default=True, help="Set the number of nodes.")
@click.option(
    "--cpus",
    "cpus_per_agent",
    type=int,
    default=_STANDARD.cpus_per_agent,
    show_default=True,
    help="Set the CPUs of each node.",
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="HOST|NAME=HOST,…",
    help="Set one address for all replicas, or one for each by repeating the option or as r1=10.0.0.1,r2=10.0.0.2."
    "  [default: 127.0.0.1]",
)
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="NAME=HOST,…",
    help="Set the nodes and their hosts; each --host must then be NAME=HOST.",
)
@click.option(
    "--base-port",
    type=int,
    default=_STANDARD.base_port,
    show_default=True,
    help="Set the first peer port; API ports are 10 higher.",
)
@click.option(
    "--pool",
    "pools",
    multiple=True,
    metavar="NAME=QUANTITY/GRANULARITY[,default]",
    help="Create a pool, for example fast=96MiB/8MiB; repeatable.",
)
@click.option(
    "--source-root",
    "sources",
    multiple=True,
    metavar="DIR",
    help="Allow stage-in from this directory; %u is the user; repeatable.",
)
@click.option(
    "--destination-root",
    "destinations",
    multiple=True,
    metavar="DIR",
    help="Allow stage-out to this directory; repeatable.",
)
@click.option(
    "--accounts",
    type=click.Choice(["own", "switch", "own-as-root"]),
    help="Run jobs as the agent's account (own) or as their users (switch).  [default: switch for root and services]",
)
@click.option("--allow-root", is_flag=True, help="Allow root to submit jobs.")
@click.option("--user", "users", multiple=True, metavar="NAME", help="Also issue a certificate for this user.")
@click.option(
    "--data-directory",
    "data",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Keep the data of replicas and agents in this directory.  [default: DIRECTORY]",
)
@click.option(
    "--replica-account",
    metavar="ACCOUNT",
    help="Make this Unix account the owner of the replicas' keys and directories; for the packages, use `forebay`."
    "  [default: you]",
)
@JSON_OPTION
def init(
    directory: Path,
    pools: tuple[str, ...],
    sources: tuple[str, ...],
    destinations: tuple[str, ...],
    accounts: Literal["own", "switch", "own-as-root"] | None,
    hosts: tuple[str, ...],
    nodes: tuple[str, ...],
    data: Path | None,
    replica_account: str | None,
    as_json: bool,
    **fields: Any,
) -> None:
    """Create a cluster's forebay.toml and certificates.

    If --host names the replicas, DIRECTORY/hosts has a bundle for each host with the keys of that host only; ca.key
    stays in DIRECTORY. Existing files are not overwritten. Staging roots are relative to the current directory; without
    them jobs cannot stage data.
    """
    here, is_root = Path.cwd(), os.geteuid() == 0
    are_named = any("=" in host for host in hosts)
    account = replica_account or "" if are_named else ""
    try:
        founding = Founding(
            pools=tuple(PoolSpec.parse(pool) for pool in pools) or _STANDARD.pools,
            source_roots=tuple(Path(os.path.normpath(here / root)) for root in sources),
            destination_roots=tuple(Path(os.path.normpath(here / root)) for root in destinations),
            accounts=accounts or ("switch" if is_root or account else "own"),
            hosts=_STANDARD.hosts if are_named or not hosts else hosts,
            named=_parse_hosts("--host", hosts) if are_named else (),
            nodes=_parse_hosts("--node", nodes),
            data=None if data is None else Path(os.path.normpath(here / data)),
            owner=None if are_named or replica_account is None else _owner(replica_account),
            account=account,
            founder=_current_account(),
            **fields,
        )
        config = create_site(directory, founding, clock=SystemClock())
    except FoundingRefused as error:
        sentence, _, remedy = str(error).partition("; ")
        raise bad_input(sentence, remedy or "see forebay cluster init --help") from error
    founded = InitAnswer(
        config=str(config.file),
        replicas=len(config.replicas),
        agents=len(config.agents),
        valid_until=format_instant(certificate_of(config.tls.certificates, OPERATOR_NAME).valid_until),
        next=tuple(_next_lines(config, founding)),
    )
    wrote = (
        f"Wrote {config.file} and certificates for {_count(config)}, valid until "
        f"{format_time(founded.valid_until).partition('T')[0]}."
    )
    present(founded, as_json, lambda: "\n".join((wrote, *founded.next)))
    if founding.named and not founding.nodes:
        note("forebay: warning: the cluster has no nodes: use --node")
    if is_root and founding.accounts == "own":
        note("forebay: warning: agents with accounts = 'own' do not start as root: use --accounts")
    if founding.accounts == "switch" and not founding.named:
        for name in founding.users:
            if not _is_account(name):
                note(
                    f"forebay: warning: user {name} has no account on this machine: create it before {name}'s jobs run"
                )
        closed = _closed_to_others(founding.data or directory)
        if closed is not None:
            note(f"forebay: warning: jobs cannot reach their buffers through {closed}: chmod o+x {closed}")
    if not founding.allow_root and is_root:
        note("forebay: warning: root may not submit jobs to this cluster: use --allow-root, or --user for a user")
    for root in () if founding.named else dict.fromkeys((*founding.source_roots, *founding.destination_roots)):
        # The part of the root from %u on depends on the job's user.
        known = Path(str(root).partition("%u")[0])
        if not known.is_dir():
            note(f"forebay: warning: staging root {known} does not exist: create it before jobs use it")
    if not sources or not destinations:
        missing = _unset_roots(sources, destinations)
        note(f"forebay: warning: jobs cannot stage {missing}: use --source-root and --destination-root, or [staging]")


def _next_lines(config: Config, founding: Founding) -> Iterator[str]:
    """Yield the next steps after a cluster was created."""
    if founding.named:
        for host in hosts_of(founding):
            yield f"Next: copy {config.file.parent / HOSTS_NAME / host} to {host} as /etc/forebay, and there:"
            # Hosts that run services get a script with all steps.
            script = [f"sh /etc/forebay/{GUIDE_NAME}"]
            lines = script if founding.account else guide_of(host, founding).splitlines()[1:]
            yield from (f"  {line}" for line in lines)
    elif founding.owner is None:
        yield f"Next: forebay --config {config.file} cluster up"
    else:
        replicas, agents, _ = list_children(config)
        yield f"Next: {enable_command(*((one.kind, one.name) for one in (*replicas, *agents)))}"


def _parse_hosts(option: str, given: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return pairs of name and host from NAME=HOST,… texts.

    Raises:
        Failure: bad input, if a part has another form.
    """
    pairs = []
    for one in (part for text in given for part in text.split(",")):
        name, equals, host = one.partition("=")
        if not equals or not name or not host:
            raise bad_input(f"{one!r} is not NAME=HOST", f"write {option} r1=10.0.0.1,r2=10.0.0.2", place=option)
        pairs.append((name, host))
    return tuple(pairs)


def _current_account() -> str:
    name = account_of(os.geteuid())
    return name if name is not None and is_name(name) else ""


def _unset_roots(sources: tuple[str, ...], destinations: tuple[str, ...]) -> str:
    return " or ".join(word for word, roots in (("in", sources), ("out", destinations)) if not roots)


def _is_account(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _owner(account: str) -> FileOwner:
    """Return the uid and gid of an account.

    Raises:
        Failure: bad input, if this machine has no such account.
    """
    try:
        found = pwd.getpwnam(account)
    except KeyError:
        raise bad_input(
            f"this machine has no account {account!r}",
            "create it first, or remove the option",
            place="--replica-account",
        ) from None
    return FileOwner(found.pw_uid, found.pw_gid)


def _closed_to_others(directory: Path) -> Path | None:
    """Return the first directory on the path that other accounts may not traverse, or None."""
    resolved = directory.resolve()
    way = (*reversed(resolved.parents), resolved)
    return next((one for one in way if not one.stat().st_mode & stat.S_IXOTH), None)


def _count(config: Config) -> str:
    counts = (("replica", len(config.replicas)), ("agent", len(config.agents)))
    return " and ".join(f"{count} {noun}" + ("" if count == 1 else "s") for noun, count in counts)


@click.command("up")
@LOG_FORMAT_OPTION
def up() -> None:
    """Run all processes of a one-machine cluster.

    Starts every replica and agent of the configuration as a child process and prints their output, each line with the
    process's name. A process that ends is not restarted, except after a drill. Use it for trials; in production each
    process is a service of its own.
    """
    current = session()
    config = current.config()
    for own in config.agents:
        config.check_accounts(own, os.geteuid())
    replicas, agents, helpers = list_children(config)

    def print_line(line: str) -> None:
        click.echo(as_logged(line, "forebay.cluster.cli.up"))
        sys.stdout.flush()

    async def announce() -> None:
        if any(child.kind == "gateway" for child in replicas):
            await _wait_for_gateway(config)
        # A replica's certificate is always there; the account that runs `up` may have none.
        name = current.identity or config.replicas[0].name
        async with Client.from_config(config, name, clock=current.clock, deadline_s=READY_S) as client:
            answer = await client.call(ops.LIST_MEMBERS)
        for line in _next_commands(config, answer.leader):
            print_line(line)

    print_line(f"Starting cluster {config.cluster.name} of {config.file}: {_count(config)}. Ctrl-C stops it.")
    try:
        asked = run_to_end(run(replicas, agents, helpers, say=print_line, announce=announce))
    except OSError as error:
        raise Failure(
            ExitCode.REFUSED, f"a process cannot be started ({error.strerror})", "free some memory"
        ) from error
    if not asked:
        raise Failure(
            ExitCode.REFUSED,
            "all processes have ended",
            "see their messages above; usual causes are ports in use, or directories of another cluster",
        )
    print_line("All processes have ended.")


async def _wait_for_gateway(config: Config) -> None:
    """Wait until the gateway of `up` accepts connections, READY_S at most: the printed commands use it."""
    way = GatewayAccess(config.access.socket, frozenset({os.geteuid()}))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READY_S):
            while True:
                with contextlib.suppress(OSError):
                    connect_gateway(way, READY_S).close()
                    return
                await asyncio.sleep(LOOK_S)


def _next_commands(config: Config, leader: str | None) -> list[str]:
    first_agent = config.agents[0].name if config.agents else None
    lines = [
        f"Ready: the leader is {leader}. In another terminal:" if leader else "Ready. In another terminal:",
        f"  export FOREBAY_CONFIG={config.file}",
        "  forebay cluster members",
        "  forebay submit SCRIPT && forebay queue",
        f"Status page, for a browser with a certificate: {config.replicas[0].api.url}/page",
    ]
    if first_agent is None:
        lines.append(
            f"The cluster has no agents, so jobs wait: add [[agent]] to {config.file} and restart `forebay cluster up`."
        )
    return lines
