"""The reference of the Python API, from docstrings and signatures of what `forebay` and `forebay.testing` export."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec

import forebay
import forebay.testing

_SECTION = re.compile(r"^(Args|Raises|Attributes):$")
_ANNOTATION = re.compile(r"(: |-> )'([^']*)'")
"""An annotation, which is a text; defaults that are texts keep their quotes."""

WIDTH = 100
"""Characters of a line of the page."""


def clients() -> str:
    """Return the methods of the asynchronous client; the other one has the same."""
    return _of_class(forebay.AsyncClient)


def options() -> str:
    """Return the options of a submit."""
    names = forebay.SubmitOptions.__annotations__
    return "\n".join(["| option | type |", "|---|---|", *(f"| `{name}` | `{_type(names[name])}` |" for name in names)])


def errors() -> str:
    """Return the exceptions, each with its base and meaning."""
    rows = []
    for name in forebay.__all__:
        kind = getattr(forebay, name)
        if isinstance(kind, type) and issubclass(kind, forebay.ForebayError):
            base = "" if kind is forebay.ForebayError else f" ({', '.join(one.__name__ for one in kind.__bases__)})"
            rows += [f"### {name}{base}", "", *_text(kind)]
    return "\n".join(rows)


def results() -> str:
    """Return the classes of results, with the object of the HTTP API that documents each."""
    found = []
    for name in forebay.__all__:
        kind = getattr(forebay, name)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            found.append(f"| `{name}` | {', '.join(f'`{field}`' for field in kind.__struct_fields__[:4])}, … |")
    return "\n".join(["| class | first fields |", "|---|---|", *found])


def memory() -> str:
    """Return the cluster in memory."""
    rows = [*_heading("cluster", forebay.testing.cluster), *_text(forebay.testing.cluster), "### MemoryCluster", ""]
    return "\n".join([*rows, *_text(forebay.testing.MemoryCluster), _of_class(forebay.testing.MemoryCluster)])


def _of_class(kind: type) -> str:
    rows: list[str] = []
    for name, member in vars(kind).items():
        function: Any = getattr(member, "__func__", member)
        if name.startswith("_"):
            continue
        if isinstance(function, property):
            rows += [f"### {name}", "", *_text(function)]
        elif callable(function):
            rows += [*_heading(name, function), *_text(function)]
    return "\n".join(rows)


def _type(annotation: Any) -> str:
    text = annotation.__forward_arg__ if hasattr(annotation, "__forward_arg__") else str(annotation)
    return text.replace("|", "or").replace("  ", " ")


def _text(member: Any) -> Iterator[str]:
    """Yield a docstring as Markdown: paragraphs in lines of this width, its sections as lists, examples as they are."""
    for paragraph in inspect.cleandoc(member.__doc__ or "").split("\n\n"):
        lines = paragraph.splitlines()
        section = _SECTION.match(lines[0])
        if lines[0].startswith("    "):
            yield from ("```python", *(line[4:] for line in lines), "```", "")
        elif section is None:
            yield from (*textwrap.wrap(" ".join(lines), WIDTH), "")
        else:
            yield from ({"Args": "Arguments"}.get(section[1], section[1]) + ":", "")
            items: list[str] = []
            for line in lines[1:]:
                if line[4] == " ":
                    items[-1] += f" {line.strip()}"
                else:
                    name, _, text = line.strip().partition(": ")
                    items.append(f"- `{name.replace(', ', '`, `')}`: {text}")
            yield from (row for item in items for row in textwrap.wrap(item, WIDTH, subsequent_indent="  "))
            yield ""


def _heading(name: str, function: Any) -> Iterator[str]:
    """Yield a heading and a signature, with one parameter a line if it is long."""
    found = inspect.signature(function)
    parameters = [one for one in found.parameters.values() if one.name not in ("self", "cls")]
    shown = _ANNOTATION.sub(r"\1\2", str(found.replace(parameters=parameters)))
    call = f"{'await ' * inspect.iscoroutinefunction(function)}{name}"
    text = f"{call}{shown}"
    if len(text) > WIDTH:
        inside, _, result = shown[1:].rpartition(") -> ")
        rows = re.split(r", (?![^\[(]*[\])])", inside)
        text = "\n".join([f"{call}(", *(f"    {row}," for row in rows), f") -> {result}"])
    yield from (f"### {name}", "", "```text", text, "```", "")
