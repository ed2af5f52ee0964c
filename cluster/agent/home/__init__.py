"""What an agent has of its own: its directory, the outbox, retries on a full disk, the watchdog of its workers."""

from cluster.agent.home.buffer_syncs import BufferSync
from cluster.agent.home.home import AgentFailed, DiskFullRetry, GivenUp, Home, Outbox
from cluster.agent.home.worker_watchdog import Bounds, End, Handle, see_through, whereabouts
