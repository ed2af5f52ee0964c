"""Where a cluster is and who one is to it: what a command that asks it needs of forebay.toml.

Such a command reads the tables [cluster], [[replica]], [tls] and [access], and no table that this page does not name;
what the others hold is for whoever uses it, and read by `cluster.config.config`. Most of a command is what it imports.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from cluster.config.accounts import NO_ACCESS, AccessTable
from cluster.config.toml import NOBODYS, ConfigError, Document, InvalidValue, Name, Text, Written
from cluster.security import AUTHORITY_NAME, NAME_RULE, TlsFiles, find_unsafe_keys, is_name, is_there
from cluster.system import Address

CONFIG_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of the file: 10,000 agents of about 100 bytes each fit several times."""

REPLICAS_MAX: Final = 16
"""Replicas in the file: the founders, and those that were added since; only nine may be members at a time."""

DOORS_MAX: Final = 16
"""Doors of a replica, count: more than there is work for in front of one core."""

OPERATOR_NAME: Final = "operator"
"""Name of the certificate that `forebay cluster init` makes for the operator."""

_Table = TypeVar("_Table", bound=msgspec.Struct)

CLUSTER_ID_DIGITS: Final = 32

_WITH_THE_OTHERS: Final = Path("CERTIFICATES", f"{AUTHORITY_NAME}.pem")
"""The authority's certificate where [tls] does not say."""


class ClusterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which cluster: its name for people and its id for frames, snapshots and certificates."""

    name: Annotated[Written[Name], Meta(examples=["demo"])]
    id: Annotated[Text, Meta(examples=["32 hexadecimal digits made by forebay cluster init"])]

    def __post_init__(self) -> None:
        """Refuse an id that is none; InvalidValue."""
        if len(self.id) != CLUSTER_ID_DIGITS or not set(self.id) <= set("0123456789abcdef"):
            remedy = f"write the {CLUSTER_ID_DIGITS} hexadecimal digits that `forebay cluster init` made"
            raise InvalidValue(f"found {self.id!r:.60}", remedy, "id")


class ReplicaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One replica: where its peers and where its clients reach it."""

    name: Annotated[Written[Name], Meta(examples=["r1"])]
    peer: Annotated[Written[Address], Meta(examples=["127.0.0.1:7401"])]
    api: Annotated[Written[Address], Meta(examples=["127.0.0.1:7411"])]
    channel: Annotated[Written[Address], Meta(examples=["127.0.0.1:7421"])] | None = None
    """Where programs reach its pipelined channel; None: it offers none."""
    doors: Annotated[int, Meta(ge=0, le=DOORS_MAX)] = 0
    """How many processes of their own serve API and channel in front of the one that decides; 0: it does so itself."""
    joins: bool = False
    """Whether it is not one of the founders, but was added to the cluster, or will be."""

    @property
    def add_command(self) -> str:
        """The command that adds it to the cluster as a new member."""
        return f"forebay cluster add {self.name} --peer {self.peer} --api {self.api}"


class TlsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the authority's certificate and everybody's `<name>.pem` and `<name>.key` are."""

    authority: Path = _WITH_THE_OTHERS
    certificates: Path = Path("tls")

    def __post_init__(self) -> None:
        """Look for the authority's certificate among the others where nothing is said of it."""
        if self.authority is _WITH_THE_OTHERS:
            force_setattr(self, "authority", self.certificates / self.authority.name)


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """What a client needs of a configuration; every path in it is absolute."""

    file: Path
    cluster: ClusterConfig
    replicas: tuple[ReplicaConfig, ...]
    tls: TlsConfig
    access: AccessTable = NO_ACCESS
    """Who may come as the account that he is."""
    owner_uid: int = NOBODYS
    """User ID of the owner of the file when it was read."""

    @classmethod
    def glance(cls, path: Path) -> Self | None:
        """Read the tables that a client needs; None where they are not what they should be.

        ConfigError for a file that is none, and for keys that others may read.
        """
        file = Path(os.path.abspath(path))
        document = Document.load(file, bytes_max=CONFIG_BYTES_MAX)
        tables = document.taken(_File)
        if tables is None or not tables.replica:
            return None
        base = file.parent
        access = cls(
            file=file,
            cluster=tables.cluster,
            replicas=tables.replica,
            tls=absolute(tables.tls, base),
            access=absolute(tables.access, base),
            owner_uid=document.owner_uid,
        )
        found = find_unsafe_keys(access.tls.certificates)
        if found is not None:
            raise document.refuse(("tls", "certificates"), *found)
        return access

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
                f"issue one with `forebay cert issue {name} --role ROLE`, or name somebody who has one",
            )
        return files


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tables of the file; of those with `Any` it is known that they may be there."""

    cluster: ClusterConfig
    replica: Annotated[tuple[ReplicaConfig, ...], Meta(max_length=REPLICAS_MAX)] = ()
    tls: TlsConfig = TlsConfig()
    access: AccessTable = NO_ACCESS
    agent: Any = None
    place: Any = None
    pool: Any = None
    storage: Any = None
    timing: Any = None
    staging: Any = None
    policy: Any = None
    mail: Any = None
    provider: Any = None
    job_process: Any = None
    limits: Any = None
    witness: Any = None
    checkpoints: Any = None
    helper: Any = None
    drill: Any = None
    retention: Any = None
    traces: Any = None


def absolute(table: _Table, base: Path) -> _Table:
    """Return the table with its paths absolute; in the file they are relative to `base`."""
    paths: dict[str, Path | tuple[Path, ...]] = {}
    for key, value in msgspec.structs.asdict(table).items():
        if isinstance(value, Path):
            paths[key] = Path(os.path.normpath(base / value))
        elif isinstance(value, tuple) and value and all(isinstance(one, Path) for one in value):
            paths[key] = tuple(Path(os.path.normpath(base / one)) for one in value)
    return msgspec.structs.replace(table, **paths)
