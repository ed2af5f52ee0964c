"""The tables `[[witness]]` and `[checkpoints]`: who is asked to cosign checkpoints, and how many must have.

They are a replica's own, as where it is reached: write the same for each of them. Whoever leads asks.
"""

import re
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from cluster.config.toml import Document, InvalidValue, Name, Text, Written
from cluster.security.proofs import COSIGNATURE_KEY, NoteRefused, VerifierKey, parse_key
from cluster.system import Address

WITNESSES_MAX: Final = 16
"""Witnesses of a cluster, count: a note has room for their lines beside those of nine replicas."""

URL_CHARACTERS_MAX: Final = 1024
HTTPS_PORT: Final = 443

# No user, no query, no fragment: nothing that would have to be kept secret, or that an answer would depend on.
_URL: Final = r"https?://[A-Za-z0-9.:\[\]-]+(/[A-Za-z0-9._~/-]*)?"


class WitnessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One witness: its name for people, where it is asked, and the key that its cosignatures are verified with."""

    name: Annotated[Written[Name], Meta(examples=["security"])]
    url: Annotated[Text, Meta(examples=["https://witness.example.org:7600"])]
    """Its submission prefix; `/add-checkpoint` is added."""
    key: Annotated[Text, Meta(examples=["what `forebay audit witness key` printed"])]
    authority: Path | None = None
    """Who issued its certificate; None: one of those that the system knows."""

    def __post_init__(self) -> None:
        """Refuse what cannot be asked, or believed; InvalidValue."""
        try:
            if parse_key(self.key).kind != COSIGNATURE_KEY:
                raise NoteRefused("it is the key of a log")
        except NoteRefused as error:
            remedy = "write the line that `forebay audit witness key` printed"
            raise InvalidValue(f"this is no key of a witness: {error}", remedy, "key") from error
        force_setattr(self, "url", self.url.rstrip("/"))
        sentence = _fault(self.url)
        if sentence:
            remedy = "write https://HOST:PORT; http:// only for a proxy on this machine"
            raise InvalidValue(sentence, remedy, "url")

    @property
    def verifier(self) -> VerifierKey:
        """The key, parsed."""
        return parse_key(self.key)


class CheckpointsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint must have to be called witnessed."""

    witnesses_needed: Annotated[int, Meta(ge=0, le=WITNESSES_MAX)] = 0
    """Witnesses that must have cosigned it, count; 0, which need not be written: a majority of those that there are."""

    def needed(self, witnesses: int) -> int:
        """Return how many of so many must have cosigned; 0 where there are none."""
        return self.witnesses_needed or (witnesses // 2 + 1 if witnesses else 0)


def check_witnesses(document: Document, witnesses: tuple[WitnessConfig, ...], checkpoints: CheckpointsConfig) -> None:
    """Refuse a witness that is there twice, and more that are needed than there are; ConfigError."""
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
        raise document.refuse(("checkpoints", "witnesses_needed"), sentence, "write at most as many as there are")


def _fault(text: str) -> str:
    """Return what is wrong with where a witness is asked, or nothing."""
    sentence = f"found {text!r:.60}, which is no prefix of HTTPS"
    if len(text) > URL_CHARACTERS_MAX or re.fullmatch(_URL, text) is None:
        return sentence
    try:
        url = urlsplit(text)
        host, port = url.hostname, url.port or HTTPS_PORT
    except ValueError:
        return sentence
    if not host or (url.scheme == "http" and not Address(host, port).is_loopback):
        return f"{host!r} is another machine, and what it answers could be anybody's" if host else sentence
    return ""
