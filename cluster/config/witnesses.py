"""Tables `[[witness]]` and `[checkpoints]`: witnesses that cosign checkpoints, and the required number of cosignatures.

The tables are not replicated: every replica needs the same ones. The leader sends the requests.
"""

from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from forebay.cluster.config.https_urls import https_fault
from forebay.cluster.config.toml import Document, InvalidValue, Name, Text, Written
from forebay.cluster.security.proofs import COSIGNATURE_KEY, NoteError, VerifierKey, parse_key

WITNESSES_MAX: Final = 16
"""Maximum number of witnesses of a cluster: a note has space for their signatures and those of nine replicas."""


class WitnessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Witness: its display name, its address, and the key that verifies its cosignatures."""

    name: Annotated[Written[Name], Meta(examples=["security"])]
    url: Annotated[Text, Meta(examples=["https://witness.example.org:7600"])]
    """Submission prefix; requests go to this address with `/add-checkpoint` appended."""
    key: Annotated[Text, Meta(examples=["what `forebay audit witness key` printed"])]
    authority: Path | None = None
    """Issuer of its certificate; None for the system's authorities."""

    def __post_init__(self) -> None:
        """Check key and address.

        Raises:
            InvalidValue: One of them is invalid.
        """
        try:
            if parse_key(self.key).kind != COSIGNATURE_KEY:
                raise NoteError("it is the key of a log, not of a witness")
        except NoteError as error:
            remedy = "write the line that `forebay audit witness key` printed"
            raise InvalidValue(f"this is not a witness key: {error}", remedy, "key") from error
        force_setattr(self, "url", self.url.rstrip("/"))
        sentence = https_fault(self.url, "whose answers could be forged without HTTPS")
        if sentence:
            remedy = "write https://HOST:PORT; http:// only for a proxy on this machine"
            raise InvalidValue(sentence, remedy, "url")

    @property
    def verifier(self) -> VerifierKey:
        """Parsed key."""
        return parse_key(self.key)


class CheckpointsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requirements of a witnessed checkpoint."""

    witnesses_needed: Annotated[int, Meta(ge=0, le=WITNESSES_MAX)] = 0
    """Required number of cosignatures; 0, the default, means a majority of the witnesses."""

    def required_cosignatures(self, witnesses: int) -> int:
        """Return the required cosignatures for this number of witnesses; 0 if there are none."""
        return self.witnesses_needed or (witnesses // 2 + 1 if witnesses else 0)


def check_witnesses(document: Document, witnesses: tuple[WitnessConfig, ...], checkpoints: CheckpointsConfig) -> None:
    """Check that the witnesses are unique, and that there are as many as required.

    Raises:
        ConfigError: A witness is listed twice, or too many are required.
    """
    for field in ("name", "url", "key"):
        taken: dict[str, int] = {}
        for number, one in enumerate(witnesses):
            value = getattr(one, field)
            if value in taken:
                sentence = f"{value!r} is taken by witness[{taken[value] + 1}]"
                raise document.refuse(("witness", number, field), sentence, "write each witness once")
            taken[value] = number
    if checkpoints.witnesses_needed > len(witnesses):
        sentence = f"found {checkpoints.witnesses_needed}, and there are {len(witnesses)} tables [[witness]]"
        raise document.refuse(("checkpoints", "witnesses_needed"), sentence, f"write at most {len(witnesses)}")
