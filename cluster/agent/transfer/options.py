"""Options and items of a transfer."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final, Literal, NamedTuple

import msgspec

from forebay.cluster.agent.files import FileIdentity, Target
from forebay.cluster.providers import NO_LOCAL, Local

Algorithm = Literal["xxh3-128", "blake3"]
"""File digests: xxh3-128 against accidental damage, blake3 where receipts must resist tampering."""

CHUNK_BYTES: Final = 16 * 1024 * 1024
"""Bytes of a large file copied, and after a crash copied again, at a time; a power of two."""

CHUNKS_MAX: Final = 65_536
"""Chunks of one file, count: its table on the agent's disk has 40 bytes for each, so at most 2.5 MiB."""

LARGE_BYTES: Final = 32 * 1024 * 1024
"""Minimum size of files copied in chunks: smaller ones are cheaper to restart than to track."""

STREAMS: Final = 2
"""Concurrent copy helpers: one reads while the other waits for the disk."""


class Verify(IntEnum):
    """Verification before a file counts as moved; each level includes the previous one."""

    NONE = 0
    SIZE = 1
    """Compare the size and time of the written file."""
    DIGEST = 2
    """Compute and store a digest of the bytes written; compare it when resuming."""
    READ_BACK = 3
    """Compare data read back from storage with the digest before putting the file in place."""

    @property
    def word(self) -> str:
        """Name of the level in receipts and configuration."""
        return self.name.lower()


class TransferOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a transfer."""

    verify: Verify = Verify.DIGEST
    algorithm: Algorithm = "xxh3-128"
    streams: int = STREAMS
    chunk_bytes: int = CHUNK_BYTES
    """Power of two; larger for files with more than CHUNKS_MAX chunks."""
    large_bytes: int = LARGE_BYTES
    replace: bool = True
    """Replace regular files at a destination; otherwise the transfer fails and names the file."""
    owned: bool = False
    """Destination belongs to this transfer alone: remove files of an earlier attempt that the source no longer has."""
    limit_bytes: int = 0
    """Total size limit, checked before copying and while sources grow; 0 for none."""
    xattrs: bool = True
    """Copy extended attributes of class `user.`."""
    sparse: bool = True
    """Preserve holes."""
    template: str = ""
    """Site's command line for the backend `template` (cluster.agent.transfer.programs)."""
    local: Local = NO_LOCAL
    """Programs that this machine's configuration permits for it."""
    outgoing: bool = False
    """Results are staged out, which users can no longer correct. A link that cannot be treated as `TransferItem.links`
    requires is left out with a receipt line, as devices, pipes and sockets always are. A missing source fails the
    transfer only after everything else is at its destination.
    """
    partial: bool = False
    """With `outgoing`: also leave out missing sources, and links that should fail, with a receipt line."""


def chunk_bytes_of(size_bytes: int, options: TransferOptions) -> int:
    """Return the chunk length of a file of this size, bytes."""
    chunk_bytes = options.chunk_bytes
    while chunk_bytes * CHUNKS_MAX < size_bytes:
        chunk_bytes *= 2
    return chunk_bytes


def chunks_of(size_bytes: int, options: TransferOptions) -> int:
    """Return the chunk count of a file of this size; 0 if it is copied as a whole."""
    return 0 if size_bytes < options.large_bytes else -(-size_bytes // chunk_bytes_of(size_bytes, options))


def chunk_bytes_again(planned_bytes: int, size_bytes: int, options: TransferOptions) -> int:
    """Return the chunk length of a file whose size changed after planning.

    Its chunk count may not exceed the planned one, because its marks share a table with those of other files.
    """
    chunk_bytes, count = chunk_bytes_of(planned_bytes, options), chunks_of(planned_bytes, options)
    while chunk_bytes * count < size_bytes:
        chunk_bytes *= 2
    return chunk_bytes


class ItemKind(Enum):
    """Kind of an item."""

    FILE = "file"
    DIRECTORY = "directory"


Links = Literal["keep", "keep_all", "asis", "follow", "skip", "fail"]
"""Treatment of symbolic links in a tree. `keep` recreates links that stay inside it; `keep_all` also recreates the
others unchanged; `asis` recreates all unchanged. `follow` replaces a link by its target below the item's anchor, `skip`
leaves it out with a receipt line, and `fail` fails the transfer.
"""


class TransferItem(NamedTuple):
    """File or tree to move. The anchors of its targets stay the caller's and may be shared."""

    kind: ItemKind
    source: Target
    destination: Target
    source_barred: FileIdentity | None = None
    """Directory that a source path may not enter: the agent's own."""
    destination_barred: FileIdentity | None = None
    staging: int = -1
    """Open staging directory on the destination's filesystem for temporary files, which a newer attempt takes away
    (cluster.agent.transfer.fence); -1 to create them beside the destination.
    """
    backend: str = "native"
    """Backend that moves it (cluster.agent.transfer.transfer)."""
    move: bool = False
    """Remove each source once everything is durable at the destination and the source is unchanged."""
    links: Links = "keep"
    acls: bool = False
    """Copy POSIX access control lists, if the destination supports them."""
