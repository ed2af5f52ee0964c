"""Spur's form of `--bb`, separated by `;`: `capacity=N`, `stage_in:<command>`, `stage_out:<command>`.

Capacities add up, in GiB unless a unit is written. Commands are kept as written, one per line. Source: SPUR.md.
"""

from __future__ import annotations

from forebay.replica.grammar.lexer import DirectiveWord, control_offset, quoted_text
from forebay.replica.grammar.request import STAGES, RequestBuilder
from forebay.replica.grammar.values import OptionValue, read_capacity
from forebay.replica.values import SIZE_BYTES_MAX, Quantity, RejectionCode

BARE_BYTES = 1024**3
"""Unit of a capacity without a suffix, bytes."""

_FORM = "write capacity=10GiB, stage_in:COMMAND and stage_out:COMMAND, separated by ;"


def is_spur(text: str) -> bool:
    """Return whether a text of `--bb` is in Spur's form, not in Slurm's short one."""
    return not text.startswith("#") and (";" in text or text.lstrip(" \t").startswith(("stage_in:", "stage_out:")))


def read_spur(text: str, builder: RequestBuilder) -> None:
    """Read a text of `--bb` in Spur's form.

    Raises:
        DirectiveRejected: the text is invalid; with the column.
    """
    bad = control_offset(text)
    if bad is not None:
        raise DirectiveWord(text, "--bb", 1, 1).rejection(
            f"the text of --bb contains the character U+{ord(text[bad]):04X}", "remove it", bad
        )
    builder.kind = "spur"
    builder.lines.append(text.strip(" \t"))
    pieces = text.split(";")
    position = 0
    for index, piece in enumerate(pieces):
        stripped = piece.strip(" \t")
        at = DirectiveWord(stripped, "--bb", 1, position + len(piece) - len(piece.lstrip(" \t")) + 1)
        position += len(piece) + 1
        if not stripped:
            if index == len(pieces) - 1 and any(before.strip(" \t") for before in pieces[:-1]):
                continue
            raise at.rejection("there is nothing between the separators", _FORM)
        _read_piece(at, builder)


def _read_piece(at: DirectiveWord, builder: RequestBuilder) -> None:
    stage, colon, command = at.text.partition(":")
    if colon and stage in STAGES:
        offset = len(stage) + 1 + len(command) - len(command.lstrip(" \t"))
        if not command.strip(" \t"):
            raise at.rejection(f"{stage}: has no command", f"write {stage}:COMMAND", min(offset, len(at.text)))
        builder.commands[stage].append(command.strip(" \t"))
        return
    key, equals, value = at.text.partition("=")
    if key != "capacity" or not equals:
        raise at.rejection(f"{quoted_text(at.text)} is not part of a request", _FORM)
    if not value:
        raise at.rejection("capacity= is empty", "write a value after capacity=", len(key) + 1)
    _add_capacity(OptionValue(at, value, len(key) + 1), builder)


def _add_capacity(value: OptionValue, builder: RequestBuilder) -> None:
    more = read_capacity(value, BARE_BYTES)
    if more.unit == "nodes":
        raise value.rejection(
            "this form does not support a capacity in nodes", "write a size", 0, RejectionCode.INVALID_CAPACITY
        )
    total = more.value + (0 if builder.capacity is None else builder.capacity.value)
    if total > SIZE_BYTES_MAX:
        raise value.rejection("the capacities together overflow", "request less", 0, RejectionCode.INVALID_CAPACITY)
    if builder.capacity is None:
        builder.begin_space(value.word)
        builder.capacity_at = value.word
    builder.capacity = Quantity(total, "bytes")
