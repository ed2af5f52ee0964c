"""What happened, read to its end: an answer is a stretch of it, which ends where looking took too long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from cluster.schemas import operations as ops

if TYPE_CHECKING:
    from cluster.client.client import Client
    from cluster.schemas import StoryAnswer


async def read_event_pages(client: Client, after: int | None = None, **asked: Any) -> AsyncIterator[StoryAnswer]:
    """Yield the answers of GET /v1/history, oldest first, until one has read up to the last revision that there was.

    Whoever asks once knows less than there is. `after` is the revision behind which to begin; ApiError.
    """
    while True:
        answer = await client.call(ops.SHOW_HISTORY, **asked, after=after)
        yield answer
        if answer.read >= answer.last:
            return
        after = answer.read
