"""The operations that agents perform for buffers."""

from __future__ import annotations

from enum import IntEnum


class Stage(IntEnum):
    """An operation that an agent performs for a buffer; the numbers are wire numbers."""

    STAGE_IN = 1
    RUN = 2
    POST_RUN = 3
    STAGE_OUT = 4
    TEARDOWN = 5

    @property
    def word(self) -> str:
        """As in orders and reports, for example `stage_in`."""
        return self.name.lower()
