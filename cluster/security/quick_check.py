"""Quick certificate check without the X.509 library, whose import doubles the time of a command.

The check confirms only that a certificate is valid and issued by the cluster's authority. It compares the exact bytes
except for the signature's value, which the peer verifies. A certificate of any other form goes to the full check
(`cluster.security.tls`), which also explains the error. Source of the layout: RFC 5280, 4.1 and 4.2.1; X.690, 10.1 and
11.
"""

import datetime
import ssl
from pathlib import Path
from typing import Final, NamedTuple

from forebay.cluster.security.files import TlsError, TlsFiles
from forebay.cluster.security.tls import check_key_file, check_validity, client_context, examine, read_pem
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant

_INTEGER: Final = 0x02
_BITS: Final = 0x03
_OBJECT: Final = 0x06
_TEXT: Final = 0x0C
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18
_SEQUENCE: Final = 0x30
_SET: Final = 0x31
_EXTENSIONS: Final = 0xA3

_VERSION_3: Final = bytes.fromhex("a003020102")
_ECDSA_SHA256: Final = bytes.fromhex("300a06082a8648ce3d040302")
_P256: Final = bytes.fromhex("301306072a8648ce3d020106082a8648ce3d030107")
_NAMES: Final = frozenset({b"\x55\x04\x03", b"\x55\x04\x0a", b"\x55\x04\x0b"})
"""CN, O and OU."""

_KEY_ID: Final = bytes.fromhex("0603551d0e04160414")
_ISSUER_KEY_ID: Final = bytes.fromhex("0603551d23041830168014")
_KEY_ID_BYTES: Final = 20
_CONSTANT_EXTENSIONS: Final = frozenset(
    {
        bytes.fromhex("0603551d130101ff04023000"),
        bytes.fromhex("0603551d130101ff040830060101ff020100"),
        bytes.fromhex("0603551d0f0101ff040403020780"),
        bytes.fromhex("0603551d0f0101ff040403020106"),
        bytes.fromhex("0603551d25040c300a06082b06010505070302"),
    }
)
"""Basic constraints, key usage and extended key usage as `cluster.security.pki` writes them for an authority and for a
certificate that only opens connections.
"""

_SERIAL_BYTES_MAX: Final = 20
_SCALAR_BYTES_MAX: Final = 33

_PRIME: Final = 2**256 - 2**224 + 2**192 + 2**96 - 1
_B: Final = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B
"""Parameters of the curve P-256 (FIPS 186-4, D.1.2.3): y² = x³ - 3x + b over a prime field."""

_BEGIN: Final = b"-----BEGIN CERTIFICATE-----"
_FIRST_YEAR_OF_1900S: Final = 50
"""Two-digit years of a UTCTime from here on belong to the twentieth century; later years use GeneralizedTime."""


class _PlainCertificate(NamedTuple):
    """Fields of a certificate. Dates are digits, `20260131120000`; names and key IDs are bytes."""

    issuer: bytes
    subject: bytes
    since: str
    until: str
    key_id: bytes
    issuer_key_id: bytes


class _UnusualCertificate(Exception):
    """The certificate has a form this module does not parse."""


def context_of(files: TlsFiles, at: Instant) -> ssl.SSLContext:
    """Return the TLS context for one command started at `at`.

    Raises:
        TlsError: The files cannot be used.
    """
    if not _is_plainly_usable(files, at):
        try:
            check_validity(files.certificate, at)
            examine(files)
        except ModuleNotFoundError:
            _check_without_library(files, at)
    return client_context(files, examined=True)


def _check_without_library(files: TlsFiles, at: Instant) -> None:
    """Check a certificate as far as this module can; the replica rejects what passes wrongly, only without a reason.

    Raises:
        TlsError: The certificate is not valid at `at`, or another authority issued it.
    """
    check_key_file(files.key)
    try:
        mine, authority = _read_plain(files.certificate), _read_plain(files.authority)
    except (_UnusualCertificate, ValueError, IndexError, StopIteration):
        return
    now = _at_second(at)
    if not mine.since <= now <= mine.until:
        raise TlsError(
            f"{files.certificate}: the certificate is valid from {mine.since} to {mine.until} (UTC), and the clock of "
            f"this machine shows {now}; issue a new one, or set the clock"
        )
    if mine.issuer != authority.subject or mine.issuer_key_id != authority.key_id:
        raise TlsError(
            f"{files.certificate}: the certificate is not signed by the authority in {files.authority}; use a "
            f"certificate and an authority of the same cluster"
        )


def _at_second(at: Instant) -> str:
    return datetime.datetime.fromtimestamp(at / MICROSECONDS_PER_SECOND, tz=datetime.UTC).strftime("%Y%m%d%H%M%S")


def _is_plainly_usable(files: TlsFiles, at: Instant) -> bool:
    """Return True if the certificate is valid and the authority beside it issued it.

    Returns False if the quick check cannot tell.
    """
    try:
        mine, authority = _read_plain(files.certificate), _read_plain(files.authority)
    except (_UnusualCertificate, TlsError, ValueError, IndexError, StopIteration):
        return False
    now = _at_second(at)
    is_issuer = mine.issuer == authority.subject and mine.issuer_key_id == authority.key_id != b""
    # Leave the first and last second to the library.
    return is_issuer and mine.since < now < mine.until


def _read_plain(path: Path) -> _PlainCertificate:
    """Parse the only certificate in a file.

    Raises:
        _UnusualCertificate: The file contains anything else, such as a chain.
    """
    pem = read_pem(path, "the certificate")
    if pem.count(_BEGIN) != 1 or not pem.startswith(_BEGIN):
        raise _UnusualCertificate
    certificate, signed_with, signature = _parts(_only(ssl.PEM_cert_to_DER_cert(pem.decode("ascii")), _SEQUENCE), 3)
    _check_signature(signed_with, signature)
    version, serial, algorithm, issuer, validity, subject, key, extensions = _parts(_only(certificate, _SEQUENCE), 8)
    _check_integer(serial, _SERIAL_BYTES_MAX)
    _check_name(issuer)
    _check_name(subject)
    _check_key(key)
    if version != _VERSION_3 or algorithm != signed_with:
        raise _UnusualCertificate
    since, until = map(_digits, _parts(_only(validity, _SEQUENCE), 2))
    key_id, issuer_key_id = _key_ids(_only(_only(extensions, _EXTENSIONS), _SEQUENCE))
    return _PlainCertificate(issuer, subject, since, until, key_id, issuer_key_id)


def _elements(data: bytes) -> list[bytes]:
    """Return the consecutive DER elements of `data`, each with its tag and length."""
    found = []
    first = 0
    while first < len(data):
        size, at = data[first + 1], first + 2
        if size & 0x80:
            digits = size & 0x7F
            size, at = int.from_bytes(data[at : at + digits], "big"), at + digits
            if size < 0x80 or size.bit_length() <= 8 * (digits - 1):
                raise _UnusualCertificate  # DER requires the shortest length
        if at + size > len(data):
            raise _UnusualCertificate
        found.append(data[first : at + size])
        first = at + size
    return found


def _parts(data: bytes, count: int) -> list[bytes]:
    found = _elements(data)
    if len(found) != count:
        raise _UnusualCertificate
    return found


def _only(element: bytes, tag: int) -> bytes:
    """Return the contents of the single element in `element`."""
    (element,) = _parts(element, 1)
    if element[0] != tag:
        raise _UnusualCertificate
    digits = element[1] & 0x7F if element[1] & 0x80 else 0
    return element[2 + digits :]


def _check_integer(element: bytes, bytes_max: int) -> None:
    """Reject anything but a positive integer in its shortest form."""
    digits = _only(element, _INTEGER)
    is_shortest = len(digits) == 1 or digits[0] != 0 or digits[1] & 0x80
    if not 0 < len(digits) <= bytes_max or digits[0] & 0x80 or not any(digits) or not is_shortest:
        raise _UnusualCertificate


def _check_signature(algorithm: bytes, signature: bytes) -> None:
    bits = _only(signature, _BITS)
    if algorithm != _ECDSA_SHA256 or bits[0] != 0:
        raise _UnusualCertificate
    for scalar in _parts(_only(bits[1:], _SEQUENCE), 2):
        _check_integer(scalar, _SCALAR_BYTES_MAX)


def _check_name(name: bytes) -> None:
    for element in _elements(_only(name, _SEQUENCE)):
        kind, text = _parts(_only(_only(element, _SET), _SEQUENCE), 2)
        if _only(kind, _OBJECT) not in _NAMES or not _only(text, _TEXT).decode("utf-8"):
            raise _UnusualCertificate


def _check_key(key: bytes) -> None:
    """Reject anything but a point on the curve."""
    algorithm, bits = _parts(_only(key, _SEQUENCE), 2)
    point = _only(bits, _BITS)
    x, y = int.from_bytes(point[2:34], "big"), int.from_bytes(point[34:], "big")
    is_plain = algorithm == _P256 and len(point) == 66 and point[:2] == b"\x00\x04" and max(x, y) < _PRIME
    if not is_plain or (y * y - (x**3 - 3 * x + _B)) % _PRIME:
        raise _UnusualCertificate


def _key_ids(extensions: bytes) -> tuple[bytes, bytes]:
    """Return the key ID and the issuer's key ID, each empty if missing. Reject an extension that occurs twice."""
    found: dict[bytes, bytes] = {}
    kinds = []
    for element in _elements(extensions):
        extension = _only(element, _SEQUENCE)
        kinds.append(extension[:5])
        for prefix in (_KEY_ID, _ISSUER_KEY_ID):
            if extension.startswith(prefix) and len(extension) == len(prefix) + _KEY_ID_BYTES:
                found[prefix] = extension[len(prefix) :]
                break
        else:
            if extension not in _CONSTANT_EXTENSIONS:
                raise _UnusualCertificate
    if len(set(kinds)) != len(kinds):
        raise _UnusualCertificate
    return found.get(_KEY_ID, b""), found.get(_ISSUER_KEY_ID, b"")


def _digits(time: bytes) -> str:
    is_short = time[0] == _UTC_TIME
    text = _only(time, _UTC_TIME if is_short else _GENERALIZED_TIME).decode("ascii")
    if is_short:
        text = ("19" if int(text[:2]) >= _FIRST_YEAR_OF_1900S else "20") + text
    elif int(text[:4]) < 2000 + _FIRST_YEAR_OF_1900S:
        raise _UnusualCertificate
    if len(text) != len("20260131120000Z") or not text.endswith("Z") or not text[:-1].isdecimal():
        raise _UnusualCertificate
    month, day, hour, minute, second = (int(text[at : at + 2]) for at in range(4, 14, 2))
    datetime.datetime(int(text[:4]), month, day, hour, minute, second, tzinfo=datetime.UTC)  # ValueError: no such day
    return text[:-1]
