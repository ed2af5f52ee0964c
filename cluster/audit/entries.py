"""One entry of the ledger as JSON, as `GET /v1/ledger` shows it."""

from cluster.api.render import configuration_record, record_view
from cluster.schemas import LedgerEntryView
from cluster.system import format_instant
from replica.messages import Batch
from replica.values import Instant, Revision
from wal import Kind, Ledger, LedgerEntry, decode_batch, decode_configuration, kind_of

NO_OP = "no-op"
BATCH = "batch"
CONFIGURATION = "configuration"
"""Who is a member from this entry on, and who asked for that."""

VOID = "void"
"""A batch that the check of its base refused everywhere: it was decided on another revision, and changed nothing."""


def entry_view(entry: LedgerEntry, ledger: Ledger) -> LedgerEntryView:
    """Return an entry as JSON shows it; CodecError for one that this release does not know, LedgerBroken for damage.

    What changed nothing, a no-op or a void batch, has no records and no revisions.
    """
    kind = kind_of(entry.data)
    if kind is Kind.CONFIGURATION:
        configuration = decode_configuration(entry.data)
        return LedgerEntryView(
            index=entry.index,
            term=entry.term,
            kind=CONFIGURATION,
            digest=entry.digest.hex(),
            at=format_instant(Instant(configuration.change.at)),
            size_bytes=len(entry.data),
            records=(configuration_record(configuration),),
        )
    batch = decode_batch(entry.data) if kind is Kind.BATCH else None
    void = batch is not None and is_void(entry.index, batch, ledger)
    settled = None if void else batch
    return LedgerEntryView(
        index=entry.index,
        term=entry.term,
        kind=NO_OP if batch is None else VOID if void else BATCH,
        digest=entry.digest.hex(),
        base_revision=None if settled is None else settled.base,
        revision=None if settled is None else settled.base + len(settled.entries),
        at=None if batch is None else format_instant(batch.at),
        size_bytes=len(entry.data),
        records=()
        if settled is None
        else tuple(
            record_view(record, Revision(settled.base + position))
            for position, record in enumerate(settled.entries, start=1)
        ),
    )


def is_void(index: int, batch: Batch, ledger: Ledger) -> bool:
    """Whether the check of its base refused this batch: another entry settled the revisions that it would have."""
    if not batch.entries:
        return False
    try:
        return ledger.index_of_revision(batch.base + 1) != index
    except LookupError:
        return True
