"""Processes of jobs: accounts, what they find in their environment, starting and ending them.

No event loop is imported here: workers and supervisors start with this room."""

from cluster.agent.processes.environment import (
    BASE_LANG,
    BASE_PATH,
    CANNOT_EXECUTE,
    Account,
    AccountRefused,
    Mode,
    ScriptRefused,
    account_for,
    acting_as,
    become,
    become_script,
    environment_of,
    persistent_variables,
)
from cluster.agent.processes.job_processes import OPERATION_VARIABLE, kill_job, kill_operation, spawn
