"""Adapter `gpfs`: filesets with quotas on IBM Storage Scale (GPFS).

Each buffer is a dependent fileset, linked at the buffer's path. Quotas must be enabled (`mmchfs DEVICE -Q yes`). They
do not limit root unless `enforceFilesetQuotaOnRoot` is set, so the agent must switch accounts. A filesystem may have
10,000 filesets.

Sources: IBM Storage Scale 5.2, command reference: mmcrfileset, mmlinkfileset (`-J` names the junction, which must not
exist), mmunlinkfileset (`-f`: with open files), mmdelfileset, mmsetquota (`DEVICE:FILESET --block SOFT:HARD --files
SOFT:HARD`), and mmlsquota `-Y`: lines of fields separated by colons, encoded like URLs, named by a HEADER line;
`blockUsage` and `blockLimit` are KiB.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import ClassVar, Final
from urllib.parse import unquote

from forebay.cluster.agent.adapters.interface import (
    NOT_APPLIED,
    UNUSABLE,
    AdapterFailed,
    BufferLimit,
    QuotaAdapter,
    QuotaUsage,
    mount_point_of,
    path_of,
)
from forebay.cluster.agent.adapters.tools import Tools, bad_output, run_tool

_KIB: Final = 1024
_PRIVATE: Final = 0o700
_MOUNTS: Final = "/proc/self/mountinfo"
_MOUNT_POINT: Final = 4
_NAME_DIGITS: Final = 32
"""Hexadecimal digits of a fileset's name after the prefix; a name may have 255 characters."""


class GpfsAdapter(QuotaAdapter):
    """Each buffer is a fileset of its own."""

    word: ClassVar[str] = "gpfs"
    removes_directory: ClassVar[bool] = True

    def __init__(self, tools: Tools) -> None:
        """Use the commands that the settings lead to."""
        self._tools = tools

    def _find_fault(self, parent: int) -> str:
        """Return the reason why filesets cannot be limited, or ""."""
        device = device_of(path_of(parent))
        printed = run_tool(self._tools, "mmlsfs", device, "-Q", "-Y")
        enforced = {row.get("data", "") for row in _rows(printed) if row.get("fieldName") == "quotasEnforced"}
        if not any("fileset" in value for value in enforced):
            return f"quotas of filesets are not enforced on {device}; run `mmchfs {device} -Q yes`"
        return ""

    def create(self, parent: int, name: str) -> None:
        """Create a fileset and link it. A fileset that an earlier attempt created is linked.

        Raises:
            AdapterFailed: A command failed.
            FileExistsError: The name exists.
            OSError: The directory cannot be changed.
        """
        path = os.path.join(path_of(parent), name)
        if os.path.lexists(path):
            raise FileExistsError(path)
        device, fileset = device_of(path_of(parent)), fileset_of(path)
        try:
            run_tool(self._tools, "mmcrfileset", device, fileset)
        except AdapterFailed:
            if not self._exists(device, fileset):
                raise
        run_tool(self._tools, "mmlinkfileset", device, fileset, "-J", path)
        os.chmod(name, _PRIVATE, dir_fd=parent)

    def apply(self, directory: int, seed: str, limit: BufferLimit) -> None:
        """Limit a fileset.

        Raises:
            AdapterFailed: A command failed, or no limit is reported.
        """
        path = path_of(directory)
        device, fileset = device_of(path), fileset_of(path)
        wanted: list[str] = []
        if limit.size_bytes is not None:
            kib = -(-limit.size_bytes // _KIB)
            wanted += ["--block", f"{kib}K:{kib}K"]
        if limit.inodes is not None:
            wanted += ["--files", f"{limit.inodes}:{limit.inodes}"]
        run_tool(self._tools, "mmsetquota", f"{device}:{fileset}", *wanted)
        # GPFS rounds limits up to its blocks, so a larger one is right.
        found = self._quota(device, fileset)
        if limit.size_bytes and int(found["blockLimit"]) * _KIB < limit.size_bytes:
            raise AdapterFailed(
                f"mmlsquota reports a limit of {found['blockLimit']} KiB for fileset {fileset} after "
                f"{limit.size_bytes} bytes were set; check that quotas are enabled (mmlsfs {device} -Q)",
                NOT_APPLIED,
            )

    def usage(self, directory: int) -> QuotaUsage:
        """Return the usage of the buffer's fileset.

        Raises:
            AdapterFailed: A command failed.
        """
        path = path_of(directory)
        found = self._quota(device_of(path), fileset_of(path))
        return QuotaUsage(int(found["blockUsage"]) * _KIB, int(found["filesUsage"]))

    def find(self, parent: int, name: str) -> str:
        """Return the name of the buffer's fileset, or "" if there is neither fileset nor directory."""
        path = os.path.join(path_of(parent), name)
        fileset = fileset_of(path)
        return fileset if self._exists(device_of(path_of(parent)), fileset) else ""

    def release(self, parent: int, name: str, handle: str) -> None:
        """Unlink and delete a fileset, which must be empty.

        Raises:
            AdapterFailed: A command failed.
        """
        device = device_of(path_of(parent))
        with contextlib.suppress(FileNotFoundError):
            os.stat(name, dir_fd=parent, follow_symlinks=False)
            run_tool(self._tools, "mmunlinkfileset", device, handle, "-f")
        run_tool(self._tools, "mmdelfileset", device, handle)
        os.fsync(parent)

    def _exists(self, device: str, fileset: str) -> bool:
        """Return whether a fileset exists. GPFS fails if it does not, so the whole filesystem is asked then.

        Raises:
            AdapterFailed: The filesystem cannot be asked.
        """
        try:
            run_tool(self._tools, "mmlsfileset", device, fileset, "-Y")
        except AdapterFailed:
            run_tool(self._tools, "mmlsfs", device, "-Q", "-Y")
            return False
        return True

    def _quota(self, device: str, fileset: str) -> dict[str, str]:
        printed = run_tool(self._tools, "mmlsquota", "-j", fileset, "--block-size", "1K", "-Y", device)
        for row in _rows(printed):
            figures = (row.get(name, "") for name in ("blockUsage", "blockLimit", "filesUsage"))
            if row.get("quotaType") == "FILESET" and row.get("name") == fileset and all(map(str.isdecimal, figures)):
                return row
        raise bad_output("mmlsquota -Y", printed)


def _rows(printed: str) -> list[dict[str, str]]:
    """Return the lines of a command's `-Y` output by the names of the HEADER line before them."""
    header: list[str] = []
    rows = []
    for line in printed.splitlines():
        fields = [unquote(field) for field in line.split(":")]
        if "HEADER" in fields[:3]:
            header = fields
        elif header:
            rows.append(dict(zip(header, fields, strict=False)))
    return rows


def fileset_of(path: str) -> str:
    """Return the name of the fileset for a buffer's path, the same on every machine."""
    return f"forebay-{hashlib.sha256(os.fsencode(path)).hexdigest()[:_NAME_DIGITS]}"


def device_of(path: str) -> str:
    """Return the device of the filesystem that holds a path.

    Raises:
        AdapterFailed: The mount cannot be found.
    """
    point = mount_point_of(path)
    found = ""
    with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            if before.split()[_MOUNT_POINT] == point:
                found = os.path.basename(after.split()[1])
    if not found:
        raise AdapterFailed(f"the device mounted at {point} is not listed in {_MOUNTS}; mount it again", UNUSABLE)
    return found
