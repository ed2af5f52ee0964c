"""How a TOML table is read so that nothing in it is ignored and every mistake names its place.

Each value is asked for by key and kind; whatever nobody asked for is an unknown key. Options taken without that are the
ones that a misspelling silently turns off (hazard H22).
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from replica.values import SizeError, parse_size

INTEGER_MAX: Final = 2**63 - 1
"""Largest integer: TOML's own bound."""

_KINDS: Final[tuple[tuple[type, str], ...]] = (
    (bool, "true or false"),
    (int, "a whole number"),
    (float, "a decimal number"),
    (str, "a text"),
    (list, "a list"),
    (dict, "a table"),
)


class ConfigError(Exception):
    """A configuration that cannot be used.

    It names `file`, `key` (a path like `replica[2].peer`), what was found (`sentence`), what would be right (`remedy`).
    """

    def __init__(self, file: Path, key: str, sentence: str, remedy: str) -> None:
        super().__init__(": ".join(part for part in (str(file), key, f"{sentence}; {remedy}") if part))
        self.file = file
        self.key = key
        self.sentence = sentence
        self.remedy = remedy


class Table:
    """One table of a TOML file, with the path that leads to it."""

    def __init__(self, file: Path, path: str, values: Mapping[str, Any]) -> None:
        self._file = file
        self._path = path
        self._values = values
        self._asked: list[str] = []

    def has(self, key: str) -> bool:
        """Say whether the key is written, whatever its value."""
        return key in self._values

    def keys(self) -> tuple[str, ...]:
        """Return the keys that are written: for a table whose keys are free."""
        return tuple(self._values)

    def place(self, key: str) -> str:
        """Return the path of a key of this table, as errors name it."""
        return f"{self._path}.{key}" if self._path else key

    def refuse(self, key: str, sentence: str, remedy: str) -> ConfigError:
        """Return the error for a key of this table, to be raised."""
        return ConfigError(self._file, self.place(key) if key else self._path, sentence, remedy)

    def text(self, key: str, default: str | None = None, *, example: str = "") -> str:
        """Return a non-empty text; `default` may be empty."""
        value = self._take(key, str, default, f'write {key} = "{example or "…"}"')
        if not value and self.has(key):
            raise self.refuse(key, "the text is empty", f'write {key} = "{example or "…"}" or leave the key out')
        if "\x00" in value or "\n" in value:
            raise self.refuse(key, "the text has a line break or a NUL character", "write one line")
        return str(value)

    def integer(self, key: str, default: int | None = None, *, least: int = 0, most: int = INTEGER_MAX) -> int:
        """Return a whole number from `least` to `most`."""
        remedy = f"write a whole number from {least} to {most}" if most < INTEGER_MAX else f"write at least {least}"
        value = int(self._take(key, int, default, remedy))
        if not least <= value <= most:
            raise self.refuse(key, f"found {value}", remedy)
        return value

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """Return true or false."""
        return bool(self._take(key, bool, default, "write true or false, without quotes"))

    def choice(self, key: str, choices: tuple[str, ...], default: str | None = None) -> str:
        """Return one of the texts in `choices`."""
        value = self.text(key, default, example=choices[0])
        if value not in choices:
            raise self.refuse(
                key, f"found {value!r}", f"write one of {', '.join(map(repr, choices))}{near(value, choices)}"
            )
        return value

    def texts(self, key: str, default: tuple[str, ...] | None = None, *, most: int) -> tuple[str, ...]:
        """Return a list of at most `most` non-empty texts."""
        value = self._take(key, list, default, f'write {key} = ["…", "…"]')
        if len(value) > most:
            raise self.refuse(key, f"found {len(value)} entries", f"at most {most} are possible")
        for number, item in enumerate(value):
            if not isinstance(item, str) or not item or "\x00" in item or "\n" in item:
                raise self.refuse(f"{key}[{number + 1}]", f"found {_kind(item)}", "write a non-empty text of one line")
        return tuple(value)

    def size(self, key: str, default_bytes: int | None = None) -> int:
        """Return a size in bytes, written as a text with a suffix (`96MiB`) or as a whole number of bytes."""
        self._ask(key)
        value = self._values.get(key)
        if value is None and default_bytes is not None:
            return default_bytes
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if value is None:
            raise self.refuse(key, "the key is missing", f'write a size, for example {key} = "96MiB"')
        if not isinstance(value, str):
            raise self.refuse(key, f"found {_kind(value)}", f'write a size, for example {key} = "96MiB"')
        try:
            return parse_size(value)
        except SizeError as error:
            raise self.refuse(key, error.sentence, error.remedy) from error

    def table(self, key: str, *, required: bool = False) -> "Table":
        """Return the table `[key]`; an empty one where it is not written."""
        value = self._take(key, dict, None if required else {}, f"write a table [{self.place(key)}]")
        return Table(self._file, self.place(key), value)

    def tables(self, key: str, *, most: int) -> "list[Table]":
        """Return the tables `[[key]]`, at most `most`, in the order of the file; errors count them from 1."""
        value = self._take(key, list, (), f"write tables [[{self.place(key)}]]")
        if len(value) > most:
            raise self.refuse(key, f"found {len(value)} tables", f"at most {most} are possible")
        rows = []
        for number, item in enumerate(value, start=1):
            place = f"{self.place(key)}[{number}]"
            if not isinstance(item, dict):
                raise ConfigError(self._file, place, f"found {_kind(item)}", f"write a table [[{self.place(key)}]]")
            rows.append(Table(self._file, place, item))
        return rows

    def finish(self, elsewhere: Mapping[str, str] | None = None) -> None:
        """Refuse keys that nobody asked for; `elsewhere` says of some where they belong."""
        for key in self._values:
            if key in self._asked:
                continue
            if elsewhere and key in elsewhere:
                raise self.refuse(key, "this key does not belong here", f"write it in {elsewhere[key]}")
            hint = near(key, tuple(self._asked))
            remedy = f"{hint.strip(' ()')} known keys here: {', '.join(self._asked)}"
            raise self.refuse(key, "unknown key", remedy if hint else f"remove it;{remedy}")

    def _ask(self, key: str) -> None:
        if key not in self._asked:
            self._asked.append(key)

    def _take(self, key: str, kind: type, default: Any, remedy: str) -> Any:
        self._ask(key)
        if key not in self._values:
            if default is None:
                resembling = difflib.get_close_matches(key, self._values, n=1, cutoff=0.6)
                instead = f" (found {resembling[0]!r} instead)" if resembling else ""
                raise self.refuse(key, f"the key is missing{instead}", remedy)
            return default
        value = self._values[key]
        # bool is an int in Python, but `cpus = true` is a mistake.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.refuse(key, f"found {_kind(value)}", remedy)
        return value


def near(word: str, known: tuple[str, ...]) -> str:
    """Return ` (did you mean …?)` where one of `known` resembles `word`, else nothing."""
    found = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _kind(value: object) -> str:
    for kind, phrase in _KINDS:
        if isinstance(value, kind):
            return phrase if isinstance(value, (list, dict)) else f"{phrase} ({value!r:.60})"
    return f"{value!r:.60}"
