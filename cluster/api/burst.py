"""Handlers of buffers, of the burst-buffer state as in `scontrol show burst`, and of the provider's status."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Final

import msgspec

from forebay.cluster.api.privacy import only_user, owns
from forebay.cluster.api.render import buffer_view, external_job_fields, persistent_view
from forebay.cluster.api.service import ApiCall, Reply, encode_view, handles
from forebay.cluster.api.web import Problem, actor_of, bad_request, queue_full
from forebay.cluster.providers import STATUS_ARGUMENT_BYTES_MAX, STATUS_ARGUMENTS_MAX, OperationError
from forebay.cluster.providers.calls import TooManyCalls
from forebay.cluster.providers.worker import CallRequest
from forebay.cluster.schemas import (
    BuffersAnswer,
    BurstAnswer,
    BurstBufferView,
    BurstPoolView,
    BurstUseView,
    ProviderStatus,
    burst_lines,
    made_of,
)
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system import format_instant
from forebay.cluster.system.eventloop import iterate_paced
from forebay.replica.model import provider_facts, provision_of
from forebay.replica.operations import ExternalJobPhase
from forebay.replica.views import Burst, BurstBuffer, burst_buffers, burst_of, burst_place

BUFFERS_LISTED_MAX = 10_000
"""Newest buffers in one list, count; old and completed ones are omitted first."""

PARTS_PER_BUFFER = 12
"""Slice parts for rendering one buffer: about twenty microseconds."""

FORMATS = ("json", "text")

_PROGRAMS: Final = (
    *("create_buffer", "destroy_buffer", "get_sys_state", "get_sys_status"),
    *("start_stage_in", "start_stage_out", "stop_stage_in", "stop_stage_out"),
)
"""Fields that are null if not configured."""

PROVIDER_FAILED: Final = "provider_failed"
"""Error code: the provider cannot be called, or reports a failure."""

STATUS_WAIT_S_MAX: Final = 60
"""Time for a response to `bbstat`, an interactive command, seconds."""


@handles(ops.LIST_BUFFERS)
async def list_buffers(call: ApiCall[None]) -> Reply[BuffersAnswer]:
    state, work = await call.state(), call.work
    only, retained = only_user(call, state), call.query.get("retained") == "yes"

    async def listed(job_ids: Iterable[int], *, newest: bool) -> Iterator[int]:
        found: list[int] = []
        async for job_id in iterate_paced(job_ids, work, parts=1):
            if job_id not in state.buffers or (only is not None and state.jobs[job_id].request.user != only):
                continue
            if not retained or external_job_fields(state, job_id).get("phase") == ExternalJobPhase.RETAINED:
                found.append(job_id)
        return await work.sort(found, reverse=newest)

    rows = []
    for name in await work.sort(state.persistent):
        if not retained and (only is None or state.persistent[name].user == only):
            await work.take()
            rows.append(encode_view(persistent_view(state, name)))
    found = list(islice(await listed(state.unfinished, newest=False), BUFFERS_LISTED_MAX))
    if call.query.get("live") != "yes" and not retained:
        found += islice(await listed(state.finished, newest=True), BUFFERS_LISTED_MAX - len(found))
    for job_id in await work.sort(found):
        await work.take()
        rows.append(encode_view(buffer_view(state, job_id, path=owns(call, state, job_id))))
    return Reply(state.revision, BuffersAnswer(revision=state.revision, buffers=tuple(rows)))


@handles(ops.SHOW_BURST)
async def show_burst(call: ApiCall[None]) -> Reply[BurstAnswer]:
    wanted = call.query.get("format", "json")
    if wanted not in FORMATS:
        raise bad_request(f"the format {wanted!r} is unknown", f"use {' or '.join(FORMATS)}", "query format")
    state, work = await call.state(), call.work
    buffers = [
        buffer async for buffer in iterate_paced(burst_buffers(state, only_user(call, state)), work, PARTS_PER_BUFFER)
    ]
    await work.take(0, parts=4 * len(buffers))  # usage is summed for each user
    found = burst_of(state, buffers=list(await work.sort(buffers, key=burst_place, reverse=True)))
    uids = await call.service.identities.uids(
        [*dict.fromkeys(buffer.user for buffer in found.buffers), *(use.user for use in found.uses)]
    )
    await work.take()
    view = burst_view(msgspec.structs.replace(found, buffers=()), state.revision, uids)
    views = [_buffer(buffer, uids) async for buffer in iterate_paced(found.buffers, work, PARTS_PER_BUFFER)]
    if wanted == "text":
        lines = burst_lines(msgspec.structs.replace(view, buffers=tuple(views)))
        text = "\n".join([line async for line in iterate_paced(lines, work, PARTS_PER_BUFFER)]) + "\n"
        return Reply(state.revision, content=text.encode(), content_type="text/plain; charset=utf-8")
    rows = [encode_view(row) async for row in iterate_paced(views, work, PARTS_PER_BUFFER)]
    return Reply(state.revision, msgspec.structs.replace(view, buffers=tuple(rows)))


def burst_view(found: Burst, revision: int, uids: Mapping[str, int | None]) -> BurstAnswer:
    """Return the view of a State's burst buffers, with UIDs as far as known."""
    return made_of(
        found,
        BurstAnswer,
        revision=revision,
        name=found.provider,
        default_pool=next((pool.name for pool in found.pools if pool.is_default), None),
        pools=tuple(made_of(pool, BurstPoolView, unit=pool.unit.word) for pool in found.pools),
        buffers=tuple(_buffer(buffer, uids) for buffer in found.buffers),
        uses=tuple(made_of(use, BurstUseView, uid=uids.get(use.user), unit=use.unit.word) for use in found.uses),
        **{text: getattr(found, text) or None for text in _PROGRAMS},
    )


def _buffer(buffer: BurstBuffer, uids: Mapping[str, int | None]) -> BurstBufferView:
    return made_of(
        buffer,
        BurstBufferView,
        job_id=buffer.job or None,
        array_job_id=buffer.array_job or None,
        array_task_id=buffer.array_task if buffer.array_job else None,
        name=buffer.name or None,
        create_time=format_instant(buffer.created_at),
        pool=buffer.pool or None,
        unit=buffer.unit.word,
        uid=uids.get(buffer.user),
    )


@handles(ops.SHOW_PROVIDER_STATUS)
async def show_provider_status(call: ApiCall[None]) -> Reply[ProviderStatus]:
    arguments = _arguments(call.query.get("arguments", "[]"))
    service = call.service
    await service.lead()
    state = await service.current()
    provision = provision_of(state)
    if provision is None:
        raise Problem(
            409,
            "wrong_state",
            "the agents of this cluster move the data themselves, so no provider can report its status",
            "see forebay slurm burst and forebay transfer list",
        )
    request = CallRequest(
        operation="get_status",
        provision=msgspec.structs.replace(provision, other_timeout_s=min(provision.other_timeout_s, STATUS_WAIT_S_MAX)),
        local=service.providing.local,
        user=actor_of(call.identity).name,
        arguments=arguments,
    )
    try:
        answer = await service.providing.calls.ask(request, min(provision.other_timeout_s, STATUS_WAIT_S_MAX))
    except TooManyCalls as error:
        raise queue_full("too many requests wait for the provider", "try again later") from error
    except OperationError as error:
        what = provider_facts(provision.provider).status_command
        # Not a gateway status, after which clients would retry with the same result.
        raise Problem(
            409, PROVIDER_FAILED, f"Error running {what}: {error.message}", "see the log of the leading replica"
        ) from error
    return Reply(state.revision, ProviderStatus(revision=state.revision, text=answer.text))


def _arguments(text: str) -> tuple[str, ...]:
    try:
        found = msgspec.json.decode(text, type=tuple[str, ...])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(
            f"arguments is not a JSON list of strings: {error}", 'write for example ["sessions"]', "query arguments"
        ) from error
    if len(found) > STATUS_ARGUMENTS_MAX:
        raise bad_request(f"{len(found)} arguments are given", f"use at most {STATUS_ARGUMENTS_MAX}", "query arguments")
    for argument in found:
        if "\0" in argument or len(argument.encode("utf-8", "replace")) > STATUS_ARGUMENT_BYTES_MAX:
            raise bad_request(
                "an argument is too long or has a NUL character in it",
                f"use at most {STATUS_ARGUMENT_BYTES_MAX} bytes",
                "query arguments",
            )
    return found
