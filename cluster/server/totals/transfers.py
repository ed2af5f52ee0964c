"""Sums over the receipts of transfers."""

from __future__ import annotations

from collections import Counter

from replica.messages import Batch, TransferRecorded


class TransferTotals:
    """Sums over receipts by (stage, outcome); every replica counts what it applies."""

    def __init__(self) -> None:
        """Begin at zero."""
        self.ended: Counter[tuple[str, str]] = Counter()
        """Transfers that ended; outcome: complete or failed."""
        self.files: Counter[str] = Counter()
        self.size_bytes: Counter[str] = Counter()
        self.resumed_bytes: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()

    def applied(self, batch: Batch) -> None:
        """Count the receipts of a batch that was just applied."""
        for entry in batch.entries:
            for event in entry.events:
                if type(event) is TransferRecorded:
                    receipt, stage = event.receipt, event.receipt.stage.word
                    self.ended[stage, "complete" if receipt.complete else "failed"] += 1
                    self.files[stage] += receipt.files
                    self.size_bytes[stage] += receipt.size_bytes
                    self.resumed_bytes[stage] += receipt.resumed_bytes
                    self.retries[stage] += receipt.retries
                    self.left_out[stage] += receipt.left_out
