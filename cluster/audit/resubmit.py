"""Reconstruction of a job's request from the decision about it: the likeliest requests first.

A submit resolves its request: symbols in paths are replaced, the pool rounds the capacity, defaults of the site are
filled in. The ledger has the original directives, which are parsed again. Every other field is tried as decided, and in
each form in which it may have been requested.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import combinations, product
from typing import Any, Final

from msgspec.structs import replace

from forebay.replica.grammar import (
    DirectiveRejected,
    ParsedRequest,
    PathVariables,
    read_external_job_request,
    read_request,
)
from forebay.replica.messages import JobSubmitted, SubmitJob, UpdateJob
from forebay.replica.messages import events as e
from forebay.replica.model import (
    AfterTask,
    BufferRequest,
    Dependency,
    JobChange,
    JobOptions,
    JobRequest,
    with_options,
)
from forebay.replica.state import Facts

Asked = tuple[tuple[Dependency, ...], tuple[AfterTask, ...]]
"""Dependencies of a job as requested: jobs and arrays, and tasks of arrays."""


def submits(state: Facts, event: JobSubmitted) -> Iterator[SubmitJob]:
    """Yield the submits that may have caused an event."""
    decided, array = event.request, event.array
    tasks, throttle = (array.tasks, array.throttle) if array is not None else ((), 0)
    buffers = buffers_asked(state, decided)
    options = _options(state, decided)
    conditions = _conditions(state, decided.dependencies)
    for outputs in _outputs(event):
        for buffer, (dependencies, after_tasks), option, output in product(buffers, conditions, options, outputs):
            asked = replace(decided, buffer=buffer, dependencies=dependencies, output=output)
            yield SubmitJob(with_options(asked, option), event.hold, tasks, throttle, after_tasks)


def updates(state: Facts, event: e.JobUpdated, changed: Iterable[JobChange]) -> Iterator[UpdateJob]:
    """Yield the updates that may have caused `changed`: changes to the job of `event` and perhaps to other jobs."""
    change, request = _union(changed), state.jobs[event.job].request
    buffers: list[BufferRequest | None] = [None]
    if event.buffer is not None:
        buffers = [*buffers_asked(state, replace(request, buffer=event.buffer))]
    for said in _with_unchanged_fields(request, change):
        partitions = dict.fromkeys((said.partition, "" if said.partition else said.partition))
        conditions: list[tuple[tuple[Dependency, ...] | None, tuple[AfterTask, ...]]] = [(said.dependencies, ())]
        if said.dependencies is not None:
            conditions = [*_conditions(state, said.dependencies)]
        for buffer, (dependencies, after_tasks), partition in product(buffers, conditions, partitions):
            yield UpdateJob(
                event.job, replace(said, dependencies=dependencies, partition=partition), buffer, after_tasks
            )


SAID_AGAIN_MAX: Final = 4
"""Number of fields that an update may have repeated with their present value: 4,000 combinations."""


def _with_unchanged_fields(request: JobRequest, change: JobChange) -> Iterator[JobChange]:
    """Yield the change in the event, then the change with additional fields that already had the requested value."""
    options = request.effective_options
    so = {
        field: getattr(request if hasattr(request, field) else options, field)
        for field in change.__struct_fields__
        if getattr(change, field) is None
    }
    for count in range(SAID_AGAIN_MAX + 1):
        for fields in combinations(so, count):
            yield replace(change, **{field: so[field] for field in fields})


def buffers_asked(state: Facts, decided: JobRequest) -> list[BufferRequest | None]:
    """Return the possible buffer requests behind a decided request."""
    buffer = decided.buffer
    if buffer is None:
        return [None]
    found: list[BufferRequest | None] = [buffer]
    site = state.site
    variables = PathVariables(site.path_variables, buffer.variables)
    read = partial(read_request, provider=site.provider, directive=site.directive, variables=variables)
    readings: tuple[Callable[[], ParsedRequest], ...] = (
        partial(read, decided.script, "", ""),
        partial(read, "", "", buffer.text),
        partial(read, "", buffer.text, ""),
    )
    for reading in readings:
        found += _as_written(buffer, reading)
    counted = (("bytes", "bare", "count"),) * (1 + len(buffer.creates))
    for units, *made in product(*counted):
        creates = tuple(replace(one, units=unit) for one, unit in zip(buffer.creates, made, strict=True))
        found.append(replace(buffer, units=units, creates=creates))
    return list(dict.fromkeys(found))


def external_job_requests(state: Facts, name: str, decided: JobRequest) -> Iterator[JobRequest]:
    """Yield the possible requests behind the decided setup of an external job; `name` is the ID of the job."""
    options = JobOptions(gid=decided.effective_options.gid, groups=decided.effective_options.groups)
    buffer = decided.buffer
    if buffer is None:
        return
    text = buffer.text + "\n"
    found = buffers_asked(state, decided)
    variables = PathVariables(state.site.path_variables, by_scheduler=True)
    for read in (
        lambda: read_external_job_request("#!/bin/sh\n" + text, directive=state.site.directive, variables=variables),
        lambda: read_request("#!/bin/sh\n" + text, "", "", provider=state.site.provider, variables=variables),
    ):
        found += _as_written(buffer, read)
    for asked in dict.fromkeys(found):
        if asked is not None:
            for units in dict.fromkeys((asked.units, "bare", "bytes")):
                own = replace(asked, creates=(), destroys=(), units=units)
                plain = JobRequest(decided.name or name, decided.user, "", decided.workdir, 0, buffer=own)
                yield with_options(plain, options)


def _as_written(decided: BufferRequest, read: Callable[[], ParsedRequest]) -> list[BufferRequest]:
    """Return the possible requests with the directives of a decided request; empty if these cannot be parsed."""
    try:
        written = read().request
    except DirectiveRejected:
        return []
    if written is None or written.text != decided.text:
        return []
    # A scheduler that rounds values requests the decided ones.
    as_counted = replace(
        written, pool=decided.pool, capacity_bytes=decided.capacity_bytes, places=decided.places, units=decided.units
    )
    return [written, replace(written, places=decided.places), as_counted]


def _options(state: Facts, decided: JobRequest) -> list[JobOptions]:
    """Return the options that may have been requested, without or with the site's defaults."""
    options, rules = decided.effective_options, state.scheduling_rules
    accounts = [options.account] + [""] * (options.account != "" and options.account == rules.default_account)
    qos = [options.qos] + [""] * (options.qos != "" and options.qos == rules.default_qos)
    partitions = [options.partition] + [""] * (options.partition != "")
    conditions = [options.any_of] + [True] * (not options.any_of)
    return [
        replace(options, account=account, qos=named, partition=partition, any_of=any_of, by_operator=False)
        for any_of, partition, account, named in product(conditions, partitions, accounts, qos)
    ]


def _conditions(state: Facts, decided: tuple[Dependency, ...]) -> list[Asked]:
    """Return the dependencies that may have been requested: an array by its first task, a task by its index."""
    if not decided:
        return [((), ())]
    plain: Asked = (tuple(Dependency(one.kind.for_job, one.job) for one in decided), ())
    tasks: list[AfterTask] = []
    others: list[Dependency] = []
    for one in decided:
        job = state.jobs.get(one.job)
        array = None if job is None else job.request.array
        if array is None or one.kind.is_for_array:
            others.append(Dependency(one.kind.for_job, one.job))
        else:
            tasks.append(AfterTask(one.kind, array.job, array.task))
    return list(dict.fromkeys((plain, (decided, ()), (tuple(others), tuple(tasks)))))


def _outputs(event: JobSubmitted) -> tuple[list[str], list[str]]:
    """Return the output and error paths that may have been requested: literal paths or defaults first, then symbols."""
    request, array = event.request, event.array
    decided = array.outputs[0] if array is not None and array.outputs else request.output
    texts = dict.fromkeys((decided.removeprefix(request.workdir.rstrip("/") + "/"), decided))
    symbols = [(str(event.job), "%j"), (request.user, "%u"), (request.name, "%x"), (str(event.job), "%A")]
    if array is not None:
        symbols = [(f"{event.job}_{array.tasks[0]}", "%A_%a"), (str(array.tasks[0]), "%a"), *symbols]
    found: dict[str, None] = {}
    for text in texts:
        for chosen in product((True, False), repeat=len(symbols)):
            written = text
            for (value, symbol), is_chosen in zip(symbols, chosen, strict=True):
                if is_chosen and value:
                    written = written.replace(value, symbol)
            found[written] = None
        # The name may contain the value literally as well, so also try the symbol at a single position.
        for value, symbol in symbols:
            pieces = text.split(value) if value else [text]
            for place in range(1, len(pieces)):
                found[value.join(pieces[:place]) + symbol + value.join(pieces[place:])] = None
    likely = ["", *texts]
    return likely, [text for text in found if text not in likely]


def _union(changes: Iterable[JobChange]) -> JobChange:
    """Return the union of several changes: each job's own change contains only its differences."""
    said: dict[str, Any] = {}
    for change in changes:
        for field in change.__struct_fields__:
            if (value := getattr(change, field)) is not None:
                said.setdefault(field, value)
    return JobChange(**said)
