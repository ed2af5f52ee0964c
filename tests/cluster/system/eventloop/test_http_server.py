"""HTTP listeners: all input is answered or disconnected, and adds a bounded number of bytes to the log."""

import asyncio
import logging
from typing import ClassVar

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.cluster.system.eventloop import HttpConnection, HttpServer
from tests.cluster.harness import PATIENCE_S
from tests.logs import lines_of

LOGGER = logging.getLogger("listener")


async def answer(_: web.BaseRequest) -> web.StreamResponse:
    return web.Response(text="here")


async def send(port: int, data: bytes, behind: bytes = b"nonsense\r\n\r\n") -> bytes:
    """Send bytes, then an invalid request; return the first bytes of the response, empty if disconnected."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data + behind)
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read(1024)
    except ConnectionError:
        return b""
    finally:
        writer.close()


HEADS = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from([b"GET / HTTP/1.1", b"POST /x HTTP/1.1", b"Host: x", b"Content-Length: -1", b"x" * 9000]),
        st.sampled_from(
            [b"Transfer-Encoding: chunked, gzip", b"Content-Length: 3", b"Connection: upgrade", b" folded"]
        ),
    ),
    max_size=6,
).map(lambda lines: b"\r\n".join(lines) + b"\r\n\r\n")


@given(heads=st.lists(HEADS, min_size=1, max_size=20))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_log_one_line_of_each_kind_and_no_traceback(
    caplog: pytest.LogCaptureFixture, heads: list[bytes]
) -> None:
    async def run() -> None:
        server = HttpServer(answer, LOGGER)
        listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        for head in heads:
            await send(listening.sockets[0].getsockname()[1], head)
        listening.close()
        await server.shutdown(PATIENCE_S)

    caplog.clear()
    asyncio.run(run())
    said = lines_of(caplog, LOGGER.name)
    assert len(said) <= 1 and all(line.count("\n") == 0 and len(line) < 200 for line in said), said


def test_exception_of_a_handler_is_logged_once_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    class Slow(HttpConnection):
        rest_s_max: ClassVar[float] = 0.0

    class Listener(HttpServer):
        connection_type: ClassVar[type[HttpConnection]] = Slow

    async def fail(_: web.BaseRequest) -> web.StreamResponse:
        raise ValueError("a fault")

    async def run() -> None:
        server = Listener(fail, LOGGER)
        listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        for _ in range(5):
            assert b" 500 " in await send(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(PATIENCE_S):
            while not server.sweep():
                await asyncio.sleep(0.01)
            assert await reader.read() == b""
        writer.close()
        listening.close()
        await server.shutdown(PATIENCE_S)

    asyncio.run(run())
    (said,) = lines_of(caplog, LOGGER.name)
    assert said.startswith("a request of 127.0.0.1 failed") and "ValueError: a fault" in said
