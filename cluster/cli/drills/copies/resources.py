"""What a copy needs of this machine, and whether a tree holds a release: asked before anything is done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from cluster.system import free_bytes

COPIES: Final = 3
"""Replicas of a copy, count: as many as stand a loss."""

REPLICA_BYTES: Final = 96 << 20
"""What a replica takes on the disk beside its state, bytes: its sync log, the pages of its journal, its index."""

IMAGES: Final = 4
"""How often the state lies in a replica's directory, count: two snapshots, one that is being written, and that of its
historian."""

PROCESS_BYTES: Final = 192 << 20
"""What a replica and its historian take of memory without a state, bytes."""

EXPANSION: Final = 16
"""How much larger a state is in memory than in a snapshot, at most, with its historian's: times."""

FLOOR_BYTES: Final = 64 << 20
"""What is to be left free on the disk of a copy: below it a drill ends."""

_MEMINFO: Final = Path("/proc/meminfo")


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What there is and what a copy of a snapshot of this size needs, bytes."""

    directory: str
    """Where the copy is made."""
    snapshot_bytes: int
    free_bytes: int
    memory_bytes: int
    fault: str = ""
    """Why nothing can be made there; empty: it can."""

    @property
    def needed_bytes(self) -> int:
        """On the disk."""
        return COPIES * (REPLICA_BYTES + IMAGES * self.snapshot_bytes) + self.snapshot_bytes + FLOOR_BYTES

    @property
    def needed_memory_bytes(self) -> int:
        """Of memory."""
        return COPIES * (PROCESS_BYTES + EXPANSION * self.snapshot_bytes)


def measure_resources(directory: Path, snapshot_bytes: int, meminfo: Path = _MEMINFO) -> Resources:
    """Return what there is of room in a directory, and of memory."""
    free, fault = 0, ""
    try:
        free = free_bytes(directory)
        if not os.access(directory, os.W_OK | os.X_OK):
            fault = "this account may not write there"
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
    """Return what memory there is without taking any from others, bytes; as proc(5) says."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def backup_fault(file: Path) -> str:
    """Return why a file cannot be read; empty: it can."""
    try:
        with file.open("rb") as opened:
            return "" if opened.read(1) else "it is empty"
    except OSError as error:
        return error.strerror or str(error)


def release_fault(tree: Path) -> str:
    """Return why the release in a tree cannot be started; empty: it can, as far as its files say."""
    if not tree.is_dir():
        return f"{tree} is no directory"
    for name in ("cluster/serve.py", "cluster/audit/worker.py"):
        if not (tree / name).is_file():
            return f"{tree} holds no release of Forebay that can be started: there is no {name} in it"
    return ""
