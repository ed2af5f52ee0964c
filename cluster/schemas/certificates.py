"""Bodies and answers about revoked certificates."""

from typing import Annotated

import msgspec

from cluster.schemas.base import Answer, Command, View
from replica.values import MESSAGE_CHARACTERS_MAX


class RevocationRequest(Command, frozen=True, kw_only=True):
    """Body of PUT /v1/revocations/{certificate}."""

    reason: Annotated[str, msgspec.Meta(max_length=MESSAGE_CHARACTERS_MAX)] = ""
    valid_until: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    """When the certificate expires, ISO 8601 with a zone; the entry can go then. Without: when any that is issued by
    now does, or never for a holder."""


class RevocationView(View, frozen=True, kw_only=True):
    """One entry of the list."""

    certificate: str
    """`serial:1f2e…` for one certificate; `user:alan`, `agent:n1`, `replica:r1`, `operator:op`, and
    `scheduler:slurm` for all of a holder."""
    reason: str
    by: str
    at: str | None
    until: str | None
    """When the entry can go; null: when somebody takes it off the list."""


class RevocationsAnswer(Answer, frozen=True, kw_only=True):
    """Answer about revoked certificates."""

    revocations: tuple[RevocationView, ...]
