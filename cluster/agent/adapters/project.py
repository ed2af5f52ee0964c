"""Adapter `project`: project quotas of xfs and ext4, set by system calls (`project_quota`)."""

from __future__ import annotations

import contextlib
from typing import ClassVar

from forebay.cluster.agent.adapters import project_quota
from forebay.cluster.agent.adapters.interface import BufferLimit, QuotaAdapter, QuotaUsage
from forebay.cluster.system import closing, open_directory


class ProjectAdapter(QuotaAdapter):
    """Each buffer is a project of its own."""

    word: ClassVar[str] = "project"

    def _find_fault(self, parent: int) -> str:
        """Return the reason why buffers cannot be limited, or ""."""
        return "" if project_quota.is_enforced(parent) else "its filesystem does not enforce project quotas"

    def apply(self, directory: int, seed: str, limit: BufferLimit) -> None:
        """Limit a buffer; it joins a project if it has none.

        Raises:
            OSError: The limit cannot be set.
        """
        if limit.size_bytes is not None:
            project_quota.hold(directory, seed, limit.size_bytes)
        if limit.inodes is not None:
            project_quota.limit_inodes(directory, limit.inodes)

    def usage(self, directory: int) -> QuotaUsage:
        """Return the usage of the buffer's project; zero if it has none.

        Raises:
            OSError: The quota cannot be read.
        """
        project = project_quota.project_of(directory)
        return project_quota.read_usage(directory, project) if project else QuotaUsage(0, 0)

    def find(self, parent: int, name: str) -> str:
        """Return the buffer's project ID, or ""."""
        with contextlib.suppress(OSError), closing(open_directory(name, dir_fd=parent)) as directory:
            return str(project_quota.project_of(directory) or "")
        return ""

    def release(self, parent: int, name: str, handle: str) -> None:
        """Clear the limits of the project. Leftover limits of an unused ID do no harm."""
        with contextlib.suppress(OSError):
            project_quota.release(parent, int(handle))
