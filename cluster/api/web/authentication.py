"""Authorization: the identity in the peer's certificate, and the permissions of each role."""

from __future__ import annotations

from forebay.cluster.api.web.problems import Problem, permission_denied
from forebay.cluster.security import Identity, IdentityError, Role
from forebay.replica.messages import Actor, ActorRole

_ACTOR_ROLES = {
    Role.OPERATOR: ActorRole.OPERATOR,
    Role.USER: ActorRole.USER,
    Role.AGENT: ActorRole.AGENT,
    Role.SCHEDULER: ActorRole.SCHEDULER,
    Role.DRILL: ActorRole.DRILL,
}


def not_identified(error: IdentityError) -> Problem:
    """Return the error for an unidentified client."""
    return Problem(401, "not_identified", str(error), "use a certificate that `forebay cluster init` made")


def permit(identity: Identity, roles: frozenset[Role], what: str) -> None:
    """Check that the caller has one of the roles.

    Raises:
        Problem: 403, if the caller has none of them.
    """
    if identity.role not in roles:
        allowed = ", ".join(sorted(roles))
        raise permission_denied(f"{identity} may not {what}", f"use a certificate with one of the roles {allowed}")


def permit_node(identity: Identity, node: str) -> None:
    """Check that an agent acts for its own node.

    Raises:
        Problem: 403, if it does not.
    """
    if identity.name != node:
        remedy = "start each agent with the certificate of its own node"
        raise permission_denied(f"{identity} may not act for node {node!r}", remedy)


def actor_of(identity: Identity) -> Actor:
    """Return the identity for commands.

    Raises:
        Problem: 403, for a replica, which sends no commands through the API.
    """
    role = _ACTOR_ROLES.get(identity.role)
    if role is None:
        raise permission_denied(f"{identity} may not send commands", "use another certificate")
    return Actor(role, identity.name)
