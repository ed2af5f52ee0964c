"""API worker process: `python -m cluster.api.worker SOCKET PARENT API CHANNEL`, started by the controller process.

SOCKET, API and CHANNEL are descriptors: a socket to the controller, and listening sockets (-1: no channel). PARENT is
the controller's process, whose death ends the worker. The controller sends the worker's configuration.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from forebay.cluster.api.worker.channel import ChannelServer
from forebay.cluster.api.worker.link import RemoteBackend
from forebay.cluster.api.worker.server import Server
from forebay.cluster.ipc import begin_child
from forebay.cluster.security import Credentials, TlsFiles
from forebay.cluster.system import Address

EXIT_CORE_LOST = 1


async def run(link: socket.socket, api_fd: int, channel_fd: int) -> None:
    """Serve until SIGTERM; then stop accepting, complete pending requests, and exit."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    _, core = await loop.create_unix_connection(lambda: RemoteBackend(lambda: os._exit(EXIT_CORE_LOST)), sock=link)
    welcome = await core.welcome
    files = TlsFiles(*map(Path, (welcome.authority, welcome.certificate, welcome.key)))
    credentials = Credentials(files, serves=True, open_to_all=welcome.access.munge)
    core.peers.checks.append(credentials.refresh)
    credentials.on_authorities.append(core.peers.close_all)
    loop.add_signal_handler(signal.SIGHUP, lambda: credentials.refresh(at_once=True))
    core.peers.start()
    tls = credentials.server_context
    api, api_tls = Address.parse(welcome.api), credentials.api_context
    server = Server(core, address=api, tls=api_tls, listening=_listening(api_fd))
    await server.start()
    channel = None
    if channel_fd >= 0:
        address = Address.parse(welcome.channel)
        channel = ChannelServer(core, address=address, tls=tls, listening=_listening(channel_fd))
        await channel.start()
    await stopped.wait()
    if channel is not None:
        await channel.stop()
    await server.stop()


def _listening(descriptor: int) -> socket.socket:
    found = socket.socket(fileno=descriptor)
    found.setblocking(False)
    return found


def main(arguments: Sequence[str]) -> int:
    """Run the worker; return its exit code."""
    link, descriptors = begin_child(arguments)
    uvloop.run(run(link, *map(int, descriptors)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
