"""Fixtures of the client's tests: two clusters' certificates, and an address that nobody serves."""

import socket
from collections.abc import Iterator

import pytest

from cluster.system.address import Address
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
