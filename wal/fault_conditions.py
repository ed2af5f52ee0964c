"""The names of what can be wrong with the storage of a replica, and what a row of the recovery table says of each."""

from enum import Enum, StrEnum
from typing import NamedTuple


class Action(StrEnum):
    """What the replica does about a condition that it finds when it opens its storage."""

    CREATE = "create"
    CONTINUE = "continue"
    CUT = "cut"
    REFUSE = "refuse"


class Row(NamedTuple):
    """One row of the recovery table: a condition, what is done, why that is safe, and what a person can do."""

    action: Action
    sign: str
    reason: str
    remedy: str


class Condition(Enum):
    """Every condition that a start tells apart. The values are the names that messages and tests use."""

    FIRST_START = "first start"
    DIRECTORY_EMPTY = "directory empty"
    CREATION_UNFINISHED = "creation unfinished"
    TRANSACTION_UNFINISHED = "transaction unfinished"
    HINT_BEHIND = "hint behind"
    DIRECTORY_UNUSABLE = "directory unusable"
    HELD_BY_ANOTHER_PROCESS = "held by another process"
    CANNOT_BE_OPENED = "cannot be opened"
    READERS_FILE_UNUSABLE = "table of readers unusable"
    DATA_FILE_MISSING = "data file missing"
    DATA_FILE_UNREADABLE = "data file unreadable"
    META_PAGES_DISAGREE = "meta pages disagree"
    TABLE_MISSING = "table missing"
    FORMAT_UNKNOWN = "format unknown"
    FORMAT_OF_A_STEP = "format of a construction step"
    IDENTITY_DAMAGED = "identity damaged"
    CLUSTER_FOREIGN = "cluster foreign"
    REPLICA_FOREIGN = "replica foreign"
    HARD_STATE_MISSING = "hard state missing"
    HARD_STATE_DAMAGED = "hard state damaged"
    MARKS_MISSING = "marks missing"
    MARKS_DAMAGED = "marks damaged"
    MARKS_OUT_OF_ORDER = "marks out of order"
    COMMIT_BEYOND_LAST = "commit beyond last"
    ENTRY_DAMAGED_APPLIED = "applied entry damaged"
    ENTRY_DAMAGED_TAIL = "tail entry damaged"
    ENTRY_MISSING = "entry missing"
    ENTRY_BEYOND_LAST = "entry beyond last"
    TERM_OUT_OF_ORDER = "term out of order"
    CHAIN_ROW_MISSING = "chain row missing"
    CHAIN_ROW_DAMAGED = "chain row damaged"
    CHAIN_MISMATCH = "chain mismatch"
    SYNC_UNFINISHED = "sync unfinished"
    GENERATION_OVER = "generation over"
    LOG_MARK_MISSING = "log mark missing"
    LOG_MARK_DAMAGED = "log mark damaged"
    SYNC_LOG_NOT_MADE = "sync log not made"
    SYNC_LOG_MISSING = "sync log missing"
    SYNC_LOG_UNREADABLE = "sync log unreadable"
    SYNC_LOG_WRONG_SIZE = "sync log of another size"
    SYNC_LOG_FOREIGN = "sync log foreign"
    SYNC_LOG_DAMAGED = "sync log damaged"
    SYNC_LOG_AHEAD = "sync log ahead"
    SYNC_LOG_CONTRADICTS = "sync log contradicts"
    SYNC_LOG_RESTLESS = "sync log restless"
    LOCK_FILE_ALTERED = "lock file altered"
    READERS_FILE_ALTERED = "table of readers altered"
    DISK_FULL = "disk full"
    FIRST_START_KEPT = "first start kept"
    HAS_RUN = "has run"
    MEMBER_NOTE_DAMAGED = "member note damaged"
    MEMBER_NOTE_CONTRADICTS = "member note contradicts"
    PROMISES_FORGOTTEN = "promises forgotten"
    SNAPSHOT_UNFINISHED = "snapshot unfinished"
    SNAPSHOT_LOST = "snapshot lost"
    SNAPSHOT_DAMAGED = "snapshot damaged"
    SNAPSHOT_NOT_OF_LEDGER = "snapshot not of this ledger"
    SNAPSHOT_NEEDED = "snapshot needed"
    SNAPSHOTS_UNUSABLE = "snapshots unusable"
    LEDGER_DAMAGED = "ledger damaged"
    STATE_CONTRADICTS = "state contradicts"
