"""What the proposer of a replica has done."""

from __future__ import annotations

from collections import Counter

import msgspec


class Counts(msgspec.Struct):
    """What the proposer has done since the process started."""

    batches: int = 0
    commands: int = 0
    receipts_answered: int = 0
    queue_full: int = 0
    outcomes_unknown: int = 0
    refusals: Counter[str] = msgspec.field(default_factory=Counter)
