"""URLs of third parties in the configuration: HTTPS, or HTTP to a proxy on this machine; without secrets."""

import re
from typing import Final
from urllib.parse import urlsplit

from forebay.cluster.system import Address

URL_CHARACTERS_MAX: Final = 1024
HTTPS_PORT: Final = 443

# No user, query or fragment: nothing secret, and nothing that changes the answer.
_URL: Final = r"https?://[A-Za-z0-9.:\[\]-]+(/[A-Za-z0-9._~%/-]*)?"


def https_fault(text: str, risk: str) -> str:
    """Return the fault of a URL, or ""; `risk` says why HTTP to another machine is rejected."""
    sentence = f"found {text!r:.60}, which is not an HTTPS prefix"
    if len(text) > URL_CHARACTERS_MAX or re.fullmatch(_URL, text) is None:
        return sentence
    try:
        url = urlsplit(text)
        host, port = url.hostname, url.port or HTTPS_PORT
    except ValueError:
        return sentence
    if not host or (url.scheme == "http" and not Address(host, port).is_loopback):
        return f"{host!r} is another machine, {risk}" if host else sentence
    return ""
