"""A client cannot hold the server by being slow, silent, large or many."""

import asyncio
import logging
import ssl

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import forebay.cluster.api.web.bodies
import forebay.cluster.api.web.connections
from forebay.cluster.api.web.bodies import (
    AGENT_BODY_BYTES,
    BODY_BYTES_MAX,
    SMALL_BODY_BYTES,
    BodyBudget,
    BodyQuota,
    BodyQuotas,
)
from forebay.cluster.api.web.problems import Problem
from forebay.cluster.config.config import Config
from forebay.cluster.schemas.jobs import ErrorAnswer
from forebay.cluster.security.identity import Identity, Role
from forebay.cluster.security.tls import client_context
from tests.cluster.harness import Harness, story, until
from tests.logs import lines_of


async def connect(config: Config) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = config.replica("r1").api
    context = client_context(config.tls_files("alice"))
    return await asyncio.open_connection(address.host, address.port, ssl=context, server_hostname="127.0.0.1")


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Read until the server ends the connection."""
    received = b""
    async with asyncio.timeout(20):
        while True:
            try:
                part = await reader.read(65536)
            except (ConnectionError, ssl.SSLError):
                return received
            if not part:
                return received
            received += part


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        await writer.wait_closed()
    except (ConnectionError, ssl.SSLError):
        pass


@story
async def test_a_head_that_trickles_in_is_cut(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forebay.cluster.api.web.connections.ApiConnection, "head_s_max", 0.2)
    monkeypatch.setattr("forebay.cluster.api.worker.server.SWEEP_PERIOD_S", 0.02)
    async with Harness(config):
        reader, writer = await connect(config)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
        end = asyncio.create_task(ended(reader))
        for _ in range(2000):
            if end.done():
                break
            writer.write(b"X")
            await asyncio.sleep(0.01)
        assert await end == b""
        await close(writer)


@story
async def test_a_connection_that_says_nothing_is_cut(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forebay.cluster.api.web.connections.ApiConnection, "rest_s_max", 0.1)
    monkeypatch.setattr("forebay.cluster.api.worker.server.SWEEP_PERIOD_S", 0.02)
    async with Harness(config):
        reader, writer = await connect(config)
        assert await ended(reader) == b""
        await close(writer)


@story
async def test_a_body_that_does_not_come_is_answered_408(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forebay.cluster.api.web.bodies, "BODY_READ_S", 0.1)
    async with Harness(config) as harness:
        reader, writer = await connect(config)
        writer.write(
            b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        head = await reader.readline()
        assert b" 408 " in head
        await close(writer)
        assert (await harness.submit()).status == 201


@story
async def test_a_body_that_trickles_in_is_cut_however_long_its_sender_goes_on(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forebay.cluster.api.web.bodies, "BODY_READ_S", 0.1)
    monkeypatch.setattr("forebay.cluster.api.worker.server.LINGER_S", 0.1)
    async with Harness(config) as harness:
        for path in ("/v1/jobs", "/v1/jobs/1/clear", "/v1/nothing", "/healthz"):  # read, forbidden, unknown, unwanted
            reader, writer = await connect(config)
            writer.write(begun(100_000).replace(b"/v1/jobs", path.encode(), 1))
            end = asyncio.create_task(ended(reader))
            while not end.done():
                writer.write(b" ")
                await asyncio.sleep(0.01)
            assert b"HTTP/1.1 4" in await end
            await close(writer)
        assert harness.server._budget.held_bytes == 0


@story
async def test_whoever_goes_away_in_the_middle_of_a_body_costs_no_line_of_the_log(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with Harness(config) as harness:
        reader, writer = await connect(config)
        writer.write(begun(BODY_BYTES_MAX, b"{" * 1000))
        await until(lambda: harness.server._budget.held_bytes == 1000)
        before = len(caplog.records)
        writer.transport.abort()
        await until(lambda: harness.server._budget.held_bytes == 0)
        assert (await harness.submit()).status == 201
        assert len(caplog.records) == before


def begun(length: int, sent: bytes = b"{") -> bytes:
    """Return a submit that announces `length` bytes and sends fewer."""
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    return head.encode() + sent


@story
async def test_bodies_that_are_announced_and_do_not_come_keep_nobody_out(config: Config) -> None:
    async with Harness(config) as harness:
        held = []
        for _ in range(12):
            _, writer = await connect(config)
            writer.write(begun(BODY_BYTES_MAX))
            held.append(writer)
        await until(lambda: harness.server._budget.held_bytes == len(held))
        for who in ("alice", "operator"):
            small, large = (
                await harness.submit(who=who),
                await harness.submit(who=who, script="#!/bin/sh\n" + "#" * 200_000),
            )
            assert (small.status, large.status) == (201, 201)
        for writer in held:
            await close(writer)
        await until(lambda: harness.server._budget.held_bytes == 0)


@story
async def test_who_fills_the_share_of_one_identity_is_refused_and_nobody_else(config: Config) -> None:
    async with Harness(config) as harness:
        room = BodyQuota(bytes_max=400_000, share_bytes=150_000)
        harness.server._budget = BodyBudget(BodyQuotas(large=room))
        reader, writer = await connect(config)
        writer.write(begun(300_000, b"{" * 140_000))
        await until(lambda: harness.server._budget.held_bytes == 140_000)
        second_reader, second = await connect(config)
        second.write(begun(300_000, b"{" * 20_000))
        assert b" 503 " in await second_reader.readline()
        writer.write(b"{" * 20_000)
        assert b" 503 " in await reader.readline()
        await until(lambda: harness.server._budget.held_bytes == 0)
        for one in (writer, second):
            await close(one)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300_000), st.integers(1, 300_000)), max_size=60))
def test_no_sender_and_no_kind_of_body_holds_more_than_its_room(bodies: list[tuple[int, int, int]]) -> None:
    rooms = BodyQuotas(
        large=BodyQuota(900_000, 400_000), small=BodyQuota(100_000, 70_000), agents=BodyQuota(500_000, 200_000)
    )
    budget = BodyBudget(rooms)
    people = [Identity(role, name) for role in (Role.USER, Role.AGENT) for name in ("a", "b")]
    claims = []
    for number, announced, arrived in bodies:
        claim = budget.claim(people[number], announced)
        claims.append(claim)
        before = budget.held_bytes
        try:
            claim.take(arrived)
        except Problem as problem:
            assert (problem.status, budget.held_bytes) == (503, before)
        accounts = ((budget._large, rooms.large), (budget._small, rooms.small), (budget._agents, rooms.agents))
        for account, room in accounts:
            assert account.held_bytes == sum(account.held_by.values()) <= room.bytes_max
            assert all(held <= room.share_bytes for held in account.held_by.values())
    for claim in claims:
        claim.give()
    assert budget.held_bytes == 0


def test_full_rooms_of_people_leave_the_agents_theirs_and_large_bodies_leave_small_ones_theirs() -> None:
    budget = BodyBudget()
    refused = 0
    for number in range(8):
        for announced in (BODY_BYTES_MAX, SMALL_BODY_BYTES):
            claim = budget.claim(Identity(Role.USER, f"u{number}"), announced)
            try:
                while True:
                    claim.take(announced)
            except Problem:
                refused += 1
    assert refused == 16
    budget.claim(Identity(Role.AGENT, "n1"), 1_000_000).take(1_000_000)
    large_only = BodyBudget()
    for number in range(5):
        large_only.claim(Identity(Role.USER, f"u{number}"), BODY_BYTES_MAX).take(BODY_BYTES_MAX)
    with pytest.raises(Problem):
        large_only.claim(Identity(Role.OPERATOR, "operator"), BODY_BYTES_MAX).take(BODY_BYTES_MAX)
    large_only.claim(Identity(Role.OPERATOR, "operator"), SMALL_BODY_BYTES).take(SMALL_BODY_BYTES)


def test_a_whole_body_of_the_largest_size_fits_into_the_share_of_whoever_sends_it() -> None:
    for role in Role:
        for announced in (1, SMALL_BODY_BYTES, SMALL_BODY_BYTES + 1, AGENT_BODY_BYTES, BODY_BYTES_MAX):
            budget = BodyBudget()
            budget.claim(Identity(role, "x"), announced).take(announced)
            assert budget.held_bytes == announced


@story
async def test_a_body_without_a_length_is_refused(config: Config) -> None:
    async with Harness(config):
        reader, writer = await connect(config)
        writer.write(
            b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"2\r\n{}\r\n0\r\n\r\n"
        )
        assert b" 411 " in await reader.readline()
        await close(writer)


@story
async def test_a_body_is_invited_by_who_asks_for_it(config: Config) -> None:
    async with Harness(config):
        reader, writer = await connect(config)
        writer.write(
            b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\n"
            b"Expect: 100-continue\r\n\r\n"
        )
        assert b" 100 " in await reader.readline()
        await reader.readline()
        writer.write(b"{}")
        assert b" 400 " in await reader.readline()
        await close(writer)


@story
async def test_more_connections_than_the_bound_are_refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forebay.cluster.api.web.connections, "CONNECTIONS_MAX", 3)
    async with Harness(config) as harness:
        held = [await connect(config) for _ in range(3)]
        assert harness.server._guarded is not None
        await until(lambda: len(harness.server._guarded.connections) == 3)  # type: ignore[union-attr]
        reader, writer = await connect(config)
        assert await ended(reader) == b""
        await close(writer)
        for _, other in held:
            await close(other)
        await until(lambda: not harness.server._guarded.connections)  # type: ignore[union-attr]
        assert (await harness.ask("GET", "/healthz")).status == 200


@story
async def test_all_users_together_leave_connections_to_operators_and_agents(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forebay.cluster.api.web.connections, "CONNECTIONS_OF_USERS_MAX", 2)
    async with Harness(config) as harness:
        for who in ("alice", "bob"):
            assert (await harness.ask("GET", "/healthz", who=who)).status == 200
        reader, writer = await connect(config)
        assert await ended(reader) == b""
        await close(writer)
        for who in ("operator", "n1"):
            assert (await harness.ask("GET", "/healthz", who=who)).status == 200


@story
async def test_one_holder_of_a_certificate_cannot_take_all_the_connections(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forebay.cluster.api.web.connections, "CONNECTIONS_PER_IDENTITY_MAX", 2)
    async with Harness(config) as harness:
        held = [await connect(config) for _ in range(2)]
        guarded = harness.server._guarded
        assert guarded is not None
        await until(lambda: guarded.held["user alice"] == 2)
        reader, writer = await connect(config)
        assert await ended(reader) == b""
        await close(writer)
        assert (await harness.ask("GET", "/healthz", who="bob")).status == 200
        await close(held.pop()[1])
        await until(lambda: guarded.held["user alice"] == 1)
        assert (await harness.ask("GET", "/healthz", who="alice")).status == 200
        await close(held.pop()[1])
        await until(lambda: guarded.held["user alice"] <= 1)


@story
@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431, "limit_exceeded"),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n", 431, "limit_exceeded"),
        (begun(1).replace(b"h: 1\r", b"h: " + b"9" * 40 + b"\r"), 400, "malformed_request"),
        (begun(1).replace(b"h: 1\r", b"h: -1\r"), 400, "malformed_request"),
        (b"\x16\x03\x01 nonsense\r\n\r\n", 400, "malformed_request"),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n", 400, "malformed_request"),
    ],
)
async def test_what_is_no_request_gets_the_error_of_all_others_and_one_line_of_the_log(
    config: Config, caplog: pytest.LogCaptureFixture, sent: bytes, status: int, code: str
) -> None:
    caplog.set_level(logging.INFO)
    async with Harness(config, raises=False) as harness:
        caplog.clear()
        reader, writer = await connect(config)
        writer.write(sent)
        answer = await ended(reader)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b" %d " % status in head.splitlines()[0] and b"application/json" in head
        error = msgspec.json.decode(body, type=ErrorAnswer).error
        assert error.code == code and error.sentence and error.remedy
        assert "xxxx" not in error.sentence
        await close(writer)
        for _ in range(20):
            reader, writer = await connect(config)
            writer.write(sent)
            assert await ended(reader)
            await close(writer)
        said = lines_of(caplog, "forebay.cluster.api.worker.server")
        assert len(said) == 1 and said[0].startswith("a request of 127.0.0.1 is rejected: ") and len(said[0]) < 200
        assert (await harness.ask("GET", "/healthz")).status == 200
