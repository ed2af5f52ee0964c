"""TOML files decoded into structs, with errors that name file, line, column, key and remedy.

msgspec decodes and the structs forbid unknown keys: an ignored key could silently disable a setting by a typing error
(hazard H22). This module adds the position in the text and the remedy.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, NewType, TypeVar, get_args

import msgspec
from msgspec import Meta, inspect

from forebay.cluster.security import NAME_RULE, is_name
from forebay.cluster.system import Address, AddressError
from forebay.replica.values import SizeError, parse_size

TEXT_CHARACTERS_MAX: Final = 16 * 1024
"""Characters of a string: a path has at most 4,096 bytes, a variable for a site's programs may have more."""

INTEGER_MAX: Final = 2**63 - 1
"""Largest integer shown in messages: TOML's limit, which tomllib does not enforce."""

SHOWN_CHARACTERS_MAX: Final = 60
"""Characters of a key or value repeated in a message."""

NOBODYS: Final = -1
"""User ID that stands for the owner of a text that was not read from a file."""

KeyPath = tuple[str | int, ...]
"""Keys, and list positions from 0, that lead to a value: `("replica", 1, "peer")` is `replica[2].peer`."""

_ONE_LINE: Final = "a non-empty text of one line"
_KINDS: Final[tuple[tuple[type, str], ...]] = (
    (bool, "true or false"),
    (int, "a whole number"),
    (float, "a decimal number"),
    (str, "a text"),
    (list, "a list"),
    (dict, "a table"),
)

# Used only for errors: `re` compiles them on first use, because every command pays for work at import.
_BARE_KEY: Final = r"[A-Za-z0-9_-]+"
_ERROR_PATH: Final = r" - at `\$([^`]*)`\Z"
_STEP: Final = r"\.([^.\[]+)|\[([0-9]+)\]"
_TOML_PLACE: Final = r" \(at (?:line ([0-9]+), column ([0-9]+)|end of document)\)\Z"

# An unclosed string extends to the end of its line or of the text, so that an incomplete file is scanned in linear
# time.
_TOKEN: Final = r'''(?xs)
    (?P<blank>[ \t\r]+|\#[^\n]*)
    |(?P<word>"""(?:\\.?|[^\\])*?(?:"""(?!")|\Z) | \'\'\'.*?(?:\'\'\'(?!\')|\Z) | "(?:\\.|[^"\\\n])*"? | '[^'\n]*'?
        | [^\s"'\[\]{}=,\#]+)
    |(?P<mark>.)'''

_T = TypeVar("_T")

if TYPE_CHECKING:
    Written = Annotated[_T, "in TOML as a text"]
    Name = str
else:
    Name = NewType("Name", str)
    """Name that is valid as a file name and in a certificate (`forebay.cluster.security.identity`)."""

    class _Open(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return True

    class Written(Generic[_T], metaclass=_Open):
        """Field of type `_T` that is written as a text, decoded by `_DECODERS`.

        msgspec calls its hook only for unknown classes such as this, and accepts any result as an instance.
        """


Size = NewType("Size", int)
"""Bytes, written as a string with a suffix or as an integer."""


Bytes = Annotated[Written[Size], Meta(title="a size", examples=["96MiB"])]
Text = Written[str]
"""Non-empty line of text; a default may be empty."""


class ConfigError(Exception):
    """The configuration is invalid.

    The attributes are `file`, `line` and `column` (from 1; 0 without a position), `key` (such as `replica[2].peer`),
    the fault (`sentence`) and the `remedy`.
    """

    def __init__(self, file: Path, key: str, sentence: str, remedy: str, line: int = 0, column: int = 0) -> None:
        from forebay.replica.grammar import format_place

        self.place = format_place(str(file), line, column) if line else str(file)
        super().__init__(": ".join(part for part in (self.place, key, f"{sentence}; {remedy}") if part))
        self.file = file
        self.line = line
        self.column = column
        self.key = key
        self.sentence = sentence
        self.remedy = remedy


class InvalidValue(ValueError):
    """Value of the right type that is not permitted, raised in `__post_init__`.

    `key` is relative to the struct's table.
    """

    def __init__(self, sentence: str, remedy: str, *key: str | int) -> None:
        super().__init__(f"{sentence}; {remedy}")
        self.sentence = sentence
        self.remedy = remedy
        self.key: KeyPath = key


class Document:
    """TOML file with its text and values, which reports errors with their position."""

    def __init__(self, file: Path, text: str, owner_uid: int = NOBODYS) -> None:
        """Parse the text.

        Raises:
            ConfigError: The text is not TOML.
        """
        self._file = file
        self.owner_uid: Final = owner_uid
        """User ID of the file's owner when it was read."""
        self._text = text
        try:
            self._values = tomllib.loads(text)
        # Python raises a plain ValueError for numbers with too many digits.
        except (ValueError, RecursionError) as error:
            raise self._not_toml(error) from error

    @classmethod
    def load(cls, file: Path, *, bytes_max: int) -> Document:
        """Read and parse a file of at most `bytes_max` bytes.

        Raises:
            ConfigError: The file cannot be read or is not TOML.
        """
        try:
            with file.open("rb") as stream:
                owner_uid = os.fstat(stream.fileno()).st_uid
                data = stream.read(bytes_max + 1)
        except OSError as error:
            sentence = f"the configuration cannot be read ({error.strerror})"
            raise ConfigError(
                file, "", sentence, "make one with `forebay cluster init`, or name it with --config"
            ) from error
        if len(data) > bytes_max:
            remedy = "this is not a configuration of Forebay"
            raise ConfigError(file, "", f"the file has more than {bytes_max} bytes", remedy)
        try:
            return cls(file, data.decode("utf-8"), owner_uid)
        except UnicodeDecodeError as error:
            before = data[: error.start].decode("utf-8")
            sentence = f"byte {error.start} is not UTF-8"
            place = _line_and_column(before, len(before))
            raise ConfigError(file, "", sentence, "save the file as UTF-8", *place) from error

    def decode(self, kind: type[_T]) -> _T:
        """Decode the values into the struct `kind`.

        Raises:
            ConfigError: A value is invalid; the error is for the first one.
        """
        try:
            return msgspec.convert(self._values, kind, dec_hook=_decode)
        except msgspec.ValidationError as error:
            raise self._explain(error, kind) from error

    def try_decode(self, kind: type[_T]) -> _T | None:
        """Decode the values into the struct `kind`; return None if they are invalid."""
        try:
            return msgspec.convert(self._values, kind, dec_hook=_decode)
        except msgspec.ValidationError:
            return None

    def refuse(self, path: KeyPath, sentence: str, remedy: str, *, at: KeyPath | None = None) -> ConfigError:
        """Return the error for the value at `path`; `at` gives its position in the text if different."""
        place = _line_and_column(self._text, _find(self._text, path if at is None else at))
        return ConfigError(self._file, key_text(path), sentence, remedy, *place)

    def _not_toml(self, error: Exception) -> ConfigError:
        message = str(error)
        found = re.search(_TOML_PLACE, message)
        if found is None:
            return ConfigError(self._file, "", f"this is not TOML: {message}", "write shorter and flatter values")
        line, column = _line_and_column(self._text, len(self._text))
        if found.group(1):
            line, column = int(found.group(1)), int(found.group(2))
        seen: dict[KeyPath, int] = {}
        begin = 0
        for _ in range(line - 1):
            begin = self._text.index("\n", begin) + 1
        for path, offset in _keys(self._text[: begin + column]):
            if path in seen and isinstance(path[-1], str):
                first, _ = _line_and_column(self._text, seen[path])
                place = _line_and_column(self._text, offset)
                sentence = f"the key is written twice, first in line {first}"
                return ConfigError(self._file, key_text(path), sentence, "leave one of the two out", *place)
            seen[path] = offset
        sentence = f"this is not TOML: {message[: found.start()]}"
        return ConfigError(self._file, "", sentence, "correct the text here or just before", line, column)

    def _explain(self, error: msgspec.ValidationError, kind: type) -> ConfigError:
        root = inspect.type_info(kind)
        assert isinstance(root, inspect.StructType)
        # Check keys first, because an unknown key could look like the path at the end of msgspec's message.
        rejection = self._explain_keys((), root, self._values, root)
        if rejection is not None:
            return rejection
        found = re.search(_ERROR_PATH, str(error))
        path: KeyPath = ()
        form = _Form(root)
        value: Any = self._values
        for step in re.finditer(_STEP, found.group(1) if found else ""):
            following = form.inside(step.group(1))
            if following is None:
                break
            name = step.group(1) or int(step.group(2))
            path, form, value = (*path, name), following, value[name]
        cause = error.__cause__
        if isinstance(cause, InvalidValue):
            return self.refuse((*path, *cause.key), cause.sentence, cause.remedy)
        if isinstance(cause, (AddressError, SizeError)):
            return self.refuse(path, cause.sentence, cause.remedy)
        if isinstance(form.kind, inspect.StructType) and isinstance(value, dict):
            rejection = self._explain_keys(path, form.kind, value, root)
        return rejection or self.refuse(path, *form.explain(path, value))

    def _explain_keys(
        self, path: KeyPath, table: inspect.StructType, values: dict[str, Any], root: inspect.StructType
    ) -> ConfigError | None:
        import difflib

        known = {field.encode_name: field for field in table.fields}
        missing = [name for name, field in known.items() if field.required and name not in values]
        for key in (key for key in values if key not in known):
            # The cutoff is low for short keys such as `id`.
            (resembled,) = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.5) or ("",)
            if resembled in missing:
                sentence = f"the key is missing (found {_display_value(key)} instead)"
                remedy = _Form(known[resembled].type).remedy((*path, resembled))
                return self.refuse((*path, resembled), sentence, remedy, at=(*path, key))
            homes = _headers_with(root, key)
            if len(homes) == 1:
                return self.refuse((*path, key), "this key belongs to another table", f"write it in {homes[0]}")
            hint = f"did you mean {resembled!r}?" if resembled else "remove it;"
            return self.refuse((*path, key), "unknown key", f"{hint} known keys here: {', '.join(known)}")
        for name in missing:
            remedy = _Form(known[name].type).remedy((*path, name))
            return self.refuse((*path, name), "the key is missing", remedy)
        return None


class _Form:
    """Type of a value, with its metadata in the struct (`Meta`)."""

    def __init__(self, kind: inspect.Type) -> None:
        self.notes: dict[str, Any] = {}
        while isinstance(kind, (inspect.Metadata, inspect.UnionType)):
            if isinstance(kind, inspect.Metadata):
                self.notes |= kind.extra_json_schema or {}
                kind = kind.type
            else:
                kind = next(one for one in kind.types if not isinstance(one, inspect.NoneType))
        self.kind = kind

    def inside(self, name: str | None) -> _Form | None:
        """Return the type of the value at a key, or of list elements if `name` is None.

        None if there is no such type.
        """
        if isinstance(self.kind, inspect.StructType):
            return next((_Form(field.type) for field in self.kind.fields if field.encode_name == name), None)
        return _Form(self.kind.item_type) if isinstance(self.kind, inspect.VarTupleType) and name is None else None

    def remedy(self, path: KeyPath) -> str:
        """Return the remedy for a value at `path`."""
        kind, key = self.kind, path[-1]
        match kind:
            case inspect.StructType() | inspect.DictType():
                is_row = isinstance(key, int)
                return f"write a table [[{key_text(path[:-1])}]]" if is_row else f"write a table [{key_text(path)}]"
            case inspect.VarTupleType():
                is_tables = isinstance(_Form(kind.item_type).kind, inspect.StructType)
                return f"write tables [[{key}]]" if is_tables else f'write {key} = ["…", "…"]'
            case inspect.IntType():
                return f"write a whole number from {kind.ge} to {kind.le}"
            case inspect.BoolType():
                return "write true or false, without quotes"
            case inspect.LiteralType():
                return f"write one of {', '.join(map(repr, kind.values))}"
        title, example = self.notes.get("title", ""), self.notes.get("examples", ["…"])[0]
        if isinstance(key, int):
            return f"write {_ONE_LINE}"
        return f'write {title}, for example {key} = "{example}"' if title else f'write {key} = "{example}"'

    def explain(self, path: KeyPath, value: Any) -> tuple[str, str]:
        """Return the fault of a value, and the remedy."""
        remedy = self.remedy(path)
        match self.kind, value:
            case inspect.VarTupleType(max_length=most), list():
                things = "tables" if remedy.startswith("write tables") else "entries"
                return f"found {len(value)} {things}", f"at most {most} are possible"
            case inspect.IntType(), int() if not isinstance(value, bool):
                return f"found {_display_value(value)}", remedy
            case inspect.LiteralType(values=values), str():
                return f"found {_display_value(value)}", remedy + near(value, tuple(map(str, values)))
        return f"found {_kind(value)}", remedy


def near(word: str, known: tuple[str, ...]) -> str:
    """Return ` (did you mean …?)` if a known word is similar, otherwise ""."""
    import difflib

    found = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return f" (did you mean {found[0]!r}?)" if found else ""


def key_text(path: KeyPath) -> str:
    """Format a path for errors: positions count from 1, and keys are quoted where TOML requires it."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step + 1}]"
        else:
            text += ("." if text else "") + (step if re.fullmatch(_BARE_KEY, step) else _display_value(step))
    return text


def check_line(value: object, *key: str | int) -> str:
    """Check that a value is a single line, as for `Text`, and return it.

    Raises:
        InvalidValue: The value is not a single line; the error is for `key`.
    """
    if not isinstance(value, str) or not value or "\x00" in value or "\n" in value:
        raise InvalidValue(f"found {_kind(value)}", f"write {_ONE_LINE}", *key)
    if len(value) > TEXT_CHARACTERS_MAX:
        raise InvalidValue(f"found {len(value)} characters", f"at most {TEXT_CHARACTERS_MAX} are possible", *key)
    return value


def _size(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError
    if isinstance(value, int) and abs(value) > INTEGER_MAX:
        raise InvalidValue(f"found {_display_value(value)}", f"write at most {INTEGER_MAX} bytes")
    return parse_size(str(value))


def _name(text: str) -> str:
    if not is_name(text):
        raise InvalidValue(f"found {_display_value(text)}", NAME_RULE)
    return text


def _from_text(read: Callable[[str], object]) -> Callable[[object], object]:
    def decode(value: object) -> object:
        if not isinstance(value, str):
            raise TypeError
        return read(check_line(value))

    return decode


def _decode(form: Any, value: object) -> object:
    """Convert a value of a type that TOML lacks.

    Raises:
        ValueError: The value is invalid.
        TypeError: The value has the wrong type.
    """
    return _DECODERS[(get_args(form) or (form,))[0]](value)


_DECODERS: Final[dict[Any, Callable[[Any], object]]] = {
    Size: _size,
    str: _from_text(str),
    Name: _from_text(_name),
    Path: _from_text(Path),
    Address: _from_text(Address.parse),
}
"""Converters of the types that TOML lacks."""


def _headers_with(root: inspect.StructType, key: str) -> list[str]:
    """Return the headers of the tables with this key."""
    found = []
    for field in root.fields:
        form, header = _Form(field.type), f"[{field.encode_name}]"
        if isinstance(form.kind, inspect.VarTupleType):
            form, header = _Form(form.kind.item_type), f"[{header}]"
        if isinstance(form.kind, inspect.StructType) and key in {one.encode_name for one in form.kind.fields}:
            found.append(header)
    return found


def _kind(value: object) -> str:
    for kind, phrase in _KINDS:
        if isinstance(value, kind):
            return phrase if isinstance(value, (list, dict)) else f"{phrase} ({_display_value(value)})"
    return _display_value(value)


def _display_value(value: object) -> str:
    # Python refuses to format a number with thousands of digits, which may come from hexadecimal.
    if isinstance(value, int) and abs(value) > INTEGER_MAX:
        return "a number of more than 63 bits"
    return f"{value!r:.{SHOWN_CHARACTERS_MAX}}"


def _line_and_column(text: str, offset: int) -> tuple[int, int]:
    """Return line and column of an offset, both from 1."""
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


def _find(text: str, path: KeyPath) -> int:
    """Return the offset of the key, table or list element at `path`, or of the nearest enclosing one."""
    nearest, depth = 0, 0
    for found, offset in _keys(text):
        if found[: len(path)] == path:
            return offset
        if len(found) > depth and found == path[: len(found)]:
            nearest, depth = offset, len(found)
    return nearest


def _keys(text: str) -> Iterator[tuple[KeyPath, int]]:
    """Yield each key, table header and list element of a TOML text with its offset, in order."""
    base: KeyPath = ()  # of the last header
    rows: dict[KeyPath, int] = {}  # position of the last row of each table [[…]]
    path: KeyPath = ("",)  # of the next value or list element
    around: list[KeyPath] = []  # open lists and inline tables
    names: list[str] = []  # of the current key
    start, brackets, in_key = 0, 0, True
    for token in re.finditer(_TOKEN, text):
        kind, word, offset = token.lastgroup, token.group(), token.start()
        if kind == "blank" or (word == "\n" and around):
            continue
        if word == "\n":
            names, brackets, in_key = [], 0, True
        elif in_key and kind == "word":
            start = start if names else offset
            names += _names(word)
        elif in_key and word == "=":
            path, names, in_key = (*(around[-1] if around else base), *(names or [""])), [], False
            yield path, start
        elif in_key and word == "[":
            brackets += 1
        elif in_key and word == "]" and names:
            base, names = _header(names, rows, is_row=brackets > 1), []
            yield base, start
        elif word in "]}":
            path, in_key = around.pop() if around else path, False
        elif word == "," and not in_key:
            last = path[-1]
            path, in_key = ((*path[:-1], last + 1), False) if isinstance(last, int) else (path, True)
        elif not in_key:
            if isinstance(path[-1], int):
                yield path, offset
            if word in "[{":
                around.append(path)
                path, in_key = ((*path, 0), False) if word == "[" else (path, True)


def redact(text: str, table: KeyPath, instead: str) -> str:
    """Replace each string in the table at this path by `instead`, and return the TOML text.

    Raises:
        ValueError: A value of the table cannot be replaced.
    """
    done, kept = 0, []
    for path, offset in _keys(text):
        if path[: len(table)] == table and len(path) > len(table):
            tokens = (token for token in re.finditer(_TOKEN, text[offset:]) if token.lastgroup != "blank")
            assigned = next((token for token in tokens if token.group() == "="), None)
            value = next(tokens, None)
            if assigned is not None and value is not None and value.lastgroup == "word" and offset >= done:
                kept.append(text[done : offset + value.start()])
                done = offset + value.end()
    redacted = f'"{instead}"'.join((*kept, text[done:]))
    found: Any = tomllib.loads(redacted)
    for key in table:
        found = found.get(key, {})
    if any(value != instead for value in found.values()):
        raise ValueError(f"the values of {key_text(table)} cannot be located")
    return redacted


def _header(names: list[str], rows: dict[KeyPath, int], *, is_row: bool) -> KeyPath:
    """Return the path of the table whose header has these names."""
    path: KeyPath = ()
    for number, name in enumerate(names, start=1):
        path = (*path, name)
        if is_row and number == len(names):
            rows[path] = rows.get(path, -1) + 1
        if path in rows:
            path = (*path, rows[path])
    return path


def _names(word: str) -> list[str]:
    """Return the names in one word of a key: a quoted name, or several names separated by dots."""
    if word[0] not in "\"'":
        return [name for name in word.split(".") if name]
    try:
        return [str(tomllib.loads(f"name = {word}")["name"])]
    except ValueError:
        return [word]
