"""Parser of burst_buffer.conf: turns lines into settings; every fault has file, line, column and remedy.

The grammar is that of Slurm's configuration files: `Key=Value` pairs, one or several on a line, values without blanks
or in double quotes, case-insensitive names; `#` begins a comment (`\\#` does not), and a `\\` at the end of a line
continues it. The caller resolves `Include FILE` (`included_file`), because this package reads no files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import msgspec

from forebay.replica.grammar.settings import SettingKey, ValueFormatError, find_key, parse_value, unknown_key_remedy
from forebay.replica.values import SETTING_CHARACTERS_MAX, SETTINGS_MAX

_PAIR = re.compile(r"""\s*(?P<key>[A-Za-z0-9_.]+)\s*=\s*(?:"(?P<quoted>[^"]*)"|(?P<plain>[^\s"]+))(?=\s|$)""")
_KEY = re.compile(r"\s*(?P<key>[A-Za-z0-9_.]+)\s*(?P<equals>=?)")
_INCLUDE = re.compile(r"\s*include\s+(?P<file>\S+)\s*$", re.IGNORECASE)


class ConfLine(msgspec.Struct, frozen=True):
    """A line of a file without its line end; `number` counts from 1."""

    file: str
    number: int
    text: str


class ConfSetting(msgspec.Struct, frozen=True):
    """A key with its value as written, and its location; `line` is 0 if it comes from no file."""

    key: str
    value: str
    file: str = ""
    line: int = 0
    column: int = 0
    """First column of the value, in characters from 1."""

    def place(self, offset: int = 0) -> str:
        """Return the place of a character of the value, for messages."""
        return format_place(self.file, self.line, self.column + offset) if self.line else self.key


class ConfFault(msgspec.Struct, frozen=True):
    """A fault in a file."""

    place: str
    sentence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.place}: {self.sentence}; {self.remedy}"


class ConfContents(msgspec.Struct, frozen=True):
    """Settings and faults of a file; the settings are usable only without faults."""

    settings: tuple[ConfSetting, ...]
    faults: tuple[ConfFault, ...]


def format_place(file: str, line: int, column: int) -> str:
    """Format a place in a file, for messages."""
    return f"{file} line {line}, column {column}"


def split_lines(text: str, file: str) -> list[ConfLine]:
    """Return the lines of a file's text."""
    return [ConfLine(file, number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), start=1)]


def included_file(line: ConfLine) -> str | None:
    """Return the file that the line includes, as written; None for any other line."""
    found = _INCLUDE.match("".join(character for character, _ in _without_comment(line.text)))
    return found.group("file").strip('"') if found else None


def parse_lines(lines: Iterable[ConfLine]) -> ConfContents:
    """Return the settings and faults of a file."""
    settings: dict[str, ConfSetting] = {}
    faults: list[ConfFault] = []
    for joined in _logical_lines(lines):
        _parse_logical_line(joined, settings, faults)
    if len(settings) > SETTINGS_MAX:
        faults.append(ConfFault("file", f"the file has {len(settings)} settings", f"write at most {SETTINGS_MAX}"))
    return ConfContents(tuple(settings.values()), tuple(faults))


def parse_text(text: str, file: str = "burst_buffer.conf") -> ConfContents:
    """Return the settings and faults of a text without includes."""
    return parse_lines(split_lines(text, file))


class _LogicalLine:
    """Continued lines joined into one text, with the origin of each character."""

    def __init__(self) -> None:
        self.text = ""
        self._places: list[tuple[ConfLine, int]] = []
        """For each character its line, and its column counted from 1."""

    def add(self, line: ConfLine) -> bool:
        """Append a line without its comment; return whether it is continued."""
        kept = _without_comment(line.text)
        continues = bool(kept) and kept[-1][0] == "\\"
        if continues:
            kept.pop()
        self.text += "".join(character for character, _ in kept)
        self._places.extend((line, column) for _, column in kept)
        return continues

    def at(self, offset: int) -> tuple[str, int, int]:
        """Return file, line and column of a character; of the last one for an offset behind the end."""
        line, column = self._places[min(offset, len(self._places) - 1)]
        return line.file, line.number, column

    def place(self, offset: int) -> str:
        return format_place(*self.at(offset))


def _without_comment(text: str) -> list[tuple[str, int]]:
    """Return the characters before the comment, each with its column; escaped # are unescaped."""
    kept: list[tuple[str, int]] = []
    index = 0
    while index < len(text) and text[index] != "#":
        escaped = text[index : index + 2] == "\\#"
        index += escaped
        kept.append((text[index], index + 1))
        index += 1
    return kept


def _logical_lines(lines: Iterable[ConfLine]) -> Iterable[_LogicalLine]:
    joined = _LogicalLine()
    for line in lines:
        if not joined.add(line):
            yield joined
            joined = _LogicalLine()
    if joined.text:
        yield joined


def _parse_logical_line(joined: _LogicalLine, settings: dict[str, ConfSetting], faults: list[ConfFault]) -> None:
    text, position = joined.text, 0
    while text[position:].strip():
        found = _PAIR.match(text, position)
        if found is None:
            faults.append(_syntax_fault(joined, position))
            return
        position = found.end()
        _add_setting(joined, found, settings, faults)


def _add_setting(
    joined: _LogicalLine, found: re.Match[str], settings: dict[str, ConfSetting], faults: list[ConfFault]
) -> None:
    name = found.group("key")
    group = "plain" if found.group("quoted") is None else "quoted"
    value, value_at, key_at = found.group(group), found.start(group), found.start("key")
    key = find_key(name)
    if key is None:
        faults.append(ConfFault(joined.place(key_at), f"the key {name!r} is unknown", unknown_key_remedy(name)))
        return
    first = settings.get(key.name)
    if first is not None:
        remedy = f"keep one: the first is at {first.place()}"
        faults.append(ConfFault(joined.place(key_at), f"{key.name} is written twice", remedy))
        return
    if len(value) > SETTING_CHARACTERS_MAX:
        sentence = f"{key.name} has {len(value)} characters"
        faults.append(ConfFault(joined.place(value_at), sentence, f"write at most {SETTING_CHARACTERS_MAX}"))
        return
    try:
        parse_value(key, value)
    except ValueFormatError as fault:
        faults.append(ConfFault(joined.place(value_at + fault.offset), fault.sentence, fault.remedy))
    file, line, column = joined.at(value_at)
    settings[key.name] = ConfSetting(key.name, value, file, line, column)


def _syntax_fault(joined: _LogicalLine, position: int) -> ConfFault:
    text = joined.text
    start = position + len(text[position:]) - len(text[position:].lstrip())
    found = _KEY.match(text, position)
    word = text[start:].split()[0]
    if found is None:
        return ConfFault(joined.place(start), f"{word[:48]!r} is not a key", "write Key=Value")
    name = found.group("key")
    if not found.group("equals"):
        known = find_key(name)
        if known is not None:
            return ConfFault(joined.place(found.start("key")), f"{name} has no =", f"write {known.name}=VALUE")
        if name.lower() == "include":
            return ConfFault(joined.place(start), "Include is not alone on its line", "write Include FILE alone")
        remedy = "write Key=Value; a value with blanks stands in double quotes"
        return ConfFault(joined.place(start), f"{word[:48]!r} is not Key=Value", remedy)
    rest = text[found.end() :].lstrip()
    value_at = min(len(text) - len(rest), max(len(text) - 1, 0))
    if not rest:
        return ConfFault(joined.place(value_at), f"{name} has no value", "write one after =, or leave the key out")
    return ConfFault(
        joined.place(value_at), f"the quotes of {name} are not closed or not at its ends", f'write {name}="…"'
    )


class SettingError(Exception):
    """A setting that cannot be used, with its fault."""

    def __init__(self, fault: ConfFault) -> None:
        super().__init__(str(fault))
        self.fault = fault


def parse_settings(
    settings: Iterable[ConfSetting], default_of: Callable[[SettingKey], object] | None = None
) -> Mapping[str, tuple[SettingKey, object, ConfSetting]]:
    """Return key name -> (key, value, setting).

    `default_of` gives the value of a key that is written without one; otherwise that is an error.

    Raises:
        SettingError: a key is unknown, written twice, or has an invalid value.
    """
    found: dict[str, tuple[SettingKey, object, ConfSetting]] = {}
    for setting in settings:
        key = find_key(setting.key)
        if key is None:
            remedy = unknown_key_remedy(setting.key)
            raise SettingError(ConfFault(setting.place(), f"the key {setting.key[:64]!r} is unknown", remedy))
        if key.name in found:
            raise SettingError(ConfFault(setting.place(), f"{key.name} is written twice", "keep one of them"))
        try:
            cleared = default_of is not None and not setting.value
            value = default_of(key) if cleared and default_of is not None else parse_value(key, setting.value)
            found[key.name] = (key, value, setting)
        except ValueFormatError as fault:
            raise SettingError(ConfFault(setting.place(fault.offset), fault.sentence, fault.remedy)) from None
    return found
