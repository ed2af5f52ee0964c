"""Access methods of the CLI: as the account that runs the command, or with a named certificate.

An account uses its machine's gateway, else MUNGE if the site has it, else the certificate with its name. No account is
an operator by default.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

import msgspec

from forebay.cluster.client.attempt import AttemptError
from forebay.cluster.client.errors import UNTRUSTED
from forebay.cluster.config import AccessConfig, ConfigError
from forebay.cluster.security import NO_CERTIFICATE, TlsError, TlsFiles, is_name
from forebay.cluster.system import account_of, peer_account, short_path, uid_of

PROBE_S: Final = 5.0
"""Time to connect to a gateway, seconds; the kernel connects at once unless hundreds wait."""


class GatewayAccess(msgspec.Struct, frozen=True):
    """This machine's gateway, and the accounts trusted to run it."""

    path: Path
    owners: frozenset[int]


class MungeAccess(msgspec.Struct, frozen=True):
    """Replicas that accept MUNGE credentials."""

    files: TlsFiles
    """Only the authority; no certificate is shown."""
    cluster_id: str
    socket: Path | None


AccessMethod = GatewayAccess | MungeAccess | TlsFiles


def access_method_of(config: AccessConfig, identity: str | None) -> AccessMethod:
    """Return the access method with or without a certificate.

    Raises:
        ConfigError, TlsError: No access method is available.
    """
    return own_access_method(config) if identity is None else config.tls_files(identity)


def own_access_method(config: AccessConfig) -> AccessMethod:
    """Return the access method of the account that runs this process.

    Raises:
        ConfigError: None is available; the message lists the options.
    """
    table = config.access
    way = GatewayAccess(table.socket, _owners(config))
    why_no_gateway = _gateway_problem(way)
    if not why_no_gateway:
        return way
    why_no_munge = "[access] munge is not set"
    if table.munge:
        from forebay.cluster.security import Munge, MungeUnavailable

        try:
            Munge(table.munge_socket).encode(b"")
        except MungeUnavailable as error:
            why_no_munge = str(error)
        else:
            nothing = TlsFiles(config.tls.authority, NO_CERTIFICATE, NO_CERTIFICATE)
            return MungeAccess(nothing, config.cluster.id, table.munge_socket)
    account = account_of(os.geteuid())
    if account is not None and is_name(account):
        try:
            return config.tls_files(account)
        except (ConfigError, TlsError):
            pass
    name = account or f"uid {os.geteuid()}"
    raise ConfigError(
        config.file,
        "access",
        f"{why_no_gateway}, {why_no_munge}, and there is no certificate for {name} in {config.tls.certificates}",
        "start the gateway (`forebay cluster up` starts one; on a login node: `forebay run gateway`), ask an operator "
        "for a certificate, or name one that you may use with --identity or $FOREBAY_IDENTITY",
    )


def connect_gateway(way: GatewayAccess, timeout_s: float) -> socket.socket:
    """Connect to the gateway, and check by its UID that its owner is trusted, because it sees every request.

    Raises:
        OSError: The gateway cannot be reached.
        AttemptError: Its owner is not trusted.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        with short_path(way.path) as short:
            connection.connect(short)
        check_owner(way, connection)
    except BaseException:
        connection.close()
        raise
    return connection


def check_owner(way: GatewayAccess, connection: socket.socket) -> None:
    """Check that a trusted account runs the gateway.

    Raises:
        AttemptError: Another account runs it.
    """
    uid = peer_account(connection).uid
    if uid not in way.owners:
        raise AttemptError(
            f"the service at {way.path} is run by {account_of(uid) or 'an account'} (uid {uid}), which is not trusted",
            code=UNTRUSTED,
            may_have_arrived=False,
            remedy="inform an operator; if that account should run gateways, name it in [access] gateway_account",
        )


def _owners(config: AccessConfig) -> frozenset[int]:
    """Return the trusted gateway owners: root, the own account, the configuration's owner and its `gateway_account`."""
    named = config.access.gateway_account
    found = uid_of(named) if named is not None else None
    return frozenset({0, os.geteuid(), config.owner_uid} | ({found} if found is not None else set()))


def _gateway_problem(way: GatewayAccess) -> str:
    """Return the reason the gateway cannot be used, or an empty string."""
    try:
        connect_gateway(way, PROBE_S).close()
    except AttemptError as error:
        raise TlsError(str(error)) from error
    except FileNotFoundError:
        return f"there is no gateway at {way.path}"
    except OSError as error:
        return f"the gateway at {way.path} cannot be reached ({error.strerror or error})"
    return ""
