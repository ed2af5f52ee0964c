"""What can be wrong with the storage of a replica, and what is done about each: one table, and the exceptions."""

from enum import Enum, StrEnum
from typing import Final, NamedTuple

DATA_FILE: Final = "data.mdb"
LOG_FILE: Final = "sync.log"


class StorageFailed(Exception):
    """The storage broke a promise: the replica must stop and write nothing more. The message names the remedy."""


class BrokenInvariant(Exception):
    """A caller asked for what no correct program does, such as truncating what is committed: the replica must stop."""


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


REPLACE = (
    "Keep the directory for an examination, remove this replica from the cluster and add a new one under a new name; "
    "never let it start empty under its old name, because it may have promised what it no longer holds"
)
OTHER_DIRECTORY = "Name the right directory in [storage] of forebay.toml, or the right replica on the command line"


class Condition(Enum):
    """Every condition that opening the storage tells apart. The values are the names that messages and tests use."""

    FIRST_START = "first start"
    DIRECTORY_EMPTY = "directory empty"
    CREATION_UNFINISHED = "creation unfinished"
    TRANSACTION_UNFINISHED = "transaction unfinished"
    HINT_BEHIND = "hint behind"
    DIRECTORY_UNUSABLE = "directory unusable"
    HELD_BY_ANOTHER_PROCESS = "held by another process"
    DATA_FILE_UNREADABLE = "data file unreadable"
    META_PAGES_DISAGREE = "meta pages disagree"
    TABLE_MISSING = "table missing"
    FORMAT_UNKNOWN = "format unknown"
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
    FORMAT_WITHOUT_SYNC_LOG = "format without sync log"
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


TABLE: dict[Condition, Row] = {
    Condition.FIRST_START: Row(
        Action.CREATE,
        "no data file, and the caller says that this replica has never run",
        "there is no promise that could be forgotten",
        "none needed",
    ),
    Condition.DIRECTORY_EMPTY: Row(
        Action.REFUSE,
        "no data file, and the caller says that this replica has run before",
        "a replica that starts empty under its old name can vote twice in a term and forget acknowledged entries",
        OTHER_DIRECTORY
        + ". If the disk is lost: remove this replica from the cluster and add a new one under a new name",
    ),
    Condition.CREATION_UNFINISHED: Row(
        Action.CREATE,
        "a data file without a single transaction",
        "the identity is the first thing written, in one transaction with the hard state, so nothing was ever promised",
        "none needed",
    ),
    Condition.TRANSACTION_UNFINISHED: Row(
        Action.CUT,
        "pages of a transaction whose meta page did not reach the disk (the torn tail)",
        "promises leave after the sync that writes the meta page, so nothing of it was promised; LMDB ignores it",
        "none needed",
    ),
    Condition.HINT_BEHIND: Row(
        Action.CONTINUE,
        "commit or applied mark below the truth",
        "both are written lazily; consensus learns the commit index anew, and applying again compares with it",
        "none needed",
    ),
    Condition.DIRECTORY_UNUSABLE: Row(
        Action.REFUSE,
        "the directory cannot be made, opened or locked by this account",
        "nothing can be remembered there",
        "Make it a directory that this account owns, on a local disk with free space",
    ),
    Condition.HELD_BY_ANOTHER_PROCESS: Row(
        Action.REFUSE,
        "another process holds the lock of the directory",
        "two processes with one identity can vote twice",
        "Stop the other process first, or start this replica under its own name and directory",
    ),
    Condition.DATA_FILE_UNREADABLE: Row(
        Action.REFUSE,
        "LMDB refuses the data file or finds a broken page in it",
        "what cannot be read cannot be trusted",
        REPLACE,
    ),
    Condition.META_PAGES_DISAGREE: Row(
        Action.REFUSE,
        "the two meta pages are not of two successive transactions",
        "LMDB would silently go back to an older state, and forget what was acknowledged since",
        REPLACE,
    ),
    Condition.TABLE_MISSING: Row(
        Action.REFUSE, "a table is not there", "all tables are made in the first transaction", REPLACE
    ),
    Condition.FORMAT_UNKNOWN: Row(
        Action.REFUSE,
        "the format version is not one that this release reads",
        "another release wrote it, and guessing would corrupt it",
        "Start the release that wrote it, or one that says it reads this format",
    ),
    Condition.IDENTITY_DAMAGED: Row(
        Action.REFUSE, "identity or format fails its checksum", "it is not known whose promises these are", REPLACE
    ),
    Condition.CLUSTER_FOREIGN: Row(
        Action.REFUSE, "the identity names another cluster", "its entries are not ours", OTHER_DIRECTORY
    ),
    Condition.REPLICA_FOREIGN: Row(
        Action.REFUSE, "the identity names another replica", "its votes are not ours", OTHER_DIRECTORY
    ),
    Condition.HARD_STATE_MISSING: Row(
        Action.REFUSE, "no term and vote", "without them a second vote in a term is possible", REPLACE
    ),
    Condition.HARD_STATE_DAMAGED: Row(
        Action.REFUSE, "term and vote fail their checksum", "as when they are missing", REPLACE
    ),
    Condition.MARKS_MISSING: Row(
        Action.REFUSE, "no marks", "without them it is not known how far the promises go", REPLACE
    ),
    Condition.MARKS_DAMAGED: Row(Action.REFUSE, "the marks fail their checksum", "as when they are missing", REPLACE),
    Condition.MARKS_OUT_OF_ORDER: Row(
        Action.REFUSE, "not base <= applied <= commit", "every transaction writes them in order", REPLACE
    ),
    Condition.COMMIT_BEYOND_LAST: Row(
        Action.REFUSE,
        "the commit mark lies beyond the last entry",
        "committed entries are missing, and this replica may be one of the majority that holds them",
        REPLACE,
    ),
    Condition.ENTRY_DAMAGED_APPLIED: Row(
        Action.REFUSE,
        "an entry at or below the applied mark fails its checksum",
        "history that was acknowledged is damaged",
        REPLACE,
    ),
    Condition.ENTRY_DAMAGED_TAIL: Row(
        Action.REFUSE,
        "an entry above the applied mark fails its checksum",
        "a transaction is written whole or not at all, so this is damage after the sync: the entry may be acknowledged "
        "although the commit hint, which is lazy, lies below it; cutting it could lose it from the majority",
        REPLACE,
    ),
    Condition.ENTRY_MISSING: Row(
        Action.REFUSE, "a hole in the indexes", "a synced entry is gone, and it may be acknowledged", REPLACE
    ),
    Condition.ENTRY_BEYOND_LAST: Row(
        Action.REFUSE,
        "an entry beyond the last index of the marks",
        "entry and marks are written in one transaction: one of the two is from another time",
        REPLACE,
    ),
    Condition.TERM_OUT_OF_ORDER: Row(
        Action.REFUSE,
        "a term below that of the entry before, or above the term of the hard state",
        "terms only grow, and the hard state is written with or before the entries",
        REPLACE,
    ),
    Condition.CHAIN_ROW_MISSING: Row(
        Action.REFUSE, "no digest for an applied entry", "each applied entry has one", REPLACE
    ),
    Condition.CHAIN_ROW_DAMAGED: Row(
        Action.REFUSE, "a digest fails its checksum", "the history cannot be proven", REPLACE
    ),
    Condition.CHAIN_MISMATCH: Row(
        Action.REFUSE,
        "an entry is not the one that the chained digest speaks of",
        "history was altered, although each checksum holds",
        REPLACE,
    ),
    Condition.FORMAT_WITHOUT_SYNC_LOG: Row(
        Action.CONTINUE,
        "the format version is 1, the last one without a sync log",
        "a log is made, and then LMDB says in one transaction that there is one; until then it promises nothing",
        "none needed; older releases refuse the directory from now on",
    ),
    Condition.SYNC_UNFINISHED: Row(
        Action.CUT,
        "a record at the end of the sync log of which sectors were not written (the torn tail)",
        "promises leave after the flush that follows its write, so nothing of it was promised",
        "none needed",
    ),
    Condition.GENERATION_OVER: Row(
        Action.CONTINUE,
        "the sync log holds records of an older generation than LMDB names",
        "LMDB began the next generation in the transaction that took them over: they are in it",
        "none needed",
    ),
    Condition.LOG_MARK_MISSING: Row(
        Action.REFUSE,
        "LMDB does not name the generation of the sync log",
        "every transaction since the sync log was made writes it, and without it the log cannot be read",
        REPLACE,
    ),
    Condition.LOG_MARK_DAMAGED: Row(
        Action.REFUSE, "the generation of the sync log fails its checksum", "as when it is missing", REPLACE
    ),
    Condition.SYNC_LOG_NOT_MADE: Row(
        Action.REFUSE,
        "the sync log of a new storage, or of one of the format before, cannot be made",
        "there would be nowhere to sync to; what was promised so far is all in LMDB",
        "Free space, see that this account owns the directory, and start the replica again",
    ),
    Condition.SYNC_LOG_MISSING: Row(
        Action.REFUSE,
        "LMDB speaks of a sync log and there is none",
        "what was acknowledged since the last checkpoint was in it",
        f"Put {LOG_FILE} back if it was moved. If it is lost: {REPLACE[0].lower()}{REPLACE[1:]}",
    ),
    Condition.SYNC_LOG_UNREADABLE: Row(
        Action.REFUSE,
        "the sync log is no regular file, may not be opened, or cannot be read",
        "it may hold what was acknowledged since the last checkpoint",
        f"See that {LOG_FILE} is a file that this account owns. If its disk fails: {REPLACE[0].lower()}{REPLACE[1:]}",
    ),
    Condition.SYNC_LOG_WRONG_SIZE: Row(
        Action.REFUSE,
        "the sync log is shorter or longer than LMDB says",
        "its size never changes, so what was acknowledged since the last checkpoint may be cut off",
        REPLACE,
    ),
    Condition.SYNC_LOG_FOREIGN: Row(
        Action.REFUSE, "the sync log is another replica's", "its promises are not ours, and ours are gone", REPLACE
    ),
    Condition.SYNC_LOG_DAMAGED: Row(
        Action.REFUSE,
        "a record of the sync log is there as a whole and fails its checksum, or is gone although a later one is there",
        "it was damaged after its sync and may have been acknowledged; cutting it could lose it from the majority",
        REPLACE,
    ),
    Condition.SYNC_LOG_AHEAD: Row(
        Action.REFUSE,
        "the sync log is of a later generation than LMDB",
        "a generation begins in LMDB first: the data file is an older copy, and has forgotten what was acknowledged",
        REPLACE,
    ),
    Condition.SYNC_LOG_CONTRADICTS: Row(
        Action.REFUSE,
        "a record of the sync log does not follow from what LMDB and the records before it say",
        "the two files are not of one history, although each checksum holds",
        REPLACE,
    ),
    Condition.SYNC_LOG_RESTLESS: Row(
        Action.REFUSE,
        "a reader beside the running replica finds the sync log changed each time that it reads it",
        "a view of two moments is no view; nothing is wrong with the replica",
        "Read again when the replica is less busy, or read another replica's ledger",
    ),
}


class RecoveryRefused(StorageFailed):
    """The storage was refused when it was opened; `condition` is the table's row, the message says place and remedy."""

    def __init__(self, condition: Condition, place: str) -> None:
        row = TABLE[condition]
        super().__init__(f"{place}: {condition.value}: {row.reason}. {row.remedy}.")
        self.condition = condition
        self.place = place
