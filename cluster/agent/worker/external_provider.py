"""Operations of an external provider in the agent's worker, and the order in which a stage runs them.

    persistent destroy_persistent or create_persistent, before a stage-in or teardown that needs one
    stage_in   setup data_in real_size paths
    run        pre_run, then the script with the variables from `paths`
    post_run   post_run
    stage_out  data_out
    teardown   teardown

Each operation runs in a process of its own that the worker can end (cluster.providers.guard). The output of `paths` is
kept durably in calls/<job>/environment.json until teardown.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from typing import Final

import msgspec

from forebay.cluster.agent.files import CALLS, read_bounded, remove_tree, write_durably
from forebay.cluster.agent.messages import failure
from forebay.cluster.agent.processes import AccountRefused, Mode, account_for, cgroup_of_script, kill_job
from forebay.cluster.agent.worker.task import Outcome, WorkerTask
from forebay.cluster.providers import OperationError, Provider, Subject, log_for, provider_for
from forebay.cluster.system import SystemClock, become_subreaper, closing, open_directory
from forebay.replica.messages import OperationDone
from forebay.replica.model import NO_OPTIONS, NO_STATUS, Order

PRE_RUN: Final = "pre_run"
"""Internal stage of the agent: the first part of a run. The controller never orders it."""

PERSISTENT_CHANGE: Final = "persistent"
"""Internal stage of the agent: create or remove one persistent buffer. The controller never orders it."""

ENVIRONMENT: Final = "environment.json"

_PRIVATE: Final = 0o700


def perform(work: WorkerTask) -> Outcome:
    """Carry out the order with the site's provider; provider errors become an `OperationFailed`."""
    order = work.order
    assert order.provision is not None
    become_subreaper()
    log_for(order.job)
    try:
        provider = provider_for(order.provision, work.local, SystemClock())
        subject, directory = subject_of(order, work.accounts, work.node), _directory(work)
        match order.stage:
            case _ if order.stage == PERSISTENT_CHANGE:
                _change_persistent(order, provider, subject, directory)
            case "stage_in":
                return _stage_in(work, provider, subject, directory)
            case "post_run":
                return _post_run(work, provider, subject, directory)
            case "teardown":
                return _teardown(work, provider, subject, directory)
            case "stage_out":
                provider.data_out(subject, directory)
            case _:
                assert order.stage == PRE_RUN
                provider.pre_run(subject, directory)
        return OperationDone()
    except OperationError as error:
        return failure(error.message, final=error.final, operation=error.operation)


def subject_of(order: Order, accounts: Mode, node: str) -> Subject:
    """Return the description of the order's job for a provider.

    Raises:
        AccountRefused: The agent switches accounts and the user does not exist on this node.
    """
    uid, gid = _ids(order.user, accounts)
    options = order.options or NO_OPTIONS
    array = order.array
    return Subject(
        job=order.job,
        name=order.name,
        user=order.user,
        uid=uid,
        gid=order.gid or gid,
        workdir=order.workdir,
        script=order.script,
        directives=order.directives,
        pool=order.pool,
        size=order.capacity_bytes,
        size_is_bytes=order.pool_is_bytes,
        has_size=order.capacity_bytes > 0,
        node=node,
        time_limit_s=order.time_limit_s,
        cpus=order.cpus,
        options=options,
        status=order.status or NO_STATUS,
        persistent_only=options.nodes == 0,
        array_job=0 if array is None else array.job,
        array_task=0 if array is None else array.task,
        array_throttle=0 if array is None else array.throttle,
    )


def _ids(user: str, accounts: Mode) -> tuple[int, int]:
    """Return the user and group ID for providers: the user's own, or the agent's if the user is unknown here."""
    with contextlib.suppress(KeyError):
        found = pwd.getpwnam(user)
        return found.pw_uid, found.pw_gid
    if accounts == "switch":
        raise AccountRefused(f"the user {user!r} does not exist on this node; create the account")
    return os.geteuid(), os.getegid()


def _directory(work: WorkerTask) -> str:
    """Create the directory for the job's provider files, accessible only to the agent, and return its path."""
    name = str(work.order.job)
    with closing(open_directory(os.path.join(work.home, CALLS))) as calls:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, _PRIVATE, dir_fd=calls)
        os.close(open_directory(name, dir_fd=calls))
    return os.path.join(work.home, CALLS, name)


def paths_of(calls: int, job: int) -> tuple[tuple[str, str], ...]:
    """Return the variables that `paths` gave the job; `calls` is an open directory.

    Raises:
        FileRefused: The file is too large.
        msgspec.DecodeError: The file is damaged.
    """
    try:
        directory = open_directory(str(job), dir_fd=calls)
    except FileNotFoundError:
        return ()
    with closing(directory):
        data = read_bounded(directory, ENVIRONMENT)
    return () if data is None else msgspec.json.decode(data, type=tuple[tuple[str, str], ...])


def forget(calls: int, job: int) -> None:
    """Remove the job's provider files.

    Raises:
        RemovalFailed: A file cannot be removed.
    """
    remove_tree(calls, str(job), shown=f"{CALLS}/{job}")


def _change_persistent(order: Order, provider: Provider, subject: Subject, directory: str) -> None:
    for unwanted in order.destroys:
        provider.destroy_persistent(subject, unwanted, directory)
    for wanted in order.creates:
        provider.create_persistent(subject, wanted, directory)


def _stage_in(work: WorkerTask, provider: Provider, subject: Subject, directory: str) -> Outcome:
    provider.setup(subject, directory)
    provider.data_in(subject, directory)
    size = provider.real_size(subject, directory)
    # A job without a script has no environment and no node.
    variables = () if subject.persistent_only else provider.paths(subject, directory)
    with closing(open_directory(directory)) as place:
        write_durably(place, ENVIRONMENT, msgspec.json.encode(variables))
    return OperationDone(size_bytes=size or 0)


def _kill_script(work: WorkerTask) -> list[int]:
    """Kill remaining processes of the job's script; return the IDs of those that cannot be killed."""
    uid = account_for(work.accounts, work.order.user).uid
    cgroup = cgroup_of_script(work.home, work.order.job)
    return kill_job(f"{work.storage_id}.{work.order.job}", uid, cgroup=cgroup)


def _post_run(work: WorkerTask, provider: Provider, subject: Subject, directory: str) -> Outcome:
    left = _kill_script(work)
    if left:
        return failure(f"processes of job {work.order.job} cannot be killed: {', '.join(map(str, left[:20]))}")
    provider.post_run(subject, directory)
    return OperationDone()


def _teardown(work: WorkerTask, provider: Provider, subject: Subject, directory: str) -> Outcome:
    with contextlib.suppress(AccountRefused):
        _kill_script(work)
    provider.teardown(subject, work.order.hurry, directory)
    with closing(open_directory(os.path.join(work.home, CALLS))) as calls:
        forget(calls, work.order.job)
    return OperationDone()
