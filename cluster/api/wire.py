"""From what clients write to commands: what can be refused without the state is refused here, with its place."""

from __future__ import annotations

import re
from typing import NamedTuple

from cluster.api.problems import Problem, bad
from cluster.client import requests as r
from cluster.clock import parse_instant
from cluster.identity import Identity, Role
from replica import commands as c
from replica.arrays import ArrayFault, parse_array
from replica.directives import DirectiveRefused, Reading, read_request
from replica.events import Stage
from replica.jobs import Dependency, DependencyKind, Hold, JobSpec
from replica.limits import DEPENDENCIES_MAX, SCRIPT_BYTES_MAX
from replica.names import name_fault
from replica.options import NO_OPTIONS, BufferOptions, JobOptions
from replica.pools import Pool
from replica.refusals import RefusalCode
from replica.sites import DEFAULT_SITE, Site
from replica.units import NEVER, Instant, SizeError, parse_size

DEFAULT_NAME = "batch"
"""Name of a job that was given none."""

_DEPENDENCY = re.compile(r"([a-z]+):([0-9]{1,18})(?:_([0-9]{1,9}))?", re.ASCII)
SINGLETON = "singleton"
"""The dependency that names no job: all earlier ones of the same user and name."""

_LICENSE = re.compile(r"([A-Za-z0-9_.+-]+)(?:[:=]([1-9][0-9]{0,8}))?", re.ASCII)
_KINDS = {kind.word: kind for kind in DependencyKind if not kind.of_array}
_STAGES = {stage.word: stage for stage in Stage}


class Submission(NamedTuple):
    """The command of a submit, and what its submitter should look at."""

    command: c.SubmitJob
    warnings: tuple[str, ...]


def submission(request: r.SubmitRequest, identity: Identity, site: Site = DEFAULT_SITE) -> Submission:
    """Return the command of a submit; Problem with line and column for a directive.

    `site` says who performs the cluster's operations: the grammar of requests is the provider's.
    """
    size_bytes = len(request.script.encode())
    if size_bytes > SCRIPT_BYTES_MAX:
        raise Problem(
            413,
            "limit_exceeded",
            f"the script has {size_bytes} bytes; at most {SCRIPT_BYTES_MAX} are accepted",
            "put its data into files and stage them in",
            "script",
        )
    user = identity.name if request.user is None else request.user
    if identity.role is not Role.OPERATOR and user != identity.name:
        raise Problem(
            403,
            "permission_denied",
            f"{identity} may not submit for user {user!r}",
            "leave out user, or ask an operator",
            "user",
        )
    for text, place in ((request.bb, "--bb"), (request.bbf, "--bbf")):
        if text is not None and not text.strip():
            raise bad(f"the text of {place} is empty", "leave it out, or write a request", place, "invalid_directive")
    reading = _read(request, site)
    dependencies, after_tasks = _dependencies(tuple(text for text in request.dependencies if text != SINGLETON))
    spec = JobSpec(
        name=request.name or DEFAULT_NAME,
        user=user,
        script=request.script,
        workdir=request.workdir,
        time_limit_s=request.time_limit_s,
        cpus=request.cpus,
        priority=1 if request.priority is None else request.priority,
        begin_at=_instant(request.begin_at, "begin_at"),
        deadline=_instant(request.deadline, "deadline"),
        dependencies=dependencies,
        output=request.output or "",
        environment=tuple(sorted(request.environment.items())),
    )
    tasks, throttle = _array(request.array)
    command = c.SubmitJob(
        spec,
        reading.request,
        Hold.USER if request.hold else Hold.NONE,
        _options(request, reading.options, throttle),
        array=tasks,
        after_tasks=after_tasks,
    )
    return Submission(command, reading.warnings)


def submit_job(request: r.SubmitRequest, identity: Identity, site: Site = DEFAULT_SITE) -> c.SubmitJob:
    """Return the command of a submit alone; Problem as `submission`."""
    return submission(request, identity, site).command


def warnings_of(request: r.SubmitRequest, site: Site = DEFAULT_SITE) -> tuple[str, ...]:
    """Return what the submitter of a request that was accepted should look at."""
    return _read(request, site).warnings


def _read(request: r.SubmitRequest, site: Site) -> Reading:
    try:
        return read_request(
            request.script,
            request.bb or "",
            request.bbf or "",
            provider=site.provider,
            directive=site.directive,
        )
    except DirectiveRefused as error:
        refusal = error.refusal
        status = 413 if refusal.code is RefusalCode.LIMIT_EXCEEDED else 400
        raise Problem(status, refusal.code.name.lower(), refusal.sentence, refusal.remedy, refusal.place) from error


def _array(text: str | None) -> tuple[tuple[int, ...], int]:
    """Return the tasks and the throttle of `--array`."""
    if text is None:
        return (), 0
    try:
        return parse_array(text)
    except ArrayFault as error:
        sentence, _, remedy = str(error).partition("; ")
        raise bad(sentence, remedy or "write for example 1-10 or 1-10%2", "array") from error


def _options(request: r.SubmitRequest, buffer: BufferOptions | None, throttle: int) -> JobOptions:
    options = JobOptions(
        nodes=request.nodes,
        account=request.account or "",
        qos=request.qos or "",
        licenses=_licenses(request.licenses),
        reservation=request.reservation or "",
        nice=request.nice,
        array_throttle=throttle,
        singleton=SINGLETON in request.dependencies,
        requeue=request.requeue,
        mail_types=request.mail_types,
        mail_user=request.mail_user or "",
        comment=request.comment or "",
        partition=request.partition or "",
        buffer=buffer,
    )
    return NO_OPTIONS if options == NO_OPTIONS else options


def _licenses(texts: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    found: dict[str, int] = {}
    for text in texts:
        matched = _LICENSE.fullmatch(text)
        if matched is None or name_fault(matched.group(1)) is not None:
            raise bad(f"the licence {text[:48]!r} cannot be read", "write NAME or NAME:COUNT", "licenses")
        if matched.group(1) in found:
            raise bad(f"the licence {matched.group(1)} is named twice", "name it once", "licenses")
        found[matched.group(1)] = int(matched.group(2) or 1)
    return tuple(sorted(found.items()))


def set_pool(name: str, request: r.PoolRequest) -> c.SetPool:
    """Return the command that makes or changes a pool."""
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


def bulk_command(request: r.BulkCommand, identity: Identity, site: Site = DEFAULT_SITE) -> c.Command:
    """Return one command of a bulk request."""
    match request:
        case r.SubmitCommand():
            return submit_job(request, identity, site)
        case r.CancelCommand():
            return c.CancelJob(request.job_id, request.hurry)
        case r.HoldCommand():
            return c.HoldJob(request.job_id)
        case r.ReleaseCommand():
            return c.ReleaseJob(request.job_id)
        case r.PoolCommand():
            return set_pool(request.name, request)
        case r.DrainCommand():
            return c.DrainNode(request.node, request.reason)
        case r.ResumeCommand():
            return c.ResumeNode(request.node)


def report_operation(node: str, report: r.Report) -> c.ReportOperation:
    """Return the command of one report."""
    return c.ReportOperation(node, report.job, report.attempt, _STAGES[report.stage], report.result)


def _instant(text: str | None, place: str) -> Instant:
    if text is None:
        return NEVER
    try:
        found = parse_instant(text)
    except (ValueError, OverflowError) as error:
        raise bad(f"the time {text!r} cannot be read", "write it as 2026-01-31T12:00:00Z", place) from error
    if found < 0:
        raise bad(f"the time {text!r} is before 1970", "write a later one", place)
    return found


def _dependencies(texts: tuple[str, ...]) -> tuple[tuple[Dependency, ...], tuple[c.AfterTask, ...]]:
    """Return the conditions on jobs, and those on tasks of arrays."""
    if len(texts) > DEPENDENCIES_MAX:
        raise bad(f"there are {len(texts)} dependencies", f"depend on at most {DEPENDENCIES_MAX} jobs", "dependencies")
    jobs: list[Dependency] = []
    tasks: list[c.AfterTask] = []
    for text in texts:
        matched = _DEPENDENCY.fullmatch(text)
        kind = _KINDS.get(matched.group(1)) if matched else None
        if matched is None or kind is None:
            known = ", ".join([*(f"{word}:JOB" for word in _KINDS), SINGLETON])
            raise bad(f"the dependency {text[:48]!r} is unknown", f"write one of {known}", "dependencies")
        if matched.group(3) is None:
            jobs.append(Dependency(kind, int(matched.group(2))))
        else:
            tasks.append(c.AfterTask(kind, int(matched.group(2)), int(matched.group(3))))
    return tuple(jobs), tuple(tasks)


def _size(text: str, place: str) -> int:
    try:
        return parse_size(text)
    except SizeError as error:
        raise bad(error.sentence, error.remedy, f"{place} column {error.offset + 1}", "invalid_capacity") from error
