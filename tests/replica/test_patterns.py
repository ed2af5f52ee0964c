"""Patterns that are compiled when they are used: they find what `re` finds."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.replica.values import Pattern

USES: dict[str, Callable[[Any, str], Any]] = {
    "fullmatch": lambda one, text: _said(one.fullmatch(text)),
    "match": lambda one, text: _said(one.match(text)),
    "search": lambda one, text: _said(one.search(text)),
    "finditer": lambda one, text: [_said(found) for found in one.finditer(text)],
    "findall": lambda one, text: one.findall(text),
    "sub": lambda one, text: one.sub(lambda found: found[0].upper() + "-", text),
}


def _said(found: re.Match[str] | None) -> object:
    return None if found is None else (found.span(), found.groups())


@pytest.mark.parametrize("name", USES)
@given(
    st.sampled_from(["(a+)b?", "(?:b|(c))", "^$"]), st.sampled_from([0, re.IGNORECASE]), st.text("abcABC", max_size=8)
)
def test_a_pattern_finds_what_re_finds(name: str, pattern: str, flags: int, text: str) -> None:
    one = Pattern(pattern, flags)
    for _ in range(2):  # the second time without asking
        assert USES[name](one, text) == USES[name](re.compile(pattern, flags), text)


def test_every_method_of_a_pattern_is_one_of_re() -> None:
    assert Pattern.__annotations__.keys() == USES.keys()
    with pytest.raises(AttributeError):
        _ = Pattern("a").scanner


def test_a_pattern_is_not_compiled_before_it_is_used() -> None:
    broken = Pattern("(")
    with pytest.raises(re.error):
        broken.match("")
