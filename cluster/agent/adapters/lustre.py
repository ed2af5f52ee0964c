"""Adapter `lustre`: project quotas and stripes, set with `lfs`.

Each buffer is a project; files created in it inherit its ID. Quotas must be enforced on the servers
(`lctl conf_param FSNAME.quota.ost=p`), which `lfs` does not report: `forebay pool filesystem check` tests it by writing
past a limit.

Sources: lfs-project(1), lfs-setquota(1), lfs-quota(1) and lfs-setstripe(1) of lustre-release. `lfs project -d` prints
`ID FLAG PATH`, with the flag P if new files inherit the ID. `lfs quota -q -p` prints the filesystem, used KiB, soft and
hard limit, grace time, and the same for inodes; a long filesystem name has a line of its own. An asterisk marks an
exceeded limit, and brackets an incomplete sum. Limits without a unit are KiB.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final, NamedTuple

from forebay.cluster.agent.adapters import project_ids
from forebay.cluster.agent.adapters.interface import (
    BAD_OUTPUT,
    NOT_APPLIED,
    UNUSABLE,
    AdapterFailed,
    BufferLimit,
    LayoutAdapter,
    QuotaAdapter,
    QuotaUsage,
    Stripes,
    mount_point_of,
    path_of,
)
from forebay.cluster.agent.adapters.tools import Tools, bad_output, run_tool
from forebay.cluster.system import closing, open_directory

_KIB: Final = 1024
_PROJECT: Final = re.compile(r"\s*(\d+)\s+([P-])\s")
_HEADERS: Final = ("Disk quotas for", "Filesystem", "pid ")
"""Beginnings of lines without figures. Some releases print the last although `-q` is given."""

_FIELDS: Final = 9
_USED, _HARD, _FILES, _FILES_HARD = 1, 3, 5, 7


class _Figures(NamedTuple):
    """Quota of a project. Limits of 0 mean unlimited."""

    used_kib: int
    hard_kib: int
    inodes: int
    inodes_hard: int


class LustreAdapter(QuotaAdapter):
    """Each buffer is a project of its own."""

    word: ClassVar[str] = "lustre"

    def __init__(self, tools: Tools) -> None:
        """Use the `lfs` that the settings lead to."""
        self._tools = tools

    def _find_fault(self, parent: int) -> str:
        """Return the reason why projects cannot be limited, or ""."""
        path = path_of(parent)
        self._project(path)
        self._figures(path, project_ids.LEAST)
        return ""

    def apply(self, directory: int, seed: str, limit: BufferLimit) -> None:
        """Limit a buffer; it joins a project if it has none of ours.

        Raises:
            AdapterFailed: `lfs` failed, or reports another limit.
        """
        path = path_of(directory)
        project, inherits = self._project(path)
        if project < project_ids.LEAST or not inherits:
            project = project if project >= project_ids.LEAST else self._free_id(path, seed)
            run_tool(self._tools, "lfs", "project", "-p", str(project), "-s", "-r", path)
        wanted: list[str] = []
        if limit.size_bytes is not None:
            wanted += ["-b", "0", "-B", str(_kib(limit.size_bytes))]
        if limit.inodes is not None:
            wanted += ["-i", "0", "-I", str(limit.inodes)]
        self._set(path, project, *wanted)
        found = self._figures(path, project)
        if (limit.size_bytes is not None and found.hard_kib != _kib(limit.size_bytes)) or (
            limit.inodes is not None and found.inodes_hard != limit.inodes
        ):
            raise AdapterFailed(
                f"lfs reports a limit of {found.hard_kib} KiB and {found.inodes_hard} files for project {project} of "
                f"{path} after another was set; check the quota of the filesystem's servers",
                NOT_APPLIED,
            )

    def usage(self, directory: int) -> QuotaUsage:
        """Return the usage of the buffer's project; zero if it has none of ours.

        Raises:
            AdapterFailed: `lfs` failed, or a server did not answer.
        """
        path = path_of(directory)
        project, _ = self._project(path)
        if project < project_ids.LEAST:
            return QuotaUsage(0, 0)
        found = self._figures(path, project)
        return QuotaUsage(found.used_kib * _KIB, found.inodes)

    def find(self, parent: int, name: str) -> str:
        """Return the buffer's project ID if it is one of ours, or ""."""
        with closing(open_directory(name, dir_fd=parent)) as directory:
            project, _ = self._project(path_of(directory))
        return str(project) if project >= project_ids.LEAST else ""

    def release(self, parent: int, name: str, handle: str) -> None:
        """Clear the limits of the buffer's project.

        Raises:
            AdapterFailed: `lfs` failed.
        """
        self._set(path_of(parent), int(handle), "-b", "0", "-B", "0", "-i", "0", "-I", "0")

    def _set(self, path: str, project: int, *limits: str) -> None:
        run_tool(self._tools, "lfs", "setquota", "-p", str(project), *limits, mount_point_of(path))

    def _project(self, path: str) -> tuple[int, bool]:
        """Return a directory's project ID, and whether new files inherit it."""
        printed = run_tool(self._tools, "lfs", "project", "-d", path)
        found = _PROJECT.match(printed)
        if found is None:
            raise bad_output("lfs project -d", printed)
        return int(found[1]), found[2] == "P"

    def _figures(self, path: str, project: int) -> _Figures:
        printed = run_tool(self._tools, "lfs", "quota", "-q", "-p", str(project), mount_point_of(path))
        lines = (line for line in printed.splitlines() if not line.strip().startswith(_HEADERS))
        fields = " ".join(lines).split()
        if len(fields) != _FIELDS:
            raise bad_output("lfs quota -q -p", printed)
        chosen = [fields[number].rstrip("*") for number in (_USED, _HARD, _FILES, _FILES_HARD)]
        if any(field.startswith("[") for field in chosen):
            raise AdapterFailed(
                f"lfs quota is incomplete for project {project}: {printed.strip()[:200]}; "
                "check that all servers of the filesystem are up (lfs check servers)",
                BAD_OUTPUT,
            )
        if not all(field.isdecimal() for field in chosen):
            raise bad_output("lfs quota -q -p", printed)
        return _Figures(*map(int, chosen))

    def _free_id(self, path: str, seed: str) -> int:
        for project in project_ids.candidates(seed):
            found = self._figures(path, project)
            if (found.used_kib, found.inodes) == (0, 0):
                return project
        raise AdapterFailed(f"no project ID is free for {path}; remove old buffers", UNUSABLE)


class LustreLayout(LayoutAdapter):
    """Stripes over OSTs."""

    word: ClassVar[str] = "lustre"

    def __init__(self, tools: Tools) -> None:
        """Use the `lfs` that the settings lead to."""
        self._tools = tools

    def _find_fault(self, parent: int) -> str:
        """Return the reason why stripes cannot be set, or ""."""
        run_tool(self._tools, "lfs", "getstripe", "-d", path_of(parent))
        return ""

    def apply(self, directory: int, stripes: Stripes) -> None:
        """Set the default layout of a directory.

        Raises:
            AdapterFailed: `lfs` failed.
        """
        wanted: list[str] = []
        if stripes.targets:
            wanted += ["-c", str(stripes.targets)]
        if stripes.size_bytes:
            wanted += ["-S", str(stripes.size_bytes)]
        if stripes.pool:
            wanted += ["-p", stripes.pool]
        if wanted:
            run_tool(self._tools, "lfs", "setstripe", *wanted, path_of(directory))


def _kib(size_bytes: int) -> int:
    """Return a limit in KiB, rounded up: 0 would mean unlimited."""
    return -(-size_bytes // _KIB)
