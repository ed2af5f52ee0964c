"""The event stream: every event once and in order, resumable at any revision, and bounded for who does not read."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

import forebay.cluster.api.events
import forebay.cluster.api.worker.server
from forebay.cluster.client.sse import ServerSentEvent, SseParser
from forebay.cluster.config.config import Config
from forebay.cluster.security.tls import client_context
from forebay.snapshots import Image
from tests.cluster.harness import Harness, story, until


@asynccontextmanager
async def streaming(harness: Harness, query: str = "", headers: dict[str, str] | None = None) -> AsyncIterator[Any]:
    async with harness.session("alice").get(harness.url + "/v1/events" + query, headers=headers) as response:
        assert response.status == 200, await response.read()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        yield response


async def read(response: Any, count: int) -> list[ServerSentEvent]:
    parser, found = SseParser(), []
    async with asyncio.timeout(20):
        while len(found) < count:
            chunk = await response.content.readany()
            assert chunk, "the stream ended before the event came"
            found += parser.feed(chunk)
    return found[:count]


def places(events: list[ServerSentEvent]) -> list[tuple[int, int]]:
    return [(data["revision"], data["sequence"]) for data in (json.loads(event.data) for event in events)]


async def prepare(harness: Harness, jobs: int = 5) -> None:
    instance = {"command_id": harness.new_id(), "instance": "i", "storage_id": "s", "cpus": 2}
    await harness.ask("POST", "/v1/agents/n1/register", instance, who="n1")
    for _ in range(jobs):
        await harness.submit()


async def total(harness: Harness) -> int:
    applied = await harness.applied()
    return sum(len(entry.events) for one in applied if one.batch for entry in one.batch.entries)


@story
async def test_a_stream_from_zero_has_every_event_and_then_those_that_come(config: Config) -> None:
    async with Harness(config) as harness:
        await prepare(harness)
        async with streaming(harness, "?from=0") as response:
            events = await read(response, await total(harness))
            assert events[0].event == "cluster_founded"
            assert places(events) == sorted(set(places(events)))
            submitted = [event for event in events if event.event == "job_submitted"]
            assert len(submitted) == 5
            detail = json.loads(submitted[0].data)
            assert (detail["actor"], detail["job_id"], detail["command"]) == ("user alice", 1, "submit_job")
            assert "script" not in detail["detail"]["request"] and "environment" not in detail["detail"]["request"]
            await harness.submit(hold=True)
            (later,) = await read(response, 1)
            assert later.event == "job_submitted" and json.loads(later.data)["job_id"] == 6


@story
async def test_a_stream_resumed_at_any_revision_continues_without_gap_or_repetition(config: Config) -> None:
    async with Harness(config) as harness:
        await prepare(harness)
        async with streaming(harness, "?from=0") as response:
            everything = places(await read(response, await total(harness)))
        # Once from the memory of this process, once from the ledger on disk.
        for _ in range(2):
            for revision in range(harness.controller.state.revision):
                wanted = [place for place in everything if place[0] > revision]
                if not wanted:
                    continue
                async with streaming(harness, f"?from={revision}") as response:
                    assert places(await read(response, len(wanted))) == wanted
                async with streaming(harness, headers={"Last-Event-ID": str(revision)}) as response:
                    assert places(await read(response, len(wanted))) == wanted
            await harness.restart()


@story
async def test_only_the_last_event_of_a_revision_carries_its_id(config: Config) -> None:
    async with Harness(config) as harness:
        await prepare(harness, jobs=1)
        body = {"command_id": harness.new_id(), "hurry": True}
        await harness.ask("POST", "/v1/jobs/1/cancel", body, who="alice")
        async with streaming(harness, "?from=0") as response:
            raw = await response.content.readany()
            while raw.count(b"data: ") < await total(harness):
                raw += await response.content.readany()
        frames = [frame for frame in raw.split(b"\n\n") if frame]
        for frame, following in zip(frames, frames[1:] + [b""], strict=True):
            revision = json.loads(frame.split(b"data: ")[1])["revision"]
            last = not following or json.loads(following.split(b"data: ")[1])["revision"] != revision
            assert (b"id: %d\n" % revision in frame) is last


@story
async def test_the_client_of_this_project_reads_the_stream(config: Config) -> None:
    from contextlib import aclosing

    from forebay.cluster.client import Client

    async with Harness(config) as harness:
        await prepare(harness)
        async with Client(config.endpoints, config.tls_files("alice")) as client, aclosing(client.events()) as events:
            found = [await anext(events) for _ in range(await total(harness))]
            assert found[0].event == "cluster_founded"
            assert len({(event.revision, event.sequence) for event in found}) == len(found)


@story
async def test_a_subscriber_that_does_not_read_is_cut_and_told_where_to_resume(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forebay.cluster.api.worker.server, "PART_WRITE_S_MAX", 1.0)
    async with Harness(config) as harness:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        address = config.replica("r1").api
        await loop.sock_connect(raw, (address.host, address.port))
        reader, writer = await asyncio.open_connection(
            sock=raw, ssl=client_context(config.tls_files("alice")), server_hostname="127.0.0.1", limit=1024
        )
        writer.write(b"GET /v1/events?from=0 HTTP/1.1\r\nHost: x\r\n\r\n")
        await writer.drain()
        await until(lambda: harness.service.event_streams == 1)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        long_name = "#!/bin/sh\n#DW jobdw capacity=8MiB access_mode=striped type=scratch\n" + "".join(
            f"#DW stage_in type=file source={config.file.parent}/in/{'x' * 200}{n} destination=$DW_JOB_STRIPED/{n}\n"
            for n in range(400)
        )
        for _ in range(200):
            await harness.submit(hold=True, script=long_name)
            if harness.service.event_streams == 0:
                break
        assert harness.service.event_streams == 0
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        received = b""
        while True:
            try:
                part = await reader.read(65536)
            except (ConnectionError, ssl.SSLError):
                break
            if not part:
                break
            received = received[-4096:] + part
        assert b": too slow; resume with from=" in received
        writer.close()


@story
async def test_too_many_streams_are_refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forebay.cluster.api.events, "STREAMS_MAX", 1)
    async with Harness(config) as harness:
        async with streaming(harness):
            answer = await harness.ask("GET", "/v1/events", who="bob")
            assert (answer.status, answer.code) == (503, "too_busy")


@story
async def test_one_holder_of_a_certificate_cannot_take_all_the_streams(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forebay.cluster.api.events, "STREAMS_PER_IDENTITY_MAX", 2)
    monkeypatch.setattr(forebay.cluster.api.events, "KEEP_ALIVE_S", 0.02)
    async with Harness(config) as harness:
        async with streaming(harness):
            async with streaming(harness):
                answer = await harness.ask("GET", "/v1/events", who="alice")
                assert (answer.status, answer.code, answer.headers["Retry-After"]) == (429, "too_many_requests", "5")
                assert "user alice has 2 event streams open" in answer.sentence
                async with harness.session("operator").get(harness.url + "/v1/events") as other:
                    assert other.status == 200
                await until(lambda: harness.service.event_streams == 2)
            await until(lambda: harness.service.event_streams == 1)
            # Neither the refusals nor those that went away hold a place.
            async with streaming(harness):
                assert (await harness.ask("GET", "/v1/events", who="alice")).status == 429
        await until(lambda: harness.service.event_streams == 0)


def test_the_streams_of_one_identity_are_half_of_all_at_most() -> None:
    assert 2 * forebay.cluster.api.events.STREAMS_PER_IDENTITY_MAX <= forebay.cluster.api.events.STREAMS_MAX


@story
@pytest.mark.parametrize("end", [ConnectionResetError, asyncio.CancelledError, RuntimeError])
async def test_a_stream_that_ends_while_it_is_prepared_gives_its_place_back(
    config: Config, end: type[BaseException]
) -> None:
    async with Harness(config) as harness:
        prepare_response = web.StreamResponse.prepare
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forebay.cluster.api.events, "STREAMS_PER_IDENTITY_MAX", 1)

            async def vanish(response: web.StreamResponse, request: web.BaseRequest) -> Any:
                if type(response) is not web.StreamResponse:
                    return await prepare_response(response, request)
                assert harness.service.event_streams == 1
                assert request.transport is not None
                request.transport.abort()
                raise end()

            for _ in range(2):
                patch.setattr(web.StreamResponse, "prepare", vanish)
                with pytest.raises(aiohttp.ClientConnectionError):
                    await harness.ask("GET", "/v1/events", who="alice")
                await until(lambda: harness.service.event_streams == 0)
            # A position that is none takes no place for longer than its rejection.
            assert (await harness.ask("GET", "/v1/events?from=-1", who="alice")).status == 400
            patch.setattr(web.StreamResponse, "prepare", prepare_response)
            async with streaming(harness):
                assert harness.service.event_streams == 1


def catch_up(harness: Harness, *, entries: int, revisions: int) -> None:
    """Let a snapshot arrive that is so many entries and revisions later, as at a follower that was away."""
    controller = harness.controller
    harness.engine.depose()
    state = msgspec.structs.replace(controller.state, revision=controller.state.revision + revisions)
    controller.installed(Image(state, harness.engine.applied_index + entries, harness.engine.term, bytes(range(32))))


@story
@pytest.mark.parametrize("behind", [True, False], ids=["behind", "up to date"])
async def test_a_subscriber_is_told_at_once_that_a_snapshot_came_in_place_of_its_events(
    config: Config, behind: bool
) -> None:
    async with Harness(config) as harness:
        await prepare(harness)
        held, count = harness.controller.state.revision, await total(harness)
        async with streaming(harness, "?from=0") as reader:
            everything = places(await read(reader, count))
        if behind:
            catch_up(harness, entries=1000, revisions=1000)
        async with streaming(harness, "?from=0") as response:
            if not behind:
                assert places(await read(response, count)) == everything
                catch_up(harness, entries=1000, revisions=1000)
            # Nothing follows the snapshot: the stream ends all the same, after all that is held.
            async with asyncio.timeout(20):
                rest = await response.content.read()
        parser = SseParser()
        assert places(parser.feed(rest)) == (everything if behind else [])
        assert rest.endswith(f": revisions after {held} are not held here; ask another replica\n\n".encode())
        assert (await harness.ask("GET", f"/v1/events?from={held}", who="alice")).code == "history_not_held"


@story
@pytest.mark.parametrize("woken", ["by the snapshot", "by what follows it"])
async def test_a_snapshot_that_settled_nothing_new_interrupts_no_stream(
    config: Config, monkeypatch: pytest.MonkeyPatch, woken: str
) -> None:
    monkeypatch.setattr(forebay.cluster.api.events, "KEEP_ALIVE_S", 0.02)
    async with Harness(config) as harness:
        await prepare(harness)
        gate, more = asyncio.Event(), harness.controller.applied_log.more

        async def gated(index: int, timeout_s: float) -> bool:
            await gate.wait()
            return await more(index, timeout_s)

        monkeypatch.setattr(harness.controller.applied_log, "more", gated)
        async with streaming(harness) as response:
            revision = harness.controller.state.revision
            catch_up(harness, entries=1000, revisions=0)
            if woken == "by the snapshot":
                gate.set()
                # It waits as for any other entry, and says so.
                assert (await response.content.readline()) == f": revision {revision}\n".encode()
            harness.engine.lead()
            await harness.submit(hold=True)
            gate.set()
            (event,) = await read(response, 1)
            assert (event.event, places([event])) == ("job_submitted", [(revision + 1, 0)])


@story
async def test_a_silent_stream_shows_that_it_lives(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forebay.cluster.api.events, "KEEP_ALIVE_S", 0.02)
    async with Harness(config) as harness:
        async with streaming(harness) as response:
            assert (await response.content.readline()).startswith(b": revision ")


@story
async def test_a_stopping_replica_tells_its_subscribers_where_to_resume(config: Config) -> None:
    async with Harness(config) as harness:
        async with streaming(harness) as response:
            harness.service.stopping.set()
            rest = await response.content.read()
            assert f"resume with from={harness.controller.state.revision}" in rest.decode()


@story
async def test_a_position_that_is_no_revision_is_refused(config: Config) -> None:
    async with Harness(config) as harness:
        assert (await harness.ask("GET", "/v1/events?from=-1", who="alice")).status == 400
        answer = await harness.ask("GET", "/v1/events", who="alice", headers={"Last-Event-ID": "yesterday"})
        assert (answer.status, answer.body["error"]["place"]) == (400, "header Last-Event-ID")
