"""The event stream: every event from a revision on, as server-sent events, from whichever replica is asked.

A subscriber is a position in the ledger and nothing more: it reads from the entries that are in memory, or from the
ledger when it is far behind. What is held for it is the connection's own buffer, which is bounded; a subscriber that
does not empty it in time is cut, with a comment that tells where to resume.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import msgspec

from cluster.api.privacy import may_see
from cluster.api.render import event_view
from cluster.api.service import ApiCall, handles
from cluster.api.web import StreamChunk, Problem, Stream, bad_request, too_busy, too_many
from cluster.schemas import EventView
from cluster.schemas import operations as ops
from cluster.server import AppliedEntry, settled_at
from cluster.system.eventloop import SlicedWork

STREAMS_MAX = 128
"""Subscribers at once, count: dashboards and exporters, not users."""

STREAMS_PER_IDENTITY_MAX = 16
"""Streams of one certificate's holder at once, count: an eighth of all, so that nobody takes them all.

A subscriber that vanished in silence holds its place until the next sign of life fails, so one whose network breaks off
every second needs some fifteen.
"""

KEEP_ALIVE_S = 15.0
"""A comment is sent after this long without an event, seconds: it shows both sides that the other is there."""

SEND_BYTES = 64 * 1024
"""Events that are written at once, bytes: more only where one event alone is larger."""

RETRY_AFTER_S = 5
"""What a subscriber for whom there is no place is told to wait, seconds."""

REVISION_MAX = 2**63 - 1

CONTENT_TYPE = f"{ops.EVENT_STREAM}; charset=utf-8"


@handles(ops.STREAM_EVENTS)
async def stream_events(call: ApiCall[None]) -> Stream:
    service = call.service
    release = _reserve_stream(call)
    try:
        after = _position(call)
        index = _index_after(call, after)
    except LookupError as error:
        release()
        raise Problem(
            410, "history_not_held", f"events after revision {after} cannot be sent: {error}", "ask another replica"
        ) from error
    except Problem:
        release()
        raise
    return Stream(service.controller.state.revision, CONTENT_TYPE, _follow(call, index, after), release)


def _reserve_stream(call: ApiCall[None]) -> Callable[[], None]:
    """Take one place among the streams, and return what gives it back; Problem 429 or 503 where none is free."""
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
        raise bad_request(f"Last-Event-ID is {last!r}", "send the revision of the last event", "header Last-Event-ID")
    return int(last)


def _index_after(call: ApiCall[None], revision: int) -> int:
    """Return where the events after `revision` begin, or will; LookupError where this replica does not hold them."""
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
                # Entries in between came with a snapshot: this replica cannot send what happened there.
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
            # There should be an entry and none could be read: a snapshot came in its place. Asking on would be a loop
            # without an end; the subscriber lacks what was settled there, or goes on where its next revision is.
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
    """Wait for an entry after `index`, for the end of the server, or for the time of a sign of life.

    ConnectionResetError as soon as the subscriber has gone.
    """
    stop = asyncio.ensure_future(call.service.stopping.wait())
    over = asyncio.ensure_future(call.asked.gone.wait())
    more = asyncio.ensure_future(call.service.controller.applied_log.more(index, KEEP_ALIVE_S))
    try:
        done, _ = await asyncio.wait({stop, over, more}, return_when=asyncio.FIRST_COMPLETED)
        if over in done:
            raise ConnectionResetError("the subscriber has gone")
        return stop in done or more.result()
    finally:
        for waiting in (stop, over, more):
            waiting.cancel()


async def _render_events(
    call: ApiCall[None], applied: AppliedEntry, after: int, work: SlicedWork
) -> AsyncIterator[tuple[int, bytes]]:
    """Yield the frames of an entry's events, each with the last revision of which all has been yielded then."""
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
    """Return the event as the caller may see it: of other users' jobs only that it happened, where data is private."""
    if view.job_id is None or may_see(call, call.service.controller.state, view.job_id):
        return view
    return msgspec.structs.replace(view, detail={})


def _frame(view: EventView, *, last: bool) -> bytes:
    # Only the last event of a revision carries its id: who resumes after an earlier one gets the whole revision again.
    head = f"id: {view.revision}\n" if last else ""
    return f"{head}event: {view.event}\ndata: ".encode() + msgspec.json.encode(view) + b"\n\n"
