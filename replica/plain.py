"""Texts that come from other people, such that neither a terminal, nor a log, nor a mail takes orders from them."""

from __future__ import annotations


def plain(text: str) -> str:
    """Return the text on one line, each character that is not printable as an escape, such as `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
