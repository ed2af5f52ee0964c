"""What the log's lines of a worker look like: one line for one thing, whatever a site's program wrote in it."""

from __future__ import annotations

import logging
import sys
from typing import Final

LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_stderr(whose: str = "") -> None:
    """Have this process log to its standard error, which is that of whoever started it; `whose` begins each message."""
    shown = whose.replace("%", "%%")
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=LOG_FORMAT.replace("%(message)s", f"{shown}%(message)s")
    )
