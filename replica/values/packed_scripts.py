"""Scripts that are too long for the ledger as they are: how one is kept in fewer bytes, and how many it may have.

The comment lines at the top stay as they are, with every directive at its line and column. Then comes a line with
PACKED_MARK, and the rest in one line of base85. Who submits a script packs it, and whoever runs it unpacks it
(`cluster.schemas`): what is between them sees text.
"""

from __future__ import annotations

from replica.values.limits import PACKED_HEAD_BYTES_MAX, PACKED_SCRIPT_BYTES_MAX, SCRIPT_BYTES_MAX
from replica.values.patterns import Pattern

PACKED_MARK = "\n: This script is packed. Run it with an agent of Forebay that unpacks it.\n"
"""What stands between the head of a packed script and its rest: a command without effect to a shell."""

_BASE85 = Pattern(r"[0-9A-Za-z!#$%&()*+;<=>?@^_`{|}~-]*\n?")


def split_packed(script: str) -> tuple[str, str] | None:
    """Return the head of a packed script, which ends with a newline, and its rest in base85; None if it is none.

    Base85 has no character that JSON escapes, so a packed script is not longer where it is sent.
    """
    at = script.find(PACKED_MARK, 0, PACKED_HEAD_BYTES_MAX + len(PACKED_MARK))
    if at < 0:
        return None
    rest = script[at + len(PACKED_MARK) :]
    return (script[: at + 1], rest) if _BASE85.fullmatch(rest) else None


def script_bytes_max(script: str) -> int:
    """Return how many bytes a script may have that comes in this form."""
    return PACKED_SCRIPT_BYTES_MAX if PACKED_MARK in script and split_packed(script) is not None else SCRIPT_BYTES_MAX
