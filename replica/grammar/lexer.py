"""Lexer of directives: comment lines at the top of a text whose first word is a known kind.

The scan is Slurm's: it ends at the first line that does not begin with `#`, skips blank lines, and is case-sensitive.
The directive of a Lua script is a prefix, as in Slurm: with `Directive=CONDUIT`, `#CONDUIT_PRE cp` is a directive.
`#DW` and `#BB` must be whole words; similar words are comments, and the submitter is warned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import islice

import msgspec

from forebay.replica.values import (
    DIRECTIVE_TEXT_BYTES_MAX,
    DIRECTIVE_WORDS_MAX,
    DIRECTIVES_MAX,
    PACKED_HEAD_BYTES_MAX,
    PACKED_SCRIPT_BYTES_MAX,
    SCRIPT_BYTES_MAX,
    Rejection,
    RejectionCode,
)

SCRIPT = "script"
"""Source name of a batch script in places."""

WARNINGS_MAX = 16
"""Warnings about one request, count: the first ones suffice to correct it."""


class Directive(msgspec.Struct, frozen=True):
    """A directive with its continuation lines joined: the word of its kind, and the words after it."""

    at: DirectiveWord
    words: tuple[DirectiveWord, ...]
    text: str

    @property
    def kind(self) -> str:
        """Return the kind, for example `#DW`."""
        return self.at.text


class DirectiveKinds(msgspec.Struct, frozen=True):
    """The kinds of directives that a provider reads (`known`), and other kinds.

    Lines of a kind in `refused` are rejected. Lines of a kind in `foreign` are comments, and the submitter is warned.
    """

    known: tuple[str, ...]
    foreign: tuple[str, ...] = ()
    refused: Mapping[str, str] = {}
    """Kind -> remedy."""
    by_prefix: bool = False
    """True if every line that begins with a kind is a directive, as in Slurm's lua plugin."""
    by_beginning: bool = False
    """True if another program also reads the text and treats a kind as a prefix: words that begin with one are
    rejected.
    """

    def kind_of(self, line: str, head: str) -> str:
        """Return the kind of a directive line; `head`, its first word, for other lines."""
        if self.by_prefix:
            return next((kind for kind in self.known if line.startswith(kind)), head)
        return head


class RequestWarnings:
    """Warnings for the submitter, limited to WARNINGS_MAX."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, place: str, sentence: str) -> None:
        """Add a warning, up to the limit."""
        if len(self.lines) < WARNINGS_MAX:
            self.lines.append(f"{place}: {sentence}")


class _Open(msgspec.Struct):
    """A directive whose last line so far ended in a backslash."""

    at: DirectiveWord
    words: list[DirectiveWord]
    texts: list[str]
    """Text of each line."""
    backslash: DirectiveWord


def find_directives(text: str, source: str, kinds: DirectiveKinds, warnings: RequestWarnings) -> list[Directive]:
    """Return the directives at the top of a text.

    Raises:
        DirectiveRejected: a directive is malformed; with line and column.
    """
    if source != SCRIPT:
        check_length(text, source)
    found: list[Directive] = []
    pending: _Open | None = None
    words = 0
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        head = kinds.kind_of(line, line.split(maxsplit=1)[0]) if line[:1] == "#" else ""
        if pending is not None:
            if head != pending.at.text:
                raise pending.backslash.rejection(
                    f"the line after a continuation does not start with {pending.at.text}",
                    f"start line {number} with {pending.at.text}, or remove the backslash",
                )
        elif head not in kinds.known:
            if line.strip() and not head:
                _warn_of_late_directives(text, number, source, kinds, warnings)
                break
            _check_comment(DirectiveWord(head, source, number, 1), kinds, warnings)
            continue
        words += 1 + sum(1 for _ in islice(_WORD.finditer(line, len(head)), DIRECTIVE_WORDS_MAX))
        if words > DIRECTIVE_WORDS_MAX:
            raise DirectiveWord(head, source, number, 1).rejection(
                f"the directives have more than {DIRECTIVE_WORDS_MAX} words",
                "stage a directory instead of its files, and write comments into other lines",
                code=RejectionCode.LIMIT_EXCEEDED,
            )
        pending = _read_line(line, DirectiveWord(head, source, number, 1), pending, found)
        if len(found) > DIRECTIVES_MAX:
            raise found[-1].at.rejection(
                f"there are more than {DIRECTIVES_MAX} directives",
                "stage a directory instead of its files",
                code=RejectionCode.LIMIT_EXCEEDED,
            )
    if pending is not None:
        raise pending.backslash.rejection("the last directive ends in a continuation", "remove the backslash")
    return found


def _read_line(line: str, at: DirectiveWord, pending: _Open | None, found: list[Directive]) -> _Open | None:
    """Read one line of a directive; return the directive if it continues, else append it to `found`."""
    bad = control_offset(line)
    if bad is not None:
        raise DirectiveWord(line, at.source, at.line, 1).rejection(
            f"the directive contains the character U+{ord(line[bad]):04X}, which cannot be printed",
            "remove it, or retype the line",
            bad,
        )
    body, backslash = line.rstrip(" \t"), None
    if ends_in_backslash(body):
        backslash = DirectiveWord("\\", at.source, at.line, len(body))
        body = body[:-1].rstrip(" \t")
    words = split_words(body, at.source, at.line, len(at.text))
    each = pending
    if each is None:
        each = _Open(at, words, [body], at)
    else:
        each.words += words
        each.texts.append(body[len(at.text) :].strip(" \t"))
    if backslash is not None:
        each.backslash = backslash
        return each
    if each.words and ends_in_backslash(each.words[-1].text):
        raise each.words[-1].rejection("the directive ends in a backslash, but no line follows", "remove the backslash")
    found.append(Directive(each.at, tuple(each.words), " ".join(text for text in each.texts if text)))
    return None


def _check_comment(head: DirectiveWord, kinds: DirectiveKinds, warnings: RequestWarnings) -> None:
    if not head.text or head.text == "#" or head.text.startswith(("#!", "#SBATCH")):
        return
    if head.text in kinds.refused:
        raise head.rejection(f"{head.text} is not read on this cluster", kinds.refused[head.text])
    listed = " or ".join(kinds.known)
    if head.text in kinds.foreign:
        warnings.add(
            head.place(), f"{head.text} is not read by the provider of this cluster, which reads {listed}: a comment"
        )
        return
    for kind in (*kinds.known, *kinds.refused):
        if kinds.by_beginning and head.text.startswith(kind):
            raise head.rejection(
                f"Slurm reads {quoted_text(head.text)} as {kind}", f"write {kind} and a blank, or another word"
            )
        is_prefix = head.text.upper().startswith(kind.upper()) if kinds.by_prefix else head.text.startswith(kind)
        if is_prefix or head.text.upper() == kind.upper():
            warnings.add(
                head.place(), f"{quoted_text(head.text)} is a comment, not a directive; a directive starts with {kind}"
            )
            return


def _warn_of_late_directives(
    text: str, number: int, source: str, kinds: DirectiveKinds, warnings: RequestWarnings
) -> None:
    """Warn of the first directive that is not read: after the first command, or indented, as line `number` is.

    To Slurm, too, an indented line is a command and ends the directives.
    """
    if not any(kind in text for kind in kinds.known):
        return
    for late, line in enumerate(text.split("\n")[number - 1 :], start=number):
        if "#" not in line:
            continue
        head = line.split(maxsplit=1)[0]
        if kinds.kind_of(head, head) in kinds.known:
            is_indented = not line.startswith(head)
            why = "in an indented line is not read; remove the blanks before it" if is_indented else _LATE
            warnings.add(f"{source} line {late}, column {line.index(head) + 1}", f"{head} {why}")
            return


_LATE = "after the first command is not read; move it up"


def check_length(text: str, source: str) -> None:
    """Check the length of the text of `--bb` or of a file.

    Raises:
        DirectiveRejected: the text is too long.
    """
    if len(text.encode("utf-8", "surrogatepass")) > DIRECTIVE_TEXT_BYTES_MAX:
        raise DirectiveRejected(
            Rejection(
                RejectionCode.LIMIT_EXCEEDED,
                f"the text of {source} is longer than {DIRECTIVE_TEXT_BYTES_MAX} bytes",
                "stage a directory instead of its files",
                source,
            )
        )


# ---- words with their places, and rejections


SHOWN_CHARACTERS = 48
"""Characters of user input that a message repeats: enough to find it, short enough for one line."""


_CONTROL = re.compile(
    "[\\x00-\\x08\\x0a-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)
_WORD = re.compile(r"[^ \t]+")


class DirectiveRejected(Exception):
    """A rejected request; `rejection.place` is the line and column."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(f"{rejection.place}: {rejection.sentence}; {rejection.remedy}")
        self.rejection = rejection
        self.others: tuple[Rejection, ...] = ()
        """Further mistakes in the request, in reading order."""


REJECTIONS_MAX = 64
"""Mistakes reported for one request, count: a screen or two."""


def collect_rejections(read: Callable[[], None], rejections: list[Rejection]) -> None:
    """Run `read`, and append its rejections to a list instead of raising them."""
    try:
        read()
    except DirectiveRejected as error:
        rejections += (error.rejection, *error.others)


def raise_collected(rejections: list[Rejection]) -> None:
    """Raise all collected rejections together, if any.

    Raises:
        DirectiveRejected: the list is not empty.
    """
    if rejections:
        error = DirectiveRejected(rejections[0])
        error.others = tuple(rejections[1:REJECTIONS_MAX])
        raise error


class DirectiveWord(msgspec.Struct, frozen=True):
    """A word of a request and its position; line and column count from 1, columns in characters."""

    text: str
    source: str
    line: int
    column: int

    def place(self, offset: int = 0) -> str:
        """Return the place for a message, for example `script line 3, column 12`."""
        return f"{self.source} line {self.line}, column {self.column + offset}"

    def rejection(
        self, sentence: str, remedy: str, offset: int = 0, code: RejectionCode = RejectionCode.INVALID_DIRECTIVE
    ) -> DirectiveRejected:
        """Return the exception that names this word's place."""
        return DirectiveRejected(Rejection(code, sentence, remedy, self.place(offset)))


def quoted_text(text: str) -> str:
    """Return user input for a message: quoted, with escaped control characters, and cut to length."""
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…")


def ends_in_backslash(text: str) -> bool:
    """Return whether a text ends in an odd number of backslashes.

    An even number is the symbol that disables symbols.
    """
    return text.endswith("\\") and (len(text) - len(text.rstrip("\\"))) % 2 == 1


def split_words(line: str, source: str, number: int, start: int = 0) -> list[DirectiveWord]:
    """Return the words of a line from the offset `start` on, separated by blanks and tabs."""
    return [DirectiveWord(found[0], source, number, found.start() + 1) for found in _WORD.finditer(line, start)]


def control_offset(line: str) -> int | None:
    """Return the offset of the first forbidden character, or None.

    Forbidden are characters that control a terminal, end a line for some reader, or have no UTF-8 form.
    """
    if line.isprintable():
        return None  # most lines: this check is much faster than the search
    found = _CONTROL.search(line)
    return None if found is None else found.start()


# ---- packed scripts, which are too long for the ledger as they are
#
# The comment lines at the top stay unchanged, with every directive at its line and column. A line with PACKED_MARK
# follows, and the rest in one line of base85. The client packs a script, and the agent that runs it unpacks it.
# All programs between them see text.


PACKED_MARK = "\n: This script is packed. Run it with an agent of Forebay that unpacks it.\n"
"""Separator between the head of a packed script and its rest: a no-op command to a shell."""

_BASE85 = re.compile(r"[0-9A-Za-z!#$%&()*+;<=>?@^_`{|}~-]*\n?")


def split_packed(script: str) -> tuple[str, str] | None:
    """Return the head of a packed script, ending in a newline, and its rest in base85; None if it is not packed.

    Base85 has no character that JSON escapes, so a packed script does not grow on the wire.
    """
    at = script.find(PACKED_MARK, 0, PACKED_HEAD_BYTES_MAX + len(PACKED_MARK))
    if at < 0:
        return None
    rest = script[at + len(PACKED_MARK) :]
    return (script[: at + 1], rest) if _BASE85.fullmatch(rest) else None


def script_bytes_max(script: str) -> int:
    """Return the maximum size of a script in its present form, bytes."""
    return PACKED_SCRIPT_BYTES_MAX if PACKED_MARK in script and split_packed(script) is not None else SCRIPT_BYTES_MAX
