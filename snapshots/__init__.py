"""Snapshots: a replica's state in a file that is complete, checksummed, and verified before use."""

from forebay.snapshots.finalize import (
    SNAPSHOT_BYTES_MAX,
    SnapshotAbandoned,
    SnapshotFailed,
    SnapshotName,
    UnsyncedDisk,
    write_snapshot,
)
from forebay.snapshots.image import Assembly, Image, ImageRejected, to_sections
from forebay.snapshots.receive import Receiver
from forebay.snapshots.restore import SnapshotRefused, Summary, inspect, load_snapshot
from forebay.snapshots.store import SnapshotStore
