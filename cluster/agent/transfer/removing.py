"""A move's last step: sources go when everything is durable at its destination, and only what did not change since."""

from __future__ import annotations

import contextlib
import os

from cluster.agent.transfer.checkpoint import Copied, State
from cluster.agent.transfer.errors import TransferFailed, root_cause
from cluster.agent.transfer.manifest import DIRECTORY, FILE, Record
from cluster.agent.transfer.places import Places, is_there
from cluster.agent.transfer.receipts import with_slots
from cluster.agent.transfer.state import Desk


def remove_sources(desk: Desk) -> int:
    """Remove the sources of the items that are moved, and return how many files went.

    A source that changed stays, and so does a directory that still has something in it. TransferFailed if the file
    system does not let one go: everything is at its destination then.
    """
    removed = 0
    directories: list[Record] = []
    with desk.places() as places:

        def leave(record: Record | None) -> None:
            while directories and (record is None or not _lies_in(record, directories[-1])):
                gone = directories.pop()
                if gone.path:
                    # Something may be in it that was not moved, or an earlier attempt removed it.
                    with contextlib.suppress(OSError, TransferFailed):
                        directory, name = places.source(gone)
                        os.rmdir(name, dir_fd=directory)

        for record, slot in with_slots(desk.manifest, desk.slots):
            if not desk.items[record.item].move:
                continue
            leave(record)
            try:
                if record.kind == DIRECTORY:
                    directories.append(record)
                elif record.kind == FILE and slot.state is State.DONE:
                    removed += _remove(places, record, slot.copied)
            except FileNotFoundError:
                removed += 1
            except OSError as error:
                raise desk.failed(record, error) from error
            except TransferFailed as error:
                if not isinstance(root_cause(error), FileNotFoundError):
                    raise
                removed += 1
        leave(None)
    return removed


def _remove(places: Places, record: Record, copied: Copied) -> int:
    directory, name = places.source(record)
    now = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if (now.st_ino, now.st_dev) != (record.inode, record.device):
        return 0
    if (now.st_size, now.st_mtime_ns) != (copied.size, copied.mtime_ns):
        return 0
    if not is_there(places, record, copied):
        # Somebody took the copy away, so this is the last one.
        return 0
    os.unlink(name, dir_fd=directory)
    return 1


def _lies_in(record: Record, directory: Record) -> bool:
    if record.item != directory.item:
        return False
    return not directory.path or record.path.startswith(directory.path + b"/")
