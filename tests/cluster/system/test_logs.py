"""The three log formats: no message can forge a line, an object or a field."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.cluster.system import about, as_logged, is_logged, logs

HOSTILE = {
    "nothing": "",
    "a line": "x\n2026-01-01 00:00:00,000 CRITICAL forebay.cluster.serve: forged",
    "lines of all kinds": "\r\nforged\rforged\vforged\fforged\x1cforged\x85forged\u2028forged\u2029forged",
    "an object": 'x"}\n{"time": "2026-01-01T00:00:00.000000Z", "level": "CRITICAL", "logger": "x", "message": "y"}',
    "fields": "x\nPRIORITY=0\nFOREBAY_JOB=7\n\nMESSAGE=forged\n",
    "a field with a length": "x\nFOREBAY_JOB\n\x01\0\0\0\0\0\0\x007\n",
    "a terminal's": "\x1b[2J\x1b]0;forged\x07\x9b31m\x7f\b\b",
    "turned around": "\u202edegrof\u2066",
    "no UTF-8": b"\xff\xfe\xc3(".decode("utf-8", "surrogateescape"),
    "NUL": "a\0b",
    "formats": "%s %d %(message)s {0} %",
    "huge": "x\n" * 500_000,
    "huge and astral": "\U0001f525" * 300_000,
}
"""Texts that people, disks and peers might put into a message."""


def record(text: str, **fields: Any) -> logging.LogRecord:
    """Return a log record with this text."""
    attributes = {"name": "forebay.cluster.serve", "levelno": logging.INFO, "levelname": "INFO", "msg": text, **fields}
    return logging.makeLogRecord(attributes)


TEXTS = st.text(st.characters(codec=None), max_size=40)
PROCESS: dict[str, int | str] = {"identifier": "forebay-test", "replica": "r1"}


class Read:
    """Records written in one format, each read back as `(message, fields)`."""

    def __init__(self, handler: logging.Handler, records: Callable[[], list[dict[str, Any]]]) -> None:
        self._logger = logging.Logger("hostile")
        self._logger.addHandler(handler)
        self._records = records

    def log(self, text: str, **fields: Any) -> list[dict[str, Any]]:
        """Log a text as message argument, as error message and as fields, then log a plain record."""
        try:
            raise ValueError(text)
        except ValueError as error:
            self._logger.error("before %s after", text, exc_info=error, extra=about(**fields))
        self._logger.info("the next one")
        return self._records()


@contextlib.contextmanager
def in_text() -> Iterator[Read]:
    stream = _stream()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.TextFormatter())

    def records() -> list[dict[str, Any]]:
        lines = _written(stream).splitlines()
        assert all(line.isprintable() for line in lines)
        return [
            {"message": line.split(": ", 1)[1], "level": line.split()[2]} for line in lines if not line.startswith(" ")
        ]

    yield Read(handler, records)


@contextlib.contextmanager
def in_json() -> Iterator[Read]:
    stream = _stream()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonFormatter({"replica": "r1"}))

    def records() -> list[dict[str, Any]]:
        text = _written(stream)
        assert text.isascii() and text.endswith("\n")
        return [_strictly(line) for line in text.splitlines()]

    yield Read(handler, records)


@contextlib.contextmanager
def in_the_journal() -> Iterator[Read]:
    with _journal() as (listening, path):
        handler = logs.JournalHandler("forebay-test", {"replica": "r1"}, path)
        yield Read(handler, lambda: [_level(one) for one in _received(listening)])
        handler.close()


FORMS = {"text": in_text, "json": in_json, "journald": in_the_journal}


def _stream() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", newline="")


def _written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    text = buffer.getvalue().decode()
    buffer.seek(0)
    buffer.truncate()
    return text


def _strictly(line: str) -> dict[str, Any]:
    """Parse a JSON object without duplicate keys, whose texts are valid UTF-8."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    found = json.loads(line, object_pairs_hook=unique)
    json.dumps(found, ensure_ascii=False).encode()
    return dict(found)


@contextlib.contextmanager
def _journal() -> Iterator[tuple[socket.socket, str]]:
    """Journal of the test: its socket and its address, which is abstract and leaves no file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("")
        listening.setblocking(False)
        yield listening, listening.getsockname().decode("latin-1")


def _received(listening: socket.socket) -> list[dict[str, str]]:
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            data, descriptors, _, _ = socket.recv_fds(listening, 1 << 20, 1)
            for descriptor in descriptors:
                assert data == b"", "an entry is either a datagram or a file"
                with os.fdopen(descriptor, "rb") as file:
                    file.seek(0)
                    data = file.read()
            found.append(_entry(data))
    return found


def _entry(data: bytes) -> dict[str, str]:
    """Return the fields of an entry as journald reads them, without duplicates."""
    found: dict[str, str] = {}
    while data:
        head, _, data = data.partition(b"\n")
        name, equals, value = head.partition(b"=")
        if not equals:
            size = int.from_bytes(data[:8], "little")
            value, newline, data = data[8 : 8 + size], data[8 + size : 9 + size], data[9 + size :]
            assert (len(value), newline) == (size, b"\n")
        assert name.decode() not in found
        found[name.decode()] = value.decode()
    return found


def _level(entry: dict[str, str]) -> dict[str, Any]:
    # journalctl shows fields with unprintable characters as "[… blob data]".
    assert all(character.isprintable() or character == "\n" for character in entry["MESSAGE"])
    names = {"MESSAGE", "PRIORITY", "SYSLOG_IDENTIFIER", "LOGGER", "FOREBAY_REPLICA", "FOREBAY_JOB", "FOREBAY_REVISION"}
    assert entry.keys() <= names
    return {
        "message": entry["MESSAGE"].partition("\n")[0],
        "level": {"3": "ERROR", "6": "INFO"}[entry["PRIORITY"]],
        **{name.removeprefix("FOREBAY_").lower(): entry[name] for name in entry if name.startswith("FOREBAY_")},
    }


def _hold(read: Read, text: str) -> None:
    first, second = read.log(text, job=text, revision=7)
    assert (first["level"], second["level"], second["message"]) == ("ERROR", "INFO", "the next one")
    assert first["message"].startswith("before ")
    assert first["message"].endswith((" after", " characters more)")), first["message"][-100:]
    assert len(first["message"]) < 12 * logs.MESSAGE_CHARS_MAX
    if "revision" in first:
        assert (str(first["revision"]), first["replica"], second["replica"]) == ("7", "r1", "r1")
        assert len(first.get("job", "")) <= 10 * logs.VALUE_CHARS_MAX and "job" not in second


@pytest.mark.parametrize(("form", "text"), list(itertools.product(FORMS, HOSTILE)))
def test_hostile_texts_stay_within_one_record(form: str, text: str) -> None:
    with FORMS[form]() as read:
        _hold(read, HOSTILE[text])


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(text=TEXTS)
def test_any_text_stays_within_one_record(form: str, text: str) -> None:
    with FORMS[form]() as read:
        _hold(read, text)


def test_subject_of_a_record_is_in_fields_and_times_are_utc_microseconds() -> None:
    fields = about(job=42, revision=7, term=3, node="n1")
    told = record("job %s: %s", args=(42, "größer"), created=1767225600.000123, **fields)
    assert json.loads(logs.JsonFormatter({"node": "n9", "replica": "r1"}).format(told)) == {
        "time": "2026-01-01T00:00:00.000123Z", "level": "INFO", "logger": "forebay.cluster.serve",
        "message": "job 42: größer",
        "job": 42, "revision": 7, "node": "n1", "replica": "r1", "term": 3,
    }  # fmt: skip
    with _journal() as (listening, path):
        handler = logs.JournalHandler("forebay-agent", {"node": "n9", "replica": "r1"}, path)
        handler.handle(told)
        handler.close()
        assert _received(listening) == [{
            "MESSAGE": "job 42: größer", "PRIORITY": "6", "SYSLOG_IDENTIFIER": "forebay-agent",
            "LOGGER": "forebay.cluster.serve", "FOREBAY_JOB": "42", "FOREBAY_REVISION": "7", "FOREBAY_NODE": "n1",
            "FOREBAY_REPLICA": "r1", "FOREBAY_TERM": "3",
        }]  # fmt: skip


def test_entry_too_large_for_a_datagram_is_sent_as_a_sealed_file() -> None:
    with _journal() as (listening, path):
        handler = logs.JournalHandler("forebay-test", {}, path)
        handler._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        handler.handle(record("y" * 10_000))
        data, [descriptor], _, _ = socket.recv_fds(listening, 1 << 16, 1)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            with pytest.raises(PermissionError):
                file.write(b"MESSAGE=forged")
            file.seek(0)
            assert (data, _entry(file.read())["MESSAGE"]) == (b"", "y" * 10_000)
        handler.close()


def test_full_journal_is_not_awaited_and_gets_the_number_of_lost_records() -> None:
    with _journal() as (listening, path):
        handler, sent = logs.JournalHandler("forebay-test", {}, path), 0
        while handler.lost < 3 and sent < 100_000:
            handler.handle(record("x" * 200))
            sent += 1
        assert handler.lost == 3
        assert len(_received(listening)) == sent - 3
        handler.handle(record("at last"))
        lost, last = _received(listening)
        assert lost["MESSAGE"].startswith("3 messages of this process are lost") and lost["PRIORITY"] == "4"
        assert (last["MESSAGE"], handler.lost) == ("at last", 0)
        handler.close()


def test_record_without_a_journal_is_a_line_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = logs.JournalHandler("forebay-test", {}, str(tmp_path / "none"))
    handler.handle(record("said"))
    handler.close()
    assert capsys.readouterr().err.endswith(" INFO forebay.cluster.serve: said\n")


BEGINS = """
import json, logging, os, subprocess, sys
found = os.fstat(2)
os.environ["JOURNAL_STREAM"] = f"{found.st_dev}:{found.st_ino + int(sys.argv[1])}"
from forebay.cluster.system import begin_logging, say_at_last
begin_logging("forebay-controller", replica="r1")
print(json.dumps({name: os.environ[name] for name in os.environ if name.startswith("FOREBAY_LOG_")}))
say_at_last("forebay: it ends")
if len(sys.argv) > 2:
    subprocess.run([sys.executable, "-c", "from forebay.cluster.providers import log_for; log_for(7);"
                    "import logging; logging.getLogger('x').info('%d%%', 5)"], check=True)
"""


def begun(other_stream: int, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_LOG_")}
    return subprocess.run(
        [sys.executable, "-c", BEGINS, str(other_stream), *more],
        env={**environment, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_systemd_service_logs_to_the_journal_and_others_in_text_by_default() -> None:
    as_service, elsewhere = begun(0), begun(1)
    assert json.loads(as_service.stdout)["FOREBAY_LOG_FORMAT"] == "journald"
    assert json.loads(elsewhere.stdout) == {
        "FOREBAY_LOG_FORMAT": "text", "FOREBAY_LOG_LEVEL": "info",
        "FOREBAY_LOG_PROCESS": '{"identifier": "forebay-controller", "replica": "r1"}',
    }  # fmt: skip
    assert elsewhere.stderr == "forebay: it ends\n"


def test_child_inherits_the_log_format_and_its_last_words_are_a_record() -> None:
    done = begun(0, "child", FOREBAY_LOG_FORMAT="JSON")
    last, childs = map(json.loads, done.stderr.splitlines())
    assert (last["message"], last["level"], last["replica"]) == ("forebay: it ends", "CRITICAL", "r1")
    assert (childs["message"], childs["job"], childs["replica"]) == ("job 7: 5%", 7, "r1")


@pytest.mark.parametrize("variable", ["FOREBAY_LOG_FORMAT", "FOREBAY_LOG_LEVEL"])
def test_unknown_log_format_or_level_is_rejected(variable: str) -> None:
    done = begun(1, **{variable: "xml\n"})
    assert done.returncode == 78
    assert done.stderr.startswith(f"forebay: {variable} is 'xml\\\\n'; write one of ")


def test_output_of_a_child_becomes_records_and_records_stay_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["", "started", '{"time": 1}', "{", "[" * 10_000, '{"a":' * 3_000, 'x {"time"', "%s %"]
    assert not any(map(is_logged, lines)) and [as_logged(line, "up") for line in lines] == lines
    monkeypatch.setenv("FOREBAY_LOG_FORMAT", "json")
    for line in lines:
        assert not is_logged(line)
        made = as_logged(line, "up")
        assert json.loads(made)["message"] == line
        assert is_logged(made) and as_logged(made, "up") == made
