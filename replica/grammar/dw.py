"""`#DW` directives: jobdw, swap, persistentdw, stage_in, stage_out.

With other providers, transfers are passed on unread to DataWarp's own tools. With the provider native they are parsed
completely, because Forebay's agents execute them.
"""

from __future__ import annotations

from forebay.replica.grammar.lexer import Directive, DirectiveWord, quoted_text
from forebay.replica.grammar.request import STAGES, RequestBuilder
from forebay.replica.grammar.values import (
    Options,
    OptionValue,
    did_you_mean,
    missing_capacity,
    read_capacity,
    read_options,
    read_persistent_name,
    read_pool,
)
from forebay.replica.grammar.variables import split_pattern
from forebay.replica.model import CHOICE_KEYS, CHOOSABLE, LINKS, ListTransfer, Transfer, TransferKind
from forebay.replica.values import RejectionCode

VERBS = ("jobdw", "persistentdw", "swap", *STAGES)
SPACE_KEYS = ("capacity", "pool", "type", "access_mode", "pfs")
STAGE_KEYS = ("type", "source", "destination", *CHOICE_KEYS)
COPIES = {"copy_in": "stage_in", "copy_out": "stage_out"}
"""Rabbit's directives, with those that they become."""

COPY_KEYS = ("source", "destination", "profile", *CHOICE_KEYS)
TRANSFER_TYPES = ("file", "directory", "list")

BARE_SWAP_BYTES = 1024**3
"""Unit of a swap size without a suffix, bytes: Slurm writes `swap=2` of --bb as `swap 2GiB`."""


def read_dw(directive: Directive, builder: RequestBuilder) -> None:
    """Read one `#DW` directive.

    Raises:
        DirectiveRejected: the directive is invalid; with line and column.
    """
    verb, rest = directive.words[0], directive.words[1:]
    builder.lines.append(directive.text)
    if verb.text == "jobdw":
        # Elsewhere a name may belong to another program: it is kept, with a warning.
        keys = (*SPACE_KEYS, "name") if builder.native and builder.paths.allows_names else SPACE_KEYS
        options = read_options(rest, keys, keep_bare=not builder.native)
        read_space(verb, options, builder, "access_mode")
    elif verb.text == "swap":
        _read_swap(verb, rest, builder)
    elif verb.text == "persistentdw":
        options = read_options(rest, ("name",), keep_bare=not builder.native)
        if "name" not in options.known:
            raise verb.rejection("persistentdw has no name=", "write #DW persistentdw name=…")
        builder.use(read_persistent_name(options.known["name"]), options.known["name"].word)
        builder.pass_on(verb.text, options.others)
    elif verb.text in STAGES:
        if builder.native:
            _read_stage(verb, rest, builder)
        else:
            builder.opaque_at = builder.opaque_at or verb
    elif verb.text in COPIES and builder.native:
        _read_copy(verb, rest, builder)
    elif verb.text in ("create_persistent", "destroy_persistent"):
        raise verb.rejection(f"{verb.text} is a directive of #BB, not of #DW", f"write #BB {verb.text}")
    else:
        known = (*VERBS, *COPIES) if builder.native else VERBS
        near = did_you_mean(verb.text, known)
        raise verb.rejection(
            f"unknown directive {quoted_text(verb.text)} of #DW", f"{near}use one of {', '.join(known)}"
        )


def read_space(verb: DirectiveWord, options: Options, builder: RequestBuilder, access_key: str) -> None:
    """Read the options of a request for a job's own buffer; `verb` is its first word."""
    known = options.known
    builder.begin_space(verb, known.get("name"))
    if "capacity" not in known:
        raise missing_capacity(verb, options)
    builder.add_capacity(read_capacity(known["capacity"]), known["capacity"])
    builder.set_pool(known.get("pool"), verb)
    if "type" in known:
        builder.type = builder.read_type(known["type"])
    if access_key in known:
        builder.access = tuple(dict.fromkeys((*builder.access, *builder.access_modes(known[access_key]))))
    if "pfs" in known:
        # Only DataWarp reads this option: it is passed on, and no field of the request has it.
        builder.options.append(("jobdw", known["pfs"].word.text))
        if builder.native:
            builder.warnings.add(known["pfs"].word.place(), "pfs= has no effect with the provider native")
    builder.pass_on("jobdw", options.others)


def _read_swap(verb: DirectiveWord, rest: tuple[DirectiveWord, ...], builder: RequestBuilder) -> None:
    if not rest or "=" in rest[0].text:
        raise verb.rejection("swap has no size", "write #DW swap 2GiB", code=RejectionCode.INVALID_CAPACITY)
    options = read_options(rest[1:], ("pool",), keep_bare=not builder.native)
    set_swap(verb, OptionValue(rest[0], rest[0].text, 0), options.known.get("pool"), builder)
    builder.pass_on(verb.text, options.others)


def set_swap(verb: DirectiveWord, size: OptionValue, pool: OptionValue | None, builder: RequestBuilder) -> None:
    """Set the swap of each node of the job."""
    builder.begin_swap(verb)
    quantity = read_capacity(size, BARE_SWAP_BYTES)
    if quantity.unit == "nodes":
        raise size.rejection(
            f"swap {quoted_text(size.text)} is a number of nodes",
            "write a size, for example 2GiB",
            0,
            RejectionCode.INVALID_CAPACITY,
        )
    if quantity.unit == "bare":
        builder.warnings.add(size.word.place(size.offset), f"swap {size.text} is read as {size.text}GiB, as in Slurm")
    builder.swap_bytes = quantity.value
    if pool is not None:
        builder.swap_pool = read_pool(pool)
        if builder.pool_at is None:
            builder.pool_at = pool.word


def _read_stage(verb: DirectiveWord, rest: tuple[DirectiveWord, ...], builder: RequestBuilder) -> None:
    stage = verb.text
    options = read_options(rest, STAGE_KEYS)
    known = options.known
    for key in ("type", "source", "destination"):
        if key not in known:
            raise verb.rejection(f"{stage} has no {key}=", f"write {stage} type=file source=… destination=…")
    kind, source, destination = known["type"], known["source"], known["destination"]
    if kind.text not in TRANSFER_TYPES:
        raise kind.rejection(
            f"the type of {stage} is {quoted_text(kind.text)}", "write type=file, type=directory or type=list"
        )
    outside, inside = (source, destination) if stage == "stage_in" else (destination, source)
    if kind.text == "list":
        _read_list(stage, verb, source, destination, builder)
    else:
        which = TransferKind.FILE if kind.text == "file" else TransferKind.DIRECTORY
        builder.move(stage, verb, _read_move(stage, which, source, destination, builder), outside.word, inside.word)
    _read_choices(stage, known, builder)
    builder.pass_on(stage, options.others)


def _read_copy(verb: DirectiveWord, rest: tuple[DirectiveWord, ...], builder: RequestBuilder) -> None:
    """Read Rabbit's `copy_in` or `copy_out`: a stage-in or stage-out of a file or a directory."""
    stage = COPIES[verb.text]
    options = read_options(rest, COPY_KEYS)
    known = options.known
    for key in ("source", "destination"):
        if key not in known:
            raise verb.rejection(f"{verb.text} has no {key}=", f"write {verb.text} source=… destination=…")
    source, destination = known["source"], known["destination"]
    named = split_pattern(source)
    if named is not None:
        raise source.rejection(
            f"the source of {verb.text} is a pattern", f"write {stage} type=file, or type=directory", named
        )
    transfer = _read_move(stage, TransferKind.EITHER, source, destination, builder)
    outside, inside = (source, destination) if stage == "stage_in" else (destination, source)
    builder.move(stage, verb, transfer, outside.word, inside.word)
    _read_choices(stage, known, builder)
    if "profile" in known:
        builder.warnings.add(
            known["profile"].word.place(), "profile= has no effect: the site decides how data is moved"
        )
    builder.pass_on(stage, options.others)


def _read_move(
    stage: str, kind: TransferKind, source: OptionValue, destination: OptionValue, builder: RequestBuilder
) -> Transfer:
    """Return a transfer of a file or a directory, or of those that match a pattern."""
    paths, named = builder.paths, split_pattern(source)
    if stage == "stage_in":
        outside, inside = paths.outside(source, named), paths.inside(destination)
    else:
        outside = paths.outside(destination)
        inside = paths.inside(source, named, is_file=kind is TransferKind.FILE)
    return Transfer(kind, outside, inside, "" if named is None else paths.pattern(source, named))


CHOICES = {"backend": CHOOSABLE, "move": ("yes", "no"), "links": LINKS, "acls": ("yes", "no")}


def _read_choices(stage: str, known: dict[str, OptionValue], builder: RequestBuilder) -> None:
    """Read the options of a single transfer."""
    for key in CHOICE_KEYS:
        if key not in known:
            continue
        value, allowed = known[key], CHOICES[key]
        if value.text not in allowed:
            raise value.rejection(f"{key}={value.text[:48]} is not possible", f"use one of {', '.join(allowed)}")
        if key == "move" and stage == "stage_in" and value.text == "yes":
            raise value.rejection(
                "move=yes would leave the only copy in the buffer, which is removed after the job",
                "leave it out: only stage_out can move files",
            )
        builder.choose(stage, f"{key}={value.text}", listed="type" in known and known["type"].text == "list")
    if "links" not in known or known["links"].text != "follow":
        return
    if "move" in known and known["move"].text == "yes":
        raise known["links"].rejection(
            "links=follow excludes move=yes: a link's target does not belong to this transfer", "leave out one of them"
        )
    if "backend" in known and known["backend"].text != "native":
        raise known["links"].rejection(
            f"links=follow and backend={known['backend'].text}: only Forebay itself follows links, and never out of "
            "the directories that may be used",
            "leave out one of them",
        )


def _read_list(
    stage: str, verb: DirectiveWord, source: OptionValue, destination: OptionValue, builder: RequestBuilder
) -> None:
    """Read a transfer of a list, which is a file outside. Files that it names go below the destination."""
    named = split_pattern(source)
    if named is not None:
        raise source.rejection(
            "the path of a list is a pattern, but one file holds the list",
            "write type=file to stage what matches, or \\\\ before the path if it is the file's name",
            named,
        )
    path = builder.paths.outside(source)
    if stage == "stage_out":
        target = builder.paths.outside(destination)
    else:
        target = builder.paths.inside(destination)
        builder.list_insides.append((destination.word, target))
    record = ListTransfer(stage == "stage_out", path, target, source.word.place())
    builder.move_list(stage, verb, record)
