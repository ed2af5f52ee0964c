"""Layout of one sync's bytes in the sync log. The layout distinguishes a torn write from damage.

A disk writes each sector completely or not at all, and may write the sectors of one write in any order. Every sector of
a record begins with a tag that is unique to the record, so the tags show which sectors were written. A record that
lacks a sector was never synced and carried no promise. A record that has all sectors and a wrong checksum was damaged
later. Each record begins at a new block, so a block with synced data is not written again before LMDB has the data.
"""

import struct
from hashlib import blake2b
from typing import Final
from zlib import crc32

SECTOR_BYTES: Final = 512
"""Unit that every disk writes completely or not at all."""

TAG_BYTES: Final = 8
DATA_BYTES: Final = SECTOR_BYTES - TAG_BYTES

BLOCK_BYTES: Final = 4096
"""Unit of file systems and most disks: a failing write may damage its own block only."""

VERSION: Final = 1
"""Version of the layout of records and of the file's first block."""

FLIPPED_BITS_MAX: Final = 8
"""Maximum number of wrong bits in a tag that counts as damaged. Old content comes so close in one of 4e9 sectors."""

_FILE = struct.Struct(">8sBQH")
_MAGIC: Final = b"FBSYNCLG"
_HEAD = struct.Struct(">BQQII")
_CRC = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_HEAD_BYTES: Final = _HEAD.size + _CRC.size
_NOTHING: Final = bytes(DATA_BYTES)
_BLOCK_SECTORS: Final = BLOCK_BYTES // SECTOR_BYTES


class LogDamaged(Exception):
    """Damaged sync log; the message gives the position and the evidence."""


class LogAhead(Exception):
    """Sync log of a later generation than LMDB's; the message names both generations."""


class LogForeign(Exception):
    """Sync log of another replica."""


class Tags:
    """Sector tags of one generation of a replica's log."""

    def __init__(self, identity: bytes, generation: int) -> None:
        key = blake2b(identity).digest()
        self._hasher = blake2b(_U64.pack(generation), digest_size=TAG_BYTES, key=key)

    def of(self, sequence: int) -> bytes:
        """Return the tag of the record with this sequence number."""
        hasher = self._hasher.copy()
        hasher.update(_U64.pack(sequence))
        return hasher.digest()


def first_block(identity: bytes, size_bytes: int) -> bytes:
    """Return the first block of the file, which names the file's owner and size."""
    block = _FILE.pack(_MAGIC, VERSION, size_bytes, len(identity)) + identity
    block = block.ljust(BLOCK_BYTES - _CRC.size, b"\0")
    return block + _CRC.pack(crc32(block))


def check_first_block(block: bytes, identity: bytes, size_bytes: int) -> None:
    """Check that the block equals `first_block`.

    Raises:
        LogDamaged: The block was damaged.
        LogForeign: The block names another cluster or replica.
    """
    if block == first_block(identity, size_bytes):
        return
    if len(block) != BLOCK_BYTES or _CRC.pack(crc32(block[: -_CRC.size])) != block[-_CRC.size :]:
        raise LogDamaged("its first block fails its checksum")
    magic, version, size_there_bytes, _length = _FILE.unpack_from(block)
    if magic != _MAGIC or version != VERSION:
        raise LogDamaged(f"its first block has version {version}; this release reads {VERSION}")
    if size_there_bytes != size_bytes:
        raise LogDamaged(f"its first block states {size_there_bytes} bytes instead of {size_bytes}")
    raise LogForeign("its first block names another cluster or replica")


def size_on_disk_bytes(body_bytes: int) -> int:
    """Return the size that a record with this body takes in the file: whole blocks, in bytes."""
    sectors = -(-(_HEAD_BYTES + body_bytes) // DATA_BYTES)
    return -(-sectors // _BLOCK_SECTORS) * BLOCK_BYTES


def lay_out(tag: bytes, generation: int, sequence: int, body: bytes) -> bytes:
    """Return the blocks of a record: whole sectors, each with the tag; the last block is padded with tagged zeros."""
    head = _HEAD.pack(VERSION, generation, sequence, len(body), crc32(body))
    data = head + _CRC.pack(crc32(head, crc32(tag))) + body
    stamped = tag + tag.join([data[at : at + DATA_BYTES] for at in range(0, len(data), DATA_BYTES)])
    stamped += bytes(-len(stamped) % SECTOR_BYTES)
    return stamped + (tag + _NOTHING) * (-len(stamped) % BLOCK_BYTES // SECTOR_BYTES)


def read(content: bytes, identity: bytes, generation: int) -> list[bytes]:
    """Return the bodies of this generation's records, in order, up to the end or to a torn record.

    Raises:
        LogDamaged: A complete record was damaged.
        LogAhead: A record has a later generation.
        LogForeign: The file belongs to another replica.
    """
    check_first_block(content[:BLOCK_BYTES], identity, len(content))
    _check_age(content, identity, generation)
    tags = Tags(identity, generation)
    bodies: list[bytes] = []
    at = BLOCK_BYTES
    while at < len(content):
        body = _read_one(content, at, tags.of(len(bodies) + 1), generation, len(bodies) + 1)
        if body is None:
            break
        bodies.append(body)
        at += size_on_disk_bytes(len(body))
    _check_what_follows(content, at, tags, len(bodies) + 1)
    return bodies


def _read_one(content: bytes, at: int, tag: bytes, generation: int, sequence: int) -> bytes | None:
    """Return the body of the record at this offset; None if some of its sectors were never written."""
    if not _is_written(content, at, tag, sequence):
        return None
    # The first sector was written completely, so a fault in it is later damage.
    head = content[at + TAG_BYTES : at + TAG_BYTES + _HEAD.size]
    (checksum,) = _CRC.unpack_from(content, at + TAG_BYTES + _HEAD.size)
    if crc32(head, crc32(tag)) != checksum:
        raise LogDamaged(f"byte {at}, record {sequence}: its header fails its checksum")
    version, generation_there, sequence_there, body_bytes, checksum = _HEAD.unpack(head)
    end = at + size_on_disk_bytes(body_bytes)
    if (version, generation_there, sequence_there) != (VERSION, generation, sequence) or end > len(content):
        raise LogDamaged(
            f"byte {at}, record {sequence}: its header names record {sequence_there} of generation "
            f"{generation_there}, version {version}, {body_bytes} bytes"
        )
    sectors = range(at, end, SECTOR_BYTES)
    if not all(_is_written(content, sector, tag, sequence) for sector in sectors):
        return None
    data = b"".join([content[sector + TAG_BYTES : sector + SECTOR_BYTES] for sector in sectors])
    body = data[_HEAD_BYTES : _HEAD_BYTES + body_bytes]
    if crc32(body) != checksum or data.count(0, _HEAD_BYTES + body_bytes) != len(data) - _HEAD_BYTES - body_bytes:
        raise LogDamaged(f"byte {at}, record {sequence}: it is complete, but fails its checksum")
    return body


def _is_written(content: bytes, sector: int, tag: bytes, sequence: int) -> bool:
    there = content[sector : sector + TAG_BYTES]
    if there == tag:
        return True
    if (int.from_bytes(there, "big") ^ int.from_bytes(tag, "big")).bit_count() <= FLIPPED_BITS_MAX:
        raise LogDamaged(f"byte {sector}, record {sequence}: the tag of a sector is damaged")
    return False


def _check_what_follows(content: bytes, at: int, tags: Tags, sequence: int) -> None:
    """Check that no later record exists: a record is written only once the previous one is durable.

    Raises:
        LogDamaged: A later record exists.
    """
    left = range(at, len(content), SECTOR_BYTES)
    later = {tags.of(sequence + ahead): sequence + ahead for ahead in range(1, len(left) // _BLOCK_SECTORS + 1)}
    for sector in left:
        found = later.get(content[sector : sector + TAG_BYTES])
        if found is not None:
            raise LogDamaged(f"byte {at}: record {sequence} is missing, although record {found} was written after it")


def _check_age(content: bytes, identity: bytes, generation: int) -> None:
    """Check that no record has a later generation. LMDB durably records a generation before the log begins it.

    Raises:
        LogAhead: A record has a later generation.
    """
    if len(content) <= BLOCK_BYTES:
        return
    tag = content[BLOCK_BYTES : BLOCK_BYTES + TAG_BYTES]
    head = content[BLOCK_BYTES + TAG_BYTES : BLOCK_BYTES + TAG_BYTES + _HEAD.size]
    (checksum,) = _CRC.unpack_from(content, BLOCK_BYTES + TAG_BYTES + _HEAD.size)
    _version, generation_there, sequence, *_ = _HEAD.unpack(head)
    if (
        generation_there > generation
        and crc32(head, crc32(tag)) == checksum
        and Tags(identity, generation_there).of(sequence) == tag
    ):
        raise LogAhead(f"it has generation {generation_there}, but LMDB has {generation}")
