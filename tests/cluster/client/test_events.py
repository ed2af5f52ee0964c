"""The event stream: read over broken connections, each event once and in order; and the format below it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.cluster.client import ApiError, Client
from forebay.cluster.client import sse as sse_module
from forebay.cluster.client.attempt import AttemptError, HttpResponse
from forebay.cluster.client.calls import FIRST_WAIT_S, LONGEST_WAIT_S, Endpoints
from forebay.cluster.client.errors import UNREACHABLE, UNTRUSTED
from forebay.cluster.client.events import GIVE_UP_S, EventStream, StreamPosition
from forebay.cluster.client.exchange import Exchange
from forebay.cluster.client.sse import ServerSentEvent, SseParser, StreamBroken
from forebay.cluster.schemas.ledger import EventView
from forebay.cluster.system.address import Address
from forebay.replica.values.units import Instant
from tests.cluster.client.misbehaving import (
    Behaviour,
    Misbehaving,
    Pki,
    failing,
    redirecting,
    serving,
    streaming,
)


def event(revision: int, sequence: int = 0, kind: str = "JobSubmitted") -> bytes:
    """One event as a replica streams it."""
    data = {
        "revision": revision,
        "sequence": sequence,
        "at": "2026-01-31T12:00:00.000000Z",
        "actor": "user:alice",
        "command": "submit_job",
        "event": kind,
        "detail": {"sentence": "ä\nb"},
    }
    return f"id: {revision}\nevent: {kind}\ndata: {json.dumps(data)}\n\n".encode()


async def read(client: Client, count: int, from_revision: int = 0) -> list[tuple[int, int]]:
    """Return (revision, sequence) of the first `count` events."""
    seen: list[tuple[int, int]] = []
    async with contextlib.aclosing(client.events(from_revision=from_revision, give_up_s=5.0)) as events:
        async for view in events:
            seen.append((view.revision, view.sequence))
            if len(seen) == count:
                break
    return seen


def paths(server: Misbehaving) -> list[str]:
    return [path for _, path, _ in server.requests]


def run_against(pki: Pki, behaviours: Sequence[Behaviour], count: int) -> tuple[list[tuple[int, int]], list[str]]:
    async def scenario() -> tuple[list[tuple[int, int]], list[str]]:
        async with (
            serving(pki.replica, *behaviours) as server,
            Client([server.address], pki.operator) as client,
        ):
            return await read(client, count), paths(server)

    return asyncio.run(scenario())


@pytest.mark.parametrize("then", ["end", "abort"])
def test_a_broken_stream_goes_on_after_the_last_complete_revision(pki: Pki, then: str) -> None:
    behaviours = [streaming(event(1), event(4), then=then), streaming(event(4), event(5), then="hang")]
    seen, asked = run_against(pki, behaviours, 3)
    assert seen == [(1, 0), (4, 0), (5, 0)]
    # Whether revision 4 was complete nobody could know: it is asked for again.
    assert asked == ["/v1/events?from=0", "/v1/events?from=1"]


def test_a_stream_broken_within_a_revision_loses_and_repeats_nothing(pki: Pki) -> None:
    behaviours = [
        streaming(event(3), event(7, 0), event(7, 1), then="abort"),
        streaming(event(7, 0), event(7, 1), event(7, 2), event(8), then="hang"),
    ]
    seen, asked = run_against(pki, behaviours, 5)
    assert seen == [(3, 0), (7, 0), (7, 1), (7, 2), (8, 0)]
    assert asked[1] == "/v1/events?from=3"


def test_a_stream_cut_within_an_event_goes_on_before_it(pki: Pki) -> None:
    behaviours = [streaming(event(1), event(2)[:25], then="abort"), streaming(event(1), event(2), then="hang")]
    seen, _ = run_against(pki, behaviours, 2)
    assert seen == [(1, 0), (2, 0)]


def test_a_stream_that_leaves_an_event_out_is_an_error(pki: Pki) -> None:
    with pytest.raises(ApiError, match="skipped events before event 2 of revision 7"):
        run_against(pki, [streaming(event(7, 0), event(7, 2), then="hang")], 2)


def test_keep_alive_comments_and_revisions_without_events_are_no_gap(pki: Pki) -> None:
    chunks = [b": keep-alive\n\n", event(2), b":\n\n", event(900)]
    assert run_against(pki, [streaming(*chunks, then="hang")], 2)[0] == [(2, 0), (900, 0)]


def test_a_redirect_and_an_unready_replica_are_passed(pki: Pki) -> None:
    async def scenario() -> None:
        async with serving(pki.replica, streaming(event(6), then="hang")) as streams:
            elsewhere = redirecting(lambda _: f"{streams.address.url}/v1/events")
            async with (
                serving(pki.replica, failing(503, "no_leader")) as unready,
                serving(pki.replica, elsewhere) as redirects,
                Client([unready.address, redirects.address], pki.operator) as client,
            ):
                assert await read(client, 1, from_revision=5) == [(6, 0)]
                assert paths(streams) == ["/v1/events?from=5"]

    asyncio.run(scenario())


def test_a_rejection_ends_the_stream_with_its_sentence(pki: Pki) -> None:
    with pytest.raises(ApiError, match="it is permission_denied"):
        run_against(pki, [failing(403, "permission_denied")], 1)


def test_history_that_one_replica_does_not_hold_is_asked_of_another_and_missed_only_where_nobody_holds_it(
    pki: Pki,
) -> None:
    lacking = failing(410, "history_not_held")

    async def scenario() -> None:
        async with (
            serving(pki.replica, lacking) as first,
            serving(pki.replica, streaming(event(1), then="hang")) as second,
            Client([first.address, second.address], pki.operator) as client,
        ):
            assert await read(client, 1) == [(1, 0)]
            async with Client([first.address], pki.operator) as limited:
                with pytest.raises(ApiError, match="it is history_not_held"):
                    await read(limited, 1)

    asyncio.run(scenario())


def test_nobody_streaming_ends_in_an_error_that_says_so(pki: Pki, free_address: Address) -> None:
    async def scenario() -> None:
        async with Client([free_address], pki.operator) as client:
            with pytest.raises(ApiError, match=r"no replica has streamed events for 0.2 s.*cannot be reached"):
                async for _ in client.events(give_up_s=0.2):
                    raise AssertionError("nobody streams")

    asyncio.run(scenario())


def test_a_stream_of_another_authority_is_refused_at_once(pki: Pki, foreign_pki: Pki) -> None:
    async def scenario() -> None:
        async with (
            serving(foreign_pki.replica, streaming(event(1), then="hang")) as server,
            Client([server.address], pki.operator) as client,
        ):
            with pytest.raises(ApiError, match="not signed by the expected authority"):
                await read(client, 1)

    asyncio.run(scenario())


# In virtual time

COMMENT = b": revision 7\n\n"
QUIET: list[float | bytes] = [15.0, COMMENT] * 5
"""A healthy stream of 75 s on a cluster where nothing happens."""
SILENT: list[float | bytes] = []
"""A stream that is opened and broken off at once."""

Conduct = Sequence[float | bytes] | Exception | int


class Enough(Exception):
    """Nothing went wrong for long enough."""


class Virtual:
    """Replicas in virtual time: what each does is a list of seconds to wait and chunks, a failure, or a status."""

    def __init__(self, *conducts: Conduct, until_s: float = 1000.0) -> None:
        self.conducts = {Address("127.0.0.1", port): conduct for port, conduct in enumerate(conducts, 1)}
        self.until_s = until_s
        self.now_s = 0.0
        self.asked: list[tuple[float, int]] = []
        self.waits: list[float] = []

    def now(self) -> Instant:
        return Instant(round(self.now_s * 1_000_000))

    def monotonic_s(self) -> float:
        return self.now_s

    async def sleep(self, wait_s: float) -> None:
        self.waits.append(wait_s)
        self.now_s += wait_s

    @contextlib.asynccontextmanager
    async def stream(
        self, address: Address, target: str, *, connect_s: float, idle_s: float
    ) -> AsyncIterator[tuple[HttpResponse, AsyncIterator[bytes]]]:
        self.asked.append((self.now_s, address.port))
        # Without any wait time stands still: so many requests at one moment are a storm.
        if self.now_s >= self.until_s or len(self.asked) >= 5000:
            raise Enough
        conduct = self.conducts[address]
        if isinstance(conduct, Exception):
            raise conduct
        if isinstance(conduct, int):
            error = {
                "code": "rejected",
                "sentence": f"it is {conduct}",
                "remedy": "",
                "place": "",
                "outcome": "rejected",
            }
            yield HttpResponse(status=conduct, body=json.dumps({"error": error}).encode()), self.chunks([])
        else:
            yield HttpResponse(status=200, body=b""), self.chunks(conduct)

    async def chunks(self, conduct: Sequence[float | bytes]) -> AsyncIterator[bytes]:
        for part in conduct:
            if isinstance(part, bytes):
                yield part
            else:
                self.now_s += part

    async def read(self, seen: Callable[[EventView], None] = lambda _: None) -> None:
        stream = EventStream(
            cast(Exchange, self),
            Endpoints(self.conducts),
            self,
            StreamPosition(6),
            sleep=self.sleep,
            chance=lambda: 1.0,
        )
        async with contextlib.aclosing(stream.read()) as events:
            async for view in events:
                seen(view)

    def run(self, seen: Callable[[EventView], None] = lambda _: None) -> None:
        """Read until it has gone well for `until_s`; any other end is the test's failure."""
        with pytest.raises(Enough):
            asyncio.run(self.read(seen))


def unreachable() -> AttemptError:
    return AttemptError("it cannot be reached", code=UNREACHABLE, may_have_arrived=False)


def refusing_trust() -> AttemptError:
    return AttemptError("its certificate is foreign", code=UNTRUSTED, may_have_arrived=False)


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_quiet_stream_that_breaks_after_longer_than_the_patience_is_opened_again(replicas: int) -> None:
    virtual = Virtual(*[QUIET] * replicas)
    virtual.run()
    assert {port for _, port in virtual.asked} == set(range(1, replicas + 1))
    assert all(wait_s <= FIRST_WAIT_S for wait_s in virtual.waits)


@pytest.mark.parametrize("other", [unreachable(), refusing_trust(), 410, 503], ids=["away", "foreign", "410", "503"])
def test_a_quiet_stream_that_breaks_is_opened_again_whatever_the_other_replica_says(other: Conduct) -> None:
    for conducts in ((QUIET, other), (other, QUIET)):
        virtual = Virtual(*conducts)
        virtual.run()
        assert virtual.now_s >= 1000.0


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(
    "conduct", [SILENT, [COMMENT], [event(7)], [event(7, 0), event(7, 1)[:40]]], ids=["nothing", "life", "seen", "part"]
)
def test_replicas_that_stream_and_break_off_at_once_meet_a_growing_wait(
    conduct: Sequence[float | bytes], replicas: int
) -> None:
    virtual = Virtual(*[conduct] * replicas, until_s=100.0)
    virtual.run()
    # The one event is progress once; from then on each round is asked later than the one before, up to the longest.
    waits = virtual.waits[1:]
    assert waits[0] <= 2 * FIRST_WAIT_S and waits[10:] == [LONGEST_WAIT_S] * len(waits[10:])
    assert all(later == min(LONGEST_WAIT_S, 2 * wait) for wait, later in zip(waits, waits[1:], strict=False))
    assert len(virtual.asked) <= replicas * (len(virtual.waits) + 2)


def test_who_once_streamed_and_then_nobody_is_given_up_after_the_patience_and_not_before() -> None:
    virtual = Virtual(QUIET)

    def restart() -> None:
        virtual.conducts = dict.fromkeys(virtual.conducts, unreachable())

    async def chunks(conduct: Sequence[float | bytes]) -> AsyncIterator[bytes]:
        async for chunk in Virtual.chunks(virtual, conduct):
            yield chunk
        restart()

    virtual.chunks = chunks  # type: ignore[method-assign]
    with pytest.raises(ApiError, match="no replica has streamed events for 60 s; the last error: it cannot be"):
        asyncio.run(virtual.read())
    assert 75.0 + GIVE_UP_S <= virtual.now_s <= 75.0 + GIVE_UP_S + LONGEST_WAIT_S


def test_the_time_that_the_reader_takes_for_an_event_is_no_silence_of_the_replicas() -> None:
    virtual = Virtual([event(7)])

    def work(_: EventView) -> None:
        virtual.now_s += 2 * GIVE_UP_S

    virtual.run(work)
    assert virtual.now_s >= 1000.0


def test_an_event_view_decodes_what_is_streamed() -> None:
    [raw] = SseParser().feed(event(7, 3))
    view = json.loads(raw.data)
    assert (raw.id, raw.event, view["detail"]) == ("7", "JobSubmitted", {"sentence": "ä\nb"})
    assert EventView.__struct_fields__[:2] == ("revision", "sequence")


# The format


STREAM = (
    b"\xef\xbb\xbf: hello\r\n\r\n"
    b"id: 1\r\nevent: a\r\ndata: one\r\ndata:two\r\n\r\n"
    b"data\n\n"
    b"id: 2\rdata: three \xc3\xa4\r\r"
    b"retry: 250\nunknown: x\n\n"
    b"event: never dispatched without data\n\n"
    b"id: bad\x00id\ndata: four\n\n"
    b"data: unfinished"
)
EVENTS = [
    ServerSentEvent("a", "one\ntwo", "1"),
    ServerSentEvent("message", "", "1"),
    ServerSentEvent("message", "three ä", "2"),
    ServerSentEvent("message", "four", "2"),
]


def test_the_format_is_read_as_the_standard_says() -> None:
    parser = SseParser()
    assert parser.feed(STREAM) == EVENTS
    assert parser.retry_ms == 250


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_wherever_the_chunks_are_cut_the_events_are_the_same(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    parser = SseParser()
    events = [found for a, b in zip(places, places[1:], strict=False) for found in parser.feed(STREAM[a:b])]
    assert events == EVENTS


@given(st.binary(max_size=200))
def test_any_bytes_are_events_or_a_broken_stream(data: bytes) -> None:
    parser = SseParser()
    try:
        events = parser.feed(data)
    except StreamBroken as broken:
        assert "UTF-8" in str(broken)
    else:
        assert all(isinstance(found, ServerSentEvent) for found in events)


def test_an_endless_line_and_an_endless_event_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse_module, "LINE_BYTES_MAX", 100)
    monkeypatch.setattr(sse_module, "EVENT_BYTES_MAX", 300)
    with pytest.raises(StreamBroken, match="a line of the event stream has more than 100 bytes"):
        SseParser().feed(b"data: " + b"x" * 100)
    with pytest.raises(StreamBroken, match="a line of the event stream has more than 100 bytes"):
        SseParser().feed(b"data: " + b"x" * 100 + b"\n")
    parser = SseParser()
    with pytest.raises(StreamBroken, match="an event of the stream has more than 300 bytes"):
        for _ in range(10):
            parser.feed(b"data: " + b"x" * 80 + b"\n")


@given(st.integers(0, 6), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=12))
@example(0, [(1, 0), (2, 1), (1, 1)])  # the end of revision 1 is among what was skipped
def test_an_event_is_taken_once_in_order_and_after_what_is_complete(
    complete: int, offered: list[tuple[int, int]]
) -> None:
    position, taken = StreamPosition(complete), list[tuple[int, int]]()
    for revision, sequence in offered:
        last = taken[-1] if taken else (complete, 9)
        is_new = (revision, sequence) > last
        view = EventView(
            revision=revision, sequence=sequence, at="", actor="", command="", event="JobSubmitted", detail={}
        )
        if is_new and sequence != (last[1] + 1 if revision == last[0] else 0):
            with pytest.raises(ApiError, match="skipped events"):
                position.accept(view)
        else:
            assert position.accept(view) is is_new
            taken += [(revision, sequence)] if is_new else []
