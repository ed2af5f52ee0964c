"""`#BB` directives: create_persistent, destroy_persistent, and the older guide's `#BB capacity=…`."""

from __future__ import annotations

from replica.grammar.asked import Asked
from replica.grammar.lines import Directive
from replica.grammar.short import read_short
from replica.grammar.values import read_access, read_capacity, read_options, read_persistent_name, read_pool, read_type
from replica.grammar.words import Word, shown
from replica.model.job_options import CreatePersistent, DestroyPersistent
from replica.values.errors import RefusalCode

VERBS = ("create_persistent", "destroy_persistent")


def read_bb(directive: Directive, asked: Asked) -> None:
    """Read one `#BB` directive. Raises DirectiveRefused with line and column."""
    verb, rest = directive.words[0], directive.words[1:]
    if "=" in verb.text and asked.provider != "datawarp":
        read_short(directive.words, asked)
        return
    asked.lines.append(directive.text)
    if verb.text not in VERBS:
        raise verb.refuse(f"unknown directive {shown(verb.text)} of #BB", f"use one of {', '.join(VERBS)}")
    if verb.source == "--bb":
        raise verb.refuse(
            f"--bb may not contain {verb.text}", "put the directive into the script, or into a file for --bbf"
        )
    if verb.text == "create_persistent":
        _read_create(verb, rest, asked)
    else:
        _read_destroy(verb, rest, asked)


def _read_create(verb: Word, rest: tuple[Word, ...], asked: Asked) -> None:
    options = read_options(rest, ("name", "capacity", "access", "access_mode", "pool", "type"))
    known = options.known
    for key, example, code in (
        ("name", "name=alpha", RefusalCode.INVALID_DIRECTIVE),
        ("capacity", "capacity=10GiB", RefusalCode.INVALID_CAPACITY),
    ):
        if key not in known:
            raise verb.refuse(f"create_persistent has no {key}=", f"add {key}=, for example {example}", code=code)
    if "access" in known and "access_mode" in known:
        raise known["access_mode"].word.refuse("access= and access_mode= are both written", "write one of them")
    access = known.get("access") or known.get("access_mode")
    quantity = read_capacity(known["capacity"])
    record = CreatePersistent(
        name=read_persistent_name(known["name"]),
        capacity_bytes=quantity.value,
        pool=read_pool(known["pool"]) if "pool" in known else "",
        access=read_access(access) if access is not None else (),
        type=read_type(known["type"], cache=not asked.native) if "type" in known else "",
        place=known["capacity"].word.place(),
        units="count" if quantity.unit == "nodes" else quantity.unit,
    )
    asked.create(record, known["name"].word)
    asked.pass_on(verb.text, options.others)


def _read_destroy(verb: Word, rest: tuple[Word, ...], asked: Asked) -> None:
    hurries = [word for word in rest if word.text == "hurry"]
    if len(hurries) > 1:
        raise hurries[1].refuse("hurry is written twice", "write it once")
    options = read_options((word for word in rest if word.text != "hurry"), ("name",))
    if "name" not in options.known:
        raise verb.refuse("destroy_persistent has no name=", "add name=, for example name=alpha")
    name = options.known["name"]
    asked.destroy(DestroyPersistent(read_persistent_name(name), bool(hurries), name.word.place()), name.word)
    asked.pass_on(verb.text, options.others)
