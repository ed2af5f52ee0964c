"""Witness process: asked over HTTP by any client, with bounded use of resources."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import create_authority, issue
from forebay.cluster.security.proofs import MAX_REQUEST_BYTES, SIZE_TYPE, cosignature_in, parse_key
from forebay.cluster.security.tls import open_client_context, open_server_context
from forebay.cluster.system.address import Address
from forebay.cluster.system.clock import SystemClock
from forebay.cluster.witness import (
    CheckpointStore,
    CheckpointWitness,
    WitnessServer,
    log_of,
    make_key,
    read_key,
)
from forebay.cluster.witness import server as server_module
from tests.cluster.audit.ledgers import real
from tests.cluster.harness import PATIENCE_S, story
from tests.cluster.witness.logs import ORIGIN, MemoryLog, keys_of
from tests.logs import lines_of
from tests.ports import free_port

SOUND = MemoryLog(300)
ADDED = b"POST /add-checkpoint HTTP/1.1\r\nHost: w\r\nContent-Length: %d\r\n\r\n%s"


class Reply:
    def __init__(self, held: bytes) -> None:
        head, _, self.body = held.partition(b"\r\n\r\n")
        self.head = head.decode()
        self.status = int(self.head.split(" ")[1]) if head else 0


@contextlib.asynccontextmanager
async def listening(directory: Path, tls: Callable[[], ssl.SSLContext] | None = None):  # type: ignore[no-untyped-def]
    public = make_key(directory / "w", "witness.example/w1")
    CheckpointStore.create(directory / "w.db", str(public))
    seen = CheckpointStore(directory / "w.db", str(public))
    witness = CheckpointWitness(*read_key(directory / "w"), [log_of(ORIGIN, keys_of(3))], seen, SystemClock())
    address = Address("127.0.0.1", free_port())
    server = WitnessServer(witness, address, tls)
    await server.start()
    try:
        yield server, address
    finally:
        await server.stop()
        seen.close()


async def sent(address: Address, held: bytes, context: ssl.SSLContext | None = None) -> Reply:
    """Send bytes; return the received bytes when the other end closes or one answer is complete."""
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
    try:
        writer.write(held)
        found = b""
        async with asyncio.timeout(PATIENCE_S):
            while part := await reader.read(65536):
                found += part
                head, empty, body = found.partition(b"\r\n\r\n")
                if empty and len(body) >= int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]):
                    break
        return Reply(found)
    finally:
        writer.close()


@story
async def test_requests_are_answered_over_one_connection_or_many(tmp_path: Path) -> None:
    async with listening(tmp_path) as (_, address):

        async def asked(old_size: int, size: int, log: MemoryLog = SOUND) -> Reply:
            body = log.asked(old_size, size)
            return await sent(address, ADDED % (len(body), body))

        assert (await asked(0, 100)).status == 200
        conflict = await asked(0, 200)
        assert (conflict.status, conflict.body) == (409, b"100\n")
        assert f"Content-Type: {SIZE_TYPE}" in conflict.head
        assert (await asked(100, 200, MemoryLog(200, forked_from=40))).status == 422
        assert (await asked(0, 200, MemoryLog(200, origin="forebay/c2"))).status == 404
        assert (await sent(address, ADDED % (3, b"old"))).status == 400
        assert (await sent(address, b"GET /add-checkpoint HTTP/1.1\r\nHost: w\r\n\r\n")).status == 405
        assert (await sent(address, b"GET / HTTP/1.1\r\nHost: w\r\n\r\n")).status == 404
        assert (await sent(address, b"nonsense\r\n\r\n")).status == 400


@story
async def test_request_without_a_length_or_too_large_is_not_read(tmp_path: Path) -> None:
    async with listening(tmp_path) as (server, address):
        head = b"POST /add-checkpoint HTTP/1.1\r\nHost: w\r\nContent-Length: %d\r\n\r\n"
        assert (await sent(address, head % (MAX_REQUEST_BYTES + 1))).status == 413
        assert (await sent(address, head % (1 << 62))).status == 413
        chunked = b"POST /add-checkpoint HTTP/1.1\r\nHost: w\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nold 0\r\n"
        assert (await sent(address, chunked)).status == 411
        packed = b"POST /add-checkpoint HTTP/1.1\r\nHost: w\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"
        assert (await sent(address, packed)).status == 415
        assert (await sent(address, b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n")).status == 431
        body = SOUND.asked(0, 10)
        assert (await sent(address, ADDED % (len(body), body))).status == 200


@story
async def test_invalid_request_adds_one_line_to_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with listening(tmp_path) as (_, address):
        for _ in range(20):
            reply = await sent(address, b"nonsense\r\n\r\n")
            assert (reply.status, "Server: forebay-witness" in reply.head) == (400, True)
        (said,) = lines_of(caplog, "forebay.cluster.witness.server")
        assert said.startswith("a request of 127.0.0.1 is rejected: ") and len(said) < 200


@story
async def test_silent_and_slow_clients_block_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CONNECTIONS_MAX", 8)
    async with listening(tmp_path) as (server, address):
        opened = [await asyncio.open_connection(address.host, address.port) for _ in range(12)]
        for number, (_, writer) in enumerate(opened):
            slow = (b"", b"POST /add", ADDED[:-2] % 4000)[number % 3]
            writer.write(slow)
        for size in range(1, 20):
            body = SOUND.asked(size - 1, size)
            assert (await sent(address, ADDED % (len(body), body))).status == 200
            assert server.connections <= 9
        monkeypatch.setattr(server_module, "REQUEST_S_MAX", 0.0)
        monkeypatch.setattr(server_module, "REST_S_MAX", 0.0)
        for _, writer in opened:
            writer.close()
        last = await asyncio.open_connection(address.host, address.port)
        last[1].write(b"POST /add")
        async with asyncio.timeout(PATIENCE_S):
            while await last[0].read(1):
                pass
            while server.connections:
                await asyncio.sleep(0.05)
        last[1].close()


@story
async def test_witness_shows_a_certificate_and_requires_none(tmp_path: Path) -> None:
    at = SystemClock().now()
    authority = create_authority(tmp_path / "tls", cluster_name="others", cluster_id="0" * 32, at=at)
    issue(authority, tmp_path / "tls", role=Role.REPLICA, name="w1", at=at, addresses=("127.0.0.1",))
    files = tmp_path / "tls/w1.pem", tmp_path / "tls/w1.key"
    body = SOUND.asked(0, 10)
    async with listening(tmp_path, lambda: open_server_context(*files)) as (_, address):
        trusting = open_client_context(next((tmp_path / "tls").glob("ca.pem")))
        assert (await sent(address, ADDED % (len(body), body), trusting)).status == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            await sent(address, b"", open_client_context(None))


# The process, as it is typed -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(*words: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "forebay.cluster.cli", "run", "witness", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until_it_listens(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if "listening at" in line:
            return said
    raise AssertionError(said)


def test_witness_keeps_its_checkpoints_when_it_is_killed_and_restarted(tmp_path: Path) -> None:
    made = real("audit", "witness", "key", "--key", tmp_path / "w", "--name", "witness.example/w1")
    public = parse_key(made.stdout.strip())
    assert made.returncode == 0 and public.name == "witness.example/w1"
    again = real("audit", "witness", "key", "--key", tmp_path / "w", "--name", "witness.example/w1")
    assert again.returncode == 2 and "exists already" in again.stderr
    (tmp_path / "keys").write_text("".join(f"# a replica\n{key}\n" for key in keys_of(3)))
    address = Address("127.0.0.1", free_port())
    words = ("--key", tmp_path / "w", "--listen", address, "--keys", tmp_path / "keys")
    at = 0
    for size, end in ((100, signal.SIGKILL), (200, signal.SIGTERM)):
        with running(*words) as process:
            assert "2 of 3 keys must sign" in until_it_listens(process)
            body = SOUND.asked(at, size)
            reply = asyncio.run(sent(address, ADDED % (len(body), body)))
            assert reply.status == 200
            cosignature_in(SOUND.checkpoint(size).text(), reply.body, public)
            fork = MemoryLog(300, forked_from=40).asked(size, size)
            assert asyncio.run(sent(address, ADDED % (len(fork), fork))).status == 409
            process.send_signal(end)
            assert process.wait(PATIENCE_S) == (0 if end is signal.SIGTERM else -signal.SIGKILL)
        at = size
    shown = json.loads(real("audit", "witness", "list", "--key", tmp_path / "w", "--json").stdout)
    assert [(one["origin"], one["size"]) for one in shown["logs"]] == [(ORIGIN, 200)]
    assert [one["note"] for one in shown["evidence"]] == [
        MemoryLog(300, forked_from=40).note(size).decode() for size in (100, 200)
    ]
    listed = real("audit", "witness", "list", "--key", tmp_path / "w")
    assert "REJECTED at" in listed.stderr and f"{ORIGIN}      200" in listed.stdout
    assert all(one["note"] in listed.stdout for one in shown["evidence"])


def test_sighup_reloads_the_keys_and_keeps_the_old_ones_on_errors(
    tmp_path: Path,
) -> None:
    real("audit", "witness", "key", "--key", tmp_path / "w", "--name", "witness.example/w1")
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{key}\n" for key in keys_of(3)))
    address = Address("127.0.0.1", free_port())
    with running("--key", tmp_path / "w", "--listen", address, "--keys", keys) as process:
        until_it_listens(process)
        assert process.stderr is not None
        for text, said in (
            ("no key\n", "the previous ones stay in use"),
            ("".join(f"{key}\n" for key in keys_of(5)), "3 of 5 keys must sign"),
        ):
            keys.write_text(text)
            process.send_signal(signal.SIGHUP)
            assert said in process.stderr.readline()
            assert process.poll() is None


def test_witness_that_cannot_start_reports_the_cause(tmp_path: Path) -> None:
    real("audit", "witness", "key", "--key", tmp_path / "w", "--name", "witness.example/w1")
    mine, log = ("--key", tmp_path / "w"), ("--log", f"{ORIGIN}={','.join(map(str, keys_of(3)))}")
    here = ("--listen", f"127.0.0.1:{free_port()}")
    for words, code, said in (
        ((*mine, *here), 2, "no ledger is given"),
        ((*mine, "--listen", "192.0.2.1:7600", *log), 78, "listen on loopback, behind a proxy"),
        ((*mine, *here, "--log", ORIGIN), 78, "write ORIGIN=KEY"),
        ((*mine, *here, "--log", f"other={keys_of(1)[0]}"), 78, "is not a key of a replica of other"),
        ((*mine, *here, *log, *log), 78, "each once"),
        ((*mine, *here, "--keys", tmp_path / "none"), 78, "cannot be read"),
        ((*mine, *here, *log, "--certificate", tmp_path / "none"), 78, "specify both"),
        (("--key", tmp_path / "none", *here, *log), 66, "audit witness key"),
        ((*mine, "--db", tmp_path / "none", *here, *log), 66, "must not continue with the same key"),
        ((*mine, "--listen", "203.0.113.1:1", *log, "--certificate", "x", "--certificate-key", "x"), 78, "private key"),
    ):
        found = real("run", "witness", *words)
        assert (found.returncode, said in found.stderr) == (code, True), (words, found.stderr)
