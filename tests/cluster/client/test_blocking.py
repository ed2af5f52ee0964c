"""Answers of HTTP/1.1 as a blocking exchange reads them: whole, bounded, or refused; however they arrive."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.client import blocking, http_responses
from forebay.cluster.client.attempt import AttemptError, HttpResponse
from forebay.cluster.client.calls import finish
from forebay.cluster.client.http_responses import HEAD_BYTES_MAX
from forebay.cluster.system.address import Address
from tests.clocks import ManualClock

WHO = Address("127.0.0.1", 1)


class Arriving:
    """A socket on which these pieces arrive, and then its end."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def settimeout(self, duration_s: float) -> None:
        assert duration_s > 0

    def recv(self, most: int) -> bytes:
        return next(self._pieces, b"")


def read(data: bytes, piece_bytes: int = 10_000) -> tuple[HttpResponse, bool]:
    pieces = (data[at : at + piece_bytes] for at in range(0, len(data), piece_bytes))
    connection: Any = Arriving(pieces)
    reader = http_responses.SocketReader(connection, ManualClock(), 10.0)
    answer, _, is_open = finish(http_responses.read_response(reader, WHO))
    return answer, is_open


def answered(head: str, body: bytes = b"", piece_bytes: int = 10_000) -> tuple[HttpResponse, bool]:
    return read(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n" + body, piece_bytes)


@given(st.binary(max_size=300), st.integers(1, 400), st.integers(1, 90))
def test_a_body_is_read_whole_however_it_is_delimited_and_arrives(body: bytes, piece: int, chunk: int) -> None:
    parts = [body[at : at + chunk] for at in range(0, len(body), chunk)]
    chunks = b"".join(b"%x;x=y\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\nX-Trailer: 1\r\n\r\n"
    by_length = answered(f"HTTP/1.1 200 OK\nContent-Length: {len(body)}", body, piece)
    by_chunks = answered("HTTP/1.1 200 OK\nTransfer-Encoding: chunked", chunks, piece)
    by_end = answered("HTTP/1.1 200 OK\nServer: x", body, piece)
    assert [by_length[0].body, by_chunks[0].body, by_end[0].body] == [body] * 3
    assert [by_length[1], by_chunks[1], by_end[1]] == [True, True, False]


def test_headers_that_matter_are_read_whatever_their_case_and_what_comes_before_an_answer_is_not_one() -> None:
    answer, is_open = answered(
        "HTTP/1.1 100 Continue\n\nHTTP/1.1 307 Elsewhere\nLOCATION: https://a:1/\nretry-after:  3 \n"
        "Connection: Close\nContent-Length: 0"
    )
    assert (answer.status, answer.body, answer.location, answer.retry_after) == (307, b"", "https://a:1/", "3")
    assert not is_open
    assert not answered("HTTP/1.0 200 OK\nContent-Length: 0")[1]
    assert answered("HTTP/1.1 204 Nothing")[0].body == b""


@pytest.mark.parametrize(
    "head",
    [
        "SSH-2.0-OpenSSH_9",
        "HTTP/2 200 OK",
        "HTTP/1.1 2000 OK",
        "HTTP/1.1 ok",
        "HTTP/1.1 200 OK\nContent-Length: -1",
        "HTTP/1.1 200 OK\nContent-Length: 0x10",
        "HTTP/1.1 200 OK\nContent-Length: 5\nContent-Length: 6",
        "HTTP/1.1 200 OK\nContent-Length: 5",
        "HTTP/1.1 200 OK\nTransfer-Encoding: gzip",
        "HTTP/1.1 200 OK\nno colon",
        "HTTP/1.1 200 OK\nContent-Length : 0",
        "HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n-1",
        "HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\nzz",
        "HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n2\nabc",
        "HTTP/1.1 200 OK\nX: " + "x" * (HEAD_BYTES_MAX + 10_001),
        "HTTP/1.1 200 OK" + "\nX: 1" * HEAD_BYTES_MAX,
    ],
)
def test_what_is_not_an_answer_of_http_is_refused(head: str) -> None:
    with pytest.raises(http_responses.MalformedResponse):
        answered(head)


@pytest.mark.parametrize("head", ["Content-Length: 2000", "Transfer-Encoding: chunked", "Server: x"])
def test_no_more_than_the_bound_is_read(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_responses, "ANSWER_BYTES_MAX", 1_000)
    body = b"7d0\r\n" + b"x" * 2_000 + b"\r\n0\r\n\r\n" if "chunked" in head else b"x" * 2_000
    with pytest.raises(AttemptError, match="more than 1000 bytes"):
        answered(f"HTTP/1.1 200 OK\n{head}", body)


def test_a_call_that_waits_for_a_loop_is_not_finished_without_one() -> None:
    class Forever:
        def __await__(self) -> Iterator[None]:
            yield

    async def wait() -> None:
        await Forever()

    with pytest.raises(RuntimeError, match="event loop"):
        finish(wait())


def test_a_name_service_without_an_answer_costs_the_wait_and_does_not_keep_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over, names = threading.Event(), []

    def hang(host: bytes, *_: object, **options: int) -> list[object]:
        if options.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror
        names.append((host, threading.current_thread().daemon))
        over.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        with pytest.raises(TimeoutError):
            blocking._addresses(b"r1.example", 7402, 0.05)
    finally:
        over.set()
    assert names == [(b"r1.example", True)]


def test_headers_of_exactly_the_bound_are_read_and_none_above_it() -> None:
    def answer(size_bytes: int) -> HttpResponse:
        lines = ["Content-Length: 0", *["X: " + "x" * 497] * (size_bytes // 500 - 1)]
        lines.append("Y: " + "y" * (size_bytes - sum(map(len, lines)) - 3))
        assert sum(map(len, lines)) == size_bytes
        return answered("\n".join(("HTTP/1.1 200 OK", *lines)))[0]

    for size_bytes in (HEAD_BYTES_MAX - 1, HEAD_BYTES_MAX):
        assert answer(size_bytes).status == 200
    with pytest.raises(http_responses.MalformedResponse, match="too many headers"):
        answer(HEAD_BYTES_MAX + 1)


def test_a_name_has_the_addresses_or_the_failure_of_the_name_service(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[object, ...]] = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 7402))]

    def look(host: bytes, *_: object, **options: int) -> list[tuple[object, ...]]:
        if options.get("flags", 0) & socket.AI_NUMERICHOST or host == b"unknown.example":
            raise socket.gaierror(socket.EAI_NONAME, "unknown name")
        return found

    monkeypatch.setattr(socket, "getaddrinfo", look)
    assert blocking._addresses(b"r1.example", 7402, 60.0) == found
    with pytest.raises(socket.gaierror, match="unknown name"):
        blocking._addresses(b"unknown.example", 7402, 60.0)
