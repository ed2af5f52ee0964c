"""Self-contained HTML pages: style, headline figures, legends and collapsible tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final, NamedTuple

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"

COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
"""Colours of the classes c0 to c7, distinguishable with any kind of colour vision (Okabe and Ito, 2002)."""

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --muted: #545d68; --page: #f6f7f9; --card: #fff; --line: #d5dae0;
  --good: #17693a; --warn: #8a5300; --bad: #b3211c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --muted: #abb3bd; --page: #14171b; --card: #1d2126;
  --line: #383f48; --good: #63cf8f; --warn: #f0b54a; --bad: #ff8e86; } }
* { box-sizing: border-box; }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1200px;
  margin: 0 auto; padding: .5rem 1rem 2rem; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
h1 { font-size: 1.4em; margin: .5em 0; } h2 { font-size: 1.15em; margin: 1.8em 0 .5em; } p { margin: .4em 0; }
.small, .key, .x, .y, summary { color: var(--muted); font-size: .87em; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .7rem; margin: .8rem 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .7rem 1rem; }
.tile span { display: block; color: var(--muted); font-size: .87em; } .tile b { display: block; font-size: 1.35em; }
.tile.good b { color: var(--good); } .tile.warn b { color: var(--warn); } .tile.bad b { color: var(--bad); }
.strip { display: block; width: 100%; height: 9rem; border-radius: .3rem; background: var(--card); }
.plot { display: grid; grid-template-columns: 5.5rem minmax(0, 1fr); gap: 0 .6rem; }
.y { display: flex; flex-direction: column; justify-content: space-between; text-align: right; line-height: 1; }
.x { grid-column: 2; width: 100%; height: 1.6em; } .x text { fill: var(--muted); }
.rows { display: grid; grid-template-columns: 12rem minmax(0, 1fr); gap: .2rem .6rem; }
.rows .strip { height: 1.1rem; border-radius: .15rem; }
.name { text-align: right; font-size: .87em; line-height: 1.1rem; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; }
.grid line { stroke: var(--muted); stroke-opacity: .35; vector-effect: non-scaling-stroke; }
.line { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; }
table { border-collapse: collapse; background: var(--card); margin: .4rem 0; }
th, td { padding: .25rem .7rem; text-align: left; vertical-align: top; border: 1px solid var(--line);
  font-weight: 400; }
th { color: var(--muted); font-size: .87em; } td.n { text-align: right; }
.key .item { display: inline-block; margin-right: .9em; }
.key .item span { display: inline-block; width: .8em; height: .8em; border-radius: .15em; margin-right: .35em; }
summary { cursor: pointer; margin: .5em 0; }
@media (max-width: 45rem) {
  .plot { grid-template-columns: 4.2rem minmax(0, 1fr); } .strip { height: 6rem; }
  .tiles { grid-template-columns: 1fr 1fr; }
  .rows { grid-template-columns: minmax(0, 1fr); } .name { text-align: left; margin-top: .3rem; }
  .rows .x { grid-column: 1; }
  table, tbody, tr, td { display: block; } tr:first-child:has(th) { display: none; }
  table { background: none; } tr { background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
    padding: .4rem .7rem; margin-bottom: .5rem; }
  td, td.n { border: 0; padding: .05rem 0; text-align: left; }
  td[data-label] { display: grid; grid-template-columns: 8rem minmax(0, 1fr); gap: .5rem; }
  td::before { content: attr(data-label); color: var(--muted); font-size: .87em; }
  table.facts td:first-child { color: var(--muted); font-size: .87em; }
}
"""


class HeadlineFigure(NamedTuple):
    """Headline figure: label, value, explanation, and class (`good`, `warn`, `bad` or none)."""

    label: str
    value: str
    more: str = ""
    kind: str = ""


def tiles(found: Iterable[HeadlineFigure]) -> str:
    """Return headline figures as HTML."""
    parts = (
        f'<div class="tile {escape(one.kind)}"><span>{escape(one.label)}</span><b>{escape(one.value)}</b>'
        f"{escape(one.more)}</div>"
        for one in found
    )
    return f'<div class="tiles">{"".join(parts)}</div>'


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
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def key(kinds: Iterable[tuple[str, str]]) -> str:
    """Return a chart legend as HTML, from classes and their meanings."""
    items = "".join(f'<span class="item"><span class="{kind}"></span>{escape(name)}</span> ' for kind, name in kinds)
    return f'<p class="key">{items}</p>'


def details(table: str, title: str = "As a table") -> str:
    """Return a collapsed table."""
    return f"<details><summary>{escape(title)}</summary>{table}</details>"


def html_table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table with numbers aligned right; on a phone each row is a card. Without heads it is a list of facts."""
    has_heads = any(heads)

    def cell(head: str, value: Any) -> str:
        name = f' data-label="{escape(head)}"' if head else ""
        if isinstance(value, int):
            return f'<td class="n"{name}>{value:,}</td>'
        return f"<td{name}>{escape(str(value))}</td>"

    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        f"<tr>{''.join(cell(name, value) for name, value in zip(heads, row, strict=True))}</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>" if has_heads else f'<table class="facts">{body}</table>'
