"""How a command gets its id: a UUIDv7 (RFC 9562, 5.7), 48 bits of milliseconds and 74 random ones.

The same id is sent with every retry of one command, and with no other: that is what makes it happen once (law 6).
"""

import os
from collections.abc import Callable
from typing import Final

from cluster.system import Clock
from replica.values import Instant

MICROSECONDS_PER_MILLISECOND: Final = 1_000
_VERSION: Final = 7
_VARIANT: Final = 0b10
_MILLISECONDS_MAX: Final = 2**48 - 1


def new_command_id(clock: Clock, entropy: Callable[[int], bytes] = os.urandom) -> str:
    """Return a new id as 32 hexadecimal digits; `entropy(n)` gives n random bytes."""
    milliseconds = clock.now() // MICROSECONDS_PER_MILLISECOND
    if not 0 <= milliseconds <= _MILLISECONDS_MAX:
        raise ValueError(f"the clock says {clock.now()} µs, which no UUIDv7 can hold; set this machine's clock")
    random = int.from_bytes(entropy(10), "big")
    number = milliseconds << 80 | _VERSION << 76 | (random >> 68) << 64 | _VARIANT << 62 | (random & (2**62 - 1))
    return f"{number:032x}"


def instant_of(command_id: str) -> Instant:
    """Return when the id was made, to the millisecond, by its maker's clock; ValueError if it is not a UUIDv7."""
    return instant_in(bytes_of(command_id))


def instant_in(found: bytes) -> Instant:
    """Return when an id was made whose bytes were read."""
    return Instant(int.from_bytes(found[:6], "big") * MICROSECONDS_PER_MILLISECOND)


def bytes_of(command_id: str) -> bytes:
    """Return the 16 bytes of an id; ValueError if it is not a UUIDv7."""
    try:
        found = bytes.fromhex(command_id)
    except ValueError:
        found = b""
    # `fromhex` also takes capitals and blanks: there is one way to write an id.
    if len(found) != 16 or found.hex() != command_id:
        raise ValueError(f"{command_id!r} is not a command id: write the 32 hexadecimal digits of a UUIDv7")
    if found[6] >> 4 != _VERSION or found[8] >> 6 != _VARIANT:
        raise ValueError(f"{command_id!r} is not a UUIDv7 (RFC 9562): make a new one for each command")
    return found
