"""Decide the submit of a job or a job array: a pipeline from the request to one event.

The pipeline checks the options and resolves the buffer request, the array, the dependencies, the partition and the
account; it then checks the request and resolves paths and space. Each step raises RejectionError, which is caught here.
"""

from __future__ import annotations

from msgspec.structs import replace

from forebay.replica.decide.accounts import admit_request, check_limits, default_account, drop_undefined_options
from forebay.replica.decide.arrays import check_array, resolve_array, resolve_dependencies
from forebay.replica.decide.buffer_request import (
    check_buffer_user,
    persistent_fault,
    resolve_buffer,
    resolve_space,
)
from forebay.replica.decide.checks import (
    RejectionError,
    check_dependencies,
    check_name,
    check_number,
    check_options,
    check_path,
    check_unprivileged,
    expand,
    require,
)
from forebay.replica.grammar import script_bytes_max
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model import (
    DEFAULT_PRIORITY,
    NODE_SYMBOL,
    JobRequest,
    choose_partition,
    is_node_in,
    node_set_name,
    with_options,
)
from forebay.replica.state import Facts
from forebay.replica.values import Rejection, RejectionCode, Steps, limits

DEFAULT_OUTPUT = "forebay-%j.out"
"""Default output file of a job, in its working directory (Slurm: slurm-%j.out)."""


NO_OUTPUT = "/dev/null"
"""Output path of a job whose output is discarded."""


def submit_job(state: Facts, actor: c.Actor, command: c.SubmitJob) -> Steps[e.JobSubmitted | Rejection]:
    """Return the event of a submit with all fields resolved, or a Rejection; in steps."""
    try:
        return (yield from _resolve_submit(state, actor, command))
    except RejectionError as error:
        return error.rejection


def _resolve_submit(state: Facts, actor: c.Actor, command: c.SubmitJob) -> Steps[e.JobSubmitted]:
    request, is_array = command.request, bool(command.tasks)
    _check_ignored(state, command)
    check_options(request.effective_options)
    if command.if_defined and state.site.unknown_sbatch_options == "warn":
        request = drop_undefined_options(state, request, command.if_defined)
    request = _with_actor(actor, resolve_buffer(state, actor, request, of_array=is_array))
    require(persistent_fault(request.buffer))
    check_array(state, command)
    if request.dependencies or command.after_tasks:
        dependencies = resolve_dependencies(state, request.dependencies, command.after_tasks)
        request = replace(request, dependencies=dependencies)
    request = _with_partition(state, _with_conditions(request))
    if request.effective_options.exclusive:
        request = _with_whole_node(state, request)
    request = admit_request(state, request, max(1, len(command.tasks)))

    _check_record(state, actor, request)
    if request.buffer is not None:
        check_buffer_user(state, request.user)

    def resolve(one: JobRequest, job_id: int) -> e.JobSubmitted:
        return _resolve_job(state, one, job_id, command)

    if is_array:
        event = yield from resolve_array(replace(command, request=request), state.next_job, resolve)
    else:
        event = resolve(request, state.next_job)
    check_limits(state, event.request, event.pool, event.granted_bytes)
    return event


def _with_actor(actor: c.Actor, request: JobRequest) -> JobRequest:
    """Return the request with `by_operator` set if an operator's job destroys persistent buffers.

    Such a job may destroy other users' buffers.
    """
    destroys = request.buffer is not None and bool(request.buffer.destroys)
    by_operator, options = destroys and actor.role is c.ActorRole.OPERATOR, request.effective_options
    if options.by_operator == by_operator:
        return request
    return with_options(request, replace(options, by_operator=by_operator))


def _with_conditions(request: JobRequest) -> JobRequest:
    """Return the request with `any_of` cleared when it has fewer than two conditions."""
    options = request.effective_options
    if not options.any_of:
        return request
    if len(request.dependencies) + options.singleton < 2:
        return with_options(request, replace(options, any_of=False))
    return request


def _check_ignored(state: Facts, command: c.SubmitJob) -> None:
    """Check that the site accepts the unsupported sbatch options of a submit.

    Raises:
        RejectionError: It does not (UnknownSbatchOptions=reject).
    """
    if command.ignored and state.site.unknown_sbatch_options == "reject":
        raise RejectionError(
            RejectionCode.INVALID_FIELD,
            f"options {', '.join(command.ignored)} are not supported",
            "remove them, or ask an operator to run: forebay config set UnknownSbatchOptions=warn",
            "ignored_options",
        )


def _with_whole_node(state: Facts, request: JobRequest) -> JobRequest:
    """Return the request with the CPUs of the largest node of its partition, so that no other job fits on its node.

    Raises:
        RejectionError: The partition has no registered node.
    """
    place = node_set_name(state.partitions, request.effective_options.partition)
    nodes = [
        node for node in state.nodes.values() if not node.is_mover and is_node_in(state.partitions, place, node.name)
    ]
    if not nodes:
        raise RejectionError(
            RejectionCode.WRONG_STATE,
            "the job requests a whole node, but no node of its partition is registered",
            "wait until `forebay node list` shows one, or omit --exclusive",
            "exclusive",
        )
    return replace(request, cpus=max(request.cpus, *(node.cpus for node in nodes)))


def _with_partition(state: Facts, request: JobRequest) -> JobRequest:
    """Return the request with its partition: the first of the named ones that accepts the job.

    Raises:
        RejectionError: None does.
    """
    options = request.effective_options
    if not state.partitions:
        first = options.partition.partition(",")[0]
        return request if first == options.partition else with_options(request, replace(options, partition=first))
    # The default account counts, too: a partition may be for the jobs of some accounts only.
    account = options.account or default_account(state, request.user)
    found = [choose_partition(state.partitions, name, request.user, account) for name in options.partition.split(",")]
    chosen = require(next((one for one in found if isinstance(one, str)), found[0]))
    return with_options(request, replace(options, partition=chosen))


def _resolve_job(state: Facts, request: JobRequest, job_id: int, command: c.SubmitJob) -> e.JobSubmitted:
    """Return the submit event of one job or task, with its paths and its space resolved."""
    asked, pool, granted = request.buffer, "", 0
    check_path(request.workdir, "workdir")
    written = request.output or DEFAULT_OUTPUT
    output = _resolve_file(request, job_id, written, "output")
    if NODE_SYMBOL in _resolve_file(request, job_id, written, "output", node=""):
        raise RejectionError(
            RejectionCode.INVALID_FIELD,
            f"output {written[:48]!r} expands to {NODE_SYMBOL}, which is reserved for the job's node",
            "use another name",
            "output",
        )
    for place, other in (("error", request.effective_options.error), ("input", request.effective_options.input)):
        if other:
            # Only checked: the record keeps the path as written, and `error_path` resolves it.
            _resolve_file(request, job_id, other, place)
    if asked is not None:
        asked, pool, granted = resolve_space(state, request, asked, job_id)
    return e.JobSubmitted(job_id, replace(request, output=output, buffer=asked), pool, granted, command.hold)


def check_requeue(state: Facts, request: JobRequest, pool: str) -> None:
    """Check that a finished job may be requeued: accounts, partitions, limits, permitted users and its pool may have
    changed since its submit.

    Raises:
        RejectionError: It may not.
    """
    if len(state.unfinished) >= limits.JOBS_UNFINISHED_MAX:
        raise RejectionError(
            RejectionCode.LIMIT_EXCEEDED,
            f"the limit of {limits.JOBS_UNFINISHED_MAX} unfinished jobs is reached",
            "wait until some have finished",
            "",
        )
    _with_partition(state, admit_request(state, request, 1))
    if request.buffer is not None:
        check_buffer_user(state, request.user)
    if pool and pool not in state.pools:
        raise RejectionError(
            RejectionCode.UNKNOWN_POOL, f"pool {pool!r} no longer exists", "submit the job again", "job"
        )


def _resolve_file(request: JobRequest, job_id: int, written: str, place: str, node: str = NODE_SYMBOL) -> str:
    """Return the absolute path of a file for the script's input or output.

    Any path is permitted, because the agent opens the file as the job's user.
    """
    path = expand(written, request, job_id, place, node)
    if path == NO_OUTPUT:
        return path
    if not path.startswith("/"):
        path = request.workdir.rstrip("/") + "/" + path
    check_path(path, place)
    return path


def _check_record(state: Facts, actor: c.Actor, request: JobRequest) -> None:
    if actor.role is c.ActorRole.USER and request.user != actor.name:
        raise RejectionError(
            RejectionCode.PERMISSION_DENIED,
            f"permission denied: submitting for user {request.user!r} requires the operator role",
            "submit as yourself",
            "user",
        )
    if actor.role is c.ActorRole.USER:
        check_unprivileged(request.priority, DEFAULT_PRIORITY, request.effective_options.nice, 0)
    if request.user == "root" and not state.site.allow_root:
        raise RejectionError(
            RejectionCode.ROOT_NOT_ALLOWED,
            "User root can not allocate burst buffers",
            "submit as another user, or set allow_root in the policy",
            "user",
        )
    check_name("user", request.user)
    check_name("name", request.name)
    if not request.script.startswith("#!"):
        raise RejectionError(
            RejectionCode.INVALID_FIELD,
            "the script has no interpreter line",
            "start it with #!, for example #!/bin/bash",
            "script line 1, column 1",
        )
    most = script_bytes_max(request.script)
    if _utf8_bytes(request.script) > most:
        raise RejectionError(
            RejectionCode.LIMIT_EXCEEDED,
            f"the script is longer than {most} bytes",
            "put its data into files and stage them in",
            "script",
        )
    if "\0" in request.script:
        raise RejectionError(
            RejectionCode.INVALID_FIELD, "the script contains a NUL byte", "submit a text file", "script"
        )
    check_number("time_limit_s", request.time_limit_s)
    check_number("cpus", request.cpus)
    if request.effective_options.nodes and request.effective_options.tasks > request.cpus:
        raise RejectionError(
            RejectionCode.INVALID_FIELD,
            f"the job has {request.effective_options.tasks} tasks on {request.cpus} CPUs",
            "request at least one CPU per task; cpus is the total",
            "tasks",
        )
    check_number("priority", request.priority)
    # A job without nodes does not run: movers create and remove its buffers.
    if (
        request.effective_options.nodes
        and state.nodes
        and not any(request.cpus <= node.cpus for node in state.nodes.values())
    ):
        largest = max(node.cpus for node in state.nodes.values())
        raise RejectionError(
            RejectionCode.LIMIT_EXCEEDED,
            f"the job requests {request.cpus} CPUs, but no node has more than {largest}",
            f"request at most {largest}",
            "cpus",
        )
    _check_environment(request)
    check_dependencies(state, request.dependencies)
    if len(state.unfinished) >= limits.JOBS_UNFINISHED_MAX:
        raise RejectionError(
            RejectionCode.LIMIT_EXCEEDED,
            f"the limit of {limits.JOBS_UNFINISHED_MAX} unfinished jobs is reached",
            "wait until some have finished",
            "",
        )


def _check_environment(request: JobRequest) -> None:
    if len(request.environment) > limits.ENVIRONMENT_VARIABLES_MAX:
        raise RejectionError(
            RejectionCode.LIMIT_EXCEEDED,
            f"the environment has more than {limits.ENVIRONMENT_VARIABLES_MAX} variables",
            "export fewer",
            "environment",
        )
    size = 0
    for name, value in request.environment:
        size += _utf8_bytes(name) + _utf8_bytes(value)
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise RejectionError(
                RejectionCode.INVALID_FIELD,
                f"{name!r} is not a valid environment variable",
                "use NAME=VALUE",
                "environment",
            )
    if size > limits.ENVIRONMENT_BYTES_MAX:
        raise RejectionError(
            RejectionCode.LIMIT_EXCEEDED,
            f"the environment is longer than {limits.ENVIRONMENT_BYTES_MAX} bytes",
            "export less",
            "environment",
        )


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
