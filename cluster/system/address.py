"""Network addresses: a host and a port, written `host:port` or `[v6]:port`."""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    import ipaddress

HOST_CHARACTERS_MAX: Final = 253
"""Maximum length of a host name: the DNS limit."""

_HOST_NAME: Final = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*", re.ASCII)
_PORT: Final = re.compile(r"[0-9]{1,5}", re.ASCII)
PORT_MAX: Final = 65_535

EXAMPLE: Final = "write host:port, for example 10.0.0.5:7401 or [fd00::5]:7401"


class AddressError(ValueError):
    """Text that is not an address; `remedy` gives the valid form."""

    def __init__(self, sentence: str, remedy: str = EXAMPLE) -> None:
        super().__init__(f"{sentence}; {remedy}")
        self.sentence = sentence
        self.remedy = remedy


class Address(msgspec.Struct, frozen=True, order=True):
    """Host (name, IPv4 or IPv6 without brackets) and TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Address as a URL without a trailing slash."""
        return f"https://{self}"

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine can reach the address."""
        if self.host == "localhost":
            return True
        import ipaddress

        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse an address.

        Raises:
            AddressError: The text is not an address; the error has a remedy.
        """
        if text.startswith("["):
            host, bracket, rest = text[1:].partition("]")
            if not bracket or not rest.startswith(":"):
                raise AddressError(f"{text!r} is not an address")
            port_text, bracketed = rest[1:], True
        else:
            host, colon, port_text = text.rpartition(":")
            if not colon:
                raise AddressError(f"{text!r} has no port")
            bracketed = False
        if _PORT.fullmatch(port_text) is None or not 1 <= int(port_text) <= PORT_MAX:
            raise AddressError(f"{port_text!r} in {text!r} is not a port", f"use a number from 1 to {PORT_MAX}")
        return cls(_checked_host(host, text, bracketed), int(port_text))


def _checked_host(host: str, text: str, bracketed: bool) -> str:
    if _is_ipv4(host):
        address, version, is_unspecified = host, 4, host == "0.0.0.0"
    elif (v6 := _ipv6(host)) is not None:
        address, version, is_unspecified = str(v6), 6, v6.is_unspecified
    else:
        if bracketed or len(host) > HOST_CHARACTERS_MAX or _HOST_NAME.fullmatch(host) is None:
            raise AddressError(f"{host!r} in {text!r} is neither an IP address nor a host name")
        if host.replace(".", "").isdigit():
            raise AddressError(f"{host!r} in {text!r} is not an IP address")
        return host
    if bracketed != (version == 6):
        raise AddressError(f"{text!r} has misplaced brackets")
    if is_unspecified:
        raise AddressError(
            f"{text!r} is not an address that another machine could connect to",
            "write the address that other machines connect to",
        )
    return address


def _is_ipv4(host: str) -> bool:
    try:
        return len(socket.inet_pton(socket.AF_INET, host)) == 4
    except (OSError, ValueError):
        return False


def _ipv6(host: str) -> ipaddress.IPv6Address | None:
    if ":" not in host:
        return None
    import ipaddress  # rarely needed

    try:
        return ipaddress.IPv6Address(host)
    except ValueError:
        return None
