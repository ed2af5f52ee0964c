"""What the log's lines of a worker look like: one line for one thing, whatever a site's program wrote in it."""

from __future__ import annotations

import logging
import sys
from typing import Final

LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def one_line(text: str) -> str:
    """Return the text with each character that is not printable as an escape: it can neither begin a line of its own
    nor tell a terminal anything."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def log_to_stderr(whose: str = "") -> None:
    """Have this process log to its standard error, which is that of whoever started it; `whose` begins each message."""
    shown = whose.replace("%", "%%")
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=LOG_FORMAT.replace("%(message)s", f"{shown}%(message)s")
    )
