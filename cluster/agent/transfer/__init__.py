"""Moving data so that what arrives is what was there: the library that a worker of the agent uses (see DESIGN.md)."""

from cluster.agent.transfer.backends.programs import (
    NO_LIMIT_S,
    POLL_S,
    IoWatch,
    ProgramFailed,
    end_descendants,
    last_words,
)
from cluster.agent.transfer.copying.rate_limit import UNLIMITED, Control, Pace, Stopped
from cluster.agent.transfer.planning import fence
from cluster.agent.transfer.planning.context import Context, nothing
from cluster.agent.transfer.planning.fence import Claimant, Fenced, FenceFailed
from cluster.agent.transfer.rechecking import Difference, recheck
from cluster.agent.transfer.records import workspace
from cluster.agent.transfer.records.digests import hasher
from cluster.agent.transfer.records.errors import Paused, Receipt, TransferFailed, file_message, root_cause
from cluster.agent.transfer.records.options import Algorithm, Item, Kind, Options, Verify
from cluster.agent.transfer.records.progress import PHASES, Counters, Rate, SharedCounters
from cluster.agent.transfer.records.receipts import Place, raw_lines, read_lines, read_places
from cluster.agent.transfer.records.workspace import RECEIPTS, STAGES, Workspace
from cluster.agent.transfer.transfer import resumable, run_transfer
