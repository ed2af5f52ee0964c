"""Schedule of campaigns: tests marked `campaign(days)` that are too expensive for every day."""

import zlib


def is_due_on(day: int, days: int, group: str, position: int) -> bool:
    """Return whether a test runs on a day: once in `days` days. The tests of a group take turns by their position."""
    return (day + zlib.crc32(group.encode()) + position) % days == 0
