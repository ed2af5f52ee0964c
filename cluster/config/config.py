"""The configuration of a cluster: one TOML file, read once, checked whole, never guessed at.

Unknown keys, duplicate names and addresses, sizes and numbers out of bounds are refused before anything starts. Paths
are relative to the file. What the cluster is founded with is read in `founding_config`.
"""

import os
import re
import tomllib
from pathlib import Path
from typing import Final, Literal, TypeVar, cast

import msgspec

from cluster.config.initial_state import read_name, read_policy, read_pools
from cluster.config.mail import NO_MAIL, MailConfig, read_mail
from cluster.config.provider import read_provider
from cluster.config.toml import ConfigError, Table, near
from cluster.providers.interface import NO_LOCAL, Local
from cluster.security import AUTHORITY_NAME, NAME_RULE, TlsFiles, find_unsafe_keys, is_name, is_there
from cluster.system import Address, AddressError
from replica.model import Policy, Pool
from replica.values import CPUS_MAX, NODES_MAX

__all__ = [
    "AgentConfig",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "ReplicaConfig",
    "StorageConfig",
    "TimingConfig",
    "TlsConfig",
]

CONFIG_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of the file: 10,000 agents of about 100 bytes each fit several times."""

REPLICA_COUNTS: Final = (1, 3, 5)
"""How many replicas a cluster may have: an even number tolerates no more failures than one fewer."""

REPLICAS_MAX: Final = 16
"""Replicas in the file: the founders, and those that were added since; only nine may be members at a time."""

GIB: Final = 1024**3
MAP_SIZE_BYTES_MIN: Final = 16 * 1024**2
"""Least LMDB map, bytes: below it the first snapshot's worth of entries does not fit."""

MAP_SIZE_BYTES_MAX: Final = 16 * 1024 * GIB
"""Largest LMDB map, bytes: far below the 128 TiB of user address space on x86-64."""

KILL_WAIT_S_MAX: Final = 3_600
"""Longest grace of a script that is ended, seconds: its node is not free for anybody else meanwhile."""

TIMING_MS_MAX: Final = 60_000
"""Largest election timeout, milliseconds: a leader that is missed for a minute helps nobody."""

HEARTBEATS_PER_ELECTION: Final = 3
"""Heartbeats that must fit into the shortest election timeout, with time to spare: one lost packet must not cost an
election. Consensus refuses less (cluster.consensus.interface.Timing)."""

OPERATOR_NAME: Final = "operator"
"""Name of the certificate that `forebay init` makes for the operator."""

_T = TypeVar("_T", str, Address, Path)

_CLUSTER_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)


class ClusterConfig(msgspec.Struct, frozen=True):
    """Which cluster: its name for people and its id for frames, snapshots and certificates."""

    name: str
    id: str


class ReplicaConfig(msgspec.Struct, frozen=True):
    """One replica: where its peers and where its clients reach it."""

    name: str
    peer: Address
    api: Address
    channel: Address | None = None
    """Where programs reach its pipelined channel; None: it offers none."""
    joins: bool = False
    """Whether it is not one of the founders, but was added to the cluster, or will be."""


class AgentConfig(msgspec.Struct, frozen=True):
    """One node's agent. `accounts`: run all as the agent's `own` account, or `switch` to the job's user (root only)."""

    name: str
    directory: Path
    cpus: int
    accounts: Literal["own", "switch"]
    copy_rate_bytes_s: int = 0
    """What one operation may copy in a second, bytes (`copy_rate`); 0 is no limit."""
    kill_wait_s: int = 30
    """Seconds between SIGTERM and SIGKILL of a script that is cancelled or over its time limit (Slurm's KillWait)."""


class TlsConfig(msgspec.Struct, frozen=True):
    """Where the authority's certificate and everybody's `<name>.pem` and `<name>.key` are."""

    authority: Path
    certificates: Path


class StorageConfig(msgspec.Struct, frozen=True):
    """Where and how a replica keeps its journal and snapshots."""

    directory: Path
    map_size_bytes: int
    snapshot_every_entries: int
    snapshots_kept: int


class TimingConfig(msgspec.Struct, frozen=True):
    """How long replicas wait for each other, seconds."""

    election_min_s: float
    election_max_s: float
    heartbeat_s: float
    node_down_s: int = 30
    """Seconds of an agent's silence after which the leader marks its node down."""


class Config(msgspec.Struct, frozen=True):
    """A checked configuration; every path in it is absolute."""

    file: Path
    cluster: ClusterConfig
    replicas: tuple[ReplicaConfig, ...]
    agents: tuple[AgentConfig, ...]
    pools: tuple[Pool, ...]
    tls: TlsConfig
    storage: StorageConfig
    timing: TimingConfig
    policy: Policy
    provider: Local = NO_LOCAL
    """Where this machine has the programs of the site's burst-buffer provider."""
    mail: MailConfig = NO_MAIL

    @classmethod
    def load(cls, path: Path) -> "Config":
        """Read and check the file; ConfigError names file, key, what was found and what would be right."""
        file = Path(os.path.abspath(path))
        return _read(file, _parse(file))

    def replica(self, name: str) -> ReplicaConfig:
        """Return the replica of that name; ConfigError names the near one."""
        for replica in self.replicas:
            if replica.name == name:
                return replica
        raise self._unknown("replica", name, tuple(replica.name for replica in self.replicas))

    def agent(self, name: str) -> AgentConfig:
        """Return the agent of that name; ConfigError names the near one."""
        for agent in self.agents:
            if agent.name == name:
                return agent
        raise self._unknown("agent", name, tuple(agent.name for agent in self.agents))

    @property
    def members(self) -> dict[str, str]:
        """The replicas' peer addresses by name: where to find somebody. Who is a member, the journal says."""
        return {replica.name: str(replica.peer) for replica in self.replicas}

    @property
    def founders(self) -> tuple[ReplicaConfig, ...]:
        """The replicas with which the cluster begins."""
        return tuple(replica for replica in self.replicas if not replica.joins)

    @property
    def endpoints(self) -> tuple[Address, ...]:
        """Where clients reach the replicas."""
        return tuple(replica.api for replica in self.replicas)

    def tls_files(self, name: str) -> TlsFiles:
        """Return the files with which `name` (a replica, an agent, `operator` or a user) proves who it is.

        ConfigError if there are none, TlsRefused if they may not be looked at; whether they are any good is for
        `cluster.security.tls` to say.
        """
        if not is_name(name):
            raise ConfigError(self.file, "tls.certificates", f"{name!r} is not a name", NAME_RULE)
        files = TlsFiles(
            authority=self.tls.authority,
            certificate=self.tls.certificates / f"{name}.pem",
            key=self.tls.certificates / f"{name}.key",
        )
        if not is_there(files.certificate):
            raise ConfigError(
                self.file,
                "tls.certificates",
                f"there is no certificate {files.certificate}",
                f"issue one with `forebay certificate issue {name} --role ROLE`, or name somebody who has one",
            )
        return files

    def wal_directory(self, replica: str) -> Path:
        """Where this replica's LMDB environment is."""
        return self.storage.directory / replica / "wal"

    def snapshot_directory(self, replica: str) -> Path:
        """Where this replica's snapshots are."""
        return self.storage.directory / replica / "snapshots"

    def _unknown(self, kind: str, name: str, known: tuple[str, ...]) -> ConfigError:
        hint = near(name, known)
        return ConfigError(
            self.file, kind, f"there is no {kind} {name!r}{hint}", f"known are {', '.join(known) or 'none'}"
        )


def _parse(file: Path) -> Table:
    try:
        with file.open("rb") as stream:
            data = stream.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            file,
            "",
            f"the configuration cannot be read ({error.strerror})",
            "make one with `forebay init`, or name it with --config",
        ) from error
    if len(data) > CONFIG_BYTES_MAX:
        raise ConfigError(
            file, "", f"the file has more than {CONFIG_BYTES_MAX} bytes", "this is not a configuration of Forebay"
        )
    try:
        return Table(file, "", tomllib.loads(data.decode("utf-8")))
    except UnicodeDecodeError as error:
        raise ConfigError(file, "", f"byte {error.start} is not UTF-8", "save the file as UTF-8") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(file, "", f"this is not TOML: {error}", "correct the line named") from error


def _read(file: Path, top: Table) -> Config:
    base = file.parent
    config = Config(
        file=file,
        cluster=_cluster(top.table("cluster", required=True)),
        replicas=_replicas(top),
        agents=_agents(top, base),
        pools=read_pools(top),
        tls=_tls(top.table("tls"), base),
        storage=_storage(top.table("storage"), base),
        timing=_timing(top.table("timing")),
        policy=read_policy(top, base),
        mail=read_mail(top.table("mail")),
        provider=read_provider(top.table("provider"), base),
    )
    top.finish()
    _refuse_shared(file, config)
    _refuse_unsafe_keys(file, config.tls)
    return config


def _cluster(table: Table) -> ClusterConfig:
    name = read_name(table, "name", "demo")
    cluster_id = table.text("id", example="32 hexadecimal digits made by forebay init")
    if _CLUSTER_ID.fullmatch(cluster_id) is None:
        raise table.refuse("id", f"found {cluster_id!r}", "write the 32 hexadecimal digits that `forebay init` made")
    table.finish()
    return ClusterConfig(name=name, id=cluster_id)


def _replicas(top: Table) -> tuple[ReplicaConfig, ...]:
    tables = top.tables("replica", most=REPLICAS_MAX)
    replicas = []
    for table in tables:
        replica = ReplicaConfig(
            read_name(table, "name", "r1"),
            _address(table, "peer", "7401"),
            _address(table, "api", "7411"),
            _address(table, "channel", "7421") if table.has("channel") else None,
            table.boolean("joins", False),
        )
        table.finish()
        replicas.append(replica)
    founders = sum(1 for replica in replicas if not replica.joins)
    if founders not in REPLICA_COUNTS:
        raise top.refuse("replica", f"found {founders} replicas", "write 1, 3 or 5 tables [[replica]] without joins")
    return tuple(replicas)


def _agents(top: Table, base: Path) -> tuple[AgentConfig, ...]:
    agents = []
    for table in top.tables("agent", most=NODES_MAX):
        name = read_name(table, "name", "n1")
        accounts = cast(Literal["own", "switch"], table.choice("accounts", ("own", "switch"), "own"))
        agents.append(
            AgentConfig(
                name,
                _path(table, "directory", name, base),
                table.integer("cpus", least=1, most=CPUS_MAX),
                accounts,
                table.size("copy_rate", 0),
                table.integer("kill_wait_s", 30, least=0, most=KILL_WAIT_S_MAX),
            )
        )
        table.finish()
    return tuple(agents)


def _tls(table: Table, base: Path) -> TlsConfig:
    certificates = _path(table, "certificates", "tls", base)
    authority = _path(table, "authority", str(certificates / f"{AUTHORITY_NAME}.pem"), base)
    table.finish()
    return TlsConfig(authority=authority, certificates=certificates)


def _storage(table: Table, base: Path) -> StorageConfig:
    map_size = table.size("map_size", 16 * GIB)
    if not MAP_SIZE_BYTES_MIN <= map_size <= MAP_SIZE_BYTES_MAX:
        raise table.refuse("map_size", f"found {map_size} bytes", "write a size from 16MiB to 16TiB")
    storage = StorageConfig(
        directory=_path(table, "directory", ".", base),
        map_size_bytes=map_size,
        snapshot_every_entries=table.integer("snapshot_every_entries", 10_000, least=1, most=1_000_000_000),
        snapshots_kept=table.integer("snapshots_kept", 2, least=1, most=1_000),
    )
    table.finish()
    return storage


def _timing(table: Table) -> TimingConfig:
    least = table.integer("election_min_ms", 300, least=20, most=TIMING_MS_MAX)
    most = table.integer("election_max_ms", 2 * least, least=20, most=2 * TIMING_MS_MAX)
    # As seldom as HEARTBEATS_PER_ELECTION allows, nearly: what an idle cluster costs is its heartbeats.
    heartbeat = table.integer("heartbeat_ms", max(1, least * 3 // 10), least=1, most=TIMING_MS_MAX)
    if most <= least:
        raise table.refuse(
            "election_max_ms",
            f"found {most}, not more than election_min_ms {least}",
            f"write {2 * least}: chance must decide who stands first",
        )
    if heartbeat * HEARTBEATS_PER_ELECTION >= least:
        raise table.refuse(
            "heartbeat_ms",
            f"found {heartbeat}, too close to election_min_ms {least}",
            f"write at most {(least - 1) // HEARTBEATS_PER_ELECTION}: one lost heartbeat must not cost an election",
        )
    node_down_s = table.integer("node_down_s", 30, least=1, most=86_400)
    table.finish()
    return TimingConfig(
        election_min_s=least / 1000, election_max_s=most / 1000, heartbeat_s=heartbeat / 1000, node_down_s=node_down_s
    )


def _path(table: Table, key: str, default: str, base: Path) -> Path:
    return Path(os.path.normpath(base / table.text(key, default)))


def _address(table: Table, key: str, example_port: str) -> Address:
    text = table.text(key, example=f"127.0.0.1:{example_port}")
    try:
        return Address.parse(text)
    except AddressError as error:
        raise table.refuse(key, error.sentence, error.remedy) from error


def _refuse_shared(file: Path, config: Config) -> None:
    """Refuse a name or an address that two have: their certificate files, directories or sockets would be the same."""
    names: dict[str, str] = {AUTHORITY_NAME: "the authority", OPERATOR_NAME: "the operator"}
    addresses: dict[Address, str] = {}
    directories: dict[Path, str] = {config.tls.certificates: "tls.certificates"}
    for number, replica in enumerate(config.replicas, start=1):
        _claim(file, names, replica.name, f"replica[{number}].name")
        _claim(file, addresses, replica.peer, f"replica[{number}].peer")
        _claim(file, addresses, replica.api, f"replica[{number}].api")
        if replica.channel is not None:
            _claim(file, addresses, replica.channel, f"replica[{number}].channel")
        _claim(file, directories, config.storage.directory / replica.name, f"replica[{number}].name")
    for number, agent in enumerate(config.agents, start=1):
        _claim(file, names, agent.name, f"agent[{number}].name")
        _claim(file, directories, agent.directory, f"agent[{number}].directory")


def _claim(file: Path, taken: dict[_T, str], value: _T, place: str) -> None:
    if value in taken:
        raise ConfigError(file, place, f"{str(value)!r} is taken by {taken[value]}", "write another one")
    taken[value] = place


def _refuse_unsafe_keys(file: Path, tls: TlsConfig) -> None:
    found = find_unsafe_keys(tls.certificates)
    if found is not None:
        raise ConfigError(file, "tls.certificates", *found)
