"""The configuration of a cluster: one TOML file, read once, checked whole, never guessed at.

Unknown keys, duplicate names and addresses, sizes and numbers out of bounds are refused before anything starts. Paths
are relative to the file. Each table is a struct, which says of each key its kind, bounds and default.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, field
from msgspec.structs import force_setattr

from cluster.config.access import (
    CONFIG_BYTES_MAX,
    OPERATOR_NAME,
    REPLICAS_MAX,
    Access,
    ClusterConfig,
    ReplicaConfig,
    TlsConfig,
    absolute,
)
from cluster.config.accounts import NO_ACCESS, AccessTable
from cluster.config.drill import HELPERS_MAX, NO_DRILLS, DrillConfig, HelperConfig
from cluster.config.initial_state import (
    PlaceTable,
    PolicyTable,
    PoolTable,
    StagingTable,
    places_of,
    policy_of,
    pools_of,
)
from cluster.config.job_process import JobProcessTable
from cluster.config.limits import DEFAULT_LIMITS, LimitsConfig
from cluster.config.mail import NO_MAIL, MailConfig
from cluster.config.provider import ProviderTable
from cluster.config.toml import Bytes, ConfigError, Document, InvalidValue, Name, Size, Text, Written, key_text, near
from cluster.config.witnesses import WITNESSES_MAX, CheckpointsConfig, WitnessConfig, check_witnesses
from cluster.providers import NO_LOCAL, Local
from cluster.security import AUTHORITY_NAME, find_unsafe_keys
from cluster.system import Address, JobProcess
from replica.model import Place, Pool, Site
from replica.values import CPUS_MAX, NODES_MAX, PLACES_MAX, POOLS_MAX

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

REPLICA_COUNTS: Final = (1, 3, 5)
"""How many replicas a cluster may have: an even number tolerates no more failures than one fewer."""

GIB: Final = 1024**3
MAP_SIZE_BYTES_MIN: Final = 16 * 1024**2
"""Least LMDB map, bytes: below it the first snapshot's worth of entries does not fit."""

MAP_SIZE_BYTES_MAX: Final = 16 * 1024 * GIB
"""Largest LMDB map, bytes: far below the 128 TiB of user address space on x86-64."""

KILL_WAIT_S_MAX: Final = 3_600
"""Longest grace of a script that is ended, seconds: its node is not free for anybody else meanwhile."""

CGROUP_WORDS: Final = ("auto", "own", "none")
"""What an agent may say of its cgroups, beside a path."""

TIMING_MS_MAX: Final = 60_000
"""Largest election timeout, milliseconds: a leader that is missed for a minute helps nobody."""

HEARTBEATS_PER_ELECTION: Final = 3
"""Heartbeats that must fit into the shortest election timeout, with time to spare: one lost packet must not cost an
election. Consensus refuses less (cluster.consensus.interface.Timing)."""

ARCHIVES_MIN: Final = 2
ARCHIVES_MAX: Final = 8
"""Copies of the archive: nothing goes that is not in two; more than eight are somebody else's backup."""

KEEP_DAYS_MAX: Final = 36_500
"""A century."""

KEEP_BYTES_MIN: Final = 1 << 20
"""Least of the ledger that is kept by size: below it nearly nothing is."""

ROOT_USER_ID: Final = 0

_T = TypeVar("_T", str, Address, Path)

_BY_NAME: Final = Path("NAME")
"""Directory of an agent whose table does not say: it is called as the agent is."""


class AgentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One node's agent.

    `accounts`: `switch` to the job's user (the agent is root), or run all as the agent's `own` account (not root);
    `own-as-root`: run all jobs as root, so that whoever may submit has this machine.
    """

    name: Annotated[Written[Name], Meta(examples=["n1"])]
    cpus: Annotated[int, Meta(ge=1, le=CPUS_MAX)]
    directory: Path = _BY_NAME
    accounts: Literal["own", "switch", "own-as-root"] = "own"
    cgroup: Annotated[Text, Meta(examples=["auto", "own", "none", "/sys/fs/cgroup/forebay"])] = "auto"
    """Where processes of jobs are held, so that all of them can be ended: below the agent's own cgroup, where it is
    delegated to the agent (`own`; `auto`: there or nowhere), or below a cgroup (v2) that is left to it."""
    buffer_image: Literal["none", "ext4"] = "none"
    """Whether each buffer is a file system of its own, in a file of its size that is mounted (the agent is root);
    `none`: a directory, held to its capacity by quotas where there are any."""
    copy_rate_bytes_s: Bytes = field(default=Size(0), name="copy_rate")
    """What one operation may copy in a second, bytes; 0, which cannot be written, is no limit."""
    kill_wait_s: Annotated[int, Meta(ge=0, le=KILL_WAIT_S_MAX)] = 30
    """Seconds between SIGTERM and SIGKILL of a script that is cancelled or over its time limit (Slurm's KillWait)."""

    def __post_init__(self) -> None:
        """Call the directory as the agent where nothing is said of it."""
        if self.directory is _BY_NAME:
            force_setattr(self, "directory", Path(self.name))
        if self.cgroup not in CGROUP_WORDS and not self.cgroup.startswith("/"):
            words = ", ".join(f'"{word}"' for word in CGROUP_WORDS)
            raise InvalidValue(f"found {self.cgroup!r:.60}", f"write {words} or an absolute path", "cgroup")

    @property
    def mode(self) -> Literal["own", "switch"]:
        """Whose account jobs run as: the agent's own, whichever that is, or their users'."""
        return "switch" if self.accounts == "switch" else "own"


class StorageConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where and how a replica keeps its journal and snapshots."""

    directory: Path = Path()
    map_size_bytes: Bytes = field(default=Size(16 * GIB), name="map_size")
    snapshot_every_entries: Annotated[int, Meta(ge=1, le=1_000_000_000)] = 10_000
    snapshots_kept: Annotated[int, Meta(ge=1, le=1_000)] = 2

    def __post_init__(self) -> None:
        """Refuse a map that is too small for a journal or too large for an address space; InvalidValue."""
        if not MAP_SIZE_BYTES_MIN <= self.map_size_bytes <= MAP_SIZE_BYTES_MAX:
            sentence = f"found {self.map_size_bytes} bytes"
            raise InvalidValue(sentence, "write a size from 16MiB to 16TiB", "map_size")


class RetentionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much of its ledger this machine's replica keeps, and where the rest goes; what replicas agree on it is not.

    Nothing reads it but `forebay audit retain`. With neither `keep_days` nor `keep` that archives, and prunes nothing.
    """

    archives: Annotated[tuple[Path, ...], Meta(min_length=ARCHIVES_MIN, max_length=ARCHIVES_MAX)]
    """Directories, each of which gets all of the ledger: on file systems that do not fail together."""
    keys: Path
    """The keys that replicas sign checkpoints with, as `forebay audit keys` prints them."""
    keep_days: Annotated[int, Meta(ge=0, le=KEEP_DAYS_MAX)] = 0
    """What is older goes, days of the replicated clock; 0: however old."""
    keep_bytes: Bytes = field(default=Size(0), name="keep")
    """What goes beyond the newest entries of so many bytes; 0, which cannot be written: however much."""

    def __post_init__(self) -> None:
        """Refuse one directory for two copies, and to keep next to nothing; InvalidValue."""
        if len(set(self.archives)) < len(self.archives):
            raise InvalidValue("one directory is named twice", "name a directory for each copy", "archives")
        if 0 < self.keep_bytes < KEEP_BYTES_MIN:
            raise InvalidValue(f"found {self.keep_bytes} bytes", "write at least 1MiB", "keep")


class TracesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which collector of OpenTelemetry gets traces of jobs, by OTLP over HTTP, where this machine's replica leads."""

    endpoint: Text = ""
    """Its address; empty: none. Without a path it is asked at /v1/traces, as OTLP has it."""

    def __post_init__(self) -> None:
        """Refuse what is no address, or has a name and a password; InvalidValue."""
        if self.endpoint and not re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", self.endpoint):
            remedy = 'write its address without a name, such as "http://127.0.0.1:4318"'
            raise InvalidValue(f"found {self.endpoint!r:.60}", remedy, "endpoint")

    @property
    def url(self) -> str:
        """Where spans are posted."""
        has_path = self.endpoint.partition("://")[2].partition("/")[2]
        return self.endpoint if has_path else f"{self.endpoint.rstrip('/')}/v1/traces"


NO_TRACES = TracesConfig()


class TimingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long replicas wait for each other, milliseconds; 0, which cannot be written: what fits `election_min_ms`."""

    election_min_ms: Annotated[int, Meta(ge=20, le=TIMING_MS_MAX)] = 300
    election_max_ms: Annotated[int, Meta(ge=20, le=2 * TIMING_MS_MAX)] = 0
    heartbeat_ms: Annotated[int, Meta(ge=1, le=TIMING_MS_MAX)] = 0
    node_down_s: Annotated[int, Meta(ge=1, le=86_400)] = 30
    """Seconds of an agent's silence after which the leader marks its node down."""

    def __post_init__(self) -> None:
        """Complete what is not said, and refuse times that do not fit together; InvalidValue."""
        least = self.election_min_ms
        most = self.election_max_ms or 2 * least
        # As seldom as HEARTBEATS_PER_ELECTION allows, nearly: what an idle cluster costs is its heartbeats.
        heartbeat = self.heartbeat_ms or max(1, least * 3 // 10)
        if most <= least:
            sentence = f"found {most}, not more than election_min_ms {least}"
            remedy = f"write {2 * least}: chance must decide who stands first"
            raise InvalidValue(sentence, remedy, "election_max_ms")
        if heartbeat * HEARTBEATS_PER_ELECTION >= least:
            bound = (least - 1) // HEARTBEATS_PER_ELECTION
            sentence = f"found {heartbeat}, too close to election_min_ms {least}"
            remedy = f"write at most {bound}: one lost heartbeat must not cost an election"
            raise InvalidValue(sentence, remedy, "heartbeat_ms")
        force_setattr(self, "election_max_ms", most)
        force_setattr(self, "heartbeat_ms", heartbeat)

    @property
    def election_min_s(self) -> float:
        """The shortest election timeout, seconds."""
        return self.election_min_ms / 1000

    @property
    def election_max_s(self) -> float:
        """The longest election timeout, seconds."""
        return self.election_max_ms / 1000

    @property
    def heartbeat_s(self) -> float:
        """The time between two heartbeats, seconds."""
        return self.heartbeat_ms / 1000


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tables of the file, as they are written."""

    cluster: ClusterConfig
    replica: Annotated[tuple[ReplicaConfig, ...], Meta(max_length=REPLICAS_MAX)] = ()
    agent: Annotated[tuple[AgentConfig, ...], Meta(max_length=NODES_MAX)] = ()
    place: Annotated[tuple[PlaceTable, ...], Meta(max_length=PLACES_MAX)] = ()
    pool: Annotated[tuple[PoolTable, ...], Meta(max_length=POOLS_MAX)] = ()
    tls: TlsConfig = TlsConfig()
    access: AccessTable = NO_ACCESS
    storage: StorageConfig = StorageConfig()
    timing: TimingConfig = TimingConfig()
    staging: StagingTable = StagingTable()
    policy: PolicyTable = PolicyTable()
    mail: MailConfig = NO_MAIL
    provider: ProviderTable = ProviderTable()
    job_process: JobProcessTable = JobProcessTable()
    limits: LimitsConfig = DEFAULT_LIMITS
    witness: Annotated[tuple[WitnessConfig, ...], Meta(max_length=WITNESSES_MAX)] = ()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    helper: Annotated[tuple[HelperConfig, ...], Meta(max_length=HELPERS_MAX)] = ()
    drill: DrillConfig = NO_DRILLS
    retention: RetentionConfig | None = None
    traces: TracesConfig = NO_TRACES


class Config(Access, frozen=True, kw_only=True):
    """A checked configuration; every path in it is absolute."""

    agents: tuple[AgentConfig, ...]
    pools: tuple[Pool, ...]
    places: tuple[Place, ...]
    storage: StorageConfig
    timing: TimingConfig
    policy: Site
    provider: Local = NO_LOCAL
    """Where this machine has the programs of the site's burst-buffer provider."""
    mail: MailConfig = NO_MAIL
    job_process: JobProcess = JobProcess()
    """What every process of a job gets."""
    limits: LimitsConfig = DEFAULT_LIMITS
    witnesses: tuple[WitnessConfig, ...] = ()
    """Who is asked to cosign checkpoints."""
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    helpers: tuple[HelperConfig, ...] = ()
    """Who does to each machine what a drill asks for."""
    drill: DrillConfig = NO_DRILLS
    """What drills may do to this machine."""
    retention: RetentionConfig | None = None
    """How much of the ledger replicas keep; None: all of it."""
    traces: TracesConfig = NO_TRACES
    """Which collector gets traces of jobs."""

    @property
    def witnesses_needed(self) -> int:
        """How many of them must have cosigned a checkpoint that is called witnessed; 0 where there are none."""
        return self.checkpoints.needed(len(self.witnesses))

    @classmethod
    def load(cls, path: Path) -> "Config":
        """Read and check the file; ConfigError names file, key, what was found and what would be right."""
        file = Path(os.path.abspath(path))
        return _read(file, Document.load(file, bytes_max=CONFIG_BYTES_MAX))

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

    def helper(self, name: str) -> HelperConfig:
        """Return the helper of that name; ConfigError names the near one."""
        for helper in self.helpers:
            if helper.name == name:
                return helper
        raise self._unknown("helper", name, tuple(helper.name for helper in self.helpers))

    def helper_of(self, target: str) -> HelperConfig | None:
        """Return the helper on the machine of a replica or an agent, None if there is none."""
        return next((helper for helper in self.helpers if target in helper.targets), None)

    def check_accounts(self, agent: AgentConfig, user_id: int) -> None:
        """Refuse to run an agent as an account (`user_id`) that its `accounts` is not for; ConfigError.

        Not when the file is read: it is the same on machines where the agent is not, or runs as somebody else.
        """
        is_root = user_id == ROOT_USER_ID
        if is_root is (agent.accounts != "own"):
            return
        if is_root:
            sentence = f"found 'own', and agent {agent.name} runs as root: every job would be root on this machine"
            remedy = (
                "write 'switch': jobs then run as their users; or 'own-as-root' if whoever submits may be root here"
            )
        else:
            sentence = f"found {agent.accounts!r}, and agent {agent.name} does not run as root"
            remedy = "run it as root, or write 'own': all jobs then run as the agent's account"
        document = Document.load(self.file, bytes_max=CONFIG_BYTES_MAX)
        raise document.refuse(("agent", self.agents.index(agent), "accounts"), sentence, remedy)

    def provider_here(self, *more: Path) -> Local:
        """Return what this machine's file says of its provider, with the directories of whoever may run here.

        Nothing below those, or `more`, is a program, whoever names it: what lies there was written by others.
        """
        agents = (agent.directory for agent in self.agents)
        replicas = (self.storage.directory / replica.name for replica in self.replicas)
        there = [str(path) for path in (self.tls.certificates, *replicas, *agents) if os.path.isdir(path)]
        return msgspec.structs.replace(self.provider, closed=(*there, *map(str, more)))

    @property
    def members(self) -> dict[str, str]:
        """The replicas' peer addresses by name: where to find somebody. Who is a member, the journal says."""
        return {replica.name: str(replica.peer) for replica in self.replicas}

    @property
    def founders(self) -> tuple[ReplicaConfig, ...]:
        """The replicas with which the cluster begins."""
        return tuple(replica for replica in self.replicas if not replica.joins)

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


def _read(file: Path, document: Document) -> Config:
    tables, base = document.decode(_File), file.parent
    founders = sum(1 for replica in tables.replica if not replica.joins)
    if founders not in REPLICA_COUNTS:
        remedy = "write 1, 3 or 5 tables [[replica]] without joins"
        raise document.refuse(("replica",), f"found {founders} replicas", remedy)
    check_witnesses(document, tables.witness, tables.checkpoints)
    places = places_of(document, tables.place)
    config = Config(
        file=file,
        cluster=tables.cluster,
        replicas=tables.replica,
        agents=tuple(absolute(agent, base) for agent in tables.agent),
        pools=pools_of(document, tables.pool, places),
        places=places,
        tls=absolute(tables.tls, base),
        access=absolute(tables.access, base),
        owner_uid=document.owner_uid,
        storage=absolute(tables.storage, base),
        timing=tables.timing,
        policy=policy_of(document, tables.policy, tables.staging, base),
        mail=tables.mail,
        provider=tables.provider.local(base, tables.cluster.name),
        job_process=tables.job_process.settings(),
        limits=tables.limits,
        witnesses=tuple(absolute(one, base) for one in tables.witness),
        checkpoints=tables.checkpoints,
        helpers=tables.helper,
        drill=absolute(tables.drill, base),
        retention=None if tables.retention is None else absolute(tables.retention, base),
        traces=tables.traces,
    )
    _refuse_shared(document, config)
    found = find_unsafe_keys(config.tls.certificates)
    if found is not None:
        raise document.refuse(("tls", "certificates"), *found)
    return config


def _refuse_shared(document: Document, config: Config) -> None:
    """Refuse a name or an address that two have: their certificate files, directories or sockets would be the same."""
    names: dict[str, str] = {AUTHORITY_NAME: "the authority", OPERATOR_NAME: "the operator"}
    addresses: dict[Address, str] = {}
    directories: dict[Path, str] = {config.tls.certificates: "tls.certificates"}

    def claim(taken: dict[_T, str], value: _T, *path: str | int) -> None:
        if value in taken:
            raise document.refuse(path, f"{str(value)!r} is taken by {taken[value]}", "write another one")
        taken[value] = key_text(path)

    for number, replica in enumerate(config.replicas):
        claim(names, replica.name, "replica", number, "name")
        claim(addresses, replica.peer, "replica", number, "peer")
        claim(addresses, replica.api, "replica", number, "api")
        if replica.channel is not None:
            claim(addresses, replica.channel, "replica", number, "channel")
        claim(directories, config.storage.directory / replica.name, "replica", number, "name")
    for number, agent in enumerate(config.agents):
        claim(names, agent.name, "agent", number, "name")
        claim(directories, agent.directory, "agent", number, "directory")
    targets: dict[str, str] = {}
    processes = (*(one.name for one in config.replicas), *(one.name for one in config.agents))
    for number, helper in enumerate(config.helpers):
        claim(names, helper.name, "helper", number, "name")
        claim(addresses, helper.address, "helper", number, "address")
        claim(directories, config.drill.directory / helper.name, "helper", number, "name")
        for place, target in enumerate(helper.targets):
            if target not in processes:
                sentence = f"there is no replica or agent {target!r}{near(target, processes)}"
                remedy = f"name those of its machine: {', '.join(processes)}"
                raise document.refuse(("helper", number, "targets", place), sentence, remedy)
            claim(targets, target, "helper", number, "targets", place)
