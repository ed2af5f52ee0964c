"""Parser of the `#SBATCH` lines of a batch script, with line and column.

It follows sbatch: comment lines at the top, before the first command; options in the forms of getopt (`--time=10`,
`--time 10`, `-t 10`, `-t10`, `-Ht10`, and `--part` for `--partition`); words may be quoted; `#` outside of quotes
starts a comment; the last of several values wins. `sbatch_options` has the treatment of each option. An unknown name
is rejected, because it may be a misspelt option that decides where data goes.
"""

import difflib
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from forebay.cluster.cli.exits import Failure, bad_input
from forebay.cluster.cli.submission.sbatch_options import (
    LONG,
    SHORT,
    UNNAMED_FIELDS,
    VALUES_WITHOUT_EFFECT,
    Option,
    Treatment,
    Value,
    options_for,
)
from forebay.replica.values import SUBMITTED_SCRIPT_BYTES_MAX, NodeListError, parse_nodes

MARK: Final = "#SBATCH"

FOREIGN_MARKS: Final = ("#PBS ", "#BSUB ", "#COBALT ", "#$ -")
"""Prefixes of the option lines of other batch systems; sbatch reads some of them."""

WARNINGS_MAX: Final = 16
"""Maximum number of warnings about the lines of one script."""

ADDED: Final = ("mail_types",)
"""Fields for which sbatch appends a second value to the first."""

_COMPONENTS: Final = ("hetjob", "packjob")
"""Words that separate the components of a heterogeneous job."""

CONTROL_WORDS_SHOWN: Final = 24
"""Characters of an unknown word shown in an error: enough to find it, short enough for one line."""


class Word(NamedTuple):
    """Unquoted word of a line, with the column (from 1) of its start."""

    text: str
    column: int


class Setting(NamedTuple):
    """Value of an option, with its place."""

    value: str
    place: str


class IgnoredOption(NamedTuple):
    """Option without effect."""

    written: str
    """Option name, followed by the value if only this value has no effect."""
    place: str
    reason: str
    remedy: str

    def rejection(self) -> Failure:
        """Return the failure for a site that does not accept such options."""
        return bad_input(f"{self.written} has no effect: {self.reason}", self.remedy, place=self.place)


def ignore_value(long: str, value: str, place: str) -> IgnoredOption:
    """Return the ignored option for a value in VALUES_WITHOUT_EFFECT."""
    return IgnoredOption(f"{long}={value}" if value else long, place, *VALUES_WITHOUT_EFFECT[long])


class ScriptOptions(NamedTuple):
    """Options in the `#SBATCH` lines of a script."""

    settings: dict[str, Setting]
    """Settings by field."""
    ignored: tuple[IgnoredOption, ...]
    warnings: tuple[str, ...]
    faults: tuple[Failure, ...]
    """Errors in the order of the lines; if there are any, the other fields are not valid."""


def check_script(data: bytes, name: str) -> str:
    """Return the text of a batch script.

    Raises:
        Failure: bad input, if it is too large, not text, has Windows line ends, or names no interpreter.
    """
    if len(data) > SUBMITTED_SCRIPT_BYTES_MAX:
        raise bad_input(
            f"the script has more than {SUBMITTED_SCRIPT_BYTES_MAX} bytes",
            "move data and programs to files that the script uses",
            place=name,
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise bad_input(
            "the script is not UTF-8 text",
            "convert it to UTF-8, or submit a script that runs the program",
            place=f"{name} line {line}",
        ) from None
    for forbidden, sentence, remedy in (
        ("\0", "the script has a zero byte", "submit a text file, not a program"),
        ("\r\n", "the line has a Windows line end (CR LF)", f"convert the script: sed -i 's/\\r$//' {name}"),
    ):
        offset = text.find(forbidden)
        if offset >= 0:
            raise bad_input(sentence, remedy, place=f"{name} line {text.count(chr(10), 0, offset) + 1}")
    if not text.startswith("#!"):
        raise bad_input(
            "the file is not a batch script: it does not begin with #!",
            "make the first line name the interpreter, for example #!/bin/sh",
            place=f"{name} line 1, column 1",
        )
    return text


def read_options(script: str, name: str) -> ScriptOptions:
    """Return the options in the `#SBATCH` lines, and errors with line and column."""
    found = ScriptOptions({}, (), (), ())
    warnings: list[str] = []
    faults: list[Failure] = []
    ignored: list[IgnoredOption] = []
    at_top = True
    for number, line in enumerate(script.split("\n"), start=1):
        if not line.startswith(MARK):
            if at_top and line.strip() and not line.lstrip().startswith("#"):
                at_top = False
            elif at_top and line.startswith(FOREIGN_MARKS):
                warnings.append(f"{name} line {number}: {line.split()[0]} lines are ignored; write {MARK}")
            continue
        rest = line[len(MARK) : len(MARK) + 1]
        if rest and not rest.isspace() and rest != "-":
            continue
        if not at_top:
            warnings.append(f"{name} line {number}: {MARK} after the first command is ignored; move it to the top")
            continue
        for one in _read_line(line, f"{name} line {number}"):
            match one:
                case Failure():
                    faults.append(one)
                case IgnoredOption():
                    ignored.append(one)
                case _:
                    field, setting = one
                    if field in ADDED and field in found.settings:
                        setting = setting._replace(value=f"{found.settings[field].value},{setting.value}")
                    found.settings[field] = setting
    return found._replace(ignored=tuple(ignored), warnings=_shorten(warnings), faults=tuple(faults))


def _shorten(warnings: list[str]) -> tuple[str, ...]:
    more = len(warnings) - WARNINGS_MAX
    return (*warnings[:WARNINGS_MAX], f"and {more} more such lines") if more > 0 else tuple(warnings)


def split_words(line: str, start: int, place: str) -> list[Word]:
    """Return the words of a line from offset `start` on, with quotes and backslashes as in sbatch.

    Raises:
        Failure: bad input, if a quote is not closed.
    """
    words: list[Word] = []
    text, column, quote, offset = "", 0, "", start
    while offset < len(line):
        character = line[offset]
        if quote:
            if character == quote:
                quote = ""
            elif character == "\\" and quote == '"' and line[offset + 1 : offset + 2] in ('"', "\\"):
                offset += 1
                text += line[offset]
            else:
                text += character
        elif character.isspace():
            if column:
                words.append(Word(text, column))
            text, column = "", 0
        elif character == "#":
            break
        else:
            column = column or offset + 1
            if character in "\"'":
                quote = character
            elif character == "\\":
                offset += 1
                text += line[offset : offset + 1]
            else:
                text += character
        offset += 1
    if quote:
        raise bad_input(
            f"the quote {quote} is not closed", f"add {quote} where the value ends", place=f"{place}, column {column}"
        )
    if text or (column and line[column - 1] != "\\"):
        words.append(Word(text, column))
    return words


Found = tuple[str, Setting] | IgnoredOption | Failure
"""Result of reading one option."""


def _read_line(line: str, place: str) -> Iterator[Found]:
    """Yield the result for each option of a line."""
    try:
        words = split_words(line, len(MARK), place)
    except Failure as failure:
        yield failure
        return
    if words and words[0].text.lower() in _COMPONENTS:
        yield bad_input(
            f"{words[0].text} begins a component of a heterogeneous job, and jobs run on one node",
            "submit each component as a job",
            place=f"{place}, column {words[0].column}",
        )
        return
    left = deque(words)
    while left:
        word = left.popleft()
        try:
            if word.text.startswith("--") and len(word.text) > 2:
                yield _long(word, left, place)
            elif word.text.startswith("-") and len(word.text) > 1 and word.text != "--":
                yield from _short(word, left, place)
            else:
                raise bad_input(
                    f"{_quote(word.text)} is not an option",
                    "options begin with - or --; quote a value that has spaces",
                    place=f"{place}, column {word.column}",
                )
        except Failure as failure:
            yield failure
            while left and not left[0].text.startswith("-"):
                # Skip the value of an unknown option, which would cause a second error.
                left.popleft()


def _long(word: Word, left: deque[Word], place: str) -> Found:
    name, equals, value = word.text.partition("=")
    option = _find_option(name, f"{place}, column {word.column}")
    if not equals:
        return _without_value(option, name, left, place, word.column)
    column = word.column + len(name) + 1
    if option.value is Value.NONE:
        if value and value == option.without_effect:
            return ignore_value(option.long, value, f"{place}, column {column}")
        raise bad_input(f"{name} takes no value", f"write {name} alone", place=f"{place}, column {column - 1}")
    return _with_value(option, name, Word(value, column), place, word.column)


def _short(word: Word, left: deque[Word], place: str) -> Iterator[Found]:
    for offset in range(1, len(word.text)):
        name = "-" + word.text[offset]
        column = word.column if offset == 1 else word.column + offset
        option = SHORT.get(name)
        if option is None:
            raise _unknown(name, f"{place}, column {column}")
        if option.value is Value.NONE:
            yield _without_value(option, name, left, place, column)
            continue
        value = Word(word.text[offset + 1 :], word.column + offset + 1)
        if value.text.startswith("="):
            raise bad_input(
                f"{name} takes its value without an equals sign",
                f"write {name} {value.text[1:]} or {option.long}={value.text[1:]}",
                place=f"{place}, column {value.column}",
            )
        if value.text:
            yield _with_value(option, name, value, place, column)
        else:
            yield _without_value(option, name, left, place, column)
        return


def _without_value(option: Option, written: str, left: deque[Word], place: str, column: int) -> Found:
    """Return the result for an option without a value in its word; a required value is the next word."""
    at_option = f"{place}, column {column}"
    if option.value is not Value.REQUIRED:
        return _treat(option, written, Setting(option.alone, at_option), at_option)
    if not left:
        raise bad_input(f"{written} needs a value", f"write {option.long}=VALUE", place=at_option)
    return _with_value(option, written, left.popleft(), place, column)


def _with_value(option: Option, written: str, value: Word, place: str, column: int) -> Found:
    at_value = f"{place}, column {value.column}"
    if not value.text:
        raise bad_input(f"the value of {written} is empty", f"write {option.long}=VALUE", place=at_value)
    return _treat(option, written, Setting(value.text, at_value), f"{place}, column {column}")


def _treat(option: Option, written: str, setting: Setting, place: str) -> Found:
    if option.treatment is Treatment.IGNORED:
        if option.long == "--nodelist" and _names_several(setting.value):
            raise bad_input(f"{written} names several nodes, and jobs run on one", option.remedy, place=setting.place)
        return IgnoredOption(option.long, place, option.reason, option.remedy)
    if option.treatment is Treatment.REJECTED:
        raise rejection(option, written, place)
    return option.field, setting


class TypedOptions(NamedTuple):
    """Options of sbatch on the command line that `forebay submit` does not have."""

    args: list[str]
    """Command line without the options in `settings` and `ignored`."""
    settings: dict[str, str]
    ignored: tuple[IgnoredOption, ...]


def read_typed(args: list[str], name: str) -> TypedOptions:
    """Extract one option of sbatch from a command line, or expand its abbreviated name.

    `name` is the option that click's parser reported as unknown. Other words are unchanged.

    Raises:
        Failure: bad input, if the option is rejected.
    """
    is_long = name.startswith("--")
    found = options_for(name) if is_long else tuple(filter(None, (SHORT.get(name),)))
    places = (at for at, word in enumerate(args) if (word.partition("=")[0] if is_long else word[:2]) == name)
    at = next(places, None)
    if len(found) != 1 or at is None:
        return TypedOptions(args, {}, ())
    option, word = found[0], args[at]
    if option.treatment is Treatment.REJECTED:
        raise rejection(option, name, "")
    value, rest = word[len(name) :].removeprefix("=" if is_long else ""), args[at + 1 :]
    if option.treatment is Treatment.CARRIED_OUT and option.field not in UNNAMED_FIELDS:
        return TypedOptions([*args[:at], option.long + word[len(name) :], *rest], {}, ())
    if option.value is Value.REQUIRED and word == name:
        if not rest:
            raise bad_input(f"{name} needs a value", f"write {option.long}=VALUE")
        value, *rest = rest
    elif not is_long and option.value is Value.NONE and value:
        rest = ["-" + value, *rest]
    args = [*args[:at], *rest]
    if option.treatment is Treatment.IGNORED:
        found_one = _treat(option, name, Setting(value, ""), "")
        assert isinstance(found_one, IgnoredOption)
        return TypedOptions(args, {}, (found_one,))
    return TypedOptions(args, {option.field: value}, ())


def _names_several(text: str) -> bool:
    """Return whether a list names several nodes; False for an invalid list."""
    try:
        return len(parse_nodes(text)) > 1
    except NodeListError:
        return False


def rejection(option: Option, written: str, place: str) -> Failure:
    """Return the failure for a rejected option."""
    return bad_input(f"{written} is not supported: {option.reason}", option.remedy, place=place)


def _find_option(name: str, place: str) -> Option:
    """Return the option for a long name or an unambiguous prefix.

    Raises:
        Failure: bad input, if there is no such option, or several.
    """
    found = options_for(name)
    if len(found) == 1:
        return found[0]
    if not found:
        raise _unknown(name, place)
    listed = ", ".join(option.long for option in found)
    raise bad_input(f"{_quote(name)} is ambiguous: {listed}", "write the whole name", place=place)


def _unknown(written: str, place: str) -> Failure:
    near = difflib.get_close_matches(written, LONG, n=1)
    remedy = f"did you mean {near[0]}? " if near else ""
    remedy += (
        "remove it, or write ##SBATCH to make the line a comment; docs/reference/sbatch-options.md lists the "
        "supported options"
    )
    return bad_input(f"option {_quote(written)} is unknown", remedy, place=place)


def _quote(text: str) -> str:
    return repr(text if len(text) <= CONTROL_WORDS_SHOWN else text[:CONTROL_WORDS_SHOWN] + "…")
