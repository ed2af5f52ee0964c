"""Addresses: strict parsing, and output that parses to the same address."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.system.address import Address, AddressError, _ipv6, _is_ipv4


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7401", "127.0.0.1", 7401),
        ("localhost:1", "localhost", 1),
        ("bb-1.cluster_2.example:65535", "bb-1.cluster_2.example", 65535),
        ("[::1]:80", "::1", 80),
        ("[FD00::5]:80", "fd00::5", 80),
    ],
)
def test_valid_address_is_read(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == Address(host, port)


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)), st.integers(1, 65535))
def test_address_survives_conversion_to_text(ip: object, port: int) -> None:
    address = Address(str(ip), port)
    if str(ip) not in ("0.0.0.0", "::"):
        assert Address.parse(str(address)) == address


HOSTS = (
    st.text("0123456789abcdefx.:%", max_size=16)
    | st.lists(st.integers(0, 300).map(str) | st.sampled_from(["", "01", "1e1", "٣"]), max_size=5).map(".".join)
    | st.ip_addresses().map(str)
    | st.text(max_size=6)
)


@given(HOSTS)
def test_ip_addresses_are_recognized_as_by_ipaddress(host: str) -> None:
    try:
        known: object = ipaddress.ip_address(host)
    except ValueError:
        known = None
    assert ((ipaddress.IPv4Address(host) if _is_ipv4(host) else _ipv6(host)), known) == (known, known)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("127.0.0.1", "has no port"),
        ("", "has no port"),
        (":80", "neither an IP address nor a host name"),
        ("127.0.0.1:", "is not a port"),
        ("127.0.0.1:0", "use a number from 1 to 65535"),
        ("127.0.0.1:65536", "use a number from 1 to 65535"),
        ("127.0.0.1:+80", "is not a port"),
        ("127.0.0.1:٣", "is not a port"),
        ("127.0.0.999:80", "is not an IP address"),
        ("::1:80", "misplaced brackets"),
        ("[127.0.0.1]:80", "misplaced brackets"),
        ("[::1]80", "is not an address"),
        ("[::1", "is not an address"),
        ("[host]:80", "neither an IP address nor a host name"),
        ("0.0.0.0:80", "not an address that another machine could connect to"),
        ("[::]:80", "not an address that another machine could connect to"),
        ("a b:80", "neither"),
        ("user@host:80", "neither"),
        ("host/path:80", "neither"),
        ("-host:80", "neither"),
        ("a" * 64 + ":80", "neither"),
    ],
)
def test_invalid_address_is_rejected_with_the_expected_form(text: str, sentence: str) -> None:
    with pytest.raises(AddressError) as caught:
        Address.parse(text)
    assert sentence in str(caught.value)
    assert "write" in caught.value.remedy or "use" in caught.value.remedy


def test_loopback_is_recognized() -> None:
    assert [Address(host, 1).is_loopback for host in ("127.0.0.1", "::1", "localhost", "10.0.0.1", "other")] == [
        True,
        True,
        True,
        False,
        False,
    ]
