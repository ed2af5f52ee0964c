"""Client's part of forebay.toml: the addresses of the cluster, and how to authenticate.

This module reads the tables [cluster], [[replica]], [tls] and [access], and rejects unknown table names. Only
`cluster.config.config` reads the content of other tables, because imports dominate the run time of a command.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from forebay.cluster.config.accounts import NO_ACCESS, AccessTable
from forebay.cluster.config.toml import NOBODYS, ConfigError, Document, InvalidValue, Name, Text, Written
from forebay.cluster.security import AUTHORITY_NAME, NAME_RULE, TlsFiles, find_unsafe_keys, is_name, is_there
from forebay.cluster.system import Address

CONFIG_BYTES_MAX: Final = 4 * 1024 * 1024
"""Size limit of the file, bytes: several times the size of 10,000 agents with about 100 bytes each."""

REPLICAS_MAX: Final = 16
"""Maximum number of replicas in the file: founders and added ones, of which at most nine are members at a time."""

API_WORKERS_MAX: Final = 16
"""Maximum number of API workers of a replica: more than a controller process can keep busy."""

OPERATOR_NAME: Final = "operator"
"""Name of the operator's certificate created by `forebay cluster init`."""

_Table = TypeVar("_Table", bound=msgspec.Struct)

CLUSTER_ID_DIGITS: Final = 32

_WITH_THE_OTHERS: Final = Path("CERTIFICATES", f"{AUTHORITY_NAME}.pem")
"""Default for the authority's certificate: in the directory of the other certificates."""


class ClusterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Identity of the cluster: a display name, and an ID for frames, snapshots and certificates."""

    name: Annotated[Written[Name], Meta(examples=["demo"])]
    id: Annotated[Text, Meta(examples=["32 hexadecimal digits made by forebay cluster init"])]

    def __post_init__(self) -> None:
        """Check the ID.

        Raises:
            InvalidValue: The ID is malformed.
        """
        if len(self.id) != CLUSTER_ID_DIGITS or not set(self.id) <= set("0123456789abcdef"):
            remedy = f"write the {CLUSTER_ID_DIGITS} hexadecimal digits that `forebay cluster init` made"
            raise InvalidValue(f"found {self.id!r:.60}", remedy, "id")


class ReplicaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Addresses of one replica for peers and clients."""

    name: Annotated[Written[Name], Meta(examples=["r1"])]
    peer: Annotated[Written[Address], Meta(examples=["127.0.0.1:7401"])]
    api: Annotated[Written[Address], Meta(examples=["127.0.0.1:7411"])]
    channel: Annotated[Written[Address], Meta(examples=["127.0.0.1:7421"])] | None = None
    """Address of the replica's pipelined channel; None for no channel."""
    api_workers: Annotated[int, Meta(ge=0, le=API_WORKERS_MAX)] = 0
    """Number of API workers, which serve API and channel in front of the controller process.

    0 if the controller itself does.
    """
    joins: bool = False
    """True for a replica that joins an existing cluster; False for a founder."""

    @property
    def add_command(self) -> str:
        """Command that adds the replica to the cluster."""
        return f"forebay cluster add {self.name} --peer {self.peer} --api {self.api}"


class TlsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paths of the authority's certificate and of all `<name>.pem` and `<name>.key` files."""

    authority: Path = _WITH_THE_OTHERS
    certificates: Path = Path("tls")

    def __post_init__(self) -> None:
        """Set the default path of the authority's certificate."""
        if self.authority is _WITH_THE_OTHERS:
            force_setattr(self, "authority", self.certificates / self.authority.name)


class AccessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Client's part of a configuration; all paths are absolute."""

    file: Path
    cluster: ClusterConfig
    replicas: tuple[ReplicaConfig, ...]
    tls: TlsConfig
    access: AccessTable = NO_ACCESS
    """Accounts that may authenticate without a certificate."""
    owner_uid: int = NOBODYS
    """User ID of the file's owner when it was read."""

    @classmethod
    def read_if_valid(cls, path: Path) -> Self | None:
        """Read the client's tables; return None if they are invalid.

        Raises:
            ConfigError: The file is not readable TOML, or other users may read the keys.
        """
        file = Path(os.path.abspath(path))
        document = Document.load(file, bytes_max=CONFIG_BYTES_MAX)
        tables = document.try_decode(_AccessFile)
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
        """Client addresses of the replicas."""
        return tuple(replica.api for replica in self.replicas)

    def tls_files(self, name: str) -> TlsFiles:
        """Return the certificate files of `name` (a replica, an agent, `operator` or a user), without checking their
        content.

        Raises:
            ConfigError: There is no such certificate.
            TlsError: The files may not be read.
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
                f"issue one with `forebay cert issue {name} --role ROLE`, or use another name",
            )
        return files


class _AccessFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tables of the file; those of type `Any` are only known to be permitted."""

    cluster: ClusterConfig
    replica: Annotated[tuple[ReplicaConfig, ...], Meta(max_length=REPLICAS_MAX)] = ()
    tls: TlsConfig = TlsConfig()
    access: AccessTable = NO_ACCESS
    agent: Any = None
    filesystem: Any = None
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
    sink: Any = None


def absolute(table: _Table, base: Path) -> _Table:
    """Return the table with absolute paths; in the file they are relative to `base`."""
    paths: dict[str, Path | tuple[Path, ...]] = {}
    for key, value in msgspec.structs.asdict(table).items():
        if isinstance(value, Path):
            paths[key] = Path(os.path.normpath(base / value))
        elif isinstance(value, tuple) and value and all(isinstance(one, Path) for one in value):
            paths[key] = tuple(Path(os.path.normpath(base / one)) for one in value)
    return msgspec.structs.replace(table, **paths)
