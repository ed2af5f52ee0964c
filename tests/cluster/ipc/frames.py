"""Frame of the tests."""

import msgspec

BYTES_MAX = 1 << 20


class Said(msgspec.Struct, frozen=True, array_like=True):
    text: str
