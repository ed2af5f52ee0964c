"""Certificates: what each role may do, and keys that only their owner can read."""

import asyncio
import contextlib
import datetime
import os
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from forebay.cluster.security.certificates import certificate_of
from forebay.cluster.security.identity import HELPER_HOST, Identity, Role, identify
from forebay.cluster.security.pki import Authority, PkiError, create_authority, issue, load_authority
from forebay.cluster.security.tls import (
    TlsError,
    TlsFiles,
    check_key_file,
    check_validity,
    client_context,
    open_key_file,
    open_server_context,
    server_context,
    until_valid,
)
from forebay.cluster.system.clock import SystemClock
from forebay.replica.values.units import Instant
from tests.clocks import ManualClock

NOW = SystemClock().now()


@pytest.fixture
def tls(tmp_path: Path) -> Path:
    return tmp_path / "tls"


def authority_in(tls: Path, name: str = "demo") -> Authority:
    return create_authority(tls, cluster_name=name, cluster_id="c1", at=NOW)


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Exchange handshake data in memory until it is complete; return (server's end, client's end)."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server_end = server.wrap_bio(to_server, to_client, server_side=True)
    client_end = client.wrap_bio(to_client, to_server, server_hostname=host)
    for _ in range(4):
        for end in (client_end, server_end):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return server_end, client_end


def test_both_ends_are_identified_over_tls_1_3(tls: Path) -> None:
    authority = authority_in(tls)
    replica = issue(authority, tls, role=Role.REPLICA, name="r1", addresses=["127.0.0.1", "host.example"], at=NOW)
    for role in Role:
        hosts = ["127.0.0.1"] if role is Role.REPLICA else []
        files = issue(authority, tls, role=role, name=f"the-{role.value}", addresses=hosts, at=NOW)
        for host in ("127.0.0.1", "host.example"):
            server_end, client_end = shake_hands(server_context(replica), client_context(files), host)
            assert client_end.version() == "TLSv1.3"
            assert identify(server_end.getpeercert(), cluster_id="c1") == Identity(role, f"the-{role.value}")
            assert identify(client_end.getpeercert(), cluster_id="c1") == Identity(Role.REPLICA, "r1")


def test_no_session_is_resumed(tls: Path) -> None:
    """A resumed session would skip the check of the certificate, outlive it, and be extended by each use."""
    authority = authority_in(tls)
    replica = issue(authority, tls, role=Role.REPLICA, name="r1", addresses=["127.0.0.1"], at=NOW)
    alice = issue(authority, tls, role=Role.USER, name="alice", at=NOW)
    server = server_context(replica)
    client = ssl.create_default_context(cafile=str(alice.authority))
    client.load_cert_chain(alice.certificate, alice.key)
    session = None
    for _ in range(3):
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        server_end = server.wrap_bio(to_server, to_client, server_side=True)
        client_end = client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1", session=session)
        for _ in range(4):
            for end in (client_end, server_end):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
        server_end.write(b"x")  # the first data of the server carries session tickets
        assert client_end.read(1) == b"x"
        assert not server_end.session_reused
        session = client_end.session
    assert server.session_stats()["hits"] == 0


def test_client_stops_when_the_server_certificate_has_expired(tls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = authority_in(tls)
    replica = issue(authority, tls, role=Role.REPLICA, name="r1", addresses=["127.0.0.1"], at=NOW)
    server_end, client_end = shake_hands(server_context(replica), client_context(replica), "127.0.0.1")
    server_end.write(b"before after")
    assert client_end.read(6) == b"before"
    clock = ManualClock(certificate_of(tls, "r1").valid_until)
    monkeypatch.setattr("forebay.cluster.security.tls._CLOCK", clock)
    assert client_end.read(1) == b" "
    clock.advance(1)
    for act in (lambda: client_end.read(5), lambda: client_end.write(b"x")):
        with pytest.raises(ssl.SSLError, match="expired on an open connection"):
            act()


def test_tls_1_2_client_is_rejected(tls: Path) -> None:
    authority = authority_in(tls)
    replica = issue(authority, tls, role=Role.REPLICA, name="r1", addresses=["127.0.0.1"], at=NOW)
    old = client_context(replica)
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        shake_hands(server_context(replica), old, "127.0.0.1")


def test_client_without_a_certificate_is_rejected(tls: Path) -> None:
    replica = issue(authority_in(tls), tls, role=Role.REPLICA, name="r1", addresses=["127.0.0.1"], at=NOW)
    anonymous = ssl.create_default_context(cafile=str(replica.authority))
    with pytest.raises(ssl.SSLError):
        shake_hands(server_context(replica), anonymous, "127.0.0.1")


@pytest.mark.parametrize("role", [Role.AGENT, Role.OPERATOR, Role.USER])
def test_only_replicas_may_serve(tls: Path, role: Role) -> None:
    authority = authority_in(tls)
    other = issue(authority, tls, role=role, name="x", at=NOW)
    lenient = client_context(other)
    lenient.check_hostname = False
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose|certificate"):
        shake_hands(server_context(other), lenient, "127.0.0.1")


def test_helper_cannot_pose_as_a_replica_nor_a_replica_as_a_helper(tls: Path) -> None:
    authority = authority_in(tls)
    helper = issue(authority, tls, role=Role.HELPER, name="h1", at=NOW)
    replica = issue(authority, tls, role=Role.REPLICA, name="r1", addresses=["127.0.0.1"], at=NOW)
    for address in ("127.0.0.1", "localhost", "h1", "::1"):
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            shake_hands(server_context(helper), client_context(replica), address)
    _, client_end = shake_hands(server_context(helper), client_context(replica), HELPER_HOST)
    assert identify(client_end.getpeercert()) == Identity(Role.HELPER, "h1")
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake_hands(server_context(replica), client_context(helper), HELPER_HOST)
    with pytest.raises(PkiError, match="identified by its role and name, not by an address; leave out 127"):
        issue(authority, tls, role=Role.HELPER, name="h2", addresses=["127.0.0.1"], at=NOW)
    with pytest.raises(PkiError, match=f"{HELPER_HOST} is reserved for helpers"):
        issue(authority, tls, role=Role.REPLICA, name="r2", addresses=[HELPER_HOST.upper()], at=NOW)


def test_certificate_of_another_authority_is_rejected_by_both_sides(tmp_path: Path) -> None:
    ours, theirs = authority_in(tmp_path / "a"), authority_in(tmp_path / "b", "mars")
    own = issue(ours, tmp_path / "a", role=Role.REPLICA, name="r1", addresses=["127.0.0.1"], at=NOW)
    foreign = issue(theirs, tmp_path / "b", role=Role.REPLICA, name="r1", addresses=["127.0.0.1"], at=NOW)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server_context(foreign), client_context(own), "127.0.0.1")
    trusting = client_context(foreign)
    trusting.load_verify_locations(own.authority)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server_context(own), trusting, "127.0.0.1")


def test_replica_at_an_address_outside_its_certificate_is_rejected(tls: Path) -> None:
    replica = issue(authority_in(tls), tls, role=Role.REPLICA, name="r1", addresses=["127.0.0.1"], at=NOW)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake_hands(server_context(replica), client_context(replica), "127.0.0.2")


def test_keys_are_private_with_any_umask(tls: Path) -> None:
    before = os.umask(0)
    try:
        issue(authority_in(tls), tls, role=Role.AGENT, name="n1", at=NOW)
    finally:
        os.umask(before)
    assert stat.S_IMODE(tls.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tls.iterdir()}
    assert modes == {"ca.key": 0o600, "ca.pem": 0o644, "n1.key": 0o600, "n1.pem": 0o644}


def test_open_directory_is_rejected_and_not_changed(tls: Path) -> None:
    tls.mkdir(mode=0o755)
    tls.chmod(0o755)
    with pytest.raises(PkiError, match="has mode 0755; run: chmod 700"):
        authority_in(tls)
    assert stat.S_IMODE(tls.stat().st_mode) == 0o755
    assert list(tls.iterdir()) == []


def test_second_authority_and_second_certificate_are_rejected(tls: Path) -> None:
    authority = authority_in(tls)
    before = (tls / "ca.pem").read_bytes()
    with pytest.raises(PkiError, match="ca.pem already exists"):
        authority_in(tls)
    assert (tls / "ca.pem").read_bytes() == before
    issue(authority, tls, role=Role.USER, name="alice", at=NOW)
    first = (tls / "alice.pem").read_bytes()
    with pytest.raises(PkiError, match="alice.pem already exists"):
        issue(authority, tls, role=Role.OPERATOR, name="alice", at=NOW)
    assert (tls / "alice.pem").read_bytes() == first
    renewed = issue(authority, tls, role=Role.USER, name="alice", at=NOW, replace=True)
    assert renewed.certificate.read_bytes() != first
    client_context(renewed)


def test_key_is_never_written_through_a_link(tls: Path, tmp_path: Path) -> None:
    authority = authority_in(tls)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tls / "n1.key").symlink_to(victim)
    with pytest.raises(PkiError, match="n1.key already exists"):
        issue(authority, tls, role=Role.AGENT, name="n1", at=NOW)
    issue(authority, tls, role=Role.AGENT, name="n1", at=NOW, replace=True)
    assert victim.read_text() == "mine"
    assert not (tls / "n1.key").is_symlink()


@pytest.mark.parametrize("name", ["ca", "../x", "", ".hidden", "a/b", "-rf"])
def test_invalid_name_gets_no_certificate(tls: Path, name: str) -> None:
    authority = authority_in(tls)
    before = sorted(path.name for path in tls.iterdir())
    with pytest.raises(PkiError, match="cannot name a certificate"):
        issue(authority, tls, role=Role.AGENT, name=name, at=NOW)
    assert sorted(path.name for path in tls.iterdir()) == before


def test_only_replicas_have_addresses_and_need_one(tls: Path) -> None:
    authority = authority_in(tls)
    with pytest.raises(PkiError, match="needs the address at which others reach it"):
        issue(authority, tls, role=Role.REPLICA, name="r1", at=NOW)
    with pytest.raises(PkiError, match="accepts no connections"):
        issue(authority, tls, role=Role.AGENT, name="n1", addresses=["127.0.0.1"], at=NOW)
    with pytest.raises(PkiError, match="neither an IP address nor an ASCII host name"):
        issue(authority, tls, role=Role.REPLICA, name="r1", addresses=["höst"], at=NOW)


def test_loaded_authority_equals_the_created_one_and_issues_certificates(tls: Path) -> None:
    authority_in(tls)
    loaded = load_authority(tls)
    assert loaded.cluster_id == "c1"
    client_context(issue(loaded, tls, role=Role.USER, name="alice", at=NOW))


def test_authority_with_a_readable_or_foreign_key_is_rejected(tls: Path, tmp_path: Path) -> None:
    authority_in(tls)
    (tls / "ca.key").chmod(0o640)
    with pytest.raises(PkiError, match="ca.key: the private key has mode 0640.*chmod 600"):
        load_authority(tls)
    authority_in(tmp_path / "other")
    (tls / "ca.key").unlink()
    (tmp_path / "other" / "ca.key").rename(tls / "ca.key")
    with pytest.raises(PkiError, match="this is not the elliptic-curve key of"):
        load_authority(tls)
    (tls / "ca.key").unlink()
    with pytest.raises(PkiError, match="ca.key: the private key cannot be read"):
        load_authority(tls)


def test_authority_cannot_create_another_authority(tls: Path) -> None:
    certificate = authority_in(tls).certificate
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)
    leaf = issue(load_authority(tls), tls, role=Role.USER, name="alice", at=NOW)
    parsed = x509.load_pem_x509_certificate(leaf.certificate.read_bytes())
    assert not parsed.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_validity_begins_shortly_before_the_certificate_was_issued(tls: Path) -> None:
    files = issue(authority_in(tls), tls, role=Role.USER, name="alice", at=NOW)
    certificate = x509.load_pem_x509_certificate(files.certificate.read_bytes())
    made = datetime.datetime.fromtimestamp(NOW // 1_000_000, tz=datetime.UTC)
    assert certificate.not_valid_before_utc == made - datetime.timedelta(minutes=10)
    assert certificate.not_valid_after_utc == made + datetime.timedelta(days=825)
    check_validity(files.certificate, NOW)
    clock = ManualClock(NOW)
    clock.advance(826 * 86_400)
    with pytest.raises(TlsError, match="the certificate expired on"):
        check_validity(files.certificate, clock.now())
    with pytest.raises(TlsError, match="set the clock"):
        check_validity(files.certificate, Instant(NOW - 11 * 60 * 1_000_000))


# Unusable files


@pytest.fixture
def files(tls: Path) -> TlsFiles:
    return issue(authority_in(tls), tls, role=Role.OPERATOR, name="operator", at=NOW)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o610, 0o601])
def test_key_accessible_to_others_is_rejected_with_the_chmod_command(files: TlsFiles, mode: int) -> None:
    files.key.chmod(mode)
    with pytest.raises(TlsError, match=f"has mode {mode:04o}, so others may use it; run: chmod 600 {files.key}"):
        client_context(files)
    files.key.chmod(0o400)
    client_context(files)


def test_key_that_is_missing_or_not_a_file_is_rejected(files: TlsFiles, tmp_path: Path) -> None:
    with pytest.raises(TlsError, match="not a regular file"):
        check_key_file(tmp_path)
    files.key.unlink()
    with pytest.raises(TlsError, match="operator.key: the private key cannot be read"):
        client_context(files)


@pytest.mark.parametrize("which", ["authority", "certificate", "key"])
@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff\xfe", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_file_that_is_not_pem_is_named(files: TlsFiles, which: str, content: bytes) -> None:
    path: Path = getattr(files, which)
    path.write_bytes(content)
    with pytest.raises(TlsError) as caught:
        client_context(files)
    assert str(path) in str(caught.value)


def test_missing_or_huge_authority_is_named(files: TlsFiles) -> None:
    files.authority.write_bytes(b"x" * (300 * 1024))
    with pytest.raises(TlsError, match=r"ca.pem: the certificate authority has more than \d+ bytes"):
        client_context(files)
    files.authority.unlink()
    with pytest.raises(TlsError, match="ca.pem: the certificate authority cannot be read"):
        server_context(files)


def test_key_of_another_certificate_is_rejected(files: TlsFiles, tls: Path) -> None:
    other = issue(load_authority(tls), tls, role=Role.USER, name="alice", at=NOW)
    with pytest.raises(TlsError, match="alice.key: this is not the unencrypted private key of .*operator.pem"):
        client_context(TlsFiles(authority=files.authority, certificate=files.certificate, key=other.key))


def test_encrypted_key_is_rejected_without_asking_for_a_password(files: TlsFiles) -> None:
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    files.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(TlsError, match="the private key is encrypted"):
        client_context(files)


def test_wait_for_a_valid_certificate_ends_when_the_clock_is_corrected(
    files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.cluster.security.tls.VALIDITY_LOOK_S", 0.001)

    class Slow(ManualClock):
        looks = 0

        def now(self) -> Instant:
            self.looks += 1
            return Instant(NOW - (10 - self.looks) * 24 * 3600 * 1_000_000)

    clock = Slow()
    assert asyncio.run(until_valid(files.certificate, clock, asyncio.Event()))
    assert clock.looks == 10


def test_loaded_key_is_the_checked_one(files: TlsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that replaces the key between its check and its use is not read."""
    really, other = open_key_file, tmp_path / "other"
    other.write_text("not the key")

    def swapped(path: Path) -> int:
        descriptor = really(path)
        path.unlink()
        path.symlink_to(other)
        return descriptor

    monkeypatch.setattr("forebay.cluster.security.tls.open_key_file", swapped)
    assert open_server_context(files.certificate, files.key).minimum_version is ssl.TLSVersion.TLSv1_3
