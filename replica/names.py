"""Names: what users, pools, nodes and jobs may be called."""

from __future__ import annotations

import re

from replica.limits import NAME_CHARACTERS_MAX

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


def name_fault(name: str) -> str | None:
    """Return what is wrong with a name, in words that follow `the … name `, or None."""
    if not name:
        return "is empty"
    if len(name) > NAME_CHARACTERS_MAX:
        return f"is longer than {NAME_CHARACTERS_MAX} characters"
    if _NAME.fullmatch(name) is None:
        return f"{name!r} has a character other than letters, digits, _ . + - (and starts with a letter, digit or _)"
    return None


class UnknownSymbol(ValueError):
    """A `%` symbol that does not exist or has no meaning here."""


def expand_symbols(
    text: str, *, job: int, user: str, name: str, workdir: str, array_job: int = 0, array_task: int = 0
) -> str:
    """Return `text` with Slurm's symbols replaced: %% %A %a %d %j %u %x; `\\\\` stops it and is removed.

    `array_job` 0: the job is no task of an array, `%a` means nothing and `%A` the job. Raises UnknownSymbol. Source:
    the burst buffer guide, Symbol Replacement.
    """
    values = {"%": "%", "A": str(array_job or job), "d": workdir, "j": str(job), "u": user, "x": name}
    if array_job:
        values["a"] = str(array_task)
    head, stop, tail = text.partition("\\\\")
    parts: list[str] = []
    position = 0
    while position < len(head):
        if head[position] != "%":
            parts.append(head[position])
            position += 1
            continue
        symbol = head[position + 1 : position + 2]
        if symbol not in values or not symbol:
            raise UnknownSymbol(f"%{symbol}")
        parts.append(values[symbol])
        position += 2
    return "".join(parts) + (tail if stop else "")
