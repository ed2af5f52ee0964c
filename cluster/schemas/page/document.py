"""Self-contained HTML pages: style, legends and collapsible tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"

COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
"""Colours of the classes c0 to c7, distinguishable with any kind of colour vision (Okabe and Ito, 2002)."""

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #222; --faint: #ddd; --page: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --faint: #444; --page: #181818; } }
body { font: 14px/1.4 sans-serif; color: var(--ink); background: var(--page); max-width: 1140px;
  margin: 1em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 11px sans-serif; fill: var(--ink); } .label { text-anchor: end; } .time { text-anchor: middle; }
.axis { stroke: var(--ink); } .tick { stroke: var(--faint); } .line { fill: none; stroke-width: 1.5; }
table { border-collapse: collapse; } td, th { padding: 1px 10px 1px 0; text-align: left; } td.n { text-align: right; }
.key span { display: inline-block; width: 10px; height: 10px; margin: 0 4px 0 12px; } .key { margin: 4px 0; }
"""


def page(title: str, parts: Iterable[str], colours: Mapping[str, str] | None = None) -> str:
    """Return a page from HTML parts; `colours` adds classes to c0 to c7."""
    style = (
        _STYLE
        + "".join(f".{kind} {{ fill: {colour}; background: {colour}; }}\n" for kind, colour in (colours or {}).items())
        + "".join(f".c{n} {{ fill: {colour}; background: {colour}; }}\n" for n, colour in enumerate(COLOURS))
        + "".join(
            f".line.c{n} {{ fill: none; background: none; stroke: {colour}; }}\n" for n, colour in enumerate(COLOURS)
        )
    )
    body = "\n".join((f"<h1>{escape(title)}</h1>", *parts))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def key(kinds: Iterable[tuple[str, str]]) -> str:
    """Return a chart legend from classes and their meanings."""
    return '<p class="key">' + "".join(f'<span class="{kind}"></span>{escape(name)}' for kind, name in kinds) + "</p>"


def details(table: str) -> str:
    """Return a collapsed table."""
    return f"<details><summary>as a table</summary>{table}</details>"


def html_table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table with numbers aligned right."""
    cell: Callable[[Any], str] = lambda value: (  # noqa: E731
        f'<td class="n">{value}</td>' if isinstance(value, int) else f"<td>{escape(str(value))}</td>"
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(cell(value) for value in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
