"""Whether a replica has run, as far as the directory of its journal says: then it must not begin without data."""

import os
from pathlib import Path

from wal import meta_pages, sync_log
from wal.failures import DATA_FILE, LOG_FILE, RecoveryRefused


def of_a_life(directory: Path) -> Path | None:
    """A file here that a replica may have promised something with; None if there is none.

    What a first start that was interrupted leaves is no such file; one that cannot be read is. Nothing is locked.
    """
    if meta_pages.may_hold_a_transaction(directory / DATA_FILE):
        return directory / DATA_FILE
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return directory
    try:
        # A log is made after the data file: where it is alone, the data file was lost.
        alone = os.path.lexists(directory / LOG_FILE) and not os.path.lexists(directory / DATA_FILE)
        used = alone or sync_log.is_used(sync_log.DiskStore(descriptor, readonly=True), directory)
    except RecoveryRefused:
        used = True
    finally:
        os.close(descriptor)
    return directory / LOG_FILE if used else None
