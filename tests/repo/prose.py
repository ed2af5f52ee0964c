"""Measures of Markdown text: lines, sentences, paragraphs and table cells outside of code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

LINE_MAX: Final = 100
"""Characters of a line, outside of code and tables."""

SENTENCE_MAX: Final = 35
"""Words of a sentence; code in backticks counts as one word."""

PARAGRAPH_MAX: Final = 5
"""Lines of a paragraph."""

CELL_MAX: Final = 15
"""Words of a table cell."""

WORD: Final = re.compile(r"[\w`][^\s]*")
SENTENCE_END: Final = re.compile(r"(?<=[.!?])[)\"”]?\s+(?=[(\"`“]?[A-Z0-9`])")
LONG_WORD: Final = re.compile(r"\S{60,}")
"""A link or path that no line break can shorten."""


class Measures(NamedTuple):
    """Everything in a page that exceeds a limit, each with its line."""

    lines: list[str]
    sentences: list[str]
    paragraphs: list[str]
    cells: list[str]


def measure(path: Path) -> Measures:
    """Return what exceeds the limits in a page."""
    text = path.read_text(encoding="utf-8")
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    code = _lines_of(tokens, {"fence", "code_block", "table_open", "html_block"})
    found = Measures([], [], [], [])
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > LINE_MAX and number not in code and not LONG_WORD.search(line):
            found.lines.append(f"{number}: {len(line)} characters")
    generated = _generated(text)
    in_cell = False
    opening = tokens[0] if tokens else None
    for token in tokens:
        if token.type in ("td_open", "th_open"):
            in_cell = True
        elif token.type in ("td_close", "th_close"):
            in_cell = False
        elif token.type == "paragraph_open" and token.map:
            opening = token
            start, end = token.map
            if end - start > PARAGRAPH_MAX and start + 1 not in generated:
                found.paragraphs.append(f"{start + 1}: {end - start} lines")
        elif token.type == "inline":
            start = (token.map or (opening.map if opening and opening.map else [0, 0]))[0] + 1
            plain = _plain(token)
            if in_cell and start not in generated and (words := len(WORD.findall(plain))) > CELL_MAX:
                found.cells.append(f"{start}: {words} words: {plain[:60]}")
            for sentence in SENTENCE_END.split(plain):
                if (words := len(WORD.findall(sentence))) > SENTENCE_MAX:
                    found.sentences.append(f"{start}: {words} words: {sentence[:60]}")
    return found


def _plain(token: Token) -> str:
    """Return the text of an inline token; code counts as a word."""
    parts = []
    for child in token.children or []:
        if child.type == "code_inline":
            parts.append("`code`")
        elif child.type in ("softbreak", "hardbreak"):
            parts.append(" ")
        elif child.type in ("text", "image"):
            parts.append(child.content)
    return "".join(parts)


def _lines_of(tokens: list[Token], types: set[str]) -> set[int]:
    return {number + 1 for token in tokens if token.type in types and token.map for number in range(*token.map)}


def _generated(text: str) -> set[int]:
    """Return the lines of generated blocks."""
    return set(_inside(text.splitlines()))


def _inside(lines: list[str]) -> Iterator[int]:
    inside = False
    for number, line in enumerate(lines, 1):
        if line.startswith("<!-- generated:"):
            inside = True
        if inside:
            yield number
        if line.startswith("<!-- end of generated"):
            inside = False
