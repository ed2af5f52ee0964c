"""A certificate accepted by the quick check is also accepted by the library that parses everything."""

import base64
import itertools
import ssl
import sys
import warnings
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.cluster.security import quick_check
from forebay.cluster.security.certificates import certificate_of
from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import CERTIFICATE_LIFETIME_DAYS, PkiError, create_authority, issue, load_authority
from forebay.cluster.security.tls import (
    NotValidNow,
    TlsError,
    TlsFiles,
    check_validity,
    describe_authority,
    describe_certificate,
    examine,
)
from forebay.cluster.system.clock import SystemClock
from forebay.replica.values.units import Instant

NOW = SystemClock().now()
DAY_US = 86_400 * 1_000_000


def pki(directory: Path, cluster_id: str) -> TlsFiles:
    authority = create_authority(directory, cluster_name="demo", cluster_id=cluster_id, at=NOW)
    return issue(authority, directory, role=Role.USER, name="alice", at=NOW)


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return pki(tmp_path_factory.mktemp("mine"), "a" * 32)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    """Return the files of an authority with the same name and another key."""
    return pki(tmp_path_factory.mktemp("twin"), "a" * 32)


def test_issued_certificate_passes_the_quick_check_while_it_is_valid(mine: TlsFiles) -> None:
    assert quick_check._is_plainly_usable(mine, NOW)
    for days in (-400, -2, CERTIFICATE_LIFETIME_DAYS + 1, 40_000):
        at = Instant(NOW + days * DAY_US)
        assert not quick_check._is_plainly_usable(mine, at)
        with pytest.raises(NotValidNow):
            quick_check.context_of(mine, at)


def test_certificate_of_an_authority_with_the_same_name_is_rejected(mine: TlsFiles, twin: TlsFiles) -> None:
    mixed = TlsFiles(authority=mine.authority, certificate=twin.certificate, key=twin.key)
    assert not quick_check._is_plainly_usable(mixed, NOW)
    with pytest.raises(TlsError, match="is not signed by"):
        quick_check.context_of(mixed, NOW)


def test_key_readable_by_others_is_rejected_with_a_valid_certificate(tmp_path: Path) -> None:
    files = pki(tmp_path, "b" * 32)
    files.key.chmod(0o640)
    assert quick_check._is_plainly_usable(files, NOW)
    with pytest.raises(TlsError, match="mode 0640"):
        quick_check.context_of(files, NOW)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 3_000), st.integers(0, 255), st.booleans())
def test_quick_check_survives_any_text_and_accepts_only_valid_dates(
    mine: TlsFiles, tmp_path: Path, at: int, byte: int, cut: bool
) -> None:
    data = bytearray(mine.certificate.read_bytes())
    place = at % len(data)
    broken = data[:place] if cut else data[:place] + bytes([byte]) + data[place + 1 :]
    (tmp_path / "broken.pem").write_bytes(broken)
    files = TlsFiles(authority=mine.authority, certificate=tmp_path / "broken.pem", key=mine.key)
    if quick_check._is_plainly_usable(files, NOW):
        try:
            check_validity(files.certificate, NOW)
            examine(files)
        except TlsError as refused:
            # The changed byte is in the signature, in a key or in a part that the quick check skips.
            assert "expired" not in str(refused) and "valid from" not in str(refused)


def der_of(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


def why_refused(der: bytes) -> str:
    """Return why the complete parser rejects a certificate; empty if it is accepted."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = x509.load_der_x509_certificate(der)
            for name in (found.subject, found.issuer):
                name.rfc4514_string()
            assert list(found.extensions) and found.public_key() and found.serial_number
            assert found.signature_hash_algorithm and found.not_valid_before_utc and found.not_valid_after_utc
    except Exception as error:  # any exception of the parser
        return repr(error)
    return ""


def accepted(files: TlsFiles, directory: Path, der: bytes, *, authority: bool) -> bool:
    """Return whether the quick check accepts a certificate in place of one of the files."""
    changed = directory / "changed.pem"
    changed.write_text(ssl.DER_cert_to_PEM_cert(der))
    mine = files.certificate if authority else changed
    return quick_check._is_plainly_usable(TlsFiles(changed if authority else files.authority, mine, files.key), NOW)


@pytest.mark.parametrize("authority", [False, True], ids=["certificate", "authority"])
def test_flipped_bit_that_the_parser_rejects_fails_the_quick_check(
    mine: TlsFiles, tmp_path: Path, authority: bool
) -> None:
    der = der_of(mine.authority if authority else mine.certificate)
    assert accepted(mine, tmp_path, der, authority=authority)
    for at, bit in itertools.product(range(len(der)), range(8)):
        changed = der[:at] + bytes([der[at] ^ 1 << bit]) + der[at + 1 :]
        if accepted(mine, tmp_path, changed, authority=authority):
            assert why_refused(changed) == "", (at, bit)


@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 520), st.integers(0, 12), st.binary(max_size=12), st.booleans())
def test_replaced_bytes_that_the_parser_rejects_fail_the_quick_check(
    mine: TlsFiles, tmp_path: Path, at: int, length: int, instead: bytes, authority: bool
) -> None:
    der = der_of(mine.authority if authority else mine.certificate)
    changed = der[:at] + instead + der[at + length :]
    if accepted(mine, tmp_path, changed, authority=authority):
        assert why_refused(changed) == ""


def test_certificate_of_an_unknown_version_is_rejected_everywhere(tmp_path: Path) -> None:
    files = pki(tmp_path, "6f1c")
    for path in (files.certificate, files.authority):
        body = b"".join(line for line in path.read_bytes().splitlines() if not line.startswith(b"-"))
        der = base64.b64decode(body)
        assert der.count(b"\xa0\x03\x02\x01\x02") == 1
        forged = base64.encodebytes(der.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x06"))
        path.write_bytes(b"-----BEGIN CERTIFICATE-----\n" + forged + b"-----END CERTIFICATE-----\n")
    with pytest.raises(TlsError, match="is not a PEM certificate"):
        examine(files)
    assert "is not a PEM certificate" in certificate_of(tmp_path, "alice").problem
    with pytest.raises(PkiError, match="is not an unencrypted PEM file"):
        load_authority(tmp_path)


def test_a_client_without_the_library_finds_the_same_faults(
    mine: TlsFiles, twin: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    quick_check.context_of(mine, NOW)
    for days in (-400, CERTIFICATE_LIFETIME_DAYS + 1):
        with pytest.raises(TlsError, match="valid from"):
            quick_check.context_of(mine, Instant(NOW + days * DAY_US))
    mixed = TlsFiles(authority=mine.authority, certificate=twin.certificate, key=twin.key)
    with pytest.raises(TlsError, match="is not signed by"):
        quick_check.context_of(mixed, NOW)
    assert str(mine.certificate) in describe_certificate(mine.certificate)
    assert str(mine.authority) in describe_authority(mine.authority)
