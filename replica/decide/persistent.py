"""Decide a scheduler's commands about persistent buffers: create or remove one for a user.

A persistent buffer always belongs to Forebay. It is therefore created or removed by a job without nodes, submitted for
the user whom the scheduler names: the job waits in the queue, counts toward that user's limits, and is in the ledger.
Both commands are idempotent: creating the user's existing buffer or removing a missing one succeeds at once, and a
pending job for the same buffer counts as work under way.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, Final

from msgspec.structs import replace

from forebay.replica.decide.buffer_request import find_pool
from forebay.replica.decide.checks import RejectionError, check_name, require
from forebay.replica.decide.external_jobs import scheduler_rejection
from forebay.replica.decide.jobs import cancel_job
from forebay.replica.decide.submit import NO_OUTPUT, submit_job
from forebay.replica.messages import NOTHING, Acceptance, Decision
from forebay.replica.messages import commands as c
from forebay.replica.model import (
    Access,
    BufferRequest,
    BufferState,
    DestroyPersistent,
    Job,
    JobOptions,
    JobRequest,
    check_user_lists,
    expand_roots,
    group_members,
    with_options,
)
from forebay.replica.state import Facts
from forebay.replica.values import Instant, Rejection, RejectionCode, format_size, run_to_end

SCRIPT: Final = "#!/bin/sh\n"
"""Script of a job without nodes; it never runs."""

TIME_LIMIT_S: Final = 60
"""Time limit of the script that never runs, seconds."""

JOBS_SCANNED_MAX: Final = 1_000
"""Maximum number of a user's jobs scanned for one about the same buffer, count: one millisecond. If the scan misses it,
a second job is submitted, which has no effect.
"""


def find_persistent_job(state: Facts, user: str, name: str) -> Job | None:
    """Return the job without nodes that creates or destroys a user's persistent buffer, or None."""
    group = state.named.get(user, _NO_NAMES).get(name)
    for job_id in () if group is None else islice(group_members(group), JOBS_SCANNED_MAX):
        job = state.jobs[job_id]
        asked = job.request.buffer
        if (
            asked is not None
            and not job.request.effective_options.nodes
            and (_creates(job, name) or _destroys(job, name))
        ):
            return job
    return None


_NO_NAMES: Final[dict[str, Any]] = {}


def _creates(job: Job, name: str) -> bool:
    asked = job.request.buffer
    return asked is not None and any(one.name == name for one in asked.creates)


def _destroys(job: Job, name: str) -> bool:
    asked = job.request.buffer
    return asked is not None and any(one.name == name for one in asked.destroys)


def _make_persistent(state: Facts, actor: c.Actor, command: c.MakePersistent, at: Instant) -> Decision:
    wanted = command.create
    try:
        _check_caller(state, actor, command.cluster, command.user, command.uid)
        known = state.persistent.get(wanted.name)
        if known is not None and known.user != command.user:
            raise _owned_by_another(wanted.name, "Duplicate buffer name", "choose another name")
        if known is not None and known.state is not BufferState.DELETING:
            return NOTHING
        under_way = find_persistent_job(state, command.user, wanted.name)
        if under_way is not None and _creates(under_way, wanted.name):
            return NOTHING
        pool = find_pool(state, wanted.pool, "pool")
        if not pool.filesystem:
            shared = sorted(name for name, one in state.pools.items() if one.filesystem)
            raise RejectionError(
                RejectionCode.INVALID_DIRECTIVE,
                f"pool {pool.name} has its buffers on nodes, where external jobs cannot use them",
                f"use one of: {', '.join(shared)}"
                if shared
                else "ask an operator to create a pool in a shared filesystem",
                "pool",
            )
    except RejectionError as error:
        return error.rejection
    text = f"#BB create_persistent name={wanted.name} capacity={format_size(wanted.capacity_bytes)} pool={wanted.pool}"
    return _submit(state, actor, command, wanted.name, replace(_EMPTY_REQUEST, text=text, creates=(wanted,)))


def _remove_persistent(state: Facts, actor: c.Actor, command: c.RemovePersistent, at: Instant) -> Decision:
    name = command.name
    try:
        _check_caller(state, actor, command.cluster, command.user, command.uid)
        known = state.persistent.get(name)
        if known is not None and known.user != command.user:
            raise _owned_by_another(name, f"Delete buffer {name} permission denied", "ask its owner, or an operator")
    except RejectionError as error:
        return error.rejection
    under_way = find_persistent_job(state, command.user, name)
    if under_way is not None and _destroys(under_way, name):
        return NOTHING
    if under_way is not None and (known is None or known.state is BufferState.ALLOCATING):
        # The teardown of the cancelled job removes the partly created buffer.
        return cancel_job(state, actor, c.CancelJob(under_way.id, hurry=True), at)
    if known is None or known.state is BufferState.DELETING:
        return NOTHING
    text = f"#BB destroy_persistent name={name}{' hurry' if command.hurry else ''}"
    asked = replace(_EMPTY_REQUEST, text=text, destroys=(DestroyPersistent(name, command.hurry),))
    return _submit(state, actor, command, name, asked)


_EMPTY_REQUEST: Final = BufferRequest("", 0, (Access.STRIPED,), "scratch", (), (), "", directives_kind="bb")


def _check_caller(state: Facts, actor: c.Actor, cluster: str, user: str, uid: int) -> None:
    """Check that a scheduler may act for the user.

    Raises:
        RejectionError: The scheduler is not registered, or the user may not have buffers.
    """
    rejection = scheduler_rejection(state, actor, cluster)
    if rejection is not None:
        raise RejectionError(rejection.code, rejection.sentence, rejection.remedy, rejection.place)
    check_name("user", user)
    if uid <= 0 or user == "root":
        sentence = "User root can not allocate burst buffers"
        raise RejectionError(RejectionCode.ROOT_NOT_ALLOWED, sentence, "submit as another user", "user")
    require(check_user_lists(state.site, user, uid))


def _owned_by_another(name: str, sentence: str, remedy: str) -> RejectionError:
    return RejectionError(
        RejectionCode.PERMISSION_DENIED, f"{sentence}: {name} belongs to another user", remedy, "name"
    )


def _submit(
    state: Facts,
    actor: c.Actor,
    command: c.MakePersistent | c.RemovePersistent,
    name: str,
    asked: BufferRequest,
) -> Decision:
    workdir = next(iter(expand_roots(state.site.destinations, command.user)), "/")
    plain = JobRequest(name, command.user, SCRIPT, workdir, TIME_LIMIT_S, output=NO_OUTPUT, buffer=asked)
    request = with_options(plain, JobOptions(nodes=0, gid=command.gid, requeue=False))
    submitted = run_to_end(submit_job(state, actor, c.SubmitJob(request)))
    return submitted if isinstance(submitted, Rejection) else Acceptance((submitted,))


PERSISTENT_BY_KEY: dict[type, Callable[[Facts, c.Actor, Any, Instant], Decision]] = {
    c.MakePersistent: _make_persistent,
    c.RemovePersistent: _remove_persistent,
}
"""Command type -> handler that needs lookups by key only."""
