"""Requests to a helper and its answers: one JSON object per line, over TLS with certificates of the cluster."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from forebay.replica.values import DRILL_FIGURES_MAX, MESSAGE_CHARACTERS_MAX, NAME_CHARACTERS_MAX

PROTOCOL: Final = 1
"""Protocol version of a helper; the coordinator rejects a lower one."""

LINE_BYTES_MAX: Final = 16 * 1024
"""Limit of one request or answer, bytes."""

LEASE_S: Final = 3.0
"""Duration of a fault without a renewal, seconds: the fault continues if two renewals are lost."""

RENEW_EVERY_S: Final = 1.0
"""Seconds between two renewals."""

DURATION_S_MAX: Final = 120
"""Maximum duration of a fault with renewals, seconds."""

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
"""Scenario -> setting that the machine must allow."""

AGENTS: Final = frozenset({"agent-kill", "node-down"})
"""Scenarios that target an agent; the others target a replica."""

NOT_DONE: Final[dict[str, str]] = {
    "clock-skew": (
        "setting the clock of a single process needs a preloaded library, and all programs of a machine share its clock"
    ),
}
"""Known scenarios that no helper can simulate faithfully -> reason."""

Word = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARACTERS_MAX)]
Number = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class LookRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="look", tag_field="ask"):
    """Request to check whether the fault would be allowed here, without causing it."""

    scenario: Word
    target: Word


class BeginRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="begin", tag_field="ask"):
    """Request to cause the fault for at most `duration_s`."""

    drill: Number
    plan: Word
    scenario: Word
    target: Word
    duration_s: Annotated[int, msgspec.Meta(ge=1, le=DURATION_S_MAX)]


class RenewRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="renew", tag_field="ask"):
    """Renewal of the lease by the drill's coordinator."""

    drill: Number


class EndRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="end", tag_field="ask"):
    """Request to undo the fault now."""

    drill: Number


Ask = LookRequest | BeginRequest | RenewRequest | EndRequest


class HelperAnswer(msgspec.Struct, frozen=True):
    """Result of a request. If not `done`, `sentence` is the cause and `remedy` the correction."""

    done: bool
    sentence: Annotated[str, msgspec.Meta(max_length=2 * MESSAGE_CHARACTERS_MAX)] = ""
    remedy: Annotated[str, msgspec.Meta(max_length=2 * MESSAGE_CHARACTERS_MAX)] = ""
    protocol: int = PROTOCOL
    figures: Annotated[dict[str, int], msgspec.Meta(max_length=DRILL_FIGURES_MAX)] = {}
    """Answer to `look`: the machine's wall clock `now_us`, `certificate_until_us`, and `free_bytes` of a disk."""
    starts: str = ""
    """Answer to `look`: `command` or `up` if that restarts a killed process; empty for a service manager, or none."""


class HelperRefused(Exception):
    """Helper that is unreachable, or rejects a request."""

    def __init__(self, sentence: str, remedy: str) -> None:
        super().__init__(f"{sentence}; {remedy}")
        self.sentence = sentence
        self.remedy = remedy


ASKS: Final = msgspec.json.Decoder(Ask)
ANSWERS: Final = msgspec.json.Decoder(HelperAnswer)
JSON: Final = msgspec.json.Encoder()
