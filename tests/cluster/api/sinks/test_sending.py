"""A batch is sent signed and once, and whatever a receiver answers becomes an outcome within bounds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from forebay.cluster.api.sinks import sending as sending_module
from forebay.cluster.api.sinks.sending import (
    RESPONSE_BYTES_MAX,
    RETRY_AFTER_S_MAX,
    PostOutcome,
    PostResult,
    SinkClient,
    result_of,
    retry_after_s,
    signature_of,
)
from forebay.cluster.config.config import Config
from forebay.cluster.config.sinks import SinkConfig
from forebay.cluster.security.tls import TlsError, open_server_context
from forebay.cluster.system.clock import SystemClock
from tests.cluster.api.sinks.receiver import SECRET, Receiver, hang, hang_up, say_garbage, verify
from tests.cluster.harness import story

BODY = b'[{"id":"c/1/0","data":{"revision":1}}]'


async def posted(sink: SinkConfig, body: bytes = BODY) -> PostResult:
    client = SinkClient(SystemClock())
    try:
        return await client.post(sink, body)
    finally:
        await client.close()


@story
async def test_a_batch_arrives_signed_and_named(tmp_path: Path) -> None:
    async with Receiver(tmp_path) as receiver:
        assert (await posted(receiver.sink())).outcome is PostOutcome.ACCEPTED
    (request,) = receiver.requests
    assert request["Content-Type"] == "application/cloudevents-batch+json; charset=utf-8"
    assert (request["Forebay-Sink"], request["path"]) == ("audit", "/events")
    assert verify(SECRET, request["Forebay-Signature"], BODY)
    assert not verify(SECRET, request["Forebay-Signature"], BODY + b" ")
    assert list(receiver.arrived) == ["c/1/0"]


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        *((status, PostOutcome.ACCEPTED) for status in (200, 201, 202, 204)),
        *((status, PostOutcome.REFUSED) for status in (301, 302, 307, 308, 400, 401, 403, 404, 413, 415, 422)),
        (410, PostOutcome.GONE),
        *((status, PostOutcome.FAILED) for status in (408, 425, 429, 500, 502, 503, 504)),
    ],
)
def test_a_status_has_one_outcome(status: int, outcome: PostOutcome) -> None:
    result = result_of(status, "", 0)
    assert result.outcome is outcome
    assert bool(result.error) is (outcome is not PostOutcome.ACCEPTED)


@story
async def test_a_redirect_is_not_followed_and_a_busy_receiver_is_given_its_time(tmp_path: Path) -> None:
    async with Receiver(tmp_path) as receiver:
        receiver.answer, receiver.headers = 307, {"Location": f"http://127.0.0.1:{receiver.port}/elsewhere"}
        assert (await posted(receiver.sink())).outcome is PostOutcome.REFUSED
        assert [request["path"] for request in receiver.requests] == ["/events"]
        receiver.answer, receiver.headers = 503, {"Retry-After": "7"}
        assert await posted(receiver.sink()) == PostResult(PostOutcome.FAILED, "status 503", 7.0)


@story
async def test_a_receiver_that_is_dead_hangs_hangs_up_or_talks_nonsense_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending_module, "POST_S", 0.5)
    receiver = Receiver(tmp_path)
    assert (await posted(receiver.sink())).outcome is PostOutcome.FAILED  # not started
    async with receiver:
        for answer in (hang, hang_up, say_garbage):
            receiver.answer = answer
            result = await posted(receiver.sink())
            assert result.outcome is PostOutcome.FAILED and result.error and result.error.isprintable()


@story
async def test_an_endless_or_stuck_body_costs_nothing_once_the_status_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending_module, "DRAIN_S", 0.2)
    written = 0

    async def flood(request: web.Request) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(16 * 1024))
            written += 16 * 1024

    async def stall(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "5"})
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    async with Receiver(tmp_path) as receiver:
        for answer in (flood, stall):
            receiver.answer = answer
            assert (await posted(receiver.sink())).outcome is PostOutcome.ACCEPTED
    assert written < RESPONSE_BYTES_MAX + 64 * 1024 * 1024  # the rest is in the buffers of the kernel


@story
async def test_a_certificate_is_verified_by_the_sinks_authority(config: Config, tmp_path: Path) -> None:
    files = config.tls_files("r1")

    async def accept(request: web.Request) -> web.StreamResponse:
        return web.Response()

    app = web.Application()
    app.router.add_post("/events", accept)
    runner = web.AppRunner(app)
    await runner.setup()
    receiver = Receiver(tmp_path)
    site = web.TCPSite(
        runner, "127.0.0.1", receiver.port, ssl_context=open_server_context(files.certificate, files.key)
    )
    await site.start()
    try:
        sink = replace(receiver.sink(), url=f"https://127.0.0.1:{receiver.port}/events")
        assert (await posted(replace(sink, authority=files.authority))).outcome is PostOutcome.ACCEPTED
        assert (await posted(sink)).outcome is PostOutcome.FAILED
        assert (await posted(replace(sink, authority=tmp_path / "missing.pem"))).outcome is PostOutcome.FAILED
    finally:
        await runner.cleanup()


@story
async def test_a_key_that_others_can_read_is_short_or_missing_sends_nothing(tmp_path: Path) -> None:
    async with Receiver(tmp_path) as receiver:
        receiver.secret_file.chmod(0o640)
        result = await posted(receiver.sink())
        assert result.outcome is PostOutcome.FAILED and "chmod 600" in result.error
        receiver.secret_file.chmod(0o600)
        for content in (b"short", b"x" * 5000):
            receiver.secret_file.write_bytes(content)
            assert (await posted(receiver.sink())).outcome is PostOutcome.FAILED
        receiver.secret_file.unlink()
        assert (await posted(receiver.sink())).outcome is PostOutcome.FAILED
        assert not receiver.requests
        receiver.secret_file.symlink_to("/dev/zero")
        with pytest.raises(TlsError):
            signature_of(receiver.secret_file, 1, BODY)


@pytest.mark.parametrize(
    ("text", "pause_s"),
    [
        ("", 0.0),
        ("0", 0.0),
        ("120", 120.0),
        ("99999999999999999999", RETRY_AFTER_S_MAX),
        ("-5", 0.0),
        ("soon", 0.0),
        ("Thu, 01 Jan 1970 00:20:00 GMT", 200.0),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", RETRY_AFTER_S_MAX),
    ],
)
def test_retry_after_is_seconds_or_a_date(text: str, pause_s: float) -> None:
    assert retry_after_s(text, 1_000) == pause_s


@given(st.text(), st.integers(0, 2**33))
def test_any_retry_after_is_a_bounded_pause(text: str, now_s: int) -> None:
    assert 0 <= retry_after_s(text, now_s) <= RETRY_AFTER_S_MAX
