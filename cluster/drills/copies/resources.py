"""Disk space and memory that a copy needs, and checks of a backup and a release, for a plan's preconditions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from forebay.cluster.system import free_bytes

COPIES: Final = 3
"""Number of replicas of a copy: the fewest that tolerate a failure."""

REPLICA_BYTES: Final = 96 << 20
"""Disk space of a replica without its state, bytes: sync log, journal pages and index."""

IMAGES: Final = 4
"""Number of state images in a replica's directory: two snapshots, a third being written, and the history service's."""

PROCESS_BYTES: Final = 192 << 20
"""Memory of a replica and its history service without a state, bytes."""

EXPANSION: Final = 16
"""Largest ratio of the memory for a state, including the history service, to the size of its snapshot."""

FLOOR_BYTES: Final = 64 << 20
"""Disk space that must stay free, bytes: below it a drill on a copy is aborted."""

_MEMINFO: Final = Path("/proc/meminfo")


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """Available disk space and memory, and the needs of a copy of a snapshot of this size, bytes."""

    directory: str
    """Parent of the copy's directory."""
    snapshot_bytes: int
    free_bytes: int
    memory_bytes: int
    fault: str = ""
    """Reason why the directory cannot be used, or an empty string."""

    @property
    def needed_bytes(self) -> int:
        """Disk space that the copy needs."""
        return COPIES * (REPLICA_BYTES + IMAGES * self.snapshot_bytes) + self.snapshot_bytes + FLOOR_BYTES

    @property
    def needed_memory_bytes(self) -> int:
        """Memory that the copy needs."""
        return COPIES * (PROCESS_BYTES + EXPANSION * self.snapshot_bytes)


def measure_resources(directory: Path, snapshot_bytes: int, meminfo: Path = _MEMINFO) -> Resources:
    """Return the space available in a directory, and the available memory."""
    free, fault = 0, ""
    try:
        free = free_bytes(directory)
        if not os.access(directory, os.W_OK | os.X_OK):
            fault = "not writable for this account"
    except OSError as error:
        fault = error.strerror or str(error)
    return Resources(
        directory=str(directory),
        snapshot_bytes=snapshot_bytes,
        free_bytes=free,
        memory_bytes=_available_bytes(meminfo),
        fault=fault,
    )


def _available_bytes(meminfo: Path) -> int:
    """Return the available memory, bytes; 0 if it is unknown. Source: proc(5), MemAvailable."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def backup_fault(file: Path) -> str:
    """Return why a backup cannot be read, or an empty string."""
    try:
        with file.open("rb") as opened:
            return "" if opened.read(1) else "the file is empty"
    except OSError as error:
        return error.strerror or str(error)


def release_fault(tree: Path) -> str:
    """Return why a directory contains no complete release, judged by its files, or an empty string."""
    if not tree.is_dir():
        return f"{tree} is not a directory"
    for name in ("forebay/cluster/serve.py", "forebay/cluster/audit/worker.py"):
        if not (tree / name).is_file():
            return f"{tree} is not a release of Forebay: {name} is missing"
    return ""
