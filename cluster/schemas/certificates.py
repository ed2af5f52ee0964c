"""Schemas of certificate revocation."""

from typing import Annotated

import msgspec

from forebay.cluster.schemas.base import Answer, Command, View
from forebay.replica.values import MESSAGE_CHARACTERS_MAX


class RevocationRequest(Command, frozen=True, kw_only=True):
    """Body of PUT /v1/revocations/{certificate}."""

    reason: Annotated[str, msgspec.Meta(max_length=MESSAGE_CHARACTERS_MAX)] = ""
    valid_until: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    """Expiry of the certificate, ISO 8601 with a zone; the entry can be dropped then. Default: the latest expiry of any
    certificate issued so far, or never for all certificates of a holder.
    """


class RevocationView(View, frozen=True, kw_only=True):
    """Entry of the revocation list."""

    certificate: str
    """`serial:1f2e…` for one certificate; `user:alan`, `agent:n1`, `replica:r1`, `operator:op` or `scheduler:slurm`
    for all certificates of a holder.
    """
    reason: str
    by: str
    at: str | None
    until: str | None
    """Time the entry can be dropped; null: only when an operator removes it."""


class RevocationsAnswer(Answer, frozen=True, kw_only=True):
    """Response with revoked certificates."""

    revocations: tuple[RevocationView, ...]
