"""Snapshots: a replica's state in a file that is complete, checksummed, and verified before use."""

from snapshots.finalize import (
    SNAPSHOT_BYTES_MAX,
    SnapshotAbandoned,
    SnapshotFailed,
    SnapshotName,
    UnsyncedDisk,
    write_snapshot,
)
from snapshots.image import Assembly, Image, ImageRejected, to_sections
from snapshots.receive import Receiver
from snapshots.restore import SnapshotRefused, Summary, inspect, load_snapshot
from snapshots.store import SnapshotStore
