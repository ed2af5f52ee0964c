"""Event stream: all events after a revision as server-sent events, from any replica.

A subscriber is only a position in the ledger. It reads from the entries in memory or, if far behind, from the ledger.
Only the bounded connection buffer is held for it. A subscriber that does not read in time is disconnected, with a
comment that names the revision to resume from.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import msgspec

from forebay.cluster.api.privacy import may_see
from forebay.cluster.api.render import event_view
from forebay.cluster.api.service import ApiCall, handles
from forebay.cluster.api.web import Problem, Stream, StreamChunk, bad_request, too_busy, too_many
from forebay.cluster.schemas import EventView
from forebay.cluster.schemas import operations as ops
from forebay.cluster.server import AppliedEntry, settled_at
from forebay.cluster.system.eventloop import SlicedWork

STREAMS_MAX = 128
"""Concurrent subscribers, count; intended for dashboards and exporters, not users."""

STREAMS_PER_IDENTITY_MAX = 16
"""Concurrent streams of one identity, count: an eighth of all.

A subscriber that vanished keeps its slot until a keep-alive fails, so one that reconnects every second needs about
fifteen.
"""

KEEP_ALIVE_S = 15.0
"""Interval without events after which a keep-alive comment is sent, seconds."""

SEND_BYTES = 64 * 1024
"""Bytes of events per write; more only for a single larger event."""

RETRY_AFTER_S = 5
"""Retry-After for a rejected subscriber, seconds."""

REVISION_MAX = 2**63 - 1

CONTENT_TYPE = f"{ops.EVENT_STREAM}; charset=utf-8"


@handles(ops.STREAM_EVENTS)
async def stream_events(call: ApiCall[None]) -> Stream:
    service = call.service
    after = _position(call)
    release = _reserve_stream(call)
    try:
        index = _index_after(call, after)
    except LookupError as error:
        release()
        raise Problem(
            410, "history_not_held", f"events after revision {after} cannot be sent: {error}", "ask another replica"
        ) from error
    return Stream(service.controller.state.revision, CONTENT_TYPE, _follow(call, index, after), release)


def _reserve_stream(call: ApiCall[None]) -> Callable[[], None]:
    """Reserve a stream slot and return its release function.

    Raises:
        Problem: 429 or 503, if no slot is free.
    """
    service, who = call.service, call.identity
    streams_of = service.event_streams_of
    if streams_of[who] >= STREAMS_PER_IDENTITY_MAX:
        words = f"{who} has {STREAMS_PER_IDENTITY_MAX} event streams open, which is the most for one identity"
        raise too_many(words, "close one of them, or try another replica", RETRY_AFTER_S)
    if service.event_streams >= STREAMS_MAX:
        raise too_busy(f"{STREAMS_MAX} event streams are open", "try another replica", RETRY_AFTER_S)
    streams_of[who] += 1

    def release() -> None:
        streams_of[who] -= 1
        if not streams_of[who]:
            del streams_of[who]

    return release


def _position(call: ApiCall[None]) -> int:
    if "from" in call.query:
        return call.integer("from", 0, least=0, most=REVISION_MAX)
    last = call.asked.last_event_id
    if last is None:
        return call.service.controller.state.revision
    if not last.isascii() or not last.isdigit() or len(last) > 18:
        raise bad_request(
            f"Last-Event-ID {last!r} is not a revision", "send the revision of the last event", "header Last-Event-ID"
        )
    return int(last)


def _index_after(call: ApiCall[None], revision: int) -> int:
    """Return the index at which events after `revision` begin.

    Raises:
        LookupError: This replica does not hold them.
    """
    controller = call.service.controller
    if revision < controller.state.revision:
        return controller.applied_log.index_of(revision + 1)
    return controller.applied_log.last_index + 1


async def _follow(call: ApiCall[None], index: int, after: int) -> AsyncGenerator[StreamChunk, None]:
    applied_log, stopping, work = call.service.controller.applied_log, call.service.stopping, call.work
    complete = after

    def part(payload: bytes) -> StreamChunk:
        return StreamChunk(payload, f": too slow; resume with from={complete}\n\n".encode())

    while not stopping.is_set():
        first = index
        frames: list[bytes] = []
        async for applied in applied_log.walk(index, applied_log.last_index, work):
            if applied.index > index and applied.base > complete:
                # A snapshot replaced the entries in between, so their events cannot be sent.
                yield part(b"".join([*frames, _gap(complete)]))
                return
            size_bytes = sum(map(len, frames))
            async for revision, frame in _render_events(call, applied, after, work):
                frames.append(frame)
                size_bytes += len(frame)
                if size_bytes > SEND_BYTES:
                    yield part(b"".join(frames))
                    frames, size_bytes = [], 0
                complete = max(complete, revision)
            index, complete = applied.index + 1, max(complete, applied.revision)
            if stopping.is_set():
                break
        if frames:
            yield part(b"".join(frames))
        if applied_log.last_index >= index:
            if index > first:
                continue
            # A snapshot replaced an entry that should exist, so a retry would loop forever. Report the gap, or continue
            # at the next held revision.
            try:
                index = _index_after(call, complete)
            except LookupError:
                yield part(_gap(complete))
                return
        if not await _more(call, index - 1):
            yield part(f": revision {complete}\n\n".encode())
    yield part(f": this replica is stopping; resume with from={complete} at another one\n\n".encode())


def _gap(complete: int) -> bytes:
    return f": revisions after {complete} are not held here; ask another replica\n\n".encode()


async def _more(call: ApiCall[None], index: int) -> bool:
    """Wait for an entry after `index`, for shutdown, or for the next keep-alive.

    Raises:
        ConnectionResetError: The subscriber has disconnected.
    """
    stop = asyncio.ensure_future(call.service.stopping.wait())
    over = asyncio.ensure_future(call.asked.gone.wait())
    more = asyncio.ensure_future(call.service.controller.applied_log.more(index, KEEP_ALIVE_S))
    try:
        done, _ = await asyncio.wait({stop, over, more}, return_when=asyncio.FIRST_COMPLETED)
        if over in done:
            raise ConnectionResetError("the subscriber has disconnected")
        return stop in done or more.result()
    finally:
        for waiting in (stop, over, more):
            waiting.cancel()


async def _render_events(
    call: ApiCall[None], applied: AppliedEntry, after: int, work: SlicedWork
) -> AsyncIterator[tuple[int, bytes]]:
    """Yield the frames of an entry's events, each with the last complete revision."""
    batch = applied.batch
    if batch is None or applied.void:
        return
    for position, entry in enumerate(batch.entries):
        revision = settled_at(applied, position)
        if revision <= after:
            continue
        for sequence in range(len(entry.events)):
            await work.take()
            last = sequence == len(entry.events) - 1
            view = _visible(call, event_view(batch, entry, revision, sequence))
            yield revision if last else revision - 1, _frame(view, last=last)


def _visible(call: ApiCall[None], view: EventView) -> EventView:
    """Redact the event for the caller: with private data, other users' jobs show only that the event happened."""
    if view.job_id is None or may_see(call, call.service.controller.state, view.job_id):
        return view
    return msgspec.structs.replace(view, detail={})


def _frame(view: EventView, *, last: bool) -> bytes:
    # Only a revision's last event has an ID, so that resuming after an earlier one repeats the whole revision.
    head = f"id: {view.revision}\n" if last else ""
    return f"{head}event: {view.event}\ndata: ".encode() + msgspec.json.encode(view) + b"\n\n"
