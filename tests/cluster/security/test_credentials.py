"""Certificates, keys and authorities are renewed in a running process, and files that do not match are never used."""

import os
import ssl
import tempfile
from pathlib import Path

import pytest

from forebay.cluster.security.credentials import REFRESH_S, Credentials
from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import (
    Authority,
    PkiError,
    create_authority,
    issue,
    load_authority,
    renew_authority,
    retire_authorities,
)
from forebay.cluster.security.tls import TlsError, TlsFiles, client_context, server_context
from forebay.cluster.system.clock import SystemClock
from forebay.replica.values.units import Instant
from tests.clocks import ManualClock
from tests.cluster.security.test_pki import shake_hands

NOW = SystemClock().now()
NOBODY = 65534


class Place:
    """A directory of certificates, with a replica and a client."""

    def __init__(self, directory: Path) -> None:
        self.tls = directory
        self.authority = create_authority(directory, cluster_name="demo", cluster_id="c1", at=NOW)
        self.replica = self.issue("r1")
        self.agent = self.issue("n1")

    def issue(self, name: str) -> TlsFiles:
        role, hosts = (Role.REPLICA, ["127.0.0.1"]) if name == "r1" else (Role.AGENT, [])
        authority: Authority = load_authority(self.tls)
        return issue(authority, self.tls, role=role, name=name, addresses=hosts, at=NOW, replace=True)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "tls")


def serial_shown(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[str, str]:
    """Make a handshake; return the serial numbers of server and client."""
    server_end, client_end = shake_hands(server, client, "127.0.0.1")
    return client_end.getpeercert()["serialNumber"], server_end.getpeercert()["serialNumber"]  # type: ignore[index,return-value]


def test_renewed_certificate_is_used_from_the_next_handshake(place: Place) -> None:
    clock = ManualClock(NOW)
    served, asked = Credentials(place.replica, serves=True, clock=clock), Credentials(place.agent, clock=clock)
    before = serial_shown(served.server_context(), asked.client_context())
    place.issue("r1"), place.issue("n1")
    for credentials in (served, asked):
        credentials.refresh()
        assert credentials.generation == 0, "a handshake does not check the files again"
    clock.advance(REFRESH_S)
    for credentials in (served, asked):
        credentials.refresh()
        assert credentials.generation == 1
    after = serial_shown(served.server_context(), asked.client_context())
    assert len({*before, *after}) == 4


def test_files_that_do_not_match_are_not_used_until_they_match(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    credentials = Credentials(place.replica, serves=True)
    context = credentials.server_context()
    former = place.replica.certificate.read_bytes()
    place.issue("r1")
    renewed = place.replica.certificate.read_bytes()
    for half in (former, b"", b"nonsense"):
        place.replica.certificate.write_bytes(half)
        for _ in range(3):
            credentials.refresh(at_once=True)
        assert credentials.server_context() is context
    assert sum("stay in use" in record.message for record in caplog.records) == 3, "each reason is logged once"
    os.unlink(place.replica.certificate)
    credentials.refresh(at_once=True)
    place.replica.certificate.write_bytes(renewed)
    credentials.refresh(at_once=True)
    assert credentials.server_context() is not context


def test_key_readable_by_others_is_not_used(place: Place) -> None:
    credentials = Credentials(place.replica, serves=True)
    place.issue("r1")
    place.replica.key.chmod(0o644)
    credentials.refresh(at_once=True)
    assert credentials.generation == 0


def test_authority_is_renewed_in_three_steps_without_a_rejected_handshake(place: Place) -> None:
    told: list[str] = []
    served, asked = Credentials(place.replica, serves=True), Credentials(place.agent)
    served.on_authorities.append(lambda: told.append("changed"))

    def talk() -> None:
        for credentials in (served, asked):
            credentials.refresh(at_once=True)
        serial_shown(served.server_context(), asked.client_context())

    talk()
    old = server_context(place.replica), client_context(place.agent)
    # 1: both authorities are trusted; processes without the change have certificates of the former one.
    renew_authority(place.tls, at=Instant(NOW + 1))
    talk()
    serial_shown(served.server_context(), old[1])
    serial_shown(old[0], asked.client_context())
    assert told == ["changed"]
    with pytest.raises(PkiError, match="an unfinished renewal"):
        renew_authority(place.tls, at=NOW)
    # 2: the certificates are renewed one after the other.
    place.issue("r1")
    talk()
    place.issue("n1")
    talk()
    assert told == ["changed"]
    # 3: the former authority is no longer trusted.
    assert retire_authorities(place.tls) == 1 and retire_authorities(place.tls) == 0
    talk()
    assert told == ["changed", "changed"]
    with pytest.raises(ssl.SSLCertVerificationError):
        serial_shown(served.server_context(), old[1])
    with pytest.raises(TlsError, match="not signed by"):
        former = create_authority(place.tls.parent / "other", cluster_name="demo", cluster_id="c1", at=NOW)
        stranger = issue(former, place.tls.parent / "other", role=Role.AGENT, name="n1", at=NOW)
        client_context(TlsFiles(authority=place.replica.authority, certificate=stranger.certificate, key=stranger.key))


@pytest.mark.parametrize("closed", ["certificate", "key"])
def test_file_unreadable_for_this_account_is_named(closed: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        place = Place(Path(directory) / "tls")
        path: Path = getattr(place.agent, closed)
        is_root = os.geteuid() == 0
        for one in (*place.tls.iterdir(), place.tls, Path(directory)) if is_root else ():
            os.chown(one, NOBODY, -1)
        path.chmod(0)
        if is_root:
            os.seteuid(NOBODY)
        try:
            with pytest.raises(TlsError, match=f"{path}: cannot be read .Permission denied.; give it to the account"):
                client_context(place.agent, examined=True)
        finally:
            if is_root:
                os.seteuid(0)
