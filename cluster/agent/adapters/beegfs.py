"""Adapter `beegfs`: quotas of groups, and stripe patterns.

BeeGFS has no quotas of directories. Each buffer gets a group of its own from `quota_groups` of `[[agent]]`, in which no
account may be, and the set-group-ID bit, so that new files belong to it. Two gaps follow: the owner of a file may give
it to a group of the owner, and the servers notice an exceeded limit only at their next collection, minutes later.

`beegfs` of release 8 is used where it is installed, otherwise `beegfs-ctl` of release 7.

Sources: doc.beegfs.io 7.4 and 8, "Quota" and "Striping"; beegfs-go, ctl/internal/cmd/quota: `beegfs quota set-limits
--gid ID --space N|unlimited|reset --inode N|unlimited|reset POOL`; `beegfs quota list-usage --gids ID --raw` prints
name, ID, type, pool, and USED/LIMIT of space and inodes. `beegfs-ctl --getquota --gid ID --csv` prints name, ID, size,
hard limit, files, hard limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from typing import ClassVar, Final, NamedTuple

from forebay.cluster.agent.adapters.interface import (
    NOT_APPLIED,
    NOT_INSTALLED,
    UNUSABLE,
    AdapterFailed,
    BufferLimit,
    LayoutAdapter,
    QuotaAdapter,
    QuotaUsage,
    Stripes,
    path_of,
)
from forebay.cluster.agent.adapters.tools import Tools, bad_output, find_tool, run_tool
from forebay.cluster.system import closing, open_directory

POOL: Final = "1"
"""ID of the default storage pool."""

PROBES_MAX: Final = 256
"""Groups tried until one is free, count: as many consecutive ones would have to belong to other buffers."""

_NEW: Final = "beegfs"
_OLD: Final = "beegfs-ctl"
_UNLIMITED: Final = ("unlimited", "∞", "-")
_TABLE_FIELDS: Final = 6


class _GroupQuota(NamedTuple):
    """Usage and limits of a group. Limits of 0 mean unlimited."""

    size_bytes: int
    size_limit_bytes: int
    inodes: int
    inodes_limit: int


class BeegfsAdapter(QuotaAdapter):
    """Each buffer belongs to a group of its own."""

    word: ClassVar[str] = "beegfs"
    keeps_group: ClassVar[bool] = True

    def __init__(self, tools: Tools) -> None:
        """Use the programs and groups that the settings name."""
        self._tools = tools

    def _find_fault(self, parent: int) -> str:
        """Return the reason why groups cannot be limited, or ""."""
        first, last = self._tools.quota_groups
        if not first:
            return (
                'no groups are set aside for buffers; set `quota_groups`, for example "2000000-2099999", in [[agent]]'
            )
        self._quota(first)
        return ""

    def apply(self, directory: int, seed: str, limit: BufferLimit) -> None:
        """Limit a buffer; it gets a group if it has none.

        Raises:
            AdapterFailed: The program failed, or reports another limit.
            OSError: The group cannot be changed.
        """
        status = os.fstat(directory)
        group = status.st_gid if self._is_ours(status.st_gid) else self._free_group(seed)
        os.fchown(directory, -1, group)
        os.fchmod(directory, stat.S_IMODE(status.st_mode) | stat.S_ISGID)
        before = self._quota(group)
        wanted = _GroupQuota(
            0,
            before.size_limit_bytes if limit.size_bytes is None else limit.size_bytes,
            0,
            before.inodes_limit if limit.inodes is None else limit.inodes,
        )
        self._set(group, str(wanted.size_limit_bytes or "unlimited"), str(wanted.inodes_limit or "unlimited"))
        found = self._quota(group)
        if (found.size_limit_bytes, found.inodes_limit) != (wanted.size_limit_bytes, wanted.inodes_limit):
            raise AdapterFailed(
                f"BeeGFS reports a limit of {found.size_limit_bytes} bytes and {found.inodes_limit} files for group "
                f"{group} after another was set; check that quotas are enforced",
                NOT_APPLIED,
            )

    def usage(self, directory: int) -> QuotaUsage:
        """Return the usage of the buffer's group, as of the servers' last collection; zero if it has none of ours.

        Raises:
            AdapterFailed: The program failed.
        """
        group = os.fstat(directory).st_gid
        if not self._is_ours(group):
            return QuotaUsage(0, 0)
        found = self._quota(group)
        return QuotaUsage(found.size_bytes, found.inodes)

    def find(self, parent: int, name: str) -> str:
        """Return the buffer's group if it is one of ours, or ""."""
        with closing(open_directory(name, dir_fd=parent)) as directory:
            group = os.fstat(directory).st_gid
        return str(group) if self._is_ours(group) else ""

    def release(self, parent: int, name: str, handle: str) -> None:
        """Remove the limits of the buffer's group.

        Raises:
            AdapterFailed: The program failed.
        """
        self._set(int(handle), "reset", "reset")

    def _is_ours(self, group: int) -> bool:
        first, last = self._tools.quota_groups
        return bool(first) and first <= group <= last

    def _free_group(self, seed: str) -> int:
        first, last = self._tools.quota_groups
        if not first:
            raise AdapterFailed("no groups are set aside for buffers; set `quota_groups` in [[agent]]", UNUSABLE)
        count = last - first + 1
        start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big") % count
        for step in range(min(PROBES_MAX, count)):
            group = first + (start + step) % count
            found = self._quota(group)
            # A limit marks a group that is in use, because usage is collected only every few minutes.
            if found == (0, 0, 0, 0):
                return group
        raise AdapterFailed(
            f"no group of {first}-{last} is free; remove old buffers or default limits of groups, or widen the range",
            UNUSABLE,
        )

    def _set(self, group: int, size: str, inodes: str) -> None:
        gid = ("--gid", str(group))
        if _program(self._tools) == _NEW:
            run_tool(self._tools, _NEW, "quota", "set-limits", *gid, "--space", size, "--inode", inodes, POOL)
        else:
            run_tool(self._tools, _OLD, "--setquota", *gid, f"--sizelimit={size}", f"--inodelimit={inodes}")

    def _quota(self, group: int) -> _GroupQuota:
        """Return usage and limits of a group; all 0 if BeeGFS does not know it."""
        if _program(self._tools) == _NEW:
            printed = run_tool(self._tools, _NEW, "quota", "list-usage", "--gids", str(group), "--raw")
            rows = [line.split() for line in printed.splitlines()]
            found = [row for row in rows if len(row) == _TABLE_FIELDS and row[1:3] == [str(group), "group"]]
            fields = [field for row in found for pair in row[4:] for field in pair.split("/")]
        else:
            printed = run_tool(self._tools, _OLD, "--getquota", "--gid", str(group), "--csv")
            rows = [line.split(",") for line in printed.splitlines()]
            found = [row for row in rows if len(row) == _TABLE_FIELDS and row[1] == str(group)]
            fields = [field.strip() for row in found for field in row[2:]]
        if not printed.strip() or len(found) > 1:
            raise bad_output(f"the quota of group {group} in BeeGFS", printed)
        try:
            return _GroupQuota(*map(_figure, fields)) if found else _GroupQuota(0, 0, 0, 0)
        except (ValueError, TypeError) as error:
            raise bad_output(f"the quota of group {group} in BeeGFS", printed) from error


class BeegfsLayout(LayoutAdapter):
    """Stripe patterns of directories."""

    word: ClassVar[str] = "beegfs"

    def __init__(self, tools: Tools) -> None:
        """Use the programs that the settings lead to."""
        self._tools = tools

    def _find_fault(self, parent: int) -> str:
        """Return the reason why patterns cannot be set, or ""."""
        program = _program(self._tools)
        words = ("entry", "info") if program == _NEW else ("--getentryinfo",)
        run_tool(self._tools, program, *words, path_of(parent))
        return ""

    def apply(self, directory: int, stripes: Stripes) -> None:
        """Set the pattern of new files.

        Raises:
            AdapterFailed: The program failed, or the pattern is impossible on BeeGFS.
        """
        if stripes.targets < 0:
            raise AdapterFailed("BeeGFS cannot stripe over all targets; set a stripe count above 0", UNUSABLE)
        is_new = _program(self._tools) == _NEW
        wanted: list[str] = []
        if stripes.targets:
            wanted.append(f"{'--num-targets' if is_new else '--numtargets'}={stripes.targets}")
        if stripes.size_bytes:
            wanted.append(f"{'--chunk-size' if is_new else '--chunksize'}={stripes.size_bytes}")
        if stripes.pool:
            wanted.append(f"{'--pool' if is_new else '--storagepoolid'}={stripes.pool}")
        if wanted:
            words = ("entry", "set") if is_new else ("--setpattern",)
            run_tool(self._tools, _NEW if is_new else _OLD, *words, *wanted, path_of(directory))


def _program(tools: Tools) -> str:
    """Return the name of the installed program.

    Raises:
        AdapterFailed: Neither is installed, or others may change it.
    """
    for name in (_NEW, _OLD):
        with contextlib.suppress(AdapterFailed):
            find_tool(tools, name)
            return name
    places = ", ".join(tools.directories)
    raise AdapterFailed(
        f"neither {_NEW} nor {_OLD} is installed in {places}; install BeeGFS' tools on this machine", NOT_INSTALLED
    )


def _figure(field: str) -> int:
    """Return a number of bytes or inodes; 0 for no limit.

    Raises:
        ValueError: It is not a number.
    """
    return 0 if field in _UNLIMITED else int(field)
