"""Exercises at a site with a real Slurm; each returns figures or raises RunFailed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from tests.slurm.exercises.arrays import arrays, large_array
from tests.slurm.exercises.cancels import cancels
from tests.slurm.exercises.common import Told
from tests.slurm.exercises.datawarp_scripts import datawarp_scripts
from tests.slurm.exercises.deaths import leader_kill, reconfigure, slurmctld_kill, takeover
from tests.slurm.exercises.interruptions import (
    SETTINGS,
    heterogeneous,
    node_failure,
    preemption,
    requeue,
    time_limit,
)
from tests.slurm.exercises.lives import lifecycle, unexported
from tests.slurm.exercises.load import away, mass, tiny_job
from tests.slurm.exercises.options import options
from tests.slurm.exercises.refusals import ROWS, refusals
from tests.slurm.exercises.space import overcommit
from tests.slurm.site import POOL_GRAINS

__all__ = ["EXERCISES", "ROWS", "Exercise"]


class Exercise(NamedTuple):
    """Exercise, with its default size and the options of its site."""

    told: Told
    size: int = 1
    site: Callable[[int], dict[str, Any]] = lambda size: {}
    """Options of `Site` by the size."""
    only: str = ""
    """The plugin that it is for; empty: both."""


def _interrupted(size: int) -> dict[str, Any]:
    return {"settings": SETTINGS}


EXERCISES: Final = {
    "lifecycle": Exercise(lifecycle),
    "arrays": Exercise(arrays),
    "large-array": Exercise(large_array, 2000, lambda size: {"settings": f"MaxArraySize={size + 1}\n", "gates": False}),
    "cancels": Exercise(cancels, 40),
    "options": Exercise(options, 1, lambda size: {"checked": True}),
    "leader-kill": Exercise(leader_kill, 50),
    "slurmctld-kill": Exercise(slurmctld_kill, 20),
    "takeover": Exercise(takeover, 8, lambda size: {"backup": True}),
    "reconfigure": Exercise(reconfigure, 8),
    "requeue": Exercise(requeue, 3, _interrupted),
    "preemption": Exercise(preemption, 1, _interrupted),
    "node-failure": Exercise(node_failure, 1, _interrupted),
    "time-limit": Exercise(time_limit, 1, _interrupted),
    "heterogeneous": Exercise(heterogeneous, 1, _interrupted),
    "datawarp-scripts": Exercise(datawarp_scripts, 1, lambda size: {"grains": 4 * POOL_GRAINS}, only="datawarp"),
    "overcommit": Exercise(overcommit, 200, lambda size: {"grains": 2 * POOL_GRAINS}),
    "refusals": Exercise(refusals),
    "unexported": Exercise(unexported),
    "away": Exercise(away, 100),
    "tiny-job": Exercise(tiny_job, 25, lambda size: {"gates": False}),
    "mass": Exercise(mass, 2000, lambda size: {"grains": max(size, 160) + POOL_GRAINS, "gates": False}),
}
"""By their names."""
