"""Only another replica of the same cluster may connect to a replica (H5): by its certificate, in frames."""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from forebay.cluster.consensus import PeerTls
from forebay.cluster.consensus.frames import (
    MAX_FRAME_BYTES,
    AnyMessage,
    AppendReply,
    AppendRequest,
    Heartbeat,
    encode_frame,
)
from forebay.cluster.consensus.transport import (
    HANDSHAKE_S,
    HANDSHAKES_MAX,
    QUEUED_BYTES_MAX,
    ConnectionFailures,
    TlsLinks,
    why,
)
from forebay.cluster.security.certificates import certificate_of
from forebay.cluster.security.credentials import Credentials
from forebay.cluster.security.identity import IdentityError, Role
from forebay.cluster.security.peers import Peers
from forebay.cluster.security.pki import issue
from forebay.cluster.system.clock import SystemClock
from forebay.cluster.system.log_rate_limiter import KEYS_MAX, PERIOD_S
from forebay.replica.model.accounts import Revocation
from forebay.wal import FIRST_INCARNATION, Incarnation, lineage_of
from tests.clocks import ManualClock
from tests.cluster.consensus.tls_cluster import CLUSTER, FAST, PATIENCE_S, certify, make_authority, make_members

BEAT = Heartbeat(1, 1, 0, True)


class Ear:
    """Listener that records the events of links."""

    def __init__(self) -> None:
        self.frames: list[tuple[str, AnyMessage]] = []
        self.up: set[str] = set()
        self.downs = self.lost = 0
        self.later: list[tuple[str, Incarnation]] = []
        self.changed = asyncio.Event()

    def on_frame(self, peer: str, message: AnyMessage) -> None:
        self.frames.append((peer, message))
        self.changed.set()

    def on_up(self, peer: str) -> None:
        self.up.add(peer)
        self.changed.set()

    def on_down(self, peer: str) -> None:
        self.up.discard(peer)
        self.downs += 1
        self.changed.set()

    def on_lost_sight(self, peer: str) -> None:
        self.lost += 1
        self.changed.set()

    def on_later_incarnation(self, peer: str, incarnation: Incarnation) -> None:
        self.later.append((peer, incarnation))
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.changed.clear()
                if not condition():
                    await self.changed.wait()


class Site:
    """Directory with an authority, addresses for r1 to r3, and links of r1 with a recording listener."""

    def __init__(self, directory: Path) -> None:
        self.tls = directory / "tls"
        self.authority = make_authority(self.tls)
        self.members = make_members(["r1", "r2", "r3"])
        self.ear = Ear()
        self.links = self.make("r1", self.ear)

    def make(
        self,
        name: str,
        ear: Ear,
        *,
        files: PeerTls | None = None,
        cluster_id: str = CLUSTER,
        me: str | None = None,
        incarnation: Incarnation = FIRST_INCARNATION,
    ) -> TlsLinks:
        members = self.members if name in self.members else {**self.members, **make_members([name])}
        return TlsLinks(
            me=me or name,
            members=members,
            cluster_id=lineage_of(cluster_id, incarnation),
            tls=Credentials(files or certify(self.authority, self.tls, name), serves=True),
            peers=Peers(cluster_id, SystemClock()),
            timing=FAST,
            uniform=lambda low, high: (low + high) / 2,
            listener=ear,
        )

    async def dial(
        self, files: PeerTls | None, *, version: ssl.TLSVersion | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to r1 with or without a certificate, as a foreign program would."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.load_verify_locations(self.tls / "ca.pem")
        if version is not None:
            context.maximum_version = version
        if files is not None:
            context.load_cert_chain(files.certificate, files.key)
        host, _, port = self.members["r1"].rpartition(":")
        return await asyncio.open_connection(host, int(port), ssl=context)

    async def is_turned_away(
        self, files: PeerTls | None, data: bytes, *, version: ssl.TLSVersion | None = None
    ) -> bool:
        """Return whether r1 closes the connection without receiving a frame."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                reader, writer = await self.dial(files, version=version)
            except (OSError, ssl.SSLError):
                return not self.ear.frames
            try:
                writer.write(data)
                await writer.drain()
                ended = await reader.read() == b""
            except (OSError, ssl.SSLError):
                ended = True
            writer.close()
            return ended and not self.ear.frames


def run(directory: Path, work: Callable[[Site], Awaitable[None]]) -> None:
    async def whole() -> None:
        site = Site(directory)
        await site.links.start()
        try:
            await work(site)
        finally:
            await site.links.stop()

    asyncio.run(whole())


async def linked(site: Site) -> tuple[Ear, TlsLinks]:
    """Return started links of r2 that are connected to the site's, and their listener."""
    ear = Ear()
    other = site.make("r2", ear)
    await other.start()
    await ear.until(lambda: "r1" in ear.up)
    return ear, other


def test_replicas_of_one_cluster_receive_frames_in_order(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        ear, other = await linked(site)
        for seq in range(100):
            other.send("r1", Heartbeat(1, seq, 0, True))
        other.flush()
        await site.ear.until(lambda: len(site.ear.frames) == 100)
        assert site.ear.frames == [("r2", Heartbeat(1, seq, 0, True)) for seq in range(100)]
        await other.stop()
        await site.ear.until(lambda: site.ear.lost == 1)

    run(tmp_path, work)


SECOND, OTHER_SECOND, THIRD = Incarnation(2, "a" * 16), Incarnation(2, "b" * 16), Incarnation(3, "c" * 16)


@pytest.mark.parametrize(
    ("mine", "theirs", "told"),
    [
        (SECOND, FIRST_INCARNATION, SECOND),
        (THIRD, SECOND, THIRD),
        (OTHER_SECOND, SECOND, None),
    ],
)
def test_ended_incarnation_is_notified_and_other_incarnations_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mine: Incarnation, theirs: Incarnation, told: Incarnation | None
) -> None:
    async def work(site: Site) -> None:
        await site.links.stop()
        ears = Ear(), Ear()
        own = site.make("r2", ears[0], incarnation=mine)
        other = site.make("r3", ears[1], incarnation=theirs)
        for links in (own, other):
            await links.start()
        async with asyncio.timeout(PATIENCE_S):
            while (told is not None and not ears[1].later) or "closed" not in caplog.text:
                for links, ear, peer in ((other, ears[1], "r2"), (own, ears[0], "r3")):
                    if peer in ear.up:
                        links.send(peer, BEAT)
                        links.flush()
                await asyncio.sleep(0.01)
        assert {known for _, known in ears[1].later} == ({told} if told is not None else set())
        assert (ears[0].later, ears[0].frames, ears[1].frames) == ([], [], [])
        assert ("recovered twice" in caplog.text) is (told is None)
        for links in (own, other):
            await links.stop()

    run(tmp_path, work)


def test_link_ends_when_either_certificate_expires(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        ear, other = await linked(site)
        await site.ear.until(lambda: "r2" in site.ear.up)
        for links, peer in ((site.links, "r2"), (other, "r1")):
            until = certificate_of(site.tls, peer).valid_until  # the two may have been issued in different seconds
            clock = ManualClock(until)
            await ear.until(lambda links=links: links.peers.count == 2)
            lost, downs = site.ear.lost, ear.downs
            with patch.object(links.peers, "_clock", clock):
                links.peers.check()
                assert (links.peers.count, site.ear.lost, ear.downs) == (2, lost, downs)
                clock.advance(1)
                links.peers.check()
                assert links.peers.count == 0
                await ear.until(lambda was=downs: ear.downs > was)
                await site.ear.until(lambda was=lost: site.ear.lost > was)
            clock.set_wall(until)
            await ear.until(lambda: "r1" in ear.up)
            await site.ear.until(lambda: "r2" in site.ear.up)
        await other.stop()

    run(tmp_path, work)


def test_replica_with_a_revoked_certificate_is_disconnected_and_rejected(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        ear, other = await linked(site)
        await site.ear.until(lambda: "r2" in site.ear.up)
        serial = f"serial:{certificate_of(site.tls, 'r2').serial}"
        revoked = {serial: Revocation(serial, "stolen", "ada")}
        site.links.peers.follow(lambda: revoked)
        site.links.peers.check()
        assert site.links.peers.count == 0
        await ear.until(lambda: ear.downs > 0)
        await site.ear.until(lambda: "r2" not in site.ear.up and site.ear.lost > 0)
        refused = site.links.failures.count
        async with asyncio.timeout(PATIENCE_S):
            while site.links.failures.count < refused + 2:
                await asyncio.sleep(0.01)
        assert site.links.peers.count == 0
        assert not site.ear.up
        await other.stop()

    run(tmp_path, work)


def test_acknowledging_replica_lets_the_leader_run_first(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        ear, other = await linked(site)
        happened: list[str] = []
        dialler = other._diallers["r1"]
        with (
            patch("forebay.cluster.consensus.transport.os.sched_yield", lambda: happened.append("yielded")),
            patch.object(dialler, "flush", lambda: happened.append("sent")),
        ):
            for message in (BEAT, AppendReply(1, 7, 7), BEAT):
                other.send("r1", message)
                other.flush()
        assert happened == ["sent", "sent", "yielded", "sent"]
        await other.stop()

    run(tmp_path, work)


def test_link_returns_after_its_peer(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        files = certify(site.authority, site.tls, "r2")
        for rounds in (1, 2):
            other = site.make("r2", Ear(), files=files)
            await other.start()
            await site.ear.until(lambda: "r2" in site.ear.up)
            await other.stop()
            await site.ear.until(lambda rounds=rounds: site.ear.downs == rounds)  # type: ignore[misc]

    run(tmp_path, work)


def test_h05_foreign_certificate_is_rejected_before_any_frame_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(site: Site) -> None:
        foreign_directory = tmp_path / "foreign"
        foreign = certify(make_authority(foreign_directory), foreign_directory, "r2")
        other_cluster_directory = tmp_path / "other"
        other_cluster = certify(make_authority(other_cluster_directory, "another"), other_cluster_directory, "r2")
        agent = certify(site.authority, site.tls, "r3", Role.AGENT)
        operator = certify(site.authority, site.tls, "operator", Role.OPERATOR)
        own_name = PeerTls(authority=site.tls / "ca.pem", certificate=site.tls / "r1.pem", key=site.tls / "r1.key")
        for stranger in (None, foreign, other_cluster, agent, operator, own_name):
            name = "r2" if stranger is None else stranger.certificate.stem
            assert await site.is_turned_away(stranger, encode_frame(CLUSTER, name, BEAT)), stranger
        for said in ("is not a replica", "replica r1 is this replica itself"):
            assert said in caplog.text
        frame = encode_frame(CLUSTER, "r2", BEAT)
        member = certify(site.authority, site.tls, "r2")
        assert await site.is_turned_away(member, frame, version=ssl.TLSVersion.TLSv1_2)
        assert site.ear.frames == []

    run(tmp_path, work)


def test_h05_replica_does_not_connect_to_another_cluster(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        ear = Ear()
        links = site.make("r2", ear, cluster_id="another")
        await links.start()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await ear.until(lambda: bool(ear.up))
        await links.stop()

    run(tmp_path, work)


def test_h05_replica_at_the_address_of_another_is_rejected(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        files = certify(site.authority, site.tls, "r3")
        site.members = {**site.members, "r3": site.members["r2"]}
        ear = Ear()
        impostor = site.make("r3", ear, files=files)
        await impostor.start()
        await ear.until(lambda: "r1" in ear.up)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await site.ear.until(lambda: bool(site.ear.up))
        await impostor.stop()

    run(tmp_path, work)


def test_h05_member_that_sends_an_invalid_frame_loses_its_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(site: Site) -> None:
        member = certify(site.authority, site.tls, "r2")
        for wrong, said in (
            (struct.pack(">I", MAX_FRAME_BYTES + 1), "the maximum is"),
            (struct.pack(">I", 4) + b"junk", "not a frame"),
            (encode_frame("another", "r2", BEAT), "'another'"),
            (encode_frame(CLUSTER, "r3", BEAT), "'r3' on the connection of 'r2'"),
        ):
            caplog.clear()
            site.links.failures._limiter._logged.clear()
            assert await site.is_turned_away(member, wrong)
            assert said in caplog.text

    run(tmp_path, work)


def test_h05_connections_without_certificate_are_bounded_and_do_not_exclude_replicas(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        host, _, port = site.members["r1"].rpartition(":")
        loop = asyncio.get_running_loop()
        silent = [socket.create_connection((host, int(port))) for _ in range(HANDSHAKES_MAX + 3)]
        try:
            for number, one in enumerate(silent):
                one.setblocking(False)
                if number < 3:
                    async with asyncio.timeout(HANDSHAKE_S / 2):
                        with contextlib.suppress(ConnectionResetError):
                            assert await loop.sock_recv(one, 1) == b"", "the oldest are closed early"
            ear = Ear()
            other = site.make("r2", ear)
            await other.start()
            await ear.until(lambda: "r1" in ear.up)
            other.send("r1", BEAT)
            other.flush()
            await site.ear.until(lambda: bool(site.ear.frames))
            await other.stop()
        finally:
            for one in silent:
                one.close()

    run(tmp_path, work)


def test_peer_that_does_not_read_loses_its_link(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        ear = Ear()
        other = site.make("r2", ear)
        await other.start()
        await site.ear.until(lambda: "r2" in site.ear.up)
        await ear.until(lambda: "r1" in ear.up)
        sent = 0
        big = AppendRequest(1, 1, 0, 0, 0, True, [(1, b"x" * (1 << 20))])
        # Without an await in between nothing is sent, so everything is queued.
        while sent <= QUEUED_BYTES_MAX + (64 << 20):
            site.links.send("r2", big)
            site.links.flush()
            sent += 1 << 20
        await site.ear.until(lambda: site.ear.downs == 1)
        await other.stop()

    run(tmp_path, work)


def test_unusable_address_is_named(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        second = site.make("r2", Ear())
        second._address = site.links._address  # type: ignore[misc]
        with pytest.raises(OSError, match="replica r2 cannot listen at 127.0.0.1:"):
            await second.start()
        await second.stop()

    run(tmp_path, work)


def test_changing_peers_does_not_disturb_other_links(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        ears = {name: Ear() for name in ("r2", "r3")}
        others = {name: site.make(name, ear) for name, ear in ears.items()}
        for other in others.values():
            await other.start()
        await site.ear.until(lambda: site.ear.up == {"r2", "r3"})
        site.links.set_peers({"r2": (site.members["r2"],)})
        await site.ear.until(lambda: site.ear.up == {"r2"})
        site.links.set_peers({"r2": (site.members["r2"],), "r3#6": (site.members["r3"],)})
        await site.ear.until(lambda: site.ear.up == {"r2", "r3#6"})
        assert site.ear.downs == 1
        for other in others.values():
            await other.stop()

    run(tmp_path, work)


def test_peer_is_found_at_its_second_address(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        others = [site.make("r2", Ear()), site.make("r3", Ear())]
        for other in others:
            await other.start()
        (nowhere,) = make_members(["r4"]).values()
        for wrong in (nowhere, site.members["r3"]):
            site.links.set_peers({})
            site.links.set_peers({"r2": (wrong, site.members["r2"])})
            await site.ear.until(lambda: site.ear.up == {"r2"})
            assert site.links.address_of("r2") == site.members["r2"]
            # The link is up, so further addresses do not disturb it; an unused address does.
            downs = site.ear.downs
            site.links.set_peers({"r2": (site.members["r2"], nowhere)})
            site.links.set_peers({"r2": (nowhere, site.members["r2"])})
            await asyncio.sleep(0)
            assert (site.ear.downs, site.links.address_of("r2")) == (downs, site.members["r2"])
            site.links.set_peers({"r2": (nowhere,)})
            await site.ear.until(lambda: not site.ear.up)
            assert site.links.address_of("r2") is None
        for other in others:
            await other.stop()

    run(tmp_path, work)


def test_host_name_is_resolved_again_for_each_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(site: Site) -> None:
        files = issue(
            site.authority, site.tls, role=Role.REPLICA, name="r2", at=SystemClock().now(), addresses=["r2.test"]
        )
        there, port = "127.0.0.2", int(site.members["r2"].rpartition(":")[2])
        loop = asyncio.get_running_loop()
        resolve = loop.getaddrinfo

        async def getaddrinfo(host: str, *words: object, **more: object) -> object:
            return await resolve(there if host == "r2.test" else host, *words, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
        site.links.set_peers({"r2": (f"r2.test:{port}",)})
        for there in ("127.0.0.2", "127.0.0.3"):
            site.members["r2"] = f"{there}:{port}"
            other = site.make("r2", Ear(), files=files)
            await other.start()
            await site.ear.until(lambda: site.ear.up == {"r2"})
            await other.stop()
            await site.ear.until(lambda: not site.ear.up)

    run(tmp_path, work)


def test_certificate_for_another_host_is_rejected_with_the_remedy(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        files = issue(
            site.authority, site.tls, role=Role.REPLICA, name="r2", at=SystemClock().now(), addresses=["10.0.0.1"]
        )
        other = site.make("r2", Ear(), files=files)
        await other.start()
        with pytest.raises(ssl.SSLCertVerificationError) as refused:
            await site.links._diallers["r2"]._connection()
        assert "forebay cert issue NAME --role replica --host HOST --replace" in why(refused.value)
        await other.stop()

    run(tmp_path, work)


def test_peer_that_is_not_dialled_gets_replies_on_its_own_connection(tmp_path: Path) -> None:
    async def work(site: Site) -> None:
        site.links.set_peers({})
        ear = Ear()
        other = site.make("r9", ear, me="r9#4")
        await other.start()
        await ear.until(lambda: "r1" in ear.up)
        other.send("r1", BEAT)
        other.flush()
        await site.ear.until(lambda: site.ear.frames == [("r9#4", BEAT)])
        for stranger in ("r9", "r9#5"):
            site.links.send(stranger, BEAT)
        site.links.send("r9#4", Heartbeat(2, 2, 0, True))
        await ear.until(lambda: bool(ear.frames))
        assert ear.frames == [("r1", Heartbeat(2, 2, 0, True))]
        await other.stop()

    run(tmp_path, work)


def test_h05_replica_cannot_send_frames_of_another_member(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(site: Site) -> None:
        member = certify(site.authority, site.tls, "r2")
        for sender in ("r3", "r3#2", "r22#2"):
            site.links.failures._limiter._logged.clear()
            assert await site.is_turned_away(member, encode_frame(CLUSTER, sender, BEAT)), sender
        assert "a frame of 'r3#2' on the connection of 'r2'" in caplog.text

    run(tmp_path, work)


def test_h05_each_rejection_names_the_check_the_peer_and_the_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def work(site: Site) -> None:
        foreign_directory = tmp_path / "foreign"
        foreign = certify(make_authority(foreign_directory), foreign_directory, "r2")
        agent = certify(site.authority, site.tls, "r3", Role.AGENT)
        host, _, port = site.members["r1"].rpartition(":")
        for files, version, said in (
            (None, None, "presented no certificate; replicas need certificates of the cluster's own authority"),
            (foreign, None, "its certificate is not valid (unable to get local issuer certificate)"),
            (agent, None, "agent r3 is not a replica"),
            (agent, ssl.TLSVersion.TLSv1_2, "does not use TLS 1.3"),
        ):
            caplog.clear()
            assert await site.is_turned_away(files, b"", version=version)
            assert f"a connection from {host} to the peer address is rejected: " in caplog.text
            assert said in caplog.text
        caplog.clear()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert not (await reader.read()).startswith(b"HTTP")
        assert "it uses HTTP without TLS; users and tools must use the API address" in caplog.text
        caplog.clear()
        dialling = site.make("r2", Ear(), files=foreign)
        await dialling.start()
        wanted = f"no connection to replica r1 at {site.members['r1']}: its certificate is not valid"
        async with asyncio.timeout(PATIENCE_S):
            while wanted not in caplog.text:
                await asyncio.sleep(0.01)
        await dialling.stop()
        assert all(record.message.rstrip().rpartition(": ")[2] for record in caplog.records), "a reason is missing"

    run(tmp_path, work)


def test_h05_replica_learns_from_its_own_log_that_its_certificate_is_rejected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With TLS 1.3 its own handshake ends before the other side checks the certificate."""
    caplog.set_level("INFO")

    async def work(site: Site) -> None:
        foreign_directory = tmp_path / "foreign"
        foreign = certify(make_authority(foreign_directory), foreign_directory, "r2")
        mixed = PeerTls(authority=site.tls / "ca.pem", certificate=foreign.certificate, key=foreign.key)
        with patch("forebay.cluster.security.tls.examine"):  # otherwise it would be rejected before dialling
            links = site.make("r2", Ear(), files=mixed)
        await links.start()
        async with asyncio.timeout(PATIENCE_S):
            while "no connection to replica r1" not in caplog.text:
                await asyncio.sleep(0.01)
        await links.stop()
        assert "it rejects this replica's certificate or name" in caplog.text

    run(tmp_path, work)


def test_repeated_peer_failure_is_logged_occasionally_with_a_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 0.0
    failures = ConnectionFailures(lambda: now_s)
    for _ in range(100):
        failures.note("r2", "r2 is refused", IdentityError("it is an agent"))
        now_s += 0.5
    assert [record.message for record in caplog.records] == ["r2 is refused: it is an agent"]
    now_s = PERIOD_S + 0.5
    failures.note("r2", "r2 is refused", IdentityError("it is an agent"))
    failures.note("r3", "r3 is refused", IdentityError("it is an agent"))
    failures.note("r2", "r2 is refused", TimeoutError())
    assert [record.message for record in caplog.records][1:] == [
        "r2 is refused: it is an agent (99 times more in the last 60 s)",
        "r3 is refused: it is an agent",
        "r2 is refused: it did not finish the TLS handshake in time; it is overloaded, or not a replica",
    ]
    for number in range(3 * KEYS_MAX):
        failures.note(f"10.0.0.{number}", "rejected", OSError())
    assert len(failures._limiter._logged) == KEYS_MAX and failures.count == 103 + 3 * KEYS_MAX


@pytest.mark.parametrize(
    "error",
    [OSError(), TimeoutError(), ConnectionResetError(), ConnectionAbortedError(), ssl.SSLError(), ssl.SSLEOFError()],
    ids=lambda error: type(error).__name__,
)
def test_reason_is_never_empty(error: BaseException) -> None:
    assert len(why(error)) > 6


def test_each_replica_has_one_connection_and_their_number_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.cluster.consensus.transport.INBOUND_MAX", 2)

    async def work(site: Site) -> None:
        files = {name: certify(site.authority, site.tls, name) for name in ("r2", "r3", "r4")}

        async def speak(name: str) -> asyncio.StreamReader:
            reader, writer = await site.dial(files[name])
            writer.write(encode_frame(CLUSTER, name, BEAT))
            writers.append(writer)
            return reader

        writers: list[asyncio.StreamWriter] = []
        async with asyncio.timeout(PATIENCE_S):
            first = await speak("r2")
            await site.ear.until(lambda: len(site.ear.frames) == 1)
            second = await speak("r2")
            await site.ear.until(lambda: len(site.ear.frames) == 2)
            with contextlib.suppress(OSError):
                assert await first.read() == b"", "the older connection is closed"
            await speak("r3")
            await site.ear.until(lambda: len(site.ear.frames) == 3)
            with contextlib.suppress(OSError, ssl.SSLError):
                assert await (await speak("r4")).read() == b""
            assert len(site.ear.frames) == 3 and sorted(site.links._inbound) == ["r2", "r3"]
            assert not second.at_eof()
        for writer in writers:
            writer.close()

    run(tmp_path, work)
