"""Entity tags of records that operators change (RFC 9110, 8.8.3): a change names the version that it replaces."""

import hashlib

import msgspec

ETAG_BYTES = 8
"""Length of a tag, bytes: it distinguishes versions of one record, and a collision benefits no attacker."""

ABSENT = ""
"""Tag of a record that does not exist."""

_ENCODER = msgspec.msgpack.Encoder()


def etag_of(record: msgspec.Struct | None) -> str:
    """Return a record's tag, hexadecimal; ABSENT for None. Equal records have equal tags."""
    if record is None:
        return ABSENT
    return hashlib.blake2b(_ENCODER.encode(record), digest_size=ETAG_BYTES).hexdigest()
