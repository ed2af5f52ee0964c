"""Store of the checkpoints that a witness has cosigned: one row in SQLite for each log.

A row is durable before its cosignature is sent. The store also has evidence of forks: validly signed checkpoints that
contradict a cosigned checkpoint, because the root differs or the trees are not consistent.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from forebay.cluster.security.proofs import EMPTY_ROOT
from forebay.cluster.witness.keys import WitnessError

EVIDENCE_MAX: Final = 64
"""Maximum number of rejected checkpoints kept per log: the first ones, because one is enough as proof."""

LOCK_WAIT_S: Final = 5.0
"""Wait for another process's lock, seconds; `forebay audit witness list` holds it briefly."""

# Sizes are u64, but SQLite's integers are signed.
_SCHEMA: Final = """
    CREATE TABLE seen (origin TEXT PRIMARY KEY, size TEXT NOT NULL, root BLOB NOT NULL, at_s INTEGER NOT NULL,
        note TEXT NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE evidence (origin TEXT NOT NULL, at_s INTEGER NOT NULL, why TEXT NOT NULL, note TEXT NOT NULL,
        UNIQUE (origin, note)) STRICT;
    CREATE TABLE witness (key TEXT NOT NULL) STRICT;
    PRAGMA user_version = 1;
"""

_T = TypeVar("_T")


class SeenCheckpoint(NamedTuple):
    """Last cosigned checkpoint of a log, with the time (seconds since 1970), and the note without the cosignature."""

    origin: str
    size: int
    root: bytes
    at_s: int
    note: str


class Evidence(NamedTuple):
    """A validly signed checkpoint, rejected because it contradicts a cosigned one."""

    origin: str
    at_s: int
    why: str
    note: str


class CheckpointStore:
    """Database of one witness, used by one thread at a time."""

    def __init__(self, path: Path, key: str) -> None:
        """Open the database of the key (in verifier form).

        Raises:
            WitnessError: The database cannot be used or belongs to another key.
        """
        self._path = path
        if not path.exists():
            raise WitnessError(
                f"the database {path} does not exist",
                "restore it; a witness that lost the record of its cosignatures must not continue with the same key: "
                "if the database is lost, create a new key with `forebay audit witness key`, and configure it in the "
                "clusters",
            )
        self._connection = _open_database(path)
        found = self._with_errors(lambda: self._connection.execute("SELECT key FROM witness").fetchall())
        if found != [(key,)]:
            self.close()
            raise WitnessError(
                f"the database {path} belongs to another key", "use the database that belongs to the key"
            )

    @classmethod
    def create(cls, path: Path, key: str) -> None:
        """Create an empty, durable database for a key.

        Raises:
            WitnessError: The file exists, or cannot be written.
        """
        if path.exists():
            raise WitnessError(f"{path} already exists", "use another file: a database is never overwritten")
        connection = _open_database(path)
        try:
            connection.executescript(_SCHEMA)
            connection.execute("INSERT INTO witness VALUES (?)", (key,))
        except sqlite3.Error as error:
            raise WitnessError(f"{path} cannot be written ({error})", "use a file that you may write") from error
        finally:
            connection.close()

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def last(self, origin: str) -> SeenCheckpoint:
        """Return the last cosigned checkpoint of a log; the empty tree at second 0 if there is none."""
        found = self._with_errors(
            lambda: self._connection.execute(
                "SELECT origin, size, root, at_s, note FROM seen WHERE origin = ?", (origin,)
            ).fetchone()
        )
        return _row(found) if found else SeenCheckpoint(origin, 0, EMPTY_ROOT, 0, "")

    def go_on(self, before: SeenCheckpoint, after: SeenCheckpoint) -> bool:
        """Store the new checkpoint durably; return False if `before` is no longer the last one."""

        def exchange() -> bool:
            with self._transaction() as connection:
                found = connection.execute("SELECT size, root FROM seen WHERE origin = ?", (after.origin,)).fetchone()
                if (found or ("0", EMPTY_ROOT)) != (str(before.size), before.root):
                    return False
                row = (after.origin, str(after.size), after.root, after.at_s, after.note)
                connection.execute("INSERT OR REPLACE INTO seen VALUES (?, ?, ?, ?, ?)", row)
                return True

        return self._with_errors(exchange)

    def keep(self, evidence: Evidence) -> None:
        """Store evidence of a fork, up to EVIDENCE_MAX."""

        def insert() -> None:
            with self._transaction() as connection:
                count = "SELECT count(*) FROM evidence WHERE origin = ?"
                if connection.execute(count, (evidence.origin,)).fetchone()[0] < EVIDENCE_MAX:
                    connection.execute("INSERT OR IGNORE INTO evidence VALUES (?, ?, ?, ?)", evidence)

        self._with_errors(insert)

    def read_all(self) -> tuple[list[SeenCheckpoint], list[Evidence]]:
        """Return all checkpoints by origin, and all evidence, oldest first."""

        def read() -> tuple[list[SeenCheckpoint], list[Evidence]]:
            rows = self._connection.execute("SELECT origin, size, root, at_s, note FROM seen ORDER BY origin")
            kept = self._connection.execute("SELECT origin, at_s, why, note FROM evidence ORDER BY origin, rowid")
            return [*map(_row, rows)], [Evidence(*one) for one in kept]

        return self._with_errors(read)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _with_errors(self, work: Callable[[], _T]) -> _T:
        try:
            return work()
        except sqlite3.Error as error:
            raise WitnessError(
                f"the database {self._path} cannot be used ({error})", "check its disk and its permissions"
            ) from error


def _open_database(path: Path) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(path, timeout=LOCK_WAIT_S, isolation_level=None, check_same_thread=False)
        # With these settings, a commit is durable, including the directory entry of SQLite's journal.
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("PRAGMA synchronous = EXTRA")
    except sqlite3.Error as error:
        raise WitnessError(f"{path} cannot be opened ({error})", "use a file that you may write") from error
    return connection


def _row(found: tuple[str, str, bytes, int, str]) -> SeenCheckpoint:
    origin, size, root, at_s, note = found
    return SeenCheckpoint(origin, int(size), bytes(root), at_s, note)
