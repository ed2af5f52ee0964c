"""The maps of a State that came after feature level 2, each in one row: digest and snapshot go through this table.

Such a map is left out of both while it is empty, so that members of an earlier release agree as long as nothing of the
new level was written. To add one: its field in State, Facts and Draft, and its row here, at the end.
"""

from __future__ import annotations

import msgspec

from replica.model import (
    Account,
    AccountUser,
    JobTransfers,
    LeftOut,
    License,
    Limit,
    Mail,
    Measured,
    Partition,
    PersistentBuffer,
    PoolUnit,
    Qos,
    Rates,
    Reservation,
    ReservedSpace,
    SchedulingRules,
    Site,
    TransferCheckpoint,
    TransferReceipt,
    TransferRules,
)
from replica.values import (
    ACCOUNTS_MAX,
    CONSUMED_MAX,
    JOBS_IN_STATE_MAX,
    LICENSES_MAX,
    MAILS_OWED_MAX,
    PARTITIONS_MAX,
    PERSISTENT_BUFFERS_MAX,
    POOLS_MAX,
    QOS_MAX,
    RESERVATIONS_MAX,
)


class LaterMap(msgspec.Struct, frozen=True):
    """One map. `section` is its number in snapshots: from 9 on, append only, never reused (law 12)."""

    field: str
    section: int
    key: type
    record: type
    records_max: int
    level: int = 3
    """The feature level that it came with: it is empty below (`replica.messages.features` has what the numbers stand
    for)."""


LATER_MAPS: tuple[LaterMap, ...] = (
    LaterMap("persistent", 10, str, PersistentBuffer, PERSISTENT_BUFFERS_MAX),
    LaterMap("sites", 11, str, Site, 1),
    LaterMap("pool_units", 12, str, PoolUnit, POOLS_MAX),
    LaterMap("accounts", 13, str, Account, ACCOUNTS_MAX),
    LaterMap("qos", 14, str, Qos, QOS_MAX),
    LaterMap("licenses", 15, str, License, LICENSES_MAX),
    LaterMap("reservations", 16, str, Reservation, RESERVATIONS_MAX),
    LaterMap("scheduling_rules", 17, str, SchedulingRules, 1),
    LaterMap("rates", 18, str, Rates, POOLS_MAX + 1),
    LaterMap("mails", 40, str, Mail, MAILS_OWED_MAX),
    LaterMap("transfer_rules", 50, str, TransferRules, 1, level=4),
    LaterMap("transfers", 51, int, JobTransfers, JOBS_IN_STATE_MAX, level=4),
    LaterMap("partitions", 60, str, Partition, PARTITIONS_MAX, level=4),
    LaterMap("consumed", 61, str, int, CONSUMED_MAX, level=4),
)

LATER_SHAPED: tuple[type[msgspec.Struct], ...] = (
    PersistentBuffer,
    Site,
    Limit,
    AccountUser,
    Account,
    Qos,
    License,
    ReservedSpace,
    Reservation,
    SchedulingRules,
    Measured,
    Rates,
    Mail,
    TransferRules,
    JobTransfers,
    TransferReceipt,
    LeftOut,
    TransferCheckpoint,
    Partition,
)
"""Every kind of record in those maps. Append only: positions are wire numbers (law 12)."""
