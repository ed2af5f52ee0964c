"""The two kinds of command ids: of a single command, and of a command in a session (law 6).

Theory of operation
===================

A single command's id is a UUIDv7: its answer is kept for RECEIPTS_KEPT_S, since nobody says when it has arrived. A
program that sends many opens a session (Ongaro's thesis, 6.3) and numbers its commands in it. Each says up to which
number the program has the answers, and those are forgotten: so what is kept follows what is outstanding, not what was
done. A session in which nothing comes for SESSION_IDLE_S_MAX of the replicated clock ends.

The id of such a command is a UUIDv8 (RFC 9562, 5.8), so that it goes wherever an id goes:

    48 bits: the session | 4: version 8 | 12: outstanding | 2: variant | 62: sequence number

`sequence - outstanding` is the number up to which the program has every answer, or wants none any more.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec

from replica.values.limits import SESSION_WINDOW_MAX

SINGLE_VERSION: Final = 7
SESSION_VERSION: Final = 8
_VARIANT: Final = 0b10
_VERSION_BYTE: Final = SESSION_VERSION << 4

IDS_REMEMBERED: Final = 4_096
"""Ids of which it is remembered what they say, count: each is read when it comes, is decided and is settled."""

SESSION_NUMBER_MAX: Final = 2**48 - 1
SEQUENCE_MAX: Final = 2**62 - 1


class Numbered(msgspec.Struct, frozen=True, gc=False):
    """What the id of a command in a session says."""

    session: int
    sequence: int
    acknowledged: int


def is_in_session(command_id: bytes) -> bool:
    """Return whether an id is that of a command in a session."""
    return len(command_id) == 16 and command_id[6] & 0xF0 == _VERSION_BYTE


def session_command_id(session: int, sequence: int, acknowledged: int) -> bytes:
    """Return the 16 bytes of a command's id.

    ValueError outside the bounds: 0 <= acknowledged < sequence <= acknowledged + SESSION_WINDOW_MAX.
    """
    outstanding = sequence - acknowledged
    if not 0 < session <= SESSION_NUMBER_MAX or not 0 < sequence <= SEQUENCE_MAX or acknowledged < 0:
        raise ValueError(f"session {session} has no command {sequence}")
    if not 0 < outstanding <= SESSION_WINDOW_MAX:
        raise ValueError(f"{outstanding} commands are outstanding; from 1 to {SESSION_WINDOW_MAX} may be")
    number = session << 80 | SESSION_VERSION << 76 | outstanding << 64 | _VARIANT << 62 | sequence
    return number.to_bytes(16, "big")


@lru_cache(IDS_REMEMBERED)
def numbered(command_id: bytes) -> Numbered:
    """Return what the id of a command in a session says; ValueError is a sentence where it is none."""
    number = int.from_bytes(command_id, "big")
    session, sequence = number >> 80, number & SEQUENCE_MAX
    is_one = len(command_id) == 16 and number >> 76 & 0xF == SESSION_VERSION and number >> 62 & 0b11 == _VARIANT
    if not is_one or not session or not sequence:
        raise ValueError(f"{command_id.hex()} is not the id of a command in a session")
    outstanding = number >> 64 & 0xFFF
    if not 0 < outstanding <= min(SESSION_WINDOW_MAX, sequence):
        raise ValueError(
            f"{command_id.hex()} says that {outstanding} commands up to {sequence} are outstanding; "
            f"from 1 to {SESSION_WINDOW_MAX} may be"
        )
    return Numbered(session, sequence, sequence - outstanding)


def answer_key(session: int, sequence: int) -> bytes:
    """Return under what the answer to a command in a session is kept: its id, without what is outstanding.

    So it is the same for every repetition.
    """
    return (session << 80 | SESSION_VERSION << 76 | _VARIANT << 62 | sequence).to_bytes(16, "big")


def answered(key: bytes) -> tuple[int, int]:
    """Return of which session and sequence number a key is; ValueError is a sentence where it is none."""
    number = int.from_bytes(key, "big")
    session, sequence = number >> 80, number & SEQUENCE_MAX
    if not 0 < session <= SESSION_NUMBER_MAX or not sequence or key != answer_key(session, sequence):
        raise ValueError(f"{key.hex()} is not the key of an answer in a session")
    return session, sequence


def client_ms(command_id: bytes) -> int:
    """Return when a single command's id was made by its maker's clock, milliseconds since 1970."""
    return int.from_bytes(command_id[:6], "big")
