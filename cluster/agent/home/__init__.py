"""What an agent has of its own: its directory, the outbox, retries on a full disk, the watchdog of its workers."""

from cluster.agent.home.disk_full_retry import DiskFullRetry, GivenUp
from cluster.agent.home.home import AgentFailed, Home
from cluster.agent.home.outbox import Outbox
from cluster.agent.home.worker_watchdog import Bounds, End, Handle, Hung, see_through, whereabouts
