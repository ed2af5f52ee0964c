"""IDs of single commands: UUIDv7 (RFC 9562, 5.7) with 48 bits of milliseconds and 74 random bits.

Every retry of a command carries the same ID, and no other command does; that makes commands exactly-once (law 6).
Commands of a session are numbered instead (`replica.values.command_ids`), in a UUIDv8.
"""

import os
from collections.abc import Callable
from typing import Final

from forebay.cluster.system import Clock
from forebay.replica.values import SINGLE_VERSION, Instant, decode_session_command_id, is_in_session

MICROSECONDS_PER_MILLISECOND: Final = 1_000
_VARIANT: Final = 0b10
_MILLISECONDS_MAX: Final = 2**48 - 1


def new_command_id(clock: Clock, entropy: Callable[[int], bytes] = os.urandom) -> str:
    """Return a new ID as 32 hexadecimal digits; `entropy(n)` returns n random bytes."""
    milliseconds = clock.now() // MICROSECONDS_PER_MILLISECOND
    if not 0 <= milliseconds <= _MILLISECONDS_MAX:
        raise ValueError(f"the clock says {clock.now()} µs, which no UUIDv7 can hold; set this machine's clock")
    random = int.from_bytes(entropy(10), "big")
    number = milliseconds << 80 | SINGLE_VERSION << 76 | (random >> 68) << 64 | _VARIANT << 62 | (random & (2**62 - 1))
    return f"{number:032x}"


def instant_of(command_id: str) -> Instant:
    """Return the creation time of an ID, to the millisecond, by its creator's clock.

    Raises:
        ValueError: The text is not a UUIDv7.
    """
    found = bytes_of(command_id)
    if is_in_session(found):
        raise ValueError(f"{command_id!r} is the ID of a command in a session, which contains no time")
    return instant_in(found)


def instant_in(found: bytes) -> Instant:
    """Return the creation time of an ID given as bytes."""
    return Instant(int.from_bytes(found[:6], "big") * MICROSECONDS_PER_MILLISECOND)


def bytes_of(command_id: str) -> bytes:
    """Return the 16 bytes of an ID.

    Raises:
        ValueError: The text is neither the ID of a single command nor of a session's command.
    """
    try:
        found = bytes.fromhex(command_id)
    except ValueError:
        found = b""
    # `fromhex` also accepts capitals and blanks, but an ID has exactly one spelling.
    if len(found) != 16 or found.hex() != command_id:
        raise ValueError(f"{command_id!r} is not a command id: write the 32 hexadecimal digits of a UUIDv7")
    if is_in_session(found):
        decode_session_command_id(found)
        return found
    if found[6] >> 4 != SINGLE_VERSION or found[8] >> 6 != _VARIANT:
        raise ValueError(f"{command_id!r} is not a UUIDv7 (RFC 9562): make a new one for each command")
    return found
