"""Messages of an agent: what its log says of orders and results, and what it reports of a failure."""

from __future__ import annotations

import signal
from typing import Final

from replica.messages import (
    OperationDone,
    OperationFailed,
    OperationReached,
    OperationResult,
    PersistentChanged,
    ScriptEnded,
    ScriptStarted,
)
from replica.model import Order, TransferReceipt
from replica.values import MESSAGE_CHARACTERS_MAX, plain

_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_MOVING: Final = ("stage_in", "stage_out")

_ELLIPSIS: Final = " … "


def named(job: int, attempt: int, stage: str) -> str:
    """Return how the log names one attempt: `job 7: stage_in attempt 3`."""
    return f"job {job}: {stage} attempt {attempt}"


def order_named(order: Order) -> str:
    """Return how the log names an order."""
    return named(order.job, order.attempt, order.stage)


def result_message(stage: str, result: OperationResult) -> str:
    """Return what became of it: `done: 2 files, 3 MiB`."""
    match result:
        case OperationDone(files, size_bytes):
            return f"done: {count(files, 'file')}, {figure(size_bytes)}" if stage in _MOVING else "done"
        case OperationFailed(message, final):
            return f"failed: {plain(message)}{'; it is not tried again by itself' if final else ''}"
        case OperationReached(checkpoint):
            return f"has {count(checkpoint.files, 'file')}, {figure(checkpoint.size_bytes)} that are durable"
        case PersistentChanged(name):
            return f"made or removed the persistent buffer {name}"
        case ScriptStarted():
            return "started"
        case ScriptEnded(state, exit_code, number, message):
            how = f"signal {signal_name(number)}" if number else f"exit code {exit_code}"
            return f"ended: {state.name}, {how}{f': {plain(message)}' if message else ''}"


def failure(
    message: str, *, final: bool = False, operation: str = "", receipt: TransferReceipt | None = None
) -> OperationFailed:
    """Return a failure whose message fits into the state; a `final` one is not tried again by itself.

    A long one loses its middle, because its ends say what and why.
    """
    if len(message) > MESSAGE_CHARACTERS_MAX:
        half = (MESSAGE_CHARACTERS_MAX - len(_ELLIPSIS)) // 2
        message = message[:half] + _ELLIPSIS + message[-half:]
    # Names of files need not be UTF-8; what is reported has to be.
    return OperationFailed(message.encode("utf-8", "replace").decode(), final, operation, receipt)


def figure(size_bytes: int) -> str:
    """Return a size for people: `3 MiB`, `1.5 GiB`; at most one digit after the point."""
    power = min(max(size_bytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{f'{size_bytes / 1024**power:.1f}'.removesuffix('.0')} {_UNITS[power]}"


def count(number: int, thing: str) -> str:
    """Return so many of a thing: `1 file`, `2 files`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def signal_name(number: int) -> str:
    """Format a signal with its name, for example `9 (SIGKILL)`."""
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return str(number)
