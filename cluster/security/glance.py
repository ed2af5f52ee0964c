"""What a certificate plainly says, read without the library that reads everything: that takes a command's time twice.

Only "this is surely one that our authority issued, and valid" is answered here; whoever is not told so has it looked at
closely (`cluster.security.tls`), which also says in words what is wrong. Source of the layout: RFC 5280, 4.1 and 4.2.1.
"""

import datetime
import ssl
from pathlib import Path
from typing import Final, NamedTuple

from cluster.security.files import TlsFiles, TlsRefused
from cluster.security.tls import check_validity, client_context, examine, read_pem
from replica.values import MICROSECONDS_PER_SECOND, Instant

_SEQUENCE: Final = 0x30
_OCTETS: Final = 0x04
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18
_VERSION: Final = 0xA0
_EXTENSIONS: Final = 0xA3
_KEY_ID: Final = 0x80

_SUBJECT_KEY: Final = b"\x06\x03\x55\x1d\x0e"
_AUTHORITY_KEY: Final = b"\x06\x03\x55\x1d\x23"

_BEGIN: Final = b"-----BEGIN CERTIFICATE-----"
_FIRST_YEAR_OF_1900S: Final = 50
"""Two digits of a UTCTime from here on are of the twentieth century."""


class _Plain(NamedTuple):
    """Dates as digits, `20260131120000`; names and ids of keys as they stand."""

    issuer: bytes
    subject: bytes
    since: str
    until: str
    key_id: bytes
    issuer_key_id: bytes


class _Unclear(Exception):
    """Something that this page does not read."""


def context_of(files: TlsFiles, at: Instant) -> ssl.SSLContext:
    """Return the context for connections of one command, begun at `at`; TlsRefused where the files cannot be used."""
    if not _is_plainly_usable(files, at):
        check_validity(files.certificate, at)
        examine(files)
    return client_context(files, examined=True)


def _is_plainly_usable(files: TlsFiles, at: Instant) -> bool:
    """Say whether the certificate is one of the authority beside it by name and key, and valid; False: unclear."""
    try:
        mine, authority = _read(files.certificate), _read(files.authority)
    except (_Unclear, TlsRefused, ValueError, IndexError, StopIteration):
        return False
    now = datetime.datetime.fromtimestamp(at / MICROSECONDS_PER_SECOND, tz=datetime.UTC).strftime("%Y%m%d%H%M%S")
    is_issuer = mine.issuer == authority.subject and mine.issuer_key_id == authority.key_id != b""
    # Not in the second in which it begins or ends: what is said of those is the other library's.
    return is_issuer and mine.since < now < mine.until


def _read(path: Path) -> _Plain:
    """Return what the one certificate in a file says; _Unclear for anything unusual, such as a chain."""
    pem = read_pem(path, "the certificate")
    if pem.count(_BEGIN) != 1 or not pem.startswith(_BEGIN):
        raise _Unclear
    data = ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))
    (_, certificate), *_ = _elements(data)
    (_, body), *_ = _elements(certificate)
    fields = [field for field in _elements(body) if field[0] != _VERSION]
    (_, issuer), (_, validity), (_, subject) = fields[2:5]
    (_, extensions), *_ = _elements(next(inside for tag, inside in fields if tag == _EXTENSIONS))
    key_id = issuer_key_id = b""
    for _, extension in _elements(extensions):
        if extension.startswith(_SUBJECT_KEY):
            (_, octets) = _elements(extension)[-1]
            key_id = _one(octets, _OCTETS)
        elif extension.startswith(_AUTHORITY_KEY):
            (_, octets) = _elements(extension)[-1]
            issuer_key_id = _one(_one(octets, _SEQUENCE), _KEY_ID)
    since, until = map(_digits, _elements(validity))
    return _Plain(issuer, subject, since, until, key_id, issuer_key_id)


def _elements(data: bytes) -> list[tuple[int, bytes]]:
    """Return tag and contents of the elements of a DER text, one after the other."""
    found = []
    at = 0
    while at < len(data):
        tag, size, at = data[at], data[at + 1], at + 2
        if size & 0x80:
            digits = size & 0x7F
            size, at = int.from_bytes(data[at : at + digits], "big"), at + digits
        if at + size > len(data):
            raise _Unclear
        found.append((tag, data[at : at + size]))
        at += size
    return found


def _one(data: bytes, wanted: int) -> bytes:
    tag, inside = _elements(data)[0]
    if tag != wanted:
        raise _Unclear
    return inside


def _digits(time: tuple[int, bytes]) -> str:
    tag, text = time[0], time[1].decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if int(text[:2]) >= _FIRST_YEAR_OF_1900S else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise _Unclear
    if len(text) != len("20260131120000Z") or not text.endswith("Z"):
        raise _Unclear
    return text[:-1]
