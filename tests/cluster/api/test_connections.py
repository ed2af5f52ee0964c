"""A client cannot hold the server by being slow, silent, large or many."""

import asyncio
import ssl

import pytest

import cluster.api.bodies
import cluster.api.connections
from cluster.api.bodies import BodyBudget
from cluster.api.problems import Problem
from cluster.config import Config
from cluster.tls import client_context
from tests.cluster.rig import Rig, story, until


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
    monkeypatch.setattr(cluster.api.connections, "HEADERS_S_MAX", 0.2)
    monkeypatch.setattr("cluster.api.server.SWEEP_PERIOD_S", 0.02)
    async with Rig(config):
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
    monkeypatch.setattr(cluster.api.connections, "IDLE_S_MAX", 0.1)
    monkeypatch.setattr("cluster.api.server.SWEEP_PERIOD_S", 0.02)
    async with Rig(config):
        reader, writer = await connect(config)
        assert await ended(reader) == b""
        await close(writer)


@story
async def test_a_body_that_does_not_come_is_answered_408(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.api.bodies, "BODY_READ_S", 0.1)
    async with Rig(config) as rig:
        reader, writer = await connect(config)
        writer.write(
            b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        )
        head = await reader.readline()
        assert b" 408 " in head
        await close(writer)
        assert (await rig.submit()).status == 201


@story
async def test_bodies_share_one_bounded_budget(config: Config) -> None:
    async with Rig(config) as rig:
        rig.server._budget = BodyBudget(1000)
        large = await rig.submit(script="#!/bin/sh\n" + "#" * 2000)
        assert (large.status, large.code) == (503, "too_busy")
        assert (await rig.submit()).status == 201


def test_a_budget_gives_back_what_was_taken() -> None:
    budget = BodyBudget(10)
    budget.take(10)
    with pytest.raises(Problem):
        budget.take(1)
    budget.give(10)
    budget.take(10)


@story
async def test_a_body_without_a_length_is_refused(config: Config) -> None:
    async with Rig(config):
        reader, writer = await connect(config)
        writer.write(
            b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"2\r\n{}\r\n0\r\n\r\n"
        )
        assert b" 411 " in await reader.readline()
        await close(writer)


@story
async def test_a_body_is_invited_by_who_asks_for_it(config: Config) -> None:
    async with Rig(config):
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
    monkeypatch.setattr(cluster.api.connections, "CONNECTIONS_MAX", 3)
    async with Rig(config) as rig:
        held = [await connect(config) for _ in range(3)]
        assert rig.server._guarded is not None
        await until(lambda: len(rig.server._guarded.connections) == 3)  # type: ignore[union-attr]
        reader, writer = await connect(config)
        assert await ended(reader) == b""
        await close(writer)
        for _, other in held:
            await close(other)
        await until(lambda: not rig.server._guarded.connections)  # type: ignore[union-attr]
        assert (await rig.ask("GET", "/healthz")).status == 200


@story
async def test_a_head_that_is_too_long_is_refused(config: Config) -> None:
    async with Rig(config) as rig:
        reader, writer = await connect(config)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n")
        assert b" 400 " in await reader.readline()
        await close(writer)
        assert (await rig.ask("GET", "/healthz")).status == 200
