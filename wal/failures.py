"""Recovery table: every storage condition of a replica with its treatment, and the exceptions.

The table includes the files of higher layers, snapshots and notes beside the journal, so that operators find every
condition in one place.
"""

from enum import Enum, StrEnum, unique
from typing import Final, NamedTuple

DATA_FILE: Final = "data.mdb"
LOG_FILE: Final = "sync.log"
READERS_FILE: Final = "lock.mdb"


class StorageFailed(Exception):
    """Failure of the storage. The replica must stop and write nothing more. The message names the remedy."""


class BrokenInvariant(Exception):
    """Request that no correct program makes, such as truncating committed entries. The replica must stop."""


REPLACE = (
    "Run `forebay cluster replace NAME`, move this replica's directory away (keep it for an examination) and start it "
    "again. Never let it start empty as who it was, because it may have promised what it no longer holds. Where the "
    "data of a majority is lost, `forebay cluster recover` on a machine that has some left makes a cluster of it"
)
OTHERWISE_REPLACE = f"{REPLACE[0].lower()}{REPLACE[1:]}"
OTHER_DIRECTORY = "Name the right directory in [storage] of forebay.toml, or the right replica on the command line"


class Reaction(StrEnum):
    """Reaction of the replica to a condition found when it opens its storage."""

    CREATE = "create"
    CONTINUE = "continue"
    CUT = "cut"
    REFUSE = "refuse"


class Row(NamedTuple):
    """Row of the recovery table: the reaction to a condition, why it is safe, and the operator's remedy."""

    action: Reaction
    sign: str
    reason: str
    remedy: str


@unique
class Condition(Enum):
    """Recovery table: every condition that a start distinguishes, with its row."""

    FIRST_START = Row(
        Reaction.CREATE,
        "no data file, and the caller says that this replica has never run",
        "there is no promise that could be forgotten",
        "none needed",
    )
    DIRECTORY_EMPTY = Row(
        Reaction.REFUSE,
        "no data file, and the caller says that this replica has run before",
        "a replica that starts empty under its old name can vote twice in a term and forget acknowledged entries",
        f"{OTHER_DIRECTORY}. If it has never run: `forebay run replica --name NAME --first-start`, once. If the disk "
        f"is "
        f"lost: {OTHERWISE_REPLACE}",
    )
    CREATION_UNFINISHED = Row(
        Reaction.CREATE,
        "a data file without a single transaction",
        "the identity is the first thing written, in one transaction with the hard state, so nothing was ever promised",
        "none needed",
    )
    TRANSACTION_UNFINISHED = Row(
        Reaction.CUT,
        "pages of a transaction whose meta page did not reach the disk (the torn tail)",
        "promises leave after the sync that writes the meta page, so nothing of it was promised; LMDB ignores it",
        "none needed",
    )
    HINT_BEHIND = Row(
        Reaction.CONTINUE,
        "commit or applied mark below the truth",
        "both are written lazily; consensus learns the commit index anew, and applying again compares with it",
        "none needed",
    )
    DIRECTORY_UNUSABLE = Row(
        Reaction.REFUSE,
        "the directory cannot be made, opened or locked by this account",
        "nothing can be remembered there",
        "Make it a directory that this account owns, on a local disk with free space",
    )
    HELD_BY_ANOTHER_PROCESS = Row(
        Reaction.REFUSE,
        "another process holds the lock of the directory",
        "two processes with one identity can vote twice",
        "Stop the other process first, or start this replica under its own name and directory",
    )
    CANNOT_BE_OPENED = Row(
        Reaction.REFUSE,
        "the system does not open the data file, or what LMDB needs beside it: permission, a read-only file system, a "
        "symbolic link, a full disk, or a limit on open files, memory or readers",
        "nothing says that it is damaged, and without it nothing can be promised",
        "Do not replace the replica: remove the cause that the message names (owner and mode of the files, the mount, "
        "the link, the limits, the full disk) and start it again",
    )
    TABLE_OF_READERS_UNUSABLE = Row(
        Reaction.REFUSE,
        f"{READERS_FILE} is altered while a reader has it open, or is no file",
        "LMDB would not know which pages are being read; nothing is wrong with the data",
        f"Stop the readers of this directory, such as audits, remove {READERS_FILE} (nothing else), and start the "
        "replica again",
    )
    DATA_FILE_MISSING = Row(
        Reaction.REFUSE,
        "a sync log that was used, and no data file beside it, or one without a single transaction",
        "what was promised was in the data file and may be in the log, and a new one would make both void",
        f"Put {DATA_FILE} back if it was moved. If it is lost: {OTHERWISE_REPLACE}",
    )
    DATA_FILE_UNREADABLE = Row(
        Reaction.REFUSE,
        "LMDB refuses the data file or finds a broken page in it",
        "what cannot be read cannot be trusted",
        REPLACE,
    )
    META_PAGES_DISAGREE = Row(
        Reaction.REFUSE,
        "the two meta pages are not of two successive transactions",
        "LMDB would silently go back to an older state, and forget what was acknowledged since",
        REPLACE,
    )
    TABLE_MISSING = Row(
        Reaction.REFUSE, "a table is not there", "all tables are made in the first transaction", REPLACE
    )
    FORMAT_UNKNOWN = Row(
        Reaction.REFUSE,
        "the format version is not one that this release reads",
        "another release wrote it, and guessing would corrupt it",
        "Start the release that wrote it, or one that says it reads this format",
    )
    FORMAT_OF_A_CONSTRUCTION_STEP = Row(
        Reaction.REFUSE,
        "the format is that of one of the construction steps 0.1 to 0.3",
        "0.1 to 0.3 were construction steps: release 1.0 begins the formats anew, and no release reads theirs",
        "Make a new cluster with this release in another directory. What the old one did can be read with the tree "
        "that wrote it: `forebay audit dump --data DIRECTORY`",
    )
    IDENTITY_DAMAGED = Row(
        Reaction.REFUSE,
        "identity or format fails its checksum",
        "it is not known whose promises these are",
        REPLACE,
    )
    CLUSTER_FOREIGN = Row(
        Reaction.REFUSE, "the identity names another cluster", "its entries are not ours", OTHER_DIRECTORY
    )
    REPLICA_FOREIGN = Row(
        Reaction.REFUSE, "the identity names another replica", "its votes are not ours", OTHER_DIRECTORY
    )
    HARD_STATE_MISSING = Row(
        Reaction.REFUSE, "no term and vote", "without them a second vote in a term is possible", REPLACE
    )
    HARD_STATE_DAMAGED = Row(Reaction.REFUSE, "term and vote fail their checksum", "as when they are missing", REPLACE)
    MARKS_MISSING = Row(Reaction.REFUSE, "no marks", "without them it is not known how far the promises go", REPLACE)
    MARKS_DAMAGED = Row(Reaction.REFUSE, "the marks fail their checksum", "as when they are missing", REPLACE)
    MARKS_OUT_OF_ORDER = Row(
        Reaction.REFUSE, "not base <= applied <= commit", "every transaction writes them in order", REPLACE
    )
    COMMIT_BEYOND_LAST = Row(
        Reaction.REFUSE,
        "the commit mark lies beyond the last entry",
        "committed entries are missing, and this replica may be one of the majority that holds them",
        REPLACE,
    )
    APPLIED_ENTRY_DAMAGED = Row(
        Reaction.REFUSE,
        "an entry at or below the applied mark fails its checksum",
        "history that was acknowledged is damaged",
        REPLACE,
    )
    TAIL_ENTRY_DAMAGED = Row(
        Reaction.REFUSE,
        "an entry above the applied mark fails its checksum",
        "a transaction is written whole or not at all, so this is damage after the sync. The entry may be acknowledged "
        "although the commit hint, which is lazy, lies below it; cutting it could lose it from the majority",
        REPLACE,
    )
    ENTRY_MISSING = Row(
        Reaction.REFUSE, "a hole in the indexes", "a synced entry is gone, and it may be acknowledged", REPLACE
    )
    ENTRY_BEYOND_LAST = Row(
        Reaction.REFUSE,
        "an entry beyond the last index of the marks",
        "entry and marks are written in one transaction: one of the two is from another time",
        REPLACE,
    )
    TERM_OUT_OF_ORDER = Row(
        Reaction.REFUSE,
        "a term below that of the entry before, or above the term of the hard state",
        "terms only grow, and the hard state is written with or before the entries",
        REPLACE,
    )
    CHAIN_ROW_MISSING = Row(Reaction.REFUSE, "no digest for an applied entry", "each applied entry has one", REPLACE)
    CHAIN_ROW_DAMAGED = Row(Reaction.REFUSE, "a digest fails its checksum", "the history cannot be proven", REPLACE)
    CHAIN_MISMATCH = Row(
        Reaction.REFUSE,
        "an entry is not the one that the chained digest speaks of",
        "history was altered, although each checksum holds",
        REPLACE,
    )
    SYNC_UNFINISHED = Row(
        Reaction.CUT,
        "a record at the end of the sync log of which sectors were not written (the torn tail)",
        "promises leave after the flush that follows its write, so nothing of it was promised",
        "none needed",
    )
    GENERATION_OVER = Row(
        Reaction.CONTINUE,
        "the sync log holds records of an older generation than LMDB names",
        "LMDB began the next generation in the transaction that took them over: they are in it",
        "none needed",
    )
    LOG_MARK_MISSING = Row(
        Reaction.REFUSE,
        "LMDB does not name the generation of the sync log",
        "every transaction since the sync log was made writes it, and without it the log cannot be read",
        REPLACE,
    )
    LOG_MARK_DAMAGED = Row(
        Reaction.REFUSE, "the generation of the sync log fails its checksum", "as when it is missing", REPLACE
    )
    SYNC_LOG_NOT_MADE = Row(
        Reaction.REFUSE,
        "the sync log of a new storage cannot be made",
        "there would be nowhere to sync to; what was promised so far is all in LMDB",
        "Free space, see that this account owns the directory, and start the replica again",
    )
    SYNC_LOG_MISSING = Row(
        Reaction.REFUSE,
        "LMDB speaks of a sync log and there is none",
        "what was acknowledged since the last checkpoint was in it",
        f"Put {LOG_FILE} back if it was moved. If it is lost: {OTHERWISE_REPLACE}",
    )
    SYNC_LOG_UNREADABLE = Row(
        Reaction.REFUSE,
        "the sync log is no regular file, may not be opened, or cannot be read",
        "it may hold what was acknowledged since the last checkpoint",
        f"See that {LOG_FILE} is a file that this account owns. If its disk fails: {OTHERWISE_REPLACE}",
    )
    SYNC_LOG_OF_ANOTHER_SIZE = Row(
        Reaction.REFUSE,
        "the sync log is shorter or longer than LMDB says",
        "its size never changes, so what was acknowledged since the last checkpoint may be cut off",
        REPLACE,
    )
    SYNC_LOG_FOREIGN = Row(
        Reaction.REFUSE,
        "the sync log is another replica's",
        "its promises are not ours, and ours are gone",
        REPLACE,
    )
    SYNC_LOG_DAMAGED = Row(
        Reaction.REFUSE,
        "a record of the sync log is there as a whole and fails its checksum, or is gone although a later one is there",
        "it was damaged after its sync and may have been acknowledged; cutting it could lose it from the majority",
        REPLACE,
    )
    SYNC_LOG_AHEAD = Row(
        Reaction.REFUSE,
        "the sync log is of a later generation than LMDB",
        "a generation begins in LMDB first: the data file is an older copy, and has forgotten what was acknowledged",
        REPLACE,
    )
    SYNC_LOG_CONTRADICTS = Row(
        Reaction.REFUSE,
        "a record of the sync log does not follow from what LMDB and the records before it say",
        "the two files are not of one history, although each checksum holds",
        REPLACE,
    )
    SYNC_LOG_RESTLESS = Row(
        Reaction.REFUSE,
        "a reader beside the running replica finds the sync log changed each time that it reads it",
        "a view of two moments is no view; nothing is wrong with the replica",
        "Read again when the replica is less busy, or read another replica's ledger",
    )
    LOCK_FILE_ALTERED = Row(
        Reaction.CONTINUE,
        "replica.lock is lost or altered",
        "the lock is the kernel's and on the directory itself, so no second process is let in even while one runs. "
        "What this file says is for people, and each start writes it anew",
        "none needed",
    )
    TABLE_OF_READERS_ALTERED = Row(
        Reaction.CONTINUE,
        f"{READERS_FILE} is lost, or altered while nobody has it open",
        "it only says who reads which pages, and a start makes it anew. Removed while the replica runs, it stops the "
        "replica within a second, because readers that come later would have pages written under them",
        "start readers that had it open again",
    )
    DISK_FULL = Row(
        Reaction.REFUSE,
        "the disk is full, or fails, when the checkpoint that ends a start is written",
        "who cannot write can promise nothing; what was promised is there, and the next start finds it",
        "Free space or replace the disk, then start the replica again",
    )
    FIRST_START_KEPT = Row(
        Reaction.REFUSE,
        "the mark that allows a first start cannot be removed",
        "it would allow another start without data after the data was lost",
        "See that this account may write in that directory, or remove the mark by hand, and start the replica again",
    )
    HAS_RUN = Row(
        Reaction.REFUSE,
        "`--first-start` where a data file, a sync log, a snapshot, or the file member says otherwise",
        "a replica that starts empty under its old name has forgotten votes and entries that others count on",
        f"Start it without `--first-start`. If its data is lost: {OTHERWISE_REPLACE}",
    )
    MEMBER_NOTE_DAMAGED = Row(
        Reaction.REFUSE,
        "the file member cannot be read, or says what is no id of this replica",
        "it says under which id the replica joined, and another id has other promises",
        "Write into it the id that `forebay cluster members --json` shows for this replica, or, if it cannot be "
        "written: " + OTHERWISE_REPLACE,
    )
    MEMBER_NOTE_CONTRADICTS = Row(
        Reaction.REFUSE,
        "the file member is lost, or names another id of this replica than the storage does",
        "the storage holds what was promised under its own id, and nobody may go on with it as somebody else",
        "If `forebay cluster members --json` shows the storage's id for this replica, write it into the file member. "
        "If it shows another one, this directory is of an earlier life: " + OTHERWISE_REPLACE,
    )
    PROMISES_FORGOTTEN = Row(
        Reaction.REFUSE,
        "the file forgotten is there, whatever it says",
        "the leader found that this replica lacks what it had acknowledged, and a restart does not bring it back",
        REPLACE,
    )
    INCARNATION_OVER = Row(
        Reaction.REFUSE,
        "the file superseded is there, whatever it says",
        "the cluster was recovered after a majority was lost, and goes on as a later incarnation without this replica",
        "Keep the directory for an examination: it may hold what the recovery lost (`forebay audit dump --data "
        "DIRECTORY`). Then move it away, run `forebay cluster add` with its name and "
        "addresses, and start it again",
    )
    SNAPSHOT_UNFINISHED = Row(
        Reaction.CUT,
        "a snapshot that was being written or received when the process died",
        "it never had its name, so nothing counts on it; of what was received the frames that are sound are kept",
        "none needed",
    )
    SNAPSHOT_LOST = Row(
        Reaction.CONTINUE,
        "a snapshot is gone, or all of them are, and the ledger is whole behind an older one or from its beginning",
        "a snapshot is never the only copy of what the ledger holds: more of it is folded, and the start takes longer",
        "none needed",
    )
    SNAPSHOT_DAMAGED = Row(
        Reaction.CONTINUE,
        "a snapshot is cut, fails a checksum, or is of another cluster, and an older one or the ledger can serve",
        "every byte of it is checked before it is believed; it is passed over, not sent to peers, and the log says why",
        "none needed; if it comes again, see to the disk",
    )
    SNAPSHOT_NOT_OF_THIS_LEDGER = Row(
        Reaction.CONTINUE,
        "a sound snapshot is ahead of the applied mark, or its digest is not the ledger's, and another one can serve",
        "the process died before it was installed, or it is of another history: it is passed over like a damaged one",
        "none needed",
    )
    SNAPSHOT_NEEDED = Row(
        Reaction.REFUSE,
        "no snapshot can serve, and the ledger has a gap where one was installed",
        "the state cannot be rebuilt: nothing else here says what the entries of the gap did",
        f"If it was moved, put the snapshot back. If it is lost: {OTHERWISE_REPLACE}",
    )
    SNAPSHOTS_UNUSABLE = Row(
        Reaction.REFUSE,
        "the directory of the snapshots cannot be made, read or cleaned",
        "without snapshots the journal only grows, and which of them can be trusted is not known",
        "Do what the message names: free space, or make it a directory that this account owns",
    )
    LEDGER_DAMAGED = Row(
        Reaction.REFUSE,
        "an entry before those that are checked at every start is damaged or missing, and no snapshot stands behind it",
        "history that was acknowledged is damaged, and the state cannot be rebuilt without it",
        REPLACE,
    )
    STATE_CONTRADICTS = Row(
        Reaction.REFUSE,
        "the state that snapshot and entries add up to has another revision than the applied mark",
        "one of them is not what was agreed, although each checksum holds, or this release folds otherwise",
        REPLACE,
    )
    STATE_NOT_THE_RECORDED = Row(
        Reaction.REFUSE,
        "the state that snapshot and entries add up to is not the one whose digest the ledger records",
        "the snapshot or the history was altered, although each checksum holds, or this release folds otherwise",
        f"Keep the directory for an inquiry. {REPLACE}",
    )

    @property
    def title(self) -> str:
        """Name of the condition in messages and documents: `directory empty`."""
        return self.name.lower().replace("_", " ")


class RecoveryRefused(StorageFailed):
    """Storage rejected at opening. `condition` is the row of the table; the message names place and remedy.

    `name`: the replica's configured name, for the remedy's commands; empty if only its files are known.
    """

    def __init__(self, condition: Condition, place: str, name: str | None = None) -> None:
        row = condition.value
        remedy = row.remedy if name is None else row.remedy.replace("NAME", name)
        super().__init__(f"{place}: {condition.title}: {row.reason}. {remedy}.")
        self.condition = condition
        self.place = place
