"""TLS contexts: TLS 1.3, both sides with a certificate of the cluster's authority.

Replicas, agents, the API and the CLI create their contexts here. They trust only the cluster's own authority, not the
system's. Sessions are never resumed, because a ticket could outlive its certificate. Witnesses belong to third parties:
their signatures make them trusted, and they do not authenticate clients (`open_…_context`).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import ssl
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.cluster.security.files import FORBIDDEN_KEY_BITS, TlsError, TlsFiles
from forebay.cluster.system import Clock, SystemClock, closing
from forebay.replica.values import MICROSECONDS_PER_SECOND, NEVER, Instant

if TYPE_CHECKING:
    import asyncio

    # Imported only where a certificate is parsed; most commands need just the quick check (`quick_check`).
    from cryptography import x509

MAX_PEM_BYTES: Final = 256 * 1024
"""Largest certificate or key file, bytes; a certificate chain has a few KiB."""


_CLOCK: Final = SystemClock()

VALIDITY_LOOK_S: Final = 5.0
"""Interval of checks while a process waits until its certificate is valid, seconds."""


class NotValidNow(TlsError):
    """The certificate is not valid by this machine's clock. Either may be corrected while a process waits."""


def server_context(files: TlsFiles, *, required: bool = True) -> ssl.SSLContext:
    """Return a listener's context: TLS 1.3 only; clients need a certificate of the authority.

    Without `required`, a client without a certificate may connect unauthenticated; one with a wrong certificate is
    still rejected.

    Raises:
        TlsError: A file is missing or malformed, or other accounts can read a key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    # In TLS 1.3 this option alone still allows stateful tickets; disabling all tickets needs both lines.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    examine(files)
    return _load_files(context, files)


def client_context(files: TlsFiles, *, examined: bool = False) -> ssl.SSLContext:
    """Return the context of an outgoing connection: TLS 1.3 only, verifying the server's certificate and address.

    `examined`: the caller has checked that the authority issued the certificate.

    Raises:
        TlsError: A file is missing or malformed, or other accounts can read a key.
    """
    if not examined:
        examine(files)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = True
    context.sslobject_class = _ExpiringSSLObject
    return _load_files(context, files)


def authority_context(authority: Path) -> ssl.SSLContext:
    """Return the context of a connection to a replica without a client certificate. The replica's is verified."""
    context = open_client_context(authority)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.sslobject_class = _ExpiringSSLObject
    return context


def open_server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the context of a listener that does not authenticate clients, for a witness: TLS 1.3 only.

    Raises:
        TlsError: A file is missing or malformed, or other accounts can read a key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return _with_chain(context, certificate, key)


def open_client_context(authority: Path | None) -> ssl.SSLContext:
    """Return the context of a connection to a third party's listener, without a client certificate.

    The listener's certificate is verified by the authority in a file, or by the authorities that the system trusts.

    Raises:
        TlsError: The authority file cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = True
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if authority is None:
        context.load_default_certs()
        return context
    try:
        context.load_verify_locations(cadata=read_pem(authority, "the certificate authority").decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
        raise TlsError(f"{authority}: this is not a PEM certificate authority; name another file") from error
    return context


class _ExpiringSSLObject(ssl.SSLObject):
    """Client side of a connection that fails all reads and writes after the server's certificate has expired.

    A listener closes expired connections itself (`cluster.security.peers`); a client's pool has no such check.
    """

    def do_handshake(self) -> None:
        """Complete the handshake and record the expiry of the server's certificate."""
        super().do_handshake()
        self._valid_until = valid_until(self.getpeercert() or {})

    def read(self, len: int = 1024, buffer: Any = None) -> Any:
        """Read, as `ssl.SSLObject` does.

        Raises:
            ssl.SSLError: The certificate has expired.
        """
        self._check()
        return super().read(len) if buffer is None else super().read(len, buffer)

    def write(self, data: Any) -> int:
        """Write, as `ssl.SSLObject` does.

        Raises:
            ssl.SSLError: The certificate has expired.
        """
        self._check()
        return super().write(data)

    def _check(self) -> None:
        if _CLOCK.now() > self._valid_until:
            raise ssl.SSLError(ssl.SSL_ERROR_SSL, "the certificate of the replica has expired on an open connection")


def valid_until(certificate: Mapping[str, Any]) -> Instant:
    """Return a certificate's expiry; `certificate` is the result of `ssl.SSLSocket.getpeercert()`."""
    not_after = certificate.get("notAfter")
    if not isinstance(not_after, str):
        return NEVER
    return Instant(ssl.cert_time_to_seconds(not_after) * MICROSECONDS_PER_SECOND)


def check_key_file(path: Path) -> None:
    """Check that no other account can access a private key.

    Raises:
        TlsError: Another account can access the key; the message names the file and the chmod.
    """
    os.close(open_key_file(path))


def open_key_file(path: Path) -> int:
    """Return a descriptor (O_PATH) of a private key that only its owner can access. Raises as `check_key_file`.

    Reading through it (`/proc/self/fd/N`) reads the checked file, even if its name has been reused.
    """
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise TlsError(
            f"{path}: the private key cannot be read ({error.strerror}); run `forebay cluster init` or issue one"
        ) from error
    try:
        _check_key(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_secret(path: Path, *, bytes_max: int) -> bytes:
    """Return the content of a file with a secret key that only its owner can access.

    Raises:
        TlsError: The file cannot be read, is too large, or other accounts can access it.
    """
    try:
        with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as descriptor:
            _check_key(os.fstat(descriptor), path)
            content = os.read(descriptor, bytes_max + 1)
    except OSError as error:
        remedy = "make one with: head -c 32 /dev/urandom | base64"
        raise TlsError(f"{path}: the secret key cannot be read ({error.strerror}); {remedy}") from error
    if len(content) > bytes_max:
        raise TlsError(f"{path}: the secret key has more than {bytes_max} bytes; name another file")
    return content


def _check_key(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise TlsError(f"{path}: the private key is not a regular file")
    if status.st_uid not in (os.geteuid(), 0):
        raise TlsError(
            f"{path}: the private key belongs to user id {status.st_uid}; it must belong to user id {os.geteuid()}, "
            f"which runs this process: chown it"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & FORBIDDEN_KEY_BITS:
        raise TlsError(f"{path}: the private key has mode {mode:04o}, so others may use it; run: chmod 600 {path}")


def describe_authority(path: Path) -> str:
    """Describe the authority in `path` by name, fingerprint and file; never raises."""
    try:
        certificate = _load_certificate(path)
        return f"the authority {_common_name(certificate.subject)!r} (SHA-256 {_fingerprint(certificate)}) in {path}"
    except ModuleNotFoundError:
        # The client alone is installed without the library.
        return f"the authority in {path}"
    except (TlsError, ValueError):
        # Unreadable parts of a certificate raise only on access.
        return f"the authority in {path} (unreadable)"


def describe_certificate(path: Path) -> str:
    """Describe the certificate in `path` by holder, role, issuer and file; never raises."""
    try:
        from cryptography.x509.oid import NameOID

        certificate = _load_certificate(path)
        units = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
        role = str(units[0].value) if units else "no role"
        name, issuer = _common_name(certificate.subject), _common_name(certificate.issuer)
        until = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
    except ModuleNotFoundError:
        return f"the certificate in {path}"
    except (TlsError, ValueError):
        return f"the certificate in {path} (unreadable)"
    return f"the certificate of {role} {name!r} in {path} (issued by {issuer!r}, valid until {until})"


def read_key_file(path: Path, what: str) -> bytes:
    """Return the bytes of a private key that only its owner can access."""
    with closing(open_key_file(path)) as descriptor:
        return read_pem(path, what, opened=f"/proc/self/fd/{descriptor}")


def read_pem(path: Path, what: str, *, opened: str | None = None) -> bytes:
    """Return the bytes of a small PEM file; `what` describes it in messages, `opened` is another path to it.

    Raises:
        TlsError: The file is missing or larger than MAX_PEM_BYTES.
    """
    try:
        with open(opened or path, "rb") as file:
            data = file.read(MAX_PEM_BYTES + 1)
    except OSError as error:
        raise TlsError(
            f"{path}: {what} cannot be read ({error.strerror}); run `forebay cluster init` or issue one"
        ) from error
    if len(data) > MAX_PEM_BYTES:
        raise TlsError(f"{path}: {what} has more than {MAX_PEM_BYTES} bytes; this is not a PEM certificate or key")
    return data


def parse_certificates(pem: bytes) -> list[x509.Certificate]:
    """Parse the certificates of a PEM text.

    Raises:
        ValueError: The text contains no certificate, or is malformed.
    """
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(pem)
    except x509.InvalidVersion as error:
        # The only parse error the library does not report as ValueError.
        raise ValueError(str(error)) from error


def _unreadable(certificate: Path, key: Path) -> Path:
    """Return the unreadable path: the certificate's or the key's."""
    try:
        certificate.open("rb").close()
    except OSError:
        return certificate
    return key


def _load_files(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    authority = read_pem(files.authority, "the certificate authority")
    try:
        context.load_verify_locations(cadata=authority.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
        raise TlsError(
            f"{files.authority}: this is not a PEM certificate authority; use the cluster's ca.pem"
        ) from error
    return _with_chain(context, files.certificate, files.key)


def _with_chain(context: ssl.SSLContext, certificate: Path, key: Path) -> ssl.SSLContext:
    try:
        with closing(open_key_file(key)) as descriptor:
            # Without a password callback OpenSSL would prompt on the terminal, and a daemon would hang.
            context.load_cert_chain(certificate, f"/proc/self/fd/{descriptor}", password=_no_password)
    except ssl.SSLError as error:
        raise TlsError(
            f"{key}: this is not the unencrypted private key of {certificate} ({error.reason or error}); "
            f"issue the pair again"
        ) from error
    except _KeyIsEncrypted as error:
        raise TlsError(
            f"{key}: the private key is encrypted; Forebay needs an unencrypted one with mode 0600"
        ) from error
    except OSError as error:
        raise TlsError(
            f"{_unreadable(certificate, key)}: cannot be read ({error.strerror}); give it to the account that this "
            f"process runs as (user id {os.geteuid()})"
        ) from error
    return context


def check_validity(path: Path, at: Instant) -> None:
    """Check that a certificate is valid at `at`. The peer would only close the connection, without a reason.

    Raises:
        NotValidNow: The certificate is not valid; the message names the file and the date.
    """
    certificate = _load_certificate(path)
    moment = datetime.datetime.fromtimestamp(at / MICROSECONDS_PER_SECOND, tz=datetime.UTC)
    if moment > certificate.not_valid_after_utc:
        until = certificate.not_valid_after_utc
        raise NotValidNow(
            f"{path}: the certificate expired on {until:%Y-%m-%d at %H:%M} UTC, and the clock of this machine shows "
            f"{moment:%Y-%m-%d %H:%M}; issue a new one, or set the clock"
        )
    if moment < certificate.not_valid_before_utc:
        since = certificate.not_valid_before_utc
        raise NotValidNow(
            f"{path}: the certificate is valid from {since:%Y-%m-%d %H:%M} UTC, and the clock of this machine shows "
            f"{moment:%Y-%m-%d %H:%M}; set the clock"
        )


async def until_valid(path: Path, clock: Clock, stop: asyncio.Event) -> bool:
    """Wait until the certificate is valid by this machine's clock; return False if `stop` is set first.

    At boot the clock is often wrong for a while, and a process that exits because of that would stay down.
    """
    import asyncio
    import logging

    said = ""
    while not stop.is_set():
        try:
            check_validity(path, clock.now())
        except NotValidNow as wait:
            if str(wait) != said:
                logging.getLogger(__name__).error("%s; checking again every %.0f s until then", wait, VALIDITY_LOOK_S)
                said = str(wait)
        else:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), VALIDITY_LOOK_S)
    return False


def examine(files: TlsFiles) -> None:
    """Check that no other account can read the key and that the authority signed the certificate.

    The peer trusts the same authority, and would close the connection without a reason.

    Raises:
        TlsError: A check failed.
    """
    from cryptography.exceptions import InvalidSignature

    check_key_file(files.key)
    chain = _load_certificates(files.certificate, "the certificate")
    authorities = _load_certificates(files.authority, "the certificate authority")
    for authority in authorities:
        try:
            chain[-1].verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            continue
        return
    raise TlsError(
        f"{describe_certificate(files.certificate)} is not signed by {describe_authority(files.authority)}; "
        f"use a certificate and an authority of the same cluster"
    )


class _KeyIsEncrypted(Exception):
    pass


def _no_password() -> str:
    raise _KeyIsEncrypted


def _load_certificate(path: Path) -> x509.Certificate:
    return _load_certificates(path, "the certificate")[0]


def _load_certificates(path: Path, what: str) -> list[x509.Certificate]:
    try:
        return parse_certificates(read_pem(path, what))
    except ValueError as error:
        raise TlsError(f"{path}: {what} is not a PEM certificate; run `forebay cluster init` or issue one") from error


def _common_name(name: x509.Name) -> str:
    from cryptography.x509.oid import NameOID

    values = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(values[0].value) if values else "(no name)"


def _fingerprint(certificate: x509.Certificate) -> str:
    from cryptography.hazmat.primitives import hashes

    return certificate.fingerprint(hashes.SHA256()).hex()[:16]
