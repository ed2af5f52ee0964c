"""The `#SBATCH` lines of a batch script: what they ask for, with line and column, and nothing ignored.

They are read as sbatch reads them: comment lines at the top, before the first command; options in the forms of getopt
(`--time=10`, `--time 10`, `-t 10`, `-t10`, `-Ht10`); words may be quoted; a word that begins with `#` starts a comment.
The last one of two wins. An option that Forebay does not know is refused, because a job that silently lacks what its
script asks for is worse than one that is not accepted.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from cluster.cli.exits import Failure, bad_input
from cluster.schemas import JOB_FIELDS
from replica.values import SCRIPT_BYTES_MAX

MARK: Final = "#SBATCH"

CONTROL_WORDS_SHOWN: Final = 24
"""Characters of an unknown word repeated in an error: enough to find it, short enough for one line."""


class Option(NamedTuple):
    """One option that Forebay knows; `field` is what it sets."""

    field: str
    long: str
    short: str = ""
    takes_value: bool = True
    only: str = ""
    """The one value that is accepted, where Forebay can do just that."""
    alone: str = ""
    """What it says where no value is written, for those that may stand alone; never in the next word."""


def _options() -> Iterator[Option]:
    for row in JOB_FIELDS:
        long, *others = row.slurm
        opposite = next((other for other in others if other.startswith("--")), "")
        short = next((other for other in others if other != opposite), "")
        is_switch = row.reads == "switch"
        yield Option(row.field, long, short, takes_value=not is_switch, alone="yes" if is_switch else row.alone)
        if opposite:
            yield Option(row.field, opposite, takes_value=False, alone="no")
    yield Option("tasks", "--ntasks", "-n", only="1")


OPTIONS: Final = tuple(_options())

_NO_MEMORY: Final = "Forebay keeps no account of memory: a job has what its node has free"
_NO_DEVICES: Final = "Forebay gives out CPUs, burst buffers and licences, and no devices"
_ONE_NODE: Final = "a job of Forebay is one task on one node, which Forebay chooses"
_TYPED: Final = "it says what the command does, not what the job is"

UNSUPPORTED: Final[Mapping[str, tuple[str, str]]] = {
    **dict.fromkeys(("--mem", "--mem-per-cpu", "--mem-per-gpu"), (_NO_MEMORY, "leave it out")),
    **dict.fromkeys(
        ("--gres", "--gpus", "--gpus-per-node", "--gpus-per-task", "--cpus-per-gpu", "-G"),
        (_NO_DEVICES, "leave it out, or have an operator make a licence for them: forebay license set gpu --total N"),
    ),
    **dict.fromkeys(
        ("--nodelist", "--exclude", "--constraint", "-w", "-x", "-C"),
        (_ONE_NODE, "leave it out, or name a partition of such nodes with --partition"),
    ),
    **dict.fromkeys(
        ("--ntasks-per-node", "--tasks-per-node", "--ntasks-per-core", "--ntasks-per-socket", "--sockets-per-node"),
        (_ONE_NODE, "leave it out, and ask for CPUs with --cpus-per-task"),
    ),
    **dict.fromkeys(
        ("--exclusive", "--oversubscribe", "-s"),
        (_ONE_NODE + ", and shares with others", "ask for all CPUs of a node with --cpus-per-task"),
    ),
    "--input": ("the standard input of a job is /dev/null", "read the file in the script: command < FILE"),
    "-i": ("the standard input of a job is /dev/null", "read the file in the script: command < FILE"),
    "--signal": ("a job gets SIGTERM at its time limit, and no signal before", "leave it out"),
    "--export": (
        "a job of Forebay brings nothing of the environment unless it is named",
        "leave it out, and name what it needs: forebay submit --export NAME=VALUE",
    ),
    **dict.fromkeys(
        ("--wait", "-W", "--parsable", "--wrap", "--uid"), (_TYPED, "leave it out, and give it to forebay submit")
    ),
}
"""Options of sbatch that scripts often have and Forebay does not: what they would need, and what would be right."""

_LONG: Final = {option.long: option for option in OPTIONS}
_SHORT: Final = {option.short: option for option in OPTIONS if option.short}


class Word(NamedTuple):
    """One word of a line, unquoted, and the column (from 1) at which it starts."""

    text: str
    column: int


class Setting(NamedTuple):
    """The value that a script gives one option, and the place it stands at."""

    value: str
    place: str


class ScriptOptions(NamedTuple):
    """What the `#SBATCH` lines of a script say, by field, and what should be looked at."""

    settings: dict[str, Setting]
    warnings: tuple[str, ...]


def check_script(data: bytes, name: str) -> str:
    """Return the text of a batch script; Failure if it is too big, not text, not for Unix or names no interpreter."""
    if len(data) > SCRIPT_BYTES_MAX:
        raise bad_input(
            f"the script has more than {SCRIPT_BYTES_MAX} bytes",
            "keep data and programs in files of their own and let the script call them",
            place=name,
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise bad_input(
            "the script is not UTF-8 text",
            "convert it, or submit a script that runs the program",
            place=f"{name} line {line}",
        ) from None
    for forbidden, sentence, remedy in (
        ("\0", "the script has a zero byte", "submit a text file, not a program"),
        ("\r\n", "the line ends as on Windows (CR LF)", f"convert the script: sed -i 's/\\r$//' {name}"),
    ):
        offset = text.find(forbidden)
        if offset >= 0:
            raise bad_input(sentence, remedy, place=f"{name} line {text.count(chr(10), 0, offset) + 1}")
    if not text.startswith("#!"):
        raise bad_input(
            "this does not look like a batch script: it does not begin with #!",
            "make the first line name the interpreter, for example #!/bin/sh",
            place=f"{name} line 1, column 1",
        )
    return text


def read_options(script: str, name: str) -> ScriptOptions:
    """Return what the `#SBATCH` lines say; Failure names line and column of what cannot be used."""
    settings: dict[str, Setting] = {}
    warnings: list[str] = []
    at_top = True
    for number, line in enumerate(script.split("\n"), start=1):
        stripped = line.strip()
        if at_top and stripped and not stripped.startswith("#"):
            at_top = False
        if not line.startswith(MARK):
            continue
        rest = line[len(MARK) : len(MARK) + 1]
        if rest and not rest.isspace():
            if rest == "-" and at_top:
                raise bad_input(
                    f"a space is missing between {MARK} and the option",
                    f"write {MARK} {line[len(MARK) :].split()[0]}",
                    place=f"{name} line {number}, column {len(MARK) + 1}",
                )
            continue
        if not at_top:
            warnings.append(f"{name} line {number}: {MARK} after the first command is not read; move it to the top")
            continue
        for option, value, column in _settings(line, name, number):
            settings[option.field] = Setting(value, f"{name} line {number}, column {column}")
    return ScriptOptions(settings, tuple(warnings))


def split_words(line: str, start: int, place: str) -> list[Word]:
    """Return the words of a line from offset `start` on, quotes and backslashes as in sbatch.

    Failure names the place of a quote that does not end.
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
        elif character == "#" and not column:
            break
        else:
            column = column or offset + 1
            if character in "\"'":
                quote = character
            elif character == "\\" and offset + 1 < len(line):
                offset += 1
                text += line[offset]
            else:
                text += character
        offset += 1
    if quote:
        raise bad_input(
            f"the quote {quote} is not closed", f"add {quote} where the value ends", place=f"{place}, column {column}"
        )
    if column:
        words.append(Word(text, column))
    return words


def _settings(line: str, name: str, number: int) -> Iterator[tuple[Option, str, int]]:
    place = f"{name} line {number}"
    words = iter(split_words(line, len(MARK), place))
    for word in words:
        if word.text.startswith("--") and len(word.text) > 2:
            yield _long(word, words, place)
        elif word.text.startswith("-") and len(word.text) > 1 and word.text != "--":
            yield from _short(word, words, place)
        else:
            raise bad_input(
                f"{_shown(word.text)} is not an option",
                "options begin with - or --; quote a value that has spaces",
                place=f"{place}, column {word.column}",
            )


def _long(word: Word, words: Iterator[Word], place: str) -> tuple[Option, str, int]:
    long, equals, value = word.text.partition("=")
    option = _LONG.get(long)
    if option is None:
        raise _unknown(long, place, word.column)
    if not option.takes_value:
        if equals:
            raise bad_input(
                f"{long} takes no value", f"write {long} alone", place=f"{place}, column {word.column + len(long)}"
            )
        return option, option.alone, word.column
    if not equals and option.alone:
        return option, option.alone, word.column
    if not equals:
        return _checked(option, long, _next_value(long, words, place, word.column), place)
    return _checked(option, long, Word(value, word.column + len(long) + 1), place)


def _short(word: Word, words: Iterator[Word], place: str) -> Iterator[tuple[Option, str, int]]:
    for offset in range(1, len(word.text)):
        short = "-" + word.text[offset]
        column = word.column if offset == 1 else word.column + offset
        option = _SHORT.get(short)
        if option is None:
            raise _unknown(short, place, column)
        if not option.takes_value:
            yield option, option.alone, column
            continue
        value = Word(word.text[offset + 1 :], word.column + offset + 1)
        if value.text.startswith("="):
            raise bad_input(
                f"{short} takes its value without an equals sign",
                f"write {short} {value.text[1:]} or {option.long}={value.text[1:]}",
                place=f"{place}, column {value.column}",
            )
        yield _checked(option, short, value if value.text else _next_value(short, words, place, column), place)
        return


def _next_value(option: str, words: Iterator[Word], place: str, column: int) -> Word:
    following = next(words, None)
    if following is None:
        raise bad_input(f"{option} needs a value", f"write {option} VALUE", place=f"{place}, column {column}")
    return following


def _checked(option: Option, written: str, value: Word, place: str) -> tuple[Option, str, int]:
    if not value.text:
        raise bad_input(
            f"the value of {written} is empty", f"write {option.long}=VALUE", place=f"{place}, column {value.column}"
        )
    if option.only and value.text != option.only:
        raise bad_input(
            f"{written} {_shown(value.text)} cannot be had: a job of Forebay is one task on one node",
            f"write {option.long}={option.only}, and ask for CPUs with --cpus-per-task",
            place=f"{place}, column {value.column}",
        )
    return option, value.text, value.column


def unsupported(written: str, place: str) -> Failure | None:
    """Return the failure for an option of sbatch that Forebay does not have; None for one that is none of those."""
    found = UNSUPPORTED.get(written)
    return None if found is None else bad_input(f"{written} cannot be had: {found[0]}", found[1], place=place)


def _unknown(written: str, place: str, column: int) -> Failure:
    known_option = unsupported(written, f"{place}, column {column}")
    if known_option is not None:
        return known_option
    near = difflib.get_close_matches(written, _LONG, n=1)
    known = ", ".join(f"{option.long}/{option.short}" if option.short else option.long for option in OPTIONS)
    remedy = f"did you mean {near[0]}? " if near else ""
    remedy += f"remove it, or write ##SBATCH to keep the line as a comment; Forebay knows {known}"
    return bad_input(f"Forebay does not know the option {_shown(written)}", remedy, place=f"{place}, column {column}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= CONTROL_WORDS_SHOWN else text[:CONTROL_WORDS_SHOWN] + "…")
