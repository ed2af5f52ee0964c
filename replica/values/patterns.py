"""Lazily compiled regular expressions: a command-line program loads many and uses few."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any


class Pattern:
    """A regular expression with the methods of `re.Pattern` that are declared here."""

    fullmatch: Callable[[str], re.Match[str] | None]
    match: Callable[[str], re.Match[str] | None]
    search: Callable[[str], re.Match[str] | None]
    finditer: Callable[[str], Iterator[re.Match[str]]]
    findall: Callable[[str], list[str]]
    sub: Callable[[str | Callable[[re.Match[str]], str], str], str]

    def __init__(self, text: str, flags: int = 0) -> None:
        self._text = text
        self._flags = flags

    def __getattr__(self, name: str) -> Any:
        """Return a method of the compiled expression, and store it for direct access."""
        if name not in Pattern.__annotations__:
            raise AttributeError(name)
        found = getattr(re.compile(self._text, self._flags), name)
        setattr(self, name, found)
        return found
