"""Certificate files of a directory: holders, roles and expiry."""

import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID

from forebay.cluster.security.files import TlsError, TlsFiles
from forebay.cluster.security.pki import AUTHORITY_NAME
from forebay.cluster.security.tls import parse_certificates, read_pem
from forebay.replica.values import MICROSECONDS_PER_SECOND, NEVER, Instant

AUTHORITY_ROLE: Final = "authority"
"""Role displayed for ca.pem, which has no role in the cluster."""

CERTIFICATES_LISTED_MAX: Final = 10_000
"""Maximum number of files read from one directory: every user of a large site."""


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """Certificate file. Times are instants, µs.

    `problem` explains why a file is unreadable, and is empty otherwise.
    """

    name: str
    role: str
    """replica, agent, operator, user; `authority` for ca.pem; empty if unreadable."""
    cluster_id: str = ""
    valid_from: Instant = NEVER
    valid_until: Instant = NEVER
    addresses: tuple[str, ...] = ()
    serial: str = ""
    """Hexadecimal digits, as in the revocation list."""
    has_key: bool = False
    """True if the private key is in the same directory."""
    problem: str = ""


def certificates_in(directory: Path) -> list[Certificate]:
    """Return the certificates of a directory by name.

    Raises:
        OSError: The directory is unreadable.
    """
    names = sorted(name for name in os.listdir(directory) if name.endswith(".pem") and not name.startswith("."))
    return [certificate_of(directory, name.removesuffix(".pem")) for name in names[:CERTIFICATES_LISTED_MAX]]


def certificate_of(directory: Path, name: str) -> Certificate:
    """Return the contents of <name>.pem; any error is reported in its `problem`."""
    has_key = False
    with contextlib.suppress(OSError):
        has_key = (directory / f"{name}.key").exists()
    try:
        found = parse_certificates(read_pem(directory / f"{name}.pem", "the certificate"))[0]
    except (TlsError, ValueError) as error:
        problem = str(error) if isinstance(error, TlsError) else f"{name}.pem is not a PEM certificate"
        return Certificate(name=name, role="", has_key=has_key, problem=problem)
    units = found.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
    organisations = found.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    return Certificate(
        name=name,
        role=AUTHORITY_ROLE if name == AUTHORITY_NAME else str(units[0].value) if units else "",
        cluster_id=str(organisations[0].value) if organisations else "",
        valid_from=Instant(int(found.not_valid_before_utc.timestamp()) * MICROSECONDS_PER_SECOND),
        valid_until=_until(found),
        addresses=_addresses(found),
        serial=f"{found.serial_number:x}",
        has_key=has_key,
    )


def expiries(files: TlsFiles) -> tuple[Instant, Instant]:
    """Return the expiry of a process's certificate and of its issuing authority; NEVER if unknown."""
    try:
        shown = parse_certificates(read_pem(files.certificate, "the certificate"))[0]
        authorities = parse_certificates(read_pem(files.authority, "the certificate authority"))
    except (TlsError, ValueError):
        return NEVER, NEVER
    for authority in authorities:
        with contextlib.suppress(ValueError, TypeError, InvalidSignature):
            shown.verify_directly_issued_by(authority)
            return _until(shown), _until(authority)
    return _until(shown), NEVER


def _until(certificate: x509.Certificate) -> Instant:
    return Instant(int(certificate.not_valid_after_utc.timestamp()) * MICROSECONDS_PER_SECOND)


def _addresses(found: x509.Certificate) -> tuple[str, ...]:
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return ()
    return tuple(str(name.value) for name in names)
