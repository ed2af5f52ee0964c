"""Reader of the event history, page by page. A page ends early if the search takes too long."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from forebay.cluster.schemas import operations as ops

if TYPE_CHECKING:
    from forebay.cluster.client.client import Client
    from forebay.cluster.schemas import StoryAnswer


async def read_event_pages(client: Client, after: int | None = None, **asked: Any) -> AsyncIterator[StoryAnswer]:
    """Yield the pages of GET /v1/history after revision `after`, oldest first, up to the last existing revision.

    A single request may return only part of the history.
    """
    while True:
        answer = await client.call(ops.SHOW_HISTORY, **asked, after=after)
        yield answer
        if answer.read >= answer.last:
            return
        after = answer.read
