"""Agent messages: log lines about orders and results, and failures for reports."""

from __future__ import annotations

import signal
from typing import Final

from forebay.replica.messages import (
    OperationDone,
    OperationFailed,
    OperationResult,
    PersistentChanged,
    ScriptEnded,
    ScriptStarted,
    TransferProgressed,
)
from forebay.replica.model import Order, TransferReceipt
from forebay.replica.values import MESSAGE_CHARACTERS_MAX, plain

_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_MOVING: Final = ("stage_in", "stage_out")

_ELLIPSIS: Final = " … "


def attempt_label(job: int, attempt: int, stage: str) -> str:
    """Format one attempt for the log, for example `job 7: stage_in attempt 3`."""
    return f"job {job}: {stage} attempt {attempt}"


def order_label(order: Order) -> str:
    """Format an order for the log."""
    return attempt_label(order.job, order.attempt, order.stage)


def result_message(stage: str, result: OperationResult) -> str:
    """Format a result for the log, for example `done: 2 files, 3 MiB`."""
    match result:
        case OperationDone(files, size_bytes):
            return f"done: {format_count(files, 'file')}, {format_bytes(size_bytes)}" if stage in _MOVING else "done"
        case OperationFailed(message, final):
            return f"failed: {plain(message)}{'; it is not retried automatically' if final else ''}"
        case TransferProgressed(checkpoint):
            return f"reached {format_count(checkpoint.files, 'file')}, {format_bytes(checkpoint.size_bytes)} durable"
        case PersistentChanged(name):
            return f"created or removed persistent buffer {name}"
        case ScriptStarted():
            return "started"
        case ScriptEnded(state, exit_code, number, message):
            how = f"signal {signal_name(number)}" if number else f"exit code {exit_code}"
            return f"ended: {state.name}, {how}{f': {plain(message)}' if message else ''}"


def failure(
    message: str, *, final: bool = False, operation: str = "", receipt: TransferReceipt | None = None
) -> OperationFailed:
    """Return a failure whose message fits into the state; a `final` one is not retried automatically.

    A long message loses its middle, because both ends carry the cause.
    """
    if len(message) > MESSAGE_CHARACTERS_MAX:
        half = (MESSAGE_CHARACTERS_MAX - len(_ELLIPSIS)) // 2
        message = message[:half] + _ELLIPSIS + message[-half:]
    # File names may not be UTF-8, but reports must be.
    return OperationFailed(message.encode("utf-8", "replace").decode(), final, operation, receipt)


def format_bytes(size_bytes: int) -> str:
    """Format a size with at most one decimal, for example `3 MiB` or `1.5 GiB`."""
    power = min(max(size_bytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{f'{size_bytes / 1024**power:.1f}'.removesuffix('.0')} {_UNITS[power]}"


def format_count(number: int, thing: str) -> str:
    """Format a count, for example `1 file` or `2 files`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def signal_name(number: int) -> str:
    """Format a signal with its name, for example `9 (SIGKILL)`."""
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return str(number)
