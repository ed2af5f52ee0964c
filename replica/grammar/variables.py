"""Paths of transfers as directives write them: variables, patterns, and paths in the job's working directory.

`$USER` is the job's user, like the symbol `%u`. The site lists all other variables (`PathVariables`). An entry `NAME`
is taken from the environment of the submit, whose client sends the value; an entry `NAME=/TEXT` is that text, with `%u`
for the user. No value comes from a server's environment, and the request records the values that the client sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from forebay.replica.grammar.lexer import DirectiveRejected
from forebay.replica.grammar.paths import INSIDE_VARIABLES, check_inside, check_outside, path_fault
from forebay.replica.grammar.values import STOP, OptionValue
from forebay.replica.model import DEFAULT_SITE, JOB_PREFIX, PERSISTENT_PREFIX, WHOLE_BUFFER
from forebay.replica.values import PATH_BYTES_MAX, has_control_character

USER_VARIABLE = "USER"
"""The variable that is always permitted."""

USER_SYMBOL = "%u"

WORKDIR = "%d"
"""Symbol of the working directory, which relative paths begin with."""

_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*)|(\{))", re.ASCII)
_BUFFER_PREFIXES = ("DW_", WHOLE_BUFFER, PERSISTENT_PREFIX)


class PathVariables(msgspec.Struct, frozen=True):
    """Variables of one request: the site's entries, and the values that the client sent."""

    allowed: tuple[str, ...] = DEFAULT_SITE.path_variables
    given: tuple[tuple[str, str], ...] = ()
    known: bool = True
    """False if the site is unknown: any variable is accepted, and its value is `/`."""
    by_scheduler: bool = False
    """True if another scheduler submitted the job: it does not send an environment."""

    @property
    def names(self) -> list[str]:
        """Return the permitted names."""
        return sorted({USER_VARIABLE, *(entry.partition("=")[0] for entry in self.allowed)})


NO_VARIABLES = PathVariables()
UNKNOWN_VARIABLES = PathVariables(known=False)
"""For a reader that does not know the site, and does not use the paths."""


def variable_names(text: str) -> list[str]:
    """Return the names of the variables in a text, except those of buffers, in order and without duplicates."""
    found = dict.fromkeys(match[1] or match[2] for match in _VARIABLE.finditer(text) if not match[3])
    return [name for name in found if not name.startswith(_BUFFER_PREFIXES)]


def path_variable_table(allowed: tuple[str, ...]) -> dict[str, str | bool]:
    """Return the permitted variables, each with its text, in which symbols are replaced later.

    The text is False if it is in the environment of a submit.
    """
    entries = (entry.partition("=") for entry in allowed)
    return {**{name: _with_user(text) if sign else False for name, sign, text in entries}, USER_VARIABLE: USER_SYMBOL}


def _with_user(template: str) -> str:
    """Return the text of a site's variable, in which only the symbol of the user is replaced."""
    return USER_SYMBOL.join(_plain(part) for part in template.split(USER_SYMBOL))


def split_pattern(value: OptionValue) -> int | None:
    """Return the offset of the first part of a path with a pattern; None if it has none.

    After two backslashes every character is itself.
    """
    if value.literal:
        return None
    at = 0
    for part in value.text.partition(STOP)[0].split("/"):
        if is_pattern(part):
            return at
        at += len(part) + 1
    return None


def is_pattern(part: str) -> bool:
    """Return whether a part of a path may match other names: it has `*`, `?`, or a choice such as `[a-z]`."""
    return "*" in part or "?" in part or 0 <= part.find("[") < part.rfind("]") - 1


def is_named(path: str) -> bool:
    """Return whether a path begins with the variable of a named buffer, such as `$DW_JOB_STRIPED_a`."""
    head = path.removeprefix(STOP).partition("/")[0]
    variable = head[2:-1] if head.startswith("${") and head.endswith("}") else head[1:]
    return head.startswith("$") and variable.startswith(JOB_PREFIX) and variable not in INSIDE_VARIABLES


def match_literally(text: str) -> str:
    """Return the pattern that matches a text only."""
    return _SPECIAL.sub(r"[\g<0>]", text)


_SPECIAL = re.compile(r"[*?\[]")


class PathReader:
    """Reads the paths of one request; `used` has the values of the client that they contain."""

    def __init__(self, variables: PathVariables) -> None:
        self._variables = variables
        self._templates = {
            name: text for name, equals, text in (entry.partition("=") for entry in variables.allowed) if equals
        }
        self._given = dict(variables.given)
        self.used: dict[str, str] = {}
        self.allows_names = not variables.by_scheduler
        """True if the job may name its buffers: another scheduler does not pass on their variables."""

    def outside(self, value: OptionValue, end: int | None = None) -> str:
        """Return a path outside the buffers: absolute, or beginning with WORKDIR.

        With `end`, the offset of a pattern, it is the directory before the pattern.

        Raises:
            DirectiveRejected: the path is invalid; with line and column.
        """
        path = self._expand(value, 0, end)
        if not _is_absolute(path):
            if (path if end is None else value.text).startswith(WORKDIR):
                raise value.rejection(
                    f"the path {value.text[:48]!r} continues {WORKDIR} without a slash",
                    f"write {WORKDIR}/ before the rest",
                )
            if (path if end is None else value.text).startswith("~"):
                raise value.rejection("the path starts with ~, which is not replaced", "write $HOME instead")
            path = f"{WORKDIR}/{_without_dots(path)}"
        check_outside(value.word, path, value.offset)
        return path

    def inside(self, value: OptionValue, end: int | None = None, *, is_file: bool = False) -> str:
        """Return a path in a buffer. `is_file`: the source of a transfer of one file. `end` is as in `outside`.

        Raises:
            DirectiveRejected: the path is invalid; with line and column.
        """
        head = value.as_path.partition("/")[0]
        path = self._expand(value, len(head) - len(value.as_path) + len(value.text), end)
        checked = path
        if self.allows_names and is_named(path):
            # Its name is checked when all directives have been read: the root of a named buffer is a root, too.
            checked = f"$DW_JOB_STRIPED/{path.partition('/')[2]}"
        check_inside(value.word, checked, value.offset, is_file=is_file and end is None)
        return path

    def pattern(self, value: OptionValue, start: int) -> str:
        """Return the pattern in a path, which begins at the offset `start`; the values of variables match themselves.

        Raises:
            DirectiveRejected: the pattern is invalid; with line and column.
        """
        head, _, tail = value.text.partition(STOP)
        text = self._replace(value, head, start, match_literally) + _plain(match_literally(tail))
        if start == 0 and text.startswith("/"):
            raise value.rejection("the pattern begins in the value of a variable", "write a slash before it", start)
        if "**" in text:
            raise value.rejection(
                "** is not supported: a pattern does not descend", "write * for each level, or type=directory", start
            )
        fault = path_fault("/" + text)
        if fault is not None:
            raise value.rejection(f"the pattern {fault}", "write a path below the directory, without ..")
        return text

    def _expand(self, value: OptionValue, start: int, end: int | None) -> str:
        """Return the path of an option up to `end`, with its variables replaced from the offset `start` on."""
        if value.literal or "$" not in value.text[start:end]:
            return value.as_path[:end]
        head, stop, tail = value.text[:end].partition(STOP)
        return head[:start] + self._replace(value, head, start, str) + stop + tail

    def _replace(self, value: OptionValue, text: str, start: int, quote: Callable[[str], str]) -> str:
        """Return `text` from the offset `start` on, with its variables replaced by their quoted values."""
        pieces, at = list[str](), start
        for found in _VARIABLE.finditer(text, start):
            pieces += (text[at : found.start()], quote(self._value(value, found)))
            at = found.end()
        return "".join((*pieces, text[at:]))

    def _value(self, option: OptionValue, found: re.Match[str]) -> str:
        """Return the value of a variable, in which symbols are replaced later."""
        name = found[1] or found[2]
        if found[3]:
            raise option.rejection(
                f"{option.text[found.start() :][:48]!r} is not a variable", "write for example ${HOME}", found.start()
            )
        if name.startswith(_BUFFER_PREFIXES):
            raise option.rejection(
                f"${name[:48]} is a path in a buffer, and cannot be used here",
                "write a path outside the buffers: the source of a stage-in, or the destination of a stage-out",
                found.start(),
            )
        if not self._variables.known:
            return "/"
        text = self._lookup(option, name, found.start())
        if found.start() == 0 and not text.startswith("/"):
            raise option.rejection(
                f"${name} is {text[:48]!r}, which is not an absolute path",
                f"write the path itself, or ./${name} for a path in the working directory",
                found.start(),
            )
        if not text or STOP in text or has_control_character(text) or len(text.encode()) > PATH_BYTES_MAX:
            raise option.rejection(
                f"the value of ${name} is empty, or cannot be a part of a path", "write the path itself", found.start()
            )
        return text

    def _lookup(self, option: OptionValue, name: str, offset: int) -> str:
        variables = self._variables
        if name == USER_VARIABLE:
            return USER_SYMBOL
        if name in self._templates:
            return _with_user(self._templates[name])
        if name not in variables.allowed:
            raise _unknown(option, name, offset, variables)
        if name not in self._given:
            raise _not_given(option, name, offset, by_scheduler=variables.by_scheduler)
        self.used[name] = self._given[name]
        return _plain(self._given[name])


def _plain(text: str) -> str:
    """Return a text in which no symbol is replaced."""
    return text.replace("%", "%%")


def _unknown(option: OptionValue, name: str, offset: int, variables: PathVariables) -> DirectiveRejected:
    listed = ", ".join(f"${known}" for known in variables.names)
    return option.rejection(
        f"the variable ${name[:48]} is not permitted in paths on this cluster",
        f"use one of {listed}; \\\\ before a path makes $ an ordinary character",
        offset,
    )


def _not_given(option: OptionValue, name: str, offset: int, *, by_scheduler: bool) -> DirectiveRejected:
    if by_scheduler:
        return option.rejection(
            f"${name} is taken from the environment of a submit, which Slurm does not pass on",
            f"write the path itself, or ask an operator to set PathVariables={name}=/DIRECTORY/%u",
            offset,
        )
    return option.rejection(f"${name} is not set where the job was submitted", f"set {name}, or write the path", offset)


def _is_absolute(path: str) -> bool:
    rest = path.removeprefix(STOP)
    return rest.startswith("/") or (rest is path and (path == WORKDIR or path.startswith(WORKDIR + "/")))


def _without_dots(path: str) -> str:
    """Return a relative path without `./` at its beginning."""
    while path.startswith("./"):
        path = path[2:].lstrip("/")
    return "" if path == "." else path
