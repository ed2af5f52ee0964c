"""Transfer from plan to receipt: plans, copies everything, makes it durable and removes moved sources.

Sources of a move are removed last, when everything is durable at its destination, and only if unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from forebay.cluster.agent.adapters import is_local
from forebay.cluster.agent.files import PathRefused, kind_of, open_target_parent
from forebay.cluster.agent.transfer import helpers
from forebay.cluster.agent.transfer.errors import TransferFailed, TransferPaused, os_message, root_cause
from forebay.cluster.agent.transfer.fence import discard_all
from forebay.cluster.agent.transfer.file_copy import (
    copy_acls,
    copy_xattrs,
    mode_alone,
    publish,
    target_exists_error,
    xattrs_of,
)
from forebay.cluster.agent.transfer.manifest import DIRECTORY, FILE, LINK, ManifestRecord, TransferManifest
from forebay.cluster.agent.transfer.options import TransferItem, TransferOptions
from forebay.cluster.agent.transfer.plan import STEP_RECORDS, find_generations, plan
from forebay.cluster.agent.transfer.program_copies import move_by
from forebay.cluster.agent.transfer.programs import Backend, Rclone, Rsync, Template
from forebay.cluster.agent.transfer.rate_limit import TransferStopped
from forebay.cluster.agent.transfer.receipts import ReceiptBuilder, with_rows, write_lines
from forebay.cluster.agent.transfer.record_paths import (
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
from forebay.cluster.agent.transfer.status_table import (
    EMPTY,
    NO_FLAG,
    CopiedFile,
    Flag,
    RecordsFailed,
    RecordState,
    write_header,
)
from forebay.cluster.agent.transfer.transfer_state import POLL_RECORDS, MovedAmounts, TransferContext, TransferState
from forebay.cluster.agent.transfer.workspace import Workspace
from forebay.cluster.system import is_disk_full, sync_file_system
from forebay.replica.model import TransferReceipt

NATIVE = "native"


def _copy_all(transfer: TransferState) -> None:
    """Copy every pending file with its item's backend.

    Raises:
        TransferFailed: A file cannot be copied; the message names it.
        WriterFenced: A newer attempt owns the destination.
    """
    for name in dict.fromkeys(item.backend for item in transfer.items):
        if name != NATIVE:
            move_by(transfer, _backend_of(transfer, name))
    helpers.copy_all(transfer)


def _backend_of(transfer: TransferState, name: str) -> Backend:
    """Return the named backend.

    Raises:
        TransferFailed: There is no such backend.
    """
    if name == "rsync":
        return Rsync(sparse=transfer.options.sparse)
    if name == "rclone":
        return Rclone()
    if name == "template":
        return Template(transfer.options.template, transfer.options.local)
    raise TransferFailed(f"the backend {name!r} does not exist; use native, rsync, rclone or template")


COPYING: Final = 2
COMMITTING: Final = 4
"""Phases in the counters (cluster.agent.transfer.progress.PHASES)."""

_PASSING: Final = frozenset({errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.EAGAIN, errno.EBUSY, errno.ECONNRESET})
"""Errors of storage that may recover. A full disk is excluded: partial files would fill it."""

DIRECTORY_MODE_BITS: Final = 0o3777
"""Mode bits copied for directories: set-group-ID and sticky control access there and execute nothing."""

DIRECTORIES_SYNCED_ALONE_MAX: Final = 16
"""Directories synced individually, count: beyond that, one sync of the filesystem costs less."""


def resumable(items: Sequence[TransferItem], options: TransferOptions, workspace: Workspace) -> bool:
    """Return whether an earlier attempt at the same transfer can be resumed.

    Raises:
        OSError: The records cannot be read.
    """
    return find_generations(items, options, workspace) is not None


def run_transfer(items: Sequence[TransferItem], options: TransferOptions, context: TransferContext) -> TransferReceipt:
    """Move the items and return the receipt; on return everything is durable at the destination.

    However it ends, each destination is absent, old or complete. Also raises the exceptions of `context`.

    Raises:
        TransferFailed: A file cannot be moved; the error has `item` and `receipt`.
        WriterFenced: A newer attempt owns the destination.
        OSError: The agent's own records cannot be written.
    """
    return _Transfer(items, options, context).run()


class _Transfer:
    def __init__(self, items: Sequence[TransferItem], options: TransferOptions, context: TransferContext) -> None:
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
        except (TransferPaused, TransferStopped):
            raise
        except BaseException as error:
            self._clean_up(keep=_goes_away(error))
            raise

    def _run(self) -> TransferReceipt:
        context, options = self._context, self._options
        claimed = find_generations(self._items, options, context.workspace) is not None
        if claimed:
            # The earlier attempt's files are in its staging directories.
            self._claim()
        planned = plan(self._items, options, context)
        context.planned(planned.amounts)
        if planned.begins:
            manifest = TransferManifest(planned.files.manifest, planned.header.manifest_bytes)
            check_collisions(self._items, manifest, planned.begins)
        if not claimed:
            self._claim()
        transfer = TransferState(self._items, options, context, planned)
        if options.limit_bytes and planned.header.size_bytes > options.limit_bytes:
            raise TransferFailed(
                f"the transfers need {planned.header.size_bytes} bytes, the buffer has {options.limit_bytes}; "
                "request more capacity or stage less"
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
                # Only now, so that the other files are not lost.
                number, reason = planned.absent[0]
                more = f" (and {len(planned.absent) - 1} more)" if len(planned.absent) > 1 else ""
                raise TransferFailed(f"{reason}{more}; everything else is at its destination", number)
            try:
                transfer.slots.sync()
                write_header(planned.files.control, msgspec.structs.replace(planned.header, complete=True))
            except RecordsFailed as error:
                # Everything is durable at its destination; only a move has to know that later.
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
        summed = ReceiptBuilder(self._options, transfer.items, complete=complete)
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
        """Remove temporary files in progress, unless the next attempt resumes them."""
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
    """Return the records that have temporary files: large files and the rest of a batch."""
    found: set[int] = set()
    for base in range(0, transfer.header.records, POLL_RECORDS):
        states = transfer.slots.states(base, min(POLL_RECORDS, transfer.header.records - base))
        if RecordState.STARTED in states or RecordState.READY in states:
            found.update(
                base + at for at, state in enumerate(states) if state in (RecordState.STARTED, RecordState.READY)
            )
    return found


def _goes_away(error: BaseException) -> bool:
    """Return whether another attempt may resume, and partial files do not take the space that it lacks."""
    cause = root_cause(error)
    return isinstance(cause, OSError) and cause.errno in _PASSING


def make_top(item: TransferItem, workspace: Workspace) -> None:
    """Create the top directory of a tree with private access, unless it exists.

    That this transfer sets its final permissions is durable before it becomes visible.

    Raises:
        PathRefused: The directory cannot be created.
        OSError: A parent directory cannot be read or written.
    """
    target = item.destination
    if not target.parts:
        return
    mine = target._replace(anchor=os.dup(target.anchor))
    with open_target_parent(mine, forbidden=item.destination_barred, create=True) as (directory, name):
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
            raise PathRefused(f"the directory {target.path} cannot be created: {os_message(error)}") from error


def _make_directories(transfer: TransferState, directories: Sequence[int], mode: int) -> None:
    """Create all directories before copying.

    Which of them belong to this transfer, and get their source's metadata, is durable before the first is created, or
    is shown by their mode if it cannot be recorded.
    """
    with contextlib.closing(transfer.paths()) as paths:
        absent: ManifestRecord | None = None
        making = False
        for record in _at(transfer, directories):
            there = None
            if absent is None or not record.lies_in(absent):
                there = _mode_there(transfer, record, paths)
                absent = record if there is None else None
            made = transfer.slots.get(record.index).state is RecordState.MADE or (
                there is not None and is_unrecorded(there)
            )
            if not made and not record.path:
                made = transfer.context.workspace.was_made(os.fsencode(transfer.items[record.item].destination.path))
            elif absent is not None:
                making = made = True
            transfer.slots.put(record.index, EMPTY._replace(state=RecordState.MADE if made else RecordState.THERE))
        if making:
            transfer.slots.sync()
    with contextlib.closing(transfer.paths()) as paths:
        for record in _at(transfer, directories):
            if record.path and transfer.slots.get(record.index).state is RecordState.MADE:
                _, shown = transfer.display_paths(record)
                try:
                    make_directory(*paths.destination(record), shown, mode)
                except (OSError, TransferFailed) as error:
                    raise transfer.failure_of(record, error) from error


def _mode_there(transfer: TransferState, record: ManifestRecord, paths: RecordPaths) -> int | None:
    """Return the mode of the record's destination directory, or None if missing; the top of a tree is created."""
    _, shown = transfer.display_paths(record)
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
        raise transfer.failure_of(record, error) from error


def _make_links(transfer: TransferState, links: Sequence[int]) -> None:
    """Create all missing links after the directories, whose sync makes them durable.

    Raises:
        TransferFailed: A link cannot be created; the message names it.
        WriterFenced: A newer attempt owns the destination.
    """
    with contextlib.closing(transfer.paths()) as paths:
        for record in _at(transfer, links):
            if transfer.slots.get(record.index).state is not RecordState.DONE:
                try:
                    _make_link(transfer, record, paths)
                except (OSError, TransferFailed) as error:
                    raise transfer.failure_of(record, error) from error


def _make_link(transfer: TransferState, record: ManifestRecord, paths: RecordPaths) -> None:
    replace = transfer.options.replace
    _, shown = transfer.display_paths(record)
    directory, name = paths.destination(record)
    _check_link_target(directory, name, shown, replace=replace)
    staging, part = paths.part(record)
    discard(staging, part)
    os.symlink(record.target, part, dir_fd=staging)
    try:
        os.utime(part, ns=(record.mtime_ns, record.mtime_ns), dir_fd=staging, follow_symlinks=False)
        status = os.stat(part, dir_fd=staging, follow_symlinks=False)
        copied = CopiedFile(status.st_size, status.st_mtime_ns, status.st_ino)
        transfer.slots.mark(record.index, RecordState.READY, copied)
        if not replace:
            transfer.slots.sync()
        publish(staging, part, directory, name, shown, replace=replace)
    except (OSError, TransferFailed):
        with contextlib.suppress(OSError):
            discard(staging, part)
        raise
    transfer.slots.mark(record.index, RecordState.DONE, copied)


def _check_link_target(directory: int, name: bytes, shown: str, *, replace: bool) -> None:
    """Check that a link may be put at the target."""
    try:
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not replace:
        raise target_exists_error(shown)
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise TransferFailed(f"{shown} exists and is a {kind_of(mode)}; a link can only replace a file or a link")


def _finish_directories(transfer: TransferState, directories: Sequence[int]) -> None:
    """Set the metadata of created directories and make all directories durable."""
    alone = len(directories) <= DIRECTORIES_SYNCED_ALONE_MAX
    with contextlib.closing(transfer.paths()) as paths:
        for number, record in enumerate(_at(transfer, directories)):
            descriptor = paths.destination_directory(record)
            try:
                row = transfer.slots.get(record.index)
                if row.state is RecordState.MADE:
                    flags = _set_directory(transfer, record, paths, descriptor)
                    transfer.slots.put(record.index, row._replace(copied=row.copied._replace(flags=flags)))
                if alone or not is_local(descriptor):
                    os.fsync(descriptor)
            except OSError as error:
                raise transfer.failure_of(record, error) from error
            if number % STEP_RECORDS == 0:
                transfer.tell(transfer.counters._replace(directories_done=number))
        if not alone:
            _sync_file_systems(transfer, directories, paths)
    transfer.tell(transfer.counters._replace(directories_done=len(directories)))


def _set_directory(transfer: TransferState, record: ManifestRecord, paths: RecordPaths, descriptor: int) -> Flag:
    """Copy a directory's metadata; return flags for whatever was lost.

    Raises:
        OSError: The metadata cannot be set.
    """
    flags, acls = NO_FLAG, transfer.items[record.item].acls
    mode, source, names = record.mode & DIRECTORY_MODE_BITS, -1, list[str]()
    with contextlib.suppress(TransferFailed):
        # A source removed meanwhile has no attributes.
        source = paths.source_directory(record)
        names = xattrs_of(source)
    if names and transfer.options.xattrs:
        flags |= copy_xattrs(source, descriptor, names)
    if names and not acls:
        mode = mode_alone(source, names, mode)
    # Keep the owner's access, without which only root could fill or remove the directory, and an inherited group.
    inherited = os.fstat(descriptor).st_mode & stat.S_ISGID
    os.fchmod(descriptor, mode | inherited | 0o700)
    if names:
        flags |= copy_acls(source, descriptor, names, asked=acls)
    if record.mode & stat.S_ISGID and not os.fstat(descriptor).st_mode & stat.S_ISGID:
        flags |= Flag.SETID_STRIPPED
    os.utime(descriptor, ns=(record.mtime_ns, record.mtime_ns))
    return flags


def _finish_tops(transfer: TransferState, directories: Sequence[int]) -> None:
    """Restore the times of top directories after the staging directories were removed from them."""
    with contextlib.closing(transfer.paths()) as paths:
        for record in _at(transfer, directories):
            if not record.path and transfer.slots.get(record.index).state is RecordState.MADE:
                descriptor = paths.destination_directory(record)
                try:
                    os.utime(descriptor, ns=(record.mtime_ns, record.mtime_ns))
                    os.fsync(descriptor)
                except OSError as error:
                    raise transfer.failure_of(record, error) from error


def _sync_file_systems(transfer: TransferState, directories: Sequence[int], paths: RecordPaths) -> None:
    """Sync every local filesystem with one of the directories: others may be mounted below a destination."""
    synced: set[int] = set()
    for record in _at(transfer, directories):
        descriptor = paths.destination_directory(record)
        device = os.fstat(descriptor).st_dev
        if device not in synced and is_local(descriptor):
            synced.add(device)
            try:
                sync_file_system(descriptor)
            except OSError as error:
                raise transfer.failure_of(record, error) from error


def _at(transfer: TransferState, paths: Sequence[int]) -> Iterator[ManifestRecord]:
    """Yield the records at these places, reporting progress."""
    for number, place in enumerate(paths):
        if number % STEP_RECORDS == 0:
            transfer.context.pace.check()
            transfer.advance(MovedAmounts(steps=1))
        yield transfer.manifest.at(place)


def remove_sources(transfer: TransferState) -> int:
    """Remove the sources of moved items and return the number of files.

    Changed sources and non-empty directories stay.

    Raises:
        TransferFailed: A source cannot be removed; everything is at its destination by then.
    """
    removed = 0
    directories: list[ManifestRecord] = []
    with contextlib.closing(transfer.paths()) as paths:
        for record, row in with_rows(transfer.manifest, transfer.slots):
            if not transfer.items[record.item].move:
                continue
            remove_left(directories, record, paths.source)
            try:
                if record.kind == DIRECTORY:
                    directories.append(record)
                elif record.kind in (FILE, LINK) and row.state is RecordState.DONE:
                    transfer.context.before_removal()
                    removed += _remove(paths, record, row.copied)
            except FileNotFoundError:
                removed += 1
            except OSError as error:
                raise transfer.failure_of(record, error) from error
            except TransferFailed as error:
                if not isinstance(root_cause(error), FileNotFoundError):
                    raise
                removed += 1
        remove_left(directories, None, paths.source)
    return removed


def _remove(paths: RecordPaths, record: ManifestRecord, copied: CopiedFile) -> int:
    directory, name = paths.source(record)
    now = os.stat(name, dir_fd=directory, follow_symlinks=False)
    # Do not compare devices, whose numbers change after a reboot and on another machine that continues the removal.
    if now.st_ino != record.inode:
        return 0
    if record.kind == FILE and (now.st_size, now.st_mtime_ns) != (copied.size, copied.mtime_ns):
        return 0
    if record.kind == LINK and now.st_mtime_ns != record.mtime_ns:
        return 0
    if not is_there(paths, record, copied):
        # The copy has disappeared, so the source is the last one.
        return 0
    os.unlink(name, dir_fd=directory)
    return record.kind == FILE
