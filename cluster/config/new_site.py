"""New site for `forebay cluster init`: a directory with `forebay.toml` and the certificates of a new cluster.

Existing files are not overwritten. Before success is reported, `Config.load` reads and checks the new files.
"""

import contextlib
import os
import secrets
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from forebay.cluster.config.config import OPERATOR_NAME, REPLICA_COUNTS, Config, StorageConfig, TimingConfig
from forebay.cluster.config.toml import ConfigError
from forebay.cluster.security import (
    AUTHORITY_NAME,
    NAME_RULE,
    SHARED_DIRECTORY_MODE,
    Authority,
    PkiError,
    Role,
    create_authority,
    is_name,
    issue,
)
from forebay.cluster.system import (
    Address,
    AddressError,
    Clock,
    closing,
    make_private_directory,
    names_in,
    new_private_file,
    open_directory,
    sync_directory,
)
from forebay.replica.values import SizeError, format_size, parse_size

CONFIG_NAME: Final = "forebay.toml"
TLS_NAME: Final = "tls"

FIRST_START_NAME: Final = "first-start"
"""File that permits the first start of a replica without data, in the replica's directory."""

HOSTS_NAME: Final = "hosts"
"""Directory of the bundles, one for each host."""

GUIDE_NAME: Final = "NEXT"
"""File of a bundle with the commands to type on its host."""

LOCAL_GATEWAY: Final = "local"
"""Name of the gateway that `forebay cluster up` runs for users of its machine."""

GATEWAY_SOCKET: Final = "gateway.sock"

API_PORT_OFFSET: Final = 10
"""Difference between a replica's peer and API port, for easily remembered numbers (7401 and 7411)."""

AGENTS_MAX: Final = 256
"""Maximum number of agents that `init` writes; more can be added to the file later."""


_SHOWN_MODE: Final = 0o644
_PASSABLE_MODE: Final = 0o755
"""Modes of a configuration read by a service and all clients of a machine, and of its directory."""


class FoundingRefused(Exception):
    """The cluster cannot be created as requested; the message has the remedy."""


class PoolSpec(msgspec.Struct, frozen=True):
    """Founding pool as on the command line: `name=quantity/granularity`, with `,default` for the default pool."""

    name: str
    quantity: str
    granularity: str
    is_default: bool = False

    @classmethod
    def parse(cls, text: str) -> "PoolSpec":
        """Parse a pool.

        Raises:
            FoundingRefused: The text is invalid; the message has the remedy.
        """
        example = "write it as fast=96MiB/8MiB, with ,default at the end for the default pool"
        name, equals, rest = text.partition("=")
        sizes, comma, flag = rest.partition(",")
        quantity, slash, granularity = sizes.partition("/")
        if not equals or not slash or (comma and flag != "default"):
            raise FoundingRefused(f"{text!r} is not a pool; {example}")
        if not is_name(name):
            raise FoundingRefused(f"{name!r} in {text!r} cannot name a pool: {NAME_RULE}")
        for size in (quantity, granularity):
            try:
                parse_size(size)
            except SizeError as error:
                raise FoundingRefused(f"pool {name!r}: {error.sentence}; {error.remedy}") from error
        return cls(name=name, quantity=quantity, granularity=granularity, is_default=bool(comma))


class FileOwner(msgspec.Struct, frozen=True):
    """Account that replicas run as, by user and group ID."""

    user_id: int
    group_id: int


class Founding(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a new cluster."""

    name: str = "forebay"
    hosts: tuple[str, ...] = ("127.0.0.1",)
    """Hosts of the replicas: one for all, or one for each."""
    named: tuple[tuple[str, str], ...] = ()
    """Named replicas with their hosts, instead of `hosts` and `replicas`; each host gets a bundle."""
    nodes: tuple[tuple[str, str], ...] = ()
    """Named agents with their hosts, instead of `agents`, if replicas are `named`."""
    base_port: int = 7401
    replicas: int = 3
    agents: int = 2
    cpus_per_agent: int = 2
    accounts: Literal["own", "switch", "own-as-root"] = "own"
    pools: tuple[PoolSpec, ...] = (PoolSpec("scratch", "1GiB", "16MiB", True),)
    users: tuple[str, ...] = ()
    source_roots: tuple[Path, ...] = ()
    destination_roots: tuple[Path, ...] = ()
    allow_root: bool = False
    data: Path | None = None
    """Absolute directory for the data of replicas and agents; None: beside forebay.toml."""
    owner: FileOwner | None = None
    """Owner of the replicas' keys and directories; None for the current account."""
    account: str = ""
    """Account of the packages' services on named hosts, which owns keys and directories there.

    Empty without services.
    """
    founder: str = ""
    """Account with the operator role on this machine if replicas run here; empty for none."""

    def check(self) -> None:
        """Check the options.

        Raises:
            FoundingRefused: They are impossible.
        """
        replicas = len(self.named) if self.named else self.replicas
        if replicas not in REPLICA_COUNTS:
            raise FoundingRefused(f"{replicas} replicas are not possible; choose 1, 3 or 5")
        agents = len(self.nodes) if self.named else self.agents
        if not 0 <= agents <= AGENTS_MAX:
            raise FoundingRefused(f"{agents} agents are not possible; choose 0 to {AGENTS_MAX}")
        if self.nodes and not self.named:
            raise FoundingRefused("nodes have hosts but replicas have none; use --host NAME=HOST for each replica")
        if self.account and self.data is None:
            raise FoundingRefused("services store no data in /etc/forebay; use --data-directory /var/lib/forebay")
        if self.account and not is_name(self.account):
            raise FoundingRefused(f"{self.account!r} cannot name an account; {NAME_RULE}")
        names = (*self.replica_names, *self.agent_names)
        for name in names:
            if not is_name(name) or name in (AUTHORITY_NAME, OPERATOR_NAME):
                raise FoundingRefused(
                    f"{name!r} cannot name a replica or a node; {NAME_RULE}, and do not use a reserved name"
                )
            if names.count(name) > 1:
                raise FoundingRefused(f"{name!r} is used twice; give each replica and node a unique name")
        if not self.named and len(self.hosts) not in (1, self.replicas):
            raise FoundingRefused(
                f"{len(self.hosts)} hosts for {self.replicas} replicas are not possible; "
                "name one for all, or one for each"
            )
        try:
            for host in (*(host for _, host in (*self.named, *self.nodes)), *self.hosts):
                Address.parse(str(Address(host, self.base_port)))
                Address.parse(str(Address(host, self.base_port + API_PORT_OFFSET + replicas - 1)))
        except AddressError as error:
            raise FoundingRefused(f"{error.sentence}; {error.remedy}") from error
        reserved = {AUTHORITY_NAME, OPERATOR_NAME, LOCAL_GATEWAY, *self.replica_names, *self.agent_names}
        for user in self.users:
            if not is_name(user):
                raise FoundingRefused(f"{user!r} cannot name a user: {NAME_RULE}")
            if user in reserved or self.users.count(user) > 1:
                raise FoundingRefused(f"the user name {user!r} is taken; choose another one")
        for root in (*self.source_roots, *self.destination_roots):
            if not root.is_absolute():
                raise FoundingRefused(f"the staging root {str(root)!r} is not absolute; start it with /")
        if self.data is not None and not self.data.is_absolute():
            raise FoundingRefused(f"the data directory {str(self.data)!r} is not absolute; start it with /")

    @property
    def replica_names(self) -> tuple[str, ...]:
        """Names of the replicas: r1, r2, … by default."""
        if self.named:
            return tuple(name for name, _ in self.named)
        return tuple(f"r{number}" for number in range(1, self.replicas + 1))

    @property
    def agent_names(self) -> tuple[str, ...]:
        """Names of the agents: n1, n2, … by default."""
        if self.named:
            return tuple(name for name, _ in self.nodes)
        return tuple(f"n{number}" for number in range(1, self.agents + 1))

    def addresses(self, number: int) -> tuple[Address, Address]:
        """Return peer and API address of the replica with this number, from 0.

        Ports count separately on each named host.
        """
        if self.named:
            host = self.named[number][1]
            port = self.base_port + sum(other == host for _, other in self.named[:number])
            return Address(host, port), Address(host, port + API_PORT_OFFSET)
        host = self.hosts[number % len(self.hosts)]
        return Address(host, self.base_port + number), Address(host, self.base_port + API_PORT_OFFSET + number)


def create_site(directory: Path, founding: Founding, *, clock: Clock) -> Config:
    """Write a new cluster into `directory`, created if missing; return its checked configuration.

    Raises:
        FoundingRefused: There is a cluster already, or an option is invalid; nothing is left behind.
    """
    founding.check()
    cluster_id = secrets.token_hex(16)
    data = directory if founding.named else founding.data or directory
    here = (HOSTS_NAME,) if founding.named else founding.replica_names
    try:
        new = [path for path in (directory, data) if not path.exists()]
        make_private_directory(directory)
        make_private_directory(data)
        for path in (directory / CONFIG_NAME, directory / TLS_NAME, *(data / name for name in here)):
            if os.path.lexists(path):
                raise FoundingRefused(f"{path} exists; choose another directory or remove it")
        # Write to a scratch directory first, so that an interruption leaves no incomplete cluster.
        with _scratch(directory, "site") as scratch, _scratch(data, "data") as beside_data:
            _write_certificates(scratch / TLS_NAME, founding, cluster_id, clock)
            _write_text(scratch / CONFIG_NAME, render(founding, cluster_id))
            Config.load(scratch / CONFIG_NAME)
            if founding.named:
                for host in hosts_of(founding):
                    _write_bundle(scratch, beside_data / HOSTS_NAME / host, host, founding)
            for name in () if founding.named else founding.replica_names:
                _allow_first_start(beside_data, name)
            if founding.owner is not None:
                _hand_over(scratch / TLS_NAME, beside_data, founding, founding.owner)
            if founding.owner is not None or founding.accounts == "switch":
                # Services, clients of other accounts and jobs need access, because the configuration and the buffers
                # are here.
                (scratch / CONFIG_NAME).chmod(_SHOWN_MODE)
                for path in new:
                    with closing(open_directory(path)) as opened:
                        os.fchmod(opened, _PASSABLE_MODE)
            for name in here:
                os.rename(beside_data / name, data / name)
            for name in (TLS_NAME, CONFIG_NAME):
                os.rename(scratch / name, directory / name)
            sync_directory(data)
            sync_directory(directory)
        return Config.load(directory / CONFIG_NAME)
    except OSError as error:
        raise FoundingRefused(f"{directory}: the cluster cannot be written ({error.strerror})") from error
    except PkiError as error:
        raise FoundingRefused(str(error)) from error
    except ConfigError as error:
        # Do not name the file, which is a deleted scratch copy.
        raise FoundingRefused(f"{error.key}: {error.sentence}; {error.remedy}") from error


def render(founding: Founding, cluster_id: str) -> str:
    """Return the text of `forebay.toml`, with comments for administrators."""
    storage, timing = StorageConfig(), TimingConfig()
    map_size = quote(format_size(storage.map_size_bytes))
    has_default = any(pool.is_default for pool in founding.pools)
    lines = [
        "# Forebay: one file for the whole cluster; every machine has the same copy. Paths are relative to this file.",
        "# Pools and policy below found the cluster. Afterwards change them with `forebay config` and `forebay pool`:",
        "# replicas never decide from a local file.",
        "",
        "[cluster]",
        f"name = {quote(founding.name)}",
        f"id = {quote(cluster_id)}  # in every frame, snapshot and certificate; never edit it",
        "",
        "# 1, 3 or 5 replicas. `peer` is its address for other replicas, `api` for users, tools and agents.",
    ]
    for number, name in enumerate(founding.replica_names):
        peer, api = founding.addresses(number)
        lines += ["[[replica]]", f"name = {quote(name)}", f"peer = {quote(str(peer))}", f"api = {quote(str(api))}", ""]
    lines += [
        '# One agent per compute or storage node. accounts = "switch": jobs run as their users (the agent is root);',
        '# "own": as the agent\'s account, not root: every user who may submit then has its permissions, including the',
        "# keys below. Use it for a single user, or if all users are trusted.",
    ]
    for name in founding.agent_names:
        lines += [
            "[[agent]]",
            f"name = {quote(name)}",
            f"directory = {quote(name if founding.data is None else str(founding.data / name))}",
            f"cpus = {founding.cpus_per_agent}",
            f"accounts = {quote(founding.accounts)}",
            "",
        ]
    lines += ["# Founding pools. Requests are rounded up to the granularity; without a pool they go to the default."]
    for index, pool in enumerate(founding.pools):
        lines += [
            "[[pool]]",
            f"name = {quote(pool.name)}",
            f"quantity = {quote(pool.quantity)}",
            f"granularity = {quote(pool.granularity)}",
        ]
        if pool.is_default or (not has_default and index == 0):
            lines.append("default = true")
        lines.append("")
    lines += [
        "# Certificates <name>.pem and keys <name>.key; keys have mode 0600. ca.key only issues certificates: for a",
        "# cluster of several machines, store it elsewhere.",
        "[tls]",
        f'authority = "{TLS_NAME}/{AUTHORITY_NAME}.pem"',
        f'certificates = "{TLS_NAME}"',
        "",
        "# Accounts that may authenticate without a certificate, by a gateway (a service on the machine) or MUNGE.",
        "# operators: accounts, and groups as %group. If all replicas are on one machine, the account that created the",
        f"# cluster is an operator through {LOCAL_GATEWAY}, which `forebay cluster up` or",
        f"# forebay-gateway@{LOCAL_GATEWAY} runs.",
        "[access]",
        *_access_lines(founding),
        "",
        "[storage]",
        f"directory = {quote(str(founding.data or storage.directory))}  # r1 keeps r1/wal and r1/snapshots in it",
        f"map_size = {map_size}  # address space, not disk: the journal can grow up to it",
        f"snapshot_every_entries = {storage.snapshot_every_entries}",
        f"snapshots_kept = {storage.snapshots_kept}",
        "",
        "[timing]",
        f"election_min_ms = {timing.election_min_ms}",
        f"election_max_ms = {timing.election_max_ms}",
        f"heartbeat_ms = {timing.heartbeat_ms}",
        "",
        "# Directories that jobs may stage in from and stage out to; %u is the user. If empty, staging is rejected.",
        "[staging]",
        f"sources = [{', '.join(quote(str(root)) for root in founding.source_roots)}]",
        f"destinations = [{', '.join(quote(str(root)) for root in founding.destination_roots)}]",
        "",
        "# Founding policy; what is not written has its default.",
        "[policy]",
        f"allow_root = {'true' if founding.allow_root else 'false'}  # whether the user root may submit jobs",
        "",
    ]
    return "\n".join(lines)


def _access_lines(founding: Founding) -> list[str]:
    # A service uses its unit's directory for the socket, and no account becomes operator of the named hosts.
    lines = [] if founding.named or founding.owner is not None else [f"socket = {quote(GATEWAY_SOCKET)}"]
    founders = [founding.founder] if founding.founder and not founding.named else []
    if founders:
        lines.append(f"operators = [{quote(founding.founder)}]")
        lines.append(f"operators_through = [{quote(LOCAL_GATEWAY)}]")
    if founding.accounts != "switch":
        users = dict.fromkeys((*founding.users, *founders))
        names = ", ".join(map(quote, users or (OPERATOR_NAME,)))
        lines.append(f"users = [{names}]  # jobs run as the agent's account: users have its permissions")
    return lines


def quote(text: str) -> str:
    """Quote `text` as a TOML basic string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in escaped) + '"'


def replica_hosts(peer: Address, api: Address) -> Sequence[str]:
    """Return the hosts for a replica's certificate, on loopback including localhost."""
    hosts = [peer.host, api.host]
    if peer.is_loopback and api.is_loopback:
        hosts += ["localhost", "127.0.0.1", "::1"]
    return sorted(set(hosts))


def _write_certificates(directory: Path, founding: Founding, cluster_id: str, clock: Clock) -> Authority:
    at = clock.now()
    authority = create_authority(directory, cluster_name=founding.name, cluster_id=cluster_id, at=at)
    for number, name in enumerate(founding.replica_names):
        hosts = replica_hosts(*founding.addresses(number))
        issue(authority, directory, role=Role.REPLICA, name=name, addresses=hosts, at=at)
    for name in founding.agent_names:
        issue(authority, directory, role=Role.AGENT, name=name, at=at)
    issue(authority, directory, role=Role.OPERATOR, name=OPERATOR_NAME, at=at)
    issue(authority, directory, role=Role.GATEWAY, name=LOCAL_GATEWAY, at=at)
    for name in founding.users:
        issue(authority, directory, role=Role.USER, name=name, at=at)
    return authority


def _hand_over(tls: Path, data: Path, founding: Founding, owner: FileOwner) -> None:
    """Make the replicas' account the owner of their keys and directories; other files stay the founder's.

    The group of that account may list the directory of keys. Each key is readable only by its owner.
    """
    os.chown(tls, -1, owner.group_id)
    tls.chmod(SHARED_DIRECTORY_MODE)
    for name in founding.replica_names:
        for path in (tls / f"{name}.key", data / name / FIRST_START_NAME, data / name):
            os.chown(path, owner.user_id, owner.group_id)


def hosts_of(founding: Founding) -> dict[str, tuple[str, ...]]:
    """Return the hosts of a cluster with named replicas, with the replicas and agents of each."""
    found: dict[str, tuple[str, ...]] = {}
    for name, host in (*founding.named, *founding.nodes):
        found[host] = (*found.get(host, ()), name)
    return found


def _write_bundle(scratch: Path, bundle: Path, host: str, founding: Founding) -> None:
    """Write the files and keys that one host needs, and the commands to type on that host."""
    make_private_directory(bundle / TLS_NAME)
    shutil.copy2(scratch / CONFIG_NAME, bundle / CONFIG_NAME)
    shutil.copy2(scratch / TLS_NAME / f"{AUTHORITY_NAME}.pem", bundle / TLS_NAME)
    for name in hosts_of(founding)[host]:
        for suffix in ("pem", "key"):
            shutil.copy2(scratch / TLS_NAME / f"{name}.{suffix}", bundle / TLS_NAME)
        if name in founding.replica_names and founding.data is None:
            _allow_first_start(bundle, name)
    _write_text(bundle / GUIDE_NAME, guide_of(host, founding))


def guide_of(host: str, founding: Founding) -> str:
    """Return the commands to type on a host with its bundle in /etc/forebay; for services, a script for root."""
    names = hosts_of(founding)[host]
    lines = _service_guide(host, names, founding) if founding.account else _guide(host, names, founding)
    return "\n".join((*lines, ""))


def _guide(host: str, names: tuple[str, ...], founding: Founding) -> Iterator[str]:
    yield f"# On {host}, with this directory as /etc/forebay, which belongs to the account that runs Forebay:"
    for name in names:
        is_replica = name in founding.replica_names
        if is_replica and founding.data is not None:
            there = founding.data / name
            yield f"mkdir -p -m 700 {there} && touch {there / FIRST_START_NAME}"
        kind = "replica" if is_replica else "agent"
        yield f"forebay --config /etc/forebay/{CONFIG_NAME} run {kind} --name {name}"


def _service_guide(host: str, names: tuple[str, ...], founding: Founding) -> Iterator[str]:
    account, replicas = founding.account, [name for name in names if name in founding.replica_names]
    yield f"# On {host}, as root, once, with the packages installed and this directory as /etc/forebay:"
    yield "set -e"
    yield "cd /etc/forebay"
    # Clients trust a file of root, and every user may read it.
    yield f"chown -R root: . && chmod 755 . && chmod 644 {CONFIG_NAME}"
    if replicas:
        assert founding.data is not None
        yield f"chgrp {account} {TLS_NAME} && chmod {SHARED_DIRECTORY_MODE:o} {TLS_NAME}"
        for name in replicas:
            there, mark = (shlex.quote(str(founding.data / name / file)) for file in ("", FIRST_START_NAME))
            yield f"chown {account}: {TLS_NAME}/{name}.key"
            yield f"install -d -o {account} -g {account} -m 700 {there}"
            yield f"install -o {account} -g {account} -m 600 /dev/null {mark}"
            yield f"runuser -u {account} -- forebay --config {CONFIG_NAME} cluster check --name {name}"
    agents = [name for name in names if name not in replicas]
    for name in agents:
        yield f"forebay --config {CONFIG_NAME} cluster check --name {name}"
    units = [f"forebay-controller@{name}" for name in replicas] + [f"forebay-agent@{name}" for name in agents]
    # Do not wait: replicas wait for each other to start.
    yield f"systemctl enable --now --no-block {' '.join(units)}"
    # Start without data is permitted only once.
    yield f"rm {GUIDE_NAME}"


def _allow_first_start(directory: Path, name: str) -> None:
    (directory / name).mkdir(mode=0o700)
    _write_text(directory / name / FIRST_START_NAME, "")


@contextlib.contextmanager
def _scratch(directory: Path, what: str) -> Iterator[Path]:
    scratch = directory / f".init-{what}-{secrets.token_hex(8)}"
    scratch.mkdir(mode=0o700)
    with closing(open_directory(scratch)) as opened:
        try:
            yield scratch
        finally:
            # Remove the created files by descriptor, because another account may have replaced the directory.
            for name in names_in(opened):
                try:
                    os.unlink(name, dir_fd=opened)
                except OSError:
                    shutil.rmtree(name, ignore_errors=True, dir_fd=opened)
            with contextlib.suppress(OSError):
                scratch.rmdir()


def _write_text(path: Path, text: str) -> None:
    with new_private_file(path) as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
