"""Visibility of other users' data: Flags=PrivateData of the configuration (SEMANTICS.md, Configuration)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from forebay.cluster.api.web import Problem, permission_denied
from forebay.cluster.schemas import JOB_FIELDS, JobDetailsView, JobView
from forebay.cluster.security import Role
from forebay.replica.model import has_private_data
from forebay.replica.state import State

if TYPE_CHECKING:
    from forebay.cluster.api.service import ApiCall

PRIVATE_WORD = "(private)"
"""Replaces a hidden text."""

PUBLIC_STATE = frozenset({
    "job_id", "user", "uid", "state", "reason", "node", "attempt", "submit_time", "eligible_time", "start_time",
    "end_time", "exit_code", "signal", "cancelled", "external_job", "epoch", "phase", "details", "expected_start",
    "expected_after", "revision",
})  # fmt: skip
"""Fields of a job's view that other users see and no user sets; for fields that users set, see `JobField.public`."""

PUBLIC_DETAILS = frozenset({
    "gid", "array_job_id", "array_task_id", "array_throttle", "restarts", "singleton", "dependency_any", "suspend_time",
    "suspended_s",
})  # fmt: skip
"""The same for a job's details."""


def _hidden(view: type[msgspec.Struct], public: frozenset[str]) -> dict[str, Any]:
    """Return the fields of a view that are hidden from other users, with the values shown instead."""
    shown = public | {field.field for field in JOB_FIELDS if field.public}
    hidden: dict[str, Any] = {}
    for field in msgspec.structs.fields(view):
        if field.name in shown:
            continue
        if field.default is not msgspec.NODEFAULT:
            hidden[field.name] = field.default
        else:
            hidden[field.name] = {str: PRIVATE_WORD, int: 0}.get(field.type)
    return hidden


HIDDEN = _hidden(JobView, PUBLIC_STATE)
HIDDEN_DETAILS = _hidden(JobDetailsView, PUBLIC_DETAILS)


def only_user(call: ApiCall[Any], state: State) -> str | None:
    """Return the only user whose jobs and buffers the caller may see under PrivateData; None: all."""
    is_private = has_private_data(state.site) or call.service.is_private
    return call.identity.name if call.identity.role is Role.USER and is_private else None


def may_see(call: ApiCall[Any], state: State, job_id: int) -> bool:
    """Return True if the caller may see a job's buffer, files and history.

    For a deleted job, only if all are visible.
    """
    only = only_user(call, state)
    if only is None:
        return True
    job = state.jobs.get(job_id)
    return job is not None and job.request.user == only


def owns(call: ApiCall[Any], state: State, job_id: int) -> bool:
    """Return True if the caller may see names of the job's files: its user and operators may."""
    if call.identity.role is Role.DRILL:
        return False
    job = state.jobs.get(job_id)
    return call.identity.role is not Role.USER or (job is not None and job.request.user == call.identity.name)


class RecordedJob:
    """Visibility of a job that may exist only in the ledger, where its owner becomes known with its submit."""

    def __init__(self, call: ApiCall[Any], state: State, job_id: int) -> None:
        """`state`: the current one.

        Raises:
            Problem: 403, if the job is in the state and hidden from the caller.
        """
        self.job_id = job_id
        self.names = owns(call, state, job_id)
        """True if the caller may see names of its files."""
        self._caller = call.identity.name
        self._only = only_user(call, state)
        self._is_known = self._only is None
        if job_id in state.jobs:
            check_may_see(call, state, job_id)
            self._is_known = True

    def submitted_by(self, user: str) -> None:
        """Record the job's owner.

        Raises:
            Problem: 403, if the job is hidden from the caller.
        """
        if self._only not in (None, user):
            raise hidden_job(self.job_id)
        self.names, self._is_known = self.names or user == self._caller, True

    def check(self) -> None:
        """Raise Problem 403 if the owner is unknown and only the owner may see the job."""
        if not self._is_known:
            raise hidden_job(self.job_id)


def check_may_see(call: ApiCall[Any], state: State, job_id: int) -> None:
    """Raise Problem 403 if a job's history is hidden from the caller."""
    if not may_see(call, state, job_id):
        raise hidden_job(job_id)


def check_may_see_of(call: ApiCall[Any], state: State, job_id: int, user: str) -> None:
    """Raise Problem 403 if a job of `user`, possibly deleted, is hidden from the caller."""
    if only_user(call, state) not in (None, user):
        raise hidden_job(job_id)


def hidden_job(job_id: int) -> Problem:
    """Return the error for a job hidden by private data."""
    remedy = "ask its user or an operator; the site has Flags=PrivateData"
    return permission_denied(f"job {job_id} is private to its user", remedy, "job id")


def visible_reason(call: ApiCall[Any], state: State, job_id: int, reason: str) -> str:
    """Return a job's reason; PRIVATE_WORD for a hidden operation's message, because it can name files."""
    job = state.jobs[job_id]
    is_message = reason in (job.message, job.effective_interruptions.held_because)
    return PRIVATE_WORD if is_message and not may_see(call, state, job_id) else reason


def redact_job(call: ApiCall[Any], state: State, view: JobView) -> JobView:
    """Return the view with fields hidden from the caller replaced."""
    if may_see(call, state, view.job_id):
        return view
    changed = {**HIDDEN, "reason": visible_reason(call, state, view.job_id, view.reason)}
    if not view.system_comment:
        del changed["system_comment"]  # its absence shows only that no operation failed, as the job's state does
    if view.details is not None:
        changed["details"] = msgspec.structs.replace(view.details, **HIDDEN_DETAILS)
    return msgspec.structs.replace(view, **changed)
