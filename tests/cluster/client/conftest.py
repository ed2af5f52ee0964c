"""Fixtures of the client's tests: two clusters' certificates, and an address that nobody serves."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from forebay.cluster.client import client as client_module
from forebay.cluster.client.attempt import HttpResponse
from forebay.cluster.client.blocking import BlockingExchange
from forebay.cluster.client.calls import finish
from forebay.cluster.security.tls import TlsFiles
from forebay.cluster.system.address import Address
from forebay.cluster.system.clock import Clock, SystemClock
from tests.cluster.client.misbehaving import Pki


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki") / "tls", "demo")


@pytest.fixture(scope="session")
def foreign_pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("foreign") / "tls", "mars")


@pytest.fixture
def free_address() -> Iterator[Address]:
    """An address at which nobody listens, and nobody else can while the test runs."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield Address("127.0.0.1", int(reserved.getsockname()[1]))


class InThreads:
    """A blocking exchange for a client on a loop: the servers of these tests run on the same one."""

    def __init__(self, tls: TlsFiles, clock: Clock) -> None:
        # The certificate is looked at on the clock of the test; sockets wait on the machine's.
        BlockingExchange(tls, clock)
        self._exchange = BlockingExchange(tls, SystemClock())

    async def send(
        self, address: Address, method: str, target: str, body: bytes | None, *, timeout_s: float, connect_s: float
    ) -> HttpResponse:
        sending = self._exchange.send(address, method, target, body, timeout_s=timeout_s, connect_s=connect_s)
        return await asyncio.to_thread(finish, sending)

    async def close(self) -> None:
        await self._exchange.close()


@pytest.fixture(params=["on a loop", "blocking"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have clients send their requests one way, and then the other: what comes of a call must be the same."""
    if request.param == "blocking":
        monkeypatch.setattr(client_module, "_on_a_loop", InThreads)
