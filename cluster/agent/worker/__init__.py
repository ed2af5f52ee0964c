"""One operation of a job in a process of its own: staging, persistent buffers, programs of a site."""

from cluster.agent.worker.leftovers import SWEEP, Left, jobs_with_leftovers
from cluster.agent.worker.provided import PRE_RUN, paths_of
from cluster.agent.worker.work import Outcome, Work
