"""Runtime of an agent: its state directory, the report outbox, retries on a full disk, and the worker watchdog."""

from forebay.cluster.agent.runtime.buffer_syncs import BufferSync
from forebay.cluster.agent.runtime.state_directory import (
    AgentFailed,
    DiskFullRetry,
    ReportOutbox,
    RetryAbandoned,
    StateDirectory,
)
from forebay.cluster.agent.runtime.worker_watchdog import Handle, WorkerEnd, WorkerLimits, kernel_location, supervise
