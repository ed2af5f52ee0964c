"""Transfer from its plan to its receipt: plans, has everything copied, makes it durable, removes what is moved.

Sources of a move go last, when everything is durable at its destination, and only what did not change since."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from cluster.agent.files import PathRefused, is_local, kind_of, opened_parent
from cluster.agent.transfer import helpers
from cluster.agent.transfer.errors import Paused, TransferFailed, os_message, root_cause
from cluster.agent.transfer.fence import discard_all
from cluster.agent.transfer.file_copy import copy_acls, copy_xattrs, mode_alone, publish, taken, xattrs_of
from cluster.agent.transfer.manifest import DIRECTORY, FILE, LINK, Manifest, Record
from cluster.agent.transfer.moving import move_by
from cluster.agent.transfer.options import Item, Options
from cluster.agent.transfer.plan import STEP_RECORDS, earlier, plan
from cluster.agent.transfer.programs import Backend, Rclone, Rsync, Template
from cluster.agent.transfer.rate_limit import Stopped
from cluster.agent.transfer.receipts import Summed, with_rows, write_lines
from cluster.agent.transfer.record_paths import (
    PRIVATE_MODE,
    UNRECORDED_MODE,
    RecordPaths,
    check_collisions,
    discard,
    is_there,
    is_unrecorded,
    make_directory,
    remove_left,
)
from cluster.agent.transfer.status_table import EMPTY, NO_FLAG, Copied, Flag, RecordsFailed, State, write_header
from cluster.agent.transfer.transfer_state import POLL_RECORDS, Context, Moved, TransferState
from cluster.agent.transfer.workspace import Workspace
from cluster.system import is_disk_full, sync_file_system
from replica.model import TransferReceipt

NATIVE = "native"


def _copy_all(transfer: TransferState) -> None:
    """Copy every pending file by the backend of its item. TransferFailed names the one that cannot be; Fenced."""
    for name in dict.fromkeys(item.backend for item in transfer.items):
        if name != NATIVE:
            move_by(transfer, _backend_of(transfer, name))
    helpers.copy_all(transfer)


def _backend_of(transfer: TransferState, name: str) -> Backend:
    """Return the backend of a name. TransferFailed if there is none."""
    if name == "rsync":
        return Rsync(sparse=transfer.options.sparse)
    if name == "rclone":
        return Rclone()
    if name == "template":
        return Template(transfer.options.template, transfer.options.local)
    raise TransferFailed(f"{name!r} is no backend of this release; use native, rsync, rclone or template")


COPYING: Final = 2
COMMITTING: Final = 4
"""Phases in the counters (cluster.agent.transfer.progress.PHASES)."""

_PASSING: Final = frozenset({errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.EAGAIN, errno.EBUSY, errno.ECONNRESET})
"""What the kernel says of storage that may be back soon. Not that it is full: what is half done would fill it."""

DIRECTORY_MODE_BITS: Final = 0o3777
"""What is copied of a directory's mode: set-group-id and sticky say who may do what in it, and run nothing."""

DIRECTORIES_SYNCED_ALONE_MAX: Final = 16
"""Directories that are synced one by one, count: from there on one sync of their file system costs less."""


def resumable(items: Sequence[Item], options: Options, workspace: Workspace) -> bool:
    """Return whether an earlier attempt at the same transfer left something to go on from. OSError."""
    return earlier(items, options, workspace) is not None


def run_transfer(items: Sequence[Item], options: Options, context: Context) -> TransferReceipt:
    """Move the items, and return what was done.

    On return all of it is durable at the destination. TransferFailed says why not, with `item` and `receipt`; so do
    Fenced, OSError (the agent's own records) and whatever `context` raises. However it ends, each destination is
    absent, old or complete.
    """
    return _Transfer(items, options, context).run()


class _Transfer:
    def __init__(self, items: Sequence[Item], options: Options, context: Context) -> None:
        self._items = items
        self._options = options
        self._context = context
        self._started_at = context.clock.now()
        self._transfer: TransferState | None = None

    def run(self) -> TransferReceipt:
        try:
            return self._run()
        except TransferFailed as error:
            self._clean_up(keep=_goes_away(error))
            if self._transfer is not None:
                with contextlib.suppress(OSError):
                    error.receipt = self._receipt(self._transfer, complete=False)
            raise
        except (Paused, Stopped):
            raise
        except BaseException as error:
            self._clean_up(keep=_goes_away(error))
            raise

    def _run(self) -> TransferReceipt:
        context, options = self._context, self._options
        claimed = earlier(self._items, options, context.workspace) is not None
        if claimed:
            # What the earlier attempt left is in its staging directories.
            self._claim()
        planned = plan(self._items, options, context)
        context.planned(planned.amounts)
        if planned.begins:
            manifest = Manifest(planned.files.manifest, planned.header.manifest_bytes)
            check_collisions(self._items, manifest, planned.begins)
        if not claimed:
            self._claim()
        transfer = TransferState(self._items, options, context, planned)
        if options.limit_bytes and planned.header.size_bytes > options.limit_bytes:
            raise TransferFailed(
                f"the transfers need {planned.header.size_bytes} bytes, the buffer has {options.limit_bytes}; "
                "ask for more capacity or stage less"
            )
        self._transfer = transfer
        transfer.tell(
            transfer.counters._replace(
                files_done=planned.resumed_files,
                bytes_done=planned.resumed_bytes,
                resumed_files=planned.resumed_files,
                resumed_bytes=planned.resumed_bytes,
                durable_files=planned.resumed_files,
                durable_bytes=planned.resumed_bytes,
                steps=planned.header.records,
                phase=COPYING,
            )
        )
        if not planned.header.complete:
            is_recorded = planned.is_recorded and not context.workspace.in_memory
            _make_directories(transfer, planned.directories, PRIVATE_MODE if is_recorded else UNRECORDED_MODE)
            _copy_all(transfer)
            transfer.tell(transfer.counters._replace(phase=COMMITTING))
            _make_links(transfer, planned.links)
            _finish_directories(transfer, planned.directories)
            if planned.absent and not options.partial:
                # Only now: nobody is to lose the rest for it.
                number, reason = planned.absent[0]
                more = f" (and {len(planned.absent) - 1} more)" if len(planned.absent) > 1 else ""
                raise TransferFailed(f"{reason}{more}; everything else is at its destination", number)
            try:
                transfer.slots.sync()
                write_header(planned.files.control, msgspec.structs.replace(planned.header, complete=True))
            except RecordsFailed as error:
                # Everything is durable at its destination. Only a move has to know that for certain later on.
                if not is_disk_full(error) or any(item.move for item in self._items):
                    raise
        removed = remove_sources(transfer) if any(item.move for item in self._items) else 0
        receipt = self._receipt(transfer, complete=True, removed=removed)
        context.release()
        _finish_tops(transfer, planned.directories)
        return receipt

    def _claim(self) -> None:
        self._items = [item._replace(staging=self._context.claim(item)) for item in self._items]

    def _receipt(self, transfer: TransferState, *, complete: bool, removed: int = 0) -> TransferReceipt:
        summed = Summed(self._options, transfer.items, complete=complete)
        write_lines(self._context.workspace.receipts, transfer.manifest, transfer.slots, summed)
        counters = transfer.counters
        return TransferReceipt(
            stage=self._context.stage,
            attempt=self._context.attempt,
            complete=complete,
            backends=tuple(dict.fromkeys(item.backend for item in transfer.items)),
            files=summed.files,
            directories=summed.directories,
            links=summed.links,
            size_bytes=summed.size_bytes,
            written_bytes=transfer.written_bytes,
            resumed_files=counters.resumed_files,
            resumed_bytes=counters.resumed_bytes,
            retries=summed.retries,
            removed_files=removed,
            left_out=summed.left_out,
            left_out_first=tuple(summed.left_out_first),
            stripped=summed.stripped,
            dangling=summed.dangling,
            verify=self._options.verify.word,
            algorithm=self._options.algorithm,
            digest=summed.digest,
            manifest_digest=f"xxh3-128:{transfer.header.manifest_digest.hex()}",
            started_at=self._started_at,
            ended_at=self._context.clock.now(),
        )

    def _clean_up(self, *, keep: bool) -> None:
        """Remove the temporary files of what was under way, unless the next attempt goes on with them."""
        transfer = self._transfer
        if transfer is None or keep:
            return
        for staging in {item.staging for item in transfer.items if item.staging >= 0}:
            discard_all(staging)
        with contextlib.suppress(OSError), contextlib.closing(transfer.paths()) as paths:
            under_way = _under_way(transfer)
            if not under_way:
                return
            for record in transfer.manifest.records():
                if record.index not in under_way:
                    continue
                with contextlib.suppress(OSError, TransferFailed):
                    discard(*paths.part(record))
                    transfer.slots.put(record.index, EMPTY._replace(tries=transfer.slots.get(record.index).tries))
                under_way.discard(record.index)
                if not under_way:
                    return


def _under_way(transfer: TransferState) -> set[int]:
    """Return the records that have temporary files: large ones, and what is left of a batch."""
    found: set[int] = set()
    for base in range(0, transfer.header.records, POLL_RECORDS):
        states = transfer.slots.states(base, min(POLL_RECORDS, transfer.header.records - base))
        if State.STARTED in states or State.READY in states:
            found.update(base + at for at, state in enumerate(states) if state in (State.STARTED, State.READY))
    return found


def _goes_away(error: BaseException) -> bool:
    """Whether another attempt may well go on from here, and what is half done takes no room that it lacks."""
    cause = root_cause(error)
    return isinstance(cause, OSError) and cause.errno in _PASSING


def make_top(item: Item, workspace: Workspace) -> None:
    """Make the directory that a tree goes to, which only its owner may use as yet, unless it is there.

    That it is this transfer's to give its source's permissions is durable before it can be seen. PathRefused, OSError.
    """
    target = item.destination
    if not target.parts:
        return
    mine = target._replace(anchor=os.dup(target.anchor))
    with opened_parent(mine, forbidden=item.destination_barred, create=True) as (directory, name):
        try:
            os.stat(name, dir_fd=directory, follow_symlinks=False)
            return
        except FileNotFoundError:
            is_recorded = workspace.note_made(os.fsencode(target.path))
        try:
            os.mkdir(name, PRIVATE_MODE if is_recorded else UNRECORDED_MODE, dir_fd=directory)
            os.fsync(directory)
        except FileExistsError:
            return
        except OSError as error:
            raise PathRefused(f"the directory {target.path} cannot be made: {os_message(error)}") from error


def _make_directories(transfer: TransferState, directories: Sequence[int], mode: int) -> None:
    """Make all directories, so that whoever copies finds them.

    Which of them are this transfer's own, and get what their sources have, is durable before the first one is made; or
    their mode says it, where no record can be kept.
    """
    with contextlib.closing(transfer.paths()) as paths:
        absent: Record | None = None
        making = False
        for record in _at(transfer, directories):
            there = None
            if absent is None or not record.lies_in(absent):
                there = _mode_there(transfer, record, paths)
                absent = record if there is None else None
            made = transfer.slots.get(record.index).state is State.MADE or (there is not None and is_unrecorded(there))
            if not made and not record.path:
                made = transfer.context.workspace.was_made(os.fsencode(transfer.items[record.item].destination.path))
            elif absent is not None:
                making = made = True
            transfer.slots.put(record.index, EMPTY._replace(state=State.MADE if made else State.THERE))
        if making:
            transfer.slots.sync()
    with contextlib.closing(transfer.paths()) as paths:
        for record in _at(transfer, directories):
            if record.path and transfer.slots.get(record.index).state is State.MADE:
                _, shown = transfer.shown(record)
                try:
                    make_directory(*paths.destination(record), shown, mode)
                except (OSError, TransferFailed) as error:
                    raise transfer.failed(record, error) from error


def _mode_there(transfer: TransferState, record: Record, paths: RecordPaths) -> int | None:
    """Return the mode of the directory that a record goes to, None where there is none; the top of a tree is made."""
    _, shown = transfer.shown(record)
    try:
        if not record.path:
            make_top(transfer.items[record.item], transfer.context.workspace)
            return os.fstat(paths.destination_directory(record)).st_mode
        directory, name = paths.destination(record)
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        if not stat.S_ISDIR(mode):
            raise TransferFailed(f"{shown} exists and is a {kind_of(mode)}, not a directory")
        return mode
    except FileNotFoundError:
        return None
    except PathRefused as error:
        raise TransferFailed(str(error), record.item) from error
    except (OSError, TransferFailed) as error:
        raise transfer.failed(record, error) from error


def _make_links(transfer: TransferState, links: Sequence[int]) -> None:
    """Make every link that is not there, when all directories are; they are durable when those are.

    TransferFailed names the one that cannot be; Fenced.
    """
    with contextlib.closing(transfer.paths()) as paths:
        for record in _at(transfer, links):
            if transfer.slots.get(record.index).state is not State.DONE:
                try:
                    _make_link(transfer, record, paths)
                except (OSError, TransferFailed) as error:
                    raise transfer.failed(record, error) from error


def _make_link(transfer: TransferState, record: Record, paths: RecordPaths) -> None:
    replace = transfer.options.replace
    _, shown = transfer.shown(record)
    directory, name = paths.destination(record)
    _check_link_target(directory, name, shown, replace=replace)
    staging, part = paths.part(record)
    discard(staging, part)
    os.symlink(record.target, part, dir_fd=staging)
    try:
        os.utime(part, ns=(record.mtime_ns, record.mtime_ns), dir_fd=staging, follow_symlinks=False)
        status = os.stat(part, dir_fd=staging, follow_symlinks=False)
        copied = Copied(status.st_size, status.st_mtime_ns, status.st_ino)
        transfer.slots.mark(record.index, State.READY, copied)
        if not replace:
            transfer.slots.sync()
        publish(staging, part, directory, name, shown, replace=replace)
    except (OSError, TransferFailed):
        with contextlib.suppress(OSError):
            discard(staging, part)
        raise
    transfer.slots.mark(record.index, State.DONE, copied)


def _check_link_target(directory: int, name: bytes, shown: str, *, replace: bool) -> None:
    """See that a link may take the name."""
    try:
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not replace:
        raise taken(shown)
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise TransferFailed(f"{shown} exists and is a {kind_of(mode)}; a link can only replace a file or a link")


def _finish_directories(transfer: TransferState, directories: Sequence[int]) -> None:
    """Give directories that were made what their sources have, and make all of them durable."""
    alone = len(directories) <= DIRECTORIES_SYNCED_ALONE_MAX
    with contextlib.closing(transfer.paths()) as paths:
        for number, record in enumerate(_at(transfer, directories)):
            descriptor = paths.destination_directory(record)
            try:
                row = transfer.slots.get(record.index)
                if row.state is State.MADE:
                    flags = _set_directory(transfer, record, paths, descriptor)
                    transfer.slots.put(record.index, row._replace(copied=row.copied._replace(flags=flags)))
                if alone or not is_local(descriptor):
                    os.fsync(descriptor)
            except OSError as error:
                raise transfer.failed(record, error) from error
            if number % STEP_RECORDS == 0:
                transfer.tell(transfer.counters._replace(directories_done=number))
        if not alone:
            _sync_file_systems(transfer, directories, paths)
    transfer.tell(transfer.counters._replace(directories_done=len(directories)))


def _set_directory(transfer: TransferState, record: Record, paths: RecordPaths, descriptor: int) -> Flag:
    """Give a directory what its source has, and say what it did not take. OSError."""
    flags, acls = NO_FLAG, transfer.items[record.item].acls
    mode, source, names = record.mode & DIRECTORY_MODE_BITS, -1, list[str]()
    with contextlib.suppress(TransferFailed):
        # A source that is gone since has none to give.
        source = paths.source_directory(record)
        names = xattrs_of(source)
    if names and transfer.options.xattrs:
        flags |= copy_xattrs(source, descriptor, names)
    if names and not acls:
        mode = mode_alone(source, names, mode)
    # The owner keeps his own permissions, or nobody but root could fill or remove it; the group that the directory
    # above passes on stays passed on.
    inherited = os.fstat(descriptor).st_mode & stat.S_ISGID
    os.fchmod(descriptor, mode | inherited | 0o700)
    if names:
        flags |= copy_acls(source, descriptor, names, asked=acls)
    if record.mode & stat.S_ISGID and not os.fstat(descriptor).st_mode & stat.S_ISGID:
        flags |= Flag.SETID_STRIPPED
    os.utime(descriptor, ns=(record.mtime_ns, record.mtime_ns))
    return flags


def _finish_tops(transfer: TransferState, directories: Sequence[int]) -> None:
    """Give the tops of trees their times again: the staging directories were removed from them."""
    with contextlib.closing(transfer.paths()) as paths:
        for record in _at(transfer, directories):
            if not record.path and transfer.slots.get(record.index).state is State.MADE:
                descriptor = paths.destination_directory(record)
                try:
                    os.utime(descriptor, ns=(record.mtime_ns, record.mtime_ns))
                    os.fsync(descriptor)
                except OSError as error:
                    raise transfer.failed(record, error) from error


def _sync_file_systems(transfer: TransferState, directories: Sequence[int], paths: RecordPaths) -> None:
    """Sync every local file system that one of the directories is on: others may be mounted below a destination."""
    synced: set[int] = set()
    for record in _at(transfer, directories):
        descriptor = paths.destination_directory(record)
        device = os.fstat(descriptor).st_dev
        if device not in synced and is_local(descriptor):
            synced.add(device)
            try:
                sync_file_system(descriptor)
            except OSError as error:
                raise transfer.failed(record, error) from error


def _at(transfer: TransferState, paths: Sequence[int]) -> Iterator[Record]:
    """Yield the records at these places, with signs of life."""
    for number, place in enumerate(paths):
        if number % STEP_RECORDS == 0:
            transfer.context.pace.check()
            transfer.advance(Moved(steps=1))
        yield transfer.manifest.at(place)


def remove_sources(transfer: TransferState) -> int:
    """Remove the sources of the items that are moved, and return how many files went.

    A source that changed stays, and so does a directory that still has something in it. TransferFailed if the file
    system does not let one go: everything is at its destination then.
    """
    removed = 0
    directories: list[Record] = []
    with contextlib.closing(transfer.paths()) as paths:
        for record, row in with_rows(transfer.manifest, transfer.slots):
            if not transfer.items[record.item].move:
                continue
            remove_left(directories, record, paths.source)
            try:
                if record.kind == DIRECTORY:
                    directories.append(record)
                elif record.kind in (FILE, LINK) and row.state is State.DONE:
                    transfer.context.before_removal()
                    removed += _remove(paths, record, row.copied)
            except FileNotFoundError:
                removed += 1
            except OSError as error:
                raise transfer.failed(record, error) from error
            except TransferFailed as error:
                if not isinstance(root_cause(error), FileNotFoundError):
                    raise
                removed += 1
        remove_left(directories, None, paths.source)
    return removed


def _remove(paths: RecordPaths, record: Record, copied: Copied) -> int:
    directory, name = paths.source(record)
    now = os.stat(name, dir_fd=directory, follow_symlinks=False)
    # Not the device: it has another number after a boot, and on another machine that goes on with the removal.
    if now.st_ino != record.inode:
        return 0
    if record.kind == FILE and (now.st_size, now.st_mtime_ns) != (copied.size, copied.mtime_ns):
        return 0
    if record.kind == LINK and now.st_mtime_ns != record.mtime_ns:
        return 0
    if not is_there(paths, record, copied):
        # Somebody took the copy away, so this is the last one.
        return 0
    os.unlink(name, dir_fd=directory)
    return record.kind == FILE
