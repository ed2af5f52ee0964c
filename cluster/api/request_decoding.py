"""Request decoding: turns request bodies into commands; state-independent errors are rejected with their position."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import msgspec

from forebay.cluster.api.web import LONG_CHARACTERS, DecodedSubmit, Problem, bad_request, permission_denied
from forebay.cluster.schemas import OtherError, SubmitRequest, UpdateRequest, made_of, shared_fields
from forebay.cluster.schemas import agents as agent_schemas
from forebay.cluster.schemas import external_jobs as g
from forebay.cluster.schemas import requests as r
from forebay.cluster.security import Identity, Role
from forebay.cluster.system import parse_instant
from forebay.replica.grammar import (
    DirectiveRejected,
    ParsedRequest,
    PathVariables,
    read_external_job_request,
    read_request,
    script_bytes_max,
)
from forebay.replica.messages import commands as c
from forebay.replica.model import (
    DEFAULT_SITE,
    AfterTask,
    ArrayError,
    Dependency,
    DependencyKind,
    Hold,
    JobChange,
    JobOptions,
    JobRequest,
    Pool,
    Site,
    Stage,
    Tasks,
    TransferReceipt,
    clip_checkpoint,
    clip_count,
    clip_receipt,
    parse_array,
    parse_reference,
    with_options,
)
from forebay.replica.values import (
    DEPENDENCIES_MAX,
    NEVER,
    SCRIPT_BYTES_MAX,
    SIZE_BYTES_MAX,
    Instant,
    RejectionCode,
    SizeError,
    name_fault,
    parse_size,
)

DEFAULT_NAME = "batch"
"""Default job name."""

_DEPENDENCY = re.compile(r"([a-z]+):([0-9]{1,18})(?:_([0-9]{1,9}))?", re.ASCII)
SINGLETON = "singleton"
"""Dependency without a job: all earlier jobs of the same user and name."""

_LICENSE = re.compile(r"([A-Za-z0-9_.+-]+)(?:[:=]([1-9][0-9]{0,8}))?", re.ASCII)
_KINDS = {kind.word: kind for kind in DependencyKind if not kind.is_for_array}
_STAGES = {stage.word: stage for stage in Stage}


def submission(
    request: SubmitRequest, identity: Identity, site: Site = DEFAULT_SITE
) -> tuple[c.SubmitJob, tuple[str, ...]]:
    """Return a submit's command and its warnings.

    `site` selects the provider, whose grammar requests follow.

    Raises:
        Problem: The request is invalid; names line and column.
    """
    size_bytes = len(request.script.encode())
    most = script_bytes_max(request.script)
    if size_bytes > most:
        raise Problem(
            413,
            "limit_exceeded",
            f"the script has {size_bytes} bytes; at most {most} are accepted",
            "put its data into files and stage them in",
            "script",
        )
    user = identity.name if request.user is None else request.user
    if identity.role is not Role.OPERATOR and user != identity.name:
        raise permission_denied(
            f"{identity} may not submit for user {user!r}", "omit user, or ask an operator to submit the job", "user"
        )
    _refuse_blank(request, "leave it out, or write a request")
    reading = _read_directives(request.script, request, site, too_large=413)
    dependencies, after_tasks = _dependencies(tuple(text for text in request.dependencies if text != SINGLETON))
    job = JobRequest(
        **_given_fields(request, JobRequest)
        | {
            "name": request.name or DEFAULT_NAME,
            "user": user,
            "begin_at": _instant(request.begin_at, "begin_at"),
            "deadline": _instant(request.deadline, "deadline"),
            "dependencies": dependencies,
            "environment": tuple(sorted(request.environment.items())),
            "buffer": reading.request,
            "array": None,
        }
    )
    tasks, throttle = _array(request.array)
    hold = Hold.USER if request.hold else Hold.NONE
    command = c.SubmitJob(
        with_options(job, _options(request)),
        hold,
        tasks,
        throttle,
        after_tasks,
        request.ignored_options,
        request.if_defined,
    )
    return command, reading.warnings


def warnings_of(request: SubmitRequest, site: Site = DEFAULT_SITE) -> tuple[str, ...]:
    """Return warnings for the submitter of an accepted request."""
    return _read_directives(request.script, request, site).warnings


def _refuse_blank(request: SubmitRequest | UpdateRequest, remedy: str) -> None:
    for text, place in ((request.bb, "--bb"), (request.bbf, "--bbf")):
        if text is not None and not text.strip():
            raise bad_request(f"the text of {place} is empty", remedy, place, "invalid_directive")


def _read_directives(
    script: str, request: SubmitRequest | UpdateRequest, site: Site, *, too_large: int = 400
) -> ParsedRequest:
    """Return the burst-buffer request.

    Raises:
        Problem: The request is invalid; `too_large` is the status for a text that is too long.
    """
    try:
        return read_request(
            script,
            request.bb or "",
            request.bbf or "",
            provider=site.provider,
            directive=site.directive,
            variables=PathVariables(site.path_variables, tuple(request.variables.items())),
        )
    except DirectiveRejected as error:
        rejection = error.rejection
        status = too_large if rejection.code is RejectionCode.LIMIT_EXCEEDED else 400
        raise _directives_problem(status, error) from error


def _directives_problem(status: int, error: DirectiveRejected) -> Problem:
    first = error.rejection
    others = tuple(OtherError(sentence=one.sentence, remedy=one.remedy, place=one.place) for one in error.others)
    return Problem(status, first.code.name.lower(), first.sentence, first.remedy, first.place, others=others)


def _array(text: str | None) -> tuple[tuple[int, ...], int]:
    """Return the tasks and the throttle of `--array`."""
    if text is None:
        return (), 0
    try:
        return parse_array(text)
    except ArrayError as error:
        sentence, _, remedy = str(error).partition("; ")
        raise bad_request(sentence, remedy or "write for example 1-10 or 1-10%2", "array") from error


def _options(request: SubmitRequest) -> JobOptions:
    return JobOptions(
        **_given_fields(request, JobOptions)
        | {
            "licenses": _licenses(request.licenses),
            "singleton": SINGLETON in request.dependencies,
            "any_of": request.dependency_any,
        }
    )


def _given_fields(request: SubmitRequest, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields of `kind` that a submit sets under the same names; the others keep their defaults."""
    names = shared_fields(SubmitRequest, kind)
    return {name: value for name in names if (value := getattr(request, name)) is not None}


def _licenses(texts: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    found: dict[str, int] = {}
    for text in texts:
        matched = _LICENSE.fullmatch(text)
        if matched is None or name_fault(matched.group(1)) is not None:
            raise bad_request(f"the licence {text[:48]!r} is invalid", "write NAME or NAME:COUNT", "licenses")
        if matched.group(1) in found:
            raise bad_request(f"the licence {matched.group(1)} is named twice", "name it once", "licenses")
        found[matched.group(1)] = int(matched.group(2) or 1)
    return tuple(sorted(found.items()))


def external_job_setup(
    job: str, request: g.SetUpExternalJobRequest, site: Site
) -> tuple[c.SetUpExternalJob, tuple[str, ...]]:
    """Return an external job's setup command and the directives without effect.

    Raises:
        Problem: The request is invalid; names the position.
    """
    if len(request.script.encode()) > SCRIPT_BYTES_MAX:
        sentence = f"the script has more than {SCRIPT_BYTES_MAX} bytes"
        raise Problem(413, "limit_exceeded", sentence, "put its data into files and stage them in", "script")
    reading = _directives(request.script, site)
    asked = reading.request
    if asked is not None:
        # The external scheduler has rounded and accounted the directives, so exactly that much is granted. It requests
        # creation and removal of persistent buffers separately, in advance.
        own: dict[str, Any] = {"pool": request.pool or asked.pool, "creates": (), "destroys": ()}
        own["capacity_bytes"] = request.size or asked.capacity_bytes
        asked = msgspec.structs.replace(asked, **own, units="bare" if request.size else asked.units)
    options = JobOptions(gid=request.gid, groups=request.groups)
    wanted = JobRequest(request.name or job, request.user, "", request.workdir, 0, buffer=asked)
    command = c.SetUpExternalJob(request.cluster, job, request.uid, with_options(wanted, options), request.epoch)
    return command, reading.warnings


def _directives(script: str, site: Site) -> ParsedRequest:
    variables = PathVariables(site.path_variables, by_scheduler=True)
    try:
        reading = read_external_job_request(script, directive=site.directive, variables=variables)
        if reading.request is not None:
            return reading
        # A script without Slurm's directives uses Forebay's own.
        return read_request(script, "", "", provider=site.provider, variables=variables)
    except DirectiveRejected as error:
        rejection = error.rejection
        raise Problem(
            400, rejection.code.name.lower(), rejection.sentence, rejection.remedy, rejection.place
        ) from error


def set_pool(name: str, request: r.PoolRequest) -> c.SetPool:
    """Return the command that creates or changes a pool."""
    out = request.out_of_service
    return c.SetPool(
        Pool(
            name=name,
            quantity_bytes=_size(request.quantity, "quantity"),
            granularity_bytes=_size(request.granularity, "granularity"),
            is_default=request.default,
            out_of_service_bytes=0 if out is None or out == "0" else _size(out, "out_of_service"),
        )
    )


_OF_JOBS: dict[type[r.JobCommand], Callable[[int, Tasks], c.Command]] = {
    r.HoldCommand: c.HoldJob,
    r.SuspendCommand: c.SuspendJob,
    r.ContinueCommand: c.ResumeJob,
    r.RequeueCommand: c.RequeueJob,
}
"""Commands whose only parameter is the job, by their bulk type."""


def text_characters(request: r.Request) -> int:
    """Return the number of text characters in a request, which determines its decoding time."""
    return sum(len(value) for name in request.__struct_fields__ if isinstance(value := getattr(request, name), str))


def bulk_command(request: r.BulkCommand, identity: Identity, site: Site = DEFAULT_SITE) -> c.Command:
    """Return one command of a bulk request."""
    match request:
        case r.SubmitCommand():
            return submission(request, identity, site)[0]
        case r.CancelCommand():
            job, tasks = job_reference(request.job_id)
            return c.CancelJob(job, request.hurry, tasks)
        case r.ReleaseCommand():
            return c.ReleaseJob(*job_reference(request.job_id), request.partial)
        case r.JobCommand():
            return _OF_JOBS[type(request)](*job_reference(request.job_id))
        case r.UpdateCommand():
            return update_job(*job_reference(request.job_id), request, site)
        case r.ClearCommand():
            return _clear(request)
        case r.PoolCommand():
            return set_pool(request.name, request)
        case r.DrainCommand():
            return c.DrainNode(request.node, request.reason)
        case r.ResumeCommand():
            return c.ResumeNode(request.node)
        case r.OpenSessionCommand():
            return c.OpenSession()


def job_reference(named: r.JobReference, place: str = "job_id") -> tuple[int, Tasks]:
    """Parse a job reference, `12`, `12_3` or `12_[1-4]`, into job or array and tasks.

    Raises:
        Problem: 400, if the reference is invalid.
    """
    if isinstance(named, int):
        return named, None
    try:
        return parse_reference(named)
    except ArrayError as fault:
        sentence, _, remedy = str(fault).partition("; ")
        raise bad_request(sentence, remedy or "use the job ID that the submit returned", place) from fault


def _clear(request: r.ClearCommand) -> c.ClearBuffer:
    if (request.job_id is None) == (request.name is None):
        raise bad_request("no buffer is named", "give job_id, or the name of a persistent buffer", "job_id")
    return c.ClearBuffer(job=request.job_id or 0, name=request.name or "", discard=request.discard)


def report_operation(node: str, report: agent_schemas.OperationReport) -> c.ReportOperation:
    """Return the command of one report."""
    stage = _STAGES[report.stage]
    return c.ReportOperation(
        node, report.job, report.attempt, stage, _bound_result(report.result, stage, report.attempt)
    )


def _bound_result(result: c.OperationResult, stage: Stage, attempt: int) -> c.OperationResult:
    """Clamp the result's numbers to the ledger's range.

    Rejecting it would make its agent resend it forever, although the operation has ended.
    """
    match result:
        case c.OperationDone(files, size_bytes, _, receipt):
            kept = None if receipt is None else clip_receipt(receipt, stage, attempt)
            return msgspec.structs.replace(
                result, files=clip_count(files), size_bytes=clip_count(size_bytes), receipt=kept
            )
        case c.OperationFailed(receipt=TransferReceipt() as receipt):
            return msgspec.structs.replace(result, receipt=clip_receipt(receipt, stage, attempt))
        case c.TransferProgressed(checkpoint):
            return c.TransferProgressed(clip_checkpoint(checkpoint, stage, attempt))
        case c.ScriptEnded(exit_code=exit_code, signal=signal):
            numbers = {"exit_code": clip_count(exit_code, least=-SIZE_BYTES_MAX), "signal": clip_count(signal)}
            return msgspec.structs.replace(result, **numbers)
    return result


def _instant(text: str | None, place: str) -> Instant:
    if text is None:
        return NEVER
    try:
        found = parse_instant(text)
    except (ValueError, OverflowError) as error:
        raise bad_request(f"the time {text!r} is invalid", "write it as 2026-01-31T12:00:00Z", place) from error
    if found < 0:
        raise bad_request(f"the time {text!r} is before 1970", "write a later one", place)
    return found


def _dependencies(texts: tuple[str, ...]) -> tuple[tuple[Dependency, ...], tuple[AfterTask, ...]]:
    """Return the dependencies on jobs, and those on array tasks."""
    if len(texts) > DEPENDENCIES_MAX:
        raise bad_request(
            f"{len(texts)} dependencies are given", f"depend on at most {DEPENDENCIES_MAX} jobs", "dependencies"
        )
    jobs: list[Dependency] = []
    tasks: list[AfterTask] = []
    for text in texts:
        matched = _DEPENDENCY.fullmatch(text)
        kind = _KINDS.get(matched.group(1)) if matched else None
        if matched is None or kind is None:
            known = ", ".join([*(f"{word}:JOB" for word in _KINDS), SINGLETON])
            raise bad_request(f"the dependency {text[:48]!r} is unknown", f"write one of {known}", "dependencies")
        if matched.group(3) is None:
            jobs.append(Dependency(kind, int(matched.group(2))))
        else:
            tasks.append(AfterTask(kind, int(matched.group(2)), int(matched.group(3))))
    return tuple(jobs), tuple(tasks)


def _size(text: str, place: str) -> int:
    try:
        return parse_size(text)
    except SizeError as error:
        raise bad_request(
            error.sentence, error.remedy, f"{place} column {error.offset + 1}", "invalid_capacity"
        ) from error


_NO_SCRIPT = "#!/bin/sh\n"
"""Replaces a job's script, whose directives are not read again."""


def update_job(job: int, tasks: Tasks, request: UpdateRequest, site: Site = DEFAULT_SITE) -> c.UpdateJob:
    """Return the command that changes a pending job.

    Raises:
        Problem: The request is invalid; names the position.
    """
    singleton, texts = None, request.dependencies
    dependencies: tuple[Dependency, ...] | None = None
    after_tasks: tuple[AfterTask, ...] = ()
    if texts is not None:
        singleton = SINGLETON in texts
        dependencies, after_tasks = _dependencies(tuple(text for text in texts if text != SINGLETON))
    elif request.dependency_any:
        raise bad_request("dependency_any is given without dependencies", "list them all", "dependencies")
    reading = _read_alone(request, site)
    change = made_of(
        request,
        JobChange,
        begin_at=None if request.begin_at is None else _instant(request.begin_at or None, "begin_at"),
        deadline=None if request.deadline is None else _instant(request.deadline or None, "deadline"),
        dependencies=dependencies,
        singleton=singleton,
        any_of=None if texts is None else request.dependency_any,
        licenses=None if request.licenses is None else _licenses(request.licenses),
    )
    return c.UpdateJob(job, change, None if reading is None else reading.request, after_tasks, tasks)


def _read_alone(request: UpdateRequest, site: Site) -> ParsedRequest | None:
    """Return the request of --bb and --bbf without a script; None if neither is given."""
    if request.bb is None and request.bbf is None:
        return None
    _refuse_blank(request, "write a request")
    reading = _read_directives(_NO_SCRIPT, request, site)
    if reading.request is None:
        raise bad_request(
            "the burst-buffer request is empty", "write for example capacity=10GiB", "--bb", "invalid_directive"
        )
    return reading


# ---- submit decoding in API workers: it depends only on the site's grammar


class SubmitDecoder:
    """Decodes submits: short ones at once, long ones one at a time in a thread."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(1)

    async def read(self, request: Any, identity: Identity, site: Site) -> DecodedSubmit | None:
        """Return a decoded submit; None for any other request."""
        if not isinstance(request, SubmitRequest):
            return None
        if text_characters(request) <= LONG_CHARACTERS:
            return decode_submit(request, identity, site)
        async with self._turns:
            return await asyncio.to_thread(decode_submit, request, identity, site)


def decode_submit(request: SubmitRequest, identity: Identity, site: Site) -> DecodedSubmit:
    """Decode a submit by the grammar of `site` into its command or rejection."""
    try:
        command, warnings = submission(request, identity, site)
    except Problem as problem:
        grammar = site.provider, site.directive, site.path_variables
        return DecodedSubmit(request.command_id, *grammar, None, (), problem.status, problem.view)
    return DecodedSubmit(request.command_id, site.provider, site.directive, site.path_variables, command, warnings)
