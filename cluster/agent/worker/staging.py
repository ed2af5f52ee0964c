"""Stage-in and stage-out: whether what is to be moved fits, moving it, and the commands that stage.

A transfer has one staging directory in each destination directory. All of them are claimed before anything is moved and
kept until the end, so that a late agent which goes on from one destination to the next finds a newer attempt in each
(cluster.agent.transfer.fence).

Commands that stage (`stage_in:COMMAND`, `stage_out:COMMAND`) are run by a shell as the job's user, each ended whole.
What a command moves is its own affair: nobody knows what it should have moved. So its exit code counts, its last words
are the failure's message, and after a stage-in what lies in the buffer is counted and held against the capacity. What a
command left running is ended with it: nothing writes to a buffer that counts as staged, or reads one that is removed.
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

from cluster.agent.files import (
    Identity,
    PathRefused,
    Target,
    empty_directory,
    inside_target,
    leads_to,
    open_as_user,
    opened,
    opened_parent,
)
from cluster.agent.transfer import (
    NO_LIMIT_S,
    POLL_S,
    Algorithm,
    Claimant,
    Context,
    Item,
    Kind,
    Links,
    Options,
    Stopped,
    TransferFailed,
    Verify,
    Workspace,
    end_program,
    fence,
    file_message,
    is_absence,
    make_top,
    nothing,
    resumable,
    run_transfer,
)
from cluster.agent.worker.items import Movement, RecordPaths, movements, name_of, named
from cluster.providers import NO_LOCAL, Local, guard
from cluster.system import (
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
from replica.messages import OperationDone
from replica.model import (
    DEFAULT_TRANSFER_RULES,
    NOTHING_SPECIAL,
    Order,
    Stage,
    TransferReceipt,
    default_backend,
    persistent_variable,
)
from replica.values import format_size

_CLUSTER_CHARACTERS: Final = 8
"""Digits of a cluster's id in the name of a staging directory, count: clusters may share a destination."""


def claimant_of(cluster: str, job: int, attempt: int, storage_id: str) -> Claimant:
    """Return who claims for an attempt of a job: `storage_id` is the agent's."""
    return Claimant(f"{cluster[:_CLUSTER_CHARACTERS] or 'alone'}-{job}", attempt, storage_id)


class _Claimed(NamedTuple):
    directory: int
    shown: str
    staging: int


class Claims:
    """All of them; as a context manager it closes them, and leaves what is in them to the next attempt."""

    def __init__(self, claimant: Claimant) -> None:
        """Begin with none."""
        self._claimant = claimant
        self._claimed: dict[tuple[int, tuple[str, ...]], _Claimed] = {}

    def __enter__(self) -> Self:
        """Give itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close what is open."""
        while self._claimed:
            claimed = self._claimed.popitem()[1]
            os.close(claimed.staging)
            os.close(claimed.directory)

    def add(self, directory: int, shown: str) -> int:
        """Claim an open directory, and return its staging directory. Fenced, FenceFailed or OSError."""
        return self._claim((directory, ()), os.dup(directory), shown)

    def stage(self, item: Item, workspace: Workspace, *, outgoing: bool = False) -> Item:
        """Return the item with the staging directory of its destination, which is made if it is missing.

        Its source is looked at first: what is not there makes no directory, and with `outgoing` is for the transfer to
        say. TransferFailed or PathRefused names what is wrong; Fenced, FenceFailed or OSError.
        """
        try:
            look_at(item)
        except (TransferFailed, PathRefused) as error:
            if outgoing and is_absence(error):
                return item
            raise
        destination, barred = item.destination, item.destination_barred
        parts = destination.parts if item.kind is Kind.DIRECTORY else destination.parts[:-1]
        key = (destination.anchor, parts)
        known = self._claimed.get(key)
        if known is None:
            if item.kind is Kind.FILE and not destination.parts:
                return item
            if item.kind is Kind.DIRECTORY:
                make_top(item, workspace)
            target = Target(os.dup(destination.anchor), destination.shown, parts)
            with opened(target, forbidden=barred, create=True) as directory:
                staging = self._claim(key, os.dup(directory), target.path)
        else:
            staging = known.staging
        return item._replace(staging=staging)

    def release(self) -> None:
        """Remove them, and what is in them: everything was moved, or nobody wants it. OSError or FenceFailed."""
        for claimed in self._claimed.values():
            fence.sweep(claimed.directory, claimed.shown, self._claimant)

    def tidy(self) -> None:
        """Remove those that are empty; what is in the others the next attempt goes on with."""
        with contextlib.suppress(OSError, fence.FenceFailed):
            for claimed in self._claimed.values():
                fence.tidy(claimed.directory, self._claimant)

    def _claim(self, key: tuple[int, tuple[str, ...]], directory: int, shown: str) -> int:
        try:
            staging = fence.claim(directory, shown, self._claimant)
        except BaseException:
            os.close(directory)
            raise
        self._claimed[key] = _Claimed(directory, shown, staging)
        return staging


def look_at(item: Item) -> None:
    """Raise TransferFailed or PathRefused if the item's source is not there."""
    source = item.source._replace(anchor=os.dup(item.source.anchor))
    if item.kind is Kind.DIRECTORY:
        with opened(source, forbidden=item.source_barred):
            return
    with opened_parent(source, forbidden=item.source_barred) as (directory, name):
        try:
            os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError as error:
            raise TransferFailed(file_message(source.path, error)) from error


SHELL: Final = "/bin/sh"


class Held(NamedTuple):
    """What lies in a directory."""

    files: int
    size_bytes: int


class Commands:
    """The commands of one order, ready to be run by a worker that has become the job's user."""

    def __init__(
        self, environment: dict[str, str], process: JobProcess, *, clock: Clock, poll: Callable[[int], None]
    ) -> None:
        """They have `environment` and `process` and no more; `poll` is told the number of each while it runs."""
        self._environment = environment
        self._process = process
        self._clock = clock
        self._poll = poll
        self.started_at = self.ended_at = clock.now()

    def run(self, order: Order, home: Identity) -> None:
        """Run them, one after the other; ProgramFailed or PathRefused says why not."""
        special = order.special or NOTHING_SPECIAL
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
        """Run one command in the open directory; ProgramFailed has its last words. OSError if none can be run."""

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


def held_in(directory: int) -> Held:
    """Return what the open directory holds: each file once, however many names it has; links count as nothing.

    Nothing is followed. A directory that this user may not look into counts as empty; one that goes while it is looked
    at, too. TransferFailed for one that is deeper than can be looked into.
    """
    try:
        return _held_in(directory)
    except (RecursionError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EMFILE, errno.ENAMETOOLONG):
            raise
        raise TransferFailed(
            "what lies in the buffer cannot be counted: directories lie too deep in each other"
        ) from None


def _held_in(directory: int) -> Held:
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
    return Held(files, size_bytes)


ACCESS_DIRECTORIES: Final = ("striped", "private")

NO_PERSISTENT: Final[Mapping[str, str]] = MappingProxyType({})


class TransferRun(NamedTuple):
    """What moves the data of an operation."""

    context: Context
    """What is planned is the stage's own affair."""
    claimant: Claimant
    home: Identity
    """The agent's own directory, which no path may lead to."""
    persistent: Mapping[str, str] = NO_PERSISTENT
    """The directories of the persistent buffers that the order uses, by variable."""
    commands: Commands | None = None
    """What is run besides; None where the order has no commands."""
    await_order: Callable[[], None] = nothing
    """Returns while the order is certain to stand."""
    seen_by_pace: Callable[[], AbstractContextManager[object]] = nullcontext
    """While it is entered, whatever ends this process from outside is raised by the context's pace, and nowhere else;
    at its end, too."""
    local: Local = NO_LOCAL
    """Which programs this machine's configuration lets the site's name."""
    shared: bool = False
    """Whether the buffer lies in a place, where another mover may have begun with it."""


def stage_in(order: Order, buffer: int, run: TransferRun) -> OperationDone:
    """Fill the job's buffer (an open directory) from nothing, or go on with what an earlier attempt did, and what the
    order names of persistent ones. TransferFailed or RemovalFailed says why not.
    """
    commands = run.commands
    options = _options(order, run.local)
    if has_space(order):
        # What a command did cannot be told from what it did not.
        if commands is not None or not _goes_on(order, buffer, run, options):
            if run.shared:
                _see_empty(buffer, run.claimant)
            else:
                empty_directory(buffer, shown="the buffer", lasting=False)
        for name in ACCESS_DIRECTORIES:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=buffer)
        os.fsync(buffer)
    _check_persistent(buffer, run.persistent)
    with RecordPaths(order, buffer, run.persistent) as paths:
        moves = movements(order, paths, run.home)
        receipt = _run(order, moves, options, run, buffer if has_space(order) else None)
    os.fsync(buffer)
    if commands is None:
        return _done(order, moves, receipt, None)
    commands.run(order, run.home)
    done = _done(order, moves, receipt, commands)
    held = held_in(buffer)
    if capacity_of(order) and held.size_bytes > capacity_of(order):
        raise TransferFailed(
            f"after the command of stage_in the buffer holds {_size(held.size_bytes)}, and has room for "
            f"{_size(capacity_of(order))}; ask for more capacity or stage less"
        )
    receipt_now = done.receipt
    if receipt_now is not None and receipt is None:
        receipt_now = replace(receipt_now, files=held.files, size_bytes=held.size_bytes)
    return OperationDone(files=held.files, size_bytes=held.size_bytes, digest=done.digest, receipt=receipt_now)


def _check_persistent(buffer: int, persistent: Mapping[str, str]) -> None:
    """Raise TransferFailed unless this user may read and enter each persistent buffer: the script would fail there."""
    for variable in sorted(persistent):
        try:
            os.close(inside_target(buffer, f"${variable}", persistent).anchor)
        except PathRefused as error:
            raise TransferFailed(str(error)) from error


def _see_empty(buffer: int, claimant: Claimant) -> None:
    """Raise TransferFailed unless there is nothing in a buffer that another mover may have begun to fill.

    It is not emptied: who is late would take away what a later attempt has staged.
    """
    for name in names_in(buffer):
        if claimant.may_own(name):
            continue
        if name in ACCESS_DIRECTORIES:
            with closing(open_directory(name, dir_fd=buffer)) as directory:
                if not names_in(directory):
                    continue
        raise TransferFailed(
            f"the buffer holds {name}, which no record tells of; release the job to have it staged into a new one"
        )


def stage_out(order: Order, buffer: int, run: TransferRun) -> OperationDone:
    """Copy results out of the job's buffer (an open directory) and of persistent ones; TransferFailed says why not.

    Sources are only removed where the order says so, after their copies are durable.
    """
    with RecordPaths(order, buffer, run.persistent) as paths:
        moves = movements(order, paths, run.home)
        receipt = _run(order, moves, _options(order, run.local), run, None)
    if run.commands is not None:
        run.commands.run(order, run.home)
    return _done(order, moves, receipt, run.commands)


def capacity_of(order: Order) -> int:
    """Return how much the buffer may hold, bytes; 0 where that has no bound, or its pool counts something else."""
    return order.capacity_bytes if order.pool_is_bytes else 0


def has_space(order: Order) -> bool:
    """Return whether the job has space of its own; else its buffer is an empty directory that only the agent enters."""
    return order.capacity_bytes > 0


def check_room(
    order: Order, moves: Sequence[Movement], sizes_bytes: Sequence[int], persistent: Mapping[str, str]
) -> None:
    """Raise TransferFailed unless what is moved fits into the buffers: the job's own, and persistent ones with what
    they hold already.
    """
    needed: dict[str, int] = {}
    for move, size_bytes in zip(moves, sizes_bytes, strict=True):
        needed[move.persistent] = needed.get(move.persistent, 0) + size_bytes
    own_bytes = needed.pop("", 0)
    if capacity_of(order) and own_bytes > capacity_of(order):
        raise TransferFailed(
            f"stage_in needs {_size(own_bytes)}, the buffer has {_size(capacity_of(order))}; "
            "ask for more capacity or stage less"
        )
    granted = dict((order.special or NOTHING_SPECIAL).granted)
    for name, needed_bytes in sorted(needed.items()):
        if not granted.get(name):
            continue
        with closing(
            os.open(persistent[persistent_variable(name)], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        ) as directory:
            held_bytes = held_in(directory).size_bytes
        if held_bytes + needed_bytes > granted[name]:
            raise TransferFailed(
                f"stage_in needs {_size(needed_bytes)} in the persistent buffer {name}, which has "
                f"{_size(granted[name])} and holds {_size(held_bytes)}; remove what is not needed, or stage less"
            )


def _options(order: Order, local: Local) -> Options:
    rules = order.rules or DEFAULT_TRANSFER_RULES
    special = order.special or NOTHING_SPECIAL
    limit_bytes = 0
    if order.stage == "stage_in" and capacity_of(order) and len(special.granted) == len(order.uses):
        limit_bytes = capacity_of(order) + sum(granted for _, granted in special.granted)
    return Options(
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


def _goes_on(order: Order, buffer: int, run: TransferRun, options: Options) -> bool:
    """Return whether an earlier attempt at this stage-in left something to go on from."""
    if not set(ACCESS_DIRECTORIES) <= set(names_in(buffer)):
        return False
    with RecordPaths(order, buffer, run.persistent) as paths:
        moves = movements(order, paths, run.home)
        items = [_chosen(order, move, backend) for move, backend in zip(moves, backends_of(order, moves), strict=True)]
        return resumable(items, options, run.context.workspace)


def _run(
    order: Order, moves: Sequence[Movement], options: Options, run: TransferRun, buffer: int | None
) -> TransferReceipt | None:
    """Move everything; `buffer` is the job's own if that is where it goes. None if there is nothing to move."""
    if not moves:
        return None

    def planned(amounts: Sequence[tuple[int, int]]) -> None:
        if order.stage == "stage_in":
            check_room(order, moves, [size_bytes for _, size_bytes in amounts], run.persistent)

    with run.seen_by_pace(), Claims(run.claimant) as claims:
        own = -1 if buffer is None else claims.add(buffer, "the buffer")
        items = []
        for move, backend in zip(moves, backends_of(order, moves), strict=True):
            with named(order.stage, move.source, move.destination):
                item = _chosen(order, move, backend)
                inside = buffer is not None and not move.persistent
                if inside:
                    items.append(item._replace(staging=own))
                else:
                    items.append(claims.stage(item, run.context.workspace, outgoing=options.outgoing))
        try:
            # When everything is claimed: a newer attempt is ordered after this moment, and finds the claims.
            run.await_order()
            context = run.context._replace(planned=planned, release=claims.release)
            if run.shared:
                # Another mover that has taken over knows whether all was whole, and may still need what was not.
                context = context._replace(before_removal=run.await_order)
            receipt = run_transfer(items, options, context)
        except TransferFailed as error:
            claims.tidy()
            raise _named(order, moves, error) from error
        except Stopped:
            # Nobody wants it any more; Paused leaves it to the next attempt.
            claims.release()
            raise
    return receipt


def _chosen(order: Order, move: Movement, backend: str) -> Item:
    """Return the item as its directive wants it; a link that is named itself stands for what it leads to beneath the
    directory that its path begins in. TransferFailed where the site does not allow `links=asis`.
    """
    choice, rules = move.choice, order.rules or DEFAULT_TRANSFER_RULES
    if choice.links == "asis" and not rules.outside_links:
        raise TransferFailed(
            "links=asis is not allowed here (TransferOutsideLinks=no); leave it out, or say links=skip"
        )
    links = choice.links or ("keep_all" if rules.outside_links else "keep")
    item = move.item._replace(backend=backend, move=choice.move, links=cast(Links, links))
    item = item._replace(acls=choice.acls)
    found = leads_to(item.source) if item.links in ("keep", "keep_all", "follow") else None
    return item if found is None else item._replace(source=found)


def _named(order: Order, moves: Sequence[Movement], error: TransferFailed) -> TransferFailed:
    """Return the failure with the name of the transfer before it."""
    message = str(error)
    if error.item is not None:
        move = moves[error.item]
        message = f"{name_of(order.stage, move.source, move.destination)}: {message}"
    failed = TransferFailed(message, error.item)
    failed.receipt = error.receipt
    return failed


def backends_of(order: Order, moves: Sequence[Movement]) -> list[str]:
    """Return what moves each of the movements."""
    chosen = default_backend((order.rules or DEFAULT_TRANSFER_RULES).backends)
    # No other program is told what links lead to.
    return ["native" if move.choice.links == "follow" else move.choice.backend or chosen for move in moves]


def _size(size_bytes: int) -> str:
    text = format_size(size_bytes)
    return f"{size_bytes} bytes" if text.isdecimal() else f"{text} ({size_bytes} bytes)"


def _of_command(order: Order, commands: Commands) -> TransferReceipt:
    """Return the receipt of a stage that was commands alone: what they moved is theirs to know, and not compared."""
    return TransferReceipt(
        stage=Stage[order.stage.upper()],
        attempt=order.attempt,
        backends=("command",),
        verify="none",
        algorithm="",
        started_at=commands.started_at,
        ended_at=commands.ended_at,
    )


def _done(
    order: Order, moves: Sequence[Movement], receipt: TransferReceipt | None, commands: Commands | None
) -> OperationDone:
    if receipt is None:
        return OperationDone(receipt=None if commands is None else _of_command(order, commands))
    backends = dict.fromkeys(backends_of(order, moves) + ([] if commands is None else ["command"]))
    return OperationDone(
        files=receipt.files,
        size_bytes=receipt.size_bytes,
        digest=receipt.digest,
        receipt=replace(receipt, backends=tuple(backends)),
    )
