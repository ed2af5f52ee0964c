"""Directives of jobs that Slurm schedules: Slurm's own word (`#BB_LUA`), followed by the syntax of `#DW`.

Slurm reads `pool=` and `capacity=` of such a line itself and charges by them. It takes the first occurrence of the
letters in the line, whole numbers only, and accepts words that begin like its own. Requests that Slurm and Forebay
would read differently are rejected. Source: SLURM-OBSERVED.md, 4.
"""

from __future__ import annotations

import re
from typing import Final

from msgspec.structs import replace

from forebay.replica.grammar.dw import (
    CHOICES,
    COPIES,
    COPY_KEYS,
    SPACE_KEYS,
    STAGE_KEYS,
    TRANSFER_TYPES,
    read_dw,
    read_space,
)
from forebay.replica.grammar.lexer import SCRIPT, Directive, DirectiveKinds, DirectiveWord, find_directives, quoted_text
from forebay.replica.grammar.paths import INSIDE_VARIABLES
from forebay.replica.grammar.request import STAGES, RequestBuilder
from forebay.replica.grammar.values import Options, read_options, strip_comment
from forebay.replica.grammar.variables import path_variable_table
from forebay.replica.model import (
    CHOICE_KEYS,
    DEFAULT_SITE,
    PERSISTENT_PREFIX,
    VARIABLE_DIRECTORIES,
    WHOLE_BUFFER,
    Access,
)
from forebay.replica.values import (
    DIRECTIVE_WORDS_MAX,
    DIRECTIVES_MAX,
    NAME_CHARACTERS_MAX,
    NODE_SUFFIXES,
    PATH_BYTES_MAX,
    SIZE_BYTES_MAX,
    SIZE_DIGITS_MAX,
    SIZE_MULTIPLIERS,
    SUFFIXES,
    TRANSFERS_PER_STAGE_MAX,
    RejectionCode,
)

COUNTED: Final = ("pool", "capacity")
"""Words of a line that Slurm evaluates."""

EXTERNAL_JOB_VERBS: Final = ("jobdw", *STAGES, *COPIES)

_DIRECTIVES: Final = ("#DW", "#BB")
_TAB_AFTER: Final = re.compile(r"(?:^|[ \t])(pool|capacity)=[^ \t]*\t")


def external_job_kinds(directive: str) -> DirectiveKinds:
    """Return the kinds of directives of a job of Slurm; `directive` is that of burst_buffer.conf."""
    site = "#" + directive
    return DirectiveKinds((site,), tuple(kind for kind in _DIRECTIVES if kind != site), by_beginning=True)


def read_external_job(script: str, directive: str, builder: RequestBuilder) -> None:
    """Read all directives of a script.

    Raises:
        DirectiveRejected: a directive is invalid; with line and column.
    """
    kinds = external_job_kinds(directive)
    builder.word = kinds.known[0]
    builder.paths.allows_names = False
    found = find_directives(script, SCRIPT, kinds, builder.warnings)
    for each in found:
        _check_counted(each)
        words = strip_comment(each.words)
        if not words:
            raise each.at.rejection(
                f"{each.kind} has no directive after it", f"write for example {each.kind} pool=fast capacity=10GiB"
            )
        builder.kind = "dw"
        if "=" in words[0].text:
            builder.lines.append(f"{each.kind} jobdw {' '.join(word.text for word in words)}")
            read_space(words[0], _space_options(words), builder, "access_mode")
        elif words[0].text == "jobdw":
            builder.lines.append(each.text)
            read_space(words[0], read_options(words[1:], SPACE_KEYS), builder, "access_mode")
        elif words[0].text in EXTERNAL_JOB_VERBS:
            read_dw(replace(each, words=words), builder)
        else:
            raise words[0].rejection(
                f"unknown directive {quoted_text(words[0].text)} of {each.kind}",
                f"use one of {', '.join(EXTERNAL_JOB_VERBS)}",
            )
    _check_whole(builder, found)


def _space_options(words: tuple[DirectiveWord, ...]) -> Options:
    return read_options(words, SPACE_KEYS)


def _check_counted(directive: Directive) -> None:
    """Check that Slurm reads the same pool and capacity in a line as Forebay.

    Raises:
        DirectiveRejected: it would not.
    """
    words = directive.words
    asks = bool(words) and (words[0].text == "jobdw" or "=" in words[0].text)
    comment = next((index for index, word in enumerate(words) if word.text.startswith("#")), len(words))
    for key in COUNTED:
        index = next((index for index, word in enumerate(words) if f"{key}=" in word.text), None)
        if index is not None and not (asks and index < comment and words[index].text.startswith(f"{key}=")):
            raise words[index].rejection(
                f"Slurm reads the letters {key}= in {quoted_text(words[index].text)} as a request of the job",
                f"write {key}= once, as an option of the capacity request, and nowhere else",
                words[index].text.index(f"{key}="),
            )
    tab = _TAB_AFTER.search(directive.text)
    if tab is not None:
        word = next(word for word in words if word.text.startswith(f"{tab[1]}="))
        raise word.rejection("Slurm reads the tab after this word as a part of it", "write a blank", len(word.text))


def _check_whole(builder: RequestBuilder, found: list[Directive]) -> None:
    """Check the request against limits of external jobs: nodes are unknown, and Slurm charges the capacity.

    Raises:
        DirectiveRejected: the request exceeds them.
    """
    if not found:
        return
    if builder.capacity_at is None or builder.capacity is None:
        raise found[0].at.rejection(
            "the job requests no capacity", f"add for example {found[0].kind} pool=fast capacity=10GiB"
        )
    at, text = builder.capacity_at, builder.capacity_at.text
    value_at = text.index("=") + 1
    if builder.capacity.unit == "nodes":
        raise at.rejection(
            "a capacity in nodes is requested, but the nodes of the job are not known yet",
            "write a size, for example capacity=10GiB",
            value_at,
            RejectionCode.INVALID_CAPACITY,
        )
    if "." in text:
        raise at.rejection(
            f"Slurm reads {quoted_text(text[value_at:])} as the whole number before its point",
            "write a whole number with a smaller unit, for example 1536MiB",
            text.index("."),
            RejectionCode.INVALID_CAPACITY,
        )
    if builder.pool_at is None:
        raise at.rejection(
            "capacity= needs pool=: Slurm counts by the pool that the line names",
            "add pool= to this line",
            code=RejectionCode.NO_DEFAULT_POOL,
        )
    if Access.PRIVATE in builder.access:
        word = next(word for each in found for word in each.words if word.text.startswith("access_mode="))
        raise word.rejection(
            "access_mode=private cannot be set up for each node: the nodes of the job are not known yet",
            "use access_mode=striped",
            len("access_mode="),
        )


def external_job_tables() -> dict[str, object]:
    """Return the words, keys, suffixes and bounds that the same check in another language needs.

    `cluster/slurm/burst_buffer.lua` is that check; a test compares both.
    """
    return {
        "verbs": list(EXTERNAL_JOB_VERBS),
        "space_keys": list(SPACE_KEYS),
        "stage_keys": list(STAGE_KEYS),
        "copies": dict(COPIES),
        "copy_keys": list(COPY_KEYS),
        "transfer_types": list(TRANSFER_TYPES),
        "choice_keys": list(CHOICE_KEYS),
        "choices": {key: list(words) for key, words in CHOICES.items()},
        "types": ["scratch"],
        "access_modes": [mode.name.lower() for mode in Access],
        "variables": list(INSIDE_VARIABLES),
        "variable_modes": {name: mode.name.lower() for name, mode in INSIDE_VARIABLES.items() if mode is not None},
        "whole_buffer": WHOLE_BUFFER,
        "variable_directories": dict(VARIABLE_DIRECTORIES),
        "persistent_prefix": PERSISTENT_PREFIX,
        "path_variables": path_variable_table(DEFAULT_SITE.path_variables),
        "suffixes": {suffix: float(factor) for suffix, factor in SIZE_MULTIPLIERS.items()},
        "suffixes_listed": SUFFIXES,
        "node_suffixes": list(NODE_SUFFIXES),
        "units": [[word, float(SIZE_MULTIPLIERS[word.upper()])] for word in ("PiB", "TiB", "GiB", "MiB", "KiB")],
        "limits": {
            "directives": DIRECTIVES_MAX,
            "words": DIRECTIVE_WORDS_MAX,
            "transfers": TRANSFERS_PER_STAGE_MAX,
            "path": PATH_BYTES_MAX,
            "name": NAME_CHARACTERS_MAX,
            "digits": SIZE_DIGITS_MAX,
            "bytes": float(SIZE_BYTES_MAX),
        },
    }
