"""The operations of a site's own provider, in the agent's worker: which ones make up a stage, and in which order.

    persistent destroy_persistent, or create_persistent: one by one before a stage-in or a teardown that has any
    stage_in   setup data_in real_size paths
    run        pre_run, then the script with the variables that `paths` gave
    post_run   post_run
    stage_out  data_out
    teardown   teardown

Each operation is a process of its own that the worker can end (cluster.providers.guard). What `paths` said is kept,
durably, in calls/<job>/environment.json until the teardown.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from typing import Final

import msgspec

from cluster.agent.files import CALLS, read_bounded, remove_tree, write_durably
from cluster.agent.messages import failure
from cluster.agent.processes import AccountRefused, Mode, account_for, cgroup_of_script, kill_job
from cluster.agent.worker.work import Outcome, Work
from cluster.providers import OperationError, Provider, Subject, log_for, provider_for
from cluster.system import SystemClock, become_subreaper, closing, open_directory
from replica.messages import OperationDone
from replica.model import NO_OPTIONS, NO_STATUS, Order

PRE_RUN: Final = "pre_run"
"""The stage that an agent makes of the first part of a run; no order names it."""

PERSISTENT_CHANGE: Final = "persistent"
"""The stage that an agent makes of each persistent buffer to make or remove; no order names it."""

ENVIRONMENT: Final = "environment.json"

_PRIVATE: Final = 0o700


def perform(work: Work) -> Outcome:
    """Do what the order asks for with the site's provider; what it says is wrong is a result, too."""
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
    """Return what a provider is told of the order's job; AccountRefused if its user has to be known here and is not."""
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
    """Return the user and group id that providers are told: the user's own, or the agent's where he is not known."""
    with contextlib.suppress(KeyError):
        found = pwd.getpwnam(user)
        return found.pw_uid, found.pw_gid
    if accounts == "switch":
        raise AccountRefused(f"the user {user!r} does not exist on this node; make the account here")
    return os.geteuid(), os.getegid()


def _directory(work: Work) -> str:
    """Return where the files for this job's calls are; only the agent's account can look in."""
    name = str(work.order.job)
    with closing(open_directory(os.path.join(work.home, CALLS))) as calls:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, _PRIVATE, dir_fd=calls)
        os.close(open_directory(name, dir_fd=calls))
    return os.path.join(work.home, CALLS, name)


def paths_of(calls: int, job: int) -> tuple[tuple[str, str], ...]:
    """Return the variables that `paths` gave the job; `calls` is the open directory.

    FileRefused or msgspec.DecodeError if they are damaged.
    """
    try:
        directory = open_directory(str(job), dir_fd=calls)
    except FileNotFoundError:
        return ()
    with closing(directory):
        data = read_bounded(directory, ENVIRONMENT)
    return () if data is None else msgspec.json.decode(data, type=tuple[tuple[str, str], ...])


def forget(calls: int, job: int) -> None:
    """Remove the files of a job's calls; RemovalFailed if that is not possible."""
    remove_tree(calls, str(job), shown=f"{CALLS}/{job}")


def _change_persistent(order: Order, provider: Provider, subject: Subject, directory: str) -> None:
    for unwanted in order.destroys:
        provider.destroy_persistent(subject, unwanted, directory)
    for wanted in order.creates:
        provider.create_persistent(subject, wanted, directory)


def _stage_in(work: Work, provider: Provider, subject: Subject, directory: str) -> Outcome:
    provider.setup(subject, directory)
    provider.data_in(subject, directory)
    size = provider.real_size(subject, directory)
    # A job that runs no script has no environment, and no node for it.
    variables = () if subject.persistent_only else provider.paths(subject, directory)
    with closing(open_directory(directory)) as place:
        write_durably(place, ENVIRONMENT, msgspec.json.encode(variables))
    return OperationDone(size_bytes=size or 0)


def _kill_script(work: Work) -> list[int]:
    """Kill what is left of the job's script; return the ids of what cannot be killed. AccountRefused."""
    uid = account_for(work.accounts, work.order.user).uid
    cgroup = cgroup_of_script(work.home, work.order.job)
    return kill_job(f"{work.storage_id}.{work.order.job}", uid, cgroup=cgroup)


def _post_run(work: Work, provider: Provider, subject: Subject, directory: str) -> Outcome:
    left = _kill_script(work)
    if left:
        return failure(f"processes of job {work.order.job} cannot be killed: {', '.join(map(str, left[:20]))}")
    provider.post_run(subject, directory)
    return OperationDone()


def _teardown(work: Work, provider: Provider, subject: Subject, directory: str) -> Outcome:
    with contextlib.suppress(AccountRefused):
        _kill_script(work)
    provider.teardown(subject, work.order.hurry, directory)
    with closing(open_directory(os.path.join(work.home, CALLS))) as calls:
        forget(calls, work.order.job)
    return OperationDone()
