"""The answer of GET /v1/bbstat."""

from __future__ import annotations

from cluster.client.views import View


class ProviderStatus(View, frozen=True, kw_only=True):
    """What the site's burst-buffer provider says of itself."""

    revision: int
    text: str
