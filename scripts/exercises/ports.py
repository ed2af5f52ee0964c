"""Free ports for a cluster on loopback, which several exercises at once do not give to each other."""

import contextlib
import os
import socket
from collections.abc import Iterable
from typing import Final

PORT_FIRST: Final = 12_000
PORT_LAST: Final = 19_900
"""Where ports are looked for: below the range that the kernel hands out by itself."""

PORT_STEP: Final = 40
"""Between two base ports: more than a cluster of five replicas with channels takes."""

_claims: list[socket.socket] = []
"""One for each base port that this process was given, until it ends."""


class NoFreePorts(Exception):
    """All ports are in use; the message says which were tried."""


def claim_base_port(offsets: Iterable[int]) -> int:
    """Return a base port that nobody else is given as long as this process lives; its ports at `offsets` are free now.

    Between looking and listening somebody else could look, so a name in the kernel says whose the base port is.
    """
    wanted = tuple(offsets)
    start = PORT_FIRST + os.getpid() * PORT_STEP % (PORT_LAST - PORT_FIRST)
    for base in (*range(start, PORT_LAST, PORT_STEP), *range(PORT_FIRST, start, PORT_STEP)):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0forebay-ports-{base}")
            _probe(base + offset for offset in wanted)
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        return base
    raise NoFreePorts(f"no free ports between {PORT_FIRST} and {PORT_LAST}")


def _probe(ports: Iterable[int]) -> None:
    """OSError if one of the ports is in use."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", port))
