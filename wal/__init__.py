"""Storage of a replica: the Raft journal, which is also the ledger, in one LMDB environment."""

from forebay.wal.archived import ArchivedLedger
from forebay.wal.codec import (
    CodecError,
    EntryKind,
    SettledCommands,
    batch_of_encoded,
    commands_of,
    counted_revision_after,
    decode_batch,
    encode_batch,
    encode_entry,
    instant_of,
    is_earlier_form,
    kind_of,
    leader_of,
    no_op_of,
    one_of_batch,
    revision_after,
)
from forebay.wal.configuration import (
    LEARNERS_MAX,
    VOTERS_MAX,
    Change,
    ChangeKind,
    Configuration,
    ConfigurationAt,
    Member,
    check,
    decode_configuration,
    encode_configuration,
    identity_of,
    incarnation_of,
    initial,
    is_configuration,
    name_of,
    unknown,
)
from forebay.wal.environment import Environment
from forebay.wal.failures import BrokenInvariant, Condition, RecoveryRefused, StorageFailed
from forebay.wal.job_index import CLUSTER, Hole, IndexPosition, JobIndex, JobIndexBroken, JobIndexRow
from forebay.wal.journal import Journal
from forebay.wal.ledger import (
    DAMAGED_MAX,
    HistoryEntry,
    Ledger,
    LedgerBroken,
    LedgerEntry,
    LedgerSummary,
    NotThisHistory,
    SegmentName,
    export_history,
    fill,
    replace_damaged,
)
from forebay.wal.pruning import authorise, insert_beginning, prunable_below, prune_some
from forebay.wal.records import (
    ENTRY_MAX_BYTES,
    FIRST_INCARNATION,
    KEPT_ENTRIES,
    SEAL_MAX_BYTES,
    ChainRow,
    Entry,
    Gap,
    Incarnation,
    PrunedRange,
    PrunedSegment,
    lineage_of,
    parse_lineage,
)
from forebay.wal.recovery import may_have_run
from forebay.wal.segments import Archive, Segment, SegmentBroken, SegmentManifest, archive_from
