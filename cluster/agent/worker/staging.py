"""Stage-in and stage-out: whether what is to be moved fits, moving it, and the commands that stage."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Final, NamedTuple, cast

from msgspec.structs import replace

from cluster.agent.files import Identity, empty_directory
from cluster.agent.transfer import (
    Algorithm,
    Claimant,
    Context,
    Options,
    Stopped,
    TransferFailed,
    Verify,
    nothing,
    resumable,
    run_transfer,
)
from cluster.agent.worker.claims import Claims
from cluster.agent.worker.commands import Commands, held_in
from cluster.agent.worker.items import Movement, RecordPaths, movements, name_of, named
from cluster.system import closing
from replica.messages import OperationDone
from replica.model import (
    DEFAULT_TRANSFER_RULES,
    NOTHING_SPECIAL,
    Order,
    Stage,
    TransferReceipt,
    default_backend,
)
from replica.values import format_size

ACCESS_DIRECTORIES: Final = ("striped", "private")

NO_PERSISTENT: Final[Mapping[str, str]] = MappingProxyType({})


class TransferRun(NamedTuple):
    """What moves the data of an operation."""

    context: Context
    """What is planned is the stage's own affair."""
    claimant: Claimant
    await_order: Callable[[], None] = nothing
    """Returns while the order is certain to stand."""
    seen_by_pace: Callable[[], AbstractContextManager[object]] = nullcontext
    """While it is entered, whatever ends this process from outside is raised by the context's pace, and nowhere else;
    at its end, too."""


def stage_in(
    order: Order,
    buffer: int,
    run: TransferRun,
    home: Identity,
    *,
    persistent: Mapping[str, str] = NO_PERSISTENT,
    commands: Commands | None = None,
) -> OperationDone:
    """Fill the job's buffer (an open directory) from nothing, or go on with what an earlier attempt did, and what the
    order names of persistent ones.

    `persistent` has their directories by variable. TransferFailed or RemovalFailed says why not.
    """
    options = _options(order)
    # What a command did cannot be told from what it did not.
    if commands is not None or not _goes_on(order, buffer, run, home, persistent, options):
        empty_directory(buffer, shown="the buffer")
    for name in ACCESS_DIRECTORIES:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=buffer)
    os.fsync(buffer)
    with RecordPaths(order, buffer, persistent) as paths:
        moves = movements(order, paths, home)
        receipt = _run(order, moves, options, run, persistent, buffer)
    os.fsync(buffer)
    if commands is None:
        return _done(order, moves, receipt, None)
    commands.run()
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


def stage_out(
    order: Order,
    buffer: int,
    run: TransferRun,
    home: Identity,
    *,
    persistent: Mapping[str, str] = NO_PERSISTENT,
    commands: Commands | None = None,
) -> OperationDone:
    """Copy results out of the job's buffer (an open directory) and of persistent ones; TransferFailed says why not.

    Sources are only removed where the order says so, after their copies are durable.
    """
    with RecordPaths(order, buffer, persistent) as paths:
        moves = movements(order, paths, home)
        receipt = _run(order, moves, _options(order), run, persistent, None)
    if commands is not None:
        commands.run()
    return _done(order, moves, receipt, commands)


def capacity_of(order: Order) -> int:
    """Return how much the buffer may hold, bytes; 0 where that has no bound, or its pool counts something else."""
    return order.capacity_bytes if order.pool_is_bytes else 0


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
            os.open(persistent[f"DW_PERSISTENT_STRIPED_{name}"], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        ) as directory:
            held_bytes = held_in(directory).size_bytes
        if held_bytes + needed_bytes > granted[name]:
            raise TransferFailed(
                f"stage_in needs {_size(needed_bytes)} in the persistent buffer {name}, which has "
                f"{_size(granted[name])} and holds {_size(held_bytes)}; remove what is not needed, or stage less"
            )


def _options(order: Order) -> Options:
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
    )


def _goes_on(
    order: Order,
    buffer: int,
    run: TransferRun,
    home: Identity,
    persistent: Mapping[str, str],
    options: Options,
) -> bool:
    """Return whether an earlier attempt at this stage-in left something to go on from."""
    if not set(ACCESS_DIRECTORIES) <= set(os.listdir(buffer)):
        return False
    with RecordPaths(order, buffer, persistent) as paths:
        items = [move.item for move in movements(order, paths, home)]
        return resumable(items, options, run.context.workspace)


def _run(
    order: Order,
    moves: Sequence[Movement],
    options: Options,
    run: TransferRun,
    persistent: Mapping[str, str],
    buffer: int | None,
) -> TransferReceipt | None:
    """Move everything; `buffer` is the job's own if that is where it goes. None if there is nothing to move."""
    if not moves:
        return None

    def planned(amounts: Sequence[tuple[int, int]]) -> None:
        if order.stage == "stage_in":
            check_room(order, moves, [size_bytes for _, size_bytes in amounts], persistent)

    with run.seen_by_pace(), Claims(run.claimant) as claims:
        own = -1 if buffer is None else claims.add(buffer, "the buffer")
        items = []
        for move, backend in zip(moves, backends_of(order, moves), strict=True):
            with named(order.stage, move.source, move.destination):
                item = move.item._replace(backend=backend, move=move.choice.move)
                inside = buffer is not None and not move.persistent
                items.append(item._replace(staging=own) if inside else claims.stage(item))
        try:
            # When everything is claimed: a newer attempt is ordered after this moment, and finds the claims.
            run.await_order()
            receipt = run_transfer(items, options, run.context._replace(planned=planned))
        except TransferFailed as error:
            claims.tidy()
            raise _named(order, moves, error) from error
        except Stopped:
            # Nobody wants it any more; Paused leaves it to the next attempt.
            claims.release()
            raise
        claims.release()
    return receipt


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
    return [move.choice.backend or chosen for move in moves]


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
