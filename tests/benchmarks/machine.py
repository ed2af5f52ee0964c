"""What machine is this: facts that a figure means nothing without, and the disk's own time for one durable write."""

import os
import platform
import statistics
import time
from pathlib import Path

FDATASYNC_ROUNDS = 200
"""Durable writes measured, count: enough for a stable median, under a second on any disk."""

FDATASYNC_BLOCK_BYTES = 4096
"""Bytes of each: one page, about what a small commit writes."""


def facts(directory: Path) -> dict[str, object]:
    """Return the machine's facts; `directory` is where the clusters will keep their data."""
    median_us, p99_us = fdatasync_us(directory)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _field(Path("/proc/cpuinfo"), "model name"),
        "memory": _field(Path("/proc/meminfo"), "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file_system": _file_system(directory),
        "load_before": round(os.getloadavg()[0], 2),
        "fdatasync_p50_us": median_us,
        "fdatasync_p99_us": p99_us,
    }


def fdatasync_us(directory: Path) -> tuple[float, float]:
    """Append blocks to a file in `directory`, each made durable; return median and 99th percentile, microseconds."""
    path = directory / "fdatasync.probe"
    block = os.urandom(FDATASYNC_BLOCK_BYTES)
    taken_us = []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for _ in range(FDATASYNC_ROUNDS):
            started = time.perf_counter()
            os.write(fd, block)
            os.fdatasync(fd)
            taken_us.append((time.perf_counter() - started) * 1e6)
    finally:
        os.close(fd)
        path.unlink()
    return round(statistics.median(taken_us), 1), round(statistics.quantiles(taken_us, n=100)[98], 1)


def _field(path: Path, name: str) -> str:
    for line in path.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _file_system(directory: Path) -> str:
    """Return the type of the file system that holds `directory`: the longest mount point above it."""
    best, kind = "", "unknown"
    resolved = str(directory.resolve())
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, point, type_, *_ = line.split(" ")
        if (resolved + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best):
            best, kind = point, type_
    return kind
