"""What a replica remembers: the journal of consensus, which is the ledger, in one LMDB environment."""

from wal.codec import (
    CodecError,
    Kind,
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
from wal.configuration import (
    LEARNERS_MAX,
    VOTERS_MAX,
    Action,
    Change,
    Configuration,
    Member,
    Placed,
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
from wal.environment import Environment
from wal.failures import BrokenInvariant, Condition, RecoveryRefused, StorageFailed
from wal.job_index import CLUSTER, Hole, JobIndex, JobIndexBroken, JobRow, Position
from wal.journal import Journal
from wal.ledger import (
    DAMAGED_MAX,
    Handed,
    Ledger,
    LedgerBroken,
    LedgerEntry,
    NotThisHistory,
    Verified,
    fill,
    hand_over,
    mend,
)
from wal.records import (
    ENTRY_MAX_BYTES,
    FIRST_INCARNATION,
    Entry,
    Gap,
    Incarnation,
    lineage_of,
    parse_lineage,
)
from wal.recovery import may_have_run
