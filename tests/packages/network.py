"""Machines that reach each other and nobody else: network namespaces on one bridge, with root let in by ssh."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.packages.machine import Machine

NETWORK: Final = ("ip", "ssh-keygen")
"""Programs without which there is no such network."""

ADDRESS: Final = "10.0.0."
"""Of each machine with its number: the addresses of the documents, which are nobody else's in these namespaces."""


def ip(*words: str) -> None:
    """Run ip(8)."""
    subprocess.run(("ip", *words), check=True)


@contextlib.contextmanager
def networks(name: str, count: int) -> Iterator[str]:
    """Yield the namespace of a bridge; `name`1, `name`2, … are behind it, with the last number of their address."""
    hub = f"{name}0"
    made = []
    try:
        for number in range(count + 1):
            ip("netns", "add", f"{name}{number}")
            made.append(f"{name}{number}")
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "address", "add", f"{ADDRESS}254/24", "dev", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for number in range(1, count + 1):
            far = f"{name}{number}"
            ip("-n", hub, "link", "add", f"v{number}", "type", "veth", "peer", "name", "host0", "netns", far)
            ip("-n", hub, "link", "set", f"v{number}", "master", "bridge", "up")
            ip("-n", far, "address", "add", f"{ADDRESS}{number}/24", "dev", "host0")
            ip("-n", far, "link", "set", "host0", "up")
            ip("-n", far, "link", "set", "lo", "up")
        yield hub
    finally:
        for one in made:
            ip("netns", "delete", one)


def key_pair(path: Path) -> None:
    """Write a key of ssh, and beside it what lets it in."""
    subprocess.run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)), check=True)


def let_in(machine: Machine, public: Path) -> None:
    """Let who has the key of `public` in as root."""
    directory = machine.root / "root/.ssh"
    directory.mkdir(mode=0o700, exist_ok=True)
    (directory / "authorized_keys").write_text(public.read_text())
