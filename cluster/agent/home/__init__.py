"""An agent's own directory: where what is kept, the outbox, reserve files."""

from cluster.agent.home.disk_full_retry import GivenUp, Room
from cluster.agent.home.home import AgentFailed, Home
from cluster.agent.home.outbox import Outbox
