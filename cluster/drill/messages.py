"""What a helper is asked and answers: one JSON object a line, over TLS with certificates of the cluster."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from replica.values import DRILL_FIGURES_MAX, MESSAGE_CHARACTERS_MAX, NAME_CHARACTERS_MAX

PROTOCOL: Final = 1
"""What a helper understands; who asks refuses to go on with one that understands less."""

LINE_BYTES_MAX: Final = 16 * 1024
"""Bytes of one request or answer."""

LEASE_S: Final = 3.0
"""For how long a fault lasts without a renewal, seconds: two renewals may be lost."""

RENEW_EVERY_S: Final = 1.0
"""Between two renewals, seconds."""

DURATION_S_MAX: Final = 120
"""For how long a fault may last, however often it is renewed, seconds."""

NEEDS: Final[dict[str, str]] = {
    "leader-kill": "process",
    "leader-hang": "process",
    "follower-stop": "process",
    "agent-kill": "process",
    "node-down": "process",
    "partition": "network",
    "partition-in": "network",
    "partition-out": "network",
    "disk-full": "disk",
    "slow-disk": "disk",
}
"""Scenario -> what its machine must allow."""

AGENTS: Final = frozenset({"agent-kill", "node-down"})
"""Scenarios whose target is an agent; that of the others is a replica."""

NOT_DONE: Final[dict[str, str]] = {
    "clock-skew": (
        "the clock of one process cannot be set without a program that stands in for the system's, and that of a "
        "machine is everybody's on it"
    ),
}
"""Scenarios that people ask for and that cannot be done honestly -> why."""

Word = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARACTERS_MAX)]
Number = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class LookRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="look", tag_field="ask"):
    """Would this be done here? Nothing is."""

    scenario: Word
    target: Word


class BeginRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="begin", tag_field="ask"):
    """Do it, for `duration_s` at most from when it is done."""

    drill: Number
    plan: Word
    scenario: Word
    target: Word
    duration_s: Annotated[int, msgspec.Meta(ge=1, le=DURATION_S_MAX)]


class RenewRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="renew", tag_field="ask"):
    """Whoever carries the drill out is still there."""

    drill: Number


class EndRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="end", tag_field="ask"):
    """Undo it now."""

    drill: Number


Ask = LookRequest | BeginRequest | RenewRequest | EndRequest


class HelperAnswer(msgspec.Struct, frozen=True):
    """What came of it. Not `done`: `sentence` says why, `remedy` what would be right."""

    done: bool
    sentence: Annotated[str, msgspec.Meta(max_length=2 * MESSAGE_CHARACTERS_MAX)] = ""
    remedy: Annotated[str, msgspec.Meta(max_length=2 * MESSAGE_CHARACTERS_MAX)] = ""
    protocol: int = PROTOCOL
    figures: Annotated[dict[str, int], msgspec.Meta(max_length=DRILL_FIGURES_MAX)] = {}
    """Of `look`: `now_us`, the wall clock of the machine, `certificate_until_us`, and `free_bytes` of a disk."""
    starts: str = ""
    """Of `look`: who starts a process again that was killed: `command`, `up`; empty: a service manager, or nobody."""


class HelperRefused(Exception):
    """A helper that is not there, or does not do what it is asked."""

    def __init__(self, sentence: str, remedy: str) -> None:
        super().__init__(f"{sentence}; {remedy}")
        self.sentence = sentence
        self.remedy = remedy


ASKS: Final = msgspec.json.Decoder(Ask)
ANSWERS: Final = msgspec.json.Decoder(HelperAnswer)
JSON: Final = msgspec.json.Encoder()
