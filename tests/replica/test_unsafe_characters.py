"""Texts that would give a terminal orders, or look like other texts, are refused where they come in."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.replica.grammar.lexer import control_offset
from forebay.replica.grammar.paths import path_fault
from forebay.replica.model.configuration import program_fault
from forebay.replica.values import has_control_character, plain
from forebay.replica.values.errors import Rejection
from tests.replica.test_request_options import refused, submit, world

BIDI_CONTROL = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""The characters with the property Bidi_Control (Unicode Standard Annex 9)."""

UNSAFE = sorted({chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)} | set(BIDI_CONTROL))


def is_unsafe(character: str) -> bool:
    # Of the standard's own table: what has a direction of its own and no width, controls, separators of lines.
    directions = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    return (
        unicodedata.category(character) in ("Cc", "Zl", "Zp")
        or unicodedata.bidirectional(character) in directions
        or (unicodedata.category(character) == "Cf" and unicodedata.bidirectional(character) in ("L", "R", "AL"))
        and character in BIDI_CONTROL
    )


@given(st.text(max_size=12))
def test_a_text_is_safe_if_each_character_is(text: str) -> None:
    assert has_control_character(text) == any(map(is_unsafe, text))


def test_each_unsafe_character_is_found_and_nothing_else() -> None:
    found = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000 and has_control_character(chr(code))]
    assert found == UNSAFE


@pytest.mark.parametrize("character", [one for one in UNSAFE if one not in "\t"], ids=ascii)
def test_no_path_program_directive_or_comment_has_one(character: str) -> None:
    text = f"/scratch/a{character}b"
    assert "control character" in (path_fault(text) or "")
    assert "control character" in (program_fault(text) or "")
    assert control_offset(f"#DW a{character}b") == len("#DW a")
    assert plain(text).isprintable()
    made = world()
    for field in ("comment", "mail_user"):
        assert "control character" in refused(made, **{field: f"a{character}b"}).sentence
    for field in ("workdir", "output", "error"):
        assert isinstance(submit(made, **{field: text}), Rejection), field
