"""Founding pools and policy in a configuration.

Once the cluster exists, they are replicated state that commands change (law 3), and the values in the file are ignored.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta, field

from forebay.cluster.config.toml import Bytes, Document, InvalidValue, KeyPath, Name, Size, Text, Written
from forebay.replica.grammar import check_adapters, check_filesystem
from forebay.replica.model import (
    FOUNDING_FIELDS,
    LAYOUT_NONE,
    QUOTA_AUTO,
    FilesystemLayout,
    Pool,
    SharedFilesystem,
    Site,
    check_site,
)

ROOTS_MAX: Final = 256
"""Maximum number of sources, and of destinations: each is compared with every path of a job."""

_Roots = Annotated[tuple[Text, ...], Meta(max_length=ROOTS_MAX)]


class PoolTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Table [[pool]], sizes in bytes."""

    name: Annotated[Written[Name], Meta(examples=["fast"])]
    quantity: Bytes
    granularity: Bytes = Size(1)
    default: bool = False
    filesystem: Written[Name] | None = None

    def __post_init__(self) -> None:
        """Check the pool's size.

        Raises:
            InvalidValue: The pool is smaller than its granularity.
        """
        if self.granularity > self.quantity:
            sentence = f"found {self.granularity} bytes, more than the pool's quantity of {self.quantity}"
            raise InvalidValue(sentence, "write a smaller one", "granularity")


class FilesystemTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Table [[filesystem]]: a shared filesystem that all nodes mount at `path`."""

    name: Annotated[Written[Name], Meta(examples=["bb"])]
    path: Annotated[Text, Meta(examples=["/bb/fast"])]
    quota: Text = QUOTA_AUTO
    """Adapter that limits buffers to their capacity: auto, none, project, btrfs, lustre, cephfs, beegfs, gpfs or
    command. `auto` uses project or btrfs quotas if they are enabled.
    """
    layout: Text = LAYOUT_NONE
    """Adapter that places the files of striped buffers: none, lustre, cephfs, beegfs or command."""
    stripe_count: int = 0
    """With `layout`: targets of one file; -1 for all (Lustre), 0 for the filesystem's default."""
    stripe_size_bytes: Bytes = field(default=Size(0), name="stripe_size")
    """With `layout`: bytes on one target before the next is used; 0 for the filesystem's default."""
    stripe_pool: Text = ""
    """With `layout`: storage pool; empty for the filesystem's default."""

    def shared(self) -> SharedFilesystem:
        """Return the founding record."""
        layout = FilesystemLayout(self.layout, self.stripe_count, self.stripe_size_bytes, self.stripe_pool)
        return SharedFilesystem(self.name, self.path, quota=self.quota, layout=layout)


class StagingTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Table [staging]: directories that jobs may stage in from and out to; `%u` is the job's user."""

    sources: _Roots = ()
    destinations: _Roots = ()

    def __post_init__(self) -> None:
        """Check the roots.

        Raises:
            InvalidValue: A root is ambiguous.
        """
        for key in self.__struct_fields__:
            for number, root in enumerate(getattr(self, key)):
                if "%" in root.replace("%u", ""):
                    raise InvalidValue(f"found {root!r}", "the only symbol is %u, the job's user", key, number)
                if ".." in Path(root).parts:
                    raise InvalidValue(f"found '..' in {root!r}", "write the directory itself", key, number)


if TYPE_CHECKING:
    PolicyTable = Site
else:
    PolicyTable = msgspec.defstruct(
        "PolicyTable",
        [
            (name, type(default), default)
            for name, default in zip(FOUNDING_FIELDS, Site.__struct_defaults__, strict=False)
            if name not in StagingTable.__struct_fields__
        ],
        frozen=True,
        forbid_unknown_fields=True,
    )
    """Table [policy]: the fields of a policy, except those of [staging]."""


def filesystems_of(document: Document, tables: tuple[FilesystemTable, ...]) -> tuple[SharedFilesystem, ...]:
    """Return the founding shared filesystems.

    Raises:
        ConfigError: A path is invalid or used twice.
    """
    filesystems: dict[str, SharedFilesystem] = {}
    for number, table in enumerate(tables):
        wanted = table.shared()
        rejection = check_filesystem(filesystems, table.name, table.path) or check_adapters(wanted)
        if rejection is not None:
            key = rejection.place.removeprefix("filesystem.")
            raise document.refuse(("filesystem", number, key), rejection.sentence, rejection.remedy)
        filesystems[table.name] = wanted
    return tuple(filesystems.values())


def pools_of(
    document: Document, tables: tuple[PoolTable, ...], filesystems: tuple[SharedFilesystem, ...] = ()
) -> tuple[Pool, ...]:
    """Return the founding pools.

    Raises:
        ConfigError: A name is used twice, there is a second default, or a shared filesystem is unknown.
    """
    known = [filesystem.name for filesystem in filesystems]
    pools: list[Pool] = []
    default = ""
    for number, table in enumerate(tables):
        if table.name in {pool.name for pool in pools}:
            sentence = f"there is already a pool {table.name!r}"
            raise document.refuse(("pool", number, "name"), sentence, "give each pool a name of its own")
        if table.default and default:
            sentence = f"pool {default!r} is the default already"
            raise document.refuse(("pool", number, "default"), sentence, "make one pool the default")
        if table.filesystem is not None and table.filesystem not in known:
            remedy = (
                f"use one of: {', '.join(known)}" if known else "write a table [[filesystem]] with its name and path"
            )
            raise document.refuse(
                ("pool", number, "filesystem"), f"there is no shared filesystem {table.filesystem!r}", remedy
            )
        default = table.name if table.default else default
        pools.append(
            Pool(table.name, table.quantity, table.granularity, table.default, filesystem=table.filesystem or "")
        )
    return tuple(pools)


def policy_of(document: Document, table: PolicyTable, staging: StagingTable, base: Path) -> Site:
    """Return the founding policy, with paths relative to `base`.

    Raises:
        ConfigError: A value is invalid; the message names the key.
    """
    roots = {
        key: tuple(os.path.normpath(base / root) for root in getattr(staging, key))
        for key in StagingTable.__struct_fields__
    }
    site = Site(**msgspec.structs.asdict(table) | roots)
    rejection = check_site(site)
    if rejection is not None:
        key = rejection.place.removeprefix("site.")
        path: KeyPath = ("staging" if key in roots else "policy", key)
        raise document.refuse(path, rejection.sentence, rejection.remedy)
    return site
