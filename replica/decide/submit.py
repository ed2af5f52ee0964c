"""Whether a job may be submitted: its fields, its pool and capacity, and the paths that its user may touch."""

from __future__ import annotations

from msgspec.structs import replace

from replica.grammar import path_fault, split_inside
from replica.messages import BURST_BUFFERS_WHOLE, level_refusal
from replica.messages import commands as c
from replica.messages import events as e
from replica.model import (
    NO_OPTIONS,
    BufferOptions,
    BufferRequest,
    Dependency,
    JobOptions,
    JobSpec,
    Pool,
    PoolUnit,
    Transfer,
    buffer_user_refusal,
    expand_roots,
    format_amount,
)
from replica.state import Facts
from replica.values import (
    SIZE_BYTES_MAX,
    Refusal,
    RefusalCode,
    UnknownSymbol,
    expand_symbols,
    limits,
    name_fault,
    round_up,
)

DEFAULT_OUTPUT = "forebay-%j.out"
"""Where a job's output goes when it does not say, in its working directory (Slurm: slurm-%j.out)."""


class Unfit(Exception):
    """A submission that is refused; carries the refusal out of the checks."""

    def __init__(self, code: RefusalCode, sentence: str, remedy: str, place: str) -> None:
        super().__init__(sentence)
        self.refusal = Refusal(code, sentence, remedy, place)


def job_submitted(state: Facts, actor: c.Actor, command: c.SubmitJob, *, job_id: int = 0) -> e.JobSubmitted | Refusal:
    """Return the event that a submit leads to, with pool, granted capacity and paths decided; or why it is refused.
    `job_id` 0: the next one.
    """
    try:
        _check_spec(state, actor, command.spec)
        if command.request is not None or command.options.buffer is not None:
            _check_buffer_user(state, command.spec.user)
        job_id = job_id or state.next_job
        spec = _expanded_spec(state, command.spec, job_id, command.options)
        request, pool, granted = None, "", 0
        if command.request is not None:
            request, pool, granted = _decided(state, spec, command.request, job_id, command.options)
    except Unfit as unfit:
        return unfit.refusal
    return e.JobSubmitted(job_id, spec, request, pool, granted, command.hold)


def request_decided(
    state: Facts, spec: JobSpec, request: BufferRequest, job_id: int, options: JobOptions
) -> tuple[BufferRequest, str, int]:
    """Return what a job asks of burst buffers with its paths decided, the pool, and what it would hold there; Unfit."""
    _check_buffer_user(state, spec.user)
    return _decided(state, spec, request, job_id, options)


def _decided(
    state: Facts, spec: JobSpec, request: BufferRequest, job_id: int, options: JobOptions
) -> tuple[BufferRequest, str, int]:
    request = _expanded_request(state, spec, request, job_id, options)
    return request, *_granted(state, request, swap_bytes_of(options))


def options_refusal(state: Facts, command: c.SubmitJob) -> Refusal | None:
    """Return why the options of a submit are refused, None where they are not or there are none."""
    if command.options == NO_OPTIONS:
        return None
    asked = f"what the job asks for ({_asked(command.options)})"
    return level_refusal(state.feature_level, BURST_BUFFERS_WHOLE, asked) or _persistent_fault(command.options.buffer)


def _persistent_fault(buffer: BufferOptions | None) -> Refusal | None:
    """Return why the persistent buffers that a job names cannot be: too many, no names, or at odds with each other."""
    if buffer is None:
        return None
    kinds = {
        "create_persistent": [(one.name, one.place) for one in buffer.creates],
        "destroy_persistent": [(one.name, one.place) for one in buffer.destroys],
        "persistentdw": [(name, "") for name in buffer.uses],
    }
    for kind, named in kinds.items():
        if len(named) > limits.PERSISTENT_PER_JOB_MAX:
            most = limits.PERSISTENT_PER_JOB_MAX
            sentence = f"there are {len(named)} {kind}"
            return Refusal(RefusalCode.LIMIT_EXCEEDED, sentence, f"write at most {most} in one job", named[most][1])
        seen: set[str] = set()
        for name, place in named:
            fault = "starts with a digit" if name[:1].isdigit() else name_fault(name)
            if fault is not None:
                sentence = f"the name {name!r} of a persistent buffer {fault}"
                return Refusal(RefusalCode.INVALID_DIRECTIVE, sentence, "choose another", place)
            if name in seen and kind != "persistentdw":
                sentence = f"{kind} names {name} twice"
                return Refusal(RefusalCode.INVALID_DIRECTIVE, sentence, "name each once", place)
            seen.add(name)
    wanted = {*(one.name for one in buffer.creates), *buffer.uses}
    for destroy in buffer.destroys:
        if destroy.name in wanted:
            sentence = f"the job destroys the persistent buffer {destroy.name} that it creates or uses"
            return Refusal(RefusalCode.INVALID_DIRECTIVE, sentence, "destroy it in a job of its own", destroy.place)
    return None


def _asked(options: JobOptions) -> str:
    """Return the names of the options that are not as in a job that did not ask."""
    fields = options.__struct_fields__
    return ", ".join(field for field in fields if getattr(options, field) != getattr(NO_OPTIONS, field))


def _check_spec(state: Facts, actor: c.Actor, spec: JobSpec) -> None:
    if actor.role is c.ActorRole.USER and spec.user != actor.name:
        raise Unfit(
            RefusalCode.PERMISSION_DENIED,
            f"{actor} may not submit for user {spec.user!r}",
            "submit as yourself",
            "user",
        )
    if spec.user == "root" and not state.policy.allow_root:
        raise Unfit(
            RefusalCode.ROOT_NOT_ALLOWED,
            "User root can not allocate burst buffers",
            "submit as another user, or set allow_root in the policy",
            "user",
        )
    for field, value in (("user", spec.user), ("name", spec.name)):
        fault = name_fault(value)
        if fault is not None:
            raise Unfit(RefusalCode.INVALID_FIELD, f"the {field} {fault}", "choose another", field)
    if not spec.script.startswith("#!"):
        raise Unfit(
            RefusalCode.INVALID_FIELD,
            "the script does not say what runs it",
            "start its first line with #!, for example #!/bin/bash",
            "script line 1, column 1",
        )
    if len(spec.script.encode("utf-8", "surrogatepass")) > limits.SCRIPT_BYTES_MAX:
        raise Unfit(
            RefusalCode.LIMIT_EXCEEDED,
            f"the script is longer than {limits.SCRIPT_BYTES_MAX} bytes",
            "put its data into files and stage them in",
            "script",
        )
    if "\0" in spec.script:
        raise Unfit(RefusalCode.INVALID_FIELD, "the script holds a zero byte", "submit a text file", "script")
    for field, number, least, most in (
        ("time_limit_s", spec.time_limit_s, 1, limits.TIME_LIMIT_S_MAX),
        ("cpus", spec.cpus, 1, limits.CPUS_MAX),
        ("priority", spec.priority, 0, limits.PRIORITY_MAX),
    ):
        if not least <= number <= most:
            raise Unfit(
                RefusalCode.INVALID_FIELD, f"{field} is {number}", f"use a number from {least} to {most}", field
            )
    largest = max((node.cpus for node in state.nodes.values()), default=spec.cpus)
    if spec.cpus > largest:
        raise Unfit(
            RefusalCode.LIMIT_EXCEEDED,
            f"the job needs {spec.cpus} CPUs, and no node has more than {largest}",
            f"ask for at most {largest}",
            "cpus",
        )
    _check_environment(spec)
    check_dependencies(state, spec.dependencies)
    if len(state.unfinished) >= limits.JOBS_UNFINISHED_MAX:
        raise Unfit(
            RefusalCode.LIMIT_EXCEEDED, f"{limits.JOBS_UNFINISHED_MAX} jobs are not over yet", "wait until some are", ""
        )


def _check_buffer_user(state: Facts, user: str) -> None:
    """Raise Unfit for a user whom AllowUsers or DenyUsers keeps from buffers."""
    refusal = buffer_user_refusal(state.site, user)
    if refusal is not None:
        raise Unfit(refusal.code, refusal.sentence, refusal.remedy, refusal.place)


def _check_environment(spec: JobSpec) -> None:
    if len(spec.environment) > limits.ENVIRONMENT_VARIABLES_MAX:
        raise Unfit(
            RefusalCode.LIMIT_EXCEEDED,
            f"there are more than {limits.ENVIRONMENT_VARIABLES_MAX} variables",
            "export fewer",
            "environment",
        )
    size = 0
    for name, value in spec.environment:
        size += len(name.encode("utf-8", "surrogatepass")) + len(value.encode("utf-8", "surrogatepass"))
        if not name or "=" in name or "\0" in name + value:
            raise Unfit(RefusalCode.INVALID_FIELD, f"{name!r} cannot be a variable", "use NAME=VALUE", "environment")
    if size > limits.ENVIRONMENT_BYTES_MAX:
        raise Unfit(
            RefusalCode.LIMIT_EXCEEDED,
            f"the environment is longer than {limits.ENVIRONMENT_BYTES_MAX} bytes",
            "export less",
            "environment",
        )


def check_dependencies(state: Facts, dependencies: tuple[Dependency, ...]) -> None:
    """Raise Unfit for too many dependencies, or one on a job that is not there."""
    if len(dependencies) > limits.DEPENDENCIES_MAX:
        raise Unfit(
            RefusalCode.LIMIT_EXCEEDED,
            f"there are more than {limits.DEPENDENCIES_MAX} dependencies",
            "depend on fewer jobs",
            "dependencies",
        )
    for dependency in dependencies:
        if dependency.job not in state.jobs and not dependency.kind.of_array:
            raise Unfit(
                RefusalCode.UNKNOWN_DEPENDENCY,
                f"{dependency.kind.word}:{dependency.job}: there is no job {dependency.job}",
                "forebay job list shows the jobs",
                "dependencies",
            )


def expand(text: str, spec: JobSpec, job_id: int, place: str, options: JobOptions = NO_OPTIONS) -> str:
    """Return `text` with the job's symbols replaced; Unfit for one that means nothing here."""
    try:
        return expand_symbols(
            text,
            job=job_id,
            user=spec.user,
            name=spec.name,
            workdir=spec.workdir,
            array_job=options.array_job,
            array_task=options.array_task,
        )
    except UnknownSymbol as symbol:
        raise Unfit(
            RefusalCode.INVALID_DIRECTIVE,
            f"{text!r} has the symbol {symbol}, which means nothing here",
            "use %% %A %d %j %u %x, and %a in an array",
            place,
        ) from None


def _expanded_spec(state: Facts, spec: JobSpec, job_id: int, options: JobOptions) -> JobSpec:
    check_beneath(state.policy.destinations, spec.user, spec.workdir, "destinations", "workdir")
    output = expand(spec.output or DEFAULT_OUTPUT, spec, job_id, "output", options)
    if not output.startswith("/"):
        output = spec.workdir.rstrip("/") + "/" + output
    check_beneath(state.policy.destinations, spec.user, output, "destinations", "output")
    return replace(spec, output=output)


def _expanded_request(
    state: Facts, spec: JobSpec, request: BufferRequest, job_id: int, options: JobOptions
) -> BufferRequest:
    places = iter(request.places[2:])
    moved: dict[str, tuple[Transfer, ...]] = {}
    for stage, roots, key in (
        ("stage_in", state.policy.sources, "sources"),
        ("stage_out", state.policy.destinations, "destinations"),
    ):
        transfers = []
        for transfer in getattr(request, stage):
            place = next(places, stage)
            outside = expand(transfer.outside, spec, job_id, place, options)
            check_beneath(roots, spec.user, outside, key, place)
            inside = expand(transfer.inside, spec, job_id, place, options)
            _, rest = split_inside(inside)
            fault = path_fault("/" + rest)
            if fault is not None:
                raise Unfit(
                    RefusalCode.PATH_NOT_ALLOWED,
                    f"the path {fault}",
                    "write a path below the variable, without ..",
                    place,
                )
            transfers.append(Transfer(transfer.kind, outside, inside))
        moved[stage] = tuple(transfers)
    return replace(request, stage_in=moved["stage_in"], stage_out=moved["stage_out"])


def check_beneath(roots: tuple[str, ...], user: str, path: str, key: str, place: str) -> None:
    """Raise Unfit unless `path` lies beneath one of the roots. By its text: the agent checks again by directory
    descriptor.
    """
    fault = path_fault(path)
    if fault is not None:
        raise Unfit(RefusalCode.INVALID_FIELD, f"the path {fault}", "write an absolute path without ..", place)
    expanded = expand_roots(roots, user)
    parts = [part for part in path.split("/") if part not in ("", ".")]
    for root in expanded:
        root_parts = [part for part in root.split("/") if part not in ("", ".")]
        if parts[: len(root_parts)] == root_parts:
            return
    listed = ", ".join(expanded) if expanded else f"none: the site has set no {key}"
    raise Unfit(
        RefusalCode.PATH_NOT_ALLOWED,
        f"{path!r} is outside what user {user} may touch",
        f"use a path beneath one of {listed}",
        place,
    )


def swap_bytes_of(options: JobOptions) -> int:
    """Return the swap of all of a job's nodes together, bytes."""
    return 0 if options.buffer is None else options.buffer.swap_bytes * max(1, options.nodes)


def _granted(state: Facts, request: BufferRequest, swap_bytes: int = 0) -> tuple[str, int]:
    """Return the pool and the bytes (units, where it counts those) that the request will hold."""
    pool_place = request.places[0] if request.places else "pool"
    capacity_place = request.places[1] if len(request.places) > 1 else "capacity"
    if not request.capacity_bytes and not swap_bytes:
        if request.pool:
            pool_of(state, request.pool, pool_place)
        return "", 0
    pool = pool_of(state, request.pool, pool_place)
    granted = round_up(request.capacity_bytes, pool.granularity_bytes) + round_up(swap_bytes, pool.granularity_bytes)
    if granted > SIZE_BYTES_MAX:
        raise Unfit(RefusalCode.INVALID_CAPACITY, "the request overflows", "ask for less", capacity_place)
    if granted > pool.usable_bytes and not state.site.hold_oversized:
        unit = state.pool_units.get(pool.name, PoolUnit.BYTES)
        most, asked = format_amount(pool.usable_bytes, unit), format_amount(request.capacity_bytes + swap_bytes, unit)
        raise Unfit(
            RefusalCode.CAPACITY_OVER_TOTAL,
            f"{asked} is more than pool {pool.name} has in all, {most}",
            f"ask for at most {most}, or for another pool",
            capacity_place,
        )
    return pool.name, granted


def pool_of(state: Facts, name: str, place: str) -> Pool:
    if name:
        pool = state.pools.get(name)
        if pool is None:
            listed = ", ".join(sorted(state.pools)) or "there are none"
            raise Unfit(RefusalCode.UNKNOWN_POOL, f"there is no pool {name!r}", f"use one of: {listed}", place)
        return pool
    for pool in state.pools.values():
        if pool.is_default:
            return pool
    raise Unfit(
        RefusalCode.NO_DEFAULT_POOL,
        "the request names no pool, and there is no default pool",
        f"add pool=, one of: {', '.join(sorted(state.pools))}",
        place,
    )
