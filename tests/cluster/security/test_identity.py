"""Identification of peers: exactly one role and one name, or rejection."""

from typing import Any

import pytest

from forebay.cluster.security.identity import Identity, IdentityError, Role, identify, is_name


def certificate(*pairs: tuple[str, str]) -> dict[str, Any]:
    """Return a certificate with this subject, in the form of `getpeercert()`."""
    return {"subject": tuple((pair,) for pair in pairs)}


ORG, OU, CN = "organizationName", "organizationalUnitName", "commonName"


@pytest.mark.parametrize("role", list(Role))
def test_role_and_name_come_from_the_certificate(role: Role) -> None:
    found = identify(certificate((ORG, "c1"), (OU, role.value), (CN, "x1")), cluster_id="c1")
    assert found == Identity(role, "x1")
    assert str(found) == f"{role.value} x1"


@pytest.mark.parametrize(
    ("subject", "sentence"),
    [
        ([], "exactly one CN"),
        ([(OU, "agent")], "exactly one CN in its subject, it has 0"),
        ([(CN, "n1")], "exactly one OU in its subject, it has 0"),
        ([(OU, "agent"), (CN, "n1"), (CN, "n2")], "exactly one CN in its subject, it has 2"),
        ([(OU, "agent"), (OU, "operator"), (CN, "n1")], "exactly one OU in its subject, it has 2"),
        ([(OU, "admin"), (CN, "n1")], "unknown role (OU) 'admin'; roles are replica, agent, operator, user"),
        ([(OU, "Operator"), (CN, "n1")], "role (OU) 'Operator'"),
        ([(OU, "agent"), (CN, "../n1")], "is not a name"),
        ([(OU, "agent"), (CN, "n1\n")], "is not a name"),
        ([(OU, "agent"), (CN, "")], "is not a name"),
    ],
)
def test_subject_without_exactly_one_role_and_name_is_rejected(subject: list[tuple[str, str]], sentence: str) -> None:
    with pytest.raises(IdentityError) as caught:
        identify({"subject": tuple((pair,) for pair in subject), "issuer": ()})
    assert sentence in str(caught.value)


@pytest.mark.parametrize("nothing", [None, {}])
def test_peer_without_a_certificate_is_rejected(nothing: dict[str, Any] | None) -> None:
    with pytest.raises(IdentityError, match="no client certificate"):
        identify(nothing)


def test_certificate_of_another_cluster_is_rejected() -> None:
    theirs = certificate((ORG, "c2"), (OU, "operator"), (CN, "operator"))
    assert identify(theirs).role is Role.OPERATOR
    with pytest.raises(IdentityError, match="belongs to cluster 'c2', but this is 'c1'"):
        identify(theirs, cluster_id="c1")
    with pytest.raises(IdentityError, match="exactly one O"):
        identify(certificate((OU, "operator"), (CN, "operator")), cluster_id="c1")


@pytest.mark.parametrize("name", ["r1", "a" * 64, "node-01.rack_2", "Alice", "_x", "0"])
def test_valid_names(name: str) -> None:
    assert is_name(name)


@pytest.mark.parametrize("name", ["", "a" * 65, ".", "..", ".x", "-x", "a/b", "a b", "é", "a\n", "a\x00", "٣"])
def test_invalid_names_are_rejected(name: str) -> None:
    assert not is_name(name)
