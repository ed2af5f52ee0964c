"""How a transfer is to be done."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final, Literal, NamedTuple

import msgspec

from cluster.agent.files import Identity, Target
from cluster.providers import NO_LOCAL, Local

Algorithm = Literal["xxh3-128", "blake3"]
"""Digests of files: xxh3-128 against accidents, blake3 where a receipt must stand up to tampering."""

CHUNK_BYTES: Final = 16 * 1024 * 1024
"""Bytes of a large file that are copied, and after a crash copied again, at once; a power of two."""

CHUNKS_MAX: Final = 65_536
"""Chunks of one file, count: its table on the agent's disk has 40 bytes for each, so 2.5 MiB at most."""

LARGE_BYTES: Final = 32 * 1024 * 1024
"""From this size on a file is copied in chunks: below it, starting again costs less than keeping count."""

STREAMS: Final = 2
"""Helpers that copy at once: one reads while the other waits for the disk."""


class Verify(IntEnum):
    """What is compared before a file counts as moved; each level has all that the one before it has."""

    NONE = 0
    SIZE = 1
    """The size of what was written, and its time."""
    DIGEST = 2
    """A digest is taken of the very bytes written, and kept; what is resumed is compared with it."""
    READ_BACK = 3
    """What storage gives back is compared with the digest before the file is put in place."""

    @property
    def word(self) -> str:
        """The level as receipts and the configuration write it."""
        return self.name.lower()


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a transfer; each has a default."""

    verify: Verify = Verify.DIGEST
    algorithm: Algorithm = "xxh3-128"
    streams: int = STREAMS
    chunk_bytes: int = CHUNK_BYTES
    """A power of two; larger for files that would have more than CHUNKS_MAX of them."""
    large_bytes: int = LARGE_BYTES
    replace: bool = True
    """Whether a regular file at a destination is replaced; otherwise the transfer fails and names it."""
    owned: bool = False
    """Whether the destination is this transfer's alone: what an earlier attempt put there and the source no longer has
    is removed."""
    limit_bytes: int = 0
    """More than this in all is refused before anything is copied, and while sources grow; 0: no limit."""
    xattrs: bool = True
    """Whether extended attributes of the `user.` class are copied."""
    sparse: bool = True
    """Whether holes stay holes."""
    template: str = ""
    """The site's command line for the backend of that name (cluster.agent.transfer.programs)."""
    local: Local = NO_LOCAL
    """Which programs this machine's own configuration lets that name."""
    outgoing: bool = False
    """Whether results go out, which nobody can put right any more: a link in a tree that cannot be what `Item.links`
    says is left out with a line in the receipt, as devices, pipes and sockets always are, and a source that is not
    there fails the transfer only when everything else is at its destination."""
    partial: bool = False
    """With `outgoing`: sources that are not there, and links that were to fail, are left out with a line, too."""


def chunk_bytes_of(size_bytes: int, options: Options) -> int:
    """Return how long the chunks of a file of this size are, bytes."""
    chunk_bytes = options.chunk_bytes
    while chunk_bytes * CHUNKS_MAX < size_bytes:
        chunk_bytes *= 2
    return chunk_bytes


def chunks_of(size_bytes: int, options: Options) -> int:
    """Return how many chunks a file of this size has; 0 if it is copied as a whole."""
    return 0 if size_bytes < options.large_bytes else -(-size_bytes // chunk_bytes_of(size_bytes, options))


def chunk_bytes_again(planned_bytes: int, size_bytes: int, options: Options) -> int:
    """Return how long the chunks of a file are that had one size when it was planned, and has another when it is
    copied: it has no more of them than were planned for, since their marks are in a table that others have their part
    of.
    """
    chunk_bytes, count = chunk_bytes_of(planned_bytes, options), chunks_of(planned_bytes, options)
    while chunk_bytes * count < size_bytes:
        chunk_bytes *= 2
    return chunk_bytes


class Kind(Enum):
    """What an item is."""

    FILE = "file"
    DIRECTORY = "directory"


Links = Literal["keep", "keep_all", "asis", "follow", "skip", "fail"]
"""Treatment of symbolic links in a tree. `keep` recreates those that stay in it, `keep_all` also the others as they
are, `asis` all of them as they are. `follow` replaces a link by its target if that is beneath the item's anchor, `skip`
leaves it out with a line in the receipt, and `fail` fails the transfer."""


class Item(NamedTuple):
    """One thing to move. The anchors of the targets stay the caller's, are never closed here, and may be shared."""

    kind: Kind
    source: Target
    destination: Target
    source_barred: Identity | None = None
    """A directory that must not be met on the source's side: the agent's own."""
    destination_barred: Identity | None = None
    staging: int = -1
    """The open directory, on the destination's file system, that temporary files are made in, and that a newer attempt
    takes away (cluster.agent.transfer.fence); -1: they are made beside the destination."""
    backend: str = "native"
    """What moves it (cluster.agent.transfer.transfer)."""
    move: bool = False
    """Whether its sources are removed: each only when everything is durable at the destination, and unchanged since."""
    links: Links = "keep"
    acls: bool = False
    """Whether POSIX access control lists are copied, where the destination has any."""
