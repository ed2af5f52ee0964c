"""A connection does not outlive the certificate that opened it, at any listener and in any state."""

import asyncio
import ssl

import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.security.certificates import certificate_of
from forebay.cluster.security.tls import client_context
from forebay.cluster.system.address import Address
from forebay.cluster.system.clock import SystemClock
from forebay.replica.values.units import Instant
from tests.cluster.channel.test_channel import channel_of
from tests.cluster.harness import Harness, story


class AheadClock(SystemClock):
    """Clock of the machine, moved ahead by some time."""

    __slots__ = ("ahead",)

    def __init__(self) -> None:
        self.ahead = 0

    def now(self) -> Instant:
        return Instant(super().now() + self.ahead)


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
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


def lifetime_us(config: Config, name: str) -> int:
    found = certificate_of(config.tls.certificates, name)
    return found.valid_until - SystemClock().now()


@pytest.mark.parametrize("listener", ["api", "api in a request", "channel"])
@story
async def test_connection_ends_when_its_certificate_expires(config: Config, listener: str) -> None:
    clock = AheadClock()
    harness = Harness(config)
    harness.certificate_clock = clock
    async with harness, channel_of(harness) as channel:
        context = client_context(config.tls_files("alice"))
        place = Address("127.0.0.1", channel.port) if listener == "channel" else config.replica("r1").api
        reader, writer = await asyncio.open_connection(place.host, place.port, ssl=context, server_hostname="127.0.0.1")
        if listener == "channel":
            assert await reader.read(1)  # greeting of the replica
        else:
            path = "/v1/events" if listener != "api" else "/healthz"
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert harness.service.peers.count == 1
        clock.ahead = lifetime_us(config, "alice") + 1_000_000
        await read_to_end(reader)
        assert harness.service.peers.count == 0
        writer.close()

        # TLS rejects later peers by the machine's clock, and this code rejects them by the replica's clock.
        assert (await harness.ask("GET", "/v1/jobs", who="alice")).status == 401
        answer = await harness.ask("GET", "/v1/jobs", who="bob")
        assert "has expired; issue a new one" in answer.sentence


@story
async def test_ended_connections_are_no_longer_watched(config: Config) -> None:
    async with Harness(config) as harness, channel_of(harness) as channel:
        context = client_context(config.tls_files("alice"))
        for place in (Address("127.0.0.1", channel.port), config.replica("r1").api):
            reader, writer = await asyncio.open_connection(
                place.host, place.port, ssl=context, server_hostname="127.0.0.1"
            )
            if place.port == channel.port:
                assert await reader.read(1)
            else:
                writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                await read_to_end(reader)
            writer.close()
        async with asyncio.timeout(20):
            while harness.service.peers.count:
                await asyncio.sleep(0.01)
