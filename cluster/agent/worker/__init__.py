"""Worker process that carries out one operation of a job: staging, persistent buffers, or a site's provider."""

from forebay.cluster.agent.worker.buffer_usage import Usage, UsageQuery, UsageReply, UsageRequest, blocks_of, inodes_of
from forebay.cluster.agent.worker.external_provider import PERSISTENT_CHANGE, PRE_RUN, paths_of
from forebay.cluster.agent.worker.orphans import SWEEP, Orphans, jobs_with_orphans
from forebay.cluster.agent.worker.task import Outcome, WorkerTask
