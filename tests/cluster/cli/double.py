"""HTTPS double of the API with real TLS and configured answers, and a function that runs commands against it."""

import asyncio
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from click.testing import CliRunner, Result

from forebay.cluster.cli.app import cli
from forebay.cluster.cli.session import Session
from forebay.cluster.config.config import Config
from forebay.cluster.config.new_site import API_PORT_OFFSET, Founding, create_site
from forebay.cluster.schemas.jobs import ErrorAnswer, ErrorView
from forebay.cluster.security.identity import identify
from forebay.cluster.security.tls import server_context
from forebay.cluster.system.clock import SystemClock


class Asked(NamedTuple):
    """Received request."""

    method: str
    target: str
    body: Any
    identity: str


class Double:
    """Sends the configured answers, and 404 for other requests."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.asked: list[Asked] = []
        self.answers: dict[tuple[str, str], tuple[int, bytes]] = {}

    def answer(self, method: str, path: str, view: msgspec.Struct, status: int = 200) -> None:
        """Configure an answer; `path` is a regular expression for path and query."""
        self.answers[(method, path)] = (status, msgspec.json.encode(view))

    def refuse(self, method: str, path: str, status: int, code: str, sentence: str, **more: str) -> None:
        """Configure a rejection."""
        self.answer(method, path, ErrorAnswer(error=ErrorView(code=code, sentence=sentence, **more)), status)  # type: ignore[arg-type]

    async def handle(self, request: web.Request) -> web.Response:
        certificate = request.transport.get_extra_info("peercert") if request.transport else None
        body = await request.read()
        asked = Asked(
            request.method, request.path_qs, msgspec.json.decode(body) if body else None, str(identify(certificate))
        )
        self.asked.append(asked)
        for (method, path), (status, data) in reversed(list(self.answers.items())):
            if method == asked.method and re.fullmatch(path, asked.target):
                return web.Response(status=status, body=data, content_type="application/json")
        error = ErrorView(code="not_found", sentence=f"there is no {asked.target}", remedy="look at /v1/openapi.json")
        return web.Response(
            status=404, body=msgspec.json.encode(ErrorAnswer(error=error)), content_type="application/json"
        )


@contextmanager
def serving(directory: Path) -> Iterator[Double]:
    """Cluster of one replica whose API is a double, with certificates for `operator` and `alice`."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
        founding = Founding(name="demo", replicas=1, agents=1, base_port=port - API_PORT_OFFSET, users=("alice",))
        double = Double(create_site(directory, founding, clock=SystemClock()))
        loop = asyncio.new_event_loop()
        started = threading.Event()

        async def start() -> web.AppRunner:
            application = web.Application()
            application.router.add_route("*", "/{path:.*}", double.handle)
            runner = web.AppRunner(application)
            await runner.setup()
            await web.SockSite(runner, listener, ssl_context=server_context(double.config.tls_files("r1"))).start()
            return runner

        def serve() -> None:
            runner = loop.run_until_complete(start())
            started.set()
            loop.run_forever()
            loop.run_until_complete(runner.cleanup())
            loop.close()

        thread = threading.Thread(target=serve)
        thread.start()
        assert started.wait(timeout=30)
        try:
            yield double
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()


def forebay(
    config: Config, *words: str, stdin: bytes | None = None, columns: int | None = None, **options: Any
) -> Result:
    """Run a command with these global options."""
    session = Session(config_path=config.file, **{"identity": "operator", **options})
    environment = {"COLUMNS": None if columns is None else str(columns), "FOREBAY_CONFIG": None}
    return CliRunner().invoke(cli, words, input=stdin, env=environment, obj=session)


@contextmanager
def on_a_terminal(config: Config, *words: str) -> Iterator[tuple[int, int, "subprocess.Popen[bytes]"]]:
    """Run a command on a pseudo-terminal; yield both ends and the process, which is ended afterwards."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "forebay.cluster.cli", "--config", str(config.file), *words],
        stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
        cwd=Path(__file__).parents[3],
        # If the tests run in the background of a shell, SIGINT is ignored, and child processes inherit this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        yield ours, theirs, process
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
        if process.stderr is not None:
            process.stderr.close()
