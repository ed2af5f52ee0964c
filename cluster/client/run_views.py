"""The JSON shapes of what is done to runs and stuck buffers."""

from __future__ import annotations

from cluster.client.requests import Command
from cluster.client.views import View


class SuspendRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/jobs/{id}/suspend."""


class ContinueRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/jobs/{id}/resume."""


class RequeueRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/jobs/{id}/requeue."""


class ClearRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/jobs/{id}/clear and /v1/persistent/{name}/clear. `discard`: also where the only copy of data is
    lost by it.
    """

    discard: bool = False


class PersistentCleared(View, frozen=True, kw_only=True):
    """A persistent buffer that left the list."""

    revision: int
    name: str
