"""Log compaction (section 7): InstallSnapshot on leader and follower, and the limit of compaction."""

import logging
from typing import Final

from forebay.cluster.consensus.frames import DONE, REFUSED, SnapshotChunk, SnapshotReply
from forebay.cluster.consensus.progress import Phase, Progress
from forebay.cluster.consensus.raft_log import follow_configuration
from forebay.cluster.consensus.snapshots import RETRY_S, SnapshotSender
from forebay.cluster.consensus.state import NEVER, RaftState
from forebay.wal import BrokenInvariant

_log = logging.getLogger(__name__)

HELD_BACK_ENTRIES: Final = 1 << 18
"""Number of entries before a snapshot that are kept for lagging peers: a minute of catching up under load.

A peer that only seems alive can retain no more entries than these. A start reads and checks them in 2 s (7 us each).
"""


def compactable_to(raft: RaftState, index: int) -> int:
    """Return the index up to which the journal may be compacted, given a snapshot at `index`.

    Peers that receive a snapshot need the entries after it until they have caught up. Without these entries another
    snapshot would follow, and under steady load another one after that, without end.
    """
    if not raft.leads:
        return index
    base_index = raft.journal.base_index
    needed = [sender.ref.index for sender in raft.senders.values()]
    for peer, known in raft.progress.items():
        # A peer that lags further needs entries that are already compacted.
        is_fed = known.phase is not Phase.SNAPSHOT and not known.lost and known.match >= base_index
        if is_fed and peer in raft.connected:
            needed.append(known.match)
    return min(index, max(min(needed, default=index), index - HELD_BACK_ENTRIES))


# ---- leader ----


def send_snapshot(raft: RaftState, peer: str, now_s: float) -> None:
    """Send the next chunks of the newest snapshot to a peer that needs compacted entries."""
    if peer not in raft.senders and now_s < raft.snapshot_after_s.get(peer, -NEVER):
        return
    try:
        sender = raft.senders.get(peer) or _begin_sending(raft, peer, now_s)
        sender.pump(raft.term, raft.next_seq, lambda chunk: raft.outbox.send(peer, chunk), now_s)
    except (OSError, ValueError, LookupError) as error:
        _give_up_sending(raft, peer, str(error))


def on_snapshot_reply(raft: RaftState, peer: str, known: Progress, reply: SnapshotReply) -> None:
    """Handle a reply of this term to a chunk."""
    known.match = max(known.match, reply.match_index)
    sender = raft.senders.get(peer)
    if reply.outcome == DONE:
        raft.end_sending(peer)
        if known.phase is Phase.SNAPSHOT:
            known.probe_from(known.match + 1)
    elif reply.outcome == REFUSED:
        if sender is not None:
            raft.machine.snapshot_refused(sender.ref.index)
        _give_up_sending(raft, peer, "the replica rejected it")
    elif sender is not None:
        sender.answered(reply, raft.seq, raft.clock.monotonic_s())


def _begin_sending(raft: RaftState, peer: str, now_s: float) -> SnapshotSender:
    ref = raft.machine.newest_snapshot()
    if ref is None or ref.index < raft.journal.base_index:
        raise LookupError(f"no snapshot exists at or after entry {raft.journal.base_index}")
    sender = raft.senders[peer] = SnapshotSender(ref, now_s)
    return sender


def _give_up_sending(raft: RaftState, peer: str, why: str) -> None:
    _log.error("sending a snapshot to %s failed, retrying: %s", peer, why)
    raft.end_sending(peer)
    raft.snapshot_after_s[peer] = raft.clock.monotonic_s() + RETRY_S


# ---- follower ----


def on_chunk(raft: RaftState, peer: str, chunk: SnapshotChunk) -> None:
    """Handle a chunk of the leader's snapshot, unless this replica already has the snapshot's content."""
    # Entries up to the checked index equal the leader's, so an older snapshot adds nothing. Installing it would discard
    # acknowledged entries (H25).
    if chunk.index <= raft.checked_index:
        raft.receiver.abort()
        outcome, offset = DONE, chunk.size_bytes
    else:
        outcome, offset = raft.receiver.take(chunk)
    place = (chunk.index, chunk.snapshot_term, outcome, offset, raft.checked_index)
    raft.outbox.send(peer, SnapshotReply(raft.term, chunk.seq, *place))


def install_verified(raft: RaftState) -> None:
    """Install a verified snapshot at once, between two messages.

    The snapshot's content is committed, so every later leader has it, whatever the present term.
    """
    if raft.receiver.verified is None:
        return
    if raft.receiver.verified[0] <= raft.checked_index:
        raise BrokenInvariant(
            f"a snapshot of entry {raft.receiver.verified[0]} was to be installed, but a leader has meanwhile sent "
            f"everything up to {raft.checked_index}"
        )
    place = raft.receiver.install()
    if place is not None:
        _follow_install(raft, *place)


def _follow_install(raft: RaftState, index: int, term: int) -> None:
    journal = raft.journal
    if journal.applied_index != index or journal.term_of(index) != term:
        raise BrokenInvariant(
            f"a snapshot of index {index} and term {term} was installed, but the journal is "
            f"at {journal.applied_index}, term {journal.term_of(journal.applied_index)}"
        )
    raft.durable_index = min(
        raft.durable_index, raft.applied_index
    )  # later entries may have been dropped with the snapshot
    raft.applied_index = journal.applied_index
    raft.commit_index = max(raft.commit_index, journal.commit_index)
    journal.set_commit(raft.commit_index)
    raft.checked_index = index
    if raft.configurations.installed(index, raft.receiver.configuration, journal.last_index):
        follow_configuration(raft)
    raft.touch_hints()
