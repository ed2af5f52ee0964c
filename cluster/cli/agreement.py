"""Do the replicas that were asked hold the same state? What `member status --digest` concludes from their digests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from cluster.schemas import DigestsAnswer, StatusView

DIGEST_DIGITS_SHOWN = 16
"""Digits of a digest in a table: enough to see a difference; `--json` has all 64."""


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica said of itself, or why it did not."""

    name: str
    api: str
    reachable: bool
    status: StatusView | None = None
    checkpoints: DigestsAnswer | None = None
    """Only with --digest: the states that it digested last, which it compares with its peers' by itself."""
    error: str | None = None


class Agreement(StrEnum):
    """What the digests say of the states."""

    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "unknown"
    """No two replicas gave a digest of the same state."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome for all replicas that answered."""

    agreement: Agreement
    sentence: str


def compare(answers: Iterable[ReplicaStatus]) -> Comparison:
    """Compare what is comparable: states of one revision, and checkpoints after one entry."""
    of_revision: defaultdict[int, dict[str, str]] = defaultdict(dict)
    after_entry: defaultdict[int, dict[str, str]] = defaultdict(dict)
    for answer in answers:
        if answer.status is not None and answer.status.state_digest is not None:
            of_revision[answer.status.revision][answer.name] = answer.status.state_digest
        if answer.checkpoints is not None:
            for index, digest in answer.checkpoints.digests.items():
                after_entry[index][answer.name] = digest
    points = [(f"at revision {number}", of_revision[number]) for number in sorted(of_revision, reverse=True)]
    points += [(f"after entry {number}", after_entry[number]) for number in sorted(after_entry, reverse=True)]
    for where, digests in points:
        if len(set(digests.values())) > 1:
            shown = ", ".join(f"{name} {digest[:DIGEST_DIGITS_SHOWN]}" for name, digest in sorted(digests.items()))
            return Comparison(agreement=Agreement.DIFFERENT, sentence=f"the replicas' states differ {where}: {shown}")
    # The most replicas first; of those the newest, in the order above.
    where, digests = max(points, key=lambda point: len(point[1]), default=("", {}))
    if len(digests) > 1:
        names = ", ".join(sorted(digests))
        return Comparison(agreement=Agreement.SAME, sentence=f"{names} hold the same state {where}")
    return Comparison(
        agreement=Agreement.UNKNOWN,
        sentence="no two replicas gave a digest of the same state; ask again, or when fewer commands come in",
    )
