"""Replica: storage, applied log, proposals, membership, and the leader's duties."""

from forebay.cluster.server.applied_log import AppliedEntry, AppliedLog, Transition, settled_at
from forebay.cluster.server.controller import Controller, Unavailable
from forebay.cluster.server.divergence import Checkpoints, Digests, Verdict
from forebay.cluster.server.feature_levels import UNHEARD, MemberLevel
from forebay.cluster.server.history_fetch import PRUNED, Backfill, Scrub
from forebay.cluster.server.joining import JoiningRefused, has_joined, is_joining, is_permitted, join
from forebay.cluster.server.liveness import (
    POLLS_MAX,
    SPREAD_S_MAX,
    SPREAD_S_PER_POLL,
    AgentContacts,
    AgentReport,
    AgentReports,
    Liveness,
    Transfer,
)
from forebay.cluster.server.membership import members
from forebay.cluster.server.operation_restart import jobs_under_way
from forebay.cluster.server.pending import (
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
from forebay.cluster.server.planner import Planner
from forebay.cluster.server.pruning import PruneNote, Pruner, answer_to_note, leave_note
from forebay.cluster.server.snapshots import snapshot_view
from forebay.cluster.server.storage import Storage, StorageRefused, note_forgotten, note_superseded, open_storage
from forebay.cluster.server.totals import Durations
