"""Stage-in and stage-out: capacity check, data transfer, and stage commands.

A transfer has one staging directory in each destination directory. It claims all of them before moving data and keeps
them until the end, so a late agent finds a newer attempt in every destination (cluster.agent.transfer.fence).

A shell runs each stage command (`stage_in:COMMAND`, `stage_out:COMMAND`) as the job's user. Forebay cannot know which
files a command should have moved. Its exit code decides, and the last line of its output becomes the error message.
After a stage-in, the content of the buffer is counted and compared with the capacity. When a command ends, all its
remaining processes are killed: nothing may write to a staged buffer, or read one that is being removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Final, NamedTuple, Self, cast

from msgspec.structs import replace

from forebay.cluster.agent.files import (
    FileIdentity,
    PathRefused,
    Target,
    empty_directory,
    inside_target,
    leads_to,
    open_as_user,
    open_target,
    open_target_parent,
)
from forebay.cluster.agent.transfer import (
    NO_LIMIT_S,
    POLL_S,
    Algorithm,
    Claimant,
    ItemKind,
    Links,
    TransferContext,
    TransferFailed,
    TransferItem,
    TransferOptions,
    TransferStopped,
    Verify,
    Workspace,
    end_program,
    fence,
    file_message,
    is_absence,
    make_top,
    no_op,
    resumable,
    run_transfer,
)
from forebay.cluster.agent.worker.items import Movement, OrderPaths, label_errors, movements, name_of
from forebay.cluster.providers import NO_LOCAL, Local, guard
from forebay.cluster.system import (
    Clock,
    JobProcess,
    become_subreaper,
    closing,
    forgo,
    limit,
    names_in,
    open_directory,
    prepare,
    reset,
)
from forebay.replica.messages import OperationDone
from forebay.replica.model import (
    DEFAULT_TRANSFER_RULES,
    NO_SPECIAL_TRANSFERS,
    Order,
    Stage,
    TransferReceipt,
    default_backend,
    persistent_variable,
)
from forebay.replica.values import format_size

_CLUSTER_CHARACTERS: Final = 8
"""Digits of the cluster ID in a staging directory's name, count: clusters may share a destination."""


def claimant_of(cluster: str, job: int, attempt: int, storage_id: str) -> Claimant:
    """Return the claimant for an attempt of a job; `storage_id` identifies the agent."""
    return Claimant(f"{cluster[:_CLUSTER_CHARACTERS] or 'alone'}-{job}", attempt, storage_id)


class _Claim(NamedTuple):
    directory: int
    shown: str
    staging: int


class Claims:
    """Claims on all destination directories of a transfer.

    On exit the context manager closes them but keeps their content for the next attempt.
    """

    def __init__(self, claimant: Claimant) -> None:
        """Begin without claims."""
        self._claimant = claimant
        self._claimed: dict[tuple[int, tuple[str, ...]], _Claim] = {}

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close all claims."""
        while self._claimed:
            claimed = self._claimed.popitem()[1]
            os.close(claimed.staging)
            os.close(claimed.directory)

    def add(self, directory: int, shown: str) -> int:
        """Claim an open directory and return its staging directory.

        Raises:
            WriterFenced: A newer attempt owns the destination.
            FenceFailed: The destination cannot be claimed.
            OSError: The directory cannot be read or written.
        """
        return self._claim((directory, ()), os.dup(directory), shown)

    def stage(
        self, item: TransferItem, workspace: Workspace, *, outgoing: bool = False, above: bool = False
    ) -> TransferItem:
        """Return the item with the staging directory of its destination, creating the destination if necessary.

        Checks the source first, so that a missing source creates no directory. With `outgoing`, the transfer itself
        reports a missing source. With `above`, the staging directory of a directory is beside it, as that of a file is.

        Raises:
            TransferFailed: The source cannot be read.
            PathRefused: A path is not permitted.
            WriterFenced: A newer attempt owns the destination.
            FenceFailed: The destination cannot be claimed.
            OSError: The directory cannot be read or written.
        """
        try:
            require_source(item)
        except (TransferFailed, PathRefused) as error:
            if outgoing and is_absence(error):
                return item
            raise
        destination, barred = item.destination, item.destination_barred
        within = item.kind is ItemKind.DIRECTORY and not above
        parts = destination.parts if within else destination.parts[:-1]
        key = (destination.anchor, parts)
        known = self._claimed.get(key)
        if item.kind is ItemKind.DIRECTORY and (known is None or above):
            make_top(item, workspace)
        if known is None:
            if item.kind is ItemKind.FILE and not destination.parts:
                return item
            target = Target(os.dup(destination.anchor), destination.shown, parts)
            with open_target(target, forbidden=barred, create=True) as directory:
                staging = self._claim(key, os.dup(directory), target.path)
        else:
            staging = known.staging
        return item._replace(staging=staging)

    def release(self) -> None:
        """Remove the staging directories with their content, after a complete or a cancelled transfer.

        Raises:
            OSError: A staging directory cannot be removed.
            FenceFailed: A staging directory cannot be entered.
        """
        for claimed in self._claimed.values():
            fence.sweep(claimed.directory, claimed.shown, self._claimant)

    def tidy(self) -> None:
        """Remove empty staging directories; the next attempt resumes from the others."""
        with contextlib.suppress(OSError, fence.FenceFailed):
            for claimed in self._claimed.values():
                fence.tidy(claimed.directory, self._claimant)

    def _claim(self, key: tuple[int, tuple[str, ...]], directory: int, shown: str) -> int:
        try:
            staging = fence.claim(directory, shown, self._claimant)
        except BaseException:
            os.close(directory)
            raise
        self._claimed[key] = _Claim(directory, shown, staging)
        return staging


def require_source(item: TransferItem) -> None:
    """Check that the item's source exists.

    Raises:
        TransferFailed: The source cannot be read.
        PathRefused: The path to it is not permitted.
    """
    source = item.source._replace(anchor=os.dup(item.source.anchor))
    if item.kind is ItemKind.DIRECTORY:
        with open_target(source, forbidden=item.source_barred):
            return
    with open_target_parent(source, forbidden=item.source_barred) as (directory, name):
        try:
            os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError as error:
            raise TransferFailed(file_message(source.path, error)) from error


SHELL: Final = "/bin/sh"


class DirectoryContent(NamedTuple):
    """Number and total size of the files in a directory."""

    files: int
    size_bytes: int


class StageCommands:
    """Stage commands of one order; run by a worker that has switched to the job's user."""

    def __init__(
        self, environment: dict[str, str], process: JobProcess, *, clock: Clock, poll: Callable[[int], None]
    ) -> None:
        """Use exactly `environment` and `process`; call `poll` with the process ID while a command runs."""
        self._environment = environment
        self._process = process
        self._clock = clock
        self._poll = poll
        self.started_at = self.ended_at = clock.now()

    def run(self, order: Order, home: FileIdentity) -> None:
        """Run the commands in sequence.

        Raises:
            ProgramFailed: A command failed.
            PathRefused: The working directory is not permitted.
        """
        special = order.special or NO_SPECIAL_TRANSFERS
        become_subreaper()
        self.started_at = self._clock.now()
        workdir = open_as_user(order.workdir, forbidden=home)
        try:
            for command in special.commands:
                self._run_one(command, workdir, order.stage)
        finally:
            os.close(workdir)
            self.ended_at = self._clock.now()

    def _run_one(self, command: str, workdir: int, stage: str) -> None:
        """Run one command in an open directory.

        Raises:
            ProgramFailed: The command failed; the message has the last line of its output.
            OSError: No process can be started.
        """

        def become(returned: int) -> None:
            os.close(returned)
            os.fchdir(workdir)
            limit(self._process)
            prepare(self._process)
            forgo(self._process)
            reset(self._process)
            os.execve(SHELL, [SHELL, "-c", command], self._environment)

        ran = guard.run(
            become, timeout_s=NO_LIMIT_S, clock=self._clock, keep=(workdir,), poll=self._poll, poll_s=POLL_S
        )
        end_program(f"the command of {stage}", ran)


def measure_content(directory: int) -> DirectoryContent:
    """Count the files in an open directory; a file with several names counts once, and links count as nothing.

    Follows no links. Directories that are unreadable, or that disappear meanwhile, count as empty.

    Raises:
        TransferFailed: The directories are nested too deeply.
    """
    try:
        return _measure_content(directory)
    except (RecursionError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EMFILE, errno.ENAMETOOLONG):
            raise
        raise TransferFailed(
            "the content of the buffer cannot be counted: its directories are nested too deeply"
        ) from None


def _measure_content(directory: int) -> DirectoryContent:
    files, size_bytes = 0, 0
    seen: set[tuple[int, int]] = set()
    for _, _, names, descriptor in os.fwalk(".", dir_fd=directory, follow_symlinks=False):
        for name in names:
            try:
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(status.st_mode):
                continue
            if status.st_nlink > 1:
                identity = (status.st_dev, status.st_ino)
                if identity in seen:
                    continue
                seen.add(identity)
            files += 1
            size_bytes += status.st_size
    return DirectoryContent(files, size_bytes)


ACCESS_DIRECTORIES: Final = ("striped", "private")

NO_PERSISTENT: Final[Mapping[str, str]] = MappingProxyType({})


class TransferRun(NamedTuple):
    """Setup for moving an operation's data."""

    context: TransferContext
    """The stage fills in `planned` and `release` itself."""
    claimant: Claimant
    home: FileIdentity
    """State directory of the agent, which no path may lead to."""
    persistent: Mapping[str, str] = NO_PERSISTENT
    """Directories of the persistent buffers in the order, by variable."""
    commands: StageCommands | None = None
    """Commands to run after the transfer, or None."""
    await_order: Callable[[], None] = no_op
    """Block until the order is confirmed to be current."""
    seen_by_pace: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context in which SIGTERM takes effect only where the transfer checks its pace, and on exit."""
    local: Local = NO_LOCAL
    """Provider programs that this machine's configuration permits."""
    shared: bool = False
    """True if the buffer is on a shared filesystem, where another mover may have begun the stage-in."""


def stage_in(order: Order, buffer: int, run: TransferRun) -> OperationDone:
    """Fill the job's buffer (an open directory) and the persistent buffers in the order, resuming an earlier attempt.

    Raises:
        TransferFailed: The data cannot be staged.
        RemovalFailed: Old content cannot be removed.
    """
    commands = run.commands
    options = _options(order, run.local)
    if has_space(order):
        # It is unknown which part of its work an interrupted command has done.
        if commands is not None or not _is_resumable(order, buffer, run, options):
            if run.shared:
                _check_empty(order, buffer, run.claimant)
            else:
                empty_directory(buffer, shown="the buffer", lasting=False)
        for name in ACCESS_DIRECTORIES:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=buffer)
            _make_named(order, buffer, name)
        os.fsync(buffer)
    _check_persistent(buffer, run.persistent)
    with OrderPaths(order, buffer, run.persistent) as paths:
        moves = movements(order, paths, run.home)
        receipt = _run(order, moves, options, run, buffer if has_space(order) else None)
    os.fsync(buffer)
    if commands is None:
        return _done_result(order, moves, receipt, None)
    commands.run(order, run.home)
    done = _done_result(order, moves, receipt, commands)
    held = measure_content(buffer)
    if capacity_of(order) and held.size_bytes > capacity_of(order):
        raise TransferFailed(
            f"after the command of stage_in the buffer holds {_size(held.size_bytes)}, but its capacity is "
            f"{_size(capacity_of(order))}; request more capacity or stage less"
        )
    receipt_now = done.receipt
    if receipt_now is not None and receipt is None:
        receipt_now = replace(receipt_now, files=held.files, size_bytes=held.size_bytes)
    return OperationDone(files=held.files, size_bytes=held.size_bytes, digest=done.digest, receipt=receipt_now)


def _check_persistent(buffer: int, persistent: Mapping[str, str]) -> None:
    """Raise TransferFailed unless this user may read and enter each persistent buffer, which the script needs."""
    for variable in sorted(persistent):
        try:
            os.close(inside_target(buffer, f"${variable}", persistent).anchor)
        except PathRefused as error:
            raise TransferFailed(str(error)) from error


def _make_named(order: Order, buffer: int, above: str) -> None:
    """Make the directories of the job's named buffers in one of ACCESS_DIRECTORIES."""
    if not order.names:
        return
    with closing(open_directory(above, dir_fd=buffer)) as directory:
        for name in order.names:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=directory)
        os.fsync(directory)


def _check_empty(order: Order, buffer: int, claimant: Claimant) -> None:
    """Raise TransferFailed unless a buffer that another mover may have begun to fill is empty.

    The buffer is not emptied here, because a late attempt would remove what a newer one has staged.
    """
    for name in names_in(buffer):
        if claimant.may_own(name):
            continue
        if name in ACCESS_DIRECTORIES:
            with closing(open_directory(name, dir_fd=buffer)) as directory:
                if all(one in order.names and _is_empty(directory, one) for one in names_in(directory)):
                    continue
        raise TransferFailed(
            f"the buffer contains {name}, which is not recorded; release the job to stage into a new buffer"
        )


def _is_empty(directory: int, name: str) -> bool:
    with closing(open_directory(name, dir_fd=directory)) as inner:
        return not names_in(inner)


def stage_out(order: Order, buffer: int, run: TransferRun) -> OperationDone:
    """Copy results from the job's buffer (an open directory) and from persistent buffers.

    Sources are removed only if the order requests it, and only after their copies are durable.

    Raises:
        TransferFailed: The data cannot be staged out.
    """
    with OrderPaths(order, buffer, run.persistent) as paths:
        moves = movements(order, paths, run.home)
        receipt = _run(order, moves, _options(order, run.local), run, None)
    if run.commands is not None:
        run.commands.run(order, run.home)
    return _done_result(order, moves, receipt, run.commands)


def capacity_of(order: Order) -> int:
    """Return the buffer's capacity in bytes; 0 if it is unlimited or its pool does not count bytes."""
    return order.capacity_bytes if order.pool_is_bytes else 0


def has_space(order: Order) -> bool:
    """Return whether the job has a buffer of its own; otherwise only the agent enters the empty directory."""
    return order.capacity_bytes > 0


def check_capacity(
    order: Order, moves: Sequence[Movement], sizes_bytes: Sequence[int], persistent: Mapping[str, str]
) -> None:
    """Raise TransferFailed unless the data fits into the buffers.

    For persistent buffers, the data they already hold counts too.
    """
    needed: dict[str, int] = {}
    for move, size_bytes in zip(moves, sizes_bytes, strict=True):
        needed[move.persistent] = needed.get(move.persistent, 0) + size_bytes
    own_bytes = needed.pop("", 0)
    if capacity_of(order) and own_bytes > capacity_of(order):
        raise TransferFailed(
            f"stage_in needs {_size(own_bytes)}, the buffer has {_size(capacity_of(order))}; "
            "request more capacity or stage less"
        )
    granted = dict((order.special or NO_SPECIAL_TRANSFERS).granted)
    for name, needed_bytes in sorted(needed.items()):
        if not granted.get(name):
            continue
        with closing(
            os.open(persistent[persistent_variable(name)], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        ) as directory:
            held_bytes = measure_content(directory).size_bytes
        if held_bytes + needed_bytes > granted[name]:
            raise TransferFailed(
                f"stage_in needs {_size(needed_bytes)} in the persistent buffer {name}, which has "
                f"{_size(granted[name])} and holds {_size(held_bytes)}; remove unneeded files or stage less"
            )


def _options(order: Order, local: Local) -> TransferOptions:
    rules = order.rules or DEFAULT_TRANSFER_RULES
    special = order.special or NO_SPECIAL_TRANSFERS
    limit_bytes = 0
    if order.stage == "stage_in" and capacity_of(order) and len(special.granted) == len(order.uses):
        limit_bytes = capacity_of(order) + sum(granted for _, granted in special.granted)
    return TransferOptions(
        verify=Verify[rules.verify.upper()],
        algorithm=cast(Algorithm, rules.algorithm),
        replace=rules.replace,
        owned=order.stage == "stage_in",
        limit_bytes=limit_bytes,
        template=rules.template,
        local=local,
        outgoing=order.stage == "stage_out",
        partial=order.partial,
    )


def _is_resumable(order: Order, buffer: int, run: TransferRun, options: TransferOptions) -> bool:
    """Return whether an earlier attempt at this stage-in left data to resume from."""
    if not set(ACCESS_DIRECTORIES) <= set(names_in(buffer)):
        return False
    with OrderPaths(order, buffer, run.persistent) as paths:
        moves = movements(order, paths, run.home)
        items = [_chosen(order, move, backend) for move, backend in zip(moves, backends_of(order, moves), strict=True)]
        return resumable(items, options, run.context.workspace)


def _run(
    order: Order, moves: Sequence[Movement], options: TransferOptions, run: TransferRun, buffer: int | None
) -> TransferReceipt | None:
    """Move all items and return the receipt, or None if there are none. `buffer` is the job's own, if it is a
    destination.
    """
    if not moves:
        return None

    def planned(amounts: Sequence[tuple[int, int]]) -> None:
        if order.stage == "stage_in":
            check_capacity(order, moves, [size_bytes for _, size_bytes in amounts], run.persistent)

    with run.seen_by_pace(), Claims(run.claimant) as claims:
        own = -1 if buffer is None else claims.add(buffer, "the buffer")
        items = []
        for move, backend in zip(moves, backends_of(order, moves), strict=True):
            with label_errors(order.stage, move.source, move.destination):
                item = _chosen(order, move, backend)
                inside = buffer is not None and not move.persistent
                if inside:
                    items.append(item._replace(staging=own))
                else:
                    items.append(
                        claims.stage(item, run.context.workspace, outgoing=options.outgoing, above=move.is_match)
                    )
        try:
            # Wait only now: a newer attempt ordered after this moment finds the claims.
            run.await_order()
            context = run.context._replace(planned=planned, release=claims.release)
            if run.shared:
                # Another mover may have taken over, and may still need an incomplete source.
                context = context._replace(before_removal=run.await_order)
            receipt = run_transfer(items, options, context)
        except TransferFailed as error:
            claims.tidy()
            raise _label_failure(order, moves, error) from error
        except TransferStopped:
            # The operation was cancelled. TransferPaused leaves the files to the next attempt instead.
            claims.release()
            raise
    return receipt


def _chosen(order: Order, move: Movement, backend: str) -> TransferItem:
    """Apply the directive's options to an item; if the source itself is a link beneath its root, use the link's target.

    Raises:
        TransferFailed: The site does not allow `links=asis`.
    """
    choice, rules = move.choice, order.rules or DEFAULT_TRANSFER_RULES
    if choice.links == "asis" and not rules.outside_links:
        raise TransferFailed("links=asis is not allowed here (TransferOutsideLinks=no); omit it or use links=skip")
    links = choice.links or ("keep_all" if rules.outside_links else "keep")
    item = move.item._replace(backend=backend, move=choice.move, links=cast(Links, links))
    item = item._replace(acls=choice.acls)
    found = leads_to(item.source) if item.links in ("keep", "keep_all", "follow") else None
    return item if found is None else item._replace(source=found)


def _label_failure(order: Order, moves: Sequence[Movement], error: TransferFailed) -> TransferFailed:
    """Return the failure with the transfer's label as a prefix."""
    message = str(error)
    if error.item is not None:
        move = moves[error.item]
        message = f"{name_of(order.stage, move.source, move.destination)}: {message}"
    failed = TransferFailed(message, error.item)
    failed.receipt = error.receipt
    return failed


def backends_of(order: Order, moves: Sequence[Movement]) -> list[str]:
    """Return the name of the backend for each movement."""
    chosen = default_backend((order.rules or DEFAULT_TRANSFER_RULES).backends)
    # External programs are not given the targets of links.
    return ["native" if move.choice.links == "follow" else move.choice.backend or chosen for move in moves]


def _size(size_bytes: int) -> str:
    text = format_size(size_bytes)
    return f"{size_bytes} bytes" if text.isdecimal() else f"{text} ({size_bytes} bytes)"


def _command_receipt(order: Order, commands: StageCommands) -> TransferReceipt:
    """Return the receipt of a stage with only commands, whose files are neither known nor verified."""
    return TransferReceipt(
        stage=Stage[order.stage.upper()],
        attempt=order.attempt,
        backends=("command",),
        verify="none",
        algorithm="",
        started_at=commands.started_at,
        ended_at=commands.ended_at,
    )


def _done_result(
    order: Order, moves: Sequence[Movement], receipt: TransferReceipt | None, commands: StageCommands | None
) -> OperationDone:
    if receipt is None:
        return OperationDone(receipt=None if commands is None else _command_receipt(order, commands))
    backends = dict.fromkeys(backends_of(order, moves) + ([] if commands is None else ["command"]))
    return OperationDone(
        files=receipt.files,
        size_bytes=receipt.size_bytes,
        digest=receipt.digest,
        receipt=replace(receipt, backends=tuple(backends)),
    )
