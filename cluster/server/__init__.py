"""Replica: storage, applied log, proposals, membership, and the leader's duties."""

from cluster.server.applied_log import AppliedEntry, AppliedLog, settled_at
from cluster.server.controller import Controller, Unavailable
from cluster.server.divergence import Checkpoints, Digests, Verdict
from cluster.server.feature_levels import UNHEARD, MemberLevel
from cluster.server.history_fetch import PRUNED, Backfill, Scrub
from cluster.server.joining import JoiningRefused, has_joined, is_joining, is_permitted, join
from cluster.server.liveness import POLLS_MAX, SPREAD_S_MAX, SPREAD_S_PER_POLL, AgentReport, Liveness, Transfer
from cluster.server.membership import members
from cluster.server.operation_restart import jobs_under_way
from cluster.server.pending import (
    Answer,
    Asker,
    CannotDecide,
    JournalFull,
    NotLeading,
    OutcomeUnknown,
    QueueFull,
    Settlement,
    TooManyAnswers,
)
from cluster.server.planner import Planner
from cluster.server.pruning import PruneNote, Pruner, answer_to_note, leave_note
from cluster.server.snapshots import snapshot_view
from cluster.server.storage import Storage, StorageRefused, note_forgotten, note_superseded, open_storage
from cluster.server.totals import Durations
