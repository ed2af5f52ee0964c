"""Authorization: the identity in the peer's certificate, and the permissions of each role."""

from __future__ import annotations

from cluster.api.web.problems import Problem, permission_denied
from cluster.security import Identity, IdentityError, Role
from replica.messages import Actor, ActorRole

_ACTOR_ROLES = {
    Role.OPERATOR: ActorRole.OPERATOR,
    Role.USER: ActorRole.USER,
    Role.AGENT: ActorRole.AGENT,
    Role.SCHEDULER: ActorRole.SCHEDULER,
    Role.DRILL: ActorRole.DRILL,
}


def not_identified(error: IdentityError) -> Problem:
    """Return the error for an unidentified client."""
    return Problem(
        401, "not_identified", str(error), "use a certificate that `forebay cluster init` or `forebay cert issue` made"
    )


def permit(identity: Identity, roles: frozenset[Role], what: str) -> None:
    """Check that the caller has one of the roles; Problem 403."""
    if identity.role not in roles:
        allowed = ", ".join(sorted(roles))
        raise permission_denied(f"{identity} may not {what}", f"use the certificate of a role that may: {allowed}")


def permit_node(identity: Identity, node: str) -> None:
    """Check that an agent acts for its own node; Problem 403."""
    if identity.name != node:
        remedy = "start each agent with the certificate of its own node"
        raise permission_denied(f"{identity} may not act for node {node!r}", remedy)


def actor_of(identity: Identity) -> Actor:
    """Return the identity for commands; Problem 403 for a replica, which sends none through the API."""
    role = _ACTOR_ROLES.get(identity.role)
    if role is None:
        raise permission_denied(f"{identity} may not send commands", "use another certificate")
    return Actor(role, identity.name)
