"""Who one is without a certificate: what a gateway may say, what MUNGE vouches for, and whom that makes an operator."""

import asyncio
import contextlib
import json
import os
import pwd
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from forebay.cluster.api.web import AccessRules, IdentityAssertions
from forebay.cluster.api.web.connections import network_of
from forebay.cluster.client.access_methods import GatewayAccess, MungeAccess
from forebay.cluster.client.client import Client
from forebay.cluster.client.errors import ApiError
from forebay.cluster.client.own_account import Credential
from forebay.cluster.config.accounts import AccessTable
from forebay.cluster.config.config import Config
from forebay.cluster.gateway.service import CONNECTIONS_PER_ACCOUNT_MAX, Gateway
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.operations import OPERATIONS
from forebay.cluster.security.files import NO_CERTIFICATE, TlsFiles
from forebay.cluster.security.identity import Role
from forebay.cluster.security.munge import Munge, MungeError, purpose_of
from forebay.cluster.security.tls import authority_context
from forebay.cluster.system.clock import SystemClock
from forebay.replica.messages import ActorRole
from tests.cluster.api.test_permissions import WHO, target
from tests.cluster.harness import Harness, story, until
from tests.logs import lines_of

GROUPS = {("olga", "ops"), ("alice", "hpc")}
ME = pwd.getpwuid(os.geteuid()).pw_name


def with_access(config: Config, **fields: Any) -> Config:
    return msgspec.structs.replace(config, access=AccessTable(**fields))


def vouching(config: Config, accounts: dict[int, str] | None = None) -> IdentityAssertions:
    known = accounts or {os.geteuid(): ME}
    rules = AccessRules.of(config.access)
    return IdentityAssertions(rules, config.cluster.id, member=lambda asked: asked in GROUPS, account=known.get)


@contextlib.asynccontextmanager
async def serving(config: Config, **fields: Any) -> AsyncIterator[Harness]:
    async with Harness(with_access(config, **fields)) as harness:
        harness.core.vouching = vouching(harness.config)
        yield harness


def speaking(*accounts: str) -> dict[str, Any]:
    return {"who": "local", "headers": {"Forebay-User": ", ".join(accounts)}} if accounts else {"who": "local"}


@story
async def test_a_name_is_believed_from_a_gateway_alone_and_gives_what_that_person_may_do(config: Config) -> None:
    """The law over (role of the certificate) x (claimed account) x (operation)."""
    claims = {"alice": Role.USER, "olga": Role.OPERATOR, "operator": Role.USER, "r1": Role.USER, "root": Role.USER}
    async with serving(config, operators=("%ops",)) as harness:
        await harness.submit(hold=True)
        for route in OPERATIONS.values():
            body: dict[str, Any] | None = {} if route.has_body else None
            for account, role in claims.items():
                allowed = role in route.roles
                if allowed and not route.has_body and route.path not in ("/v1/jobs", "/v1/nodes"):
                    continue  # who may ask is decided before; what is answered, elsewhere
                revision = harness.controller.state.revision
                answer = await harness.ask(route.method, target(route), body, **speaking(account))
                asked = f"{account} {route.method} {route.path}: {answer}"
                if not allowed:
                    assert (answer.status, answer.code) == (403, "permission_denied"), asked
                    assert f"{role} {account} may not" in answer.sentence, asked
                    assert harness.controller.state.revision == revision, asked
                else:
                    assert answer.status != 401, asked
                    assert answer.status != 403 or "may not" not in answer.sentence, asked
            for role, name in WHO.items():
                if role is not Role.GATEWAY:
                    named = {"Forebay-User": "alice"}
                    answer = await harness.ask(route.method, target(route), body, who=name, headers=named)
                    assert answer.status == 403, (role, route.path, answer)
                    assert answer.sentence == f"{role} {name} may not act for a user"


@story
async def test_a_gateway_that_names_nobody_or_two_or_what_is_no_name_is_refused(config: Config) -> None:
    async with serving(config) as harness:
        for accounts in ((), ("alice", "bob"), ("../alice",), ("alice smith",), ("",)):
            answer = await harness.ask("GET", "/v1/jobs", **speaking(*accounts))
            assert answer.status in (401, 403), (accounts, answer)
        session = harness.session("local")
        twice = [("Forebay-User", "alice"), ("Forebay-User", "bob")]
        async with session.get(f"{harness.url}/v1/jobs", headers=twice) as response:
            assert response.status == 401


@pytest.mark.parametrize(
    ("fields", "account", "role"),
    [
        ({}, "olga", Role.USER),
        ({"operators": ("%ops",)}, "olga", Role.OPERATOR),
        ({"operators": ("%ops",)}, "alice", Role.USER),
        ({"operators": ("ops",)}, "olga", Role.USER),
        ({"operators": ("olga",)}, "olga", Role.OPERATOR),
        ({"operators": ("%ops",), "operators_through": ("login9",)}, "olga", Role.USER),
        ({"operators": ("%ops",), "operators_through": ("login9", "local")}, "olga", Role.OPERATOR),
        ({"operators": ("%ops",), "operators_through": ()}, "olga", Role.USER),
        ({"operators": ("%ops",)}, "root", Role.USER),
        ({"users": ("%hpc",)}, "alice", Role.USER),
        ({"users": ("%hpc",)}, "bob", None),
        ({"users": ("%hpc",), "operators": ("%ops",)}, "olga", Role.OPERATOR),
        ({"users": ("%hpc",), "operators": ("%ops",), "operators_through": ("login9",)}, "olga", None),
    ],
)
def test_who_is_an_operator_is_what_this_replica_finds_in_its_groups(
    config: Config, fields: dict[str, Any], account: str, role: Role | None
) -> None:
    @story
    async def ask() -> None:
        async with serving(config, **fields) as harness:
            drained = await harness.ask("POST", "/v1/nodes/n1/drain", {}, **speaking(account))
            listed = await harness.ask("GET", "/v1/jobs", **speaking(account))
            assert (drained.status == 400) is (role is Role.OPERATOR), drained
            assert (listed.status == 200) is (role is not None), listed

    ask()


@story
async def test_the_ledger_says_whose_command_it_was_and_never_the_gateways(config: Config) -> None:
    async with serving(config, operators=("%ops",)) as harness:
        for account in ("alice", "olga"):
            answer = await harness.ask("POST", "/v1/jobs", harness.job(), **speaking(account))
            assert answer.status == 201, answer
        refused = await harness.ask("POST", "/v1/jobs", harness.job(user="bob"), **speaking("alice"))
        assert refused.status == 403
        actors = [
            entry.actor for one in await harness.applied() if one.batch for entry in one.batch.entries if entry.id
        ]
        assert [(one.role, one.name) for one in actors][-2:] == [
            (ActorRole.USER, "alice"),
            (ActorRole.OPERATOR, "olga"),
        ]
        assert {job.request.user for job in harness.controller.state.jobs.values()} == {"alice", "olga"}


@story
async def test_two_users_of_one_gateway_do_not_see_what_is_private(config: Config) -> None:
    async with serving(config) as harness:
        settings = [{"key": "Flags", "value": "PrivateData"}]
        body = {"command_id": harness.new_id(), "settings": settings, "partial": True}
        assert (await harness.ask("POST", "/v1/configuration", body)).status < 300
        job = (await harness.ask("POST", "/v1/jobs", harness.job(), **speaking("alice"))).body["job_id"]
        for account, status in (("alice", 200), ("bob", 403), ("alice", 200)):
            found = await harness.ask("GET", f"/v1/jobs/{job}/history", **speaking(account))
            assert found.status == status, (account, found)


@story
async def test_a_user_who_is_revoked_or_whose_gateway_is_does_not_come_in(config: Config) -> None:
    async with serving(config) as harness:
        for certificate, account, status in (
            ("user:alice", "alice", 401),
            ("user:alice", "bob", 200),
            ("gateway:local", "bob", 401),
        ):
            body = {"command_id": harness.new_id()}
            assert (await harness.ask("PUT", f"/v1/revocations/{certificate}", body)).status < 300
            for session in harness._sessions.values():
                await session.close()
            harness._sessions.clear()
            answer = await harness.ask("GET", "/v1/jobs", **speaking(account))
            assert answer.status == status, (certificate, account, answer)


@story
async def test_a_user_has_the_limits_of_one_whichever_way_he_comes(config: Config) -> None:
    limits = msgspec.structs.replace(config.limits, commands_per_minute=2)
    async with serving(msgspec.structs.replace(config, limits=limits)) as harness:
        ways: list[dict[str, Any]] = [speaking("alice"), {"who": "alice"}, speaking("alice"), speaking("bob")]
        found = [(await harness.ask("POST", "/v1/jobs", harness.job(), **way)).status for way in ways]
        assert found == [201, 201, 429, 201]


# The gateway itself ---------------------------------------------------------------------------------------------------


@pytest.fixture
def passable() -> Iterator[Path]:
    """A directory that every account of the machine may pass."""
    with tempfile.TemporaryDirectory(prefix="forebay-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextlib.asynccontextmanager
async def gateway(config: Config, path: Path) -> AsyncIterator[Gateway]:
    found = Gateway(config, config.tls_files("local"), path, SystemClock())
    await found.start()
    try:
        yield found
    finally:
        await found.stop()


def asked_of(path: Path, request: bytes, uid: int) -> bytes:
    """Return what the gateway answers to these bytes of a process of this account."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            if uid != os.geteuid():
                os.setgroups([])
                os.setresuid(uid, uid, uid)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                connection.sendall(request)
                while data := connection.recv(65536):
                    os.write(write, data)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return data


@story
async def _one_is_who_the_kernel_says(config: Config, path: Path) -> None:
    import asyncio

    async with serving(config, operators=("%ops",)) as harness, gateway(harness.config, path):
        where = str(harness.config.replica("r1").api)
        accounts = {os.geteuid(): ME} | ({1: pwd.getpwuid(1).pw_name} if os.geteuid() == 0 else {})
        for uid, account in accounts.items():
            body = msgspec.json.encode(harness.job())
            head = (
                f"POST /v1/jobs HTTP/1.1\r\nHost: {where}\r\nContent-Type: application/json\r\nForebay-User: olga\r\n"
                f"Authorization: MUNGE x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            told = await asyncio.to_thread(asked_of, path, head.encode() + body, uid)
            assert told.startswith(b"HTTP/1.1 201"), told
            assert {job.request.user for job in harness.controller.state.jobs.values()} >= {account}
        assert "olga" not in {job.request.user for job in harness.controller.state.jobs.values()}
        for line, status in (
            (f"GET /v1/jobs HTTP/1.1\r\nHost: {where}1", b"421"),
            (f"GET http://{where}/v1/jobs HTTP/1.1\r\nHost: {where}", b"404"),
            (f"GET /metrics HTTP/1.1\r\nHost: {where}", b"404"),
        ):
            request = f"{line}\r\nConnection: close\r\n\r\n".encode()
            told = await asyncio.to_thread(asked_of, path, request, os.geteuid())
            assert told.split()[1] == status, told


def test_one_is_who_the_kernel_says_whatever_one_sends(config: Config, passable: Path) -> None:
    _one_is_who_the_kernel_says(config, passable / "gateway.sock")


@story
async def test_a_client_asks_by_the_gateway_with_and_without_a_loop(config: Config, fast_path: Path) -> None:
    import asyncio

    path = fast_path / ("long" * 30) / "gateway.sock"
    path.parent.mkdir()
    async with serving(config) as harness, gateway(harness.config, path):
        way = GatewayAccess(path, frozenset({os.geteuid()}))
        endpoints = harness.config.endpoints

        def without() -> int:
            from forebay.cluster.client.calls import finish

            client = Client(endpoints, way, blocking=True)
            held = finish(client.call(ops.SUBMIT_JOB, msgspec.convert(harness.job(), ops.SUBMIT_JOB.request)))
            finish(client.call(ops.LIST_JOBS))
            finish(client.close())
            return held.job_id

        job = await asyncio.to_thread(without)
        assert harness.controller.state.jobs[job].request.user == ME
        async with Client(endpoints, way) as client:
            assert [row.job_id for row in (await client.call(ops.LIST_JOBS)).jobs] == [job]
            async with contextlib.aclosing(client.events()) as events:
                async for event in events:
                    if event.job_id == job:
                        break
        await harness.server.stop()
        for blocking in (False, True):
            late = Client(endpoints, way, blocking=blocking, unreachable_s=0.0)
            with pytest.raises(ApiError, match="nothing listens at"):
                call = late.call(ops.LIST_JOBS)
                await (asyncio.to_thread(asyncio.run, call) if blocking else call)


@story
async def test_one_account_does_not_use_up_the_gateway(config: Config, fast_path: Path) -> None:
    path = fast_path / "gateway.sock"
    async with serving(config) as harness, gateway(harness.config, path):
        connector = aiohttp.UnixConnector(str(path), limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            where = str(harness.config.replica("r1").api)
            held = [socket.socket(socket.AF_UNIX) for _ in range(CONNECTIONS_PER_ACCOUNT_MAX)]
            for one in held:
                one.connect(str(path))
            async with session.get(f"http://{where}/v1/jobs") as response:
                assert response.status == 429
                assert "connections open already" in await response.text()
            for one in held:
                one.close()
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session:

            async def asked() -> int:
                async with session.get(f"http://{where}/v1/jobs") as response:
                    return response.status

            statuses: list[int] = []
            while 200 not in statuses[-1:]:
                statuses.append(await asked())
                assert set(statuses) <= {200, 429}


def test_what_is_no_request_costs_a_gateway_one_line_that_names_the_uid(
    config: Config, passable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        path = passable / "gateway.sock"
        async with gateway(config, path):
            for head in (b"nonsense", b"GET /" + b"x" * 100_000 + b" HTTP/1.1", b"GET / HTTP/1.1\r\nno colon") * 7:
                answer = await asyncio.to_thread(asked_of, path, head + b"\r\n\r\n", 1001)
                assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400", b"HTTP/1.1 431", b"HTTP/1.0 431")), answer
                assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["remedy"]

    asyncio.run(run())
    (said,) = lines_of(caplog, "forebay.cluster.gateway.service")
    assert said.startswith("a request of uid 1001 is rejected: ") and len(said) < 200


# MUNGE ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def munged() -> Iterator[Path]:
    """The socket of a munged with a key of its own, run by an ordinary account where that can be."""
    with tempfile.TemporaryDirectory(prefix="forebay-test-") as name:
        directory, options = Path(name), dict[str, Any]()
        directory.chmod(0o755)
        (directory / "key").write_bytes(os.urandom(128))
        (directory / "key").chmod(0o600)
        if os.geteuid() == 0:
            options = {"user": 1, "group": 1, "extra_groups": []}
            for path in (directory, directory / "key"):
                os.chown(path, 1, 1)
        files = {word: directory / word for word in ("key", "pid", "log", "seed")}
        words = [f"--{word}-file={path}" for word, path in files.items()]
        command = ["/usr/sbin/munged", "--foreground", "--force", f"--socket={directory / 's'}", *words]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options) as daemon:
            assert daemon.stderr is not None
            for line in daemon.stderr:
                if b"work thread" in line or b"Found" in line:
                    break
            try:
                yield directory / "s"
            finally:
                daemon.terminate()
                daemon.stderr.read()


def munge_way(harness: Harness, munged: Path) -> MungeAccess:
    files = TlsFiles(harness.config.tls.authority, NO_CERTIFICATE, NO_CERTIFICATE)
    return MungeAccess(files, harness.config.cluster.id, munged)


def test_a_credential_is_good_once_for_one_request_to_one_replica(config: Config, munged: Path) -> None:
    @story
    async def ask() -> None:
        async with serving(config, munge=True, munge_socket=munged) as harness:
            replica = harness.config.replica("r1").api
            credential = Credential(munge_way(harness, munged))
            context = authority_context(harness.config.tls.authority)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:

                async def sent(authorization: str | None, target: str = "/v1/jobs", body: bytes | None = None) -> int:
                    headers = {"Authorization": authorization} if authorization is not None else {}
                    headers |= {"Content-Type": "application/json"} if body else {}
                    method = "GET" if body is None else "POST"
                    async with session.request(method, harness.url + target, headers=headers, data=body) as response:
                        return response.status

                good = credential.header(replica, "GET", "/v1/jobs", None)
                assert [await sent(good), await sent(good)] == [200, 401]
                body = msgspec.json.encode(harness.job())
                assert await sent(credential.header(replica, "POST", "/v1/jobs", body), body=body) == 201
                assert harness.controller.state.jobs[1].request.user == ME
                other = msgspec.structs.replace(replica, port=replica.port + 1)
                elsewhere = Credential(msgspec.structs.replace(munge_way(harness, munged), cluster_id="0" * 32))
                mine = Munge(munged).encode
                for relayed in (
                    credential.header(other, "GET", "/v1/jobs", None),
                    credential.header(replica, "GET", "/v1/nodes", None),
                    credential.header(replica, "POST", "/v1/jobs", None),
                    credential.header(replica, "GET", "/v1/jobs", b"{}"),
                    elsewhere.header(replica, "GET", "/v1/jobs", None),
                    f"MUNGE {mine(b'')}",
                    "MUNGE MUNGE:AAAA:",
                    "MUNGE ",
                    "Basic YTpi",
                    None,
                ):
                    assert await sent(relayed) == 401, relayed
                changed = msgspec.json.encode(harness.job(name="another"))
                stolen = credential.header(replica, "POST", "/v1/jobs", body)
                assert await sent(stolen, body=changed) == 401
                assert len(harness.controller.state.jobs) == 1
                headers = {"Authorization": credential.header(replica, "GET", "/v1/jobs", None)}
                assert (await harness.ask("GET", "/v1/jobs", who="alice", headers=headers)).status == 400
                named = {**headers, "Forebay-User": "olga"}
                async with session.get(f"{harness.url}/v1/jobs", headers=named) as response:
                    assert response.status == 401

    ask()


@pytest.mark.parametrize(("through", "status"), [(None, 403), (("munge",), 404), (("local",), 403)])
def test_munge_makes_no_operator_unless_the_site_says_so(
    config: Config, munged: Path, through: tuple[str, ...] | None, status: int
) -> None:
    @story
    async def ask() -> None:
        fields: dict[str, Any] = {"operators": (ME,), "operators_through": through}
        async with serving(config, munge=True, munge_socket=munged, **fields) as harness:
            async with Client(harness.config.endpoints, munge_way(harness, munged)) as client:
                assert (await client.call(ops.LIST_JOBS)).jobs == ()
                with pytest.raises(ApiError) as refused:
                    await client.call(ops.RESUME_NODE, name="nobody")
                assert refused.value.status == status

    ask()


@story
async def test_who_shows_nothing_and_says_nothing_is_cut(config: Config) -> None:
    """A stranger holds no place for long: he has as little time as his head may take."""
    from forebay.cluster.api.web.connections import STRANGER_S_MAX, ApiConnection

    async with serving(config, munge=True) as harness:
        context = authority_context(harness.config.tls.authority)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
            async with session.get(f"{harness.url}/v1/jobs") as response:
                assert response.status == 401
            guarded = harness.server._guarded  # type: ignore[union-attr]
            assert guarded is not None
            [connection] = guarded.connections
            assert isinstance(connection, ApiConnection)
            assert (list(guarded.strangers), connection.holder) == (["nobody at 127.0.0.1"], "nobody at 127.0.0.1")
            connection.made_s -= STRANGER_S_MAX + 1
            guarded.sweep()
            await until(lambda: not guarded.strangers)


@story
async def test_connections_that_say_nothing_keep_no_other_of_their_address_out(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.cluster.api.web.connections.CONNECTIONS_OF_A_STRANGER_MAX", 6)
    async with serving(config, munge=True) as harness:
        context = authority_context(harness.config.tls.authority)
        api = harness.config.replica("r1").api
        guarded = harness.server._guarded  # type: ignore[union-attr]
        assert guarded is not None
        silent = []
        for number in range(1, 20):
            silent.append(await asyncio.open_connection(api.host, harness.server.port, ssl=context))  # type: ignore[union-attr]
            await until(lambda number=number: sum(map(len, guarded.strangers.values())) == min(number, 6))
        for _ in range(3):
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
                async with session.get(f"{harness.url}/v1/jobs") as response:
                    assert response.status == 401
        # Those that were silent for longest have gone.
        for reader, _ in silent[:12]:
            assert await reader.read() == b""
        for _, writer in silent:
            writer.close()


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9%eth0", "2001:db8:1:2::/64"),
        ("", ""),
    ],
)
def test_strangers_are_counted_by_what_a_site_is_given(host: str, network: str) -> None:
    assert network_of(host) == network


def test_a_credential_that_is_too_old_is_refused_however_long_its_maker_lets_it_live(
    munged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    munge = Munge(munged)
    monkeypatch.setattr(Munge, "_number", lambda self, context, option: {6: 1_000, 7: 1_061}[option])
    with pytest.raises(MungeError, match="61 s old"):
        munge.decode(munge.encode(purpose_of("c", "s", "GET", "/", b"")))


class BehindADoor(Harness):
    """The same replica with a process of its own in front."""

    api_workers = 1


def test_a_door_believes_what_the_replica_would(config: Config, munged: Path) -> None:
    @story
    async def ask() -> None:
        own = {"operators": ("olga",), "users": ("olga", "alice", ME), "munge": True, "munge_socket": munged}
        async with BehindADoor(with_access(config, **own)) as harness:
            for account, listed, resumed in (("olga", 200, 404), ("alice", 200, 403), ("bob", 403, 403)):
                assert (await harness.ask("GET", "/v1/jobs", **speaking(account))).status == listed
                body = {"command_id": harness.new_id()}
                answer = await harness.ask("POST", "/v1/nodes/nobody/resume", body, **speaking(account))
                assert answer.status == resumed, (account, answer)
            assert (await harness.ask("GET", "/v1/jobs", **speaking())).status == 401
            assert (await harness.ask("GET", "/v1/jobs", who="alice", headers={"Forebay-User": "olga"})).status == 403
            way = munge_way(harness, munged)
            async with Client(harness.config.endpoints, way) as client:
                await client.call(ops.SUBMIT_JOB, msgspec.convert(harness.job(), ops.SUBMIT_JOB.request))
            assert {job.request.user for job in harness.controller.state.jobs.values()} == {ME}
            assert (
                await harness.ask("PUT", "/v1/revocations/user:alice", {"command_id": harness.new_id()})
            ).status < 300
            assert (await harness.ask("GET", "/v1/jobs", **speaking("alice"))).status == 401
            assert (await harness.ask("GET", "/v1/jobs", **speaking("olga"))).status == 200

    ask()


@story
async def test_a_stream_ends_when_its_user_is_revoked_and_other_users_streams_go_on(config: Config) -> None:
    async with serving(config) as harness:
        session = harness.session("local")

        async def stream(account: str) -> aiohttp.ClientResponse:
            found = await session.get(f"{harness.url}/v1/events", headers={"Forebay-User": account})
            assert found.status == 200
            return found

        hers, his = await stream("alice"), await stream("bob")
        body = {"command_id": harness.new_id()}
        assert (await harness.ask("PUT", "/v1/revocations/user:alice", body)).status < 300
        with pytest.raises(aiohttp.ClientError):
            await hers.read()
        first = await his.content.readany()
        assert first and not his.content.is_eof()
        his.close()
