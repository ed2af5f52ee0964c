"""Message from the agent to a worker: one order and its settings."""

from __future__ import annotations

import msgspec

from forebay.cluster.agent.adapters import NO_TOOLS, Tools
from forebay.cluster.agent.files import capacity
from forebay.cluster.agent.processes import Mode
from forebay.cluster.agent.worker.orphans import Orphans
from forebay.cluster.providers import NO_LOCAL, Local
from forebay.cluster.system import JobProcess
from forebay.replica.messages import OperationDone, OperationFailed
from forebay.replica.model import Order


class WorkerTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Operation that a worker reads from its standard input."""

    order: Order
    home: str
    """State directory of the agent, absolute."""
    storage_id: str
    accounts: Mode
    progress: int
    """Descriptor of the shared progress counters."""
    control: int = -1
    """Descriptor of the transfer control page (transfer/rate_limit); -1 if the operation moves no data."""
    process: JobProcess = JobProcess()
    """Settings of all processes of a job."""
    capacity_control: str = capacity.WATCH
    """Mechanism that enforces the capacity of buffers."""
    tools: Tools = NO_TOOLS
    """Settings of this machine for the tools of shared filesystems."""
    cluster: str = ""
    """Cluster ID: part of staging directory names, because clusters may share destinations."""
    local: Local = NO_LOCAL
    """Provider settings of this machine."""
    cgroups: str = ""
    """Cgroup tree that contains all processes of the job's scripts; empty if some may be outside."""
    node: str = ""
    """Node name as the job sees it."""
    left: Orphans | None = None
    """For `sweep`: directories to remove temporary files from."""
    agent: int
    """Process ID of the agent, which the worker does not outlive."""


Outcome = OperationDone | OperationFailed
"""Result that a worker writes to standard output as JSON."""
