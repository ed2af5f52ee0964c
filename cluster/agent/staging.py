"""Stage-in and stage-out: which transfers, whether they fit, and copying them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

from cluster.agent.beneath import Identity, PathRefused, Target, inside_target, opened, opened_parent, outside_target
from cluster.agent.mover import Amount, Mover, TransferFailed
from cluster.agent.removal import empty_directory
from replica.buffers import Transfer, TransferKind
from replica.commands import OperationDone
from replica.orders import Order
from replica.units import format_size

SHOWN_CHARACTERS: Final = 200
"""Characters of a path that the name of a transfer repeats: the failure itself names the whole path."""

ACCESS_DIRECTORIES: Final = ("striped", "private")


def stage_in(order: Order, buffer: int, mover: Mover, home: Identity) -> OperationDone:
    """Fill the job's buffer (an open directory) from nothing; TransferFailed or RemovalFailed says why not."""
    # What an earlier attempt left is incomplete by definition: a stage-in begins with an empty buffer.
    empty_directory(buffer, shown="the buffer")
    for name in ACCESS_DIRECTORIES:
        os.mkdir(name, 0o700, dir_fd=buffer)
    os.fsync(buffer)
    needed_bytes = 0
    for transfer in order.transfers:
        with _named("stage_in", transfer.outside, transfer.inside):
            amount = _measure(transfer.kind, _source_outside(order, transfer), mover, home)
        needed_bytes += amount.size_bytes
        mover.expect(amount)
    if order.capacity_bytes and needed_bytes > order.capacity_bytes:
        raise TransferFailed(
            f"stage_in needs {_size(needed_bytes)}, the buffer has {_size(order.capacity_bytes)}; "
            "ask for more capacity or stage less"
        )
    for transfer in order.transfers:
        with _named("stage_in", transfer.outside, transfer.inside):
            _copy(
                transfer.kind,
                _source_outside(order, transfer),
                inside_target(buffer, transfer.inside),
                mover,
                home,
                None,
            )
    os.fsync(buffer)
    return _done(mover)


def stage_out(order: Order, buffer: int, mover: Mover, home: Identity) -> OperationDone:
    """Copy results out of the job's buffer (an open directory); TransferFailed says why not.

    Sources are never removed.
    """
    for transfer in order.transfers:
        with _named("stage_out", transfer.inside, transfer.outside):
            mover.expect(_measure(transfer.kind, inside_target(buffer, transfer.inside), mover, None))
    for transfer in order.transfers:
        with _named("stage_out", transfer.inside, transfer.outside):
            destination = outside_target(order.roots, transfer.outside, "stage_out")
            _copy(transfer.kind, inside_target(buffer, transfer.inside), destination, mover, None, home)
    return _done(mover)


def _source_outside(order: Order, transfer: Transfer) -> Target:
    return outside_target(order.roots, transfer.outside, "stage_in")


def _measure(kind: TransferKind, source: Target, mover: Mover, barred: Identity | None) -> Amount:
    if kind is TransferKind.DIRECTORY:
        with opened(source, forbidden=barred) as directory:
            return mover.measure_tree(directory, source.path)
    with opened_parent(source, forbidden=barred) as (directory, name):
        return mover.measure_file(directory, name, source.path)


def _copy(
    kind: TransferKind,
    source: Target,
    destination: Target,
    mover: Mover,
    source_barred: Identity | None,
    destination_barred: Identity | None,
) -> None:
    if kind is TransferKind.DIRECTORY:
        with (
            opened(source, forbidden=source_barred) as reading,
            opened(destination, forbidden=destination_barred, create=True) as writing,
        ):
            mover.copy_tree(reading, writing, source.path, destination.path)
        return
    with (
        opened_parent(source, forbidden=source_barred) as (reading, name),
        opened_parent(destination, forbidden=destination_barred, create=True) as (writing, target),
    ):
        mover.copy_file(reading, name, writing, target, source.path, destination.path)
        os.fsync(writing)


@contextlib.contextmanager
def _named(stage: str, source: str, destination: str) -> Iterator[None]:
    """Put the name of the transfer before whatever is wrong with it."""
    try:
        yield
    except (PathRefused, TransferFailed) as error:
        raise TransferFailed(f"{stage} source={_short(source)} destination={_short(destination)}: {error}") from error
    except OSError as error:
        raise TransferFailed(
            f"{stage} source={_short(source)} destination={_short(destination)}: {error.strerror}"
        ) from error


def _short(path: str) -> str:
    return path if len(path) <= SHOWN_CHARACTERS else "…" + path[-SHOWN_CHARACTERS:]


def _size(size_bytes: int) -> str:
    text = format_size(size_bytes)
    return f"{size_bytes} bytes" if text.isdecimal() else f"{text} ({size_bytes} bytes)"


def _done(mover: Mover) -> OperationDone:
    return OperationDone(files=mover.counters.files_done, size_bytes=mover.counters.bytes_done, digest=mover.digest)
