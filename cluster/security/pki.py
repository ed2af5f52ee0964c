"""The cluster's certificate authority: creation, renewal, and issuing of certificates.

A certificate's subject is O = cluster ID, OU = role, CN = name. Only certificates of replicas and helpers have the
extended key usage serverAuth, so agents and users cannot pose as a replica. A helper's certificate names only
HELPER_HOST, which is no address, so helpers cannot pose as a replica either. `ca.key` is needed only to issue
certificates; in a cluster of several machines it stays with the operator.
"""

import contextlib
import datetime
import ipaddress
import os
import secrets
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from forebay.cluster.security.files import TlsError, TlsFiles
from forebay.cluster.security.identity import AUTHORITY_NAME, HELPER_HOST, NAME_RULE, Role, is_name
from forebay.cluster.security.tls import parse_certificates, read_key_file, read_pem
from forebay.cluster.system import keep_ownership, make_private_directory
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant

AUTHORITY_LIFETIME_DAYS: Final = 3650
"""Validity of an authority, days: replacing it touches every machine, so it outlives the hardware."""

CERTIFICATE_LIFETIME_DAYS: Final = 825
"""Validity of a certificate, days: yearly renewal with a year's grace."""

CLOCK_TOLERANCE_MINUTES: Final = 10
"""Time that a certificate is valid before its creation, minutes, because another machine's clock may be behind."""

MAX_SUBJECT_ALTERNATIVE_NAMES: Final = 64
"""Maximum number of addresses in one certificate: a replica has a handful, so more is a mistake."""

DIRECTORY_MODE: Final = 0o700

SHARED_DIRECTORY_MODE: Final = 0o750
"""Mode of a directory with keys of several accounts, such as a service's and root's. The group may list it."""

FORBIDDEN_DIRECTORY_BITS: Final = stat.S_IWGRP | stat.S_IRWXO
"""Permission bits forbidden on a key directory, because write access allows replacing keys.

Each key's own mode protects it from a group that may list the directory.
"""

KEY_MODE: Final = 0o600
CERTIFICATE_MODE: Final = 0o644


class PkiError(Exception):
    """A certificate cannot be issued; the message names the file or the name, and the remedy."""


class Authority(msgspec.Struct, frozen=True):
    """Certificate and private key of an authority."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def cluster_id(self) -> str:
        """Return the ID of this authority's cluster."""
        return str(self.certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)[0].value)


def create_authority(directory: Path, *, cluster_name: str, cluster_id: str, at: Instant) -> Authority:
    """Create an authority and write ca.pem and ca.key (mode 0600) to `directory` (created with mode 0700).

    Raises:
        PkiError: An authority exists already. A second one would exclude all holders of certificates of the first.
    """
    _make_private_directory(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, cluster_id),
            x509.NameAttribute(NameOID.COMMON_NAME, f"Forebay {cluster_name}"[:64]),
        ]
    )
    certificate = _authority_certificate(subject, key, at)
    _write_pair(directory, AUTHORITY_NAME, [certificate], key, replace=False)
    return Authority(certificate=certificate, key=key)


def load_authority(directory: Path) -> Authority:
    """Read ca.pem and ca.key from `directory`.

    Raises:
        PkiError: A file is missing, malformed or not private.
    """
    certificate_path, key_path = directory / f"{AUTHORITY_NAME}.pem", directory / f"{AUTHORITY_NAME}.key"
    try:
        key_pem = read_key_file(key_path, "the authority's key")
        certificate_pem = read_pem(certificate_path, "the authority")
    except TlsError as error:
        raise PkiError(str(error)) from error
    try:
        certificates = parse_certificates(certificate_pem)
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError) as error:
        raise PkiError(
            f"{directory}: ca.pem or ca.key is not an unencrypted PEM file that `forebay cluster init` wrote"
        ) from error
    # During a renewal, ca.pem also contains the previous authority.
    certificate = next((one for one in certificates if one.public_key() == key.public_key()), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or certificate is None:
        raise PkiError(
            f"{key_path}: this is not the elliptic-curve key of {certificate_path}; restore the matching pair"
        )
    if not certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME):
        raise PkiError(
            f"{certificate_path}: the authority does not name its cluster (O); use one that `forebay cluster init` made"
        )
    return Authority(certificate=certificate, key=key)


def renew_authority(directory: Path, *, at: Instant) -> Authority:
    """Create a new authority key, put its certificate first in ca.pem, and return the new authority.

    Hosts with the new ca.pem trust certificates of both authorities. Distribute ca.pem before issuing certificates.

    Raises:
        PkiError: An earlier renewal is unfinished.
    """
    former = load_authority(directory)
    if len(_authorities(directory)) > 1:
        raise PkiError(
            f"{directory / AUTHORITY_NAME}.pem has two authorities of an unfinished renewal; finish the renewal first"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _authority_certificate(former.certificate.subject, key, at)
    _write_pair(directory, AUTHORITY_NAME, [certificate, former.certificate], key, replace=True)
    return Authority(certificate=certificate, key=key)


def retire_authorities(directory: Path) -> int:
    """Remove all authorities from ca.pem except the one of ca.key; return the number removed."""
    current, known = load_authority(directory), _authorities(directory)
    if len(known) > 1:
        _write_pair(directory, AUTHORITY_NAME, [current.certificate], current.key, replace=True)
    return len(known) - 1


def _authorities(directory: Path) -> list[x509.Certificate]:
    return parse_certificates(read_pem(directory / f"{AUTHORITY_NAME}.pem", "the authority"))


def _authority_certificate(subject: x509.Name, key: ec.EllipticCurvePrivateKey, at: Instant) -> x509.Certificate:
    return (
        _builder(subject, subject, key.public_key(), at, AUTHORITY_LIFETIME_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def issue(
    authority: Authority,
    directory: Path,
    *,
    role: Role,
    name: str,
    at: Instant,
    addresses: Iterable[str] = (),
    replace: bool = False,
) -> TlsFiles:
    """Issue a certificate and write <name>.pem and <name>.key (mode 0600) to `directory`.

    `addresses` are the host names or IP addresses of a replica, without ports. A replica needs at least one; other
    roles have none. `at` is the wall clock, µs.

    Raises:
        PkiError: The name is invalid, or its files exist and `replace` is false.
    """
    if not is_name(name) or name == AUTHORITY_NAME:
        raise PkiError(
            f"{name!r} cannot name a certificate: {NAME_RULE}, and {AUTHORITY_NAME!r} is the authority's own"
        )
    alternatives = _alternative_names(name, role, sorted(set(addresses)))
    _make_private_directory(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, authority.cluster_id),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role.value),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if role in _SERVERS:
        usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
    builder = (
        _builder(subject, authority.certificate.subject, key.public_key(), at, CERTIFICATE_LIFETIME_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
    )
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    certificate = builder.sign(authority.key, hashes.SHA256())
    _write_pair(directory, name, [certificate], key, replace=replace)
    return TlsFiles(
        authority=directory / f"{AUTHORITY_NAME}.pem",
        certificate=directory / f"{name}.pem",
        key=directory / f"{name}.key",
    )


_SERVERS = frozenset({Role.REPLICA, Role.HELPER})
"""Roles that accept connections."""


def _alternative_names(name: str, role: Role, addresses: list[str]) -> list[x509.GeneralName]:
    if role is not Role.REPLICA:
        if addresses and role is Role.HELPER:
            said = ", ".join(addresses)
            raise PkiError(f"{role} {name!r} is identified by its role and name, not by an address; leave out {said}")
        if addresses:
            raise PkiError(
                f"{role} {name!r} accepts no connections and needs no addresses; leave out {', '.join(addresses)}"
            )
        return [x509.DNSName(HELPER_HOST)] if role is Role.HELPER else []
    if not addresses:
        raise PkiError(f"{role} {name!r} needs the address at which others reach it, e.g. addresses=['127.0.0.1']")
    if len(addresses) > MAX_SUBJECT_ALTERNATIVE_NAMES:
        raise PkiError(
            f"{role} {name!r} has {len(addresses)} addresses; at most {MAX_SUBJECT_ALTERNATIVE_NAMES} are possible"
        )
    alternatives: list[x509.GeneralName] = []
    for address in addresses:
        if address.lower().rstrip(".") == HELPER_HOST:
            raise PkiError(f"{HELPER_HOST} is reserved for helpers; give {role} {name!r} its own address")
        try:
            alternatives.append(x509.IPAddress(ipaddress.ip_address(address)))
        except ValueError:
            try:
                alternatives.append(x509.DNSName(address))
            except ValueError as error:
                raise PkiError(
                    f"{address!r} is neither an IP address nor an ASCII host name; give one without a port"
                ) from error
    return alternatives


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, at: Instant, lifetime_days: int
) -> x509.CertificateBuilder:
    made = datetime.datetime.fromtimestamp(at // MICROSECONDS_PER_SECOND, tz=datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(made - datetime.timedelta(minutes=CLOCK_TOLERANCE_MINUTES))
        .not_valid_after(made + datetime.timedelta(days=lifetime_days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _make_private_directory(directory: Path) -> None:
    try:
        if not directory.exists():
            make_private_directory(directory)
        mode = stat.S_IMODE(directory.stat().st_mode)
    except OSError as error:
        raise PkiError(f"{directory}: the directory for certificates cannot be made ({error.strerror})") from error
    # The mode is not corrected here, because the directory may serve other purposes.
    if mode & FORBIDDEN_DIRECTORY_BITS:
        raise PkiError(f"{directory}: the directory for keys has mode {mode:04o}; run: chmod 700 {directory}")


def _write_pair(
    directory: Path,
    name: str,
    certificates: Sequence[x509.Certificate],
    key: ec.EllipticCurvePrivateKey,
    *,
    replace: bool,
) -> None:
    directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not replace:
            for suffix in ("pem", "key"):
                with contextlib.suppress(FileNotFoundError):
                    os.stat(f"{name}.{suffix}", dir_fd=directory_fd, follow_symlinks=False)
                    raise PkiError(f"{directory / name}.{suffix} already exists; remove it, or use --replace")
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _write_file(directory_fd, f"{name}.key", pem, KEY_MODE)
        shown = b"".join(one.public_bytes(serialization.Encoding.PEM) for one in certificates)
        _write_file(directory_fd, f"{name}.pem", shown, CERTIFICATE_MODE)
        os.fsync(directory_fd)
    except OSError as error:
        raise PkiError(f"{directory}: the certificate of {name!r} cannot be written ({error.strerror})") from error
    finally:
        os.close(directory_fd)


def _write_file(directory_fd: int, file_name: str, data: bytes, mode: int) -> None:
    temporary = f".{file_name}.{secrets.token_hex(8)}"
    # Setting the mode at creation leaves no moment in which another account could open the key.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, mode, dir_fd=directory_fd)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            keep_ownership(file.fileno(), file_name, directory=directory_fd)
            os.fsync(file.fileno())
        os.rename(temporary, file_name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory_fd)
        raise
