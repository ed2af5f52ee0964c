"""Where each word of a request stands, and what is said of one that cannot be accepted."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from replica.values.errors import Refusal, RefusalCode

SHOWN_CHARACTERS = 48
"""Characters of what the user wrote that a message repeats: enough to find it, short enough for one line."""


_CONTROL = re.compile("[\\x00-\\x08\\x0a-\\x1f\\x7f-\\x9f\\u2028\\u2029\\ud800-\\udfff]")


class DirectiveRefused(Exception):
    """A request that cannot be accepted; `refusal.place` is the line and column."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.place}: {refusal.sentence}; {refusal.remedy}")
        self.refusal = refusal


class Word(msgspec.Struct, frozen=True):
    """One word of a request and where it starts; line and column count from 1, columns in characters."""

    text: str
    source: str
    line: int
    column: int

    def place(self, offset: int = 0) -> str:
        """Return the place for a message, for example `script line 3, column 12`."""
        return f"{self.source} line {self.line}, column {self.column + offset}"

    def refuse(
        self, sentence: str, remedy: str, offset: int = 0, code: RefusalCode = RefusalCode.INVALID_DIRECTIVE
    ) -> DirectiveRefused:
        """Return the exception that names this word's place."""
        return DirectiveRefused(Refusal(code, sentence, remedy, self.place(offset)))


def shown(text: str) -> str:
    """Return what the user wrote as a message repeats it: quoted, control characters visible, cut where it is long."""
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…")


def ends_in_backslash(text: str) -> bool:
    """Whether a text ends in an odd number of backslashes: an even number is the symbol that stops symbols."""
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def split_words(line: str, source: str, number: int, start: int = 0) -> Iterator[Word]:
    """Yield the words of a line from the offset `start` on: what lies between blanks and tabs."""
    column = start
    while column < len(line):
        if line[column] in " \t":
            column += 1
            continue
        end = column
        while end < len(line) and line[end] not in " \t":
            end += 1
        yield Word(line[column:end], source, number, column + 1)
        column = end


def control_offset(line: str) -> int | None:
    """Return the offset of the first character that a directive may not hold, or None: those that move a terminal's
    cursor, end a line for some reader, or cannot be written as UTF-8.
    """
    found = _CONTROL.search(line)
    return None if found is None else found.start()
