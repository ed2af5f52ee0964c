"""Free ports of loopback for servers of tests: no two processes are handed the same one.

Between looking for a free port and listening on it somebody else could take it: another test process, or the kernel
for a connection. So each process claims a block of ports below those that the kernel hands out, by a name in the
kernel that is gone when the process ends, and hands out its own in turn.
"""

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator
from functools import cache
from typing import Final

PORT_FIRST: Final = 12_000
PORT_LAST: Final = 31_999
"""Linux gives ports from 32,768 to connections unless it is told otherwise."""

BLOCK_PORTS: Final = 400
"""Ports of one process, count: one is handed out again when all others were, long after its server has gone."""


class NoFreePorts(Exception):
    """All ports are in use; the message says which were tried."""


def free_ports(count: int) -> list[int]:
    """Return `count` ports in a row on which nobody listens, and which no other process is handed while this one lives.

    NoFreePorts if there are none.
    """
    block = _block(os.getpid())
    for _ in range(BLOCK_PORTS):
        row = list(itertools.islice(block.ports, count))
        if row[-1] - row[0] == count - 1 and all(map(_is_free, row)):
            return row
    raise NoFreePorts(f"no {count} free ports in a row from {block.first} to {block.first + BLOCK_PORTS - 1}")


def free_port() -> int:
    """Return one such port."""
    return free_ports(1)[0]


class _Block:
    """The ports of this process, handed out in turn."""

    def __init__(self, first: int, claim: socket.socket) -> None:
        self.first = first
        self.ports: Iterator[int] = itertools.cycle(range(first, first + BLOCK_PORTS))
        self._claim = claim


@cache
def _block(process: int) -> _Block:
    """Claim a block for a process: one that was forked has another than its parent."""
    firsts = range(PORT_FIRST, PORT_LAST - BLOCK_PORTS + 2, BLOCK_PORTS)
    for at in range(len(firsts)):
        first = firsts[(process + at) % len(firsts)]
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError):
            claim.bind(f"\0forebay-ports-{first}")
            return _Block(first, claim)
        claim.close()
    raise NoFreePorts(f"all ports from {PORT_FIRST} to {PORT_LAST} are claimed by other processes")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
