"""One operation of a job in a process of its own: staging, persistent buffers, programs of a site."""

from cluster.agent.worker.buffer_usage import Answered, Asked, Look, Usage, blocks_of, inodes_of
from cluster.agent.worker.external_provider import PERSISTENT_CHANGE, PRE_RUN, paths_of
from cluster.agent.worker.orphans import SWEEP, Orphans, jobs_with_orphans
from cluster.agent.worker.work import Outcome, Work
