"""Who is on the other end of a connection: the role and the name in a peer's certificate.

The API server and the peer transport ask the same function, so that they cannot disagree about who somebody is. Whoever
is not named exactly once, or has a role that Forebay does not know, is nobody: deny by default.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

import msgspec

from replica.values import NAME_CHARACTERS_MAX

AUTHORITY_NAME: Final = "ca"
"""Stem of the authority's two files, ca.pem and ca.key; nobody else may have this name."""

HELPER_HOST: Final = "drill-helper.forebay.invalid"
"""What a helper's certificate is for instead of an address. No host has such a name (RFC 6761): a client that connects
to a replica, wherever it is, refuses a helper there; who connects to a helper asks for this name."""

NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)
"""Names are also file names (`<name>.pem`) and X.509 common names (64 characters).

No slash, no leading dot, no leading dash that a command would take for an option.
"""

NAME_RULE: Final = (
    f"a name has 1 to {NAME_CHARACTERS_MAX} letters, digits, '_', '.' or '-' and begins with a letter, a digit or '_'"
)


class Role(StrEnum):
    """What the holder of a certificate may be; the certificate's organisational unit (OU) says it."""

    REPLICA = "replica"
    AGENT = "agent"
    OPERATOR = "operator"
    USER = "user"
    SCHEDULER = "scheduler"
    """Another scheduler: for its external jobs, which stand under the name of the certificate, and nothing else."""
    AUDITOR = "auditor"
    """Somebody outside: reads checkpoints, tiles and leaves of the ledger's tree, and nothing else."""
    MONITOR = "monitor"
    """A program that watches: reads metrics and health of each replica, and nothing else."""
    DRILL = "drill"
    """Somebody who carries out drills of the cluster, and nothing else."""
    HELPER = "helper"
    """A machine's helper for drills: reads whether one is under way, and does what its own machine allows."""
    GATEWAY = "gateway"
    """A login node's service: speaks for the accounts of the people on it, and asks nothing for itself."""


class Identity(msgspec.Struct, frozen=True):
    """Somebody whom the cluster's certificate authority vouches for."""

    role: Role
    name: str

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


class IdentityError(Exception):
    """The peer's certificate does not say who the peer is in this cluster; the message is a sentence for the peer."""


def is_name(text: str) -> bool:
    """Say whether `text` may name a replica, a node, an operator or a user."""
    return NAME_PATTERN.fullmatch(text) is not None


def identify(certificate: Mapping[str, Any] | None, *, cluster_id: str | None = None) -> Identity:
    """Return who a verified peer is; `certificate` is what `ssl.SSLSocket.getpeercert()` returned.

    With `cluster_id` the certificate's organisation must be that cluster too, for clusters that share an authority.
    IdentityError if there is no certificate or it does not name exactly one role and one name.
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
            f"the certificate of {name!r} has the role (OU) {unit!r}; known roles are {known}"
        ) from None
    if not is_name(name):
        raise IdentityError(f"the certificate's name (CN) {name!r} is not a name: {NAME_RULE}")
    if cluster_id is not None:
        organisation = _only(fields, "organizationName", "O")
        if organisation != cluster_id:
            raise IdentityError(
                f"the certificate of {name!r} belongs to cluster {organisation!r}, this is cluster {cluster_id!r}"
            )
    return Identity(role=role, name=name)


def _only(fields: Mapping[str, list[str]], key: str, short: str) -> str:
    values = fields.get(key, [])
    if len(values) != 1:
        raise IdentityError(f"the certificate must have exactly one {short} in its subject, it has {len(values)}")
    return values[0]
