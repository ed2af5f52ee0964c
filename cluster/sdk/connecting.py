"""Access to a cluster: from forebay.toml as the command line finds it, or from addresses and files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from forebay.cluster.client import Client as ClusterClient
from forebay.cluster.config import find_config, read_access
from forebay.cluster.sdk.errors import CONFIGURATION, ConfigurationError, converted_errors
from forebay.cluster.security import TlsFiles
from forebay.cluster.system import Address, AddressError

CONFIG_VARIABLE: Final = "FOREBAY_CONFIG"
IDENTITY_VARIABLE: Final = "FOREBAY_IDENTITY"
"""Environment variables that the command line reads too."""


def open_client(
    config: str | os.PathLike[str] | None,
    identity: str | None,
    urls: str | Sequence[str] | None,
    authority: str | os.PathLike[str] | None,
    certificate: str | os.PathLike[str] | None,
    key: str | os.PathLike[str] | None,
    *,
    deadline_s: float,
    blocking: bool,
) -> ClusterClient:
    """Return a client that connects when it is first used.

    Raises:
        ConfigurationError: The access is incomplete, or a file cannot be used.
    """
    with converted_errors():
        if urls is None:
            if authority is not None or certificate is not None or key is not None:
                raise _incomplete("certificate files are given without urls", "give urls too, or use forebay.toml")
            named = config or os.environ.get(CONFIG_VARIABLE)
            access = read_access(Path(named) if named else find_config(os.environ))
            who = identity or os.environ.get(IDENTITY_VARIABLE) or None
            return ClusterClient.from_config(access, who, deadline_s=deadline_s, blocking=blocking)
        if config is not None or identity is not None:
            raise _incomplete("urls are given together with config or identity", "give one or the other")
        if authority is None or certificate is None:
            raise _incomplete("urls are given without authority and certificate", "give the paths of both files")
        files = TlsFiles(Path(authority), Path(certificate), Path(key or Path(certificate).with_suffix(".key")))
        addresses = [_address(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not addresses:
            raise _incomplete("urls is empty", "give the address of at least one replica")
        return ClusterClient(addresses, files, deadline_s=deadline_s, blocking=blocking)


def _address(url: str) -> Address:
    """Return the address in `https://host:port`, or `host:port`."""
    text = url
    if "://" in url:
        parts = urlsplit(url)
        if parts.scheme != "https" or parts.path.strip("/") or parts.query or parts.fragment:
            raise _incomplete(f"{url!r} is not the address of a replica", "write https://host:port")
        text = parts.netloc
    try:
        return Address.parse(text)
    except AddressError as error:
        raise _incomplete(error.sentence, "write https://host:port") from error


def _incomplete(message: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(CONFIGURATION, message, remedy, place="connect")
