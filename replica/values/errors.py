"""Why a command was refused: a value, never an exception, and the same for ever in the ledger."""

from __future__ import annotations

from enum import IntEnum

import msgspec


class RefusalCode(IntEnum):
    """What kind of refusal; numbers are wire numbers (law 12): append only, never reused."""

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


class Refusal(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One refusal: `place` names the field, or the line and column; `remedy` says what would be right."""

    code: RefusalCode
    sentence: str
    remedy: str = ""
    place: str = ""


# ---- what no correct leader can have agreed on: not refused as a command is, but a reason to stop (law 10)


class LedgerViolation(Exception):
    """An event that no ledger can hold: a broken invariant, so the replica stops (law 10)."""
