"""Logging of a process in one of three forms: lines of text, JSON objects, or journald entries.

Text and JSON go to standard error. No content of a message can begin a line or a field: unprintable characters are
escaped, fields have a maximum length, and long messages are cut. The caller states the job, revision or term of a
record with `extra=about(…)`; nothing is parsed out of a message.

journald is addressed directly in its native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL), without waiting. systemd's
Python bindings need its C library to build, and block the caller while journald does not read.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import socket
import sys
import traceback
from datetime import UTC, datetime
from typing import Final

from forebay.cluster.system.service_manager import (
    EXIT_CONFIGURATION,
    FORMAT_VARIABLE,
    FORMATS,
    LEVEL_VARIABLE,
    LEVELS,
    PROCESS_VARIABLE,
)
from forebay.replica.values import plain

FIELDS: Final = ("job", "revision", "node", "replica", "term")
"""Subjects of a record, in output order."""

JOURNAL_VARIABLE: Final = "JOURNAL_STREAM"
"""Environment variable of systemd: device and inode of the journal stream that is a service's standard error."""

JOURNAL_SOCKET: Final = "/run/systemd/journal/socket"

MESSAGE_CHARS_MAX: Final = 16 * 1024
"""Maximum length of a message; longer messages are cut. Escaping so many characters takes some milliseconds."""

TRACEBACK_CHARS_MAX: Final = 32 * 1024
"""Maximum length of a traceback. The end, which names the cause, is kept."""

VALUE_CHARS_MAX: Final = 256
"""Maximum length of a field: names and numbers are shorter."""

_PRIORITIES: Final = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
"""Minimum level -> priority of syslog(3); lower levels have priority 7."""

_PRINTABLE: Final = re.compile(r"[ -~]*\Z")

_Value = int | str


def about(
    *, job: _Value = "", revision: int | None = None, node: str = "", replica: str = "", term: int | None = None
) -> dict[str, _Value]:
    """Return the subject of a record for `extra`. A job is given by ID, or in its display form such as 12_3."""
    said = {"job": job, "revision": revision, "node": node, "replica": replica, "term": term}
    return {name: value for name, value in said.items() if value is not None and value != ""}


def begin_logging(identifier: str = "forebay", *, level: str | None = None, node: str = "", replica: str = "") -> None:
    """Start logging in this process and, through the environment, in its children; no effect if already started.

    `identifier` is the SYSLOG_IDENTIFIER; `node` or `replica` is added to each record. The environment sets the form,
    and the level if it is None. The default form is journald if standard error is the journal, otherwise text. An
    unknown form or level ends the process with exit code 78 and a message.
    """
    root = logging.getLogger()
    if root.handlers:
        return
    form = _one_of(FORMAT_VARIABLE, FORMATS) or ("journald" if _stderr_is_journal() else "text")
    level = level or _one_of(LEVEL_VARIABLE, LEVELS) or "info"
    process = {"identifier": identifier, **about(node=node, replica=replica)}
    if len(process) == 1:
        process = _inherited_subject() or process
    os.environ[FORMAT_VARIABLE], os.environ[LEVEL_VARIABLE] = form, level
    os.environ[PROCESS_VARIABLE] = json.dumps(process)
    root.addHandler(handler_for(form, process))
    root.setLevel(level.upper())


def handler_for(form: str, process: dict[str, _Value]) -> logging.Handler:
    """Return the handler of a form; `process` is the identifier and the common subject of all records."""
    said = {name: value for name, value in process.items() if name in FIELDS}
    if form == "journald":
        return JournalHandler(str(process["identifier"]), said)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(said) if form == "json" else TextFormatter())
    return handler


def say_at_last(sentence: str) -> None:
    """Write the reason why this process ends to standard error: as text, or as a JSON record if logs are JSON."""
    if any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers):
        logging.getLogger("forebay").critical("%s", sentence)
    else:
        print(sentence, file=sys.stderr, flush=True)


def is_logged(line: str) -> bool:
    """Return whether logs are JSON and this line of a child process is already a JSON record."""
    try:
        found = json.loads(line) if _is_json() and line.startswith("{") else None
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"time", "level", "logger", "message"} <= found.keys()


def as_logged(line: str, logger: str) -> str:
    """Return a line in the form of the log: unchanged as text, or wrapped in a JSON record."""
    if not _is_json() or is_logged(line):
        return line
    return JsonFormatter({}).format(logging.makeLogRecord({"name": logger, "levelname": "INFO", "msg": line}))


class TextFormatter(logging.Formatter):
    """Formats each record as a line. Lines of a traceback are indented, so that they do not look like records."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text without a trailing newline."""
        line = f"{self.formatTime(record)} {record.levelname} {record.name}: {_to_printable_line(_message(record))}"
        return "".join((line, *(f"\n    {_to_printable_line(one)}" for one in _traceback(record).split("\n") if one)))


class JsonFormatter(logging.Formatter):
    """Formats each record as a JSON object on one line, in ASCII."""

    def __init__(self, said: dict[str, _Value]) -> None:
        """Create a formatter; `said` is the common subject of all records."""
        super().__init__()
        self._said = said

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON object."""
        written: dict[str, _Value] = {
            "time": datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "level": record.levelname,
            "logger": record.name,
            "message": _whole(_message(record)),
            **{name: value if isinstance(value, int) else _whole(value) for name, value in _fields(record, self._said)},
        }
        if text := _traceback(record):
            written["traceback"] = _whole(text)
        return json.dumps(written)


class JournalHandler(logging.Handler):
    """Sends each record to journald as an entry.

    Entries that journald cannot take at once are dropped, counted, and reported later. Without journald, a record is a
    line of text on standard error.
    """

    def __init__(self, identifier: str, said: dict[str, _Value], path: str = JOURNAL_SOCKET) -> None:
        """Create a handler; `said` is the common subject of all records, `path` journald's socket."""
        super().__init__()
        self._identifier, self._said, self._path = identifier, said, path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        self._instead = logging.StreamHandler(sys.stderr)
        self._instead.setFormatter(TextFormatter())
        self.lost = 0
        """Number of records dropped since journald last accepted one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Send an entry; never raises, never waits for journald."""
        try:
            if self.lost:
                sentence = f"{self.lost} messages of this process are lost: journald did not accept them in time"
                self._send(self._entry(logging.WARNING, __name__, sentence, self._said.items()))
                self.lost = 0
            text = "\n".join(
                _to_printable_line(one) for one in (_message(record), *_traceback(record).split("\n")) if one
            )
            self._send(self._entry(record.levelno, record.name, text, _fields(record, self._said)))
        except (BlockingIOError, InterruptedError):
            self.lost += 1
        except OSError:
            self._instead.handle(record)
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        super().close()

    def _entry(self, level: int, logger: str, text: str, fields: object) -> bytes:
        priority = next((priority for least, priority in _PRIORITIES if level >= least), 7)
        rows: list[tuple[str, _Value]] = [
            ("MESSAGE", text),
            ("PRIORITY", priority),
            ("SYSLOG_IDENTIFIER", self._identifier),
            ("LOGGER", logger),
        ]
        rows += [(f"FOREBAY_{name.upper()}", value) for name, value in fields]  # type: ignore[attr-defined]
        return b"".join(_field(name, value) for name, value in rows)

    def _send(self, entry: bytes) -> None:
        try:
            self._socket.sendto(entry, self._path)
        except OSError as error:
            if isinstance(error, BlockingIOError) or len(entry) < _DATAGRAM_BYTES:
                raise
            self._send_file(entry)

    def _send_file(self, entry: bytes) -> None:
        # Entries larger than a datagram travel as a sealed file in memory.
        descriptor = os.memfd_create("forebay-log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.write(descriptor, entry)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor.to_bytes(4, sys.byteorder))]
            self._socket.sendmsg([], rights, 0, self._path)
        finally:
            os.close(descriptor)


_DATAGRAM_BYTES: Final = 2048
"""Size that every socket accepts as a datagram (SO_SNDBUF, socket(7)). If a smaller one fails, the cause is another."""


def _field(name: str, value: _Value) -> bytes:
    data = (str(value) if isinstance(value, int) else value).encode("utf-8", "backslashreplace")
    if b"\n" not in data:
        return b"%s=%s\n" % (name.encode(), data)
    return b"%s\n%s%s\n" % (name.encode(), len(data).to_bytes(8, "little"), data)


def _fields(record: logging.LogRecord, said: dict[str, _Value]) -> list[tuple[str, _Value]]:
    given = ((name, record.__dict__.get(name, said.get(name))) for name in FIELDS)
    return [
        (name, value if isinstance(value, int) else _to_printable_line(str(value)[:VALUE_CHARS_MAX]))
        for name, value in given
        if value is not None
    ]


def _message(record: logging.LogRecord) -> str:
    text = record.getMessage()
    over = len(text) - MESSAGE_CHARS_MAX
    return text if over <= 0 else f"{text[:MESSAGE_CHARS_MAX]}… ({over} characters more)"


def _traceback(record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    text = "" if error is None else "".join(traceback.format_exception(error)).rstrip("\n")
    if record.stack_info:
        text = f"{text}\n{record.stack_info}"
    over = len(text) - TRACEBACK_CHARS_MAX
    return text if over <= 0 else f"({over} characters more) …{text[-TRACEBACK_CHARS_MAX:]}"


def _to_printable_line(text: str) -> str:
    """Return a text as one printable line."""
    return text if _PRINTABLE.match(text) else plain(text)


def _whole(text: str) -> str:
    """Return a text that UTF-8 can encode: surrogates from undecodable bytes are escaped."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _one_of(variable: str, known: tuple[str, ...]) -> str:
    value = os.environ.get(variable, "")
    if value.lower() in ("", *known):
        return value.lower()
    print(f"forebay: {variable} is {plain(value)!r:.60}; write one of {', '.join(known)}", file=sys.stderr, flush=True)
    sys.exit(EXIT_CONFIGURATION)


def _is_json() -> bool:
    return os.environ.get(FORMAT_VARIABLE, "").lower() == "json"


def _inherited_subject() -> dict[str, _Value]:
    try:
        found = json.loads(os.environ.get(PROCESS_VARIABLE, ""))
    except ValueError:
        return {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        return {}
    return found if "identifier" in found else {}


def _stderr_is_journal() -> bool:
    device, _, inode = os.environ.get(JOURNAL_VARIABLE, "").partition(":")
    try:
        found = os.fstat(2)
    except OSError:
        return False
    return (device, inode) == (str(found.st_dev), str(found.st_ino))
