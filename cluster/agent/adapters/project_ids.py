"""IDs of Forebay's projects, for filesystems that limit directories by project ID."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

LEAST: Final = 1 << 30
"""Project IDs below this are left to a site's /etc/projid."""

PROBES_MAX: Final = 256
"""IDs tried until one is free, count: as many consecutive IDs would have to belong to other agents' buffers."""


def candidates(seed: str) -> Iterator[int]:
    """Yield the IDs to try for a buffer, the same on every machine."""
    first = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big") % LEAST
    for step in range(PROBES_MAX):
        yield LEAST + (first + step) % LEAST
