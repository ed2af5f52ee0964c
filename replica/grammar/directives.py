"""The grammar of burst-buffer requests: directives of a script, `--bb` and `--bbf`. The public face of `grammar`.

Sources: the burst buffer guides, SEMANTICS.md, SPUR.md. What is understood is parsed exactly; what is not is refused
with line and column or, where it is an option that somebody else may know, kept with a warning; nothing is ignored
silently. A request is read here without knowing pools, users or job numbers: those are checked when the job is decided
on.
"""

from __future__ import annotations

from functools import lru_cache, partial

import msgspec
from msgspec.structs import replace

from replica.grammar.bb import read_bb, read_short
from replica.grammar.dw import read_dw
from replica.grammar.lexer import (
    SCRIPT,
    Directive,
    DirectiveRefused,
    Kinds,
    Warnings,
    Word,
    check_length,
    control_offset,
    find_directives,
    note_refusals,
    raise_noted,
    shown,
    split_words,
)
from replica.grammar.lua import read_lua
from replica.grammar.paths import INSIDE_VARIABLES, path_fault, split_inside
from replica.grammar.request import Asked
from replica.grammar.slurm import read_external_job
from replica.grammar.spur import is_spur, read_spur
from replica.grammar.values import without_comment
from replica.model import NATIVE, BufferRequest, provider_facts
from replica.values import Refusal, RefusalCode

__all__ = [
    "INSIDE_VARIABLES",
    "DirectiveRefused",
    "Reading",
    "parse_request",
    "path_fault",
    "read_external_job_request",
    "read_request",
    "split_inside",
]

DIRECTIVE_DEFAULT = "BB_LUA"
"""Default word after `#` in the directives of a Lua script."""


REQUESTS_REMEMBERED = 256
"""Requests that were read lately and need not be read again, count: those who submit in a loop submit the same one."""

REMEMBERED_CHARACTERS_MAX = 8_192
"""Characters of a request that is remembered: all of them take some 8 MiB at most, with what was read."""


class Reading(msgspec.Struct, frozen=True):
    """Parsed request of a job; `request` is None if it requests no buffer."""

    request: BufferRequest | None
    warnings: tuple[str, ...]


def read_request(
    script: str, bb: str = "", bbf: str = "", *, provider: str = NATIVE, directive: str = DIRECTIVE_DEFAULT
) -> Reading:
    """Return what script, `--bb` and the text of a `--bbf` file together ask for.

    `provider` and `directive` are the site's. Raises DirectiveRefused with the place and the remedy.
    """
    if len(script) + len(bb) + len(bbf) > REMEMBERED_CHARACTERS_MAX:
        return _read_request(script, bb, bbf, provider, directive)
    return _remembered(script, bb, bbf, provider, directive)


def _read_request(script: str, bb: str, bbf: str, provider: str, directive: str) -> Reading:
    warnings = Warnings()
    kinds = _kinds(provider, directive)
    asked = Asked(provider, warnings)
    refusals: list[Refusal] = []
    if bb:
        note_refusals(lambda: _read_command_line(bb, kinds, asked), refusals)
    if bbf:
        note_refusals(lambda: _read_file(bbf, kinds, asked), refusals)
    note_refusals(lambda: _read(find_directives(script, SCRIPT, kinds, warnings), asked), refusals)
    raise_noted(refusals)
    if not asked.kind:
        return Reading(None, tuple(warnings.lines))
    return Reading(asked.finish(), tuple(warnings.lines))


_remembered = lru_cache(REQUESTS_REMEMBERED)(_read_request)


def read_external_job_request(script: str, *, directive: str = DIRECTIVE_DEFAULT) -> Reading:
    """Return what a job asks for that Slurm schedules, whose directives begin with `#` and `directive`.

    After that word stands what `#DW` reads (`jobdw`, `stage_in`, `stage_out`), or `pool=` and `capacity=` alone. Raises
    DirectiveRefused with the place and the remedy.
    """
    if len(script) > REMEMBERED_CHARACTERS_MAX:
        return _read_external_job_request(script, directive)
    return _remembered_external_job(script, directive)


def _read_external_job_request(script: str, directive: str) -> Reading:
    asked = Asked(NATIVE, Warnings())
    read_external_job(script, directive, asked)
    return Reading(asked.finish() if asked.kind else None, tuple(asked.warnings.lines))


_remembered_external_job = lru_cache(REQUESTS_REMEMBERED)(_read_external_job_request)


def parse_request(script: str, bb: str = "", bbf: str = "") -> BufferRequest | None:
    """Return what the three together ask for on a native cluster, or None where none of them asks for anything.

    Raises DirectiveRefused with the place and the remedy.
    """
    return read_request(script, bb, bbf).request


def _kinds(provider: str, directive: str) -> Kinds:
    site = "#" + directive
    if provider_facts(provider).site_directive:
        return Kinds((site,), tuple(kind for kind in ("#DW", "#BB") if kind != site), by_prefix=True)
    if provider == NATIVE:
        instead = "write #DW jobdw, #DW stage_in and #DW stage_out; it is for clusters whose provider is lua"
        return Kinds(("#DW", "#BB"), (), {site: instead} if site not in ("#DW", "#BB") else {})
    return Kinds(("#DW", "#BB"), (site,) if site not in ("#DW", "#BB") else ())


def _read_file(text: str, kinds: Kinds, asked: Asked) -> None:
    found = find_directives(text, "--bbf", kinds, asked.warnings)
    if not found:
        raise DirectiveRefused(
            Refusal(
                RefusalCode.INVALID_DIRECTIVE,
                "the file of --bbf holds no directive",
                f"start its lines with {' or '.join(kinds.known)}",
                "--bbf line 1, column 1",
            )
        )
    _read(found, asked)


def _read(found: list[Directive], asked: Asked) -> None:
    """Read directives, each also where another one is refused; DirectiveRefused."""
    refusals: list[Refusal] = []
    for directive in found:
        note_refusals(partial(_read_one, directive, asked), refusals)
    raise_noted(refusals)


def _read_one(directive: Directive, asked: Asked) -> None:
    if asked.facts.site_directive:
        read_lua(directive, asked)
        return
    directive = replace(directive, words=without_comment(directive.words))
    if not directive.words:
        raise directive.at.refuse(
            f"{directive.kind} is followed by nothing", "write a directive, for example #DW jobdw capacity=10GiB"
        )
    if directive.kind == "#DW":
        asked.kind = asked.kind if asked.kind == "spur" else "dw"
        read_dw(directive, asked)
    else:
        asked.kind = asked.kind or "bb"
        read_bb(directive, asked)


def _read_command_line(text: str, kinds: Kinds, asked: Asked) -> None:
    """Read `--bb`: the lines of a script, or one of the two short forms."""
    check_length(text, "--bb")
    start = Word(text, "--bb", 1, 1)
    if text.startswith("#"):
        found = find_directives(text, "--bb", kinds, asked.warnings)
        if not found:
            listed = " or ".join(kinds.known)
            raise start.refuse("the text of --bb holds no directive", f"start it with {listed}")
        _read(found, asked)
        return
    if asked.facts.site_directive:
        listed = " or ".join(kinds.known)
        raise start.refuse(f"the text of --bb does not start with {listed}", f"write {listed} pool=… capacity=…")
    if is_spur(text):
        if asked.provider != NATIVE:
            raise start.refuse(
                f"the form with ; is not read by the provider {asked.provider}",
                "write capacity= pool= access= type= swap=",
            )
        read_spur(text, asked)
        return
    flat = text.replace("\r\n", "\n").replace("\n", " ")
    bad = control_offset(flat)
    if bad is not None:
        raise start.refuse(f"the text of --bb holds the character U+{ord(flat[bad]):04X}", "remove it", bad)
    words = tuple(split_words(flat, "--bb", 1))
    if not words:
        raise Word("", "--bb", 1, 1).refuse("the text of --bb is empty", "write for example capacity=10GiB")
    asked.kind = "bb"
    read_short(words, asked)
    if asked.capacity is not None and asked.capacity.unit == "bare" and asked.capacity_at is not None:
        asked.warnings.add(
            asked.capacity_at.place(),
            f"{shown(asked.capacity_at.text)} has no unit: bytes, or units of the pool (compare capacity=10GiB)",
        )
