"""Attacks by connections: endless bodies, streams of the whole history, and expired certificates."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import Final

from forebay.cluster.schemas import operations as ops
from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import CERTIFICATE_LIFETIME_DAYS, Authority, issue, load_authority
from forebay.cluster.security.tls import client_context
from forebay.cluster.system.clock import SystemClock
from forebay.replica.values import Instant, seconds
from tests.faults.attacks.sites import PATIENCE_S, Reader, RunFailed, Writer, connected, ended, history, logged, works
from tests.faults.bare import BareCluster
from tests.faults.local_cluster import REPLICAS, USER

STREAMS: Final = 4
"""Streams of all history at a time, count: as many as deposed a leader once."""

CALLERS: Final = 4
"""Clients of the storm that connect at the same time, count: each of them again and again."""

LEFT_S: Final = 5
"""How long the certificate is valid that is to expire, seconds; twice as long where its connections took longer."""


async def bodies(site: BareCluster, count: int) -> dict[str, int]:
    """Begin bodies that trickle in without end and bodies that are cut off; no connection stays, and no log grows."""
    async with site.client() as client:
        leader = await site.leader(client)
        before = logged(site)
        begun = [await _begin(site, leader, b"{" * 1000) for _ in range(count)]
        for _, writer in begun:
            writer.transport.abort()
        slow = [await _begin(site, leader, b"{") for _ in range(count)]
        trickling = [asyncio.create_task(_trickle(writer)) for _, writer in slow]
        try:
            answers = [await ended(reader) for reader, _ in slow]
        finally:
            for task in trickling:
                task.cancel()
            await asyncio.gather(*trickling, return_exceptions=True)
        if not all(answer.startswith(b"HTTP/1.1 408") for answer in answers):
            raise RunFailed(f"bodies that trickle in were answered {sorted({answer[:40] for answer in answers})}")
        await works(site, client)
        grown = logged(site)[len(before) :]
        if "Traceback" in grown or len(grown.splitlines()) >= count:
            raise RunFailed(f"the log grew by {len(grown.splitlines())} lines: {grown[-500:]}")
    return {"slow": count, "cut": count}


async def heads(site: BareCluster, count: int) -> dict[str, int]:
    """Send request heads that are malformed; the log has no traceback, and no line for each."""
    malformed = (b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"\x16\x03\x01\r\n\r\n")
    async with site.client() as client:
        leader = await site.leader(client)
        before = logged(site)
        for number in range(count):
            reader, writer = await connected(site, leader, USER)
            writer.write(malformed[number % len(malformed)])
            if b" 400 " not in (said := await ended(reader))[:16]:
                raise RunFailed(f"a malformed head was answered {said[:60]!r}")
            writer.close()
        await works(site, client)
        grown = logged(site)[len(before) :]
        if "Traceback" in grown or grown.count("is rejected: this is not an HTTP/1.1 request") >= count:
            raise RunFailed(f"the log grew by {len(grown.splitlines())} lines: {grown[-500:]}")
    return {"heads": count}


async def _begin(site: BareCluster, name: str, sent: bytes) -> tuple[Reader, Writer]:
    reader, writer = await connected(site, name, USER)
    head = "POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
    writer.write(head.encode() + sent)
    await writer.drain()
    return reader, writer


async def _trickle(writer: Writer) -> None:
    with contextlib.suppress(OSError, ssl.SSLError):
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.2)


async def streams(site: BareCluster, events: int) -> dict[str, int]:
    """Read all history in several streams again and again, in a storm of clients that connect anew for each request.

    Nobody may be deposed by it, and every honest request is answered.
    """
    read = calls = 0
    async with site.client() as client:
        await site.leader(client)
        await history(client, events)
        leader = await site.leader(client)
        term = (await client.call(ops.LIST_MEMBERS)).term
        over = asyncio.Event()

        async def stream() -> int:
            size = 0
            while not over.is_set():
                reader, writer = await connected(site, leader, USER)
                writer.write(b"GET /v1/events?from=0 HTTP/1.1\r\nHost: x\r\n\r\n")
                got = b""
                # The last event of what there was: then it begins anew.
                while not over.is_set() and f'"comment":"{events - 1}"'.encode() not in got[-65536:]:
                    part = await reader.read(1 << 20)
                    if not part:
                        raise RunFailed(f"a stream ended after {size} bytes: {got[-200:]!r}")
                    got = got[-65536:] + part
                    size += len(part)
                writer.transport.abort()
            return size

        async def call() -> int:
            count = 0
            while not over.is_set():
                reader, writer = await connected(site, leader, USER)
                writer.write(b"GET /v1/jobs?limit=10000 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                if not (said := await ended(reader)).startswith(b"HTTP/1.1 200"):
                    raise RunFailed(f"a request of the storm was not answered by {leader}: {said[:400]!r}")
                writer.close()
                count += 1
            return count

        reading = [asyncio.create_task(stream()) for _ in range(STREAMS)]
        calling = [asyncio.create_task(call()) for _ in range(CALLERS)]
        try:
            for _ in range(10):
                await works(site, client)
        finally:
            over.set()
            sizes = await asyncio.gather(*reading, *calling)
        read, calls = sum(sizes[:STREAMS]), sum(sizes[STREAMS:])
        answer = await client.call(ops.LIST_MEMBERS)
        if (answer.leader, answer.term) != (leader, term):
            raise RunFailed(f"{leader} of term {term} was deposed: {answer.leader} leads in term {answer.term}")
    return {"events": events, "streamed_bytes": read, "calls": calls}


async def certificates(site: BareCluster, rounds: int) -> dict[str, int]:
    """Go on with certificates that expired or were revoked: over open connections, TLS tickets and new connections."""
    ended_count = refused = 0
    left_s = LEFT_S
    async with site.client("operator") as operator:
        await site.leader(operator)
        for number in range(rounds):
            expires, revoked = f"expires{number}", f"revoked{number}"
            who = [(name, replica) for name in (expires, revoked) for replica in REPLICAS]
            issue(_authority(site), site.directory / "tls", role=Role.USER, name=revoked, at=SystemClock().now())
            sessions: dict[tuple[str, str], _Session] = {}
            opened: list[tuple[Reader, Writer]] = []
            while not opened:
                valid_until = SystemClock().now() + seconds(left_s)
                at = Instant(valid_until - seconds(CERTIFICATE_LIFETIME_DAYS * 86_400))
                issue(_authority(site), site.directory / "tls", role=Role.USER, name=expires, at=at, replace=True)
                try:
                    sessions = {one: await asyncio.to_thread(_session, site, *one) for one in who}
                    opened = await _opened(site, who)
                except (RunFailed, OSError, ssl.SSLError):
                    if SystemClock().now() < valid_until:
                        raise
                    left_s *= 2  # this machine is too busy for the time that it was valid
            await operator.call(ops.REVOKE_CERTIFICATE, certificate=f"user:{revoked}")
            for reader, writer in opened:
                await ended(reader)
                writer.close()
                ended_count += 1
            for name, replica in who:
                for session in (sessions[name, replica], None):
                    said = await asyncio.to_thread(_ask, site, name, replica, session)
                    if said.startswith(b"HTTP/1.1 2"):
                        how = "with a ticket" if session else "anew"
                        raise RunFailed(f"{replica} answers {name} {how}: {said[:60]!r}")
                    refused += 1
        await works(site, operator)
    return {"connections_ended": ended_count, "connections_refused": refused}


def _authority(site: BareCluster) -> Authority:
    return load_authority(site.directory / "tls")


_Session = tuple[ssl.SSLContext, ssl.SSLSession]


async def _opened(site: BareCluster, who: list[tuple[str, str]]) -> list[tuple[Reader, Writer]]:
    """Return open connections of users to replicas: idle ones, and ones in a request."""
    idle = [await connected(site, replica, name) for name, replica in who]
    streaming = [await connected(site, replica, name) for name, replica in who]
    for reader, writer in streaming:
        writer.write(b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n")
        if not (await reader.readline()).startswith(b"HTTP/1.1 200"):
            raise RunFailed("a certificate that is valid was refused")
    return [*idle, *streaming]


_ASKED: Final = b"GET /v1/jobs?stale=ok HTTP/1.1\r\nHost: x\r\n\r\n"


def _session(site: BareCluster, who: str, name: str) -> _Session:
    """Return a TLS session of a certificate that is valid, with its ticket where it is given one."""
    place = site.config.replica(name).api
    context = client_context(site.config.tls_files(who))
    plain = socket.create_connection((place.host, place.port), PATIENCE_S)
    with context.wrap_socket(plain, server_hostname=place.host) as opened:
        opened.sendall(_ASKED)
        if not opened.recv(65536).startswith(b"HTTP/1.1 2"):
            raise RunFailed(f"{name} refuses {who}, whose certificate is valid")
        assert opened.session is not None
        return context, opened.session


def _ask(site: BareCluster, who: str, name: str, session: _Session | None) -> bytes:
    """Return what a replica answers on a new connection, nothing where it refuses it; `session` is resumed."""
    place = site.config.replica(name).api
    context, resumed = session or (client_context(site.config.tls_files(who)), None)
    try:
        plain = socket.create_connection((place.host, place.port), PATIENCE_S)
        with context.wrap_socket(plain, server_hostname=place.host, session=resumed) as opened:
            opened.sendall(_ASKED)
            return opened.recv(65536)
    except (OSError, ssl.SSLError):
        return b""
