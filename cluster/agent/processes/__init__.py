"""Processes of jobs: accounts, environments, starting and killing.

No event loop is imported here, because workers and supervisors import this package at start.
"""

from forebay.cluster.agent.processes.cgroups import (
    AUTO,
    CGROUP_FILE,
    NONE,
    OWN,
    Cgroup,
    CgroupName,
    CgroupRefused,
    CgroupTree,
    cgroup_of_script,
    enter,
    join,
    open_tree,
)
from forebay.cluster.agent.processes.cloning import fork
from forebay.cluster.agent.processes.environment import (
    BASE_LANG,
    BASE_PATH,
    CANNOT_EXECUTE,
    AccountRefused,
    Mode,
    ScriptRefused,
    UnixAccount,
    account_for,
    acting_as,
    become,
    become_script,
    environment_of,
    load_accounts,
    persistent_variables,
)
from forebay.cluster.agent.processes.forking import BEGIN, READY, ChildProcess, ForkAnswer, ForkRequest, ForkServer
from forebay.cluster.agent.processes.job_processes import (
    ENDED,
    OPERATION_VARIABLE,
    SYNCED,
    ScriptProcesses,
    kill_job,
    kill_operation,
)
