"""Role and name of a connection's peer, from its certificate.

The API server and the peer transport share this function, so that they always agree. Deny by default: a peer without
exactly one name and one known role has no identity.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

import msgspec

from forebay.replica.values import NAME_CHARACTERS_MAX

AUTHORITY_NAME: Final = "ca"
"""Stem of the authority's files, ca.pem and ca.key; reserved."""

HELPER_HOST: Final = "drill-helper.forebay.invalid"
"""Host name in a drill helper's certificate, in place of an address. No host has this name (RFC 6761). A client that
connects to a replica therefore rejects a helper at the replica's address; a helper's clients expect this name.
"""

NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)
"""Names are also file names (`<name>.pem`) and X.509 common names (64 characters).

No slash, no leading dot, and no leading dash, which would look like an option.
"""

NAME_RULE: Final = (
    f"a name has 1 to {NAME_CHARACTERS_MAX} letters, digits, '_', '.' or '-' and begins with a letter, a digit or '_'"
)


class Role(StrEnum):
    """Role of a certificate's holder, stored as the organisational unit (OU)."""

    REPLICA = "replica"
    AGENT = "agent"
    OPERATOR = "operator"
    USER = "user"
    SCHEDULER = "scheduler"
    """Another scheduler; may use its own external jobs only, which carry the certificate's name."""
    AUDITOR = "auditor"
    """External auditor; reads only checkpoints, tiles and leaves of the ledger's tree."""
    MONITOR = "monitor"
    """Monitoring program; reads only metrics and health of each replica."""
    DRILL = "drill"
    """Drill coordinator; may only run drills."""
    HELPER = "helper"
    """Drill helper of a machine; reads whether a drill is under way, and acts on its own machine only."""
    GATEWAY = "gateway"
    """Login node's gateway; acts for its local accounts only."""


class Identity(msgspec.Struct, frozen=True):
    """Identity certified by the cluster's authority."""

    role: Role
    name: str

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


class IdentityError(Exception):
    """The peer's certificate does not identify it in this cluster; the message is for the peer."""


def is_name(text: str) -> bool:
    """Return True if `text` is a valid name of a replica, node, operator or user."""
    return NAME_PATTERN.fullmatch(text) is not None


def identify(certificate: Mapping[str, Any] | None, *, cluster_id: str | None = None) -> Identity:
    """Return the identity of a verified peer; `certificate` is the result of `ssl.SSLSocket.getpeercert()`.

    With `cluster_id`, the certificate's organisation must match it, for clusters that share an authority.

    Raises:
        IdentityError: There is no certificate, or it does not contain exactly one role and one name.
    """
    if not certificate:
        raise IdentityError(
            "no client certificate was presented; present one that `forebay cluster init` or pki.issue made"
        )
    fields: dict[str, list[str]] = {}
    for relative_name in certificate.get("subject", ()):
        for key, value in relative_name:
            fields.setdefault(str(key), []).append(str(value))
    name = _only(fields, "commonName", "CN")
    unit = _only(fields, "organizationalUnitName", "OU")
    try:
        role = Role(unit)
    except ValueError:
        known = ", ".join(Role)
        raise IdentityError(
            f"the certificate of {name!r} has the unknown role (OU) {unit!r}; roles are {known}"
        ) from None
    if not is_name(name):
        raise IdentityError(f"the certificate's name (CN) {name!r} is not a name: {NAME_RULE}")
    if cluster_id is not None:
        organisation = _only(fields, "organizationName", "O")
        if organisation != cluster_id:
            raise IdentityError(
                f"the certificate of {name!r} belongs to cluster {organisation!r}, but this is {cluster_id!r}"
            )
    return Identity(role=role, name=name)


def _only(fields: Mapping[str, list[str]], key: str, short: str) -> str:
    values = fields.get(key, [])
    if len(values) != 1:
        raise IdentityError(f"the certificate must have exactly one {short} in its subject, it has {len(values)}")
    return values[0]
