"""What an agent tells a worker: one order, and what else the worker has to know."""

from __future__ import annotations

import msgspec

from cluster.agent.files import capacity
from cluster.agent.processes import Mode
from cluster.agent.worker.orphans import Orphans
from cluster.providers import NO_LOCAL, Local
from cluster.system import JobProcess
from replica.messages import OperationDone, OperationFailed
from replica.model import Order


class Work(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One operation, as a worker reads it from its standard input."""

    order: Order
    home: str
    """The agent's directory, absolute."""
    storage_id: str
    accounts: Mode
    progress: int
    """Descriptor of the shared counters."""
    control: int = -1
    """Descriptor of what the transfer may do now (transfer/rate_limit); -1: it does not move data."""
    process: JobProcess = JobProcess()
    """What every process of a job gets."""
    capacity_control: str = capacity.WATCH
    """What holds buffers to their capacity."""
    cluster: str = ""
    """The cluster's id: part of the names of staging directories in destinations that clusters share."""
    local: Local = NO_LOCAL
    """What this machine's configuration says of the site's provider."""
    cgroups: str = ""
    """The tree of cgroups that everything of the job's scripts lives in and cannot leave; empty: there may be more."""
    node: str = ""
    """The node's name, as its jobs know it."""
    left: Orphans | None = None
    """sweep: where to remove temporary files."""
    agent: int
    """Process id of the agent: a worker does not outlive it."""


Outcome = OperationDone | OperationFailed
"""What a worker may say, as JSON on its standard output."""
