"""Renewing and revoking certificates of a running cluster with real processes and commands."""

import asyncio
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.cluster.schemas import operations as ops
from forebay.cluster.security.certificates import certificate_of
from forebay.cluster.security.tls import client_context
from tests.faults.bare import REPLICAS, USER, BareCluster

FOREBAY = Path(sys.executable).with_name("forebay")
TIMEOUT_S = 60
"""Time limit of a step, seconds: it detects a hang."""


def typed(site: BareCluster, *words: str) -> str:
    line = [str(FOREBAY), "--config", str(site.file), "--identity", "operator", *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


async def shown(site: BareCluster, name: str, who: str) -> str:
    """Return the serial number of a replica's certificate.

    Raise ConnectionError or ssl.SSLError if it rejects `who`.
    """
    place = site.config.replica(name).api
    context = client_context(site.config.tls_files(who))
    reader, writer = await asyncio.open_connection(place.host, place.port, ssl=context, server_hostname=place.host)
    try:
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        if not (await reader.read(16)).startswith(b"HTTP/1.1 200"):
            raise ConnectionRefusedError(who)
        return str(writer.get_extra_info("peercert")["serialNumber"]).lower().lstrip("0")
    finally:
        writer.close()


async def until_shown(site: BareCluster, name: str, who: str) -> None:
    """Wait until a replica presents the certificate in its file to `who`."""
    wanted = certificate_of(site.directory / "tls", name).serial
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                if await shown(site, name, who) == wanted:
                    return
            except (OSError, ssl.SSLError):
                pass
            await asyncio.sleep(0.05)


async def works(site: BareCluster) -> None:
    """Check that a confirmed leader answers a user, and that all processes run."""
    async with site.client(USER) as client:
        await site.leader(client)
    site.check_running()


async def renewing(site: BareCluster) -> None:
    site.start_all()
    await works(site)
    pids = {name: process.pid for name, process in site.processes.items()}

    # A replica's certificate is renewed at once by a signal, or by itself.
    for name in REPLICAS:
        typed(site, "cert", "issue", name, "--role", "replica", "--replace")
        await until_shown(site, name, USER)
        await works(site)

    # The authority is renewed: distribute the new ca.pem, issue all certificates again, retire the former authority.
    former = site.directory / "former"
    typed(site, "cert", "issue", "late", "--role", "user", "--into", str(former))
    typed(site, "cert", "renew-authority")
    await works(site)
    for name in REPLICAS:
        typed(site, "cert", "issue", name, "--role", "replica", "--replace")
        await until_shown(site, name, "operator")
        await works(site)
    for name, role in ((USER, "user"), ("operator", "operator")):
        typed(site, "cert", "issue", name, "--role", role, "--replace")
    await works(site)
    typed(site, "cert", "retire-authority", "--yes")
    async with asyncio.timeout(TIMEOUT_S):
        for name in REPLICAS:
            context = client_context(site.config.tls_files(USER))
            stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            stranger.load_verify_locations(site.directory / "tls" / "ca.pem")
            stranger.load_cert_chain(former / "late.pem", former / "late.key")
            place = site.config.replica(name).api
            assert context
            while True:
                try:
                    reader, writer = await asyncio.open_connection(
                        place.host, place.port, ssl=stranger, server_hostname=place.host
                    )
                    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                    refused = await reader.read(16) == b""
                    writer.close()
                except (OSError, ssl.SSLError):
                    refused = True
                if refused:
                    break
                await asyncio.sleep(0.05)
    await works(site)
    assert {name: process.pid for name, process in site.processes.items()} == pids, "nothing was started again"


async def revoking(site: BareCluster) -> None:
    site.start_all()
    await works(site)
    context = client_context(site.config.tls_files(USER))
    open_ones = []
    for replica in site.config.replicas:
        reader, writer = await asyncio.open_connection(
            replica.api.host, replica.api.port, ssl=context, server_hostname=replica.api.host
        )
        writer.write(b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 ")
        open_ones.append((reader, writer))
    typed(site, "cert", "revoke", str(site.directory / "tls" / f"{USER}.pem"), "--reason", "lost")
    assert "lost" in typed(site, "cert", "revocations")
    async with asyncio.timeout(TIMEOUT_S):
        for reader, writer in open_ones:
            try:
                while await reader.read(65536):
                    pass
            except (OSError, ssl.SSLError):
                pass
            writer.close()
    for name in REPLICAS:
        with pytest.raises((OSError, ssl.SSLError)):
            await shown(site, name, USER)

    # The list is replicated and durable: who comes back knows it. And a member whose former certificate was stolen is
    # given another, and the former is revoked while it runs.
    site.kill("r2")
    site.start("r2")
    async with site.client("operator") as client:
        await site.agreed(client)
        with pytest.raises((OSError, ssl.SSLError)):
            await shown(site, "r2", USER)
        stolen = certificate_of(site.directory / "tls", "r3").serial
        typed(site, "cert", "issue", "r3", "--role", "replica", "--replace")
        await until_shown(site, "r3", "operator")
        typed(site, "cert", "revoke", f"serial:{stolen}")
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                members = await client.call(ops.LIST_MEMBERS)
                if all(member.reachable for member in members.members):
                    break
                await asyncio.sleep(0.05)
        await site.agreed(client)


@pytest.mark.campaign(4)
@pytest.mark.parametrize("story", [renewing, revoking])
def test_certificates_are_renewed_and_revoked_on_a_running_cluster(tmp_path: Path, story: object) -> None:
    site = BareCluster(tmp_path / "c")
    site.found()
    try:
        asyncio.run(story(site))  # type: ignore[operator]
    finally:
        site.stop_all()
