"""Mutants of consensus, journal, proposer and door, each with the world and the seed that are known to find it.

A seed belongs to the code: after a change of either another one may be the first to find a mutant. `python -m
tests.mutants` looks for those again, and prints the rows that have changed.
"""

from __future__ import annotations

from typing import Final

from tests.mutants.planting import Mutant

_ELECTION: Final = "forebay.cluster.consensus.leader_election:"
_REPLICATION: Final = "forebay.cluster.consensus.log_replication:"
_LOG: Final = "forebay.cluster.consensus.raft_log:"
_PROGRESS: Final = "forebay.cluster.consensus.progress:Progress."
_READS: Final = "forebay.cluster.consensus.read_index:ReadRounds."
_COMPACTION: Final = "forebay.cluster.consensus.log_compaction:"
_ENGINE: Final = "forebay.cluster.consensus.engine:Engine."
_STATE: Final = "forebay.cluster.consensus.state:"
_MEMBERS: Final = "forebay.cluster.consensus.membership_change:"
_CONFIGURATIONS: Final = "forebay.cluster.consensus.configurations:Configurations."
_PROPOSER: Final = "forebay.cluster.server.proposer:Proposer."
_JOURNAL: Final = "forebay.wal.journal:Journal."

_COMPLETE: Final = "(request.last_term, request.last_index) >= own"

# fmt: off
MUTANTS: Final = (
    # who leads
    Mutant("a vote looks at the index before the term", _ELECTION + "on_vote_request",
           _COMPLETE, "(request.last_index, request.last_term) >= own[::-1]", "restless", 0),
    Mutant("a vote does not look at the journal", _ELECTION + "on_vote_request", _COMPLETE, "True", "restless", 1),
    Mutant("a vote wants more than it has itself", _ELECTION + "on_vote_request",
           _COMPLETE, "(request.last_term, request.last_index) > own", "raft", 0),
    Mutant("a second vote in a term", _ELECTION + "on_vote_request",
           "granted = granted and raft.voted_for in (None, peer)", "pass", "raft", 3),
    Mutant("a vote is not stored", _ELECTION + "on_vote_request",
           "raft.transitions.set_term(raft.term, peer)", "pass", "raft", 0),
    Mutant("an answer before a campaign counts in it", _ELECTION + "on_vote_reply",
           "(reply.seq, reply.pre) != (raft.campaign_seq, raft.pre_vote)", "False", "raft", 0),
    Mutant("who was asked first counts as who voted", _ELECTION + "on_vote_reply",
           "(reply.seq, reply.pre) != (raft.campaign_seq, raft.pre_vote)", "reply.seq < raft.campaign_seq - 1",
           "raft", 0),
    Mutant("a refused vote counts", _ELECTION + "on_vote_reply", "if reply.granted and (", "if (", "raft", 3),
    Mutant("one vote less than a majority", "forebay.cluster.consensus.state:RaftState.has_votes",
           ">= self.configuration.majority", ">= self.configuration.majority - 1", "raft", 0),
    Mutant("a candidate does not vote for itself", _ELECTION + "stand",
           "_enter_term(raft, raft.term + 1, raft.me)", "_enter_term(raft, raft.term + 1, None)", "raft", 1),
    Mutant("a candidate stands in the term that it has", _ELECTION + "stand",
           "raft.term + 1, raft.me", "raft.term, raft.me", "raft", 1),
    Mutant("what was checked survives its term", _ELECTION + "_enter_term",
           "raft.checked_index = raft.commit_index", "pass", "restless", 0),
    Mutant("a promise survives its term", _ELECTION + "_enter_term", "raft.outbox.drop()", "pass", "net", 21),
    Mutant("reads survive the leadership", _ELECTION + "become_follower",
           "raft.end_leadership()", "pass", "raft", 1),
    Mutant("a leader decides before its first entry is applied", _ELECTION + "_become_leader",
           "raft.no_op_index = last + 1", "raft.no_op_index = 0", "restless", 13),
    Mutant("a leader keeps what it knew of its peers", _ELECTION + "_become_leader",
           "known.begin_term(last + 1, now_s)", "pass", "restless", 9),
    Mutant("a term that is one ahead is not taken", _ENGINE + "_dispatch",
           "if message.term > raft.term:", "if message.term > raft.term + 1:", "raft", 3),
    Mutant("a leader without a majority leads on", _REPLICATION + "check_quorum",
           "become_follower(raft, None)", "pass", "net", 0),
    # the leader's side
    Mutant("a match survives its term", _PROGRESS + "begin_term", "self.match = 0", "pass", "restless", 2),
    Mutant("entries of older terms are committed by counting", _REPLICATION + "advance_commit",
           "and raft.journal.term_of(index) == raft.term", "", "figure_8", 1),
    Mutant("a leader counts what it has not synced", _REPLICATION + "advance_commit",
           "raft.reached(raft.durable_index,", "raft.reached(raft.journal.last_index,", "restless", 0),
    Mutant("one replica less than a majority commits", _STATE + "RaftState.reached",
           "reached[configuration.majority - 1]", "reached[configuration.majority - 2]", "raft", 0),
    Mutant("one replica more than a majority commits", _STATE + "RaftState.reached",
           "reached[configuration.majority - 1]", "reached[-1]", "restless", 0),
    Mutant("a request names another term before its entries", _REPLICATION + "_send_entries",
           "request = AppendRequest(raft.term, seq, prev, prev_term,",
           "request = AppendRequest(raft.term, seq, prev, raft.term,", "raft", 0),
    Mutant("what was lost is not sent again", _PROGRESS + "accepted", "if sent > self.match:", "if False:", "raft", 0),
    Mutant("an entry is left out after a probe", _PROGRESS + "accepted",
           "            self.next = self.match + 1\n            self.probe_seq = 0\n            self.held",
           "            self.next = self.match + 2\n            self.probe_seq = 0\n            self.held", "raft", 3),
    Mutant("a probe that was lost is waited for", _PROGRESS + "accepted",
           "elif seq > self.probe_seq:", "elif False:", "restless", 1),
    Mutant("a window has no end", _PROGRESS + "may_send",
           "len(self._flights) < WINDOW_REQUESTS and self._bytes < WINDOW_BYTES", "True", "deep", 0),
    Mutant("a window is not emptied by answers", _PROGRESS + "accepted",
           "self._bytes -= flight.size_bytes", "pass", "deep", 0),
    Mutant("a window is not emptied by a new probe", _PROGRESS + "_land_all", "self._bytes = 0", "pass", "deep", 0),
    # reads
    Mutant("a minority confirms a read", _REPLICATION + "quorum_seq",
           "raft.reached(raft.seq + 1, lambda known: known.acked_seq)",
           "max((known.acked_seq for known in raft.progress.values()), default=raft.seq + 1)", "restless", 0),
    Mutant("nobody confirms a read", _READS + "answer", "quorum_seq >= self._asked_seq", "True", "raft", 0),
    Mutant("a read is confirmed by what was asked before", _READS + "answer",
           "quorum_seq >= self._asked_seq", "quorum_seq >= self._asked_seq - 3", "raft", 0),
    Mutant("a read joins the round that is under way", _READS + "add",
           "self._waiting.append(waiter)", "(self._asked or self._waiting).append(waiter)", "restless", 0),
    Mutant("a round does not wait for its own requests", _REPLICATION + "send_appends",
           "reads.start(raft.seq + 1)", "reads.start(0)", "raft", 0),
    Mutant("a read is answered before the first entry", _ENGINE + "_tick",
           "if raft.reads.under_way and raft.has_begun:", "if raft.reads.under_way:", "restless", 2),
    # the follower's side
    Mutant("an older leader is obeyed", _REPLICATION + "on_leader_message",
           "if message.term < raft.term:", "if False:", "restless", 0),
    Mutant("a commit index is taken for all that is held", _REPLICATION + "take_commit",
           "min(message.commit_index, raft.checked_index)", "min(message.commit_index, raft.journal.last_index)",
           "raft", 6),
    Mutant("all that is held counts as checked", _REPLICATION + "_on_append",
           "max(raft.checked_index, prev + len(entries))", "raft.journal.last_index", "restless", 0),
    Mutant("all that is held is acknowledged", _REPLICATION + "_acknowledge",
           "AppendReply(raft.term, seq, raft.checked_index, key=key)",
           "AppendReply(raft.term, seq, raft.journal.last_index, key=key)", "restless", 0),
    Mutant("the term before the entries is not compared", _REPLICATION + "_agrees_before",
           "journal.term_of(prev) == request.prev_term", "prev <= journal.last_index", "restless", 0),
    Mutant("an entry that differs is kept", _REPLICATION + "append_what_is_missing",
           "if known == entry.term:", "if known is not None:", "raft", 1),
    Mutant("an entry that agrees is cut off", _REPLICATION + "append_what_is_missing",
           "if known == entry.term:", "if False:", "raft", 0),
    Mutant("a truncation leaves an entry too many", _REPLICATION + "append_what_is_missing",
           "truncate_from(raft, entry.index)", "truncate_from(raft, entry.index + 1)", "raft", 1),
    # the log
    Mutant("what was cut still counts as synced", _LOG + "truncate_from",
           "raft.durable_index = min(raft.durable_index, index - 1)", "pass", "restless", 0),
    Mutant("what was cut is still synced to the journal itself", _JOURNAL + "_cut",
           "self._synced.note_truncation(index)", "pass", "net", 5),
    Mutant("promises leave without a sync", _LOG + "make_durable", "journal.sync()", "pass", "raft", 0),
    Mutant("a copy that was put off counts", _LOG + "make_durable",
           "        if postpones_sync(raft):\n            return",
           "        if postpones_sync(raft):\n            raft.durable_index = journal.last_index\n            return",
           "raft", 0),
    Mutant("a commit index falls", _LOG + "commit",
           "if index > raft.commit_index:", "if index != raft.commit_index:", "raft", 0),
    Mutant("entries are applied before they are committed", _LOG + "apply_committed",
           "if raft.applied_index >= raft.commit_index:\n        return",
           "raft.commit_index = max(raft.commit_index, raft.checked_index)", "raft", 0),
    Mutant("an entry is passed over", _LOG + "apply_committed",
           "first = raft.applied_index + 1", "first = min(raft.applied_index + 2, raft.commit_index)", "raft", 0),
    Mutant("a slice of applying ends with an entry that was passed over", _LOG + "apply_committed",
           "return  # next_due_s requests another tick at once",
           "raft.applied_index += 1\n                return", "half_hour", 1),
    # snapshots
    Mutant("what a snapshot holds is not checked", _COMPACTION + "_follow_install",
           "raft.checked_index = index", "pass", "raft", 1),
    Mutant("what a snapshot holds is not committed", _COMPACTION + "_follow_install",
           "raft.commit_index = max(raft.commit_index, journal.commit_index)", "pass", "raft", 1),
    Mutant("a snapshot begins at its second chunk", "forebay.cluster.consensus.snapshots:SnapshotSender.answered",
           "self._offset = ", "self._offset = 1 + ", "raft", 1),
    # who is a member
    Mutant("a configuration that was cut is in force", _LOG + "truncate_from",
           "if raft.configurations.truncated_from(index):", "if False:", "members", 95),
    Mutant("a configuration is not followed", _LOG + "append",
           "if raft.configurations.appended(entries):", "if raft.configurations.appended(entries) and False:",
           "members", 0),
    # the proposer
    Mutant("an entry of another term answers", _PROPOSER + "applied",
           "(head.index and head.term != term)", "False", "a_batch_in_the_place_of_another", 1),
    Mutant("a batch is decided on what is applied only", _PROPOSER + "_propose_batch",
           "self._in_flight[-1].after if self._in_flight else self._applied()", "self._applied()", "net", 15),
    Mutant("a batch is foreseen for other bytes", _PROPOSER + "precomputed",
           "head.speculative.base is not before or (head.data is not data and head.data != data)", "False", "net", 6),
    Mutant("a retry is answered before its commit", _PROPOSER + "_answered_before",
           "if known.revision <= applied.revision:", "if True:", "net", 2),
    Mutant("a leader's own wall clock pulls the time", "forebay.cluster.server.agreed_time:AgreedTime._between",
           "at = max(at, bounds.earliest)", "at = max(at, self._clock.now())", "net", 6),
    # the door
    Mutant("an agent whose clock is wrong is turned away", "forebay.cluster.api.service:ApiService.fenced_id",
           "except Problem:\n        return NO_ID", "except Problem:\n        raise", "all", 2),
)
# fmt: on
"""Every mutant, by what is wrong in it."""
