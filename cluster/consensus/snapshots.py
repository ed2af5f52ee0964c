"""Snapshot transfer (section 7): in chunks, few in flight, resumable, beside the heartbeats.

The sender first asks with an empty chunk how much of the snapshot the peer has. A peer that misses a chunk replies with
the offset to resume from. A peer that loses its link keeps the received part, even over a restart, until another
snapshot is offered or entries arrive. The complete snapshot is verified in a thread; meanwhile the peer stays a
follower with its present journal, and answers heartbeats and votes. The snapshot is then installed in one step.
"""

import logging
import os
from collections.abc import Callable
from typing import BinaryIO, Final

from forebay.cluster.consensus.frames import CHUNK_BYTES, CONTINUE, REFUSED, RESUME, SnapshotChunk, SnapshotReply
from forebay.cluster.consensus.interface import Machine, SnapshotRef, SnapshotSink
from forebay.replica.messages import ReleaseNeeded
from forebay.wal import BrokenInvariant, ConfigurationAt, StorageFailed

_log = logging.getLogger(__name__)

CHUNKS_IN_FLIGHT: Final = 4
"""Number of unanswered chunks: 1 MiB keeps a LAN busy, and does not delay heartbeats."""

RETRY_S: Final = 1.0
"""Time without a reply, or after a rejection, before the snapshot is offered again, seconds."""


class SnapshotSender:
    """Leader's side of one transfer. The file stays open, so that pruning does not disturb the transfer."""

    def __init__(self, ref: SnapshotRef, now_s: float) -> None:
        self.ref: Final = ref
        self._file: BinaryIO = ref.path.open("rb")
        size = os.fstat(self._file.fileno()).st_size
        if size != ref.size_bytes:
            self._file.close()
            raise ValueError(f"{ref.path} has {size} bytes instead of {ref.size_bytes}")
        self._offset = 0
        self._in_flight = 0
        self._answered_from = 0
        self._asking = True
        self._heard_s = now_s

    def pump(self, term: int, next_seq: Callable[[], int], send: Callable[[SnapshotChunk], None], now_s: float) -> None:
        """Send the chunks that may be sent now.

        Raises:
            OSError: The file cannot be read.
        """
        if now_s - self._heard_s >= RETRY_S:
            self._asking, self._in_flight, self._heard_s = True, 0, now_s
        if self._asking:
            if self._in_flight == 0:
                self._answered_from = seq = next_seq()
                send(self._chunk(term, seq, 0, b""))
                self._in_flight = 1
            return
        while self._in_flight < CHUNKS_IN_FLIGHT and self._offset < self.ref.size_bytes:
            data = os.pread(self._file.fileno(), CHUNK_BYTES, self._offset)
            if not data:
                raise OSError(f"{self.ref.path} ended at byte {self._offset} of {self.ref.size_bytes}")
            send(self._chunk(term, next_seq(), self._offset, data))
            self._offset += len(data)
            self._in_flight += 1

    def answered(self, reply: SnapshotReply, newest_seq: int, now_s: float) -> None:
        """Handle a reply that is not the last; `newest_seq` is the newest sequence number of any request so far."""
        if (reply.index, reply.snapshot_term) != (self.ref.index, self.ref.term) or reply.seq < self._answered_from:
            return
        self._heard_s = now_s
        if reply.outcome == RESUME:
            # Chunks in flight follow a gap, so replies to them do not count for later chunks.
            self._asking = False
            self._offset = min(reply.offset, self.ref.size_bytes)
            self._in_flight = 0
            self._answered_from = newest_seq + 1
        elif reply.outcome == CONTINUE:
            self._in_flight = max(0, self._in_flight - 1)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _chunk(self, term: int, seq: int, offset: int, data: bytes) -> SnapshotChunk:
        ref = self.ref
        return SnapshotChunk(term, seq, ref.index, ref.term, ref.size_bytes, offset, data)


class SnapshotReceiver:
    """Follower's side: at most one unfinished snapshot."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._identity: tuple[int, int, int] | None = None
        self._sink: SnapshotSink | None = None
        self._received = 0
        self._verifying = False
        self._refused: tuple[int, int, int] | None = None
        """Rejected snapshot whose sender has not been notified yet."""
        self.verified: tuple[int, int] | None = None
        """Index and term of a verified snapshot that `install` will install, or None."""
        self.on_verified: Callable[[], None] = lambda: None
        """Called when `verified` is set; no other event may follow."""
        self.configuration: ConfigurationAt | None = None
        """Configuration in the snapshot installed last."""

    @property
    def index(self) -> int:
        """Index of the unfinished snapshot; 0 if there is none."""
        return 0 if self._identity is None else self._identity[0]

    def take(self, chunk: SnapshotChunk) -> tuple[int, int]:
        """Handle a chunk; return (outcome, offset) for the reply.

        An exception of the sink rejects the snapshot without other effect, except for exceptions that stop the replica.
        """
        try:
            return self._take(chunk)
        except (StorageFailed, BrokenInvariant, ReleaseNeeded):
            raise
        except Exception as error:
            self._refuse((chunk.index, chunk.snapshot_term), error)
            return REFUSED, 0

    def install(self) -> tuple[int, int] | None:
        """Make the machine take over the verified snapshot; return its (index, term), or None if the machine rejects
        it.

        The sender is notified of a rejection in the reply to its next request.
        """
        sink, place, identity = self._sink, self.verified, self._identity
        assert sink is not None and place is not None
        try:
            self.configuration = sink.finish()
        except (StorageFailed, BrokenInvariant, ReleaseNeeded):
            raise
        except Exception as error:
            self._refuse(place, error)
            self._refused = identity
            return None
        self._forget()
        return place

    def abort(self) -> None:
        """Discard the unfinished snapshot, if any."""
        sink = self._sink
        self._forget()
        if sink is not None:
            sink.abort()

    def suspend(self) -> None:
        """Keep the unfinished snapshot, if any, for the next process."""
        sink = self._sink
        self._forget()
        if sink is not None:
            sink.suspend()

    def _forget(self) -> None:
        self._sink, self._identity, self._received, self._verifying, self.verified = None, None, 0, False, None
        self._refused = None

    def _refuse(self, place: tuple[int, int], error: Exception) -> None:
        _log.error("snapshot (%d, %d) of a peer is rejected: %s", *place, error)
        self.abort()

    def _take(self, chunk: SnapshotChunk) -> tuple[int, int]:
        identity = (chunk.index, chunk.snapshot_term, chunk.size_bytes)
        if self._refused == identity:
            self._refused = None
            return REFUSED, 0
        if self._sink is None or self._identity != identity:
            if chunk.offset != 0:
                return RESUME, 0
            self._begin(identity)
        if self._verifying or not chunk.data or chunk.offset != self._received:
            return RESUME, self._received
        if self._received + len(chunk.data) > chunk.size_bytes:
            raise ValueError(f"more than the announced {chunk.size_bytes} bytes were sent")
        sink = self._sink
        assert sink is not None
        sink.write(chunk.offset, chunk.data)
        self._received += len(chunk.data)
        if self._received == chunk.size_bytes:
            self._verifying = True
            sink.verify(lambda: self._note_verified(sink))
        return CONTINUE, self._received

    def _begin(self, identity: tuple[int, int, int]) -> None:
        index, term, size_bytes = identity
        self.abort()
        sink = self._machine.begin_install(index, term)
        if sink.received_bytes >= size_bytes:
            sink.abort()  # the part is of a longer file, because a part never includes the end
            sink = self._machine.begin_install(index, term)
        self._sink, self._identity, self._received = sink, identity, sink.received_bytes

    def _note_verified(self, sink: SnapshotSink) -> None:
        if sink is self._sink and self._identity is not None:  # it may have been abandoned meanwhile
            self.verified = self._identity[:2]
            self.on_verified()
