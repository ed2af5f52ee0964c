"""Reconstruction of a job's request from the decision about it: the likeliest requests first.

A submit resolves its request: symbols in paths are replaced, the pool rounds the capacity, defaults of the site are
filled in. The record has the directives as written, so they are parsed again; every other field is tried both as
decided and as it may have been requested.
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
    """Yield the updates of the job of `event` that may have caused changes to it, or to it and others."""
    change, request = _union(changed), state.jobs[event.job].request
    buffers: list[BufferRequest | None] = [None]
    if event.buffer is not None:
        buffers = [*buffers_asked(state, replace(request, buffer=event.buffer))]
    for said in _with_what_is_so(request, change):
        partitions = dict.fromkeys((said.partition, "" if said.partition else said.partition))
        conditions: list[tuple[tuple[Dependency, ...] | None, tuple[AfterTask, ...]]] = [(said.dependencies, ())]
        if said.dependencies is not None:
            conditions = [*_conditions(state, said.dependencies)]
        for buffer, (dependencies, after_tasks), partition in product(buffers, conditions, partitions):
            yield UpdateJob(
                event.job, replace(said, dependencies=dependencies, partition=partition), buffer, after_tasks
            )


SAID_AGAIN_MAX: Final = 4
"""Fields of an update that may have been given with their present value, count: 4,000 combinations."""


def _with_what_is_so(request: JobRequest, change: JobChange) -> Iterator[JobChange]:
    """Yield a change as in the event, and with some fields that the event lacks because they had that value already."""
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
    """Yield the possible requests of an external job's setup behind a decision; `name` is its job's ID."""
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
    """Return the possible requests behind a request's directives; empty if these do not parse to its text."""
    try:
        written = read().request
    except DirectiveRejected:
        return []
    if written is None or written.text != decided.text:
        return []
    # Values rounded by its scheduler are given as decided.
    as_counted = replace(
        written, pool=decided.pool, capacity_bytes=decided.capacity_bytes, places=decided.places, units=decided.units
    )
    return [written, replace(written, places=decided.places), as_counted]


def _options(state: Facts, decided: JobRequest) -> list[JobOptions]:
    """Return the options that may have been requested: the site's defaults may have been omitted."""
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
    """Return the output paths that may have been requested: without symbols or default first, then with symbols."""
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
        # The value may also occur literally in the name; then the symbol is at one position only.
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
