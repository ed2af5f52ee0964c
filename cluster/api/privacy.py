"""Whose buffers a caller may see: Flags=PrivateData of the configuration (SEMANTICS.md, Configuration)."""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.api.service import Call
from cluster.api.web import denied
from cluster.schemas import JobView
from cluster.security import Role
from replica.model import private_data
from replica.state import State

HIDDEN: dict[str, object] = {
    "burst_buffer": None,
    "burst_buffer_state": None,
    "pool": None,
    "capacity_bytes": 0,
    "system_comment": "",
}
"""What of a job is about its buffer, and what is shown of it to others where data is private."""


def only_user(call: Call[Any], state: State) -> str | None:
    """Return the one user whose buffers the caller may see, None where he may see everybody's."""
    return call.identity.name if call.identity.role is Role.USER and private_data(state.site) else None


def may_see(call: Call[Any], state: State, job_id: int) -> bool:
    """Whether the caller may see the buffer of a job; of a job that is no longer in the state only who may see all."""
    only = only_user(call, state)
    if only is None:
        return True
    job = state.jobs.get(job_id)
    return job is not None and job.request.user == only


def owns(call: Call[Any], state: State, job_id: int) -> bool:
    """Whether names of files of the job are the caller's to see: its user's, and operators'."""
    if call.identity.role is not Role.USER:
        return True
    job = state.jobs.get(job_id)
    return job is not None and job.request.user == call.identity.name


def check_sight(call: Call[Any], state: State, job_id: int) -> None:
    """Raise Problem 403 where what happened to the buffer of a job is not the caller's to see."""
    if job_id in state.buffers and not may_see(call, state, job_id):
        remedy = "ask its user or an operator; the site has Flags=PrivateData"
        raise denied(f"the buffer of job {job_id} is private to its user", remedy, "job id")


def shown(call: Call[Any], state: State, view: JobView) -> JobView:
    """Return the job as the caller may see it."""
    only = only_user(call, state)
    if only is None or view.user == only or view.burst_buffer_state is None:
        return view
    return msgspec.structs.replace(view, **HIDDEN)
