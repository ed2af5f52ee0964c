"""The maps of a State, each in one row: builder, digest, snapshot and invariants go through this table.

A map that is derived from others has no row. To add one: its field in State, its annotation in StateBuilder, and its
row here. It is empty below the feature level that its events came with, and then leaves no trace in digests and
snapshots.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from replica.messages import Receipt
from replica.model import (
    Account,
    Buffer,
    Job,
    JobTransfers,
    License,
    Mail,
    Node,
    Partition,
    PersistentBuffer,
    Pool,
    Qos,
    Rates,
    Reservation,
)
from replica.values import (
    ACCOUNTS_MAX,
    CONSUMED_MAX,
    JOBS_IN_STATE_MAX,
    LICENSES_MAX,
    MAILS_OWED_MAX,
    NODES_MAX,
    PARTITIONS_MAX,
    PERSISTENT_BUFFERS_MAX,
    POOLS_MAX,
    QOS_MAX,
    RECEIPTS_MAX,
    RESERVATIONS_MAX,
)

if TYPE_CHECKING:
    from replica.state.state import State

CommandId = Annotated[bytes, msgspec.Meta(min_length=1, max_length=64)]


class Table(msgspec.Struct, frozen=True):
    """One map of a State. `section` is its number in snapshots: append only, never reused (law 12)."""

    field: str
    section: int
    key: Any
    record: type
    records_max: int
    own_key: str = ""
    """The attribute of a record that is its key: the record then stands alone, else a pair of key and record."""
    of_job: bool = False
    """Whether the keys are jobs that must be in the state."""

    def pair(self, written: Any) -> tuple[Any, Any]:
        """Return key and record of what stands in a section."""
        if self.own_key:
            return getattr(written, self.own_key), written
        key, record = written
        return key, record

    def written(self, state: State) -> Iterator[Any]:
        """Yield what stands in a section, in the order of keys; receipts in the order of their revisions."""
        records = getattr(state, self.field)
        pairs = records.items() if self.field == "receipts" else ((key, records[key]) for key in sorted(records))
        return (record for _, record in pairs) if self.own_key else iter(pairs)

    def misplaced(self, state: State) -> Iterator[str]:
        """Yield a sentence for each record under a key that is not its own, or of a job that does not exist."""
        records = getattr(state, self.field)
        if self.own_key:
            own_key = attrgetter(self.own_key)
            for key, record in records.items():
                if own_key(record) != key:
                    yield f"{self.field}: the record under {key!r} says that it is {own_key(record)!r}"
        if self.of_job:
            for job_id in records:
                if job_id not in state.jobs:
                    yield f"{self.field}: there is a record of job {job_id}, which does not exist"


TABLES: tuple[Table, ...] = (
    Table("jobs", 10, int, Job, JOBS_IN_STATE_MAX, "id"),
    Table("buffers", 20, int, Buffer, JOBS_IN_STATE_MAX, "job", of_job=True),
    Table("persistent", 24, str, PersistentBuffer, PERSISTENT_BUFFERS_MAX, "name"),
    Table("transfers", 28, int, JobTransfers, JOBS_IN_STATE_MAX, of_job=True),
    Table("pools", 40, str, Pool, POOLS_MAX, "name"),
    Table("rates", 44, str, Rates, POOLS_MAX + 1),
    Table("nodes", 50, str, Node, NODES_MAX, "name"),
    Table("partitions", 54, str, Partition, PARTITIONS_MAX, "name"),
    Table("accounts", 60, str, Account, ACCOUNTS_MAX, "name"),
    Table("qos", 62, str, Qos, QOS_MAX, "name"),
    Table("licenses", 64, str, License, LICENSES_MAX, "name"),
    Table("reservations", 66, str, Reservation, RESERVATIONS_MAX, "name"),
    Table("consumed", 68, str, int, CONSUMED_MAX),
    Table("mails", 80, str, Mail, MAILS_OWED_MAX, "key"),
    Table("receipts", 90, CommandId, Receipt, 2 * RECEIPTS_MAX),
)
"""Every map that is not derived, in the order in which they stand in digests and snapshots. Append only, by number."""
