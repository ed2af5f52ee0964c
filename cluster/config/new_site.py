"""What `forebay cluster init` writes: a directory with `forebay.toml` and the certificates of a new cluster.

Nothing is overwritten, and what was written is read back with the checks of `Config.load` before anybody is told that
it is there.
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

from cluster.config.config import OPERATOR_NAME, REPLICA_COUNTS, Config, StorageConfig, TimingConfig
from cluster.config.toml import ConfigError
from cluster.security import (
    AUTHORITY_NAME,
    NAME_RULE,
    SHARED_DIRECTORY_MODE,
    Authority,
    PkiRefused,
    Role,
    create_authority,
    is_name,
    issue,
)
from cluster.system import (
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
from replica.values import SizeError, format_size, parse_size

CONFIG_NAME: Final = "forebay.toml"
TLS_NAME: Final = "tls"

FIRST_START_NAME: Final = "first-start"
"""A file in the directory of a replica that has never run: its first start without data is as it should be."""

HOSTS_NAME: Final = "hosts"
"""The directory of the bundles, one for each host."""

GUIDE_NAME: Final = "NEXT"
"""The file of a bundle that says what to type on its host."""

LOCAL_GATEWAY: Final = "local"
"""Name of the gateway that `forebay cluster up` runs for who is on its machine."""

GATEWAY_SOCKET: Final = "gateway.sock"

API_PORT_OFFSET: Final = 10
"""Ports between a replica's peer port and its API port, so that both are easy to remember (7401 and 7411)."""

AGENTS_MAX: Final = 256
"""Agents that `init` writes at once, count: more are added to the file by whatever generates it."""


_SHOWN_MODE: Final = 0o644
_PASSABLE_MODE: Final = 0o755
"""Modes of a configuration that a service and every client of a machine read, and of what it lies in."""


class FoundingRefused(Exception):
    """The cluster cannot be founded as asked; the message is a sentence with the remedy."""


class PoolSpec(msgspec.Struct, frozen=True):
    """A founding pool as on the command line: `name=quantity/granularity`, with `,default` for the default pool."""

    name: str
    quantity: str
    granularity: str
    is_default: bool = False

    @classmethod
    def parse(cls, text: str) -> "PoolSpec":
        """Return the pool that the text says; FoundingRefused says what is wrong with it."""
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


class Owner(msgspec.Struct, frozen=True):
    """An account that replicas run as: its numbers."""

    user_id: int
    group_id: int


class Founding(msgspec.Struct, frozen=True, kw_only=True):
    """What the new cluster is to be."""

    name: str = "forebay"
    hosts: tuple[str, ...] = ("127.0.0.1",)
    """Where the replicas are: one host for all of them, or one for each."""
    named: tuple[tuple[str, str], ...] = ()
    """Replicas by their names, each with its host, in place of `hosts` and `replicas`: there is a bundle for each."""
    nodes: tuple[tuple[str, str], ...] = ()
    """Agents by their names, each with its host, in place of `agents`, where replicas are `named`."""
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
    """The directory in which replicas and agents keep theirs, absolute; None: they are beside forebay.toml."""
    owner: Owner | None = None
    """Who is given the keys and directories of the replicas; None: whoever founds."""
    account: str = ""
    """Who is given them on hosts that are named, where the packages' services run; empty: whoever starts replicas."""
    founder: str = ""
    """The account that is the operator on this machine, if replicas are here; empty: nobody without a certificate."""

    def check(self) -> None:
        """Refuse what cannot be founded; FoundingRefused."""
        replicas = len(self.named) if self.named else self.replicas
        if replicas not in REPLICA_COUNTS:
            raise FoundingRefused(f"{replicas} replicas are not possible; choose 1, 3 or 5")
        agents = len(self.nodes) if self.named else self.agents
        if not 0 <= agents <= AGENTS_MAX:
            raise FoundingRefused(f"{agents} agents are not possible; choose 0 to {AGENTS_MAX}")
        if self.nodes and not self.named:
            raise FoundingRefused("nodes have hosts and replicas have none; say --host NAME=HOST for each replica")
        if self.account and self.data is None:
            raise FoundingRefused("services keep nothing in /etc/forebay; say --data-directory /var/lib/forebay")
        if self.account and not is_name(self.account):
            raise FoundingRefused(f"{self.account!r} cannot name an account; {NAME_RULE}")
        names = (*self.replica_names, *self.agent_names)
        for name in names:
            if not is_name(name) or name in (AUTHORITY_NAME, OPERATOR_NAME):
                raise FoundingRefused(f"{name!r} cannot name a replica or a node; {NAME_RULE}, and no name of another")
            if names.count(name) > 1:
                raise FoundingRefused(f"{name!r} is there twice; give each replica and each node a name of its own")
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
                raise FoundingRefused(f"a user cannot be called {user!r}: the name is taken; choose another one")
        for root in (*self.source_roots, *self.destination_roots):
            if not root.is_absolute():
                raise FoundingRefused(f"the staging root {str(root)!r} is not absolute; start it with /")
        if self.data is not None and not self.data.is_absolute():
            raise FoundingRefused(f"the data directory {str(self.data)!r} is not absolute; start it with /")

    @property
    def replica_names(self) -> tuple[str, ...]:
        """r1, r2, … where nobody names them."""
        if self.named:
            return tuple(name for name, _ in self.named)
        return tuple(f"r{number}" for number in range(1, self.replicas + 1))

    @property
    def agent_names(self) -> tuple[str, ...]:
        """n1, n2, … where nobody names the replicas."""
        if self.named:
            return tuple(name for name, _ in self.nodes)
        return tuple(f"n{number}" for number in range(1, self.agents + 1))

    def addresses(self, number: int) -> tuple[Address, Address]:
        """Return peer and API address of a replica; `number` counts from 0. On each named host ports count anew."""
        if self.named:
            host = self.named[number][1]
            port = self.base_port + sum(other == host for _, other in self.named[:number])
            return Address(host, port), Address(host, port + API_PORT_OFFSET)
        host = self.hosts[number % len(self.hosts)]
        return Address(host, self.base_port + number), Address(host, self.base_port + API_PORT_OFFSET + number)


def found(directory: Path, founding: Founding, *, clock: Clock) -> Config:
    """Write a new cluster into `directory` (made if it is not there); return its configuration, read back and checked.

    FoundingRefused if there is one already or the options cannot be; then nothing has been left behind.
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
                raise FoundingRefused(f"{path} is there already; choose another directory or remove it")
        # In a directory of its own first: an interruption leaves no half of a cluster that looks like a whole one.
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
                # The service, clients of other accounts and their jobs, whose buffers and scripts lie here.
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
    except PkiRefused as error:
        raise FoundingRefused(str(error)) from error
    except ConfigError as error:
        # Without the file: it is a scratch one that is gone already.
        raise FoundingRefused(f"{error.key}: {error.sentence}; {error.remedy}") from error


def render(founding: Founding, cluster_id: str) -> str:
    """Return the text of `forebay.toml`, with comments for whoever edits it."""
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
        "# 1, 3 or 5 replicas. `peer` is where the other replicas reach it, `api` where people, tools and agents do.",
    ]
    for number, name in enumerate(founding.replica_names):
        peer, api = founding.addresses(number)
        lines += ["[[replica]]", f"name = {quote(name)}", f"peer = {quote(str(peer))}", f"api = {quote(str(api))}", ""]
    lines += [
        '# One agent per compute or storage node. accounts = "switch": jobs run as their users (the agent is root);',
        '# "own": as the agent\'s account, which is not root: whoever may submit then has what that account has, the',
        "# keys below included. For one person, or where all users are trusted with that account.",
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
        "# <name>.pem and <name>.key of everybody; keys have mode 0600. ca.key issues certificates and is needed for",
        "# nothing else: on a cluster of several machines keep it away from them.",
        "[tls]",
        f'authority = "{TLS_NAME}/{AUTHORITY_NAME}.pem"',
        f'certificates = "{TLS_NAME}"',
        "",
        "# Who may come without a certificate, as the account that he is: by a gateway, a service on the machine, or",
        "# by MUNGE. operators: accounts, and groups as %group. Where all replicas are on one machine, its founder is",
        f"# an operator through {LOCAL_GATEWAY}, of `forebay cluster up` or the service "
        f"forebay-gateway@{LOCAL_GATEWAY}.",
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
        "# Directories that jobs may stage in from and stage out to; %u is the job's user. None: staging is refused.",
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
    # A service has the directory of its unit for its socket, and nobody is an operator of machines that he named.
    lines = [] if founding.named or founding.owner is not None else [f"socket = {quote(GATEWAY_SOCKET)}"]
    founders = [founding.founder] if founding.founder and not founding.named else []
    if founders:
        lines.append(f"operators = [{quote(founding.founder)}]")
        lines.append(f"operators_through = [{quote(LOCAL_GATEWAY)}]")
    if founding.accounts != "switch":
        users = dict.fromkeys((*founding.users, *founders))
        names = ", ".join(map(quote, users or (OPERATOR_NAME,)))
        lines.append(f"users = [{names}]  # jobs run as the agent's account: whoever may submit has what that has")
    return lines


def quote(text: str) -> str:
    """Return `text` as a TOML basic string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in escaped) + '"'


def replica_hosts(peer: Address, api: Address) -> Sequence[str]:
    """Return the hosts that a replica's certificate must name; on loopback it may be called localhost too."""
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


def _hand_over(tls: Path, data: Path, founding: Founding, owner: Owner) -> None:
    """Give the replicas' keys and directories to the account that they run as; what else there is stays the founder's.

    Its group may look into the directory of keys: each key in it is for its own owner alone.
    """
    os.chown(tls, -1, owner.group_id)
    tls.chmod(SHARED_DIRECTORY_MODE)
    for name in founding.replica_names:
        for path in (tls / f"{name}.key", data / name / FIRST_START_NAME, data / name):
            os.chown(path, owner.user_id, owner.group_id)


def hosts_of(founding: Founding) -> dict[str, tuple[str, ...]]:
    """Return the hosts of a cluster whose replicas are named, with the replicas and agents of each."""
    found: dict[str, tuple[str, ...]] = {}
    for name, host in (*founding.named, *founding.nodes):
        found[host] = (*found.get(host, ()), name)
    return found


def _write_bundle(scratch: Path, bundle: Path, host: str, founding: Founding) -> None:
    """Write all that one host needs, and no key of another; what to type there stands in it, too."""
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
    """Return what to type on a host once its bundle is in /etc/forebay there; for services it is a script, for root."""
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
    # Clients believe the owner of the file, and everybody reads it.
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
    # Replicas wait for each other, and so would who starts one.
    yield f"systemctl enable --now --no-block {' '.join(units)}"
    # A replica is told once that it may start without data.
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
            # What was made is removed, and not what may have its name by now: the directory above may be another's.
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
