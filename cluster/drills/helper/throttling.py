"""I/O limit that makes the disk slow for one replica, by limiting the write rate of the replica's cgroup.

Cgroup v2, controller `io` (the kernel's Documentation/admin-guide/cgroup-v2.rst): writes beyond `wiops` wait, as on a
slow disk. The cgroup must contain no other processes, because the limit would apply to them too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from forebay.cluster.drills.helper.faults import IO_MAX, TargetProcess, Throttle
from forebay.cluster.drills.helper.messages import HelperRefused
from forebay.cluster.system import cgroup_of, descendants

WRITES_PER_S: Final = 10
"""Writes per second of a slow disk: a commit takes 0.1 s and more."""

NONE: Final = "rbps=max wbps=max riops=max wiops=max"
"""Content of `io.max` without limits."""

ACCOUNTING: Final = "write IOAccounting=yes into the unit of the replica, or enable the controller io for its cgroup"
OWN_SERVICE: Final = "start each replica as a service of its own, as the units of the packages do"


def throttle_of(process: TargetProcess, home: Path) -> Throttle:
    """Return the limit that makes a directory's disk slow for a process.

    Raises:
        HelperRefused: The process does not have a cgroup of its own with disk limits.
    """
    try:
        group = cgroup_of(process.pid)
    except (LookupError, OSError) as error:
        raise HelperRefused(str(error), OWN_SERVICE) from error
    try:
        members = {int(line) for line in Path(group, "cgroup.procs").read_text().split()}
    except OSError as error:
        raise HelperRefused(f"the processes of the cgroup {group} cannot be listed: {error}", OWN_SERVICE) from error
    others = sorted(members - {process.pid, *descendants(process.pid)})
    if others:
        raise HelperRefused(f"process {others[0]} is in the same cgroup, {group}", OWN_SERVICE)
    try:
        lines = Path(group, IO_MAX).read_text().splitlines()
    except OSError as error:
        raise HelperRefused(
            f"disk limits are not enabled for the cgroup {group} ({error.strerror})", ACCOUNTING
        ) from error
    if not os.access(os.path.join(group, IO_MAX), os.W_OK):
        raise HelperRefused(f"the helper may not write {group}/{IO_MAX}", "run the helper as root")
    device = disk_of(home)
    before = next((line.partition(" ")[2] for line in lines if line.split(" ")[0] == device), NONE)
    return Throttle(group, f"{device} wiops={WRITES_PER_S}", f"{device} {before}")


def disk_of(directory: Path) -> str:
    """Return the disk that contains a directory, not its partition, as MAJOR:MINOR.

    Raises:
        HelperRefused: The directory is not on a disk that can be slowed down.
    """
    number = os.stat(directory).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    place = Path("/sys/dev/block", device)
    if not place.exists():
        raise HelperRefused(
            f"{directory} is not on a disk that can be slowed down (device {device})",
            "give the replica an ext4 or xfs filesystem on a disk",
        )
    # The kernel accepts no limit for a partition.
    return (place.resolve().parent / "dev").read_text().strip() if (place / "partition").exists() else device
