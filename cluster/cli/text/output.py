"""Terminal output: escaped text, tables, and JSON.

Names, messages and scripts come from other users, so they are never interpreted as markup, and control characters are
escaped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click
import msgspec

from forebay.replica.values import format_size, plain

if TYPE_CHECKING:
    # The import of rich takes a third of a command's time, so only functions that need rich import it.
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

WIDTH_WITHOUT_TERMINAL: Final = 1_000
"""Line width of a pipe or file, characters: wider than any table, so that programs read whole lines."""

NOTHING: Final = "-"
"""Text of an empty cell, so that columns can be counted."""

GAP: Final = 2
"""Blanks between two columns."""

INDENT: Final = 4
"""Blanks before the continuation of a row on another line."""

SHORTENED_MIN: Final = 20
"""Minimum width of a shortened text, characters; with less space, the text gets its own line."""

MARK: Final = "…"
"""Mark at the end of a shortened text; the `show` commands print the whole text."""

ROWS_STYLED_MAX: Final = 1_000
"""Largest table with colours and folding, rows: they take about half a second."""

_SGR: Final = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "magenta": 35, "cyan": 36}
"""Words of a style -> parameter of the terminal's SGR sequence (ECMA-48, 8.3.117); colours begin at 30."""

_FIRST_COLOUR: Final = 30

_ASKING: Final = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""Environment variables by which users force terminal output; rich obeys them as well."""

_PLAIN_TERMINALS: Final = ("dumb", "unknown")


class StyledText(msgspec.Struct, frozen=True):
    """Cell with a style, words of `_SGR`; `text` has no control characters."""

    text: str
    style: str


Cell: TypeAlias = "str | int | None | StyledText | Text"


def stdout_console() -> Console:
    """Return the console for results, as wide as the terminal, COLUMNS, or WIDTH_WITHOUT_TERMINAL."""
    return _console(sys.stdout)


def stderr_console() -> Console:
    """Return the console for progress, warnings and errors."""
    return _console(sys.stderr)


def _console(file: Any) -> Console:
    from rich.console import Console

    width = None if file.isatty() else _columns() or WIDTH_WITHOUT_TERMINAL
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


def _columns() -> int | None:
    columns = os.environ.get("COLUMNS", "")
    return (
        int(columns) if columns.isascii() and columns.isdigit() and 0 < int(columns) <= WIDTH_WITHOUT_TERMINAL else None
    )


def is_terminal() -> bool:
    """Return whether to format results for a terminal."""
    if any(name in os.environ for name in _ASKING):
        return bool(stdout_console().is_terminal)
    return sys.stdout.isatty()


def show(*renderables: RenderableType | Listing) -> None:
    """Print to stdout, without trailing blanks if the output is not a terminal."""
    if len(renderables) == 1 and isinstance(renderables[0], Listing) and renderables[0].print_as_it_is():
        return
    import io

    from rich.console import Console

    console = stdout_console()
    if console.is_terminal:
        for renderable in renderables:
            console.print(renderable)
        return
    buffer = io.StringIO()
    plain_console = Console(file=buffer, width=console.width, highlight=False, markup=False, emoji=False, no_color=True)
    for renderable in renderables:
        plain_console.print(renderable)
    click.echo("\n".join(line.rstrip() for line in buffer.getvalue().split("\n")), nl=False)


def show_json(value: Any) -> None:
    """Print one JSON value to stdout."""
    click.echo(json_text(value))


def json_text(value: Any) -> str:
    """Return a value as indented JSON, the fields in the order of its view."""
    import msgspec

    return printable_json(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def json_line(value: Any) -> str:
    """Return a value as JSON on one line, the fields in the order of its view."""
    import msgspec

    return printable_json(msgspec.json.encode(value).decode())


def printable_json(text: str) -> str:
    """Return an equivalent JSON text in which control characters such as `\\u202e` are escaped.

    Outside of strings, JSON has no such characters except line breaks.
    """
    if text.isascii() and "\x7f" not in text:
        return text  # msgspec has escaped other control characters
    return "".join(
        character if character.isprintable() or character == "\n" else _escape(character) for character in text
    )


def _escape(character: str) -> str:
    """Return the JSON escape of a character: its UTF-16 code units."""
    units = character.encode("utf-16-be").hex()
    return "".join(f"\\u{units[first : first + 4]}" for first in range(0, len(units), 4))


def present(answer: Any, as_json: bool, text: Callable[[], RenderableType | Listing]) -> None:
    """Print an answer as JSON, or the result of `text`."""
    if as_json:
        show_json(answer)
    elif isinstance(made := text(), str):
        click.echo(made)
    else:
        show(made)


def note(sentence: str) -> None:
    """Print a note to stderr, because a program may read stdout."""
    click.echo(plain(sentence), err=True)


class Listing:
    """Table in the style of squeue, one line for each row if it fits.

    If it does not fit, long texts are shortened, and further columns continue on a line below; figures are never cut.
    Only tables without a header and cells with several styles are left to rich, which takes 0.5 ms a row.
    """

    def __init__(
        self,
        columns: tuple[str, ...],
        rows: list[tuple[str | StyledText | Text, ...]],
        right: frozenset[str],
        flexible: frozenset[str],
        header: bool,
    ) -> None:
        self.columns = columns
        self.rows = rows
        self._right = right
        self._flexible = flexible
        self._header = header
        self._cells = [tuple(map(_text_in, row)) for row in rows]
        heads = columns if header else ("",) * len(columns)
        self._widths = [max(map(_width, cells)) for cells in zip(heads, *self._cells, strict=True)]

    @property
    def width(self) -> int:
        """Width of the longest line, terminal columns."""
        return sum(self._widths) + GAP * (len(self._widths) - 1)

    def print_as_it_is(self) -> bool:
        """Print the table if it needs no folding; return whether it was printed."""
        long = len(self.rows) > ROWS_STYLED_MAX
        on_terminal = is_terminal()
        room = _terminal() if sys.stdout.isatty() else _columns() or WIDTH_WITHOUT_TERMINAL
        narrow = not long and self.width > room > 0
        if narrow and not (self._header and self._is_simple()):
            return False
        if not long and not narrow and on_terminal and not (sys.stdout.isatty() and self._is_simple()):
            return False
        styled = on_terminal and not long and os.environ.get("TERM", "").lower() not in _PLAIN_TERMINALS
        click.echo(self.text(styled=styled, room=room if narrow else 0), nl=False, color=True if styled else None)
        return True

    def _is_simple(self) -> bool:
        return all(isinstance(cell, str | StyledText) for row in self.rows for cell in row)

    def text(self, *, styled: bool = False, room: int = 0) -> str:
        """Return all lines, with escape sequences for styles if `styled`.

        With `room`, lines are limited to that many characters, as far as shortening long texts allows.
        """
        if room and (used := self._without_empty_columns()) is not self:
            return used.text(styled=styled, room=room if used.width > room else 0)
        lines: list[tuple[Any, ...]] = [*self.rows]
        if self._header:
            lines.insert(0, tuple(StyledText(column, "bold") for column in self.columns))
        groups, widths = self._lay_out(room) if room else ([range(len(self.columns))], self._widths)
        made = []
        for row in lines:
            for group in groups:
                padded = []
                for number in group:
                    cell, width = row[number], widths[number]
                    text = _shorten(_text_in(cell), width)
                    blanks = " " * (width - _width(text))
                    shown = _apply_style(text, cell.style) if styled and isinstance(cell, StyledText) else text
                    padded.append(blanks + shown if self.columns[number] in self._right else shown + blanks)
                indent = " " * (INDENT if group[0] else 0)
                made.append(indent + (" " * GAP).join(padded).rstrip() + "\n")
        return "".join(made)

    def _without_empty_columns(self) -> Listing:
        """Return the listing without empty columns, or itself if it has none."""
        used = [at for at, cells in enumerate(zip(*self._cells, strict=True)) if any(cell != NOTHING for cell in cells)]
        if not self.rows or len(used) == len(self.columns):
            return self
        rows = [tuple(row[at] for at in used) for row in self.rows]
        return Listing(tuple(self.columns[at] for at in used), rows, self._right, self._flexible, self._header)

    def _lay_out(self, room: int) -> tuple[list[range], list[int]]:
        """Return the columns of each line of a row, and the width of each column."""
        widths = list(self._widths)
        flexible = [number for number, column in enumerate(self.columns) if column in self._flexible]
        over = self.width - room
        for number in sorted(flexible, key=lambda number: -widths[number]):
            least = max(SHORTENED_MIN, _width(self.columns[number]))
            cut = min(over, widths[number] - least)
            if cut > 0:
                widths[number], over = widths[number] - cut, over - cut
        if over > 0:
            # With several lines for each row, a long text may take a whole line.
            widths = [
                min(width, room - INDENT) if number in flexible else width for number, width in enumerate(self._widths)
            ]
        groups: list[range] = []
        first, used = 0, 0
        for number, width in enumerate(widths):
            if number > first and used + GAP + width > room:
                groups.append(range(first, number))
                first, used = number, INDENT + width
            else:
                used += width + (GAP if number > first else 0)
        groups.append(range(first, len(widths)))
        return groups, widths

    def __rich__(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        made = Table(
            box=None, pad_edge=False, show_edge=False, padding=(0, GAP, 0, 0), header_style="bold",
            show_header=self._header,
        )  # fmt: skip
        for column in self.columns:
            made.add_column(
                Text(column),
                justify="right" if column in self._right else "left",
                no_wrap=column not in self._flexible,
                overflow="fold",
            )
        for row in self.rows:
            made.add_row(
                *(
                    Text(cell)
                    if isinstance(cell, str)
                    else Text(cell.text, cell.style)
                    if isinstance(cell, StyledText)
                    else cell
                    for cell in row
                )
            )
        return made


def _text_in(cell: str | StyledText | Text) -> str:
    return cell if isinstance(cell, str) else cell.text if isinstance(cell, StyledText) else cell.plain


def _width(text: str) -> int:
    """Return the width of a text, terminal columns."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _shorten(text: str, width: int) -> str:
    """Return the text shortened to `width` terminal columns, with a mark at the end if it was longer."""
    if _width(text) <= width:
        return text
    from rich.cells import set_cell_size

    return set_cell_size(text, max(0, width - len(MARK))).rstrip() + MARK


def _apply_style(text: str, style: str) -> str:
    codes = [_SGR[word] for word in style.split()]
    if os.environ.get("NO_COLOR"):
        codes = [code for code in codes if code < _FIRST_COLOUR]
    return f"\x1b[{';'.join(map(str, codes))}m{text}\x1b[0m" if codes else text


def _terminal() -> int:
    """Return the width of the terminal, or COLUMNS if it is set; 0 if unknown."""
    try:
        return _columns() or os.get_terminal_size(sys.stdout.fileno()).columns
    except OSError:
        return 0


def table(
    columns: Iterable[str],
    rows: Iterable[Iterable[Cell]],
    *,
    right: frozenset[str] = frozenset(),
    flexible: frozenset[str] = frozenset(),
    header: bool = True,
) -> Listing:
    """Return a table in the style of squeue; `right` columns are right-aligned, `flexible` ones may be shortened."""
    named = tuple(columns)
    made = [
        tuple(text_of(cell) if cell is None or isinstance(cell, str | int) else cell for cell in row) for row in rows
    ]
    return Listing(named, made, right, flexible, header)


def fields_table(fields: Iterable[tuple[str, str | int | None]]) -> Listing:
    """Return a table of names and values, one line for each field."""
    return table(("FIELD", "VALUE"), fields, flexible=frozenset({"VALUE"}), header=False)


def list_fields(one: Listing | str) -> Listing | str:
    """Return a listing of one row with each column on its own line, where no text is shortened."""
    if isinstance(one, str):
        return one
    (row,) = one.rows
    return Listing(("FIELD", "VALUE"), [*zip(one.columns, row, strict=True)], frozenset(), frozenset({"VALUE"}), False)


def text_of(cell: str | int | None) -> str:
    """Return the text of a cell: `-` if it is empty, otherwise without control characters."""
    if cell is None or cell == "":
        return NOTHING
    return plain(str(cell))


def size(size_bytes: int | None) -> str:
    """Format a size exactly, with the largest possible suffix; `-` for None."""
    return NOTHING if size_bytes is None else format_size(size_bytes)
