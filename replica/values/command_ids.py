"""Command IDs: of single commands, and of commands in a session (law 6).

Theory of operation
===================

The ID of a single command is a UUIDv7. Its reply is kept for RECEIPTS_KEPT_S, because the sender never confirms that
the reply has arrived. A program that sends many commands opens a session (Ongaro's thesis, 6.3) and numbers its
commands in it. Each command states the sequence number up to which the program has all replies; the replica deletes
those. Memory therefore depends on the number of outstanding commands, not on the number of completed ones. A session
ends after SESSION_IDLE_S_MAX of the replicated clock without a command.

The ID of a command in a session is a UUIDv8 (RFC 9562, 5.8), so it fits wherever an ID fits:

    48 bits: the session | 4: version 8 | 12: outstanding | 2: variant | 62: sequence number

`sequence - outstanding` is the number up to which the program has all replies, or no longer needs them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import msgspec

from forebay.replica.values.limits import SESSION_WINDOW_MAX

SINGLE_VERSION: Final = 7
SESSION_VERSION: Final = 8
_VARIANT: Final = 0b10
_VERSION_BYTE: Final = SESSION_VERSION << 4

IDS_REMEMBERED: Final = 4_096
"""Size of the cache of decoded IDs: each ID is decoded on receipt, on decision and on settlement."""

SESSION_NUMBER_MAX: Final = 2**48 - 1
SEQUENCE_MAX: Final = 2**62 - 1


class SessionCommandId(msgspec.Struct, frozen=True, gc=False):
    """Decoded ID of a command in a session."""

    session: int
    sequence: int
    acknowledged: int


def is_in_session(command_id: bytes) -> bool:
    """Return whether an ID belongs to a command in a session."""
    return len(command_id) == 16 and command_id[6] & 0xF0 == _VERSION_BYTE


def encode_session_command_id(session: int, sequence: int, acknowledged: int) -> bytes:
    """Encode the 16-byte ID of a command in a session.

    Raises:
        ValueError: unless 0 <= acknowledged < sequence <= acknowledged + SESSION_WINDOW_MAX.
    """
    outstanding = sequence - acknowledged
    if not 0 < session <= SESSION_NUMBER_MAX or not 0 < sequence <= SEQUENCE_MAX or acknowledged < 0:
        raise ValueError(f"session {session} has no command {sequence}")
    if not 0 < outstanding <= SESSION_WINDOW_MAX:
        raise ValueError(f"{outstanding} commands are outstanding; from 1 to {SESSION_WINDOW_MAX} may be")
    number = session << 80 | SESSION_VERSION << 76 | outstanding << 64 | _VARIANT << 62 | sequence
    return number.to_bytes(16, "big")


@lru_cache(IDS_REMEMBERED)
def decode_session_command_id(command_id: bytes) -> SessionCommandId:
    """Decode the ID of a command in a session.

    Raises:
        ValueError: the ID is not that of a command in a session.
    """
    number = int.from_bytes(command_id, "big")
    session, sequence = number >> 80, number & SEQUENCE_MAX
    is_one = len(command_id) == 16 and number >> 76 & 0xF == SESSION_VERSION and number >> 62 & 0b11 == _VARIANT
    if not is_one or not session or not sequence:
        raise ValueError(f"{command_id.hex()} is not the ID of a command in a session")
    outstanding = number >> 64 & 0xFFF
    if not 0 < outstanding <= min(SESSION_WINDOW_MAX, sequence):
        raise ValueError(
            f"{command_id.hex()} has {outstanding} outstanding commands up to {sequence}; "
            f"from 1 to {SESSION_WINDOW_MAX} may be"
        )
    return SessionCommandId(session, sequence, sequence - outstanding)


def reply_key(session: int, sequence: int) -> bytes:
    """Return the key of the cached reply to a command in a session: its ID without the outstanding count.

    Every repetition of the command has the same key.
    """
    return (session << 80 | SESSION_VERSION << 76 | _VARIANT << 62 | sequence).to_bytes(16, "big")


def decode_reply_key(key: bytes) -> tuple[int, int]:
    """Decode a reply key into session and sequence number.

    Raises:
        ValueError: the bytes are not a reply key.
    """
    number = int.from_bytes(key, "big")
    session, sequence = number >> 80, number & SEQUENCE_MAX
    if not 0 < session <= SESSION_NUMBER_MAX or not sequence or key != reply_key(session, sequence):
        raise ValueError(f"{key.hex()} is not the key of a reply in a session")
    return session, sequence


def client_ms(command_id: bytes) -> int:
    """Return the client's clock in the ID of a single command, milliseconds since 1970."""
    return int.from_bytes(command_id[:6], "big")
