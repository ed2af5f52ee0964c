"""`#BB` directives: create_persistent, destroy_persistent, and the older guide's `#BB capacity=…`."""

from __future__ import annotations

from forebay.replica.grammar.dw import BARE_SWAP_BYTES, read_space, set_swap
from forebay.replica.grammar.lexer import Directive, DirectiveWord, quoted_text
from forebay.replica.grammar.request import RequestBuilder
from forebay.replica.grammar.values import (
    Options,
    did_you_mean,
    read_capacity,
    read_options,
    read_persistent_name,
    read_pool,
    read_type,
)
from forebay.replica.model import CreatePersistent, DestroyPersistent
from forebay.replica.values import Quantity, RejectionCode, format_size, parse_quantity

VERBS = ("create_persistent", "destroy_persistent")


def read_bb(directive: Directive, builder: RequestBuilder) -> None:
    """Read one `#BB` directive.

    Raises:
        DirectiveRejected: the directive is invalid; with line and column.
    """
    verb, rest = directive.words[0], directive.words[1:]
    if "=" in verb.text and builder.facts.short_bb:
        read_short(directive.words, builder)
        return
    builder.lines.append(directive.text)
    if verb.text not in VERBS:
        near = did_you_mean(verb.text, VERBS)
        raise verb.rejection(
            f"unknown directive {quoted_text(verb.text)} of #BB", f"{near}use one of {', '.join(VERBS)}"
        )
    if verb.source == "--bb":
        raise verb.rejection(
            f"--bb may not contain {verb.text}", "put the directive into the script, or into a file for --bbf"
        )
    if verb.text == "create_persistent":
        _read_create(verb, rest, builder)
    else:
        _read_destroy(verb, rest, builder)


def _read_create(verb: DirectiveWord, rest: tuple[DirectiveWord, ...], builder: RequestBuilder) -> None:
    known_keys = ("name", "capacity", "access", "access_mode", "pool", "type")
    options = read_options(rest, known_keys, keep_bare=not builder.native)
    known = options.known
    for key, example, code in (
        ("name", "name=alpha", RejectionCode.INVALID_DIRECTIVE),
        ("capacity", "capacity=10GiB", RejectionCode.INVALID_CAPACITY),
    ):
        if key not in known:
            raise verb.rejection(f"create_persistent has no {key}=", f"add {key}=, for example {example}", code=code)
    if "access" in known and "access_mode" in known:
        raise known["access_mode"].word.rejection("access= and access_mode= are both written", "write one of them")
    access = known.get("access") or known.get("access_mode")
    quantity = read_capacity(known["capacity"])
    record = CreatePersistent(
        name=read_persistent_name(known["name"]),
        capacity_bytes=quantity.value,
        pool=read_pool(known["pool"]) if "pool" in known else "",
        access=builder.access_modes(access) if access is not None else (),
        type=read_type(known["type"], builder.native) if "type" in known else "",
        place=known["capacity"].word.place(),
        units="count" if quantity.unit == "nodes" else quantity.unit,
        access_text="" if access is None or builder.native else access.text,
    )
    builder.create(record, known["name"].word)
    builder.pass_on(verb.text, options.others)


def _read_destroy(verb: DirectiveWord, rest: tuple[DirectiveWord, ...], builder: RequestBuilder) -> None:
    hurries = [word for word in rest if word.text == "hurry"]
    if len(hurries) > 1:
        raise hurries[1].rejection("hurry is written twice", "write it once")
    rest = tuple(word for word in rest if word.text != "hurry")
    options = read_options(rest, ("name",), keep_bare=not builder.native)
    if "name" not in options.known:
        raise verb.rejection("destroy_persistent has no name=", "add name=, for example name=alpha")
    name = options.known["name"]
    builder.destroy(DestroyPersistent(read_persistent_name(name), bool(hurries), name.word.place()), name.word)
    builder.pass_on(verb.text, options.others)


# ---- the short form of `--bb`, equivalent to `#DW` directives: `access= capacity= swap= type= pool=`


KEYS = ("capacity", "pool", "access", "type", "swap")


def read_short(words: tuple[DirectiveWord, ...], builder: RequestBuilder) -> None:
    """Read the short form of `--bb`. Unknown options are rejected, because its grammar is closed.

    Raises:
        DirectiveRejected: the text is invalid; with the column.
    """
    for word in words:
        if word.text in ("create_persistent", "destroy_persistent"):
            raise word.rejection(
                f"--bb may not contain {word.text}", "put #BB directives into the script, or into a file for --bbf"
            )
    options = read_options(words, KEYS, keep_others=False)
    known = options.known
    if "capacity" in known or "swap" not in known:
        space = {key: value for key, value in known.items() if key != "swap"}
        read_space(words[0], Options(space), builder, "access")
    else:
        for key in ("access", "type"):
            if key in known:
                raise known[key].word.rejection(
                    f"{key}= has no effect without capacity=", "add capacity=", code=RejectionCode.INVALID_CAPACITY
                )
    if "swap" in known:
        set_swap(known["swap"].word, known["swap"], known.get("pool"), builder)
    builder.lines.extend(_as_dw_directives(options))


def _as_dw_directives(options: Options) -> list[str]:
    """Return the directives equivalent to the short form, as Slurm writes them."""
    texts = {key: value.text for key, value in options.known.items()}
    pool = f" pool={texts['pool']}" if "pool" in texts else ""
    lines = []
    if "swap" in texts:
        lines.append(f"#DW swap {format_bytes(parse_quantity(texts['swap'], BARE_SWAP_BYTES).value)}{pool}")
    if "capacity" in texts:
        access = f" access_mode={texts['access']}" if "access" in texts else ""
        kind = f" type={texts['type']}" if "type" in texts else ""
        lines.append(f"#DW jobdw capacity={format_quantity(parse_quantity(texts['capacity']))}{pool}{access}{kind}")
    return lines


def format_quantity(quantity: Quantity) -> str:
    """Format a capacity for a directive; a number without a suffix keeps none."""
    if quantity.unit == "bytes":
        return format_bytes(quantity.value)
    return f"{quantity.value}{'N' if quantity.unit == 'nodes' else ''}"


def format_bytes(size_bytes: int) -> str:
    """Format a size, always with a suffix: a bare number would mean GiB for swap, and units for a capacity."""
    text = format_size(size_bytes)
    return f"{size_bytes // 1000}.{size_bytes % 1000:03}KB" if text.isdigit() else text
