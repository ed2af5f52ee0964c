"""Parser of a job's burst-buffer request: directives of a script, `--bb` and `--bbf`.

Known directives are parsed exactly. Others are rejected with line and column; options that another program may know are
kept with a warning. Nothing is ignored silently. Pools, users and job IDs are unknown here; they are checked when the
job is decided. Sources: the burst buffer guides, SEMANTICS.md, SPUR.md.
"""

from __future__ import annotations

from functools import lru_cache, partial

import msgspec
from msgspec.structs import replace

from forebay.replica.grammar.bb import read_bb, read_short
from forebay.replica.grammar.dw import read_dw
from forebay.replica.grammar.lexer import (
    SCRIPT,
    Directive,
    DirectiveKinds,
    DirectiveRejected,
    DirectiveWord,
    RequestWarnings,
    check_length,
    collect_rejections,
    control_offset,
    find_directives,
    quoted_text,
    raise_collected,
    split_words,
)
from forebay.replica.grammar.lua import read_lua
from forebay.replica.grammar.paths import INSIDE_VARIABLES, path_fault, split_inside
from forebay.replica.grammar.request import RequestBuilder
from forebay.replica.grammar.slurm import read_external_job
from forebay.replica.grammar.spur import is_spur, read_spur
from forebay.replica.grammar.values import strip_comment
from forebay.replica.grammar.variables import NO_VARIABLES, PathVariables
from forebay.replica.model import NATIVE, BufferRequest, provider_facts
from forebay.replica.values import Rejection, RejectionCode

__all__ = [
    "INSIDE_VARIABLES",
    "DirectiveRejected",
    "ParsedRequest",
    "parse_request",
    "path_fault",
    "read_external_job_request",
    "read_request",
    "split_inside",
]

DIRECTIVE_DEFAULT = "BB_LUA"
"""Default word after `#` in the directives of a Lua script."""


REQUESTS_REMEMBERED = 256
"""Cached requests, count: programs that submit in a loop submit the same one."""

REMEMBERED_CHARACTERS_MAX = 8_192
"""Maximum length of a cached request, characters: the cache takes at most some 8 MiB, with the results."""


class ParsedRequest(msgspec.Struct, frozen=True):
    """Parsed request of a job; `request` is None if it requests no buffer."""

    request: BufferRequest | None
    warnings: tuple[str, ...]


def read_request(
    script: str,
    bb: str = "",
    bbf: str = "",
    *,
    provider: str = NATIVE,
    directive: str = DIRECTIVE_DEFAULT,
    variables: PathVariables = NO_VARIABLES,
) -> ParsedRequest:
    """Return the request in a script, `--bb` and the text of a `--bbf` file together.

    `provider` and `directive` are the site's; `variables` are those that paths may contain.

    Raises:
        DirectiveRejected: the request is invalid; with the place and the remedy.
    """
    if "$" not in script and "$" not in bb and "$" not in bbf:
        # One cached result for all values.
        variables = replace(NO_VARIABLES, by_scheduler=variables.by_scheduler)
    if len(script) + len(bb) + len(bbf) > REMEMBERED_CHARACTERS_MAX:
        return _read_request(script, bb, bbf, provider, directive, variables)
    return _read_request_cached(script, bb, bbf, provider, directive, variables)


def _read_request(
    script: str, bb: str, bbf: str, provider: str, directive: str, variables: PathVariables
) -> ParsedRequest:
    warnings = RequestWarnings()
    kinds = _kinds(provider, directive)
    builder = RequestBuilder(provider, warnings, variables)
    rejections: list[Rejection] = []
    if bb:
        collect_rejections(lambda: _read_command_line(bb, kinds, builder), rejections)
    if bbf:
        collect_rejections(lambda: _read_file(bbf, kinds, builder), rejections)
    collect_rejections(lambda: _read(find_directives(script, SCRIPT, kinds, warnings), builder), rejections)
    raise_collected(rejections)
    if not builder.kind:
        return ParsedRequest(None, tuple(warnings.lines))
    return ParsedRequest(builder.finish(), tuple(warnings.lines))


_read_request_cached = lru_cache(REQUESTS_REMEMBERED)(_read_request)


def read_external_job_request(
    script: str, *, directive: str = DIRECTIVE_DEFAULT, variables: PathVariables = NO_VARIABLES
) -> ParsedRequest:
    """Return the request of a job that Slurm schedules, whose directives begin with `#` and `directive`.

    The word is followed by what `#DW` accepts (`jobdw`, `stage_in`, `stage_out`), or by `pool=` and `capacity=` alone.

    Raises:
        DirectiveRejected: the request is invalid; with the place and the remedy.
    """
    if len(script) > REMEMBERED_CHARACTERS_MAX:
        return _read_external_job_request(script, directive, variables)
    return _read_external_job_request_cached(script, directive, variables)


def _read_external_job_request(script: str, directive: str, variables: PathVariables) -> ParsedRequest:
    builder = RequestBuilder(NATIVE, RequestWarnings(), variables)
    read_external_job(script, directive, builder)
    return ParsedRequest(builder.finish() if builder.kind else None, tuple(builder.warnings.lines))


_read_external_job_request_cached = lru_cache(REQUESTS_REMEMBERED)(_read_external_job_request)


def parse_request(script: str, bb: str = "", bbf: str = "") -> BufferRequest | None:
    """Return the request of the three sources on a native cluster, or None if they request no buffer.

    Raises:
        DirectiveRejected: the request is invalid; with the place and the remedy.
    """
    return read_request(script, bb, bbf).request


def _kinds(provider: str, directive: str) -> DirectiveKinds:
    site = "#" + directive
    if provider_facts(provider).site_directive:
        return DirectiveKinds((site,), tuple(kind for kind in ("#DW", "#BB") if kind != site), by_prefix=True)
    if provider == NATIVE:
        instead = "write #DW jobdw, #DW stage_in and #DW stage_out; it is for clusters whose provider is lua"
        return DirectiveKinds(("#DW", "#BB"), (), {site: instead} if site not in ("#DW", "#BB") else {})
    return DirectiveKinds(("#DW", "#BB"), (site,) if site not in ("#DW", "#BB") else ())


def _read_file(text: str, kinds: DirectiveKinds, builder: RequestBuilder) -> None:
    found = find_directives(text, "--bbf", kinds, builder.warnings)
    if not found:
        raise DirectiveRejected(
            Rejection(
                RejectionCode.INVALID_DIRECTIVE,
                "the file of --bbf contains no directive",
                f"start its lines with {' or '.join(kinds.known)}",
                "--bbf line 1, column 1",
            )
        )
    _read(found, builder)


def _read(found: list[Directive], builder: RequestBuilder) -> None:
    """Read all directives, and reject the invalid ones together.

    Raises:
        DirectiveRejected: a directive is invalid.
    """
    rejections: list[Rejection] = []
    for directive in found:
        collect_rejections(partial(_read_one, directive, builder), rejections)
    raise_collected(rejections)


def _read_one(directive: Directive, builder: RequestBuilder) -> None:
    if builder.facts.site_directive:
        read_lua(directive, builder)
        return
    directive = replace(directive, words=strip_comment(directive.words))
    if not directive.words:
        raise directive.at.rejection(
            f"{directive.kind} has no directive after it", "write a directive, for example #DW jobdw capacity=10GiB"
        )
    if directive.kind == "#DW":
        builder.kind = builder.kind if builder.kind == "spur" else "dw"
        read_dw(directive, builder)
    else:
        builder.kind = builder.kind or "bb"
        read_bb(directive, builder)


def _read_command_line(text: str, kinds: DirectiveKinds, builder: RequestBuilder) -> None:
    """Read `--bb`: directives, or one of the two short forms."""
    check_length(text, "--bb")
    start = DirectiveWord(text, "--bb", 1, 1)
    if text.startswith("#"):
        found = find_directives(text, "--bb", kinds, builder.warnings)
        if not found:
            listed = " or ".join(kinds.known)
            raise start.rejection("the text of --bb contains no directive", f"start it with {listed}")
        _read(found, builder)
        return
    if builder.facts.site_directive:
        listed = " or ".join(kinds.known)
        raise start.rejection(f"the text of --bb does not start with {listed}", f"write {listed} pool=… capacity=…")
    if is_spur(text):
        if builder.provider != NATIVE:
            raise start.rejection(
                f"the provider {builder.provider} does not support the form with ;",
                "write capacity= pool= access= type= swap=",
            )
        read_spur(text, builder)
        return
    flat = text.replace("\r\n", "\n").replace("\n", " ")
    bad = control_offset(flat)
    if bad is not None:
        raise start.rejection(f"the text of --bb contains the character U+{ord(flat[bad]):04X}", "remove it", bad)
    words = tuple(split_words(flat, "--bb", 1))
    if not words:
        raise DirectiveWord("", "--bb", 1, 1).rejection("the text of --bb is empty", "write for example capacity=10GiB")
    builder.kind = "bb"
    read_short(words, builder)
    if builder.capacity is not None and builder.capacity.unit == "bare" and builder.capacity_at is not None:
        builder.warnings.add(
            builder.capacity_at.place(),
            f"{quoted_text(builder.capacity_at.text)} has no unit: bytes, or units of the pool "
            "(compare capacity=10GiB)",
        )
