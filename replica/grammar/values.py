"""Parser of `key=value` words, and of values that several directives share."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

import msgspec

from forebay.replica.grammar.lexer import DirectiveRejected, DirectiveWord, ends_in_backslash, quoted_text
from forebay.replica.model import Access
from forebay.replica.values import Quantity, RejectionCode, SizeError, name_fault, parse_quantity

STOP = "\\\\"
"""Two backslashes: no symbol after them is replaced, up to the end of the line."""


class OptionValue(msgspec.Struct, frozen=True):
    """Value of an option; `literal` means that symbols were disabled earlier in the line."""

    word: DirectiveWord
    text: str
    offset: int
    literal: bool = False

    @property
    def as_path(self) -> str:
        """Return the text, prefixed with STOP if symbols are disabled."""
        return STOP + self.text if self.literal and not self.text.startswith(STOP) else self.text

    def rejection(
        self, sentence: str, remedy: str, offset: int = 0, code: RejectionCode = RejectionCode.INVALID_DIRECTIVE
    ) -> DirectiveRejected:
        """Return the exception that names this value's place, `offset` characters into it."""
        return self.word.rejection(sentence, remedy, self.offset + offset, code)


class Options(msgspec.Struct, frozen=True):
    """Options of one directive: known ones by key, others as written."""

    known: dict[str, OptionValue]
    others: tuple[DirectiveWord, ...] = ()


def strip_comment(words: tuple[DirectiveWord, ...]) -> tuple[DirectiveWord, ...]:
    """Return the words before a comment, which starts at a word that begins with `#`.

    Raises:
        DirectiveRejected: the directive continues on the line after the comment.
    """
    for index, word in enumerate(words):
        if word.text.startswith("#"):
            if words[-1].line != word.line:
                raise word.rejection(
                    "the directive continues after the line of this comment",
                    "move the comment to the end of its last line",
                )
            return words[:index]
    return words


def read_options(
    words: Iterable[DirectiveWord], known: tuple[str, ...], *, keep_others: bool = True, keep_bare: bool = False
) -> Options:
    """Return the options in these words.

    An unknown key is kept in `others`, or rejected without `keep_others`; so is a word without a key (`keep_bare`).

    Raises:
        DirectiveRejected: a word is not an option, a key is written twice, or a value is empty.
    """
    found: dict[str, OptionValue] = {}
    others: list[DirectiveWord] = []
    literal = False
    for word in words:
        key, equals, text = word.text.partition("=")
        if ends_in_backslash(word.text):
            raise word.rejection(
                f"{quoted_text(word.text)} ends in a backslash that continues nothing",
                "remove it, or end the line with it",
                len(word.text) - 1,
            )
        if not equals and keep_bare:
            others.append(word)
            continue
        if not equals or not key:
            raise word.rejection(f"{quoted_text(word.text)} is not an option", _written(known))
        if key not in known:
            if not keep_others:
                raise word.rejection(
                    f"unknown option {quoted_text(key)}", did_you_mean(key, known, "=") + _written(known)
                )
            others.append(word)
        elif key in found:
            raise word.rejection(f"{key}= is written twice", "write it once")
        elif not text:
            raise word.rejection(f"{key}= is empty", f"write a value after {key}=", len(key) + 1)
        else:
            found[key] = OptionValue(word, text, len(key) + 1, literal)
        literal = literal or STOP in word.text
    return Options(found, tuple(others))


SUGGESTED_CHARACTERS_MAX = 32
"""Maximum length of an unknown word that gets a suggestion, characters: no name is longer."""

SUGGESTED_WORDS_MAX = 8
"""Unknown words compared with `capacity`, count: a request with that misspelling has few others."""


def did_you_mean(word: str, known: Iterable[str], suffix: str = "") -> str:
    """Return `did you mean NAME? ` for the known name closest to an unknown word, or an empty text."""
    if len(word) > SUGGESTED_CHARACTERS_MAX:
        return ""
    near = difflib.get_close_matches(word.lower(), tuple(known), n=1)
    return f"did you mean {near[0]}{suffix}? " if near else ""


def missing_capacity(verb: DirectiveWord, options: Options) -> DirectiveRejected:
    """Return the rejection of a request without a capacity: at a misspelt `capacity=` if there is one."""
    for word in options.others[:SUGGESTED_WORDS_MAX]:
        key = word.text.partition("=")[0]
        if did_you_mean(key, ("capacity",)):
            return word.rejection(
                f"unknown option {quoted_text(key)}", "did you mean capacity=?", code=RejectionCode.INVALID_CAPACITY
            )
    return verb.rejection(
        "the request has no capacity", "add capacity=, for example capacity=10GiB", code=RejectionCode.INVALID_CAPACITY
    )


def _written(known: tuple[str, ...]) -> str:
    return "write " + " ".join(name + "=" for name in known)


def read_capacity(value: OptionValue, bare: int = 1) -> Quantity:
    """Return a capacity; a number without a suffix is multiplied by `bare`."""
    try:
        return parse_quantity(value.text, bare)
    except SizeError as error:
        raise value.rejection(error.sentence, error.remedy, error.offset, RejectionCode.INVALID_CAPACITY) from None


def read_pool(value: OptionValue) -> str:
    """Return the name of a pool."""
    fault = name_fault(value.text)
    if fault is not None:
        raise value.rejection(f"the pool name {fault}", "write the name of a pool")
    return value.text


def read_persistent_name(value: OptionValue) -> str:
    """Return the name of a persistent buffer. Names that start with a digit are reserved for jobs' own buffers."""
    if "0" <= value.text[0] <= "9":
        raise value.rejection(
            f"the name {quoted_text(value.text)} of a persistent buffer starts with a digit", "start it with a letter"
        )
    fault = name_fault(value.text)
    if fault is not None:
        raise value.rejection(f"the name {fault}", "write the name of a persistent buffer")
    return value.text


_ACCESS_MODE = re.compile(r"([^(),]*)(\(([^()]*)\))?(,|$)")
"""An access mode with its options and its terminator."""


class AccessModes(msgspec.Struct, frozen=True):
    """Access modes of a value; `has_options` marks options that only DataWarp's own tools read."""

    modes: tuple[Access, ...]
    has_options: bool = False


def read_access(value: OptionValue) -> AccessModes:
    """Return the access modes of `striped,private(MFS=1GiB)`."""
    modes: list[Access] = []
    offset, ends, has_options = 0, False, False
    while not ends:
        found = _ACCESS_MODE.match(value.text, offset)
        if found is None:
            raise value.rejection(
                "the options of an access mode are not enclosed in one pair of ( )",
                "write them as striped(client_cache=yes)",
                offset,
            )
        part, bracketed, options, end = found.groups()
        if bracketed is not None and not options:
            raise value.rejection(
                f"the access mode {quoted_text(part)} has empty options", "remove ()", offset + len(part)
            )
        has_options, ends = has_options or bracketed is not None, not end
        if part not in ("striped", "private", "ldbalance"):
            raise value.rejection(
                f"unknown access mode {quoted_text(part)}",
                "use striped, private, ldbalance, separated by commas",
                offset,
            )
        mode = Access[part.upper()]
        if mode in modes:
            raise value.rejection(f"access mode {part!r} is written twice", "write it once", offset)
        modes.append(mode)
        offset = found.end()
    return AccessModes(tuple(modes), has_options)


_NATIVE_TYPES = {
    "cache": ("has no transparent cache", "write type=scratch"),
    "swap": ("has it as a directive of its own", "write #DW swap with a size"),
}
"""Types of DataWarp that the provider native does not support: reason and remedy."""


def read_type(value: OptionValue, native: bool) -> str:
    """Return the type of a buffer."""
    if value.text not in ("scratch", *_NATIVE_TYPES):
        types = "type=scratch" if native else "type=scratch, type=cache or type=swap"
        raise value.rejection(f"unknown type {quoted_text(value.text)}", f"write {types}")
    if native and value.text in _NATIVE_TYPES:
        why, remedy = _NATIVE_TYPES[value.text]
        raise value.rejection(f"type={value.text} is not supported by the provider native, which {why}", remedy)
    return value.text
