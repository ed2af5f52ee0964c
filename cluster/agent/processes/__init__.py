"""Processes of jobs: accounts, starting, waiting, ending."""

from cluster.agent.processes.accounts import Account, AccountRefused, Mode, account_for, become
from cluster.agent.processes.job_processes import OPERATION_VARIABLE, STEP_VARIABLE, kill_job, kill_operation
from cluster.agent.processes.spawning import spawn
