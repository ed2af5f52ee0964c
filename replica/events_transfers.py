"""Facts about moving data: by which rules, what was moved, and how far a transfer under way is. Feature level 4."""

from __future__ import annotations

import msgspec

from replica.model.transfers import TransferCheckpoint, TransferReceipt, TransferRules


class TransferRulesSet(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=95):
    """The site moves data by these rules from now on."""

    rules: TransferRules


class TransferRecorded(msgspec.Struct, frozen=True, array_like=True, tag=96):
    """A transfer of the job has ended, well or not; what follows from that stands in the same entry."""

    job: int
    node: str
    receipt: TransferReceipt


class TransferCheckpointed(msgspec.Struct, frozen=True, array_like=True, tag=97):
    """So much of the transfer under way is durable."""

    job: int
    node: str
    checkpoint: TransferCheckpoint
