"""What a job chose for single transfers: who moves the data, and whether the source goes when the copy is there.

Written as options of `#DW stage_in` and `#DW stage_out` (`backend=`, `move=`), kept among the options of the request
as `stage_out:2 move=yes`: the number counts the transfers of that stage in their order, `list2` those of what a file
lists.
"""

from __future__ import annotations

import msgspec

from replica.options import BufferOptions
from replica.transfers import BACKENDS

CHOOSABLE = tuple(backend for backend in BACKENDS if backend != "command")
"""What `backend=` may say; a command is written as `stage_in:COMMAND`."""

CHOICE_KEYS = ("backend", "move")


class TransferChoice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is special about one transfer."""

    backend: str = ""
    """One of CHOOSABLE; empty: the first that the site's rules name."""
    move: bool = False
    """Whether the source is deleted once its copy is durable."""


NO_CHOICE = TransferChoice()


def choice_verb(stage: str, index: int, *, listed: bool) -> str:
    """Return what stands before the option of a transfer, for example `stage_out:list2`."""
    return f"{stage}:{'list' if listed else ''}{index}"


def choices_of(options: BufferOptions | None, stage: str, count: int, *, listed: bool) -> tuple[TransferChoice, ...]:
    """Return the choice for each of the `count` transfers of a stage; empty where there is none at all."""
    if options is None or not any(option.startswith(stage + ":") for option in options.options):
        return ()
    chosen: dict[str, dict[str, str]] = {}
    for option in options.options:
        verb, _, text = option.partition(" ")
        key, _, value = text.partition("=")
        chosen.setdefault(verb, {})[key] = value
    choices = []
    for index in range(count):
        mine = chosen.get(choice_verb(stage, index, listed=listed), {})
        choices.append(TransferChoice(mine.get("backend", ""), mine.get("move") == "yes"))
    return tuple(choices) if any(choice != NO_CHOICE for choice in choices) else ()


def default_backend(backends: tuple[str, ...]) -> str:
    """Return what moves the data of a transfer that names nothing: the first that the rules allow and that can."""
    return next((backend for backend in backends if backend in CHOOSABLE), "native")
