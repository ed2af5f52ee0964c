"""What of others a caller may see: Flags=PrivateData of the configuration (SEMANTICS.md, Configuration)."""

from __future__ import annotations

from typing import Any

import msgspec

from cluster.api.service import ApiCall
from cluster.api.web import Problem, permission_denied
from cluster.schemas import JobView
from cluster.security import Role
from replica.model import private_data
from replica.state import State

PRIVATE_WORD = "(private)"
"""What is shown of a text that is not the caller's to see."""

HIDDEN: dict[str, object] = {
    "burst_buffer": None,
    "burst_buffer_state": None,
    "pool": None,
    "capacity_bytes": 0,
    "system_comment": "",
    "workdir": PRIVATE_WORD,
    "output": PRIVATE_WORD,
    "warnings": (),
    "tres": "",
}
"""What of a job is about its buffer and its files, and what is shown of it to others where data is private."""

HIDDEN_DETAILS: dict[str, object] = {"comment": None, "mail_user": None, "error": None, "arguments": ()}
"""What its user wrote for himself, for his script and for his mail."""


def only_user(call: ApiCall[Any], state: State) -> str | None:
    """Return the one user whose buffers the caller may see, None where he may see everybody's."""
    is_private = private_data(state.site) or call.service.is_private
    return call.identity.name if call.identity.role is Role.USER and is_private else None


def may_see(call: ApiCall[Any], state: State, job_id: int) -> bool:
    """Whether the caller may see buffer, files and history of a job; of one that has left the state who may see all."""
    only = only_user(call, state)
    if only is None:
        return True
    job = state.jobs.get(job_id)
    return job is not None and job.request.user == only


def owns(call: ApiCall[Any], state: State, job_id: int) -> bool:
    """Whether names of files of the job are the caller's to see: its user's, and operators'."""
    if call.identity.role is Role.DRILL:
        return False
    job = state.jobs.get(job_id)
    return call.identity.role is not Role.USER or (job is not None and job.request.user == call.identity.name)


class RecordedJob:
    """What a caller may see of a job that may be in the ledger only: whose it was is known when its submit is read."""

    def __init__(self, call: ApiCall[Any], state: State, job_id: int) -> None:
        """`state`: the one in force. Problem 403 where the job is in it and not the caller's to see."""
        self.job_id = job_id
        self.names = owns(call, state, job_id)
        """Whether names of its files are the caller's to see."""
        self._caller = call.identity.name
        self._only = only_user(call, state)
        self._is_known = self._only is None
        if job_id in state.jobs:
            check_may_see(call, state, job_id)
            self._is_known = True

    def submitted_by(self, user: str) -> None:
        """Take note of whose job it was; Problem 403 where it is not the caller's to see."""
        if self._only not in (None, user):
            raise hidden_job(self.job_id)
        self.names, self._is_known = self.names or user == self._caller, True

    def check(self) -> None:
        """Raise Problem 403 where nobody knows whose it was and only its user may see it."""
        if not self._is_known:
            raise hidden_job(self.job_id)


def check_may_see(call: ApiCall[Any], state: State, job_id: int) -> None:
    """Raise Problem 403 where what happened to a job is not the caller's to see."""
    if not may_see(call, state, job_id):
        raise hidden_job(job_id)


def check_may_see_of(call: ApiCall[Any], state: State, job_id: int, user: str) -> None:
    """Raise Problem 403 where a job of `user`, which may have left the state in force, is not the caller's to see."""
    if only_user(call, state) not in (None, user):
        raise hidden_job(job_id)


def hidden_job(job_id: int) -> Problem:
    """Return the problem of who asks about a job that is not his where data is private."""
    remedy = "ask its user or an operator; the site has Flags=PrivateData"
    return permission_denied(f"job {job_id} is private to its user", remedy, "job id")


def redact_job(call: ApiCall[Any], state: State, view: JobView) -> JobView:
    """Return a job of the state as the caller may see it."""
    if may_see(call, state, view.job_id):
        return view
    changed = dict(HIDDEN)
    job = state.jobs[view.job_id]
    if view.reason in (job.message, job.interrupted.held_because):
        changed["reason"] = PRIVATE_WORD  # what an operation said when it failed, which may name files
    if view.details is not None:
        changed["details"] = msgspec.structs.replace(view.details, **HIDDEN_DETAILS)
    return msgspec.structs.replace(view, **changed)
