"""What goes to the terminal: text that cannot take it over, tables of one look, and JSON that is nothing but JSON.

Names, messages and scripts come from other users: they are shown as text, never as markup, and characters that a
terminal would obey are shown as escapes.
"""

import io
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

import click
import msgspec
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from replica.values import format_size, plain

WIDTH_WITHOUT_TERMINAL: Final = 1_000
"""Characters in a line of a pipe or file: more than any table here, so that nothing is wrapped for a program."""

NOTHING: Final = "-"
"""What a table shows where there is nothing to show, so that columns can be counted."""

GAP: Final = 2
"""Blanks between two columns."""

ROWS_STYLED_MAX: Final = 1_000
"""Rows of a table for which colours and folding are worth waiting, count: about half a second."""

Cell = str | int | None | Text


def stdout_console() -> Console:
    """Return the console for results; its width is the terminal's, or COLUMNS, or enough for everything."""
    return _console(sys.stdout)


def stderr_console() -> Console:
    """Return the console for progress, warnings and errors."""
    return _console(sys.stderr)


def _console(file: Any) -> Console:
    width = None if file.isatty() else _columns() or WIDTH_WITHOUT_TERMINAL
    return Console(file=file, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)


def _columns() -> int | None:
    columns = os.environ.get("COLUMNS", "")
    return (
        int(columns) if columns.isascii() and columns.isdigit() and 0 < int(columns) <= WIDTH_WITHOUT_TERMINAL else None
    )


def show(*renderables: RenderableType) -> None:
    """Print to stdout, without blanks at the ends of lines where the output is not a terminal."""
    console = stdout_console()
    if len(renderables) == 1 and isinstance(renderables[0], Listing):
        listing = renderables[0]
        long = len(listing.rows) > ROWS_STYLED_MAX
        if long or (not console.is_terminal and listing.width <= console.width):
            click.echo(listing.text(), nl=False)
            return
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
    """Print one JSON value to stdout, indented, the fields in the order of its view."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def present(answer: Any, as_json: bool, text: Callable[[], RenderableType]) -> None:
    """Print an answer: as JSON, or what `text` makes of it for people, a string as it is."""
    if as_json:
        show_json(answer)
    elif isinstance(made := text(), str):
        click.echo(made)
    else:
        show(made)


def note(sentence: str) -> None:
    """Print a remark to stderr: never to stdout, which may be read by a program."""
    click.echo(plain(sentence), err=True)


class Listing:
    """A table that looks like squeue's. Rich draws it, folding and colours included, but takes 0.5 ms a row.

    So what fits as it is, or has very many rows, is written here: the same characters, a hundred times faster.
    """

    def __init__(
        self,
        columns: tuple[str, ...],
        rows: list[tuple[str | Text, ...]],
        right: frozenset[str],
        flexible: frozenset[str],
        header: bool,
    ) -> None:
        self.columns = columns
        self.rows = rows
        self._right = right
        self._flexible = flexible
        self._header = header
        self._cells = [tuple(cell.plain if isinstance(cell, Text) else cell for cell in row) for row in rows]
        heads = columns if header else ("",) * len(columns)
        self._widths = [max(map(cell_len, cells)) for cells in zip(heads, *self._cells, strict=True)]

    @property
    def width(self) -> int:
        """Columns of a terminal that its longest line takes."""
        return sum(self._widths) + GAP * (len(self._widths) - 1)

    def text(self) -> str:
        """Return all lines, each as long as its text."""
        lines = [self.columns, *self._cells] if self._header else self._cells
        right = [column in self._right for column in self.columns]
        made = []
        for cells in lines:
            padded = [
                " " * (width - cell_len(cell)) + cell if on_the_right else cell + " " * (width - cell_len(cell))
                for cell, width, on_the_right in zip(cells, self._widths, right, strict=True)
            ]
            made.append((" " * GAP).join(padded).rstrip() + "\n")
        return "".join(made)

    def __rich__(self) -> Table:
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
            made.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
        return made


def table(
    columns: Iterable[str],
    rows: Iterable[Iterable[Cell]],
    *,
    right: frozenset[str] = frozenset(),
    flexible: frozenset[str] = frozenset(),
    header: bool = True,
) -> Listing:
    """Return a table that looks like squeue's: `right` columns hold numbers; `flexible` ones are folded if need be."""
    named = tuple(columns)
    made = [tuple(cell if isinstance(cell, Text) else text_of(cell) for cell in row) for row in rows]
    return Listing(named, made, right, flexible, header)


def fields_table(fields: Iterable[tuple[str, str | int | None]]) -> Listing:
    """Return names and values below each other, for one thing with many properties."""
    return table(("FIELD", "VALUE"), fields, flexible=frozenset({"VALUE"}), header=False)


def text_of(cell: str | int | None) -> str:
    """Return what a cell shows: `-` for nothing, everything else without characters that a terminal obeys."""
    if cell is None or cell == "":
        return NOTHING
    return plain(str(cell))


def size(size_bytes: int | None) -> str:
    """Return a size in bytes with the largest suffix that loses nothing; `-` where there is none."""
    return NOTHING if size_bytes is None else format_size(size_bytes)


def readable_size(size_bytes: float) -> str:
    """Return a measured size rounded for reading, `12.3 MiB`: for amounts whose last byte does not matter."""
    value = float(size_bytes)
    for suffix in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or suffix == "TiB":
            return f"{int(value)} B" if suffix == "B" else f"{value:.1f} {suffix}"
        value /= 1024
    raise AssertionError("unreachable")
