"""Recovery table: every storage condition of a replica with the reaction to it, and the storage exceptions.

The table also covers files of higher layers (snapshots, and notes beside the journal), so that operators find every
condition in one place.
"""

from enum import Enum, StrEnum, unique
from typing import Final, NamedTuple

DATA_FILE: Final = "data.mdb"
LOG_FILE: Final = "sync.log"
READERS_FILE: Final = "lock.mdb"


class StorageFailed(Exception):
    """Failed storage. The replica must stop writing and exit. The message names the remedy."""


class BrokenInvariant(Exception):
    """Violated invariant, for example a truncation of committed entries. The replica must stop."""


REPLACE = (
    "Run `forebay cluster replace NAME`, move this replica's directory away (keep it for an examination) and start it "
    "again. Never let it start empty under its old identity, because it may have lost promised votes and entries. If "
    "a majority lost its data, `forebay cluster recover` on a machine that still has data rebuilds the cluster from it"
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
    """Row of the recovery table: the reaction, the condition's sign, why the reaction is safe, and the remedy."""

    action: Reaction
    sign: str
    reason: str
    remedy: str


@unique
class Condition(Enum):
    """Recovery table: the conditions that a replica distinguishes when it starts, each with its row."""

    FIRST_START = Row(
        Reaction.CREATE,
        "no data file, and the operator declares that this replica has never run",
        "no promise can be forgotten",
        "none needed",
    )
    DIRECTORY_EMPTY = Row(
        Reaction.REFUSE,
        "no data file, and no declaration that this replica has never run",
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
        "promises are sent after the sync that writes the meta page, so these pages promised nothing; LMDB ignores "
        "them",
        "none needed",
    )
    HINT_BEHIND = Row(
        Reaction.CONTINUE,
        "the commit mark or the applied mark is too low",
        "both are written lazily; consensus determines the commit index again, and reapplied entries are compared",
        "none needed",
    )
    DIRECTORY_UNUSABLE = Row(
        Reaction.REFUSE,
        "this account cannot create, open or lock the directory",
        "the replica cannot store its promises there",
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
        "the data file, or a file or resource that LMDB needs, cannot be opened: permission, a read-only file system, "
        "a symbolic link, a full disk, or a limit on open files, memory or readers",
        "the data may be intact, but the replica can promise nothing without it",
        "Do not replace the replica: remove the cause that the message names (owner and mode of the files, the mount, "
        "the link, the limits, the full disk) and start it again",
    )
    TABLE_OF_READERS_UNUSABLE = Row(
        Reaction.REFUSE,
        f"{READERS_FILE} is altered while a reader has it open, or is not a file",
        "LMDB would not know which pages are being read; the data is intact",
        f"Stop the readers of this directory, such as audits, remove {READERS_FILE} (nothing else), and start the "
        "replica again",
    )
    DATA_FILE_MISSING = Row(
        Reaction.REFUSE,
        "a used sync log without a data file, or with one that has no transaction",
        "the data file and perhaps the log held promises, which a new data file would void",
        f"Restore {DATA_FILE} if it was moved. If it is lost: {OTHERWISE_REPLACE}",
    )
    DATA_FILE_UNREADABLE = Row(
        Reaction.REFUSE,
        "LMDB rejects the data file or finds a damaged page in it",
        "unreadable data cannot be trusted",
        REPLACE,
    )
    META_PAGES_DISAGREE = Row(
        Reaction.REFUSE,
        "the two meta pages do not belong to two successive transactions",
        "LMDB would silently return to an older state and forget later acknowledged entries",
        REPLACE,
    )
    TABLE_MISSING = Row(
        Reaction.REFUSE, "a table is missing", "all tables are created in the first transaction", REPLACE
    )
    FORMAT_UNKNOWN = Row(
        Reaction.REFUSE,
        "this release does not read the format version",
        "another release wrote the data, and guessing would corrupt it",
        "Start the release that wrote the data, or a release that documents support for this format",
    )
    FORMAT_OF_A_CONSTRUCTION_STEP = Row(
        Reaction.REFUSE,
        "the format is that of a preliminary version, 0.1 to 0.3",
        "the formats of 0.1 to 0.3 were temporary: release 1.0 defines new formats, and no release reads the old ones",
        "Make a new cluster with this release in another directory. To read the old history, use the source tree that "
        "wrote the history: `forebay audit dump --data DIRECTORY`",
    )
    IDENTITY_DAMAGED = Row(
        Reaction.REFUSE,
        "identity or format fails its checksum",
        "the replica that made these promises is unknown",
        REPLACE,
    )
    CLUSTER_FOREIGN = Row(
        Reaction.REFUSE, "the identity names another cluster", "its entries belong to that cluster", OTHER_DIRECTORY
    )
    REPLICA_FOREIGN = Row(
        Reaction.REFUSE, "the identity names another replica", "its votes belong to that replica", OTHER_DIRECTORY
    )
    HARD_STATE_MISSING = Row(
        Reaction.REFUSE, "term and vote are missing", "without them a second vote in a term is possible", REPLACE
    )
    HARD_STATE_DAMAGED = Row(
        Reaction.REFUSE,
        "term and vote fail their checksum",
        "without them a second vote in a term is possible",
        REPLACE,
    )
    MARKS_MISSING = Row(
        Reaction.REFUSE, "the marks are missing", "without them the extent of the promises is unknown", REPLACE
    )
    MARKS_DAMAGED = Row(
        Reaction.REFUSE,
        "the marks fail their checksum",
        "without them the extent of the promises is unknown",
        REPLACE,
    )
    MARKS_OUT_OF_ORDER = Row(
        Reaction.REFUSE,
        "the marks violate base <= applied <= commit",
        "every transaction writes them in order",
        REPLACE,
    )
    COMMIT_BEYOND_LAST = Row(
        Reaction.REFUSE,
        "the commit mark lies beyond the last entry",
        "committed entries are missing, and this replica may be part of the majority that held them",
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
        "transactions are atomic, so this damage happened after the sync. The entry may be acknowledged although the "
        "lazily written commit mark is lower; truncation could remove its copy from the majority",
        REPLACE,
    )
    ENTRY_MISSING = Row(
        Reaction.REFUSE,
        "an index is missing between stored entries",
        "the missing entry was synced, and may have been acknowledged",
        REPLACE,
    )
    ENTRY_BEYOND_LAST = Row(
        Reaction.REFUSE,
        "an entry beyond the last index of the marks",
        "entries and marks are written in one transaction, so these come from different states",
        REPLACE,
    )
    TERM_OUT_OF_ORDER = Row(
        Reaction.REFUSE,
        "an entry's term is below the previous entry's term, or above the hard state's term",
        "terms only grow, and the hard state is written before the entries or together with them",
        REPLACE,
    )
    CHAIN_ROW_MISSING = Row(
        Reaction.REFUSE, "an applied entry has no digest", "each applied entry has a digest", REPLACE
    )
    CHAIN_ROW_DAMAGED = Row(Reaction.REFUSE, "a digest fails its checksum", "the history cannot be proven", REPLACE)
    CHAIN_MISMATCH = Row(
        Reaction.REFUSE,
        "an entry contradicts the chained digest",
        "history was altered, although each checksum is correct",
        REPLACE,
    )
    SYNC_UNFINISHED = Row(
        Reaction.CUT,
        "a record at the end of the sync log with unwritten sectors (the torn tail)",
        "promises are sent after the flush that follows the write, so this record promised nothing",
        "none needed",
    )
    GENERATION_OVER = Row(
        Reaction.CONTINUE,
        "the sync log holds records of an older generation than LMDB names",
        "LMDB began the next generation in the transaction that copied these records, so LMDB contains them",
        "none needed",
    )
    LOG_MARK_MISSING = Row(
        Reaction.REFUSE,
        "LMDB does not name the generation of the sync log",
        "every transaction writes the generation, and the log cannot be read without it",
        REPLACE,
    )
    LOG_MARK_DAMAGED = Row(
        Reaction.REFUSE,
        "the generation of the sync log fails its checksum",
        "the log cannot be read without the generation",
        REPLACE,
    )
    SYNC_LOG_NOT_MADE = Row(
        Reaction.REFUSE,
        "the sync log of a new storage cannot be created",
        "nothing could be synced; LMDB contains all promises so far",
        "Free space, check that this account owns the directory, and start the replica again",
    )
    SYNC_LOG_MISSING = Row(
        Reaction.REFUSE,
        "LMDB refers to a sync log that does not exist",
        "the log contained the entries acknowledged since the last checkpoint",
        f"Restore {LOG_FILE} if it was moved. If it is lost: {OTHERWISE_REPLACE}",
    )
    SYNC_LOG_UNREADABLE = Row(
        Reaction.REFUSE,
        "the sync log is not a regular file, may not be opened, or cannot be read",
        "the log may contain entries acknowledged since the last checkpoint",
        f"Check that {LOG_FILE} is a file that this account owns. If its disk fails: {OTHERWISE_REPLACE}",
    )
    SYNC_LOG_OF_ANOTHER_SIZE = Row(
        Reaction.REFUSE,
        "the sync log is shorter or longer than LMDB says",
        "its size never changes, so entries acknowledged since the last checkpoint may be cut off",
        REPLACE,
    )
    SYNC_LOG_FOREIGN = Row(
        Reaction.REFUSE,
        "the sync log belongs to another replica",
        "the log contains that replica's promises, and this replica's promises are missing",
        REPLACE,
    )
    SYNC_LOG_DAMAGED = Row(
        Reaction.REFUSE,
        "a complete record of the sync log fails its checksum, or is missing although a later one exists",
        "the damage happened after the sync, so the record may be acknowledged, and truncation could lose it",
        REPLACE,
    )
    SYNC_LOG_AHEAD = Row(
        Reaction.REFUSE,
        "the sync log has a later generation than LMDB",
        "LMDB begins each generation first, so the data file is an older copy that lacks acknowledged entries",
        REPLACE,
    )
    SYNC_LOG_CONTRADICTS = Row(
        Reaction.REFUSE,
        "a record of the sync log contradicts LMDB or the records before it",
        "the two files have different histories, although each checksum is correct",
        REPLACE,
    )
    SYNC_LOG_RESTLESS = Row(
        Reaction.REFUSE,
        "a reader in another process finds the sync log changed on every attempt",
        "the two files were read at different times; the replica itself is sound",
        "Read again when the replica is less busy, or read another replica's ledger",
    )
    LOCK_FILE_ALTERED = Row(
        Reaction.CONTINUE,
        "replica.lock is lost or altered",
        "the kernel locks the directory itself, so no second process can open it. This file only informs operators, "
        "and each start writes it again",
        "none needed",
    )
    TABLE_OF_READERS_ALTERED = Row(
        Reaction.CONTINUE,
        f"{READERS_FILE} is lost, or altered while no process has it open",
        "the file only lists which process reads which pages, and a start creates it again. Removal while the replica "
        "runs stops the replica within a second, because pages would be overwritten while later readers use them",
        "restart readers that had it open",
    )
    DISK_FULL = Row(
        Reaction.REFUSE,
        "the disk is full, or fails, when the checkpoint that ends a start is written",
        "the replica can make no promises without writing; earlier promises are kept, and the next start finds them",
        "Free space or replace the disk, then start the replica again",
    )
    FIRST_START_KEPT = Row(
        Reaction.REFUSE,
        "the mark that allows a first start cannot be removed",
        "the mark would allow a start without data after the data was lost",
        "Check that this account may write in that directory, or remove the mark by hand, and start the replica again",
    )
    HAS_RUN = Row(
        Reaction.REFUSE,
        "`--first-start` although there is a data file, a sync log, a snapshot, or the file `member`",
        "a replica that starts empty under its old name has forgotten votes and entries that other replicas rely on",
        f"Start it without `--first-start`. If its data is lost: {OTHERWISE_REPLACE}",
    )
    MEMBER_NOTE_DAMAGED = Row(
        Reaction.REFUSE,
        "the file `member` cannot be read, or does not contain an ID of this replica",
        "the file contains the ID under which the replica joined; promises are bound to that ID",
        "Write the ID that `forebay cluster members --json` shows for this replica into it, or, if it cannot be "
        "written: " + OTHERWISE_REPLACE,
    )
    MEMBER_NOTE_CONTRADICTS = Row(
        Reaction.REFUSE,
        "the file `member` is lost, or contains another ID than the storage",
        "the storage's promises belong to the storage's ID, and must not be continued under another ID",
        "If `forebay cluster members --json` shows the storage's ID for this replica, write it into the file "
        "`member`. If it shows another ID, this directory belongs to an earlier member: " + OTHERWISE_REPLACE,
    )
    PROMISES_FORGOTTEN = Row(
        Reaction.REFUSE,
        "the file `forgotten` exists, with any content",
        "the leader found that this replica lost entries that it had acknowledged; a restart does not restore them",
        REPLACE,
    )
    INCARNATION_OVER = Row(
        Reaction.REFUSE,
        "the file `superseded` exists, with any content",
        "the cluster was recovered after a majority was lost, and continues as a later incarnation without this "
        "replica",
        "Keep the directory for an examination: it may contain entries that the recovery lost (`forebay audit dump "
        "--data DIRECTORY`). Then move it away, run `forebay cluster add` with its name and addresses, and start it "
        "again",
    )
    SNAPSHOT_UNFINISHED = Row(
        Reaction.CUT,
        "a snapshot that was being written or received when the process died",
        "the snapshot never had its final name, so nothing relies on it; valid received frames are kept",
        "none needed",
    )
    SNAPSHOT_LOST = Row(
        Reaction.CONTINUE,
        "some or all snapshots are missing, and the ledger is complete after an older one or from its beginning",
        "the ledger contains the data of every snapshot: more entries are applied, and the start takes longer",
        "none needed",
    )
    SNAPSHOT_DAMAGED = Row(
        Reaction.CONTINUE,
        "a snapshot is truncated, fails a checksum, or belongs to another cluster, and an older one or the ledger "
        "suffices",
        "every byte is verified before use; the snapshot is ignored and not sent to peers; the log gives the reason",
        "none needed; if it recurs, check the disk",
    )
    SNAPSHOT_NOT_OF_THIS_LEDGER = Row(
        Reaction.CONTINUE,
        "a sound snapshot is ahead of the applied mark, or its digest contradicts the ledger, and another one suffices",
        "the process died before it installed the snapshot, or the histories differ; the snapshot is ignored",
        "none needed",
    )
    SNAPSHOT_NEEDED = Row(
        Reaction.REFUSE,
        "no snapshot is usable, and the ledger has a gap where one was installed",
        "the state cannot be rebuilt without the entries of the gap",
        f"If the snapshot was moved, restore it. If it is lost: {OTHERWISE_REPLACE}",
    )
    SNAPSHOTS_UNUSABLE = Row(
        Reaction.REFUSE,
        "the directory of the snapshots cannot be created, read or cleaned",
        "without snapshots the journal only grows, and no snapshot in the directory can be trusted",
        "Follow the message: free space, or make it a directory that this account owns",
    )
    LEDGER_DAMAGED = Row(
        Reaction.REFUSE,
        "an entry before those that are checked at every start is damaged or missing, and no snapshot replaces it",
        "history that was acknowledged is damaged, and the state cannot be rebuilt without it",
        REPLACE,
    )
    STATE_CONTRADICTS = Row(
        Reaction.REFUSE,
        "the state rebuilt from snapshot and entries contradicts the revision in the applied mark",
        "one of these was altered, although each checksum is correct, or this release applies entries differently",
        REPLACE,
    )
    STATE_NOT_THE_RECORDED = Row(
        Reaction.REFUSE,
        "the state rebuilt from snapshot and entries contradicts the digest that the ledger records",
        "the snapshot or the history was altered, although each checksum is correct, or this release applies entries "
        "differently",
        f"Keep the directory for an examination. {REPLACE}",
    )

    @property
    def title(self) -> str:
        """Name of the condition in messages and documents: `directory empty`."""
        return self.name.lower().replace("_", " ")


class RecoveryRefused(StorageFailed):
    """Storage rejected at opening. `condition` is the row of the recovery table; the message names location and remedy.

    `name` is the replica's configured name, for the commands in the remedy; None if the caller does not know the name.
    """

    def __init__(self, condition: Condition, place: str, name: str | None = None) -> None:
        row = condition.value
        remedy = row.remedy if name is None else row.remedy.replace("NAME", name)
        super().__init__(f"{place}: {condition.title}: {row.reason}. {remedy}.")
        self.condition = condition
        self.place = place
