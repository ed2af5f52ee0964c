"""A log line that others can cause as often as they like: written once in a while, with the count of those left out."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

PERIOD_S: Final = 10.0
"""Seconds between two lines of one kind."""


class LimitedLog:
    """One kind of line, written at most once in `PERIOD_S`, by the clock of the running loop."""

    def __init__(self, logger: logging.Logger, level: int) -> None:
        self._logger = logger
        self._level = level
        self._next_s = float("-inf")
        self._left_out = 0

    def write(self, sentence: str, *values: object, fault: BaseException | None = None) -> None:
        """Log a sentence with its values, and the traceback of a fault; or count it, if one was logged just now."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_s:
            self._left_out += 1
            return
        more = f" ({self._left_out} more since the last such line)" if self._left_out else ""
        self._next_s, self._left_out = now_s + PERIOD_S, 0
        self._logger.log(self._level, sentence + "%s", *values, more, exc_info=fault)
