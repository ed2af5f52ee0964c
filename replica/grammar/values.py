"""The `key=value` words of a directive, and the values that several directives share."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from replica.grammar.lexer import DirectiveRefused, Word, ends_in_backslash, shown
from replica.model import Access
from replica.values import Quantity, RefusalCode, SizeError, name_fault, parse_quantity

STOP = "\\\\"
"""Two backslashes: no symbol after them is replaced, up to the end of the line."""


class Value(msgspec.Struct, frozen=True):
    """The value of one option; `literal`: the line's symbols were stopped before it."""

    word: Word
    text: str
    offset: int
    literal: bool = False

    @property
    def as_path(self) -> str:
        """The text, with the symbol before it that keeps its own symbols from being replaced, where that is so."""
        return STOP + self.text if self.literal and not self.text.startswith(STOP) else self.text

    def refuse(
        self, sentence: str, remedy: str, offset: int = 0, code: RefusalCode = RefusalCode.INVALID_DIRECTIVE
    ) -> DirectiveRefused:
        """Return the exception that names this value's place, `offset` characters into it."""
        return self.word.refuse(sentence, remedy, self.offset + offset, code)


class Options(msgspec.Struct, frozen=True):
    """The options of one directive: those it knows by key, and the others as they were written."""

    known: dict[str, Value]
    others: tuple[Word, ...] = ()


def read_options(words: Iterable[Word], known: tuple[str, ...], *, keep_others: bool = True) -> Options:
    """Return the options that these words are.

    An unknown key is kept in `others`, or refused where these are not kept. Raises DirectiveRefused for a word that is
    no option, a key that is written twice, an empty value.
    """
    found: dict[str, Value] = {}
    others: list[Word] = []
    listed = " ".join(name + "=" for name in known)
    literal = False
    for word in words:
        key, equals, text = word.text.partition("=")
        if ends_in_backslash(word.text):
            raise word.refuse(
                f"{shown(word.text)} ends in a backslash that continues nothing",
                "remove it, or end the line with it",
                len(word.text) - 1,
            )
        if not equals or not key:
            raise word.refuse(f"{shown(word.text)} is not an option", f"write {listed}")
        if key not in known:
            if not keep_others:
                raise word.refuse(f"unknown option {shown(key)}", f"write {listed}")
            others.append(word)
        elif key in found:
            raise word.refuse(f"{key}= is written twice", "write it once")
        elif not text:
            raise word.refuse(f"{key}= is empty", f"write a value after {key}=", len(key) + 1)
        else:
            found[key] = Value(word, text, len(key) + 1, literal)
        literal = literal or STOP in word.text
    return Options(found, tuple(others))


def read_capacity(value: Value, bare: int = 1) -> Quantity:
    """Return a capacity; a number without a suffix is multiplied with `bare`."""
    try:
        return parse_quantity(value.text, bare)
    except SizeError as error:
        raise value.refuse(error.sentence, error.remedy, error.offset, RefusalCode.INVALID_CAPACITY) from None


def read_pool(value: Value) -> str:
    """Return the name of a pool."""
    fault = name_fault(value.text)
    if fault is not None:
        raise value.refuse(f"the pool name {fault}", "write the name of a pool")
    return value.text


def read_persistent_name(value: Value) -> str:
    """Return the name of a persistent buffer; names that start with a digit are those of jobs' own buffers."""
    if "0" <= value.text[0] <= "9":
        raise value.refuse(
            f"the name {shown(value.text)} of a persistent buffer starts with a digit", "start it with a letter"
        )
    fault = name_fault(value.text)
    if fault is not None:
        raise value.refuse(f"the name {fault}", "write the name of a persistent buffer")
    return value.text


def read_access(value: Value) -> tuple[Access, ...]:
    """Return the access modes of `striped,private`."""
    modes: list[Access] = []
    offset = 0
    for part in value.text.split(","):
        if part not in ("striped", "private", "ldbalance"):
            raise value.refuse(
                f"unknown access mode {shown(part)}", "use striped, private, ldbalance, separated by commas", offset
            )
        mode = Access[part.upper()]
        if mode in modes:
            raise value.refuse(f"access mode {part!r} is written twice", "write it once", offset)
        modes.append(mode)
        offset += len(part) + 1
    return tuple(modes)


def read_type(value: Value, cache: bool) -> str:
    """Return the type of a buffer; `cache`: whether the provider has transparent caches."""
    if value.text not in ("scratch", "cache"):
        raise value.refuse(f"unknown type {shown(value.text)}", "write type=scratch or type=cache")
    if value.text == "cache" and not cache:
        raise value.refuse(
            "type=cache is not supported by the provider native, which has no transparent cache", "write type=scratch"
        )
    return value.text
