"""The state of the burst buffers as Slurm's `scontrol show burst` shows it: as JSON, and as its very text."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.api.privacy import only_user
from cluster.api.problems import bad
from cluster.api.service import Call, Reply
from cluster.schemas.burst import BurstAnswer, BurstBufferView, BurstPoolView, BurstUseView, burst_text
from cluster.system.clock import format_instant
from replica.views.burst import Burst, BurstBuffer, burst_of

FORMATS = ("json", "text")


async def burst(call: Call) -> Reply:
    """Show pools, settings, allocated buffers and their users, as `scontrol show burst` does."""
    wanted = call.query.get("format", "json")
    if wanted not in FORMATS:
        raise bad(f"the format {wanted!r} is unknown", f"use {' or '.join(FORMATS)}", "query format")
    state = await call.state()
    found = burst_of(state, only_user=only_user(call, state))
    uids = await call.service.identities.uids(
        [*(buffer.user for buffer in found.buffers), *(use.user for use in found.uses)]
    )
    view = burst_view(found, state.revision, uids)
    if wanted == "text":
        text = burst_text(view) + "\n"
        return Reply(state.revision, content=text.encode(), content_type="text/plain; charset=utf-8")
    return Reply(state.revision, view)


def burst_view(found: Burst, revision: int, uids: Mapping[str, int | None]) -> BurstAnswer:
    """Return the answer for what the State says, with the numbers of users as far as they are known."""
    return BurstAnswer(
        revision=revision,
        name=found.provider,
        default_pool=next((pool.name for pool in found.pools if pool.is_default), None),
        granularity=found.granularity,
        pools=tuple(
            BurstPoolView(
                name=pool.name,
                unit=pool.unit.word,
                granularity=pool.granularity,
                total=pool.total,
                free=pool.free,
                used=pool.used,
                out_of_service=pool.out_of_service,
                missing=pool.missing,
                is_default=pool.is_default,
            )
            for pool in found.pools
        ),
        flags=found.flags,
        stage_in_timeout_s=found.stage_in_timeout_s,
        stage_out_timeout_s=found.stage_out_timeout_s,
        validate_timeout_s=found.validate_timeout_s,
        other_timeout_s=found.other_timeout_s,
        allow_users=found.allow_users,
        deny_users=found.deny_users,
        create_buffer=found.create_buffer or None,
        destroy_buffer=found.destroy_buffer or None,
        get_sys_state=found.get_sys_state or None,
        get_sys_status=found.get_sys_status or None,
        start_stage_in=found.start_stage_in or None,
        start_stage_out=found.start_stage_out or None,
        stop_stage_in=found.stop_stage_in or None,
        stop_stage_out=found.stop_stage_out or None,
        buffers=tuple(_buffer(buffer, uids) for buffer in found.buffers),
        uses=tuple(
            BurstUseView(user=use.user, uid=uids.get(use.user), unit=use.unit.word, used=use.used) for use in found.uses
        ),
    )


def _buffer(buffer: BurstBuffer, uids: Mapping[str, int | None]) -> BurstBufferView:
    return BurstBufferView(
        job_id=buffer.job or None,
        array_job_id=buffer.array_job or None,
        array_task_id=buffer.array_task if buffer.array_job else None,
        name=buffer.name or None,
        create_time=format_instant(buffer.created_at),
        pool=buffer.pool or None,
        unit=buffer.unit.word,
        size=buffer.size,
        state=buffer.state,
        buffer_state=buffer.buffer_state,
        user=buffer.user,
        uid=uids.get(buffer.user),
    )
