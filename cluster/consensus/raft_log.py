"""Replica's own log: append and cut with embedded configurations, sync before promises, commit, apply.

Entries and votes are durable before other replicas learn of them (figure 2; H1, H2). One exception: a leader may
postpone its own copy, which counts for commits like any other copy (thesis 10.2.1). A configuration is in force once
appended, and no longer in force once cut (thesis 4.1).
"""

from collections.abc import Mapping, Sequence
from typing import Final

from forebay.cluster.consensus.frames import APPEND_ENTRIES
from forebay.cluster.consensus.interface import RemovedFromCluster
from forebay.cluster.consensus.progress import Phase, Progress
from forebay.cluster.consensus.seals import SealBroken, check_tail, remedy_for
from forebay.cluster.consensus.state import NEVER, RaftState
from forebay.wal import BrokenInvariant, Entry, decode_configuration, incarnation_of, is_configuration, name_of

SCAN_BYTES: Final = 4 << 20
SCAN_ENTRIES: Final = 1024
"""Limits of one read of the journal during the search for configurations: bytes and number of entries."""

APPLY_SLICE_S: Final = 0.02
"""Seconds of applying after which a tick yields to the loop: less than half of the shortest sensible heartbeat."""

APPLY_BYTES: Final = 4 << 20
"""Size of entries read from the journal at once for applying."""

SYNC_POSTPONED_BYTES: Final = 32 << 10
"""Size of proposals since a leader's last sync above which the leader postpones its own sync and lets its followers
commit: at that rate its processor is the bottleneck, and a sync would block it.
"""

SYNC_POSTPONED_S: Final = 0.003
"""Maximum postponement, seconds: several round trips, and a short delay for clients if a follower is slow."""


# ---- entries, and the configurations among them ----


def read_configurations(raft: RaftState, index: int) -> None:
    """Read the configurations after `index` in the journal. They are in force, although not applied (H13)."""
    journal = raft.journal
    while index < journal.last_index:
        entries = journal.entries(index + 1, max_bytes=SCAN_BYTES, max_entries=SCAN_ENTRIES)
        raft.configurations.appended(entries, read_back=True)
        index = entries[-1].index


def append(raft: RaftState, entries: Sequence[Entry]) -> None:
    """Append to the journal; a configuration among the entries is in force from now on."""
    raft.journal.append(entries)
    if raft.configurations.appended(entries):
        follow_configuration(raft)


def append_own(raft: RaftState, data: bytes, votes: Mapping[str, bytes] | None = None) -> int:
    """Append a sealed entry that this leader accepts; return its index.

    `votes`: for the first entry of a leadership, the votes that elected the leader.
    """
    entry = Entry(raft.journal.last_index + 1, raft.term, data)
    if raft.seals is not None:
        entry = raft.seals.sealed(entry, raft.journal.last_term, votes or {})
    append(raft, [entry])
    return entry.index


def check_received(raft: RaftState, entries: Sequence[Entry]) -> None:
    """Check that received entries were accepted by the leaders of their terms.

    Raises:
        SealBroken: An entry was not accepted by the leader of its term.
    """
    if raft.seals is None or not entries:
        return
    before = entries[0].index - 1
    term_before, configuration = raft.journal.term_of(before) or 0, raft.configurations.at(before)
    for entry in entries:
        raft.seals.check(entry, term_before, configuration)
        term_before = entry.term
        if is_configuration(entry.data):
            configuration = decode_configuration(entry.data)


def check_held(raft: RaftState) -> None:
    """Check the unapplied entries of this replica's own log. The last applied entry identifies the leader of its term.

    Raises:
        SealBroken: The leader of an entry's term did not accept it; the message includes the remedy.
    """
    seals, journal = raft.seals, raft.journal
    if seals is None:
        return
    index = journal.applied_index
    if journal.base_index < index:
        seals.note(journal.entries(index, max_bytes=0, max_entries=1)[0])
    while index < journal.last_index:
        entries = journal.entries(index + 1, max_bytes=SCAN_BYTES, max_entries=SCAN_ENTRIES)
        before = raft.configurations.at(index)
        try:
            check_tail(seals, entries, journal.term_of(index) or 0, before, known_index=journal.commit_index)
        except SealBroken as error:
            raise SealBroken(f"{error}; {remedy_for(raft.me)}") from error
        index = entries[-1].index


def truncate_from(raft: RaftState, index: int) -> None:
    """Cut the journal from `index` on. Configurations in the cut part are no longer in force."""
    raft.journal.truncate_from(index)
    raft.durable_index = min(raft.durable_index, index - 1)
    if raft.configurations.truncated_from(index):
        follow_configuration(raft)


def follow_configuration(raft: RaftState) -> None:
    """Update the progress records to the members in force."""
    if raft.seals is not None:
        raft.seals.check_own_key(raft.configuration)
    before = raft.progress
    others = sorted(member.id for member in raft.configuration.members() if member.id != raft.me)
    raft.progress = {peer: before.get(peer) or Progress() for peer in others}
    for peer in before.keys() - raft.progress.keys():
        raft.end_sending(peer)
    if raft.leads:
        now_s = raft.clock.monotonic_s()
        for peer in raft.progress.keys() - before.keys():
            raft.progress[peer].begin_term(raft.journal.last_index + 1, now_s)
    raft.on_members()


def leave_if_removed(raft: RaftState) -> None:
    """Stop if a committed configuration lacks this replica and is later than the one that added it."""
    committed = raft.configurations.committed(raft.commit_index)
    if committed.version >= max(1, incarnation_of(raft.me)) and not committed.holds(raft.me):
        raise RemovedFromCluster(name_of(raft.me), committed.version)


def last_index_not_above_term(raft: RaftState, index: int, term: int, floor: int) -> int:
    """Return the last index from `floor` to `index` whose term is not above `term`: the logs may agree there (5.3)."""
    # Entries with terms above `term` are at most one leader's uncommitted entries, so single steps are fast enough.
    while index > floor and (raft.journal.term_of(index) or 0) > term:
        index -= 1
    return index


# ---- syncs ----


def make_durable(raft: RaftState) -> None:
    """Sync once for all promises of this tick, then send them (H1, H2)."""
    outbox, journal = raft.outbox, raft.journal
    outbox.flush()  # append requests contain no promise, so send them before the sync
    if journal.dirty:
        if postpones_sync(raft):
            return
        began_s = raft.clock.monotonic_s()
        journal.sync()
        raft.sync_times.took(raft.clock.monotonic_s() - began_s)
    raft.sync_due_s = raft.sync_owed_s = NEVER
    raft.unsynced_bytes = 0
    raft.durable_index = journal.last_index
    outbox.release()
    outbox.flush()


def postpones_sync(raft: RaftState) -> bool:
    """Return whether this leader's own copy may wait: only the leader's share in commits depends on it.

    The sync always waits for one more tick if followers are streaming, because replies may have arrived. Under load, or
    if all entries are committed, it waits longer as long as the followers form a majority without the leader.
    """
    if not raft.leads or raft.outbox.holds:
        return False
    now_s = raft.clock.monotonic_s()
    configuration = raft.configuration
    streaming = sum(one.id != raft.me and _is_streaming(raft, one.id) for one in configuration.voters)
    if raft.sync_owed_s == NEVER:
        if not streaming:
            return False
        raft.sync_owed_s = now_s + SYNC_POSTPONED_S
    elif now_s >= raft.sync_owed_s:
        return False
    is_spared = raft.unsynced_bytes >= SYNC_POSTPONED_BYTES or raft.commit_index == raft.journal.last_index
    if is_spared and streaming >= configuration.majority:
        raft.sync_due_s = raft.sync_owed_s
        return True
    asked_before = raft.sync_due_s <= now_s
    raft.sync_due_s = now_s
    return not asked_before


def _is_streaming(raft: RaftState, peer: str) -> bool:
    """Return whether entries are sent to a peer without probing."""
    return peer in raft.connected and raft.progress[peer].phase is Phase.REPLICATE


# ---- commit and apply ----


def commit(raft: RaftState, index: int) -> None:
    """Raise the commit index to `index`; never lower it."""
    if index > raft.commit_index:
        raft.commit_index = index
        raft.journal.set_commit(index)
        raft.configurations.forget_before(index)
        raft.touch_hints()


def apply_committed(raft: RaftState) -> None:
    """Apply committed entries in order, each once. An exception stops the replica before the next entry (H6, H7)."""
    if raft.applied_index >= raft.commit_index:
        return
    clock, journal = raft.clock, raft.journal
    began_s = clock.monotonic_s()
    while (count := raft.commit_index - raft.applied_index) > 0:
        first = raft.applied_index + 1
        for entry in journal.entries(first, max_bytes=APPLY_BYTES, max_entries=min(count, APPEND_ENTRIES)):
            if not _apply(raft, entry) or clock.monotonic_s() - began_s > APPLY_SLICE_S:
                return  # next_due_s requests another tick at once


def _apply(raft: RaftState, entry: Entry) -> bool:
    """Apply an entry or a part of it; return whether it is applied."""
    index = entry.index
    if index != raft.applied_index + 1:
        raise BrokenInvariant(f"entry {index} was to be applied out of order, after {raft.applied_index}")
    if raft.machine.apply(index, entry.term, entry.data):
        return False
    if raft.journal.applied_index != index:
        raise BrokenInvariant(f"the state machine did not record entry {index} as applied in the journal")
    raft.applied_index = index
    raft.touch_hints()
    if is_configuration(entry.data):
        leave_if_removed(raft)
        raft.on_members()
    return True
