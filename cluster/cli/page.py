"""Command `forebay page`: open the status page in a browser as the account that runs the command."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Final

import click

from forebay.cluster.cli.exits import bad_input
from forebay.cluster.cli.session import session
from forebay.cluster.cli.text import note
from forebay.cluster.schemas import operations as ops

if TYPE_CHECKING:
    from forebay.cluster.client import Client

DISPLAYS: Final = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
"""Environment variables, one of which is set where a browser can be started."""


@click.command("page")
@click.option("--port", type=click.IntRange(1, 65535), help="Listen on this port of 127.0.0.1.  [default: a free one]")
@click.option("--no-browser", is_flag=True, help="Print the link, and start no browser.")
def page(port: int | None, no_browser: bool) -> None:
    """Open the status page in a browser.

    It shows what your account may see, until Ctrl-C; the browser needs no certificate. The link
    works once. From another machine, forward the port first: ssh -L 8080:127.0.0.1:8080 HOST forebay page --port 8080
    """
    session().ask(lambda client: _serve(client, port or 0, browser=not no_browser), on_a_loop=True)


async def _serve(client: Client, port: int, *, browser: bool) -> None:
    # An account without access learns it here instead of in the browser.
    await client.call(ops.SHOW_OVERVIEW, stale=True)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    proxy = client.page_proxy(port)
    try:
        await proxy.__aenter__()
    except OSError as error:
        raise bad_input(f"port {port} cannot be used: {error.strerror or error}", "use another --port") from error
    try:
        click.echo(proxy.url)
        note("The link works once. Press Ctrl-C to end the page.")
        if browser and any(os.environ.get(name) for name in DISPLAYS):
            import webbrowser

            await asyncio.to_thread(webbrowser.open, proxy.url)
        await stopped.wait()
    finally:
        await proxy.__aexit__(None, None, None)
