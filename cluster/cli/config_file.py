"""Reading a configuration file on the operator's machine: its includes, its faults, the ids in it.

This is the only place where such a file is read: what is in it becomes settings that are sent, and a replica never
decides from a file of its own.
"""

import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cluster.cli.exits import ExitCode, Failure, bad_input
from cluster.cli.output import note
from replica.grammar import Fault, Kind, Line, Setting, find_key, include_of, lines_of, parse_lines
from replica.values import SITE_USERS_MAX

FILE_BYTES_MAX: Final = 1024 * 1024
"""All files of one configuration, bytes: every key with its largest value is smaller."""

INCLUDES_MAX: Final = 16
"""Files included by files that are included, count: Slurm's own sites have one or two."""

FAULTS_SHOWN_MAX: Final = 20
"""Faults of one file that are printed, count: after these, one is repaired first."""


def read_settings(path: Path) -> tuple[Setting, ...]:
    """Return the settings of a file; Failure names every fault with file, line and column."""
    reader = _Reader()
    parsed = parse_lines(reader.lines(path, depth=0, included_at=""))
    if parsed.faults:
        raise _failure(parsed.faults)
    return tuple(_with_names(setting) for setting in parsed.settings)


def settings_of(pairs: tuple[str, ...]) -> tuple[Setting, ...]:
    """Return the settings that stand on the command line, each Key=Value; Failure for one that cannot be read."""
    found: list[Setting] = []
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise bad_input(f"{pair!r} has no =", "write Key=Value, for example StageInTimeout=600")
        found.append(_with_names(Setting(key.strip(), value.strip())))
    return tuple(found)


class _Reader:
    def __init__(self) -> None:
        self._bytes = 0

    def lines(self, path: Path, *, depth: int, included_at: str) -> Iterator[Line]:
        for line in lines_of(self._text(path, included_at), str(path)):
            included = include_of(line)
            if included is None:
                yield line
                continue
            place = f"{line.file} line {line.number}"
            if depth >= INCLUDES_MAX:
                raise bad_input(
                    f"more than {INCLUDES_MAX} files include each other", "let no file include itself", place=place
                )
            # As in Slurm, a relative name is looked for where the including file is.
            yield from self.lines(path.parent / included, depth=depth + 1, included_at=place)

    def _text(self, path: Path, included_at: str) -> str:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise bad_input(f"{str(path)!r} is no regular file", "name a file", place=included_at)
                data = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            code = ExitCode.NOT_FOUND if isinstance(error, FileNotFoundError) else ExitCode.BAD_INPUT
            sentence = f"{str(path)!r} cannot be read ({error.strerror})"
            raise Failure(code, sentence, "correct the name, or its permissions", place=included_at) from error
        self._bytes += len(data)
        if self._bytes > FILE_BYTES_MAX:
            sentence = f"the configuration is larger than {FILE_BYTES_MAX} bytes"
            raise bad_input(sentence, "name a burst_buffer.conf", place=included_at or str(path))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = data[: error.start].count(b"\n") + 1
            sentence = "a byte is no UTF-8 text"
            raise bad_input(sentence, "save the file as UTF-8", place=f"{path} line {line}") from error


def _failure(faults: tuple[Fault, ...]) -> Failure:
    first, others = faults[0], faults[1:]
    shown = [f"{fault.place}: {fault.sentence}; {fault.remedy}" for fault in others[: FAULTS_SHOWN_MAX - 1]]
    for text in shown:
        note(f"forebay: {text}")
    if len(others) >= FAULTS_SHOWN_MAX:
        note(f"forebay: and {len(others) - FAULTS_SHOWN_MAX + 1} more")
    return bad_input(first.sentence, first.remedy, place=first.place)


def _with_names(setting: Setting) -> Setting:
    """Return the setting with the names of users whose ids it has: replicas know users by name."""
    key = find_key(setting.key)
    if key is None or key.kind not in (Kind.USERS, Kind.DENIED):
        return setting
    users = setting.value.replace(":", ",").split(",") if key.kind is Kind.DENIED else setting.value.split(",")
    if not any(user.isascii() and user.isdigit() for user in users[: SITE_USERS_MAX + 1]):
        return setting
    named: list[str] = []
    for user in users:
        named.append(_name_of(key.name, user) if user.isascii() and user.isdigit() and len(user) < 11 else user)
    return Setting(setting.key, ",".join(named), setting.file, setting.line, setting.column)


def _name_of(key: str, text: str) -> str:
    try:
        name = pwd.getpwuid(int(text)).pw_name
    except (KeyError, OverflowError):
        note(f"forebay: warning: {key} has the id {text}, which no user of this machine has; it is kept as it is")
        return text
    note(f"forebay: {key}: the id {text} is user {name}")
    return name
