"""Configuration of a cluster: one TOML file, read once and checked completely.

Unknown keys, duplicate names and addresses, and sizes and numbers out of range are rejected before anything starts.
Paths are relative to the file. Each table is a struct with the type, limits and default of its keys.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, field
from msgspec.structs import force_setattr

from forebay.cluster.config.access import (
    CONFIG_BYTES_MAX,
    OPERATOR_NAME,
    REPLICAS_MAX,
    AccessConfig,
    ClusterConfig,
    ReplicaConfig,
    TlsConfig,
    absolute,
)
from forebay.cluster.config.accounts import NO_ACCESS, AccessTable
from forebay.cluster.config.drill import HELPERS_MAX, NO_DRILLS, DrillConfig, HelperConfig
from forebay.cluster.config.initial_state import (
    FilesystemTable,
    PolicyTable,
    PoolTable,
    StagingTable,
    filesystems_of,
    policy_of,
    pools_of,
)
from forebay.cluster.config.job_process import JobProcessTable
from forebay.cluster.config.limits import DEFAULT_LIMITS, LimitsConfig
from forebay.cluster.config.mail import NO_MAIL, MailConfig
from forebay.cluster.config.provider import ProviderTable
from forebay.cluster.config.sinks import SinkConfig, check_sinks
from forebay.cluster.config.toml import (
    Bytes,
    ConfigError,
    Document,
    InvalidValue,
    Name,
    Size,
    Text,
    Written,
    key_text,
    near,
)
from forebay.cluster.config.witnesses import WITNESSES_MAX, CheckpointsConfig, WitnessConfig, check_witnesses
from forebay.cluster.providers import NO_LOCAL, Local
from forebay.cluster.security import AUTHORITY_NAME, find_unsafe_keys
from forebay.cluster.system import Address, JobProcess
from forebay.replica.model import Pool, SharedFilesystem, Site
from forebay.replica.values import CPUS_MAX, FILESYSTEMS_MAX, NODES_MAX, POOLS_MAX, SINKS_MAX

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
"""Possible numbers of founding replicas: an even number tolerates no more failures than the next smaller odd number."""

GIB: Final = 1024**3
MAP_SIZE_BYTES_MIN: Final = 16 * 1024**2
"""Minimum LMDB map, bytes: a smaller map cannot hold the entries of one snapshot interval."""

MAP_SIZE_BYTES_MAX: Final = 16 * 1024 * GIB
"""Maximum LMDB map, bytes: far below the 128 TiB of user address space on x86-64."""

KILL_WAIT_S_MAX: Final = 3_600
"""Longest grace period of a script, seconds, during which its node is occupied."""

CGROUP_WORDS: Final = ("auto", "own", "none")
"""Values of an agent's `cgroup` setting besides a path."""

TIMING_MS_MAX: Final = 60_000
"""Longest election timeout, milliseconds: longer timeouts leave the cluster without a leader for too long."""

HEARTBEATS_PER_ELECTION: Final = 3
"""Minimum number of heartbeats in the shortest election timeout, so that a lost packet causes no election.

Consensus itself checks less strictly (cluster.consensus.interface.Timing).
"""

ARCHIVES_MIN: Final = 2
ARCHIVES_MAX: Final = 8
"""Minimum and maximum number of archives: pruning requires two copies, and more than eight need a backup system."""

KEEP_DAYS_MAX: Final = 36_500
"""Maximum of keep_days, days: a hundred years."""

KEEP_BYTES_MIN: Final = 1 << 20
"""Minimum size of the ledger to keep, bytes: less would keep almost nothing."""

ROOT_USER_ID: Final = 0

_T = TypeVar("_T", str, Address, Path)

TOOL_DIRECTORIES_MAX: Final = 16
"""Directories of tools, count: each is searched for every tool."""

GROUP_MAX: Final = 2**32 - 2
"""Largest group ID; the next one means "unchanged" to chown(2)."""

_BY_NAME: Final = Path("NAME")
"""Default directory of an agent: named after the agent."""


class AgentConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Agent of one node.

    `accounts`: `switch` runs jobs as their users (the agent must be root). `own` runs all jobs as the agent's account
    (not root). `own-as-root` runs all jobs as root, which makes every user who may submit root on the machine.
    """

    name: Annotated[Written[Name], Meta(examples=["n1"])]
    cpus: Annotated[int, Meta(ge=1, le=CPUS_MAX)]
    directory: Path = _BY_NAME
    accounts: Literal["own", "switch", "own-as-root"] = "own"
    cgroup: Annotated[Text, Meta(examples=["auto", "own", "none", "/sys/fs/cgroup/forebay"])] = "auto"
    """Parent of the jobs' cgroups, which make it possible to kill all processes of a job.

    `own` is the agent's cgroup, which must be delegated. `auto` is `own` if that is delegated, otherwise `none`. A path
    is a delegated cgroup v2 directory.
    """
    buffer_image: Literal["none", "ext4"] = "none"
    """Form of buffers: `ext4` mounts an image file of the buffer's size (the agent must be root).

    `none` creates a directory, with a quota if available.
    """
    copy_rate_bytes_s: Bytes = field(default=Size(0), name="copy_rate")
    """Copy rate of one operation, bytes per second; 0, only the default, means unlimited."""
    kill_wait_s: Annotated[int, Meta(ge=0, le=KILL_WAIT_S_MAX)] = 30
    """Seconds between SIGTERM and SIGKILL of a script that is cancelled or exceeds its time limit (Slurm's
    KillWait).
    """

    tool_directories: Annotated[tuple[Text, ...], Meta(max_length=TOOL_DIRECTORIES_MAX)] = ()
    """Directories of the tools of shared filesystems, such as `lfs`; by default those of Debian, Red Hat, GPFS and
    BeeGFS.
    """
    filesystem_command: Text = ""
    """The site's program for shared filesystems with `quota = "command"` or `layout = "command"`."""
    quota_groups: Annotated[Text, Meta(examples=["2000000-2099999"])] = ""
    """First and last ID of the groups that limit buffers on BeeGFS; no account may be in one."""

    def __post_init__(self) -> None:
        """Set the default directory, and check `cgroup` and the settings for shared filesystems.

        Raises:
            InvalidValue: One of them is invalid.
        """
        for number, path in enumerate(self.tool_directories):
            if not path.startswith("/"):
                raise InvalidValue(f"found {path!r:.60}", "write an absolute path", "tool_directories", number)
        if self.filesystem_command and not self.filesystem_command.startswith("/"):
            raise InvalidValue(f"found {self.filesystem_command!r:.60}", "write an absolute path", "filesystem_command")
        self.group_range()
        if self.directory is _BY_NAME:
            force_setattr(self, "directory", Path(self.name))
        if self.cgroup not in CGROUP_WORDS and not self.cgroup.startswith("/"):
            words = ", ".join(f'"{word}"' for word in CGROUP_WORDS)
            raise InvalidValue(f"found {self.cgroup!r:.60}", f"write {words} or an absolute path", "cgroup")

    def group_range(self) -> tuple[int, int]:
        """Return the first and last group of `quota_groups`; (0, 0): none.

        Raises:
            InvalidValue: `quota_groups` is invalid.
        """
        if not self.quota_groups:
            return 0, 0
        first, dash, last = self.quota_groups.partition("-")
        if not (dash and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) <= GROUP_MAX):
            remedy = f"write the first and the last ID, at most {GROUP_MAX}, for example 2000000-2099999"
            raise InvalidValue(f"found {self.quota_groups!r:.60}", remedy, "quota_groups")
        return int(first), int(last)

    @property
    def mode(self) -> Literal["own", "switch"]:
        """Account for jobs: the agent's account (`own`), or that of the job's user (`switch`)."""
        return "switch" if self.accounts == "switch" else "own"


class StorageConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Storage of a replica's journal and snapshots."""

    directory: Path = Path()
    map_size_bytes: Bytes = field(default=Size(16 * GIB), name="map_size")
    snapshot_every_entries: Annotated[int, Meta(ge=1, le=1_000_000_000)] = 10_000
    snapshots_kept: Annotated[int, Meta(ge=1, le=1_000)] = 2

    def __post_init__(self) -> None:
        """Check the map's size.

        Raises:
            InvalidValue: The map is too small for a journal, or too large for an address space.
        """
        if not MAP_SIZE_BYTES_MIN <= self.map_size_bytes <= MAP_SIZE_BYTES_MAX:
            sentence = f"found {self.map_size_bytes} bytes"
            raise InvalidValue(sentence, "write a size from 16MiB to 16TiB", "map_size")


class RetentionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Retention of the ledger on this machine's replica, and its archives; not replicated.

    Only `forebay audit retain` reads this table. Without `keep_days` and `keep`, the command archives but prunes
    nothing.
    """

    archives: Annotated[tuple[Path, ...], Meta(min_length=ARCHIVES_MIN, max_length=ARCHIVES_MAX)]
    """Archive directories, each with the whole ledger, on filesystems with independent failures."""
    keys: Path
    """Public keys of the replicas' checkpoint signatures, as printed by `forebay audit keys`."""
    keep_days: Annotated[int, Meta(ge=0, le=KEEP_DAYS_MAX)] = 0
    """Prune entries older than this, days of the replicated clock; 0 for no limit."""
    keep_bytes: Bytes = field(default=Size(0), name="keep")
    """Prune entries beyond this total size, bytes; 0, only the default, means no limit."""

    def __post_init__(self) -> None:
        """Check the archive directories and `keep`.

        Raises:
            InvalidValue: A directory is listed twice, or `keep` is too small.
        """
        if len(set(self.archives)) < len(self.archives):
            raise InvalidValue("a directory is listed twice", "use a different directory for each copy", "archives")
        if 0 < self.keep_bytes < KEEP_BYTES_MIN:
            raise InvalidValue(f"found {self.keep_bytes} bytes", "write at least 1MiB", "keep")


class TracesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenTelemetry collector that receives job traces by OTLP over HTTP while this machine's replica leads."""

    endpoint: Text = ""
    """Address of the collector; empty for none. Without a path, /v1/traces is used, as in OTLP."""

    def __post_init__(self) -> None:
        """Check the address.

        Raises:
            InvalidValue: The address is malformed or contains credentials.
        """
        if self.endpoint and not re.fullmatch(r"https?://[^\s/@?#]+(/[^\s@?#]*)?", self.endpoint):
            remedy = 'write its address without a name, such as "http://127.0.0.1:4318"'
            raise InvalidValue(f"found {self.endpoint!r:.60}", remedy, "endpoint")

    @property
    def url(self) -> str:
        """URL that receives spans."""
        has_path = self.endpoint.partition("://")[2].partition("/")[2]
        return self.endpoint if has_path else f"{self.endpoint.rstrip('/')}/v1/traces"


NO_TRACES = TracesConfig()


class TimingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Timeouts between replicas, milliseconds; 0, only the default, derives them from `election_min_ms`."""

    election_min_ms: Annotated[int, Meta(ge=20, le=TIMING_MS_MAX)] = 300
    election_max_ms: Annotated[int, Meta(ge=20, le=2 * TIMING_MS_MAX)] = 0
    heartbeat_ms: Annotated[int, Meta(ge=1, le=TIMING_MS_MAX)] = 0
    node_down_s: Annotated[int, Meta(ge=1, le=86_400)] = 30
    """Seconds without contact after which the leader marks an agent's node down."""

    def __post_init__(self) -> None:
        """Fill in defaults, and check the times.

        Raises:
            InvalidValue: The times are inconsistent.
        """
        least = self.election_min_ms
        most = self.election_max_ms or 2 * least
        # Use nearly the longest permitted period, because heartbeats are the load of an idle cluster.
        heartbeat = self.heartbeat_ms or max(1, least * 3 // 10)
        if most <= least:
            sentence = f"found {most}, not more than election_min_ms {least}"
            remedy = f"write {2 * least}: timeouts of replicas must differ at random"
            raise InvalidValue(sentence, remedy, "election_max_ms")
        if heartbeat * HEARTBEATS_PER_ELECTION >= least:
            bound = (least - 1) // HEARTBEATS_PER_ELECTION
            sentence = f"found {heartbeat}, too close to election_min_ms {least}"
            remedy = f"write at most {bound}: one lost heartbeat must not cause an election"
            raise InvalidValue(sentence, remedy, "heartbeat_ms")
        force_setattr(self, "election_max_ms", most)
        force_setattr(self, "heartbeat_ms", heartbeat)

    @property
    def election_min_s(self) -> float:
        """Shortest election timeout, seconds."""
        return self.election_min_ms / 1000

    @property
    def election_max_s(self) -> float:
        """Longest election timeout, seconds."""
        return self.election_max_ms / 1000

    @property
    def heartbeat_s(self) -> float:
        """Time between two heartbeats, seconds."""
        return self.heartbeat_ms / 1000


class _ConfigFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tables of the file as written."""

    cluster: ClusterConfig
    replica: Annotated[tuple[ReplicaConfig, ...], Meta(max_length=REPLICAS_MAX)] = ()
    agent: Annotated[tuple[AgentConfig, ...], Meta(max_length=NODES_MAX)] = ()
    filesystem: Annotated[tuple[FilesystemTable, ...], Meta(max_length=FILESYSTEMS_MAX)] = ()
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
    sink: Annotated[tuple[SinkConfig, ...], Meta(max_length=SINKS_MAX)] = ()


class Config(AccessConfig, frozen=True, kw_only=True):
    """Checked configuration; all paths are absolute."""

    agents: tuple[AgentConfig, ...]
    pools: tuple[Pool, ...]
    filesystems: tuple[SharedFilesystem, ...]
    storage: StorageConfig
    timing: TimingConfig
    policy: Site
    provider: Local = NO_LOCAL
    """Provider programs of this machine."""
    mail: MailConfig = NO_MAIL
    job_process: JobProcess = JobProcess()
    """Settings of all processes of a job."""
    limits: LimitsConfig = DEFAULT_LIMITS
    witnesses: tuple[WitnessConfig, ...] = ()
    """Witnesses that cosign checkpoints."""
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    helpers: tuple[HelperConfig, ...] = ()
    """Helpers that perform a drill's actions on each machine."""
    drill: DrillConfig = NO_DRILLS
    """Permissions of drills on this machine."""
    retention: RetentionConfig | None = None
    """Retention of the ledger; None keeps everything."""
    traces: TracesConfig = NO_TRACES
    """Collector of job traces."""
    sinks: tuple[SinkConfig, ...] = ()
    """Receivers of events."""

    @property
    def witnesses_needed(self) -> int:
        """Cosignatures required for a witnessed checkpoint; 0 without witnesses."""
        return self.checkpoints.required_cosignatures(len(self.witnesses))

    @classmethod
    def load(cls, path: Path) -> "Config":
        """Read and check the file.

        Raises:
            ConfigError: The file is invalid; the message names file, key, value and remedy.
        """
        file = Path(os.path.abspath(path))
        return _read_config(file, Document.load(file, bytes_max=CONFIG_BYTES_MAX))

    def replica(self, name: str) -> ReplicaConfig:
        """Return the named replica.

        Raises:
            ConfigError: There is no such replica; the message suggests a similar name.
        """
        for replica in self.replicas:
            if replica.name == name:
                return replica
        raise self._unknown("replica", name, tuple(replica.name for replica in self.replicas))

    def agent(self, name: str) -> AgentConfig:
        """Return the named agent.

        Raises:
            ConfigError: There is no such agent; the message suggests a similar name.
        """
        for agent in self.agents:
            if agent.name == name:
                return agent
        raise self._unknown("agent", name, tuple(agent.name for agent in self.agents))

    def helper(self, name: str) -> HelperConfig:
        """Return the named helper.

        Raises:
            ConfigError: There is no such helper; the message suggests a similar name.
        """
        for helper in self.helpers:
            if helper.name == name:
                return helper
        raise self._unknown("helper", name, tuple(helper.name for helper in self.helpers))

    def helper_of(self, target: str) -> HelperConfig | None:
        """Return the helper on the machine of a replica or an agent, or None."""
        return next((helper for helper in self.helpers if target in helper.targets), None)

    def check_accounts(self, agent: AgentConfig, user_id: int) -> None:
        """Check that an agent may run as this account with its `accounts` setting.

        Reading the file does not include this check, because the file is also read on machines without the agent.

        Raises:
            ConfigError: The account and the setting do not match.
        """
        is_root = user_id == ROOT_USER_ID
        if is_root is (agent.accounts != "own"):
            return
        if is_root:
            sentence = f"found 'own', and agent {agent.name} runs as root: every job would be root on this machine"
            remedy = "write 'switch': jobs then run as their users; or 'own-as-root' if every user may be root here"
        else:
            sentence = f"found {agent.accounts!r}, and agent {agent.name} does not run as root"
            remedy = "run it as root, or write 'own': all jobs then run as the agent's account"
        document = Document.load(self.file, bytes_max=CONFIG_BYTES_MAX)
        raise document.refuse(("agent", self.agents.index(agent), "accounts"), sentence, remedy)

    def provider_here(self, *more: Path) -> Local:
        """Return this machine's provider settings, with the directories of local processes, and `more`, as closed.

        No program below a closed directory is run, because other accounts may have written it.
        """
        agents = (agent.directory for agent in self.agents)
        replicas = (self.storage.directory / replica.name for replica in self.replicas)
        there = [str(path) for path in (self.tls.certificates, *replicas, *agents) if os.path.isdir(path)]
        return msgspec.structs.replace(self.provider, closed=(*there, *map(str, more)))

    @property
    def members(self) -> dict[str, str]:
        """Peer addresses of the configured replicas by name; the actual members are in the journal."""
        return {replica.name: str(replica.peer) for replica in self.replicas}

    @property
    def founders(self) -> tuple[ReplicaConfig, ...]:
        """Replicas that found the cluster."""
        return tuple(replica for replica in self.replicas if not replica.joins)

    def wal_directory(self, replica: str) -> Path:
        """Return the directory of a replica's LMDB environment."""
        return self.storage.directory / replica / "wal"

    def snapshot_directory(self, replica: str) -> Path:
        """Return the directory of a replica's snapshots."""
        return self.storage.directory / replica / "snapshots"

    def _unknown(self, kind: str, name: str, known: tuple[str, ...]) -> ConfigError:
        hint = near(name, known)
        return ConfigError(
            self.file, kind, f"there is no {kind} {name!r}{hint}", f"known are {', '.join(known) or 'none'}"
        )


def _read_config(file: Path, document: Document) -> Config:
    tables, base = document.decode(_ConfigFile), file.parent
    founders = sum(1 for replica in tables.replica if not replica.joins)
    if founders not in REPLICA_COUNTS:
        remedy = "write 1, 3 or 5 tables [[replica]] without joins"
        raise document.refuse(("replica",), f"found {founders} replicas", remedy)
    check_witnesses(document, tables.witness, tables.checkpoints)
    filesystems = filesystems_of(document, tables.filesystem)
    config = Config(
        file=file,
        cluster=tables.cluster,
        replicas=tables.replica,
        agents=tuple(absolute(agent, base) for agent in tables.agent),
        pools=pools_of(document, tables.pool, filesystems),
        filesystems=filesystems,
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
        sinks=tuple(absolute(one, base) for one in tables.sink),
    )
    check_sinks(document, config.sinks)
    _refuse_shared(document, config)
    found = find_unsafe_keys(config.tls.certificates)
    if found is not None:
        raise document.refuse(("tls", "certificates"), *found)
    return config


def _refuse_shared(document: Document, config: Config) -> None:
    """Reject duplicate names and addresses, whose certificates, directories or sockets would collide."""
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
                sentence = f"replica or agent {target!r} does not exist{near(target, processes)}"
                remedy = f"name those of its machine: {', '.join(processes)}"
                raise document.refuse(("helper", number, "targets", place), sentence, remedy)
            claim(targets, target, "helper", number, "targets", place)
