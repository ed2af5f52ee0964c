"""The bound that makes a replica's disk slow for it alone: how often its own cgroup may write to the device.

Cgroup v2, controller `io` (the kernel's Documentation/admin-guide/cgroup-v2.rst): a write that is more than `wiops`
allows waits, as on a disk that does no more. Whoever shares the cgroup would wait too, so nobody may.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from cluster.drill.faults import IO_MAX, TargetProcess, Throttle
from cluster.drill.messages import HelperRefused
from cluster.system import cgroup_of, descendants

WRITES_PER_S: Final = 10
"""Writes that a slow disk does, count a second: a commit takes 0.1 s and more."""

NONE: Final = "rbps=max wbps=max riops=max wiops=max"
"""What `io.max` says where nothing is bounded."""

ACCOUNTING: Final = "write IOAccounting=yes into the unit of the replica, or enable the controller io for its cgroup"
OF_ITS_OWN: Final = "start each replica as a service of its own, as the units of the packages do"


def throttle_of(process: TargetProcess, home: Path) -> Throttle:
    """Return what makes the disk of a directory slow for a process; HelperRefused."""
    try:
        group = cgroup_of(process.pid)
    except (LookupError, OSError) as error:
        raise HelperRefused(str(error), OF_ITS_OWN) from error
    try:
        members = {int(line) for line in Path(group, "cgroup.procs").read_text().split()}
    except OSError as error:
        raise HelperRefused(f"nobody can say who is in the cgroup {group}: {error}", OF_ITS_OWN) from error
    others = sorted(members - {process.pid, *descendants(process.pid)})
    if others:
        raise HelperRefused(f"process {others[0]} is in the same cgroup, {group}", OF_ITS_OWN)
    try:
        lines = Path(group, IO_MAX).read_text().splitlines()
    except OSError as error:
        raise HelperRefused(f"disks are not bounded for the cgroup {group} ({error.strerror})", ACCOUNTING) from error
    if not os.access(os.path.join(group, IO_MAX), os.W_OK):
        raise HelperRefused(f"the helper may not write {group}/{IO_MAX}", "run the helper as root")
    device = disk_of(home)
    before = next((line.partition(" ")[2] for line in lines if line.split(" ")[0] == device), NONE)
    return Throttle(group, f"{device} wiops={WRITES_PER_S}", f"{device} {before}")


def disk_of(directory: Path) -> str:
    """Return the whole disk that a directory is on, as MAJOR:MINOR; HelperRefused."""
    number = os.stat(directory).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    place = Path("/sys/dev/block", device)
    if not place.exists():
        raise HelperRefused(
            f"{directory} is on no disk that could be slow (device {device})",
            "give the replica an ext4 or xfs on a disk",
        )
    # The kernel takes no bound for a part of a disk.
    return (place.resolve().parent / "dev").read_text().strip() if (place / "partition").exists() else device
