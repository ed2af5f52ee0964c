"""Rejections of commands: values, not exceptions, stored permanently in the ledger."""

from __future__ import annotations

from enum import IntEnum

import msgspec


class RejectionCode(IntEnum):
    """Kinds of rejection. The numbers are wire numbers (law 12): append only, never reused."""

    UNKNOWN_POOL = 1
    CAPACITY_OVER_TOTAL = 2
    INVALID_CAPACITY = 3
    UNKNOWN_JOB = 4
    PERMISSION_DENIED = 5
    WRONG_STATE = 6
    STALE_ATTEMPT = 7
    UNKNOWN_NODE = 8
    LIMIT_EXCEEDED = 9
    INVALID_FIELD = 10
    PATH_NOT_ALLOWED = 11
    COMMAND_TOO_OLD = 12
    ALREADY_FOUNDED = 13
    NO_DEFAULT_POOL = 14
    UNKNOWN_DEPENDENCY = 15
    ROOT_NOT_ALLOWED = 16
    STORAGE_CHANGED = 17
    NOT_FOUNDED = 18
    INVALID_DIRECTIVE = 19
    COMMAND_ID_REUSED = 20
    UNKNOWN_SESSION = 21


class Rejection(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rejection of a command: `place` names the field, or the line and column; `remedy` says how to correct it."""

    code: RejectionCode
    sentence: str
    remedy: str = ""
    place: str = ""


# ---- invariant violations, which stop the replica instead of rejecting a command (law 10)


class LedgerViolation(Exception):
    """An event that no correct leader can have agreed on. It breaks an invariant, so the replica stops (law 10)."""
